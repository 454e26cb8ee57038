//! One round: load, faults, and the checker.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fastrand::Rng;
use tokio::time::sleep;

use crate::application::Role;
use crate::check::{Clocks, Report};
use crate::fleet::Fleet;
use crate::history::now;
use crate::nemesis::{Fault, inject};
use crate::rig::replica_set::ReplicaSet;
use crate::ways::Ways;

/// So few that the workers compete for them.
const KEYS: usize = 3;

pub(crate) fn load(seed: u64) -> Role {
    Role::Load { seed, keys: KEYS, careless: false }
}

/// The outcome of a round.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) report: Report,
    pub(crate) faults: BTreeMap<Fault, usize>,
    pub(crate) took: Duration,
}

/// Runs application servers under load with these faults, one after the other. Keeps the histories if a
/// check fails.
pub(crate) async fn on(set: &ReplicaSet, faults: &[Fault], seed: u64, servers: usize) -> Outcome {
    println!("seed {seed}");
    let began = Instant::now();
    let mut rng = Rng::with_seed(seed);
    let mut fleet = Fleet::new(&set.uri()).await;
    fleet.put_documents(KEYS).await;
    for _ in 0..servers {
        fleet.start_behind(Ways::to(set), load(rng.u64(..))).await;
    }
    fleet.until_saved_since(now()).await;
    let mut injected = BTreeMap::new();
    for &fault in faults {
        inject(fault, set, &mut fleet, load, &mut rng).await;
        *injected.entry(fault).or_default() += 1;
        fleet.until_saved_since(now()).await;
        sleep(Duration::from_millis(rng.u64(..500))).await;
    }
    let report = finish(fleet, Clocks::Agree).await;
    Outcome { report, faults: injected, took: began.elapsed() }
}

/// Stops the load, and checks the recorded history.
pub(crate) async fn finish(mut fleet: Fleet, clocks: Clocks) -> Report {
    fleet.stop().await;
    // Their locks may be left behind; an additional server, which does nothing else, removes them.
    let idle = Role::Script { steps: vec!["idle".into()], id: "0".into() };
    fleet.applications.clear();
    fleet.start(idle).await;
    // After a clock has jumped back, this takes as long as the jump.
    let report = if clocks == Clocks::Agree {
        fleet.until_nothing_is_left().await;
        fleet.check_to_the_end().await
    } else {
        fleet.check(clocks).await
    };
    println!(
        "{} grants, {} saves, {} refused, {} releases, {} unknown, {} idle sessions",
        report.grants,
        report.saves,
        report.refused_saves,
        report.releases,
        report.unknown,
        report.idle
    );
    report
}
