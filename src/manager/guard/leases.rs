//! Answers without asking the store: see
//! [`LockManagerBuilder::trust_leases`](crate::LockManagerBuilder::trust_leases).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use crate::{
    clock,
    event::LockEvent,
    key::LockKey,
    lock::{Lock, Mode, PageId},
    manager::{
        Inner, LockManager,
        guard::lost::{Watch, Watched},
    },
    store::{Acquisition, Claim},
};

/// A lease is trusted only if at least this much of it is left: enough time to answer before it expires.
const MARGIN: Duration = Duration::from_millis(100);
/// How many locks are kept before the expired ones are removed.
const FEW: usize = 1024;

/// The exclusive locks that the store has granted to sessions of this process.
#[derive(Debug, Default)]
pub(in crate::manager) struct Leases(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    locks: HashMap<LockKey, Lease>,
    /// How many locks were left after the last removal.
    tidied: usize,
}

#[derive(Debug)]
struct Lease {
    lock: Lock,
    page: Option<PageId>,
    /// The latest news of the lock in this process.
    belief: Watch,
}

impl Leases {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session holds the lock, and is not about to release it.
    fn learn(&self, lock: &Lock, page: Option<PageId>, watched: &Watched) {
        let Some(token) = lock.token.filter(|_| lock.mode == Mode::Exclusive) else { return };
        let belief = watched.watch(lock, token);
        let mut known = self.known();
        if known.locks.len() >= FEW.max(2 * known.tidied) {
            let now = clock::now();
            known.locks.retain(|_, lease| lease.belief.live_until().is_some_and(|it| it > now));
            known.tidied = known.locks.len();
        }
        known.locks.insert(lock.key.clone(), Lease { lock: lock.clone(), page, belief });
    }

    /// The lock, if the store would answer this claim with the session's own lock. The store must be told
    /// of another tab and of another load of the page, so these get no answer here.
    fn answer(&self, key: &LockKey, claim: &Claim) -> Option<Lock> {
        let known = self.known();
        let lease = known.locks.get(key)?;
        let same = (&lease.lock.aid, lease.lock.tab, lease.page, Mode::Exclusive)
            == (&claim.aid, claim.tab, claim.page, claim.mode);
        let until = lease.belief.live_until().filter(|_| same)?;
        (until > clock::now() + MARGIN).then(|| Lock { expires_at: until, ..lease.lock.clone() })
    }

    fn forget(&self, key: &LockKey) {
        self.known().locks.remove(key);
    }

    fn forget_all(&self) {
        self.known().locks.clear();
    }
}

impl Inner {
    pub(in crate::manager) fn trusts(&self, lock: &Lock, page: Option<PageId>) {
        if self.settings.trust_leases {
            self.leases.learn(lock, page, &self.watched);
        }
    }

    pub(in crate::manager) fn trusted(&self, key: &LockKey, claim: &Claim) -> Option<Lock> {
        self.settings.trust_leases.then(|| self.leases.answer(key, claim))?
    }

    /// The lock is about to be released, or may be.
    pub(in crate::manager) fn distrusts(&self, key: &LockKey) {
        if self.settings.trust_leases {
            self.leases.forget(key);
        }
    }
}

/// Follows the actions of other servers on locks, as long as the manager lives.
pub(in crate::manager) async fn listen(inner: Weak<Inner>) {
    let Some(mut events) = inner.upgrade().map(|inner| LockManager { inner }.events()) else {
        return;
    };
    while let Some(event) = events.next().await {
        let Some(inner) = inner.upgrade() else { return };
        match &*event {
            LockEvent::Resync => inner.leases.forget_all(),
            // The answer to the acquire says more about an own lock.
            LockEvent::Acquired(_) => {}
            event => {
                if let Some(gone) = event.lock().and_then(Acquisition::of) {
                    inner.gone(&gone);
                }
            }
        }
    }
}

/// Starts with the manager.
pub(in crate::manager) fn follow(inner: &Arc<Inner>) {
    if inner.settings.trust_leases {
        inner.runner.spawn_untracked(listen(Arc::downgrade(inner)));
    }
}
