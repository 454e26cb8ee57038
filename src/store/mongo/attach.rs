//! Opens lock collections as they are, for programs that do not know the types of the documents.

use std::time::Duration;

use mongodb::bson::Document;

use crate::{
    error::StoreError,
    key::LockKey,
    store::{
        Rules,
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
        // With this option a user who may not list all collections gets those that it may read.
        let names = self.database().list_collection_names().authorized_collections(true).await;
        let names = names.map_err(|e| store_error("looking for lock collections", e))?;
        let mut collections: Vec<_> = names
            .iter()
            .filter_map(|name| name.strip_suffix(".lock"))
            .filter(|name| LockKey::new(*name, 0).is_ok())
            .map(ToOwned::to_owned)
            .collect();
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
}
