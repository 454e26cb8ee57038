//! Removes locks: by release, give-back and break, and all locks of a session at once. No other file deletes a
//! record, or keeps a record for its other content.

use std::{
    slice,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use mongodb::{
    bson::{Bson, Document, doc},
    error::Error,
};

use crate::{
    error::StoreErrorKind,
    key::{LockId, LockKey},
    lock::{Aid, Lock, Mode, PageId},
    store::{
        Acquisition, Deadline, Released, Removal, Rules, TakenBy,
        lock_rules::{Grant, Moment, Record},
        mongo::{
            LockCollection,
            admission::Purpose,
            error::{MAX_TIME_EXPIRED, Result, Unacknowledged, exceeded_time_limit, is_odd, kind},
            filters::{Target, exclusive_of, is_live, of_sessions},
            ids::exactly,
            lock_record::lease,
            read::Fetched,
            send::{Timing, Write, acknowledged, number_of, refusals, rows, run, until_majority},
            step::{Decided, Rule},
            time_limits::{LIMIT, answered},
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
#[derive(Clone)]
pub(super) enum Grants {
    Of(Vec<Aid>),
    ExpiredOf(Vec<Aid>),
    /// These grants, if they have expired.
    Expired {
        ids: Vec<Bson>,
        tokens: Vec<String>,
    },
}

impl Grants {
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
        filter.insert("$expr", doc! { "$not": [is_live(rules.ttl)] });
        filter
    }

    fn records(&self) -> Document {
        match self {
            Self::Of(aids) | Self::ExpiredOf(aids) => of_sessions(aids),
            Self::Expired { ids, .. } => doc! { "_id": { "$in": ids } },
        }
    }

    fn are(&self, grant: &Grant, now: Duration) -> bool {
        match self {
            Self::Of(aids) => aids.contains(&grant.aid),
            Self::ExpiredOf(aids) => aids.contains(&grant.aid) && !grant.is_live(now),
            Self::Expired { tokens, .. } => {
                let token = grant.token.map(|token| token.to_string());
                !grant.is_live(now) && token.is_some_and(|token| tokens.contains(&token))
            }
        }
    }
}

/// How many records are changed at the same time, if a verb is about many.
const AT_ONCE: usize = 16;

/// The fields of an exclusive lock in its record, without the fence.
const OF_GRANT: [&str; 15] = [
    "ts", "ttl", "aid", "token", "since", "holder", "tab", "page", "until", "leaving", "again",
    "taken", "due", "saved", "asks",
];

/// A lock of a session, with the name of its lease.
pub(super) struct Leased {
    pub(super) lock: Lock,
    /// `None` for the lock of a foreign program.
    pub(super) lease: Option<String>,
    pub(super) is_live: bool,
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

impl LockCollection<'_> {
    pub(super) async fn remove_lock(&self, removal: Removal<'_>) -> Result<Released> {
        if let Removal::Break { seen, taken } = removal {
            return self.break_lock(seen, taken).await;
        }
        let (gone, before) = until_majority(self.until, || self.remove(removal)).await?;
        Ok(released(gone || before))
    }

    async fn remove(&self, removal: Removal<'_>) -> Result<bool> {
        let rules = &self.rules;
        let target = match removal {
            Removal::Release(it) => Some(Target::of(it)),
            Removal::Retract(attempts) => Target::untold(attempts),
            Removal::Break { .. } => None,
        };
        // delete or update returns: 1 → released. 0 → the record has other content, too, or the lock is gone:
        // given back before, never granted, or this is the repetition of a command whose reply was
        // lost.
        if let Some(it) = target {
            let is_plain = it.mode == Mode::Exclusive && !rules.fair && !rules.fenced;
            let gone = match it.mode {
                Mode::Exclusive if rules.fenced => self.leave_fence(&it).await?,
                // An exclusive lock is alone in its record, unless the record has a queue.
                Mode::Exclusive if is_plain => self.delete(&it).await?,
                Mode::Exclusive => self.delete_alone(&it).await?,
                // Probably the only reader.
                Mode::Shared if !rules.fenced && self.hints.is_held_by(&it.id, it.aid()) => {
                    self.delete_alone(&it).await?
                }
                _ => false,
            };
            if gone || is_plain {
                if !rules.fenced {
                    self.hints.gone(&it.id);
                }
                return Ok(gone);
            }
        }
        let Some(id) = removal.key().map(LockKey::id) else { return Ok(false) };
        // The step outlives its caller.
        let remove: Box<Remove> = match removal {
            Removal::Release(it) => {
                let it = it.clone();
                Box::new(move |record, now| record.remove(Removal::Release(&it), now))
            }
            Removal::Retract(attempts) => {
                let attempts = attempts.to_vec();
                Box::new(move |record, now| record.remove(Removal::Retract(&attempts), now))
            }
            Removal::Break { seen, taken } => {
                let (seen, taken) = (seen.clone(), taken.clone());
                Box::new(move |record, now| {
                    record.remove(Removal::Break { seen: &seen, taken: &taken }, now)
                })
            }
        };
        let remove =
            move |record: &mut Record, moment: Moment| Decided::promise(remove(record, moment.now));
        self.step(id, Purpose::Other, remove).await
    }

    // First makes an exclusive lock expire, together with the name of who broke it. This is for
    // watchers, because a removal carries no information. The removal itself works as a release does, and finds nothing
    // if a waiter was quicker. If it fails, or the process dies before it, the sweep removes the lock.
    async fn break_lock(&self, seen: &Lock, by: &TakenBy) -> Result<Released> {
        let removal = Removal::Break { seen, taken: by };
        let Some(held) = Acquisition::of(seen).filter(|it| it.mode == Mode::Exclusive) else {
            let (gone, before) = until_majority(self.until, || self.remove(removal)).await?;
            return Ok(released(gone || before));
        };
        let mark = || {
            let (lock, by) = (seen.clone(), by.clone());
            let mark = move |record: &mut Record, moment: Moment| {
                Decided::promise(record.mark_broken(&lock, &by, moment.now))
            };
            self.step(seen.key.id(), Purpose::Other, mark)
        };
        // A sweep or a claim may have removed the broken lock before the repetition.
        let (is_broken, before) = match until_majority(self.until, mark).await {
            // A name stands twice in the record, or a text is not UTF-8: it cannot be changed, so it is deleted without the
            // mark.
            Err(e) if is_odd(&e) => return Ok(released(self.remove(removal).await?)),
            marked => marked?,
        };
        if !is_broken && !before {
            return Ok(Released::AlreadyGone);
        }
        // The lock is broken, whether or not its record is removed now, so the caller does not wait long.
        let soon = self.with(Deadline::at(Instant::now() + TO_TIDY_UP));
        let _ = soon.remove(Removal::Release(&held)).await;
        Ok(Released::Released)
    }

    /// The rule [`Record::expire_in`] as a step, whose answer is durable.
    pub(super) async fn expire_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
    ) -> Result<Released> {
        let it = held.clone();
        let expire = move |record: &mut Record, moment: Moment| {
            Decided::promise(record.expire_in(&it, page, grace, moment.now))
        };
        Ok(released(self.step(held.key.id(), Purpose::Other, expire).await?))
    }

    /// Deletes the record of an exclusive lock that is alone in it.
    ///
    /// Retractions share a command. Its reply counts the deleted records, but does not name them: if the count is smaller
    /// than the number of locks, each lock is reported as not deleted.
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

    /// Removes an exclusive lock that nobody waits for from a record that stays for its fence.
    async fn leave_fence(&self, it: &Target) -> Result<bool> {
        let mut filter = it.alone(&self.rules);
        filter.extend(doc! { "queue": { "$exists": false }, "fence": { "$exists": true } });
        let gone: Document = OF_GRANT.iter().map(|it| ((*it).to_owned(), "".into())).collect();
        let by = Write::One(doc! { "$unset": gone });
        Ok(self.write_one(&it.id, filter, &by).await? > 0)
    }

    async fn delete_alone(&self, it: &Target) -> Result<bool> {
        Ok(self.write_one(&it.id, it.alone(&self.rules), &Write::Delete).await? > 0)
    }

    // find returns the records that are there. A lock that was there and that the delete did not refuse is gone
    // then, whoever removed it: released. No reply → each release is repeated, and finds nothing to delete.
    async fn release_together(&self, jobs: &[Target]) -> Result<Vec<Result<bool>>> {
        let ids: Vec<_> = jobs.iter().map(|job| &job.id).collect();
        let records = self.records(&ids).await?;
        let is_there = |job: &Target| records.get(&job.id).is_some_and(|it| job.is_in(&it.fields));
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
            match self.remove_many(&Grants::Of(vec![aid.clone()]), may_read).await {
                Ok(()) => break,
                Err(e) if attempts == 0 || kind(&e) != StoreErrorKind::Unavailable => {
                    return Err(e);
                }
                Err(_) => {}
            }
        }
        let keys = locks.into_iter().filter(|it| it.is_live).map(|it| it.lock.key);
        Ok(keys.inspect(|key| self.hints.gone(key.id())).collect())
    }

    /// All locks of the session, so that they can be removed.
    pub(super) async fn of_session(&self, aid: &Aid, limit: usize) -> Result<OfSession> {
        let of = of_sessions(slice::from_ref(aid));
        let found = self.fetch(&self.primary, of.clone(), limit).await?;
        let own = |it: &Fetched| {
            let (key, moment) = (it.key.clone(), it.moment);
            let grants = it.record.grants.iter().filter(|grant| grant.aid == *aid);
            let counted = grants.filter(|it| {
                it.is_live(moment.now) || it.token.is_some() && !it.has_reached_max_hold()
            });
            let held = counted.map(|it| Leased {
                lock: it.to_lock(&key, moment),
                lease: lease(it),
                is_live: it.is_live(moment.now),
            });
            held.collect::<Vec<_>>()
        };
        let reads = |it: &Fetched| it.record.grants.iter().any(|it| it.mode == Mode::Shared);
        let is_full = found.len() >= limit;
        // Beyond the limit it is not known whether the session reads.
        let may_read = is_full || found.iter().any(reads);
        let more = if is_full { self.beyond(limit, of).await? } else { 0 };
        Ok(OfSession { locks: found.iter().flat_map(own).collect(), more, may_read })
    }

    /// How many records more than the limit the filter matches.
    pub(super) async fn beyond(&self, limit: usize, filter: Document) -> Result<usize> {
        let all = self.primary.count_documents(filter).max_time(self.until.read_limit());
        let all = answered(all).await?;
        Ok(usize::try_from(all).unwrap_or(usize::MAX).saturating_sub(limit))
    }

    /// Removes several grants. If `shared` is false, there are no readers among them. May be called again
    /// after an error.
    pub(super) async fn remove_many(&self, grants: &Grants, shared: bool) -> Result<()> {
        let rules = &self.rules;
        if !rules.fenced && !rules.fair {
            self.write_all(grants.exclusive(rules), &Write::Delete).await?;
            if !shared {
                return Ok(());
            }
        }
        let (records, grants) = (grants.records(), grants.clone());
        let remove = move |record: &mut Record, moment: Moment| {
            let gone = record.remove_if(moment.now, |grant| grants.are(grant, moment.now));
            Decided::promise(gone)
        };
        self.step_each(records, remove).await.map(drop)
    }

    /// One step on each of the records that the filter matches, and their answers. A record that cannot be changed
    /// does not keep the others from it, and the records that are known to be stuck come last.
    pub(super) async fn step_each<T: Send + 'static>(
        &self,
        filter: Document,
        rule: impl Rule<T> + Clone,
    ) -> Result<Vec<T>> {
        let found = self.primary.find(filter).projection(doc! { "_id": 1 });
        let found = rows(found.max_time(self.until.read_limit())).await?;
        let mut ids: Vec<_> =
            found.iter().filter_map(|it| LockId::from_bson(it.get("_id")?)).collect();
        let stuck = self.admission.stuck();
        ids.sort_by_key(|id| stuck.contains(&Bson::from(id)));
        let mut steps = Vec::new();
        for some in ids.chunks(AT_ONCE) {
            let some = some.iter().map(|id| self.step(id, Purpose::Other, rule.clone()));
            steps.extend(join_all(some).await);
        }
        steps.into_iter().filter(|done| !done.as_ref().is_err_and(is_odd)).collect()
    }
}

type Remove = dyn Fn(&mut Record, Duration) -> bool + Send + Sync;

fn released(gone: bool) -> Released {
    if gone { Released::Released } else { Released::AlreadyGone }
}

fn release_limit(usual: Duration) -> Duration {
    (usual * LIMIT_TO_USUAL).clamp(SHORTEST_LIMIT, LIMIT)
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
