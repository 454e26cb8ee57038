//! The grants of a record, in filters and in expressions. An exclusive grant stands in the record itself, the grants
//! of readers stand in its `readers`.
//!
//! Two rules keep strings from users from being read as operators: in a filter, write `{field: {$eq:
//! …}}`; in a pipeline, write `{$literal: …}`. Only `_id` may stand without an operator: see
//! [`by_id`](super::record::by_id).
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
            codec::{is, literal, millis},
            record::by_id,
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

    /// True if `grant` is this acquisition.
    pub(super) fn is(&self, grant: Grant) -> Document {
        let mut all = vec![
            doc! { "$eq": [grant.field("aid"), literal(self.aid.as_str())] },
            doc! { "$in": [grant.field("token"), &self.tokens] },
        ];
        if self.unless_told {
            all.push(doc! { "$eq": [{ "$type": grant.field("again") }, "missing"] });
        }
        doc! { "$and": all }
    }

    /// As `is`, for a record that was read: true if its exclusive lock is this acquisition.
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

/// All records in which one of these sessions has or had a lock.
pub(super) fn of_sessions(aids: &[Aid]) -> Document {
    or_shared(exclusive_of(aids))
}

/// The records that `exclusive` matches, and those with a shared lock of its sessions.
fn or_shared(exclusive: Document) -> Document {
    let shared = doc! { "readers.aid": exclusive.get("aid").cloned() };
    doc! { "$or": [exclusive, shared] }
}

/// The live locks that these sessions hold. `exclusive` matches their exclusive locks, live or not.
pub(super) fn held_by(aids: &[Aid], exclusive: Document, foreign_ttl: Duration) -> Document {
    let mut filter = or_shared(exclusive);
    let reads = some_reader(doc! { "$and": [is_of(Grant::Reader, aids), is_live_reader()] });
    let holds = doc! { "$or": [{ "$not": [is_shared()] }, reads] };
    filter.insert("$expr", doc! { "$and": [is_live(foreign_ttl), holds] });
    filter
}

/// Narrows `filter` to live locks.
pub(super) fn and_live(mut filter: Document, foreign_ttl: Duration) -> Document {
    filter.insert("$expr", is_live(foreign_ttl));
    filter
}

/// True if the grant is one of these sessions'.
pub(super) fn is_of(grant: Grant, aids: &[Aid]) -> Document {
    doc! { "$in": [grant.field("aid"), { "$literal": texts(aids) }] }
}

/// True if the grant has expired, and so counts as absent.
pub(super) fn has_expired(grant: Grant, foreign_ttl: Duration) -> Document {
    match grant {
        Grant::Reader => doc! { "$not": [is_live_reader()] },
        Grant::Exclusive => doc! { "$not": [is_live(foreign_ttl)] },
    }
}

/// Where the fields of a grant are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Grant {
    /// An exclusive grant: in the record.
    Exclusive,
    /// The grant of a reader: in `r`, an element of `readers`.
    Reader,
}

/// Dates and ttls beyond this number of milliseconds are cut off, so that their sum is a valid date.
const FAR: i64 = 100_000_000_000_000;

impl Grant {
    pub(super) fn field(self, name: &str) -> String {
        match self {
            Self::Exclusive => format!("${name}"),
            Self::Reader => format!("$$r.{name}"),
        }
    }

    /// The `ts` of a renewal. The server fixes the time of a command when the command begins. A command
    /// that had to wait must not take back a later renewal.
    pub(super) fn not_before(self) -> Document {
        doc! { "$max": [self.field("ts"), "$$NOW"] }
    }

    /// `ttl`, or the time until the end of `max_hold` if that is less.
    pub(super) fn capped(self, ttl: impl Into<Bson>) -> Document {
        let (ttl, until) = (ttl.into(), self.field("until"));
        let left = doc! { "$subtract": [{ "$max": [until, "$$NOW"] }, "$$NOW"] };
        doc! { "$cond": [self.has_max_hold(), { "$min": [ttl.clone(), left] }, ttl] }
    }

    /// `{ aid, lease }`, where the lease is named by the token and the last renewal. A save that is
    /// committed late can make an expired grant live again, under the same token: that is another lease.
    pub(super) fn lease(self) -> Document {
        let (token, ts) = (self.field("token"), self.field("ts"));
        let renewed = doc! { "$cond": [is(&ts, "date"), { "$toString": { "$toLong": ts } }, ""] };
        doc! { "aid": self.field("aid"), "lease": { "$concat": [token, "/", renewed] } }
    }

    pub(super) fn has_max_hold(self) -> Document {
        is(&self.field("until"), "date")
    }

    /// True if the last renewal could no longer grant the whole ttl.
    pub(super) fn has_reached_max_hold(self) -> Document {
        let after_1970 = |date: &str| doc! { "$max": [self.field(date), { "$toDate": 0_i64 }] };
        doc! { "$and": [
            self.has_max_hold(),
            { "$gte": [
                self.field("ttl"),
                { "$subtract": [after_1970("until"), after_1970("ts")] },
            ] },
        ] }
    }

    /// `ts + ttl > now`, on the server's clock.
    ///
    /// Written as `ttl > now - ts`, because a sum with a number from a foreign program can overflow. A
    /// date before 1970 counts as 1970, because the difference can overflow, too.
    fn outlives_now(self, ttl: impl Into<Bson>) -> Document {
        let age = doc! {
            "$subtract": ["$$NOW", { "$max": [self.field("ts"), { "$toDate": 0_i64 }] }]
        };
        doc! { "$gt": [ttl.into(), age] }
    }
}

/// Replaces the record by this document, unless a name stands twice in the record, as some drivers write it: MongoDB 6.0
/// aborts when it compares such a record with its replacement. Such a record stays as it is until it has expired. Then
/// [`remove_odd`](Call::remove_odd) removes it.
pub(super) fn replace_with(new: impl Into<Bson>) -> Document {
    doc! { "$replaceWith": { "$cond": [has_repetition(), "$$ROOT", new.into()] } }
}

/// True if a name stands twice in the record, or in a document within it that a replacement may have, too.
pub(super) fn has_repetition() -> Document {
    let all = |array: &str| doc! { "$cond": [{ "$isArray": array }, array, []] };
    let within = doc! { "$concatArrays": [
        ["$$ROOT", "$holder", "$leaving"],
        all("$readers"), all("$readers.holder"), all("$queue"), all("$queue.holder"),
    ] };
    let documents = doc! { "$filter": { "input": within, "as": "d", "cond": is("$$d", "object") } };
    let names = doc! { "$map": { "input": { "$objectToArray": "$$d" }, "in": "$$this.k" } };
    let distinct = doc! { "$size": { "$setUnion": ["$$names"] } };
    let repeats = doc! { "$let": {
        "vars": { "names": names }, "in": { "$ne": [{ "$size": "$$names" }, distinct] },
    } };
    doc! { "$anyElementTrue": [{ "$map": { "input": documents, "as": "d", "in": repeats } }] }
}

/// True if an exclusive lock is in its grace period, because its page has gone.
pub(super) fn is_leaving() -> Document {
    is("$leaving", "object")
}

/// True if `r` is a reader, and not an entry that a foreign program put there.
pub(super) fn is_reader() -> Document {
    doc! { "$and": [
        is("$$r.ts", "date"),
        { "$isNumber": "$$r.ttl" },
        is("$$r.aid", "string"),
        is("$$r.token", "string"),
    ] }
}

pub(super) fn is_live_reader() -> Document {
    doc! { "$and": [is_reader(), Grant::Reader.outlives_now("$$r.ttl")] }
}

/// The readers for which `hold` is true; none if there is no list of readers.
pub(super) fn readers_that(hold: impl Into<Bson>) -> Document {
    doc! { "$filter": { "input": readers(), "as": "r", "cond": hold.into() } }
}

/// True if `holds` is true for some reader.
pub(super) fn some_reader(holds: impl Into<Bson>) -> Document {
    doc! { "$anyElementTrue": [
        { "$map": { "input": readers(), "as": "r", "in": holds.into() } },
    ] }
}

pub(super) fn readers() -> Document {
    doc! { "$cond": [is_shared(), "$readers", []] }
}

/// True if the record has a list of readers, even if all of them have expired.
pub(super) fn is_shared() -> Document {
    doc! { "$isArray": "$readers" }
}

/// True if somebody holds the lock, in either mode: for readers, `ts` and `ttl` describe the one that
/// expires last.
///
/// A record without a ttl is a foreign one, and has the ttl of the collection. A record without a date
/// is dead, for the TTL index, too.
pub(super) fn is_live(foreign_ttl: Duration) -> Document {
    let ttl = doc! { "$cond": [{ "$isNumber": "$ttl" }, "$ttl", millis(foreign_ttl)] };
    doc! { "$and": [is("$ts", "date"), Grant::Exclusive.outlives_now(ttl)] }
}

/// When `r` was granted or renewed, in milliseconds.
pub(super) fn began() -> Document {
    within_bounds(doc! { "$toLong": "$$r.ts" })
}

/// When `r` expires, in milliseconds.
pub(super) fn expires() -> Document {
    doc! { "$add": [began(), within_bounds("$$r.ttl")] }
}

fn within_bounds(millis: impl Into<Bson>) -> Document {
    doc! { "$toLong": { "$min": [{ "$max": [millis.into(), 0_i64] }, FAR] } }
}

/// The next fencing token: higher than the last one. If all records were lost, it is still higher than
/// any earlier token, as long as the clock is not set back.
///
/// A value that cannot be such a token counts as zero.
pub(super) fn next_fence() -> Document {
    let is_sound = doc! { "$and": [
        { "$isNumber": "$fence" }, { "$gte": ["$fence", 0] }, { "$lt": ["$fence", i64::MAX / 2] },
    ] };
    let last = doc! { "$cond": [is_sound, { "$toLong": "$fence" }, 0_i64] };
    doc! { "$max": [{ "$add": [last, 1_i64] }, { "$toLong": "$$NOW" }] }
}

/// The fields of an exclusive lock that is renewed. The record of a foreign program has no ttl of its own, and gets
/// none here.
pub(super) fn renewed_exclusive(ttl: impl Into<Bson>, rules: &Rules) -> Document {
    let capped = Grant::Exclusive.capped(ttl);
    let is_ours = doc! { "$isNumber": "$ttl" };
    let ttl = doc! { "$cond": [is_ours.clone(), capped.clone(), millis(rules.ttl)] };
    let has_end = doc! { "$or": [is_ours, Grant::Exclusive.has_max_hold()] };
    doc! {
        "ts": Grant::Exclusive.not_before(),
        "ttl": { "$cond": [has_end, capped, { "$ifNull": ["$ttl", "$$REMOVE"] }] },
        "due": due_again(ttl, rules),
    }
}

/// When the sweep must look at an exclusive lock that is renewed for `ttl`. If `ts` tells that already,
/// the field is left out, unless the record had it before.
pub(super) fn due_again(ttl: impl Into<Bson>, rules: &Rules) -> Document {
    let ttl = ttl.into();
    let is_shorter = doc! { "$lt": [ttl.clone(), millis(rules.ttl)] };
    doc! { "$cond": [
        { "$or": [is("$due", "date"), is_shorter] },
        { "$add": [Grant::Exclusive.not_before(), { "$min": [ttl, millis(rules.ttl)] }] },
        "$$REMOVE",
    ] }
}
