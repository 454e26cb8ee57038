//! Locks are granted: the two commands that do it.

use std::time::Instant;

use mongodb::bson::{Bson, Document};

use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Lock, LockToken, Mode},
    store::{
        Claim, TryAcquire,
        mongo::{
            Prepared,
            error::{retry_duplicate_key, store_error},
            lanes,
            pipeline::{self, Acquisition},
            write::Modified,
        },
    },
};

/// What came of a claim.
pub(super) enum Answered {
    Answer(TryAcquire),
    /// These expired grants are in its way, and are to be left to a reaper before the claim is made again.
    Expired(Vec<Bson>),
}

impl Prepared {
    // findAndModify comes back as: the token of this attempt or of an earlier one of our claim, whose reply
    // was lost → granted; our aid with another token → already ours; anything else → held. Nothing →
    // impossible, an upsert returns the document. 11000 → two first upserts met and the server did
    // not retry by itself; tried again as unavailable. Write concern time-out, connection lost → not
    // known; tried again.
    //
    // There are three forms of it, because the length of the pipeline is what it costs beyond an
    // insert. A shorter one that does not come to an answer has changed nothing that matters, and is
    // followed by the next. No two of them can grant: late, the second would bring back what was released.
    pub(super) async fn acquire(
        &self,
        key: &LockKey,
        claim: &Claim,
        traced: &[String],
    ) -> Result<Answered, StoreError> {
        let (rules, is_exclusive) = (&self.rules, claim.mode == Mode::Exclusive);
        let mut has_readers = false;
        if is_exclusive && !rules.fair && !rules.fenced && !self.seen.is_there(key.id()) {
            // From here on: a repetition has to look closer.
            self.seen.there(key.id());
            let update = pipeline::acquire_if_free(claim, rules);
            let (it, asked) = self.attempt(key, update, None).await?;
            if let Some(mut record) = it.record {
                if it.is_new {
                    record.insert("now", record.get("ts").cloned());
                    if let Some(answer) = self.fetched(key, &record, asked).answer(claim) {
                        return Ok(Answered::Answer(answer));
                    }
                } else if record.get_str("token").is_ok_and(|it| it == claim.token.to_string()) {
                    // What was left of a record had no `ts`.
                    return self.granted_before(key, claim).await.map(Answered::Answer);
                }
                has_readers = record.contains_key("readers");
            }
        }
        if is_exclusive && !rules.fair && !has_readers {
            let update = pipeline::acquire_shortly(claim, traced, rules);
            let mut fields = pipeline::short_answer_fields(claim);
            fields.insert(pipeline::FORMER, pipeline::former(claim, traced, rules));
            let (it, asked) = self.attempt(key, update, Some(fields)).await?;
            self.seen.there(key.id());
            if let Some(record) = it.record
                && !record.get_bool(pipeline::MORE).unwrap_or(false)
                && let Some(answered) = self.answered(key, &record, asked, claim)
            {
                return Ok(answered);
            }
        }
        let update = pipeline::acquire(claim, traced, rules);
        let mut fields = pipeline::answer_fields(claim, rules);
        fields.insert(pipeline::FORMER, pipeline::former(claim, traced, rules));
        let (it, asked) = self.attempt(key, update, Some(fields)).await?;
        let answered = it.record.and_then(|record| self.answered(key, &record, asked, claim));
        answered.ok_or_else(|| StoreError::new(StoreErrorKind::Other, acquiring(key)))
    }

    fn answered(
        &self,
        key: &LockKey,
        record: &Document,
        asked: Instant,
        claim: &Claim,
    ) -> Option<Answered> {
        let former = record.get_array(pipeline::FORMER).map_or(&[][..], |former| former);
        let answer = self.fetched(key, record, asked).answer(claim);
        // Readers are not in each other's way: the list is full, and has expired ones.
        let is_in_the_way = |lock: &Lock| {
            !lock.expires_in().is_zero() && (lock.mode, claim.mode) != (Mode::Shared, Mode::Shared)
        };
        match answer {
            // Somebody's live lock, or a waiter's turn.
            Some(TryAcquire::Held(lock)) if former.is_empty() || is_in_the_way(&lock) => {
                Some(Answered::Answer(TryAcquire::Held(lock)))
            }
            _ if !former.is_empty() => Some(Answered::Expired(former.to_vec())),
            answer => answer.map(Answered::Answer),
        }
    }

    /// Reads what this claim was granted, because who changes a record is not told the time.
    async fn granted_before(&self, key: &LockKey, claim: &Claim) -> Result<TryAcquire, StoreError> {
        let asked = Instant::now();
        let found = self.leases.find_one(pipeline::by_id(key.id()));
        let found = found.projection(pipeline::lock_fields(Some(&claim.aid)));
        let found = found.max_time(lanes::read_limit()).await;
        let record = found.map_err(|e| store_error(acquiring(key), e))?;
        match record.and_then(|record| self.fetched(key, &record, asked).answer(claim)) {
            Some(granted @ TryAcquire::Granted(_)) => Ok(granted),
            _ => Err(StoreError::new(
                StoreErrorKind::Unavailable,
                format!("{}: it was granted, and has gone again at once", acquiring(key)),
            )),
        }
    }

    async fn attempt(
        &self,
        key: &LockKey,
        update: Vec<Document>,
        fields: Option<Document>,
    ) -> Result<(Modified, Instant), StoreError> {
        let asked = Instant::now();
        let done = self.modify(key.id(), pipeline::by_id(key.id()), update, true, fields).await;
        done.map(|it| (it, asked)).map_err(|e| retry_duplicate_key(store_error(acquiring(key), e)))
    }

    // findAndModify comes back as: our token → granted, also by an earlier attempt whose reply was
    // lost; nothing → the acquisition had gone, and so has what an earlier attempt granted.
    pub(super) async fn hand_over(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        claim: &Claim,
    ) -> Result<Option<Lock>, StoreError> {
        let from = Acquisition::new(key.id(), aid, token, Mode::Exclusive);
        let asked = Instant::now();
        let fields = match claim.mode {
            Mode::Exclusive => pipeline::short_answer_fields(claim),
            Mode::Shared => pipeline::answer_fields(claim, &self.rules),
        };
        let update = pipeline::hand_over(&from, claim, &self.rules);
        let handed = pipeline::handed(&from, claim);
        let done = self.modify(key.id(), handed, update, false, Some(fields)).await;
        let record =
            done.map_err(|e| store_error(format!("handing the lock on {key:?} over"), e))?.record;
        let answer = record.and_then(|record| self.fetched(key, &record, asked).answer(claim));
        Ok(match answer {
            Some(TryAcquire::Granted(lock)) => Some(lock),
            _ => None,
        })
    }
}

fn acquiring(key: &LockKey) -> String {
    format!("acquiring the lock on {key:?}")
}
