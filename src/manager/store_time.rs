//! Compares the store's clock with the clock of this process, which stands still while its machine is suspended, moved or
//! restored from a snapshot. The beliefs of this process about locks and freezes are then older than they seem.

use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::clock;

/// By how much the clocks may differ between two answers: more than a clock is ever corrected at once.
const SLACK: Duration = Duration::from_millis(500);

/// The time of the latest answer, and how often this process has stood still.
#[derive(Debug, Default)]
pub(super) struct StoreTime {
    latest: Mutex<Option<(Instant, SystemTime)>>,
    standstills: watch::Sender<u64>,
}

impl StoreTime {
    /// The store was asked at the moment `asked`, and has answered: its time was `at`.
    pub(super) fn heard(&self, asked: Instant, at: SystemTime) {
        let earlier = self.latest.lock().replace((asked, at));
        let Some((before, then)) = earlier else { return };
        let passed = at.duration_since(then).unwrap_or_default();
        let Some(missing) = passed.checked_sub(clock::since(before) + SLACK) else { return };
        log::warn!(
            target: "actix_doclock::manager",
            "the clock of this process stood still for {:?}, or the clock of the store was set ahead: locks may have \
             expired meanwhile, and are looked at again",
            missing + SLACK,
        );
        self.standstills.send_modify(|count| *count += 1);
    }

    /// Tells of each standstill from now on.
    pub(super) fn standstills(&self) -> watch::Receiver<u64> {
        self.standstills.subscribe()
    }

    /// True if the store's time of the latest answer was this much before the date.
    pub(super) fn is_before(&self, date: SystemTime, by: Duration) -> bool {
        let latest = *self.latest.lock();
        latest.is_some_and(|(_, at)| date.duration_since(at).is_ok_and(|age| age > by))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_stands_still_between_two_answers_is_noticed_and_a_slow_answer_is_none() {
        let (time, began) = (StoreTime::default(), SystemTime::now());
        let seconds = Duration::from_secs;
        let mut standstills = time.standstills();
        let mut is_noticed = |asked, at| {
            time.heard(asked, began + at);
            let is_noticed = standstills.has_changed().unwrap();
            standstills.mark_unchanged();
            is_noticed
        };
        assert!(!is_noticed(clock::now(), seconds(100)), "the first answer");
        let asked = clock::now();
        tokio::time::advance(seconds(7)).await;
        assert!(!is_noticed(asked, seconds(107)), "a slow answer");
        tokio::time::advance(seconds(1)).await;
        assert!(is_noticed(clock::now(), seconds(117)));
        assert!(!is_noticed(clock::now(), seconds(50)), "the store's clock was set back");
    }
}
