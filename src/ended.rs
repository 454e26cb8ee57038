//! The end of a session, as the application is told.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{key::LockKey, lock::Aid};

/// How many of its locks the announcement of a session's end names at most.
pub const MAX_NAMED_LOCKS: usize = 1000;

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EndReason {
    /// The person ended it: `purge`, `clear`, `Identity::logout`, or a deadline of the identity.
    LoggedOut,
    /// It fell silent: none of its locks was renewed for their ttl. Or its time was over, if it is in
    /// a session store that can tell.
    Expired,
    /// Somebody else ended it.
    Revoked,
}

#[cfg(feature = "_mongo")]
impl EndReason {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::LoggedOut => "logged_out",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        }
    }

    /// What is not known counts as a logout: records of the first version of this crate say nothing.
    pub(crate) fn from_stored(reason: &str) -> Self {
        let known = [Self::Expired, Self::Revoked].into_iter().find(|r| r.as_str() == reason);
        known.unwrap_or(Self::LoggedOut)
    }
}

/// A session that has ended, with what it held.
///
/// For the listener of
/// [`on_session_end`](crate::LockManagerBuilder::on_session_end).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionEnded {
    /// Tells this end from every other, and is the same when it is announced again.
    pub event: Uuid,
    /// The session.
    pub aid: Aid,
    /// Why it ended.
    pub reason: EndReason,
    /// Whether it is over. A session that has only fallen silent (its locks have run out, and that is
    /// all that is known) may come back, lock again, and end once more.
    pub for_good: bool,
    /// The locks that went with it, at most [`MAX_NAMED_LOCKS`].
    pub locks: Vec<LockKey>,
    /// When it ended, by the server's clock.
    pub at: SystemTime,
    /// Whether a listener may have been called with this `event` before, by a server that was killed
    /// or cut off before it could say so.
    pub repeated: bool,
}
