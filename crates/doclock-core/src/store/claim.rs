//! The arguments of the verbs: a claim, a grant, a removal, a query.

use std::time::Duration;

use crate::{
    key::LockKey,
    lock::{Aid, Holder, Lock, LockToken, Mode, PageId, TabId},
    store::Turn,
    takeover::TakenBy,
};

/// A claim on a lock, with all that the store needs to grant it.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The session that is to hold the lock.
    pub aid: Aid,
    /// The name of this acquisition, chosen before the first attempt. Each repetition carries the [next
    /// token](LockToken::next_attempt). The store can thus recognise the same claim, and can tell a
    /// late attempt from the one that was granted.
    pub token: LockToken,
    /// The tab of the session that claims the lock, stored with the lock.
    pub tab: Option<TabId>,
    /// The page that claims the lock, stored with it too. Re-entry replaces it with the newer page, if the
    /// claim names one.
    pub page: Option<PageId>,
    /// The holder as others see it.
    pub holder: Holder,
    /// By whom and why a lock is taken over, in a [`hand_over`](crate::store::Locks::hand_over) that the holder did
    /// not ask for. Watchers are told.
    pub taken: Option<TakenBy>,
    /// Exclusive or shared.
    pub mode: Mode,
    /// The shared lock of the session that this exclusive claim upgrades. If that lock is no longer live, the answer
    /// of [`try_acquire`](crate::store::Locks::try_acquire) is [`Lost`](crate::store::TryAcquire::Lost), because
    /// somebody may have written in between. `None` for an ordinary claim. A waiter upgrades nothing, so
    /// [`hand_over`](crate::store::Locks::hand_over) does not read this field.
    pub upgrades: Option<LockToken>,
    /// How long the lock outlives the last sign of life of its session.
    pub ttl: Duration,
    /// How long after the grant the lock expires, however often it is renewed.
    pub max_hold: Option<Duration>,
    /// The turn of a waiter in a [fair](crate::store::Rules::fair) collection. `None` if the claim does not wait: it
    /// then comes after all waiters.
    pub turn: Option<Turn>,
}

/// A session whose locks are to be [renewed](crate::store::Locks::renew).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Active {
    /// The session.
    pub aid: Aid,
    /// Of the exclusive locks that [tabs](Claim::tab) have taken, only those that are named here are renewed, because
    /// the other tabs may have crashed. `None`: all.
    pub named: Option<Vec<NamedBy>>,
}

/// How a request names the locks that tabs of its session have taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NamedBy {
    /// All locks of this tab.
    Tab(TabId),
    /// This acquisition.
    Token(LockToken),
}

impl Active {
    /// All locks of the session.
    #[must_use]
    pub fn all_of(aid: &Aid) -> Self {
        Self { aid: aid.clone(), named: None }
    }

    /// True if a lock with this tab and token is to be renewed.
    pub(crate) fn names(&self, tab: Option<TabId>, token: Option<LockToken>) -> bool {
        let (Some(named), Some(tab)) = (&self.named, tab) else { return true };
        named.iter().any(|it| match it {
            NamedBy::Tab(it) => *it == tab,
            NamedBy::Token(it) => Some(*it) == token,
        })
    }
}

/// One grant of a lock, as its holder names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acquisition {
    /// The document.
    pub key: LockKey,
    /// The session.
    pub aid: Aid,
    /// The token of the grant.
    pub token: LockToken,
    /// The mode of the grant, or [`Shared`](Mode::Shared) if the caller does not know it.
    pub mode: Mode,
}

impl Acquisition {
    /// An acquisition of an exclusive lock.
    #[must_use]
    pub fn exclusive(key: &LockKey, aid: &Aid, token: LockToken) -> Self {
        Self { key: key.clone(), aid: aid.clone(), token, mode: Mode::Exclusive }
    }

    /// The acquisition of this lock; `None` if a foreign program holds the lock.
    #[must_use]
    pub fn of(lock: &Lock) -> Option<Self> {
        let (key, aid, token) = (lock.key.clone(), lock.aid.clone(), lock.token?);
        Some(Self { key, aid, token, mode: lock.mode })
    }
}

/// Which lock [`Locks::remove_lock`](crate::store::Locks::remove_lock) removes, and on which condition.
#[derive(Debug, Clone, Copy)]
pub enum Removal<'a> {
    /// The holder releases its lock.
    Release(&'a Acquisition),
    /// The request that claimed the lock no longer wants it. Any of these attempts of its claim may have been granted.
    /// Removed only if no other request was told that the session holds the lock:
    /// another request of the session may have been answered
    /// [`AlreadyMine`](crate::store::TryAcquire::AlreadyMine), or may have saved. The lock then belongs
    /// to that request, and stays.
    Retract(&'a [Acquisition]),
    /// Somebody other than the holder removes the lock. The lock may be a foreign one. Removed only while it is
    /// live. Watchers learn who broke it, unless it is a foreign or a shared lock.
    Break {
        /// The lock as it was shown.
        seen: &'a Lock,
        /// By whom, and why.
        taken: &'a TakenBy,
    },
}

impl Removal<'_> {
    /// The document; `None` if there is nothing to remove.
    #[must_use]
    pub fn key(&self) -> Option<&LockKey> {
        match self {
            Self::Release(it) => Some(&it.key),
            Self::Retract(attempts) => attempts.first().map(|it| &it.key),
            Self::Break { seen, .. } => Some(&seen.key),
        }
    }
}

/// Which live locks of a collection [`Locks::locks`](crate::store::Locks::locks) reads.
#[derive(Debug, Clone, Copy)]
pub enum Query<'a> {
    /// At most one lock on each of these documents. Of several readers: the lock of the session `aid`, or
    /// else the lock that expires last.
    Each {
        /// The documents.
        keys: &'a [LockKey],
        /// The session that asks.
        aid: Option<&'a Aid>,
    },
    /// All locks on these documents: the exclusive lock, or the locks of all readers.
    On(&'a [LockKey]),
    /// All locks of these sessions.
    Of(&'a [Aid]),
    /// All locks.
    All,
}
