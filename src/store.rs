//! The contract of a store, and the stores of this crate.

pub use doclock_core::store::*;
#[cfg(feature = "_mongo")]
#[expect(hidden_glob_reexports, reason = "the rules are not for applications")]
pub(crate) use doclock_core::store::{end_state, lock_rules};
pub(crate) use doclock_document::{Draft, UnclearChange};
#[cfg(feature = "_mongo")]
use doclock_document::{Members, Name, Node, decode, readable};

#[cfg(feature = "_mongo")]
pub(crate) mod mongo;

#[cfg(feature = "_mongo")]
pub(crate) use mongo::Forget;
#[cfg(feature = "_mongo")]
pub use mongo::{
    Danger, HeldLock, Index, MongoStore, Needs, Survey, Surveyed, TransactionError, WorkError,
};
