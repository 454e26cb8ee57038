//! How often something is done in the background.

use std::{borrow::Cow, time::Duration};

use crate::random;

/// The longest pause after failures: what comes back is found again within that time.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How many intervals a pause is at most while there is nothing to do. Not for as long as that: a
/// fail-over to a server whose clock is ahead, or a hand that edits records, changes it at any time.
pub(super) const IDLE_INTERVALS: u32 = 3;

/// The pauses of a background task: jittered, so that servers which were started together do not
/// ask together, and doubled with each failure.
#[derive(Debug)]
pub(crate) struct Rhythm {
    what: Cow<'static, str>,
    interval: Duration,
    failures: u32,
}

impl Rhythm {
    /// `what` is done, for the log, as in "looking for silent sessions".
    pub(crate) fn new(what: impl Into<Cow<'static, str>>, interval: Duration) -> Self {
        Self { what: what.into(), interval, failures: 0 }
    }

    /// The pause after success: until `next` there is nothing to do, as far as is known. At most three
    /// intervals.
    ///
    /// Almost to the moment, and not at the next stroke of the interval: what runs out may be removed
    /// by the TTL monitor from then on, and nobody would hear of it. Not quite to the moment, because
    /// all servers know of the same one, and the first one does it.
    pub(crate) fn after_success(&mut self, next: Option<Duration>) -> Duration {
        self.works();
        let longest = self.interval * IDLE_INTERVALS;
        let jitter = (self.interval / 20).mul_f64(random());
        (next.unwrap_or(longest).min(longest) + jitter).max(self.interval / 50)
    }

    /// It has come to something since the last failure.
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
        let mut rhythm = Rhythm::new("a test", INTERVAL);
        let cases = [(Some(INTERVAL / 10), INTERVAL / 10), (Some(INTERVAL * 2), INTERVAL * 2)];
        let all = [(Some(INTERVAL * 1000), INTERVAL * 3), (None, INTERVAL * 3)];
        for (next, expected) in cases.into_iter().chain(all) {
            for _ in 0..100 {
                let pause = rhythm.after_success(next);
                assert!(pause >= expected, "{next:?}: {pause:?}");
                assert!(pause <= expected + INTERVAL / 20, "{next:?}: {pause:?}");
            }
        }
        assert!(rhythm.after_success(Some(Duration::ZERO)) >= INTERVAL / 50, "no spinning");
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
        assert!(rhythm.after_success(Some(INTERVAL)) <= INTERVAL * 5 / 4);
    }
}
