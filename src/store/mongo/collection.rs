//! The collections of a store: prepared, or opened as they are.

use std::sync::Arc;

use mongodb::{
    Database,
    bson::{Bson, doc},
    options::ReadConcern,
};

use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    store::{
        DEFAULT_TTL, Pattern, Rules, StoreResult,
        mongo::{
            Inner, MongoStore, Prepared,
            acquire::RecordHints,
            admission::Admission,
            concerns::{open, primary},
            error::{Doing, Result, failure, is_denied},
            schema::{
                absent::Absent, create_indexes, danger, index::Index, owner, requirements::Needs,
            },
            send::Groups,
            time_limits::answered,
        },
    },
};

pub(super) async fn prepare(
    store: &MongoStore,
    collection: &str,
    rules: &Rules,
) -> StoreResult<()> {
    let Inner { database, ended, .. } = &*store.inner;
    if let Some(problem) = owner::of_name(collection) {
        return Err(StoreError::new(StoreErrorKind::Other, problem));
    }
    store.has_transactions().await.doing(|| "asking the server for its kind")?;
    let looked = refuse_options(database, collection, ended.name(), rules).await;
    looked.doing(|| format!("looking at the options of {collection}"))?;
    let locks = primary(database, &format!("{collection}.lock"));
    create_indexes::ensure_of_locks(&locks, &Needs::of_locks(collection, rules), rules).await?;
    create_indexes::ensure(ended, &Needs::of_ended(ended.name())).await?;
    store.add(collection, *rules, false);
    let registered = store.inner.collections.read().len();
    // Said once, with the first one that is too many.
    if let Some(danger) = store.too_few_connections(registered)
        && store.too_few_connections(registered - 1).is_none()
    {
        log::warn!(target: "actix_doclock::store", "{danger}");
    }
    Ok(())
}

/// Refuses a collection in which `Home` and `home` are the same document. To this crate they are two
/// keys, so one document could get two locks. Refuses what is no ordinary collection. Warns of a validator, which may
/// refuse locks.
async fn refuse_options(
    database: &Database,
    collection: &str,
    ended: &str,
    rules: &Rules,
) -> Result<()> {
    let locks = format!("{collection}.lock");
    let found = match danger::options(database, &[collection, &locks, ended]).await {
        Err(e) if is_denied(&e) => {
            if rules.text_ids {
                log::warn!(
                    target: "actix_doclock::store",
                    "cannot check whether {collection} has a collation: give the database user the action \
                     listCollections. With a case-insensitive collation, one document could get two locks",
                );
            }
            return Ok(());
        }
        found => found?,
    };
    for found in found {
        let (has_records, is_of_ended) = (found.name != collection, found.name == ended);
        let may_be_text = rules.text_ids && !is_of_ended;
        for danger in danger::of_options(&found, has_records, may_be_text) {
            if danger.is_refused {
                return Err(failure(StoreErrorKind::Other, danger.to_string()));
            }
            log::warn!(target: "actix_doclock::store", "{danger}");
        }
    }
    Ok(())
}

/// At most `limit` names of existing collections that the pattern covers, sorted.
pub(super) async fn collections(
    store: &MongoStore,
    like: &Pattern,
    limit: usize,
) -> Result<Vec<String>> {
    let condition: Bson = match like.parts() {
        (name, None) => name.into(),
        (before, Some(after)) => {
            doc! { "$regex": format!("^{}.+{}$", literally(before), literally(after)) }.into()
        }
    };
    let mut names = existing(store, condition).await?;
    // In a regular expression, `$` also matches before a line break at the end of a name.
    names.retain(|name| like.matches(name));
    names.sort();
    names.truncate(limit);
    Ok(names)
}

async fn existing(store: &MongoStore, name: impl Into<Bson>) -> Result<Vec<String>> {
    // With this option, a database user without the right to list all collections gets those that it may read.
    let names = store.database().list_collection_names().authorized_collections(true);
    answered(names.filter(doc! { "name": name.into() })).await
}

/// The text escaped for a regular expression, so that it stands for itself there.
fn literally(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii() && !c.is_ascii_alphanumeric() {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

impl MongoStore {
    fn add(&self, collection: &str, rules: Rules, is_attached: bool) {
        let Inner { database, writes, .. } = &*self.inner;
        let locks = format!("{collection}.lock");
        let prepared = Prepared {
            primary: primary(database, &locks),
            majority: open(database, &locks, ReadConcern::majority()),
            documents: primary(database, collection),
            rules,
            is_attached,
            hints: RecordHints::new(),
            admission: Admission::new(writes.clone()),
            groups: Groups::default(),
            absent: Absent::default(),
        };
        let mut all = self.inner.collections.write();
        all.insert(collection.to_owned(), Arc::new(prepared));
    }

    /// The collections of the database that have a lock collection, by name.
    ///
    /// # Errors
    /// If the database is not reached.
    pub async fn lock_collections(&self) -> StoreResult<Vec<String>> {
        let found = existing(self, doc! { "$regex": r"\.lock$" }).await;
        let mut collections = found.doing(|| "looking for collections")?;
        collections.iter_mut().for_each(|name| name.truncate(name.len() - ".lock".len()));
        collections.retain(|name| LockKey::new(&**name, 0).is_ok());
        collections.sort();
        Ok(collections)
    }

    /// Opens an existing lock collection as it is, and changes nothing about it. Returns `None` if
    /// there is none.
    ///
    /// For programs that look at the locks of others, or break them. A program that takes locks has to
    /// [register](crate::LockManager::register) its types.
    ///
    /// # Errors
    /// If the database is not reached, or its user may not look at the indexes.
    pub async fn attach(&self, collection: &str) -> StoreResult<Option<Rules>> {
        let existing = create_indexes::list(self.database(), &format!("{collection}.lock")).await;
        let existing = existing.doing(|| format!("looking at the indexes of {collection}.lock"))?;
        if existing.is_empty() {
            return Ok(None);
        }
        let expiring = Index::of_expiry(&existing);
        let ttl = expiring.and_then(|index| index.expires_after);
        let mut rules = Rules::new(ttl.unwrap_or(DEFAULT_TTL));
        rules.fenced = expiring.is_some_and(Index::is_of_fenced);
        // Nothing shows whether the collection is fair. In a fair collection a record may hold more
        // than its lock, and a removal must leave the rest. If the collection is not fair, this caution
        // costs nothing.
        rules.fair = true;
        self.add(collection, rules, true);
        Ok(Some(rules))
    }
}
