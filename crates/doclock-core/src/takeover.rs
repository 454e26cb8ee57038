//! A lock that its holder has lost to somebody else, as the application is told about it.

use std::{fmt, time::SystemTime};

use uuid::Uuid;

use crate::{
    key::LockKey,
    lock::{Aid, Holder, LockToken},
};

/// How a holder has lost its lock to somebody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TakeoverKind {
    /// Somebody broke the lock. The document was free then.
    Broken,
    /// Somebody took the lock over, and holds it now.
    TakenOver,
}

impl TakeoverKind {
    #[doc(hidden)]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Broken => "broken",
            Self::TakenOver => "taken_over",
        }
    }

    /// The kind with this name; an unknown one is a break.
    #[doc(hidden)]
    pub fn named(name: Option<&str>) -> Self {
        if name == Some("taken_over") { Self::TakenOver } else { Self::Broken }
    }
}

/// Who breaks a lock or takes it over, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenBy {
    /// Whether the lock was broken or taken over.
    pub kind: TakeoverKind,
    /// By whom: a label to show.
    pub by: String,
    /// The reason, in the words of that person.
    pub reason: String,
}

/// How a session has lost a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossCause {
    /// The lock has expired, because the session was idle; nobody has taken it from the session. Remembered for up to a day.
    Expired,
    /// Somebody has broken the lock or has taken it over, and this server has heard of it within the last minute.
    Taken(TakenBy),
    /// The session was ended, as by a logout.
    SessionEnded,
    /// A request of the session has released the lock on this server, and that is not long ago.
    Released,
}

impl LossCause {
    /// The name, for programs.
    #[doc(hidden)]
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Taken(taken) => taken.kind.as_str(),
            Self::SessionEnded => "session_ended",
            Self::Released => "released",
        }
    }
}

/// In words, for people: the part after "you do not hold the lock:".
impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expired => f.write_str("it has expired"),
            Self::Taken(TakenBy { kind, by, reason }) => {
                let how = match kind {
                    TakeoverKind::Broken => "has broken it",
                    TakeoverKind::TakenOver => "has taken it over",
                };
                write!(f, "{by} {how}")?;
                if reason.is_empty() { Ok(()) } else { write!(f, " ({reason})") }
            }
            Self::SessionEnded => f.write_str("the session was ended"),
            Self::Released => f.write_str("the session has released it"),
        }
    }
}

/// A break or a takeover: somebody other than the holder has removed a lock, or has taken it over for another session.
///
/// For the listener of `LockManagerBuilder::on_lock_taken`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Takeover {
    /// Identifies this event. A repeated announcement has the same value.
    pub event: Uuid,
    /// The document.
    pub key: LockKey,
    /// Whether the lock was broken or taken over.
    pub kind: TakeoverKind,
    /// The former holder, with the id of the user if the application [gave one](crate::Actor::with_id).
    /// `None` if another program held the lock.
    pub from: Option<Holder>,
    /// The session of the former holder.
    pub aid: Aid,
    /// The acquisition that was lost. `None` if another program held the lock.
    pub token: Option<LockToken>,
    /// The person who broke the lock or took it over, with the id of the user if the application gave one.
    pub by: Holder,
    /// The reason that this person gave, perhaps empty.
    pub reason: String,
    /// When it happened, by the store's clock.
    pub at: SystemTime,
    /// True if a listener may have been called with this `event` before, by a server that was killed or
    /// cut off before it could record the call.
    pub repeated: bool,
}
