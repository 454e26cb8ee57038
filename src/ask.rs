//! What somebody asks the holder of a lock, and the holder's answer.

use std::time::SystemTime;

use uuid::Uuid;

use crate::{
    lock::{Aid, Holder},
    random,
    text::one_line,
};

/// The longest text of an ask or of an answer, in bytes. The HTTP API refuses a longer one; the manager cuts it.
pub const MAX_ASK_BYTES: usize = 500;
/// How many asks one lock has at most, each of another person.
pub const MAX_ASKS: usize = 8;

/// Somebody asks the holder of a lock for the document. This changes neither the lock nor the order of its waiters.
///
/// An ask stands in the record of the lock, and goes with the lock. It also goes 90 s after its asker has last repeated it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// Names the ask. A repetition keeps the name, and another text gives the ask a new one.
    pub id: Uuid,
    /// The session that asks. Never shown to anybody.
    pub aid: Aid,
    /// Who asks.
    pub by: Holder,
    /// What for, in one line of at most [`MAX_ASK_BYTES`].
    pub message: String,
    /// When, by the store's clock.
    pub at: SystemTime,
    /// The latest answer of the holder.
    pub answer: Option<Answer>,
}

/// What the holder of a lock answers to an [`Ask`]. To give the document away is to release it: its next waiter is in.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// The holder will release the lock soon, and says a word to that.
    Soon(String),
    /// The holder will not release the lock, and says why.
    No(String),
}

impl Ask {
    /// A new ask. The store sets the time.
    pub(crate) fn new(aid: Aid, by: Holder, message: &str) -> Self {
        let message = one_line(message, MAX_ASK_BYTES);
        Self { id: random::uuid(), aid, by, message, at: SystemTime::UNIX_EPOCH, answer: None }
    }

    /// True if it is an ask of this session, or of another session of the same person.
    pub(crate) fn is_of(&self, aid: &Aid, user: Option<&str>) -> bool {
        self.aid == *aid || user.is_some() && self.by.user.as_deref() == user
    }
}

impl Answer {
    /// `None` if there is no answer of this name.
    pub(crate) fn named(name: &str, message: &str) -> Option<Self> {
        let message = one_line(message, MAX_ASK_BYTES);
        match name {
            "soon" => Some(Self::Soon(message)),
            "no" => Some(Self::No(message)),
            _ => None,
        }
    }

    /// `soon` or `no`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Soon(_) => "soon",
            Self::No(_) => "no",
        }
    }

    /// The holder's words, perhaps none.
    #[must_use]
    pub fn message(&self) -> &str {
        let (Self::Soon(message) | Self::No(message)) = self;
        message
    }
}
