//! The answers of the verbs of a store.

use std::time::{Duration, SystemTime};

use crate::{
    ended::EndReason,
    error::StoreError,
    freeze::Freeze,
    key::LockKey,
    lock::{Aid, Ask, Lock, LockToken, PageId},
    store::StoredDocument,
};

/// The answer to [`end_session`](crate::store::Sessions::end_session).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ended {
    /// The documents whose locks the session has lost with its end.
    pub locks: Vec<LockKey>,
    /// How many locks beyond these were released: a store need not name more than a thousand.
    pub more: usize,
}

/// The answer to [`freezes`](crate::store::Servers::freezes).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Frozen {
    /// The freezes that are on.
    pub on: Vec<Freeze>,
    /// The store's time; `None` if its clock is the clock of this process.
    pub at: Option<SystemTime>,
}

/// How a session last ended, as [`last_ends`](crate::store::Sessions::last_ends) returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastEnd {
    /// [`Expired`](EndReason::Expired) if the session became idle.
    pub reason: EndReason,
    /// True if the session is over. An idle session may come back.
    pub for_good: bool,
    /// How long ago.
    pub ago: Duration,
}

/// The answer to [`ask`](crate::store::Locks::ask).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// The ask is on record.
    Stands {
        /// The ask of this person with its name, its time and its answer.
        ask: Ask,
        /// The sessions that have asked before, the first one first.
        before: Vec<Aid>,
    },
    /// This was a repetition, and the ask is gone: withdrawn, forgotten, or with the lock. Nothing was changed.
    Gone,
    /// Nobody holds the lock. Nothing was changed.
    Free,
    /// The lock is the asker's own, or a foreign program or readers hold it. Nothing was changed.
    NobodyHears,
    /// The lock has [`MAX_ASKS`](crate::limits::MAX_ASKS) asks of others. Nothing was changed.
    TooMany,
}

/// The answer to [`answer`](crate::store::Locks::answer).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answered {
    /// The answer is on record.
    Told,
    /// The ask is gone, or has another text now. Nothing was changed.
    NoSuchAsk,
    /// This acquisition is no longer live. Nothing was changed.
    Lost,
}

/// The answer to [`hand_over`](crate::store::Locks::hand_over).
#[derive(Debug, Clone)]
#[must_use = "the claim may have been granted"]
#[expect(clippy::large_enum_variant, reason = "nearly all answers are locks")]
pub enum HandedOver {
    /// The claim has the lock.
    To(Lock),
    /// A waiter of another server is ahead of the claim, so the lock was released.
    Released,
    /// The acquisition is no longer on record. Nothing was changed.
    AlreadyGone,
}

impl HandedOver {
    /// The lock of the claim.
    #[must_use]
    pub fn lock(self) -> Option<Lock> {
        match self {
            Self::To(lock) => Some(lock),
            Self::Released | Self::AlreadyGone => None,
        }
    }
}

/// The answer to [`try_acquire`](crate::store::Locks::try_acquire). Exhaustive, as the other answers are:
/// the caller must handle each case.
#[derive(Debug, Clone)]
#[must_use = "a lock may have been granted, and must then be released"]
pub enum TryAcquire<G = Lock> {
    /// Granted: the document was free, or the lock on it had expired. Carries the claim's token, or the
    /// token of an earlier attempt of the claim.
    Granted(G),
    /// The session holds the lock already. The lock was renewed, and keeps its token.
    AlreadyMine(Lock),
    /// Another session holds it, or is ahead in the queue.
    Held(Lock),
    /// The shared lock on this document that the claim [upgrades](crate::store::Claim::upgrades) is no longer live.
    /// Nothing was changed, whoever holds the document now.
    Lost(LockKey),
}

/// The answer to [`confirm`](crate::store::Locks::confirm).
#[derive(Debug, Clone)]
pub struct Confirmed {
    /// The live lock of the session.
    pub lock: Lock,
    /// The load of the page that the lock belongs to.
    pub page: Option<PageId>,
    /// True if a second request was told of the lock, so that the first request no longer gives it back.
    pub is_known: bool,
    /// True if the lock is in the grace period of a page that has gone.
    pub is_leaving: bool,
    /// The document, if it was asked for and exists.
    pub document: Option<StoredDocument>,
}

/// The answer to [`remove_lock`](crate::store::Locks::remove_lock) and to
/// [`expire_in`](crate::store::Locks::expire_in).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The lock was there, and is now removed.
    Released,
    /// There was no such lock to remove, which is just as good.
    AlreadyGone,
}

/// The answer to [`renew`](crate::store::Locks::renew).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Renewed {
    /// On how many documents a lock was renewed.
    pub documents: u64,
    /// The sessions whose locks may not all have been renewed. Ask again, for fewer sessions at a time.
    pub late: Vec<Aid>,
}

/// The answer to [`save`](crate::store::Documents::save).
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the document may not have been written"]
pub enum Saved {
    /// Written.
    Saved,
    /// This acquisition is no longer live. Nothing was written.
    Lost,
    /// The lock is live, but the document no longer exists. Nothing was written.
    DocumentGone,
    /// The lock is live, but another program has changed this field since the document was loaded, so that
    /// the changes cannot be [applied](crate::store::Changes::apply). Nothing was written.
    ChangedMeanwhile(String),
}

/// The answer to [`sweep`](crate::store::Sessions::sweep).
#[derive(Debug, Default)]
pub struct Swept {
    /// How many sessions were found to be idle.
    pub sessions: usize,
    /// True if this worker should sweep again at once.
    pub more: bool,
    /// True if the sweep reached its limit, whichever worker goes on.
    pub has_backlog: bool,
    /// True if some news, ends or takeovers, waits to be announced.
    pub announcements: bool,
    /// How long until the first live lock can expire. `None` if there is no lock.
    pub next: Option<Duration>,
    /// The expired locks that this sweep removed or reported, for the metrics. Two sweeps at the same moment may
    /// both name a lock whose session is not idle.
    pub expired: Vec<(LockKey, LockToken)>,
    /// Something has failed in some collections, and is left to the next sweep. The rest was done.
    pub failed: Option<StoreError>,
}
