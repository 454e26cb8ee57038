//! The lock that a caller wants, how long the caller waits, and the outcome of its claim.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::OwnedSemaphorePermit;

use crate::{
    actor::Person,
    clock,
    key::LockKey,
    lock::{Aid, Holder, Lock, LockToken, Mode, PageId, TabId},
    store::{Acquisition, Claim, TryAcquire, Turn},
};

/// Whether, and how long, to wait for a lock that has another holder.
///
/// A release wakes the waiters in the order of their arrival within this process. See
/// [`LockManager::acquire`](crate::LockManager::acquire).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait(
    /// How long at most. `None`: without a limit.
    pub(super) Option<Duration>,
);

impl Wait {
    /// Does not wait: one command, and its answer.
    #[must_use]
    pub fn no() -> Self {
        Self(Some(Duration::ZERO))
    }

    /// Waits for at most this time. Zero is [`no`](Self::no).
    ///
    /// The answer comes at most one [deadline](crate::LockManagerBuilder::deadline) later. This also
    /// holds in an outage, for any number of waiters, and in a [fair](crate::Lockable::FAIR) collection.
    /// If the time is over before the caller could ask the store, it asks once, unless the holder is known. If an
    /// answer of the store is under way, the caller waits for the answer. When the manager
    /// [shuts down](crate::LockManager::shutdown), the wait ends at once.
    #[must_use]
    pub fn for_at_most(time: Duration) -> Self {
        Self(Some(time))
    }

    /// Waits without a limit, also during outages of the store. Ends at once when the manager [shuts
    /// down](crate::LockManager::shutdown).
    #[must_use]
    pub fn until_acquired() -> Self {
        Self(None)
    }

    /// The rest of this wait for the next lock. A wait with a limit keeps a limit, even if no time is left.
    pub(crate) fn since(self, began: Instant) -> Self {
        Self(self.0.map(|time| time.saturating_sub(clock::since(began))))
    }
}

/// The lock that a caller wants, and for whom.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) key: LockKey,
    pub(crate) aid: Aid,
    /// Whose waiters are limited together; `None` for a job.
    pub(crate) person: Option<Person>,
    pub(crate) holder: Holder,
    /// The tab of the session that wants the lock.
    pub(crate) tab: Option<TabId>,
    pub(crate) page: Option<PageId>,
    pub(crate) mode: Mode,
    /// The shared lock that is to become exclusive. Such a claim does not wait.
    pub(crate) upgrades: Option<LockToken>,
    /// The manager's ttl, or a shorter one.
    pub(crate) ttl: Duration,
}

impl Wanted {
    pub(super) fn claim(&self, max_hold: Option<Duration>, turn: Option<Turn>) -> Claim {
        Claim {
            aid: self.aid.clone(),
            // Chosen here, before the first attempt, so that the store recognises a repetition of the
            // same claim.
            token: LockToken::new(),
            holder: self.holder.clone(),
            tab: self.tab,
            page: self.page,
            taken: None,
            mode: self.mode,
            upgrades: self.upgrades,
            ttl: self.ttl,
            max_hold,
            turn,
        }
    }
}

/// The permit of a claim, kept until the last attempt to give its lock back has ended. Without a permit no claim is
/// sent. So each lock that nobody knows of is given back; otherwise it would live as long as its session, which renews
/// all its locks.
pub(super) type ClaimPermit = Arc<OwnedSemaphorePermit>;

/// The outcome of a claim. A new grant is given back unless it is confirmed.
pub(crate) type Acquired = TryAcquire<Provisional>;

/// The shared lock that the claim is to replace.
pub(super) fn upgraded_from(key: &LockKey, claim: &Claim) -> Option<Acquisition> {
    let (key, aid) = (key.clone(), claim.aid.clone());
    claim.upgrades.map(|token| Acquisition { key, aid, token, mode: Mode::Shared })
}

/// The lock that the session has, or that is in its way.
pub(super) fn lock_of(acquired: &Acquired) -> Option<&Lock> {
    match acquired {
        TryAcquire::Granted(fresh) => Some(&fresh.lock),
        TryAcquire::AlreadyMine(lock) | TryAcquire::Held(lock) => Some(lock),
        TryAcquire::Lost(_) => None,
    }
}

type GiveBack = dyn FnOnce(Acquisition, Joined) + Send + Sync;

/// What becomes of an unwanted grant that other requests of its session have joined meanwhile: they were told that the
/// session holds the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joined {
    /// The lock stays, for them.
    Keep,
    /// The lock goes: what forbids it to one request forbids it to all.
    Lose,
}

/// A fresh lock that is given back when this value is dropped, unless it was confirmed before.
///
/// So a request leaves no lock behind, however it ends: a deadline passes, a handler is dropped with its
/// connection, a sibling extractor fails, a document does not exist.
pub(crate) struct Provisional {
    pub(crate) lock: Lock,
    pub(crate) token: LockToken,
    /// `None` once the lock is confirmed.
    give_back: Option<Box<GiveBack>>,
}

impl Provisional {
    /// The lock that was granted to this claim.
    pub(super) fn new(
        lock: Lock,
        claim: &Claim,
        give_back: impl FnOnce(Acquisition, Joined) + Send + Sync + 'static,
    ) -> Self {
        // The lock may carry the token of an earlier attempt.
        let token = lock.token.unwrap_or(claim.token);
        Self { lock, token, give_back: Some(Box::new(give_back)) }
    }

    /// Keeps the lock.
    pub(crate) fn confirm(mut self) -> Lock {
        self.give_back = None;
        self.lock.clone()
    }

    /// The lock is gone by other means, and need not be given back.
    pub(crate) fn forget(mut self) {
        self.give_back = None;
    }

    /// Gives the lock back, also if other requests have joined the grant.
    pub(super) fn refuse_to_all(mut self) {
        self.end(Joined::Lose);
    }

    fn end(&mut self, joined: Joined) {
        if let Some(give_back) = self.give_back.take() {
            let Lock { key, aid, mode, .. } = self.lock.clone();
            give_back(Acquisition { key, aid, token: self.token, mode }, joined);
        }
    }
}

impl Drop for Provisional {
    fn drop(&mut self) {
        self.end(Joined::Keep);
    }
}

impl fmt::Debug for Provisional {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provisional").field("lock", &self.lock).finish_non_exhaustive()
    }
}
