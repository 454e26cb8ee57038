//! Counts something for each key, such as the waiters of each person.

use std::hash::Hash;

use crate::random::HashMap;

/// Remembers only the keys that have at least one.
#[derive(Debug)]
pub(in crate::manager) struct Counts<K>(HashMap<K, usize>);

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Self(HashMap::default())
    }
}

impl<K: Hash + Eq> Counts<K> {
    pub(in crate::manager) fn of(&self, who: &K) -> usize {
        self.0.get(who).copied().unwrap_or(0)
    }

    pub(in crate::manager) fn all(&self) -> usize {
        self.0.values().sum()
    }

    pub(in crate::manager) fn add(&mut self, who: K) {
        *self.0.entry(who).or_default() += 1;
    }

    pub(in crate::manager) fn remove(&mut self, who: &K) {
        if let Some(count) = self.0.get_mut(who) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(who);
            }
        }
    }
}
