//! The two commands that grant locks.

use std::time::Instant;

use mongodb::{
    bson::{Bson, Document},
    error::Error,
};

use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Lock, Mode},
    store::{
        Acquisition, Claim, HandedOver, TryAcquire,
        mongo::{
            Prepared,
            error::{is_not_sent, ran_out_of_time, retry_duplicate_key, store_error},
            lanes, pipeline,
            removal::until_majority,
            together::Took,
            write::Modified,
        },
    },
};

/// The result of one attempt of a claim.
pub(super) enum Answered {
    Answer(TryAcquire),
    /// These expired grants are in its way. They must be left to a reaper before the claim is repeated.
    Expired(Vec<Bson>),
}

impl Prepared {
    /// One attempt of a claim. If another session is known to hold the lock, a read comes first.
    pub(super) async fn acquire(
        &self,
        key: &LockKey,
        claim: &Claim,
        traced: &[String],
    ) -> Result<Answered, StoreError> {
        let mut was_sent = false;
        let answered = self.acquire_or_give_way(key, claim, traced, &mut was_sent).await;
        let answered = answered.map_err(|e| if was_sent { in_doubt(e) } else { e })?;
        if let Answered::Answer(
            TryAcquire::Granted(lock) | TryAcquire::AlreadyMine(lock) | TryAcquire::Held(lock),
        ) = &answered
        {
            self.seen.held(lock);
        }
        Ok(answered)
    }

    async fn acquire_or_give_way(
        &self,
        key: &LockKey,
        claim: &Claim,
        traced: &[String],
        was_sent: &mut bool,
    ) -> Result<Answered, StoreError> {
        // A claim gives way once only. Otherwise it might never be answered.
        let mut may_give_way = true;
        loop {
            if let Some(held) = self.refuse(key, claim).await? {
                return Ok(Answered::Answer(TryAcquire::Held(held)));
            }
            lanes::in_time().map_err(|e| claim_failed(key, e))?;
            let written = self.write_claim(key, claim, traced, may_give_way, was_sent).await?;
            if let Some(answered) = written {
                return Ok(answered);
            }
            may_give_way = false;
        }
    }

    // find returns: a live exclusive lock of another session → refused. Anything else, or an error → not
    // known: the claim is written, unless the read was not even sent. Reads the state of the primary: a waiter that read an older state could
    // miss a release that its change stream does not report any more. If a failover takes the lock away
    // again, the waiter learns it when the lease would have expired.
    async fn refuse(&self, key: &LockKey, claim: &Claim) -> Result<Option<Lock>, StoreError> {
        if !self.seen.is_held_by_another(key.id(), &claim.aid) {
            return Ok(None);
        }
        let asked = Instant::now();
        let record = match self.look(key.id()).await {
            Err(e) if is_not_sent(&e) => return Err(claim_failed(key, e)),
            record => record.ok().flatten(),
        };
        let refuses = |lock: &Lock| lock.mode == Mode::Exclusive && lock.aid != claim.aid;
        let lock = record.and_then(|it| self.fetched(key, &it, asked).live_locks().find(refuses));
        match &lock {
            Some(lock) => self.seen.held(lock),
            None => self.seen.freed(key.id()),
        }
        Ok(lock)
    }

    // findAndModify returns: the token of this attempt, or of an earlier attempt of this claim whose
    // reply was lost → granted. Our aid with another token → already ours. Anything else → held.
    // Nothing → impossible, because an upsert returns the document. Error 11000 → two first upserts
    // met, and the server did not retry; reported as unavailable, and repeated. Write concern time-out
    // or lost connection → not known; repeated.
    //
    // The command has three forms, because the length of the pipeline is its only cost beyond that of
    // an insert. A shorter form that finds no answer has changed nothing that matters, and the next
    // form follows. No two forms may both grant: a delayed second command could resurrect a released
    // lock. `None`: the claim gave way.
    async fn write_claim(
        &self,
        key: &LockKey,
        claim: &Claim,
        traced: &[String],
        may_give_way: bool,
        was_sent: &mut bool,
    ) -> Result<Option<Answered>, StoreError> {
        let (rules, is_exclusive) = (&self.rules, claim.mode == Mode::Exclusive);
        let mut has_readers = false;
        if is_exclusive && !rules.fair && !rules.fenced && !self.seen.is_there(key.id()) {
            // Until the outcome is known, another claim looks closer at once.
            self.seen.there(key.id());
            let update = pipeline::acquire_if_free(claim, rules);
            let asked = Instant::now();
            let took = self.take(key.id(), update).await;
            if took.as_ref().is_err_and(|e| !ran_out_of_time(e)) {
                // Probably there is no record, and the repetition travels with others again.
                self.seen.gone(key.id());
            }
            let took = took.map_err(|e| claim_failed(key, e))?;
            *was_sent = true;
            match took {
                Took::New(mut record) => {
                    record.insert("now", record.get("ts").cloned());
                    // Anybody else's record is a newer one: this grant is gone already.
                    return match self.fetched(key, &record, asked).answer(claim) {
                        Some(granted @ TryAcquire::Granted(_)) => {
                            Ok(Some(Answered::Answer(granted)))
                        }
                        _ => Err(gone_again(key)),
                    };
                }
                Took::Existed(Some(record)) => {
                    let token = record.get_str("token").ok().and_then(|it| it.parse().ok());
                    if token.is_some_and(|it| claim.token.is_of_same_claim(it)) {
                        // The record was a leftover without `ts`, or the reply to an earlier attempt was lost.
                        let granted = self.granted_before(key, claim).await?;
                        return Ok(Some(Answered::Answer(granted)));
                    }
                    has_readers = record.contains_key("readers");
                }
                Took::Existed(None) => {}
                Took::Gone => return Err(gone_again(key)),
            }
        }
        if is_exclusive && !rules.fair && !has_readers {
            let short = || {
                let update = pipeline::acquire_shortly(claim, traced, rules);
                (update, pipeline::short_answer_fields(claim))
            };
            let Some((it, asked)) = self.attempt(key, claim, traced, may_give_way, short).await?
            else {
                return Ok(None);
            };
            *was_sent = true;
            self.seen.there(key.id());
            if let Some(record) = it.record
                && !record.get_bool(pipeline::MORE).unwrap_or(false)
                && let Some(answered) = self.answered(key, &record, asked, claim)
            {
                return Ok(Some(answered));
            }
        }
        let full = || {
            let update = pipeline::acquire(claim, traced, rules);
            (update, pipeline::answer_fields(claim, rules))
        };
        let Some((it, asked)) = self.attempt(key, claim, traced, may_give_way, full).await? else {
            return Ok(None);
        };
        let answered = it.record.and_then(|record| self.answered(key, &record, asked, claim));
        answered.map(Some).ok_or_else(|| StoreError::new(StoreErrorKind::Other, acquiring(key)))
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
        // Readers do not exclude each other: such a lock only means that the list is full, with expired
        // readers.
        let is_in_the_way = |lock: &Lock| {
            !lock.expires_in().is_zero() && (lock.mode, claim.mode) != (Mode::Shared, Mode::Shared)
        };
        match answer {
            // Another session's live lock, or the turn of a waiter.
            Some(TryAcquire::Held(lock)) if former.is_empty() || is_in_the_way(&lock) => {
                Some(Answered::Answer(TryAcquire::Held(lock)))
            }
            _ if !former.is_empty() => Some(Answered::Expired(former.to_vec())),
            answer => answer.map(Answered::Answer),
        }
    }

    /// Reads what this claim was granted, because the reply to the shortest form does not contain the
    /// server's time.
    async fn granted_before(&self, key: &LockKey, claim: &Claim) -> Result<TryAcquire, StoreError> {
        let asked = Instant::now();
        let found = self.leases.find_one(pipeline::by_id(key.id()));
        let found = found.projection(pipeline::lock_fields(Some(&claim.aid)));
        let found = found.max_time(lanes::read_limit()).await;
        let record = found.map_err(|e| store_error(acquiring(key), e))?;
        match record.and_then(|record| self.fetched(key, &record, asked).answer(claim)) {
            Some(granted @ TryAcquire::Granted(_)) => Ok(granted),
            _ => Err(gone_again(key)),
        }
    }

    /// One command, in its turn. `form` returns the update and the fields of the answer. `None` if the claim
    /// gave way: when its turn came, another session was known to hold the lock.
    async fn attempt(
        &self,
        key: &LockKey,
        claim: &Claim,
        traced: &[String],
        may_give_way: bool,
        form: impl FnOnce() -> (Vec<Document>, Document),
    ) -> Result<Option<(Modified, Instant)>, StoreError> {
        let failed = |e| claim_failed(key, e);
        let turn = self.lanes.claim(key.id()).await.map_err(failed)?;
        // Then a read will do. The holder's release must not wait behind a write of each refused claim.
        if may_give_way && self.seen.is_held_by_another(key.id(), &claim.aid) {
            return Ok(None);
        }
        let (update, mut fields) = form();
        fields.insert(pipeline::FORMER, pipeline::former(claim, traced, &self.rules));
        let asked = Instant::now();
        let done = self.modify(turn, pipeline::by_id(key.id()), update, true, Some(fields)).await;
        done.map(|it| Some((it, asked))).map_err(failed)
    }

    // findAndModify returns: our token → granted, perhaps by an earlier attempt whose reply was lost. A
    // record without a lock → released for a waiter of another server. Nothing, or another lock → the
    // acquisition was gone, and so is the lock that an earlier attempt was granted; released if an earlier
    // attempt was written and only its majority was late.
    pub(super) async fn hand_over(
        &self,
        from: &Acquisition,
        claim: &Claim,
    ) -> Result<HandedOver, StoreError> {
        let key = &from.key;
        let fields = match claim.mode {
            Mode::Exclusive => pipeline::short_answer_fields(claim),
            Mode::Shared => pipeline::answer_fields(claim, &self.rules),
        };
        let update = pipeline::hand_over(from, claim, &self.rules);
        let handed = pipeline::handed(from, claim);
        let done = until_majority(async || {
            let turn = self.lanes.turn(key.id()).await?;
            let asked = Instant::now();
            let (update, fields) = (update.clone(), Some(fields.clone()));
            Ok((self.modify(turn, handed.clone(), update, false, fields).await?, asked))
        });
        let ((done, asked), before) =
            done.await.map_err(|e| store_error(format!("handing over the lock on {key:?}"), e))?;
        let answer = done.record.as_ref().and_then(|it| self.fetched(key, it, asked).answer(claim));
        if let Some(TryAcquire::Granted(lock)) = answer {
            self.seen.held(&lock);
            return Ok(HandedOver::To(lock));
        }
        self.seen.freed(key.id());
        let is_free = match &done.record {
            Some(record) => claim.turn.is_some() && !record.contains_key("ts"),
            None => before,
        };
        Ok(if is_free { HandedOver::Released } else { HandedOver::AlreadyGone })
    }
}

fn claim_failed(key: &LockKey, error: Error) -> StoreError {
    retry_duplicate_key(store_error(acquiring(key), error))
}

/// A later form of the claim was refused because of the load, but an earlier one was sent and may hold the lock: the
/// answer to a command for several claims does not tell that a leftover record without `ts` was taken. The lock must
/// be given back. (No test: it takes a group, a leftover in it, and a gate that closes between two commands.)
fn in_doubt(error: StoreError) -> StoreError {
    match error.kind() {
        StoreErrorKind::Overloaded => StoreError::new(
            StoreErrorKind::Unavailable,
            format!("{error}; an earlier command may have been carried out"),
        ),
        _ => error,
    }
}

fn gone_again(key: &LockKey) -> StoreError {
    let what = format!("{}: it was granted, but was gone again at once", acquiring(key));
    StoreError::new(StoreErrorKind::Unavailable, what)
}

fn acquiring(key: &LockKey) -> String {
    format!("acquiring the lock on {key:?}")
}
