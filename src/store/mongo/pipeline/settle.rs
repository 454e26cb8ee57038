//! Removes grants from a record, and brings the rest into order.

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use crate::store::{
    Rules,
    mongo::pipeline::{
        grant::{Grant, began, is, is_reader, is_shared, readers_that, runs_out},
        millis,
    },
};

/// Removes the grants for which `goes` is true.
pub(in crate::store::mongo) fn take_out(
    goes: impl Fn(Grant) -> Document,
    rules: &Rules,
) -> Vec<Document> {
    let left = doc! { "$switch": {
        "branches": [
            { "case": is_shared(), "then": readers_that(doc! { "$not": [goes(Grant::Reader)] }) },
            // The record of a lock that nobody holds any more.
            { "case": goes(Grant::Exclusive), "then": [] },
        ],
        "default": "$readers",
    } };
    let mut stages = vec![doc! { "$set": { "readers": left } }];
    stages.extend(settle(rules));
    stages
}

/// The last stage of each change to the readers, the places or the holder: updates the fields that
/// depend on others. A record without a holder keeps its fence and its queue. Without these two, it is
/// an [empty](nothing_in_it) record. The command that emptied it then removes it, or else the next
/// sweep does.
///
/// Leaves a record that is in order unchanged, so that a refusal is not a write.
pub(super) fn settle(rules: &Rules) -> Vec<Document> {
    let of_all = |what: Document| {
        doc! { "$map": { "input": "$$readers", "as": "r", "in": what } }
    };
    // Counts all readers: the sweep removes the expired ones. So no clock is needed here.
    let newest = doc! { "$max": "$$began" };
    let shared = doc! { "$mergeObjects": ["$$ROOT", {
        "readers": "$$readers",
        "ts": { "$toDate": newest.clone() },
        "ttl": { "$subtract": [{ "$max": "$$ends" }, newest] },
        "due": { "$toDate": { "$min": "$$ends" } },
    }] };
    let shared = doc! {
        "$let": { "vars": { "began": of_all(began()), "ends": of_all(runs_out()) }, "in": shared }
    };
    let mut stages = Vec::new();
    if rules.fair {
        let places = doc! { "$cond": [{ "$eq": [live_places(), []] }, "$$REMOVE", live_places()] };
        stages.push(doc! { "$set": { "queue": places } });
    }
    let settled = doc! { "$switch": {
        "branches": [
            { "case": { "$ne": ["$$readers", []] }, "then": shared },
            {
                "case": { "$and": [
                    { "$not": [is_shared()] },
                    { "$or": [is_there("$ts"), is_there("$aid")] },
                ] },
                "then": "$$ROOT",
            },
        ],
        "default": held_by_nobody(rules),
    } };
    let readers = readers_that(is_reader());
    stages.push(doc! { "$replaceWith": {
        "$let": { "vars": { "readers": readers }, "in": settled },
    } });
    stages
}

fn held_by_nobody(rules: &Rules) -> Document {
    let mut rest = doc! { "_id": "$_id" };
    let mut due = Bson::from("$$NOW");
    if rules.fenced {
        let has_fence = doc! { "$isNumber": "$fence" };
        rest.insert("fence", doc! { "$cond": [has_fence.clone(), "$fence", "$$REMOVE"] });
        due = doc! { "$cond": [has_fence, "$$REMOVE", due] }.into();
    }
    if rules.fair {
        rest.insert("queue", "$queue");
        due = doc! { "$cond": [is("$queue", "array"), { "$max": "$queue.until" }, due] }.into();
    }
    rest.insert("due", due);
    rest
}

/// A record without any lock, live or expired. It may still have a queue and a fence.
pub(in crate::store::mongo) fn nothing_held() -> Document {
    doc! {
        "ts": { "$exists": false },
        "aid": { "$exists": false },
        "readers": { "$exists": false },
    }
}

/// A record without a lock, a queue and a fence.
pub(in crate::store::mongo) fn nothing_in_it() -> Document {
    let mut filter = nothing_held();
    filter.insert("queue", doc! { "$exists": false });
    filter.insert("fence", doc! { "$exists": false });
    filter
}

/// The queue has no live place.
pub(in crate::store::mongo) fn no_live_place() -> Document {
    doc! { "$eq": [live_places(), []] }
}

fn is_there(field: &str) -> Document {
    doc! { "$ne": [{ "$type": field }, "missing"] }
}

/// Records without a holder and without a waiter that are due for removal.
pub(in crate::store::mongo) fn left_over() -> Document {
    let mut filter = nothing_held();
    filter.insert("due", doc! { "$type": "date" });
    let is_due = doc! { "$lte": ["$due", "$$NOW"] };
    filter.insert("$expr", doc! { "$and": [is_due, no_live_place()] });
    filter
}

/// The longest lease of a place, so that no date from a foreign program reserves a document forever. Also how
/// far a ticket may be ahead of the clock.
pub(super) const LONGEST_LEASE: Duration = Duration::from_secs(60 * 60);

/// The places whose lease has not expired.
pub(super) fn live_places() -> Document {
    let queue = doc! { "$cond": [{ "$isArray": "$queue" }, "$queue", []] };
    let soon = doc! { "$add": ["$$NOW", millis(LONGEST_LEASE)] };
    let is_live = doc! { "$and": [
        is("$$p.until", "date"),
        is("$$p.server", "string"),
        is("$$p.aid", "string"),
        is("$$p.first", "long"),
        is("$$p.last", "long"),
        { "$gt": ["$$p.until", "$$NOW"] },
        { "$lte": ["$$p.until", soon.clone()] },
        // So that the next ticket is a number.
        { "$lte": ["$$p.last", { "$toLong": soon }] },
    ] };
    doc! { "$filter": { "input": queue, "as": "p", "cond": is_live } }
}
