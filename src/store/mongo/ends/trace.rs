//! The record of an expired lock that another session has replaced: a trace, from which a reaper learns that the former
//! holder may be idle.
//!
//! ```text
//! { _id:   "former/<lease>",
//!   ts:    <Date: when the trace was left>,
//!   step:  "look",                  // absent when a reaper has looked
//!   aid:   "<the former holder>",
//!   c: "<collection>", id: <_id>,   // the document that was locked
//!   lease: "<token>/<ms of its last renewal>" }
//! ```
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
    lock::{Aid, LockToken},
    store::mongo::{
        LockCollection,
        codec::{aid_in, is},
        ends::{Ends, NAMES_AT_ONCE, names::Expired},
        error::Result,
        send::{Timing, Write, rows},
    },
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

impl Ends<'_> {
    /// The locks of these sessions that other sessions have replaced, and that no sweep has seen. Must be read after the
    /// records: a lock that was replaced since then has a trace by now.
    pub(super) async fn replaced(&self, aids: &[Aid]) -> Result<Vec<(Aid, Expired)>> {
        let ended = &self.store.inner.ended;
        let stages = unseen(ended.name(), self.collections, Some(aids), NAMES_AT_ONCE as i64);
        let found = ended.aggregate(stages).max_time(self.until.read_limit());
        let expired = |row: &Document| {
            let (gone, collection) =
                (row.get_document("gone").ok()?, row.get_str("collection").ok()?);
            Some((aid_in(gone, "aid"), Expired::of(collection.to_owned(), row, gone)))
        };
        Ok(rows(found).await?.iter().filter_map(expired).collect())
    }

    /// Marks these traces as seen: everything that the traces are kept for is now recorded.
    pub(super) async fn looked_at(&self, traces: &[Bson]) -> Result<()> {
        if !traces.is_empty() {
            let seen = Write::Update(vec![doc! { "$unset": "step" }]);
            self.write(doc! { "_id": { "$in": traces } }, &seen).await?;
        }
        Ok(())
    }
}

/// Matches the trace, seen or not, of any renewal of this acquisition.
pub(super) fn of_acquisition(key: &LockKey, aid: &Aid, token: LockToken) -> Document {
    doc! {
        "_id": { "$regex": format!("^former/{token}/") },
        "aid": { "$eq": aid.as_str() },
        "c": { "$eq": key.collection() },
        "id": { "$eq": key.id() },
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
pub(super) fn unseen(
    ended: &str,
    collections: &[&str],
    of: Option<&[Aid]>,
    limit: i64,
) -> Vec<Document> {
    let named = doc! { "$let": {
        "vars": { "named": { "$arrayElemAt": ["$end.leases", 0] } },
        "in": { "$cond": [{ "$isArray": "$$named" }, "$$named", []] },
    } };
    let text = doc! { "$type": "string" };
    let mut waits =
        doc! { "step": LOOK, "_id": &text, "lease": &text, "c": { "$in": collections } };
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
