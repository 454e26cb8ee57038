//! Collections whose types this program does not know.

use std::sync::PoisonError;

use crate::manager::{LockManager, Registered};

impl LockManager {
    /// Makes [`list`](Self::list) and [`events`](Self::events) include a collection whose type this
    /// program does not know. The store must know the collection already
    /// ([`MongoStore::attach`](crate::MongoStore::attach)).
    ///
    /// For programs that show or break the locks of others. Build their manager [without a
    /// reaper](crate::LockManagerBuilder::without_reaper). A program that takes locks must
    /// [register](Self::register) their types.
    pub fn attach(&self, collection: &'static str) {
        let parse_id = |text: &str| Some(text.into());
        let mut all = self.inner.collections.write().unwrap_or_else(PoisonError::into_inner);
        all.entry(collection).or_insert(Registered { parse_id, fair: false, over_http: true });
    }
}
