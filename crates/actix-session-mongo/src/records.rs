//! The collection of sessions. Keys and states are strings here.

use std::{
    collections::BTreeSet,
    fmt,
    time::{Duration, Instant, SystemTime},
};

use futures_util::TryStreamExt;
use mongodb::{
    Collection, Database,
    bson::{Binary, Bson, DateTime, Document, doc, spec::BinarySubtype},
    error::Result,
    options::{CollectionOptions, ReadConcern, ReadPreference, SelectionCriteria, WriteConcern},
};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::{
    change::{Change, Fact, State, Whose},
    end::{EndReason, SessionEnd},
    indexes, pipeline,
};

/// The actions that the database user needs on the collection. The last one only creates the indexes. An index
/// that another program has made and that must be corrected needs `collMod`, too.
pub const ACTIONS: &[&str] = &["find", "insert", "update", "listIndexes", "createIndex"];

/// The longest wait for a majority, so that no request waits forever while replication stands still.
const WRITE_CONCERN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long other sweeps leave a session alone that one sweep has taken.
pub(crate) const LEASE: Duration = Duration::from_secs(30);

/// The result of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Updated {
    Written,
    /// The session has ended, or another one has begun in its record. Nothing was written.
    Ended,
    /// There is no such session, and no note of one.
    Unknown,
}

/// The key of a record, and the end of its session if that has an id.
pub(crate) type Due = (Bson, Option<SessionEnd>);

/// A session as its user may see it. The session key is not in it.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredSession {
    /// The argument for [`revoke`](crate::MongoSessionStore::revoke).
    pub id: String,
    /// The user of the session.
    pub user: String,
    /// When it began, or got its current key.
    pub created: SystemTime,
    /// When its state was last written.
    pub seen: SystemTime,
    /// When it ends unless it is extended.
    pub expires: SystemTime,
}

/// Does not show the id, which an application may treat as a secret.
impl fmt::Debug for StoredSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("StoredSession");
        shown.field("user", &self.user).field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// The collection. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Records {
    collection: Collection<Document>,
    absolute: Option<Duration>,
}

impl Records {
    /// With fixed read and write concerns, whatever the URI says: a failover must not bring an ended session back.
    pub(crate) fn of(database: &Database, name: &str, absolute: Option<Duration>) -> Self {
        let mut majority = WriteConcern::majority();
        majority.w_timeout = Some(WRITE_CONCERN_TIMEOUT);
        let options = CollectionOptions::builder()
            .write_concern(majority)
            .read_concern(ReadConcern::local())
            .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
            .build();
        Self { collection: database.collection_with_options(name, options), absolute }
    }

    pub(crate) async fn prepare(&self) -> Result<()> {
        indexes::prepare(&self.collection).await
    }

    /// The state of a live session, and how much time it has left.
    pub(crate) async fn load(&self, key: &str) -> Result<Option<(State, Option<Duration>)>> {
        let found = self.collection.find_one(pipeline::live("_id", hashed(key)));
        let Some(record) = found.projection(pipeline::state_and_rest()).await? else {
            return Ok(None);
        };
        let left = record.get_i64("left").ok().and_then(|left| left.try_into().ok());
        let state = state_of(&record).map(|state| (state, left.map(Duration::from_millis)));
        if state.is_none() {
            // Logged only once, because the record cannot be loaded from then on.
            log::warn!(
                "a record in {} is not a web session, and is left out; was it edited by hand?",
                self.collection.namespace(),
            );
            self.end(by_key(key), EndReason::Expired).await?;
        }
        Ok(state)
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
    ) -> Result<()> {
        let absolute = self.absolute.into_iter().chain(absolute_left).min();
        let create = pipeline::create(change, ttl, absolute);
        self.collection.update_one(by_key(key), create).upsert(true).await?;
        // A revocation at this moment either finds the record, or has already left its note.
        if let Fact::Is(id) = &change.id
            && self.collection.find_one(doc! { "_id": { "$eq": id } }).await?.is_some()
        {
            self.end(by_key(key), EndReason::Revoked).await?;
        }
        Ok(())
    }

    /// updateOne returns: 1 → updated; 0 → ended, another session by now, or never there, and a query tells whether it is there.
    ///
    /// Before, makes the end of a session that is replaced due after `grace`, by an upsert: inserted, or found again. A sweep
    /// that comes before the update finds the session live, and tells nobody: after a late update, the same once more.
    pub(crate) async fn update(
        &self,
        key: &str,
        change: &Change,
        ttl: Duration,
        grace: Duration,
    ) -> Result<Updated> {
        let mine = pipeline::live_of(change.only_of.as_ref(), hashed(key));
        let former = match &change.former_id {
            Some(id) if self.exists(mine.clone()).await? => Some(id),
            _ => None,
        };
        let began = Instant::now();
        self.note_end(key, former, grace).await?;
        let updated = self.collection.update_one(mine, pipeline::update(change, ttl)).await?;
        if updated.matched_count > 0 {
            self.note_end(key, former.filter(|_| began.elapsed() > grace / 2), grace).await?;
            return Ok(Updated::Written);
        }
        let exists = self.exists(by_key(key)).await?;
        Ok(if exists { Updated::Ended } else { Updated::Unknown })
    }

    /// The end of a session whose record another one goes on in.
    async fn note_end(&self, key: &str, former: Option<&String>, grace: Duration) -> Result<()> {
        let Some(id) = former else { return Ok(()) };
        let (former, end) = (format!("{key} {id}"), pipeline::replaced(id, grace));
        self.collection.update_one(by_key(&former), end).upsert(true).await.map(drop)
    }

    /// updateOne returns: 1 → live; 0 → ended or never there.
    ///
    /// Not every request writes: only if a twentieth of the time has passed, or if more than `ttl` is
    /// left because the ttl is now shorter than before.
    pub(crate) async fn extend(&self, key: &str, ttl: Duration) -> Result<bool> {
        let live = pipeline::live("_id", hashed(key));
        let extend = pipeline::extend(ttl - ttl / 20, ttl);
        Ok(self.collection.update_one(live, extend).await?.matched_count > 0)
    }

    /// Makes the end of the session due after `grace`, unless a session with the same id exists by
    /// then: a new key for an old session is also a deletion and a new session.
    ///
    /// Returns `Some` if the session was live, and the loaded one if that is known, with the rest of its absolute time-out.
    /// `call` recognises an earlier attempt of the same deletion whose reply was lost.
    pub(crate) async fn delete(
        &self,
        key: &str,
        whose: Option<&Whose>,
        grace: Duration,
        call: Uuid,
    ) -> Result<Option<Option<Duration>>> {
        let live = pipeline::live_or_ended_by(whose, hashed(key), call);
        let end = pipeline::logged_out(whose.and_then(Whose::id).as_deref(), grace, Some(call));
        let deleted = self.collection.find_one_and_update(live, end);
        Ok(deleted.projection(pipeline::absolute_left()).await?.map(|record| {
            let left = record.get_i64("left").ok()?;
            Some(Duration::from_millis(left.try_into().unwrap_or(0)))
        }))
    }

    /// Ends the sessions of this id, including those that are being given another key at the moment.
    pub(crate) async fn revoke(&self, id: &str) -> Result<()> {
        let noted = pipeline::note_of_revocation();
        self.collection.update_one(doc! { "_id": { "$eq": id } }, noted).upsert(true).await?;
        self.end(doc! { "aid": { "$eq": id } }, EndReason::Revoked).await.map(drop)
    }

    /// Ends the matching sessions that have not ended yet, and returns their number. The first reason stays.
    async fn end(&self, mut filter: Document, reason: EndReason) -> Result<u64> {
        filter.insert("ended", doc! { "$exists": false });
        let end = pipeline::end(reason, Duration::ZERO, None);
        Ok(self.collection.update_many(filter, end).await?.modified_count)
    }

    /// Ends the sessions of this user. Returns how many of them were live, and the ids of all, including those that are
    /// being given another key at the moment.
    pub(crate) async fn revoke_user(&self, user: &str) -> Result<(u64, BTreeSet<String>)> {
        // Ended, and still due: nobody was told of its end yet.
        let not_over =
            [doc! { "ended": { "$exists": false } }, doc! { "due": { "$exists": true } }];
        let of_user = doc! { "user": { "$eq": user }, "$or": &not_over[..] };
        // Done first, so that no session is missed that is just being given another id or key.
        let ids = self.find(of_user).await?.iter().filter_map(id_of).collect();
        Ok((self.end(pipeline::live("user", user), EndReason::Revoked).await?, ids))
    }

    /// The live sessions of this user that have an id.
    pub(crate) async fn list(&self, user: &str) -> Result<Vec<StoredSession>> {
        let session = |record: &Document| {
            Some(StoredSession {
                id: id_of(record)?,
                user: user.to_owned(),
                created: date(record, "created"),
                seen: date(record, "seen"),
                expires: date(record, "expires"),
            })
        };
        Ok(self.find(pipeline::live("user", user)).await?.iter().filter_map(session).collect())
    }

    /// True if there is a live session with this id.
    pub(crate) async fn has_live(&self, id: &str) -> Result<bool> {
        self.exists(pipeline::live("aid", id)).await
    }

    /// At most `limit` ended sessions that no other sweep has taken. One query if there are none.
    /// `call` identifies this call, and stays the same when the call is repeated.
    pub(crate) async fn take_due(&self, call: Uuid, limit: i64) -> Result<Vec<Due>> {
        let due = self.collection.find(pipeline::is_due(call)).sort(doc! { "due": 1 });
        let due = due.limit(limit).projection(doc! { "_id": 1 }).await?;
        let mut records = due.try_collect::<Vec<_>>().await?;
        let records: Vec<_> = records.iter_mut().filter_map(|it| it.remove("_id")).collect();
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let mut mine = pipeline::is_due(call);
        mine.insert("_id", doc! { "$in": records.clone() });
        self.collection.update_many(mine, pipeline::take(call, LEASE)).await?;
        let mine = doc! { "_id": { "$in": records }, "by": call.to_string() };
        let due = |record: &Document| {
            let reason = EndReason::from_stored(record.get_str("ended").ok());
            Some((record.get("_id")?.clone(), id_of(record).map(|id| SessionEnd { id, reason })))
        };
        Ok(self.find(mine).await?.iter().filter_map(due).collect())
    }

    /// Leaves a session alone that is live: the clock of the server where it was taken may have been ahead.
    pub(crate) async fn finish(&self, records: &[Bson]) -> Result<()> {
        let which = pipeline::taken_and_over(records);
        self.collection.update_many(which, pipeline::finish()).await.map(drop)
    }

    async fn exists(&self, filter: Document) -> Result<bool> {
        let found = self.collection.find_one(filter).projection(doc! { "_id": 1 }).await?;
        Ok(found.is_some())
    }

    async fn find(&self, filter: Document) -> Result<Vec<Document>> {
        self.collection.find(filter).projection(doc! { "state": 0 }).await?.try_collect().await
    }
}

/// The form of a session key in the database, from which nobody can read the key. A plain hash is
/// enough, because a key is 64 random characters and not a password.
fn hashed(key: &str) -> Bson {
    let bytes = Sha256::digest(key.as_bytes()).to_vec();
    Binary { subtype: BinarySubtype::Generic, bytes }.into()
}

fn by_key(key: &str) -> Document {
    doc! { "_id": { "$eq": hashed(key) } }
}

fn id_of(record: &Document) -> Option<String> {
    record.get_str("aid").ok().map(str::to_owned)
}

/// A date that can be shown: RFC 3339 has only years of four digits.
fn date(record: &Document, field: &str) -> SystemTime {
    const END_OF_9999: i64 = 253_402_300_799_999;
    let millis = record.get_datetime(field).map_or(0, |date| date.timestamp_millis());
    DateTime::from_millis(millis.clamp(0, END_OF_9999)).to_system_time()
}

fn state_of(record: &Document) -> Option<State> {
    let entry = |entry: &Bson| {
        let entry = entry.as_document()?;
        Some((entry.get_str("k").ok()?.to_owned(), entry.get_str("v").ok()?.to_owned()))
    };
    record.get_array("state").ok()?.iter().map(entry).collect()
}
