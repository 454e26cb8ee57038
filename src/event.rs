//! The events of locks, for subscribers.

use crate::{lock::Lock, store::TakenBy};

/// An event of a lock, from [`LockManager::events`](crate::LockManager::events).
///
/// Renewals are no events. Each event carries the lock as it was seen last.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum LockEvent {
    /// The lock was granted.
    Acquired(Lock),
    /// The lock was given back, reached its [`max_hold`](crate::LockManagerBuilder::max_hold), or had
    /// expired when another session took it.
    Released(Lock),
    /// The session was idle, and the lock has expired.
    Expired(Lock),
    /// The lock was broken or taken over by another person.
    Broken(Lock, TakenBy),
    /// The session was ended, and the lock with it.
    SessionEnded(Lock),
    /// Any lock may have changed: read everything again. This is the first event of each subscription, and
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
            | Self::SessionEnded(lock) => Some(lock),
            Self::Resync => None,
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
            Self::Resync => "resync",
        }
    }
}
