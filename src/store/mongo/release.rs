//! Removes locks: by release, give-back and break, and all locks of a session at once. No other file deletes a
//! record, or keeps a record for its other content.

use std::{
    slice,
    time::{Duration, Instant},
};

use mongodb::{
    bson::{Bson, Document, doc},
    error::Error,
};
use serde_json::json;

use crate::{
    error::StoreErrorKind,
    key::{LockId, LockKey},
    lock::{Aid, Lock, LockToken, Mode, PageId},
    store::{
        Acquisition, Deadline, Released, Removal, Rules, TakenBy,
        mongo::{
            Call,
            codec::{literal, millis},
            error::{MAX_TIME_EXPIRED, Result, Unacknowledged, exceeded_time_limit, kind},
            grant::{
                Grant, Target, and_live, exclusive_of, has_expired, has_repetition, is_leaving,
                is_live, is_live_reader, is_of, of_sessions, some_reader,
            },
            read::fields_for,
            record::{Exactly, Fetched, Leased, by_id, exactly, presentable},
            send::{LIMIT, Write, acknowledged, number_of, refusals, row, run},
            settle::take_out,
        },
    },
};

/// How long a break waits for the removal of the record that it has made to expire.
const TO_TIDY_UP: Duration = Duration::from_millis(500);
/// The shortest time limit of a command that releases several locks, and the limit as a multiple of the usual time.
/// A record that is stuck holds up the others once, for the time of this limit.
const SHORTEST_LIMIT: Duration = Duration::from_millis(100);
const LIMIT_TO_USUAL: u32 = 8;

/// Many grants in a collection.
pub(super) enum Grants<'a> {
    Of(&'a [Aid]),
    ExpiredOf(&'a [Aid]),
    /// These grants, if they have expired.
    Expired {
        ids: Vec<Bson>,
        tokens: Vec<&'a str>,
    },
}

impl Grants<'_> {
    /// Matches records to delete as a whole, in collections where a record contains nothing but the
    /// lock.
    fn exclusive(&self, rules: &Rules) -> Document {
        let mut filter = match self {
            Self::Of(aids) => return exclusive_of(aids),
            Self::ExpiredOf(aids) => exclusive_of(aids),
            Self::Expired { ids, tokens } => {
                doc! { "_id": { "$in": ids }, "token": { "$in": tokens } }
            }
        };
        filter.insert("$expr", has_expired(Grant::Exclusive, rules.ttl));
        filter
    }

    fn records(&self) -> Document {
        match self {
            Self::Of(aids) | Self::ExpiredOf(aids) => of_sessions(aids),
            Self::Expired { ids, .. } => doc! { "_id": { "$in": ids } },
        }
    }

    fn are(&self, grant: Grant, rules: &Rules) -> Document {
        let these = match self {
            Self::Of(aids) => return is_of(grant, aids),
            Self::ExpiredOf(aids) => is_of(grant, aids),
            Self::Expired { tokens, .. } => {
                doc! { "$in": [grant.field("token"), { "$literal": tokens }] }
            }
        };
        doc! { "$and": [these, has_expired(grant, rules.ttl)] }
    }
}

/// The locks of a session in a collection.
pub(super) struct OfSession {
    /// Its live locks, and those that expired because it became idle.
    pub(super) locks: Vec<Leased>,
    /// How many more records it has beyond the limit.
    pub(super) more: usize,
    /// True if a list of readers contains the session, or may contain it, even with an expired lease.
    pub(super) may_read: bool,
}

impl Call<'_> {
    pub(super) async fn remove_lock(&self, removal: Removal<'_>) -> Result<Released> {
        match removal {
            Removal::Release(it) => self.remove(&Target::of(it)).await,
            Removal::Retract(attempts) => match Target::untold(attempts) {
                Some(it) => self.remove(&it).await,
                None => Ok(Released::AlreadyGone),
            },
            Removal::Break { seen, taken } => self.break_lock(seen, taken).await,
        }
    }

    async fn remove(&self, it: &Target) -> Result<Released> {
        let (gone, before) = self.until.until_majority(|| self.try_remove(it)).await?;
        Ok(released(gone || before))
    }

    async fn try_remove(&self, it: &Target) -> Result<bool> {
        let rules = &self.rules;
        self.seen.freed(&it.id);
        if !rules.fenced {
            // delete returns: 1 → released. 0 → the record has other content, too, or the lock is gone:
            // given back before, never granted, or this is the repetition of a delete whose reply was
            // lost.
            if it.mode == Mode::Exclusive && !rules.fair {
                // An exclusive lock is alone in its record, unless the record has a queue.
                let gone = self.delete(it).await?;
                self.seen.gone(&it.id);
                return Ok(gone);
            }
            if self.delete_alone(it).await? {
                return Ok(true);
            }
        }
        self.change(&it.id, it.filter(), take_out(|grant| it.is(grant), rules)).await
    }

    // First makes an exclusive lock expire, together with the name of who broke it. This is for
    // watchers, because a removal carries no information. update returns 0 → the lock was gone; or it
    // had expired, and its session is left to the reaper; or this repeats a break whose reply was lost,
    // which has left its mark. The removal itself works as a release does, and finds nothing if a waiter
    // was quicker. If it fails, or the process dies before it, the sweep removes the lock.
    async fn break_lock(&self, seen: &Lock, by: &TakenBy) -> Result<Released> {
        let Some(held) = Acquisition::of(seen) else { return self.break_foreign(seen).await };
        let it = Target::of(&held);
        if it.mode == Mode::Shared && self.delete_odd(&it.id, it.filter()).await? {
            return Ok(Released::Released);
        }
        if it.mode == Mode::Shared {
            let mut live = it.filter();
            let reads = doc! { "$and": [it.is(Grant::Reader), is_live_reader()] };
            live.insert("$expr", some_reader(reads));
            let out = take_out(|grant| it.is(grant), &self.rules);
            let change = || self.change(&it.id, live.clone(), out.clone());
            let (gone, before) = self.until.until_majority(change).await?;
            return Ok(released(gone || before));
        }
        let text = taken_text(held.token, by);
        let taken = expire_by(doc! { "until": "$$NOW", "taken": literal(&text) });
        let expire = || self.shorten(&it.id, it.filter(), taken.clone());
        if let (Released::AlreadyGone, false) = self.until.until_majority(expire).await? {
            let mut marked = it.filter();
            marked.insert("taken", text);
            let found = self.primary.find_one(marked).projection(doc! { "_id": 1 });
            let found = found.exactly([&it.id]);
            if found.max_time(self.until.read_limit()).await?.is_none() {
                return Ok(Released::AlreadyGone);
            }
        }
        // The lock is broken, whether or not its record is removed now, so the caller does not wait long.
        let soon = self.with(Deadline::at(Instant::now() + TO_TIDY_UP));
        let _ = soon.remove(&it).await;
        Ok(Released::Released)
    }

    /// Deletes the whole record if a name stands twice in it: such a record [cannot be
    /// changed](super::grant::replace_with).
    async fn delete_odd(&self, id: &LockId, mut filter: Document) -> Result<bool> {
        filter.insert("$expr", has_repetition());
        Ok(self.write_one(id, filter, &Write::Delete).await? > 0)
    }

    // delete returns: 1 → removed; 0 → it was renewed or removed meanwhile.
    pub(super) async fn remove_odd(&self, id: &LockId) -> Result<()> {
        let mut odd = by_id(id);
        let expired = doc! { "$not": [is_live(self.rules.ttl)] };
        odd.insert("$expr", doc! { "$and": [expired, has_repetition()] });
        self.write_one(id, odd, &Write::Delete).await?;
        self.seen.gone(id);
        Ok(())
    }

    // A foreign lock has no token. It is recognised by the date at which it was taken. That date must
    // be read again, because a lock as shown cannot carry every date that a record can.
    async fn break_foreign(&self, seen: &Lock) -> Result<Released> {
        let (id, rules) = (seen.key.id(), &self.rules);
        let mut filter = by_id(id);
        let records = self.primary.clone_with_type();
        let found = records.find_one(filter.clone()).max_time(self.until.read_limit());
        let ts = row(found.exactly([id]))
            .await?
            .and_then(|record| record.get_datetime("ts").ok().copied());
        if presentable(ts) != seen.since {
            return Ok(Released::AlreadyGone);
        }
        filter.insert("ts", ts);
        let gone = if self.delete_odd(id, filter.clone()).await? {
            true
        } else if rules.fenced || rules.fair {
            self.change(id, filter, take_out(|_| doc! { "$literal": true }, rules)).await?
        } else {
            self.write_one(id, filter, &Write::Delete).await? > 0
        };
        Ok(released(gone))
    }

    // update returns: 1 → the lock now expires within the grace period; 0 → it was gone already.
    pub(super) async fn expire_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
    ) -> Result<Released> {
        let mut filter = Target::exclusive(held).filter();
        if let Some(page) = page {
            filter.insert("page", doc! { "$eq": page.to_string() });
        }
        let by = doc! { "$add": ["$$NOW", millis(grace)] };
        // The actual end of `max_hold` is kept in `leaving`, for a page that comes back.
        let known = doc! { "$cond": [Grant::Exclusive.has_max_hold(), "$until", by.clone()] };
        let before = doc! { "$cond": [is_leaving(), "$leaving", { "until": "$until" }] };
        let until = doc! { "until": { "$min": [known, by] }, "leaving": before };
        self.shorten(held.key.id(), filter, expire_by(until)).await
    }

    /// Changes the expiry of an exclusive lock that is still live.
    async fn shorten(&self, id: &LockId, lock: Document, by: Vec<Document>) -> Result<Released> {
        // If a foreign program wrote other types into these fields, the pipeline would fail.
        let mut filter = and_live(lock, self.rules.ttl);
        filter.insert("ts", doc! { "$type": "date" });
        filter.insert("ttl", doc! { "$type": "number" });
        Ok(released(self.write_one(id, filter, &Write::Update(by)).await? > 0))
    }

    /// Deletes the record of an exclusive lock that is alone in it. Of several locks that are
    /// retracted together, either all are reported as deleted, or none.
    async fn delete(&self, it: &Target) -> Result<bool> {
        if self.admission.is_used(&it.id) {
            return self.delete_alone(it).await;
        }
        let (groups, is_retracted) = (&self.groups, it.unless_told);
        let group = if is_retracted { &groups.retractions } else { &groups.releases };
        let gone = group.submit(it.clone(), self.until.send_by(), async |jobs| match &jobs[..] {
            [job] => vec![self.delete_alone(job).await],
            jobs => {
                let gone = match is_retracted {
                    true => self.retract_together(jobs).await,
                    false => self.release_together(jobs).await,
                };
                self.each(jobs.iter().map(|job| &job.id), gone)
            }
        });
        gone.await
    }

    async fn delete_alone(&self, it: &Target) -> Result<bool> {
        Ok(self.write_one(&it.id, it.alone(&self.rules), &Write::Delete).await? > 0)
    }

    // find returns the records that are there. A lock that was there and that the delete did not refuse is gone
    // then, whoever removed it: released. No reply → each release is repeated, and finds nothing to delete.
    async fn release_together(&self, jobs: &[Target]) -> Result<Vec<Result<bool>>> {
        let ids: Vec<_> = jobs.iter().map(|job| &job.id).collect();
        let records = self.records(&ids).await?;
        let is_there = |job: &Target| records.get(&job.id).is_some_and(|it| job.is_in(it));
        let there: Vec<_> = jobs.iter().map(is_there).collect();
        let limit = release_limit(self.groups.releases.usual());
        let reply = match self.delete_all(jobs, limit).await {
            // Some may be deleted already: all are repeated, each alone, and find nothing then.
            Err(e) if exceeded_time_limit(&e) => {
                self.admission.suspect(ids.into_iter());
                let repeat = |&has_written: &bool| {
                    let error = doc! { "code": MAX_TIME_EXPIRED }.into();
                    Err(Error::custom(Unacknowledged { has_written, error }))
                };
                return Ok(there.iter().map(repeat).collect());
            }
            reply => reply?,
        };
        let refused = refusals(&reply);
        let outcome = |(n, &is_there): (usize, &bool)| match refused.get(&n) {
            Some(e) => Err(e.clone()),
            None => acknowledged(&reply, is_there).map(|()| is_there),
        };
        Ok(there.iter().enumerate().map(outcome).collect())
    }

    // delete returns how many records it has deleted: all → retracted. Fewer → one of the locks was never
    // granted; or another request was told of it, and it stays. The reply does not say which lock, so no lock is
    // reported as deleted. No reply → each is repeated, and finds nothing to delete.
    async fn retract_together(&self, jobs: &[Target]) -> Result<Vec<Result<bool>>> {
        let reply = self.delete_all(jobs, LIMIT).await?;
        let refused = refusals(&reply);
        let all = number_of(&reply) == jobs.len() as u64;
        acknowledged(&reply, all)?;
        let of = |n| refused.get(&n).map_or(Ok(all), |e| Err(e.clone()));
        Ok((0..jobs.len()).map(of).collect())
    }

    async fn delete_all(&self, jobs: &[Target], limit: Duration) -> Result<Document> {
        let statement =
            |job: &Target| exactly(doc! { "q": job.alone(&self.rules), "limit": 0 }, "q");
        let deletes: Vec<_> = jobs.iter().map(statement).collect();
        let command = doc! { "delete": self.primary.name(), "deletes": deletes, "ordered": false };
        run(&self.primary, command, limit).await
    }

    // A find, then the removal. A lock that is taken between the two is removed but not named. If the
    // reply to the removal is lost, the removal is repeated here and not by the manager: a second find
    // would find nothing to name.
    pub(super) async fn release_all(&self, aid: &Aid) -> Result<Vec<LockKey>> {
        let OfSession { locks, may_read, .. } = self.of_session(aid, usize::MAX).await?;
        let mut attempts = 3;
        loop {
            attempts -= 1;
            match self.remove_many(&Grants::Of(slice::from_ref(aid)), may_read).await {
                Ok(()) => break,
                Err(e) if attempts == 0 || kind(&e) != StoreErrorKind::Unavailable => {
                    return Err(e);
                }
                Err(_) => {}
            }
        }
        let keys = locks.into_iter().filter(|it| it.is_live).map(|it| it.lock.key);
        Ok(keys.inspect(|key| self.seen.gone(key.id())).collect())
    }

    /// All locks of the session, so that they can be removed.
    pub(super) async fn of_session(&self, aid: &Aid, limit: usize) -> Result<OfSession> {
        let aids = slice::from_ref(aid);
        let mut fields = fields_for(aids);
        fields.insert("until", 1);
        let found = self.fetch(&self.primary, of_sessions(aids), fields, limit).await?;
        let reads = |it: &Fetched| it.record.get_array("readers").is_ok();
        let is_full = found.len() >= limit;
        // Beyond the limit it is not known whether the session reads.
        let may_read = is_full || found.iter().any(reads);
        let more = if is_full { self.beyond(limit, of_sessions(aids)).await? } else { 0 };
        Ok(OfSession { locks: found.iter().flat_map(Fetched::leases).collect(), more, may_read })
    }

    /// How many records more than the limit the filter matches.
    pub(super) async fn beyond(&self, limit: usize, filter: Document) -> Result<usize> {
        let all = self.primary.count_documents(filter).max_time(self.until.read_limit()).await?;
        Ok(usize::try_from(all).unwrap_or(usize::MAX).saturating_sub(limit))
    }

    /// Removes several grants. If `shared` is false, there are no readers among them. May be called again
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
}

fn released(gone: bool) -> Released {
    if gone { Released::Released } else { Released::AlreadyGone }
}

fn release_limit(usual: Duration) -> Duration {
    (usual * LIMIT_TO_USUAL).clamp(SHORTEST_LIMIT, LIMIT)
}

/// Only shortens the lease. Sets `due`, because `ts` alone no longer tells the expiry.
fn expire_by(changed: Document) -> Vec<Document> {
    let left = doc! { "$subtract": ["$until", "$ts"] };
    vec![
        doc! { "$set": changed },
        doc! { "$set": { "ttl": { "$min": ["$ttl", left] } } },
        doc! { "$set": { "due": { "$add": ["$ts", "$ttl"] } } },
    ]
}

/// How a record states that `token` was taken from its holder: as one string of JSON. If it were a
/// document, a change stream would report only its changed fields.
pub(super) fn taken_text(token: LockToken, by: &TakenBy) -> String {
    json!({ "token": token, "by": by.by, "reason": by.reason }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stuck_record_holds_up_a_release_for_longer_only_where_commands_usually_take_long() {
        let limits = [5, 20, 500].map(|ms| release_limit(Duration::from_millis(ms)).as_millis());
        assert_eq!(limits, [100, 160, 500]);
    }
}
