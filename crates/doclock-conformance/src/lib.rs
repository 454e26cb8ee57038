//! Tests of the behaviour that every [`Store`] must have: the conformance suite of the stores of actix-doclock.
//!
//! [`MemoryStore`](doclock_core::MemoryStore) and `MongoStore` pass them; a store of your own should. Tell the
//! suite how to fill and age your store, and let [`store_conformance!`](crate::store_conformance) make
//! one test of each case:
//!
//! ```
//! use std::time::Duration;
//! use doclock_core::{LockKey, MemoryStore, store::{Deadline, Locks, Rules}};
//! use doclock_conformance::{COLLECTION, Page, Subject, TTL};
//!
//! struct Memory(MemoryStore);
//!
//! impl Subject for Memory {
//!     type Store = MemoryStore;
//!
//!     async fn fresh() -> Self {
//!         let store = MemoryStore::new();
//!         store.prepare(COLLECTION, &Rules::new(TTL), Deadline::NONE).await.unwrap();
//!         Self(store)
//!     }
//!     fn store(&self) -> &MemoryStore { &self.0 }
//!     async fn put(&self, page: &Page) { self.0.put(page.id.clone(), page).unwrap() }
//!     async fn delete(&self, key: &LockKey) { self.0.remove(key); }
//!     async fn age(&self, key: &LockKey, by: Duration) { self.0.age(key, by) }
//! }
//!
//! doclock_conformance::store_conformance!(Memory);
//! ```

#![expect(clippy::unwrap_used, reason = "a failed case is a panic")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use doclock_core::{LockKey, Lockable, store::Store};

#[doc(hidden)]
pub mod cases;
mod shorthand;
mod steps;

pub use shorthand::{Answer, Shorthand};

/// The collection that the cases lock in.
pub const COLLECTION: &str = "page";

/// The ttl with which the collection is prepared.
pub const TTL: Duration = Duration::from_secs(600);

/// A document of the cases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Page {
    #[serde(rename = "_id")]
    pub id: String,
    pub text: String,
}

impl Lockable for Page {
    type Id = String;
    const COLLECTION: &'static str = COLLECTION;
}

/// A store, and the operations beyond its verbs that the cases need.
#[expect(async_fn_in_trait, reason = "each case runs its futures itself")]
pub trait Subject: Sized + Sync {
    /// The store under test.
    type Store: Store;

    /// An empty store, prepared for [`COLLECTION`] with [`TTL`].
    async fn fresh() -> Self;

    /// The store.
    fn store(&self) -> &Self::Store;

    /// Writes a document without regard to locks.
    async fn put(&self, page: &Page);

    /// Deletes a document, but not its lock.
    async fn delete(&self, key: &LockKey);

    /// Makes the locks on `key` and the places in its queue older, and no others: moves all dates of
    /// expiry back by `by`.
    async fn age(&self, key: &LockKey, by: Duration);
}

/// Makes one `#[tokio::test]` of each case of the conformance suite, for a
/// [`Subject`](crate::Subject). Needs `tokio` with the features `macros` and
/// `rt-multi-thread`.
#[macro_export]
macro_rules! store_conformance {
    ($subject:ty) => {
        $crate::locks!($subject);
        $crate::saves!($subject);
        $crate::ends!($subject);
        $crate::shared!($subject);
        $crate::fence!($subject);
        $crate::fair!($subject);
        $crate::watch!($subject);
        $crate::hand_over!($subject);
        $crate::asks!($subject);
        $crate::pages!($subject);
        $crate::servers!($subject);
        $crate::takeovers!($subject);
    };
}
