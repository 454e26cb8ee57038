//! Lists and shows locks.

use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
    time::{Duration, Instant},
};

use futures_util::future::try_join_all;

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

/// How old the knowledge of collections may be for a list.
const LISTS: Duration = Duration::from_secs(10);

impl LockManager {
    /// The live lock on this document, if there is one. Only for display: it may change at any moment.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn inspect(&self, key: &LockKey) -> Result<Option<Lock>, LockError> {
        self.inspect_by(key, None, self.until()).await
    }

    /// The live locks on these documents, in their order: for each document what
    /// [`inspect`](Self::inspect) returns. One query for each collection.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn inspect_many(&self, keys: &[LockKey]) -> Result<Vec<Option<Lock>>, LockError> {
        self.inspect_many_by(keys, None, self.until()).await
    }

    /// Of several readers of a document: the lock of `aid`, or else the one that expires last.
    pub(crate) async fn inspect_many_by(
        &self,
        keys: &[LockKey],
        aid: Option<&Aid>,
        until: Instant,
    ) -> Result<Vec<Option<Lock>>, LockError> {
        let mut by_collection = BTreeMap::<&str, BTreeSet<&LockKey>>::new();
        for key in keys {
            by_collection.entry(key.collection()).or_default().insert(key);
        }
        let asked = by_collection.into_iter().map(async |(collection, keys)| {
            for key in keys.iter().take(1) {
                self.ready(key, until).await?;
            }
            let keys: Vec<_> = keys.into_iter().cloned().collect();
            let args = (collection.to_owned(), keys, aid.cloned());
            self.run("inspect", until, args, |store, (collection, keys, aid)| {
                store.locks(collection, Query::Each { keys, aid: aid.as_ref() }, keys.len())
            })
            .await
        });
        let found = try_join_all(asked).await?.into_iter().flatten();
        let found: BTreeMap<_, _> = found.map(|lock| (lock.key.clone(), lock)).collect();
        Ok(keys.iter().map(|key| found.get(key).cloned()).collect())
    }

    /// All live locks on this document: one exclusive lock, or the locks of its readers.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn locks_on(&self, key: &LockKey) -> Result<Vec<Lock>, LockError> {
        self.locks_on_all(key.collection(), vec![key.clone()], self.until()).await
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
        self.ready(key, until).await?;
        let asked = clock::now();
        let args = (key.clone(), aid.cloned());
        let lock = self.run("inspect", until, args, |store, (key, aid)| {
            let each = Query::Each { keys: slice::from_ref(key), aid: aid.as_ref() };
            store.locks(key.collection(), each, 1)
        });
        let lock = lock.await?.pop();
        match &lock {
            Some(lock) => self.inner.saw(lock, asked),
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
        self.all_collections(LISTS, until).await;
        let lists = self.in_each_collection(|collection| {
            self.list_at_most(limit, collection.to_owned(), aid.cloned(), until)
        });
        let asked = clock::now();
        let locks: Vec<_> = lists.await?.into_iter().flatten().collect();
        if let Some(aid) = aid {
            self.inner.saw_all_of(aid, &locks, asked);
        }
        Ok(locks)
    }

    /// The live locks of one session in one collection.
    #[cfg(feature = "web")]
    pub(crate) async fn list_in(
        &self,
        collection: &str,
        aid: &Aid,
        until: Instant,
    ) -> Result<Vec<Lock>, LockError> {
        self.list_at_most(usize::MAX, collection.to_owned(), Some(aid.clone()), until).await
    }

    async fn list_at_most(
        &self,
        limit: usize,
        collection: String,
        aid: Option<Aid>,
        until: Instant,
    ) -> Result<Vec<Lock>, LockError> {
        let args = (collection, aid, limit);
        let list = self.run("list", until, args, |store, (collection, aid, limit)| {
            let of = aid.as_ref().map_or(Query::All, |aid| Query::Of(slice::from_ref(aid)));
            store.locks(collection, of, *limit)
        });
        list.await
    }

    /// All live locks on these documents of a collection, by one read.
    pub(crate) async fn locks_on_all(
        &self,
        collection: &str,
        keys: Vec<LockKey>,
        until: Instant,
    ) -> Result<Vec<Lock>, LockError> {
        for key in keys.iter().take(1) {
            self.ready(key, until).await?;
        }
        self.run("locks_on", until, (collection.to_owned(), keys), |store, (collection, keys)| {
            store.locks(collection, Query::On(keys), keys.len())
        })
        .await
    }
}
