//! Prepares the indexes of collections.

use std::time::Duration;

use mongodb::{
    Collection, Database, IndexModel,
    bson::{Document, doc},
    error::Error,
    options::IndexOptions,
};

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{
        Rules,
        mongo::{
            codec::number,
            error::{code, is_denied, store_error},
            pipeline::{and_live, nothing_held},
        },
    },
};

/// Codes for an existing index with other options, and for one that was dropped while it was built: another server was
/// quicker.
const INDEX_CONFLICT: [i32; 3] = [85, 86, 276];
/// How often a server begins again because of such a code.
const ATTEMPTS: usize = 10;
const NAMESPACE_NOT_FOUND: i32 = 26;
const INDEX_NOT_FOUND: i32 = 27;

/// The server refuses an `expireAfterSeconds` beyond an `i32`.
pub(super) const LONGEST_INDEX: Duration = Duration::from_secs(i32::MAX as u64);

/// An ordinary index, through which no records expire.
pub(super) struct Plain {
    pub(super) field: &'static str,
    /// Contains only records that have the field.
    pub(super) partial: bool,
}

const fn full(field: &'static str) -> Plain {
    Plain { field, partial: false }
}

/// Instead of `sparse`: under the strict Stable API the server does not use sparse indexes.
const fn partial(field: &'static str) -> Plain {
    Plain { field, partial: true }
}

pub(super) const OF_LOCKS: &[Plain] = &[full("aid"), partial("readers.aid"), partial("due")];
/// Partial, because few records have unfinished steps.
pub(super) const OF_ENDED: &[Plain] = &[partial("step")];
pub(super) const OF_SESSIONS: &[Plain] =
    &[partial("due"), partial("by"), partial("aid"), partial("user")];
/// How long the note of an ended web session stays, and a session that no sweep has handled.
pub(super) const REMEMBER_SESSIONS: Duration = Duration::from_secs(24 * 60 * 60);

/// The names of the missing indexes: of the expected ones, and of the TTL index on the date.
pub(super) async fn missing(
    database: &Database,
    collection: &str,
    date: &'static str,
    expected: &[Plain],
) -> Result<Vec<String>, Error> {
    let existing = list(database, collection).await?;
    let is_on_field = |field: &'static str| move |index: &&Document| is_on(index, field);
    let expires = existing.iter().filter(is_on_field(date)).any(|index| expiry(index).is_some());
    let mut missing = if expires { vec![] } else { vec![format!("{date} (TTL)")] };
    let absent = expected.iter().filter(|it| !existing.iter().any(|index| is_on(index, it.field)));
    missing.extend(absent.map(|it| it.field.to_owned()));
    Ok(missing)
}

/// Creates the missing indexes, and raises the expiry of the TTL index if it is too low.
///
/// Recognises an index by its field, not by its name: a hand-written protocol may have created some of
/// the indexes already.
pub(super) async fn of_locks(
    database: &Database,
    locks: &Collection<Document>,
    rules: &Rules,
) -> Result<(), StoreError> {
    let ensured = beside_other_servers(|| ensure_of_locks(database, locks, rules)).await;
    explained(database, locks, ensured)
}

/// The same for the collection of web sessions.
pub(super) async fn of_sessions(
    database: &Database,
    sessions: &Collection<Document>,
) -> Result<(), StoreError> {
    let ensured = beside_other_servers(|| ensure_of_sessions(database, sessions)).await;
    explained(database, sessions, ensured)
}

/// The same for the collection of ended sessions.
pub(super) async fn of_ended(
    database: &Database,
    ended: &Collection<Document>,
) -> Result<(), StoreError> {
    let ensured = beside_other_servers(|| ensure_of_ended(database, ended)).await;
    explained(database, ended, ensured)
}

async fn ensure_of_locks(
    database: &Database,
    locks: &Collection<Document>,
    rules: &Rules,
) -> Result<(), Error> {
    let existing = list(database, locks.name()).await?;
    let wanted = if rules.fenced {
        // An expired record still holds its fence, which must not be forgotten.
        LONGEST_INDEX
    } else {
        rules.expiry()
    };
    let was_fenced = !rules.fenced && existing.iter().filter_map(expiry).any(is_of_fenced);
    // The expiry is lowered only here, where it was not a ttl. Otherwise a server with an old, shorter
    // ttl that restarts would make the TTL monitor remove the live locks of all other servers.
    let change = if was_fenced { Expiry::Set } else { Expiry::Raise };
    let raised = ensure_ttl(database, locks, "ts", whole_seconds(wanted), change, &existing).await;
    match raised {
        // An index of an earlier version, which nobody may change. It is good enough without the margin.
        Err(e) if is_denied(&e) && !rules.fenced && has_ttl(&existing, rules.ttl) => log::warn!(
            target: "actix_doclock::store",
            "MongoDB may remove expired locks of {} before their sessions are announced, because its TTL index \
             has no margin, and may not be changed: run `doclock init`, or give the user the action collMod",
            locks.namespace(),
        ),
        raised => raised?,
    }
    if was_fenced {
        forget_fences(locks).await?;
    }
    ensure(locks, OF_LOCKS, &existing).await
}

fn has_ttl(existing: &[Document], ttl: Duration) -> bool {
    let on_ts = existing.iter().find(|index| is_on(index, "ts"));
    on_ts.and_then(expiry).is_some_and(|seconds| seconds >= whole_seconds(ttl) as f64)
}

/// Whether the collection was fenced when its TTL index got this expiry.
pub(super) fn is_of_fenced(seconds: f64) -> bool {
    seconds >= LONGEST_INDEX.as_secs_f64()
}

/// Removes records that only hold a fence: programs that lock by hand take any record for a lock.
async fn forget_fences(locks: &Collection<Document>) -> Result<(), Error> {
    let mut only_fence = nothing_held();
    only_fence.insert("queue", doc! { "$exists": false });
    only_fence.insert("fence", doc! { "$exists": true });
    locks.delete_many(only_fence).await?;
    Ok(())
}

async fn ensure_of_ended(database: &Database, ended: &Collection<Document>) -> Result<(), Error> {
    let existing = list(database, ended.name()).await?;
    let seconds = whole_seconds(super::REMEMBER_ENDED);
    ensure_ttl(database, ended, "ts", seconds, Expiry::Set, &existing).await?;
    ensure(ended, OF_ENDED, &existing).await
}

async fn ensure_of_sessions(
    database: &Database,
    sessions: &Collection<Document>,
) -> Result<(), Error> {
    let existing = list(database, sessions.name()).await?;
    let seconds = whole_seconds(REMEMBER_SESSIONS);
    ensure_ttl(database, sessions, "expires", seconds, Expiry::Set, &existing).await?;
    ensure(sessions, OF_SESSIONS, &existing).await
}

async fn ensure(
    collection: &Collection<Document>,
    wanted: &[Plain],
    existing: &[Document],
) -> Result<(), Error> {
    for &Plain { field, partial } in wanted {
        let on_field = || existing.iter().filter(|index| is_on(index, field));
        if on_field().any(|index| !is_sparse(index)) {
            continue;
        }
        // An index of an earlier version. Before MongoDB 5 one field cannot have two indexes, so the
        // old one is dropped first. For a moment each query on the locks then reads the whole
        // collection.
        for name in on_field().filter_map(|index| index.get_str("name").ok()) {
            match collection.drop_index(name).await {
                Err(e) if is_denied(&e) => return Ok(()),
                Err(e) if code(&e) != Some(INDEX_NOT_FOUND) => return Err(e),
                _ => {}
            }
        }
        let filter = partial.then(|| doc! { field: { "$exists": true } });
        let options = IndexOptions::builder().partial_filter_expression(filter).build();
        let index = IndexModel::builder().keys(doc! { field: 1 }).options(options).build();
        collection.create_index(index).await?;
    }
    Ok(())
}

pub(super) fn is_sparse(index: &Document) -> bool {
    index.get_bool("sparse").unwrap_or(false)
}

/// Begins again whenever another server, of another version perhaps, has created or replaced an index in the meantime. It
/// may be first with each of them.
async fn beside_other_servers<F>(ensure: impl Fn() -> F) -> Result<(), Error>
where
    F: Future<Output = Result<(), Error>>,
{
    let met = |e: &Error| code(e).is_some_and(|code| INDEX_CONFLICT.contains(&code));
    for _ in 0..ATTEMPTS {
        match ensure().await {
            Err(e) if met(&e) => {}
            ensured => return ensured,
        }
    }
    ensure().await
}

fn explained(
    database: &Database,
    collection: &Collection<Document>,
    result: Result<(), Error>,
) -> Result<(), StoreError> {
    let (namespace, database) = (collection.namespace(), database.name());
    let error = match result {
        Ok(()) => return Ok(()),
        Err(e) => store_error(format!("preparing {namespace}"), e),
    };
    if error.kind() != StoreErrorKind::Denied {
        return Err(error);
    }
    let message = format!(
        "the database user may not create or change the indexes of {namespace}: give it the roles \
         `readWrite` and `dbAdmin` on the database `{database}`, or the actions find, insert, \
         update, remove, listIndexes, createIndex, dropIndex, createCollection and collMod on \
         {namespace}",
    );
    Err(StoreError::new(StoreErrorKind::Denied, message).because(error))
}

/// Permitted changes to the expiry of a TTL index.
#[derive(Clone, Copy, PartialEq)]
enum Expiry {
    Raise,
    Set,
}

async fn ensure_ttl(
    database: &Database,
    collection: &Collection<Document>,
    field: &str,
    seconds: u64,
    may: Expiry,
    existing: &[Document],
) -> Result<(), Error> {
    match existing.iter().find(|index| is_on(index, field)) {
        None => {
            let expire_after = Duration::from_secs(seconds);
            let options = IndexOptions::builder().expire_after(expire_after).build();
            let index = IndexModel::builder().keys(doc! { field: 1 }).options(options).build();
            collection.create_index(index).await?;
        }
        Some(index) => {
            let is_wrong = |expiry: Option<f64>| match expiry {
                Some(expiry) if may == Expiry::Raise => expiry < seconds as f64,
                expiry => expiry != Some(seconds as f64),
            };
            if is_wrong(expiry(index)) {
                let mut wanted = seconds as f64;
                // Other servers may have raised the expiry further at the same moment: whoever overwrites a higher
                // one writes it again, so the highest one is the last.
                while let Some(higher) = change_expiry(database, collection, field, wanted).await?
                    && may == Expiry::Raise
                    && higher > wanted
                {
                    wanted = higher;
                }
            }
        }
    }
    Ok(())
}

/// Returns the previous expiry.
async fn change_expiry(
    database: &Database,
    collection: &Collection<Document>,
    field: &str,
    seconds: f64,
) -> Result<Option<f64>, Error> {
    let change = doc! { "keyPattern": { field: 1 }, "expireAfterSeconds": seconds as i64 };
    // A command does not inherit the write concern of the collection.
    let majority = doc! { "w": "majority" };
    let command = doc! { "collMod": collection.name(), "index": change, "writeConcern": majority };
    let reply = database.run_command(command).await?;
    Ok(reply.get("expireAfterSeconds_old").and_then(number))
}

/// The indexes as the server describes them. `IndexModel` would not do: the old shell wrote every
/// number as a double, which that type rejects.
pub(super) async fn list(database: &Database, collection: &str) -> Result<Vec<Document>, Error> {
    let command = doc! { "listIndexes": collection };
    let mut cursor = match database.run_cursor_command(command).await {
        Ok(cursor) => cursor,
        Err(e) if code(&e) == Some(NAMESPACE_NOT_FOUND) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut indexes = Vec::new();
    while cursor.advance().await? {
        indexes.push(cursor.deserialize_current()?);
    }
    Ok(indexes)
}

/// The longest ttl of a live lock, as its record states it.
pub(super) async fn longest_live(
    locks: &Collection<Document>,
    foreign_ttl: Duration,
) -> Result<Option<Duration>, Error> {
    let longer = doc! { "ttl": { "$type": "number", "$gt": 0 } };
    let longest = locks.find_one(and_live(longer, foreign_ttl)).sort(doc! { "ttl": -1 }).await?;
    let longest = longest.as_ref().and_then(|record| record.get("ttl")).and_then(number);
    // A foreign program may have written any number. The server takes no expiry longer than this.
    Ok(longest.map(|millis| Duration::from_millis(millis as u64).min(LONGEST_INDEX)))
}

/// Whether the index covers only this field, in ascending order.
pub(super) fn is_on(index: &Document, field: &str) -> bool {
    index.get_document("key").is_ok_and(|key| {
        key.len() == 1 && key.get(field).and_then(number).is_some_and(|direction| direction > 0.0)
    })
}

pub(super) fn expiry(index: &Document) -> Option<f64> {
    index.get("expireAfterSeconds").and_then(number)
}

/// A TTL index counts in whole seconds, and must not be early.
pub(super) fn whole_seconds(ttl: Duration) -> u64 {
    ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)
}
