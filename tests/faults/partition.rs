//! One application server is cut off, from the primary only or from all members, while another one is
//! not. Each has its own proxy in front of each member.

use std::time::{Duration, Instant};

use actix_doclock::{LockKey, Lockable};
use futures_util::future::join_all;

use crate::application::desk::Desk;
use crate::application::{Fair, Fenced, Server, Settings, guards};
use crate::check::Clocks;
use crate::fleet::Fleet;
use crate::history::{Event, Line};
use crate::paused::acquired;
use crate::rig::proxy::Proxy;
use crate::rig::replica_set::ReplicaSet;
use crate::ways::{Break, From, Ways};

const TTL: Duration = Duration::from_secs(10);
const DEADLINE: Duration = Duration::from_secs(12);
const GENEROUS: Duration = Duration::from_secs(45);
const LONG: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_off_server_knows_of_its_loss_before_another_one_is_let_in() {
    println!(
        "by a proxy for each application server and member; not by network namespaces: the \
         servers listen on the loopback of this one only"
    );
    let set = ReplicaSet::start().await;
    let primary = set.primary().await;
    let cuts: [(From, Break); 4] = [
        (From::Primary, Proxy::blackhole),
        (From::Primary, Proxy::cut),
        (From::Everything, Proxy::blackhole),
        (From::Everything, Proxy::cut),
    ];
    join_all(cuts.map(|(from, cut)| cut_off(&set, primary, from, cut))).await;
    assert_eq!(set.primary().await, primary, "the members have noticed nothing");
}

async fn cut_off(set: &ReplicaSet, primary: usize, from: From, cut: Break) {
    let settings = Settings { ttl: TTL, deadline: DEADLINE, ..Settings::default() };
    let fleet = Fleet::new(&set.uri()).await.with(settings);
    fleet.put_documents(1).await;
    let ways = Ways::to(set);
    let alone = fleet.inside_on(&ways.uri(), "alone").await;
    let other = fleet.inside("other").await;
    let document = LockKey::new(Fenced::COLLECTION, "0").unwrap();
    let name = LockKey::new(Fair::COLLECTION, "a").unwrap();

    // The cut-off server edits a document, and one of its jobs holds a name, which is renewed.
    let desk = Desk::new(&alone);
    let lock = desk.acquire(&document).await.expect("a free document");
    let loaded = desk.load(&document).await.unwrap();
    let job = {
        let (alone, name) = (alone.clone(), name.clone());
        tokio::spawn(async move { guards::hold(&alone, &name, false, LONG).await })
    };
    // The lease of a renewal has to expire in time too.
    fleet
        .until_recorded("the name is renewed", |lines| {
            let granted = lines.iter().find(|&line| is_granted(&name)(line));
            let Some(Event::Granted { token, until, .. }) = granted.map(|line| &line.event) else {
                return false;
            };
            let believed = Event::Believed { token: token.clone() };
            lines.iter().any(|line| line.event == believed && line.at > *until)
        })
        .await;
    assert_eq!(ways.fired(), 0);
    ways.cut_from(from, primary, cut);

    answers_in_time(&alone, &document, &desk, &lock).await;
    assert!(ways.fired() > 0, "the cut had no effect");

    // The other server gets both locks, and works on.
    let waiting = async {
        let wanted = || fleet.lines_of("other").iter().any(is_granted(&name));
        while !wanted() {
            guards::hold(&other, &name, false, Duration::from_millis(100)).await;
        }
    };
    let editing = async {
        let successor = Desk::new(&other);
        let lock = acquired(&successor, &document).await;
        let loaded = successor.load(&document).await.unwrap();
        assert!(successor.save(&lock, loaded).await, "the successor may save");
    };
    tokio::join!(waiting, editing);
    job.await.unwrap();

    ways.heal();
    let healed = Instant::now();
    let refused = || fleet.lines_of("alone").iter().any(|line| line.event == Event::NotSaved);
    while !refused() {
        assert!(healed.elapsed() < LONG, "no answer after it was healed");
        assert!(!desk.save(&lock, loaded.clone()).await, "{from:?}: a stale save");
    }
    let told = fleet.until_written("alone", |event| matches!(event, Event::Lost { .. })).await;
    let let_in = fleet.lines_of("other").into_iter().find(is_granted(&name)).unwrap();
    assert!(told.at < let_in.at, "{from:?}: let in before the holder knew");
    let report = fleet.check(Clocks::Agree).await;
    assert_eq!(report.violations, [""; 0], "{from:?}");
}

fn is_granted(key: &LockKey) -> impl Fn(&Line) -> bool {
    let wanted = crate::history::name(key);
    move |line| matches!(&line.event, Event::Granted { key, .. } if *key == wanted)
}

/// Each verb reports by its deadline that it does not know the outcome.
async fn answers_in_time(
    alone: &Server,
    document: &LockKey,
    desk: &Desk,
    lock: &actix_doclock::Lock,
) {
    let began = Instant::now();
    let free = LockKey::new(Fenced::COLLECTION, "free").unwrap();
    let stranger = Desk::new(alone);
    tokio::join!(
        async { assert!(stranger.acquire(&free).await.is_none()) },
        async { assert!(alone.locks.renew(&lock.aid).await.is_err()) },
        async { assert!(alone.locks.inspect(document).await.is_err()) },
    );
    assert!(!stranger.is_certain(), "an outage is not an answer");
    assert!(desk.is_certain());
    let most = DEADLINE + GENEROUS;
    assert!(began.elapsed() < most, "an answer after {:?}", began.elapsed());
}
