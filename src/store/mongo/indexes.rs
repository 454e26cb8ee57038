//! Prepares the indexes of collections.

use std::{fmt, time::Duration};

use mongodb::{
    Collection, Database, IndexModel,
    bson::{Document, doc},
    error::Error,
    options::IndexOptions,
};

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{
        Rules, StoreResult,
        mongo::{
            codec::number,
            error::{Doing, Result, code, is_denied},
            send::rows,
            settle::nothing_held,
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

/// An index of one field in ascending order.
///
/// An index is recognised by its field, not by its name: a hand-written protocol may have created it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Index {
    /// The field.
    pub field: String,
    /// The name of the index.
    pub name: String,
    /// True if the index contains only records that have the field, by a filter of its own.
    pub partial: bool,
    /// True if the index is sparse. The server does not use such an index under the strict Stable API, so none is
    /// needed; earlier versions created some.
    pub sparse: bool,
    /// For a TTL index, how long after the date in the field the server removes a record.
    pub expires_after: Option<Duration>,
}

impl Index {
    /// The index that `listIndexes` describes like this. `None` for an index of several fields, or in another order.
    #[must_use]
    pub fn of(description: &Document) -> Option<Self> {
        let key = description.get_document("key").ok()?;
        let (field, direction) = key.iter().next().filter(|_| key.len() == 1)?;
        number(direction).filter(|direction| *direction > 0.0)?;
        let seconds = description.get("expireAfterSeconds").and_then(number);
        Some(Self {
            name: description.get_str("name").unwrap_or_default().to_owned(),
            partial: description.contains_key("partialFilterExpression"),
            sparse: description.get_bool("sparse").unwrap_or(false),
            expires_after: seconds.and_then(|it| Duration::try_from_secs_f64(it).ok()),
            ..Self::on(field)
        })
    }

    pub(super) fn on(field: &str) -> Self {
        let (field, name) = (field.to_owned(), format!("{field}_1"));
        Self { field, name, partial: false, sparse: false, expires_after: None }
    }

    pub(super) fn partial(self) -> Self {
        Self { partial: true, ..self }
    }

    /// A TTL index counts in whole seconds, and must not be early.
    pub(super) fn expiring(self, after: Duration) -> Self {
        let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
        Self { expires_after: Some(Duration::from_secs(seconds)), ..self }
    }

    /// The needed indexes that are missing among the existing ones. A TTL index with another expiry is not missing.
    pub fn missing<'a>(needed: &'a [Self], existing: &[Self]) -> impl Iterator<Item = &'a Self> {
        let expires = |it: &Self| it.expires_after.is_some();
        let serves = move |it: &Self, needed: &Self| {
            it.field == needed.field && (expires(it) || !expires(needed))
        };
        needed.iter().filter(move |needed| !existing.iter().any(|it| serves(it, needed)))
    }

    /// True for the TTL index of a fenced collection, through which no record expires.
    #[must_use]
    pub fn is_of_fenced(&self) -> bool {
        self.field == "ts" && self.expires_after >= Some(LONGEST_INDEX)
    }

    fn model(&self) -> IndexModel {
        let filter = self.partial.then(|| doc! { &self.field: { "$exists": true } });
        let options = IndexOptions::builder();
        let options = options.expire_after(self.expires_after).partial_filter_expression(filter);
        IndexModel::builder().keys(doc! { &self.field: 1 }).options(options.build()).build()
    }
}

impl From<IndexModel> for Index {
    fn from(model: IndexModel) -> Self {
        let index = Self::on(model.keys.keys().next().map_or("", String::as_str));
        let options = model.options.unwrap_or_default();
        let partial = options.partial_filter_expression.is_some();
        Self { partial, expires_after: options.expire_after, ..index }
    }
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.field)?;
        if self.expires_after.is_some() { f.write_str(" (TTL)") } else { Ok(()) }
    }
}

/// Creates the missing indexes of a lock collection, and raises the expiry of its TTL index if it is too low.
pub(super) async fn ensure_of_locks(
    locks: &Collection<Document>,
    needed: &[Index],
    rules: &Rules,
) -> StoreResult<()> {
    beside_other_servers(locks, || async {
        let existing = list(&database_of(locks), locks.name()).await?;
        let was_fenced = !rules.fenced && existing.iter().any(Index::is_of_fenced);
        // The expiry is lowered only here, where it was not a ttl. Otherwise a server with an old, shorter
        // ttl that restarts would make the TTL monitor remove the live locks of all other servers.
        let may = if was_fenced { Expiry::Set } else { Expiry::Raise };
        let has_ttl =
            existing.iter().any(|it| it.field == "ts" && it.expires_after >= Some(rules.ttl));
        for index in needed {
            match ensure_one(locks, index, may, &existing).await {
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
                ensured => ensured?,
            }
        }
        if was_fenced { forget_fences(locks).await } else { Ok(()) }
    })
    .await
}

/// Creates the missing indexes of another collection, and sets the expiry of its TTL index.
pub(super) async fn ensure(collection: &Collection<Document>, needed: &[Index]) -> StoreResult<()> {
    beside_other_servers(collection, || async {
        let existing = list(&database_of(collection), collection.name()).await?;
        for index in needed {
            ensure_one(collection, index, Expiry::Set, &existing).await?;
        }
        Ok(())
    })
    .await
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
    let error = match ensured.doing(|| format!("preparing {namespace}")) {
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

async fn ensure_one(
    collection: &Collection<Document>,
    needed: &Index,
    may: Expiry,
    existing: &[Index],
) -> Result<()> {
    let on_field: Vec<_> = existing.iter().filter(|it| it.field == needed.field).collect();
    if let (Some(after), Some(index)) = (needed.expires_after, on_field.first()) {
        let may_stay = |it: Duration| it == after || may == Expiry::Raise && it > after;
        return match index.expires_after {
            Some(expiry) if may_stay(expiry) => Ok(()),
            _ => change_expiry(collection, needed, may).await,
        };
    }
    if on_field.iter().any(|index| !index.sparse) {
        return Ok(());
    }
    // Indexes of an earlier version. Before MongoDB 5 one field cannot have two indexes, so the old one is
    // dropped first. For a moment each query on the locks then reads the whole collection.
    for index in on_field {
        match collection.drop_index(&index.name).await {
            Err(e) if is_denied(&e) => return Ok(()),
            Err(e) if code(&e) != Some(INDEX_NOT_FOUND) => return Err(e),
            _ => {}
        }
    }
    collection.create_index(needed.model()).await.map(drop)
}

async fn change_expiry(
    collection: &Collection<Document>,
    index: &Index,
    may: Expiry,
) -> Result<()> {
    let mut seconds = index.expires_after.unwrap_or_default().as_secs_f64();
    loop {
        let change =
            doc! { "keyPattern": { &index.field: 1 }, "expireAfterSeconds": seconds as i64 };
        // A command does not inherit the write concern of the collection.
        let majority = doc! { "w": "majority" };
        let command =
            doc! { "collMod": collection.name(), "index": change, "writeConcern": majority };
        let reply = database_of(collection).run_command(command).await?;
        // Other servers may have raised the expiry further at the same moment: a server that overwrites a
        // higher expiry writes the higher one again, so the highest expiry is the last.
        match reply.get("expireAfterSeconds_old").and_then(number) {
            Some(higher) if may == Expiry::Raise && higher > seconds => seconds = higher,
            _ => return Ok(()),
        }
    }
}

/// The indexes of one field. `IndexModel` would not do: the old shell wrote every number as a double, which that type
/// rejects.
pub(super) async fn list(database: &Database, collection: &str) -> Result<Vec<Index>> {
    let command = doc! { "listIndexes": collection };
    match rows(database.run_cursor_command(command)).await {
        Err(e) if code(&e) == Some(NAMESPACE_NOT_FOUND) => Ok(Vec::new()),
        found => Ok(found?.iter().filter_map(Index::of).collect()),
    }
}

fn database_of(collection: &Collection<Document>) -> Database {
    collection.client().database(&collection.namespace().db)
}
