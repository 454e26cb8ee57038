//! A deterministic simulation: several application servers in one process, on one simulated database,
//! in virtual time. One seed decides everything, and replays it exactly. See `docs/evidence/simulation.md`.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, unreachable_pub, reason = "that of tests/faults, of which this uses a part")]
#[path = "../faults/check.rs"]
mod check;
mod database;
#[allow(dead_code, reason = "as above")]
#[path = "../faults/history.rs"]
mod history;
mod link;
mod nemesis;
mod rules;
mod run;
mod truth;
mod work;
mod world;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rules::Rules;
use run::Outcome;

fn seconds() -> Option<Duration> {
    let set = std::env::var("DOCLOCK_SIM_SECONDS").ok()?;
    Some(Duration::from_secs(set.parse().expect("seconds")))
}

fn seed() -> Option<u64> {
    std::env::var("DOCLOCK_SIM_SEED").ok().map(|it| it.parse().expect("a number"))
}

/// Tells the story behind a violation: runs the same seed once more, with every line.
fn tell(outcome: &Outcome, rules: Rules) -> String {
    let again = run(outcome.seed, rules, true);
    let same = again.hash == outcome.hash;
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sim-{}.txt", outcome.seed));
    fs::write(&file, again.lines.join("\n")).expect("disk space");
    format!(
        "DOCLOCK_SIM_SEED={} shows this again (was the same the second time: {same}), line by line in {}\n{}",
        outcome.seed,
        file.display(),
        outcome.violations.join("\n"),
    )
}

fn run(seed: u64, rules: Rules, keeps_lines: bool) -> Outcome {
    run::run(seed, rules, keeps_lines)
}

/// By default the same worlds each time, however slow the machine. For other worlds, for as long as
/// desired: `DOCLOCK_SIM_SECONDS=3600 cargo test --test sim -- nothing_breaks --nocapture`.
#[test]
fn nothing_breaks_whatever_happens() {
    const WORLDS: u64 = 7;
    let (began, seconds) = (Instant::now(), seconds());
    let first = seed().unwrap_or_else(|| seconds.map_or(1, |_| fastrand::u64(..1 << 48)));
    let mut stats = world::Stats::default();
    for number in 0.. {
        let outcome = run(first + number, Rules::ALL, false);
        assert!(outcome.violations.is_empty(), "{}", tell(&outcome, Rules::ALL));
        stats += outcome.stats;
        let is_over = match seconds {
            Some(seconds) => began.elapsed() >= seconds,
            None => number + 1 == WORLDS,
        };
        if seed().is_some() || is_over {
            break;
        }
    }
    println!("seeds from {first} in {:.1?}: {stats:?}", began.elapsed());
    assert!(
        seed().is_some() || stats.overloaded > 0 && stats.asked > 0,
        "too much was wanted at least once, and a holder was asked: {stats:?}"
    );
}

#[test]
fn one_seed_replays_exactly() {
    let seed = seed().unwrap_or(1);
    for seed in seed..seed + 2 {
        let [one, two] = [true, true].map(|lines| run(seed, Rules::ALL, lines));
        let differs = one.lines.iter().zip(&two.lines).position(|(one, two)| one != two);
        if let Some(at) = differs {
            let before = one.lines[at.saturating_sub(20)..at].join("\n");
            panic!("seed {seed}, line {at}:\n{before}\n{}\n{}", one.lines[at], two.lines[at]);
        }
        assert_eq!(one.hash, two.hash, "seed {seed}");
    }
}

/// The violation that is found with one rule taken out, and how soon.
fn finds(without: &str, rules: Rules, what: &str) {
    let (began, first) = (Instant::now(), seed().unwrap_or_else(|| fastrand::u64(..1 << 48)));
    for number in 0..500 {
        let outcome = run::run(first + number, rules, false);
        if let Some(violation) = outcome.violations.iter().find(|it| it.contains(what)) {
            let (took, number) = (began.elapsed(), number + 1);
            println!("without {without}: in world {number}, after {took:.1?}: {violation}");
            println!("{}", tell(&outcome, rules));
            return;
        }
        assert!(outcome.violations.is_empty(), "{}", outcome.violations.join("\n"));
    }
    panic!("500 worlds from seed {first} show nothing");
}

macro_rules! without {
    ($($rule:ident: $test:ident => $what:literal;)*) => {
        $(
            #[test]
            #[ignore = "takes up to minutes; `cargo test --test sim -- --ignored` runs it"]
            fn $test() {
                finds(stringify!($rule), Rules { $rule: false, ..Rules::ALL }, $what);
            }
        )*
    };
}

without! {
    guarded_write_changes_the_record: a_save_whose_touch_changes_nothing => "";
    takeover_keeps_the_former_holder: a_takeover_that_forgets_the_former_holder => "";
    majority: locks_acknowledged_before_a_majority_has_them => "";
    majority_commit: saves_acknowledged_before_a_majority_has_them => "";
    leases_of_a_majority: a_lease_that_only_the_primary_has => "";
    guarded_save: a_save_that_does_not_look_at_the_lock => "";
    save_in_one_transaction: a_save_in_two_steps => "";
    renew_only_what_lives: a_renewal_that_revives => "";
    release_by_token: a_release_that_names_no_acquisition => "";
    retract_unless_told: a_grant_taken_back_that_another_request_was_told_of => "";
    tombstone_first: an_end_that_removes_before_it_is_written_down => "";
    look_for_tombstone: an_acquire_that_does_not_look_for_the_tombstone => "";
    count_from_the_send: a_lease_counted_from_the_reply => "";
    fences_rise: a_fence_that_is_the_time => "";
    purge_by_lease: a_server_that_removes_by_age => "";
}
