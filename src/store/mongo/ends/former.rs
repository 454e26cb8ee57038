//! The trace of an expired lock that another session has replaced. From this trace in `doclock.ended`
//! a reaper learns that the former holder may be idle.
//!
//! A trace is kept for as long as an end is remembered, even after its step is done, so that a repeated
//! replacement does not create it a second time.
//!
//! A sweep may find the expired lock at the same moment, and announce its session before the trace is
//! written. Therefore an end keeps the `leases` that it named, and their traces are not announced again. Who names the
//! locks of a session reads the records first and the traces second: a lock that is not on record any more has a trace
//! by then.

use mongodb::bson::{Bson, Document, doc};
use uuid::Uuid;

use crate::{
    key::LockKey,
    lock::Aid,
    store::mongo::{LockCollection, codec::is, error::Result, send::Write},
};

const LOOK: &str = "look";

impl LockCollection<'_> {
    // update, with an upsert for each trace → created; or found, and left as it is. This happens before the
    // replacement: if the process dies in between, the reaper finds both the trace and the expired lock.
    pub(in crate::store::mongo) async fn leave_to_reaper(
        &self,
        key: &LockKey,
        former: &[(Aid, String)],
    ) -> Result<()> {
        let traces = former.iter().map(|(aid, lease)| trace(key, aid, lease)).collect();
        self.store.ends(&[], Uuid::nil(), self.until).update_each(traces).await
    }
}

fn trace(key: &LockKey, aid: &Aid, lease: &str) -> Document {
    let trace = doc! {
        "_id": "$_id",
        "ts": "$$NOW",
        "step": LOOK,
        "aid": { "$literal": aid.as_str() },
        "c": { "$literal": key.collection() },
        "id": { "$literal": Bson::from(key.id()) },
        "lease": { "$literal": lease },
    };
    let once = doc! { "$replaceWith": { "$cond": [is("$ts", "missing"), trace, "$$ROOT"] } };
    doc! { "q": { "_id": { "$eq": format!("former/{lease}") } }, "u": [once], "upsert": true }
}

/// The unseen traces of locks in these collections; only of these sessions, if any are given. `ended` is the collection
/// of the traces and the ends.
pub(super) fn traces(
    ended: &str,
    collections: &[&str],
    of: Option<&[Aid]>,
    limit: i64,
) -> Vec<Document> {
    let named = doc! { "$let": {
        "vars": { "named": { "$arrayElemAt": ["$end.leases", 0] } },
        "in": { "$cond": [{ "$isArray": "$$named" }, "$$named", []] },
    } };
    let mut waits =
        doc! { "step": LOOK, "_id": { "$type": "string" }, "c": { "$in": collections } };
    if let Some(aids) = of {
        waits.insert("aid", doc! { "$in": aids.iter().map(Aid::as_str).collect::<Vec<_>>() });
    }
    vec![
        doc! { "$match": waits },
        doc! { "$limit": limit },
        doc! { "$lookup": {
            "from": ended, "localField": "aid", "foreignField": "_id", "as": "end",
        } },
        doc! { "$project": {
            "_id": "$id", "trace": "$_id", "collection": "$c", "gone": {
                "aid": "$aid",
                "lease": "$lease",
                "token": { "$arrayElemAt": [{ "$split": ["$lease", "/"] }, 0] },
                "shared": { "$literal": false },
                "idle": { "$not": [{ "$in": ["$lease", named] }] },
            },
        } },
    ]
}

/// Marks a trace as seen.
pub(super) fn seen() -> Write {
    Write::Update(vec![doc! { "$unset": "step" }])
}
