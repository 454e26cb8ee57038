//! Why a session does not have a lock any more, as far as this server knows.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

#[cfg(feature = "web")]
use crate::version::Version;
use crate::{
    clock,
    key::LockKey,
    lock::{Aid, LockToken},
    manager::verbs::Verbs,
    store::{Acquisition, TakenBy},
    takeover::LossCause,
};

/// How long it is remembered who took a lock: long enough for this process to see the change.
const REMEMBER_TAKEN: Duration = Duration::from_secs(60);
/// Of how many takeovers that is remembered.
const MOST_TAKEN: usize = 10_000;
/// Of how many acquisitions it is remembered what their session did with them: for the second submit of a form.
const MOST_OWN: usize = 4096;
/// How long a refusal waits for its cause.
const SOON: Duration = Duration::from_millis(500);

/// What this server remembers of acquisitions that are gone, or may be.
#[derive(Debug, Default)]
pub(crate) struct Causes(Mutex<Notes>);

#[derive(Debug, Default)]
struct Notes {
    /// Who took a lock, and when this process learned it.
    taken: HashMap<(LockKey, LockToken), (TakenBy, Instant)>,
    /// What sessions have done under their own locks, the latest last.
    own: VecDeque<Own>,
}

#[derive(Debug)]
struct Own {
    token: LockToken,
    is_released: bool,
    /// The version of the document that was saved last.
    #[cfg(feature = "web")]
    saved: Option<Version>,
}

impl Causes {
    /// This acquisition was taken from its holder.
    pub(in crate::manager) fn was_taken(&self, key: LockKey, token: LockToken, taken: TakenBy) {
        let all = &mut self.0.lock().taken;
        all.retain(|_, (_, at)| clock::since(*at) < REMEMBER_TAKEN);
        if all.len() < MOST_TAKEN {
            all.insert((key, token), (taken, clock::now()));
        }
    }

    /// Who has taken this acquisition from its holder, if that is recent.
    pub(crate) fn taken_by(&self, key: &LockKey, token: LockToken) -> Option<TakenBy> {
        let of = (key.clone(), token);
        self.0.lock().taken.get(&of).map(|(taken, _)| taken.clone())
    }

    /// A request has saved the document under this lock.
    #[cfg(feature = "web")]
    pub(crate) fn was_saved(&self, token: LockToken, version: Version) {
        self.0.lock().of(token).saved = Some(version);
    }

    /// A request has released this lock.
    #[cfg(feature = "web")]
    pub(crate) fn was_released(&self, token: LockToken) {
        self.0.lock().of(token).is_released = true;
    }

    /// The version that was saved last under one of these locks, if that is recent.
    #[cfg(feature = "web")]
    pub(crate) fn saved_under(&self, tokens: &[LockToken]) -> Option<Version> {
        self.0.lock().own.iter().rev().find(|own| tokens.contains(&own.token))?.saved
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
        if self.0.lock().own.iter().any(|own| own.token == *token && own.is_released) {
            return Some(LossCause::Released);
        }
        let held = Acquisition::exclusive(key, aid, *token);
        let until = until.min(clock::now() + SOON);
        let asked = verbs
            .run("has_expired", until, held, |store, held, until| store.has_expired(held, until));
        matches!(asked.await, Ok(true)).then_some(LossCause::Expired)
    }
}

#[cfg(feature = "web")]
impl Notes {
    fn of(&mut self, token: LockToken) -> &mut Own {
        let known = self.own.iter().rposition(|own| own.token == token);
        let at = known.unwrap_or_else(|| {
            if self.own.len() == MOST_OWN {
                self.own.pop_front();
            }
            self.own.push_back(Own { token, is_released: false, saved: None });
            self.own.len() - 1
        });
        &mut self.own[at]
    }
}
