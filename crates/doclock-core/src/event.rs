//! The events of locks, for subscribers.

use crate::{
    key::LockKey,
    lock::{Ask, Lock},
    store::Written,
    takeover::TakenBy,
};

/// An event of a lock, from `LockManager::events`.
///
/// Renewals are no events. Each event carries the lock as it was seen last.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum LockEvent {
    /// The lock was granted.
    Acquired(Lock),
    /// The lock was given back, reached its `max_hold` (`LockManagerBuilder::max_hold`), or had
    /// expired when another session took it.
    Released(Lock),
    /// The session was idle, and the lock has expired.
    Expired(Lock),
    /// The lock was broken or taken over by another person.
    Broken(Lock, TakenBy),
    /// The session was ended, and the lock with it.
    SessionEnded(Lock),
    /// A guarded write of a document was committed. It comes with the lock of the writer, if this process knows it: the
    /// lock may have been taken and released within some milliseconds.
    Saved(LockKey, Written, Option<Lock>),
    /// Somebody asks the holder of this lock for it.
    Asked(Lock, Ask),
    /// The holder of this lock has answered the ask.
    Answered(Lock, Ask),
    /// Any lock may have changed, and any document: read everything again. This is the first event of each subscription, and
    /// also follows each gap.
    Resync,
}

impl LockEvent {
    /// The lock of this event.
    #[must_use]
    pub fn lock(&self) -> Option<&Lock> {
        match self {
            Self::Acquired(lock)
            | Self::Released(lock)
            | Self::Expired(lock)
            | Self::Broken(lock, _)
            | Self::SessionEnded(lock)
            | Self::Asked(lock, _)
            | Self::Answered(lock, _) => Some(lock),
            Self::Saved(_, _, lock) => lock.as_ref(),
            Self::Resync => None,
        }
    }

    /// The document of this event. `None` if it is about all of them.
    #[must_use]
    pub fn key(&self) -> Option<&LockKey> {
        match self {
            Self::Saved(key, ..) => Some(key),
            other => other.lock().map(|lock| &lock.key),
        }
    }

    /// The name of the event on the wire.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Acquired(_) => "acquired",
            Self::Released(_) => "released",
            Self::Expired(_) => "expired",
            Self::Broken(..) => "broken",
            Self::SessionEnded(_) => "session_ended",
            Self::Saved(..) => "saved",
            Self::Asked(..) => "asked",
            Self::Answered(..) => "answered",
            Self::Resync => "resync",
        }
    }
}
