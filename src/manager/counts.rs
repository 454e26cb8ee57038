//! Counts something for each key, such as the waiters of each person.

use std::{
    hash::Hash,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{clock, random::HashMap};

const MINUTE: Duration = Duration::from_secs(60);
/// How many keys are counted within a minute. If there are more, all counts begin anew.
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

/// How often each key was counted within the present minute.
#[derive(Debug)]
pub(in crate::manager) struct InAMinute<K>(Mutex<(Option<Instant>, HashMap<K, u32>)>);

impl<K> Default for InAMinute<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Hash + Eq> InAMinute<K> {
    /// Counts it once more.
    pub(in crate::manager) fn count(&self, who: K) -> u32 {
        let (began, counts) = &mut *self.0.lock();
        if began.is_none_or(|began| clock::since(began) >= MINUTE) || counts.len() >= KEYS {
            *began = Some(clock::now());
            counts.clear();
        }
        let count = counts.entry(who).or_default();
        *count = count.saturating_add(1);
        *count
    }
}
