//! Two operations on one session, on two servers or one. The first is held up before its first command,
//! before its second, and so on, and the other one is carried out in between.

use actix_doclock::{LockError, LockKey};
use tokio::task::JoinHandle;

use super::*;

type Operation = fn(App, Aid) -> JoinHandle<Result<(), LockError>>;

fn sweep(app: App, _: Aid) -> JoinHandle<Result<(), LockError>> {
    tokio::spawn(async move { app.locks.sweep().await.map(drop) })
}

fn log_out(app: App, aid: Aid) -> JoinHandle<Result<(), LockError>> {
    tokio::spawn(async move { app.locks.end_session(&aid).await.map(drop) })
}

/// Another session takes over the first of the two expired locks, as a waiter does when it expires, and keeps it.
fn take_over(app: App, _: Aid) -> JoinHandle<Result<(), LockError>> {
    tokio::spawn(async move { app.try_acquire(&key("0 a"), &Aid::new()).await.map(drop) })
}

/// The same, but gives the lock back.
fn take_over_and_release(app: App, _: Aid) -> JoinHandle<Result<(), LockError>> {
    tokio::spawn(async move {
        let taken = app.try_acquire(&key("0 a"), &Aid::new()).await?;
        app.locks.release(&LockError::unless_granted(taken)?).await.map(drop)
    })
}

/// Checks the announcements of the session at each of these moments.
async fn for_each_moment(
    held_up: Operation,
    in_between: Operation,
    leases_pass: bool,
    check: impl AsyncFn(usize, &App, &Aid, Vec<SessionEnded>),
) {
    moments(held_up, in_between, leases_pass, 4, false, check).await;
}

/// `least` is the number of commands that the first operation has at least. With `tells`, the listener is told of what
/// the second operation has found before the first one goes on.
async fn moments(
    held_up: Operation,
    in_between: Operation,
    leases_pass: bool,
    least: usize,
    tells: bool,
    check: impl AsyncFn(usize, &App, &Aid, Vec<SessionEnded>),
) {
    for commands in 0.. {
        let faulty = Faulty::new().await;
        let heard = Heard::default();
        let alice = sessions(&faulty.other, 1).await.remove(0);
        age_all(&faulty.database, TTL).await;
        faulty.proxy.hold_any_request(commands);
        let first = held_up(faulty.app.clone(), alice.clone());
        while faulty.proxy.fired() == 0 && !first.is_finished() {
            sleep(Duration::from_millis(1)).await;
        }
        if first.is_finished() {
            assert!(commands >= least, "it has more commands than that");
            return;
        }
        if leases_pass {
            let_leases_pass(&faulty.database).await;
        }
        in_between(faulty.other.clone(), alice.clone()).await.unwrap().unwrap();
        if tells {
            let listening = App::with(&faulty.database, heard.listening()).await;
            nothing_waits_to_be_told_to(&listening, &faulty.database).await;
            listening.locks.shutdown().await;
        }
        faulty.proxy.let_go();
        first.await.unwrap().unwrap();
        // One of the two may have left work to the other, which was still busy with it.
        let_leases_pass(&faulty.database).await;
        faulty.other.locks.sweep().await.unwrap();

        let records = lock_records(&faulty.database);
        let left = records.count_documents(doc! { "aid": alice.as_str() }).await.unwrap();
        assert_eq!(left, 0, "before command {commands}");
        let listening = App::with(&faulty.database, heard.listening()).await;
        nothing_is_left_to_announce(&faulty.database).await;
        listening.locks.shutdown().await;
        check(commands, &faulty.other, &alice, heard.of(&alice)).await;
    }
}

#[tokio::test]
async fn a_logout_during_a_sweep_is_remembered_and_announced() {
    for_each_moment(sweep, log_out, false, a_logout_is_remembered_and_announced).await;
}

#[tokio::test]
async fn a_logout_that_a_sweep_interrupts_is_remembered_and_announced() {
    for_each_moment(log_out, sweep, false, a_logout_is_remembered_and_announced).await;
}

/// The expiry may have been announced before, if it was complete by then.
async fn a_logout_is_remembered_and_announced(
    commands: usize,
    app: &App,
    alice: &Aid,
    heard: Vec<SessionEnded>,
) {
    let told = format!("before command {commands}: {heard:?}");
    assert!(app.store.session_ended(alice).await.unwrap().is_some(), "{told}");
    let last = heard.last().unwrap_or_else(|| panic!("{told}"));
    assert_eq!(
        (last.reason, last.for_good, heard.len()),
        (EndReason::LoggedOut, true, 1),
        "{told}"
    );
}

#[tokio::test]
async fn two_sweeps_announce_a_session_once_with_all_its_locks() {
    for_each_moment(sweep, sweep, false, an_idle_session_is_announced_once).await;
}

/// The first sweep is stopped for so long that the second takes it for dead.
#[tokio::test]
async fn a_sweep_that_wakes_up_after_its_lease_does_no_harm() {
    for_each_moment(sweep, sweep, true, an_idle_session_is_announced_once).await;
}

async fn an_idle_session_is_announced_once(
    commands: usize,
    _: &App,
    _: &Aid,
    heard: Vec<SessionEnded>,
) {
    let [ended] = &heard[..] else { panic!("before command {commands}: {heard:?}") };
    assert_eq!((ended.locks.len(), ended.repeated), (2, false), "before command {commands}");
}

/// The locks of the session in these announcements, each as often as it was announced.
fn told(heard: &[SessionEnded]) -> Vec<LockKey> {
    let mut told: Vec<_> = heard.iter().flat_map(|ended| ended.locks.clone()).collect();
    told.sort();
    told
}

async fn an_idle_session_is_one_end(
    commands: usize,
    app: &App,
    alice: &Aid,
    heard: Vec<SessionEnded>,
) {
    let why = format!("before command {commands}: {heard:?}");
    assert_eq!(heard.len(), 1, "{why}");
    assert_eq!(told(&heard), [key("0 a"), key("0 b")], "{why}");
    let last = app.store.last_end(alice).await.unwrap().expect("its end is remembered");
    assert_eq!((last.reason, last.for_good), (heard[0].reason, heard[0].for_good), "{why}");
}

#[tokio::test]
async fn a_takeover_during_a_sweep_leaves_one_end_with_all_locks() {
    for taken in [take_over as Operation, take_over_and_release] {
        moments(sweep, taken, false, 4, false, an_idle_session_is_one_end).await;
    }
}

#[tokio::test]
async fn a_sweep_during_a_takeover_leaves_one_end_with_all_locks_whether_it_is_told_before_or_after()
 {
    for tells in [false, true] {
        for taken in [take_over as Operation, take_over_and_release] {
            moments(taken, sweep, false, 2, tells, an_idle_session_is_one_end).await;
        }
    }
}

/// What the second sweep has found was told before it could claim the end.
#[tokio::test]
async fn a_sweep_that_comes_too_late_tells_nothing_again() {
    moments(sweep, sweep, false, 4, true, an_idle_session_is_one_end).await;
}

#[tokio::test]
async fn a_takeover_during_a_logout_leaves_one_end_with_all_locks() {
    for taken in [take_over as Operation, take_over_and_release] {
        moments(log_out, taken, false, 4, false, an_idle_session_is_one_end).await;
    }
}

#[tokio::test]
async fn a_logout_during_a_takeover_leaves_one_end_with_all_locks_whether_it_is_told_before_or_after()
 {
    for tells in [false, true] {
        for taken in [take_over as Operation, take_over_and_release] {
            moments(taken, log_out, false, 2, tells, an_idle_session_is_one_end).await;
        }
    }
}

/// A server began the end of an idle session and died, and the session has no expired lock any more.
#[tokio::test]
async fn an_end_that_two_sweeps_withdraw_at_once_is_no_end() {
    for commands in 0.. {
        let (faulty, alice) = (Faulty::new().await, Aid::new());
        let ended: Collection<Document> = faulty.database.collection("doclock.ended");
        let begun = doc! {
            "_id": alice.as_str(), "ts": DateTime::now(), "reason": "expired", "silent": true,
            "event": Uuid::new_v4().to_string(), "step": "release",
            "by": Uuid::new_v4().to_string(), "lease": DateTime::from_millis(0),
        };
        ended.insert_one(begun).await.unwrap();
        faulty.proxy.hold_any_request(commands);
        let first = sweep(faulty.app.clone(), alice.clone());
        while faulty.proxy.fired() == 0 && !first.is_finished() {
            sleep(Duration::from_millis(1)).await;
        }
        if first.is_finished() {
            assert!(commands >= 4, "it has more commands than that");
            return;
        }
        let_leases_pass(&faulty.database).await;
        faulty.other.locks.sweep().await.unwrap();
        faulty.proxy.let_go();
        first.await.unwrap().unwrap();
        let_leases_pass(&faulty.database).await;
        faulty.other.locks.sweep().await.unwrap();
        let left = ended.find_one(doc! {}).await.unwrap();
        assert_eq!(left, None, "before command {commands}");
        assert_eq!(faulty.other.store.last_end(&alice).await.unwrap(), None);
    }
}

/// As a server of an earlier version may have left it behind.
#[tokio::test]
async fn a_record_without_a_date_and_a_reason_is_no_end() {
    let database = replica_set().await;
    let (app, alice) = (App::on(&database).await, Aid::new());
    let ended: Collection<Document> = database.collection("doclock.ended");
    ended.insert_one(doc! { "_id": alice.as_str() }).await.unwrap();
    assert_eq!(app.store.last_end(&alice).await.unwrap(), None);
}

/// The server that has ended the session may not have given its news free yet, and wakes only its own listeners.
async fn nothing_waits_to_be_told_to(listening: &App, database: &Database) {
    let ended: Collection<Document> = database.collection("doclock.ended");
    eventually("all is told", async || {
        listening.locks.sweep().await.unwrap();
        ended.find_one(doc! { "step": "announce" }).await.unwrap().is_none()
    })
    .await;
}
