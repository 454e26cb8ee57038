//! The database does not answer, or is gone. Each operation fails by the deadline and never claims to
//! know who holds a lock, and nothing is left behind when the database is back.

use std::time::{Duration, Instant};

use actix_doclock::store::verbs::*;
use actix_doclock::store::{Active, Claim, Deadline, Query, Removal, Renewed, Rules};
use actix_doclock::{
    Aid, Holder, Lock, LockError, LockKey, LockManager, Released, StoreError, StoreErrorKind,
    TryAcquire, store::Saved,
};
use futures_util::future::join_all;
use mongodb::Database;
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until, timeout};

use crate::rig;
use crate::rig::app::{
    App, WorkItem, count, eventually, key, put, record, store_error_kind, title, with_deadline,
};
use crate::rig::faulty::Faulty;
use crate::rig::mongod::Mongod;

const DEADLINE: Duration = Duration::from_secs(1);
/// More than any command is waited for, on any machine.
const BOUND: Duration = Duration::from_secs(120);

/// A server that the test may break, and an application server on it that waits for [`DEADLINE`]. `other`
/// waits long enough for what must succeed on a busy machine.
struct Breakable {
    server: Mongod,
    database: Database,
    app: App,
    other: App,
}

impl Breakable {
    async fn start() -> Self {
        let server = Mongod::start_replica_set().await;
        let database = rig::patient_client(&server.uri()).await.database(&rig::fresh_name());
        let app = App::with(&database, with_deadline(DEADLINE)).await;
        let other = App::on(&database).await;
        Self { server, database, app, other }
    }
}

/// Asserts that the outcome is reported as unknown in time.
async fn unknown_in_time<T: std::fmt::Debug>(
    verb: &str,
    operation: impl Future<Output = Result<T, LockError>>,
) {
    let began = Instant::now();
    let outcome = operation.await;
    assert!(began.elapsed() < rig::BY_THE_DEADLINE, "{verb} took {:?}", began.elapsed());
    assert_eq!(store_error_kind(outcome), StoreErrorKind::Unavailable, "{verb}");
}

/// Calls every operation while the database does not answer. `alice` holds `a`, and `free` is free.
async fn everything_is_unknown(app: &App, alice: &Aid, released: &Lock) {
    let bob = Aid::new();
    let (a, free) = (key("a"), key("free"));
    let operations = async {
        tokio::join!(
            unknown_in_time("acquiring a held lock", app.try_acquire(&a, &bob)),
            unknown_in_time("acquiring a free lock", app.try_acquire(&free, &bob)),
            unknown_in_time("reentry", app.try_acquire(&a, alice)),
            unknown_in_time("renewing", app.locks.renew(alice)),
            unknown_in_time("releasing", app.locks.release(released)),
            unknown_in_time("ending a session", app.locks.end_session(&bob)),
            unknown_in_time("inspecting", app.locks.inspect(&a)),
            unknown_in_time("listing", app.locks.list()),
        )
    };
    operations.await;
}

/// Saves repeatedly, because a renewal that was given up may still be under way and conflict with one
/// attempt.
async fn saved(app: &App, lock: &Lock) {
    eventually("the document is saved", async || {
        matches!(app.save(lock, "new").await, Ok(Saved::Saved))
    })
    .await;
}

#[tokio::test]
async fn a_paused_primary_is_an_error_by_the_deadline_and_leaves_nothing_behind() {
    let Breakable { server, database, app, other } = Breakable::start().await;
    put(&database, "a", "old").await;
    let lock = other.granted(&key("a"), &Aid::new()).await;
    let released = other.granted(&key("to be released"), &Aid::new()).await;

    server.pause();
    everything_is_unknown(&app, &lock.aid, &released).await;
    server.resume();

    eventually("the release arrives, and the acquire is undone", async || {
        record(&database, &key("free")).await.is_none()
            && record(&database, &key("to be released")).await.is_none()
    })
    .await;
    app.locks.shutdown().await;
    assert_eq!(count(&database).await, 1);
    assert_eq!(other.already_mine(&key("a"), &lock.aid).await.token, lock.token);
    saved(&other, &lock).await;
    assert_eq!(title(&database, "a").await, "new");
}

#[tokio::test]
async fn a_killed_server_is_an_error_by_the_deadline_and_has_kept_the_locks() {
    let Breakable { server, database, app, other } = Breakable::start().await;
    put(&database, "a", "old").await;
    let lock = other.granted(&key("a"), &Aid::new()).await;
    let released = other.granted(&key("to be released"), &Aid::new()).await;

    server.kill9();
    everything_is_unknown(&app, &lock.aid, &released).await;
    server.restart().await;

    eventually("the server answers again", async || app.locks.inspect(&key("a")).await.is_ok())
        .await;
    assert_eq!(other.held(&key("a")).await.token, lock.token);
    assert_eq!(other.already_mine(&key("a"), &lock.aid).await.token, lock.token);
    saved(&other, &lock).await;
    other.locks.release(&released).await.unwrap();
    // If a late attempt got through to the new process, its task has undone it.
    eventually("nothing else is left", async || count(&database).await == 1).await;
    other.granted(&key("free"), &Aid::new()).await;
}

/// An answer before the kill means that the lock is on disk: the write concern waits for the journal.
#[tokio::test]
async fn a_granted_lock_survives_a_crash_of_the_server_at_that_moment() {
    let Breakable { server, database, other, .. } = Breakable::start().await;
    for round in 0..3 {
        let key = key(&format!("{round}"));
        let lock = other.granted(&key, &Aid::new()).await;
        server.kill9();
        server.restart().await;
        let later = App::on(&rig::client(&server.uri()).await.database(database.name())).await;
        assert_eq!(later.held(&key).await.token, lock.token);
    }
}

/// Starts to acquire `a`, and drops the future once the fault has taken place.
async fn abandon_acquire(faulty: &Faulty, aid: &Aid) {
    let a = key("a");
    tokio::select! {
        answer = faulty.app.try_acquire(&a, aid) => panic!("answered: {answer:?}"),
        () = faulty.proxy.until_fired(1) => {}
    }
}

/// The shutdown waits for the cleanup of the abandoned acquire.
async fn nothing_is_left_after_shutdown(faulty: &Faulty) {
    // Slows the release down, so that a shutdown that does not wait for it is noticed.
    for _ in 0..3 {
        faulty.proxy.drop_request("delete");
    }
    tokio::join!(
        faulty.app.locks.shutdown(),
        // The shutdown begins while the acquire is still under way.
        async { faulty.proxy.let_go() },
    );
    assert_eq!(faulty.proxy.passed("findAndModify"), 1, "it was carried out");
    assert_eq!(count(&faulty.database).await, 0, "and undone before the shutdown ended");
    faulty.assert_fired(4);
}

#[tokio::test]
async fn an_acquire_dropped_before_its_request_arrives_leaves_nothing_behind() {
    let faulty = Faulty::new().await;
    faulty.proxy.hold_request("findAndModify");
    abandon_acquire(&faulty, &Aid::new()).await;
    assert_eq!(count(&faulty.database).await, 0, "not there yet");
    faulty.proxy.let_go();
    eventually("the grant arrives", async || faulty.proxy.passed("findAndModify") == 1).await;
    eventually("it is given back", async || faulty.proxy.passed("delete") == 1).await;
    eventually("nothing is left", async || count(&faulty.database).await == 0).await;
}

#[tokio::test]
async fn an_acquire_dropped_before_its_reply_arrives_leaves_nothing_behind() {
    let faulty = Faulty::new().await;
    faulty.proxy.hold_reply_to("findAndModify");
    abandon_acquire(&faulty, &Aid::new()).await;
    assert_eq!(count(&faulty.database).await, 1, "granted");
    faulty.proxy.let_go();
    eventually("nothing is left", async || count(&faulty.database).await == 0).await;
}

#[tokio::test]
async fn a_shutdown_waits_until_a_dropped_acquire_is_undone() {
    let faulty = Faulty::new().await;
    faulty.proxy.hold_request("findAndModify");
    abandon_acquire(&faulty, &Aid::new()).await;
    nothing_is_left_after_shutdown(&faulty).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_waits_on_any_thread_until_a_dropped_acquire_is_undone() {
    let faulty = Faulty::new().await;
    faulty.proxy.hold_reply_to("findAndModify");
    abandon_acquire(&faulty, &Aid::new()).await;
    nothing_is_left_after_shutdown(&faulty).await;
}

/// Two requests of one session: the request that took the lock is dropped, but the other one was told
/// that the session holds it.
#[tokio::test]
async fn a_lock_that_another_request_was_told_of_is_not_given_back() {
    let faulty = Faulty::new().await;
    let (a, alice) = (key("a"), Aid::new());
    faulty.proxy.hold_reply_to("findAndModify");
    abandon_acquire(&faulty, &alice).await;
    let lock = faulty.other.already_mine(&a, &alice).await;
    faulty.proxy.let_go();
    eventually("the release is tried", async || faulty.proxy.passed("delete") == 1).await;
    faulty.app.locks.shutdown().await;
    assert_eq!(faulty.other.already_mine(&a, &alice).await.token, lock.token);
}

/// The connection is open, but no bytes come through, so only a deadline can end the wait.
#[tokio::test]
async fn a_network_that_carries_nothing_is_an_error_by_the_deadline() {
    let faulty = Faulty::with_a_patient_driver(DEADLINE).await;
    let lock = faulty.other.granted(&key("a"), &Aid::new()).await;
    let released = faulty.other.granted(&key("to be released"), &Aid::new()).await;

    faulty.proxy.blackhole();
    everything_is_unknown(&faulty.app, &lock.aid, &released).await;
    assert!(faulty.proxy.fired() > 0, "requests were withheld");
    faulty.proxy.heal();

    eventually("only the lock that was held before is left", async || {
        count(&faulty.database).await == 1
    })
    .await;
    assert_eq!(faulty.other.held(&key("a")).await.token, lock.token);
}

/// A pause shorter than the deadline only costs time.
#[tokio::test]
async fn after_a_short_pause_the_request_under_way_is_answered() {
    let Breakable { server, other, .. } = Breakable::start().await;
    server.pause();
    let (aid, a) = (Aid::new(), key("a"));
    let acquire = other.try_acquire(&a, &aid);
    let resume = async {
        sleep(Duration::from_millis(300)).await;
        server.resume();
    };
    let (answer, ()) = tokio::join!(acquire, resume);
    assert!(matches!(answer.unwrap(), TryAcquire::Granted(_)));
}

/// A store that carries out nothing while its process is paused, and then finds no primary for a moment.
struct PausedProcess {
    goes_on: tokio::time::Instant,
    given_back: watch::Sender<bool>,
}

fn no_primary<T>() -> Result<T, StoreError> {
    Err(StoreError::new(StoreErrorKind::Unavailable, "there is no primary"))
}

impl Locks for PausedProcess {
    async fn prepare(&self, _: &str, _: &Rules, _: Deadline) -> Result<(), StoreError> {
        Ok(())
    }
    async fn try_acquire(
        &self,
        _: &LockKey,
        _: &Claim,
        _: Deadline,
    ) -> Result<TryAcquire, StoreError> {
        no_primary()
    }
    async fn renew(
        &self,
        _: &str,
        _: &[Active],
        _: Duration,
        _: Deadline,
    ) -> Result<Renewed, StoreError> {
        no_primary()
    }
    async fn remove_lock(&self, _: Removal<'_>, _: Deadline) -> Result<Released, StoreError> {
        sleep_until(self.goes_on).await;
        if self.goes_on.elapsed() < Duration::from_secs(1) {
            return no_primary();
        }
        self.given_back.send_replace(true);
        Ok(Released::Released)
    }
    async fn locks(
        &self,
        _: &str,
        _: Query<'_>,
        _: usize,
        _: Deadline,
    ) -> Result<Vec<Lock>, StoreError> {
        no_primary()
    }
}

impl Documents for PausedProcess {}
impl Sessions for PausedProcess {}
impl Servers for PausedProcess {}

/// The claim may have been granted before the pause, and another page of the session may renew the lock meanwhile.
#[tokio::test(start_paused = true)]
async fn after_a_pause_longer_than_the_ttl_an_unwanted_lock_is_still_given_back() {
    let ttl = Duration::from_secs(60);
    let (given_back, mut is_given_back) = watch::channel(false);
    let goes_on = tokio::time::Instant::now() + 3 * ttl;
    let locks = LockManager::builder(PausedProcess { goes_on, given_back }).ttl(ttl);
    let locks = locks.deadline(DEADLINE).without_reaper().build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    let unknown = locks.lock_for_session(&key("a"), &Aid::new(), &Holder::new("alice")).await;
    assert_eq!(store_error_kind(unknown), StoreErrorKind::Unavailable);
    let in_time = timeout(10 * ttl, is_given_back.wait_for(|it| *it)).await;
    in_time.expect("it is given back").unwrap();
}

/// All connections of the pool break without a word, as behind a firewall that has forgotten them: nobody answers, and
/// TCP reports nothing for a quarter of an hour.
#[tokio::test(flavor = "multi_thread")]
async fn commands_on_connections_that_died_without_a_word_are_given_up() {
    /// The connections of the driver's default pool.
    const POOL: usize = 10;
    let given_up = ["commitTransaction", "find", "aggregate"].map(async |command| {
        let faulty = Faulty::with_deadline(DEADLINE).await;
        put(&faulty.database, "a", "old").await;
        let lock = faulty.other.granted(&key("a"), &Aid::new()).await;
        (0..POOL).for_each(|_| faulty.proxy.hold_request(command));
        let (app, store) = (&faulty.app, &faulty.app.store);
        let call = async || {
            let until = Deadline::at(Instant::now() + DEADLINE);
            match command {
                "find" => store.load(&lock.key, until).await.map(drop),
                "aggregate" => store.confirm(&lock.key, &lock.aid, false, until).await.map(drop),
                _ => app.save(&lock, "new").await.map(drop),
            }
        };
        let calls = timeout(BOUND, join_all((0..POOL).map(|_| call()))).await;
        let calls = calls.unwrap_or_else(|_| panic!("a {command} waits for ever"));
        assert!(calls.iter().all(Result::is_err), "{command}: {calls:?}");
        eventually(command, async || call().await.is_ok()).await;
    });
    join_all(given_up).await;
}
