//! The ends of sessions, and the outbox. Unfinished work is recorded in `doclock.ended`, so that any server can
//! continue where another one stopped. That collection has four kinds of records.
//!
//! An end:
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
//! A takeover, or a break, in the [outbox](news):
//! ```text
//! { _id: "taken <event>",  ts: <Date>,  step: "tell",
//!   asked: true,                      // the lock was to be taken; absent when it is known to be taken
//!   by: "<worker>", lease: <Date>,    // as for ends; first the event itself, for the server that takes it
//!   taken: <how often it was taken to be told>,
//!   taking: { c: "<collection>", id: <_id>, aid, token, how: "broken" | "taken_over",
//!             from: { label, user? }, by: { label, user? }, reason } }
//! ```
//!
//! A [trace](former) of an expired lock that another session has replaced:
//! ```text
//! { _id:   "former/<lease>",
//!   ts:    <Date: when the trace was left>,
//!   step:  "look",                  // absent when a reaper has looked
//!   aid:   "<the former holder>",
//!   c: "<collection>", id: <_id>,   // what was locked
//!   lease: "<token>/<ms of its last renewal>" }
//! ```
//!
//! A page that has been left, which takes no lock any more: `{ _id: "<aid>/<page>", ts: <Date> }`.
//! indexes: ts (TTL), step (partial)

use std::{
    collections::HashMap,
    slice,
    time::{Duration, Instant},
};

use futures_util::future::{try_join, try_join_all};
use mongodb::{
    bson::{Bson, Document as Record, doc},
    options::ReturnDocument,
};
use uuid::Uuid;

use crate::{
    ended::{EndReason, MAX_NAMED_LOCKS},
    key::{LockId, LockKey},
    lock::{Aid, Holder, LockToken},
    store::{
        Acquisition, Deadline, Ended, LastEnd, News, NewsId, Outbox, Sessions, Settled, Swept,
        mongo::{
            LockCollection, MongoStore,
            codec::{self, aid_in, documents, is, millis},
            ends::{former::traces, overdue::Expired},
            error::{Result, is_duplicate_id},
            ids::by_id,
            read::Fetched,
            release::{Grants, Leased},
            send::{self, LIMIT, Timing, Write, refusals, rows, run},
        },
    },
    takeover::Takeover,
};

mod former;
mod news;
mod overdue;
mod sweep;

/// How many locks are read to be named in one command. With the longest possible ids the command must stay within
/// the limits of the server. Locks beyond that number are only counted.
const NAMES_AT_ONCE: usize = 8_000;
/// How long an end that a worker has begun is reserved for that worker.
const RELEASE_LEASE: Duration = Duration::from_secs(10);

impl Sessions for MongoStore {
    verbs! { self, until:
        end_session(aid: &Aid, reason: EndReason, collections: &[&str], worker: Uuid) -> Ended:
            self.ends(collections, worker, until).end_session(aid, reason),
            "ending a session";
        end_page(page: &Aid) -> ():
            self.ends(&[], Uuid::nil(), until).end_page(page),
            "noting that a page has been left";
        last_ends(aids: &[Aid]) -> Vec<Option<LastEnd>>:
            self.ends(&[], Uuid::nil(), until).last_ends(aids),
            "asking how sessions have ended";
        has_expired(held: &Acquisition) -> bool:
            self.ends(&[], Uuid::nil(), until).has_expired(held),
            "asking whether a lock has expired";
        sweep(collections: &[&str], worker: Uuid, limit: usize) -> Swept:
            self.ends(collections, worker, until).sweep(limit),
            "ending idle sessions";
        overdue(collections: &[&str], limit: usize) -> Vec<Aid>:
            self.ends(collections, Uuid::nil(), until).overdue(limit),
            "looking for sessions that are overdue";
        put_news(takeover: &Takeover, lease: Duration) -> ():
            self.ends(&[], takeover.event, until).put_news(takeover, lease),
            "noting a break or takeover";
        take_news(what: Outbox<'_>, worker: Uuid, lease: Duration, limit: usize) -> Vec<News>:
            self.ends(&[], worker, until).take_news(what, lease, limit),
            "taking news for listeners";
        settle_news(news: &[NewsId], worker: Uuid, settled: Settled) -> ():
            self.ends(&[], worker, until).settle_news(news, settled),
            "settling news for listeners";
    }
}

/// A call of a verb about ends.
#[derive(Clone, Copy)]
struct Ends<'a> {
    store: &'a MongoStore,
    collections: &'a [&'a str],
    worker: Uuid,
    until: Deadline,
}

/// A lock that a session has or had.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    key: LockKey,
    /// Names the grant and its last renewal. `None` for the lock of a foreign program.
    lease: Option<String>,
}

impl Held {
    fn key_and_token(&self) -> Option<(LockKey, LockToken)> {
        let (token, _) = self.lease.as_ref()?.split_once('/')?;
        Some((self.key.clone(), token.parse().ok()?))
    }
}

/// The locks of a session that has ended.
#[derive(Default)]
struct Names {
    locks: Vec<Held>,
    /// How many locks there are beyond these.
    more: usize,
    /// The holder of one of these locks.
    holder: Option<Holder>,
    /// The traces of those locks that another session has replaced.
    traces: Vec<Bson>,
    /// True if a list of readers may contain the session.
    may_read: bool,
}

impl Names {
    /// Another session has replaced this lock. Its name is left out if an end has it already.
    fn add(&mut self, expired: Expired) {
        let named = expired.named().filter(|it| expired.idle && !self.locks.contains(it));
        self.locks.extend(named);
        self.traces.extend(expired.trace);
    }

    fn locked_keys(&self) -> impl Iterator<Item = &LockKey> {
        self.locks.iter().map(|it| &it.key)
    }
}

impl MongoStore {
    fn ends<'a>(&'a self, collections: &'a [&'a str], worker: Uuid, until: Deadline) -> Ends<'a> {
        Ends { store: self, collections, worker, until }
    }
}

impl Ends<'_> {
    /// Two writes: the tombstone with the names of the locks, and the removal of the locks. The end is then
    /// left to [`settle_news`](Self::settle_news), or to a sweep if this process dies. After
    /// each step any worker can continue: the tombstone prevents new locks, and the names keep any lock from
    /// being forgotten.
    async fn end_session(&self, aid: &Aid, reason: EndReason) -> Result<Ended> {
        // If there is no answer soon, the tombstone comes first, and the names later.
        let soon = Self { until: Deadline::at(Instant::now() + LIMIT), ..*self };
        let before = soon.held_by(aid).await.unwrap_or_default();
        // findAndModify, an upsert, returns: a new end; or an idle end that became permanent; or an end that
        // an earlier attempt of this worker began, with the names that it stored; or the end of another
        // worker, which only gets more names.
        let mut end = self.end_for_good(reason);
        if !before.locks.is_empty() {
            end.push(name(&before));
        }
        let begun = (self.store.inner.ended)
            .find_one_and_update(by_aid(aid), end)
            .upsert(true)
            .return_document(ReturnDocument::After)
            .max_time(self.until.write_limit());
        let begun = send::modified(begun).await?;
        // A lock that was taken before the tombstone was there belonged to the session.
        let held = self.release_ended(aid, &before).await?;
        let (mut all, mut released): (_, Vec<_>) =
            (held.locks.len() + held.more, held.locked_keys().cloned().collect());
        let mine = begun.filter(|end| end.get_str("by").is_ok_and(|by| by == self.by()));
        if let Some(end) = &mine {
            all = all.max(names_of(end).len() + more_in(end));
            released.extend(names_of(end));
        } else {
            all = all.max(before.locks.len() + before.more);
            released.extend(before.locked_keys().cloned());
        }
        released.sort();
        released.dedup();
        // Nobody needs to look whether these documents are still locked.
        for key in &released {
            if let Ok(at) = self.store.prepared(key.collection(), self.until) {
                at.hints.gone(key.id());
            }
        }
        let more = all.saturating_sub(released.len());
        Ok(Ended { locks: released, more })
    }

    // update, an upsert, returns: noted. A repetition changes nothing.
    async fn end_page(&self, page: &Aid) -> Result<()> {
        let since = doc! { "$set": { "ts": { "$ifNull": ["$ts", "$$NOW"] } } };
        self.write(by_aid(page), &Write::Upsert(vec![since])).await.map(drop)
    }

    // find returns for each session: how it ended last; or a note of expired locks, which is no end; or
    // nothing.
    async fn last_ends(&self, aids: &[Aid]) -> Result<Vec<Option<LastEnd>>> {
        let ids: Vec<_> = aids.iter().map(Aid::as_str).collect();
        let ago = doc! { "$cond": [is("$ts", "date"), { "$subtract": ["$$NOW", "$ts"] }, 0_i64] };
        let fields = doc! { "reason": 1, "for_good": { "$ne": ["$silent", true] }, "ago": ago };
        let ended = &self.store.inner.ended;
        let found = ended.find(doc! { "_id": { "$in": ids } }).projection(fields);
        let found = rows(found.max_time(self.until.read_limit())).await?;
        let ends: HashMap<_, _> = (found.iter())
            .filter_map(|record| Some((record.get_str("_id").ok()?, last_end_in(record)?)))
            .collect();
        Ok(aids.iter().map(|aid| ends.get(aid.as_str()).copied()).collect())
    }

    // find returns: a record → it has expired. None → released, broken, not seen by a sweep, or forgotten.
    async fn has_expired(&self, held: &Acquisition) -> Result<bool> {
        let Acquisition { key, aid, token, .. } = held;
        let at = self.prepared(key.collection())?;
        let found = at.fetch(&at.primary, by_id(key.id()), 1).await?;
        for Fetched { record, moment, .. } in found {
            let grant = record.grants.iter().find(|grant| grant.is_acquisition(aid, *token));
            if let Some(grant) = grant {
                return Ok(grant.is_idle(moment.now));
            }
        }
        let lease = |of: &str| doc! { "$regex": format!("^{of}{token}/") };
        // A permanent end names live locks, too.
        let named = doc! { "_id": { "$eq": aid.as_str() }, "silent": true, "leases": lease("") };
        let mut replaced = doc! { "_id": lease("former/"), "aid": { "$eq": aid.as_str() } };
        replaced.extend(doc! { "c": { "$eq": key.collection() }, "id": { "$eq": key.id() } });
        let either = doc! { "$or": [named, replaced] };
        let found = self.store.inner.ended.find_one(either).projection(doc! { "_id": 1 });
        Ok(found.max_time(self.until.read_limit()).await?.is_some())
    }

    /// Stores the names of the locks of an ended session, then removes the locks. The names in `known` are already stored.
    async fn release_ended(&self, aid: &Aid, known: &Names) -> Result<Names> {
        let mut held = self.held_by(aid).await?;
        if held.more > 0 || held.locks.iter().any(|it| !known.locks.contains(it)) {
            self.write(by_aid(aid), &Write::Update(vec![name(&held)])).await?;
        }
        // The traces stay until their locks are named.
        let aids = slice::from_ref(aid);
        let all = Grants::Of(vec![aid.clone()]);
        let remove = self.remove(&all, held.may_read);
        let (replaced, ()) = try_join(self.replaced(aids), remove).await?;
        if !replaced.is_empty() {
            replaced.into_iter().for_each(|(_, expired)| held.add(expired));
            self.write(by_aid(aid), &Write::Update(vec![name(&held)])).await?;
            self.looked_at(&held.traces).await?;
        }
        Ok(held)
    }

    /// The locks of the session that are on record, live or expired.
    async fn held_by(&self, aid: &Aid) -> Result<Names> {
        let held = try_join_all(self.collections.iter().map(async |collection| {
            self.prepared(collection)?.of_session(aid, NAMES_AT_ONCE).await
        }));
        let mut names = Names::default();
        for of_session in held.await? {
            names.may_read |= of_session.may_read;
            names.more += of_session.more;
            for Leased { lock, lease, .. } in of_session.locks {
                names.holder = names.holder.or(lock.holder);
                names.locks.push(Held { key: lock.key, lease });
            }
        }
        Ok(names)
    }

    /// The locks of these sessions that other sessions have replaced, and that no sweep has seen. Must be read after the
    /// records: a lock that was replaced since then has a trace by now.
    async fn replaced(&self, aids: &[Aid]) -> Result<Vec<(Aid, Expired)>> {
        let ended = &self.store.inner.ended;
        let stages = traces(ended.name(), self.collections, Some(aids), NAMES_AT_ONCE as i64);
        let found = self.store.inner.ended.aggregate(stages).max_time(self.until.read_limit());
        let expired = |row: &Record| {
            let (gone, collection) =
                (row.get_document("gone").ok()?, row.get_str("collection").ok()?);
            Some((aid_in(gone, "aid"), Expired::of(collection.to_owned(), row, gone)))
        };
        Ok(rows(found).await?.iter().filter_map(expired).collect())
    }

    /// Marks these traces as seen: everything that the traces are kept for is now recorded.
    async fn looked_at(&self, traces: &[Bson]) -> Result<()> {
        if !traces.is_empty() {
            self.write(doc! { "_id": { "$in": traces } }, &former::seen()).await?;
        }
        Ok(())
    }

    /// Removes these grants. If `shared` is false, there are no readers among them.
    async fn remove(&self, grants: &Grants, shared: bool) -> Result<()> {
        let remove =
            async |collection| self.prepared(collection)?.remove_many(grants, shared).await;
        try_join_all(self.collections.iter().copied().map(remove)).await.map(drop)
    }

    fn prepared(&self, collection: &str) -> Result<LockCollection<'_>> {
        self.store.prepared(collection, self.until)
    }

    /// Sends one write on all matching records of `doclock.ended`.
    async fn write(&self, filter: Record, by: &Write) -> Result<u64> {
        send::write(&self.store.inner.ended, filter, by, self.until.write_limit()).await
    }

    /// Many updates of `doclock.ended` in one command. The driver has no method for that before MongoDB
    /// 8.
    async fn update_each(&self, updates: Vec<Record>) -> Result<()> {
        if updates.is_empty() {
            return Ok(());
        }
        let ended = &self.store.inner.ended;
        let command = doc! { "update": ended.name(), "updates": updates, "ordered": false };
        let reply = run(ended, command, self.until.read_limit()).await?;
        send::acknowledged(&reply, false)?;
        // Another server has claimed the same session at the same moment, and keeps it.
        refusals(&reply).into_values().find(|e| !is_duplicate_id(e)).map_or(Ok(()), Err)
    }

    fn by(&self) -> String {
        // A UUID has only hexadecimal digits and hyphens: it is never an operator or a field path.
        self.worker.to_string()
    }

    /// Ends the session permanently. A session that has already ended permanently stays as it is, unless
    /// this worker may continue that end.
    ///
    /// If an idle end was not announced yet, its locks are announced with this end.
    fn end_for_good(&self, reason: EndReason) -> Vec<Record> {
        let mut end = self.begin(reason);
        end.extend(untold(doc! { "$or": [has_step(), is_noted()] }));
        let is_done = doc! { "$ne": ["$step", "release"] };
        let is_done = doc! { "$or": [is_done, self.someone_else_is_at_it()] };
        vec![doc! { "$replaceWith": { "$switch": {
            "branches": [
                { "case": { "$and": [is_for_good(), is_done] }, "then": "$$ROOT" },
                { "case": is_for_good(), "then": self.go_on() },
            ],
            "default": end,
        } } }]
    }

    fn begin(&self, reason: EndReason) -> Record {
        let mut end = doc! {
            "_id": "$_id",
            "ts": "$$NOW",
            "reason": reason.as_str(),
            "event": Uuid::new_v4().to_string(),
        };
        end.extend(self.reserved());
        end.insert("leases", doc! { "$cond": [{ "$isArray": "$leases" }, "$leases", "$$REMOVE"] });
        end
    }

    fn reserved(&self) -> Record {
        let lease = doc! { "$add": ["$$NOW", millis(RELEASE_LEASE)] };
        doc! { "step": "release", "by": self.by(), "lease": lease }
    }

    fn go_on(&self) -> Record {
        doc! { "$mergeObjects": ["$$ROOT", self.reserved()] }
    }

    /// The ends that wait for this step, except those reserved for other workers.
    fn waits_for(&self, step: impl Into<Bson>) -> Record {
        doc! {
            "step": step.into(),
            "_id": { "$type": "string" },
            "$expr": { "$not": [self.someone_else_is_at_it()] },
        }
    }

    fn someone_else_is_at_it(&self) -> Record {
        doc! { "$and": [{ "$gt": ["$lease", "$$NOW"] }, { "$ne": ["$by", self.by()] }] }
    }
}

fn by_aid(aid: &Aid) -> Record {
    doc! { "_id": { "$eq": aid.as_str() } }
}

fn names_of(end: &Record) -> Vec<LockKey> {
    let key = |name: &Record| {
        let id = LockId::from_bson(name.get("id")?)?;
        LockKey::new(name.get_str("c").ok()?, id).ok()
    };
    documents(end, "locks").filter_map(key).collect()
}

/// Of a record as [`last_ends`](Ends::last_ends) reads it. `None` for a mere note of expired locks.
fn last_end_in(record: &Record) -> Option<LastEnd> {
    let for_good = record.get_bool("for_good").unwrap_or(false);
    let reason = match record.get_str("reason") {
        Err(_) if !for_good => return None,
        reason => EndReason::from_name(reason.unwrap_or_default()),
    };
    let ago = record.get_i64("ago").ok().and_then(|ago| ago.try_into().ok()).unwrap_or(0);
    Some(LastEnd { reason, for_good, ago: Duration::from_millis(ago) })
}

/// Stores the names of the locks that are about to be released, and whose they are. Locks that were named before are
/// left out: they were told, or will be.
fn name(names: &Names) -> Record {
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

/// What is known, and what is new, in this order.
fn with(known: Record, new: Record) -> Record {
    doc! { "$let": {
        "vars": { "known": known },
        "in": { "$concatArrays": ["$$known", { "$setDifference": [new, "$$known"] }] },
    } }
}

/// The names of the record that are still to be told if this condition holds.
fn untold(condition: Record) -> Record {
    doc! {
        "locks": { "$cond": [condition.clone(), locks(), []] },
        "more": { "$cond": [condition.clone(), "$more", "$$REMOVE"] },
        "holder": { "$cond": [condition, "$holder", "$$REMOVE"] },
    }
}

/// How many locks the end has not named.
fn more_in(end: &Record) -> usize {
    let more = end.get("more").and_then(codec::number).unwrap_or(0.0);
    more as usize
}

fn leases() -> Record {
    doc! { "$cond": [{ "$isArray": "$leases" }, "$leases", []] }
}

fn locks() -> Record {
    doc! { "$cond": [{ "$isArray": "$locks" }, "$locks", []] }
}

fn is_noted() -> Record {
    doc! { "$gt": ["$noted", "$$NOW"] }
}

fn has_step() -> Record {
    doc! { "$in": ["$step", ["release", "announce"]] }
}

fn is_for_good() -> Record {
    doc! { "$and": [is("$ts", "date"), { "$ne": ["$silent", true] }] }
}

/// Notes that the locks are gone. An end that was announced before is not announced again.
fn released() -> Write {
    Write::Update(vec![doc! { "$set": {
        "step": { "$cond": [{ "$eq": ["$told", true] }, "$$REMOVE", "announce"] },
        "by": "$$REMOVE",
        "lease": "$$REMOVE",
    } }])
}
