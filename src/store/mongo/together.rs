//! The commands that travel in groups: taking a free document, releasing an exclusive lock, and looking at a
//! lock that is known to be held.

use std::{collections::HashMap, sync::Arc};

use mongodb::{
    bson::{Bson, Document, doc},
    error::{Error, Result},
};

use crate::{
    key::LockId,
    store::mongo::{
        Prepared, codec,
        error::{DUPLICATE_KEY, MAX_TIME_EXPIRED, Unacknowledged, code, ran_out_of_time},
        group::Group,
        lanes,
        pipeline::{self, Grantee},
        record::whole_record,
        write::{Write, acknowledged, indexes, refusals, run},
    },
};

/// The groups of a collection.
#[derive(Debug, Default)]
pub(super) struct Groups {
    takes: Arc<Group<Take, Result<Took>>>,
    releases: Arc<Group<Release, Result<bool>>>,
    looks: Arc<Group<LockId, Result<Option<Document>>>>,
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

/// The release of an exclusive lock that is alone in its record.
#[derive(Debug)]
struct Release {
    id: LockId,
    filter: Document,
    of: Grantee,
}

impl Prepared {
    /// Whether a write of this record may share a command with others. Not while other writes of the record
    /// are under way, or if it is stuck. If a command is late, perhaps a stuck record is to blame: its
    /// repetitions are sent alone, so that the [lanes](lanes) find the record.
    fn may_join(&self, id: &LockId) -> bool {
        !lanes::is_late() && !self.lanes.is_used(id)
    }

    /// Runs this update of the record `id`, an upsert that does nothing to a live lock.
    pub(super) async fn take(&self, id: &LockId, update: Vec<Document>) -> Result<Took> {
        let job = Take { id: id.clone(), update };
        if !self.may_join(id) {
            return self.take_alone(job).await;
        }
        let took = self.groups.takes.submit(job, lanes::alone_after(), |jobs| self.take_all(jobs));
        took.await.unwrap_or_else(|| Err(not_known()))
    }

    /// Deletes the record `id` if `filter` matches it. `of` says the same in Rust.
    pub(super) async fn delete(&self, id: &LockId, filter: Document, of: Grantee) -> Result<bool> {
        let job = Release { id: id.clone(), filter, of };
        if !self.may_join(id) {
            return self.release_alone(job).await;
        }
        let releases = &self.groups.releases;
        let gone = releases.submit(job, lanes::alone_after(), |jobs| self.release_all(jobs));
        gone.await.unwrap_or_else(|| Err(not_known()))
    }

    async fn take_alone(&self, Take { id, update }: Take) -> Result<Took> {
        let turn = self.lanes.turn(&id).await?;
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
                took.unwrap_or_else(|e| jobs.iter().map(|_| Err(e.clone())).collect())
            }
        }
    }

    // update returns: the number of a statement among the upserted → granted; the record tells the
    // server's time. Error 11000 of a statement → another claim has just made the record. Not among them →
    // there was a record, and the claim looks closer. The record of a grant is gone already → so is the
    // grant; the repetition has another token, so that nobody revives the one that was broken. Any other
    // error, or no reply → each claim is repeated alone, and recognises its grant.
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
                gone.unwrap_or_else(|e| jobs.iter().map(|_| Err(e.clone())).collect())
            }
        }
    }

    // find returns the records that are there, and delete only how many it has deleted. A lock that was
    // there is gone then, whoever removed it: released. A lock that is only retracted stays if another
    // request was told of it in between: it is gone for certain only if all that were there are deleted. No
    // reply → each release is repeated alone, and finds nothing to delete.
    async fn release_together(&self, jobs: &[Release]) -> Result<Vec<Result<bool>>> {
        let ids: Vec<_> = jobs.iter().map(|job| &job.id).collect();
        let records = self.records(&ids).await?;
        let is_there = |job: &Release| records.get(&job.id).is_some_and(|it| job.of.has(it));
        let there: Vec<_> = jobs.iter().map(is_there).collect();
        let statement = |job: &Release| doc! { "q": job.filter.clone(), "limit": 0 };
        let deletes: Vec<_> = jobs.iter().map(statement).collect();
        let command = doc! { "delete": self.locks.name(), "deletes": deletes, "ordered": false };
        let reply = match run(&self.locks, command, lanes::group_limit()).await {
            // Some may be deleted already: all are repeated, and find nothing then.
            Err(e) if ran_out_of_time(&e) => {
                let repeat = |&has_written: &bool| {
                    let error = doc! { "code": MAX_TIME_EXPIRED }.into();
                    Err(Error::custom(Unacknowledged { has_written, error }))
                };
                return Ok(there.iter().map(repeat).collect());
            }
            reply => reply?,
        };
        let refused = refusals(&reply);
        let deleted = reply.get("n").and_then(codec::number).unwrap_or_default() as usize;
        let is_done = |n: &usize| there[*n] && !refused.contains_key(n);
        let are_all_gone = deleted == (0..jobs.len()).filter(is_done).count();
        let late = reply.get("writeConcernError");
        Ok((0..jobs.len())
            .map(|n| {
                let is_gone = is_done(&n) && (are_all_gone || !jobs[n].of.is_retracted());
                match (refused.get(&n), late.cloned()) {
                    (Some(e), _) => Err(e.clone()),
                    (None, Some(error)) => {
                        Err(Error::custom(Unacknowledged { has_written: is_gone, error }))
                    }
                    (None, None) => Ok(is_gone),
                }
            })
            .collect())
    }

    /// The record, as the primary has it, with the server's time. Callers that ask for one record share it, so
    /// that a crowd that asks again and again leaves the connections to the holder.
    pub(super) async fn look(&self, id: &LockId) -> Result<Option<Document>> {
        let (looks, job) = (&self.groups.looks, id.clone());
        if lanes::is_late() {
            return self.look_at_all(vec![job]).await.pop().unwrap_or_else(|| Err(not_known()));
        }
        let found = looks.submit(job, lanes::alone_after(), |ids| self.look_at_all(ids));
        found.await.unwrap_or_else(|| Err(not_known()))
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

fn not_known() -> Error {
    Error::custom("the outcome of a command for several callers is not known")
}
