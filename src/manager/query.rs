//! Lists and shows locks.

use std::{slice, time::Instant};

use crate::{
    clock,
    error::LockError,
    key::LockKey,
    lock::{Aid, Lock},
    manager::LockManager,
    store::Query,
};

/// How many documents of a collection are listed in the locks of all users.
pub(crate) const LISTED: usize = 1_000;

impl LockManager {
    /// The live lock on this document, if there is one. Only for display: it may change at any moment.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn inspect(&self, key: &LockKey) -> Result<Option<Lock>, LockError> {
        self.inspect_by(key, None, self.until()).await
    }

    /// All live locks on this document: one exclusive lock, or the locks of its readers.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn locks_on(&self, key: &LockKey) -> Result<Vec<Lock>, LockError> {
        self.locks_on_all(key.collection(), vec![key.clone()]).await
    }

    /// All live locks, at most 1 000 in each registered collection.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn list(&self) -> Result<Vec<Lock>, LockError> {
        self.list_by(None, self.until()).await
    }

    /// The live locks of one session.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn list_of(&self, aid: &Aid) -> Result<Vec<Lock>, LockError> {
        self.list_by(Some(aid), self.until()).await
    }

    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.inspect", skip_all,
        fields(collection = key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn inspect_by(
        &self,
        key: &LockKey,
        aid: Option<&Aid>,
        until: Instant,
    ) -> Result<Option<Lock>, LockError> {
        self.registered(key.collection())?;
        let asked = clock::now();
        let args = (key.clone(), aid.cloned());
        let lock = self.run("inspect", until, args, |store, (key, aid)| {
            store.locks(key.collection(), Query::One { key, aid: aid.as_ref() }, 1)
        });
        let lock = lock.await?.pop();
        match &lock {
            Some(lock) => self.inner.watched.saw(lock, asked),
            None => self.inner.watched.saw_free(key, asked),
        }
        Ok(lock)
    }

    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.list", skip_all,
        fields(outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn list_by(
        &self,
        aid: Option<&Aid>,
        until: Instant,
    ) -> Result<Vec<Lock>, LockError> {
        // A session limits its own locks; the list of all locks is for a page.
        let limit = if aid.is_some() { usize::MAX } else { LISTED };
        let lists = self.in_each_collection(|collection| {
            let args = (collection, aid.cloned(), limit);
            self.run("list", until, args, |store, (collection, aid, limit)| {
                let of = aid.as_ref().map_or(Query::All, |aid| Query::Of(slice::from_ref(aid)));
                store.locks(collection, of, *limit)
            })
        });
        let asked = clock::now();
        let locks: Vec<_> = lists.await?.into_iter().flatten().collect();
        if let Some(aid) = aid {
            self.inner.watched.saw_all_of(aid, &locks, asked);
        }
        Ok(locks)
    }

    /// All live locks on these documents of a collection, by one read.
    pub(crate) async fn locks_on_all(
        &self,
        collection: &str,
        keys: Vec<LockKey>,
    ) -> Result<Vec<Lock>, LockError> {
        let (collection, _) = self.registered(collection)?;
        self.run("locks_on", self.until(), (collection, keys), |store, (collection, keys)| {
            store.locks(collection, Query::On(keys), keys.len())
        })
        .await
    }
}
