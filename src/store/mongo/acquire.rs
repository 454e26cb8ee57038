//! Acquires a lock: [makes its record](super::new_record), or takes a [step](super::step) if there is one.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hash},
    time::Instant,
};

use mongodb::bson::{Bson, doc};
use parking_lot::Mutex;

use crate::{
    key::{LockId, LockKey},
    lock::Aid,
    store::{
        Claim, TryAcquire,
        lock_rules::{Moment, Record},
        mongo::{
            LockCollection,
            admission::Purpose,
            codec::millis,
            error::{Result, unavailable},
            filters::is_live,
            ids::{by_id, exactly},
            lock_record::{self, New, decode, lease, moment},
            send::{Timing, acknowledged, run},
            step::Decided,
        },
    },
};

/// How often a claim is repeated because yet another expired lock is in its way.
const REPLACEMENTS: usize = 5;

/// The leases of expired grants of other sessions, which the claim would replace before a reaper could hear of them.
type Former = Vec<(Aid, String)>;

impl LockCollection<'_> {
    // An expired lock of another session is left to the reaper, and then replaced by the next step.
    pub(super) async fn try_acquire(&self, key: &LockKey, claim: &Claim) -> Result<TryAcquire> {
        let id = key.id();
        self.until.in_time()?;
        if claim.upgrades.is_none()
            && !self.hints.is_there(id)
            && let Some(granted) = self.take_free(key, claim).await?
        {
            return Ok(granted);
        }
        if self.hints.is_held_by(id, &claim.aid)
            && let Some(mine) = self.reenter(key, claim).await?
        {
            return Ok(mine);
        }
        if !self.hints.is_there(id) {
            self.hints.there(id, None);
        }
        let mut traced = Vec::new();
        for _ in 0..REPLACEMENTS {
            self.until.in_time()?;
            match self.claim(key, claim, &traced).await? {
                Ok(answer) => {
                    if let TryAcquire::Granted(lock)
                    | TryAcquire::AlreadyMine(lock)
                    | TryAcquire::Held(lock) = &answer
                    {
                        self.hints.there(id, Some(&lock.aid));
                    }
                    return Ok(answer);
                }
                Err(former) => {
                    self.leave_to_reaper(key, &former).await?;
                    traced.extend(former.into_iter().map(|(_, lease)| lease));
                }
            }
        }
        Err(unavailable("too many expired locks in a row"))
    }

    /// Takes the lock on a document that has no record. `None` if there is one.
    async fn take_free(&self, key: &LockKey, claim: &Claim) -> Result<Option<TryAcquire>> {
        let id = key.id();
        // Until the outcome is known, another claim looks closer at once.
        self.hints.there(id, None);
        let new = New::of(key, claim);
        let made = self.make(&new).await;
        let made = made.map(|made| made.map(|moment| new.at(&self.rules, moment).1));
        match &made {
            Ok(Some(_)) => self.hints.there(id, Some(&claim.aid)),
            Ok(None) => {}
            // Probably there is no record, and the repetition shares a command with others again.
            Err(_) => self.hints.gone(id),
        }
        made
    }

    // findAndModify returns: the record → the lock was renewed, and keeps its token. Nothing → the lock is gone, or there
    // is more to it than a renewal: a step tells.
    //
    // The usual re-entry in one command, because people wait for it. A test compares it with the rule.
    async fn reenter(&self, key: &LockKey, claim: &Claim) -> Result<Option<TryAcquire>> {
        let Claim { aid, token, tab, page, holder, ttl, .. } = claim;
        if claim.upgrades.is_some() || claim.turn.is_some() || *ttl < self.rules.ttl {
            return Ok(None);
        }
        let (first, last) = (token.first_attempt().to_string(), token.last_attempt().to_string());
        let mut filter = by_id(key.id());
        filter.extend(doc! {
            "aid": { "$eq": aid.as_str() },
            // An attempt of the same claim was granted, and not told yet.
            "token": { "$type": "string", "$not": { "$gte": first, "$lte": last } },
            // A clock that was ahead has dated the lock: the step keeps its date.
            "$expr": { "$and": [is_live(self.rules.ttl), { "$lte": ["$ts", "$$NOW"] }] },
        });
        for more in ["readers", "leaving", "until", "due"] {
            filter.insert(more, doc! { "$exists": false });
        }
        let mut fields =
            doc! { "ttl": millis(*ttl), "holder": lock_record::holder(holder), "again": true };
        if let Some(page) = page {
            fields.insert("page", page.to_string());
        }
        if let Some(tab) = tab {
            filter.insert("tab", doc! { "$in": [Bson::Null, Bson::from(tab.to_string())] });
        }
        let admitted = self.admit_claim(key.id()).await?;
        let command = doc! {
            "findAndModify": self.primary.name(),
            "query": filter,
            "update": { "$currentDate": { "ts": true }, "$set": fields },
            "new": true,
        };
        let (asked, limit) = (Instant::now(), admitted.limit);
        let command = exactly(command, "query");
        let reply = admitted.carry_out(run(&self.primary, command, limit)).await?;
        let record = reply.get_document("value").ok();
        acknowledged(&reply, record.is_some())?;
        let lock = record.and_then(|record| {
            let moment = moment(*record.get_datetime("ts").ok()?, asked);
            let grant = decode(record, &self.rules, moment).grants.into_iter().next()?;
            Some(grant.to_lock(key, moment))
        });
        Ok(lock.map(TryAcquire::AlreadyMine))
    }

    async fn claim(
        &self,
        key: &LockKey,
        claim: &Claim,
        traced: &[String],
    ) -> Result<Result<TryAcquire, Former>> {
        let (id, rules, traced) = (key.id(), self.rules, traced.to_vec());
        let (key, claim) = (key.clone(), claim.clone());
        let decide = move |record: &mut Record, moment: Moment| {
            let before = record.clone();
            let answer = record.try_acquire(&key, &claim, &rules, moment);
            let stays = |lock: &_| record.grants.iter().any(|it| it.is_same(lock));
            let former: Vec<_> = (before.of_idle_sessions(&claim.aid, moment.now).iter())
                .filter(|it| !stays(it))
                .filter_map(|it| Some((it.aid.clone(), lease(it)?)))
                .filter(|(_, lease)| !traced.contains(lease))
                .collect();
            if !former.is_empty() {
                *record = before;
                return Decided { answer: Err(former), is_promise: false };
            }
            let is_refusal = matches!(answer, TryAcquire::Held(_));
            Decided { answer: Ok(answer), is_promise: !is_refusal }
        };
        self.step(id, Purpose::Claim, decide).await
    }
}

/// The maximum number of remembered records: 64 KiB for each collection.
const SLOTS: usize = 4096;

/// The records that exist, and their holders, as far as this process has seen. It hints which command will do, but
/// decides nothing: two records may share a slot, and this process does not see the changes by other processes.
#[derive(Debug)]
pub(super) struct RecordHints {
    slots: Mutex<Box<[Slot]>>,
    hasher: RandomState,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Slot {
    id: u64,
    holder: u64,
}

impl RecordHints {
    pub(super) fn new() -> Self {
        let slots = vec![Slot::default(); SLOTS].into_boxed_slice();
        Self { slots: Mutex::new(slots), hasher: RandomState::new() }
    }

    /// Reads or changes the slot of this record, which belongs to the record if it has the same hash.
    fn slot<T>(&self, id: &LockId, use_it: impl FnOnce(&mut Slot, u64) -> T) -> T {
        let hash = self.hash(id);
        let mut slots = self.slots.lock();
        use_it(&mut slots[hash as usize % SLOTS], hash)
    }

    /// Never zero, which marks an empty slot.
    fn hash(&self, of: impl Hash) -> u64 {
        self.hasher.hash_one(of).max(1)
    }

    /// True if the record existed when it was last seen.
    pub(super) fn is_there(&self, id: &LockId) -> bool {
        self.slot(id, |slot, hash| slot.id == hash)
    }

    /// True if this session held the lock when it was last seen.
    pub(super) fn is_held_by(&self, id: &LockId, aid: &Aid) -> bool {
        let holder = self.hash(aid);
        self.slot(id, |slot, id| *slot == Slot { id, holder })
    }

    /// Notes that the record exists, and its holder, if that is known.
    pub(super) fn there(&self, id: &LockId, holder: Option<&Aid>) {
        let holder = holder.map_or(0, |aid| self.hash(aid));
        self.slot(id, |slot, id| *slot = Slot { id, holder });
    }

    /// Notes that the record no longer exists.
    pub(super) fn gone(&self, id: &LockId) {
        self.slot(id, |slot, hash| {
            if slot.id == hash {
                *slot = Slot::default();
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_is_remembered_until_it_has_gone() {
        let (hints, id) = (RecordHints::new(), LockId::from(5_i64));
        assert!(!hints.is_there(&id));
        let (alice, bob) = (Aid::new(), Aid::new());
        hints.there(&id, Some(&alice));
        assert!(hints.is_there(&id) && hints.is_held_by(&id, &alice));
        assert!(!hints.is_held_by(&id, &bob) && !hints.is_there(&LockId::from(6_i64)));
        hints.there(&id, None);
        assert!(hints.is_there(&id) && !hints.is_held_by(&id, &alice));
        hints.gone(&id);
        assert!(!hints.is_there(&id));
    }
}
