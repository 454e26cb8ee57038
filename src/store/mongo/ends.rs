//! The ends of sessions: what is left to be done is kept in `doclock.ended`, so that any server can
//! go on where another one stopped.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures_util::future::try_join_all;
use mongodb::{
    bson::{Bson, Document as Record, doc},
    options::ReturnDocument,
};
use uuid::Uuid;

use super::{
    ENDED, MongoStore, WRITE_CONCERN_TIMEOUT, codec,
    error::{DUPLICATE_KEY, retry_duplicate_key, store_error},
    pipeline::{and_live, of_session, run_out},
    record::presentable,
};
use crate::{
    Aid, EndReason, LockKey, SessionEnded, StoreError, StoreErrorKind,
    store::{Store, Swept},
};

mod pipeline;

pub(super) use pipeline::ended_for_good;

/// How many locks are named in one command, which with the longest ids there are must stay below what
/// the server takes. What is beyond is released without being named.
const NAMES_AT_ONCE: usize = 8_000;

/// What the query of a sweep has found.
#[derive(Default)]
struct Overdue {
    run_out: BTreeMap<Aid, Vec<RunOut>>,
    records: usize,
    /// Ends that somebody else began, and did not come to the end of.
    unfinished: Vec<Aid>,
    announcements: bool,
    next: Option<Duration>,
}

/// A record of a lock that has run out.
struct RunOut {
    collection: String,
    id: Bson,
    token: String,
    /// And not because of `max_hold`.
    by_silence: bool,
}

impl RunOut {
    fn key(&self) -> Option<LockKey> {
        LockKey::new(self.collection.as_str(), codec::lock_id(&self.id)?).ok()
    }
}

/// An end that this worker has claimed.
struct Claimed {
    aid: Aid,
    for_good: bool,
    /// It has the names of locks already: of an earlier attempt, or of a silence not yet announced.
    has_names: bool,
}

impl MongoStore {
    /// Tombstone, names, removal, and then it may be announced. After each of these steps anybody
    /// can go on: with the tombstone there is no new lock, and with the names none is forgotten.
    pub(super) async fn end_for_good(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        worker: Uuid,
    ) -> Result<Vec<LockKey>, StoreError> {
        let failed = |e| store_error("ending a session", e);
        // updateOne, an upsert: inserted; or turned from a silence into an end for good; or found
        // ended for good, and left as it is.
        let end = pipeline::end_for_good(reason, Uuid::new_v4(), worker);
        let begun = self.inner.ended.update_one(doc! { "_id": { "$eq": aid.as_str() } }, end);
        begun.upsert(true).await.map_err(|e| retry_duplicate_key(failed(e)))?;
        let released = self.release_ended(aid, collections).await?;
        // findAndModify: the end with all names, also of an earlier attempt whose reply was lost; or
        // nothing, if another worker has finished it or is at it.
        let mut mine = pipeline::waits_for("release", worker);
        mine.insert("_id", doc! { "$eq": aid.as_str() });
        mine.insert("by", worker.to_string());
        let finished = (self.inner.ended)
            .find_one_and_update(mine, pipeline::released())
            .return_document(ReturnDocument::After)
            .await
            .map_err(failed)?;
        Ok(finished.map_or(released, |end| names_of(&end)))
    }

    /// All locks of a session that has ended.
    async fn release_ended(
        &self,
        aid: &Aid,
        collections: &[&str],
    ) -> Result<Vec<LockKey>, StoreError> {
        let held = try_join_all(collections.iter().map(|c| self.list(c, Some(aid), NAMES_AT_ONCE)));
        let keys: Vec<_> = held.await?.into_iter().flatten().map(|lock| lock.key).collect();
        if !keys.is_empty() {
            let named = (self.inner.ended)
                .update_one(doc! { "_id": { "$eq": aid.as_str() } }, pipeline::name(&keys));
            named.await.map_err(|e| store_error("ending a session", e))?;
        }
        self.delete_in(collections, |_| of_session(aid)).await?;
        Ok(keys)
    }

    async fn delete_in(
        &self,
        collections: &[&str],
        filter: impl Fn(Duration) -> Record,
    ) -> Result<(), StoreError> {
        let delete = |collection| {
            let at = self.prepared(collection);
            let filter = &filter;
            async move {
                let at = at?;
                let deleted = at.locks.delete_many(filter(at.ttl)).await;
                deleted.map_err(|e| store_error(format!("releasing locks in {collection}"), e))
            }
        };
        try_join_all(collections.iter().copied().map(delete)).await?;
        Ok(())
    }

    /// One query; and if there is something to do, about as many commands as there are steps in
    /// [`end_for_good`](Self::end_for_good), whatever the number of sessions.
    pub(super) async fn sweep_overdue(
        &self,
        collections: &[&str],
        worker: Uuid,
        limit: usize,
    ) -> Result<Swept, StoreError> {
        let found = self.overdue(collections, worker, limit).await?;
        let mut swept = Swept {
            sessions: 0,
            more: false,
            announcements: found.announcements,
            next: found.next,
        };
        if found.run_out.is_empty() && found.unfinished.is_empty() {
            return Ok(swept);
        }
        let run_out: Vec<_> = found.run_out.keys().cloned().collect();
        let awake = self.awake(collections, &run_out).await?;
        let (silent, quiet): (Vec<_>, Vec<_>) =
            (found.run_out.into_iter()).partition(|(aid, of)| {
                !awake.contains(aid) && of.iter().any(|record| record.by_silence)
            });
        self.remove_quietly(&quiet).await?;
        let silent = silent.into_iter().map(|(aid, _)| aid);
        let claimed =
            self.claim(found.unfinished.into_iter().chain(silent).collect(), worker).await?;
        // A worker that gets nothing leaves the field to the one that is at it.
        swept.more = found.records >= limit && !(claimed.is_empty() && quiet.is_empty());
        swept.sessions = self.release_claimed(collections, &claimed, worker).await?;
        swept.announcements |= swept.sessions > 0;
        Ok(swept)
    }

    /// Locks that have run out, of sessions that have not. Just these: others may follow meanwhile.
    async fn remove_quietly(&self, quiet: &[(Aid, Vec<RunOut>)]) -> Result<(), StoreError> {
        let mut notes = Vec::new();
        for (aid, of) in quiet {
            let by_silence = of.iter().filter(|record| record.by_silence);
            let keys: Vec<_> = by_silence.filter_map(RunOut::key).collect();
            if let Some(first) = keys.first() {
                let note = pipeline::note(&keys, self.prepared(first.collection())?.ttl);
                notes.push(
                    doc! { "q": { "_id": { "$eq": aid.as_str() } }, "u": note, "upsert": true },
                );
            }
        }
        self.update_ended(notes).await?;
        let mut records: BTreeMap<&str, (Vec<Bson>, Vec<&str>)> = BTreeMap::new();
        for record in quiet.iter().flat_map(|(_, of)| of) {
            let (ids, tokens) = records.entry(&record.collection).or_default();
            ids.push(record.id.clone());
            tokens.push(&record.token);
        }
        for (collection, (ids, tokens)) in records {
            let at = self.prepared(collection)?;
            let mut these = doc! { "_id": { "$in": ids }, "token": { "$in": tokens } };
            these.insert("$expr", run_out(at.ttl));
            let deleted = at.locks.delete_many(these).await;
            deleted.map_err(|e| store_error(format!("releasing locks in {collection}"), e))?;
        }
        Ok(())
    }

    async fn overdue(
        &self,
        collections: &[&str],
        worker: Uuid,
        limit: usize,
    ) -> Result<Overdue, StoreError> {
        let failed = |e| store_error("looking for sessions that have fallen silent", e);
        let mut locks = Vec::new();
        for collection in collections {
            let at = self.prepared(collection)?;
            locks.push(((*collection).to_owned(), at.locks.name().to_owned(), at.ttl));
        }
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let query = pipeline::overdue(ENDED, &locks, worker, limit);
        let mut cursor = self.inner.ended.aggregate(query).await.map_err(failed)?;
        let mut found = Overdue::default();
        while cursor.advance().await.map_err(failed)? {
            let row: Record = cursor.deserialize_current().map_err(failed)?;
            if let Ok(aid) = row.get_str("run_out") {
                let of_aid = found.run_out.entry(Aid::from(aid.to_owned())).or_default();
                of_aid.push(RunOut {
                    collection: row.get_str("collection").unwrap_or_default().to_owned(),
                    id: row.get("_id").cloned().unwrap_or(Bson::Null),
                    token: row.get_str("token").unwrap_or_default().to_owned(),
                    by_silence: row.get_bool("by_silence").unwrap_or(true),
                });
                found.records += 1;
            } else if let Ok(aid) = row.get_str("unfinished") {
                found.unfinished.push(Aid::from(aid.to_owned()));
            } else if row.contains_key("announcement") {
                found.announcements = true;
            } else if let Ok(next) = row.get_i64("next") {
                let next = Duration::from_millis(next.try_into().unwrap_or(0));
                found.next = Some(found.next.map_or(next, |other| other.min(next)));
            }
        }
        Ok(found)
    }

    /// Those of the sessions that hold a live lock anywhere.
    async fn awake(&self, collections: &[&str], aids: &[Aid]) -> Result<BTreeSet<Aid>, StoreError> {
        let live = self.find_in(collections, usize::MAX, |ttl| and_live(of_sessions(aids), ttl));
        Ok(live.await?.into_iter().map(|(aid, _)| aid).collect())
    }

    /// Whose records these are, and what they lock if it can be named.
    async fn find_in(
        &self,
        collections: &[&str],
        at_most: usize,
        filter: impl Fn(Duration) -> Record,
    ) -> Result<Vec<(Aid, Option<LockKey>)>, StoreError> {
        let mut found = Vec::new();
        for collection in collections {
            let at = self.prepared(collection)?;
            let failed = |e| store_error(format!("looking for locks in {collection}"), e);
            let mut cursor = (at.locks)
                .find(filter(at.ttl))
                .projection(doc! { "aid": 1 })
                .limit(i64::try_from(at_most).unwrap_or(0))
                .await
                .map_err(failed)?;
            while cursor.advance().await.map_err(failed)? {
                let record: Record = cursor.deserialize_current().map_err(failed)?;
                let id = record.get("_id").and_then(codec::lock_id);
                let key = id.and_then(|id| LockKey::new(*collection, id).ok());
                found.push((aid_of(&record, "aid"), key));
            }
        }
        Ok(found)
    }

    /// Makes these ends this worker's, unless another one is at them.
    async fn claim(&self, aids: Vec<Aid>, worker: Uuid) -> Result<Vec<Claimed>, StoreError> {
        if aids.is_empty() {
            return Ok(Vec::new());
        }
        let updates = aids.iter().map(|aid| {
            doc! {
                "q": { "_id": { "$eq": aid.as_str() } },
                "u": pipeline::claim(Uuid::new_v4(), worker),
                "upsert": true,
            }
        });
        self.update_ended(updates.collect()).await?;
        self.claimed(&aids, worker).await
    }

    /// Those of the ends that are this worker's now.
    async fn claimed(&self, aids: &[Aid], worker: Uuid) -> Result<Vec<Claimed>, StoreError> {
        let failed = |e| store_error("claiming sessions that have fallen silent", e);
        let ids: Vec<_> = aids.iter().map(Aid::as_str).collect();
        let mine = doc! { "_id": { "$in": ids }, "by": worker.to_string(), "step": "release" };
        let mut cursor = self.inner.ended.find(mine).await.map_err(failed)?;
        let mut claimed = Vec::new();
        while cursor.advance().await.map_err(failed)? {
            let end: Record = cursor.deserialize_current().map_err(failed)?;
            claimed.push(Claimed {
                aid: aid_of(&end, "_id"),
                for_good: !end.get_bool("silent").unwrap_or(false),
                has_names: end.get_array("locks").is_ok_and(|names| !names.is_empty()),
            });
        }
        Ok(claimed)
    }

    /// Returns how many sessions have ended by that. A silence without a lock is none: another worker
    /// was quicker, or the session has come back.
    async fn release_claimed(
        &self,
        collections: &[&str],
        claimed: &[Claimed],
        worker: Uuid,
    ) -> Result<usize, StoreError> {
        if claimed.is_empty() {
            return Ok(0);
        }
        let silent: Vec<_> =
            claimed.iter().filter(|end| !end.for_good).map(|end| end.aid.clone()).collect();
        let run_out = self.find_in(collections, NAMES_AT_ONCE, |ttl| run_out_of(&silent, ttl));
        let mut names: BTreeMap<Aid, Vec<LockKey>> = BTreeMap::new();
        for (aid, key) in run_out.await? {
            names.entry(aid).or_default().extend(key);
        }
        let named = names.iter().filter(|(_, keys)| !keys.is_empty()).map(|(aid, keys)| {
            doc! {
                "q": { "_id": { "$eq": aid.as_str() }, "by": worker.to_string() },
                "u": pipeline::name(keys),
            }
        });
        self.update_ended(named.collect()).await?;
        // Only of those whose names are kept: after a long stall somebody else may be at them, or they
        // have been ended for good.
        let mine = self.claimed(&silent, worker).await?.into_iter().map(|end| end.aid);
        let mine: Vec<_> = mine.collect();
        self.delete_in(collections, |ttl| run_out_of(&mine, ttl)).await?;
        for end in claimed.iter().filter(|end| end.for_good) {
            self.release_ended(&end.aid, collections).await?;
        }

        let failed = |e| store_error("finishing the ends of sessions", e);
        let (ended, not): (Vec<_>, Vec<_>) = (claimed.iter())
            .partition(|end| end.for_good || end.has_names || names.contains_key(&end.aid));
        let mine = |ends: &[&Claimed]| {
            let ids: Vec<_> = ends.iter().map(|end| end.aid.as_str()).collect();
            doc! { "_id": { "$in": ids }, "by": worker.to_string(), "step": "release" }
        };
        if !not.is_empty() {
            self.inner.ended.delete_many(mine(&not)).await.map_err(failed)?;
        }
        if !ended.is_empty() {
            let released = pipeline::released();
            self.inner.ended.update_many(mine(&ended), released).await.map_err(failed)?;
        }
        Ok(ended.len())
    }

    /// Many updates of `doclock.ended` in one command. The driver has no call for that before
    /// MongoDB 8.
    async fn update_ended(&self, updates: Vec<Record>) -> Result<(), StoreError> {
        if updates.is_empty() {
            return Ok(());
        }
        let timeout = i64::try_from(WRITE_CONCERN_TIMEOUT.as_millis()).unwrap_or(i64::MAX);
        let command = doc! {
            "update": ENDED,
            "updates": updates,
            "ordered": false,
            "writeConcern": { "w": "majority", "wtimeout": timeout },
        };
        let doing = "noting the ends of sessions";
        let reply = self.inner.database.run_command(command).await;
        let reply = reply.map_err(|e| store_error(doing, e))?;
        if reply.contains_key("writeConcernError") {
            let message = format!("{doing}: not acknowledged by a majority in time");
            return Err(StoreError::new(StoreErrorKind::Unavailable, message));
        }
        let errors = reply.get_array("writeErrors").map_or(&[][..], |errors| errors);
        // Two servers that claim the same session at the same moment: it is the other one's.
        let refused = errors
            .iter()
            .filter_map(Bson::as_document)
            .find(|error| error.get("code").and_then(codec::number) != Some(DUPLICATE_KEY.into()));
        match refused {
            None => Ok(()),
            Some(error) => {
                let why = error.get_str("errmsg").unwrap_or_default().to_owned();
                let message = format!("{doing}: MongoDB refused");
                Err(StoreError::new(StoreErrorKind::Other, message).because(why))
            }
        }
    }

    pub(super) async fn take_ends(
        &self,
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<SessionEnded>, StoreError> {
        let failed = |e| store_error("taking ends of sessions to announce", e);
        let ended = &self.inner.ended;
        let waiting = pipeline::waits_for("announce", worker);
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut ids = Vec::new();
        let mut cursor = (ended.find(waiting.clone()).projection(doc! { "_id": 1 }).limit(limit))
            .await
            .map_err(failed)?;
        while cursor.advance().await.map_err(failed)? {
            let record: Record = cursor.deserialize_current().map_err(failed)?;
            ids.extend(record.get("_id").cloned());
        }
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut mine = waiting;
        mine.insert("_id", doc! { "$in": ids });
        let taken = ended.update_many(mine.clone(), pipeline::take(worker, lease)).await;
        taken.map_err(failed)?;
        mine.insert("by", worker.to_string());
        let mut taken = Vec::new();
        let mut cursor = ended.find(mine).await.map_err(failed)?;
        while cursor.advance().await.map_err(failed)? {
            let record: Record = cursor.deserialize_current().map_err(failed)?;
            match to_ended(&record) {
                Some(end) => taken.push(end),
                None => self.give_up(&record).await?,
            }
        }
        Ok(taken)
    }

    pub(super) async fn ends_announced(
        &self,
        worker: Uuid,
        ended: &[SessionEnded],
    ) -> Result<(), StoreError> {
        let ids: Vec<_> = ended.iter().map(|end| end.aid.as_str()).collect();
        // The same end: its session may have been ended for good while it was announced as silent.
        let events: Vec<_> = ended.iter().map(|end| end.event.to_string()).collect();
        let mine = doc! {
            "_id": { "$in": ids },
            "event": { "$in": events },
            "by": worker.to_string(),
            "step": "announce",
        };
        let done = self.inner.ended.update_many(mine, pipeline::announced()).await;
        done.map_err(|e| store_error("noting announced ends of sessions", e))?;
        Ok(())
    }

    /// A record that somebody has edited cannot be announced. Said once: then it is as good as done.
    async fn give_up(&self, record: &Record) -> Result<(), StoreError> {
        log::warn!(
            target: "actix_doclock::store",
            "{ENDED} holds a record that is not ours to understand, and is left out: {:?}",
            record.get("_id"),
        );
        let id = doc! { "_id": { "$eq": record.get("_id").cloned() } };
        let done = self.inner.ended.update_one(id, pipeline::announced()).await;
        done.map_err(|e| store_error("leaving out a broken record", e))?;
        Ok(())
    }
}

fn of_sessions(aids: &[Aid]) -> Record {
    let aids: Vec<_> = aids.iter().map(Aid::as_str).collect();
    doc! { "aid": { "$in": aids } }
}

fn run_out_of(aids: &[Aid], ttl: Duration) -> Record {
    let mut filter = of_sessions(aids);
    filter.insert("$expr", run_out(ttl));
    filter
}

fn aid_of(record: &Record, field: &str) -> Aid {
    Aid::from(record.get_str(field).unwrap_or_default().to_owned())
}

fn names_of(end: &Record) -> Vec<LockKey> {
    let names = end.get_array("locks").map_or(&[][..], |names| names);
    let key = |name: &Record| {
        let id = codec::lock_id(name.get("id")?)?;
        LockKey::new(name.get_str("c").ok()?, id).ok()
    };
    names.iter().filter_map(Bson::as_document).filter_map(key).collect()
}

fn to_ended(record: &Record) -> Option<SessionEnded> {
    Some(SessionEnded {
        event: record.get_str("event").ok()?.parse().ok()?,
        aid: Aid::from(record.get_str("_id").ok()?.to_owned()),
        reason: EndReason::from_stored(record.get_str("reason").unwrap_or_default()),
        for_good: !record.get_bool("silent").unwrap_or(false),
        locks: names_of(record),
        at: presentable(record.get_datetime("ts").ok().copied()),
        repeated: record.get("taken").and_then(codec::number).is_some_and(|taken| taken > 1.0),
    })
}
