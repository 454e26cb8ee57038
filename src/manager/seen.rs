//! What the answers of the store tell: each is news for the watchers of the lock, for the waiters, and for the session.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    key::LockKey,
    lock::{Aid, Lock},
    manager::{activity::Activity, observe::Losses, wait::Queues, watched::Watched},
    store::Acquisition,
};

/// Those that live on news of locks.
pub(super) struct Seen {
    pub(super) activity: Activity,
    pub(super) watched: Watched,
    pub(super) queues: Arc<Queues>,
    pub(super) losses: Losses,
    /// How often the locks of a session are renewed.
    pub(super) interval: Duration,
}

impl Seen {
    /// An answer to a question asked at that moment: this is the live lock on its document.
    pub(super) fn saw(&self, lock: &Lock, asked: Instant) {
        self.watched.saw(lock, asked);
        self.activity.saw(&lock.aid, lock.expires_in(), self.interval);
    }

    /// An answer to a question asked at that moment: the session holds these locks and no others.
    pub(super) fn saw_all_of(&self, aid: &Aid, locks: &[Lock], asked: Instant) {
        self.watched.saw_all_of(aid, locks, asked);
        if let Some(left) = locks.iter().map(Lock::expires_in).min() {
            self.activity.saw(aid, left, self.interval);
        }
    }

    /// This acquisition has ended, for whatever reason.
    pub(super) fn gone(&self, lock: &Acquisition) {
        self.activity.gone(&lock.aid, &lock.key);
        self.watched.ended(lock);
        self.queues.machine.lock().ended(lock);
    }

    /// The session held these documents, and holds nothing now.
    pub(super) fn gone_all_of(&self, aid: &Aid, keys: &[LockKey], asked: Instant) {
        self.watched.saw_all_of(aid, &[], asked);
        for key in keys {
            self.activity.gone(aid, key);
            self.queues.machine.lock().freed(key);
        }
    }
}
