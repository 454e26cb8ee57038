//! Where each owner waits, and how many locks it holds that others wait for. Without this index, a
//! deadlock search would have to walk through all queues.

use std::collections::{BTreeSet, btree_set};

use crate::{key::LockKey, lock::Aid, random::HashMap};

#[derive(Debug, Default)]
pub(in crate::manager) struct Owners(HashMap<Aid, Owner>);

/// A session or a job that waits here, or holds a lock that others wait for here.
#[derive(Debug, Default)]
struct Owner {
    /// The documents that the owner waits for, with its numbers in their queues.
    places: BTreeSet<(LockKey, u64)>,
    /// How many of them count towards the limits.
    counted: usize,
    /// How many locks it holds that others wait for here.
    in_the_way: usize,
}

impl Owners {
    pub(in crate::manager) fn waits(&mut self, owner: &Aid, key: &LockKey, number: u64) {
        self.0.entry(owner.clone()).or_default().places.insert((key.clone(), number));
    }

    pub(in crate::manager) fn waits_no_more(
        &mut self,
        owner: &Aid,
        key: &LockKey,
        number: u64,
        is_counted: bool,
    ) {
        self.change(owner, |it| {
            it.places.remove(&(key.clone(), number));
            it.counted -= usize::from(is_counted);
        });
    }

    pub(in crate::manager) fn counts(&mut self, owner: &Aid) {
        self.change(owner, |it| it.counted += 1);
    }

    pub(in crate::manager) fn counted(&self, owner: &Aid) -> usize {
        self.0.get(owner).map_or(0, |it| it.counted)
    }

    pub(in crate::manager) fn gets_in_the_way(&mut self, owner: &Aid) {
        self.0.entry(owner.clone()).or_default().in_the_way += 1;
    }

    pub(in crate::manager) fn gets_out_of_the_way(&mut self, owner: &Aid) {
        self.change(owner, |it| it.in_the_way = it.in_the_way.saturating_sub(1));
    }

    fn change(&mut self, owner: &Aid, change: impl FnOnce(&mut Owner)) {
        let Some(it) = self.0.get_mut(owner) else { return };
        change(it);
        if it.places.is_empty() && it.in_the_way == 0 {
            self.0.remove(owner);
        }
    }

    /// Whether this owner holds a lock that others wait for here. No other owner can be in a deadlock.
    pub(in crate::manager) fn is_in_the_way(&self, owner: &Aid) -> bool {
        self.0.get(owner).is_some_and(|it| it.in_the_way > 0)
    }

    /// Whether a deadlock search can go on from this owner: it waits in a second place, or holds a lock
    /// that others wait for.
    pub(in crate::manager) fn is_linked(&self, owner: &Aid) -> bool {
        self.0.get(owner).is_some_and(|it| it.places.len() + it.in_the_way > 1)
    }

    /// The places where it waits.
    pub(in crate::manager) fn places(
        &self,
        owner: &Aid,
    ) -> Option<btree_set::Iter<'_, (LockKey, u64)>> {
        self.0.get(owner).map(|it| it.places.iter()).filter(|places| places.len() > 0)
    }

    /// The owner's numbers in the queue of this document.
    pub(in crate::manager) fn numbers_in(&self, owner: &Aid, key: &LockKey) -> Vec<u64> {
        let Some(it) = self.0.get(owner) else { return Vec::new() };
        let in_queue = (key.clone(), 0)..=(key.clone(), u64::MAX);
        it.places.range(in_queue).map(|(_, number)| *number).collect()
    }
}
