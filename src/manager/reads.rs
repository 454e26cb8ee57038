//! Reads locks and documents.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    slice,
    sync::Arc,
    time::Instant,
};

use futures_util::future::{join_all, try_join_all};

use crate::{
    clock,
    error::{BoxError, LockError, Result},
    key::{LockKey, Lockable},
    lock::{Aid, Lock},
    manager::{collections::Collections, observe, verbs::Verbs, watched::Beliefs},
    store::{Confirmed, Original, Query, StoredDocument, UnclearChange},
};

/// The list of all locks shows at most this many documents of a collection.
pub(crate) const LISTED: usize = 1_000;

/// Reads in the registered collections. The answers are passed on as news.
pub(crate) struct Reads {
    pub(super) verbs: Arc<Verbs>,
    pub(super) collections: Arc<Collections>,
    pub(super) beliefs: Arc<Beliefs>,
}

impl Reads {
    /// Of several readers of a document: the lock of `aid`, or else the one that expires last.
    pub(crate) async fn inspect_many(
        &self,
        keys: &[LockKey],
        aid: Option<&Aid>,
        until: Instant,
    ) -> Result<Vec<Option<Lock>>> {
        let mut by_collection = BTreeMap::<&str, BTreeSet<&LockKey>>::new();
        for key in keys {
            by_collection.entry(key.collection()).or_default().insert(key);
        }
        let asked = by_collection.into_iter().map(async |(collection, keys)| {
            if !self.collections.may_have_locks(collection, until).await? {
                return Ok(Vec::new());
            }
            let keys: Vec<_> = keys.into_iter().cloned().collect();
            let args = (collection.to_owned(), keys, aid.cloned());
            self.verbs
                .run("inspect", until, args, |store, (collection, keys, aid), until| {
                    store.locks(
                        collection,
                        Query::Each { keys, aid: aid.as_ref() },
                        keys.len(),
                        until,
                    )
                })
                .await
        });
        let found = try_join_all(asked).await?.into_iter().flatten();
        let found: BTreeMap<_, _> = found.map(|lock| (lock.key.clone(), lock)).collect();
        Ok(keys.iter().map(|key| found.get(key).cloned()).collect())
    }

    pub(crate) async fn inspect(
        &self,
        key: &LockKey,
        aid: Option<&Aid>,
        until: Instant,
    ) -> Result<Option<Lock>> {
        observe::in_span!("doclock.inspect", Some(key.collection()), async {
            self.collections.ready(key, until).await?;
            let asked = clock::now();
            let args = (key.clone(), aid.cloned());
            let lock = self.verbs.run("inspect", until, args, |store, (key, aid), until| {
                let each = Query::Each { keys: slice::from_ref(key), aid: aid.as_ref() };
                store.locks(key.collection(), each, 1, until)
            });
            let lock = lock.await?.pop();
            match &lock {
                Some(lock) => self.beliefs.saw(lock, asked),
                None => self.beliefs.watched.saw_free(key, asked),
            }
            Ok(lock)
        })
    }

    pub(crate) async fn list(&self, aid: Option<&Aid>, until: Instant) -> Result<Vec<Lock>> {
        self.collections.all_collections(until).await;
        self.list_known(aid, until).await
    }

    /// As [`list`](Self::list), but only in the collections that this server knows.
    pub(crate) async fn list_known(&self, aid: Option<&Aid>, until: Instant) -> Result<Vec<Lock>> {
        observe::in_span!("doclock.list", None, async {
            // A session limits its own locks; the list of all locks is for a page.
            let lists = self.in_each(async |collection| match aid {
                Some(aid) => self.list_in(collection, aid, until).await,
                None => {
                    let list =
                        self.verbs.run("list", until, collection, |store, collection, until| {
                            store.locks(collection, Query::All, LISTED, until)
                        });
                    list.await
                }
            });
            let asked = clock::now();
            let locks: Vec<_> = lists.await?.into_iter().flatten().collect();
            if let Some(aid) = aid {
                self.beliefs.saw_all_of(aid, &locks, asked);
            }
            Ok(locks)
        })
    }

    /// The live locks of one session in these collections, of those that this server knows. It does not matter whether the
    /// others can be read.
    #[cfg(feature = "web")]
    pub(crate) async fn list_among(
        &self,
        collections: &BTreeSet<&str>,
        aid: &Aid,
        until: Instant,
    ) -> Result<Vec<Lock>> {
        let asked = clock::now();
        let known = self.collections.names().into_iter().filter(|it| collections.contains(it));
        let lists = join_all(known.map(|it| self.list_in(it, aid, until))).await;
        let lists: Vec<_> = lists.into_iter().collect::<Result<_>>()?;
        let locks = lists.into_iter().flatten();
        Ok(locks.inspect(|lock| self.beliefs.saw(lock, asked)).collect())
    }

    /// The live locks of one session in one collection.
    pub(crate) async fn list_in(
        &self,
        collection: &str,
        aid: &Aid,
        until: Instant,
    ) -> Result<Vec<Lock>> {
        if !self.collections.may_have_locks(collection, until).await? {
            return Ok(Vec::new());
        }
        self.verbs.locks_of(collection, [aid.clone()], usize::MAX, until).await
    }

    /// All live locks on these documents of a collection, by one read.
    pub(crate) async fn locks_on(
        &self,
        collection: &str,
        keys: Vec<LockKey>,
        until: Instant,
    ) -> Result<Vec<Lock>> {
        if let Some(key) = keys.first() {
            self.collections.ready(key, until).await?;
        }
        self.verbs
            .run(
                "locks_on",
                until,
                (collection.to_owned(), keys),
                |store, (collection, keys), until| {
                    store.locks(collection, Query::On(keys), keys.len(), until)
                },
            )
            .await
    }

    pub(crate) async fn exists(&self, key: &LockKey, until: Instant) -> Result<bool> {
        self.collections.ready(key, until).await?;
        self.verbs
            .run("exists", until, key.clone(), |store, key, until| store.exists(key, until))
            .await
    }

    /// # Errors
    /// [`LockError::NotFound`], and the errors of the store.
    pub(crate) async fn load(&self, key: &LockKey, until: Instant) -> Result<StoredDocument> {
        observe::in_span!("doclock.load", Some(key.collection()), async {
            self.collections.ready(key, until).await?;
            let loaded = self
                .verbs
                .run("load", until, key.clone(), |store, key, until| store.load(key, until))
                .await?;
            loaded.ok_or_else(|| LockError::NotFound { key: key.clone() })
        })
    }

    /// The lock of this session and, if `load`, its document. `None` if one read does not tell; then ask with
    /// another verb.
    ///
    /// # Errors
    /// The errors of the store.
    pub(crate) async fn confirm(
        &self,
        key: &LockKey,
        aid: &Aid,
        load: bool,
        until: Instant,
    ) -> Result<Option<Confirmed>> {
        observe::in_span!("doclock.confirm", Some(key.collection()), async {
            self.collections.ready(key, until).await?;
            let asked = clock::now();
            let args = (key.clone(), aid.clone(), load);
            let confirmed =
                self.verbs.run("confirm", until, args, |store, (key, aid, load), until| {
                    store.confirm(key, aid, *load, until)
                });
            let confirmed = confirmed.await?;
            observe::confirmed(confirmed.is_some());
            if let Some(confirmed) = &confirmed {
                self.beliefs.saw(&confirmed.lock, asked);
            }
            Ok(confirmed)
        })
    }

    /// Runs one operation in each registered collection, all at the same time. Returns all outcomes, or the first
    /// error. No operation is dropped before it has been handed to its task.
    pub(super) async fn in_each<T, F>(
        &self,
        operation: impl Fn(&'static str) -> F,
    ) -> Result<Vec<T>>
    where
        F: Future<Output = Result<T>>,
    {
        let all = join_all(self.collections.names().into_iter().map(operation));
        all.await.into_iter().collect()
    }
}

/// The document as a Rust value, and as it was loaded.
pub(crate) fn decode<T: Lockable>(
    key: &LockKey,
    document: StoredDocument,
) -> Result<(T, Original)> {
    let value = document.decode().map_err(unfit(key))?;
    let original = Original::new(document, &value).map_err(unfit(key))?;
    Ok((value, original))
}

pub(super) fn unfit(key: &LockKey) -> impl Fn(BoxError) -> LockError {
    |source| match source.downcast::<UnclearChange>() {
        Ok(unclear) => {
            let field = unclear.field.clone();
            LockError::UnclearChange { key: key.clone(), field, source: unclear }
        }
        Err(source) => LockError::Document { key: key.clone(), source },
    }
}
