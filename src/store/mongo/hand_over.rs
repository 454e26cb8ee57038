//! Releases a lock and grants it to a waiter in the same step, or takes it over.

use std::time::Instant;

use mongodb::bson::{Bson, Document, doc};

use crate::{
    lock::Mode,
    store::{
        Acquisition, Claim, HandedOver, Rules, TryAcquire,
        mongo::{
            Call,
            acquire::{Update, answer_fields, short_answer_fields},
            codec::literal,
            error::Result,
            grant::{Grant, Target, is_live, replace_with},
            queue::in_the_way_of,
            record::by_id,
            release::taken_text,
            settle::settle,
        },
    },
};

impl Call<'_> {
    // findAndModify returns: our token → granted, perhaps by an earlier attempt whose reply was lost. A
    // record without a lock → released for a waiter of another server. Nothing, or another lock → the
    // acquisition was gone, and so is the lock that an earlier attempt was granted; released if an earlier
    // attempt was written and only its majority was late.
    pub(super) async fn hand_over(&self, from: &Acquisition, claim: &Claim) -> Result<HandedOver> {
        let (key, update) = (&from.key, update(from, claim, &self.rules));
        let fields = match claim.mode {
            Mode::Exclusive => short_answer_fields(claim),
            Mode::Shared => answer_fields(claim, &self.rules),
        };
        let done = self.until.until_majority(async || {
            let admitted = self.admit(key.id()).await?;
            let asked = Instant::now();
            let (filter, fields) = (before_or_after(from, claim), Some(fields.clone()));
            Ok((self.modify(admitted, filter, update.clone(), false, fields).await?, asked))
        });
        let ((record, asked), before) = done.await?;
        let is_free = match &record {
            Some(record) => claim.turn.is_some() && !record.contains_key("ts"),
            None => before,
        };
        let answer = record.and_then(|record| self.fetched(key, record, asked).answer(claim));
        if let Some(TryAcquire::Granted(lock)) = answer {
            self.seen.held(&lock);
            return Ok(HandedOver::To(lock));
        }
        self.seen.freed(key.id());
        Ok(if is_free { HandedOver::Released } else { HandedOver::AlreadyGone })
    }
}

/// Matches the record of the lock `from`, before and after its handover.
fn before_or_after(from: &Acquisition, claim: &Claim) -> Document {
    let mut filter = by_id(from.key.id());
    let either = doc! { "$in": [from.token.to_string(), claim.token.to_string()] };
    if claim.mode == Mode::Exclusive {
        filter.insert("token", either);
    } else {
        let joined = doc! { "readers.token": claim.token.to_string() };
        filter.insert("$or", [doc! { "token": either }, joined].to_vec());
    }
    filter
}

/// Gives the exclusive lock `from` to the claim, or only releases it if the claim has a turn and comes
/// after others. A takeover requires that the lock is live. A repetition changes nothing.
fn update(from: &Acquisition, claim: &Claim, rules: &Rules) -> Vec<Document> {
    let it = Update { claim, traced: &[], rules };
    let mut grant = it.grant();
    let mut due = None;
    if from.aid == claim.aid {
        let (ttl, until) = it.lease_that_goes_on();
        if claim.max_hold.is_some() && claim.mode == Mode::Exclusive {
            due = Some(doc! { "$add": ["$$NOW", ttl.clone()] });
        }
        let since = doc! { "$ifNull": ["$since", "$$NOW"] };
        grant.extend(doc! { "since": since, "ttl": ttl, "until": until });
    }
    let mut granted = it.granted(grant);
    if let Some(due) = due {
        granted.insert("due", due);
    }
    let mut is_from = Target::exclusive(from).is(Grant::Exclusive);
    if let Some(by) = &claim.taken {
        granted.insert("taken", literal(&taken_text(from.token, by)));
        is_from = doc! { "$and": [is_from, is_live(rules.ttl)] };
    }
    let mut granted = Bson::from(granted);
    if claim.turn.is_some() {
        // The record of a lock that nobody holds any more, which the last stage tidies up.
        let released = doc! { "$mergeObjects": ["$$ROOT", { "readers": [] }] };
        let is_first = doc! { "$eq": [in_the_way_of(claim), []] };
        granted = doc! { "$cond": [is_first, granted, released] }.into();
    }
    let mut stages = vec![replace_with(doc! { "$cond": [is_from, granted, "$$ROOT"] })];
    if claim.mode == Mode::Shared || rules.fair {
        stages.extend(settle(rules));
    }
    stages
}
