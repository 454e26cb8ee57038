//! The clock of this process that cannot be set.
//!
//! Tokio's, not the standard library's: where a test has paused Tokio's clock, deadlines, leases and
//! timers stay on the same time. In a server the two clocks are one.

use std::time::{Duration, Instant};

pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

pub(crate) fn since(earlier: Instant) -> Duration {
    now().saturating_duration_since(earlier)
}
