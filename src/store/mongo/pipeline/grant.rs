//! The fields of a grant in an expression. An exclusive grant stands in the record itself, the grants
//! of readers stand in its `readers`.
//!
//! An error in an expression would make the document unlockable forever, whatever a foreign program
//! wrote there. So every expression checks the type before it calculates, and stays within bounds.

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use crate::store::mongo::pipeline::millis;

/// Where the fields of a grant are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::store::mongo) enum Grant {
    /// An exclusive grant: in the record.
    Exclusive,
    /// The grant of a reader: in `r`, an element of `readers`.
    Reader,
}

/// Dates and ttls beyond this number of milliseconds are cut off, so that their sum is a valid date.
const FAR: i64 = 100_000_000_000_000;

impl Grant {
    pub(in crate::store::mongo) fn field(self, name: &str) -> String {
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
    pub(in crate::store::mongo) fn lease(self) -> Document {
        let (token, ts) = (self.field("token"), self.field("ts"));
        let renewed = doc! { "$cond": [is(&ts, "date"), { "$toString": { "$toLong": ts } }, ""] };
        doc! { "aid": self.field("aid"), "lease": { "$concat": [token, "/", renewed] } }
    }

    pub(super) fn has_max_hold(self) -> Document {
        is(&self.field("until"), "date")
    }

    /// Whether the last renewal could no longer grant the whole ttl.
    pub(in crate::store::mongo) fn has_reached_max_hold(self) -> Document {
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

/// Whether an exclusive lock is in its grace period, because its page has gone.
pub(super) fn is_leaving() -> Document {
    is("$leaving", "object")
}

/// Whether `r` is a reader, and not an entry that a foreign program put there.
pub(in crate::store::mongo) fn is_reader() -> Document {
    doc! { "$and": [
        is("$$r.ts", "date"),
        { "$isNumber": "$$r.ttl" },
        is("$$r.aid", "string"),
        is("$$r.token", "string"),
    ] }
}

pub(in crate::store::mongo) fn is_live_reader() -> Document {
    doc! { "$and": [is_reader(), Grant::Reader.outlives_now("$$r.ttl")] }
}

/// The readers for which `hold` is true; none if there is no list of readers.
pub(in crate::store::mongo) fn readers_that(hold: impl Into<Bson>) -> Document {
    doc! { "$filter": { "input": readers(), "as": "r", "cond": hold.into() } }
}

/// Whether `holds` is true for some reader.
pub(in crate::store::mongo) fn some_reader(holds: impl Into<Bson>) -> Document {
    doc! { "$anyElementTrue": [
        { "$map": { "input": readers(), "as": "r", "in": holds.into() } },
    ] }
}

pub(super) fn readers() -> Document {
    doc! { "$cond": [is_shared(), "$readers", []] }
}

/// Whether the record has a list of readers, even if all of them have expired.
pub(in crate::store::mongo) fn is_shared() -> Document {
    doc! { "$isArray": "$readers" }
}

/// Whether somebody holds the lock, in either mode: for readers, `ts` and `ttl` describe the one that
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
pub(in crate::store::mongo) fn runs_out() -> Document {
    doc! { "$add": [began(), within_bounds("$$r.ttl")] }
}

fn within_bounds(millis: impl Into<Bson>) -> Document {
    doc! { "$toLong": { "$min": [{ "$max": [millis.into(), 0_i64] }, FAR] } }
}

pub(super) fn is(field: &str, bson_type: &str) -> Document {
    doc! { "$eq": [{ "$type": field }, bson_type] }
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
