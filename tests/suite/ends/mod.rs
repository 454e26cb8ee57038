//! Ends of sessions, for any reason and on any server: their locks go, and the application is told
//! once.

mod interleaved;
mod killed;
mod listeners;
mod many;
mod reaper;

use actix_doclock::store::verbs::*;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::io::{BufRead, BufReader, Read, Write, stdin};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use actix_doclock::{
    Aid, BoxError, EndReason, Holder, LockManager, LockManagerBuilder, MemoryStore, SessionEnded,
    TryAcquire, Wait,
};
use doclock_conformance::Shorthand;
use futures_util::{TryStreamExt, future::join_all};
use mongodb::bson::{Bson, DateTime, Document, doc};
use mongodb::{Collection, Database};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::rig::app::{
    App, NO_DEADLINE, TTL, WorkItem, age_all, count, eventually, key, lock_records, record,
};
use crate::rig::faulty::Faulty;
use crate::rig::mongod::{self, Mongod, Unusual};
use crate::rig::proxy::Proxy;
use crate::rig::{age, client, fresh_database, fresh_name};

const OFTEN: Duration = Duration::from_millis(20);

/// The announcements to listeners, on all servers that share it.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<SessionEnded>>>);

impl Heard {
    fn all(&self) -> Vec<SessionEnded> {
        self.0.lock().unwrap().clone()
    }

    fn of(&self, aid: &Aid) -> Vec<SessionEnded> {
        self.all().into_iter().filter(|ended| ended.aid == *aid).collect()
    }

    /// Settings of a server that records its announcements.
    fn listening(&self) -> impl FnOnce(LockManagerBuilder) -> LockManagerBuilder + use<> {
        let heard = self.clone();
        move |settings| {
            settings.on_session_end(move |ended| {
                heard.0.lock().unwrap().push(ended);
                async { Ok(()) }
            })
        }
    }

    /// Settings that also make it look for idle sessions all the time.
    fn reaping(&self) -> impl FnOnce(LockManagerBuilder) -> LockManagerBuilder + use<> {
        let listening = self.listening();
        move |settings| listening(settings).reaper_interval(OFTEN)
    }

    async fn until(&self, what: &str, count: usize) {
        eventually(what, async || self.all().len() >= count).await;
    }
}

async fn replica_set() -> Database {
    fresh_database(mongod::shared_replica_set().await.uri()).await
}

/// That many sessions, with two locks each.
async fn sessions(app: &App, many: usize) -> Vec<Aid> {
    let mut aids = Vec::new();
    for n in 0..many {
        let aid = Aid::new();
        for id in [format!("{n} a"), format!("{n} b")] {
            app.granted(&key(&id), &aid).await;
        }
        aids.push(aid);
    }
    aids
}

#[tokio::test]
async fn an_idle_session_is_ended_by_a_running_server_with_default_settings() {
    const SHORT: Duration = Duration::from_secs(2);
    let database = replica_set().await;
    let heard = Heard::default();
    let defaults = |settings| heard.listening()(settings).reaper_interval(Duration::from_secs(1));
    let app = App::with(&database, |settings| defaults(settings).ttl(SHORT)).await;
    let alice = Aid::new();
    let began = Instant::now();
    app.granted(&key("a"), &alice).await;
    eventually("the lock is removed", async || count(&database).await == 0).await;
    let took = began.elapsed();
    println!("removed {took:?} after it was taken, with a ttl of {SHORT:?}");
    assert!(took >= SHORT, "not before its ttl: {took:?}");
    heard.until("the end is announced", 1).await;
    let ended = heard.of(&alice).remove(0);
    assert_eq!(
        (ended.reason, ended.locks, ended.repeated),
        (EndReason::Expired, vec![key("a")], false)
    );
}

/// Sessions that lock one document each and then do nothing more, and one waiter for each document.
async fn idle_sessions_with_waiters(locks: &LockManager, heard: &Heard) {
    const SESSIONS: usize = 5;
    let (mut idle, mut waiters) = (Vec::new(), Vec::new());
    for n in 0..SESSIONS {
        let (key, aid) = (key(&format!("{n}")), Aid::new());
        let granted = locks.lock_for_session(&key, &aid, &Holder::new("alice")).await.unwrap();
        assert!(matches!(granted, TryAcquire::Granted(_)));
        let (locks, waited_for) = (locks.clone(), key.clone());
        waiters.push(tokio::spawn(async move {
            let guard = locks.acquire(&waited_for, Wait::until_acquired()).await.unwrap();
            let taken = Instant::now();
            // The waiter does its work and leaves, and the record of the lock goes too.
            guard.release().await.unwrap();
            taken
        }));
        idle.push((aid, key));
    }
    let mut taken = Vec::new();
    for waiter in waiters {
        taken.push(waiter.await.unwrap());
    }
    heard.until("all idle sessions are announced", SESSIONS).await;
    println!(
        "all {SESSIONS} announced {:?} after the last takeover",
        taken.iter().max().unwrap().elapsed()
    );
    for (aid, key) in idle {
        let ended: Vec<_> = heard.of(&aid).into_iter().map(|it| (it.reason, it.locks)).collect();
        assert_eq!(ended, [(EndReason::Expired, vec![key])]);
    }
    assert_eq!(heard.all().len(), SESSIONS, "and no other session: {:?}", heard.all());
}

#[tokio::test]
async fn idle_sessions_are_announced_although_there_are_waiters_for_their_locks() {
    let (heard, short) = (Heard::default(), Duration::from_secs(2));
    let app = App::with(&replica_set().await, |it| {
        heard.listening()(it).ttl(short).reaper_interval(Duration::from_secs(1))
    })
    .await;
    idle_sessions_with_waiters(&app.locks, &heard).await;
}

#[tokio::test]
async fn idle_sessions_are_announced_in_memory_although_there_are_waiters_for_their_locks() {
    let (heard, short) = (Heard::default(), Duration::from_secs(2));
    let locks = heard.listening()(LockManager::builder(MemoryStore::new()).ttl(short));
    let locks = locks.build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    idle_sessions_with_waiters(&locks, &heard).await;
}

/// No server is left to sweep, to announce or to take over.
#[tokio::test]
async fn without_any_server_the_ttl_index_alone_removes_locks() {
    let server = Mongod::start_with_eager_ttl_monitor().await;
    let database = fresh_database(&server.uri()).await;
    let app = App::with(&database, Heard::default().reaping()).await;
    app.locks.shutdown().await;
    sessions(&app, 5).await;
    drop(app);
    // The index has a margin of a minute.
    age_all(&database, TTL + Duration::from_secs(61)).await;
    eventually("the monitor comes round", async || count(&database).await == 0).await;
}

/// The session wakes up at the very moment at which it is found to be idle.
#[tokio::test]
async fn a_sweep_never_removes_a_lock_that_was_just_granted() {
    let rounds = 25 * crate::rig::depth();
    let database = replica_set().await;
    let heard = Heard::default();
    let app = App::with(&database, heard.listening()).await;
    let sweeper = App::on(&database).await;
    for round in 0..rounds {
        let (alice, id) = (Aid::new(), format!("{round}"));
        app.granted(&key(&id), &alice).await;
        age_all(&database, TTL).await;
        let swept = async { sweeper.locks.sweep().await.unwrap() };
        let key = key(&id);
        let again = app.granted(&key, &alice);
        let (_, again) = tokio::join!(swept, again);
        let live = app.locks.inspect(&key).await.unwrap().expect("the granted lock stays");
        assert_eq!(live.token, again.token, "round {round}");
        app.locks.release(&again).await.unwrap();
    }
}

/// The same, at the last possible moment.
#[tokio::test]
async fn a_session_that_wakes_up_before_its_locks_are_removed_keeps_its_new_locks() {
    let faulty = Faulty::new().await;
    let alice = sessions(&faulty.other, 1).await.remove(0);
    age_all(&faulty.database, TTL).await;
    faulty.proxy.hold_request("delete");
    let app = faulty.app.clone();
    let sweep = tokio::spawn(async move { app.locks.sweep().await });
    faulty.proxy.until_fired(1).await;
    let again = faulty.other.granted(&key("0 a"), &alice).await;
    faulty.proxy.let_go();
    sweep.await.unwrap().unwrap();
    assert_eq!(faulty.other.held(&key("0 a")).await.token, again.token);
    assert_eq!(count(&faulty.database).await, 1, "the expired locks are gone");
}

/// Two servers have found the same session, and one of them is held up until the other is done.
#[tokio::test]
async fn a_server_that_is_too_late_for_an_idle_session_announces_nothing() {
    let faulty = Faulty::new().await;
    let heard = Heard::default();
    let quick = App::with(&faulty.database, heard.listening()).await;
    sessions(&quick, 2).await;
    age_all(&faulty.database, TTL).await;
    faulty.proxy.hold_request("update");
    let app = faulty.app.clone();
    let slow = tokio::spawn(async move { app.locks.sweep().await });
    faulty.proxy.until_fired(1).await;
    assert_eq!(quick.locks.sweep().await.unwrap(), 2);
    heard.until("both are announced", 2).await;
    nothing_is_left_to_announce(&faulty.database).await;
    faulty.proxy.let_go();
    assert_eq!(slow.await.unwrap().unwrap(), 0);
    quick.locks.sweep().await.unwrap();
    quick.locks.shutdown().await;
    assert_eq!(heard.all().len(), 2);
}

/// It got stuck after the tombstone and before the removal, when the locks would stay live forever.
#[tokio::test]
async fn a_stuck_logout_is_completed_by_another_server() {
    let faulty = Faulty::new().await;
    let heard = Heard::default();
    let other = App::with(&faulty.database, heard.listening()).await;
    let alice = sessions(&other, 1).await.remove(0);
    faulty.proxy.hold_request("delete");
    let (app, aid) = (faulty.app.clone(), alice.clone());
    let logout = tokio::spawn(async move { app.locks.end_session(&aid).await });
    faulty.proxy.until_fired(1).await;
    assert_eq!(
        other.locks.sweep().await.unwrap(),
        0,
        "the first server may still be working on it"
    );
    let_leases_pass(&faulty.database).await;
    assert_eq!(other.locks.sweep().await.unwrap(), 1);
    assert_eq!(count(&faulty.database).await, 0);
    heard.until("it is announced", 1).await;
    nothing_is_left_to_announce(&faulty.database).await;
    faulty.proxy.let_go();
    logout.await.unwrap().unwrap();
    other.locks.sweep().await.unwrap();
    other.locks.shutdown().await;
    let [ended] = &heard.of(&alice)[..] else { panic!("{heard:?}") };
    assert_eq!((ended.reason, ended.locks.len()), (EndReason::LoggedOut, 2));
}

/// Another request of the session takes a lock when the names of its locks are read already.
#[tokio::test]
async fn a_lock_that_is_taken_while_its_session_ends_is_named_and_released() {
    let faulty = Faulty::new().await;
    let heard = Heard::default();
    let other = App::with(&faulty.database, heard.listening()).await;
    let alice = Aid::new();
    other.granted(&key("a"), &alice).await;
    faulty.proxy.hold_request("findAndModify");
    let (app, aid) = (faulty.app.clone(), alice.clone());
    let logout = tokio::spawn(async move { app.locks.end_session(&aid).await });
    faulty.proxy.until_fired(1).await;
    other.granted(&key("b"), &alice).await;
    faulty.proxy.let_go();
    assert_eq!(logout.await.unwrap().unwrap().locks, [key("a"), key("b")]);
    assert_eq!(count(&faulty.database).await, 0);
    faulty.app.locks.shutdown().await;
    other.locks.sweep().await.unwrap();
    heard.until("it is announced", 1).await;
    other.locks.shutdown().await;
    let [ended] = &heard.of(&alice)[..] else { panic!("{heard:?}") };
    assert_eq!(ended.locks, [key("a"), key("b")]);
}

/// The server that ended the session died after its answer.
#[tokio::test]
async fn an_end_that_nobody_allowed_to_be_announced_is_announced_by_a_sweep() {
    let database = fresh_database(mongod::shared_replica_set().await.uri()).await;
    let heard = Heard::default();
    let app = App::with(&database, heard.listening()).await;
    let alice = Aid::new();
    app.granted(&key("a"), &alice).await;
    let ended = app.store.end_session(
        &alice,
        EndReason::LoggedOut,
        &["workitem"],
        Uuid::new_v4(),
        Deadline::NONE,
    );
    assert_eq!(ended.await.unwrap().locks, [key("a")]);
    app.locks.sweep().await.unwrap();
    assert!(heard.all().is_empty(), "the other server may still be alive");
    let_leases_pass(&database).await;
    app.locks.sweep().await.unwrap();
    heard.until("it is announced", 1).await;
    app.locks.shutdown().await;
    assert_eq!(heard.all()[0].locks, [key("a")]);
}

async fn nothing_is_left_to_announce(database: &Database) {
    let ended: Collection<Document> = database.collection("doclock.ended");
    eventually("all is announced", async || {
        ended.find_one(doc! { "step": { "$exists": true } }).await.unwrap().is_none()
    })
    .await;
}

/// Lets all leases pass. They would pass on their own, but no test waits for that.
async fn let_leases_pass(database: &Database) {
    let ended: Collection<Document> = database.collection("doclock.ended");
    let pass = vec![doc! { "$set": { "lease": { "$subtract": ["$lease", 600_000] } } }];
    ended.update_many(doc! { "lease": { "$type": "date" } }, pass).await.unwrap();
}

/// The foreign program knows when its sessions end; this crate does not.
#[tokio::test]
async fn locks_of_foreign_programs_are_left_to_the_ttl_index() {
    let database = replica_set().await;
    let heard = Heard::default();
    let app = App::with(&database, heard.listening()).await;
    for (id, aid) in [("a", Bson::from("my_app_session_4711")), ("b", 5.into()), ("c", Bson::Null)]
    {
        let foreign = doc! { "_id": id, "ts": DateTime::from_millis(5), "aid": aid };
        lock_records(&database).insert_one(foreign).await.unwrap();
    }
    let odd =
        doc! { "_id": "d", "ts": DateTime::from_millis(5), "aid": 5, "token": "x", "ttl": "y" };
    lock_records(&database).insert_one(odd).await.unwrap();
    assert_eq!(app.locks.sweep().await.unwrap(), 0);
    app.locks.shutdown().await;
    assert_eq!((count(&database).await, heard.all().len()), (4, 0));
}

#[tokio::test]
async fn a_sweep_whose_replies_and_requests_are_lost_ends_each_session_once() {
    let mut all = Vec::new();
    for command in ["aggregate", "find", "update", "delete"] {
        for drop in [Proxy::drop_reply_to, Proxy::drop_request] {
            for losses in [1, 3] {
                all.push(a_sweep_that_loses(losses, command, drop));
            }
        }
    }
    join_all(all).await;
}

async fn a_sweep_that_loses(losses: usize, command: &str, drop: fn(&Proxy, &str)) {
    let faulty = Faulty::new().await;
    let aids = sessions(&faulty.other, 3).await;
    age_all(&faulty.database, TTL).await;
    for _ in 0..losses {
        drop(&faulty.proxy, command);
    }
    faulty.app.locks.sweep().await.unwrap();
    assert_eq!(count(&faulty.database).await, 0, "{command}");
    let heard = Heard::default();
    let _hears = App::with(&faulty.database, heard.reaping()).await;
    heard.until("all are announced", aids.len()).await;
    sleep(2 * OFTEN).await;
    for aid in &aids {
        let [ended] = &heard.of(aid)[..] else { panic!("{command}: {heard:?}") };
        assert_eq!((ended.locks.len(), ended.repeated), (2, false), "{command}");
    }
    // The second repetition finds that a removal without a reply has nothing left to remove.
    assert!(faulty.proxy.fired() >= losses.min(2), "{command}");
}

impl std::fmt::Debug for Heard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.all().fmt(f)
    }
}
