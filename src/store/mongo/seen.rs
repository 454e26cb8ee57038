//! The last known state of each record, in this process.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hash},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::{
    key::LockId,
    lock::{Aid, Lock, Mode},
};

/// The maximum number of remembered records: 128 KiB for each collection.
const SLOTS: usize = 4096;

/// Hints which command will suffice, never a decision: two records may share a slot, and this process does
/// not see the changes by other processes.
#[derive(Debug)]
pub(super) struct Seen {
    slots: Mutex<Box<[Slot]>>,
    hasher: RandomState,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    id: u64,
    /// The session that held the lock, and until when.
    held: Option<(u64, Instant)>,
}

impl Seen {
    pub(super) fn new() -> Self {
        let slots = vec![Slot::default(); SLOTS].into_boxed_slice();
        Self { slots: Mutex::new(slots), hasher: RandomState::new() }
    }

    /// Whether the record existed when it was last seen.
    pub(super) fn is_there(&self, id: &LockId) -> bool {
        let hash = self.hash(id);
        self.slots()[hash as usize % SLOTS].id == hash
    }

    /// Whether another session held the lock when it was last seen, and its lease has not expired since.
    pub(super) fn is_held_by_another(&self, id: &LockId, than: &Aid) -> bool {
        let (hash, own) = (self.hash(id), self.hash(than));
        let Slot { id, held } = self.slots()[hash as usize % SLOTS];
        id == hash && held.is_some_and(|(aid, until)| aid != own && until > Instant::now())
    }

    /// Notes that the record exists.
    pub(super) fn there(&self, id: &LockId) {
        self.note(id, None);
    }

    /// Notes that this lock is live. Only an exclusive lock refuses everybody else.
    pub(super) fn held(&self, lock: &Lock) {
        let is_exclusive = lock.mode == Mode::Exclusive;
        let held = is_exclusive.then(|| (self.hash(&lock.aid), lock.expires_at));
        self.note(lock.key.id(), held);
    }

    /// Notes that the record no longer exists.
    pub(super) fn gone(&self, id: &LockId) {
        let hash = self.hash(id);
        let slot = &mut self.slots()[hash as usize % SLOTS];
        if slot.id == hash {
            *slot = Slot::default();
        }
    }

    /// Notes that the lock may be free.
    pub(super) fn freed(&self, id: &LockId) {
        let hash = self.hash(id);
        let slot = &mut self.slots()[hash as usize % SLOTS];
        if slot.id == hash {
            slot.held = None;
        }
    }

    fn note(&self, id: &LockId, held: Option<(u64, Instant)>) {
        let hash = self.hash(id);
        self.slots()[hash as usize % SLOTS] = Slot { id: hash, held };
    }

    fn slots(&self) -> MutexGuard<'_, Box<[Slot]>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never zero, which marks an empty slot.
    fn hash(&self, of: impl Hash) -> u64 {
        self.hasher.hash_one(of).max(1)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::key::LockKey;

    fn lock(aid: &Aid, expires_at: Instant) -> Lock {
        Lock {
            key: LockKey::new("workitem", 5).unwrap(),
            description: None,
            mode: Mode::Exclusive,
            aid: aid.clone(),
            token: None,
            tab: None,
            fence: None,
            holder: None,
            since: SystemTime::now(),
            expires_at,
        }
    }

    #[test]
    fn what_was_seen_is_remembered_until_it_has_gone() {
        let (seen, id) = (Seen::new(), LockId::from(5_i64));
        assert!(!seen.is_there(&id));
        seen.there(&id);
        assert!(seen.is_there(&id));
        assert!(!seen.is_there(&LockId::from(6_i64)));
        seen.gone(&id);
        assert!(!seen.is_there(&id));
    }

    #[test]
    fn a_holder_is_remembered_until_its_lock_is_free_or_expires() {
        let (seen, id) = (Seen::new(), LockId::from(5_i64));
        let (alice, bob) = (Aid::new(), Aid::new());
        let later = Instant::now() + Duration::from_secs(60);
        seen.held(&lock(&alice, later));
        assert!(seen.is_there(&id));
        assert!(seen.is_held_by_another(&id, &bob));
        assert!(!seen.is_held_by_another(&id, &alice), "its own lock");
        seen.freed(&id);
        assert!(seen.is_there(&id) && !seen.is_held_by_another(&id, &bob));
        seen.held(&lock(&alice, Instant::now()));
        assert!(!seen.is_held_by_another(&id, &bob), "expired");
        seen.held(&lock(&alice, later));
        seen.gone(&id);
        assert!(!seen.is_held_by_another(&id, &bob));
    }
}
