//! The embedded store: all data in this process, none on disk.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;

#[cfg(feature = "_simulation")]
pub use self::simulated::OnRecord;
use self::state::State;
use crate::{
    error::BoxError,
    key::{LockKey, Lockable},
    store::{Format, StoredDocument},
};

mod changes;
mod documents;
mod ends;
mod freeze;
mod locks;
mod save;
mod servers;
mod sessions;
#[cfg(feature = "_simulation")]
mod simulated;
mod state;
mod sweep;
mod takeovers;

/// A store inside this process: for tests of handlers, for trying the crate out, and as the reference
/// for the behaviour of every store. Its content is lost when the process ends.
///
/// Clones share their content. Documents are kept as JSON.
///
/// ```
/// # use doclock_core::{Lockable, LockKey, MemoryStore};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct Invoice { #[serde(rename = "_id")] number: i64, total: f64 }
/// # impl Lockable for Invoice { type Id = i64; const COLLECTION: &'static str = "invoice"; }
/// let store = MemoryStore::new();
/// store.put(4711, &Invoice { number: 4711, total: 9.5 })?;
/// assert_eq!(store.all::<Invoice>()?.len(), 1);
/// # Ok::<(), doclock_core::BoxError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct MemoryStore {
    /// No verb leaves a half-made change behind when it panics.
    state: Arc<Mutex<State>>,
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes a document without regard to locks, as code that bypasses this crate would.
    ///
    /// # Errors
    /// If `document` cannot be encoded as JSON, or `id` is too long for an id.
    pub fn put<T: Lockable>(&self, id: T::Id, document: &T) -> Result<(), BoxError> {
        let document = StoredDocument::encode(Format::Json, document)?;
        self.state.lock().documents.insert(LockKey::of::<T>(id)?, document);
        Ok(())
    }

    /// All documents of the type, in the order of their ids.
    ///
    /// # Errors
    /// If one of them is not a `T`.
    pub fn all<T: Lockable>(&self) -> Result<Vec<T>, BoxError> {
        let documents: Vec<_> = (self.state.lock().documents.iter())
            .filter(|(key, _)| key.collection() == T::COLLECTION)
            .map(|(_, document)| document.clone())
            .collect();
        documents.iter().map(StoredDocument::decode).collect()
    }

    /// Removes a document, but not its lock. True if the document existed.
    pub fn remove(&self, key: &LockKey) -> bool {
        self.state.lock().documents.remove(key).is_some()
    }

    /// Advances the store's clock, so that a test need not wait for a lock to expire.
    pub fn advance(&self, by: Duration) {
        self.state.lock().turned_on += by;
    }

    /// Makes one lock older, so that a test need not wait for it to expire.
    pub fn age(&self, key: &LockKey, by: Duration) {
        // The clock of a new store has no past into which a lock could be moved. So advance the clock,
        // and move all other dates forward by the same amount.
        let mut state = self.state.lock();
        state.turned_on += by;
        for (other, record) in &mut state.locks {
            if other != key {
                for grant in &mut record.grants {
                    grant.ts += by;
                    grant.until = grant.until.map(|until| until + by);
                    grant.leaving = grant.leaving.map(|until| until.map(|until| until + by));
                    grant.asks.iter_mut().for_each(|it| it.until += by);
                }
                for place in &mut record.queue {
                    place.until += by;
                }
            }
        }
        state.ends.shift(by);
    }
}
