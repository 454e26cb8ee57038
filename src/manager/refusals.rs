//! The pace of refusals because of the load. A caller that comes back at once, again and again, would otherwise take the
//! processor from the commands under way, until no command is answered in time.
//!
//! A leaky bucket (the generic cell rate algorithm): each refusal has the next place in a row of places with a fixed
//! distance, so a lone refusal is told at once.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::time::sleep_until;

use crate::clock;

/// The time between two refusals. A refusal costs some 10 µs.
const PACE: Duration = Duration::from_micros(200);

/// When the next refusal is told.
#[derive(Debug)]
pub(super) struct Refusals(Mutex<Instant>);

impl Default for Refusals {
    fn default() -> Self {
        Self(Mutex::new(clock::now()))
    }
}

impl Refusals {
    /// Waits until this refusal may be told: at most half of the time that its caller has left. A caller with little time
    /// does not move the place of the next one back.
    pub(super) async fn wait(&self, until: Instant) {
        let now = clock::now();
        let latest = now + until.saturating_duration_since(now) / 2;
        let at = {
            let mut next = self.0.lock();
            let at = (*next).clamp(now, latest);
            *next = (*next).max(at + PACE);
            at
        };
        if at > now {
            sleep_until(at.into()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_lone_refusal_is_told_at_once_and_a_crowd_at_a_pace_within_half_of_its_time() {
        let (refusals, began) = (Refusals::default(), clock::now());
        let until = began + Duration::from_secs(5);
        refusals.wait(until).await;
        assert_eq!(clock::now(), began);
        join_all((0..2_000).map(|_| refusals.wait(until))).await;
        assert!(clock::since(began) >= 2_000 * PACE, "{:?}", clock::since(began));
        join_all((0..20_000).map(|_| refusals.wait(until))).await;
        assert!(clock::now() <= began + Duration::from_secs(4), "{:?}", clock::since(began));
        refusals.wait(clock::now()).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_with_little_time_moves_nobody_forward() {
        let (refusals, began) = (Refusals::default(), clock::now());
        let until = began + Duration::from_secs(5);
        let crowd = join_all((0..2_000).map(|_| refusals.wait(until)));
        let later = async {
            refusals.wait(clock::now()).await;
            refusals.wait(until).await;
            assert!(clock::since(began) >= 2_000 * PACE, "{:?}", clock::since(began));
        };
        tokio::join!(crowd, later);
    }
}
