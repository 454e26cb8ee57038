//! Prepares the indexes of collections.

use std::{fmt, time::Duration};

use mongodb::{
    Collection, Database, IndexModel,
    bson::{Bson, Document, doc},
    error::Error,
    options::IndexOptions,
};

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{
        Rules, StoreResult,
        mongo::{
            codec::number,
            danger,
            error::{Doing, Result, code, failure, is_denied},
            needs::Needs,
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

/// An index.
///
/// An index is recognised by what it does, not by its name: a hand-written protocol may have created it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Index {
    /// The first field.
    pub field: String,
    /// The fields with their directions or kinds, as in `ts: 1` or `aid: 1, since: -1`.
    pub keys: String,
    /// The name of the index.
    pub name: String,
    /// True if the index contains only records that have the field, by a filter of its own.
    pub partial: bool,
    /// True if queries of the store do not use the index: it has another filter, or another collation than its
    /// collection.
    pub limited: bool,
    /// True if no query uses the index until it is unhidden.
    pub hidden: bool,
    /// True if the index is sparse. The server does not use such an index under the strict Stable API, so none is
    /// needed; earlier versions created some.
    pub sparse: bool,
    /// True if no two records may have the same value.
    pub unique: bool,
    /// For a TTL index, how long after the date in the field the server removes a record.
    pub expires_after: Option<Duration>,
}

impl Index {
    /// The index that `listIndexes` describes like this. `None` if this is no description of an index.
    #[must_use]
    pub fn of(description: &Document) -> Option<Self> {
        let keys = description.get_document("key").ok()?;
        let field = keys.keys().next()?;
        let is_set = |option| description.get_bool(option).unwrap_or(false);
        let filter = description.get_document("partialFilterExpression").ok();
        let partial = filter.is_some_and(|it| *it == has(field));
        let seconds = description.get("expireAfterSeconds").and_then(number);
        // Some servers take an expiry that is not a number for zero.
        let expiry = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        Some(Self {
            keys: text_of(keys),
            name: description.get_str("name").unwrap_or_default().to_owned(),
            partial,
            limited: filter.is_some() && !partial || description.contains_key("collation"),
            hidden: is_set("hidden"),
            sparse: is_set("sparse"),
            unique: is_set("unique"),
            expires_after: seconds.map(expiry),
            ..Self::on(field)
        })
    }

    pub(super) fn on(field: &str) -> Self {
        let [partial, limited, hidden, sparse, unique] = [false; 5];
        let (keys, name, expires_after) = (format!("{field}: 1"), format!("{field}_1"), None);
        let field = field.to_owned();
        Self { field, keys, name, partial, limited, hidden, sparse, unique, expires_after }
    }

    pub(super) fn partial(self) -> Self {
        Self { partial: true, ..self }
    }

    /// A TTL index counts in whole seconds, and must not be early.
    pub(super) fn expiring(self, after: Duration) -> Self {
        let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
        Self { expires_after: Some(Duration::from_secs(seconds)), ..self }
    }

    pub(super) fn expires(&self) -> bool {
        self.expires_after.is_some()
    }

    /// The server ignores the expiry of an index of several fields.
    pub(super) fn is_of_one_field(&self) -> bool {
        self.keys == format!("{}: 1", self.field) || self.keys == format!("{}: -1", self.field)
    }

    /// True if this index does what the needed one does, once it is unhidden, or has another expiry.
    fn can_serve(&self, needed: &Self) -> bool {
        self.keys == needed.keys && !self.limited
    }

    /// True if this index does what the needed one does, whatever its name is. Its expiry may be another one.
    #[must_use]
    pub fn serves(&self, needed: &Self) -> bool {
        self.can_serve(needed) && !self.hidden && (self.expires() || !needed.expires())
    }

    /// The needed indexes that are missing among the existing ones. A TTL index with another expiry is not missing.
    pub fn missing<'a>(needed: &'a [Self], existing: &[Self]) -> impl Iterator<Item = &'a Self> {
        needed.iter().filter(move |needed| !existing.iter().any(|it| it.serves(needed)))
    }

    /// The TTL index of a lock collection among these.
    pub fn of_expiry(existing: &[Self]) -> Option<&Self> {
        let needed = Self::on("ts").expiring(LONGEST_INDEX);
        existing.iter().find(|it| it.serves(&needed))
    }

    /// True for the TTL index of a fenced collection, through which no record expires.
    #[must_use]
    pub fn is_of_fenced(&self) -> bool {
        self.keys == "ts: 1" && self.expires_after >= Some(LONGEST_INDEX)
    }

    /// An index of another kind may have the usual name already.
    fn model(&self, existing: &[Self]) -> IndexModel {
        let filter = self.partial.then(|| has(&self.field));
        let is_taken = existing.iter().any(|it| it.name == self.name);
        let name = is_taken.then(|| format!("doclock_{}", self.name));
        let options = IndexOptions::builder().name(name);
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

fn has(field: &str) -> Document {
    doc! { field: { "$exists": true } }
}

/// The old shell wrote every number as a double.
fn text_of(keys: &Document) -> String {
    let text = |(field, kind): (&String, &Bson)| match (number(kind), kind) {
        (Some(direction), _) => format!("{field}: {direction}"),
        (None, Bson::String(kind)) => format!("{field}: \"{kind}\""),
        (None, other) => format!("{field}: {other}"),
    };
    keys.iter().map(text).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.field)?;
        if self.expires_after.is_some() { f.write_str(" (TTL)") } else { Ok(()) }
    }
}

/// Creates the missing indexes of a lock collection, and raises the expiry of its TTL index if it is too low.
///
/// # Errors
/// Also if the collection has an index with which its locks would be lost or refused.
pub(super) async fn ensure_of_locks(
    locks: &Collection<Document>,
    needs: &Needs,
    rules: &Rules,
) -> StoreResult<()> {
    beside_other_servers(locks, || async {
        let existing = harmless(locks, needs).await?;
        let was_fenced = !rules.fenced && existing.iter().any(Index::is_of_fenced);
        // The expiry is lowered only here, where it was not a ttl. Otherwise a server with an old, shorter
        // ttl that restarts would make the TTL monitor remove the live locks of all other servers.
        let may = if was_fenced { Expiry::Set } else { Expiry::Raise };
        let expiry = Index::of_expiry(&existing).and_then(|it| it.expires_after);
        let has_ttl = expiry >= Some(rules.ttl);
        for index in &needs.indexes {
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
pub(super) async fn ensure(collection: &Collection<Document>, needs: &Needs) -> StoreResult<()> {
    beside_other_servers(collection, || async {
        let existing = harmless(collection, needs).await?;
        for index in &needs.indexes {
            ensure_one(collection, index, Expiry::Set, &existing).await?;
        }
        Ok(())
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

async fn ensure_one(
    collection: &Collection<Document>,
    needed: &Index,
    may: Expiry,
    existing: &[Index],
) -> Result<()> {
    let mut on_field: Vec<_> = existing.iter().filter(|it| it.can_serve(needed)).collect();
    if let Some(after) = needed.expires_after {
        on_field.sort_by_key(|index| !index.expires());
        if let Some(index) = on_field.first() {
            let may_stay = |it: Duration| it == after || may == Expiry::Raise && it > after;
            if !index.expires_after.is_some_and(may_stay) {
                change_expiry(collection, index, after, may).await?;
            }
            return unhide(collection, index).await;
        }
    }
    if let Some(index) = on_field.iter().find(|index| !index.sparse) {
        return unhide(collection, index).await;
    }
    // Indexes of an earlier version. Before MongoDB 5 one field cannot have two indexes, so the old one is
    // dropped first. For a moment each query on the locks then reads the whole collection.
    for index in &on_field {
        match collection.drop_index(&index.name).await {
            Err(e) if is_denied(&e) => return Ok(()),
            Err(e) if code(&e) != Some(INDEX_NOT_FOUND) => return Err(e),
            _ => {}
        }
    }
    let others: Vec<_> = existing.iter().filter(|it| !on_field.contains(it)).cloned().collect();
    collection.create_index(needed.model(&others)).await.map(drop)
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
    // A command does not inherit the write concern of the collection.
    let majority = doc! { "w": "majority" };
    let command = doc! { "collMod": collection.name(), "index": index, "writeConcern": majority };
    database_of(collection).run_command(command).await
}

/// The indexes of a collection. `IndexModel` would not do: the old shell wrote every number as a double, which that
/// type rejects.
pub(super) async fn list(database: &Database, collection: &str) -> Result<Vec<Index>> {
    let command = doc! { "listIndexes": collection };
    let mut found: Vec<Document> = match rows(database.run_cursor_command(command)).await {
        Err(e) if code(&e) == Some(NAMESPACE_NOT_FOUND) => return Ok(Vec::new()),
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
