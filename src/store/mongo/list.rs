//! Queries for one or several locks.

use std::{collections::HashSet, slice, time::Instant};

use mongodb::{
    Collection,
    bson::{Bson, Document, doc},
};

use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Lock},
    store::{
        Query,
        mongo::{MongoStore, Prepared, codec, error::store_error, lanes, pipeline},
    },
};

/// The locks of a session in a collection.
pub(super) struct OfSession {
    /// Its live locks.
    pub(super) held: Vec<Lock>,
    /// Whether a list of readers contains the session, or may contain it, even with an expired lease.
    pub(super) may_read: bool,
}

/// A lock that only the primary has is neither live nor gone.
fn unknown_yet(doing: String) -> StoreError {
    let what = format!(
        "{doing}: the primary has a lock that a majority has not acknowledged yet; if that lasts, \
         check the secondaries"
    );
    StoreError::new(StoreErrorKind::Unavailable, what)
}

impl Prepared {
    // find returns: a majority-committed record → live, at least until that record expires. Nothing →
    // the query is repeated on the state of the primary. Nothing there either → not locked. A record
    // there → not yet known, reported as unavailable and repeated: the lock is being taken or renewed
    // at this moment, or a new primary does not know yet what is majority-committed, or replication
    // stands still.
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
    pub(super) async fn locks_of(
        &self,
        collection: &str,
        query: Query<'_>,
        limit: usize,
    ) -> Result<Vec<Lock>, StoreError> {
        let at = self.prepared(collection)?;
        let ttl = at.rules.ttl;
        match query {
            Query::One { key, aid } => {
                let asked = Instant::now();
                let record = at.live(key, pipeline::lock_fields(aid)).await?;
                let lock = record.and_then(|record| at.fetched(key, &record, asked).lock());
                Ok(lock.into_iter().collect())
            }
            Query::On(keys) => {
                let ids: Vec<_> = keys.iter().map(|key| Bson::from(key.id())).collect();
                let live = pipeline::and_live(doc! { "_id": { "$in": ids } }, ttl);
                at.listed(live, None, limit, true).await
            }
            Query::Of(aids) => {
                at.listed(pipeline::held_by(aids, ttl), Some(aids), limit, true).await
            }
            Query::All => {
                at.listed(pipeline::and_live(Document::new(), ttl), None, limit, false).await
            }
        }
    }

    /// All locks of the session, so that they can be removed.
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
        // Beyond the limit it is not known whether the session reads.
        of_session.may_read |= seen >= limit;
        Ok(of_session)
    }
}

impl Prepared {
    /// Majority-committed locks. If `all`, a lock that only the primary has is an error.
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
            // A foreign program may lock documents whose ids this crate cannot represent. It cannot
            // lock them either.
            let id = record.get("_id").and_then(codec::lock_id);
            if let Some(key) = id.and_then(|id| LockKey::new(collection, id).ok()) {
                take(&record, self.fetched(&key, &record, asked).locks());
            }
        }
        Ok(())
    }
}
