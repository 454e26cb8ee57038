//! The grants of a record, in filters and in expressions. An exclusive grant stands in the record itself, the grants
//! of readers stand in its `readers`.
//!
//! Two rules keep strings from users from being read as operators: in a filter, write `{field: {$eq:
//! …}}`; in a pipeline, write `{$literal: …}`. Only `_id` may stand without an operator: see
//! [`by_id`](super::ids::by_id).
//!
//! An error in an expression would make the document unlockable forever, whatever a foreign program
//! wrote there. So every expression checks the type before it calculates, and stays within bounds.

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use crate::{
    key::LockId,
    lock::{Aid, Mode},
    store::{
        Acquisition, Rules,
        mongo::{
            codec::{is, millis},
            ids::by_id,
        },
    },
};

/// One grant, live or expired, as a command names it.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) id: LockId,
    aid: Aid,
    /// The token; or the tokens of all attempts of a claim, any of which may have been granted.
    tokens: Vec<String>,
    /// Shared if the mode is not known.
    pub(super) mode: Mode,
    /// True if the grant is meant only if no other request was told that the session has the lock.
    pub(super) unless_told: bool,
}

impl Target {
    pub(super) fn of(it: &Acquisition) -> Self {
        let (id, aid, tokens) = (it.key.id().clone(), it.aid.clone(), vec![it.token.to_string()]);
        Self { id, aid, tokens, mode: it.mode, unless_told: false }
    }

    /// As `of`, but matches only a grant of an exclusive lock.
    pub(super) fn exclusive(it: &Acquisition) -> Self {
        Self { mode: Mode::Exclusive, ..Self::of(it) }
    }

    /// The grant to any of these attempts of a claim, unless another request was told of the lock.
    pub(super) fn untold(attempts: &[Acquisition]) -> Option<Self> {
        let tokens = attempts.iter().map(|it| it.token.to_string()).collect();
        Some(Self { tokens, unless_told: true, ..Self::of(attempts.first()?) })
    }

    pub(super) fn aid(&self) -> &Aid {
        &self.aid
    }

    /// Matches the record of the lock.
    pub(super) fn filter(&self) -> Document {
        self.filter_with(doc! {})
    }

    /// Matches the record if it contains nothing else, so that it may be deleted as a whole.
    pub(super) fn alone(&self, rules: &Rules) -> Document {
        let mut filter = self.filter_with(doc! { "$size": 1 });
        if rules.fair {
            filter.insert("queue", doc! { "$exists": false });
        }
        filter
    }

    fn filter_with(&self, mut readers: Document) -> Document {
        let mut grant = doc! {
            "aid": { "$eq": self.aid.as_str() },
            "token": match &self.tokens[..] {
                [token] => doc! { "$eq": token },
                tokens => doc! { "$in": tokens },
            },
        };
        if self.unless_told {
            grant.insert("again", doc! { "$exists": false });
        }
        let mut filter = by_id(&self.id);
        if self.mode == Mode::Exclusive {
            filter.extend(grant);
        } else {
            readers.insert("$elemMatch", grant.clone());
            filter.insert("$or", [grant, doc! { "readers": readers }].to_vec());
        }
        filter
    }

    /// True if the exclusive lock of the record is this acquisition.
    pub(super) fn is_in(&self, record: &Document) -> bool {
        record.get_str("aid").is_ok_and(|aid| aid == self.aid.as_str())
            && record.get_str("token").is_ok_and(|it| self.tokens.iter().any(|token| token == it))
            && !(self.unless_told && record.contains_key("again"))
    }
}

fn texts(aids: &[Aid]) -> Vec<&str> {
    aids.iter().map(Aid::as_str).collect()
}

/// The records in which one of these sessions has or had an exclusive lock.
pub(super) fn exclusive_of(aids: &[Aid]) -> Document {
    doc! { "aid": { "$in": texts(aids) } }
}

/// The records in which one of these sessions has or had a shared lock.
pub(super) fn shared_of(aids: &[Aid]) -> Document {
    doc! { "readers.aid": { "$in": texts(aids) } }
}

/// All records in which one of these sessions has or had a lock.
pub(super) fn of_sessions(aids: &[Aid]) -> Document {
    doc! { "$or": [exclusive_of(aids), shared_of(aids)] }
}

/// Narrows `filter` to live locks.
pub(super) fn and_live(mut filter: Document, foreign_ttl: Duration) -> Document {
    filter.insert("$expr", is_live(foreign_ttl));
    filter
}

/// True if somebody holds the lock, in either mode: for readers, `ts` and `ttl` describe the one that
/// expires last.
///
/// A record without a ttl is a foreign one, and has the ttl of the collection. A record without a date
/// is dead, for the TTL index, too.
pub(super) fn is_live(foreign_ttl: Duration) -> Document {
    let ttl = doc! { "$cond": [{ "$isNumber": "$ttl" }, "$ttl", millis(foreign_ttl)] };
    // Written as `ttl > now - ts`, because a sum with a number from a foreign program can overflow. A
    // date before 1970 counts as 1970, because the difference can overflow, too.
    let age = doc! { "$subtract": ["$$NOW", { "$max": ["$ts", { "$toDate": 0_i64 }] }] };
    doc! { "$and": [is("$ts", "date"), { "$gt": [ttl, age] }] }
}

/// The `ts` of a renewal. The server fixes the time of a command when the command begins. A command
/// that had to wait must not take back a later renewal.
fn not_before() -> Document {
    doc! { "$max": ["$ts", "$$NOW"] }
}

/// The fields of an exclusive lock that is renewed. The record of a foreign program has no ttl of its own, and gets
/// none here.
pub(super) fn renewed_exclusive(ttl: impl Into<Bson>, rules: &Rules) -> Document {
    let ttl = ttl.into();
    let has_max_hold = is("$until", "date");
    let left = doc! { "$subtract": [{ "$max": ["$until", "$$NOW"] }, "$$NOW"] };
    let capped = doc! { "$cond": [has_max_hold.clone(), { "$min": [ttl.clone(), left] }, ttl] };
    let is_ours = doc! { "$isNumber": "$ttl" };
    let ttl = doc! { "$cond": [is_ours.clone(), capped.clone(), millis(rules.ttl)] };
    let has_end = doc! { "$or": [is_ours, has_max_hold] };
    // When the sweep must look at the lock. If `ts` tells that already, the field is left out, unless the record had it
    // before.
    let is_shorter = doc! { "$lt": [ttl.clone(), millis(rules.ttl)] };
    let due = doc! { "$cond": [
        { "$or": [is("$due", "date"), is_shorter] },
        { "$add": [not_before(), { "$min": [ttl, millis(rules.ttl)] }] },
        "$$REMOVE",
    ] };
    doc! {
        "ts": not_before(),
        "ttl": { "$cond": [has_end, capped, { "$ifNull": ["$ttl", "$$REMOVE"] }] },
        "due": due,
    }
}

/// Changes these fields, unless a name stands twice in the record, as some drivers write it: MongoDB 6.0 aborts when it
/// compares such a record with the result of a pipeline. Such a record stays as it is until it has expired.
pub(super) fn set_unless_odd(fields: Document) -> Vec<Document> {
    let changed = doc! { "$mergeObjects": ["$$ROOT", fields] };
    vec![doc! { "$replaceWith": { "$cond": [has_repetition(), "$$ROOT", changed] } }]
}

/// True if a name stands twice in the record, or in a document within it that a replacement may have, too.
fn has_repetition() -> Document {
    let all = |array: &str| doc! { "$cond": [{ "$isArray": array }, array, []] };
    let within = doc! { "$concatArrays": [
        ["$$ROOT", "$holder", "$leaving"],
        all("$readers"), all("$readers.holder"), all("$queue"), all("$queue.holder"), all("$asks"),
    ] };
    let documents = doc! { "$filter": { "input": within, "as": "d", "cond": is("$$d", "object") } };
    let names = doc! { "$map": { "input": { "$objectToArray": "$$d" }, "in": "$$this.k" } };
    let distinct = doc! { "$size": { "$setUnion": ["$$names"] } };
    let repeats = doc! { "$let": {
        "vars": { "names": names }, "in": { "$ne": [{ "$size": "$$names" }, distinct] },
    } };
    doc! { "$anyElementTrue": [{ "$map": { "input": documents, "as": "d", "in": repeats } }] }
}

/// A record without any lock, live or expired. It may still have a queue and a fence.
pub(super) fn nothing_held() -> Document {
    doc! {
        "ts": { "$exists": false },
        "aid": { "$exists": false },
        "readers": { "$exists": false },
    }
}
