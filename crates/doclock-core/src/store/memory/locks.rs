//! The locks of the embedded store.

use std::{collections::BTreeSet, time::Duration};

use uuid::Uuid;

use crate::{
    key::LockKey,
    lock::{Aid, Answer, Ask, Lock, Mode, PageId},
    store::{
        Ability, Acquisition, Active, Answered, Asked, Change, Claim, Confirmed, Deadline,
        HandedOver, Locks, Pattern, Query, Released, Removal, Renewed, Rules, StoreResult,
        StoreStatus, Ticket, Topology, TryAcquire, Waiters, Watch,
        lock_rules::{Grant, Moment, Record},
        memory::MemoryStore,
    },
};

impl Locks for MemoryStore {
    fn can(&self, _ability: Ability) -> bool {
        true
    }

    async fn prepare(&self, collection: &str, rules: &Rules, _until: Deadline) -> StoreResult<()> {
        self.state.lock().rules.insert(collection.to_owned(), *rules);
        Ok(())
    }

    async fn try_acquire(
        &self,
        key: &LockKey,
        claim: &Claim,
        _until: Deadline,
    ) -> StoreResult<TryAcquire> {
        let mut state = self.state.lock();
        let (answer, former) = state.step(key, |record, rules, moment| {
            let expired = record.of_idle_sessions(&claim.aid, moment.now);
            let answer = record.try_acquire(key, claim, rules, moment);
            let stays = |it: &Grant| record.grants.iter().any(|grant| grant.is_same(it));
            let former: Vec<_> = expired.into_iter().filter(|it| !stays(it)).collect();
            (answer, former)
        });
        if let TryAcquire::Granted(_) = answer {
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
        _until: Deadline,
    ) -> StoreResult<Renewed> {
        let mut state = self.state.lock();
        let now = state.now();
        let of_collection =
            state.locks.iter_mut().filter(|(key, _)| key.collection() == collection);
        let renewed = of_collection.filter_map(|(_, it)| it.renew(active, ttl, now).then_some(()));
        let documents = renewed.count() as u64;
        Ok(Renewed { documents, late: Vec::new() })
    }

    async fn remove_lock(&self, removal: Removal<'_>, _until: Deadline) -> StoreResult<Released> {
        let Some(key) = removal.key() else { return Ok(Released::AlreadyGone) };
        let mut state = self.state.lock();
        let gone = state.step(key, |record, _, moment| record.remove(removal, moment.now));
        if !gone {
            return Ok(Released::AlreadyGone);
        }
        if let Removal::Break { seen, taken } = removal
            && let Some(token) = seen.token
        {
            state.changes.tell(Change::Broken(key.clone(), token, taken.clone()));
        }
        state.changes.tell(Change::Freed(key.clone()));
        Ok(Released::Released)
    }

    async fn locks(
        &self,
        collection: &str,
        query: Query<'_>,
        limit: usize,
        _until: Deadline,
    ) -> StoreResult<Vec<Lock>> {
        let mut state = self.state.lock();
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

    async fn hand_over(
        &self,
        from: &Acquisition,
        claim: &Claim,
        _until: Deadline,
    ) -> StoreResult<HandedOver> {
        let key = &from.key;
        let mut state = self.state.lock();
        let done = state.step(key, |it, rules, moment| it.hand_over(from, claim, rules, moment));
        if let (HandedOver::To(_), Some(taken)) = (&done, &claim.taken) {
            state.changes.tell(Change::Broken(key.clone(), from.token, taken.clone()));
        }
        match (&done, claim.mode) {
            (HandedOver::AlreadyGone, _) => {}
            (HandedOver::To(_), Mode::Exclusive) => {
                state.changes.tell(Change::Granted(key.clone()))
            }
            // Other readers may join, or other waiters.
            _ => state.changes.tell(Change::Freed(key.clone())),
        }
        Ok(done)
    }

    async fn confirm(
        &self,
        key: &LockKey,
        aid: &Aid,
        load: bool,
        _until: Deadline,
    ) -> StoreResult<Option<Confirmed>> {
        let state = self.state.lock();
        let moment = state.moment();
        let grant = state.locks.get(key).and_then(|record| record.live(Some(aid), moment.now));
        let Some(mine) = grant.filter(|grant| grant.aid == *aid) else { return Ok(None) };
        let document = if load { state.documents.get(key) } else { None };
        Ok(Some(Confirmed {
            lock: mine.to_lock(key, moment),
            page: mine.page,
            is_known: mine.again,
            is_leaving: mine.leaving.is_some(),
            document: document.cloned(),
        }))
    }

    async fn release_all(
        &self,
        collection: &str,
        aid: &Aid,
        _until: Deadline,
    ) -> StoreResult<Vec<LockKey>> {
        let mut state = self.state.lock();
        let now = state.now();
        Ok(state.remove_all(&[collection], aid, now))
    }

    async fn expire_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
        _until: Deadline,
    ) -> StoreResult<Released> {
        let mut state = self.state.lock();
        let expire = |it: &mut Record, _: &Rules, moment: Moment| {
            it.expire_in(held, page, grace, moment.now)
        };
        if !state.step(&held.key, expire) {
            return Ok(Released::AlreadyGone);
        }
        state.changes.tell(Change::Freed(held.key.clone()));
        Ok(Released::Released)
    }

    async fn ask(
        &self,
        key: &LockKey,
        ask: &Ask,
        again: bool,
        _until: Deadline,
    ) -> StoreResult<Asked> {
        let mut state = self.state.lock();
        let asked = state.step(key, |record, _, moment| record.ask(ask, again, moment));
        if let Asked::Stands { .. } = asked {
            state.changes.tell(Change::Asked(key.clone()));
        }
        Ok(asked)
    }

    async fn answer(
        &self,
        held: &Acquisition,
        ask: Uuid,
        answer: &Answer,
        _until: Deadline,
    ) -> StoreResult<Answered> {
        let mut state = self.state.lock();
        let key = &held.key;
        let answered =
            state.step(key, |record, _, moment| record.answer(held, ask, answer, moment.now));
        if answered == Answered::Told {
            state.changes.tell(Change::Asked(key.clone()));
        }
        Ok(answered)
    }

    async fn withdraw(
        &self,
        key: &LockKey,
        aid: &Aid,
        user: Option<&str>,
        _until: Deadline,
    ) -> StoreResult<()> {
        let mut state = self.state.lock();
        if state.step(key, |record, _, _| record.withdraw(aid, user)) {
            state.changes.tell(Change::Asked(key.clone()));
        }
        Ok(())
    }

    async fn set_place(
        &self,
        key: &LockKey,
        waiters: &Waiters,
        _until: Deadline,
    ) -> StoreResult<Option<Ticket>> {
        let mut state = self.state.lock();
        if !state.rules_of(key.collection()).fair {
            return Ok(None);
        }
        let (drawn, moved) = state.step(key, |record, _, moment| {
            let before = record.place_of(waiters.server);
            let drawn = record.set_place(waiters, moment);
            (drawn, before.is_some() && record.place_of(waiters.server) != before)
        });
        // Another server may be the first now.
        if moved {
            state.changes.tell(Change::Freed(key.clone()));
        }
        Ok(drawn)
    }

    async fn watch(&self, collection: &str, _until: Deadline) -> StoreResult<Option<Watch>> {
        Ok(Some(self.state.lock().changes.watch(collection)))
    }

    async fn collections(
        &self,
        like: &Pattern,
        limit: usize,
        _until: Deadline,
    ) -> StoreResult<Vec<String>> {
        let state = self.state.lock();
        let of_documents = state.documents.keys().map(|key| key.collection().to_owned());
        let of_locks = state.rules.keys().map(|name| format!("{name}.lock"));
        let all: BTreeSet<_> = of_documents.chain(of_locks).collect();
        Ok(all.into_iter().filter(|name| like.matches(name)).take(limit).collect())
    }

    async fn status(&self, _collections: &[&str], _until: Deadline) -> StoreResult<StoreStatus> {
        Ok(StoreStatus::new(Topology::Embedded, true))
    }
}
