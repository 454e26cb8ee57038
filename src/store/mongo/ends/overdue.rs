//! Finds the work of a sweep: expired locks, unfinished ends, waiting news.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mongodb::bson::{Bson, Document, doc};

use crate::{
    key::{LockId, LockKey},
    lock::{Aid, LockToken},
    store::mongo::{
        codec::{is, millis},
        ends::{Ends, Held, former::traces},
        error::Result,
        grant::{
            Grant, expires, has_expired, is_live_reader, is_reader, is_shared, readers_that,
            some_reader,
        },
        record::aid_in,
        send::rows,
        settle::live_places,
    },
};

/// The work of a sweep.
#[derive(Default)]
pub(super) struct Overdue {
    pub(super) expired: BTreeMap<Aid, Vec<Expired>>,
    pub(super) records: usize,
    /// Collections with records that are no longer needed.
    pub(super) left_over: BTreeSet<String>,
    /// Ends that another worker began but did not finish.
    pub(super) unfinished: Vec<Aid>,
    pub(super) announcements: bool,
    pub(super) next: Option<Duration>,
}

/// An expired grant.
pub(super) struct Expired {
    pub(super) collection: String,
    pub(super) id: Bson,
    pub(super) token: String,
    /// Names the grant and its last renewal.
    pub(super) lease: String,
    pub(super) shared: bool,
    /// False if the grant expired because of its `max_hold`.
    pub(super) idle: bool,
    /// Another session has taken the lock over, and left this trace of the grant.
    pub(super) trace: Option<Bson>,
}

impl Expired {
    fn key(&self) -> Option<LockKey> {
        LockKey::new(self.collection.as_str(), LockId::from_bson(&self.id)?).ok()
    }

    pub(super) fn named(&self) -> Option<Held> {
        Some(Held { key: self.key()?, lease: Some(self.lease.clone()) })
    }

    pub(super) fn key_and_token(&self) -> Option<(LockKey, LockToken)> {
        Some((self.key()?, self.token.parse().ok()?))
    }
}

impl Ends<'_> {
    /// The first query of a sweep, and the only one if nothing is overdue. It returns everything that may
    /// have to be done, and the time of the next sweep. Each part is an index range.
    pub(super) async fn find(&self, limit: usize) -> Result<Overdue> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let ended = self.store.inner.ended.name();
        let mut stages = vec![
            doc! { "$match": self.waits_for("release") },
            doc! { "$limit": limit },
            doc! { "$project": { "_id": 0, "unfinished": "$_id" } },
            doc! { "$unionWith": { "coll": ended, "pipeline": [
                { "$match": self.waits_for(doc! { "$in": ["announce", "tell"] }) },
                { "$limit": 1 },
                { "$project": { "_id": 0, "announcement": "$_id" } },
            ] } },
            doc! { "$unionWith": {
                "coll": ended, "pipeline": traces(ended, self.collections, None, limit),
            } },
        ];
        for collection in self.collections {
            let at = self.call(collection)?;
            let ttl = at.rules.ttl;
            for part in [
                overdue_by_ts(collection, ttl, limit),
                next_by_ts(ttl),
                overdue_by_due(collection, ttl, limit),
                next_by_due(),
            ] {
                stages.push(doc! { "$unionWith": { "coll": at.primary.name(), "pipeline": part } });
            }
        }
        let found = self.store.inner.ended.aggregate(stages).max_time(self.until.read_limit());
        let mut overdue = Overdue::default();
        for row in rows(found).await? {
            overdue.add(&row);
        }
        Ok(overdue)
    }

    // aggregate in each collection returns: the sessions whose expired locks are still on record.
    pub(super) async fn overdue(&self, limit: usize) -> Result<Vec<Aid>> {
        let most = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut aids = BTreeSet::new();
        for collection in self.collections {
            let at = self.call(collection)?;
            for query in [overdue_by_ts, overdue_by_due] {
                let mut stages = query(collection, at.rules.ttl, most);
                stages.push(doc! { "$match": { "gone.idle": true } });
                stages.push(doc! { "$group": { "_id": "$gone.aid" } });
                let found = at.primary.aggregate(stages).max_time(self.until.read_limit());
                aids.extend(rows(found).await?.iter().map(|row| aid_in(row, "_id")));
            }
        }
        Ok(aids.into_iter().take(limit).collect())
    }
}

impl Overdue {
    fn add(&mut self, row: &Document) {
        if let Ok(next) = row.get_i64("next") {
            let next = Duration::from_millis(next.try_into().unwrap_or(0));
            self.next = Some(self.next.map_or(next, |other| other.min(next)));
        }
        if let Ok(collection) = row.get_str("collection") {
            self.add_expired(collection.to_owned(), row);
        } else if row.contains_key("unfinished") {
            self.unfinished.push(aid_in(row, "unfinished"));
        } else if row.contains_key("announcement") {
            self.announcements = true;
        }
    }

    fn add_expired(&mut self, collection: String, row: &Document) {
        self.records += 1;
        let Ok(gone) = row.get_document("gone") else {
            self.left_over.insert(collection);
            return;
        };
        let aid = aid_in(gone, "aid");
        self.expired.entry(aid).or_default().push(Expired::of(collection, row, gone));
    }
}

impl Expired {
    /// `row` is the record or the trace, `gone` the grant.
    pub(super) fn of(collection: String, row: &Document, gone: &Document) -> Self {
        Self {
            collection,
            id: row.get("_id").cloned().unwrap_or(Bson::Null),
            token: gone.get_str("token").unwrap_or_default().to_owned(),
            lease: gone.get_str("lease").unwrap_or_default().to_owned(),
            shared: gone.get_bool("shared").unwrap_or(false),
            idle: gone.get_bool("idle").unwrap_or(true),
            trace: row.get("trace").cloned(),
        }
    }
}

/// Expired exclusive locks that have the ttl of the collection.
fn overdue_by_ts(collection: &str, ttl: Duration, limit: i64) -> Vec<Document> {
    let expired = doc! { "$and": [
        // Uses the ttl configured here, so that the index range has an end. A server with a shorter ttl
        // finds its own locks sooner; a lock with a longer ttl has not expired yet.
        { "$lte": ["$ts", latest(ttl)] },
        { "$not": [is("$due", "date")] },
        exclusive_is_overdue(ttl),
    ] };
    vec![
        doc! { "$match": { "ts": { "$type": "date" }, "$expr": expired } },
        doc! { "$sort": { "ts": 1 } },
        doc! { "$limit": limit },
        doc! { "$project": {
            "collection": { "$literal": collection },
            "gone": gone(Grant::Exclusive),
        } },
    ]
}

/// Overdue entries that `ts` does not show: readers, locks with a short ttl, and records kept for
/// waiters.
fn overdue_by_due(collection: &str, ttl: Duration, limit: i64) -> Vec<Document> {
    let reader_is_overdue = doc! { "$and": [is_reader(), { "$not": [is_live_reader()] }] };
    let nobody_waits = doc! { "$and": [
        is("$ts", "missing"),
        is("$aid", "missing"),
        { "$not": [is_shared()] },
        { "$eq": [live_places(), []] },
    ] };
    let expired = doc! { "$and": [
        { "$lte": ["$due", "$$NOW"] },
        // Skips records that are not ours to handle, so that they do not use up the limit.
        { "$or": [
            exclusive_is_overdue(ttl),
            some_reader(reader_is_overdue.clone()),
            nobody_waits.clone(),
        ] },
    ] };
    let readers = doc! { "$map": {
        "input": readers_that(reader_is_overdue), "as": "r", "in": gone(Grant::Reader),
    } };
    let left = doc! { "$map": {
        "input": readers_that(is_live_reader()),
        "as": "r",
        "in": { "$subtract": [expires(), { "$toLong": "$$NOW" }] },
    } };
    vec![
        doc! { "$match": { "due": { "$type": "date" }, "$expr": expired } },
        doc! { "$sort": { "due": 1 } },
        doc! { "$limit": limit },
        doc! { "$project": {
            "collection": { "$literal": collection },
            "gone": { "$switch": {
                "branches": [
                    { "case": is_shared(), "then": readers },
                    { "case": nobody_waits, "then": [] },
                ],
                "default": [gone(Grant::Exclusive)],
            } },
            // The expiry of the next reader, once these are removed.
            "next": { "$min": left },
        } },
        doc! { "$unwind": { "path": "$gone", "preserveNullAndEmptyArrays": true } },
        doc! { "$limit": limit },
    ]
}

fn exclusive_is_overdue(ttl: Duration) -> Document {
    doc! { "$and": [
        is("$aid", "string"),
        // Foreign programs write no token. Their sessions are not ours to end.
        is("$token", "string"),
        { "$not": [is_shared()] },
        has_expired(Grant::Exclusive, ttl),
    ] }
}

fn gone(grant: Grant) -> Document {
    let mut gone = grant.lease();
    gone.extend(doc! {
        "token": grant.field("token"),
        "shared": { "$literal": grant == Grant::Reader },
        "idle": { "$not": [grant.has_reached_max_hold()] },
    });
    gone
}

fn next_by_ts(ttl: Duration) -> Vec<Document> {
    vec![
        doc! { "$match": { "ts": { "$type": "date" }, "$expr": { "$gt": ["$ts", latest(ttl)] } } },
        doc! { "$sort": { "ts": 1 } },
        doc! { "$limit": 1 },
        // Equals `ts + ttl - now`, and works for any date.
        doc! { "$project": { "_id": 0, "next": { "$subtract": ["$ts", latest(ttl)] } } },
    ]
}

fn next_by_due() -> Vec<Document> {
    vec![
        doc! { "$match": { "due": { "$type": "date" }, "$expr": { "$gt": ["$due", "$$NOW"] } } },
        doc! { "$sort": { "due": 1 } },
        doc! { "$limit": 1 },
        doc! { "$project": { "_id": 0, "next": { "$subtract": ["$due", "$$NOW"] } } },
    ]
}

fn latest(ttl: Duration) -> Document {
    doc! { "$subtract": ["$$NOW", millis(ttl)] }
}
