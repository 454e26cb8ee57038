//! A lock that was taken from its holder, as the application is told about it.

use std::time::SystemTime;

use uuid::Uuid;

use crate::{
    key::LockKey,
    lock::{Aid, Holder, LockToken},
};

/// How a lock was taken from its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Taking {
    /// Somebody broke it. The document was free then.
    Broken,
    /// Somebody took it over, and holds it now.
    TakenOver,
}

/// A lock that somebody else than its holder has removed, or has taken over for another session.
///
/// For the listener of [`on_lock_taken`](crate::LockManagerBuilder::on_lock_taken).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockTaken {
    /// Identifies this event. A repeated announcement has the same value.
    pub event: Uuid,
    /// The document.
    pub key: LockKey,
    /// Whether it was broken or taken over.
    pub how: Taking,
    /// The former holder, with the id of the user if the application [gave one](crate::Actor::with_id).
    /// `None` if another program held the lock.
    pub from: Option<Holder>,
    /// The session of the former holder.
    pub aid: Aid,
    /// The acquisition that was taken. `None` if another program held the lock.
    pub token: Option<LockToken>,
    /// Who took the lock, with the id of the user if the application gave one.
    pub by: Holder,
    /// The reason that this person gave, perhaps empty.
    pub reason: String,
    /// When, by the store's clock.
    pub at: SystemTime,
    /// Whether a listener may have been called with this `event` before, by a server that was killed or
    /// cut off before it could record the call.
    pub repeated: bool,
}

/// What becomes of the note of a [`LockTaken`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The lock was taken, so that a listener is to be told.
    Taken,
    /// The lock was gone before, so there is nothing to tell.
    NotTaken,
    /// The listener was called.
    Told,
}
