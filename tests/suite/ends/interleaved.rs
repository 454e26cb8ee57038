//! Two operations on one session, on two servers or one. The first is held up before its first command,
//! before its second, and so on, and the other one is carried out in between.

use actix_doclock::LockError;
use doclock_conformance::Shorthand;
use tokio::task::JoinHandle;

use super::*;

type Operation = fn(App, Aid) -> JoinHandle<Result<(), LockError>>;

fn sweep(app: App, _: Aid) -> JoinHandle<Result<(), LockError>> {
    tokio::spawn(async move { app.locks.sweep().await.map(drop) })
}

fn log_out(app: App, aid: Aid) -> JoinHandle<Result<(), LockError>> {
    tokio::spawn(async move { app.locks.end_session(&aid).await.map(drop) })
}

/// Checks the announcements of the session at each of these moments.
async fn for_each_moment(
    held_up: Operation,
    in_between: Operation,
    leases_pass: bool,
    check: impl AsyncFn(usize, &App, &Aid, Vec<SessionEnded>),
) {
    for commands in 0.. {
        let faulty = Faulty::new().await;
        let alice = sessions(&faulty.other, 1).await.remove(0);
        age_all(&faulty.database, TTL).await;
        faulty.proxy.hold_any_request(commands);
        let first = held_up(faulty.app.clone(), alice.clone());
        while faulty.proxy.fired() == 0 && !first.is_finished() {
            sleep(Duration::from_millis(1)).await;
        }
        if first.is_finished() {
            assert!(commands >= 4, "it has more commands than that");
            return;
        }
        if leases_pass {
            let_leases_pass(&faulty.database).await;
        }
        in_between(faulty.other.clone(), alice.clone()).await.unwrap().unwrap();
        faulty.proxy.let_go();
        first.await.unwrap().unwrap();
        // One of the two may have left work to the other, which was still busy with it.
        let_leases_pass(&faulty.database).await;
        faulty.other.locks.sweep().await.unwrap();

        assert_eq!(count(&faulty.database).await, 0, "before command {commands}");
        let heard = Heard::default();
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
