//! Reads locks: lists, confirmations, and reads of single records.

use std::{
    collections::{HashMap, HashSet},
    time::Instant,
};

use futures_util::future::join;
use mongodb::{
    Collection,
    bson::{Bson, Document, RawDocumentBuf, doc},
    error::Error,
};

use crate::{
    key::{LockId, LockKey},
    lock::{Aid, Lock},
    store::{
        Confirmed, Format, Query, StoredDocument,
        lock_rules::{Moment, Record},
        mongo::{
            LockCollection,
            codec::{self, is},
            error::{Result, unavailable},
            filters::{is_live, of_sessions},
            ids::{Exactly, by_id, has_text_ids, simple},
            lock_record::{Stored, decode, moment},
            send::{Both, Timing, raw_rows, rows},
            time_limits::LONGEST_WAIT,
        },
    },
};

/// In an answer: the record.
pub(super) const RECORD: &str = "lock";
/// In the answer to a confirmation: the document.
const DOCUMENT: &str = "document";

impl Both {
    /// Majority-committed locks, if the primary has no others.
    fn certain(self) -> Result<Vec<Lock>> {
        if self.uncommitted.is_empty() { Ok(self.locks) } else { Err(unknown_yet()) }
    }
}

/// A lock that only the primary has is neither live nor gone.
fn unknown_yet() -> mongodb::error::Error {
    unavailable(
        "the primary has a lock that a majority has not acknowledged yet; if that lasts, check the secondaries",
    )
}

impl LockCollection<'_> {
    pub(super) async fn locks(&self, query: Query<'_>, limit: usize) -> Result<Vec<Lock>> {
        let mut locks = match query {
            Query::Each { keys, aid } => self.each(&keys[..limit.min(keys.len())], aid).await?,
            Query::On(keys) => {
                let of = of_documents(keys);
                self.both(|from| self.listed(from, of.clone(), limit)).await?.certain()?
            }
            Query::Of([aid]) => {
                let (sessions, send_by) = (&self.groups.sessions, self.until.send_by());
                let read = sessions.submit(aid.clone(), send_by, |aids| self.of_each(aids)).await;
                read?.certain()?
            }
            Query::Of(aids) => self.both(|from| self.of(from, aids)).await?.certain()?,
            Query::All => {
                // By the index on `_id`: with `notablescan` the server reads no whole collection without one.
                let mut all = doc! { "_id": { "$gte": Bson::MinKey } };
                let may_be_live = [is_live(self.rules.ttl), is("$readers", "array")];
                all.insert("$expr", doc! { "$or": may_be_live.to_vec() });
                self.listed(&self.majority, all, limit).await?
            }
        };
        // One record may have many readers.
        if matches!(query, Query::Of(_)) {
            locks.truncate(limit);
        }
        Ok(locks)
    }

    // find on the majority-committed state returns: a live lock → certain, until it expires. The other documents are
    // looked for on the primary, which returns: no live lock → not locked; a live lock → not known, and the caller
    // repeats: the lock is being taken or renewed at this moment, or a new primary does not know yet what is
    // majority-committed, or replication stands still.
    async fn each(&self, keys: &[LockKey], aid: Option<&Aid>) -> Result<Vec<Lock>> {
        let lock = |it: &Fetched| {
            let grant = it.record.live(aid, it.moment.now)?;
            Some(grant.to_lock(&it.key, it.moment))
        };
        let found = self.fetch(&self.majority, of_documents(keys), keys.len()).await?;
        let locks: Vec<_> = found.iter().filter_map(lock).collect();
        let locked: HashSet<_> = locks.iter().map(|lock| &lock.key).collect();
        let others: Vec<_> = keys.iter().filter(|key| !locked.contains(key)).collect();
        if !others.is_empty() {
            let newest = self.fetch(&self.primary, of_documents(others), keys.len()).await?;
            if newest.iter().any(|it| lock(it).is_some()) {
                return Err(unknown_yet());
            }
        }
        Ok(locks)
    }

    /// The locks of each of these sessions.
    async fn of_each(&self, aids: Vec<Aid>) -> Vec<Result<Both>> {
        let distinct: Vec<_> = aids.iter().cloned().collect::<HashSet<_>>().into_iter().collect();
        let read = self.both(|from| self.of(from, &distinct)).await;
        let own = |aid: &Aid, locks: &[Lock]| {
            locks.iter().filter(|lock| lock.aid == *aid).cloned().collect()
        };
        let of = |aid| {
            let Both { locks, uncommitted } = read.as_ref().map_err(Clone::clone)?;
            Ok(Both { locks: own(aid, locks), uncommitted: own(aid, uncommitted) })
        };
        aids.iter().map(of).collect()
    }

    async fn both<'a, F>(&'a self, list: impl Fn(&'a Collection<Document>) -> F) -> Result<Both>
    where
        F: Future<Output = Result<Vec<Lock>>>,
    {
        let (locks, newest) = join(list(&self.majority), list(&self.primary)).await;
        let (locks, mut uncommitted) = (locks?, newest?);
        let tokens: HashSet<_> = locks.iter().map(|lock| lock.token).collect();
        let is_unknown = |lock: &Lock| !tokens.contains(&lock.token);
        uncommitted.retain(is_unknown);
        if !uncommitted.is_empty() {
            // A lock that ended between the two reads is in the second list only if that was read first.
            uncommitted = list(&self.primary).await?;
            uncommitted.retain(is_unknown);
        }
        Ok(Both { locks, uncommitted })
    }

    async fn listed(
        &self,
        from: &Collection<Document>,
        filter: Document,
        limit: usize,
    ) -> Result<Vec<Lock>> {
        let found = self.fetch(from, filter, limit).await?;
        Ok(found.iter().flat_map(Fetched::live_locks).collect())
    }

    /// The live locks of these sessions.
    async fn of(&self, from: &Collection<Document>, aids: &[Aid]) -> Result<Vec<Lock>> {
        let mut locks = self.listed(from, of_sessions(aids), usize::MAX).await?;
        let aids: HashSet<_> = aids.iter().collect();
        locks.retain(|lock| aids.contains(&lock.aid));
        Ok(locks)
    }

    /// The whole records, each with the server's time. The server computes nothing of the fields, not even whether a lock is
    /// live: that would cost it more than the whole read.
    pub(super) async fn fetch(
        &self,
        from: &Collection<Document>,
        filter: Document,
        limit: usize,
    ) -> Result<Vec<Fetched>> {
        // `usize::MAX` becomes 0, which is no limit.
        let limit = i64::try_from(limit).unwrap_or(0);
        let (asked, is_text) = (Instant::now(), has_text_ids(&filter));
        let mut found = from.find(filter).projection(all_fields()).limit(limit);
        if is_text {
            found = found.collation(simple());
        }
        let found = rows(found.max_time(self.until.read_limit())).await?;
        Ok(found.iter().filter_map(|row| self.fetched(row, asked)).collect())
    }

    /// `None` if the id of the record is none of ours.
    pub(super) fn fetched(&self, row: &Document, asked: Instant) -> Option<Fetched> {
        let (stored, now) = (row.get_document(RECORD).ok()?, *row.get_datetime("now").ok()?);
        let key = codec::key_in(self.documents.name(), stored)?;
        let moment = moment(now, asked);
        Some(Fetched { key, record: decode(stored, &self.rules, moment), moment })
    }

    // aggregate returns: the record of the lock, if there is one, and then the document, if it was asked
    // for and exists, in a wrapper without an `_id`. The server reads the lock first, both from
    // majority-committed state. A live lock of the session → confirmed. Anything else → not known: only the
    // primary may have the lock or its last renewal, which this read does not see.
    pub(super) async fn confirm(
        &self,
        key: &LockKey,
        aid: &Aid,
        load: bool,
    ) -> Result<Option<Confirmed>> {
        let this = || doc! { "$match": by_id(key.id()) };
        let with_time = doc! { "$replaceWith": { RECORD: "$$ROOT", "now": "$$NOW" } };
        let mut stages = vec![this(), with_time];
        if load {
            let wrapped = doc! { "$replaceWith": { DOCUMENT: "$$ROOT" } };
            stages.push(doc! { "$unionWith": {
                "coll": self.documents.name(), "pipeline": [this(), wrapped],
            } });
        }
        let asked = Instant::now();
        let found = self.majority.aggregate(stages).with_type::<RawDocumentBuf>();
        let found = found.exactly([key.id()]);
        let (mut confirmed, mut document) = (None, None);
        for row in raw_rows(found.max_time(self.until.read_limit())).await? {
            if row.get(RECORD).is_ok_and(|record| record.is_some()) {
                let row = codec::readable_document(&row).ok();
                confirmed = row.and_then(|row| self.fetched(&row, asked)?.own(aid));
            } else if let Ok(loaded) = row.get_document(DOCUMENT) {
                let bytes = loaded.as_bytes().to_vec();
                document = Some(StoredDocument::from_bytes(Format::Bson, bytes));
            }
        }
        Ok(confirmed.map(|confirmed| Confirmed { document, ..confirmed }))
    }

    /// The record, as the primary has it, with the server's time. Callers that ask for the same record share one
    /// read, so that a crowd that asks again and again leaves the connections to the holder.
    pub(super) async fn read_record(&self, id: &LockId) -> Result<Option<Stored>> {
        let (reads, send_by) = (&self.groups.reads, self.until.send_by());
        let found = reads.submit(id.clone(), send_by, async |ids| {
            let mut distinct: Vec<_> = ids.iter().collect();
            distinct.sort();
            distinct.dedup();
            let records = self.records(&distinct).await;
            let of =
                |id| records.as_ref().map(|records| records.get(id).cloned()).map_err(Clone::clone);
            ids.iter().map(of).collect()
        });
        found.await
    }

    /// These records, as the primary has them, with its time. Several callers share the read, so it has no caller's deadline.
    pub(super) async fn records(&self, ids: &[&LockId]) -> Result<HashMap<LockId, Stored>> {
        let filter = match ids {
            [] => return Ok(HashMap::new()),
            [id] => by_id(id),
            ids => {
                doc! { "_id": { "$in": ids.iter().map(|id| Bson::from(*id)).collect::<Vec<_>>() } }
            }
        };
        let found = self.primary.find(filter).projection(all_fields()).limit(ids.len() as i64);
        let found = found.exactly(ids.iter().copied()).max_time(LONGEST_WAIT);
        let asked = Instant::now();
        let mut records = HashMap::new();
        for found in raw_rows(found).await? {
            let now = found.get_datetime("now").map_err(Error::custom)?;
            let raw = found.get_document(RECORD).map_err(Error::custom)?.to_owned();
            let stored = Stored::read(raw, moment(now, asked))?;
            let id = stored.fields.get("_id").and_then(LockId::from_bson);
            records.extend(id.map(|id| (id, stored)));
        }
        Ok(records)
    }
}

/// A record, with the moment of the read.
pub(super) struct Fetched {
    pub(super) key: LockKey,
    pub(super) record: Record,
    pub(super) moment: Moment,
}

impl Fetched {
    /// The locks that had not expired when the server read the record. They may expire before the answer arrives.
    fn live_locks(&self) -> impl Iterator<Item = Lock> {
        let live = self.record.grants.iter().filter(|it| it.is_live(self.moment.now));
        live.map(|it| it.to_lock(&self.key, self.moment))
    }

    /// The live lock of this session.
    fn own(self, aid: &Aid) -> Option<Confirmed> {
        let grant = self.record.live(Some(aid), self.moment.now)?;
        let lock = grant.to_lock(&self.key, self.moment);
        let is_own = grant.aid == *aid && grant.token.is_some() && !lock.expires_in().is_zero();
        is_own.then_some(Confirmed {
            lock,
            page: grant.page,
            is_known: grant.again,
            is_leaving: grant.leaving.is_some(),
            document: None,
        })
    }
}

/// A whole record, and the server's time.
pub(super) fn all_fields() -> Document {
    doc! { "_id": 0, RECORD: "$$ROOT", "now": "$$NOW" }
}

/// The records of these documents.
fn of_documents<'a>(keys: impl IntoIterator<Item = &'a LockKey>) -> Document {
    let ids: Vec<_> = keys.into_iter().map(|key| Bson::from(key.id())).collect();
    doc! { "_id": { "$in": ids } }
}
