//! The collections whose documents can be locked: registered by type, by name, or by pattern. A collection by pattern
//! is prepared on its first use, and found when another server has prepared it.

use std::{
    any::type_name,
    collections::BTreeMap,
    sync::{Arc, OnceLock, Weak},
    time::{Duration, Instant},
};

use futures_util::{StreamExt, stream};
use parking_lot::RwLock;
use tokio::{
    sync::{Mutex, MutexGuard, Notify},
    time::{sleep, timeout_at},
};

use crate::{
    clock,
    error::{LockError, Result, StoreError, StoreErrorKind},
    freeze::Scope,
    key::{InvalidKey, LockId, LockKey, Lockable},
    manager::{
        Core, fleet::Servers, freezes::Freezes, log_limit::LogLimit, pauses::Pauses, verbs::Verbs,
    },
    store::{Ability, Pattern, Rules},
};

/// A manager that knows this many collections takes no more [by pattern](crate::LockManager::register_matching). Each
/// collection costs about 1 MB of memory, and a change stream while somebody waits in it or listens to events.
pub const MAX_COLLECTIONS: usize = 100;

/// How often a manager looks for the collections that other servers have prepared.
const DISCOVER_EVERY: Duration = Duration::from_secs(10);
const PREPARED_AT_ONCE: usize = 8;
/// Building an index may take longer than the deadline of a request.
const PREPARE: Duration = Duration::from_secs(60);

pub(crate) struct Collections {
    verbs: Arc<Verbs>,
    freezes: Arc<Freezes>,
    servers: Arc<Servers>,
    log_limit: Arc<LogLimit>,
    ttl: Duration,
    known: RwLock<Registrations>,
    /// When the latest discovery of collections began. The mutex is held while a collection is prepared on its first use.
    discovered: Mutex<Option<Instant>>,
    /// Notified of each new collection and pattern.
    pub(super) new: Notify,
    /// Follows the events of a new collection.
    follow: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Debug, Default)]
struct Registrations {
    by_name: BTreeMap<&'static str, Registered>,
    patterns: Vec<(Pattern, Registered)>,
}

/// The settings of a collection, from its type.
#[derive(Debug, Clone, Copy)]
pub(super) struct Registered {
    /// [`Lockable::COLLECTION`] of the type.
    declared: &'static str,
    parse_id: fn(&str) -> Option<LockId>,
    pub(super) rules: Rules,
    over_http: bool,
    /// True if the type is not known here: this program only looks at the locks.
    attached: bool,
}

impl Registered {
    fn of<T: Lockable>(ttl: Duration) -> Self {
        Self {
            declared: T::COLLECTION,
            parse_id: |text| text.parse::<T::Id>().ok().map(Into::into),
            rules: Rules::of::<T>(ttl),
            over_http: T::OVER_HTTP,
            attached: false,
        }
    }
}

/// True for the collections of this crate, which no pattern covers.
fn is_ours(name: &str) -> bool {
    name.starts_with("doclock.") || name.ends_with(".lock")
}

impl Collections {
    pub(super) fn new(
        verbs: Arc<Verbs>,
        freezes: Arc<Freezes>,
        servers: Arc<Servers>,
        log_limit: Arc<LogLimit>,
        ttl: Duration,
    ) -> Self {
        let (known, discovered, new, follow) = Default::default();
        Self { verbs, freezes, servers, log_limit, ttl, known, discovered, new, follow }
    }

    /// Has `follow` called for each new collection.
    pub(super) fn follow_with(&self, follow: impl Fn() + Send + Sync + 'static) {
        // There is one manager for each.
        let _ = self.follow.set(Box::new(follow));
    }

    fn get(&self, name: &str) -> Option<(&'static str, Registered)> {
        self.known.read().by_name.get_key_value(name).map(|(name, it)| (*name, *it))
    }

    /// As [`get`](Self::get), also for a collection by pattern that this server has not used yet.
    fn kind(&self, name: &str) -> Option<Registered> {
        let known = self.known.read();
        let covers = |(pattern, _): &&(Pattern, _)| pattern.matches(name) && !is_ours(name);
        let by_pattern = || known.patterns.iter().find(covers).map(|(_, registered)| *registered);
        known.by_name.get(name).copied().or_else(by_pattern)
    }

    /// The name is kept for as long as the process runs; the number of names is bounded.
    fn insert(&self, name: &str, registered: Registered) -> &'static str {
        let mut known = self.known.write();
        let kept = known.by_name.get_key_value(name).map(|(name, _)| *name);
        let name = kept.unwrap_or_else(|| Box::leak(Box::from(name)));
        known.by_name.insert(name, registered);
        name
    }

    pub(super) async fn register<T: Lockable>(&self, collection: &str) -> Result<()> {
        self.prepare(collection, Registered::of::<T>(self.ttl), self.until_prepared()).await?;
        self.servers.registered(collection, T::FENCED, T::FAIR);
        Ok(())
    }

    pub(super) async fn register_matching<T: Lockable>(&self, written: &str) -> Result<()> {
        let (pattern, registered) = (written.parse()?, Registered::of::<T>(self.ttl));
        {
            let mut known = self.known.write();
            known.patterns.retain(|(other, _)| *other != pattern);
            known.patterns.push((pattern, registered));
        }
        self.servers.registered(written, T::FENCED, T::FAIR);
        self.new.notify_one();
        self.discover(Duration::ZERO, self.until_prepared()).await
    }

    fn until_prepared(&self) -> Instant {
        clock::now() + self.verbs.deadline.max(PREPARE)
    }

    async fn prepare(
        &self,
        name: &str,
        registered: Registered,
        until: Instant,
    ) -> Result<&'static str> {
        LockKey::new(name, 0)?;
        self.refuse_what_the_store_cannot(name, &registered.rules)?;
        let args = (name.to_owned(), registered.rules);
        self.verbs
            .run("register", until, args, |store, (name, rules), until| {
                store.prepare(name, rules, until)
            })
            .await?;
        // Before this server grants the first lock in the collection.
        self.freezes.ask(until).await?;
        let name = self.insert(name, registered);
        self.new.notify_one();
        if let Some(follow) = self.follow.get() {
            follow();
        }
        Ok(name)
    }

    /// A store without the ability would take the rules and not obey them.
    fn refuse_what_the_store_cannot(&self, name: &str, rules: &Rules) -> Result<()> {
        let needed =
            [(rules.fair, Ability::Fair, "FAIR"), (rules.fenced, Ability::Fenced, "FENCED")];
        for (is_needed, ability, constant) in needed {
            if is_needed && !self.verbs.store.can(ability) {
                return Err(LockError::Misconfigured(format!(
                    "the type of the collection `{name}` has `{constant} = true`, which this store cannot do: \
                     remove the constant, or use another store"
                )));
            }
        }
        Ok(())
    }

    /// The collection of a document. On its first use by this server, a collection by pattern is prepared.
    ///
    /// # Errors
    /// [`LockError::Misconfigured`] if the collection is not registered; [`LockError::NotFound`] if a pattern covers
    /// it, but the collection does not exist. Otherwise as `prepare`.
    pub(super) async fn ready(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<(&'static str, Registered)> {
        match self.get(key.collection()) {
            Some(known) => Ok(known),
            None => self.prepare_on_first_use(key, until).await,
        }
    }

    /// True if there may be locks in this collection: a collection by pattern has none before a server has prepared it,
    /// which may be another server. This one then learns of it. Nothing is known of a collection that is not registered.
    ///
    /// # Errors
    /// As [`ready`](Self::ready), but a collection that does not exist has no locks.
    pub(super) async fn may_have_locks(&self, name: &str, until: Instant) -> Result<bool> {
        if self.get(name).is_some() || self.kind(name).is_none() {
            return Ok(true);
        }
        let of_locks = Pattern::exactly(name).of_locks();
        Ok(self.prepare_if_there(name, of_locks, until).await?.is_some())
    }

    pub(super) fn registered(&self, collection: &str) -> Result<Registered> {
        self.kind(collection).ok_or_else(|| {
            LockError::Misconfigured(format!(
                "the collection `{collection}` is not registered: call \
                 `locks.register::<T>().await?` for its type when the server starts, or \
                 `register_in` or `register_matching` if its name is known at run time only"
            ))
        })
    }

    /// The collections that this server has prepared.
    pub(super) fn names(&self) -> Vec<&'static str> {
        self.known.read().by_name.keys().copied().collect()
    }

    /// True if anything is registered or attached.
    pub(super) fn has_any(&self) -> bool {
        let known = self.known.read();
        !known.by_name.is_empty() || !known.patterns.is_empty()
    }

    /// True if a collection is registered, rather than attached.
    pub(super) fn grants_locks(&self) -> bool {
        self.known.read().by_name.values().any(|it| !it.attached)
    }

    /// A scope to freeze or thaw.
    ///
    /// # Errors
    /// [`LockError::Misconfigured`] if the scope is a collection that is not registered.
    pub(super) async fn scope(&self, scope: Scope) -> Result<Scope> {
        let Scope::Collection(name) = &scope else { return Ok(scope) };
        match self.ready(&LockKey::new(&**name, 0)?, self.verbs.until()).await {
            Err(LockError::NotFound { .. }) => Err(LockError::Misconfigured(format!(
                "there is no collection `{name}`: name one as it is stored, or freeze all"
            ))),
            ready => ready.map(|_| scope),
        }
    }

    /// The name for the metrics: however many collections clients name, few have a label.
    pub(super) fn label(&self, key: &LockKey) -> &'static str {
        self.get(key.collection()).map_or("other", |(name, _)| name)
    }

    #[cfg(feature = "web")]
    pub(crate) fn is_over_http(&self, collection: &str) -> bool {
        self.kind(collection).is_some_and(|it| it.over_http)
    }

    #[cfg(feature = "web")]
    pub(crate) fn is_registered(&self, collection: &str) -> bool {
        self.kind(collection).is_some()
    }

    /// Names a document by the id in a URL.
    ///
    /// # Errors
    /// [`LockError::InvalidKey`], [`LockError::Misconfigured`].
    pub(crate) fn key(&self, collection: &str, id: &str) -> Result<LockKey> {
        let registered = self.registered(collection)?;
        match (registered.parse_id)(id) {
            Some(id) => Ok(LockKey::new(collection, id)?),
            None => Err(InvalidKey::NotOfType { collection: registered.declared }.into()),
        }
    }

    /// [`Lockable::COLLECTION`] of the type for which this collection is registered.
    pub(super) fn declared(&self, collection: &str) -> Option<&'static str> {
        self.kind(collection).map(|it| it.declared)
    }

    /// # Errors
    /// [`LockError::Misconfigured`] if the collection of the document is registered for another type.
    pub(super) fn is_of<T: Lockable>(&self, key: &LockKey) -> Result<()> {
        if self.declared(key.collection()) == Some(T::COLLECTION) {
            return Ok(());
        }
        let (name, collection) = (type_name::<T>(), T::COLLECTION);
        Err(LockError::Misconfigured(format!(
            "the guard holds {key:?}, but `{name}` is in the collection `{collection}`: acquire the \
             lock with `LockKey::of::<{name}>(id)`"
        )))
    }

    #[cfg(feature = "_mongo")]
    pub(super) fn attach(&self, collection: &'static str) {
        let foreign = Registered {
            declared: collection,
            parse_id: |text| Some(text.into()),
            rules: Rules::new(self.ttl),
            over_http: true,
            attached: true,
        };
        self.known.write().by_name.entry(collection).or_insert(foreign);
    }
}

impl Collections {
    async fn prepare_by_pattern(
        &self,
        name: &str,
        registered: Registered,
        until: Instant,
    ) -> Result<&'static str> {
        if self.known.read().by_name.len() >= MAX_COLLECTIONS {
            return Err(LockError::Misconfigured(format!(
                "the collection `{name}` cannot be locked: this server knows {MAX_COLLECTIONS} collections already, \
                 and takes no more by pattern; keep the tenants in one collection, or use a database and a manager \
                 for each"
            )));
        }
        self.prepare(name, registered, until).await
    }

    pub(super) async fn prepare_on_first_use(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<(&'static str, Registered)> {
        let name = key.collection();
        let found = self.prepare_if_there(name, Pattern::exactly(name), until).await?;
        found.ok_or_else(|| LockError::NotFound { key: key.clone() })
    }

    /// Prepares a collection by pattern, unless this `sign` of it does not exist.
    async fn prepare_if_there(
        &self,
        name: &str,
        sign: Pattern,
        until: Instant,
    ) -> Result<Option<(&'static str, Registered)>> {
        let registered = self.registered(name)?;
        let _turn = self.turn_to_prepare(until).await?;
        if let Some(known) = self.get(name) {
            return Ok(Some(known));
        }
        let found = self
            .verbs
            .run("collections", until, sign, |store, it, until| store.collections(it, 1, until));
        if found.await?.is_empty() {
            return Ok(None);
        }
        Ok(Some((self.prepare_by_pattern(name, registered, until).await?, registered)))
    }

    /// As [`ready`](Self::ready), for a new document, which may be the first one of its collection.
    #[cfg(feature = "web")]
    pub(crate) async fn ready_to_create(&self, key: &LockKey, until: Instant) -> Result<()> {
        let name = key.collection();
        if self.get(name).is_none() {
            let registered = self.registered(name)?;
            let _turn = self.turn_to_prepare(until).await?;
            if self.get(name).is_none() {
                self.prepare_by_pattern(name, registered, until).await?;
            }
        }
        Ok(())
    }

    async fn turn_to_prepare(&self, until: Instant) -> Result<MutexGuard<'_, Option<Instant>>> {
        timeout_at(until.into(), self.discovered.lock()).await.map_err(|_| {
            let message = "another collection is being prepared, and the database does not answer";
            StoreError::new(StoreErrorKind::Unavailable, message).into()
        })
    }

    /// Learns of the collections by pattern that other servers have prepared, unless a discovery began within `age`
    /// before this call. Costs nothing without patterns.
    ///
    /// # Errors
    /// The first error; all other collections are prepared anyway.
    pub(super) async fn discover(&self, age: Duration, until: Instant) -> Result<()> {
        let patterns = self.known.read().patterns.clone();
        if patterns.is_empty() {
            return Ok(());
        }
        let asked = clock::now();
        let mut discovered = self.turn_to_prepare(until).await?;
        if discovered.is_some_and(|at| at + age >= asked) {
            return Ok(());
        }
        let (begins, mut outcome) = (clock::now(), Ok(()));
        for (pattern, registered) in patterns {
            let found =
                self.verbs.run("collections", until, pattern.of_locks(), |store, it, until| {
                    store.collections(it, MAX_COLLECTIONS + 1, until)
                });
            let found = found.await?;
            let names = found.iter().map(|locks| locks.strip_suffix(".lock").unwrap_or(locks));
            let new: Vec<_> =
                names.filter(|name| self.get(name).is_none() && !is_ours(name)).collect();
            let room = MAX_COLLECTIONS.saturating_sub(self.known.read().by_name.len());
            let (new, too_many) = new.split_at(room.min(new.len()));
            let prepare = |name| self.prepare_by_pattern(name, registered, until);
            // A collection that cannot be prepared takes the time of no other one.
            let all: Vec<_> = new.iter().copied().map(prepare).collect();
            let mut prepared = stream::iter(all).buffer_unordered(PREPARED_AT_ONCE);
            while let Some(prepared) = prepared.next().await {
                outcome = outcome.and(prepared.map(drop));
            }
            for name in too_many {
                outcome = outcome.and(prepare(name).await.map(drop));
            }
        }
        *discovered = Some(begins);
        outcome
    }

    /// For an operation on everything that a session holds: learns of collections that only other servers have used
    /// so far. If that fails, or takes half of the time, the operation covers only the collections that this server knows.
    pub(crate) async fn all_collections(&self, until: Instant) -> Vec<&'static str> {
        let half = clock::now() + until.saturating_duration_since(clock::now()) / 2;
        if let Err(e) = self.discover(Duration::ZERO, half).await {
            self.log_limit.warn("collections", || {
                format!("locks in collections that only other servers know may be left out: {e}")
            });
        }
        self.names()
    }

    /// Makes sure that this server knows these collections, which a client names, as far as patterns cover them and there
    /// are locks in them.
    ///
    /// # Errors
    /// If it is not certain whether there are locks in one of them.
    #[cfg(feature = "web")]
    pub(crate) async fn learn(
        &self,
        names: &std::collections::BTreeSet<&str>,
        until: Instant,
    ) -> Result<()> {
        let is_new = |name: &&str| self.get(name).is_none() && self.kind(name).is_some();
        if !names.iter().any(is_new) {
            return Ok(());
        }
        let discovered = self.discover(Duration::ZERO, until).await;
        if names.iter().any(is_new) { discovered } else { Ok(()) }
    }
}

/// Looks for collections that other servers have prepared, until the manager is gone.
pub(super) async fn follow(manager: Weak<Core>) {
    let mut pauses = Pauses::new("looking for collections", DISCOVER_EVERY);
    while let Some(core) = manager.upgrade() {
        let discovery = core.collections.discover(DISCOVER_EVERY / 2, core.verbs.until());
        let pause = match discovery.await {
            Ok(()) => pauses.after_success(Some(DISCOVER_EVERY)),
            Err(e) => pauses.after_failure(&e).min(DISCOVER_EVERY),
        };
        drop(core);
        sleep(pause).await;
    }
}
