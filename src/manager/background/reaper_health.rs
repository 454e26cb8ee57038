//! The results of the reaper's sweeps.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::task::AbortHandle;

use crate::{
    clock, error::Result, manager::pauses::IDLE_INTERVALS, store::Swept, text::millis_if_any,
};

/// The state of the reaper, the background task that ends idle sessions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ReaperHealth {
    /// Whether it runs.
    pub state: ReaperState,
    /// The time since the last successful sweep, by the reaper or by
    /// [`sweep`](crate::LockManager::sweep). `None` if there was none.
    #[serde(rename = "last_sweep_ms", serialize_with = "millis_if_any")]
    pub last_sweep: Option<Duration>,
    /// True if the reaper runs, but its last successful sweep was too long ago.
    pub overdue: bool,
    /// The number of failed sweeps since the last success.
    pub failures: u32,
    /// The error of the last failure since the last success.
    pub last_error: Option<String>,
    /// For how long each sweep has found more idle sessions than it ends at once. `None` if the sweeps keep up. No listener
    /// hears of a session whose expired locks MongoDB's TTL monitor removes before the reaper comes to them: about a minute
    /// after they have expired.
    #[serde(rename = "behind_ms", serialize_with = "millis_if_any")]
    pub behind: Option<Duration>,
}

/// Whether the reaper runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReaperState {
    /// The reaper runs.
    Running,
    /// The application wants no reaper on this server:
    /// [`without_reaper`](crate::LockManagerBuilder::without_reaper).
    Off,
    /// The reaper has ended: the manager was shut down, or its runtime is gone.
    Stopped,
}

#[derive(Debug, Default)]
pub(in crate::manager) struct Sweeps {
    past: Mutex<Past>,
    reaper: OnceLock<AbortHandle>,
}

#[derive(Debug, Default)]
struct Past {
    succeeded: Option<Instant>,
    behind_since: Option<Instant>,
    failures: u32,
    error: Option<String>,
}

impl Sweeps {
    /// This task sweeps from now on.
    pub(in crate::manager) fn by(&self, reaper: AbortHandle) {
        // There is only one reaper for each manager.
        let _ = self.reaper.set(reaper);
    }

    pub(in crate::manager) fn saw(&self, outcome: &Result<Swept>) {
        let (mut past, now) = (self.past.lock(), clock::now());
        match outcome {
            Ok(swept) => {
                let behind_since = swept.has_backlog.then(|| past.behind_since.unwrap_or(now));
                *past = Past { succeeded: Some(now), behind_since, ..Past::default() };
            }
            Err(e) => {
                past.failures = past.failures.saturating_add(1);
                past.error = Some(e.to_string());
            }
        }
    }

    /// For how long each sweep has reached its limit.
    pub(in crate::manager) fn behind(&self) -> Option<Duration> {
        self.past.lock().behind_since.map(clock::since)
    }

    /// The health of a reaper with this interval, or without one. `deadline` is how long one sweep may
    /// take.
    pub(in crate::manager) fn health(
        &self,
        interval: Option<Duration>,
        deadline: Duration,
    ) -> ReaperHealth {
        let state = match (interval, self.reaper.get()) {
            (None, _) => ReaperState::Off,
            (Some(_), Some(reaper)) if !reaper.is_finished() => ReaperState::Running,
            (Some(_), _) => ReaperState::Stopped,
        };
        let is_running = state == ReaperState::Running;
        let past = self.past.lock();
        let last_sweep = past.succeeded.map(clock::since);
        // Twice the expected time, because the machine may be busy.
        let late = 2 * (interval.unwrap_or_default() * IDLE_INTERVALS + deadline);
        ReaperHealth {
            state,
            last_sweep,
            overdue: is_running && last_sweep.is_some_and(|ago| ago > late),
            failures: past.failures,
            last_error: past.error.clone(),
            behind: past.behind_since.map(clock::since).filter(|_| is_running),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LockError;

    #[tokio::test]
    async fn a_reaper_is_overdue_when_it_could_have_swept_long_ago() {
        let (sweeps, interval) = (Sweeps::default(), Some(Duration::from_secs(1)));
        let overdue = || sweeps.health(interval, Duration::from_secs(5)).overdue;
        sweeps.by(tokio::spawn(std::future::pending::<()>()).abort_handle());
        assert!(!overdue(), "it has not begun");
        sweeps.saw(&Ok(Swept::default()));
        assert!(!overdue());
        let ago = |secs| clock::now().checked_sub(Duration::from_secs(secs));
        // Three intervals and a sweep, twice.
        sweeps.past.lock().succeeded = ago(15);
        assert!(!overdue());
        sweeps.past.lock().succeeded = ago(17);
        assert!(overdue());
        sweeps.saw(&Err(LockError::ShutDown));
        assert!(overdue(), "a failure is no sweep");
        assert_eq!(sweeps.health(None, Duration::ZERO).state, ReaperState::Off);
    }

    #[test]
    fn a_reaper_is_behind_as_long_as_each_sweep_reaches_its_limit() {
        let (sweeps, ten) = (Sweeps::default(), Duration::from_secs(10));
        let sweeps_with = |has_backlog| sweeps.saw(&Ok(Swept { has_backlog, ..Swept::default() }));
        sweeps_with(true);
        sweeps.past.lock().behind_since = clock::now().checked_sub(ten);
        sweeps.saw(&Err(LockError::ShutDown));
        sweeps_with(true);
        assert!(sweeps.behind() >= Some(ten), "neither a failure nor another sweep has caught up");
        sweeps_with(false);
        assert_eq!(sweeps.behind(), None);
        sweeps_with(true);
        assert!(sweeps.behind() < Some(ten), "it counts anew");
    }
}
