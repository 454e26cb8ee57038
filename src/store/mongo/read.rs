//! Reads locks: lists, confirmations, and looks at single records.

use std::{
    collections::{HashMap, HashSet},
    time::Instant,
};

use futures_util::future::join;
use mongodb::{
    Collection,
    bson::{Bson, Document, RawDocumentBuf, doc},
};

use crate::{
    key::{LockId, LockKey},
    lock::{Aid, Lock, Mode},
    store::{
        Confirmed, Format, Query, StoredDocument,
        mongo::{
            Call,
            codec::{self, literal},
            error::{Result, unavailable},
            grant::{
                Grant, and_live, expires, is_live_reader, is_of, is_reader, is_shared, of_sessions,
                readers_that,
            },
            record::{Exactly, Fetched, by_id, has_text_ids, simple},
            send::{Both, LIMIT, raw_rows, rows},
        },
    },
};

/// In the answer to a look: the record.
const RECORD: &str = "lock";
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

impl Call<'_> {
    pub(super) async fn locks(&self, query: Query<'_>, limit: usize) -> Result<Vec<Lock>> {
        let mut locks = match query {
            Query::Each { keys, aid } => self.each(&keys[..limit.min(keys.len())], aid).await?,
            Query::On(keys) => {
                let live = self.live_on(keys);
                self.both(|from| self.listed(from, live.clone(), limit)).await?.certain()?
            }
            Query::Of([aid]) => {
                let (sessions, send_by) = (&self.groups.sessions, self.until.send_by());
                let read = sessions.submit(aid.clone(), send_by, |aids| self.of_each(aids)).await;
                read?.certain()?
            }
            Query::Of(aids) => self.both(|from| self.of(from, aids)).await?.certain()?,
            Query::All => {
                // By the index on `_id`: with `notablescan` the server reads no whole collection without one.
                let all = doc! { "_id": { "$gte": Bson::MinKey } };
                let live = and_live(all, self.rules.ttl);
                self.listed(&self.majority, live, limit).await?
            }
        };
        // One record may have many readers.
        if matches!(query, Query::Of(_)) {
            locks.truncate(limit);
        }
        Ok(locks)
    }

    // find returns: a majority-committed record → live, at least until that record expires. No record of
    // a document → the query is repeated on the state of the primary. Nothing there either → not locked.
    // A record there → not yet known, reported as unavailable and repeated: the lock is being taken or
    // renewed at this moment, or a new primary does not know yet what is majority-committed, or
    // replication stands still.
    async fn each(&self, keys: &[LockKey], aid: Option<&Aid>) -> Result<Vec<Lock>> {
        let live = self.live_on(keys);
        let found = self.fetch(&self.majority, live, lock_fields(aid), keys.len()).await?;
        let locked: HashSet<_> = found.iter().map(|it| &it.key).collect();
        let free: Vec<_> = keys.iter().filter(|key| !locked.contains(key)).collect();
        if !free.is_empty() {
            let live = self.live_on(free);
            if !self.fetch(&self.primary, live, doc! { "_id": 1 }, 1).await?.is_empty() {
                return Err(unknown_yet());
            }
        }
        Ok(found.into_iter().filter_map(Fetched::lock).collect())
    }

    /// Matches the live records of these documents.
    fn live_on<'a>(&self, keys: impl IntoIterator<Item = &'a LockKey>) -> Document {
        let ids: Vec<_> = keys.into_iter().map(|key| Bson::from(key.id())).collect();
        and_live(doc! { "_id": { "$in": ids } }, self.rules.ttl)
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
        live: Document,
        limit: usize,
    ) -> Result<Vec<Lock>> {
        let fields = fields_with("readers", readers_that(is_live_reader()));
        let found = self.fetch(from, live, fields, limit).await?;
        Ok(found.iter().flat_map(Fetched::locks).collect())
    }

    /// The live locks of these sessions. This process leaves out the expired ones: for the server, the
    /// expressions would cost more than the read.
    async fn of(&self, from: &Collection<Document>, aids: &[Aid]) -> Result<Vec<Lock>> {
        let found = self.fetch(from, of_sessions(aids), fields_for(aids), usize::MAX).await?;
        let (aids, live) = (aids.iter().collect::<HashSet<_>>(), |it| Fetched::live_locks(it));
        Ok(found.iter().flat_map(live).filter(|lock| aids.contains(&lock.aid)).collect())
    }

    pub(super) async fn fetch(
        &self,
        from: &Collection<Document>,
        filter: Document,
        fields: Document,
        limit: usize,
    ) -> Result<Vec<Fetched>> {
        let limit = i64::try_from(limit).unwrap_or(0);
        let (asked, is_text) = (Instant::now(), has_text_ids(&filter));
        let mut found = from.find(filter).projection(fields).limit(limit);
        if is_text {
            found = found.collation(simple());
        }
        let found = rows(found.max_time(self.until.read_limit())).await?;
        let fetched = found.into_iter().filter_map(|record| {
            let key = codec::key_in(self.documents.name(), &record)?;
            Some(self.fetched(&key, record, asked))
        });
        Ok(fetched.collect())
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
        // With `$set` the read takes a tenth less time than with a projection of the whole record.
        let this = || doc! { "$match": by_id(key.id()) };
        let mut stages = vec![this(), doc! { "$set": { "now": "$$NOW" } }];
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
            if row.get("_id").is_ok_and(|id| id.is_some()) {
                let record = codec::readable_document(&row).ok();
                confirmed = record.and_then(|record| own(self.fetched(key, record, asked), aid));
            } else if let Ok(loaded) = row.get_document(DOCUMENT) {
                let bytes = loaded.as_bytes().to_vec();
                document = Some(StoredDocument::from_bytes(Format::Bson, bytes));
            }
        }
        Ok(confirmed.map(|confirmed| Confirmed { document, ..confirmed }))
    }

    /// The record, as the primary has it, with the server's time. Callers that ask for the same record share one
    /// read, so that a crowd that asks again and again leaves the connections to the holder.
    pub(super) async fn look(&self, id: &LockId) -> Result<Option<Document>> {
        let (looks, send_by) = (&self.groups.looks, self.until.send_by());
        let found = looks.submit(id.clone(), send_by, async |ids| {
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

    /// These records as they are, with the server's time. The server computes nothing: any expression would cost it
    /// more than the whole read.
    pub(super) async fn records(&self, ids: &[&LockId]) -> Result<HashMap<LockId, Document>> {
        let filter = match ids {
            [] => return Ok(HashMap::new()),
            [id] => by_id(id),
            ids => {
                doc! { "_id": { "$in": ids.iter().map(|id| Bson::from(*id)).collect::<Vec<_>>() } }
            }
        };
        let whole = doc! { "_id": 0, RECORD: "$$ROOT", "now": "$$NOW" };
        let found = self.primary.find(filter).projection(whole).limit(ids.len() as i64);
        let found = found.exactly(ids.iter().copied());
        let found = rows(found.max_time(LIMIT)).await?.into_iter().filter_map(|mut found| {
            let Bson::Document(mut record) = found.remove(RECORD)? else { return None };
            record.insert("now", found.remove("now")?);
            Some((LockId::from_bson(record.get("_id")?)?, record))
        });
        Ok(found.collect())
    }
}

/// The live lock of this session.
fn own(fetched: Fetched, aid: &Aid) -> Option<Confirmed> {
    let is_own =
        |lock: &Lock| lock.aid == *aid && lock.token.is_some() && !lock.expires_in().is_zero();
    let lock = fetched.locks().find(is_own)?;
    let of_aid = |reader: &&Document| reader.get_str("aid").is_ok_and(|it| it == aid.as_str());
    let grant = match lock.mode {
        Mode::Exclusive => &fetched.record,
        Mode::Shared => codec::documents(&fetched.record, "readers").find(of_aid)?,
    };
    Some(Confirmed {
        page: grant.get_str("page").ok().and_then(|page| page.parse().ok()),
        is_known: grant.get_bool("again").unwrap_or(false),
        is_leaving: grant.get_document("leaving").is_ok(),
        document: None,
        lock,
    })
}

/// The fields of an exclusive lock, expired or not, and `now` to compute its remaining time.
pub(super) fn exclusive_fields() -> Document {
    doc! {
        "ts": 1, "ttl": 1, "aid": 1, "token": 1, "tab": 1, "since": 1, "holder": 1, "fence": 1,
        "now": "$$NOW",
    }
}

fn fields_with(name: &str, of_readers: Document) -> Document {
    let mut fields = exclusive_fields();
    fields.insert(name, doc! { "$cond": [is_shared(), of_readers, "$$REMOVE"] });
    fields
}

/// The fields of a lock. Of several readers: the one of this session, or else the one that expires last.
pub(super) fn lock_fields(aid: Option<&Aid>) -> Document {
    let last = latest(readers_that(is_reader()));
    let Some(aid) = aid else { return reader_field(last) };
    let mine = doc! { "$eq": ["$$r.aid", literal(aid.as_str())] };
    let mine = readers_that(doc! { "$and": [mine, is_live_reader()] });
    let first = doc! { "$arrayElemAt": ["$$mine", 0] };
    let or_last = doc! { "$cond": [{ "$eq": ["$$mine", []] }, last, first] };
    reader_field(doc! { "$let": { "vars": { "mine": mine }, "in": or_last } })
}

/// The fields of a lock, with this reader. Null if there are readers, but none that matches.
pub(super) fn reader_field(reader: Document) -> Document {
    fields_with("reader", doc! { "$ifNull": [reader, Bson::Null] })
}

/// The reader that expires last. It is live if any of them is.
pub(super) fn latest(readers: Document) -> Document {
    let ends = doc! { "$map": { "input": "$$readers", "as": "r", "in": expires() } };
    let last = doc! { "$indexOfArray": ["$$ends", { "$max": "$$ends" }] };
    let last = doc! { "$arrayElemAt": ["$$readers", last] };
    let last = doc! { "$let": { "vars": { "ends": ends }, "in": last } };
    doc! { "$let": { "vars": { "readers": readers }, "in": last } }
}

/// The fields of an exclusive lock, and of those readers that are of these sessions. For one
/// session the server computes nothing.
pub(super) fn fields_for(aids: &[Aid]) -> Document {
    let [aid] = aids else {
        return fields_with("readers", readers_that(is_of(Grant::Reader, aids)));
    };
    let mut fields = exclusive_fields();
    fields.insert("readers", doc! { "$elemMatch": { "aid": aid.as_str() } });
    fields
}
