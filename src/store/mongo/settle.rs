//! Removes grants from a record, brings the rest into order, and removes a record with nothing in it.

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use crate::{
    key::LockId,
    store::{
        Rules,
        mongo::{
            Call,
            codec::{is, millis},
            error::Result,
            grant::{
                Grant, began, expires, has_repetition, is_reader, is_shared, readers_that,
                replace_with,
            },
            record::by_id,
            send::Write,
        },
    },
};

impl Call<'_> {
    // findAndModify returns: nothing → gone before. A record with content → done. A record without
    // content → this was the last grant, and the record is deleted unless another claim used it
    // meanwhile. If the process dies before that, the sweep deletes it; until then only foreign
    // programs mind it.
    pub(super) async fn change(
        &self,
        id: &LockId,
        filter: Document,
        by: Vec<Document>,
    ) -> Result<bool> {
        let there = |field: &str| {
            let is_there = doc! { "$ne": [{ "$type": field }, "missing"] };
            doc! { "$cond": [is_there, true, "$$REMOVE"] }
        };
        let fields = doc! {
            "_id": 0, "ts": 1, "aid": 1, "fence": 1,
            "readers": there("$readers"), "queue": there("$queue"),
        };
        let admitted = self.admit(id).await?;
        let left = self.modify(admitted, filter, by, false, Some(fields)).await?;
        let Some(left) = left else { return Ok(false) };
        if left.is_empty() {
            let mut empty = by_id(id);
            empty.extend(nothing_in_it());
            self.write_one(id, empty, &Write::Delete).await?;
        }
        Ok(true)
    }

    /// Removes records without a holder and without a waiter.
    pub(super) async fn tidy_up(&self) -> Result<()> {
        let mut left_over = left_over();
        if self.rules.fenced && self.rules.fair {
            let settled = take_out(|_| doc! { "$literal": false }, &self.rules);
            self.write_all(left_over.clone(), &Write::Update(settled)).await?;
        }
        if self.rules.fenced {
            left_over.insert("fence", doc! { "$exists": false });
        }
        self.write_all(left_over, &Write::Delete).await?;
        Ok(())
    }
}

/// Removes the grants for which `goes` is true.
pub(super) fn take_out(goes: impl Fn(Grant) -> Document, rules: &Rules) -> Vec<Document> {
    let left = doc! { "$switch": {
        "branches": [
            { "case": is_shared(), "then": readers_that(doc! { "$not": [goes(Grant::Reader)] }) },
            // The record of a lock that nobody holds any more.
            { "case": goes(Grant::Exclusive), "then": [] },
        ],
        "default": "$readers",
    } };
    let left = doc! { "$cond": [has_repetition(), "$readers", left] };
    let mut stages = vec![doc! { "$set": { "readers": left } }];
    stages.extend(settle(rules));
    stages
}

/// The last stage of each change to the readers, the places or the holder: updates the fields that
/// depend on others. A record without a holder keeps its fence and its queue. Without these two, it is
/// an empty record. The command that emptied it then removes it, or else the next
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
        "$let": { "vars": { "began": of_all(began()), "ends": of_all(expires()) }, "in": shared }
    };
    let mut stages = Vec::new();
    if rules.fair {
        let places = doc! { "$cond": [{ "$eq": [live_places(), []] }, "$$REMOVE", live_places()] };
        let left_alone = doc! { "$cond": [has_repetition(), "$queue", places] };
        stages.push(doc! { "$set": { "queue": left_alone } });
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
    stages.push(replace_with(doc! {
        "$let": { "vars": { "readers": readers }, "in": settled },
    }));
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
pub(super) fn nothing_held() -> Document {
    doc! {
        "ts": { "$exists": false },
        "aid": { "$exists": false },
        "readers": { "$exists": false },
    }
}

/// A record without a lock, a queue and a fence.
fn nothing_in_it() -> Document {
    let mut filter = nothing_held();
    filter.insert("queue", doc! { "$exists": false });
    filter.insert("fence", doc! { "$exists": false });
    filter
}

fn is_there(field: &str) -> Document {
    doc! { "$ne": [{ "$type": field }, "missing"] }
}

/// Records without a holder and without a waiter that are due for removal.
fn left_over() -> Document {
    let mut filter = nothing_held();
    filter.insert("due", doc! { "$type": "date" });
    let is_due = doc! { "$lte": ["$due", "$$NOW"] };
    filter.insert("$expr", doc! { "$and": [is_due, { "$eq": [live_places(), []] }] });
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
    filtered(queue, is_live)
}

pub(super) fn filtered(places: Document, condition: Document) -> Document {
    doc! { "$filter": { "input": places, "as": "p", "cond": condition } }
}
