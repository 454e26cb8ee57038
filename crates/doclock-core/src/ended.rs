//! The end of a session, as the application is told about it.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{
    key::LockKey,
    lock::{Aid, Holder},
};

/// How many locks the announcement of a session's end names at most.
pub const MAX_NAMED_LOCKS: usize = 1000;

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EndReason {
    /// The person ended it: `purge`, `clear`, `Identity::logout`, or a deadline of the identity.
    LoggedOut,
    /// The idle timeout of the session has passed: none of its locks was renewed for the ttl. Or the
    /// session itself has expired, if its session store reports this.
    Expired,
    /// Another person ended it.
    Revoked,
}

impl EndReason {
    #[doc(hidden)]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LoggedOut => "logged_out",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        }
    }

    /// An unknown reason counts as a logout, because records of the first version of this crate contain
    /// no reason.
    #[doc(hidden)]
    pub fn from_name(reason: &str) -> Self {
        use serde::de::value::{Error, StrDeserializer};

        Self::deserialize(StrDeserializer::<Error>::new(reason)).unwrap_or(Self::LoggedOut)
    }
}

/// A session that has ended, with its locks.
///
/// For the listener of
/// `LockManagerBuilder::on_session_end`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionEnded {
    /// Identifies this end. A repeated announcement has the same value.
    pub event: Uuid,
    /// The session.
    pub aid: Aid,
    /// The holder: the name and the id with which the session took one of its locks. `None` if the session ended
    /// without a lock. The holder was a [job](Aid::is_job), or the session of a person.
    pub holder: Option<Holder>,
    /// Why it ended.
    pub reason: EndReason,
    /// True if the session is over. False for an idle session: its locks have expired, and nothing more is
    /// known. An idle session may come back, lock again, and end once more.
    pub for_good: bool,
    /// The locks that ended with the session, at most [`MAX_NAMED_LOCKS`].
    pub locks: Vec<LockKey>,
    /// How many locks beyond these ended with the session.
    pub more: usize,
    /// When it ended, by the server's clock.
    pub at: SystemTime,
    /// True if a listener may have been called with this `event` before, by a server that was killed or
    /// cut off before it could record the call.
    pub repeated: bool,
}
