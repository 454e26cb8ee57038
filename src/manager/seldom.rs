//! Log lines that clients can cause in any number.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{clock, manager::LockManager};

/// How often a line of one kind is logged at most.
const EVERY: Duration = Duration::from_secs(10);

/// When a line of each kind was logged last. The code has few kinds.
#[derive(Debug, Default)]
pub(super) struct Seldom(Mutex<HashMap<&'static str, Instant>>);

impl LockManager {
    /// Logs a warning, unless one of this kind was logged within the last 10 s.
    pub(crate) fn warn_seldom(&self, kind: &'static str, line: impl FnOnce() -> String) {
        let mut logged = self.inner.seldom.0.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.get(kind).is_none_or(|at| clock::since(*at) >= EVERY) {
            logged.insert(kind, clock::now());
            drop(logged);
            log::warn!(target: "actix_doclock::web", "{}", line());
        }
    }
}
