//! The locks that an end names: as values, and in the fields `locks`, `more`, `holder` and `leases`.

use mongodb::bson::{Bson, Document, doc};

use crate::{
    ended::MAX_NAMED_LOCKS,
    key::{LockId, LockKey},
    lock::{Holder, LockToken, Mode},
    store::{
        lock_rules::Grant,
        mongo::{
            codec::{self, documents},
            lock_record::lease,
        },
    },
};

/// A lock that a session has or had.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Held {
    pub(super) key: LockKey,
    /// Names the grant and its last renewal. `None` for the lock of a foreign program.
    pub(super) lease: Option<String>,
}

impl Held {
    pub(super) fn key_and_token(&self) -> Option<(LockKey, LockToken)> {
        let (token, _) = self.lease.as_ref()?.split_once('/')?;
        Some((self.key.clone(), token.parse().ok()?))
    }
}

/// An expired grant.
pub(super) struct Expired {
    pub(super) collection: String,
    pub(super) id: Bson,
    pub(super) token: String,
    /// Names the grant and its last renewal.
    pub(super) lease: String,
    pub(super) shared: bool,
    /// False if the grant expired because of its `max_hold`.
    pub(super) idle: bool,
    /// Another session has replaced the lock, and left this trace of the grant.
    pub(super) trace: Option<Bson>,
}

impl Expired {
    /// `None` for the lock of a foreign program. Its session is not ours to end.
    pub(super) fn of_grant(key: &LockKey, grant: &Grant) -> Option<Self> {
        Some(Self {
            collection: key.collection().to_owned(),
            id: key.id().into(),
            token: grant.token?.to_string(),
            lease: lease(grant)?,
            shared: grant.mode == Mode::Shared,
            idle: !grant.has_reached_max_hold(),
            trace: None,
        })
    }

    /// `row` has the `_id` of the document, and the id of the trace if there is one; `gone` is the grant.
    pub(super) fn of(collection: String, row: &Document, gone: &Document) -> Self {
        Self {
            collection,
            id: row.get("_id").cloned().unwrap_or(Bson::Null),
            token: gone.get_str("token").unwrap_or_default().to_owned(),
            lease: gone.get_str("lease").unwrap_or_default().to_owned(),
            shared: gone.get_bool("shared").unwrap_or(false),
            idle: gone.get_bool("idle").unwrap_or(true),
            trace: row.get("trace").cloned(),
        }
    }

    fn key(&self) -> Option<LockKey> {
        LockKey::new(self.collection.as_str(), LockId::from_bson(&self.id)?).ok()
    }

    pub(super) fn named(&self) -> Option<Held> {
        Some(Held { key: self.key()?, lease: Some(self.lease.clone()) })
    }

    pub(super) fn key_and_token(&self) -> Option<(LockKey, LockToken)> {
        Some((self.key()?, self.token.parse().ok()?))
    }
}

/// The locks of a session that has ended.
#[derive(Default)]
pub(super) struct Names {
    pub(super) locks: Vec<Held>,
    /// How many locks there are beyond these.
    pub(super) more: usize,
    /// The holder of one of these locks.
    pub(super) holder: Option<Holder>,
    /// The traces of those locks that another session has replaced.
    pub(super) traces: Vec<Bson>,
    /// True if a list of readers may contain the session.
    pub(super) may_read: bool,
}

impl Names {
    /// Another session has replaced this lock. Its name is left out if an end has it already.
    pub(super) fn add(&mut self, expired: Expired) {
        let named = expired.named().filter(|it| expired.idle && !self.locks.contains(it));
        self.locks.extend(named);
        self.traces.extend(expired.trace);
    }

    pub(super) fn locked_keys(&self) -> impl Iterator<Item = &LockKey> {
        self.locks.iter().map(|it| &it.key)
    }
}

/// Stores the names of the locks that are about to be released, and whose they are. Locks that were named before are
/// left out: they were told, or will be.
pub(super) fn with_names(names: &Names) -> Document {
    let holder =
        names.holder.as_ref().map_or(Bson::from("$$REMOVE"), |Holder { label, user, .. }| {
            let literal = |text: &String| Bson::from(doc! { "$literal": text });
            let user = user.as_ref().map_or(Bson::from("$$REMOVE"), literal);
            doc! { "label": literal(label), "user": user }.into()
        });
    let some = || names.locks.iter().take(MAX_NAMED_LOCKS);
    let named = |it: &Held| {
        let id = Bson::from(it.key.id());
        Bson::from(doc! { "c": it.key.collection(), "id": id, "lease": &it.lease })
    };
    let new: Vec<_> = some().map(named).collect();
    let new = doc! { "$filter": {
        "input": { "$literal": new }, "as": "it",
        "cond": { "$not": [{ "$in": ["$$it.lease", leases()] }] },
    } };
    let new = doc! { "$map": {
        "input": new, "as": "it", "in": { "c": "$$it.c", "id": "$$it.id" },
    } };
    let all = with(locks(), new);
    let new: Vec<_> = some().filter_map(|it| it.lease.as_ref()).map(Bson::from).collect();
    let all_leases = with(leases(), doc! { "$literal": new });
    let (most, unsent) =
        (MAX_NAMED_LOCKS as i64, names.locks.len().saturating_sub(MAX_NAMED_LOCKS));
    let unsent = i64::try_from(unsent + names.more).unwrap_or(i64::MAX);
    let unnamed = doc! { "$max": [{ "$subtract": [{ "$size": all.clone() }, most] }, 0] };
    let more = match unsent {
        // All that are not new are left out by their leases.
        0 => doc! { "$add": [unnamed, { "$cond": [{ "$isNumber": "$more" }, "$more", 0] }] },
        // A repetition finds fewer locks: the rest has been removed, and was counted then.
        unsent => doc! { "$max": [{ "$add": [unnamed, unsent] }, "$more"] },
    };
    let more = doc! { "$cond": [{ "$gt": [more.clone(), 0] }, more, "$$REMOVE"] };
    doc! { "$set": {
        "locks": { "$slice": [all, most] },
        "more": more,
        "holder": { "$ifNull": ["$holder", holder] },
        "leases": { "$slice": [all_leases, -most] },
    } }
}

/// The known values, then the new ones.
fn with(known: Document, new: Document) -> Document {
    doc! { "$let": {
        "vars": { "known": known },
        "in": { "$concatArrays": ["$$known", { "$setDifference": [new, "$$known"] }] },
    } }
}

/// The names of the record, if this condition holds.
pub(super) fn names_if(condition: Document) -> Document {
    doc! {
        "locks": { "$cond": [condition.clone(), locks(), []] },
        "more": { "$cond": [condition.clone(), "$more", "$$REMOVE"] },
        "holder": { "$cond": [condition, "$holder", "$$REMOVE"] },
    }
}

/// True if ends have named all of these leases.
pub(super) fn has_named(leases_found: Vec<String>) -> Document {
    doc! { "$setIsSubset": [{ "$literal": leases_found }, leases()] }
}

fn leases() -> Document {
    doc! { "$cond": [{ "$isArray": "$leases" }, "$leases", []] }
}

pub(super) fn locks() -> Document {
    doc! { "$cond": [{ "$isArray": "$locks" }, "$locks", []] }
}

pub(super) fn locks_in(end: &Document) -> Vec<LockKey> {
    let key = |name: &Document| {
        let id = LockId::from_bson(name.get("id")?)?;
        LockKey::new(name.get_str("c").ok()?, id).ok()
    };
    documents(end, "locks").filter_map(key).collect()
}

/// How many locks the end has not named.
pub(super) fn more_in(end: &Document) -> usize {
    let more = end.get("more").and_then(codec::number).unwrap_or(0.0);
    more as usize
}
