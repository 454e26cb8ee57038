//! The record of an end, its states and their transitions.
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
//!   more:   <how many locks it has not named>,
//!   holder: { label, user },           // of one of these locks
//!   leases: [ "<token>/<ms of its last renewal>" ],   // of the locks that an end or a note has named: not named again
//!   noted:  <Date: until when the names count although no step is left>,
//!   taken:  <how often it was taken to be announced>,
//!   told:   true }                     // already announced; its locks are being released once more
//! ```
//!
//! [`EndState`] has the table of transitions. Each transition is a function here: to [`permanent`], [`idle`], [`noted`],
//! [`ready`], [`told`] and [`withdrawn`]. `is_in` says which fields encode a state. A note has neither `reason` nor `event`,
//! unless the session was idle before.

use std::{collections::HashMap, time::Duration};

use mongodb::bson::{Document, doc};
use uuid::Uuid;

use crate::{
    ended::{EndReason, SessionEnded},
    lock::{Aid, LockToken},
    store::{
        LastEnd,
        end_state::EndState::{self, Noted, Ready, Releasing, ReleasingAgain, Told},
        mongo::{
            codec::{aid_in, holder_in, is, millis, presentable},
            ends::{
                Ends, is_repeated, is_reserved_for_another,
                names::{self, Names},
            },
            error::Result,
            send::{Timing, Write, rows},
        },
    },
};

/// The step of an end in the states [`Releasing`] and [`ReleasingAgain`].
pub(super) const RELEASE: &str = "release";
/// The step of an end in the state [`Ready`].
pub(super) const ANNOUNCE: &str = "announce";
/// The states in which the names of an end are still to be told.
const UNTOLD: [EndState; 3] = [Noted, Releasing, Ready];
/// How long an end that a worker has begun is reserved for that worker.
const RELEASE_LEASE: Duration = Duration::from_secs(10);

/// True if the end is in one of these states.
fn is_in(states: &[EndState]) -> Document {
    let has_step = doc! { "$in": ["$step", [RELEASE, ANNOUNCE]] };
    let (is_told, is_noted) =
        (doc! { "$eq": ["$told", true] }, doc! { "$gt": ["$noted", "$$NOW"] });
    let is_in = |state: &EndState| match state {
        Noted => doc! { "$and": [{ "$not": [&has_step] }, &is_noted] },
        Releasing => doc! { "$and": [{ "$eq": ["$step", RELEASE] }, { "$not": [&is_told] }] },
        Ready => doc! { "$eq": ["$step", ANNOUNCE] },
        Told => doc! { "$not": [{ "$or": [&has_step, &is_noted] }] },
        ReleasingAgain => doc! { "$and": [{ "$eq": ["$step", RELEASE] }, &is_told] },
    };
    doc! { "$or": states.iter().map(is_in).collect::<Vec<_>>() }
}

fn is_permanent() -> Document {
    doc! { "$and": [is("$ts", "date"), { "$ne": ["$silent", true] }] }
}

/// To [`Releasing`], permanently. A session that has already ended permanently stays as it is, unless this worker may
/// continue that end.
///
/// If an idle end was not announced yet, its locks are announced with this end.
pub(super) fn permanent(reason: EndReason, worker: Uuid) -> Vec<Document> {
    let mut end = begin(reason, worker);
    end.extend(names::names_if(is_in(&UNTOLD)));
    let is_unfinished = is_in(&[Releasing, ReleasingAgain]);
    let is_ours = doc! { "$not": [is_reserved_for_another(worker)] };
    vec![doc! { "$replaceWith": { "$switch": {
        "branches": [
            { "case": { "$and": [is_permanent(), is_unfinished, is_ours] }, "then": go_on(worker) },
            { "case": is_permanent(), "then": "$$ROOT" },
        ],
        "default": end,
    } } }]
}

/// To [`Releasing`]: of a session whose leases `found` have expired, or an end that another worker did not finish.
pub(super) fn idle(found: Vec<String>, worker: Uuid) -> Vec<Document> {
    let mut idle = begin(EndReason::Expired, worker);
    idle.insert("silent", true);
    idle.extend(names::names_if(is_in(&[Noted])));
    let again = doc! { "$mergeObjects": [go_on(worker), { "told": true }] };
    let is_unfinished = is_in(&[Releasing, Ready, ReleasingAgain]);
    vec![doc! { "$replaceWith": { "$switch": {
        "branches": [
            { "case": is_reserved_for_another(worker), "then": "$$ROOT" },
            { "case": is_unfinished, "then": go_on(worker) },
            // Ended and announced long ago. The expired lock was acquired in spite of that end.
            { "case": is_permanent(), "then": again },
            // Another worker has named all of these leases.
            { "case": { "$and": [names::has_named(found), is_in(&[Told])] }, "then": "$$ROOT" },
        ],
        "default": idle,
    } } }]
}

/// To [`Noted`]: remembers for the ttl that these locks expired while their session had others. If the session turns
/// out to be idle, they were just the first to expire: its requests did not renew all locks at the same
/// moment. If the session has ended meanwhile, they belong to that end, unless it was announced already.
pub(super) fn noted(names: &Names, ttl: i64) -> Vec<Document> {
    let noted = doc! {
        "noted": { "$add": ["$$NOW", ttl] },
        "locks": { "$cond": [is_in(&UNTOLD), names::locks(), []] },
        "more": { "$cond": [is_in(&UNTOLD), { "$ifNull": ["$more", 0] }, 0] },
    };
    let noted = doc! { "$mergeObjects": [{ "ts": "$$NOW", "silent": true }, "$$ROOT", noted] };
    let once = doc! { "$replaceWith": { "$cond": [is_permanent(), "$$ROOT", noted] } };
    vec![once, names::with_names(names)]
}

/// To [`Ready`], because the locks are gone; or to [`Told`], if the end was told before.
pub(super) fn ready() -> Write {
    Write::Update(vec![doc! { "$set": {
        "step": { "$cond": [{ "$eq": ["$told", true] }, "$$REMOVE", ANNOUNCE] },
        "by": "$$REMOVE",
        "lease": "$$REMOVE",
    } }])
}

/// To [`Told`].
pub(super) fn told() -> Write {
    let done = ["step", "by", "lease", "locks", "more", "holder", "noted", "taken"];
    Write::Update(vec![doc! { "$unset": done.as_slice() }])
}

/// To no end: only the leases that an earlier end has named are kept.
pub(super) fn withdrawn() -> Write {
    let gone = ["step", "by", "lease", "reason", "event", "locks", "more"];
    Write::Update(vec![doc! { "$unset": gone.as_slice() }])
}

fn begin(reason: EndReason, worker: Uuid) -> Document {
    let mut end = doc! {
        "_id": "$_id",
        "ts": "$$NOW",
        "reason": reason.as_str(),
        "event": Uuid::new_v4().to_string(),
    };
    end.extend(reserved(worker));
    end.insert("leases", doc! { "$cond": [{ "$isArray": "$leases" }, "$leases", "$$REMOVE"] });
    end
}

fn reserved(worker: Uuid) -> Document {
    let lease = doc! { "$add": ["$$NOW", millis(RELEASE_LEASE)] };
    doc! { "step": RELEASE, "by": worker.to_string(), "lease": lease }
}

fn go_on(worker: Uuid) -> Document {
    doc! { "$mergeObjects": ["$$ROOT", reserved(worker)] }
}

/// Matches the ends of these sessions whose locks this worker is removing.
pub(super) fn releasing<'a>(aids: impl Iterator<Item = &'a Aid>, worker: Uuid) -> Document {
    let ids: Vec<_> = aids.map(Aid::as_str).collect();
    doc! { "_id": { "$in": ids }, "by": worker.to_string(), "step": RELEASE }
}

pub(super) fn by_aid(aid: &Aid) -> Document {
    doc! { "_id": { "$eq": aid.as_str() } }
}

/// Matches the end of an idle session that has named this acquisition. A permanent end names live locks, too.
pub(super) fn idle_with(aid: &Aid, token: LockToken) -> Document {
    let lease = doc! { "$regex": format!("^{token}/") };
    doc! { "_id": { "$eq": aid.as_str() }, "silent": true, "leases": lease }
}

/// True if the session only became idle.
pub(super) fn is_idle(end: &Document) -> bool {
    end.get_bool("silent").unwrap_or(false)
}

/// The end, as a listener is told of it. `None` for a record that somebody has edited.
pub(super) fn ended_in(end: &Document) -> Option<SessionEnded> {
    Some(SessionEnded {
        event: end.get_str("event").ok()?.parse().ok()?,
        aid: aid_in(end, "_id"),
        holder: holder_in(end, "holder"),
        reason: EndReason::from_name(end.get_str("reason").unwrap_or_default()),
        for_good: !is_idle(end),
        locks: names::locks_in(end),
        more: names::more_in(end),
        at: presentable(end.get_datetime("ts").ok().copied()),
        repeated: is_repeated(end),
    })
}

impl Ends<'_> {
    // find returns for each session: how it ended last; or a note of expired locks, which is no end; or
    // nothing.
    pub(super) async fn last_ends(&self, aids: &[Aid]) -> Result<Vec<Option<LastEnd>>> {
        let ids: Vec<_> = aids.iter().map(Aid::as_str).collect();
        let ago = doc! { "$cond": [is("$ts", "date"), { "$subtract": ["$$NOW", "$ts"] }, 0_i64] };
        // A record with neither a date nor a reason is no end: an earlier version may have left it when an end was
        // withdrawn.
        let for_good =
            doc! { "$and": [{ "$ne": ["$silent", true] }, { "$not": [is("$ts", "missing")] }] };
        let fields = doc! { "reason": 1, "for_good": for_good, "ago": ago };
        let ended = &self.store.inner.ended;
        let found = ended.find(doc! { "_id": { "$in": ids } }).projection(fields);
        let found = rows(found.max_time(self.until.read_limit())).await?;
        let ends: HashMap<_, _> = (found.iter())
            .filter_map(|end| Some((end.get_str("_id").ok()?, last_end_in(end)?)))
            .collect();
        Ok(aids.iter().map(|aid| ends.get(aid.as_str()).copied()).collect())
    }
}

/// Of a record as [`last_ends`](Ends::last_ends) reads it. `None` for a mere note of expired locks.
fn last_end_in(end: &Document) -> Option<LastEnd> {
    let for_good = end.get_bool("for_good").unwrap_or(false);
    let reason = match end.get_str("reason") {
        Err(_) if !for_good => return None,
        reason => EndReason::from_name(reason.unwrap_or_default()),
    };
    let ago = end.get_i64("ago").ok().and_then(|ago| ago.try_into().ok()).unwrap_or(0);
    Some(LastEnd { reason, for_good, ago: Duration::from_millis(ago) })
}
