//! Prepares the indexes of collections.

use std::time::Duration;

use mongodb::{
    Collection, Database, IndexModel,
    bson::{Document, doc},
    error::Error,
};
use tokio::time::sleep;

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{
        Rules, StoreResult,
        mongo::{
            codec::{millis, number},
            error::{Doing, Result, code, exceeded_time_limit, failure, is_denied, late_majority},
            filters::nothing_held,
            schema::{danger, index::Index, owner, requirements::Needs},
            send::{Write, rows, write},
            time_limits::{LIMIT, LONGEST_WAIT, answered},
        },
    },
};

/// Codes for an existing index with other options, and for one that was dropped while it was built: another server was
/// quicker.
const INDEX_CONFLICT: [i32; 3] = [85, 86, 276];
/// How often a server begins again because of such a code.
const ATTEMPTS: usize = 10;
/// How often a change is made that others hold up: for two minutes.
const ATTEMPTS_BEHIND_OTHERS: usize = 120;
const NAMESPACE_NOT_FOUND: i32 = 26;
/// A view has no indexes.
const IS_A_VIEW: i32 = 166;
const INDEX_NOT_FOUND: i32 = 27;

/// Creates the missing indexes of a lock collection, and raises the expiry of its TTL index if it is too low.
///
/// # Errors
/// Also if the collection has an index with which its locks would be lost or refused.
pub(in crate::store::mongo) async fn ensure_of_locks(
    locks: &Collection<Document>,
    needs: &Needs,
    rules: &Rules,
) -> StoreResult<()> {
    beside_other_servers(locks, || async {
        let existing = harmless(locks, needs).await?;
        // A complete collection is not looked at again: its indexes do whatever they do already.
        if !existing.is_empty() && Index::missing(&needs.indexes, &existing).next().is_some() {
            owner::refuse_others(locks).await?;
        }
        let was_fenced = !rules.fenced && existing.iter().any(Index::is_of_fenced);
        // The expiry is lowered only here, where it was not a ttl. Otherwise a server with an old, shorter
        // ttl that restarts would make the TTL monitor remove the live locks of all other servers.
        let may = if was_fenced { Expiry::Set } else { Expiry::Raise };
        let expiry = Index::of_expiry(&existing).and_then(|it| it.expires_after);
        let has_ttl = expiry >= Some(rules.ttl);
        let mut missing = Vec::new();
        for index in &needs.indexes {
            match change_existing(locks, index, may, &existing).await {
                // An index of an earlier version, which nobody may change. It is good enough without the margin.
                Err(e) if index.field == "ts" && is_denied(&e) && !rules.fenced && has_ttl => {
                    log::warn!(
                        target: "actix_doclock::store",
                        "MongoDB may remove expired locks of {} before their sessions are announced, because its TTL \
                         index has no margin, and may not be changed: run `doclock init`, or give the user the action \
                         collMod",
                        locks.namespace(),
                    )
                }
                changed => missing.extend(changed?),
            }
        }
        create(locks, missing).await?;
        if was_fenced { forget_fences(locks).await } else { Ok(()) }
    })
    .await
}

/// Creates the missing indexes of another collection, and sets the expiry of its TTL index.
pub(in crate::store::mongo) async fn ensure(
    collection: &Collection<Document>,
    needs: &Needs,
) -> StoreResult<()> {
    beside_other_servers(collection, || async {
        let existing = harmless(collection, needs).await?;
        let mut missing = Vec::new();
        for index in &needs.indexes {
            missing.extend(change_existing(collection, index, Expiry::Set, &existing).await?);
        }
        create(collection, missing).await
    })
    .await
}

/// The indexes of the collection.
///
/// # Errors
/// Also if one of them is dangerous.
async fn harmless(collection: &Collection<Document>, needs: &Needs) -> Result<Vec<Index>> {
    let existing = list(&database_of(collection), collection.name()).await?;
    match danger::of_indexes(needs, &existing).into_iter().find(|danger| danger.is_refused) {
        Some(danger) => Err(failure(StoreErrorKind::Other, danger.to_string())),
        None => Ok(existing),
    }
}

/// Begins again whenever another server, of another version perhaps, has created or replaced an index in the meantime.
/// The other server may be first with each index.
async fn beside_other_servers<F>(
    collection: &Collection<Document>,
    ensure: impl Fn() -> F,
) -> StoreResult<()>
where
    F: Future<Output = Result<()>>,
{
    let met = |e: &Error| code(e).is_some_and(|code| INDEX_CONFLICT.contains(&code));
    let mut ensured = ensure().await;
    for _ in 0..ATTEMPTS {
        if !ensured.as_ref().is_err_and(met) {
            break;
        }
        ensured = ensure().await;
    }
    let namespace = collection.namespace();
    let is_in_the_way = ensured.as_ref().is_err_and(met);
    let error = match ensured.doing(|| format!("preparing {namespace}")) {
        Err(e) if is_in_the_way => {
            let message = format!(
                "an index of {namespace} is in the way of one that is needed there: drop the one that the cause names"
            );
            return Err(StoreError::new(StoreErrorKind::Other, message).because(e));
        }
        Err(e) if e.kind() == StoreErrorKind::Denied => e,
        done => return done,
    };
    let message = format!(
        "the database user may not create or change the indexes of {namespace}: give it the roles \
         `readWrite` and `dbAdmin` on the database `{}`, or the actions find, insert, \
         update, remove, listIndexes, createIndex, dropIndex, createCollection and collMod on \
         {namespace}",
        namespace.db,
    );
    Err(StoreError::new(StoreErrorKind::Denied, message).because(error))
}

/// Removes records that only hold a fence: programs that lock by hand take any record for a lock.
async fn forget_fences(locks: &Collection<Document>) -> Result<()> {
    let mut only_fence = nothing_held();
    only_fence.insert("queue", doc! { "$exists": false });
    only_fence.insert("fence", doc! { "$exists": true });
    locks.delete_many(only_fence).await?;
    Ok(())
}

/// Permitted changes to the expiry of a TTL index.
#[derive(Clone, Copy, PartialEq)]
enum Expiry {
    Raise,
    Set,
}

/// An index to create, and the names of the indexes that it replaces.
struct Missing {
    index: IndexModel,
    replaces: Vec<String>,
}

/// Makes an existing index serve as the needed one. If none can, returns the index to create.
async fn change_existing(
    collection: &Collection<Document>,
    needed: &Index,
    may: Expiry,
    existing: &[Index],
) -> Result<Option<Missing>> {
    let mut on_field: Vec<_> = existing.iter().filter(|it| it.can_serve(needed)).collect();
    if let Some(after) = needed.expires_after {
        on_field.sort_by_key(|index| !index.expires());
        if let Some(index) = on_field.first() {
            let may_stay = |it: Duration| it == after || may == Expiry::Raise && it > after;
            if !index.expires_after.is_some_and(may_stay) {
                change_expiry(collection, index, after, may).await?;
            }
            return unhide(collection, index).await.map(|()| None);
        }
    }
    if let Some(index) = on_field.iter().find(|index| !index.sparse) {
        return unhide(collection, index).await.map(|()| None);
    }
    let others: Vec<_> = existing.iter().filter(|it| !on_field.contains(it)).cloned().collect();
    let replaces = on_field.iter().map(|it| it.name.clone()).collect();
    Ok(Some(Missing { index: needed.model(&others), replaces }))
}

/// Creates the indexes by one command, which reads the collection once.
async fn create(collection: &Collection<Document>, missing: Vec<Missing>) -> Result<()> {
    let mut create = Vec::new();
    for it in missing {
        if drop_old(collection, &it.replaces).await? {
            create.push(it.index);
        }
    }
    if create.is_empty() { Ok(()) } else { collection.create_indexes(create).await.map(drop) }
}

/// Drops indexes of an earlier version. Before MongoDB 5 one field cannot have two indexes, so the old one is dropped
/// first. For a moment each query on the locks then reads the whole collection. False if the user may not drop them.
async fn drop_old(collection: &Collection<Document>, names: &[String]) -> Result<bool> {
    for name in names {
        match giving_way(|| answered(collection.drop_index(name).max_time(LIMIT))).await {
            Err(e) if is_denied(&e) => return Ok(false),
            Err(e) if code(&e) != Some(INDEX_NOT_FOUND) => return Err(e),
            _ => {}
        }
    }
    Ok(true)
}

async fn unhide(collection: &Collection<Document>, index: &Index) -> Result<()> {
    if !index.hidden {
        return Ok(());
    }
    change(collection, doc! { "name": &index.name, "hidden": false }).await.map(drop)
}

async fn change_expiry(
    collection: &Collection<Document>,
    index: &Index,
    after: Duration,
    may: Expiry,
) -> Result<()> {
    let mut seconds = after.as_secs_f64();
    loop {
        let expiry = doc! { "name": &index.name, "expireAfterSeconds": seconds as i64 };
        let reply = change(collection, expiry).await?;
        // Other servers may have raised the expiry further at the same moment: a server that overwrites a
        // higher expiry writes the higher one again, so the highest expiry is the last.
        match reply.get("expireAfterSeconds_old").and_then(number) {
            Some(higher) if may == Expiry::Raise && higher > seconds => seconds = higher,
            _ => return Ok(()),
        }
    }
}

async fn change(collection: &Collection<Document>, index: Document) -> Result<Document> {
    let command = doc! {
        "collMod": collection.name(), "index": index, "maxTimeMS": millis(LIMIT), "writeConcern": { "w": 1 },
    };
    let database = database_of(collection);
    let reply = giving_way(|| answered(database.run_command(command.clone()))).await?;
    // Waits for a majority apart: the time limit above would end this wait, too. A failover must not take the change back.
    giving_way(|| write(collection, doc! { "_id": "" }, &Write::Nothing, LONGEST_WAIT)).await?;
    Ok(reply)
}

/// Repeats a change of the whole collection until it is made in time. Behind an open transaction it would wait, and each write
/// on the collection would wait behind it.
async fn giving_way<T, F>(change: impl Fn() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    for _ in 1..ATTEMPTS_BEHIND_OTHERS {
        match change().await {
            Err(e) if exceeded_time_limit(&e) || late_majority(&e).is_some() => sleep(LIMIT).await,
            done => return done,
        }
    }
    change().await
}

/// The indexes of a collection. `IndexModel` would not do: the old shell wrote every number as a double, which that
/// type rejects.
pub(in crate::store::mongo) async fn list(
    database: &Database,
    collection: &str,
) -> Result<Vec<Index>> {
    let command = doc! { "listIndexes": collection };
    let mut found: Vec<Document> = match rows(database.run_cursor_command(command)).await {
        Err(e) if matches!(code(&e), Some(NAMESPACE_NOT_FOUND | IS_A_VIEW)) => {
            return Ok(Vec::new());
        }
        found => found?,
    };
    // Queries have the collation of the collection, as the index on `_id` has.
    let is_on_id =
        |it: &&Document| it.get_document("key").is_ok_and(|key| *key == doc! { "_id": 1 });
    let collation = found.iter().find(is_on_id).and_then(|it| it.get("collation").cloned());
    for index in &mut found {
        if index.get("collation") == collation.as_ref() {
            index.remove("collation");
        }
    }
    Ok(found.iter().filter_map(Index::of).collect())
}

fn database_of(collection: &Collection<Document>) -> Database {
    collection.client().database(&collection.namespace().db)
}
