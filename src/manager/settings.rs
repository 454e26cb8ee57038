//! The settings of a manager, with their defaults and ranges.

use std::{fmt, ops::RangeInclusive, sync::Arc, time::Duration};

use crate::{
    actor::Actor,
    lock::{Holder, Lock},
    manager::limits::{self, Limits},
    store::{DEFAULT_TTL, TTL_RANGE},
};

/// Long enough for an ordinary election of a primary with tuned settings, short enough for a person who
/// waits for a page.
const DEADLINE: Duration = Duration::from_secs(5);
const DRAIN_RANGE: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(10 * 60);
const DEADLINE_RANGE: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(120);

/// Often enough for a listener that notifies people. A query of an index that finds nothing costs the
/// server less than a millisecond.
const REAPER_INTERVAL: Duration = Duration::from_secs(1);
const REAPER_RANGE: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(60);

const LISTENER_TIMEOUT: Duration = Duration::from_secs(10);
const LISTENER_RANGE: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(10 * 60);

#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) ttl: Duration,
    pub(super) max_hold: Option<Duration>,
    pub(super) deadline: Duration,
    pub(crate) drain_delay: Duration,
    pub(crate) holder: Holder,
    pub(super) reaper_interval: Option<Duration>,
    pub(super) listener_timeout: Duration,
    pub(super) limits: Limits,
    pub(super) break_policy: LockPolicy,
    pub(super) take_over_policy: LockPolicy,
    pub(super) admin_policy: Option<AdminPolicy>,
}

type LockPolicy = Arc<dyn Fn(&Actor, &Lock) -> bool + Send + Sync>;
type AdminPolicy = Arc<dyn Fn(&Actor) -> bool + Send + Sync>;

impl Default for Settings {
    fn default() -> Self {
        Self {
            ttl: DEFAULT_TTL,
            max_hold: None,
            deadline: DEADLINE,
            drain_delay: Duration::ZERO,
            holder: Holder::new("another session"),
            reaper_interval: Some(REAPER_INTERVAL),
            listener_timeout: LISTENER_TIMEOUT,
            limits: Limits::default(),
            break_policy: Arc::new(|_, _| false),
            take_over_policy: Arc::new(Actor::is_holder_of),
            admin_policy: None,
        }
    }
}

impl Settings {
    pub(crate) fn may_break(&self, actor: &Actor, lock: &Lock) -> bool {
        (self.break_policy)(actor, lock)
    }

    pub(super) fn may_take_over(&self, actor: &Actor, lock: &Lock) -> bool {
        (self.take_over_policy)(actor, lock)
    }

    /// `None` if nobody may.
    pub(crate) fn may_see_all(&self, actor: &Actor) -> Option<bool> {
        self.admin_policy.as_ref().map(|allows| allows(actor))
    }

    /// # Errors
    /// [`BuildError`] if a setting is out of its range.
    pub(super) fn check(&self) -> Result<(), BuildError> {
        let a_duration = "a duration";
        in_range("ttl", a_duration, self.ttl, TTL_RANGE)?;
        in_range("deadline", a_duration, self.deadline, DEADLINE_RANGE)?;
        in_range("drain_delay", a_duration, self.drain_delay, DRAIN_RANGE)?;
        in_range("listener_timeout", a_duration, self.listener_timeout, LISTENER_RANGE)?;
        if let Some(max_hold) = self.max_hold {
            in_range("max_hold", a_duration, max_hold, TTL_RANGE)?;
        }
        if let Some(interval) = self.reaper_interval {
            in_range("reaper_interval", a_duration, interval, REAPER_RANGE)?;
        }
        let limits = self.limits;
        for (limit, value) in [
            ("limit `locks_per_session`", limits.locks_per_session),
            ("limit `waiters_per_session`", limits.waiters_per_session),
            ("limit `waiters_per_person`", limits.waiters_per_person),
            ("limit `waiters`", limits.waiters),
        ] {
            in_range(limit, "a number", value, limits::RANGE)?;
        }
        Ok(())
    }
}

fn in_range<T: PartialOrd + fmt::Debug>(
    setting: &'static str,
    what: &'static str,
    value: T,
    range: RangeInclusive<T>,
) -> Result<(), BuildError> {
    if range.contains(&value) {
        return Ok(());
    }
    let range = format!("{what} from {:?} to {:?}", range.start(), range.end());
    Err(BuildError { setting, value: format!("{value:?}"), range })
}

/// A setting is out of its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the {setting} of {value} is out of range: write {range}")]
pub struct BuildError {
    setting: &'static str,
    value: String,
    range: String,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("ttl", &self.ttl)
            .field("max_hold", &self.max_hold)
            .field("deadline", &self.deadline)
            .field("holder", &self.holder)
            .field("reaper_interval", &self.reaper_interval)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{manager::LockManager, store::MemoryStore};

    #[tokio::test]
    async fn a_setting_out_of_range_is_refused_by_name_and_says_what_to_write() {
        let settings = || LockManager::builder(MemoryStore::new());
        let (none, year) = (Duration::ZERO, Duration::from_secs(365 * 24 * 60 * 60));
        for value in [none, year] {
            let cases = [
                ("ttl", settings().ttl(value)),
                ("deadline", settings().deadline(value)),
                ("max_hold", settings().max_hold(value)),
                ("reaper_interval", settings().reaper_interval(value)),
                ("listener_timeout", settings().listener_timeout(value)),
            ];
            for (setting, builder) in cases {
                let refused = builder.build().await.unwrap_err().to_string();
                assert!(refused.contains(setting), "{refused}");
                assert!(refused.contains("write a duration from"), "{refused}");
            }
        }
        for value in [0, usize::MAX] {
            let usual = Limits::default();
            let cases = [
                ("locks_per_session", Limits { locks_per_session: value, ..usual }),
                ("waiters", Limits { waiters: value, ..usual }),
                ("waiters_per_session", Limits { waiters_per_session: value, ..usual }),
                ("waiters_per_person", Limits { waiters_per_person: value, ..usual }),
            ];
            for (limit, limits) in cases {
                let refused = settings().limits(limits).build().await.unwrap_err().to_string();
                assert!(refused.contains(&format!("the limit `{limit}` of")), "{refused}");
                assert!(refused.contains("write a number from 1 to"), "{refused}");
            }
        }
        settings().build().await.unwrap();
    }
}
