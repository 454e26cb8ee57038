//! Ends of sessions, for any reason and on any server: their locks go, and the application is told
//! once.

mod interleaved;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::io::{BufRead, BufReader, Read, Write, stdin};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use actix_doclock::store::verbs::*;
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

#[tokio::test]
async fn three_servers_announce_each_end_once() {
    const SESSIONS: usize = 60;
    let name = fresh_name();
    let heard = Heard::default();
    let mut servers = Vec::new();
    for _ in 0..3 {
        let database = client(mongod::shared_replica_set().await.uri()).await.database(&name);
        servers.push(App::with(&database, heard.reaping()).await);
    }
    let database = servers[0].store.database().clone();
    let mut aids = sessions(&servers[0], SESSIONS).await;
    let logs_out = aids.pop().unwrap();
    servers[1].locks.end_session(&logs_out).await.unwrap();
    age_all(&database, TTL).await;
    let live = servers[2].granted(&key("live"), &Aid::new()).await;

    heard.until("all ends are announced", SESSIONS).await;
    eventually("all locks are gone", async || count(&database).await == 1).await;
    // Time for a server to announce something again.
    sleep(10 * OFTEN).await;
    assert_eq!(heard.all().len(), SESSIONS);
    for aid in &aids {
        let [ended] = &heard.of(aid)[..] else { panic!("{:?}", heard.of(aid)) };
        assert_eq!(
            (ended.reason, ended.locks.len(), ended.repeated),
            (EndReason::Expired, 2, false)
        );
    }
    assert_eq!(heard.of(&logs_out)[0].reason, EndReason::LoggedOut);
    assert_eq!(servers[0].held(&key("live")).await.token, live.token);
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

#[tokio::test]
async fn a_listener_that_panics_hangs_or_fails_does_not_affect_others() {
    let heard = Heard::default();
    let told = heard.clone();
    let locks = LockManager::builder(MemoryStore::new())
        .listener_timeout(Duration::from_millis(100))
        .on_session_end(move |ended: SessionEnded| {
            told.0.lock().unwrap().push(ended.clone());
            let kind = ended.locks.first().map(|key| key.id().to_string());
            assert_ne!(kind.as_deref(), Some("panics at once"));
            async move {
                match kind.as_deref() {
                    Some("panics") => panic!("on purpose"),
                    Some("hangs") => std::future::pending().await,
                    Some("fails") => Err("on purpose".into()),
                    _ => Ok::<_, BoxError>(()),
                }
            }
        })
        .build()
        .await
        .unwrap();
    locks.register::<WorkItem>().await.unwrap();
    let kinds = ["panics at once", "panics", "hangs", "fails", "works"];
    // Twice each: a listener that comes after a hanging one is called too.
    for round in 0..2 {
        for kind in kinds {
            let aid = Aid::new();
            let holder = Holder::new("alice");
            let _ = locks.lock_for_session(&key(kind), &aid, &holder).await.unwrap();
            locks.end_session(&aid).await.unwrap();
        }
        heard.until("all are called", (round + 1) * kinds.len()).await;
    }
    sleep(Duration::from_millis(300)).await;
    assert_eq!(heard.all().len(), 2 * kinds.len(), "no session is announced again");
}

#[tokio::test]
async fn a_listener_may_use_the_manager() {
    let database = replica_set().await;
    let app = App::on(&database).await;
    let (done, told) = (Arc::new(Mutex::new(Vec::new())), app.clone());
    let seen = done.clone();
    let listening = App::with(&database, |settings| {
        settings.on_session_end(move |ended: SessionEnded| {
            let (app, seen) = (told.clone(), seen.clone());
            async move {
                let system = Aid::new();
                if ended.reason != EndReason::Revoked {
                    return Ok(());
                }
                for key in &ended.locks {
                    app.granted(key, &system).await;
                }
                let released = app.locks.end_session(&system).await?;
                seen.lock().unwrap().extend(released.locks);
                Ok(())
            }
        })
    });
    let listening = listening.await;
    let alice = Aid::new();
    app.granted(&key("a"), &alice).await;
    listening.locks.revoke_session(&alice).await.unwrap();
    eventually("its own session came and went", async || !done.lock().unwrap().is_empty()).await;
    assert_eq!(*done.lock().unwrap(), [key("a")]);
}

/// A worker that runs next to the application servers must not swallow the announcements that they
/// need.
#[tokio::test]
async fn a_session_ended_by_a_server_without_a_listener_is_announced_by_one_with_a_listener() {
    let database = replica_set().await;
    let deaf = App::with(&database, |settings| settings.reaper_interval(OFTEN)).await;
    let [alice, bob] = &sessions(&deaf, 2).await[..] else { unreachable!() };
    deaf.locks.end_session(alice).await.unwrap();
    age_all(&database, TTL).await;
    eventually("the deaf one has swept", async || count(&database).await == 0).await;
    let heard = Heard::default();
    let _hears = App::with(&database, heard.reaping()).await;
    heard.until("both ends are announced", 2).await;
    assert_eq!(heard.of(alice)[0].reason, EndReason::LoggedOut);
    assert_eq!(heard.of(bob)[0].reason, EndReason::Expired);
    assert!(heard.all().iter().all(|ended| ended.locks.len() == 2));
}

#[tokio::test]
async fn the_reaper_outlives_an_outage() {
    let faulty = Faulty::new().await;
    let heard = Heard::default();
    let name = faulty.database.name().to_owned();
    let through = client(&faulty.proxy.uri()).await.database(&name);
    let deadline = Duration::from_secs(2);
    let reaping = |settings| heard.reaping()(settings).deadline(deadline);
    let _reaper = App::with(&through, reaping).await;
    faulty.proxy.cut();
    faulty.proxy.until_fired(1).await;
    let [alice] = &sessions(&faulty.other, 1).await[..] else { unreachable!() };
    age_all(&faulty.database, TTL).await;
    sleep(2 * deadline).await;
    assert_eq!(heard.all(), []);
    faulty.proxy.heal();
    heard.until("it recovers without help", 1).await;
    assert_eq!(heard.of(alice).len(), 1);
}

#[tokio::test]
async fn a_shutdown_stops_the_reaper_and_waits_for_the_listener() {
    let database = replica_set().await;
    let (called, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let heard = Heard::default();
    let (told, calls, goes_on) = (heard.clone(), called.clone(), go_on.clone());
    let app = App::with(&database, |settings| {
        settings.reaper_interval(OFTEN).on_session_end(move |ended| {
            let (told, calls, goes_on) = (told.clone(), calls.clone(), goes_on.clone());
            async move {
                calls.notify_one();
                goes_on.notified().await;
                told.0.lock().unwrap().push(ended);
                Ok(())
            }
        })
    });
    let app = app.await;
    let alice = sessions(&app, 1).await.remove(0);
    app.locks.end_session(&alice).await.unwrap();
    called.notified().await;
    let mut shutdown = Box::pin(app.locks.shutdown());
    assert!(timeout(5 * OFTEN, &mut shutdown).await.is_err(), "the listener is waited for");
    go_on.notify_one();
    shutdown.await;
    assert_eq!(heard.all().len(), 1);
    sessions(&app, 1).await;
    age_all(&database, TTL).await;
    sleep(10 * OFTEN).await;
    assert_eq!(count(&database).await, 2, "no sweep runs any more");
}

/// The store hangs, so the current operation cannot end, but the reaper stops anyway.
#[tokio::test]
async fn the_reaper_stops_although_the_store_hangs() {
    let faulty = Faulty::new().await;
    let name = faulty.database.name().to_owned();
    let through = client(&faulty.proxy.uri()).await.database(&name);
    let deadline = Duration::from_millis(400);
    let app = App::with(&through, |settings| settings.reaper_interval(OFTEN).deadline(deadline));
    let app = app.await;
    faulty.proxy.blackhole();
    faulty.proxy.until_fired(1).await;
    timeout(Duration::from_secs(10), app.locks.shutdown()).await.expect("twice the deadline");
    // Except what the driver was about to send.
    let mut sent = usize::MAX;
    eventually("nothing is sent any more", async || {
        let before = std::mem::replace(&mut sent, faulty.proxy.fired());
        sleep(10 * OFTEN).await;
        before == faulty.proxy.fired()
    })
    .await;
}

#[tokio::test]
async fn a_dropped_manager_is_not_kept_alive_by_its_tasks() {
    let heard = Heard::default();
    let store = MemoryStore::new();
    let locks = heard.reaping()(LockManager::builder(store.clone())).build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    let other = LockManager::builder(store.clone()).without_reaper().build().await.unwrap();
    other.register::<WorkItem>().await.unwrap();
    drop(locks);
    sleep(5 * OFTEN).await;
    other.end_session(&Aid::new()).await.unwrap();
    sleep(5 * OFTEN).await;
    assert_eq!(heard.all(), []);
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

/// A date that some programs write for "forever". It must not stop the reaper for other locks.
#[tokio::test]
async fn no_date_of_a_foreign_record_stops_the_reaper() {
    let database = replica_set().await;
    let app = App::on(&database).await;
    let alice = sessions(&app, 1).await.remove(0);
    age_all(&database, TTL).await;
    for (id, ms) in [("max", i64::MAX), ("min", i64::MIN), ("before 1970", -1)] {
        let foreign = doc! { "_id": id, "ts": DateTime::from_millis(ms), "aid": "x", "token": "x" };
        lock_records(&database).insert_one(foreign).await.unwrap();
        app.locks.sweep().await.unwrap_or_else(|e| panic!("{id}: {e}"));
    }
    assert_eq!(app.locks.list_of(&alice).await.unwrap().len(), 0);
    assert!(
        lock_records(&database).find_one(doc! { "aid": alice.as_str() }).await.unwrap().is_none()
    );
}

/// A server that is just starting does not know all types yet.
#[tokio::test]
async fn the_reaper_waits_until_all_types_are_registered() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Later {
        #[serde(rename = "_id")]
        id: String,
    }
    impl actix_doclock::Lockable for Later {
        type Id = String;
        const COLLECTION: &'static str = "later";
    }
    let database = replica_set().await;
    let before = App::on(&database).await;
    before.locks.register::<Later>().await.unwrap();
    let alice = sessions(&before, 1).await.remove(0);
    age_all(&database, TTL).await;
    let live = actix_doclock::LockKey::of::<Later>("live".into()).unwrap();
    before.granted(&live, &alice).await;

    let heard = Heard::default();
    let interval = Duration::from_secs(2);
    let app =
        App::with(&database, |settings| heard.listening()(settings).reaper_interval(interval));
    let app = app.await;
    app.locks.register::<Later>().await.unwrap();
    eventually("it has swept", async || count(&database).await == 0).await;
    app.locks.shutdown().await;
    assert_eq!(heard.all(), [], "she holds a lock on another type");
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
    faulty.assert_fired(losses);
}

/// A server whose listener waits for the test, with that time as its deadline.
async fn with_patient_listener(
    database: &Database,
    heard: &Heard,
    deadline: Duration,
) -> (App, Arc<Notify>) {
    let go_on = Arc::new(Notify::new());
    let (told, goes_on) = (heard.clone(), go_on.clone());
    let app = App::with(database, |settings| {
        settings.reaper_interval(OFTEN).deadline(deadline).on_session_end(move |ended| {
            told.0.lock().unwrap().push(ended);
            let goes_on = goes_on.clone();
            async move {
                goes_on.notified().await;
                Ok(())
            }
        })
    });
    (app.await, go_on)
}

#[tokio::test]
async fn a_listener_is_called_once_although_the_record_of_the_call_is_lost() {
    for drop in [Proxy::drop_reply_to, Proxy::drop_request] {
        let faulty = Faulty::new().await;
        let heard = Heard::default();
        faulty.other.locks.end_session(&Aid::new()).await.unwrap();
        let through = faulty.app.store.database();
        let (_app, go_on) = with_patient_listener(through, &heard, NO_DEADLINE).await;
        heard.until("it is called", 1).await;
        drop(&faulty.proxy, "update");
        go_on.notify_one();
        faulty.proxy.until_fired(1).await;
        nothing_is_left_to_announce(&faulty.database).await;
        assert_eq!(heard.all().len(), 1);
    }
}

#[tokio::test]
async fn a_listener_is_called_once_although_an_outage_delays_the_record_of_the_call() {
    let deadline = Duration::from_millis(300);
    let faulty = Faulty::new().await;
    let heard = Heard::default();
    faulty.other.locks.end_session(&Aid::new()).await.unwrap();
    let through = faulty.app.store.database();
    let (_app, go_on) = with_patient_listener(through, &heard, deadline).await;
    heard.until("it is called", 1).await;
    faulty.proxy.cut();
    // A second call would not wait again.
    go_on.notify_one();
    go_on.notify_one();
    // Longer than the driver looks for a server.
    sleep(Duration::from_secs(7)).await;
    faulty.proxy.heal();
    nothing_is_left_to_announce(&faulty.database).await;
    sleep(5 * OFTEN).await;
    assert_eq!(heard.all().len(), 1);
}

impl std::fmt::Debug for Heard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.all().fmt(f)
    }
}

// ---- a killed server ------------------------------------------------------------------------------

const CHILD_URI: &str = "DOCLOCK_TEST_CHILD_URI";
const CHILD_DIRECT_URI: &str = "DOCLOCK_TEST_CHILD_DIRECT_URI";
const CHILD_DATABASE: &str = "DOCLOCK_TEST_CHILD_DATABASE";

/// Another application server, in a separate process, that sweeps once when it is told to. Its listener
/// records the announcements in the collection `told`.
struct Sweeper {
    process: Child,
    /// Must stay open as long as the process may write.
    _output: BufReader<ChildStdout>,
}

impl Sweeper {
    /// Its name at the server.
    const NAME: &str = "sweeper";

    fn start(uri: &str, direct_uri: &str, database: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([
                "ends::sweeps_as_a_child_of_another_test",
                "--exact",
                "--ignored",
                "--nocapture",
            ])
            .env(CHILD_URI, uri)
            .env(CHILD_DIRECT_URI, direct_uri)
            .env(CHILD_DATABASE, database)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let ready =
            output.by_ref().lines().map_while(Result::ok).any(|line| line.ends_with("ready"));
        assert!(ready, "the child has ended before it was ready");
        Self { process: child, _output: output }
    }

    fn sweep(&mut self) {
        writeln!(self.process.stdin.as_mut().unwrap(), "sweep").unwrap();
    }

    fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }
}

/// Kills the process like `kill -9`.
impl Drop for Sweeper {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "a part of another test, which starts it as a process"]
fn sweeps_as_a_child_of_another_test() {
    let variable = |name| env::var(name).unwrap();
    let name = variable(CHILD_DATABASE);
    Runtime::new().unwrap().block_on(async {
        let told: Collection<Document> =
            client(&variable(CHILD_DIRECT_URI)).await.database(&name).collection("told");
        let database = client(&variable(CHILD_URI)).await.database(&name);
        let app = App::with(&database, |settings| {
            settings.on_session_end(move |ended: SessionEnded| {
                let told = told.clone();
                async move {
                    told.insert_one(to_record(&ended)).await?;
                    Ok(())
                }
            })
        });
        let app = app.await;
        // The announcer has asked once since it was started.
        sleep(Duration::from_millis(100)).await;
        println!("ready");
        stdin().lock().read_line(&mut String::new()).unwrap();
        app.locks.sweep().await.unwrap();
        nothing_is_left_to_announce(&database).await;
    });
}

fn to_record(ended: &SessionEnded) -> Document {
    let mut locks: Vec<_> = ended.locks.iter().map(ToString::to_string).collect();
    locks.sort();
    doc! {
        "aid": ended.aid.as_str(),
        "event": ended.event.to_string(),
        "locks": locks,
        "repeated": ended.repeated,
    }
}

/// The server continues with received commands when their client is killed. If it is late enough, such
/// a command would renew a lease that the test has let pass.
async fn until_it_sends_nothing_more(database: &Database) {
    let admin = database.client().database("admin");
    eventually("its commands are done and its connections closed", async || {
        let of_it = [
            doc! { "$currentOp": { "allUsers": true, "idleConnections": true } },
            doc! { "$match": { "appName": Sweeper::NAME } },
        ];
        !admin.aggregate(of_it).await.unwrap().advance().await.unwrap()
    })
    .await;
}

/// The server is killed before its first command, its second, and so on, until no command is left;
/// another server continues. A second announcement has the `event` of the first and says that it is
/// `repeated`.
#[tokio::test]
async fn a_server_killed_in_a_sweep_leaves_nothing_undone() {
    let server = mongod::local_replica_set().await;
    let mut killed = 0;
    for commands in 0.. {
        let database = client(&server.uri()).await.database(&fresh_name());
        let survivor = App::on(&database).await;
        let aids = sessions(&survivor, 3).await;
        age_all(&database, TTL).await;
        let proxy = Proxy::start(server.port());
        let uris =
            [proxy.uri(), server.uri()].map(|uri| format!("{uri}&appName={}", Sweeper::NAME));
        let mut sweeper = Sweeper::start(&uris[0], &uris[1], database.name());
        proxy.hold_any_request(commands);
        sweeper.sweep();
        let began = Instant::now();
        while proxy.fired() == 0 && !sweeper.has_ended() {
            assert!(began.elapsed() < NO_DEADLINE, "neither held nor done");
            sleep(Duration::from_millis(5)).await;
        }
        let was_held = proxy.fired() > 0;
        drop((sweeper, proxy));
        until_it_sends_nothing_more(&database).await;
        killed += usize::from(was_held);

        let_leases_pass(&database).await;
        let heard = Heard::default();
        let other = App::with(&database, heard.listening()).await;
        other.locks.sweep().await.unwrap();
        nothing_is_left_to_announce(&database).await;
        other.locks.shutdown().await;

        assert_eq!(count(&database).await, 0, "killed after {commands} commands");
        let mut told: BTreeMap<String, Vec<Document>> = BTreeMap::new();
        let mut by_child = database.collection::<Document>("told").find(doc! {}).await.unwrap();
        while by_child.advance().await.unwrap() {
            let record = by_child.deserialize_current().unwrap();
            told.entry(record.get_str("aid").unwrap().into()).or_default().push(record);
        }
        for ended in heard.all() {
            told.entry(ended.aid.as_str().into()).or_default().push(to_record(&ended));
        }
        for aid in &aids {
            let told = told.get(aid.as_str()).map_or(&[][..], |told| told);
            assert!(!told.is_empty(), "killed after {commands} commands: {aid:?} is not announced");
            for (n, record) in told.iter().enumerate() {
                assert_eq!(record.get_array("locks").unwrap().len(), 2, "{commands}: {record}");
                assert_eq!(record.get_str("event").unwrap(), told[0].get_str("event").unwrap());
                assert!(n == 0 || record.get_bool("repeated").unwrap(), "{commands}: {told:?}");
            }
        }
        if !was_held {
            break;
        }
    }
    // Find, claim, name, remove, announce: a sweep has at least this many steps.
    assert!(killed >= 8, "killed {killed} times");
}

/// A save touched the lock before the lock expired, and commits after a contender has noted the expiry.
/// The lock is live again under the same token. The note is about its earlier lease.
#[tokio::test]
async fn a_lock_renewed_by_a_late_commit_is_announced_when_it_expires_again() {
    let database = replica_set().await;
    let heard = Heard::default();
    let app = App::with(&database, heard.listening()).await;
    let (alice, bob) = (Aid::new(), Aid::new());
    app.granted(&key("a"), &alice).await;
    age(&database, &key("a"), TTL).await;
    let expired = record(&database, &key("a")).await.unwrap();
    // Bob notes the expired lock and takes it over; a commit in between would find this state.
    let lock = app.granted(&key("a"), &bob).await;
    app.locks.release(&lock).await.unwrap();
    let mut renewed = expired;
    renewed.insert("ts", DateTime::now());
    lock_records(&database).insert_one(renewed).await.unwrap();
    app.locks.sweep().await.unwrap();
    assert!(heard.of(&alice).is_empty(), "it has a live lock");
    age(&database, &key("a"), TTL).await;
    app.granted(&key("a"), &bob).await;
    app.locks.sweep().await.unwrap();
    eventually("alice is announced", async || heard.of(&alice).len() == 1).await;
    assert_eq!(heard.of(&alice)[0].locks, [key("a")]);
}

/// A contender finds the expired lock, the sweep removes the lock and announces its session, and only
/// then does the contender write the trace.
#[tokio::test]
async fn a_trace_written_after_the_sweep_is_not_announced_again() {
    let database = replica_set().await;
    let heard = Heard::default();
    let app = App::with(&database, heard.listening()).await;
    let (alice, bob) = (Aid::new(), Aid::new());
    for id in ["a", "b"] {
        app.granted(&key(id), &alice).await;
        age(&database, &key(id), TTL).await;
    }
    let expired = record(&database, &key("a")).await.unwrap();
    app.locks.sweep().await.unwrap();
    eventually("alice is announced", async || heard.of(&alice).len() == 1).await;
    nothing_is_left_to_announce(&database).await;
    // The same lease once more: a takeover of it leaves the trace.
    lock_records(&database).insert_one(expired).await.unwrap();
    app.granted(&key("a"), &bob).await;
    let traces = database.collection::<Document>("doclock.ended");
    let unseen = doc! { "step": "look", "aid": alice.as_str() };
    assert_eq!(traces.count_documents(unseen.clone()).await.unwrap(), 1);
    app.locks.sweep().await.unwrap();
    assert_eq!(traces.count_documents(unseen).await.unwrap(), 0);
    nothing_is_left_to_announce(&database).await;
    assert_eq!(heard.of(&alice).len(), 1);
}

/// Locks that expired a moment ago, each of a session of its own.
async fn expired_at_once(app: &App, database: &Database, many: usize) {
    app.granted(&key("first"), &Aid::new()).await;
    let first = record(database, &key("first")).await.unwrap();
    let others = (1..many).map(|n| {
        let mut other = first.clone();
        other.insert("_id", n.to_string());
        other.insert("aid", Aid::new().as_str());
        other.insert("token", uuid::Uuid::new_v4().to_string());
        other
    });
    lock_records(database).insert_many(others).await.unwrap();
    age_all(database, app.locks.ttl()).await;
}

/// Puts more locks on record for each of these sessions, all like the first lock.
async fn hold_more(app: &App, database: &Database, aids: &[Aid], each: usize) {
    app.granted(&key("first"), &aids[0]).await;
    let first = record(database, &key("first")).await.unwrap();
    let all = aids.iter().flat_map(|aid| (0..each).map(move |n| (aid, n)));
    let others = all.skip(1).map(|(aid, n)| {
        let mut other = first.clone();
        other.insert("_id", format!("{n} of {}", aid.as_str()));
        other.insert("aid", aid.as_str());
        other.insert("token", uuid::Uuid::new_v4().to_string());
        other
    });
    lock_records(database).insert_many(others).await.unwrap();
}

/// One command names at most 8 000 locks, and one end at most 1 000.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_of_many_locks_names_those_of_each_session_or_counts_them() {
    for (sessions, each) in [(90, 101), (1, 9_000)] {
        let database = replica_set().await;
        let app = App::on(&database).await;
        let aids: Vec<_> = (0..sessions).map(|_| Aid::new()).collect();
        hold_more(&app, &database, &aids, each).await;
        age_all(&database, TTL).await;
        let heard = Heard::default();
        let listening = App::with(&database, heard.listening()).await;
        while count(&database).await > 0 {
            listening.locks.sweep().await.unwrap();
        }
        heard.until("all are announced", sessions).await;
        listening.locks.shutdown().await;
        assert_eq!(heard.all().len(), sessions);
        for ended in heard.all() {
            let named = each.min(1_000);
            assert_eq!((ended.locks.len(), ended.more), (named, each - named));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_logout_of_more_locks_than_one_command_names_counts_the_others() {
    const LOCKS: usize = 9_000;
    let database = replica_set().await;
    let app = App::on(&database).await;
    let alice = Aid::new();
    hold_more(&app, &database, std::slice::from_ref(&alice), LOCKS).await;
    let worker = Uuid::new_v4();
    let records = lock_records(&database);
    let some = records.find(doc! {}).sort(doc! { "_id": -1 }).limit(1_200).await.unwrap();
    let some: Vec<_> = some.try_collect().await.unwrap();
    // Again, as if the first reply was lost; and as if the removal had stopped half-way.
    for left in [0, 0, some.len()] {
        if left > 0 {
            records.insert_many(&some).await.unwrap();
        }
        let (reason, collections) = (EndReason::LoggedOut, ["workitem"]);
        let ended = app.store.end_session(&alice, reason, &collections, worker, Deadline::NONE);
        let ended = ended.await.unwrap();
        assert_eq!(ended.locks.len() + ended.more, LOCKS);
        assert!(ended.more > 0, "not all were read");
        assert_eq!(count(&database).await, 0, "all were released");
    }
    app.store.ready(&alice, worker).await.unwrap();
    app.locks.shutdown().await;
    let heard = Heard::default();
    let listening = App::with(&database, heard.listening()).await;
    nothing_is_left_to_announce(&database).await;
    listening.locks.shutdown().await;
    let [ended] = &heard.all()[..] else { panic!("{heard:?}") };
    assert_eq!((ended.locks.len(), ended.more), (1_000, LOCKS - 1_000));
    let told = database.collection::<Document>("doclock.ended");
    let told = told.find_one(doc! { "_id": alice.as_str() }).await.unwrap().unwrap();
    assert!(!told.contains_key("locks") && !told.contains_key("more"), "{told:?}");
}

/// A session that lives on has lost many locks, and their note has been forgotten since.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_that_were_counted_in_a_forgotten_note_are_not_counted_again() {
    let database = replica_set().await;
    let app = App::on(&database).await;
    let alice = Aid::new();
    hold_more(&app, &database, std::slice::from_ref(&alice), 1_005).await;
    age_all(&database, TTL).await;
    for id in ["b", "c"] {
        app.granted(&key(id), &alice).await;
    }
    let sweep_all = async || {
        while count(&database).await > 2 {
            app.locks.sweep().await.unwrap();
        }
    };
    sweep_all().await;
    let notes = database.collection::<Document>("doclock.ended");
    let of_alice = doc! { "_id": alice.as_str() };
    let note = notes.find_one(of_alice.clone()).await.unwrap().unwrap();
    assert!(note.contains_key("more"), "{note:?}");
    let forgotten = doc! { "$set": { "noted": DateTime::from_millis(1) } };
    notes.update_one(of_alice, forgotten).await.unwrap();
    let heard = Heard::default();
    for id in ["b", "c"] {
        age(&database, &key(id), TTL).await;
        app.locks.sweep().await.unwrap();
    }
    let listening = App::with(&database, heard.listening()).await;
    heard.until("the end is announced", 1).await;
    listening.locks.shutdown().await;
    let ended = heard.of(&alice).remove(0);
    assert_eq!((ended.locks, ended.more), (vec![key("b"), key("c")], 0));
}

/// MongoDB removes expired locks too, and nobody hears of their sessions then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_expire_together_are_all_announced_although_the_ttl_monitor_runs() {
    // With 20 000 all are announced after 39 s on two cores; the margin is 60 s.
    const MANY: usize = 1_500;
    let eager = Unusual { eager_ttl_monitor: true, ..Unusual::default() };
    let server = Mongod::start_replica_set_that_is(eager).await;
    let database = fresh_database(&server.uri()).await;
    let app = App::on(&database).await;
    expired_at_once(&app, &database, MANY).await;
    let (heard, began) = (Heard::default(), Instant::now());
    let reaping = App::with(&database, heard.reaping()).await;
    eventually("the locks are gone", async || count(&database).await == 0).await;
    println!("{MANY} sessions are ended {:?} after the start of the reaper", began.elapsed());
    heard.until("all are announced", MANY).await;
    println!("and announced after {:?}", began.elapsed());
    let aids: BTreeSet<_> = heard.all().into_iter().map(|ended| ended.aid).collect();
    assert_eq!(aids.len(), MANY);
    assert_eq!(reaping.locks.health().reaper.unannounced, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_whose_locks_vanish_before_the_reaper_comes_are_counted() {
    const MANY: usize = 5_000;
    let database = replica_set().await;
    expired_at_once(&App::on(&database).await, &database, MANY).await;
    let heard = Heard::default();
    let app = App::with(&database, heard.reaping()).await;
    // The reaper has begun. Now somebody else, like the TTL monitor, is quicker.
    heard.until("the first are announced", 1).await;
    lock_records(&database).delete_many(doc! {}).await.unwrap();
    let unannounced = || app.locks.health().reaper.unannounced as usize;
    eventually("the others are counted", async || heard.all().len() + unannounced() == MANY).await;
    println!("{} of {MANY} were not announced", unannounced());
    assert!(unannounced() > 0);
    let report = app.locks.check_health().await;
    assert!(report.problems.concat().contains("idle sessions were not announced"), "{report:?}");
}
