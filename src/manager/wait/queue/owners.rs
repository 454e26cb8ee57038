//! Who waits where, and who is in somebody's way: what a search for deadlocks would otherwise have to look
//! for in all queues.

use std::collections::{BTreeSet, btree_set};

use crate::{key::LockKey, lock::Aid, random::HashMap};

#[derive(Debug, Default)]
pub(in crate::manager) struct Owners(HashMap<Aid, Owner>);

/// A session or a job that waits here, or holds something that somebody waits for here.
#[derive(Debug, Default)]
struct Owner {
    /// The documents it waits for, with its numbers in their queues.
    places: BTreeSet<(LockKey, u64)>,
    /// How many of them the limits take into account.
    counted: usize,
    /// How many locks it holds that somebody waits for here.
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

    /// Whether it holds something that somebody waits for here. Nobody else can be in a deadlock.
    pub(in crate::manager) fn is_in_the_way(&self, owner: &Aid) -> bool {
        self.0.get(owner).is_some_and(|it| it.in_the_way > 0)
    }

    /// Whether more can be learnt from it than from its place in one queue: it has another place, or is in
    /// somebody's way.
    pub(in crate::manager) fn is_linked(&self, owner: &Aid) -> bool {
        self.0.get(owner).is_some_and(|it| it.places.len() + it.in_the_way > 1)
    }

    /// Where it waits.
    pub(in crate::manager) fn places(
        &self,
        owner: &Aid,
    ) -> Option<btree_set::Iter<'_, (LockKey, u64)>> {
        self.0.get(owner).map(|it| it.places.iter()).filter(|places| places.len() > 0)
    }

    /// Its numbers in the queue of this document.
    pub(in crate::manager) fn numbers_in(&self, owner: &Aid, key: &LockKey) -> Vec<u64> {
        let Some(it) = self.0.get(owner) else { return Vec::new() };
        let in_queue = (key.clone(), 0)..=(key.clone(), u64::MAX);
        it.places.range(in_queue).map(|(_, number)| *number).collect()
    }
}
