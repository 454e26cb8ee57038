//! Every way in which a lock operation can fail, each with advice.

use std::time::Duration;

use doclock_core::store::TryAcquire;
pub(crate) use doclock_core::{BoxError, StoreError, StoreErrorKind};

use crate::{
    freeze::Freeze,
    key::{InvalidKey, LockKey},
    lock::Lock,
    takeover::LossCause,
    version::Version,
};

/// A result with the error of the manager, unless another error is named.
pub(crate) type Result<T, E = LockError> = std::result::Result<T, E>;

/// Why a document could not be locked, held, saved or released.
///
/// Over HTTP each variant has its own status; see [Answers](crate#answers).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another session holds the lock. (423)
    #[error("{} is locked by {}", name_of(.0), label_of(.0))]
    Held(Box<Lock>),

    /// Another tab of this session holds the lock. A takeover is possible. (423)
    #[error("another tab of this browser has {} open for editing", name_of(.0))]
    HeldByOtherTab(Box<Lock>),

    /// The policy does not allow this person to take over the lock. (403)
    #[error("you may not take over the lock on {key}")]
    TakeOverRefused {
        /// The document.
        key: LockKey,
    },

    /// The browser preloads this page (`Sec-Purpose: prefetch`), and perhaps nobody will ever see it.
    /// (403)
    #[error("no lock is taken for a page that is only preloaded")]
    Speculative,

    /// The page that has asked for this lock has been left meanwhile: its beacon has come. No lock is kept. (409)
    #[error("the page that has asked for this lock has been left")]
    PageLeft,

    /// The page was opened for another person than the one who is logged in now. Nothing is locked or saved. (409)
    #[error("somebody else has logged in since this page was opened: open the page again")]
    PersonChanged,

    /// The wait for the lock would never end: its holder waits, directly or through others, for a lock
    /// that this session or job holds. Release a lock, and try again. (423)
    #[error("waiting for {key} would never end: its holder waits for a lock that is held here")]
    WouldDeadlock {
        /// The document.
        key: LockKey,
        /// The holder, if it is known.
        holder: Option<Box<Lock>>,
    },

    /// The session holds as many locks as one session may hold:
    /// [`locks_per_session`](crate::limits::Limits::locks_per_session). No lock was taken.
    /// (429)
    #[error(
        "this session holds {limit} locks, and may not hold more; close a document and try again"
    )]
    TooManyLocks {
        /// How many locks a session may hold.
        limit: usize,
    },

    /// Too many requests of this web session or of this server already wait for locks. Try again when one
    /// of these waits is over; see [`waiters_per_session`](crate::limits::Limits::waiters_per_session),
    /// [`waiters_per_person`](crate::limits::Limits::waiters_per_person) and
    /// [`waiters`](crate::limits::Limits::waiters). (503)
    #[error("{}", too_many_waiters(*.limit, *.per_session))]
    TooManyWaiters {
        /// The document.
        key: LockKey,
        /// How many waiters are allowed.
        limit: usize,
        /// True for a limit of one session or person, false for the limit of the server.
        per_session: bool,
    },

    /// This server is being stopped, so its waits have ended. (503)
    #[error("this server is being stopped; try again, and another server will answer")]
    ShutDown,

    /// The collection is [frozen](crate::LockManager::freeze): no new locks are granted. (423)
    #[error("{key} cannot be locked at the moment: {}", .freeze.reason)]
    Frozen {
        /// The document.
        key: LockKey,
        /// The freeze, with its reason and its end.
        freeze: Box<Freeze>,
    },

    /// A [freeze](crate::LockManager::freeze) would have ended already, by the store's clock. Nothing has
    /// changed. (400)
    #[error("this freeze would have ended already; give a time in the future")]
    PastFreeze,

    /// Nobody holds the lock, so there is nobody to ask. (409)
    #[error("nobody has {key} locked: lock it, instead of asking for it")]
    NotLocked {
        /// The document.
        key: LockKey,
    },

    /// The lock has no holder who would hear an [ask](crate::Ask): it belongs to the session that asks, to readers, or to
    /// another program; or the store keeps no asks. (409)
    #[error(
        "nobody would hear you: {key} is locked in another tab of yours, by readers or by another program; wait for it, or \
         take it over from your other tab"
    )]
    NobodyHears {
        /// The document.
        key: LockKey,
    },

    /// As many others as may already ask the holder of the lock, or this person has asked too often in this minute. (429)
    #[error("too much is being asked for {key}; wait for it, and ask again a minute later")]
    TooManyAsks {
        /// The document.
        key: LockKey,
    },

    /// The ask that was to be answered or repeated is gone: its asker has left or has sent another text, or the lock has
    /// another holder. (404)
    #[error("this ask for {key} is gone: look at the lock again")]
    NoSuchAsk {
        /// The document.
        key: LockKey,
    },

    /// This session does not hold the lock, or holds it no longer. Nothing was written. (409)
    #[error(
        "this session does not hold the lock on {key}: {}; open the document again",
        how_lost(cause.as_ref())
    )]
    Lost {
        /// The document.
        key: LockKey,
        /// The current holder, if one was seen.
        holder: Option<Box<Lock>>,
        /// How the session has lost the lock, if that is known of the acquisition that the caller names.
        cause: Option<LossCause>,
    },

    /// The client sent the token of the live lock, but the request belongs to another session, or to none:
    /// the client does not send the session's cookie back. (423 if the request asked for the lock, 409 if it
    /// had to hold the lock)
    #[error(
        "the token is right, but this request belongs to another session than the lock on {}; send the \
         cookie of the session, or the same login, with each request", .lock.key
    )]
    WrongSession {
        /// The live lock.
        lock: Box<Lock>,
        /// True if the request asked for the lock.
        asked: bool,
    },

    /// Another program, one that takes no locks, has changed this part of the document since it was loaded, and
    /// the save would have rewritten the part as a whole. Nothing was written, and the lock has not changed. Load
    /// the document again. (409)
    #[error(
        "another program has changed `{field}` of {key} since the document was loaded; load it again, and \
         repeat the change"
    )]
    ChangedMeanwhile {
        /// The document.
        key: LockKey,
        /// The path of the part, as in `lines` or `address.phones`; empty if it is the whole document.
        field: String,
    },

    /// After this change it is not certain which elements of an array are which, and some of them have fields that the Rust
    /// type does not name, which would be lost: an element was removed and another one added by one save, for example.
    /// Nothing was written, and the lock has not changed. Two saves can do it. (409)
    #[error(
        "it is not certain which entries of `{field}` of {key} were removed, and which are new; remove entries and save, \
         then add the new ones and save again"
    )]
    UnclearChange {
        /// The document.
        key: LockKey,
        /// The path of the array, as in `lines`.
        field: String,
        /// What the application can do: see [which element is which](crate::guide::saving#which-element-is-which).
        source: BoxError,
    },

    /// The client sent the token of an earlier acquisition. (412)
    #[error("the lock that this page had on {key} is gone; open the document again")]
    StaleToken {
        /// The document.
        key: LockKey,
    },

    /// The document is not what the client shows: it has another version than the request names. Nothing was written. A
    /// lock that the session held before stays. (412)
    #[error("{key} has changed since this page was opened; open it again, and repeat the change")]
    StaleCopy {
        /// The document.
        key: LockKey,
        /// The version of the document now.
        version: Version,
    },

    /// The client's `Lock-Token`, or `lock_token` in the address, is not a token, or there are more than 100 of them. (400)
    #[error(
        "the header Lock-Token must look like <urn:uuid:…>, as the server sent it, at most 100 times; `lock_token` in \
         an address is the same"
    )]
    MalformedToken,

    /// The client's `If-Match`, or `version` in the address, is not a version, or the request means several documents.
    /// (400)
    #[error(
        "the header If-Match must be the ETag that the server sent, in quotes, and `version` in an address the same \
         without quotes; a request that names a version is about one document"
    )]
    MalformedVersion,

    /// The client's `Doclock-Tab`, or `tab` in an address of the lock API or beside `lock_token` or `version`, is not a UUID.
    /// (400)
    #[error(
        "the header Doclock-Tab must be a UUID that the page has chosen, and so must `tab` in an address that also has \
         `lock_token` or `version`, or that leads to the lock API"
    )]
    MalformedTab,

    /// The client says the same by a header and in its address, or twice in the address, but differently. (400)
    #[error("this request says its `{name}` twice, and differently; say it once")]
    SaidTwice {
        /// `lock_token`, `tab` or `version`.
        name: &'static str,
    },

    /// There is no such document. A lock on it was released. (404)
    #[error("there is no document {key}")]
    NotFound {
        /// The document.
        key: LockKey,
    },

    /// The collection or the id does not name a lockable document. (400)
    #[error(transparent)]
    InvalidKey(#[from] InvalidKey),

    /// The web session was ended, for example by a logout in another tab. (401)
    #[error("the session has ended; log in again")]
    SessionEnded {
        /// How long ago it ended, by the server's clock.
        ago: Duration,
    },

    /// The application does not know [whose request](crate::LockManager::clients) this is. (401)
    #[error("log in first")]
    LoginRequired,

    /// The policy does not allow this person to break this lock. (403)
    #[error("you may not break the lock on {key}")]
    BreakRefused {
        /// The document.
        key: LockKey,
    },

    /// The store did not answer, or refused the operation. This says nothing about the holder of the
    /// lock. (503)
    #[error(transparent)]
    Store(#[from] StoreError),

    /// The database was asked to commit, and did not answer: the guarded update or transaction may or may not
    /// be written. Look at the documents before you repeat it. (503)
    #[error("it is not known whether this was written; look at the document before you try again")]
    OutcomeUnknown(#[source] StoreError),

    /// The application's part of a [transaction](crate::MongoStore::transaction), or the comparison of a large document
    /// that is to be saved, was not done in time, although the database answers. Nothing was written, and a repetition
    /// does not help. Do less in it, make the document smaller, or raise the
    /// [deadline](crate::LockManagerBuilder::deadline) and the ttl. (500)
    #[error("this was not done within {limit:?}, so nothing was written; do less at once")]
    TooSlow {
        /// How long a guarded write may take.
        limit: Duration,
    },

    /// The database does not accept this version of the document: a unique index already contains its
    /// value, or a validation rule forbids it. Nothing was written, and the lock has not changed. (422)
    #[error("the database does not accept this version of {key}")]
    Rejected {
        /// The document.
        key: LockKey,
        /// The error of the database.
        source: StoreError,
    },

    /// The stored document cannot be read as the Rust type, or the value cannot be written as a document.
    /// (500)
    #[error("the document {key} does not fit its Rust type")]
    Document {
        /// The document.
        key: LockKey,
        /// The error of the conversion.
        source: BoxError,
    },

    /// The application uses the crate wrongly. The text says how to correct this. (500)
    #[error("{0}")]
    Misconfigured(String),
}

fn too_many_waiters(limit: usize, per_session: bool) -> String {
    if per_session {
        format!("you already wait for {limit} locks; end one of these requests, and try again")
    } else {
        format!(
            "{limit} requests already wait for locks on this server; try again in a few seconds"
        )
    }
}

/// The title of the document, if it is known.
fn name_of(lock: &Lock) -> String {
    match &lock.description {
        Some(described) => format!("“{}”", described.title),
        None => lock.key.to_string(),
    }
}

fn label_of(lock: &Lock) -> &str {
    lock.holder.as_ref().map_or("another program", |h| &h.label)
}

fn how_lost(cause: Option<&LossCause>) -> String {
    let unknown = || "it was not taken, or it expired, was released or was broken".to_owned();
    cause.map_or_else(unknown, ToString::to_string)
}

impl LockError {
    /// The lock that the session now holds.
    ///
    /// # Errors
    /// [`Held`](Self::Held) if another session holds it. [`Lost`](Self::Lost) if the claim upgrades a lock that is gone.
    pub fn unless_granted(answer: TryAcquire) -> Result<Lock> {
        match answer {
            TryAcquire::Granted(lock) | TryAcquire::AlreadyMine(lock) => Ok(lock),
            TryAcquire::Held(lock) => Err(Self::Held(Box::new(lock))),
            TryAcquire::Lost(key) => Err(Self::lost(key)),
        }
    }

    pub(crate) fn lost(key: LockKey) -> Self {
        Self::Lost { key, holder: None, cause: None }
    }

    /// True if the database was not reached, or did not say what became of the operation.
    #[cfg(feature = "web")]
    pub(crate) fn is_outage(&self) -> bool {
        let (Self::Store(error) | Self::OutcomeUnknown(error)) = self else { return false };
        matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::OutcomeUnknown)
    }

    /// True if more was asked than can be done, so that nothing was.
    #[cfg(feature = "web")]
    pub(crate) fn is_overload(&self) -> bool {
        matches!(self, Self::Store(error) if error.kind() == StoreErrorKind::Overloaded)
    }
}
