//! What happens to locks, for those who look on.

use crate::{lock::Lock, store::Taken};

/// What has happened to a lock, as [`LockManager::events`](crate::LockManager::events) tells it.
///
/// Renewals are not told. Each carries the lock as it was when it was last seen.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum LockEvent {
    /// Somebody has got it.
    Acquired(Lock),
    /// It was given back; or it ran into its [`max_hold`](crate::LockManagerBuilder::max_hold), or was
    /// run out when somebody else took it.
    Released(Lock),
    /// Its session has fallen silent.
    Expired(Lock),
    /// It was broken or taken over by somebody who is not its holder.
    Broken(Lock, Taken),
    /// It went with its session, which was ended.
    SessionEnded(Lock),
    /// Something may have happened to any lock: look at everything anew. The first of all events, and
    /// after each gap.
    Resync,
}

impl LockEvent {
    /// The lock that it is about.
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

    /// Its name on the wire.
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
