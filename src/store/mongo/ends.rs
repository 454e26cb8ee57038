//! The ends of sessions, and the outbox. Unfinished work is recorded in `doclock.ended`, so that any server can
//! continue where another one stopped. That collection has four kinds of records, each in a file of its own:
//!
//! | file | record | `step` |
//! |---|---|---|
//! | [`end`] | a session has ended or become idle; its states and their transitions | `release`, `announce` |
//! | [`takeover`] | a lock was broken or taken over | `tell` |
//! | [`trace`] | another session has replaced an expired lock | `look` |
//! | [`page`] | a page has been left | – |
//!
//! | file | purpose |
//! |---|---|
//! | [`logout`] | ends a session permanently |
//! | [`overdue`], [`sweep`] | finds the work of a sweep; ends idle sessions, and completes the unfinished ends of other workers |
//! | [`outbox`] | gives ends and takeovers to listeners |
//! | [`names`] | the locks of a session, as values and as an end stores them |
//!
//! indexes: ts (TTL), step (partial)

use std::time::Duration;

use futures_util::future::join_all;
use mongodb::{
    bson::{Bson, Document, doc},
    error::Error,
};
use uuid::Uuid;

use crate::{
    ended::EndReason,
    lock::Aid,
    store::{
        Acquisition, Deadline, Ended, LastEnd, News, NewsId, Outbox, Sessions, Settled, Swept,
        mongo::{
            LockCollection, MongoStore, codec,
            error::{Result, is_duplicate_id},
            ids::by_id,
            read::Fetched,
            release::Grants,
            send::{self, Timing, Write, refusals, run},
            time_limits::answered,
        },
    },
    takeover::Takeover,
};

mod end;
mod logout;
mod names;
mod outbox;
mod overdue;
mod page;
mod sweep;
mod takeover;
mod trace;

/// How many locks are read to be named in one command. With the longest possible ids the command must stay within
/// the limits of the server. Locks beyond that number are only counted.
const NAMES_AT_ONCE: usize = 8_000;

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

impl MongoStore {
    fn ends<'a>(&'a self, collections: &'a [&'a str], worker: Uuid, until: Deadline) -> Ends<'a> {
        Ends { store: self, collections, worker, until }
    }
}

impl Ends<'_> {
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
        let named = end::idle_with(aid, *token);
        let either = doc! { "$or": [named, trace::of_acquisition(key, aid, *token)] };
        let found = self.store.inner.ended.find_one(either).projection(doc! { "_id": 1 });
        Ok(answered(found.max_time(self.until.read_limit())).await?.is_some())
    }

    /// Removes these grants where nothing has failed yet. If `shared` is false, there are no readers among them.
    async fn remove(&self, grants: &Grants, shared: bool, failures: &mut Failures) {
        let sound = self.collections.iter().copied().filter(|it| !failures.has(it));
        let removed = join_all(sound.map(async |collection| {
            let removed = async { self.prepared(collection)?.remove_many(grants, shared).await };
            (collection, removed.await)
        }));
        for (collection, removed) in removed.await {
            failures.note(collection, removed);
        }
    }

    fn prepared(&self, collection: &str) -> Result<LockCollection<'_>> {
        self.store.prepared(collection, self.until)
    }

    /// Sends one write on all matching records of `doclock.ended`.
    async fn write(&self, filter: Document, by: &Write) -> Result<u64> {
        send::write(&self.store.inner.ended, filter, by, self.until.write_limit()).await
    }

    /// Many updates of `doclock.ended` in one command. The driver has no method for that before MongoDB
    /// 8.
    async fn update_each(&self, updates: Vec<Document>) -> Result<()> {
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

    /// The ends that wait for this step, except those reserved for other workers.
    fn waits_for(&self, step: impl Into<Bson>) -> Document {
        doc! {
            "step": step.into(),
            "_id": { "$type": "string" },
            "$expr": { "$not": [is_reserved_for_another(self.worker)] },
        }
    }
}

/// The failures by collection. The work goes on in the other collections, and the first failure is reported in the end.
#[derive(Default)]
struct Failures(Vec<(String, Error)>);

impl Failures {
    /// Keeps a failure, and returns `None` for it.
    fn note<T>(&mut self, collection: &str, result: Result<T>) -> Option<T> {
        result.map_err(|e| self.0.push((collection.to_owned(), e))).ok()
    }

    fn has(&self, collection: &str) -> bool {
        self.0.iter().any(|(failed, _)| failed == collection)
    }

    fn first(self) -> Option<Error> {
        self.0.into_iter().next().map(|(_, e)| e)
    }
}

/// True if another worker has reserved the record.
fn is_reserved_for_another(worker: Uuid) -> Document {
    doc! { "$and": [{ "$gt": ["$lease", "$$NOW"] }, { "$ne": ["$by", worker.to_string()] }] }
}

/// True if the record was taken to be announced more than once.
fn is_repeated(record: &Document) -> bool {
    record.get("taken").and_then(codec::number).is_some_and(|taken| taken > 1.0)
}
