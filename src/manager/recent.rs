//! The keys that were used recently, out of any number.

use std::{hash::Hash, mem};

use crate::random::HashMap;

/// The values of the keys that were used last: of at least `N` keys, and of at most twice as many. Two generations: when
/// the new one is full it becomes the old one, and the one before is forgotten.
#[derive(Debug)]
pub(in crate::manager) struct Recent<K, V, const N: usize> {
    new: HashMap<K, V>,
    old: HashMap<K, V>,
}

impl<K, V, const N: usize> Default for Recent<K, V, N> {
    fn default() -> Self {
        Self { new: HashMap::default(), old: HashMap::default() }
    }
}

impl<K: Hash + Eq, V: Default, const N: usize> Recent<K, V, N> {
    /// The value of this key, without a use of the key.
    pub(in crate::manager) fn get(&self, key: &K) -> Option<&V> {
        self.new.get(key).or_else(|| self.old.get(key))
    }

    /// The value of this key, which is used now.
    pub(in crate::manager) fn used(&mut self, key: K) -> &mut V {
        let before = self.old.remove(&key);
        if self.new.len() >= N && !self.new.contains_key(&key) {
            self.old = mem::take(&mut self.new);
        }
        self.new.entry(key).or_insert_with(|| before.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_used_again_is_among_the_latest_and_the_others_are_bounded() {
        const MOST: usize = 100;
        let mut recent = Recent::<_, _, MOST>::default();
        for n in 1..=5 * MOST {
            *recent.used(0) += 1;
            *recent.used(n) = n;
            assert!(recent.new.len() + recent.old.len() <= 2 * MOST, "{n}");
        }
        let last = 5 * MOST;
        assert_eq!(recent.get(&0), Some(&last));
        assert!((last - MOST + 2..=last).all(|n| recent.get(&n) == Some(&n)));
        assert_eq!(recent.get(&1), None);
    }
}
