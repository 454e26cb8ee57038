// The first definition of a link counts: here pages are modules, in the repository they are files.
#![doc = include_str!("guide/links.md")]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
// The manager has verbs that only the layer for the web uses.
#![cfg_attr(not(feature = "web"), allow(dead_code))]

mod actor;
mod clock;
#[cfg(feature = "test-util")]
pub mod conformance;
mod ended;
mod error;
mod event;
#[cfg(any(doc, doctest))]
pub mod guide;
mod key;
mod lock;
mod manager;
mod random;
mod store;
#[cfg(feature = "web")]
mod web;

pub use actor::Actor;
pub use ended::{EndReason, MAX_NAMED_LOCKS, SessionEnded};
pub use error::{BoxError, LockError, StoreError, StoreErrorKind};
pub use event::LockEvent;
pub use key::{InvalidKey, LockId, LockKey, Lockable, MAX_ID_BYTES, Named};
pub use lock::{Aid, FencingToken, Holder, Lock, LockToken, MAX_LABEL_BYTES, Mode, PageId, TabId};
#[cfg(feature = "metrics")]
pub use manager::metrics;
pub use manager::{
    BuildError, Health, HealthReport, HealthStatus, Job, LockEvents, LockGuard, LockGuards,
    LockManager, LockManagerBuilder, MAX_REASON_BYTES, ReaperHealth, ReaperState, StoreHealth,
    TaskPanics, Wait, Wakeup,
};
#[cfg(feature = "test-util")]
pub use random::seed_randomness;
#[cfg(feature = "test-util")]
pub use store::OnRecord;
#[cfg(all(feature = "mongo-session", feature = "_mongo"))]
pub use store::StoredSession;
pub use store::{
    Change, Claim, Edit, Format, Interest, LastEnd, MAX_READERS, MemoryStore, Released, Rules,
    Saved, Store, StoreStatus, StoredDocument, Swept, Taken, Topology, TryAcquire, Watch,
};
#[cfg(feature = "_mongo")]
pub use store::{Finding, MongoStore, Severity};
#[cfg(feature = "web")]
pub use web::{
    Acquire, Confirm, Guarded, HeldDoc, LockedDoc, LockingSession, LockingSessionMiddleware,
    Problem, SessionLocks, Share, SharedDoc, lock_api,
};
#[cfg(all(feature = "mongo-session", feature = "_mongo"))]
pub use web::{MongoSessionStore, MongoSessionStoreBuilder};
