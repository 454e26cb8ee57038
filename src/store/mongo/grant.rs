//! Locks are granted: the two commands that do it.

use std::time::Instant;

use mongodb::options::ReturnDocument;

use super::{
    Prepared,
    error::{retry_duplicate_key, store_error},
    pipeline::{self, Acquisition},
};
use crate::{
    Aid, Lock, LockKey, LockToken, Mode, StoreError, StoreErrorKind,
    store::{Claim, TryAcquire},
};

impl Prepared {
    // findAndModify comes back as: our token → granted (also when this is a repetition whose first
    // reply was lost); our aid with another token → already ours; anything else → held. Nothing →
    // impossible, an upsert returns the document. 11000 → two first upserts met and the server did
    // not retry by itself; tried again as unavailable. Write concern time-out, connection lost → not
    // known; tried again with the same token. A short claim that finds more to it
    // has changed nothing, and is made again in full.
    pub(super) async fn acquire(
        &self,
        key: &LockKey,
        claim: &Claim,
    ) -> Result<TryAcquire, StoreError> {
        let doing = || format!("acquiring the lock on {key:?}");
        let attempt = async |update, fields| {
            let asked = Instant::now();
            let record = (self.locks)
                .find_one_and_update(pipeline::by_id(key.id()), update)
                .upsert(true)
                .return_document(ReturnDocument::After)
                .projection(fields)
                .await
                .map_err(|e| retry_duplicate_key(store_error(doing(), e)))?;
            record
                .map(|record| (record, asked))
                .ok_or_else(|| StoreError::new(StoreErrorKind::Other, doing()))
        };
        let mut answer = None;
        if claim.mode == Mode::Exclusive && !self.rules.fair {
            let update = pipeline::acquire_shortly(claim, &self.rules);
            let (record, asked) = attempt(update, pipeline::short_answer_fields(claim)).await?;
            if !record.get_bool(pipeline::MORE).unwrap_or(false) {
                answer = self.fetched(key, &record, asked).answer(claim);
            }
        }
        if answer.is_none() {
            let update = pipeline::acquire(claim, &self.rules);
            let fields = pipeline::answer_fields(claim, &self.rules);
            let (record, asked) = attempt(update, fields).await?;
            answer = self.fetched(key, &record, asked).answer(claim);
        }
        answer.ok_or_else(|| StoreError::new(StoreErrorKind::Other, doing()))
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
        let from =
            Acquisition { id: key.id(), aid, token, mode: Mode::Exclusive, unless_told: false };
        let asked = Instant::now();
        let record = (self.locks)
            .find_one_and_update(
                pipeline::handed(&from, claim),
                pipeline::hand_over(&from, claim, &self.rules),
            )
            .return_document(ReturnDocument::After)
            .projection(match claim.mode {
                Mode::Exclusive => pipeline::short_answer_fields(claim),
                Mode::Shared => pipeline::answer_fields(claim, &self.rules),
            })
            .await
            .map_err(|e| store_error(format!("handing the lock on {key:?} over"), e))?;
        let answer = record.and_then(|record| self.fetched(key, &record, asked).answer(claim));
        Ok(match answer {
            Some(TryAcquire::Granted(lock)) => Some(lock),
            _ => None,
        })
    }
}
