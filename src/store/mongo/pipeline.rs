//! The filters and updates of the commands, as pure functions.
//!
//! Two rules keep strings from users from being read as operators: in a filter, write `{field: {$eq:
//! …}}`; in a pipeline, write `{$literal: …}`. Only `_id` may stand without an operator: see [`by_id`].

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    key::LockId,
    lock::{Aid, LockToken, Mode},
    store::{Acquisition, Active, Claim, Named, Rules, Taken},
};

mod acquire;
mod grant;
mod queue;
mod settle;

use grant::{is_live, readers};
pub(super) use {
    acquire::{FORMER, acquire, acquire_if_free, acquire_shortly, former, hand_over, handed},
    grant::{Grant, is_live_reader, is_reader, is_shared, readers_that, runs_out, some_reader},
    queue::{drawn, set_place},
    settle::{left_over, no_live_place, nothing_held, nothing_in_it, take_out},
};

/// In the answer to the short form of a claim: the full form must follow.
pub(super) const MORE: &str = "more";

/// In the answer to a read: the record of the lock.
pub(super) const RECORD: &str = "lock";
/// In the same read: the document.
pub(super) const DOCUMENT: &str = "document";

/// The record with this `_id`. The filter of an upsert must contain nothing else: the server refuses
/// `$expr` there, and retries a duplicate key only for plain equality on `_id`.
///
/// Written without `$eq`, with which the server would plan the query (a tenth of the cost of an
/// acquire). A [`LockId`] is a number, a string or bytes, and never a document or a pattern with a
/// special meaning.
pub(super) fn by_id(id: &LockId) -> Document {
    doc! { "_id": Bson::from(id) }
}

/// One grant, live or expired, as a command names it.
#[derive(Debug, Clone)]
pub(super) struct Target<'a> {
    pub(super) id: &'a LockId,
    aid: &'a Aid,
    /// The token; or those of all attempts of a claim, any of which may have been granted.
    tokens: Vec<String>,
    /// Shared if the mode is not known.
    pub(super) mode: Mode,
    /// Only if no other request was told that the session has the lock.
    unless_told: bool,
}

impl<'a> Target<'a> {
    pub(super) fn of(it: &'a Acquisition) -> Self {
        let tokens = vec![it.token.to_string()];
        Self { id: it.key.id(), aid: &it.aid, tokens, mode: it.mode, unless_told: false }
    }

    /// The same, if it is a grant of an exclusive lock.
    pub(super) fn exclusive(it: &'a Acquisition) -> Self {
        Self { mode: Mode::Exclusive, ..Self::of(it) }
    }

    /// What any of these attempts of a claim was granted, unless another request was told of it.
    pub(super) fn untold(attempts: &'a [Acquisition]) -> Option<Self> {
        let tokens = attempts.iter().map(|it| it.token.to_string()).collect();
        Some(Self { tokens, unless_told: true, ..Self::of(attempts.first()?) })
    }

    /// Matches the record of the lock.
    pub(super) fn filter(&self) -> Document {
        self.filter_with(&doc! {})
    }

    /// The record if it contains nothing else, so that it may be deleted as a whole.
    pub(super) fn alone(&self, rules: &Rules) -> Document {
        let mut filter = self.filter_with(&doc! { "$size": 1 });
        if rules.fair {
            filter.insert("queue", doc! { "$exists": false });
        }
        filter
    }

    fn filter_with(&self, readers: &Document) -> Document {
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
        let mut filter = by_id(self.id);
        if self.mode == Mode::Exclusive {
            filter.extend(grant);
        } else {
            let mut reader = readers.clone();
            reader.insert("$elemMatch", grant.clone());
            filter.insert("$or", [grant, doc! { "readers": reader }].to_vec());
        }
        filter
    }

    /// The same for records that were read.
    pub(super) fn grantee(&self) -> Grantee {
        let Self { aid, tokens, unless_told, .. } = self;
        Grantee { aid: (*aid).clone(), tokens: tokens.clone(), unless_told: *unless_told }
    }

    /// Whether `grant` is this acquisition.
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
}

/// A [`Target`] without its document.
#[derive(Debug)]
pub(super) struct Grantee {
    aid: Aid,
    tokens: Vec<String>,
    unless_told: bool,
}

impl Grantee {
    /// Whether it is removed only if no other request was told of it.
    pub(super) fn is_retracted(&self) -> bool {
        self.unless_told
    }

    /// Whether the exclusive lock in this record is this acquisition.
    pub(super) fn has(&self, record: &Document) -> bool {
        record.get_str("aid").is_ok_and(|aid| aid == self.aid.as_str())
            && record.get_str("token").is_ok_and(|it| self.tokens.iter().any(|token| token == it))
            && !(self.unless_told && record.contains_key("again"))
    }
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

/// The records in which one of these sessions has or had an exclusive lock.
pub(super) fn exclusive_of(aids: &[Aid]) -> Document {
    let aids: Vec<_> = aids.iter().map(Aid::as_str).collect();
    doc! { "aid": { "$in": aids } }
}

/// Makes an exclusive lock expire after `grace` at the latest, like a `max_hold`. The actual end of
/// `max_hold` is kept in `leaving`, for a page that comes back.
pub(super) fn expire_in(grace: Duration) -> Vec<Document> {
    let by = doc! { "$add": ["$$NOW", millis(grace)] };
    let until = "$until";
    let known = doc! { "$cond": [Grant::Exclusive.has_max_hold(), until, by.clone()] };
    let before = doc! { "$cond": [grant::is_leaving(), "$leaving", { "until": until }] };
    expire_by(doc! { "until": { "$min": [known, by] }, "leaving": before })
}

/// Makes an exclusive lock expire now, and tells watchers by whom.
pub(super) fn take_away(token: LockToken, by: &Taken) -> Vec<Document> {
    expire_by(doc! { "until": "$$NOW", "taken": taken(token, by) })
}

/// Only shortens the lease. Sets `due`, because `ts` alone no longer tells the expiry.
fn expire_by(changed: Document) -> Vec<Document> {
    let left = doc! { "$subtract": ["$until", "$ts"] };
    vec![
        doc! { "$set": changed },
        doc! { "$set": { "ttl": { "$min": ["$ttl", left] } } },
        doc! { "$set": { "due": { "$add": ["$ts", "$ttl"] } } },
    ]
}

/// How a record states that `token` was taken from its holder: as one string of JSON. If it were a
/// document, a change stream would report only those of its fields that changed.
fn taken(token: LockToken, by: &Taken) -> Document {
    literal(&taken_text(token, by))
}

pub(super) fn taken_text(token: LockToken, by: &Taken) -> String {
    json!({ "token": token, "by": by.by, "reason": by.reason }).to_string()
}

/// Parses the string of [`taken_text`].
pub(super) fn read_taken(text: &str) -> Option<(LockToken, Taken)> {
    let taken: Value = serde_json::from_str(text).ok()?;
    let text = |name: &str| taken.get(name)?.as_str();
    let by = Taken { by: text("by")?.to_owned(), reason: text("reason")?.to_owned() };
    Some((text("token")?.parse().ok()?, by))
}

/// Narrows `filter` to live locks.
pub(super) fn and_live(mut filter: Document, foreign_ttl: Duration) -> Document {
    filter.insert("$expr", is_live(foreign_ttl));
    filter
}

/// The records with a lock that is to be renewed.
///
/// What one session names also counts for the others, so that the filter stays short. That changes nothing: tabs and
/// tokens have random names that only their own session knows.
pub(super) fn renewable(active: &[Active], foreign_ttl: Duration) -> Document {
    let aids: Vec<_> = active.iter().map(|it| it.aid.clone()).collect();
    let whole = active.iter().filter(|it| it.named.is_none()).map(|it| it.aid.as_str());
    let (mut tabs, mut tokens) = (vec![Bson::Null], Vec::new());
    for named in active.iter().filter_map(|it| it.named.as_ref()).flatten() {
        match named {
            Named::Tab(tab) => tabs.push(tab.to_string().into()),
            Named::Token(token) => tokens.push(token.to_string()),
        }
    }
    let mut exclusive = exclusive_of(&aids);
    let is_named = doc! { "$or": [
        { "tab": { "$in": tabs } },
        { "token": { "$in": tokens } },
        { "aid": { "$in": whole.collect::<Vec<_>>() } },
    ] };
    exclusive.extend(is_named);
    held(exclusive, &aids, foreign_ttl)
}

/// The locks that these sessions hold.
pub(super) fn held_by(aids: &[Aid], foreign_ttl: Duration) -> Document {
    held(exclusive_of(aids), aids, foreign_ttl)
}

fn held(exclusive: Document, aids: &[Aid], foreign_ttl: Duration) -> Document {
    let mut filter = or_shared(exclusive);
    let reads = some_reader(doc! { "$and": [is_of(Grant::Reader, aids), is_live_reader()] });
    let holds = doc! { "$or": [{ "$not": [is_shared()] }, reads] };
    filter.insert("$expr", doc! { "$and": [is_live(foreign_ttl), holds] });
    filter
}

/// Whether the grant is one of these sessions'.
pub(super) fn is_of(grant: Grant, aids: &[Aid]) -> Document {
    let aids: Vec<_> = aids.iter().map(Aid::as_str).collect();
    doc! { "$in": [grant.field("aid"), { "$literal": aids }] }
}

/// Whether the grant has expired, and so counts as absent.
pub(super) fn has_run_out(grant: Grant, foreign_ttl: Duration) -> Document {
    match grant {
        Grant::Reader => doc! { "$not": [is_live_reader()] },
        Grant::Exclusive => doc! { "$not": [is_live(foreign_ttl)] },
    }
}

/// Renews the leases of these sessions, for at least `ttl`.
pub(super) fn renew(aids: &[Aid], ttl: Duration, rules: &Rules) -> Vec<Document> {
    let mine = doc! { "$and": [is_of(Grant::Reader, aids), is_live_reader()] };
    let longer = doc! { "$max": ["$$r.ttl", millis(ttl)] };
    let renewed = doc! { "$mergeObjects": [
        "$$r", { "ts": Grant::Reader.not_before(), "ttl": Grant::Reader.capped(longer) },
    ] };
    let each = doc! { "$cond": [mine, renewed, "$$r"] };
    let shared = doc! { "readers": { "$map": { "input": readers(), "as": "r", "in": each } } };
    let longer = doc! { "$max": ["$ttl", millis(ttl)] };
    let renewed = doc! { "$cond": [is_shared(), shared, renewed_exclusive(longer, rules)] };
    let mut stages = vec![doc! { "$replaceWith": { "$mergeObjects": ["$$ROOT", renewed] } }];
    stages.extend(settle::settle(rules));
    stages
}

/// Renews the lock for a save, and marks it as known to a request.
///
/// The name of the save is always new, so that the record changes even if no date does. With a `ts`
/// ahead of the clock (after a failover from a server whose clock was ahead, or within one millisecond)
/// all other fields may stay the same, and a transaction that writes nothing conflicts with nothing.
pub(super) fn renew_for_save(save: Uuid, rules: &Rules) -> Vec<Document> {
    let mut renewed = renewed_exclusive("$ttl", rules);
    renewed.insert("again", true);
    renewed.insert("saved", save.to_string());
    vec![doc! { "$set": renewed }]
}

/// The record of a foreign program has no ttl of its own, and gets none here.
fn renewed_exclusive(ttl: impl Into<Bson>, rules: &Rules) -> Document {
    let capped = Grant::Exclusive.capped(ttl);
    let is_ours = doc! { "$isNumber": "$ttl" };
    let ttl = doc! { "$cond": [is_ours.clone(), capped.clone(), millis(rules.ttl)] };
    let has_end = doc! { "$or": [is_ours, Grant::Exclusive.has_max_hold()] };
    doc! {
        "ts": Grant::Exclusive.not_before(),
        "ttl": { "$cond": [has_end, capped, { "$ifNull": ["$ttl", "$$REMOVE"] }] },
        "due": acquire::due_again(ttl, rules),
    }
}

/// The fields of a lock, and `now` to compute its remaining time. Of several readers: the one of this
/// session, or else the one that expires last.
pub(super) fn lock_fields(aid: Option<&Aid>) -> Document {
    let reader = match aid {
        None => latest(readers_that(is_reader())),
        Some(aid) => {
            let mine = doc! { "$eq": ["$$r.aid", literal(aid.as_str())] };
            let mine = readers_that(doc! { "$and": [mine, is_live_reader()] });
            let or_latest = doc! { "$cond": [
                { "$eq": ["$$mine", []] },
                latest(readers_that(is_reader())),
                { "$arrayElemAt": ["$$mine", 0] },
            ] };
            doc! { "$let": { "vars": { "mine": mine }, "in": or_latest } }
        }
    };
    reader_field(reader)
}

/// The record of a lock as it is, and the server's time. Computes nothing: any expression would cost the
/// server more than the whole read.
pub(super) fn whole() -> Document {
    doc! { "_id": 0, RECORD: "$$ROOT", "now": "$$NOW" }
}

/// Reads the lock of one document, with the server's time. With `$set` the read takes a tenth less time than
/// with a projection of the [`whole`].
pub(super) fn record(id: &LockId) -> Vec<Document> {
    vec![doc! { "$match": by_id(id) }, doc! { "$set": { "now": "$$NOW" } }]
}

/// Reads the document itself after the lock.
pub(super) fn with_document(collection: &str, id: &LockId) -> Document {
    let wrapped = doc! { "$replaceWith": { DOCUMENT: "$$ROOT" } };
    doc! { "$unionWith": { "coll": collection, "pipeline": [{ "$match": by_id(id) }, wrapped] } }
}

/// As [`lock_fields`], for the answer to this claim: the session's own lock, or the lock or place that is in its
/// way.
pub(super) fn answer_fields(claim: &Claim, rules: &Rules) -> Document {
    let mut fields = match claim.mode {
        Mode::Shared => lock_fields(Some(&claim.aid)),
        Mode::Exclusive => {
            let others = doc! { "$ne": ["$$r.aid", literal(claim.aid.as_str())] };
            let others = doc! { "$and": [others, is_reader()] };
            reader_field(latest(readers_that(others)))
        }
    };
    if rules.fair {
        fields.insert("place", queue::first_of(queue::in_the_way_of(claim)));
    }
    fields
}

/// The same with all live readers.
pub(super) fn list_fields() -> Document {
    fields_with("readers", readers_that(is_live_reader()))
}

/// The fields of an exclusive lock, expired or not, and of those readers that are of these sessions. For one
/// session the server computes nothing, as for [`whole`].
pub(super) fn fields_for(aids: &[Aid]) -> Document {
    let [aid] = aids else {
        return fields_with("readers", readers_that(is_of(Grant::Reader, aids)));
    };
    let mut fields = exclusive_fields();
    fields.insert("readers", doc! { "$elemMatch": { "aid": aid.as_str() } });
    fields
}

/// Null if there are readers, but none that matches.
fn reader_field(reader: Document) -> Document {
    fields_with("reader", doc! { "$ifNull": [reader, Bson::Null] })
}

fn fields_with(name: &str, of_readers: Document) -> Document {
    let mut fields = exclusive_fields();
    fields.insert(name, doc! { "$cond": [is_shared(), of_readers, "$$REMOVE"] });
    fields
}

fn exclusive_fields() -> Document {
    doc! {
        "ts": 1, "ttl": 1, "aid": 1, "token": 1, "tab": 1, "since": 1, "holder": 1, "fence": 1,
        "now": "$$NOW",
    }
}

/// For the answer to the short form of a claim: the fields of an exclusive lock, and whether the full
/// form must follow.
pub(super) fn short_answer_fields(claim: &Claim) -> Document {
    let mut fields = exclusive_fields();
    fields.insert(MORE, acquire::more_to_it(claim));
    fields
}

/// The reader that expires last. It is live if any of them is.
fn latest(readers: Document) -> Document {
    let ends = doc! { "$map": { "input": "$$readers", "as": "r", "in": runs_out() } };
    let last = doc! { "$indexOfArray": ["$$ends", { "$max": "$$ends" }] };
    let last = doc! { "$arrayElemAt": ["$$readers", last] };
    let last = doc! { "$let": { "vars": { "ends": ends }, "in": last } };
    doc! { "$let": { "vars": { "readers": readers }, "in": last } }
}

fn literal(text: &str) -> Document {
    doc! { "$literal": text }
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
