//! The monotonic clock of this process, which nobody can set.
//!
//! This is Tokio's clock, not the standard library's: if a test pauses Tokio's clock, then deadlines, leases and
//! timers all follow the paused time. In a server the two clocks are the same.

use std::time::{Duration, Instant};

pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

pub fn since(earlier: Instant) -> Duration {
    now().saturating_duration_since(earlier)
}
