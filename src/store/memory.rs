//! The embedded store: everything in this process, nothing on disk.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use serde_json::Value;
use uuid::Uuid;

use self::state::{Record, State};
use crate::{
    Aid, BoxError, EndReason, Lock, LockKey, LockToken, Lockable, Mode, SessionEnded, StoreError,
    StoreErrorKind,
    store::{
        Claim, Format, Released, Rules, Saved, Store, StoredDocument, Swept, TryAcquire, Watch,
    },
};

mod ends;
mod freed;
mod state;

/// A store inside this process: for tests of handlers, for trying things out, and as the reference
/// for what a store does. What it holds goes with the process.
///
/// Clones share their content. Documents are kept as JSON.
///
/// ```
/// # use actix_doclock::{Lockable, LockKey, MemoryStore};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct Invoice { #[serde(rename = "_id")] number: i64, total: f64 }
/// # impl Lockable for Invoice { type Id = i64; const COLLECTION: &'static str = "invoice"; }
/// let store = MemoryStore::new();
/// store.put(4711, &Invoice { number: 4711, total: 9.5 })?;
/// assert_eq!(store.all::<Invoice>()?.len(), 1);
/// # Ok::<(), actix_doclock::BoxError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct MemoryStore {
    state: Arc<Mutex<State>>,
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes a document without regard to locks, as code past the crate would.
    ///
    /// # Errors
    /// If `document` has no form in JSON, or `id` is longer than an id may be.
    pub fn put<T: Lockable>(&self, id: T::Id, document: &T) -> Result<(), BoxError> {
        let value = serde_json::to_value(document)?;
        self.state().documents.insert(LockKey::of::<T>(id)?, value);
        Ok(())
    }

    /// All documents of the type, in the order of their ids.
    ///
    /// # Errors
    /// If one of them is not a `T`.
    pub fn all<T: Lockable>(&self) -> Result<Vec<T>, BoxError> {
        let values: Vec<Value> = (self.state().documents.iter())
            .filter(|(key, _)| key.collection() == T::COLLECTION)
            .map(|(_, value)| value.clone())
            .collect();
        Ok(values.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?)
    }

    /// Removes a document, not its lock. Says whether there was one.
    pub fn remove(&self, key: &LockKey) -> bool {
        self.state().documents.remove(key).is_some()
    }

    /// Turns the store's clock on, so that a test need not wait for a lock to run out.
    #[cfg(feature = "test-util")]
    pub fn advance(&self, by: Duration) {
        self.state().turned_on += by;
    }

    /// Makes one lock older, so that a test need not wait for it to run out.
    #[cfg(feature = "test-util")]
    pub fn age(&self, key: &LockKey, by: Duration) {
        // The clock of a young store has no past to set a lock back to: turn it on, and everything
        // else with it.
        let mut state = self.state();
        state.turned_on += by;
        for (other, record) in &mut state.locks {
            if other != key {
                record.ts += by;
                record.until = record.until.map(|until| until + by);
            }
        }
        state.ends.shift(by);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No verb leaves a half-made change behind when it panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for MemoryStore {
    fn format(&self) -> Format {
        Format::Json
    }

    async fn prepare(&self, _collection: &str, _rules: &Rules) -> Result<(), StoreError> {
        Ok(())
    }

    async fn try_acquire(&self, key: &LockKey, claim: &Claim) -> Result<TryAcquire, StoreError> {
        let mut state = self.state();
        let now = state.now();
        if let Some(record) = state.live(key, now) {
            if record.aid != claim.aid {
                return Ok(TryAcquire::Held(record.to_lock(key, now)));
            }
            record.renew(now, claim.ttl);
            record.holder = claim.holder.clone();
            record.again |= record.token != claim.token;
            let lock = record.to_lock(key, now);
            return Ok(if record.token == claim.token {
                TryAcquire::Granted(lock)
            } else {
                TryAcquire::AlreadyMine(lock)
            });
        }
        let mut record = Record {
            ts: now,
            ttl: claim.ttl,
            aid: claim.aid.clone(),
            token: claim.token,
            since: SystemTime::now(),
            holder: claim.holder.clone(),
            until: claim.max_hold.map(|max| now + max),
            again: false,
        };
        record.renew(now, claim.ttl);
        let lock = record.to_lock(key, now);
        state.locks.insert(key.clone(), record);
        Ok(TryAcquire::Granted(lock))
    }

    async fn renew(&self, collection: &str, aids: &[Aid]) -> Result<u64, StoreError> {
        let mut state = self.state();
        let now = state.now();
        let mut renewed = 0;
        for (_, record) in state.live_in(collection, Some(aids), now) {
            record.renew(now, record.ttl);
            renewed += 1;
        }
        Ok(renewed)
    }

    async fn keep_places(
        &self,
        _key: &LockKey,
        _tokens: &[LockToken],
        _lease: Duration,
    ) -> Result<u64, StoreError> {
        Ok(0)
    }

    async fn leave(&self, _key: &LockKey, _token: LockToken) -> Result<(), StoreError> {
        Ok(())
    }

    async fn release(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        _mode: Mode,
    ) -> Result<Released, StoreError> {
        Ok(self.state().remove_if(key, |record| record.is_acquisition(aid, token)))
    }

    async fn retract(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        _mode: Mode,
    ) -> Result<Released, StoreError> {
        let unshared = |record: &Record| record.is_acquisition(aid, token) && !record.again;
        Ok(self.state().remove_if(key, unshared))
    }

    async fn release_session(
        &self,
        collection: &str,
        aid: &Aid,
    ) -> Result<Vec<LockKey>, StoreError> {
        let mut state = self.state();
        let now = state.now();
        Ok(state.remove_all(&[collection], aid, now))
    }

    async fn hand_over(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        claim: &Claim,
    ) -> Result<Option<Lock>, StoreError> {
        let released = self.release(key, aid, token, Mode::Exclusive).await?;
        if released == Released::AlreadyGone {
            return Ok(None);
        }
        match self.try_acquire(key, claim).await? {
            TryAcquire::Granted(lock) => Ok(Some(lock)),
            _ => Ok(None),
        }
    }

    async fn end_session(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        _worker: Uuid,
    ) -> Result<Vec<LockKey>, StoreError> {
        let mut state = self.state();
        let now = state.now();
        let released = state.remove_all(collections, aid, now);
        Ok(state.ends.for_good(aid, reason, released, now))
    }

    async fn session_ended(&self, aid: &Aid) -> Result<Option<Duration>, StoreError> {
        let state = self.state();
        Ok(state.ends.ended_for_good(aid, state.now()))
    }

    async fn sweep(
        &self,
        collections: &[&str],
        _worker: Uuid,
        limit: usize,
    ) -> Result<Swept, StoreError> {
        let mut state = self.state();
        let now = state.now();
        let State { locks, ends, .. } = &mut *state;
        let (live, run_out): (Vec<_>, Vec<_>) = (locks.iter())
            .filter(|(key, _)| collections.contains(&key.collection()))
            .partition(|(_, record)| record.is_live(now));
        let next = live.iter().map(|(_, record)| record.ts + record.ttl - now).min();
        let awake: BTreeSet<Aid> = live.iter().map(|(_, record)| record.aid.clone()).collect();
        let mut run_out_of: BTreeMap<Aid, Vec<LockKey>> = BTreeMap::new();
        for (key, record) in run_out {
            if !ends.is_being_announced(&record.aid, now) {
                run_out_of.entry(record.aid.clone()).or_default().push(key.clone());
            }
        }
        let more = run_out_of.len() > limit;
        let mut sessions = 0;
        for (aid, keys) in run_out_of.into_iter().take(limit) {
            let removed = keys.iter().filter_map(|key| Some((key, locks.remove(key)?)));
            let by_silence: Vec<_> = (removed.collect::<Vec<_>>().into_iter())
                .filter(|(_, record)| !record.has_reached_max_hold())
                .collect();
            let Some(ttl) = by_silence.iter().map(|(_, record)| record.ttl).max() else { continue };
            if awake.contains(&aid) {
                let keys = by_silence.into_iter().map(|(key, _)| key.clone()).collect();
                ends.note(&aid, keys, ttl, now);
            } else {
                ends.fell_silent(&aid, keys, now);
                sessions += 1;
            }
        }
        Ok(Swept { sessions, more, announcements: ends.some_to_announce(now), next })
    }

    async fn take_announcements(
        &self,
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<SessionEnded>, StoreError> {
        let mut state = self.state();
        let now = state.now();
        Ok(state.ends.take(worker, lease, limit, now))
    }

    async fn announced(&self, worker: Uuid, ended: &[SessionEnded]) -> Result<(), StoreError> {
        self.state().ends.announced(worker, ended);
        Ok(())
    }

    async fn inspect(&self, key: &LockKey, _aid: Option<&Aid>) -> Result<Option<Lock>, StoreError> {
        let mut state = self.state();
        let now = state.now();
        Ok(state.live(key, now).map(|record| record.to_lock(key, now)))
    }

    async fn list(
        &self,
        collection: &str,
        aids: Option<&[Aid]>,
        limit: usize,
    ) -> Result<Vec<Lock>, StoreError> {
        let mut state = self.state();
        let now = state.now();
        Ok(state
            .live_in(collection, aids, now)
            .take(limit)
            .map(|(key, record)| record.to_lock(key, now))
            .collect())
    }

    async fn watch(&self, collection: &str) -> Result<Option<Watch>, StoreError> {
        Ok(Some(self.state().freed.watch(collection)))
    }

    async fn break_lock(&self, seen: &Lock) -> Result<Released, StoreError> {
        let is_seen = |record: &Record| record.aid == seen.aid && Some(record.token) == seen.token;
        Ok(self.state().remove_if(&seen.key, is_seen))
    }

    async fn exists(&self, key: &LockKey) -> Result<bool, StoreError> {
        Ok(self.state().documents.contains_key(key))
    }

    async fn load(&self, key: &LockKey) -> Result<Option<StoredDocument>, StoreError> {
        let document = self.state().documents.get(key).map(ToString::to_string);
        Ok(document.map(|json| StoredDocument::from_bytes(Format::Json, json.into_bytes())))
    }

    async fn save(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        document: &StoredDocument,
        until: Instant,
    ) -> Result<Saved, StoreError> {
        let mut value: Value = serde_json::from_slice(document.as_bytes())
            .map_err(|e| unwritable(key, "is not JSON").because(e))?;
        let mut state = self.state();
        let now = state.now();
        if Instant::now() >= until {
            return Err(StoreError::new(StoreErrorKind::Unavailable, "saving: it is too late"));
        }
        if !state.live(key, now).is_some_and(|record| record.is_acquisition(aid, token)) {
            return Ok(Saved::Lost);
        }
        let Some(stored) = state.documents.get_mut(key) else {
            return Ok(Saved::DocumentGone);
        };
        // As MongoDB: the id stays, and may be left out.
        if let (Some(id), Some(fields)) = (stored.get("_id"), value.as_object_mut())
            && fields.entry("_id").or_insert_with(|| id.clone()) != id
        {
            return Err(unwritable(key, "has another `_id` than the stored one"));
        }
        *stored = value;
        if let Some(record) = state.live(key, now) {
            record.renew(now, record.ttl);
            record.again = true;
        }
        Ok(Saved::Saved)
    }
}

fn unwritable(key: &LockKey, why: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Other, format!("the document to be saved as {key} {why}"))
}
