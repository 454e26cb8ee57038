//! The commands on the collection of web sessions, as pure functions.
//!
//! ```text
//! { _id:     <SHA-256 of the session key>,
//!   aid:     "<the aid that holds its locks>",
//!   user:    "<the user of the session>",
//!   state:   [ { k: "<name>", v: "<JSON>" } ],
//!   created: <Date>, seen: <Date: last written>,
//!   until:   <Date: when it ends at the latest>,
//!   expires: <Date: when it ends unless it is extended>,
//!   due:     <Date: when a sweep must handle it; absent once one has>, by: "<worker>",
//!   ended:   "logged_out" | "expired" | "revoked" }   // then there is no state any more
//! indexes: expires (TTL, a day later), due, by, aid, user
//! ```

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};
use uuid::Uuid;

use crate::{
    ended::EndReason,
    store::mongo::{
        pipeline::millis,
        sessions::change::{Change, Fact},
    },
};

/// A session that can be loaded: by the server's clock, whether or not the TTL monitor has run.
pub(super) fn live(key: Bson) -> Document {
    doc! {
        "_id": { "$eq": key },
        "ended": { "$exists": false },
        "$expr": { "$gt": ["$expires", "$$NOW"] },
    }
}

/// The same, unless its remaining time is between `least` and `most`.
pub(super) fn live_for_other_than(key: Bson, least: Duration, most: Duration) -> Document {
    let mut filter = live(key);
    filter.insert(
        "$expr",
        doc! { "$and": [
            { "$gt": ["$expires", "$$NOW"] },
            { "$or": [
                { "$lte": ["$expires", in_future(least)] },
                { "$gt": ["$expires", in_future(most)] },
            ] },
        ] },
    );
    filter
}

/// A session that can be loaded, with this aid if one is given; or a session that `call` has ended.
pub(super) fn live_or_ended_by(key: Bson, aid: Option<&str>, call: Uuid) -> Document {
    let mut live = live(key.clone());
    if let Some(aid) = aid {
        live.insert("aid", doc! { "$eq": aid });
    }
    let by_call = doc! { "_id": { "$eq": key }, "by": call.to_string() };
    doc! { "$or": [live, by_call] }
}

pub(super) fn create(change: &Change, ttl: Duration, absolute: Option<Duration>) -> Vec<Document> {
    let until = absolute.map_or(Bson::from("$$REMOVE"), |absolute| in_future(absolute).into());
    let mut first = doc! { "created": "$$NOW", "until": until, "state": [] };
    first.extend(doc! { "aid": "$$REMOVE", "user": "$$REMOVE" });
    let mut stages = vec![doc! { "$set": first }];
    stages.extend(update(change, ttl));
    stages
}

/// Sets and removes the entries that this request has changed, and keeps those of other requests.
pub(super) fn update(change: &Change, ttl: Duration) -> Vec<Document> {
    let entries: Vec<_> = change.set.iter().map(|(k, v)| doc! { "k": k, "v": v }).collect();
    let entries = doc! { "$literal": entries };
    let state = if change.replaces {
        entries.into()
    } else {
        let touched: Vec<_> = change.set.keys().chain(&change.removed).collect();
        let touched = doc! { "$in": ["$$this.k", { "$literal": touched }] };
        let before = doc! { "$cond": [{ "$isArray": "$state" }, "$state", []] };
        let others =
            doc! { "$filter": { "input": before, "as": "this", "cond": { "$not": [touched] } } };
        Bson::from(doc! { "$concatArrays": [others, entries] })
    };
    let state = match &change.spare_aid {
        None => state,
        Some((k, v)) => {
            let has_none = doc! { "$eq": [{ "$type": "$aid" }, "missing"] };
            let spare = doc! { "$literal": [{ "k": k, "v": v }] };
            doc! { "$concatArrays": [state, { "$cond": [has_none, spare, []] }] }.into()
        }
    };
    let mut set = doc! { "seen": "$$NOW", "state": state };
    for (field, fact) in [("aid", &change.aid), ("user", &change.user)] {
        match fact {
            Fact::Unchanged => {}
            Fact::IsIfNone(value) => {
                let before = format!("${field}");
                set.insert(field, doc! { "$ifNull": [before, { "$literal": value }] });
            }
            Fact::Is(value) => drop(set.insert(field, doc! { "$literal": value })),
            Fact::Gone => drop(set.insert(field, "$$REMOVE")),
        }
    }
    let mut stages = vec![doc! { "$set": set }];
    stages.extend(extend(ttl));
    stages
}

/// The sliding time-out, up to the absolute one.
pub(super) fn extend(ttl: Duration) -> Vec<Document> {
    let slid = in_future(ttl);
    let capped = doc! { "$min": [slid.clone(), "$until"] };
    vec![
        doc! { "$set": { "expires": { "$cond": [has_until(), capped, slid] } } },
        doc! { "$set": { "due": "$expires" } },
    ]
}

/// The session can no longer be loaded. Its locks are to be released after `grace`.
pub(super) fn end(reason: EndReason, grace: Duration) -> Vec<Document> {
    vec![
        doc! { "$set": {
            "ended": reason.as_str(), "expires": "$$NOW", "due": in_future(grace),
        } },
        doc! { "$unset": "state" },
    ]
}

/// The same, and notes the call that ended it.
pub(super) fn end_by(reason: EndReason, grace: Duration, call: Uuid) -> Vec<Document> {
    let mut stages = end(reason, grace);
    stages.push(doc! { "$set": { "by": call.to_string() } });
    stages
}

/// Stops a request that is about to save a session of this aid, because the session is being given
/// another key.
pub(super) fn note_of_revocation() -> Vec<Document> {
    vec![doc! { "$set": { "ended": EndReason::Revoked.as_str(), "expires": "$$NOW" } }]
}

/// Reserves the session for one sweep, for the time of `lease`.
pub(super) fn take(call: Uuid, lease: Duration) -> Vec<Document> {
    vec![doc! { "$set": { "by": call.to_string(), "due": in_future(lease) } }]
}

/// Leaves only a note that the session existed, so that no late request revives it.
pub(super) fn finish() -> Vec<Document> {
    vec![
        doc! { "$set": { "ended": { "$ifNull": ["$ended", "expired"] } } },
        doc! { "$unset": ["due", "by", "state", "aid", "user"] },
    ]
}

/// A live session is never due, whatever its record says: a primary whose clock was ahead may have
/// taken it for ended, and it may have been extended since. A session that `call` has taken is still
/// due for that call.
pub(super) fn is_due(call: Uuid) -> Document {
    let is_over = doc! { "$or": [
        { "$ne": [{ "$type": "$ended" }, "missing"] },
        { "$not": [{ "$gt": ["$expires", "$$NOW"] }] },
    ] };
    doc! { "$or": [
        {
            "due": { "$type": "date" },
            "$expr": { "$and": [{ "$lte": ["$due", "$$NOW"] }, is_over] },
        },
        { "by": call.to_string() },
    ] }
}

/// The rest of the absolute time-out, for the session with the next key. A duration, so that no date
/// travels through a client.
pub(super) fn absolute_left() -> Document {
    let left = doc! { "$subtract": ["$until", "$$NOW"] };
    doc! { "_id": 0, "left": { "$cond": [has_until(), left, "$$REMOVE"] } }
}

fn has_until() -> Document {
    doc! { "$eq": [{ "$type": "$until" }, "date"] }
}

fn in_future(duration: Duration) -> Document {
    /// Beyond this the result is no valid date.
    const LONGEST: Duration = Duration::from_secs(1000 * 365 * 24 * 60 * 60);
    doc! { "$add": ["$$NOW", millis(duration.min(LONGEST))] }
}
