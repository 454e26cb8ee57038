//! Locks are looked at, one or several.

use std::{collections::HashSet, slice, time::Instant};

use mongodb::{
    Collection,
    bson::{Bson, Document, doc},
};

use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Lock},
    store::mongo::{MongoStore, Prepared, codec, error::store_error, lanes, pipeline},
};

/// What a session has in a collection.
pub(super) struct OfSession {
    /// Its live locks.
    pub(super) held: Vec<Lock>,
    /// Whether it is in any list of readers, or may be: also where its own lease there is over.
    pub(super) may_read: bool,
}

/// What only the primary has is neither live nor gone.
fn unknown_yet(doing: String) -> StoreError {
    let what = format!(
        "{doing}: the primary has one that a majority has not acknowledged yet; if that lasts, \
         look after the secondaries"
    );
    StoreError::new(StoreErrorKind::Unavailable, what)
}

impl Prepared {
    // find comes back as: the record as a majority has it → live, at least until then. Nothing → asked
    // again, of what the primary has: nothing → not locked; a record → nobody knows yet, tried again
    // as unavailable: it is being taken or renewed at this moment, the primary is a new one and has
    // not heard what a majority has, or replication stands still.
    pub(super) async fn live(
        &self,
        key: &LockKey,
        fields: Document,
    ) -> Result<Option<Document>, StoreError> {
        let looking = || format!("inspecting the lock on {key:?}");
        let live = pipeline::and_live(pipeline::by_id(key.id()), self.rules.ttl);
        let find = async |of: &Collection<Document>, fields| {
            let found = of.find_one(live.clone()).projection(fields);
            let found = found.max_time(lanes::read_limit()).await;
            found.map_err(|e| store_error(looking(), e))
        };
        if let Some(record) = find(&self.leases, fields).await? {
            return Ok(Some(record));
        }
        match find(&self.locks, doc! { "_id": 1 }).await? {
            None => Ok(None),
            Some(_) => Err(unknown_yet(looking())),
        }
    }
}

impl MongoStore {
    /// Live locks as a majority has them, of these sessions only if any are named.
    pub(super) async fn list_of(
        &self,
        collection: &str,
        aids: Option<&[Aid]>,
        limit: usize,
    ) -> Result<Vec<Lock>, StoreError> {
        let at = self.prepared(collection)?;
        let live = match aids {
            None => pipeline::and_live(Document::new(), at.rules.ttl),
            Some(aids) => pipeline::held_by(aids, at.rules.ttl),
        };
        // Whoever asks for those of a session takes those that are not among them for lost.
        at.listed(live, aids, limit, aids.is_some()).await
    }

    /// Live locks on these documents, as a majority has them.
    pub(super) async fn locks_on_all(
        &self,
        collection: &str,
        keys: &[LockKey],
    ) -> Result<Vec<Lock>, StoreError> {
        let at = self.prepared(collection)?;
        let ids: Vec<_> = keys.iter().map(|key| Bson::from(key.id())).collect();
        let live = pipeline::and_live(doc! { "_id": { "$in": ids } }, at.rules.ttl);
        at.listed(live, None, keys.len(), true).await
    }

    /// All that has to be removed if the session is to have nothing.
    pub(super) async fn of_session(
        &self,
        collection: &str,
        aid: &Aid,
        limit: usize,
    ) -> Result<OfSession, StoreError> {
        let (at, aids) = (self.prepared(collection)?, slice::from_ref(aid));
        let (mut of_session, mut seen) = (OfSession { held: Vec::new(), may_read: false }, 0);
        let records = pipeline::of_sessions(aids);
        at.each_of(&at.locks, records, Some(aids), limit, |record, found| {
            seen += 1;
            of_session.may_read |= matches!(record.get("readers"), Some(Bson::Array(_)));
            of_session.held.extend(found.into_iter().filter(|lock| !lock.expires_in().is_zero()));
        })
        .await?;
        // Not known of those beyond the limit.
        of_session.may_read |= seen >= limit;
        Ok(of_session)
    }
}

impl Prepared {
    /// These locks as a majority has them. If `all`, those that only the primary has are an error.
    async fn listed(
        &self,
        live: Document,
        aids: Option<&[Aid]>,
        limit: usize,
        all: bool,
    ) -> Result<Vec<Lock>, StoreError> {
        let mut locks: Vec<Lock> = Vec::new();
        self.each_of(&self.leases, live.clone(), aids, limit, |_, found| locks.extend(found))
            .await?;
        if all {
            let known: HashSet<_> = locks.iter().map(|lock| lock.token).collect();
            let mut is_unknown = false;
            self.each_of(&self.locks, live, aids, limit, |_, found| {
                is_unknown |= found.iter().any(|lock| !known.contains(&lock.token));
            })
            .await?;
            if is_unknown {
                let collection = self.documents.name();
                return Err(unknown_yet(format!("listing locks in {collection}")));
            }
        }
        Ok(locks)
    }

    async fn each_of(
        &self,
        records: &Collection<Document>,
        filter: Document,
        aids: Option<&[Aid]>,
        limit: usize,
        mut take: impl FnMut(&Document, Vec<Lock>),
    ) -> Result<(), StoreError> {
        let collection = self.documents.name();
        let failed = |e| store_error(format!("listing locks in {collection}"), e);
        let asked = Instant::now();
        let mut cursor = records
            .find(filter)
            .projection(pipeline::list_fields(aids))
            .limit(i64::try_from(limit).unwrap_or(0))
            .max_time(lanes::read_limit())
            .await
            .map_err(failed)?;
        while cursor.advance().await.map_err(failed)? {
            let record = cursor.deserialize_current().map_err(failed)?;
            // A foreign program may lock documents whose ids we cannot name, and so not lock.
            let id = record.get("_id").and_then(codec::lock_id);
            if let Some(key) = id.and_then(|id| LockKey::new(collection, id).ok()) {
                take(&record, self.fetched(&key, &record, asked).locks());
            }
        }
        Ok(())
    }
}
