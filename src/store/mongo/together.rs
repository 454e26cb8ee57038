//! The commands that travel in groups: taking a free document, releasing an exclusive lock, giving one back that
//! nobody wants, looking at a lock that is known to be held, and looking at the locks of a session.
//!
//! Each kind has commands of its own, so that claims never keep locks from being given back.

use std::{collections::HashMap, sync::Arc, time::Duration};

use mongodb::{
    bson::{Bson, Document, doc},
    error::{Error, Result},
};

use crate::{
    key::LockId,
    lock::{Aid, Lock},
    store::mongo::{
        Prepared, codec,
        error::{DUPLICATE_KEY, MAX_TIME_EXPIRED, Unacknowledged, code, not_sent, ran_out_of_time},
        group::{Failed, Group},
        lanes,
        pipeline::{self, Grantee},
        record::whole_record,
        write::{Write, acknowledged, indexes, refusals, run},
    },
};

/// How many commands of one kind are under way at once in a collection. With 64 tasks, two brought a
/// quarter more locks than one on one node, and half as many more on three: while one command waits for its
/// majority, the server works on the other.
const UNDER_WAY: usize = 2;
/// How long after a read of the locks of sessions the next one is sent, if fewer than a full command wait. So the
/// heartbeats of thousands of people share their reads: 400 a second, ten at a time. A lone one does not wait.
const SESSIONS_PACE: Duration = Duration::from_millis(25);
/// The shortest time limit of a command that releases several locks, and the limit as a multiple of the usual time: a
/// record that is stuck holds up the others for so long, once.
const SHORTEST_LIMIT: Duration = Duration::from_millis(100);
const LIMIT_TO_USUAL: u32 = 8;

/// The groups of a collection.
#[derive(Debug)]
pub(super) struct Groups {
    takes: Arc<Group<Take, Result<Took>>>,
    releases: Arc<Group<Release, Result<bool>>>,
    retractions: Arc<Group<Release, Result<bool>>>,
    looks: Arc<Group<LockId, Result<Option<Document>>>>,
    pub(super) sessions: Arc<Group<Aid, Result<Both>>>,
}

impl Default for Groups {
    fn default() -> Self {
        Self {
            takes: Group::new(UNDER_WAY),
            releases: Group::new(UNDER_WAY),
            retractions: Group::new(UNDER_WAY),
            looks: Group::new(UNDER_WAY),
            sessions: Group::paced(UNDER_WAY, SESSIONS_PACE),
        }
    }
}

/// The locks of sessions.
#[derive(Debug)]
pub(super) struct Both {
    /// Majority-committed.
    pub(super) locks: Vec<Lock>,
    /// Those that only the primary has.
    pub(super) uncommitted: Vec<Lock>,
}

/// The claim of a document that is expected to be free.
#[derive(Debug)]
struct Take {
    id: LockId,
    update: Vec<Document>,
}

/// What became of it.
#[derive(Debug)]
pub(super) enum Took {
    /// The new record, as the claim made it.
    New(Document),
    /// There was a record. If it is known, as it is now.
    Existed(Option<Document>),
    /// The claim was granted, and its record is gone again.
    Gone,
}

/// The removal of an exclusive lock that is alone in its record.
#[derive(Debug)]
struct Release {
    id: LockId,
    filter: Document,
    of: Grantee,
}

impl Prepared {
    /// Runs this update of the record `id`, an upsert that does nothing to a live lock.
    pub(super) async fn take(&self, id: &LockId, update: Vec<Document>) -> Result<Took> {
        let job = Take { id: id.clone(), update };
        if self.lanes.is_used(id) {
            return self.take_alone(job).await;
        }
        let send_by = lanes::claim_by(self.groups.releases.wait())?;
        let took = self.groups.takes.submit(job, send_by, |jobs| self.take_all(jobs));
        took.await.unwrap_or_else(failed)
    }

    /// Deletes the record `id` if `filter` matches it. `of` says the same in Rust. Of several locks that are
    /// retracted together, either all are reported as deleted, or none.
    pub(super) async fn delete(&self, id: &LockId, filter: Document, of: Grantee) -> Result<bool> {
        let job = Release { id: id.clone(), filter, of };
        if self.lanes.is_used(id) {
            return self.release_alone(job).await;
        }
        let gone = if job.of.is_retracted() {
            let retractions = &self.groups.retractions;
            retractions.submit(job, lanes::send_by(), |jobs| self.retract_all(jobs)).await
        } else {
            let releases = &self.groups.releases;
            releases.submit(job, lanes::send_by(), |jobs| self.release_all(jobs)).await
        };
        gone.unwrap_or_else(failed)
    }

    async fn take_alone(&self, Take { id, update }: Take) -> Result<Took> {
        let turn = self.lanes.claim(&id).await?;
        let it = self.modify(turn, pipeline::by_id(&id), update, true, None).await?;
        Ok(match it.record {
            Some(record) if it.is_new => Took::New(record),
            record => Took::Existed(record),
        })
    }

    async fn release_alone(&self, Release { id, filter, .. }: Release) -> Result<bool> {
        Ok(self.write_one(&id, filter, &Write::Delete).await? > 0)
    }

    async fn take_all(&self, jobs: Vec<Take>) -> Vec<Result<Took>> {
        match <[Take; 1]>::try_from(jobs) {
            Ok([job]) => vec![self.take_alone(job).await],
            Err(jobs) => {
                let took = self.take_together(&jobs).await;
                self.settle(jobs.iter().map(|job| &job.id), took)
            }
        }
    }

    /// The outcomes of the jobs. If the command for all of them ran out of time, perhaps a stuck record is to blame:
    /// the repetitions are sent alone, so that the [lanes](lanes) find the record.
    fn settle<'a, T>(
        &self,
        ids: impl Iterator<Item = &'a LockId> + Clone,
        outcomes: Result<Vec<Result<T>>>,
    ) -> Vec<Result<T>> {
        outcomes.unwrap_or_else(|e| {
            if ran_out_of_time(&e) {
                self.lanes.suspect(ids.clone());
            }
            ids.map(|_| Err(e.clone())).collect()
        })
    }

    // update returns: the number of a statement among the upserted → granted; the record tells the
    // server's time. Error 11000 of a statement → another claim has just made the record. Not among them →
    // there was a record, and the claim looks closer. The record of a grant is gone already → so is the
    // grant; the repetition has another token, so that nobody revives the one that was broken. Any other
    // error, or no reply → each claim is repeated, and recognises its grant.
    async fn take_together(&self, jobs: &[Take]) -> Result<Vec<Result<Took>>> {
        let statement = |Take { id, update }: &Take| {
            doc! { "q": pipeline::by_id(id), "u": update.clone(), "upsert": true }
        };
        let updates: Vec<_> = jobs.iter().map(statement).collect();
        let command = doc! { "update": self.locks.name(), "updates": updates, "ordered": false };
        let reply = run(&self.locks, command, lanes::group_limit()).await?;
        acknowledged(&reply, true)?;
        let mut refused = refusals(&reply);
        let new = indexes(&reply, "upserted");
        let ids: Vec<_> = new.iter().filter_map(|n| Some(&jobs.get(*n)?.id)).collect();
        let mut records = self.records(&ids).await?;
        Ok((jobs.iter().enumerate())
            .map(|(n, job)| match refused.remove(&n) {
                Some(e) if code(&e) == Some(DUPLICATE_KEY) => Ok(Took::Existed(None)),
                Some(e) => Err(e),
                None if !new.contains(&n) => Ok(Took::Existed(None)),
                None => Ok(records.remove(&job.id).map_or(Took::Gone, Took::New)),
            })
            .collect())
    }

    async fn release_all(&self, jobs: Vec<Release>) -> Vec<Result<bool>> {
        match <[Release; 1]>::try_from(jobs) {
            Ok([job]) => vec![self.release_alone(job).await],
            Err(jobs) => {
                let gone = self.release_together(&jobs).await;
                self.settle(jobs.iter().map(|job| &job.id), gone)
            }
        }
    }

    // find returns the records that are there. A lock that was there and that the delete did not refuse is gone
    // then, whoever removed it: released. No reply → each release is repeated, and finds nothing to delete.
    async fn release_together(&self, jobs: &[Release]) -> Result<Vec<Result<bool>>> {
        let ids: Vec<_> = jobs.iter().map(|job| &job.id).collect();
        let records = self.records(&ids).await?;
        let is_there = |job: &Release| records.get(&job.id).is_some_and(|it| job.of.has(it));
        let there: Vec<_> = jobs.iter().map(is_there).collect();
        let limit = release_limit(self.groups.releases.usual());
        let reply = match self.delete_all(jobs, limit).await {
            // Some may be deleted already: all are repeated, each alone, and find nothing then.
            Err(e) if ran_out_of_time(&e) => {
                self.lanes.suspect(ids.into_iter());
                let repeat = |&has_written: &bool| {
                    let error = doc! { "code": MAX_TIME_EXPIRED }.into();
                    Err(Error::custom(Unacknowledged { has_written, error }))
                };
                return Ok(there.iter().map(repeat).collect());
            }
            reply => reply?,
        };
        let refused = refusals(&reply);
        Ok((there.iter().enumerate())
            .map(|(n, &is_there)| match refused.get(&n) {
                Some(e) => Err(e.clone()),
                None => acknowledged(&reply, is_there).map(|()| is_there),
            })
            .collect())
    }

    async fn retract_all(&self, jobs: Vec<Release>) -> Vec<Result<bool>> {
        match <[Release; 1]>::try_from(jobs) {
            Ok([job]) => vec![self.release_alone(job).await],
            Err(jobs) => {
                let gone = self.retract_together(&jobs).await;
                self.settle(jobs.iter().map(|job| &job.id), gone)
            }
        }
    }

    // delete returns how many records it has deleted: all → retracted. Fewer → one of the locks was never
    // granted, or another request was told of it, and it stays. Nobody knows which, so none is reported as
    // deleted. No reply → each is repeated, and finds nothing to delete.
    async fn retract_together(&self, jobs: &[Release]) -> Result<Vec<Result<bool>>> {
        let reply = self.delete_all(jobs, lanes::group_limit()).await?;
        let refused = refusals(&reply);
        let deleted = reply.get("n").and_then(codec::number).unwrap_or_default() as usize;
        let all = deleted == jobs.len();
        acknowledged(&reply, all)?;
        let of = |n| refused.get(&n).map_or(Ok(all), |e| Err(e.clone()));
        Ok((0..jobs.len()).map(of).collect())
    }

    async fn delete_all(&self, jobs: &[Release], limit: Duration) -> Result<Document> {
        let statement = |job: &Release| doc! { "q": job.filter.clone(), "limit": 0 };
        let deletes: Vec<_> = jobs.iter().map(statement).collect();
        let command = doc! { "delete": self.locks.name(), "deletes": deletes, "ordered": false };
        run(&self.locks, command, limit).await
    }

    /// The record, as the primary has it, with the server's time. Callers that ask for one record share it, so
    /// that a crowd that asks again and again leaves the connections to the holder.
    pub(super) async fn look(&self, id: &LockId) -> Result<Option<Document>> {
        let (looks, job) = (&self.groups.looks, id.clone());
        let found = looks.submit(job, lanes::send_by(), |ids| self.look_at_all(ids));
        found.await.unwrap_or_else(failed)
    }

    async fn look_at_all(&self, ids: Vec<LockId>) -> Vec<Result<Option<Document>>> {
        let mut distinct: Vec<_> = ids.iter().collect();
        distinct.sort();
        distinct.dedup();
        let records = self.records(&distinct).await;
        let of =
            |id| records.as_ref().map(|records| records.get(id).cloned()).map_err(Clone::clone);
        ids.iter().map(of).collect()
    }

    async fn records(&self, ids: &[&LockId]) -> Result<HashMap<LockId, Document>> {
        let mut records = HashMap::new();
        let filter = match ids {
            [] => return Ok(records),
            [id] => pipeline::by_id(id),
            ids => {
                doc! { "_id": { "$in": ids.iter().map(|id| Bson::from(*id)).collect::<Vec<_>>() } }
            }
        };
        let found = self.locks.find(filter).projection(pipeline::whole()).limit(ids.len() as i64);
        let mut cursor = found.max_time(lanes::group_limit()).await?;
        while cursor.advance().await? {
            if let Some(record) = whole_record(cursor.deserialize_current()?)
                && let Some(id) = record.get("_id").and_then(codec::lock_id)
            {
                records.insert(id, record);
            }
        }
        Ok(records)
    }
}

fn release_limit(usual: Duration) -> Duration {
    (usual * LIMIT_TO_USUAL).clamp(SHORTEST_LIMIT, lanes::group_limit())
}

pub(super) fn failed<T>(why: Failed) -> Result<T> {
    Err(match why {
        Failed::NotSent => not_sent(),
        Failed::Unknown => {
            Error::custom("the outcome of a command for several callers is not known")
        }
    })
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
