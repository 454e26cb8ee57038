//! Collections whose types this program does not have.

use std::sync::PoisonError;

use crate::manager::{LockManager, Registered};

impl LockManager {
    /// Has [`list`](Self::list) and [`events`](Self::events) include a collection whose type this
    /// program does not have, and which the store knows already
    /// ([`MongoStore::attach`](crate::MongoStore::attach)).
    ///
    /// For programs that look at the locks of others, or break them; build their manager
    /// [without a reaper](crate::LockManagerBuilder::without_reaper). Whoever takes locks has to
    /// [register](Self::register) their types.
    pub fn attach(&self, collection: &'static str) {
        let parse_id = |text: &str| Some(text.into());
        let mut all = self.inner.collections.write().unwrap_or_else(PoisonError::into_inner);
        all.entry(collection).or_insert(Registered { parse_id, fair: false });
    }
}
