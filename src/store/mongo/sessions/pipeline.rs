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
//! indexes: expires (TTL, a day later), due, aid, user
//! ```

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};
use uuid::Uuid;

use super::change::{Change, Fact};
use crate::{EndReason, store::mongo::pipeline::millis};

/// A session that can be loaded: by the server's clock, whether or not the TTL monitor has been there.
pub(super) fn live(key: Bson) -> Document {
    doc! {
        "_id": { "$eq": key },
        "ended": { "$exists": false },
        "$expr": { "$gt": ["$expires", "$$NOW"] },
    }
}

/// The same, if it has no more than this time left.
pub(super) fn live_at_most(key: Bson, left: Duration) -> Document {
    let mut filter = live(key);
    filter.insert(
        "$expr",
        doc! { "$and": [
            { "$gt": ["$expires", "$$NOW"] },
            { "$lte": ["$expires", in_future(left)] },
        ] },
    );
    filter
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
    let mut set = doc! { "seen": "$$NOW", "state": state };
    for (field, fact) in [("aid", &change.aid), ("user", &change.user)] {
        match fact {
            Fact::Unchanged => {}
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
    let has_until = doc! { "$eq": [{ "$type": "$until" }, "date"] };
    let slid = in_future(ttl);
    let capped = doc! { "$min": [slid.clone(), "$until"] };
    vec![
        doc! { "$set": { "expires": { "$cond": [has_until, capped, slid] } } },
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

/// A sweep looks at it; for the time of `lease` no other one does.
pub(super) fn take(worker: Uuid, lease: Duration) -> Vec<Document> {
    vec![doc! { "$set": { "by": worker.to_string(), "due": in_future(lease) } }]
}

/// What is left is a note that there was such a session, so that no late request revives it.
pub(super) fn finish() -> Vec<Document> {
    vec![
        doc! { "$set": { "ended": { "$ifNull": ["$ended", "expired"] } } },
        doc! { "$unset": ["due", "by", "state", "aid", "user"] },
    ]
}

pub(super) fn is_due() -> Document {
    doc! { "$expr": { "$lte": ["$due", "$$NOW"] }, "due": { "$type": "date" } }
}

fn in_future(duration: Duration) -> Document {
    doc! { "$add": ["$$NOW", millis(duration)] }
}
