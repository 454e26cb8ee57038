//! The collections whose documents can be locked: registered by type, by name, or by pattern.

use std::{
    any::type_name,
    collections::BTreeMap,
    sync::{PoisonError, RwLock},
    time::{Duration, Instant},
};

use tokio::{sync::Mutex, time::timeout_at};

use crate::{
    clock,
    error::{LockError, StoreError, StoreErrorKind},
    key::{InvalidKey, LockId, LockKey, Lockable},
    manager::{Inner, LockManager, rhythm::Rhythm},
    store::{Pattern, Rules},
};

/// How many collections a manager knows, if some of them are known [by pattern](LockManager::register_matching): it takes
/// no more by pattern then. Each costs about 1 MB of memory, and a change stream while somebody waits in it or listens
/// to events.
pub const MAX_COLLECTIONS: usize = 100;

/// How often a manager looks for the collections that other servers have prepared.
const LOOK: Duration = Duration::from_secs(60);

/// Building an index may take longer than the deadline of a request.
const PREPARE: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Collections {
    known: RwLock<Known>,
    /// When the latest look for collections began. Held while one is prepared on its first use.
    looked: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Known {
    by_name: BTreeMap<&'static str, Registered>,
    patterns: Vec<(Pattern, Registered)>,
}

/// What the type says of its collection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Registered {
    /// [`Lockable::COLLECTION`] of the type.
    declared: &'static str,
    parse_id: fn(&str) -> Option<LockId>,
    pub(super) rules: Rules,
    over_http: bool,
    /// The type is not known here: this program only looks at the locks.
    attached: bool,
}

impl Registered {
    fn of<T: Lockable>(ttl: Duration) -> Self {
        let text_ids = LockId::may_be_text::<T::Id>();
        Self {
            declared: T::COLLECTION,
            parse_id: |text| text.parse::<T::Id>().ok().map(Into::into),
            rules: Rules { ttl, fenced: T::FENCED, fair: T::FAIR, text_ids },
            over_http: T::OVER_HTTP,
            attached: false,
        }
    }
}

impl Collections {
    fn known<X>(&self, read: impl FnOnce(&Known) -> X) -> X {
        read(&self.known.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change<X>(&self, write: impl FnOnce(&mut Known) -> X) -> X {
        write(&mut self.known.write().unwrap_or_else(PoisonError::into_inner))
    }

    fn get(&self, name: &str) -> Option<(&'static str, Registered)> {
        self.known(|known| known.by_name.get_key_value(name).map(|(name, it)| (*name, *it)))
    }

    /// As [`get`](Self::get), also for a collection by pattern that this server has not used yet.
    fn kind(&self, name: &str) -> Option<Registered> {
        let by_pattern = |known: &Known| {
            let pattern = known.patterns.iter().find(|(pattern, _)| pattern.matches(name));
            pattern.map(|(_, registered)| *registered)
        };
        self.get(name).map(|(_, it)| it).or_else(|| self.known(by_pattern))
    }

    /// The name is kept for as long as the process runs; the number of names is bounded.
    fn insert(&self, name: &str, registered: Registered) -> &'static str {
        self.change(|known| {
            let kept = known.by_name.get_key_value(name).map(|(name, _)| *name);
            let name = kept.unwrap_or_else(|| Box::leak(Box::from(name)));
            known.by_name.insert(name, registered);
            name
        })
    }
}

impl LockManager {
    /// Makes the documents of `T` lockable: creates the lock collection and its indexes.
    ///
    /// Call it once for each type when the server starts. Idempotent. A longer ttl raises the TTL index;
    /// a shorter ttl never lowers it, because servers with the longer ttl may hold locks.
    ///
    /// # Errors
    /// [`LockError::Store`] if the store is not reached, if the database user lacks a privilege (the
    /// message names it), or if `T::Id` may be a string and the collation of the collection treats
    /// different strings as equal. [`LockError::InvalidKey`] for an impossible collection name.
    pub async fn register<T: Lockable>(&self) -> Result<(), LockError> {
        self.register_in::<T>(T::COLLECTION).await
    }

    /// As [`register`](Self::register), for documents of `T` in a collection with another name: of one tenant, or made
    /// by a user. Also creates the lock collection of a collection that does not exist yet.
    ///
    /// Every server has to know the collection: register it on each, or by [a pattern](Self::register_matching).
    ///
    /// # Errors
    /// As `register`.
    pub async fn register_in<T: Lockable>(&self, collection: &str) -> Result<(), LockError> {
        let until = clock::now() + self.deadline().max(PREPARE);
        self.prepare(collection, Registered::of::<T>(self.ttl()), until).await?;
        self.inner.servers.registered(collection, T::FENCED, T::FAIR);
        Ok(())
    }

    /// Makes the documents of `T` lockable in every collection that the pattern covers: one `*` stands for one or more
    /// characters, as in `*_invoice`.
    ///
    /// A collection is prepared on its first use, if it exists: nobody can create collections by asking for locks, only
    /// by [`SessionLocks::create`](crate::SessionLocks::create). So the
    /// first lock in it takes some commands more, and the database user needs the rights to create indexes, unless
    /// `doclock init` has prepared it. All servers learn of it within a minute, or when a request names it. A session that
    /// ends on one server releases its locks in all collections, whether or not that server has used them.
    ///
    /// A manager takes no collection by pattern if it knows 100 collections already. For more tenants, keep the tenants in one collection, or use a
    /// manager for each database.
    ///
    /// # Errors
    /// [`LockError::InvalidKey`] if no collection can have such a name. Otherwise as [`register`](Self::register),
    /// for those collections that have locks already.
    pub async fn register_matching<T: Lockable>(&self, pattern: &str) -> Result<(), LockError> {
        let written = pattern;
        let (pattern, registered) = (pattern.parse()?, Registered::of::<T>(self.ttl()));
        self.inner.collections.change(|known| {
            known.patterns.retain(|(other, _)| *other != pattern);
            known.patterns.push((pattern, registered));
        });
        self.inner.servers.registered(written, T::FENCED, T::FAIR);
        self.inner.register.notify_one();
        self.look_for_collections(Duration::ZERO, clock::now() + self.deadline().max(PREPARE)).await
    }

    async fn prepare_by_pattern(
        &self,
        name: &str,
        registered: Registered,
        until: Instant,
    ) -> Result<&'static str, LockError> {
        if self.inner.collections.known(|known| known.by_name.len()) >= MAX_COLLECTIONS {
            return Err(LockError::Misconfigured(format!(
                "the collection `{name}` cannot be locked: this server knows {MAX_COLLECTIONS} collections already, \
                 and takes no more by pattern; keep the tenants in one collection, or use a database and a manager \
                 for each"
            )));
        }
        self.prepare(name, registered, until).await
    }

    async fn prepare(
        &self,
        name: &str,
        registered: Registered,
        until: Instant,
    ) -> Result<&'static str, LockError> {
        LockKey::new(name, 0)?;
        let args = (name.to_owned(), registered.rules);
        self.run("register", until, args, |store, (name, rules)| store.prepare(name, rules))
            .await?;
        // Before this server grants the first lock in the collection.
        self.ask_for_freezes(until).await?;
        let name = self.inner.collections.insert(name, registered);
        self.inner.register.notify_one();
        self.follow_all();
        Ok(name)
    }

    /// The collection of a document. On its first use by this server, a collection by pattern is prepared.
    ///
    /// # Errors
    /// [`LockError::Misconfigured`] if the collection is not registered; [`LockError::NotFound`] if a pattern covers
    /// it, but there is none. Otherwise as [`register`](Self::register).
    pub(super) async fn ready(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<(&'static str, Registered), LockError> {
        let (all, name) = (&self.inner.collections, key.collection());
        if let Some(known) = all.get(name) {
            return Ok(known);
        }
        let registered = self.registered(name)?;
        let _turn = self.turn_to_prepare(until).await?;
        if let Some(known) = all.get(name) {
            return Ok(known);
        }
        let exactly = Pattern::exactly(name);
        let found = self.run("collections", until, exactly, |store, it| store.collections(it, 1));
        if found.await?.is_empty() {
            return Err(LockError::NotFound { key: key.clone() });
        }
        Ok((self.prepare_by_pattern(name, registered, until).await?, registered))
    }

    /// The same for a new document, which may be the first one of its collection.
    #[cfg(feature = "web")]
    pub(crate) async fn ready_to_create(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<(), LockError> {
        let (all, name) = (&self.inner.collections, key.collection());
        if all.get(name).is_none() {
            let registered = self.registered(name)?;
            let _turn = self.turn_to_prepare(until).await?;
            if all.get(name).is_none() {
                self.prepare_by_pattern(name, registered, until).await?;
            }
        }
        Ok(())
    }

    async fn turn_to_prepare(
        &self,
        until: Instant,
    ) -> Result<tokio::sync::MutexGuard<'_, Option<Instant>>, LockError> {
        timeout_at(until.into(), self.inner.collections.looked.lock()).await.map_err(|_| {
            let message = "another collection is being prepared, and the database does not answer";
            StoreError::new(StoreErrorKind::Unavailable, message).into()
        })
    }

    /// Learns of the collections by pattern that other servers have prepared, unless a look began within `age`
    /// before this call. Costs nothing without patterns.
    ///
    /// # Errors
    /// The first one; all other collections are prepared anyway.
    pub(super) async fn look_for_collections(
        &self,
        age: Duration,
        until: Instant,
    ) -> Result<(), LockError> {
        let patterns = self.inner.collections.known(|known| known.patterns.clone());
        if patterns.is_empty() {
            return Ok(());
        }
        let asked = clock::now();
        let mut looked = self.turn_to_prepare(until).await?;
        if looked.is_some_and(|at| at + age >= asked) {
            return Ok(());
        }
        let (begins, mut outcome) = (clock::now(), Ok(()));
        for (pattern, registered) in patterns {
            let found = self.run("collections", until, pattern.of_locks(), |store, it| {
                store.collections(it, MAX_COLLECTIONS + 1)
            });
            for locks in found.await? {
                let name = locks.strip_suffix(".lock").unwrap_or(&locks);
                if self.inner.collections.get(name).is_none() {
                    let prepared = self.prepare_by_pattern(name, registered, until).await;
                    outcome = outcome.and(prepared.map(drop));
                }
            }
        }
        *looked = Some(begins);
        outcome
    }

    /// For an operation on everything that a session holds: learns of collections that only other servers have used
    /// so far. If that fails, the operation has to do with those that this server knows.
    pub(super) async fn all_collections(&self, age: Duration, until: Instant) -> Vec<&'static str> {
        if let Err(e) = self.look_for_collections(age, until).await {
            self.warn_seldom("collections", || {
                format!("locks in collections that only other servers know may be left out: {e}")
            });
        }
        self.registered_names()
    }

    /// A client names these collections: makes sure that this server knows those that patterns cover.
    #[cfg(feature = "web")]
    pub(crate) async fn learn<'a>(&self, names: impl IntoIterator<Item = &'a str>, until: Instant) {
        let all = &self.inner.collections;
        if names.into_iter().any(|name| all.get(name).is_none() && all.kind(name).is_some()) {
            self.all_collections(Duration::ZERO, until).await;
        }
    }

    pub(super) fn registered(&self, collection: &str) -> Result<Registered, LockError> {
        self.inner.collections.kind(collection).ok_or_else(|| {
            LockError::Misconfigured(format!(
                "the collection `{collection}` is not registered: call \
                 `locks.register::<T>().await?` for its type when the server starts, or \
                 `register_in` or `register_matching` if its name is known at run time only"
            ))
        })
    }

    /// The collections that this server has prepared.
    pub(super) fn registered_names(&self) -> Vec<&'static str> {
        self.inner.collections.known(|known| known.by_name.keys().copied().collect())
    }

    /// True if anything is registered or attached.
    pub(super) fn has_collections(&self) -> bool {
        let known = &self.inner.collections;
        known.known(|known| !known.by_name.is_empty() || !known.patterns.is_empty())
    }

    /// True if a collection is registered, rather than attached.
    pub(super) fn grants_locks(&self) -> bool {
        self.inner.collections.known(|known| known.by_name.values().any(|it| !it.attached))
    }

    /// The name of this collection, if this server has prepared it.
    #[cfg(feature = "metrics")]
    pub(super) fn registered_name(&self, collection: &str) -> Option<&'static str> {
        self.inner.collections.get(collection).map(|(name, _)| name)
    }

    #[cfg(feature = "web")]
    pub(crate) fn is_over_http(&self, collection: &str) -> bool {
        self.inner.collections.kind(collection).is_some_and(|it| it.over_http)
    }

    #[cfg(feature = "web")]
    pub(crate) fn is_registered(&self, collection: &str) -> bool {
        self.inner.collections.kind(collection).is_some()
    }

    /// Names a document by the id in a URL. The collection must be registered.
    ///
    /// # Errors
    /// [`LockError::InvalidKey`] if `id` is not of the collection's id type;
    /// [`LockError::Misconfigured`] if the collection is not registered.
    pub fn key(&self, collection: &str, id: &str) -> Result<LockKey, LockError> {
        let registered = self.registered(collection)?;
        match (registered.parse_id)(id) {
            Some(id) => Ok(LockKey::new(collection, id)?),
            None => Err(InvalidKey::NotOfType { collection: registered.declared }.into()),
        }
    }

    /// [`Lockable::COLLECTION`] of the type for which this collection is registered.
    pub(super) fn declared(&self, collection: &str) -> Option<&'static str> {
        self.inner.collections.kind(collection).map(|it| it.declared)
    }

    /// # Errors
    /// [`LockError::Misconfigured`] if the collection of the document is registered for another type.
    pub(super) fn is_of<T: Lockable>(&self, key: &LockKey) -> Result<(), LockError> {
        if self.declared(key.collection()) == Some(T::COLLECTION) {
            return Ok(());
        }
        let (name, collection) = (type_name::<T>(), T::COLLECTION);
        Err(LockError::Misconfigured(format!(
            "the guard holds {key:?}, but `{name}` is in the collection `{collection}`: acquire the \
             lock with `LockKey::of::<{name}>(id)`"
        )))
    }

    /// Makes [`list`](Self::list) and [`events`](Self::events) include a collection whose type this
    /// program does not know. The store must know the collection already
    /// ([`MongoStore::attach`](crate::MongoStore::attach)).
    ///
    /// For programs that show or break the locks of others. Build their manager [without a
    /// reaper](crate::LockManagerBuilder::without_reaper). A program that takes locks must
    /// [register](Self::register) their types.
    #[cfg(feature = "_mongo")]
    pub fn attach(&self, collection: &'static str) {
        let foreign = Registered {
            declared: collection,
            parse_id: |text| Some(text.into()),
            rules: Rules::new(self.ttl()),
            over_http: true,
            attached: true,
        };
        self.inner.collections.change(|known| {
            known.by_name.entry(collection).or_insert(foreign);
        });
    }
}

/// Looks for collections that other servers have prepared, until the manager is gone or shut down.
pub(super) async fn follow(manager: std::sync::Weak<Inner>) {
    let mut rhythm = Rhythm::new("looking for collections", LOOK);
    while let Some(inner) = manager.upgrade() {
        let manager = LockManager { inner };
        let stop = manager.inner.stop.token();
        let looked = manager.look_for_collections(LOOK / 2, manager.until()).await;
        let pause = match looked {
            Ok(()) => rhythm.after_success(Some(LOOK)),
            Err(e) => rhythm.after_failure(&e).min(LOOK),
        };
        drop(manager);
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}
