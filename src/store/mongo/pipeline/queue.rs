//! The queue of a document in a fair collection: the places of its waiters, in the order of arrival.

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use crate::{
    lock::{LockToken, Mode},
    store::{
        Claim, MAX_READERS, Rules,
        mongo::pipeline::{
            literal, millis,
            settle::{LONGEST_LEASE, live_places, settle},
        },
    },
};

/// The places that are ahead of this claim and exclude it. A place of its own session does not.
pub(super) fn in_the_way_of(claim: &Claim) -> Document {
    let mine = doc! { "$indexOfArray": ["$$queue.token", claim.token.of_place().to_string()] };
    let before = doc! { "$switch": {
        "branches": [
            { "case": { "$lt": ["$$mine", 0] }, "then": "$$queue" },
            { "case": { "$eq": ["$$mine", 0] }, "then": [] },
        ],
        "default": { "$slice": ["$$queue", "$$mine"] },
    } };
    let mut is_in_the_way = vec![doc! { "$ne": ["$$p.aid", literal(claim.aid.as_str())] }];
    if claim.mode == Mode::Shared {
        is_in_the_way.push(doc! { "$ne": ["$$p.mode", mode(Mode::Shared)] });
    }
    let others = doc! {
        "$filter": { "input": before, "as": "p", "cond": { "$and": is_in_the_way } }
    };
    let others = doc! { "$let": { "vars": { "mine": mine }, "in": others } };
    doc! { "$let": { "vars": { "queue": live_places() }, "in": others } }
}

/// The queue with a place for this claim: renewed where it is, or added at the end. A queue is as long
/// as the list of readers may be; a claim beyond that gets no place, and must poll.
pub(super) fn with_place(claim: &Claim, lease: Duration) -> Document {
    let token = claim.token.of_place().to_string();
    let until = doc! { "$add": ["$$NOW", millis(lease.min(LONGEST_LEASE))] };
    let kept = doc! { "$map": { "input": "$$queue", "as": "p", "in": { "$cond": [
        { "$eq": ["$$p.token", &token] },
        { "$mergeObjects": ["$$p", { "until": until.clone() }] },
        "$$p",
    ] } } };
    let new = doc! {
        "token": &token,
        "aid": literal(claim.aid.as_str()),
        "holder": { "label": literal(&claim.holder.label) },
        "mode": mode(claim.mode),
        "since": "$$NOW",
        "until": until,
    };
    let places = doc! { "$switch": {
        "branches": [
            { "case": { "$in": [token, "$$queue.token"] }, "then": kept },
            { "case": { "$gte": [{ "$size": "$$queue" }, MAX_READERS as i64] }, "then": "$$queue" },
        ],
        "default": { "$concatArrays": ["$$queue", [new]] },
    } };
    doc! { "$let": { "vars": { "queue": live_places() }, "in": places } }
}

/// The queue without the place of this claim.
pub(super) fn without(token: LockToken) -> Document {
    let others = doc! { "$ne": ["$$p.token", token.of_place().to_string()] };
    doc! { "$filter": { "input": live_places(), "as": "p", "cond": others } }
}

/// Gives up a place.
pub(in crate::store::mongo) fn leave(token: LockToken, rules: &Rules) -> Vec<Document> {
    let mut stages = vec![doc! { "$set": { "queue": without(token) } }];
    stages.extend(settle(rules));
    stages
}

/// Extends these places to `lease` from now.
pub(in crate::store::mongo) fn keep(
    tokens: &[LockToken],
    lease: Duration,
    rules: &Rules,
) -> Vec<Document> {
    let until = doc! { "$add": ["$$NOW", millis(lease.min(LONGEST_LEASE))] };
    let kept = doc! { "$map": { "input": live_places(), "as": "p", "in": { "$cond": [
        is_of(tokens),
        { "$mergeObjects": ["$$p", { "until": until }] },
        "$$p",
    ] } } };
    let mut stages = vec![doc! { "$set": { "queue": kept } }];
    stages.extend(settle(rules));
    stages
}

/// How many of these places still exist.
pub(in crate::store::mongo) fn count(tokens: &[LockToken]) -> Document {
    doc! { "$size": { "$filter": { "input": live_places(), "as": "p", "cond": is_of(tokens) } } }
}

fn is_of(tokens: &[LockToken]) -> Document {
    let tokens: Vec<_> = tokens.iter().map(ToString::to_string).collect();
    doc! { "$in": ["$$p.token", { "$literal": tokens }] }
}

fn mode(mode: Mode) -> Bson {
    (if mode == Mode::Shared { "shared" } else { "exclusive" }).into()
}
