//! Guards are kept alive, and their loss is noticed in time.

use std::future::Future;
use std::pin::pin;
use std::task::Context;

use actix_doclock::Actor;
use futures_util::future::select_all;
use futures_util::task::noop_waker_ref;

use mongodb::bson::doc;

use super::*;
use crate::rig::app::{count, record};
use crate::rig::counted_database;
use crate::rig::faulty::Faulty;
use crate::rig::mongod::Mongod;

/// The cost of a guard, apart from the store, does not grow with the number of guards.
#[tokio::test]
async fn the_last_of_twenty_thousand_guards_costs_as_much_as_the_first() {
    const MANY: usize = 1_000;
    let locks = Cluster::Memory(MemoryStore::new()).server().await;
    let job = locks.job("many");
    let (mut guards, mut took) = (Vec::new(), Vec::new());
    for thousand in 0..20 {
        let began = Instant::now();
        for n in 0..MANY {
            let key = key(&format!("{thousand}-{n}"));
            guards.push(job.acquire(&key, Wait::no()).await.unwrap());
        }
        took.push(began.elapsed());
    }
    let fastest = |of: &[Duration]| *of.iter().min().unwrap();
    let (first, last) = (fastest(&took[..5]), fastest(&took[15..]));
    eprintln!("a thousand guards: {first:?} at first, {last:?} at last");
    // A scan of all guards on each change made it forty times as much.
    assert!(last < first * 5, "{took:?}");
}

#[tokio::test]
async fn a_thousand_guards_are_renewed_together_and_only_the_broken_one_is_lost() {
    // So many that a renewal needs more than one command.
    const MANY: usize = 1_100;
    // A renewal of all of them takes seconds on a busy machine.
    const TTL: Duration = Duration::from_secs(30);
    let (database, commands) = counted_database(&mongod::local_replica_set().await.uri()).await;
    let cluster = Cluster::Mongo(database.clone());
    let (locks, other) = (cluster.server().await, cluster.uncounted().await);
    let other = other.server_with(|settings| settings.break_policy(|_, _| true)).await;

    let job = locks.job("many").ttl(TTL);
    let keys: Vec<_> = (0..MANY).map(|n| key(&n.to_string())).collect();
    let mut guards = Vec::new();
    for some in keys.chunks(50) {
        let some = some.iter().map(|key| job.acquire(key, Wait::no()));
        guards.extend(join_all(some).await.into_iter().map(Result::unwrap));
    }
    commands.take();
    sleep(TTL / 2).await;
    let sent = commands.take();
    eprintln!("{MANY} guards, in half a ttl: {sent:?}");
    // Two in each third of the ttl, and more if the server takes longer than a command may: not one for each guard.
    assert!((1..=MANY / 4).contains(&sent.len()), "{} commands: {sent:?}", sent.len());

    let broken = guards.remove(MANY / 2);
    crate::rig::app::break_on(&other, broken.key(), &Actor::new("admin")).await.unwrap();
    let since = Instant::now();
    in_time("it is noticed", broken.lost()).await;
    assert!(since.elapsed() < TTL * 2 / 3, "by the next renewal, not at its expiry");
    let others = select_all(guards.iter().map(|guard| Box::pin(guard.lost())));
    assert!(timeout(TTL / 3, others).await.is_err(), "no other guard is lost by the next renewal");
    in_time("they are released", join_all(guards.into_iter().map(LockGuard::release))).await;
    drop(broken);
    eventually("no lock is left", async || count(&database).await == 0).await;
}

/// The renewal takes long to reach the server. The server counts from its arrival; the guard does not.
#[tokio::test]
async fn without_the_server_a_guard_is_lost_before_anyone_else_is_let_in() {
    const TTL: Duration = Duration::from_secs(12);
    const MARGIN: Duration = Duration::from_secs(3);
    let faulty = Faulty::new().await;
    faulty.proxy.hold_request("update");
    let job = faulty.app.locks.job("cut off").ttl(TTL);
    let began = Instant::now();
    let guard = job.acquire(&key("a"), Wait::no()).await.unwrap();
    let mut lost = pin!(guard.lost());
    let first = record(&faulty.database, &key("a")).await.unwrap();
    faulty.proxy.until_fired(1).await;
    sleep(MARGIN).await;
    faulty.proxy.let_go();
    eventually("it is renewed", async || {
        record(&faulty.database, &key("a")).await.unwrap().get("ts") != first.get("ts")
    })
    .await;
    faulty.proxy.blackhole();
    assert!(timeout(A_WHILE, &mut lost).await.is_err(), "not lost yet");
    in_time("it is lost", lost).await;
    assert!(began.elapsed() > TTL, "the guard knows of its renewal");
    let still = faulty.other.held(&key("a")).await;
    assert_eq!(still.token, Some(guard.token()), "the server has not let anyone else in");
    drop(
        in_time("then the next waiter is let in", waiting(&faulty.other.locks, &key("a")).await)
            .await
            .unwrap(),
    );
}

#[tokio::test]
async fn a_handover_whose_request_or_reply_is_lost_takes_place_once() {
    for reply in [true, false] {
        let faulty = Faulty::new().await;
        let locks = &faulty.app.locks;
        let held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        let next = waiting(locks, &key("a")).await;
        until_told(locks, WorkItem::COLLECTION).await;
        sleep(4 * A_WHILE).await;
        let name = "findAndModify";
        if reply {
            faulty.proxy.drop_reply_to(name)
        } else {
            faulty.proxy.drop_request(name)
        }
        held.release().await.unwrap();
        faulty.proxy.until_fired(1).await;
        let guard = in_time("it is handed over", next).await.unwrap();
        let live = faulty.other.locks.inspect(&key("a")).await.unwrap().unwrap();
        assert_eq!(live.token, Some(guard.token()));
        assert_eq!(faulty.proxy.passed("delete"), 0, "in one command");
        guard.release().await.unwrap();
        assert_eq!(count(&faulty.database).await, 0);
    }
}

#[tokio::test]
async fn a_handover_that_the_server_refuses_becomes_a_release() {
    let server = Mongod::start_replica_set().await;
    let cluster = Cluster::Mongo(fresh_database(&server.uri()).await);
    let locks = cluster.server().await;
    let held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
    let next = waiting(&locks, &key("a")).await;
    until_told(&locks, WorkItem::COLLECTION).await;
    sleep(4 * A_WHILE).await;
    let once = doc! { "failCommands": ["update"], "errorCode": 13 };
    let once = doc! { "configureFailPoint": "failCommand", "mode": { "times": 1 }, "data": once };
    server.admin(once).await;
    drop(held);
    drop(in_time("the next one is let in", next).await.unwrap());
}

#[tokio::test]
async fn a_guard_that_is_dropped_during_an_outage_is_released_after_the_outage() {
    let faulty = Faulty::new().await;
    let guard = faulty.app.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    faulty.proxy.cut();
    drop(guard);
    faulty.proxy.until_fired(1).await;
    sleep(A_WHILE).await;
    assert_eq!(count(&faulty.database).await, 1);
    faulty.proxy.heal();
    eventually("it is released", async || count(&faulty.database).await == 0).await;
}

/// The ttl is the upper limit of a guard's lease. It must not be counted back from the end of a lock
/// that expires sooner.
#[tokio::test]
async fn a_guard_with_a_max_hold_below_its_ttl_is_not_lost_early() {
    let hold = Duration::from_secs(3);
    let cluster = Cluster::memory().await;
    let locks = cluster.server_with(|settings| settings.max_hold(hold)).await;
    let began = Instant::now();
    let guard = locks.acquire(&key("a"), Wait::no()).await.unwrap();
    in_time("it is lost", guard.lost()).await;
    assert!(began.elapsed() >= hold - A_WHILE, "lost after {:?}", began.elapsed());
}

/// Guards with a long ttl whose server does not answer must not cost guards with a short ttl their
/// locks.
#[tokio::test]
async fn a_stuck_renewal_holds_up_no_others() {
    let faulty = Faulty::new().await;
    let locks = &faulty.app.locks;
    let (short, long) = (Duration::from_secs(10), Duration::from_secs(30));
    let long = locks.job("long").ttl(long).acquire(&key("long"), Wait::no()).await.unwrap();
    faulty.proxy.hold_reply_to("update");
    // Only the guard with the long ttl is renewed now; its renewal is due in 10 s.
    faulty.proxy.until_fired(1).await;
    let short = locks.job("short").ttl(short).acquire(&key("short"), Wait::no()).await.unwrap();
    assert!(timeout(Duration::from_secs(11), short.lost()).await.is_err(), "it is renewed");
    faulty.proxy.let_go();
    drop(long);
}

/// A renewal finds fewer locks than there were guards when it was sent.
#[tokio::test]
async fn guards_that_are_released_during_a_renewal_do_not_count_as_lost() {
    let lines = crate::rig::log::log_lines();
    let faulty = Faulty::new().await;
    let job = faulty.app.locks.job("quick").ttl(Duration::from_secs(15));
    let name = fresh_id();
    let stays = job.acquire(&key("stays"), Wait::no()).await.unwrap();
    let goes = job.acquire(&key(&name), Wait::no()).await.unwrap();
    faulty.proxy.hold_request("update");
    faulty.proxy.until_fired(1).await;
    goes.release().await.unwrap();
    faulty.proxy.let_go();
    eventually("the server was asked which lock is gone", async || faulty.proxy.passed("find") > 0)
        .await;
    sleep(A_WHILE).await;
    let said = lines.lock().unwrap().iter().any(|it| it.contains(&name) && it.contains("was lost"));
    assert!(!said, "the guard was released, not lost");
    assert!(timeout(A_WHILE, stays.lost()).await.is_err());
}

fn fresh_id() -> String {
    crate::rig::fresh_name()
}

/// Polls `future` that many times, lets everything else run in between, and drops it. Returns whether
/// it had completed.
async fn drop_after<F: Future>(future: F, polls: usize) -> bool {
    let mut future = pin!(future);
    let mut context = Context::from_waker(noop_waker_ref());
    for _ in 0..polls {
        if future.as_mut().poll(&mut context).is_ready() {
            return true;
        }
        // Real servers take a while to answer.
        sleep(Duration::from_micros(300)).await;
    }
    false
}

on_each_store! {
    async fn a_wait_that_is_dropped_at_any_moment_leaves_nothing(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        for polls in 0..20 {
            for is_held in [false, true] {
                let key = key("a");
                let mut held = None;
                if is_held {
                    // The claim that was dropped last may arrive only now, and is given back.
                    let free = other.acquire(&key, Wait::until_acquired());
                    held = Some(in_time("it is free", free).await.unwrap());
                }
                drop_after(one.acquire(&key, Wait::until_acquired()), polls).await;
                if let Some(held) = held {
                    held.release().await.unwrap();
                }
                for locks in [&one, &other] {
                    let next = locks.acquire(&key, Wait::until_acquired());
                    let next = in_time("the next one is let in", next).await.unwrap();
                    next.release().await.unwrap();
                }
            }
        }
        eventually("no lock is left", async || other.list().await.unwrap().is_empty()).await;
    }

    async fn a_waiter_that_leaves_at_the_moment_of_the_release_holds_up_nobody(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        let held = other.acquire(&key("a"), Wait::no()).await.unwrap();
        let mut all = Vec::new();
        for _ in 0..30 {
            all.push(waiting(&one, &key("a")).await);
        }
        until_told(&one, WorkItem::COLLECTION).await;
        drop(held);
        for (n, waiting) in all.into_iter().enumerate() {
            if n % 2 == 0 {
                sleep(Duration::from_micros(200 * n as u64)).await;
                waiting.abort();
                let _ = waiting.await;
            } else {
                drop(in_time("the next one is let in", waiting).await.unwrap());
            }
        }
        drop(in_time("the last one is let in", waiting(&other, &key("a")).await).await.unwrap());
    }
}

/// An observation of the holder from before an outage is not an answer of the store.
#[tokio::test]
async fn a_wait_that_ends_in_an_outage_is_an_error_and_not_a_refusal() {
    let faulty = Faulty::with_deadline(Duration::from_millis(500)).await;
    let _held = faulty.other.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    let locks = faulty.app.locks.clone();
    let first = waiting(&locks, &key("a")).await;
    until_told(&locks, WorkItem::COLLECTION).await;
    let crowd = (0..3).map(|_| {
        let locks = locks.clone();
        tokio::spawn(async move {
            locks.acquire(&key("a"), Wait::for_at_most(Duration::from_secs(8))).await
        })
    });
    let crowd: Vec<_> = crowd.collect();
    eventually("all wait", async || locks.health().waiting == 4).await;
    faulty.proxy.cut();
    for waiting in crowd {
        let ended = in_time("it ends", waiting).await.unwrap();
        assert!(matches!(ended, Err(LockError::Store(_))), "{ended:?}");
    }
    first.abort();
}

#[tokio::test]
async fn a_server_that_is_stopped_during_an_outage_ends_all_waits() {
    let faulty = Faulty::with_deadline(Duration::from_millis(300)).await;
    let locks = faulty.app.locks.clone();
    faulty.proxy.cut();
    let waits = locks.clone();
    let waiting =
        tokio::spawn(async move { waits.acquire(&key("a"), Wait::until_acquired()).await });
    faulty.proxy.until_fired(1).await;
    sleep(Duration::from_secs(1)).await;
    assert!(!waiting.is_finished(), "the wait outlasts an outage");
    locks.shutdown().await;
    let refused = in_time("it is refused", waiting).await.unwrap();
    assert!(matches!(refused, Err(LockError::ShutDown)), "{refused:?}");
}

#[tokio::test]
async fn a_wait_outlasts_an_outage() {
    let faulty = Faulty::with_deadline(Duration::from_millis(300)).await;
    let locks = faulty.app.locks.clone();
    faulty.proxy.cut();
    let waiting = waiting(&locks, &key("a")).await;
    sleep(Duration::from_secs(2)).await;
    faulty.proxy.heal();
    drop(in_time("it is let in", waiting).await.unwrap());
}

#[tokio::test]
async fn a_wait_may_be_longer_than_a_clock_can_count() {
    let locks = Cluster::memory().await.server().await;
    let held = locks.acquire(&key("a"), Wait::for_at_most(Duration::MAX)).await.unwrap();
    let waits = locks.clone();
    let waiting =
        tokio::spawn(
            async move { waits.acquire(&key("a"), Wait::for_at_most(Duration::MAX)).await },
        );
    sleep(A_WHILE).await;
    drop(held);
    drop(in_time("it is let in", waiting).await.unwrap().unwrap());
}
