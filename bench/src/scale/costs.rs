//! The processor time of each verb: by one caller at a time, and by a crowd, whose claims and releases travel
//! in groups.

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use actix_doclock::{
    Aid, Holder, Lock, LockKey, LockManager, Lockable, MongoStore, Released, TryAcquire,
    store::{Active, verbs::*},
};
use futures_util::{StreamExt, stream};
use mongodb::Database;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::{
    Set, Size, on_a_thread,
    site::{self, Person},
};
use crate::{
    measures::fresh,
    meter::{self, Meter},
    ours::Page,
    stats::Samples,
};

/// How many sessions one command renews.
pub const RENEWED_AT_ONCE: [usize; 3] = [1, 200, 1_000];
/// The background commands of a verb, such as the note that an end may be announced, end in this time.
const SETTLE: Duration = Duration::from_millis(300);

/// The cost of one verb.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Unit {
    pub at: String,
    pub who: String,
    pub tasks: usize,
    pub n: usize,
    /// In µs, of all members together, without the time that they use when idle.
    pub mongod: f64,
    pub app: f64,
    /// In ms.
    pub p50: f64,
    /// Only where the commands are counted.
    pub commands: Option<f64>,
    pub oplog: Option<f64>,
}

/// One pass over all verbs.
struct Pass {
    at: &'static str,
    database: Database,
    meter: Meter,
    idle: f64,
    tasks: usize,
    /// How often each verb is called.
    n: usize,
    is_counted: bool,
    units: Vec<Unit>,
}

impl Pass {
    /// Runs these calls, `tasks` at a time. Each call stands for `of` units.
    async fn run<F: Future<Output = ()>>(
        &mut self,
        who: &str,
        of: usize,
        calls: impl IntoIterator<Item = F>,
    ) {
        sleep(SETTLE).await;
        let oplog = meter::oplog(&self.database).await;
        meter::take_sent();
        let before = self.meter.read();
        let took: Vec<Duration> = stream::iter(calls)
            .map(async |call| {
                let began = Instant::now();
                call.await;
                began.elapsed()
            })
            .buffer_unordered(self.tasks)
            .collect()
            .await;
        sleep(SETTLE).await;
        let used = self.meter.read().since(&before);
        let sent = meter::take_sent();
        let n = took.len() * of;
        let each = |total: f64| total / n as f64;
        let idle = self.idle * used.time.as_secs_f64();
        // The statistics of the oplog lag a little behind.
        let oplog = meter::oplog(&self.database).await - oplog;
        let unit = Unit {
            at: self.at.into(),
            who: who.into(),
            tasks: self.tasks,
            n,
            mongod: each(used.mongod.as_secs_f64() - idle) * 1e6,
            app: each(used.app.as_secs_f64()) * 1e6,
            p50: Samples::of(took).at(&[0.5])[0] / 1e3,
            commands: self.is_counted.then(|| each(sent.values().sum::<u64>() as f64)),
            oplog: self.is_counted.then(|| each(oplog)),
        };
        let counted = unit.commands.zip(unit.oplog).map_or(String::new(), |(commands, oplog)| {
            format!(", {commands:.2} commands {sent:?}, {oplog:.0} B oplog")
        });
        println!(
            "[{}] {:<44} tasks {:>2}, n {:>5}: mongod {:>6.0} µs, app {:>5.0} µs, p50 {:.2} ms{counted}",
            self.at, unit.who, unit.tasks, unit.n, unit.mongod, unit.app, unit.p50
        );
        self.units.push(unit);
    }
}

pub async fn measure(set: &Set, size: Size) -> Vec<Unit> {
    let mut units = Vec::new();
    let few = size.pick(50, 200);
    let alone = size.pick(100, if set.at == "one" { 2_000 } else { 1_200 });
    let crowd = size.pick(200, 6_000);
    for (tasks, n, is_counted) in [(1, alone, false), (64, crowd, false), (1, few, true)] {
        let database =
            if is_counted { meter::counted(&set.mongo).await } else { fresh(&set.mongo).await };
        site::write_documents(&database, n).await;
        let locks = site::manager(&database).await;
        if tasks == 1 && !is_counted {
            background(set, size).await;
        }
        let pass = Pass {
            at: set.at,
            meter: set.meter.clone(),
            idle: set.idle,
            units: Vec::new(),
            database,
            tasks,
            n,
            is_counted,
        };
        let mut pass = on_a_thread(move || async move {
            let mut pass = pass;
            requests(&mut pass, &locks).await;
            verbs(&mut pass, &locks).await;
            locks.shutdown().await;
            pass
        })
        .await;
        told(&mut pass).await;
        sweeps(&mut pass).await;
        let _ = pass.database.drop().await;
        if !is_counted {
            units.extend(pass.units);
        }
    }
    units
}

/// The load of a server without sessions on mongod: the reaper.
async fn background(set: &Set, size: Size) {
    let before = set.meter.read();
    sleep(size.pick(Duration::from_secs(2), Duration::from_secs(20))).await;
    let used = set.meter.read().since(&before);
    let of_server = (used.mongod_cores() - set.idle) * 100.0;
    println!(
        "[{}] an application server without sessions: mongod {of_server:.2} % of a core",
        set.at
    );
}

/// As pages use them.
async fn requests(pass: &mut Pass, locks: &LockManager) {
    let site = site::open(locks).await;
    let mut people: Vec<_> = (0..pass.n).map(|n| Person::new(&site, site::name(n))).collect();
    let ok = |status: u16| assert!(status == 200 || status == 204, "{status}");
    // Connections are opened before.
    for person in &mut people[..8] {
        ok(person.edit().await);
        ok(person.log_out().await);
    }
    people[..8].iter_mut().zip(0..).for_each(|(it, n)| *it = Person::new(&site, site::name(n)));

    let calls = people.iter_mut().map(async |person| ok(person.edit().await));
    pass.run("request: open (LockedDoc takes the lock)", 1, calls).await;
    let calls = people.iter_mut().map(async |person| ok(person.edit().await));
    pass.run("request: click (LockedDoc, held already)", 1, calls).await;
    let calls = people.iter_mut().map(async |person| ok(person.heartbeat().await));
    pass.run("request: heartbeat, without the renewal", 1, calls).await;
    let calls = people.iter_mut().map(async |person| ok(person.look().await));
    pass.run("request: page that locks nothing", 1, calls).await;
    let calls = people.iter_mut().map(async |person| ok(person.save().await));
    pass.run("request: save (HeldDoc)", 1, calls).await;
    let calls = (0..pass.n).map(|n| {
        let mut stranger = Person::new(&site, site::name(n));
        async move { assert_eq!(stranger.edit().await, 423) }
    });
    pass.run("request: refusal", 1, calls).await;
    let calls = people.iter_mut().map(async |person| ok(person.release().await));
    pass.run("request: release", 1, calls).await;
    let again = people.iter_mut().map(async |person| ok(person.edit().await));
    stream::iter(again).buffer_unordered(64).collect::<Vec<()>>().await;
    let calls = people.iter_mut().map(async |person| ok(person.log_out().await));
    pass.run("request: logout, one lock", 1, calls).await;
}

pub fn key(n: usize) -> LockKey {
    LockKey::of::<Page>(site::name(n)).unwrap()
}

async fn take(locks: &LockManager, n: usize, aid: &Aid) -> Lock {
    let got = locks.lock_for_session(&key(n), aid, &Holder::new("alice")).await.unwrap();
    let TryAcquire::Granted(lock) = got else { panic!("not granted: {got:?}") };
    lock
}

/// As jobs and other frameworks use them.
async fn verbs(pass: &mut Pass, locks: &LockManager) {
    let aids: Vec<_> = (0..pass.n).map(|_| Aid::new()).collect();
    let all = || aids.iter().enumerate();
    let held = RefCell::new(Vec::new());
    let calls = all().map(async |(n, aid)| {
        let lock = take(locks, n, aid).await;
        held.borrow_mut().push(lock);
    });
    pass.run("lock_for_session: granted", 1, calls).await;
    let calls = all().map(async |(n, aid)| {
        let got = locks.lock_for_session(&key(n), aid, &Holder::new("alice")).await.unwrap();
        assert!(matches!(got, TryAcquire::AlreadyMine(_)));
    });
    pass.run("lock_for_session: mine already", 1, calls).await;
    let stranger = Aid::new();
    let calls = all().map(async |_| {
        let got = locks.lock_for_session(&key(0), &stranger, &Holder::new("bob")).await.unwrap();
        assert!(matches!(got, TryAcquire::Held(_)));
    });
    pass.run("lock_for_session: refused, known", 1, calls).await;
    let calls = all().map(async |(_, aid)| assert_eq!(locks.renew(aid).await.unwrap(), 1));
    pass.run("renew", 1, calls).await;
    // The verb that the manager calls for all sessions that are due.
    let store = MongoStore::new(&pass.database);
    prepare(&store).await;
    // In the product, one command comes after the other.
    for at_once in RENEWED_AT_ONCE {
        if pass.tasks > 1 || at_once > aids.len() {
            continue;
        }
        let rounds = if at_once == 1 { 1 } else { 20 };
        let calls = (0..rounds).flat_map(|_| aids.chunks_exact(at_once)).map(async |some| {
            let active: Vec<_> = some.iter().map(Active::all_of).collect();
            let renewed = store
                .renew(Page::COLLECTION, &active, Duration::ZERO, Deadline::NONE)
                .await
                .unwrap();
            assert_eq!(renewed.documents, some.len() as u64);
        });
        pass.run(&renewal(at_once), at_once, calls).await;
    }
    let held = held.into_inner();
    let calls = held.iter().map(async |lock| {
        assert_eq!(locks.release(lock).await.unwrap(), Released::Released);
    });
    pass.run("release", 1, calls).await;
    let again = all().map(|(n, aid)| take(locks, n, aid));
    stream::iter(again).buffer_unordered(64).collect::<Vec<_>>().await;
    let calls = all().map(async |(_, aid)| {
        assert_eq!(locks.end_session(aid).await.unwrap().locks.len(), 1);
    });
    pass.run("end_session, one lock", 1, calls).await;
}

/// The name of the cost of a renewal, for each session.
pub fn renewal(at_once: usize) -> String {
    format!("a session's renewal, {at_once} at once")
}

/// The verbs of a store need a store that knows the collection.
async fn prepare(store: &MongoStore) {
    let locks = LockManager::builder(store.clone()).without_reaper().build().await.unwrap();
    locks.register::<Page>().await.unwrap();
    locks.shutdown().await;
}

/// The end of a session that a listener hears of.
async fn told(pass: &mut Pass) {
    let heard = Arc::new(AtomicUsize::new(0));
    let hears = Arc::clone(&heard);
    let locks = LockManager::builder(MongoStore::new(&pass.database)).on_session_end(move |_| {
        hears.fetch_add(1, Relaxed);
        async { Ok(()) }
    });
    let locks = locks.build().await.unwrap();
    locks.register::<Page>().await.unwrap();
    // The ends of the passes before, which no listener has heard of.
    let mut before = usize::MAX;
    while before != heard.load(Relaxed) {
        before = heard.load(Relaxed);
        sleep(Duration::from_secs(3)).await;
    }
    let aids: Vec<_> = (0..pass.n).map(|_| Aid::new()).collect();
    let take = aids.iter().enumerate().map(|(n, aid)| take(&locks, n, aid));
    stream::iter(take).buffer_unordered(64).collect::<Vec<_>>().await;
    let before = heard.load(Relaxed);
    // Waits until the listener has heard of the last one.
    let (n, tasks) = (pass.n, pass.tasks);
    let all = async {
        let ends = aids.iter().map(async |aid| locks.end_session(aid).await.unwrap());
        stream::iter(ends).buffer_unordered(tasks).for_each(|_| async {}).await;
        while heard.load(Relaxed) < before + aids.len() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let who = "end_session, one lock, and its listener";
    pass.run(who, n, [all]).await;
    locks.shutdown().await;
}

/// Locks that have expired.
async fn sweeps(pass: &mut Pass) {
    let locks = LockManager::builder(MongoStore::new(&pass.database)).ttl(Duration::from_secs(1));
    let locks = locks.without_reaper().build().await.unwrap();
    locks.register::<Page>().await.unwrap();
    let take = (0..pass.n).map(async |n| take(&locks, n, &Aid::new()).await);
    stream::iter(take).buffer_unordered(64).collect::<Vec<_>>().await;
    sleep(Duration::from_millis(1_500)).await;
    let swept = async { assert!(locks.sweep().await.unwrap() > 0) };
    let n = pass.n;
    pass.run("sweep of an idle session, one lock", n, [swept]).await;
    locks.shutdown().await;
}
