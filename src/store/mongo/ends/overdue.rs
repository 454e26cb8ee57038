//! The queries of a sweep, as pure functions.

use std::time::Duration;

use mongodb::bson::{Document, doc};
use uuid::Uuid;

use crate::{
    lock::Aid,
    store::mongo::{
        ends::{former::traces, pipeline::waits_for},
        pipeline::{
            Grant, has_run_out, held_by, is_live_reader, is_of, is_reader, is_shared, millis,
            no_live_place, of_sessions, readers_that, runs_out, some_reader,
        },
    },
};

/// The first query of a sweep, and the only one if nothing is overdue. It returns everything that may
/// have to be done, and the time of the next sweep. Each part is an index range. `ended` is the
/// collection that the query is sent to.
pub(super) fn overdue(
    ended: &str,
    collections: &[(String, String, Duration)],
    worker: Uuid,
    limit: i64,
) -> Vec<Document> {
    let names: Vec<_> = collections.iter().map(|(name, ..)| name.as_str()).collect();
    let mut stages = vec![
        doc! { "$match": waits_for("release", worker) },
        doc! { "$limit": limit },
        doc! { "$project": { "_id": 0, "unfinished": "$_id" } },
        doc! { "$unionWith": { "coll": ended, "pipeline": [
            { "$match": waits_for(doc! { "$in": ["announce", "tell"] }, worker) },
            { "$limit": 1 },
            { "$project": { "_id": 0, "announcement": "$_id" } },
        ] } },
        doc! { "$unionWith": { "coll": ended, "pipeline": traces(ended, &names, limit) } },
    ];
    for (collection, locks, ttl) in collections {
        for part in [
            overdue_by_ts(collection, *ttl, limit),
            next_by_ts(*ttl),
            overdue_by_due(collection, *ttl, limit),
            next_by_due(),
        ] {
            stages.push(doc! { "$unionWith": { "coll": locks.as_str(), "pipeline": part } });
        }
    }
    stages
}

/// The sessions with expired locks, in two queries.
pub(super) fn sessions(collection: &str, ttl: Duration, limit: i64) -> [Vec<Document>; 2] {
    [overdue_by_ts, overdue_by_due].map(|query| {
        let mut stages = query(collection, ttl, limit);
        stages.push(doc! { "$match": { "gone.by_silence": true } });
        stages.push(doc! { "$group": { "_id": "$gone.aid" } });
        stages
    })
}

/// Expired exclusive locks that have the ttl of the collection.
fn overdue_by_ts(collection: &str, ttl: Duration, limit: i64) -> Vec<Document> {
    let run_out = doc! { "$and": [
        // Uses the ttl configured here, so that the index range has an end. A server with a shorter ttl
        // finds its own locks sooner; a lock with a longer ttl has not expired yet.
        { "$lte": ["$ts", latest(ttl)] },
        { "$ne": [{ "$type": "$due" }, "date"] },
        exclusive_is_overdue(ttl),
    ] };
    vec![
        doc! { "$match": { "ts": { "$type": "date" }, "$expr": run_out } },
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
        { "$eq": [{ "$type": "$ts" }, "missing"] },
        { "$eq": [{ "$type": "$aid" }, "missing"] },
        { "$not": [is_shared()] },
        no_live_place(),
    ] };
    let run_out = doc! { "$and": [
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
        "in": { "$subtract": [runs_out(), { "$toLong": "$$NOW" }] },
    } };
    vec![
        doc! { "$match": { "due": { "$type": "date" }, "$expr": run_out } },
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
        { "$eq": [{ "$type": "$aid" }, "string"] },
        // Foreign programs write no token. Their sessions are not ours to end.
        { "$eq": [{ "$type": "$token" }, "string"] },
        { "$not": [is_shared()] },
        has_run_out(Grant::Exclusive, ttl),
    ] }
}

fn gone(grant: Grant) -> Document {
    doc! {
        "aid": grant.field("aid"),
        "token": grant.field("token"),
        "shared": { "$literal": grant == Grant::Reader },
        "by_silence": { "$not": [grant.has_reached_max_hold()] },
    }
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

/// The sessions among these that hold a live lock.
pub(super) fn awake(aids: &[Aid], ttl: Duration) -> Vec<Document> {
    let live = doc! { "$and": [is_of(Grant::Reader, aids), is_live_reader()] };
    vec![
        doc! { "$match": held_by(aids, ttl) },
        doc! { "$project": { "_id": 0, "aid": holders(live) } },
        doc! { "$unwind": "$aid" },
        doc! { "$group": { "_id": "$aid" } },
    ]
}

/// The expired locks of these sessions.
pub(super) fn run_out_of(aids: &[Aid], ttl: Duration) -> Document {
    let mut filter = of_sessions(aids);
    filter.insert(
        "$expr",
        doc! { "$cond": [
            is_shared(), some_reader(is_run_out_of(aids)), has_run_out(Grant::Exclusive, ttl),
        ] },
    );
    filter
}

/// The leases of those locks.
pub(super) fn run_out_fields(aids: &[Aid]) -> Document {
    let readers = readers_that(is_run_out_of(aids));
    let of = |grant: Grant| {
        let mut lease = grant.lease();
        lease.insert("holder", grant.field("holder"));
        lease
    };
    let readers = doc! { "$map": { "input": readers, "as": "r", "in": of(Grant::Reader) } };
    let leases = doc! { "$cond": [is_shared(), readers, [of(Grant::Exclusive)]] };
    doc! { "leases": leases, "shared": is_shared() }
}

fn is_run_out_of(aids: &[Aid]) -> Document {
    doc! { "$and": [is_of(Grant::Reader, aids), { "$not": [is_live_reader()] }] }
}

fn holders(that: Document) -> Document {
    let readers = doc! { "$map": { "input": readers_that(that), "as": "r", "in": "$$r.aid" } };
    doc! { "$cond": [is_shared(), readers, ["$aid"]] }
}
