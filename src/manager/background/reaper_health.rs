//! The results of the reaper's sweeps.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::task::AbortHandle;

use crate::{clock, error::Result, manager::pauses::IDLE_INTERVALS, text::millis_if_any};

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
    /// The number of idle sessions, since the start of this server, of which no listener hears. The reaper had met
    /// more expired locks than it can end at once. Before it came to these sessions, their locks vanished, probably by
    /// MongoDB's TTL monitor.
    ///
    /// Sessions whose locks vanish before any reaper has seen them expired are not noticed: for example while no
    /// server runs. A session that came back meanwhile and released its locks may count although nothing is missing.
    /// Each server with a reaper counts for itself, so a sum may count a session several times.
    pub unannounced: u64,
    /// The time since the latest of these sessions were noticed. `None` if there are none.
    #[serde(rename = "unannounced_ago_ms", serialize_with = "millis_if_any")]
    pub unannounced_ago: Option<Duration>,
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
    failures: u32,
    error: Option<String>,
}

impl Sweeps {
    /// This task sweeps from now on.
    pub(in crate::manager) fn by(&self, reaper: AbortHandle) {
        // There is only one reaper for each manager.
        let _ = self.reaper.set(reaper);
    }

    pub(in crate::manager) fn saw<T>(&self, outcome: &Result<T>) {
        let mut past = self.past.lock();
        *past = match outcome {
            Ok(_) => Past { succeeded: Some(clock::now()), ..Past::default() },
            Err(e) => Past {
                succeeded: past.succeeded,
                failures: past.failures.saturating_add(1),
                error: Some(e.to_string()),
            },
        };
    }

    /// The health of a reaper with this interval, or without one. `deadline` is how long one sweep may
    /// take.
    pub(in crate::manager) fn health(
        &self,
        interval: Option<Duration>,
        deadline: Duration,
        (unannounced, latest): (u64, Option<Instant>),
    ) -> ReaperHealth {
        let state = match (interval, self.reaper.get()) {
            (None, _) => ReaperState::Off,
            (Some(_), Some(reaper)) if !reaper.is_finished() => ReaperState::Running,
            (Some(_), _) => ReaperState::Stopped,
        };
        let past = self.past.lock();
        let last_sweep = past.succeeded.map(clock::since);
        // Twice the expected time, because the machine may be busy.
        let late = 2 * (interval.unwrap_or_default() * IDLE_INTERVALS + deadline);
        ReaperHealth {
            state,
            last_sweep,
            overdue: state == ReaperState::Running && last_sweep.is_some_and(|ago| ago > late),
            failures: past.failures,
            last_error: past.error.clone(),
            unannounced,
            unannounced_ago: latest.map(clock::since),
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
        let overdue = || sweeps.health(interval, Duration::from_secs(5), (0, None)).overdue;
        sweeps.by(tokio::spawn(std::future::pending::<()>()).abort_handle());
        assert!(!overdue(), "it has not begun");
        sweeps.saw(&Ok(()));
        assert!(!overdue());
        let ago = |secs| clock::now().checked_sub(Duration::from_secs(secs));
        // Three intervals and a sweep, twice.
        sweeps.past.lock().succeeded = ago(15);
        assert!(!overdue());
        sweeps.past.lock().succeeded = ago(17);
        assert!(overdue());
        sweeps.saw::<()>(&Err(LockError::ShutDown));
        assert!(overdue(), "a failure is no sweep");
        assert_eq!(sweeps.health(None, Duration::ZERO, (0, None)).state, ReaperState::Off);
    }
}
