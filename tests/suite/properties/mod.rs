//! Hostile bytes, and other properties that are tried with random values.
//!
//! Each run tries the same values, so that a change is never blamed for an old bug. To look for new
//! failures, set `PROPERTY_SEED=random`, or a seed in hexadecimal digits, as it is printed.
//! `PROPERTY_CASES` multiplies the number of cases.

#[cfg(feature = "web")]
mod hostile;
pub(crate) mod records;
#[cfg(feature = "web")]
mod requests;

use std::{env, fmt::Debug};

use proptest::{
    strategy::Strategy,
    test_runner::{Config, TestCaseError, TestRng, TestRunner},
};

/// Tries this many values, and panics with the smallest that fails. A panic in `holds` is a failure.
pub(crate) fn check<S>(what: &str, cases: u32, values: &S, mut holds: impl FnMut(S::Value))
where
    S: Strategy<Value: Debug>,
{
    let seed = match env::var("PROPERTY_SEED").as_deref() {
        Err(_) => 0,
        Ok("random") => uuid::Uuid::new_v4().as_u128(),
        Ok(seed) => u128::from_str_radix(seed, 16).expect("hexadecimal digits, or `random`"),
    };
    let more = env::var("PROPERTY_CASES").ok().and_then(|more| more.parse().ok()).unwrap_or(1);
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&seed.to_be_bytes());
    let algorithm = Config::default().rng_algorithm;
    let config = Config {
        cases: cases * more,
        failure_persistence: None,
        max_shrink_time: 60_000,
        ..Config::default()
    };
    println!("{what}: PROPERTY_SEED={seed:032x}, {} cases", config.cases);
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(algorithm, &bytes));
    let holds = std::cell::RefCell::new(&mut holds);
    let outcome = runner.run(values, |value| {
        (holds.borrow_mut())(value);
        Ok::<_, TestCaseError>(())
    });
    if let Err(e) = outcome {
        panic!("{what}: PROPERTY_SEED={seed:032x}: {e}");
    }
}
