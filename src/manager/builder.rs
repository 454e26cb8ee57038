//! What can be set, with its defaults.

use std::{fmt, sync::Arc, time::Duration};

use super::{Actor, Inner, LockManager, activity::Activity, run::Runner};
use crate::{Holder, Lock, store::DynStore};

/// Browsers wake the timers of a hidden tab once a minute at most, so a heartbeat can be late by
/// that much; WordPress settled on the same figure for its post lock.
const TTL: Duration = Duration::from_secs(150);
/// Shorter makes no sense over a network, longer hits the server's limits for dates.
const TTL_RANGE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30 * 24 * 60 * 60)];

/// Long enough for an ordinary election of a primary with tuned settings, short enough for a person
/// who waits for a page.
const DEADLINE: Duration = Duration::from_secs(5);
const DEADLINE_RANGE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(120)];

/// Settings of a [`LockManager`], each with a safe default.
#[must_use = "a builder does nothing until `build` is called"]
pub struct LockManagerBuilder {
    store: Arc<dyn DynStore>,
    settings: Settings,
}

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) ttl: Duration,
    pub(super) deadline: Duration,
    pub(super) holder: Holder,
    break_policy: BreakPolicy,
}

type BreakPolicy = Arc<dyn Fn(&Actor, &Lock) -> bool + Send + Sync>;

impl Settings {
    pub(super) fn may_break(&self, actor: &Actor, lock: &Lock) -> bool {
        (self.break_policy)(actor, lock)
    }
}

impl LockManagerBuilder {
    pub(super) fn new(store: Arc<dyn DynStore>) -> Self {
        let settings = Settings {
            ttl: TTL,
            deadline: DEADLINE,
            holder: Holder::new("another session"),
            break_policy: Arc::new(|_, _| false),
        };
        Self { store, settings }
    }

    /// How long a lock outlives the last sign of life of its session. Default 150 s, from 1 s to
    /// 30 days.
    ///
    /// Locks are renewed every third of it while requests come. Shorter frees the documents of
    /// vanished people sooner; but browsers let the timers of a hidden tab run once a minute only,
    /// so below 150 s somebody who looks at another tab can lose a lock.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = ttl;
        self
    }

    /// How long an operation may take before its caller is told that the store does not answer.
    /// Default 5 s, from 100 ms to 120 s.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self
    }

    /// Who is shown where a lock's session gives no name. Default "another session".
    pub fn holder_label(mut self, label: impl Into<String>) -> Self {
        self.settings.holder = Holder::new(label);
        self
    }

    /// Who may break whose lock. Default: nobody.
    ///
    /// Called with the person who asks and the lock as it is; must not block.
    pub fn break_policy(
        mut self,
        allows: impl Fn(&Actor, &Lock) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.settings.break_policy = Arc::new(allows);
        self
    }

    /// Starts the manager on the current Tokio runtime, which must outlive it: `main`'s, not that
    /// of a worker.
    ///
    /// # Errors
    /// [`BuildError`] if a setting is out of its range.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn build(self) -> Result<LockManager, BuildError> {
        in_range("ttl", self.settings.ttl, TTL_RANGE)?;
        in_range("deadline", self.settings.deadline, DEADLINE_RANGE)?;
        Ok(LockManager {
            inner: Arc::new(Inner {
                store: self.store,
                collections: Default::default(),
                settings: self.settings,
                runner: Runner::on_current_runtime(),
                activity: Activity::default(),
            }),
        })
    }
}

fn in_range(
    setting: &'static str,
    value: Duration,
    [least, most]: [Duration; 2],
) -> Result<(), BuildError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(BuildError { setting, value, least, most })
}

/// A setting is out of its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the {setting} of {value:?} is out of range: write a duration from {least:?} to {most:?}")]
pub struct BuildError {
    setting: &'static str,
    value: Duration,
    least: Duration,
    most: Duration,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("ttl", &self.ttl)
            .field("deadline", &self.deadline)
            .field("holder", &self.holder)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for LockManagerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockManagerBuilder")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
