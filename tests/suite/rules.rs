//! The rules of the protocol. Each has a test here, or names the test that guards it elsewhere.
//!
//! 1. A refusal carries the holder in the same round trip:
//!    `commands::a_refusal_is_one_command_and_names_the_holder`. No E11000 reaches the caller:
//!    all of `contention`. No client-side clock is used: here.
//! 2. A late or retried release never removes a newer lock: `conformance::…::
//!    a_late_release_does_not_remove_a_newer_lock_of_the_same_session`, and with a late request
//!    `lost_replies::a_release_that_arrives_late_does_not_remove_a_newer_lock_of_the_same_session`.
//! 3. A repeated acquire finds its own grant:
//!    `lost_replies::an_acquire_whose_reply_is_lost_finds_its_own_grant`.
//! 4. Re-acquiring after expiry gives a new token; re-entry and renewal keep it: `conformance::…::
//!    after_expiry_the_same_session_gets_a_new_token`, `reentry_renews_and_keeps_the_token`. An
//!    expired lock is gone for its holder too: here, through the manager.
//! 5. An outage is an error, contention is an answer: all of `outage`.
//! 6. The end of a session leaves no lock behind: here.
//! 7. A driver future is never dropped half-way: `outage::an_acquire_dropped_before_…`, and for the
//!    other verbs here. An unknown outcome is retried until the deadline, then released and
//!    reported as unknown:
//!    `lost_replies::a_grant_that_arrives_after_the_deadline_is_given_back`. The deadline may also
//!    come between two attempts: here.
//! 8. Renewals and ends of sessions are retried:
//!    `lost_replies::a_renewal_is_repeated_which_the_driver_never_does`,
//!    `lost_replies::the_end_of_a_session_is_repeated_which_the_driver_never_does`.
//! 9. Local deadlines are counted from before the request was sent: here.

use std::time::{Duration, Instant};

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, Holder, Lock, LockError, LockKey, LockToken, Mode, Released, StoreErrorKind, TryAcquire,
    store::{Claim, Saved},
};
use doclock_conformance::Shorthand;
use futures_util::future::join_all;
use mongodb::Database;
use mongodb::bson::{Bson, DateTime, Document, doc};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{sleep, timeout};

use crate::rig::app::{
    App, TTL, count, eventually, key, lock_records, put, record, store_error_kind, title,
};
use crate::rig::faulty::Faulty;
use crate::rig::mongod::{self, Mongod, Unusual};
use crate::rig::proxy::Proxy;
use crate::rig::{self, carries_a_time, claims::claim, has};

async fn app() -> (App, Database) {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    (App::on(&database).await, database)
}

/// Rule 1. The clock of the server is a day ahead, and all dates that this crate sends are of that day.
#[tokio::test]
async fn no_command_carries_a_time_of_the_client() {
    let server = with_another_clock().await;
    let (database, sent) = rig::recorded_database(&server.uri()).await;
    let app = App::on(&database).await;
    let aid = Aid::new();
    put(&database, "a", "old").await;
    let lock = app.granted(&key("a"), &aid).await;
    app.already_mine(&key("a"), &aid).await;
    app.held(&key("a")).await;
    app.locks.renew(&aid).await.unwrap();
    assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Saved);
    app.locks.inspect(&key("a")).await.unwrap();
    rig::age(&database, &key("a"), TTL).await;
    app.granted(&key("a"), &Aid::new()).await;
    app.locks.end_session(&aid).await.unwrap();

    let sent = sent.lock().unwrap();
    assert!(sent.len() >= 10, "{sent:?}");
    assert!(sent.iter().any(carries_a_time));
    for command in sent.iter() {
        assert!(!carries_our_time(command), "{command}");
    }
}

/// A server whose clock is a day ahead of this process.
pub(crate) async fn with_another_clock() -> Mongod {
    Mongod::start_replica_set_that_is(Unusual { clock_ahead: Some(DAY), ..Unusual::default() })
        .await
}

const DAY: i64 = 24 * 60 * 60;

/// True if the command carries a date of this process, which is not a day ahead.
pub(crate) fn carries_our_time(command: &Document) -> bool {
    let soon = DateTime::now().timestamp_millis() + DAY * 1_000 / 2;
    has(
        &Bson::Document(command.clone()),
        &|value| matches!(value, Bson::DateTime(date) if date.timestamp_millis() < soon),
    )
}

/// As after a fail-over to a slower clock.
#[tokio::test]
async fn a_re_entry_never_sets_the_date_of_its_lock_back() {
    let (app, database) = app().await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    let ahead = doc! { "$set": { "ts": { "$add": ["$ts", 30_000] } } };
    lock_records(&database).update_many(doc! {}, vec![ahead]).await.unwrap();
    let date = async || *record(&database, &key("a")).await.unwrap().get_datetime("ts").unwrap();
    let before = date().await;
    let again = Claim { aid: lock.aid.clone(), ..claim(Mode::Exclusive) };
    let answer = app.store.try_acquire(&key("a"), &again, Deadline::NONE).await.unwrap();
    assert!(matches!(answer, TryAcquire::AlreadyMine(_)), "{answer:?}");
    assert!(date().await >= before, "another reader was told that the lock lives until then");
}

/// Rule 4. The record is still there, and no other session has taken the lock, but it is gone anyway.
#[tokio::test]
async fn an_expired_lock_is_gone_for_its_holder_too() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    rig::age(&database, &key("a"), TTL).await;
    let before = record(&database, &key("a")).await.expect("not removed");

    assert_eq!(app.locks.renew(&lock.aid).await.unwrap(), 0);
    assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Lost);
    assert!(app.locks.inspect(&key("a")).await.unwrap().is_none());
    assert!(app.locks.list_of(&lock.aid).await.unwrap().is_empty());
    assert_eq!(record(&database, &key("a")).await, Some(before), "nothing has revived it");
    assert_eq!(title(&database, "a").await, "old");
    assert_ne!(app.granted(&key("a"), &lock.aid).await.token, lock.token);
}

/// Rule 4, if the ttl was changed in the meantime: the ttl that the holder wrote counts.
#[tokio::test]
async fn renewals_and_saves_use_the_ttl_that_the_holder_wrote() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    rig::age(&database, &key("a"), TTL / 2).await;
    let hasty = App::with(&database, |settings| settings.ttl(TTL / 4)).await;
    assert_eq!(hasty.locks.renew(&lock.aid).await.unwrap(), 1);
    rig::age(&database, &key("a"), TTL / 2).await;
    assert_eq!(hasty.save(&lock, "new").await.unwrap(), Saved::Saved);
    assert_eq!(hasty.held(&key("a")).await.token, lock.token);
}

/// A session that has lost its lock cannot write. Operations that end a lock wait for a save that has
/// seen it live, so that the next holder loads the saved document.
#[tokio::test]
async fn a_lock_cannot_go_between_the_check_of_a_save_and_its_commit() {
    let Faulty { proxy, app, database, other } = Faulty::new().await;
    put(&database, "a", "old").await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    proxy.hold_request("commitTransaction");
    let next_holder = async {
        proxy.until_fired(1).await;
        let released = other.locks.release(&lock);
        tokio::pin!(released);
        let early = timeout(Duration::from_millis(300), &mut released).await;
        assert!(early.is_err(), "the lock went under a save: {early:?}");
        proxy.let_go();
        released.await.unwrap();
        other.granted(&key("a"), &Aid::new()).await;
        title(&database, "a").await
    };
    let (saved, seen) = tokio::join!(app.save(&lock, "new"), next_holder);
    assert_eq!(saved.unwrap(), Saved::Saved);
    assert_eq!(seen, "new");
}

/// The steps of a request that locks: the lock first, then the check for the tombstone. The web layer
/// does the same, with a request around it.
async fn acquire_in_session(app: &App, key: &LockKey, aid: &Aid) -> Option<Lock> {
    let mut claim = Claim {
        aid: aid.clone(),
        token: LockToken::new(),
        holder: Holder::new("alice"),
        ttl: TTL,
        tab: None,
        page: None,
        taken: None,
        max_hold: None,
        mode: Mode::Exclusive,
        turn: None,
        upgrades: None,
    };
    let answer = loop {
        match app.store.try_acquire(key, &claim, Deadline::NONE).await {
            // The end of the session has removed the lock before the answer.
            Err(e) if e.kind() == StoreErrorKind::Unavailable => {
                claim.token = claim.token.next_attempt();
            }
            answer => break answer.unwrap(),
        }
    };
    let TryAcquire::Granted(lock) = answer else { return None };
    if app.store.session_ended(aid).await.unwrap().is_none() {
        return Some(lock);
    }
    // An earlier attempt may have been granted.
    app.store.release(key, aid, lock.token.unwrap(), Mode::Exclusive).await.unwrap();
    None
}

/// Rule 6.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_ends_while_it_acquires_leaves_no_lock_behind() {
    const LANES: usize = 8;
    let races = 200 * rig::depth() as usize;
    let uri = mongod::shared_replica_set().await;
    let (one, database) = app().await;
    let other = App::on(&rig::client(uri.uri()).await.database(database.name())).await;
    let mut lanes = JoinSet::new();
    for lane in 0..LANES {
        let (one, other) = (one.clone(), other.clone());
        lanes.spawn(async move {
            for race in (lane..races).step_by(LANES) {
                let (key, aid) = (key(&format!("{race}")), Aid::new());
                // The end and the acquire have two commands each, so in each race the end begins a
                // little earlier or later.
                let acquiring = async {
                    pause(race % 7).await;
                    acquire_in_session(&one, &key, &aid).await;
                };
                let ending = async {
                    pause(race % 5).await;
                    other.locks.end_session(&aid).await.unwrap();
                };
                tokio::join!(acquiring, ending);
            }
        });
    }
    lanes.join_all().await;
    assert_eq!(count(&database).await, 0, "locks of ended sessions");
}

/// A short pause. Its length differs from machine to machine, and need not be exact.
async fn pause(steps: usize) {
    for _ in 0..steps {
        sleep(Duration::from_micros(300)).await;
        yield_now().await;
    }
}

/// Rule 6, both orders in turn: which of the two steps of the acquire notices the end.
#[tokio::test]
async fn the_end_of_a_session_wins_whether_it_comes_before_or_after_the_lock() {
    let (app, database) = app().await;
    let (a, alice) = (key("a"), Aid::new());
    // The lock comes first, and the end removes it.
    assert!(acquire_in_session(&app, &a, &alice).await.is_some());
    assert_eq!(app.locks.end_session(&alice).await.unwrap().locks, [key("a")]);
    assert_eq!(count(&database).await, 0);
    // The end comes first. Only the tombstone tells the acquire; without the check the lock would stay.
    let unasked = app.granted(&a, &alice).await;
    assert_eq!(count(&database).await, 1);
    app.locks.release(&unasked).await.unwrap();
    assert!(acquire_in_session(&app, &a, &alice).await.is_none());
    assert_eq!(count(&database).await, 0);
}

/// Rule 6, the other half: if the removal came before the tombstone, a lock could slip in between that
/// neither of them sees.
#[tokio::test]
async fn the_tombstone_is_there_before_the_locks_are_removed() {
    let Faulty { proxy, app, database, other } = Faulty::new().await;
    let alice = Aid::new();
    app.granted(&key("a"), &alice).await;
    proxy.hold_request("delete");
    let ending = async { app.locks.end_session(&alice).await.unwrap() };
    let looking = async {
        proxy.until_fired(1).await;
        let ended = other.store.session_ended(&alice).await.unwrap();
        assert!(ended.is_some(), "an acquire that is too late for the removal sees it");
        assert!(acquire_in_session(&other, &key("b"), &alice).await.is_none());
        assert_eq!(count(&database).await, 1, "not removed yet");
        proxy.let_go();
    };
    let (released, ()) = tokio::join!(ending, looking);
    assert_eq!(released.locks, [key("a")]);
    assert_eq!(count(&database).await, 0);
}

/// A session that goes on may release all locks and lock again; only its end is final.
#[tokio::test]
async fn releasing_all_locks_is_not_the_end_of_a_session() {
    let (app, _) = app().await;
    let alice = Aid::new();
    app.granted(&key("a"), &alice).await;
    assert_eq!(app.locks.release_all(&alice).await.unwrap(), [key("a")]);
    assert!(acquire_in_session(&app, &key("a"), &alice).await.is_some());
}

/// Rule 7. Every reply is lost until there is no time for another attempt. Some attempts have been
/// carried out, and the caller is not told that it was refused.
#[tokio::test]
async fn an_acquire_that_is_never_answered_is_unknown_and_given_back() {
    let Faulty { proxy, app, database, .. } = Faulty::with_deadline(Duration::from_secs(1)).await;
    // Far more than the time allows.
    for _ in 0..100 {
        proxy.drop_reply_to("findAndModify");
    }
    let began = Instant::now();
    let outcome = app.try_acquire(&key("a"), &Aid::new()).await;
    assert_eq!(store_error_kind(outcome), StoreErrorKind::Unavailable);
    assert!(began.elapsed() < rig::BY_THE_DEADLINE, "{:?}", began.elapsed());
    assert!(proxy.passed("findAndModify") > 0, "carried out");
    eventually("nothing is left", async || {
        proxy.passed("delete") > 0 && count(&database).await == 0
    })
    .await;
}

/// Rule 7. A renewal whose caller has stopped waiting is not cut off either.
#[tokio::test]
async fn a_dropped_renewal_and_a_dropped_release_are_carried_out() {
    let Faulty { proxy, app, database, .. } = Faulty::new().await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    rig::age(&database, &key("a"), TTL / 2).await;
    let before = record(&database, &key("a")).await.unwrap();
    let ts = |record: &Document| -> DateTime { *record.get_datetime("ts").unwrap() };

    proxy.hold_request("update");
    tokio::select! {
        renewed = app.locks.renew(&lock.aid) => panic!("answered: {renewed:?}"),
        () = proxy.until_fired(1) => proxy.let_go(),
    }
    eventually("it is renewed", async || {
        ts(&record(&database, &key("a")).await.unwrap()) > ts(&before)
    })
    .await;

    proxy.hold_request("delete");
    tokio::select! {
        released = app.locks.release(&lock) => panic!("answered: {released:?}"),
        () = proxy.until_fired(2) => proxy.let_go(),
    }
    app.locks.shutdown().await;
    assert_eq!(count(&database).await, 0);
}

/// Rule 9. The reply is delayed, and the delay does not extend the holder's belief.
#[tokio::test]
async fn a_holders_belief_is_counted_from_before_the_request() {
    let Faulty { proxy, app, .. } = Faulty::new().await;
    let (alice, bob) = (Aid::new(), Aid::new());
    let claimed = async |document: usize, aid, command| {
        proxy.hold_reply_to(command);
        let key = key(&document.to_string());
        let (answer, executed) = answered_late(&proxy, app.try_acquire(&key, aid)).await;
        let (TryAcquire::Granted(lock) | TryAcquire::AlreadyMine(lock) | TryAcquire::Held(lock)) =
            answer.unwrap()
        else {
            panic!("an ordinary claim is never lost")
        };
        (lock.expires_at, executed)
    };
    let fresh = async |n| claimed(n, &alice, "findAndModify").await;
    counted_from_before("a fresh grant", fresh).await;
    counted_from_before("a grant by a command for several claims", async |n| {
        proxy.hold_reply_to("insert");
        let keys = (0..5).map(|it| key(&format!("{n} {it}")));
        let all = join_all(keys.map(async |key| app.granted(&key, &alice).await));
        let (all, executed) = answered_late(&proxy, all).await;
        (all.iter().map(|lock| lock.expires_at).max().expect("some"), executed)
    })
    .await;
    counted_from_before("a reentry", async |_| claimed(0, &alice, "findAndModify").await).await;
    counted_from_before("a refusal", async |_| claimed(0, &bob, "find").await).await;
    counted_from_before("a look", async |_| {
        proxy.hold_reply_to("find");
        let key = key("0");
        let (seen, executed) = answered_late(&proxy, app.locks.inspect(&key)).await;
        (seen.unwrap().unwrap().expires_at, executed)
    })
    .await;
}

/// Each attempt returns the end of the belief and the moment at which the command was executed.
/// On a busy machine the command may need a repetition, which begins later, or a background task may send the
/// command that is held. So one attempt of five has to be good; a belief that is counted from the reply never is.
async fn counted_from_before(verb: &str, attempt: impl AsyncFn(usize) -> (Instant, Instant)) {
    for n in 0..5 {
        let (expires_at, executed) = attempt(n).await;
        if expires_at <= executed + TTL {
            return;
        }
    }
    panic!("{verb}: counted from a later moment than its execution");
}

/// The outcome of an operation with a delayed reply, and a moment after the server carried it out.
async fn answered_late<T>(proxy: &Proxy, operation: impl Future<Output = T>) -> (T, Instant) {
    let faults = proxy.fired() + 1;
    let hold = async {
        proxy.until_fired(faults).await;
        let executed = Instant::now();
        sleep(Duration::from_millis(300)).await;
        proxy.let_go();
        executed
    };
    tokio::join!(operation, hold)
}

/// Half of rule 5: a contender that another session's lock refuses gets no error, whatever the lock.
#[tokio::test]
async fn contention_is_never_an_error() {
    let (app, database) = app().await;
    let lock = app.granted(&key("ours"), &Aid::new()).await;
    let foreign = doc! { "_id": "theirs", "ts": DateTime::now(), "aid": "x" };
    lock_records(&database).insert_one(foreign).await.unwrap();
    app.held(&key("ours")).await;
    app.held(&key("theirs")).await;
    assert_eq!(app.locks.renew(&Aid::new()).await.unwrap(), 0);
    let not_mine = Lock { aid: Aid::new(), ..lock };
    assert_eq!(app.locks.release(&not_mine).await.unwrap(), Released::AlreadyGone);
    let refused =
        crate::rig::app::break_on(&app.locks, &key("ours"), &actix_doclock::Actor::new("bob"))
            .await;
    assert!(matches!(refused, Err(LockError::BreakRefused { .. })), "{refused:?}");
}

/// Otherwise a process that stood still between the two would hold a lock that is over, or nearly over, when it is granted.
#[tokio::test]
async fn a_lock_is_not_dated_by_a_reading_of_the_clock_long_before_it_is_written() {
    const SHORT: Duration = Duration::from_secs(2);
    // A step on a record that is there; a command for several claims.
    for (held_up, claims) in [("update", 1), ("insert", 6)] {
        let Faulty { proxy, app, database, .. } = Faulty::new().await;
        let app = App::with(app.store.database(), |settings| settings.ttl(SHORT)).await;
        if claims == 1 {
            lock_records(&database).insert_one(doc! { "_id": "0" }).await.unwrap();
        }
        proxy.hold_request(held_up);
        let keys: Vec<_> = (0..claims).map(|n| key(&n.to_string())).collect();
        let began = Instant::now();
        let all = join_all(keys.iter().map(async |key| app.granted(key, &Aid::new()).await));
        let hold = async {
            proxy.until_fired(1).await;
            sleep(SHORT / 2).await;
            let hello = database.run_command(doc! { "hello": 1 }).await.unwrap();
            proxy.let_go();
            *hello.get_datetime("localTime").unwrap()
        };
        let (all, let_go) = tokio::join!(all, hold);
        assert!(all.iter().any(|lock| lock.expires_at > began + SHORT + SHORT / 4));
        let late = keys.iter().map(async |key| {
            let record = record(&database, key).await.unwrap();
            *record.get_datetime("ts").unwrap() >= let_go
        });
        // Of several claims, the first ones have commands of their own.
        let late = join_all(late).await.into_iter().filter(|it| *it).count();
        assert!(late > 0, "{held_up}");
    }
}
