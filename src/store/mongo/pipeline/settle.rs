//! Taking grants out of a record, and bringing the rest into order.

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use crate::store::{
    Rules,
    mongo::pipeline::{
        grant::{Grant, began, is, is_reader, is_shared, readers_that, runs_out},
        millis,
    },
};

/// Takes those grants out of which this holds.
pub(in crate::store::mongo) fn take_out(
    goes: impl Fn(Grant) -> Document,
    rules: &Rules,
) -> Vec<Document> {
    let left = doc! { "$switch": {
        "branches": [
            { "case": is_shared(), "then": readers_that(doc! { "$not": [goes(Grant::Reader)] }) },
            // A lock that nobody holds any more.
            { "case": goes(Grant::Exclusive), "then": [] },
        ],
        "default": "$readers",
    } };
    let mut stages = vec![doc! { "$set": { "readers": left } }];
    stages.extend(settle(rules));
    stages
}

/// What each change of readers, of places or of who is left ends with: the fields that follow from
/// others. What nobody holds keeps its fence and those who wait; if there is neither, it is an
/// [empty](nothing_in_it) record, which whoever made it removes, or else the next sweep.
///
/// Changes nothing in a record that is in order, so that a refusal is no write.
pub(super) fn settle(rules: &Rules) -> Vec<Document> {
    let of_all = |what: Document| {
        doc! { "$map": { "input": "$$readers", "as": "r", "in": what } }
    };
    // All of them, for those that have run out wait for the sweep. So no clock is needed here.
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

/// Without a lock, alive or not. Those who wait may be in it, and its fence.
pub(in crate::store::mongo) fn nothing_held() -> Document {
    doc! {
        "ts": { "$exists": false },
        "aid": { "$exists": false },
        "readers": { "$exists": false },
    }
}

/// Not even that.
pub(in crate::store::mongo) fn nothing_in_it() -> Document {
    let mut filter = nothing_held();
    filter.insert("queue", doc! { "$exists": false });
    filter.insert("fence", doc! { "$exists": false });
    filter
}

/// Nobody waits any more.
pub(in crate::store::mongo) fn no_live_place() -> Document {
    doc! { "$eq": [live_places(), []] }
}

fn is_there(field: &str) -> Document {
    doc! { "$ne": [{ "$type": field }, "missing"] }
}

/// What is left of locks that nobody holds and nobody waits for.
pub(in crate::store::mongo) fn left_over() -> Document {
    let mut filter = nothing_held();
    filter.insert("due", doc! { "$type": "date" });
    let is_due = doc! { "$lte": ["$due", "$$NOW"] };
    filter.insert("$expr", doc! { "$and": [is_due, no_live_place()] });
    filter
}

/// So that no date that somebody has written there reserves a document for good.
pub(super) const LONGEST_LEASE: Duration = Duration::from_secs(60 * 60);

/// Places whose lease has not passed.
pub(super) fn live_places() -> Document {
    let queue = doc! { "$cond": [{ "$isArray": "$queue" }, "$queue", []] };
    let is_live = doc! { "$and": [
        is("$$p.until", "date"),
        is("$$p.token", "string"),
        is("$$p.aid", "string"),
        { "$gt": ["$$p.until", "$$NOW"] },
        { "$lte": ["$$p.until", { "$add": ["$$NOW", millis(LONGEST_LEASE)] }] },
    ] };
    doc! { "$filter": { "input": queue, "as": "p", "cond": is_live } }
}
