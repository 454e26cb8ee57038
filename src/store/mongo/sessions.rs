//! Web sessions in MongoDB. This module knows nothing of actix: keys and states are strings.

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, SystemTime},
};

use mongodb::{
    Collection,
    bson::{Binary, Bson, Document as Record, doc, spec::BinarySubtype},
};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::{
    ended::EndReason,
    error::StoreError,
    lock::Aid,
    store::mongo::{MongoStore, error::store_error, majority, record::presentable},
};

mod change;
mod pipeline;

use change::Fact;
pub(crate) use change::{Change, text_of};

/// How long other sweeps leave a session alone that one sweep has taken.
const LEASE: Duration = Duration::from_secs(30);

/// Entries by name. Values are JSON, as in actix-session.
pub(crate) type State = HashMap<String, String>;

/// The result of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Updated {
    Written,
    /// The session has ended. Nothing was written.
    Ended,
    /// There is no such session, and no note of one.
    Unknown,
}

/// A session that has ended, or has been replaced by one with another key.
#[derive(Debug)]
pub(crate) struct Due {
    pub(crate) id: Bson,
    pub(crate) aid: Option<Aid>,
    pub(crate) reason: EndReason,
}

/// A session as its user may see it. Contains nothing that grants access.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredSession {
    /// The argument for `revoke`.
    pub aid: Aid,
    /// The user of the session.
    pub user: String,
    /// When it began, or got its current key.
    pub created: SystemTime,
    /// When its state was last written.
    pub seen: SystemTime,
    /// When it ends unless it is extended.
    pub expires: SystemTime,
}

/// The collection of web sessions. Clones share one collection.
#[derive(Debug, Clone)]
pub(crate) struct Sessions {
    records: Collection<Record>,
    absolute: Option<Duration>,
}

impl Sessions {
    pub(crate) async fn prepare(
        store: &MongoStore,
        collection: &str,
        absolute: Option<Duration>,
    ) -> Result<Self, StoreError> {
        let records = majority(store.database(), collection);
        store.prepare_sessions(collection).await?;
        Ok(Self { records, absolute })
    }

    pub(crate) async fn load(&self, key: &str) -> Result<Option<State>, StoreError> {
        let failed = |e| store_error("loading a web session", e);
        let found = self.records.find_one(pipeline::live(hashed(key))).await.map_err(failed)?;
        let Some(record) = found else { return Ok(None) };
        match state_of(&record) {
            Some(state) => Ok(Some(state)),
            None => {
                // Logged only once, because the record cannot be loaded from then on.
                log::warn!(
                    target: "actix_doclock::store",
                    "a record in {} is not a web session, and is left out; was it edited by hand?",
                    self.records.namespace(),
                );
                self.end(
                    doc! { "_id": { "$eq": hashed(key) } },
                    EndReason::Expired,
                    Duration::ZERO,
                )
                .await?;
                Ok(None)
            }
        }
    }

    /// updateOne, an upsert: inserted; or found and written again, if this repeats a save whose reply
    /// was lost.
    ///
    /// `absolute_left` belongs to the session whose key this one replaces.
    pub(crate) async fn save(
        &self,
        key: &str,
        change: &Change,
        ttl: Duration,
        absolute_left: Option<Duration>,
    ) -> Result<(), StoreError> {
        let record = doc! { "_id": { "$eq": hashed(key) } };
        let absolute = self.absolute.into_iter().chain(absolute_left).min();
        let create = pipeline::create(change, ttl, absolute);
        let saved = self.records.update_one(record.clone(), create).upsert(true).await;
        saved.map_err(|e| store_error("saving a web session", e))?;
        // As with locks: a revocation at this moment either finds the record, or has already left its
        // note.
        if let Fact::Is(aid) = &change.aid
            && self.is_revoked(aid).await?
        {
            self.end(record, EndReason::Revoked, Duration::ZERO).await?;
        }
        Ok(())
    }

    /// updateOne returns: 1 → updated; 0 → ended or never there, and a query tells which.
    pub(crate) async fn update(
        &self,
        key: &str,
        change: &Change,
        ttl: Duration,
    ) -> Result<Updated, StoreError> {
        let failed = |e| store_error("updating a web session", e);
        let update = pipeline::update(change, ttl);
        let updated = self.records.update_one(pipeline::live(hashed(key)), update).await;
        if updated.map_err(failed)?.matched_count > 0 {
            return Ok(Updated::Written);
        }
        let id = doc! { "_id": { "$eq": hashed(key) } };
        let found =
            self.records.find_one(id).projection(doc! { "_id": 1 }).await.map_err(failed)?;
        Ok(if found.is_some() { Updated::Ended } else { Updated::Unknown })
    }

    /// Not every request writes: only if a twentieth of the time has passed, or if more than `ttl` is
    /// left because the ttl is now shorter than before.
    pub(crate) async fn extend(&self, key: &str, ttl: Duration) -> Result<(), StoreError> {
        let other = pipeline::live_for_other_than(hashed(key), ttl - ttl / 20, ttl);
        let extended = self.records.update_one(other, pipeline::extend(ttl)).await;
        extended.map_err(|e| store_error("extending a web session", e))?;
        Ok(())
    }

    /// Releases the locks of the session after `grace`, unless a session with the same aid exists by
    /// then: a new key for an old session is also a deletion and a new session.
    ///
    /// Returns `Some` if the session was live, and had this aid if one is given, with the rest of its
    /// absolute time-out. `call` recognises an earlier attempt of the same deletion whose reply was
    /// lost.
    pub(crate) async fn delete(
        &self,
        key: &str,
        aid: Option<&str>,
        grace: Duration,
        call: Uuid,
    ) -> Result<Option<Option<Duration>>, StoreError> {
        let live = pipeline::live_or_ended_by(hashed(key), aid, call);
        let end = pipeline::end_by(EndReason::LoggedOut, grace, call);
        let deleted = self.records.find_one_and_update(live, end);
        let deleted = deleted.projection(pipeline::absolute_left()).await;
        let deleted = deleted.map_err(|e| store_error("deleting a web session", e))?;
        Ok(deleted.map(|record| {
            let left = record.get_i64("left").ok()?;
            Some(Duration::from_millis(left.try_into().unwrap_or(0)))
        }))
    }

    /// Ends the sessions of this aid, including those that are being given another key at the moment.
    pub(crate) async fn revoke(&self, aid: &Aid) -> Result<(), StoreError> {
        let failed = |e| store_error("revoking a web session", e);
        let note = doc! { "_id": { "$eq": aid.as_str() } };
        let noted = pipeline::note_of_revocation();
        self.records.update_one(note, noted).upsert(true).await.map_err(failed)?;
        let of_aid = doc! { "aid": { "$eq": aid.as_str() } };
        self.end(of_aid, EndReason::Revoked, Duration::ZERO).await
    }

    async fn is_revoked(&self, aid: &str) -> Result<bool, StoreError> {
        let note = self.records.find_one(doc! { "_id": { "$eq": aid } }).await;
        let note = note.map_err(|e| store_error("asking whether a session was revoked", e))?;
        Ok(note.is_some())
    }

    /// Ends the matching sessions that have not ended yet. The first reason stays.
    async fn end(
        &self,
        mut filter: Record,
        reason: EndReason,
        grace: Duration,
    ) -> Result<(), StoreError> {
        filter.insert("ended", doc! { "$exists": false });
        let ended = self.records.update_many(filter, pipeline::end(reason, grace)).await;
        ended.map_err(|e| store_error("ending a web session", e))?;
        Ok(())
    }

    /// The aids of this user's sessions, including those that are being given another key at the
    /// moment.
    pub(crate) async fn aids_of(&self, user: &str) -> Result<BTreeSet<Aid>, StoreError> {
        let not_over = doc! { "$or": [
            { "ended": { "$exists": false } },
            { "due": { "$exists": true } },
        ] };
        let of_user = doc! { "user": { "$eq": user }, "$and": [not_over] };
        Ok(self.find(of_user).await?.iter().filter_map(aid_of).collect())
    }

    /// Ends the sessions of this user, and returns how many of them were live.
    pub(crate) async fn revoke_user(&self, user: &str) -> Result<usize, StoreError> {
        let mut live = doc! { "user": { "$eq": user }, "ended": { "$exists": false } };
        live.insert("$expr", doc! { "$gt": ["$expires", "$$NOW"] });
        let ended = pipeline::end(EndReason::Revoked, Duration::ZERO);
        let ended = self.records.update_many(live, ended).await;
        let ended = ended.map_err(|e| store_error("revoking the sessions of a user", e))?;
        Ok(usize::try_from(ended.modified_count).unwrap_or(usize::MAX))
    }

    /// The live sessions of this user that have an aid.
    pub(crate) async fn list(&self, user: &str) -> Result<Vec<StoredSession>, StoreError> {
        let of_user = doc! {
            "user": { "$eq": user },
            "ended": { "$exists": false },
            "$expr": { "$gt": ["$expires", "$$NOW"] },
        };
        let date = |record: &Record, field| presentable(record.get_datetime(field).ok().copied());
        let session = |record: &Record| {
            Some(StoredSession {
                aid: aid_of(record)?,
                user: user.to_owned(),
                created: date(record, "created"),
                seen: date(record, "seen"),
                expires: date(record, "expires"),
            })
        };
        Ok(self.find(of_user).await?.iter().filter_map(session).collect())
    }

    /// Whether there is a live session with this aid.
    pub(crate) async fn has_live(&self, aid: &Aid) -> Result<bool, StoreError> {
        let live = doc! {
            "aid": { "$eq": aid.as_str() },
            "ended": { "$exists": false },
            "$expr": { "$gt": ["$expires", "$$NOW"] },
        };
        let found = self.records.find_one(live).projection(doc! { "_id": 1 }).await;
        Ok(found.map_err(|e| store_error("looking for a session with another key", e))?.is_some())
    }

    /// At most `limit` ended sessions that no other sweep has taken. One query if there are none.
    /// `call` identifies this call, and stays the same when the call is repeated.
    pub(crate) async fn take_due(&self, call: Uuid, limit: i64) -> Result<Vec<Due>, StoreError> {
        let failed = |e| store_error("looking for web sessions that have ended", e);
        let mut ids = Vec::new();
        let due = self.records.find(pipeline::is_due(call)).sort(doc! { "due": 1 }).limit(limit);
        let mut cursor = due.projection(doc! { "_id": 1 }).await.map_err(failed)?;
        while cursor.advance().await.map_err(failed)? {
            let record: Record = cursor.deserialize_current().map_err(failed)?;
            ids.extend(record.get("_id").cloned());
        }
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut mine = pipeline::is_due(call);
        mine.insert("_id", doc! { "$in": ids.clone() });
        self.records.update_many(mine, pipeline::take(call, LEASE)).await.map_err(failed)?;
        let mine = doc! { "_id": { "$in": ids }, "by": call.to_string() };
        let due = |record: &Record| {
            Some(Due {
                id: record.get("_id")?.clone(),
                aid: aid_of(record),
                reason: record.get_str("ended").map_or(EndReason::Expired, EndReason::from_stored),
            })
        };
        Ok(self.find(mine).await?.iter().filter_map(due).collect())
    }

    pub(crate) async fn finish(&self, ids: &[Bson]) -> Result<(), StoreError> {
        let finished = self.records.update_many(doc! { "_id": { "$in": ids } }, pipeline::finish());
        finished.await.map_err(|e| store_error("finishing the ends of web sessions", e))?;
        Ok(())
    }

    async fn find(&self, filter: Record) -> Result<Vec<Record>, StoreError> {
        let failed = |e| store_error("looking for web sessions", e);
        let mut cursor =
            self.records.find(filter).projection(doc! { "state": 0 }).await.map_err(failed)?;
        let mut found = Vec::new();
        while cursor.advance().await.map_err(failed)? {
            found.push(cursor.deserialize_current().map_err(failed)?);
        }
        Ok(found)
    }
}

/// The form of a session key in the database, from which nobody can read the key. A plain hash is
/// enough, because a key is 64 random characters and not a password.
fn hashed(key: &str) -> Bson {
    let bytes = Sha256::digest(key.as_bytes()).to_vec();
    Binary { subtype: BinarySubtype::Generic, bytes }.into()
}

fn aid_of(record: &Record) -> Option<Aid> {
    record.get_str("aid").ok().map(|aid| Aid::from(aid.to_owned()))
}

fn state_of(record: &Record) -> Option<State> {
    let entry = |entry: &Bson| {
        let entry = entry.as_document()?;
        Some((entry.get_str("k").ok()?.to_owned(), entry.get_str("v").ok()?.to_owned()))
    };
    record.get_array("state").ok()?.iter().map(entry).collect()
}
