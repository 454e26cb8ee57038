//! Makes a lock collection ready.

use std::time::Duration;

use mongodb::{
    Collection, Database, IndexModel,
    bson::{Document, doc},
    error::Error,
    options::IndexOptions,
};

use super::error::{code, store_error};
use crate::{StoreError, StoreErrorKind};

/// Codes that say "there is such an index, with other options": another server was quicker.
const INDEX_CONFLICT: [i32; 2] = [85, 86];
const NAMESPACE_NOT_FOUND: i32 = 26;

/// Creates the indexes that are missing and changes the expiry of the TTL index if it differs.
///
/// Goes by what an index is on, not by its name: a hand-written protocol may have made some of
/// them already.
pub(super) async fn ensure(
    database: &Database,
    locks: &Collection<Document>,
    ttl: Duration,
) -> Result<(), StoreError> {
    // One repetition: two servers that start at the same moment see the same index missing.
    match try_ensure(database, locks, ttl).await {
        Err(e) if code(&e).is_some_and(|code| INDEX_CONFLICT.contains(&code)) => {
            try_ensure(database, locks, ttl).await
        }
        other => other,
    }
    .map_err(|e| explain(database, locks, e))
}

/// The same for the collection of ended sessions.
pub(super) async fn ensure_ended(
    database: &Database,
    ended: &Collection<Document>,
) -> Result<(), StoreError> {
    ended
        .create_index(ttl_index(super::REMEMBER_ENDED))
        .await
        .map_err(|e| explain(database, ended, e))?;
    Ok(())
}

fn explain(database: &Database, collection: &Collection<Document>, error: Error) -> StoreError {
    let error = store_error(format!("preparing {}", collection.namespace()), error);
    if error.kind() != StoreErrorKind::Denied {
        return error;
    }
    let (namespace, database) = (collection.namespace(), database.name());
    StoreError::new(
        StoreErrorKind::Denied,
        format!(
            "the database user may not create or change the indexes of {namespace}: give it the \
             roles `readWrite` and `dbAdmin` on the database `{database}`, or the actions find, \
             insert, update, remove, listIndexes, createIndex, createCollection and collMod on \
             {namespace}",
        ),
    )
    .because(error)
}

async fn try_ensure(
    database: &Database,
    locks: &Collection<Document>,
    ttl: Duration,
) -> Result<(), Error> {
    let existing = list(locks).await?;
    let wanted = expire_after(longest_in_use(locks, ttl, &existing).await?);
    match existing.iter().find(|index| index.keys == doc! { "ts": 1 }) {
        None => {
            locks.create_index(ttl_index(wanted)).await?;
        }
        Some(index) if expiry(index) != Some(wanted) => {
            let seconds = i64::try_from(wanted.as_secs()).unwrap_or(i64::MAX);
            let change = doc! { "keyPattern": { "ts": 1 }, "expireAfterSeconds": seconds };
            database.run_command(doc! { "collMod": locks.name(), "index": change }).await?;
        }
        Some(_) => {}
    }
    for keys in [doc! { "aid": 1 }, doc! { "readers.aid": 1 }] {
        if !existing.iter().any(|index| index.keys == keys) {
            locks.create_index(IndexModel::builder().keys(keys).build()).await?;
        }
    }
    Ok(())
}

fn ttl_index(expire_after: Duration) -> IndexModel {
    let options = IndexOptions::builder().expire_after(expire_after).build();
    IndexModel::builder().keys(doc! { "ts": 1 }).options(options).build()
}

async fn list(locks: &Collection<Document>) -> Result<Vec<IndexModel>, Error> {
    let mut cursor = match locks.list_indexes().await {
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

/// The ttl that the index must respect: `ttl`, or the longest one of a lock that is held.
///
/// During a rolling change to a shorter ttl, servers with the longer one still hold locks, and the
/// TTL monitor goes by the index alone: it would remove their locks while they are live. The next
/// start of a server shortens the index, once they have gone.
async fn longest_in_use(
    locks: &Collection<Document>,
    ttl: Duration,
    existing: &[IndexModel],
) -> Result<Duration, Error> {
    let index_is_longer = (existing.iter().filter_map(expiry)).any(|e| e > expire_after(ttl));
    if !index_is_longer {
        return Ok(ttl);
    }
    let filter = super::pipeline::and_live(
        doc! { "ttl": { "$type": "number", "$gt": super::pipeline::millis(ttl) } },
        ttl,
    );
    let longest = locks.find_one(filter).sort(doc! { "ttl": -1 }).await?;
    let longest = longest.and_then(|record| record.get_i64("ttl").ok()).unwrap_or(0);
    let longest = Duration::from_millis(longest.try_into().unwrap_or(0));
    if longest > ttl {
        log::warn!(
            target: "actix_doclock::store",
            "{}: locks with a ttl of {longest:?} are held; the TTL index keeps to it until a server \
             is started after they have gone",
            locks.namespace(),
        );
    }
    Ok(longest.max(ttl))
}

fn expiry(index: &IndexModel) -> Option<Duration> {
    index.options.as_ref().and_then(|options| options.expire_after)
}

/// A TTL index counts in whole seconds, and must not be early.
fn expire_after(ttl: Duration) -> Duration {
    Duration::from_secs(ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0))
}
