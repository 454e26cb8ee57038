//! The commands' filters and updates, as pure functions.
//!
//! Two rules keep strings of users from being read as operators: a filter says `{field: {$eq: …}}`,
//! a pipeline says `{$literal: …}`.

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use crate::{Aid, LockId, LockToken, store::Claim};

/// The record with this `_id`. Nothing else may stand in the filter of an upsert: the server
/// refuses `$expr` there, and only for plain equality on `_id` it retries a duplicate key itself.
pub(super) fn by_id(id: &LockId) -> Document {
    doc! { "_id": { "$eq": Bson::from(id) } }
}

/// This acquisition, whether it has run out or not.
pub(super) fn acquisition(id: &LockId, aid: &Aid, token: LockToken) -> Document {
    doc! {
        "_id": { "$eq": Bson::from(id) },
        "aid": { "$eq": aid.as_str() },
        "token": { "$eq": token.to_string() },
    }
}

/// This acquisition, unless another request was told that the session has it.
pub(super) fn unshared(id: &LockId, aid: &Aid, token: LockToken) -> Document {
    let mut filter = acquisition(id, aid, token);
    filter.insert("again", doc! { "$exists": false });
    filter
}

/// All records of these sessions.
pub(super) fn of_sessions(aids: &[Aid]) -> Document {
    let aids: Vec<_> = aids.iter().map(Aid::as_str).collect();
    doc! { "aid": { "$in": aids } }
}

/// All records of the session.
pub(super) fn of_session(aid: &Aid) -> Document {
    doc! { "aid": { "$eq": aid.as_str() } }
}

/// Narrows `filter` to locks that have not run out.
pub(super) fn and_live(mut filter: Document, foreign_ttl: Duration) -> Document {
    filter.insert("$expr", live(foreign_ttl));
    filter
}

/// `ts + ttl > now`, on the server's clock, with the ttl of the record.
///
/// Written as `ttl > now - ts`, because a sum with a number that somebody else wrote can overflow,
/// and an error here would make the document unlockable for good; nor is a date before 1970 taken
/// at its word, for the difference can overflow, too. A record without a ttl is a
/// foreign one and has the collection's; one without a date is dead, as it is for the TTL index.
fn live(foreign_ttl: Duration) -> Document {
    doc! { "$and": [
        { "$eq": [{ "$type": "$ts" }, "date"] },
        { "$gt": [
            { "$cond": [{ "$isNumber": "$ttl" }, "$ttl", millis(foreign_ttl)] },
            { "$subtract": ["$$NOW", { "$max": ["$ts", { "$toDate": 0_i64 }] }] },
        ] },
    ] }
}

/// For records that have run out, and so count as absent.
pub(super) fn run_out(foreign_ttl: Duration) -> Document {
    doc! { "$not": [live(foreign_ttl)] }
}

/// `ttl`, or what is left until the end of `max_hold` if that is less.
fn capped(ttl: impl Into<Bson>) -> Document {
    let ttl = ttl.into();
    let left = doc! { "$subtract": [{ "$max": ["$until", "$$NOW"] }, "$$NOW"] };
    doc! { "$cond": [has_max_hold(), { "$min": [ttl.clone(), left] }, ttl] }
}

fn has_max_hold() -> Document {
    doc! { "$eq": [{ "$type": "$until" }, "date"] }
}

/// Whether the last renewal could not give the whole ttl any more.
pub(super) fn has_reached_max_hold() -> Document {
    let after_1970 = |date: &str| doc! { "$max": [date, { "$toDate": 0_i64 }] };
    doc! { "$and": [
        has_max_hold(),
        { "$gte": ["$ttl", { "$subtract": [after_1970("$until"), after_1970("$ts")] }] },
    ] }
}

/// Takes the lock if the record is absent or has run out, renews it if it is the session's own,
/// and leaves it as it is (no write, no change event) if it is somebody else's.
///
/// After the shape of DistributedLock's `MongoDistributedLock`: one upsert by `_id`, on server time.
pub(super) fn acquire(claim: &Claim, foreign_ttl: Duration) -> Vec<Document> {
    let literal = |s: &str| doc! { "$literal": s };
    let aid = literal(claim.aid.as_str());
    let token = literal(&claim.token.to_string());
    let holder = doc! { "label": literal(&claim.holder.label) };
    let ttl = millis(claim.ttl);
    let granted = granted(claim);
    vec![doc! { "$replaceWith": { "$switch": {
        "branches": [
            {
                "case": { "$and": [live(foreign_ttl), { "$ne": ["$aid", aid] }] },
                "then": "$$ROOT",
            },
            {
                "case": live(foreign_ttl),
                "then": { "$mergeObjects": [
                    "$$ROOT",
                    { "ts": "$$NOW", "ttl": capped(ttl), "holder": holder },
                    // Not for a repetition whose first reply was lost.
                    { "$cond": [{ "$eq": ["$token", token] }, {}, { "again": true }] },
                ] },
            },
        ],
        // A new document and not a merge: nothing of an earlier holder stays.
        "default": granted,
    } } }]
}

/// Starts the lease anew.
pub(super) fn renew() -> Vec<Document> {
    vec![doc! { "$set": renewed() }]
}

/// The same for a save, which tells a request that it holds the lock.
pub(super) fn renew_for_save() -> Vec<Document> {
    let mut renewed = renewed();
    renewed.insert("again", true);
    vec![doc! { "$set": renewed }]
}

/// The record of a foreign program has no ttl of its own, and gets none.
fn renewed() -> Document {
    doc! {
        "ts": "$$NOW",
        "ttl": { "$cond": [has_max_hold(), capped("$ttl"), { "$ifNull": ["$ttl", "$$REMOVE"] }] },
    }
}

/// The fields that make up a lock, and `now` to tell how long it lives.
pub(super) fn lock_fields() -> Document {
    doc! {
        "ts": 1, "ttl": 1, "aid": 1, "token": 1, "since": 1, "holder": 1, "now": "$$NOW",
    }
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn granted(claim: &Claim) -> Document {
    let literal = |s: &str| doc! { "$literal": s };
    let ttl = millis(claim.ttl);
    doc! {
        "_id": "$_id",
        "ts": "$$NOW", "ttl": ttl,
        "aid": literal(claim.aid.as_str()), "token": literal(&claim.token.to_string()), "since": "$$NOW",
        "holder": { "label": literal(&claim.holder.label) },
    }
}
pub(super) fn hand_over(claim: &Claim) -> Vec<Document> {
    vec![doc! { "$replaceWith": granted(claim) }]
}
