//! Finds idle sessions, and ends many at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mongodb::bson::{Bson, Document as Record, doc};
use uuid::Uuid;

use crate::{
    error::StoreError,
    key::LockKey,
    lock::{Aid, Holder, LockToken},
    store::{
        Swept,
        mongo::{
            ENDED, MongoStore, codec,
            ends::{NAMES_AT_ONCE, aid_of, former, overdue, pipeline},
            error::store_error,
            lanes,
            record::holder_of,
            removal::Grants,
            write::{Write, write},
        },
    },
};

/// The result of a sweep's query.
#[derive(Default)]
struct Overdue {
    run_out: BTreeMap<Aid, Vec<RunOut>>,
    records: usize,
    /// Collections with records that are no longer needed.
    left_over: BTreeSet<String>,
    /// Ends that another worker began but did not finish.
    unfinished: Vec<Aid>,
    announcements: bool,
    next: Option<Duration>,
}

/// An expired grant.
struct RunOut {
    collection: String,
    id: Bson,
    token: String,
    shared: bool,
    /// The grant did not expire because of its `max_hold`.
    by_silence: bool,
    /// Another session has taken the lock over, and left this trace of the grant.
    trace: Option<Bson>,
}

impl RunOut {
    fn key(&self) -> Option<LockKey> {
        LockKey::new(self.collection.as_str(), codec::lock_id(&self.id)?).ok()
    }

    fn lock(&self) -> Option<(LockKey, LockToken)> {
        Some((self.key()?, self.token.parse().ok()?))
    }
}

impl Overdue {
    fn overdue(&mut self, collection: &str, row: &Record) {
        self.records += 1;
        let Ok(gone) = row.get_document("gone") else {
            self.left_over.insert(collection.to_owned());
            return;
        };
        self.run_out.entry(aid_of(gone, "aid")).or_default().push(RunOut {
            collection: collection.to_owned(),
            id: row.get("_id").cloned().unwrap_or(Bson::Null),
            token: gone.get_str("token").unwrap_or_default().to_owned(),
            shared: gone.get_bool("shared").unwrap_or(false),
            by_silence: gone.get_bool("by_silence").unwrap_or(true),
            trace: row.get("trace").cloned(),
        });
    }
}

/// The expired locks of one session.
#[derive(Default)]
struct Names {
    keys: Vec<LockKey>,
    leases: Vec<String>,
    locks: Vec<(LockKey, LockToken)>,
    holder: Option<Holder>,
}

/// An end that this worker has claimed.
struct Claimed {
    aid: Aid,
    for_good: bool,
    /// It already has the names of locks: from an earlier attempt, or from an idle end not yet
    /// announced.
    has_names: bool,
}

impl MongoStore {
    /// One query; and if there is work, about as many commands as [`end_for_good`](Self::end_for_good)
    /// has steps, whatever the number of sessions.
    pub(in crate::store::mongo) async fn sweep_overdue(
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
            expired: Vec::new(),
        };
        for collection in &found.left_over {
            let tidied = self.prepared(collection)?.tidy_up().await;
            tidied.map_err(|e| store_error(format!("tidying up in {collection}"), e))?;
        }
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
        swept.expired.extend(quiet.iter().flat_map(|(_, of)| of).filter_map(RunOut::lock));
        let aids = silent.iter().map(|(aid, _)| aid.clone());
        let claimed =
            self.claim(found.unfinished.into_iter().chain(aids).collect(), worker).await?;
        // A worker that gets less than half of the sessions leaves the rest to the worker that has
        // them.
        let is_ahead = 2 * (claimed.len() + quiet.len()) > run_out.len();
        swept.more = found.records >= limit && is_ahead;
        self.release_claimed(collections, &claimed, &silent, worker, &mut swept).await?;
        Ok(swept)
    }

    // aggregate in each collection returns: the sessions whose expired locks are still on record.
    pub(in crate::store::mongo) async fn sessions_overdue(
        &self,
        collections: &[&str],
        limit: usize,
    ) -> Result<Vec<Aid>, StoreError> {
        let failed = |e| store_error("looking for sessions that are overdue", e);
        let most = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut aids = BTreeSet::new();
        for collection in collections {
            let at = self.prepared(collection)?;
            for part in overdue::sessions(collection, at.rules.ttl, most) {
                let rows = at.locks.aggregate(part).max_time(lanes::read_limit());
                let mut cursor = rows.await.map_err(failed)?;
                while cursor.advance().await.map_err(failed)? {
                    let row: Record = cursor.deserialize_current().map_err(failed)?;
                    aids.insert(aid_of(&row, "_id"));
                }
            }
        }
        Ok(aids.into_iter().take(limit).collect())
    }

    /// Removes expired locks of sessions that are not idle. Only these locks: others may expire
    /// meanwhile.
    async fn remove_quietly(&self, quiet: &[(Aid, Vec<RunOut>)]) -> Result<(), StoreError> {
        let mut notes = Vec::new();
        for (aid, of) in quiet {
            let by_silence = of.iter().filter(|record| record.by_silence);
            let keys: Vec<_> = by_silence.filter_map(RunOut::key).collect();
            if let Some(first) = keys.first() {
                let note = pipeline::note(&keys, self.prepared(first.collection())?.rules.ttl);
                notes.push(
                    doc! { "q": { "_id": { "$eq": aid.as_str() } }, "u": note, "upsert": true },
                );
            }
        }
        self.update_ended(notes).await?;
        self.looked_at(quiet.iter().flat_map(|(_, of)| of)).await?;
        let mut records: BTreeMap<&str, (Vec<Bson>, Vec<&str>, bool)> = BTreeMap::new();
        let stored = quiet.iter().flat_map(|(_, of)| of).filter(|it| it.trace.is_none());
        for record in stored {
            let (ids, tokens, shared) = records.entry(&record.collection).or_default();
            ids.push(record.id.clone());
            tokens.push(&record.token);
            *shared |= record.shared;
        }
        for (collection, (ids, tokens, shared)) in records {
            self.remove_in(&[collection], &Grants::RunOut { ids, tokens }, shared).await?;
        }
        Ok(())
    }

    /// Marks the traces of these locks as seen: everything that the traces are kept for is now
    /// recorded.
    async fn looked_at(&self, of: impl Iterator<Item = &RunOut>) -> Result<(), StoreError> {
        let traces: Vec<_> = of.filter_map(|record| record.trace.clone()).collect();
        if !traces.is_empty() {
            let these = doc! { "_id": { "$in": traces } };
            let seen = self.write_ended(these, former::seen(), false).await;
            seen.map_err(|e| store_error("recording former holders of locks", e))?;
        }
        Ok(())
    }

    async fn overdue(
        &self,
        collections: &[&str],
        worker: Uuid,
        limit: usize,
    ) -> Result<Overdue, StoreError> {
        let failed = |e| store_error("looking for idle sessions", e);
        let mut locks = Vec::new();
        for collection in collections {
            let at = self.prepared(collection)?;
            locks.push(((*collection).to_owned(), at.locks.name().to_owned(), at.rules.ttl));
        }
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let query = overdue::overdue(ENDED, &locks, worker, limit);
        let rows = self.inner.ended.aggregate(query).max_time(lanes::read_limit());
        let mut cursor = rows.await.map_err(failed)?;
        let mut found = Overdue::default();
        while cursor.advance().await.map_err(failed)? {
            let row: Record = cursor.deserialize_current().map_err(failed)?;
            if let Ok(next) = row.get_i64("next") {
                let next = Duration::from_millis(next.try_into().unwrap_or(0));
                found.next = Some(found.next.map_or(next, |other| other.min(next)));
            }
            if let Ok(collection) = row.get_str("collection") {
                found.overdue(collection, &row);
            } else if let Ok(aid) = row.get_str("unfinished") {
                found.unfinished.push(Aid::from(aid.to_owned()));
            } else if row.contains_key("announcement") {
                found.announcements = true;
            }
        }
        Ok(found)
    }

    /// The sessions among these that hold a live lock in any collection.
    async fn awake(&self, collections: &[&str], aids: &[Aid]) -> Result<BTreeSet<Aid>, StoreError> {
        let mut awake = BTreeSet::new();
        for collection in collections {
            let at = self.prepared(collection)?;
            let failed = |e| store_error(format!("looking for live locks in {collection}"), e);
            // The command `distinct` would not do: up to MongoDB 6 it does not know `$$NOW`.
            let live = overdue::awake(aids, at.rules.ttl);
            let mut cursor =
                at.locks.aggregate(live).max_time(lanes::read_limit()).await.map_err(failed)?;
            while cursor.advance().await.map_err(failed)? {
                let row: Record = cursor.deserialize_current().map_err(failed)?;
                awake.insert(aid_of(&row, "_id"));
            }
        }
        Ok(awake)
    }

    /// The names of the expired locks of these sessions; and whether there may be readers among them.
    async fn run_out(
        &self,
        collections: &[&str],
        aids: &[Aid],
    ) -> Result<(BTreeMap<Aid, Names>, bool), StoreError> {
        let (mut found, mut shared) = (BTreeMap::<_, Names>::new(), false);
        for collection in collections {
            let at = self.prepared(collection)?;
            let failed = |e| store_error(format!("looking for locks in {collection}"), e);
            let mut cursor = (at.locks)
                .find(overdue::run_out_of(aids, at.rules.ttl))
                .projection(overdue::run_out_fields(aids))
                .max_time(lanes::read_limit())
                .limit(i64::try_from(NAMES_AT_ONCE).unwrap_or(i64::MAX))
                .await
                .map_err(failed)?;
            let mut records = 0;
            while cursor.advance().await.map_err(failed)? {
                let record: Record = cursor.deserialize_current().map_err(failed)?;
                let id = record.get("_id").and_then(codec::lock_id);
                let key = id.and_then(|id| LockKey::new(*collection, id).ok());
                let leases = record.get_array("leases").map_or(&[][..], |leases| leases);
                for lease in leases.iter().filter_map(Bson::as_document) {
                    let names = found.entry(aid_of(lease, "aid")).or_default();
                    names.keys.extend(key.clone());
                    names.holder = names.holder.take().or_else(|| holder_of(lease));
                    let Ok(lease) = lease.get_str("lease") else { continue };
                    names.leases.push(lease.to_owned());
                    names.locks.extend(key.clone().zip(token_of(lease)));
                }
                shared |= record.get_bool("shared").unwrap_or(false);
                records += 1;
            }
            // Beyond the limit it is not known whether there are readers.
            shared |= records >= NAMES_AT_ONCE;
        }
        Ok((found, shared))
    }

    /// Assigns these ends to this worker, except those that another worker has.
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

    /// The ends among these that now belong to this worker.
    async fn claimed(&self, aids: &[Aid], worker: Uuid) -> Result<Vec<Claimed>, StoreError> {
        let failed = |e| store_error("claiming idle sessions", e);
        let ids: Vec<_> = aids.iter().map(Aid::as_str).collect();
        let mine = doc! { "_id": { "$in": ids }, "by": worker.to_string(), "step": "release" };
        let mut cursor =
            self.inner.ended.find(mine).max_time(lanes::read_limit()).await.map_err(failed)?;
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

    /// An idle end without locks is withdrawn: another worker was quicker, or the session has come
    /// back.
    async fn release_claimed(
        &self,
        collections: &[&str],
        claimed: &[Claimed],
        found: &[(Aid, Vec<RunOut>)],
        worker: Uuid,
        swept: &mut Swept,
    ) -> Result<(), StoreError> {
        if claimed.is_empty() {
            return Ok(());
        }
        let silent: Vec<_> =
            claimed.iter().filter(|end| !end.for_good).map(|end| end.aid.clone()).collect();
        let (mut names, shared) = self.run_out(collections, &silent).await?;
        let taken_over: Vec<_> = (found.iter())
            .flat_map(|(aid, of)| of.iter().map(move |record| (aid, record)))
            .filter(|(_, record)| record.trace.is_some())
            .collect();
        for (aid, record) in taken_over.iter().filter(|(aid, _)| silent.contains(aid)) {
            names.entry((*aid).clone()).or_default().keys.extend(record.key());
        }
        let named = names.iter().filter(|(_, names)| !names.keys.is_empty()).map(|(aid, names)| {
            doc! {
                "q": { "_id": { "$eq": aid.as_str() }, "by": worker.to_string() },
                "u": pipeline::name_expired(&names.keys, &names.leases, names.holder.as_ref()),
            }
        });
        self.update_ended(named.collect()).await?;
        // Only the sessions whose names were stored. After a long stall another worker may have the
        // others, or they may have ended permanently.
        let aids: Vec<_> = claimed.iter().map(|end| end.aid.clone()).collect();
        let (for_good, silent): (Vec<_>, Vec<_>) =
            self.claimed(&aids, worker).await?.into_iter().partition(|end| end.for_good);
        let aids: Vec<_> = silent.iter().map(|end| end.aid.clone()).collect();
        let is_mine = |aid: &Aid| aids.contains(aid) || for_good.iter().any(|end| end.aid == *aid);
        let mine = || taken_over.iter().filter(|(aid, _)| is_mine(aid)).map(|(_, record)| *record);
        self.looked_at(mine()).await?;
        swept.expired.extend(mine().filter_map(RunOut::lock));
        self.remove_in(collections, &Grants::RunOutOf(&aids), shared).await?;
        for end in &for_good {
            self.release_ended(&end.aid, collections).await?;
        }
        let (ended, withdrawn): (Vec<_>, Vec<_>) =
            (for_good.iter().chain(&silent)).partition(|end| end.for_good || end.has_names);
        self.finish(&ended, &withdrawn, worker).await?;
        // The others were found idle earlier, and only waited for their announcement.
        let anew = |end: &&&Claimed| end.for_good || names.contains_key(&end.aid);
        swept.sessions = ended.iter().filter(anew).count();
        let found = silent.iter().filter_map(|end| names.get(&end.aid));
        swept.expired.extend(found.flat_map(|names| names.locks.iter().cloned()));
        swept.announcements |= !ended.is_empty();
        Ok(())
    }

    /// Leaves these ends to the listener, and forgets the others.
    async fn finish(
        &self,
        ended: &[&Claimed],
        withdrawn: &[&Claimed],
        worker: Uuid,
    ) -> Result<(), StoreError> {
        let failed = |e| store_error("finishing the ends of sessions", e);
        let mine = |ends: &[&Claimed]| {
            let ids: Vec<_> = ends.iter().map(|end| end.aid.as_str()).collect();
            doc! { "_id": { "$in": ids }, "by": worker.to_string(), "step": "release" }
        };
        if !withdrawn.is_empty() {
            let gone = Write::Delete.command(&self.inner.ended, mine(withdrawn), false);
            let gone = write(&self.inner.ended, gone, lanes::write_limit()).await;
            gone.map_err(failed)?;
        }
        if !ended.is_empty() {
            self.write_ended(mine(ended), pipeline::released(), false).await.map_err(failed)?;
        }
        Ok(())
    }
}

/// The token in a [lease](crate::store::mongo::pipeline::Grant::lease).
fn token_of(lease: &str) -> Option<LockToken> {
    lease.split_once('/')?.0.parse().ok()
}
