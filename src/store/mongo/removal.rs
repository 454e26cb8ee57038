//! The removal of locks: the only place that deletes a record, or keeps it for its other content.

use std::time::{Duration, Instant};

use mongodb::{
    bson::{Bson, Document, doc},
    error::Result,
};

use crate::{
    key::LockId,
    lock::{Aid, Lock, Mode},
    store::{
        Acquisition, Released, Rules, Taken,
        mongo::{
            Prepared,
            error::{is_not_sent, late_majority},
            lanes,
            pipeline::{
                self, Grant, Target, exclusive_of, has_run_out, is_live_reader, is_of, of_sessions,
                some_reader, take_out,
            },
            record::presentable,
            write::Write,
        },
        with_deadline,
    },
};

/// How long a break waits for the removal of the record that it has made to expire.
const TO_TIDY_UP: Duration = Duration::from_millis(500);

/// A selection of grants in a collection.
pub(super) enum Grants<'a> {
    Of(&'a [Aid]),
    RunOutOf(&'a [Aid]),
    /// These grants, if they have expired.
    RunOut {
        ids: Vec<Bson>,
        tokens: Vec<&'a str>,
    },
}

impl Grants<'_> {
    /// Matches records to delete as a whole, in collections where a record contains nothing but the
    /// lock.
    fn exclusive(&self, rules: &Rules) -> Document {
        let run_out = has_run_out(Grant::Exclusive, rules.ttl);
        match self {
            Self::Of(aids) => exclusive_of(aids),
            Self::RunOutOf(aids) => {
                let mut filter = exclusive_of(aids);
                filter.insert("$expr", run_out);
                filter
            }
            Self::RunOut { ids, tokens } => {
                doc! { "_id": { "$in": ids }, "token": { "$in": tokens }, "$expr": run_out }
            }
        }
    }

    fn records(&self) -> Document {
        match self {
            Self::Of(aids) | Self::RunOutOf(aids) => of_sessions(aids),
            Self::RunOut { ids, .. } => doc! { "_id": { "$in": ids } },
        }
    }

    fn are(&self, grant: Grant, rules: &Rules) -> Document {
        let run_out = has_run_out(grant, rules.ttl);
        match self {
            Self::Of(aids) => is_of(grant, aids),
            Self::RunOutOf(aids) => doc! { "$and": [is_of(grant, aids), run_out] },
            Self::RunOut { tokens, .. } => {
                let these = doc! { "$in": [grant.field("token"), { "$literal": tokens }] };
                doc! { "$and": [these, run_out] }
            }
        }
    }
}

impl Prepared {
    /// Removes one acquisition.
    pub(super) async fn remove(&self, it: &Target<'_>) -> Result<Released> {
        let (released, before) = until_majority(|| self.try_remove(it)).await?;
        Ok(if before { Released::Released } else { released })
    }

    async fn try_remove(&self, it: &Target<'_>) -> Result<Released> {
        let rules = &self.rules;
        self.seen.freed(it.id);
        // An exclusive lock is alone in its record, unless the record has a queue.
        let is_all = it.mode == Mode::Exclusive && !rules.fair;
        if !rules.fenced {
            // delete returns: 1 → released. 0 → the record has other content, too, or the lock is gone:
            // given back before, never granted, or this is the repetition of a delete whose reply was
            // lost.
            let filter = it.alone(rules);
            if is_all {
                let gone = self.delete(it.id, filter, it.grantee()).await?;
                self.seen.gone(it.id);
                return Ok(released(u64::from(gone)));
            }
            if self.write_one(it.id, filter, &Write::Delete).await? > 0 {
                return Ok(Released::Released);
            }
        }
        let gone = self.change(it.filter(), take_out(|grant| it.is(grant), rules), it.id).await?;
        Ok(released(u64::from(gone)))
    }

    // First makes an exclusive lock expire, together with the name of who broke it. This is for
    // watchers, because a removal carries no information. updateOne returns 0 → the lock was gone; or it
    // had expired, and its session is left to the reaper; or this repeats a break whose reply was lost,
    // which has left its mark. The removal itself works as `release` does, and finds nothing if a waiter
    // was quicker. If it fails, or the process dies before it, the sweep removes the lock.
    //
    // A foreign lock has no token. It is recognised by the date at which it was taken. That date must
    // be read again, because a lock as shown cannot carry every date that a record can.
    pub(super) async fn take_away(&self, seen: &Lock, by: &Taken) -> Result<Released> {
        let Lock { key, aid, mode, .. } = seen;
        let Some(token) = seen.token else {
            let found = self.locks.find_one(pipeline::by_id(key.id()));
            let record = found.max_time(lanes::read_limit()).await?;
            let ts = record.and_then(|record| record.get_datetime("ts").ok().copied());
            if presentable(ts) != seen.since {
                return Ok(Released::AlreadyGone);
            }
            return self.remove_foreign(key.id(), ts.into()).await;
        };
        let it = Acquisition { key: key.clone(), aid: aid.clone(), token, mode: *mode };
        let it = Target::of(&it);
        if *mode == Mode::Shared {
            let mut live = it.filter();
            let reads = doc! { "$and": [it.is(Grant::Reader), is_live_reader()] };
            live.insert("$expr", some_reader(reads));
            let out = take_out(|grant| it.is(grant), &self.rules);
            let (gone, before) =
                until_majority(|| self.change(live.clone(), out.clone(), it.id)).await?;
            return Ok(released(u64::from(gone || before)));
        }
        let expire = || self.shorten(it.id, it.filter(), pipeline::take_away(token, by));
        if let (Released::AlreadyGone, false) = until_majority(expire).await? {
            let mut marked = it.filter();
            marked.insert("taken", pipeline::taken_text(token, by));
            let found = self.locks.find_one(marked).projection(doc! { "_id": 1 });
            if found.max_time(lanes::read_limit()).await?.is_none() {
                return Ok(Released::AlreadyGone);
            }
        }
        // The lock is broken, whether or not its record is removed now, so the caller does not wait long.
        let _ = with_deadline(Instant::now() + TO_TIDY_UP, self.remove(&it)).await;
        Ok(Released::Released)
    }

    /// Changes the expiry of an exclusive lock that is still live.
    pub(super) async fn shorten(
        &self,
        id: &LockId,
        lock: Document,
        by: Vec<Document>,
    ) -> Result<Released> {
        // If a foreign program wrote other types into these fields, the pipeline would fail.
        let mut filter = pipeline::and_live(lock, self.rules.ttl);
        filter.insert("ts", doc! { "$type": "date" });
        filter.insert("ttl", doc! { "$type": "number" });
        Ok(released(self.write_one(id, filter, &Write::Update(by)).await?))
    }

    /// Removes the lock of a foreign program that has this `ts`.
    pub(super) async fn remove_foreign(&self, id: &LockId, ts: Bson) -> Result<Released> {
        let rules = &self.rules;
        let mut filter = pipeline::by_id(id);
        filter.insert("ts", ts);
        if rules.fenced || rules.fair {
            let all = take_out(|_| doc! { "$literal": true }, rules);
            return Ok(released(u64::from(self.change(filter, all, id).await?)));
        }
        Ok(released(self.write_one(id, filter, &Write::Delete).await?))
    }

    // findAndModify returns: nothing → gone before. A record with content → done. A record without
    // content → this was the last grant, and the record is deleted unless another claim used it
    // meanwhile. If the process dies before that, the sweep deletes it; until then only foreign
    // programs mind it.
    pub(super) async fn change(
        &self,
        filter: Document,
        by: Vec<Document>,
        id: &LockId,
    ) -> Result<bool> {
        let there = |field: &str| {
            let is_there = doc! { "$ne": [{ "$type": field }, "missing"] };
            doc! { "$cond": [is_there, true, "$$REMOVE"] }
        };
        let fields = doc! {
            "_id": 0, "ts": 1, "aid": 1, "fence": 1,
            "readers": there("$readers"), "queue": there("$queue"),
        };
        let turn = self.lanes.turn(id).await?;
        let left = self.modify(turn, filter, by, false, Some(fields)).await?.record;
        let Some(left) = left else { return Ok(false) };
        if left.is_empty() {
            let mut empty = pipeline::by_id(id);
            empty.extend(pipeline::nothing_in_it());
            self.write_one(id, empty, &Write::Delete).await?;
        }
        Ok(true)
    }

    /// Removes several grants. Unless `shared`, there are no readers among them. May be called again
    /// after an error.
    pub(super) async fn remove_many(&self, grants: &Grants<'_>, shared: bool) -> Result<()> {
        let rules = &self.rules;
        if !rules.fenced && !rules.fair {
            self.write_all(grants.exclusive(rules), &Write::Delete).await?;
            if !shared {
                return Ok(());
            }
        }
        let out = take_out(|grant| grants.are(grant, rules), rules);
        self.write_all(grants.records(), &Write::Update(out)).await?;
        self.tidy_up().await
    }

    /// Removes records without a holder and without a waiter.
    pub(super) async fn tidy_up(&self) -> Result<()> {
        let mut left_over = pipeline::left_over();
        if self.rules.fenced && self.rules.fair {
            let settled = take_out(|_| doc! { "$literal": false }, &self.rules);
            self.write_all(left_over.clone(), &Write::Update(settled)).await?;
        }
        if self.rules.fenced {
            left_over.insert("fence", doc! { "$exists": false });
        }
        self.write_all(left_over, &Write::Delete).await?;
        Ok(())
    }
}

/// Repeats a removal that no majority has acknowledged in time. The repetition waits for the majority
/// again. Unless a failover has undone the removal, the repetition finds nothing more to remove. Returns
/// the last outcome, and whether an earlier attempt has removed something.
pub(super) async fn until_majority<T, F>(remove: impl Fn() -> F) -> Result<(T, bool)>
where
    F: Future<Output = Result<T>>,
{
    let (mut is_written, mut late) = (false, None);
    loop {
        match remove().await {
            Err(e) if lanes::may_repeat(late.is_some()) && late_majority(&e).is_some() => {
                is_written |= late_majority(&e) == Some(true);
                late = Some(e);
            }
            // The repetition was not sent, but an earlier attempt was.
            Err(e) if is_not_sent(&e) => return Err(late.unwrap_or(e)),
            done => return done.map(|done| (done, is_written)),
        }
    }
}

fn released(gone: u64) -> Released {
    if gone == 0 { Released::AlreadyGone } else { Released::Released }
}
