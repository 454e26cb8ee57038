//! The locks of the embedded store.

use std::{collections::BTreeSet, time::Duration};

use crate::{
    key::LockKey,
    lock::{Aid, Lock, Mode, PageId},
    store::{
        Ability, Acquisition, Active, Change, Claim, Confirmed, Deadline, HandedOver, Locks,
        Pattern, Query, Released, Removal, Renewed, Rules, StoreResult, StoreStatus, Ticket,
        Topology, TryAcquire, Waiters, Watch,
        memory::{
            MemoryStore,
            record::{Grant, Record},
            save::stored,
        },
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
        let moment = state.moment();
        let fenced = state.is_fenced(key.collection());
        let may_upgrade = |record: &Record| record.may_upgrade(claim, moment.now);
        if claim.upgrades.is_some() && !state.locks.get(key).is_some_and(may_upgrade) {
            return Ok(TryAcquire::Lost(key.clone()));
        }
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
        _until: Deadline,
    ) -> StoreResult<Renewed> {
        let mut state = self.state.lock();
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

    async fn remove_lock(&self, removal: Removal<'_>, _until: Deadline) -> StoreResult<Released> {
        let mut state = self.state.lock();
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
                    state.changes.tell(Change::Broken(seen.key.clone(), token, taken.clone()));
                }
                state.remove_if(&seen.key, is_seen)
            }
        })
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
        let Acquisition { key, aid, token, .. } = from;
        let mut state = self.state.lock();
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
            state.changes.tell(Change::Broken(key.clone(), *token, taken.clone()));
        }
        state.changes.tell(match claim.mode {
            Mode::Exclusive => Change::Granted(key.clone()),
            // Other readers may join.
            Mode::Shared => Change::Freed(key.clone()),
        });
        Ok(HandedOver::To(lock))
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
            is_leaving: mine.is_leaving(),
            document: document.map(stored),
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
        let Acquisition { key, aid, token, .. } = held;
        let mut state = self.state.lock();
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

    async fn set_place(
        &self,
        key: &LockKey,
        waiters: &Waiters,
        _until: Deadline,
    ) -> StoreResult<Option<Ticket>> {
        let mut state = self.state.lock();
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
