//! Opens lock collections as they are, for programs that do not know the types of the documents.

use std::{sync::PoisonError, time::Duration};

use mongodb::bson::{Bson, Document, doc};

use crate::{
    error::StoreError,
    key::LockKey,
    store::{
        Pattern, Rules,
        mongo::{MongoStore, error::store_error, indexes, majority},
    },
};

/// The ttl if no TTL index tells one: the same as the default of a manager.
const FOREIGN_TTL: Duration = Duration::from_secs(150);

impl MongoStore {
    /// The collections of the database that have a lock collection, by name.
    ///
    /// # Errors
    /// If the database is not reached.
    pub async fn lock_collections(&self) -> Result<Vec<String>, StoreError> {
        let mut collections = self.existing_like(doc! { "$regex": r"\.lock$" }).await?;
        collections.iter_mut().for_each(|name| name.truncate(name.len() - ".lock".len()));
        collections.retain(|name| LockKey::new(&**name, 0).is_ok());
        collections.sort();
        Ok(collections)
    }

    /// The collections that this pattern covers, sorted.
    pub(super) async fn existing(
        &self,
        like: &Pattern,
        limit: usize,
    ) -> Result<Vec<String>, StoreError> {
        let condition: Bson = match like.parts() {
            (name, None) => name.into(),
            (before, Some(after)) => {
                doc! { "$regex": format!("^{}.+{}$", literally(before), literally(after)) }.into()
            }
        };
        let mut names = self.existing_like(condition).await?;
        names.retain(|name| like.matches(name));
        names.sort();
        names.truncate(limit);
        Ok(names)
    }

    async fn existing_like(&self, name: impl Into<Bson>) -> Result<Vec<String>, StoreError> {
        // With this option a user who may not list all collections gets those that it may read.
        let names = self.database().list_collection_names().authorized_collections(true);
        let names = names.filter(doc! { "name": name.into() }).await;
        names.map_err(|e| store_error("looking for collections", e))
    }

    /// Opens an existing lock collection as it is, and changes nothing about it. Returns `None` if
    /// there is none.
    ///
    /// For programs that look at the locks of others, or break them. A program that takes locks has to
    /// [register](crate::LockManager::register) its types.
    ///
    /// # Errors
    /// If the database is not reached, or its user may not look at the indexes.
    pub async fn attach(&self, collection: &str) -> Result<Option<Rules>, StoreError> {
        let locks = majority::<Document>(self.database(), &format!("{collection}.lock"));
        let existing = indexes::list(self.database(), locks.name()).await.map_err(|e| {
            store_error(format!("looking at the indexes of {}", locks.namespace()), e)
        })?;
        if existing.is_empty() {
            return Ok(None);
        }
        let expires =
            (existing.iter().filter(|index| indexes::is_on(index, "ts"))).find_map(indexes::expiry);
        let ttl = expires.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let mut rules = Rules::new(ttl.unwrap_or(FOREIGN_TTL));
        rules.fenced = expires.is_some_and(indexes::is_of_fenced);
        // Whether the collection is fair cannot be seen. In a fair collection a record may hold more
        // than its lock, and a removal must leave the rest. If the collection is not fair, this caution
        // costs nothing.
        rules.fair = true;
        self.now_has(collection, locks, rules);
        Ok(Some(rules))
    }

    /// Creates a collection of web sessions with its indexes, as the session store of this crate does
    /// when it is built. Idempotent. `doclock.session` is its usual name.
    ///
    /// # Errors
    /// If the database is not reached, or its user lacks a privilege; the message names it.
    pub async fn prepare_sessions(&self, collection: &str) -> Result<(), StoreError> {
        let records = majority::<Document>(self.database(), collection);
        indexes::of_sessions(self.database(), &records).await?;
        self.attach_sessions(collection);
        Ok(())
    }

    /// Makes [`diagnose`](Self::diagnose) examine this collection of web sessions. Otherwise it examines
    /// `doclock.session`, if there is one.
    pub fn attach_sessions(&self, collection: &str) {
        let mut sessions = self.inner.sessions.write().unwrap_or_else(PoisonError::into_inner);
        *sessions = Some(collection.to_owned());
    }

    pub(super) fn sessions(&self) -> Option<String> {
        self.inner.sessions.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The text as a part of a regular expression that stands for itself.
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
