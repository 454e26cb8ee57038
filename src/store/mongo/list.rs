//! Queries for one or several locks.

use std::{collections::HashSet, slice, time::Instant};

use futures_util::future::join;
use mongodb::{
    Collection,
    bson::{Bson, Document, doc},
    error::Error,
};

use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Lock},
    store::{
        Query,
        mongo::{
            MongoStore, Prepared, codec,
            error::store_error,
            lanes, pipeline,
            record::Fetched,
            together::{Both, failed},
        },
    },
};

/// The locks of a session in a collection.
pub(super) struct OfSession {
    /// Its live locks.
    pub(super) held: Vec<Lock>,
    /// Whether a list of readers contains the session, or may contain it, even with an expired lease.
    pub(super) may_read: bool,
}

impl Prepared {
    // find returns: a majority-committed record → live, at least until that record expires. No record of
    // a document → the query is repeated on the state of the primary. Nothing there either → not locked.
    // A record there → not yet known, reported as unavailable and repeated: the lock is being taken or
    // renewed at this moment, or a new primary does not know yet what is majority-committed, or
    // replication stands still.
    async fn each(&self, keys: &[LockKey], aid: Option<&Aid>) -> Result<Vec<Lock>, StoreError> {
        let (mut locks, mut free) = (Vec::new(), keys.iter().collect::<HashSet<_>>());
        let live = self.live_on(&free);
        self.each_of(&self.leases, live, pipeline::lock_fields(aid), keys.len(), |_, found| {
            free.remove(&found.key);
            locks.extend(found.lock());
        })
        .await
        .map_err(|e| self.not_listed(e))?;
        let mut is_unknown = false;
        if !free.is_empty() {
            let (live, id) = (self.live_on(&free), doc! { "_id": 1 });
            let on_primary = self.each_of(&self.locks, live, id, 1, |_, _| is_unknown = true);
            on_primary.await.map_err(|e| self.not_listed(e))?;
        }
        if is_unknown { Err(self.unknown_yet()) } else { Ok(locks) }
    }

    /// Matches the live records of these documents.
    fn live_on<'a>(&self, keys: impl IntoIterator<Item = &'a &'a LockKey>) -> Document {
        let ids: Vec<_> = keys.into_iter().map(|key| Bson::from(key.id())).collect();
        pipeline::and_live(doc! { "_id": { "$in": ids } }, self.rules.ttl)
    }

    /// A lock that only the primary has is neither live nor gone.
    fn unknown_yet(&self) -> StoreError {
        let what = format!(
            "looking at locks in {}: the primary has a lock that a majority has not acknowledged yet; \
             if that lasts, check the secondaries",
            self.documents.name(),
        );
        StoreError::new(StoreErrorKind::Unavailable, what)
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
            Query::Each { keys, aid } => at.each(&keys[..limit.min(keys.len())], aid).await,
            Query::On(keys) => {
                let live = at.live_on(&keys.iter().collect::<Vec<_>>());
                at.certain(at.both(|records| at.listed(records, live.clone(), limit)).await)
            }
            Query::Of([aid]) => {
                let (sessions, aid) = (&at.groups.sessions, aid.clone());
                let read = sessions.submit(aid, lanes::send_by(), |aids| at.of_each(aids));
                let mut locks = at.certain(read.await.unwrap_or_else(failed))?;
                locks.truncate(limit);
                Ok(locks)
            }
            Query::Of(aids) => {
                let mut locks = at.certain(at.both(|records| at.of(records, aids)).await)?;
                locks.truncate(limit);
                Ok(locks)
            }
            Query::All => {
                let live = pipeline::and_live(Document::new(), ttl);
                at.listed(&at.leases, live, limit).await.map_err(|e| at.not_listed(e))
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
        let (records, fields) = (pipeline::of_sessions(aids), pipeline::fields_for(aids));
        at.each_of(&at.locks, records, fields, limit, |record, found| {
            seen += 1;
            of_session.may_read |= matches!(record.get("readers"), Some(Bson::Array(_)));
            of_session.held.extend(found.live_locks());
        })
        .await
        .map_err(|e| at.not_listed(e))?;
        // Beyond the limit it is not known whether the session reads.
        of_session.may_read |= seen >= limit;
        Ok(of_session)
    }
}

impl Prepared {
    /// Majority-committed locks, if the primary has no others.
    fn certain(&self, read: Result<Both, Error>) -> Result<Vec<Lock>, StoreError> {
        let Both { locks, uncommitted } = read.map_err(|e| self.not_listed(e))?;
        if uncommitted.is_empty() { Ok(locks) } else { Err(self.unknown_yet()) }
    }

    fn not_listed(&self, e: Error) -> StoreError {
        store_error(format!("listing locks in {}", self.documents.name()), e)
    }

    async fn both<'a, F>(
        &'a self,
        list: impl Fn(&'a Collection<Document>) -> F,
    ) -> Result<Both, Error>
    where
        F: Future<Output = Result<Vec<Lock>, Error>>,
    {
        let (locks, newest) = join(list(&self.leases), list(&self.locks)).await;
        let (locks, mut uncommitted) = (locks?, newest?);
        let tokens: HashSet<_> = locks.iter().map(|lock| lock.token).collect();
        let is_unknown = |lock: &Lock| !tokens.contains(&lock.token);
        uncommitted.retain(is_unknown);
        if !uncommitted.is_empty() {
            // A lock that ended between the two reads is in the second list only if that was read first.
            uncommitted = list(&self.locks).await?;
            uncommitted.retain(is_unknown);
        }
        Ok(Both { locks, uncommitted })
    }

    /// The locks of each of these sessions.
    async fn of_each(&self, aids: Vec<Aid>) -> Vec<Result<Both, Error>> {
        let distinct: Vec<_> = aids.iter().cloned().collect::<HashSet<_>>().into_iter().collect();
        let read = self.both(|records| self.of(records, &distinct)).await;
        let own = |aid: &Aid, locks: &[Lock]| {
            locks.iter().filter(|lock| lock.aid == *aid).cloned().collect()
        };
        let of = |aid| {
            let Both { locks, uncommitted } = read.as_ref().map_err(Clone::clone)?;
            Ok(Both { locks: own(aid, locks), uncommitted: own(aid, uncommitted) })
        };
        aids.iter().map(of).collect()
    }

    async fn listed(
        &self,
        records: &Collection<Document>,
        live: Document,
        limit: usize,
    ) -> Result<Vec<Lock>, Error> {
        let mut locks = Vec::new();
        self.each_of(records, live, pipeline::list_fields(), limit, |_, found| {
            locks.extend(found.locks());
        })
        .await?;
        Ok(locks)
    }

    /// The live locks of these sessions. The application leaves out the expired ones: for the server, the
    /// expressions would cost more than the read.
    async fn of(&self, records: &Collection<Document>, aids: &[Aid]) -> Result<Vec<Lock>, Error> {
        let (of_sessions, fields) = (pipeline::of_sessions(aids), pipeline::fields_for(aids));
        let (aids, mut locks) = (aids.iter().collect::<HashSet<_>>(), Vec::new());
        self.each_of(records, of_sessions, fields, usize::MAX, |_, found| {
            locks.extend(found.live_locks().filter(|lock| aids.contains(&lock.aid)));
        })
        .await?;
        Ok(locks)
    }

    async fn each_of(
        &self,
        records: &Collection<Document>,
        filter: Document,
        fields: Document,
        limit: usize,
        mut take: impl FnMut(&Document, Fetched<'_>),
    ) -> Result<(), Error> {
        let collection = self.documents.name();
        let asked = Instant::now();
        let mut cursor = records
            .find(filter)
            .projection(fields)
            .limit(i64::try_from(limit).unwrap_or(0))
            .max_time(lanes::read_limit())
            .await?;
        while cursor.advance().await? {
            let record = cursor.deserialize_current()?;
            // A foreign program may lock documents whose ids this crate cannot represent. It cannot
            // lock them either.
            let id = record.get("_id").and_then(codec::lock_id);
            if let Some(key) = id.and_then(|id| LockKey::new(collection, id).ok()) {
                take(&record, self.fetched(&key, &record, asked));
            }
        }
        Ok(())
    }
}
