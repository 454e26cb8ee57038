//! Why a session does not have a lock any more, as far as this server knows.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::{
    clock,
    key::LockKey,
    lock::{Aid, LockToken},
    manager::{recent::Recent, verbs::Verbs},
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

type Notes<K, V> = Mutex<Recent<K, Option<V>, REMEMBERED>>;

/// Notes on acquisitions that are gone, or may be gone.
#[derive(Debug, Default)]
pub(crate) struct Causes {
    /// Who took a lock, and when this process learned it.
    taken: Notes<(LockKey, LockToken), (TakenBy, Instant)>,
    /// What sessions have done under their own locks.
    own: Notes<LockToken, Own>,
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
    pub(in crate::manager) fn was_taken(&self, key: LockKey, token: LockToken, taken_by: TakenBy) {
        *self.taken.lock().used((key, token)) = Some((taken_by, clock::now()));
    }

    /// The person who has taken this acquisition from its holder, if that is recent.
    pub(crate) fn taken_by(&self, key: &LockKey, token: LockToken) -> Option<TakenBy> {
        let all = self.taken.lock();
        let (taken_by, at) = all.get(&(key.clone(), token))?.as_ref()?;
        (clock::since(*at) < REMEMBER_TAKEN).then(|| taken_by.clone())
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
        change(all.used(*token).get_or_insert_with(|| Own {
            key: key.clone(),
            aid: aid.clone(),
            is_released: false,
            saved: None,
        }));
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
        let own = tokens.iter().filter_map(|token| all.get(token)?.as_ref());
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
        if let Some(taken_by) = tokens.iter().find_map(|token| self.taken_by(key, *token)) {
            return Some(LossCause::Taken(taken_by));
        }
        // Of several tokens, it is not known which one belongs to this document.
        let [token] = tokens else { return None };
        let is_released = |own: &Own| own.is_released && own.is_of(key, aid);
        if self.own.lock().get(token).and_then(Option::as_ref).is_some_and(is_released) {
            return Some(LossCause::Released);
        }
        let held = Acquisition::exclusive(key, aid, *token);
        let until = until.min(clock::now() + SOON);
        let asked = verbs
            .run("has_expired", until, held, |store, held, until| store.has_expired(held, until));
        matches!(asked.await, Ok(true)).then_some(LossCause::Expired)
    }
}
