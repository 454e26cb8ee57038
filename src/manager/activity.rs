//! When the locks of a session are due for renewal.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::Aid;

/// The last renewal of each session that was active here lately.
///
/// Only a throttle: another server may renew the same session a moment later, which costs one
/// command and changes nothing.
#[derive(Debug, Default)]
pub(super) struct Activity {
    sessions: Mutex<Sessions>,
}

#[derive(Debug, Default)]
struct Sessions {
    renewed: HashMap<Aid, Instant>,
    /// The size at which silent sessions are looked for, so that this costs nothing on average.
    sweep_at: usize,
}

impl Activity {
    /// Whether the last renewal is longer ago than `interval`; if so, this moment counts as one.
    pub(super) fn is_due(&self, aid: &Aid, interval: Duration) -> bool {
        let now = Instant::now();
        let mut sessions = self.sessions();
        if let Some(last) = sessions.renewed.get_mut(aid) {
            let due = now.duration_since(*last) >= interval;
            if due {
                *last = now;
            }
            return due;
        }
        if sessions.renewed.len() >= sessions.sweep_at {
            sessions.renewed.retain(|_, last| now.duration_since(*last) < interval);
            sessions.sweep_at = (sessions.renewed.len() * 2).max(1024);
        }
        sessions.renewed.insert(aid.clone(), now);
        true
    }

    /// The renewal did not succeed: the next request shall try again.
    pub(super) fn forget(&self, aid: &Aid) {
        self.sessions().renewed.remove(aid);
    }

    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_session_is_due_once_in_an_interval_and_at_once_after_a_failure() {
        let (activity, aid) = (Activity::default(), Aid::new());
        assert!(activity.is_due(&aid, HOUR));
        assert!(!activity.is_due(&aid, HOUR));
        assert!(activity.is_due(&Aid::new(), HOUR), "each session for itself");
        activity.forget(&aid);
        assert!(activity.is_due(&aid, HOUR));
    }

    #[test]
    fn silent_sessions_are_forgotten() {
        let activity = Activity::default();
        for _ in 0..10_000 {
            activity.is_due(&Aid::new(), Duration::ZERO);
        }
        assert!(activity.sessions().renewed.len() <= 1024);
    }
}
