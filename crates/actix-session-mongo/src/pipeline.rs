//! The commands on the collection of web sessions, as pure functions.
//!
//! ```text
//! { _id:     <SHA-256 of the session key>,
//!   aid:     "<the id by which the application knows the session>",
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
    change::{Change, Fact, Whose},
    end::EndReason,
};

/// The sessions with this value in this field that can be loaded: by the server's clock, whether or not the TTL monitor
/// has run.
pub(crate) fn live(field: &str, value: impl Into<Bson>) -> Document {
    doc! {
        field: { "$eq": value.into() },
        "ended": { "$exists": false },
        "$expr": { "$gt": ["$expires", "$$NOW"] },
    }
}

/// This session, if it can be loaded: another request may have cleared it since, or logged somebody else in. Its state tells:
/// `aid` is only there if the session was saved by a store that has named it.
pub(crate) fn live_of(whose: Option<&Whose>, key: Bson) -> Document {
    let mut live = live("_id", key);
    if let Some(Whose { entry, ids }) = whose {
        let has = |id: &Option<String>| match id {
            Some(id) => doc! { "state": { "$elemMatch": { "k": entry, "v": id } } },
            // Or the visitor has got one, without a login.
            None => {
                doc! { "$or": [{ "state.k": { "$ne": entry } }, { "user": { "$exists": false } }] }
            }
        };
        live.insert("$or", ids.iter().map(has).collect::<Vec<_>>());
    }
    live
}

/// The same, or the session that `call` has ended.
pub(crate) fn live_or_ended_by(whose: Option<&Whose>, key: Bson, call: Uuid) -> Document {
    let by_call = doc! { "_id": { "$eq": key.clone() }, "by": call.to_string() };
    doc! { "$or": [live_of(whose, key), by_call] }
}

pub(crate) fn create(change: &Change, ttl: Duration, absolute: Option<Duration>) -> Vec<Document> {
    let until = absolute.map_or(Bson::from("$$REMOVE"), |absolute| in_future(absolute).into());
    let gone = "$$REMOVE";
    let first = doc! { "created": "$$NOW", "until": until, "state": [], "aid": gone, "user": gone };
    let mut stages = vec![doc! { "$set": first }];
    stages.extend(update(change, ttl));
    stages
}

/// Sets and removes the entries that this request has changed, and keeps those of other requests.
pub(crate) fn update(change: &Change, ttl: Duration) -> Vec<Document> {
    let entries: Vec<_> = change.set.iter().map(|(k, v)| doc! { "k": k, "v": v }).collect();
    let entries = doc! { "$literal": entries };
    let state = if change.replaces {
        Bson::from(entries)
    } else {
        let touched: Vec<_> = change.set.keys().chain(&change.removed).collect();
        let touched = doc! { "$in": ["$$this.k", { "$literal": touched }] };
        let before = doc! { "$cond": [{ "$isArray": "$state" }, "$state", []] };
        let others =
            doc! { "$filter": { "input": before, "as": "this", "cond": { "$not": [touched] } } };
        doc! { "$concatArrays": [others, entries] }.into()
    };
    let mut set = doc! { "seen": "$$NOW", "state": state };
    for (field, fact) in [("aid", &change.id), ("user", &change.user)] {
        match fact {
            Fact::Unchanged => {}
            Fact::Is(value) => drop(set.insert(field, doc! { "$literal": value })),
            Fact::Gone => drop(set.insert(field, "$$REMOVE")),
        }
    }
    let mut stages = vec![doc! { "$set": set }];
    stages.extend(extend(ttl, ttl));
    stages
}

/// The sliding time-out, up to the absolute one. Changes nothing while at least `least` is left, and at most `ttl`.
pub(crate) fn extend(least: Duration, ttl: Duration) -> Vec<Document> {
    let slid = in_future(ttl);
    let is_due = doc! { "$lte": ["$expires", in_future(least)] };
    let is_too_late = doc! { "$gt": ["$expires", slid.clone()] };
    let capped = doc! { "$cond": [has_until(), { "$min": [slid.clone(), "$until"] }, slid] };
    let expires = doc! { "$cond": [{ "$or": [is_due, is_too_late] }, capped, "$expires"] };
    vec![doc! { "$set": { "expires": expires } }, doc! { "$set": { "due": "$expires" } }]
}

/// The session can no longer be loaded. Its end is due after `grace`. `by` recognises the call that has ended it.
pub(crate) fn end(reason: EndReason, grace: Duration, by: Option<Uuid>) -> Vec<Document> {
    let by = by.map_or(Bson::from("$by"), |call| call.to_string().into());
    let ended =
        doc! { "ended": reason.as_str(), "expires": "$$NOW", "due": in_future(grace), "by": by };
    vec![doc! { "$set": ended }, doc! { "$unset": "state" }]
}

/// The end of the session of this id.
pub(crate) fn logged_out(id: Option<&str>, grace: Duration, by: Option<Uuid>) -> Vec<Document> {
    let named = id.map(|id| doc! { "$set": { "aid": { "$literal": id } } });
    named.into_iter().chain(end(EndReason::LoggedOut, grace, by)).collect()
}

/// The end of a session whose record another one goes on in.
pub(crate) fn replaced(id: &str, grace: Duration) -> Vec<Document> {
    let mut stages = logged_out(Some(id), grace, None);
    // A sweep that has taken an earlier note does not finish this one.
    stages.push(doc! { "$unset": "by" });
    stages
}

/// Stops a request that is about to save a session of this id, because the session is being given
/// another key.
pub(crate) fn note_of_revocation() -> Vec<Document> {
    vec![doc! { "$set": { "ended": EndReason::Revoked.as_str(), "expires": "$$NOW" } }]
}

/// Reserves the session for one sweep, for the time of `lease`.
pub(crate) fn take(call: Uuid, lease: Duration) -> Vec<Document> {
    vec![doc! { "$set": { "by": call.to_string(), "due": in_future(lease) } }]
}

/// Leaves only a note that the session existed, so that no late request revives it.
pub(crate) fn finish() -> Vec<Document> {
    vec![
        doc! { "$set": { "ended": { "$ifNull": ["$ended", "expired"] } } },
        doc! { "$unset": ["due", "by", "state", "aid", "user"] },
    ]
}

/// A live session is never due, whatever its record says: a primary whose clock was ahead may have
/// taken it for ended, and it may have been extended since. A session that `call` has taken is still
/// due for that call.
pub(crate) fn is_due(call: Uuid) -> Document {
    doc! { "$or": [
        {
            "due": { "$type": "date" },
            "$expr": { "$and": [{ "$lte": ["$due", "$$NOW"] }, is_over()] },
        },
        { "by": call.to_string() },
    ] }
}

/// The sessions of this list that a sweep has taken, and that have not turned out to be live since.
pub(crate) fn taken_and_over(records: &[Bson]) -> Document {
    doc! { "_id": { "$in": records }, "by": { "$exists": true }, "$expr": is_over() }
}

fn is_over() -> Document {
    doc! { "$or": [
        { "$ne": [{ "$type": "$ended" }, "missing"] },
        { "$not": [{ "$gt": ["$expires", "$$NOW"] }] },
    ] }
}

/// The state of a session, and the time that it has left, as a duration.
pub(crate) fn state_and_rest() -> Document {
    let is_date = doc! { "$eq": [{ "$type": "$expires" }, "date"] };
    let left = doc! { "$subtract": ["$expires", "$$NOW"] };
    doc! { "_id": 0, "state": 1, "left": { "$cond": [is_date, left, "$$REMOVE"] } }
}

/// The rest of the absolute time-out, for the session with the next key. A duration, so that no date
/// travels through a client.
pub(crate) fn absolute_left() -> Document {
    let left = doc! { "$subtract": ["$until", "$$NOW"] };
    doc! { "_id": 0, "left": { "$cond": [has_until(), left, "$$REMOVE"] } }
}

fn has_until() -> Document {
    doc! { "$eq": [{ "$type": "$until" }, "date"] }
}

fn in_future(duration: Duration) -> Document {
    /// Beyond this the result is no valid date.
    const LONGEST: Duration = Duration::from_secs(1000 * 365 * 24 * 60 * 60);
    let millis = duration.min(LONGEST).as_millis();
    doc! { "$add": ["$$NOW", i64::try_from(millis).unwrap_or(i64::MAX)] }
}
