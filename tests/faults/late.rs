//! Late answers, and connections that are all in use. For other losses on the way, see
//! tests/suite/lost_replies.rs and tests/suite/outage.rs.

use std::time::{Duration, Instant};

use actix_doclock::store::verbs::*;
use actix_doclock::{Aid, Holder, LockKey, Lockable, Mode, TryAcquire, store::Claim};
use mongodb::bson::{Document, doc};
use tokio::time::sleep;

use crate::application::desk::Desk;
use crate::application::{Fenced, Plain, Server, Settings};
use crate::check::Clocks;
use crate::fleet::Fleet;
use crate::history::Event;
use crate::paused::acquired;
use crate::rig::mongod::{Mongod, strict_replica_set};
use crate::rig::proxy::Proxy;

/// Enough for a command that is not held up, however slow the machine.
const DEADLINE: Duration = Duration::from_secs(2);

struct Late {
    proxy: Proxy,
    fleet: Fleet,
    app: Server,
    other: Server,
}

impl Late {
    async fn new(options: &str, settings: Settings) -> Self {
        let server = strict_replica_set().await;
        let proxy = Proxy::start(server.port());
        let fleet = Fleet::new(&server.uri()).await.with(settings);
        fleet.put_documents(1).await;
        let app = fleet.inside_on(&format!("{}{options}", proxy.uri()), "app").await;
        let other = fleet.inside("other").await;
        Self { proxy, fleet, app, other }
    }

    async fn is_good(&self) {
        let report = self.fleet.check(Clocks::Agree).await;
        assert_eq!(report.violations, [""; 0]);
    }
}

fn settings(deadline: Duration) -> Settings {
    Settings { deadline, reaper: None, ..Settings::default() }
}

fn document() -> LockKey {
    LockKey::new(Fenced::COLLECTION, "0").unwrap()
}

/// The time on the way counts: the holder believes from before it asked, not from the answer on.
#[tokio::test]
async fn a_grant_that_arrives_late_is_believed_for_less_time() {
    let late = Late::new("", settings(Duration::from_secs(10))).await;
    late.proxy.hold_reply_to("findAndModify");
    let desk = Desk::new(&late.app);
    let (held, on_its_way) = (document(), Duration::from_millis(1_000));
    let (lock, ()) = tokio::join!(desk.acquire(&held), async {
        late.proxy.until_fired(1).await;
        sleep(on_its_way).await;
        late.proxy.let_go();
    });
    let lock = lock.expect("granted");
    assert!(lock.expires_in() + on_its_way <= late.app.settings.ttl, "{:?}", lock.expires_in());
    // The next holder is let in after that.
    let next = acquired(&Desk::new(&late.other), &held).await;
    assert!(lock.expires_at <= Instant::now(), "{next:?}");
    late.is_good().await;
}

/// Its caller has stopped waiting, so the lock is given back long before it expires.
#[tokio::test]
async fn a_grant_that_arrives_after_the_deadline_is_given_back() {
    let ttl = Duration::from_secs(600);
    let late = Late::new("", Settings { ttl, ..settings(DEADLINE) }).await;
    late.proxy.hold_reply_to("findAndModify");
    let desk = Desk::new(&late.app);
    assert!(desk.acquire(&document()).await.is_none());
    assert!(!desk.is_certain(), "an outage is not an answer");
    late.proxy.until_fired(1).await;
    late.proxy.let_go();
    acquired(&Desk::new(&late.other), &document()).await;
    late.is_good().await;
}

/// The driver does not help here: the crate itself makes the second attempt.
#[tokio::test]
async fn a_grant_whose_answer_is_lost_is_found_by_the_next_attempt() {
    let late = Late::new("&retryWrites=false", settings(Duration::from_secs(10))).await;
    late.proxy.drop_reply_to("findAndModify");
    let (aid, holder) = (Aid::new(), Holder::new("alice"));
    let answer = late.app.locks.lock_for_session(&document(), &aid, &holder).await.unwrap();
    assert!(matches!(answer, TryAcquire::Granted(_)), "its own grant is not news: {answer:?}");
    assert_eq!(late.proxy.fired(), 1);
    // More than one other attempt if the machine is busy.
    assert!(late.proxy.passed("findAndModify") >= 2);
}

/// By then the lock has been released, and another session has saved.
#[tokio::test]
async fn an_attempt_that_arrives_after_a_later_one_was_answered_overwrites_nothing() {
    let ttl = Duration::from_secs(15);
    let late = Late::new("&retryWrites=false", Settings { ttl, ..settings(ttl) }).await;
    let key = LockKey::new(Plain::COLLECTION, "0").unwrap();
    let (desk, other) = (Desk::new(&late.app), Desk::new(&late.other));
    late.proxy.drop_request("findAndModify");
    let stale = desk.acquire(&key).await.expect("a free document");
    let loaded = desk.load(&key).await.unwrap();
    desk.release(&stale).await;
    let lock = other.acquire(&key).await.expect("free again");
    assert!(other.save(&lock, other.load(&key).await.unwrap()).await);
    other.release(&lock).await;

    // As if this attempt had only been held up on its way.
    let first = Claim {
        aid: stale.aid.clone(),
        token: stale.token.unwrap().first_attempt(),
        tab: None,
        page: None,
        holder: Holder::new("late"),
        taken: None,
        mode: Mode::Exclusive,
        ttl: Duration::from_secs(600),
        max_hold: None,
        turn: None,
        upgrades: None,
    };
    let _ = late.other.store.try_acquire(&key, &first, Deadline::NONE).await.unwrap();
    assert!(!desk.save(&stale, loaded).await, "overwritten");
    assert_eq!(late.proxy.fired(), 1);
    // A lock that was granted to nobody is gone long before it would expire.
    acquired(&other, &key).await;
    assert_eq!(other.load(&key).await.unwrap().n, 1);
}

/// By then the session has released the lock on another server and taken it again.
#[tokio::test]
async fn a_release_that_arrives_late_frees_no_newer_lock() {
    let ttl = Duration::from_secs(600);
    let late = Late::new("", Settings { ttl, ..settings(DEADLINE) }).await;
    let key = LockKey::new(Plain::COLLECTION, "0").unwrap();
    let desk = Desk::new(&late.app);
    let old = desk.acquire(&key).await.expect("a free document");
    late.proxy.hold_request("delete");
    desk.release(&old).await;
    assert!(!desk.is_certain(), "no answer in time");
    let moved = desk.moved_to(&late.other);
    moved.release(&old).await;
    let new = moved.acquire(&key).await.expect("free again");
    assert_ne!(new.token, old.token);
    assert_eq!(late.proxy.passed("delete"), 0);
    late.proxy.let_go();
    late.app.locks.shutdown().await;
    assert_eq!((late.proxy.fired(), late.proxy.passed("delete")), (1, 1));
    let lock = late.other.locks.inspect(&key).await.unwrap().expect("still locked");
    assert_eq!(lock.token, new.token);
    late.is_good().await;
}

/// A save, a renewal and a release that are answered too late have happened once or not at all.
#[tokio::test]
async fn an_operation_answered_after_the_deadline_has_an_unknown_outcome() {
    let ttl = Duration::from_secs(600);
    let late = Late::new("", Settings { ttl, ..settings(DEADLINE) }).await;
    let (desk, key) = (Desk::new(&late.app), LockKey::new(Plain::COLLECTION, "0").unwrap());
    let lock = desk.acquire(&key).await.expect("a free document");
    let loaded = desk.load(&key).await.unwrap();

    late.proxy.hold_reply_to("commitTransaction");
    let (saved, ()) = tokio::join!(desk.save(&lock, loaded), async {
        late.proxy.until_fired(1).await;
        sleep(2 * late.app.settings.deadline).await;
        late.proxy.let_go();
    });
    assert!(saved, "the store itself waits for the commit; the manager would not have");
    late.proxy.hold_reply_to("update");
    desk.renew(&lock).await;
    assert!(!desk.is_certain(), "no answer in time");
    late.proxy.let_go();
    late.proxy.hold_reply_to("delete");
    desk.release(&lock).await;
    assert_eq!(late.proxy.fired(), 3);
    late.proxy.let_go();

    let next = Desk::new(&late.other);
    let lock = acquired(&next, &key).await;
    let loaded = next.load(&key).await.unwrap();
    assert_eq!(loaded.n, 1);
    assert!(next.save(&lock, loaded).await);
    late.is_good().await;
}

/// The only connection waits for an answer that does not come.
#[tokio::test]
async fn without_a_free_connection_all_verbs_answer_in_time_and_leave_nothing_behind() {
    let ttl = Duration::from_secs(600);
    let settings = Settings { ttl, ..settings(DEADLINE) };
    let late = Late::new("&maxPoolSize=1", settings).await;
    let (key, free) = (document(), LockKey::new(Fenced::COLLECTION, "free").unwrap());
    let first = Desk::new(&late.app);
    let lock = first.acquire(&key).await.expect("a free document");
    late.proxy.hold_reply_to("find");
    let holds_the_connection = {
        let (app, key) = (late.app.clone(), key.clone());
        tokio::spawn(async move { app.locks.inspect(&key).await })
    };
    late.proxy.until_fired(1).await;
    let began = Instant::now();
    let desk = Desk::new(&late.app);
    assert!(desk.acquire(&free).await.is_none());
    assert!(!desk.is_certain(), "an outage is not an answer");
    assert!(late.app.locks.renew(&lock.aid).await.is_err());
    first.release(&lock).await;
    assert!(!first.is_certain(), "no answer in time");
    let most = 3 * DEADLINE + Duration::from_secs(15);
    assert!(began.elapsed() < most, "answered after {:?}", began.elapsed());
    assert!(holds_the_connection.await.unwrap().is_err(), "in time");
    late.proxy.let_go();
    // The acquire that got its connection late is given back, and the release gets through.
    for key in [&key, &free] {
        acquired(&Desk::new(&late.other), key).await;
    }
    assert!(late.fleet.lines().iter().any(|line| matches!(line.event, Event::Unknown { .. })));
    late.is_good().await;
}

/// The server fixes the time of a command when the command begins. A command that has to wait there
/// must not shorten a lease that was renewed in the meantime.
#[tokio::test]
async fn a_command_that_was_held_up_does_not_undo_a_later_renewal() {
    // Commands that meet an open transaction wait at this point.
    const FAIL_POINT: &str = "setYieldAllLocksHang";
    let server = Mongod::start_replica_set().await;
    let ttl = Duration::from_secs(20);
    let settings = Settings { ttl, ..settings(Duration::from_secs(60)) };
    let fleet = Fleet::new(&server.uri()).await.with(settings);
    fleet.put_documents(1).await;
    let (desk, key) = (Desk::new(&fleet.inside("app").await), document());
    let lock = desk.acquire(&key).await.expect("a free document");

    let locks = fleet.database.collection::<Document>("fenced.lock");
    let mut in_the_way = fleet.database.client().start_session().await.unwrap();
    in_the_way.start_transaction().await.unwrap();
    let touch = doc! { "$set": { "touched": true } };
    locks.update_one(doc! { "_id": "0" }, touch).session(&mut in_the_way).await.unwrap();
    let data = doc! { "namespace": format!("{}.fenced.lock", fleet.database.name()) };
    let fail = doc! { "configureFailPoint": FAIL_POINT, "mode": "alwaysOn", "data": data };
    let (again, ()) = tokio::join!(desk.acquire(&key), async {
        // The first attempts have short time limits. An attempt has as much time as its caller has waited.
        sleep(ttl / 4).await;
        server.admin(fail).await;
        let wait = doc! { "waitForFailPoint": FAIL_POINT, "timesEntered": 1, "maxTimeMS": 30_000 };
        server.admin(wait).await;
        in_the_way.abort_transaction().await.unwrap();
        sleep(ttl / 16).await;
        // On a slow machine the renewal may yield too, and waits there until it is released.
        tokio::join!(desk.renew(&lock), async {
            sleep(ttl / 32).await;
            server.admin(doc! { "configureFailPoint": FAIL_POINT, "mode": "off" }).await;
        });
    });
    assert_eq!(again.expect("the session's own lock").token, lock.token);
    acquired(&Desk::new(&fleet.inside("other").await), &key).await;
    let report = fleet.check(Clocks::Agree).await;
    assert_eq!(report.violations, [""; 0]);
}
