//! Every way in which a lock operation can fail, each with what to do about it.

use std::{error::Error, time::Duration};

use crate::{
    key::{InvalidKey, LockKey},
    lock::Lock,
};

/// Why a document could not be locked, held, saved or released.
///
/// As an answer to an HTTP request each variant has its status; see [Answers](crate#answers).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another session holds the lock. (423)
    #[error("{} is locked by {}", .0.key, label_of(.0))]
    Held(Box<Lock>),

    /// Another tab of this session holds the lock. It can be moved over. (423)
    #[error("another tab of this browser has {} open for editing", .0.key)]
    HeldByOtherTab(Box<Lock>),

    /// The policy does not allow this person to take the lock over from its holder. (403)
    #[error("taking over the lock on {key} is not allowed to you")]
    TakeOverRefused {
        /// The document.
        key: LockKey,
    },

    /// The browser loads this page in advance (`Sec-Purpose: prefetch`), and nobody may ever see it. (403)
    #[error("no lock is taken for a page that is loaded in advance")]
    Speculative,

    /// Waiting for the lock would never end: whoever holds it waits for one that this session or job
    /// holds, perhaps by way of others. Release something, and try again. (423)
    #[error("waiting for {key} would never end: its holder waits for what is held here")]
    WouldDeadlock {
        /// What was asked for.
        key: LockKey,
        /// Who holds it.
        holder: Option<Box<Lock>>,
    },

    /// The session holds as many locks as one session may:
    /// [`max_locks_per_session`](crate::LockManagerBuilder::max_locks_per_session). No lock was taken. (429)
    #[error(
        "this session holds {limit} locks, and may not hold more; close a document and try again"
    )]
    TooManyLocks {
        /// How many it may hold.
        limit: usize,
    },

    /// Too many wait for locks already, in this web session or on this server. Try again when one of them does
    /// not wait any more; see
    /// [`max_waiters_per_session`](crate::LockManagerBuilder::max_waiters_per_session) and
    /// [`max_waiters`](crate::LockManagerBuilder::max_waiters). (503)
    #[error("{}", too_many_waiters(*.limit, *.per_session))]
    TooManyWaiters {
        /// What was asked for.
        key: LockKey,
        /// How many may wait.
        limit: usize,
        /// Whether that is the limit of one session, or that of the server.
        per_session: bool,
    },

    /// The server is being stopped, so nobody waits for locks here any more. (503)
    #[error("this server is being stopped; try again with the next one")]
    ShutDown,

    /// This session does not hold the lock, or no longer. Nothing was written. (409)
    #[error(
        "this session does not hold the lock on {key}: it was not taken, ran out, was released, or was \
         broken; open the document again"
    )]
    Lost {
        /// The document.
        key: LockKey,
        /// Who holds it now, if anybody was seen to.
        holder: Option<Box<Lock>>,
    },

    /// The client sent the token of an earlier acquisition. (412)
    #[error("the lock that this page had on {key} is gone; open the document again")]
    StaleToken {
        /// The document.
        key: LockKey,
    },

    /// What the client sent as `Lock-Token` is not one. (400)
    #[error("the header Lock-Token must look like <urn:uuid:…>, as the server sent it")]
    MalformedToken,

    /// There is no such document, and no lock on it was left. (404)
    #[error("there is no document {key}")]
    NotFound {
        /// The document.
        key: LockKey,
    },

    /// The collection or the id does not name a lockable document. (400)
    #[error(transparent)]
    InvalidKey(#[from] InvalidKey),

    /// The web session was ended, by a logout in another tab for example. (401)
    #[error("the session has ended; log in again")]
    SessionEnded {
        /// How long ago, by the server's clock.
        ago: Duration,
    },

    /// The policy does not allow this person to break this lock. (403)
    #[error("breaking the lock on {key} is not allowed to you")]
    BreakRefused {
        /// The document.
        key: LockKey,
    },

    /// The store did not answer, or refused. Says nothing about who holds the lock. (503)
    #[error(transparent)]
    Store(#[from] StoreError),

    /// The database does not accept the document as it is: a unique index has its value already,
    /// or a validation rule forbids it. Nothing was written, the lock is as it was. (422)
    #[error("the database does not accept this version of {key}")]
    Rejected {
        /// The document.
        key: LockKey,
        /// What the database said.
        source: StoreError,
    },

    /// The stored document is not one of the Rust type, or cannot be written as one. (500)
    #[error("the document {key} does not fit its Rust type")]
    Document {
        /// The document.
        key: LockKey,
        /// What did not fit.
        source: BoxError,
    },

    /// The application does not use the crate as it must. The text says what to add. (500)
    #[error("{0}")]
    Misconfigured(String),
}

fn too_many_waiters(limit: usize, per_session: bool) -> String {
    if per_session {
        format!(
            "this session waits for {limit} locks already; end one of these requests, and try again"
        )
    } else {
        format!(
            "{limit} requests wait for locks on this server already; try again in a few seconds"
        )
    }
}

fn label_of(lock: &Lock) -> &str {
    lock.holder.as_ref().map_or("another program", |h| &h.label)
}

/// The source of a [`StoreError`].
pub type BoxError = Box<dyn Error + Send + Sync>;

/// What a store says when it cannot give an answer.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    source: Option<BoxError>,
}

/// What is known after a [`StoreError`], and so what may be tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store was not reached, or its answer was lost: the request may or may not have been
    /// carried out. Trying again is safe, because every verb of a store is idempotent.
    Unavailable,
    /// As [`Unavailable`](Self::Unavailable), but the request is not repeated by itself: the answer
    /// to a repetition would not tell what became of the first.
    OutcomeUnknown,
    /// The store has no permission to do this. Trying again does not help.
    Denied,
    /// The store does not accept this document. Nothing was written.
    Rejected,
    /// The store refused the request, or holds something that it cannot read.
    Other,
}

impl StoreError {
    /// An error of this kind; `message` tells an operator what failed and what to do.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// The same, with its cause.
    #[must_use]
    pub fn because(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// What is known.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}
