//! The commands on `doclock.ended`, as pure functions.
//!
//! ```text
//! { _id:    <aid>,
//!   ts:     <Date: when the session ended>,
//!   reason: "logged_out" | "expired" | "revoked",
//!   silent: true,                      // not for good: it only fell silent
//!   event:  "<name of this end>",
//!   step:   "release" | "announce",    // what is still to be done; absent when all is
//!   by: "<worker>", lease: <Date>,     // who is at it, and until when nobody else may be
//!   locks:  [ { c: "<collection>", id: <_id> } ],
//!   noted:  <Date: until when they count although no step is left>,
//!   taken:  <how often it was taken to be announced>,
//!   told:   true }                     // announced; a release was begun once more
//! indexes: ts (TTL), step (partial)
//! ```

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};
use uuid::Uuid;

use crate::{
    ended::{EndReason, MAX_NAMED_LOCKS},
    key::LockKey,
    lock::Aid,
    store::mongo::pipeline::millis,
};

/// How long nobody else goes on with what a worker has begun.
const RELEASE_LEASE: Duration = Duration::from_secs(10);

/// Ends the session for good. What has been ended for good stays as it is, unless `worker` may go on
/// with it.
///
/// A silence that nobody has heard of yet goes along: its locks are announced with this end.
pub(super) fn end_for_good(reason: EndReason, event: Uuid, worker: Uuid) -> Vec<Document> {
    let mut end = begin(reason, event, worker);
    end.insert("locks", doc! { "$cond": [{ "$or": [has_step(), is_noted()] }, locks(), []] });
    vec![doc! { "$replaceWith": { "$switch": {
        "branches": [
            {
                "case": { "$and": [is_for_good(), { "$or": [
                    { "$ne": ["$step", "release"] },
                    someone_else_is_at_it(worker),
                ] }] },
                "then": "$$ROOT",
            },
            { "case": is_for_good(), "then": go_on(worker) },
        ],
        "default": end,
    } } }]
}

/// Claims a session that seems to have fallen silent, or whose end was left half-done.
pub(super) fn claim(event: Uuid, worker: Uuid) -> Vec<Document> {
    let mut silence = begin(EndReason::Expired, event, worker);
    silence.insert("silent", true);
    silence.insert("locks", doc! { "$cond": [is_noted(), locks(), []] });
    let again = doc! { "$mergeObjects": [go_on(worker), { "told": true }] };
    vec![doc! { "$replaceWith": { "$switch": {
        "branches": [
            { "case": someone_else_is_at_it(worker), "then": "$$ROOT" },
            { "case": has_step(), "then": go_on(worker) },
            // Ended and announced long ago; what ran out is a lock that got in all the same.
            { "case": is_for_good(), "then": again },
        ],
        "default": silence,
    } } }]
}

fn begin(reason: EndReason, event: Uuid, worker: Uuid) -> Document {
    doc! {
        "_id": "$_id",
        "ts": "$$NOW",
        "reason": reason.as_str(),
        "event": literal(event),
        "step": "release",
        "by": literal(worker),
        "lease": { "$add": ["$$NOW", millis(RELEASE_LEASE)] },
        "locks": [],
    }
}

fn go_on(worker: Uuid) -> Document {
    let mine = doc! {
        "step": "release",
        "by": literal(worker),
        "lease": { "$add": ["$$NOW", millis(RELEASE_LEASE)] },
    };
    doc! { "$mergeObjects": ["$$ROOT", mine] }
}

/// Names what is about to be released.
pub(super) fn name(keys: &[LockKey]) -> Vec<Document> {
    vec![doc! { "$set": { "locks": with_names(locks(), keys) } }]
}

/// Remembers for the ttl that these locks ran out while their session has others. Should it turn out
/// to be silent, they were just the first ones: its requests have not renewed all at the same moment.
pub(super) fn note(keys: &[LockKey], ttl: Duration) -> Vec<Document> {
    let known = doc! { "$cond": [{ "$or": [has_step(), is_noted()] }, locks(), []] };
    let noted = doc! {
        "$mergeObjects": [
            { "ts": "$$NOW", "silent": true },
            "$$ROOT",
            { "locks": with_names(known, keys), "noted": { "$add": ["$$NOW", millis(ttl)] } },
        ]
    };
    vec![doc! { "$replaceWith": { "$cond": [is_for_good(), "$$ROOT", noted] } }]
}

fn with_names(known: Document, keys: &[LockKey]) -> Document {
    let names: Vec<_> = (keys.iter())
        .take(MAX_NAMED_LOCKS)
        .map(|key| doc! { "c": key.collection(), "id": Bson::from(key.id()) })
        .collect();
    let all = doc! { "$setUnion": [known, { "$literal": names }] };
    doc! { "$slice": [all, MAX_NAMED_LOCKS as i64] }
}

fn is_noted() -> Document {
    doc! { "$gt": ["$noted", "$$NOW"] }
}

/// The locks are gone. What was announced before is not announced again.
pub(super) fn released() -> Vec<Document> {
    vec![doc! { "$set": {
        "step": { "$cond": [{ "$eq": ["$told", true] }, "$$REMOVE", "announce"] },
        "by": "$$REMOVE",
        "lease": "$$REMOVE",
    } }]
}

pub(super) fn take(worker: Uuid, lease: Duration) -> Vec<Document> {
    // Not by the repetition of a command whose reply was lost.
    let anew = doc! { "$cond": [
        { "$and": [{ "$gt": ["$lease", "$$NOW"] }, { "$eq": ["$by", literal(worker)] }] }, 0, 1,
    ] };
    let before = doc! { "$cond": [{ "$isNumber": "$taken" }, "$taken", 0] };
    let taken = doc! { "$add": [before, anew] };
    vec![doc! { "$set": {
        "by": literal(worker),
        "lease": { "$add": ["$$NOW", millis(lease)] },
        "taken": taken,
    } }]
}

/// Nothing is left to be done.
pub(super) fn announced() -> Vec<Document> {
    vec![doc! { "$unset": ["step", "by", "lease", "locks", "noted", "taken"] }]
}

/// Ends that wait for this step, and that `worker` may take it with.
pub(super) fn waits_for(step: &str, worker: Uuid) -> Document {
    doc! {
        "step": step,
        "_id": { "$type": "string" },
        "$expr": { "$not": [someone_else_is_at_it(worker)] },
    }
}

/// Sessions that were ended, and not just silent.
pub(in crate::store::mongo) fn ended_for_good(aid: &Aid) -> Document {
    doc! { "_id": { "$eq": aid.as_str() }, "silent": { "$ne": true } }
}

fn has_step() -> Document {
    doc! { "$in": ["$step", ["release", "announce"]] }
}

fn is_for_good() -> Document {
    doc! { "$and": [{ "$eq": [{ "$type": "$ts" }, "date"] }, { "$ne": ["$silent", true] }] }
}

fn someone_else_is_at_it(worker: Uuid) -> Document {
    doc! { "$and": [{ "$gt": ["$lease", "$$NOW"] }, { "$ne": ["$by", literal(worker)] }] }
}

fn locks() -> Document {
    doc! { "$cond": [{ "$isArray": "$locks" }, "$locks", []] }
}

fn literal(id: Uuid) -> String {
    // Hexadecimal digits and hyphens only: never an operator or a field path.
    id.to_string()
}
