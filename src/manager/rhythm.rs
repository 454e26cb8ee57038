//! How often something is done in the background.

use std::time::Duration;

use uuid::Uuid;

/// The longest pause after failures: what comes back is found again within that time.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How many intervals a pause is at most while there is nothing to do. Not for as long as that: a
/// fail-over to a server whose clock is ahead, or a hand that edits records, changes it at any time.
const IDLE_INTERVALS: u32 = 3;

/// The pauses of a background task: jittered, so that servers which were started together do not
/// ask together, and doubled with each failure.
#[derive(Debug)]
pub(crate) struct Rhythm {
    what: &'static str,
    interval: Duration,
    failures: u32,
}

impl Rhythm {
    /// `what` is done, for the log, as in "looking for silent sessions".
    pub(crate) fn new(what: &'static str, interval: Duration) -> Self {
        Self { what, interval, failures: 0 }
    }

    /// The pause after success. Longer than the interval, three times as long at most, if there is
    /// nothing to do for so long; `None` says that nothing is in sight.
    pub(crate) fn after_success(&mut self, nothing_for: Option<Duration>) -> Duration {
        if self.failures > 0 {
            log::info!(target: "actix_doclock::background", "{} works again", self.what);
            self.failures = 0;
        }
        let longest = self.interval * IDLE_INTERVALS;
        jittered(self.interval).max(nothing_for.unwrap_or(longest).min(longest))
    }

    /// The pause after a failure.
    pub(crate) fn after_failure(&mut self, error: &dyn std::error::Error) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let doubled = self.interval.saturating_mul(2_u32.saturating_pow(self.failures));
        let pause = jittered(doubled.min(LONGEST_PAUSE)).min(LONGEST_PAUSE);
        // Once in full; an outage is not to fill the log.
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

/// Between three and five quarters of it.
fn jittered(pause: Duration) -> Duration {
    let [random, ..] = Uuid::new_v4().into_bytes();
    pause.mul_f64(0.75 + f64::from(random) / 510.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(1);

    #[test]
    fn a_pause_is_about_the_interval_or_as_long_as_there_is_nothing_to_do() {
        let mut rhythm = Rhythm::new("a test", INTERVAL);
        for _ in 0..100 {
            let pause = rhythm.after_success(Some(Duration::ZERO));
            assert!(pause >= INTERVAL * 3 / 4 && pause <= INTERVAL * 5 / 4, "{pause:?}");
        }
        assert_eq!(rhythm.after_success(Some(INTERVAL * 2)), INTERVAL * 2);
        assert_eq!(rhythm.after_success(Some(INTERVAL * 1000)), INTERVAL * IDLE_INTERVALS);
        assert_eq!(rhythm.after_success(None), INTERVAL * IDLE_INTERVALS);
    }

    #[test]
    fn failures_double_the_pause_up_to_ten_seconds_and_a_success_ends_that() {
        let mut rhythm = Rhythm::new("a test", INTERVAL);
        let error = std::io::Error::other("down");
        let pauses: Vec<_> = (0..40).map(|_| rhythm.after_failure(&error)).collect();
        assert!(pauses[0] >= INTERVAL * 3 / 2, "{pauses:?}");
        assert!(pauses[1] >= INTERVAL * 3, "{pauses:?}");
        assert!(pauses.iter().all(|pause| *pause <= LONGEST_PAUSE), "{pauses:?}");
        assert!(pauses[10..].iter().all(|pause| *pause >= LONGEST_PAUSE * 3 / 4), "{pauses:?}");
        assert!(rhythm.after_success(Some(Duration::ZERO)) <= INTERVAL * 5 / 4);
    }
}
