//! Why a session does not have a lock any more, as far as this server knows.

use std::{
    collections::HashMap,
    hash::Hash,
    mem,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    clock,
    key::LockKey,
    lock::{Aid, LockToken},
    manager::verbs::Verbs,
    store::{Acquisition, TakenBy},
    takeover::LossCause,
    version::Version,
};

/// How long it is remembered who took a lock: long enough for this process to see the change.
const REMEMBER_TAKEN: Duration = Duration::from_secs(60);
/// Of how many acquisitions something is remembered, at least.
const REMEMBERED: usize = 4096;
/// How long a refusal waits for its cause.
const SOON: Duration = Duration::from_millis(500);

/// Notes on acquisitions that are gone, or may be gone.
#[derive(Debug, Default)]
pub(crate) struct Causes {
    /// Who took a lock, and when this process learned it.
    taken: Mutex<Latest<(LockKey, LockToken), (TakenBy, Instant)>>,
    /// What sessions have done under their own locks.
    own: Mutex<Latest<LockToken, Own>>,
}

#[derive(Debug)]
struct Own {
    key: LockKey,
    aid: Aid,
    is_released: bool,
    /// The version of the document that was saved last, if the save named the version onto which it was written.
    saved: Option<Version>,
}

impl Own {
    fn is_of(&self, key: &LockKey, aid: &Aid) -> bool {
        self.key == *key && self.aid == *aid
    }
}

impl Causes {
    /// This acquisition was taken from its holder.
    pub(in crate::manager) fn was_taken(&self, key: LockKey, token: LockToken, taken: TakenBy) {
        self.taken.lock().put((key, token), (taken, clock::now()));
    }

    /// The person who has taken this acquisition from its holder, if that is recent.
    pub(crate) fn taken_by(&self, key: &LockKey, token: LockToken) -> Option<TakenBy> {
        let all = self.taken.lock();
        let (taken, at) = all.get(&(key.clone(), token))?;
        (clock::since(*at) < REMEMBER_TAKEN).then(|| taken.clone())
    }

    /// The document was saved under this lock, or was deleted.
    pub(in crate::manager) fn was_saved(&self, held: &Acquisition, version: Option<Version>) {
        self.note(held, |own| own.saved = version);
    }

    /// The session has released this lock.
    #[cfg(feature = "web")]
    pub(crate) fn was_released(&self, held: &Acquisition) {
        self.note(held, |own| own.is_released = true);
    }

    fn note(
        &self,
        Acquisition { key, aid, token, .. }: &Acquisition,
        change: impl FnOnce(&mut Own),
    ) {
        let mut all = self.own.lock();
        let known = all.take(token);
        let mut own = known.unwrap_or_else(|| Own {
            key: key.clone(),
            aid: aid.clone(),
            is_released: false,
            saved: None,
        });
        change(&mut own);
        all.put(*token, own);
    }

    /// The version that this session has saved last under one of these locks on the document.
    #[cfg(feature = "web")]
    pub(crate) fn saved_under(
        &self,
        key: &LockKey,
        aid: &Aid,
        tokens: &[LockToken],
    ) -> Option<Version> {
        let all = self.own.lock();
        let own = tokens.iter().filter_map(|token| all.get(token));
        own.filter(|own| own.is_of(key, aid)).find_map(|own| own.saved)
    }

    /// How a session has lost one of these acquisitions of a document, if that is known. The caller can do without, so
    /// it does not wait long.
    pub(crate) async fn why_lost(
        &self,
        verbs: &Verbs,
        key: &LockKey,
        aid: &Aid,
        tokens: &[LockToken],
        until: Instant,
    ) -> Option<LossCause> {
        if let Some(taken) = tokens.iter().find_map(|token| self.taken_by(key, *token)) {
            return Some(LossCause::Taken(taken));
        }
        // Of several tokens, it is not known which one belongs to this document.
        let [token] = tokens else { return None };
        if self.own.lock().get(token).is_some_and(|own| own.is_released && own.is_of(key, aid)) {
            return Some(LossCause::Released);
        }
        let held = Acquisition::exclusive(key, aid, *token);
        let until = until.min(clock::now() + SOON);
        let asked = verbs
            .run("has_expired", until, held, |store, held, until| store.has_expired(held, until));
        matches!(asked.await, Ok(true)).then_some(LossCause::Expired)
    }
}

/// The latest entries: at least [`REMEMBERED`] of them, and at most twice as many.
#[derive(Debug)]
struct Latest<K, V> {
    new: HashMap<K, V>,
    old: HashMap<K, V>,
}

impl<K, V> Default for Latest<K, V> {
    fn default() -> Self {
        Self { new: HashMap::new(), old: HashMap::new() }
    }
}

impl<K: Hash + Eq, V> Latest<K, V> {
    fn get(&self, key: &K) -> Option<&V> {
        self.new.get(key).or_else(|| self.old.get(key))
    }

    fn take(&mut self, key: &K) -> Option<V> {
        self.new.remove(key).or_else(|| self.old.remove(key))
    }

    fn put(&mut self, key: K, value: V) {
        if self.new.len() == REMEMBERED {
            self.old = mem::take(&mut self.new);
        }
        self.new.insert(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::{Latest, REMEMBERED};

    #[test]
    fn an_entry_that_is_used_again_is_among_the_latest_and_the_others_are_bounded() {
        let mut latest = Latest::default();
        for n in 1..=5 * REMEMBERED {
            let used = latest.take(&0).unwrap_or(0);
            latest.put(0, used + 1);
            latest.put(n, n);
            assert!(latest.new.len() + latest.old.len() <= 2 * REMEMBERED, "{n}");
        }
        assert_eq!(latest.get(&0), Some(&(5 * REMEMBERED)));
        let last = 5 * REMEMBERED;
        assert!((last - REMEMBERED + 2..=last).all(|n| latest.get(&n) == Some(&n)));
        assert_eq!(latest.get(&1), None);
    }
}
