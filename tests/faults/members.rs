//! Faults of the replica set, and of application servers, under load.

use std::slice;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use actix_doclock::{LockKey, Lockable};
use doclock_conformance::Shorthand;
use mongodb::bson::{Document, doc};
use mongodb::options::{Acknowledgment, WriteConcern};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{sleep, timeout};

use crate::application::desk::Desk;
use crate::application::{Plain, Settings};
use crate::check::Clocks;
use crate::fleet::{Fleet, PATIENCE};
use crate::nemesis::{self, ALL};
use crate::rig::replica_set::ReplicaSet;
use crate::rig::share;
use crate::round;

/// Three members. One test at a time uses them, and leaves all of them running.
pub(crate) async fn shared_set() -> (&'static ReplicaSet, MutexGuard<'static, ()>) {
    static SET: OnceLock<Option<ReplicaSet>> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::const_new(());
    let turn = TURN.lock().await;
    (share(&SET, ReplicaSet::start).await, turn)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fault_in_turn_under_load() {
    let (set, _turn) = shared_set().await;
    let outcome = round::on(set, &ALL, fastrand::u64(..), 2).await;
    assert_eq!(outcome.faults.len(), nemesis::ALL.len());
    let report = outcome.report;
    assert_eq!(report.violations, [""; 0]);
    // The faults have disturbed the load, which has nevertheless made progress.
    assert!(report.unknown > 0, "no operation was disturbed");
    assert!(report.refused_saves > 0, "no save was too late");
    assert!(report.saves > 20, "only {} saves", report.saves);
}

/// Only the primary has written the save, and the primary is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_that_is_only_on_the_primary_is_not_acknowledged() {
    let (set, _turn) = shared_set().await;
    let ttl = Duration::from_secs(60);
    let settings = Settings { ttl, deadline: ttl, ..Settings::default() };
    let fleet = Fleet::new(&set.uri()).await.with(settings);
    fleet.put_documents(1).await;
    let app = fleet.inside("app").await;
    let (desk, key) = (Desk::new(&app), LockKey::new(Plain::COLLECTION, "0").unwrap());
    let lock = desk.acquire(&key).await.expect("a free document");
    let loaded = desk.load(&key).await.unwrap();

    let primary = set.primary().await;
    nemesis::stop_replication(set, primary, true).await;
    let saving = desk.save(&lock, loaded);
    let failing = async {
        sleep(Duration::from_millis(1_000)).await;
        set.members()[primary].kill9();
        nemesis::stop_replication(set, primary, false).await;
        set.another_than(primary).await;
    };
    tokio::join!(saving, failing);
    set.members()[primary].restart_member().await;
    set.until_complete().await;
    let report = fleet.check(Clocks::Agree).await;
    assert_eq!(report.violations, [""; 0]);
}

/// Only the primary has written the lease, so its holder must see the state that survives a failover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_only_on_the_primary_is_not_believed() {
    let (set, _turn) = shared_set().await;
    let settings = Settings { ttl: Duration::from_secs(3), reaper: None, ..Settings::default() };
    let fleet = Fleet::new(&set.uri()).await.with(settings);
    fleet.put_documents(1).await;
    let app = fleet.inside("app").await;
    let key = LockKey::new(Plain::COLLECTION, "0").unwrap();
    let primary = set.primary().await;
    let lock = Desk::new(&app).acquire(&key).await.expect("a free document");
    nemesis::stop_replication(set, primary, true).await;
    let alone = WriteConcern::builder().w(Acknowledgment::Nodes(1)).build();
    let locks = fleet.database.collection::<Document>("plain.lock");
    let longer = doc! { "$set": { "ttl": 3_600_000_i64 } };
    let written = locks.update_one(doc! { "_id": "0" }, longer).write_concern(alone).await.unwrap();

    let lost = timeout(PATIENCE, app.locks.lost(&lock)).await;
    // The holder gives up before the server's own deadline.
    let began = Instant::now();
    let seen = loop {
        match app.store.inspect(&key, None).await {
            Ok(Some(_)) if began.elapsed() < PATIENCE => sleep(Duration::from_millis(20)).await,
            other => break other,
        }
    };
    let all = app.store.locks_on(key.collection(), slice::from_ref(&key)).await;
    let listed = app.store.list(Plain::COLLECTION, None, 9).await;
    let mine = app.store.list(Plain::COLLECTION, Some(slice::from_ref(&lock.aid)), 9).await;
    nemesis::stop_replication(set, primary, false).await;
    set.until_complete().await;
    assert_eq!(written.modified_count, 1);
    assert!(lost.is_ok(), "it is still believed");
    // It is not certain either that the lock is gone.
    assert!(seen.is_err() && all.is_err() && mine.is_err(), "{seen:?}, {all:?}, {mine:?}");
    // On a busy machine the primary may have stepped down in the meantime.
    assert!(listed.map_or(true, |it| it.is_empty()), "it is still shown");
}
