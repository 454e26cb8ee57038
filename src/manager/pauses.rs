//! The pauses of background tasks.

use std::{borrow::Cow, time::Duration};

use crate::random;

/// The longest pause after failures: a store that recovers is noticed within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How many intervals a pause lasts at most while nothing is due. It is limited because a failover to a
/// server whose clock is ahead, or a manual edit of records, can make something due at any time.
pub(super) const IDLE_INTERVALS: u32 = 3;

/// The pauses of a background task. They are jittered, so that servers which were started together do not
/// ask together, and doubled with each failure.
#[derive(Debug)]
pub(crate) struct Pauses {
    what: Cow<'static, str>,
    interval: Duration,
    failures: u32,
}

impl Pauses {
    /// `what` describes the task in the log, as in "looking for idle sessions".
    pub(crate) fn new(what: impl Into<Cow<'static, str>>, interval: Duration) -> Self {
        Self { what: what.into(), interval, failures: 0 }
    }

    /// The pause after success. As far as is known, nothing is due until `next`. At most three intervals.
    ///
    /// The pause ends shortly after `next`, not at the next multiple of the interval: once a lock has
    /// expired, the TTL monitor may remove it, and then nobody would be told. It does not end exactly at
    /// `next`, because all servers know the same moment, and one of them should go first.
    pub(crate) fn after_success(&mut self, next: Option<Duration>) -> Duration {
        self.works();
        let longest = self.interval * IDLE_INTERVALS;
        let jitter = (self.interval / 20).mul_f64(random());
        (next.unwrap_or(longest).min(longest) + jitter).max(self.interval / 50)
    }

    /// The task has succeeded, for the first time since the last failure.
    pub(crate) fn works(&mut self) {
        if self.failures > 0 {
            log::info!(target: "actix_doclock::background", "{} works again", self.what);
            self.failures = 0;
        }
    }

    /// The pause after a failure.
    pub(crate) fn after_failure(&mut self, error: &dyn std::error::Error) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let doubled = self.interval.saturating_mul(2_u32.saturating_pow(self.failures));
        let pause = jittered(doubled.min(LONGEST_PAUSE)).min(LONGEST_PAUSE);
        // Warns only once, so that an outage does not fill the log.
        let level = if self.failures == 1 { log::Level::Warn } else { log::Level::Debug };
        log::log!(
            target: "actix_doclock::background",
            level,
            "{} has failed, trying again in {pause:?} and at least every {LONGEST_PAUSE:?}: {error}",
            self.what,
        );
        pause
    }
}

/// Between three and five quarters of the pause.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.75 + random() / 2.0)
}

/// From 0 to 1.
fn random() -> f64 {
    let [random, ..] = random::uuid().into_bytes();
    f64::from(random) / 255.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(1);

    #[test]
    fn a_pause_ends_shortly_after_the_next_thing_to_do_and_after_three_intervals_at_the_latest() {
        let mut pauses = Pauses::new("a test", INTERVAL);
        let cases = [(Some(INTERVAL / 10), INTERVAL / 10), (Some(INTERVAL * 2), INTERVAL * 2)];
        let all = [(Some(INTERVAL * 1000), INTERVAL * 3), (None, INTERVAL * 3)];
        for (next, expected) in cases.into_iter().chain(all) {
            for _ in 0..100 {
                let pause = pauses.after_success(next);
                assert!(pause >= expected, "{next:?}: {pause:?}");
                assert!(pause <= expected + INTERVAL / 20, "{next:?}: {pause:?}");
            }
        }
        assert!(pauses.after_success(Some(Duration::ZERO)) >= INTERVAL / 50, "no spinning");
    }

    #[test]
    fn failures_double_the_pause_up_to_ten_seconds_and_a_success_ends_that() {
        let mut pauses = Pauses::new("a test", INTERVAL);
        let error = std::io::Error::other("down");
        let waits: Vec<_> = (0..40).map(|_| pauses.after_failure(&error)).collect();
        assert!(waits[0] >= INTERVAL * 3 / 2, "{waits:?}");
        assert!(waits[1] >= INTERVAL * 3, "{waits:?}");
        assert!(waits.iter().all(|pause| *pause <= LONGEST_PAUSE), "{waits:?}");
        assert!(waits[10..].iter().all(|pause| *pause >= LONGEST_PAUSE * 3 / 4), "{waits:?}");
        assert!(pauses.after_success(Some(INTERVAL)) <= INTERVAL * 5 / 4);
    }
}
