//! Locks that need not be asked for again: see [`LockManagerBuilder::trust_leases`](super::LockManagerBuilder::trust_leases).

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
        claim::Acquisition,
        guard::lost::{Watch, Watched},
    },
    store::Claim,
};

/// What is left of a lease that is still trusted, at least: enough to answer before it is over.
const MARGIN: Duration = Duration::from_millis(100);
/// How many locks are kept before those that are over are looked for.
const FEW: usize = 1024;

/// The exclusive locks that this process was told its sessions have.
#[derive(Debug, Default)]
pub(in crate::manager) struct Leases(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    locks: HashMap<LockKey, Lease>,
    /// How many there were when it was tidied up last.
    tidied: usize,
}

#[derive(Debug)]
struct Lease {
    lock: Lock,
    page: Option<PageId>,
    /// Hears of whatever this process learns of the lock.
    belief: Watch,
}

impl Leases {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session has it, and nobody is about to give it back.
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

    /// The lock that this claim would be told is the session's own. Of another tab, or another load of
    /// the page, the server has to be told.
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

    /// It is about to go, or may be.
    pub(in crate::manager) fn distrusts(&self, key: &LockKey) {
        if self.settings.trust_leases {
            self.leases.forget(key);
        }
    }
}

/// Has this process learn what other servers do to locks, as long as it runs.
pub(in crate::manager) async fn listen(inner: Weak<Inner>) {
    let Some(mut events) = inner.upgrade().map(|inner| LockManager { inner }.events()) else {
        return;
    };
    while let Some(event) = events.next().await {
        let Some(inner) = inner.upgrade() else { return };
        match &*event {
            LockEvent::Resync => inner.leases.forget_all(),
            // An own one is known better by what was answered.
            LockEvent::Acquired(_) => {}
            event => {
                if let Some(gone) = event.lock().and_then(Acquisition::of) {
                    inner.gone(&gone);
                }
            }
        }
    }
}

/// Begins with the manager.
pub(in crate::manager) fn follow(inner: &Arc<Inner>) {
    if inner.settings.trust_leases {
        inner.runner.spawn_untracked(listen(Arc::downgrade(inner)));
    }
}
