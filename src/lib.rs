// If a link is defined twice, the first definition counts: on docs.rs a page is a module, in the repository a file.
#![doc = include_str!("guide/links.md")]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
// The manager has verbs that only the layer for the web uses.
#![cfg_attr(not(feature = "web"), allow(dead_code))]

mod actor;
mod clock;
mod description;
mod ended;
mod error;
mod event;
pub mod freeze;
#[cfg(any(doc, doctest))]
pub mod guide;
mod key;
mod lock;
mod manager;
mod random;
mod server;
pub mod store;
mod takeover;
mod text;
mod version;
#[cfg(feature = "web")]
pub mod web;

pub use actor::Actor;
pub use description::Description;
pub use ended::{EndReason, SessionEnded};
pub use error::{BoxError, LockError, StoreError, StoreErrorKind};
pub use event::LockEvent;
pub use key::{InvalidKey, LockId, LockKey, Lockable, Named};
pub use lock::{Aid, Answer, Ask, FencingToken, Holder, Lock, LockToken, Mode, TabId};
pub use manager::{
    BuildError, Job, LockEvents, LockGuard, LockGuards, LockManager, LockManagerBuilder, Wait,
    metrics,
};
#[cfg(feature = "_mongo")]
#[doc(inline)]
pub use store::MongoStore;
#[doc(inline)]
pub use store::{MemoryStore, Released, TryAcquire};
pub use takeover::{LossCause, Takeover};
#[doc(inline)]
pub use version::{InvalidVersion, Version};
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
    pub use crate::{
        ended::MAX_NAMED_LOCKS,
        key::MAX_ID_BYTES,
        lock::{MAX_ASK_BYTES, MAX_ASKS, MAX_LABEL_BYTES},
        manager::{Limits, MAX_COLLECTIONS, MAX_REASON_BYTES},
        store::{DEFAULT_TTL, MAX_READERS, TTL_RANGE},
    };
}
