//! The commands on the collection of web sessions, as pure functions.
//!
//! ```text
//! { _id:     <SHA-256 of the session key>,
//!   aid:     "<who holds its locks>",
//!   user:    "<whose session it is>",
//!   state:   [ { k: "<name>", v: "<JSON>" } ],
//!   created: <Date>, seen: <Date: last written>,
//!   until:   <Date: when it ends at the latest>,
//!   expires: <Date: when it ends unless it is extended>,
//!   due:     <Date: when a sweep has to look at it; absent once one has>, by: "<worker>",
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

/// A session that can be loaded: by the server's clock, whether or not the TTL monitor has been there.
pub(super) fn live(key: Bson) -> Document {
    doc! {
        "_id": { "$eq": key },
        "ended": { "$exists": false },
        "$expr": { "$gt": ["$expires", "$$NOW"] },
    }
}

/// The same, unless the time that it has left is between the two.
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

/// A session that can be loaded, of this aid if one is given; or one that `call` has ended.
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

/// Sets and removes the entries that the request has changed, and leaves those of other requests.
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

/// Sliding time-out, up to the absolute one.
pub(super) fn extend(ttl: Duration) -> Vec<Document> {
    let slid = in_future(ttl);
    let capped = doc! { "$min": [slid.clone(), "$until"] };
    vec![
        doc! { "$set": { "expires": { "$cond": [has_until(), capped, slid] } } },
        doc! { "$set": { "due": "$expires" } },
    ]
}

/// Not loadable any more. What it held is to be released after `grace`.
pub(super) fn end(reason: EndReason, grace: Duration) -> Vec<Document> {
    vec![
        doc! { "$set": {
            "ended": reason.as_str(), "expires": "$$NOW", "due": in_future(grace),
        } },
        doc! { "$unset": "state" },
    ]
}

/// The same, with who has done it.
pub(super) fn end_by(reason: EndReason, grace: Duration, call: Uuid) -> Vec<Document> {
    let mut stages = end(reason, grace);
    stages.push(doc! { "$set": { "by": call.to_string() } });
    stages
}

/// For whoever saves a session of this aid from now on, because it is just given another key.
pub(super) fn note_of_revocation() -> Vec<Document> {
    vec![doc! { "$set": { "ended": EndReason::Revoked.as_str(), "expires": "$$NOW" } }]
}

/// A sweep looks at it; for the time of `lease` no other one does.
pub(super) fn take(call: Uuid, lease: Duration) -> Vec<Document> {
    vec![doc! { "$set": { "by": call.to_string(), "due": in_future(lease) } }]
}

/// What is left is a note that there was such a session, so that no late request revives it.
pub(super) fn finish() -> Vec<Document> {
    vec![
        doc! { "$set": { "ended": { "$ifNull": ["$ended", "expired"] } } },
        doc! { "$unset": ["due", "by", "state", "aid", "user"] },
    ]
}

/// A live one is not, whatever it says: it may have been seen as over by a primary whose clock was
/// ahead, and extended since. One that `call` has taken is, still.
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

/// How much of the absolute time-out is left, for the session with the next key. As a duration, so that
/// no date makes its way through a client.
pub(super) fn absolute_left() -> Document {
    let left = doc! { "$subtract": ["$until", "$$NOW"] };
    doc! { "_id": 0, "left": { "$cond": [has_until(), left, "$$REMOVE"] } }
}

fn has_until() -> Document {
    doc! { "$eq": [{ "$type": "$until" }, "date"] }
}

fn in_future(duration: Duration) -> Document {
    /// What comes after is not a date any more.
    const LONGEST: Duration = Duration::from_secs(1000 * 365 * 24 * 60 * 60);
    doc! { "$add": ["$$NOW", millis(duration.min(LONGEST))] }
}
