//! The embedded store: all data in this process, none on disk.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use serde_json::Value;
use uuid::Uuid;

#[cfg(feature = "test-util")]
pub use self::simulated::OnRecord;
use self::{
    ends::Names,
    record::{Grant, Record},
    state::State,
};
use crate::{
    clock,
    ended::{EndReason, SessionEnded},
    error::{BoxError, StoreError, StoreErrorKind},
    freeze::{Freeze, NewFreeze, Scope},
    key::{LockKey, Lockable},
    lock::{Aid, Lock, Mode, PageId},
    server::ServerNote,
    store::{
        Acquisition, Active, Change, Claim, Confirmed, Edit, Fleet, Format, HandedOver, LastEnd,
        Pattern, Query, Released, Removal, Renewed, Rules, Saved, Store, StoreStatus,
        StoredDocument, Swept, Ticket, Topology, TryAcquire, Waiters, Watch,
    },
    taken::{LockTaken, Settled},
};

mod changes;
mod ends;
mod freeze;
mod record;
mod save;
#[cfg(feature = "test-util")]
mod simulated;
mod state;
mod sweep;
mod taken;

/// A store inside this process: for tests of handlers, for trying the crate out, and as the reference
/// for the behaviour of every store. Its content is lost when the process ends.
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

    /// Writes a document without regard to locks, as code that bypasses this crate would.
    ///
    /// # Errors
    /// If `document` cannot be encoded as JSON, or `id` is too long for an id.
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

    /// Removes a document, but not its lock. Returns whether the document existed.
    pub fn remove(&self, key: &LockKey) -> bool {
        self.state().documents.remove(key).is_some()
    }

    /// Advances the store's clock, so that a test need not wait for a lock to expire.
    #[cfg(feature = "test-util")]
    pub fn advance(&self, by: Duration) {
        self.state().turned_on += by;
    }

    /// Makes one lock older, so that a test need not wait for it to expire.
    #[cfg(feature = "test-util")]
    pub fn age(&self, key: &LockKey, by: Duration) {
        // The clock of a new store has no past into which a lock could be moved. So advance the clock,
        // and move all other dates forward by the same amount.
        let mut state = self.state();
        state.turned_on += by;
        for (other, record) in &mut state.locks {
            if other != key {
                for grant in &mut record.grants {
                    grant.ts += by;
                    grant.granted += by;
                    grant.until = grant.until.map(|until| until + by);
                }
                for place in &mut record.queue {
                    place.until += by;
                }
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
    async fn prepare(&self, collection: &str, rules: &Rules) -> Result<(), StoreError> {
        self.state().rules.insert(collection.to_owned(), *rules);
        Ok(())
    }

    async fn try_acquire(&self, key: &LockKey, claim: &Claim) -> Result<TryAcquire, StoreError> {
        let mut state = self.state();
        let moment = state.moment();
        let fenced = state.is_fenced(key.collection());
        let record = state.locks.entry(key.clone()).or_default();
        let expired = record.of_idle_sessions(&claim.aid, moment.now);
        let answer = record.try_acquire(key, claim, fenced, moment);
        if let TryAcquire::Granted(_) = answer {
            let stay: Vec<_> = record.grants.iter().map(|grant| grant.token).collect();
            let former = expired.into_iter().filter(|grant| !stay.contains(&grant.token));
            state.leave_to_sweep(key, former);
            state.changes.tell(Change::Granted(key.clone()));
        }
        Ok(answer)
    }

    async fn renew(
        &self,
        collection: &str,
        active: &[Active],
        ttl: Duration,
    ) -> Result<Renewed, StoreError> {
        let mut state = self.state();
        let now = state.now();
        let aids: Vec<_> = active.iter().map(|it| it.aid.clone()).collect();
        let mut documents = 0;
        for (_, grants) in state.live_in(collection, Some(&aids), now) {
            let mut is_renewed = false;
            for grant in grants {
                let tab = grant.tab.filter(|_| grant.mode == Mode::Exclusive);
                let names = |it: &Active| it.aid == grant.aid && it.names(tab, Some(grant.token));
                if active.iter().any(names) {
                    grant.renew(now, grant.ttl.max(ttl));
                    is_renewed = true;
                }
            }
            documents += u64::from(is_renewed);
        }
        Ok(Renewed { documents, late: Vec::new() })
    }

    async fn set_place(
        &self,
        key: &LockKey,
        waiters: &Waiters,
    ) -> Result<Option<Ticket>, StoreError> {
        let mut state = self.state();
        let now = state.now();
        if !state.is_fair(key.collection()) {
            return Ok(None);
        }
        let is_there = state.locks.contains_key(key);
        if waiters.place.is_none() && !is_there {
            return Ok(None);
        }
        let record = state.locks.entry(key.clone()).or_default();
        let before = record.place_of(waiters.server);
        let drawn = record.set_place(waiters, now);
        // Another server may be the first now.
        if before.is_some() && record.place_of(waiters.server) != before {
            state.weakened(key);
        }
        Ok(drawn)
    }

    async fn remove_lock(&self, removal: Removal<'_>) -> Result<Released, StoreError> {
        let mut state = self.state();
        let now = state.now();
        Ok(match removal {
            Removal::Release(Acquisition { key, aid, token, .. }) => {
                state.remove_if(key, |grant| grant.is_acquisition(aid, *token))
            }
            Removal::Retract(attempts) => {
                let Some(key) = removal.key() else { return Ok(Released::AlreadyGone) };
                let is_attempt = |grant: &Grant| {
                    attempts.iter().any(|it| grant.is_acquisition(&it.aid, it.token))
                };
                state.remove_if(key, |grant| is_attempt(grant) && !grant.again)
            }
            Removal::Break { seen, taken } => {
                // An expired lock is left to the sweep.
                let is_seen = |grant: &Grant| {
                    grant.is_live(now) && grant.aid == seen.aid && Some(grant.token) == seen.token
                };
                let is_there = |record: &Record| record.grants.iter().any(is_seen);
                if let Some(token) = seen.token
                    && state.locks.get(&seen.key).is_some_and(is_there)
                {
                    state.changes.tell(Change::Taken(seen.key.clone(), token, taken.clone()));
                }
                state.remove_if(&seen.key, is_seen)
            }
        })
    }

    async fn begin_taking(&self, taking: &LockTaken, lease: Duration) -> Result<(), StoreError> {
        let mut state = self.state();
        let now = state.now();
        state.takings.begin(taking, lease, now);
        Ok(())
    }

    async fn settle_taking(
        &self,
        event: Uuid,
        worker: Uuid,
        settled: Settled,
    ) -> Result<(), StoreError> {
        self.state().takings.settle(event, worker, settled);
        Ok(())
    }

    async fn takings(
        &self,
        collections: &[&str],
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<LockTaken>, StoreError> {
        let mut state = self.state();
        let (now, mut takings) = (state.now(), std::mem::take(&mut state.takings));
        let told = takings.take(collections, worker, lease, limit, now, |it| state.still_has(it));
        state.takings = takings;
        Ok(told)
    }

    async fn set_freeze(
        &self,
        scope: &Scope,
        freeze: Option<&NewFreeze>,
    ) -> Result<Vec<Freeze>, StoreError> {
        let mut state = self.state();
        state.set_freeze(scope, freeze);
        Ok(state.freezes())
    }

    async fn freezes(&self) -> Result<Vec<Freeze>, StoreError> {
        Ok(self.state().freezes())
    }

    async fn obey_freeze(&self, id: Uuid, server: Uuid) -> Result<(), StoreError> {
        self.state().obey_freeze(id, server);
        Ok(())
    }

    async fn note_server(&self, id: Uuid, note: Option<&ServerNote>) -> Result<Fleet, StoreError> {
        Ok(Fleet::new(Topology::Embedded, self.state().note_server(id, note)))
    }

    async fn expire_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
    ) -> Result<Released, StoreError> {
        let Acquisition { key, aid, token, .. } = held;
        let mut state = self.state();
        let now = state.now();
        let grants = state.locks.get_mut(key).map_or(&mut [][..], |record| &mut record.grants);
        let is_it = |grant: &&mut Grant| {
            grant.is_acquisition(aid, *token)
                && grant.mode == Mode::Exclusive
                && (page.is_none() || grant.page == page)
                && grant.is_live(now)
        };
        let Some(grant) = grants.iter_mut().find(is_it) else { return Ok(Released::AlreadyGone) };
        grant.expire_by(now + grace);
        state.changes.tell(Change::Freed(key.clone()));
        Ok(Released::Released)
    }

    async fn confirm(
        &self,
        key: &LockKey,
        aid: &Aid,
        load: bool,
    ) -> Result<Option<Confirmed>, StoreError> {
        let state = self.state();
        let moment = state.moment();
        let grant = state.locks.get(key).and_then(|record| record.live(Some(aid), moment.now));
        let Some(mine) = grant.filter(|grant| grant.aid == *aid) else { return Ok(None) };
        let document = if load { state.documents.get(key) } else { None };
        Ok(Some(Confirmed {
            lock: mine.to_lock(key, moment),
            page: mine.page,
            is_known: mine.again,
            is_leaving: mine.is_leaving(),
            document: document.map(stored),
        }))
    }

    async fn release_all(&self, collection: &str, aid: &Aid) -> Result<Vec<LockKey>, StoreError> {
        let mut state = self.state();
        let now = state.now();
        Ok(state.remove_all(&[collection], aid, now))
    }

    async fn hand_over(&self, from: &Acquisition, claim: &Claim) -> Result<HandedOver, StoreError> {
        let Acquisition { key, aid, token, .. } = from;
        let mut state = self.state();
        let moment = state.moment();
        let now = moment.now;
        let fenced = state.is_fenced(key.collection());
        let Some(record) = state.locks.get_mut(key) else { return Ok(HandedOver::AlreadyGone) };
        // A lock that is taken over must be live. (A holder may hand its own lock over even when it has
        // expired.)
        let is_from = |it: &mut Grant| {
            let may_be = claim.taken.is_none() || it.is_live(now);
            it.mode == Mode::Exclusive && it.is_acquisition(aid, *token) && may_be
        };
        let from = record.grants.extract_if(.., is_from).next();
        if from.is_some() && record.comes_after_others(claim, now) {
            state.weakened(key);
            return Ok(HandedOver::Released);
        }
        let is_handed = |it: &Grant| it.is_acquisition(&claim.aid, claim.token) && it.is_live(now);
        let is_handed = record.grants.iter().any(is_handed);
        if from.is_none() && !is_handed {
            return Ok(HandedOver::AlreadyGone);
        }
        let before = from.filter(|from| from.aid == claim.aid);
        let lock = record.grant(key, claim, fenced, before, moment);
        if let Some(taken) = &claim.taken {
            state.changes.tell(Change::Taken(key.clone(), *token, taken.clone()));
        }
        state.changes.tell(match claim.mode {
            Mode::Exclusive => Change::Granted(key.clone()),
            // Other readers may join.
            Mode::Shared => Change::Freed(key.clone()),
        });
        Ok(HandedOver::To(lock))
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
        let holder = state.holder_of(collections, aid);
        let locks = state.remove_all(collections, aid, now);
        Ok(state.ends.for_good(aid, reason, Names { locks, holder }, now))
    }

    async fn overdue(&self, names: &[&str], limit: usize) -> Result<Vec<Aid>, StoreError> {
        Ok(self.state().overdue(names, limit))
    }

    async fn sweep(
        &self,
        collections: &[&str],
        _worker: Uuid,
        limit: usize,
    ) -> Result<Swept, StoreError> {
        Ok(self.state().sweep(collections, limit))
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

    async fn locks(
        &self,
        collection: &str,
        query: Query<'_>,
        limit: usize,
    ) -> Result<Vec<Lock>, StoreError> {
        let mut state = self.state();
        let moment = state.moment();
        let now = moment.now;
        Ok(match query {
            Query::Each { keys, aid } => {
                let live = keys.iter().take(limit).filter_map(|key| {
                    let grant = state.locks.get(key)?.live(aid, now)?;
                    Some(grant.to_lock(key, moment))
                });
                live.collect()
            }
            Query::On(keys) => {
                let live = keys.iter().take(limit).flat_map(|key| {
                    let grants = state.locks.get(key).map_or(&[][..], |record| &record.grants);
                    let live = grants.iter().filter(|grant| grant.is_live(now));
                    live.map(move |grant| grant.to_lock(key, moment))
                });
                live.collect()
            }
            Query::Of(aids) => state.locks_in(collection, Some(aids), limit),
            Query::All => state.locks_in(collection, None, limit),
        })
    }

    async fn status(&self, _collections: &[&str]) -> Result<StoreStatus, StoreError> {
        Ok(StoreStatus::new(Topology::Embedded, true))
    }

    async fn last_ends(&self, aids: &[Aid]) -> Result<Vec<Option<LastEnd>>, StoreError> {
        let state = self.state();
        let now = state.now();
        Ok(aids.iter().map(|aid| state.ends.last(aid, now)).collect())
    }

    async fn collections(&self, like: &Pattern, limit: usize) -> Result<Vec<String>, StoreError> {
        let state = self.state();
        let of_documents = state.documents.keys().map(|key| key.collection().to_owned());
        let of_locks = state.rules.keys().map(|name| format!("{name}.lock"));
        let all: BTreeSet<_> = of_documents.chain(of_locks).collect();
        Ok(all.into_iter().filter(|name| like.matches(name)).take(limit).collect())
    }

    async fn watch(&self, collection: &str) -> Result<Option<Watch>, StoreError> {
        Ok(Some(self.state().changes.watch(collection)))
    }

    async fn exists(&self, key: &LockKey) -> Result<bool, StoreError> {
        Ok(self.state().documents.contains_key(key))
    }

    async fn load(&self, key: &LockKey) -> Result<Option<StoredDocument>, StoreError> {
        Ok(self.state().documents.get(key).map(stored))
    }

    async fn save(
        &self,
        held: &Acquisition,
        edit: &Edit,
        until: Instant,
    ) -> Result<Saved, StoreError> {
        let Acquisition { key, aid, token, .. } = held;
        let mut state = self.state();
        let now = state.now();
        if clock::now() >= until {
            let message = "saving: the deadline has passed; nothing was written";
            return Err(StoreError::new(StoreErrorKind::Unavailable, message));
        }
        let State { locks, documents, .. } = &mut *state;
        let guards = |grant: &&mut Grant| {
            grant.is_acquisition(aid, *token) && grant.is_live(now) && grant.mode == Mode::Exclusive
        };
        let guard = locks.get_mut(key).and_then(|record| record.grants.iter_mut().find(guards));
        let Some(guard) = guard else {
            return Ok(Saved::Lost);
        };
        let saved = save::write(edit, key, documents)?;
        if saved == Saved::Saved {
            guard.renew(now, guard.ttl);
            guard.again = true;
        }
        Ok(saved)
    }
}

fn stored(document: &Value) -> StoredDocument {
    StoredDocument::from_bytes(Format::Json, document.to_string().into_bytes())
}
