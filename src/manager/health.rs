//! How a manager is doing.

use std::collections::BTreeMap;

use super::{LockManager, wakeups::Wakeup};

/// How a manager is doing, as far as it knows without asking anybody.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Health {
    /// By collection, how those who wait learn that a lock is free. Where nobody has waited for half a
    /// minute there is no entry.
    pub wakeups: BTreeMap<&'static str, Wakeup>,
}

impl LockManager {
    /// How it is doing. Costs nothing.
    #[must_use]
    pub fn health(&self) -> Health {
        Health { wakeups: self.inner.wakeups.all() }
    }
}
