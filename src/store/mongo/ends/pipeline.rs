//! The commands on `doclock.ended`, as pure functions.
//!
//! ```text
//! { _id:    <aid>,
//!   ts:     <Date: when the session ended>,
//!   reason: "logged_out" | "expired" | "revoked",
//!   silent: true,                      // the session only became idle; it may come back
//!   event:  "<name of this end>",
//!   step:   "release" | "announce",    // the next step; absent when all steps are done
//!   by: "<worker>", lease: <Date>,     // the worker that has it, and until when it is reserved
//!   locks:  [ { c: "<collection>", id: <_id> } ],
//!   holder: { label, user },           // of one of these locks
//!   leases: [ "<lease>" ],             // of the expired locks that an idle end named; see `former.rs`
//!   noted:  <Date: until when the names count although no step is left>,
//!   taken:  <how often it was taken to be announced>,
//!   told:   true }                     // already announced; its locks are being released once more
//! indexes: ts (TTL), step (partial)
//! ```

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};
use uuid::Uuid;

use crate::{
    ended::{EndReason, MAX_NAMED_LOCKS},
    key::LockKey,
    lock::Holder,
    store::mongo::{codec, pipeline::millis},
};

/// How long an end that a worker has begun is reserved for that worker.
const RELEASE_LEASE: Duration = Duration::from_secs(10);

/// Ends the session permanently. A session that has already ended permanently stays as it is, unless
/// `worker` may continue that end.
///
/// If an idle end was not announced yet, its locks are announced with this end.
pub(super) fn end_for_good(reason: EndReason, event: Uuid, worker: Uuid) -> Vec<Document> {
    let mut end = begin(reason, event, worker);
    end.insert("locks", doc! { "$cond": [{ "$or": [has_step(), is_noted()] }, locks(), []] });
    end.insert("holder", doc! { "$cond": [has_step(), "$holder", "$$REMOVE"] });
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

/// Claims a session that seems to be idle, or whose end was left half done.
pub(super) fn claim(event: Uuid, worker: Uuid) -> Vec<Document> {
    let mut silence = begin(EndReason::Expired, event, worker);
    silence.insert("silent", true);
    silence.insert("locks", doc! { "$cond": [is_noted(), locks(), []] });
    let again = doc! { "$mergeObjects": [go_on(worker), { "told": true }] };
    vec![doc! { "$replaceWith": { "$switch": {
        "branches": [
            { "case": someone_else_is_at_it(worker), "then": "$$ROOT" },
            { "case": has_step(), "then": go_on(worker) },
            // Ended and announced long ago. The expired lock was acquired in spite of that end.
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

/// Stores the names of the locks that are about to be released, and whose they are.
pub(super) fn name(keys: &[LockKey], holder: Option<&Holder>) -> Vec<Document> {
    vec![doc! { "$set": { "locks": with_names(locks(), keys), "holder": or_known(holder) } }]
}

/// The same for expired locks, with their leases.
pub(super) fn name_expired(
    keys: &[LockKey],
    leases: &[String],
    holder: Option<&Holder>,
) -> Vec<Document> {
    let known = doc! { "$cond": [{ "$isArray": "$leases" }, "$leases", []] };
    let some = &leases[..leases.len().min(MAX_NAMED_LOCKS)];
    let all = doc! { "$setUnion": [known, { "$literal": some }] };
    let leases = doc! { "$slice": [all, MAX_NAMED_LOCKS as i64] };
    let locks = with_names(locks(), keys);
    vec![doc! { "$set": { "locks": locks, "leases": leases, "holder": or_known(holder) } }]
}

fn or_known(holder: Option<&Holder>) -> Document {
    let holder = holder.map_or_else(
        || Bson::from("$$REMOVE"),
        |Holder { label, user }| {
            let user = user
                .as_ref()
                .map_or(Bson::from("$$REMOVE"), |user| doc! { "$literal": user }.into());
            doc! { "label": { "$literal": label }, "user": user }.into()
        },
    );
    doc! { "$ifNull": ["$holder", holder] }
}

/// Remembers for the ttl that these locks expired while their session had others. If the session turns
/// out to be idle, they were just the first to expire: its requests did not renew all locks at the same
/// moment.
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

/// The locks are gone. An end that was announced before is not announced again.
pub(super) fn released() -> Vec<Document> {
    vec![doc! { "$set": {
        "step": { "$cond": [{ "$eq": ["$told", true] }, "$$REMOVE", "announce"] },
        "by": "$$REMOVE",
        "lease": "$$REMOVE",
    } }]
}

/// Whether the record was taken to be announced more than once.
pub(super) fn is_repeated(record: &Document) -> bool {
    record.get("taken").and_then(codec::number).is_some_and(|taken| taken > 1.0)
}

pub(super) fn take(worker: Uuid, lease: Duration) -> Vec<Document> {
    // A repetition of a command whose reply was lost does not count.
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

/// Marks all steps as done.
pub(super) fn announced() -> Vec<Document> {
    vec![doc! { "$unset": ["step", "by", "lease", "locks", "holder", "noted", "taken"] }]
}

/// The ends that wait for this step, except those reserved for other workers.
pub(super) fn waits_for(step: impl Into<Bson>, worker: Uuid) -> Document {
    doc! {
        "step": step.into(),
        "_id": { "$type": "string" },
        "$expr": { "$not": [someone_else_is_at_it(worker)] },
    }
}

/// The fields of the last end of a session that callers are told.
pub(super) fn last_end() -> Document {
    let ago = doc! { "$subtract": ["$$NOW", "$ts"] };
    doc! {
        "reason": 1,
        "for_good": { "$ne": ["$silent", true] },
        "ago": { "$cond": [{ "$eq": [{ "$type": "$ts" }, "date"] }, ago, 0_i64] },
    }
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
    // A UUID has only hexadecimal digits and hyphens: it is never an operator or a field path.
    id.to_string()
}
