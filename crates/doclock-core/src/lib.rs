#![doc = include_str!("../README.md")]

#[doc(hidden)]
pub mod actor;
#[doc(hidden)]
pub mod clock;
#[doc(hidden)]
pub mod description;
#[doc(hidden)]
pub mod ended;
#[doc(hidden)]
pub mod error;
#[doc(hidden)]
pub mod event;
pub mod freeze;
#[doc(hidden)]
pub mod key;
#[doc(hidden)]
pub mod lock;
#[doc(hidden)]
pub mod random;
#[doc(hidden)]
pub mod server;
pub mod store;
#[doc(hidden)]
pub mod takeover;
#[doc(hidden)]
pub mod text;
#[doc(hidden)]
pub mod version;

pub use actor::Actor;
pub use description::Description;
pub use ended::{EndReason, SessionEnded};
pub use error::{BoxError, StoreError, StoreErrorKind};
pub use event::LockEvent;
pub use key::{InvalidKey, LockId, LockKey, Lockable, Named};
pub use lock::{Aid, Answer, Ask, FencingToken, Holder, Lock, LockToken, Mode, TabId};
#[doc(inline)]
pub use store::{MemoryStore, Released, TryAcquire};
pub use takeover::{LossCause, Takeover};
#[doc(inline)]
pub use version::{InvalidVersion, Version};

/// The limits that no setting changes.
pub mod limits {
    pub use crate::{
        ended::MAX_NAMED_LOCKS,
        key::MAX_ID_BYTES,
        lock::{MAX_ASK_BYTES, MAX_LABEL_BYTES},
        store::{DEFAULT_TTL, MAX_READERS, TTL_RANGE, lock_rules::MAX_ASKS},
    };
}
