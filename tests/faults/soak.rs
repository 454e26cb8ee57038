//! Rounds of random faults for as long as desired; started by scripts/soak.

use std::collections::BTreeMap;
use std::env;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::nemesis::{ALL, Fault};
use crate::rig::replica_set::ReplicaSet;
use crate::round;

/// The number of faults between two checks.
const FAULTS_OF_A_ROUND: usize = 6;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "scripts/soak runs it, for half an hour"]
async fn soak() {
    let number = |name: &str| env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let minutes = number("SOAK_MINUTES").unwrap_or(30);
    let seed = number("SOAK_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("soak of {minutes} minutes, SOAK_SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    let set = ReplicaSet::start().await;
    let ends = Instant::now() + Duration::from_secs(60 * minutes);
    let (mut rounds, mut operations, mut saves, mut refused, mut unknown) = (0, 0, 0, 0, 0);
    let mut idle = 0;
    let mut injected: BTreeMap<Fault, usize> = BTreeMap::new();
    let mut violations = Vec::new();
    while Instant::now() < ends {
        rounds += 1;
        let faults: Vec<_> = (0..FAULTS_OF_A_ROUND).map(|_| ALL[rng.usize(..ALL.len())]).collect();
        let servers = rng.usize(2..4);
        print!("round {rounds}, {servers} application servers: ");
        let outcome = round::on(&set, &faults, rng.u64(..), servers).await;
        println!("  {:.0?}, {} violations", outcome.took, outcome.report.violations.len());
        for (fault, times) in outcome.faults {
            *injected.entry(fault).or_default() += times;
        }
        operations += outcome.report.operations();
        saves += outcome.report.saves;
        refused += outcome.report.refused_saves;
        unknown += outcome.report.unknown;
        idle += outcome.report.idle;
        for violation in &outcome.report.violations {
            println!("  {violation}");
        }
        violations.extend(outcome.report.violations);
    }
    println!("\nrounds: {rounds}");
    println!("faults: {}", injected.values().sum::<usize>());
    for (fault, times) in injected {
        println!("  {fault}: {times}");
    }
    println!("operations checked: {operations}");
    println!("  saves: {saves}; refused as too late: {refused}; of unknown outcome: {unknown}");
    println!("  idle sessions, each announced: {idle}");
    println!("violations: {}", violations.len());
    assert_eq!(violations, [""; 0]);
}
