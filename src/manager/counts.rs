//! Counts something for each key, such as the waiters of each person.

use std::{
    hash::Hash,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{clock, manager::recent::Recent, random::HashMap};

const MINUTE: Duration = Duration::from_secs(60);
/// Of how many keys the count is remembered, at least.
const KEYS: usize = 10_000;

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

/// How often each key was counted within its present minute, which began with its first count.
#[derive(Debug)]
pub(in crate::manager) struct InAMinute<K>(Mutex<Recent<K, (Option<Instant>, u32), KEYS>>);

impl<K> Default for InAMinute<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Hash + Eq> InAMinute<K> {
    /// Counts it once more.
    pub(in crate::manager) fn count(&self, who: K) -> u32 {
        let mut counts = self.0.lock();
        let (began, count) = counts.used(who);
        if began.is_none_or(|began| clock::since(began) >= MINUTE) {
            (*began, *count) = (Some(clock::now()), 0);
        }
        *count = count.saturating_add(1);
        *count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stranger_with_a_few_thousand_names_resets_no_count_of_another_person() {
        let asks = InAMinute::default();
        for n in 1..=30 {
            assert_eq!(asks.count("alice".to_owned()), n);
            for stranger in 0..KEYS / 3 {
                asks.count(format!("{n}-{stranger}"));
            }
        }
    }
}
