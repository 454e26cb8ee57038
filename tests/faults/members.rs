//! Faults of the replica set, and of application servers, under load.

use std::sync::OnceLock;

use tokio::sync::{Mutex, MutexGuard};

use crate::nemesis::{self, ALL};
use crate::rig::replica_set::ReplicaSet;
use crate::rig::share;
use crate::round;

/// Three members, for one test at a time, which leaves all of them well.
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
    // The faults have reached the load, which has got somewhere all the same.
    assert!(report.unknown > 0, "no operation was disturbed");
    assert!(report.refused_saves > 0, "nobody was too late");
    assert!(report.saves > 20, "only {} saves", report.saves);
}
