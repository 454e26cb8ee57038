//! Acquires a lock: one `findAndModify`, or one statement of a command that several claims share.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hash},
    slice,
    time::Instant,
};

use mongodb::bson::{DateTime, Document, doc};
use parking_lot::Mutex;

use crate::{
    error::StoreErrorKind,
    key::{LockId, LockKey},
    lock::{Aid, Lock, Mode},
    store::{
        Claim, Query, TryAcquire,
        mongo::{
            Call,
            codec::documents,
            error::{
                Result, exceeded_time_limit, failure, is_duplicate_id, is_not_sent, unavailable,
            },
            grant::{has_repetition, is_live},
            record::{Fetched, by_id, exactly, in_our_time, presentable, token_in},
            send::{LIMIT, Take, acknowledged, refusals, run, upserted},
        },
    },
};

mod update;

use update::{FORMER, LOST, MORE, ODD};
pub(super) use update::{Update, answer_fields, short_answer_fields};

/// How often a claim is repeated because yet another expired lock is in its way.
const TAKEOVERS: usize = 5;

/// The answer to one command.
enum Found {
    Answer(TryAcquire),
    /// These expired grants are in the way. They must be left to a reaper before the claim is repeated.
    Expired(Vec<Document>),
    /// An expired record of another program is in the way, in which a name stands twice. It must be removed before the
    /// claim is repeated.
    Odd,
}

/// A claim on its way.
struct Claiming<'a> {
    call: &'a Call<'a>,
    key: &'a LockKey,
    update: Update<'a>,
}

impl Call<'_> {
    // If another session is known to hold the lock, a read comes first. An expired lock of another session is left to
    // the reaper, and then replaced by the next command.
    pub(super) async fn try_acquire(&self, key: &LockKey, claim: &Claim) -> Result<TryAcquire> {
        let mut traced = Vec::new();
        for _ in 0..TAKEOVERS {
            let update = Update { claim, traced: &traced, rules: &self.rules };
            let claiming = Claiming { call: self, key, update };
            match claiming.ask().await {
                Ok(Found::Answer(answer)) => {
                    if let TryAcquire::Granted(lock)
                    | TryAcquire::AlreadyMine(lock)
                    | TryAcquire::Held(lock) = &answer
                    {
                        self.seen.held(lock);
                    }
                    return Ok(answer);
                }
                Ok(Found::Expired(former)) => {
                    let leases = self.leave_to_reaper(key, &former).await?;
                    traced.extend(leases);
                }
                Ok(Found::Odd) => self.remove_odd(key.id()).await?,
                Err(e) => return Err(e),
            }
        }
        Err(unavailable("too many expired locks in a row"))
    }

    /// Runs this update, which does nothing to a live lock, as an upsert. Returns the record after the update, if it
    /// is known.
    async fn take(&self, job: Take) -> Result<Option<Document>> {
        if self.admission.is_used(&job.id) {
            return self.take_alone(job).await;
        }
        let send_by = self.until.claim_by(self.groups.releases.wait())?;
        let taken =
            self.groups.takes.submit(job, send_by, async |jobs| {
                match <[Take; 1]>::try_from(jobs) {
                    Ok([job]) => vec![self.take_alone(job).await],
                    Err(jobs) => {
                        let taken = self.take_together(&jobs).await;
                        self.each(jobs.iter().map(|job| &job.id), taken)
                    }
                }
            });
        taken.await
    }

    async fn take_alone(&self, Take { id, update, .. }: Take) -> Result<Option<Document>> {
        let admitted = self.admit_claim(&id).await?;
        self.modify(admitted, by_id(&id), update, true, None).await
    }

    // update returns: the number of a statement among the upserted → granted; the record tells the
    // server's time. Error 11000 of a statement → another claim has just made the record. Not among them →
    // there was a record, and the claim looks closer. The record of a grant is gone already → so is the
    // grant; the repetition has another token, so that nobody revives the one that was broken. Any other
    // error, or no reply → each claim is repeated, and recognises its grant.
    async fn take_together(&self, jobs: &[Take]) -> Result<Vec<Result<Option<Document>>>> {
        let statement = |Take { id, update, .. }: &Take| {
            exactly(doc! { "q": by_id(id), "u": update.clone(), "upsert": true }, "q")
        };
        let updates: Vec<_> = jobs.iter().map(statement).collect();
        let command = doc! { "update": self.primary.name(), "updates": updates, "ordered": false };
        let reply = run(&self.primary, command, LIMIT).await?;
        acknowledged(&reply, true)?;
        let (mut refused, new) = (refusals(&reply), upserted(&reply));
        let ids: Vec<_> = new.iter().filter_map(|n| Some(&jobs.get(*n)?.id)).collect();
        let mut records = self.records(&ids).await?;
        let taken = jobs.iter().enumerate().map(|(n, job)| match refused.remove(&n) {
            Some(e) if is_duplicate_id(&e) => Ok(None),
            Some(e) => Err(e),
            None if !new.contains(&n) => Ok(None),
            None => match records.remove(&job.id) {
                Some(record) if token_in(&record) == Some(job.token) => Ok(Some(record)),
                _ => Err(gone_again()),
            },
        });
        Ok(taken.collect())
    }
}

fn gone_again() -> mongodb::error::Error {
    unavailable("it was granted, but was gone again at once")
}

impl Claiming<'_> {
    // find returns: a live exclusive lock of another session → refused. Anything else, or an error → not
    // known: the claim is written, unless the read was not even sent. Reads the state of the primary: a waiter that
    // read an older state could miss a release that its change stream does not report any more. If a failover takes
    // the lock away again, the waiter learns it when the lease would have expired.
    async fn refused(&self) -> Result<Option<Lock>> {
        let Claim { aid, upgrades, .. } = self.update.claim;
        let (id, seen) = (self.key.id(), &self.call.seen);
        // An upgrade is lost then, and its own command says so.
        if upgrades.is_some() || !seen.is_held_by_another(id, aid) {
            return Ok(None);
        }
        let asked = Instant::now();
        let record = match self.call.look(id).await {
            Err(e) if is_not_sent(&e) => return Err(e),
            record => record.ok().flatten(),
        };
        let refuses = |lock: &Lock| lock.mode == Mode::Exclusive && lock.aid != *aid;
        let lock =
            record.and_then(|it| self.call.fetched(self.key, it, asked).live_locks().find(refuses));
        match &lock {
            Some(lock) => seen.held(lock),
            None => seen.freed(id),
        }
        Ok(lock)
    }

    // findAndModify returns: the token of this attempt, or of an earlier attempt of this claim whose
    // reply was lost → granted. Our aid with another token → already ours. Anything else → held.
    // The shared lock that the claim upgrades is neither there nor replaced by this claim, or nothing is
    // there → lost. Nothing → otherwise impossible, because an upsert returns the document. Error 11000 → two first upserts
    // met, and the server did not retry; reported as unavailable, and repeated. Write concern time-out
    // or lost connection → not known; repeated.
    //
    // The command has three forms, because only the length of its pipeline makes it cost more than an insert. A
    // shorter form that finds no answer has changed nothing that matters, and the next form follows. No two forms may
    // both grant: a delayed second command could resurrect a released lock.
    async fn ask(&self) -> Result<Found> {
        let (Self { call, key, .. }, Update { claim, rules, .. }) = (self, self.update);
        let (id, seen, token) = (key.id(), &call.seen, claim.token);
        let is_simple = claim.mode == Mode::Exclusive && claim.upgrades.is_none() && !rules.fair;
        let mut has_readers = false;
        if is_simple && !rules.fenced && !seen.is_there(id) {
            call.until.in_time()?;
            // Until the outcome is known, another claim looks closer at once.
            seen.note(id, None);
            let asked = Instant::now();
            let job = Take { id: id.clone(), token, update: self.update.if_free() };
            let taken = call.take(job).await;
            if taken.as_ref().is_err_and(|e| !exceeded_time_limit(e)) {
                // Probably there is no record, and the repetition shares a command with others again.
                seen.gone(id);
            }
            let record = taken?.unwrap_or_default();
            match token_in(&record) {
                Some(it) if it == token => {
                    // This command has written it.
                    let mut record = record;
                    record.insert("now", record.get("ts").cloned());
                    return self.found(record, asked).ok_or_else(gone_again);
                }
                Some(it) if it.is_of_same_claim(token) => return self.granted_before().await,
                _ => has_readers = record.contains_key("readers"),
            }
        }
        if is_simple
            && !has_readers
            && let Some(found) = self.send(|it| (it.shortly(), short_answer_fields(claim))).await?
        {
            return Ok(found);
        }
        let found = self.send(|it| (it.in_full(), answer_fields(claim, rules))).await?;
        if claim.upgrades.is_some() && found.is_none() {
            return Ok(Found::Answer(TryAcquire::Lost(self.key.clone())));
        }
        found.ok_or_else(|| failure(StoreErrorKind::Other, "MongoDB returned no lock"))
    }

    /// Reads the lock that an earlier attempt was granted, because the reply to the shortest form does not contain the
    /// server's time.
    async fn granted_before(&self) -> Result<Found> {
        let Claim { aid, token, .. } = self.update.claim;
        let own = Query::Each { keys: slice::from_ref(self.key), aid: Some(aid) };
        let is_of = |lock: &Lock| lock.token.is_some_and(|it| it.is_of_same_claim(*token));
        let lock = self.call.locks(own, 1).await?.into_iter().find(is_of);
        lock.map(|lock| Found::Answer(TryAcquire::Granted(lock))).ok_or_else(gone_again)
    }

    /// Sends one command. `form` returns the update pipeline, and the projection of the answer. `None` if the next form
    /// of the command must follow.
    async fn send(
        &self,
        form: impl FnOnce(&Update<'_>) -> (Vec<Document>, Document),
    ) -> Result<Option<Found>> {
        let (call, id) = (self.call, self.key.id());
        // A claim gives way once only. Otherwise it might never be answered.
        let mut may_give_way = true;
        let admitted = loop {
            if let Some(held) = self.refused().await? {
                return Ok(Some(Found::Answer(TryAcquire::Held(held))));
            }
            call.until.in_time()?;
            let admitted = call.admit_claim(id).await?;
            // If another session is known to hold the lock by now, a read will do. The holder's release must not wait
            // behind a write of each refused claim.
            if !may_give_way || !call.seen.is_held_by_another(id, &self.update.claim.aid) {
                break admitted;
            }
            may_give_way = false;
        };
        let (update, mut fields) = form(&self.update);
        fields.insert(FORMER, self.update.former());
        let has_expired = doc! { "$not": [is_live(call.rules.ttl)] };
        fields.insert(ODD, doc! { "$and": [has_expired, has_repetition()] });
        let asked = Instant::now();
        // A claim that upgrades a lock makes no record.
        let upserts = self.update.claim.upgrades.is_none();
        let record = call.modify(admitted, by_id(id), update, upserts, Some(fields)).await?;
        call.seen.note(id, None);
        if record.as_ref().is_some_and(|record| record.get_bool(ODD).unwrap_or(false)) {
            return Ok(Some(Found::Odd));
        }
        let is_answer = |record: &Document| !record.get_bool(MORE).unwrap_or(false);
        Ok(record.filter(is_answer).and_then(|record| self.found(record, asked)))
    }

    fn found(&self, record: Document, asked: Instant) -> Option<Found> {
        let claim = self.update.claim;
        let former: Vec<_> = documents(&record, FORMER).cloned().collect();
        let answer = self.call.fetched(self.key, record, asked).answer(claim);
        // Readers do not exclude each other: such a lock only means that the list is full, with expired
        // readers.
        let is_in_the_way = |lock: &Lock| {
            !lock.expires_in().is_zero() && (lock.mode, claim.mode) != (Mode::Shared, Mode::Shared)
        };
        match answer {
            Some(lost @ TryAcquire::Lost(_)) => Some(Found::Answer(lost)),
            // Another session's live lock, or a waiter that is ahead in the queue.
            Some(TryAcquire::Held(lock)) if former.is_empty() || is_in_the_way(&lock) => {
                Some(Found::Answer(TryAcquire::Held(lock)))
            }
            _ if !former.is_empty() => Some(Found::Expired(former)),
            answer => answer.map(Found::Answer),
        }
    }
}

impl Fetched {
    /// The answer to a claim: the session's own lock, or the lock or place that is in its way.
    pub(super) fn answer(self, claim: &Claim) -> Option<TryAcquire> {
        if self.record.get_bool(LOST).unwrap_or(false) {
            return Some(TryAcquire::Lost(self.key));
        }
        let place = self.record.get_document("place").ok().map(|place| self.place(place));
        let is_of = |lock: &Lock| lock.token.is_some_and(|it| it.is_of_same_claim(claim.token));
        let holds = |lock: &Lock| lock.aid == claim.aid && lock.mode.covers(claim.mode);
        // If there is a place, the lock ahead of it may have expired.
        let lock = self.lock().filter(|lock| place.is_none() || !lock.expires_in().is_zero());
        Some(match (lock, place) {
            (Some(lock), _) if holds(&lock) && is_of(&lock) => TryAcquire::Granted(lock),
            (Some(lock), _) if holds(&lock) => TryAcquire::AlreadyMine(lock),
            // Readers do not exclude each other.
            (Some(lock), Some(place)) if lock.mode == claim.mode && claim.mode == Mode::Shared => {
                TryAcquire::Held(place)
            }
            (Some(lock), _) => TryAcquire::Held(lock),
            (None, place) => TryAcquire::Held(place?),
        })
    }

    /// A waiter, shown as the next holder of the document.
    fn place(&self, place: &Document) -> Lock {
        let date = |record: &Document, field| record.get_datetime(field).ok().copied();
        let left = date(place, "until").zip(date(&self.record, "now")).map_or(0, |(until, now)| {
            until.timestamp_millis().saturating_sub(now.timestamp_millis())
        });
        let is_shared = place.get_str("mode").is_ok_and(|mode| mode == Mode::Shared.as_str());
        Lock {
            // A ticket is about the time at which it was drawn.
            since: presentable(place.get_i64("first").ok().map(DateTime::from_millis)),
            expires_at: self.asked + in_our_time(left),
            ..self.lock_of(place, if is_shared { Mode::Shared } else { Mode::Exclusive })
        }
    }
}

/// The maximum number of remembered records: 128 KiB for each collection.
const SLOTS: usize = 4096;

/// The last known state of each record, in this process. It hints which form of a claim will suffice, but decides
/// nothing: two records may share a slot, and this process does not see the changes by other processes.
#[derive(Debug)]
pub(super) struct Seen {
    slots: Mutex<Box<[Slot]>>,
    hasher: RandomState,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    id: u64,
    /// The session that held the lock, and until when.
    held: Option<(u64, Instant)>,
}

impl Seen {
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

    /// True if another session held the lock when it was last seen, and its lease has not expired since.
    pub(super) fn is_held_by_another(&self, id: &LockId, than: &Aid) -> bool {
        let Slot { held, .. } =
            self.slot(id, |slot, hash| if slot.id == hash { *slot } else { Slot::default() });
        held.is_some_and(|(aid, until)| aid != self.hash(than) && until > Instant::now())
    }

    /// Notes that this lock is live. Only an exclusive lock refuses everybody else.
    pub(super) fn held(&self, lock: &Lock) {
        let is_exclusive = lock.mode == Mode::Exclusive;
        self.note(lock.key.id(), is_exclusive.then_some((&lock.aid, lock.expires_at)));
    }

    /// Notes that the record exists, and the holder and the expiry of its exclusive lock, if there is one.
    pub(super) fn note(&self, id: &LockId, held: Option<(&Aid, Instant)>) {
        let held = held.map(|(aid, until)| (self.hash(aid), until));
        self.slot(id, |slot, hash| *slot = Slot { id: hash, held });
    }

    /// Notes that the record no longer exists.
    pub(super) fn gone(&self, id: &LockId) {
        self.slot(id, |slot, hash| {
            if slot.id == hash {
                *slot = Slot::default();
            }
        });
    }

    /// Notes that the lock may be free.
    pub(super) fn freed(&self, id: &LockId) {
        self.slot(id, |slot, hash| {
            if slot.id == hash {
                slot.held = None;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_was_seen_is_remembered_until_it_has_gone() {
        let (seen, id) = (Seen::new(), LockId::from(5_i64));
        assert!(!seen.is_there(&id));
        seen.note(&id, None);
        assert!(seen.is_there(&id));
        assert!(!seen.is_there(&LockId::from(6_i64)));
        seen.gone(&id);
        assert!(!seen.is_there(&id));
    }

    #[test]
    fn a_holder_is_remembered_until_its_lock_is_free_or_expires() {
        let (seen, id) = (Seen::new(), LockId::from(5_i64));
        let (alice, bob) = (Aid::new(), Aid::new());
        let later = Instant::now() + Duration::from_secs(60);
        seen.note(&id, Some((&alice, later)));
        assert!(seen.is_there(&id));
        assert!(seen.is_held_by_another(&id, &bob));
        assert!(!seen.is_held_by_another(&id, &alice), "its own lock");
        seen.freed(&id);
        assert!(seen.is_there(&id) && !seen.is_held_by_another(&id, &bob));
        seen.note(&id, Some((&alice, Instant::now())));
        assert!(!seen.is_held_by_another(&id, &bob), "expired");
        seen.note(&id, Some((&alice, later)));
        seen.gone(&id);
        assert!(!seen.is_held_by_another(&id, &bob));
    }
}
