//! Hostile bytes, and other properties that are tried with random values.
//!
//! Each run tries the same values, so that a change is never blamed for an old bug. `PROPTEST_RNG_SEED` gives other values,
//! and `DOCLOCK_DEPTH` gives more of them.

#[cfg(feature = "web")]
mod hostile;
pub(crate) mod records;
#[cfg(feature = "web")]
mod requests;

use std::{cell::RefCell, env, fmt::Debug};

use proptest::{
    strategy::Strategy,
    test_runner::{Config, RngSeed, TestCaseError, TestRunner},
};

use crate::rig::depth;

pub(crate) fn cases(cases: u32) -> Config {
    let mut config =
        Config { cases: cases * depth(), failure_persistence: None, ..Config::default() };
    if env::var_os("PROPTEST_RNG_SEED").is_none() {
        config.rng_seed = RngSeed::Fixed(0);
    }
    config
}

/// Tries so many values, and panics with the smallest that fails. A panic in `holds` is a failure.
pub(crate) fn check<S>(what: &str, number: u32, values: &S, mut holds: impl FnMut(S::Value))
where
    S: Strategy<Value: Debug>,
{
    let holds = RefCell::new(&mut holds);
    let mut runner = TestRunner::new(Config { max_shrink_time: 60_000, ..cases(number) });
    let outcome = runner.run(values, |value| {
        (holds.borrow_mut())(value);
        Ok::<_, TestCaseError>(())
    });
    if let Err(e) = outcome {
        panic!("{what}: {e}");
    }
}
