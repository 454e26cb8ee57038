//! Finds the work of a sweep: expired locks, unfinished ends, waiting news.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use mongodb::bson::{Bson, Document, doc};

use crate::{
    lock::Aid,
    store::mongo::{
        codec::{aid_in, is, millis},
        ends::{Ends, end, names::Expired, takeover, trace},
        error::Result,
        filters::{is_live, nothing_held},
        read::{Fetched, all_fields},
        send::{Timing, rows},
    },
};

/// The work of a sweep.
#[derive(Default)]
pub(super) struct Overdue {
    pub(super) expired: BTreeMap<Aid, Vec<Expired>>,
    /// The number of expired grants, traces and left-over records. A sweep takes no more grants than the limit: the other
    /// readers of a record come with the next sweep.
    pub(super) records: usize,
    limit: usize,
    /// Records that are no longer needed, by their collections.
    pub(super) left_over: BTreeMap<String, Vec<Bson>>,
    /// Ends that another worker began but did not finish.
    pub(super) unfinished: Vec<Aid>,
    pub(super) announcements: bool,
    pub(super) next: Option<Duration>,
}

impl Ends<'_> {
    /// The first query of a sweep, and the only one if nothing is overdue. It returns everything that may
    /// have to be done, and the time of the next sweep. Each part is an index range.
    pub(super) async fn find(&self, limit: usize) -> Result<Overdue> {
        let most = i64::try_from(limit).unwrap_or(i64::MAX);
        let ended = self.store.inner.ended.name();
        let mut stages = vec![
            doc! { "$match": self.waits_for(end::RELEASE) },
            doc! { "$limit": most },
            doc! { "$project": { "_id": 0, "unfinished": "$_id" } },
            doc! { "$unionWith": { "coll": ended, "pipeline": [
                { "$match": self.waits_for(doc! { "$in": [end::ANNOUNCE, takeover::TELL] }) },
                { "$limit": 1 },
                { "$project": { "_id": 0, "announcement": "$_id" } },
            ] } },
            doc! { "$unionWith": {
                "coll": ended, "pipeline": trace::unseen(ended, self.collections, None, most),
            } },
        ];
        for collection in self.collections {
            let at = self.prepared(collection)?;
            let ttl = at.rules.ttl;
            for part in [
                overdue_by_ts(collection, ttl, most),
                next_by_ts(ttl),
                overdue_by_due(collection, ttl, most),
                next_by_due(),
            ] {
                stages.push(doc! { "$unionWith": { "coll": at.primary.name(), "pipeline": part } });
            }
        }
        let asked = Instant::now();
        let found = self.store.inner.ended.aggregate(stages).max_time(self.until.read_limit());
        let mut overdue = Overdue { limit, ..Overdue::default() };
        for row in rows(found).await? {
            match row.get_str("records") {
                Ok(collection) => {
                    let fetched = self.prepared(collection)?.fetched(&row, asked);
                    fetched.into_iter().for_each(|it| overdue.add_record(it));
                }
                Err(_) => overdue.add(&row),
            }
        }
        Ok(overdue)
    }
}

impl Overdue {
    fn comes_next_in(&mut self, next: Duration) {
        self.next = Some(self.next.map_or(next, |other| other.min(next)));
    }

    /// Adds a row that is no record of a lock.
    fn add(&mut self, row: &Document) {
        if let Ok(next) = row.get_i64("next") {
            self.comes_next_in(Duration::from_millis(next.try_into().unwrap_or(0)));
        }
        if let (Ok(collection), Ok(gone)) = (row.get_str("collection"), row.get_document("gone")) {
            self.records += 1;
            let expired = Expired::of(collection.to_owned(), row, gone);
            self.expired.entry(aid_in(gone, "aid")).or_default().push(expired);
        } else if row.contains_key("unfinished") {
            self.unfinished.push(aid_in(row, "unfinished"));
        } else if row.contains_key("announcement") {
            self.announcements = true;
        }
    }

    fn add_record(&mut self, Fetched { key, record, moment }: Fetched) {
        let (live, expired): (Vec<_>, Vec<_>) =
            record.grants.iter().partition(|it| it.is_live(moment.now));
        if record.grants.is_empty() && record.queue.iter().all(|it| it.until <= moment.now) {
            self.records += 1;
            let left_over = self.left_over.entry(key.collection().to_owned()).or_default();
            left_over.push(key.id().into());
        }
        if let Some(first) = live.iter().map(|it| it.expires()).min() {
            self.comes_next_in(first - moment.now);
        }
        for grant in expired {
            if self.records >= self.limit {
                return;
            }
            if let Some(expired) = Expired::of_grant(&key, grant) {
                self.records += 1;
                self.expired.entry(grant.aid.clone()).or_default().push(expired);
            }
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
        { "$not": [is_live(ttl)] },
        // Foreign programs write no token. Their locks must not use up the limit.
        is("$aid", "string"),
        { "$not": [is("$readers", "array")] },
    ] };
    let expired = doc! { "ts": { "$type": "date" }, "token": a_token(), "$expr": expired };
    records(expired, "ts", collection, limit)
}

/// Overdue entries that `ts` does not show: readers, locks with a short ttl, and records kept for
/// waiters.
fn overdue_by_due(collection: &str, ttl: Duration, limit: i64) -> Vec<Document> {
    let expired = doc! { "$and": [
        { "$lte": ["$due", "$$NOW"] },
        { "$or": [is("$readers", "array"), { "$not": [is_live(ttl)] }] },
    ] };
    let is_ours =
        [doc! { "token": a_token() }, doc! { "readers.token": a_token() }, nothing_held()];
    let due = doc! {
        "due": { "$type": "date" }, "$expr": expired, "$or": is_ours.to_vec(),
    };
    records(due, "due", collection, limit)
}

/// Matches the token of a lock of this crate.
fn a_token() -> Document {
    doc! { "$regex": "^[0-9a-f-]{36}$" }
}

fn records(overdue: Document, by: &str, collection: &str, limit: i64) -> Vec<Document> {
    let mut fields = all_fields();
    fields.insert("records", doc! { "$literal": collection });
    vec![
        doc! { "$match": overdue },
        doc! { "$sort": { by: 1 } },
        doc! { "$limit": limit },
        doc! { "$project": fields },
    ]
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
