//! An application server is killed in the middle of each verb, while its command is on the way to the
//! database server or the answer is on the way back.

use std::time::{Duration, Instant};

use actix_doclock::{Lock, LockKey, Lockable};
use futures_util::future::join_all;
use mongodb::bson::{Document, doc};
use tokio::time::sleep;

use crate::application::desk::Desk;
use crate::application::{Fenced, Server, Settings};
use crate::check::Clocks;
use crate::fleet::{Fleet, PATIENCE};
use crate::history::now;
use crate::paused::script;
use crate::rig::mongod::Mongod;
use crate::rig::proxy::Proxy;

const TTL: Duration = Duration::from_secs(15);
/// How long the database server keeps an abandoned transaction; 60 s by default.
const TRANSACTIONS: Duration = Duration::from_secs(3);
/// For all steps that take time but are not measured.
const GENEROUS: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lost {
    /// The command never reaches the server.
    Request,
    /// The command is carried out.
    Reply,
}

/// Kills the server at that command of its last step. The first `skip` commands of that name pass.
async fn killed(server: &Mongod, steps: &[&str], command: &str, skip: usize, lost: Lost) {
    let case = format!("{steps:?}, {command}, {lost:?}");
    let proxy = Proxy::start(server.port());
    // Not in a hurry: after its deadline, a save does not even try to commit. Nor does it without its
    // lock, which has to outlive the way to the verb.
    let settings = Settings { reaper: None, deadline: PATIENCE, ttl: TTL };
    let mut fleet = Fleet::new(&server.uri()).await.with(settings);
    fleet.put_documents(1).await;
    let (before, verb) = steps.split_at(steps.len() - 1);
    let all = [before, &["wait:go"], verb].concat();
    let victim = fleet.start_on(&proxy.uri(), script(&all, "0"), &[]).await;
    fleet.until_said(victim, before.last().unwrap_or(&"begin")).await;
    for _ in 0..skip {
        // With a hold after that, the command would already have passed.
        proxy.hold_request(command);
    }
    proxy.let_go();
    match lost {
        Lost::Request => proxy.hold_request(command),
        Lost::Reply => proxy.hold_reply_to(command),
    }
    fleet.tell("go");
    proxy.until_fired(skip + 1).await;
    fleet.applications[victim].child.kill9();
    let killed = now();

    let successor = fleet.inside("successor").await;
    let key = LockKey::new(Fenced::COLLECTION, "0").unwrap();
    let (mut desk, mut lock) = acquired_by_anybody(&successor, &key).await;
    let took = Duration::from_nanos(now() - killed);
    let most = settings.ttl + TRANSACTIONS + GENEROUS;
    assert!(took < most, "{case}: free after {took:?}");
    let loaded = desk.load(&key).await.unwrap();
    let committed = command == "commitTransaction" && lost == Lost::Reply;
    assert_eq!(loaded.n, u64::from(committed), "{case}: old or new: {loaded:?}");
    // Its uncommitted write blocks others until the server aborts the transaction.
    while !desk.save(&lock, loaded.clone()).await {
        let lines = fleet.lines_of("successor");
        let waited = Duration::from_nanos(now() - killed);
        assert!(waited < most, "{case}: cannot be saved: {:?}", lines.last());
        sleep(Duration::from_millis(200)).await;
        desk.release(&lock).await;
        (desk, lock) = acquired_by_anybody(&successor, &key).await;
    }
    desk.release(&lock).await;
    let report = fleet.check(Clocks::Agree).await;
    assert_eq!(report.violations, [""; 0], "{case}");
    assert_eq!(report.saves, 1, "{case}");
    let saved = Duration::from_nanos(now() - killed);
    println!("{case}: free after {took:.1?}, saved after {saved:.1?}");
}

/// Tries with one session after the other, because an attempt that was given up may still be carried
/// out later.
async fn acquired_by_anybody(server: &Server, key: &LockKey) -> (Desk, Lock) {
    let began = Instant::now();
    loop {
        let desk = Desk::new(server);
        if let Some(lock) = desk.acquire(key).await {
            return (desk, lock);
        }
        assert!(began.elapsed() < PATIENCE, "{key} does not become free");
        sleep(Duration::from_millis(200)).await;
    }
}

async fn server() -> Mongod {
    let server = Mongod::start_replica_set().await;
    let limit = TRANSACTIONS.as_secs() as i64;
    server.parameter("transactionLifetimeLimitSeconds", limit).await;
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_in_the_middle_of_a_verb_blocks_nobody_for_long_and_tears_nothing() {
    let server = server().await;
    let cases: [(&[&str], &str, usize); 6] = [
        (&["begin", "acquire"], "findAndModify", 0),
        (&["acquire", "renew"], "update", 0),
        (&["acquire", "save"], "update", 0),
        (&["acquire", "save"], "update", 1),
        (&["acquire", "save"], "commitTransaction", 0),
        (&["acquire", "release"], "update", 0),
    ];
    let all = cases.iter().flat_map(|&(steps, command, skip)| {
        let server = &server;
        [Lost::Request, Lost::Reply].map(|lost| killed(server, steps, command, skip, lost))
    });
    join_all(all).await;
}

/// Another server completes the sweep that the killed server has begun.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_while_it_sweeps_leaves_the_rest_to_the_others() {
    let server = server().await;
    // Records the end of the session, deletes its locks, marks the end as complete.
    let commands = ["update", "delete", "insert", "findAndModify"];
    let cases = commands.iter().flat_map(|command| {
        [Lost::Request, Lost::Reply].map(|lost| killed_while_sweeping(&server, command, lost))
    });
    let fired: usize = join_all(cases).await.into_iter().sum();
    assert!(fired >= 4, "a sweep consists of fewer commands than that: {fired}");
}

/// Returns whether the sweep has such a command.
async fn killed_while_sweeping(server: &Mongod, command: &str, lost: Lost) -> usize {
    let proxy = Proxy::start(server.port());
    let settings = Settings { reaper: None, deadline: PATIENCE, ..Settings::default() };
    let mut fleet = Fleet::new(&server.uri()).await.with(settings);
    fleet.put_documents(1).await;
    let idle = fleet.inside("idle").await;
    let key = LockKey::new(Fenced::COLLECTION, "0").unwrap();
    let lock = Desk::new(&idle).acquire(&key).await.expect("a free document");
    crate::rig::age(&fleet.database, &key, 10 * settings.ttl).await;

    let sweep = script(&["begin", "wait:go", "sweep"], "0");
    let victim = fleet.start_on(&proxy.uri(), sweep, &[]).await;
    fleet.until_said(victim, "begin").await;
    match lost {
        Lost::Request => proxy.hold_request(command),
        Lost::Reply => proxy.hold_reply_to(command),
    }
    fleet.tell("go");
    tokio::select! {
        () = proxy.until_fired(1) => {}
        _ = fleet.until_said(victim, "sweep") => return 0,
    }
    fleet.applications[victim].child.kill9();

    let other = fleet.inside("other").await;
    let began = Instant::now();
    let locks = fleet.database.collection::<Document>("fenced.lock");
    while locks.count_documents(doc! { "aid": { "$exists": true } }).await.unwrap() > 0 {
        assert!(began.elapsed() < PATIENCE, "{command}, {lost:?}: never swept");
        let _ = other.locks.sweep().await;
        sleep(Duration::from_millis(200)).await;
    }
    let ended = fleet.database.collection::<Document>("doclock.ended");
    let ended = ended.find_one(doc! { "_id": lock.aid.as_str() }).await.unwrap();
    assert!(ended.is_some(), "{command}, {lost:?}: the session has not ended");
    1
}
