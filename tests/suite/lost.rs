//! A holder learns that its lock is gone.

use std::time::{Duration, Instant};

use actix_doclock::{Aid, Holder, Lock, LockError, LockManager, MemoryStore, TryAcquire, Wait};
use futures_util::FutureExt;
use mongodb::bson::{DateTime, doc};
use tokio::time::{sleep, timeout};

use crate::rig::app::{App, NO_DEADLINE, TTL, WorkItem, key, lock_records};
use crate::rig::faulty::Faulty;
use crate::rig::{fresh_database, mongod};

/// Long enough for anything that should happen at once.
const SOON: Duration = Duration::from_secs(30);
/// The deadline of a verb that is to miss it.
const LATE: Duration = Duration::from_secs(3);
/// Long enough to see that nothing happens.
const A_WHILE: Duration = Duration::from_millis(150);

async fn two_servers() -> (App, App) {
    let database = fresh_database(mongod::shared_replica_set().await.uri()).await;
    let one = App::with(&database, |settings| settings.break_policy(|_, _| true)).await;
    (one, App::with(&database, |settings| settings.break_policy(|_, _| true)).await)
}

#[tokio::test]
async fn a_loss_through_this_server_is_known_at_once() {
    let (app, _) = two_servers().await;
    for n in 0..5 {
        let alice = Aid::new();
        let lock = app.granted(&key("a"), &alice).await;
        let lost = app.locks.lost(&lock);
        match n {
            0 => drop(app.locks.release(&lock).await.unwrap()),
            1 => drop(app.break_lock(&key("a")).await.unwrap()),
            2 => drop(app.locks.end_session(&alice).await.unwrap()),
            3 => drop(app.locks.revoke_session(&alice).await.unwrap()),
            _ => drop(app.locks.release_all(&alice).await.unwrap()),
        }
        timeout(SOON, lost).await.unwrap_or_else(|_| panic!("case {n}"));
    }
}

#[tokio::test]
async fn a_loss_through_another_server_is_known_with_the_next_answer() {
    let (app, other) = two_servers().await;
    for n in 0..5 {
        let alice = Aid::new();
        let lock = app.granted(&key("a"), &alice).await;
        let mut lost = Box::pin(app.locks.lost(&lock));
        assert!(timeout(A_WHILE, &mut lost).await.is_err(), "it asks once");
        other.break_lock(&key("a")).await.unwrap();
        assert!(timeout(A_WHILE, &mut lost).await.is_err(), "this server cannot know yet");
        match n {
            0 => drop(app.locks.inspect(&key("a")).await.unwrap()),
            1 => drop(app.locks.renew(&alice).await.unwrap()),
            2 => drop(app.locks.list_of(&alice).await.unwrap()),
            3 => drop(app.save(&lock, "too late").await.is_ok()),
            _ => {
                other.granted(&key("a"), &Aid::new()).await;
                drop(app.try_acquire(&key("a"), &alice).await.unwrap());
            }
        }
        if n == 3 {
            // Directly in the store, so the manager has not heard of it.
            drop(app.locks.inspect(&key("a")).await.unwrap());
        }
        timeout(SOON, lost).await.unwrap_or_else(|_| panic!("case {n}"));
    }
}

#[tokio::test]
async fn news_of_other_locks_and_earlier_acquisitions_change_nothing() {
    let (app, other) = two_servers().await;
    let alice = Aid::new();
    let old = app.granted(&key("a"), &alice).await;
    app.locks.release(&old).await.unwrap();
    let lock = app.granted(&key("a"), &alice).await;
    let mut lost = Box::pin(app.locks.lost(&lock));
    timeout(SOON, app.locks.lost(&old)).await.expect("it was released before");
    app.locks.release(&old).await.unwrap();
    let of_b = app.granted(&key("b"), &alice).await;
    app.locks.release(&of_b).await.unwrap();
    app.locks.end_session(&Aid::new()).await.unwrap();
    other.held(&key("a")).await;
    app.locks.renew(&alice).await.unwrap();
    assert!(timeout(A_WHILE, &mut lost).await.is_err());
    app.locks.release(&lock).await.unwrap();
    timeout(SOON, lost).await.unwrap();
}

/// The grant has replaced the shared lock, and is given back: from then on, another session may have the document.
#[tokio::test]
async fn a_shared_lock_is_lost_with_an_upgrade_that_nobody_waits_for() {
    let faulty = Faulty::with_deadline(LATE).await;
    let mut guard = faulty.app.locks.acquire_shared(&key("a"), Wait::no()).await.unwrap();
    faulty.proxy.hold_reply_to("update");
    let upgraded = guard.upgrade().await;
    assert!(matches!(upgraded, Err(LockError::Store(_))), "{upgraded:?}");
    // News of the exclusive lock, which is renewed with all locks of its session.
    faulty.app.locks.renew(&guard.lock().aid).await.unwrap();
    faulty.proxy.let_go();
    timeout(SOON, guard.lost()).await.unwrap();
}

#[tokio::test]
async fn a_shared_lock_counts_as_lost_with_an_upgrade_that_is_never_answered() {
    let faulty = Faulty::with_deadline(LATE).await;
    let mut guard = faulty.app.locks.acquire_shared(&key("a"), Wait::no()).await.unwrap();
    // Each attempt begins with a read.
    (0..1_000).for_each(|_| faulty.proxy.drop_request("find"));
    let upgraded = guard.upgrade().await;
    assert!(matches!(upgraded, Err(LockError::Store(_))), "{upgraded:?}");
    timeout(SOON, guard.lost()).await.unwrap();
}

#[tokio::test]
async fn an_upgrade_that_finds_its_shared_lock_gone_tells_the_guard() {
    let (app, other) = two_servers().await;
    let mut guard = app.locks.acquire_shared(&key("a"), Wait::no()).await.unwrap();
    other.break_lock(&key("a")).await.unwrap();
    let upgraded = guard.upgrade().await;
    assert!(matches!(upgraded, Err(LockError::Lost { .. })), "{upgraded:?}");
    timeout(SOON, guard.lost()).await.unwrap();
}

/// Its lock has no token, as the waiter that is shown while a document is reserved for it.
#[tokio::test]
async fn the_lock_of_a_foreign_program_ends_a_shared_lock() {
    let database = fresh_database(mongod::shared_replica_set().await.uri()).await;
    let app = App::on(&database).await;
    let guard = app.locks.acquire_shared(&key("a"), Wait::no()).await.unwrap();
    let foreign = doc! { "ts": DateTime::now(), "aid": "x" };
    lock_records(&database).replace_one(doc! { "_id": "a" }, foreign).await.unwrap();
    assert!(app.locks.inspect(&key("a")).await.unwrap().expect("a lock").token.is_none());
    timeout(SOON, guard.lost()).await.unwrap();
}

/// By the local clock, which cannot be set, and without any answer: the network carries nothing.
#[tokio::test]
async fn without_an_answer_the_lock_is_lost_before_the_server_lets_another_session_in() {
    const SHORT: Duration = Duration::from_secs(2);
    let faulty = Faulty::new().await;
    let app = App::with(faulty.app.store.database(), |settings| settings.ttl(SHORT)).await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    let lost = app.locks.lost(&lock);
    faulty.proxy.blackhole();
    let expires = lock.expires_at;
    timeout(NO_DEADLINE, lost).await.unwrap();
    assert!(Instant::now() >= expires, "the holder does not give up early");
    faulty.proxy.heal();
    // A contender that asks all the time is let in after the holder has given up.
    println!("given up {:?} after its time", Instant::now() - expires);
}

#[tokio::test]
async fn a_holder_gives_up_before_another_one_is_let_in() {
    const SHORT: Duration = Duration::from_secs(2);
    let (app, other) = two_servers().await;
    let short = App::with(app.store.database(), |settings| settings.ttl(SHORT)).await;
    let lock = short.granted(&key("a"), &Aid::new()).await;
    let lost = short.locks.lost(&lock);
    let bob = Aid::new();
    let taken_over = async {
        loop {
            if let TryAcquire::Granted(_) = other.try_acquire(&key("a"), &bob).await.unwrap() {
                return Instant::now();
            }
            sleep(Duration::from_millis(1)).await;
        }
    };
    let taken_over = taken_over.await;
    assert!(lock.expires_at <= taken_over, "the holder gives up by its local deadline");
    timeout(SOON, lost).await.unwrap();
}

/// After a pause timers fire late, so at first they report nothing.
#[tokio::test]
async fn after_a_pause_of_the_process_the_first_check_reports_an_expired_lock() {
    const SHORT: Duration = Duration::from_secs(5);
    let locks = LockManager::builder(MemoryStore::new()).ttl(SHORT).build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    let granted =
        locks.lock_for_session(&key("a"), &Aid::new(), &Holder::new("alice")).await.unwrap();
    let TryAcquire::Granted(lock) = granted else { panic!("{granted:?}") };
    let mut watched = Box::pin(locks.lost(&lock));
    assert!((&mut watched).now_or_never().is_none());
    std::thread::sleep(SHORT);
    assert!(watched.now_or_never().is_some());
    assert!(locks.lost(&lock).now_or_never().is_some());
}

/// In a rolling change of the ttl, another server has renewed for a shorter time than this server
/// believed.
#[tokio::test]
async fn a_shorter_lease_counts_as_soon_as_it_is_known() {
    let (app, _) = two_servers().await;
    let shorter =
        |settings: actix_doclock::LockManagerBuilder| settings.ttl(Duration::from_secs(1));
    let other = App::with(app.store.database(), shorter).await;
    let alice = Aid::new();
    let lock = app.granted(&key("a"), &alice).await;
    let lost = app.locks.lost(&lock);
    other.already_mine(&key("a"), &alice).await;
    app.locks.inspect(&key("a")).await.unwrap();
    timeout(SOON, lost).await.expect("it expires in a second");
}

#[tokio::test]
async fn the_token_of_one_lock_says_nothing_about_another() {
    let (app, _) = two_servers().await;
    let (alice, bob) = (Aid::new(), Aid::new());
    let a = app.granted(&key("a"), &alice).await;
    let b = app.granted(&key("b"), &alice).await;
    let mut lost = Box::pin(app.locks.lost(&a));
    let wrong = [Lock { key: key("b"), ..a.clone() }, Lock { aid: bob, ..a.clone() }];
    for lock in wrong {
        app.locks.release(&lock).await.unwrap();
    }
    assert!(timeout(A_WHILE, &mut lost).await.is_err());
    app.locks.release(&b).await.unwrap();
    app.locks.release(&a).await.unwrap();
    timeout(SOON, lost).await.unwrap();
}

#[tokio::test]
async fn a_renewal_by_another_server_is_found_before_it_counts_as_lost() {
    const SHORT: Duration = Duration::from_secs(5);
    let (app, _) = two_servers().await;
    let (app, other) = {
        let short = async || App::with(app.store.database(), |settings| settings.ttl(SHORT)).await;
        (short().await, short().await)
    };
    let alice = Aid::new();
    let lock = app.granted(&key("a"), &alice).await;
    let mut lost = Box::pin(app.locks.lost(&lock));
    let until = Instant::now() + 2 * SHORT;
    while Instant::now() < until {
        assert!(timeout(SHORT / 8, &mut lost).await.is_err(), "the other server renews it");
        assert_eq!(other.locks.renew(&alice).await.unwrap(), 1);
    }
    timeout(SOON, lost).await.expect("the loss is reported once no server renews it");
}

#[tokio::test]
async fn a_renewal_by_this_manager_needs_no_further_query() {
    let store = MemoryStore::new();
    let locks =
        LockManager::builder(store.clone()).ttl(TTL).without_reaper().build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    let alice = Aid::new();
    let TryAcquire::Granted(lock) =
        locks.lock_for_session(&key("a"), &alice, &Holder::new("alice")).await.unwrap()
    else {
        panic!("not granted");
    };
    let mut lost = Box::pin(locks.lost(&lock));
    store.advance(TTL - Duration::from_secs(60));
    assert_eq!(locks.renew(&alice).await.unwrap(), 1);
    assert!(timeout(A_WHILE, &mut lost).await.is_err());
    store.advance(TTL);
    assert_eq!(locks.renew(&alice).await.unwrap(), 0);
    timeout(SOON, lost).await.expect("the renewal reports the loss");
}
