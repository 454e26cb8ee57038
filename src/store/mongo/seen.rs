//! Remembers which records existed when this process last saw them.

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::key::LockId;

/// The maximum number of remembered records: 32 KiB for each collection.
const SLOTS: usize = 4096;

/// A hint which form of a command will suffice, never a decision: two records may share a slot, and
/// this process does not see the changes by other processes.
#[derive(Debug)]
pub(super) struct Seen {
    slots: Box<[AtomicU64]>,
    hasher: RandomState,
}

impl Seen {
    pub(super) fn new() -> Self {
        let slots = (0..SLOTS).map(|_| AtomicU64::new(0)).collect();
        Self { slots, hasher: RandomState::new() }
    }

    /// Whether the record existed when it was last seen.
    pub(super) fn is_there(&self, id: &LockId) -> bool {
        let (slot, hash) = self.slot(id);
        slot.load(Relaxed) == hash
    }

    /// Notes that the record exists.
    pub(super) fn there(&self, id: &LockId) {
        let (slot, hash) = self.slot(id);
        slot.store(hash, Relaxed);
    }

    /// Notes that the record no longer exists.
    pub(super) fn gone(&self, id: &LockId) {
        let (slot, hash) = self.slot(id);
        let _ = slot.compare_exchange(hash, 0, Relaxed, Relaxed);
    }

    fn slot(&self, id: &LockId) -> (&AtomicU64, u64) {
        let hash = self.hasher.hash_one(id).max(1);
        (&self.slots[hash as usize % SLOTS], hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
