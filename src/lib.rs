// If a link is defined twice, the first definition counts: on docs.rs a page is a module, in the repository a file.
#![doc = include_str!("guide/links.md")]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
// The manager has verbs that only the layer for the web uses.
#![cfg_attr(not(feature = "web"), allow(dead_code))]

mod error;
#[cfg(any(doc, doctest))]
pub mod guide;
mod manager;
pub mod store;
#[cfg(feature = "web")]
pub mod web;

#[doc(inline)]
pub use doclock_core::{
    Actor, Aid, Answer, Ask, BoxError, Description, EndReason, FencingToken, Holder, InvalidKey,
    InvalidVersion, Lock, LockEvent, LockId, LockKey, LockToken, Lockable, LossCause, MemoryStore,
    Mode, Named, Released, SessionEnded, StoreError, StoreErrorKind, TabId, Takeover, TryAcquire,
    Version, freeze,
};
// The words, by their modules.
use doclock_core::{
    actor, clock, description, ended, event, key, lock, random, server, takeover, text, version,
};
pub use error::LockError;
pub use manager::{
    BuildError, Job, LockEvents, LockGuard, LockGuards, LockManager, LockManagerBuilder, Wait,
    metrics,
};
#[cfg(feature = "_mongo")]
#[doc(inline)]
pub use store::MongoStore;
#[cfg(feature = "web")]
#[doc(inline)]
pub use web::{HeldDoc, LockedDoc, SessionLocks, SharedDoc, lock_api};

/// The answers of [`LockManager::health`] and [`LockManager::check_health`].
///
/// [`LockManager::health`]: crate::LockManager::health
/// [`LockManager::check_health`]: crate::LockManager::check_health
pub mod health {
    pub use crate::manager::{
        Health, HealthReport, HealthStatus, ReaperHealth, ReaperState, StoreHealth, TaskPanics,
        Wakeup,
    };
}

/// [`Limits`](limits::Limits) are settings; the constants are limits that no setting changes.
pub mod limits {
    #[doc(inline)]
    pub use doclock_core::limits::*;

    pub use crate::manager::{Limits, MAX_COLLECTIONS, MAX_REASON_BYTES};
}
