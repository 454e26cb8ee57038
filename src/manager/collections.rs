//! The collections whose documents can be locked: registered by type, by name, or [by pattern](discovery).

mod discovery;

use std::{
    any::type_name,
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use parking_lot::RwLock;
use tokio::sync::{Mutex, Notify};

pub(super) use self::discovery::follow;

use crate::{
    clock,
    error::{LockError, Result},
    freeze::Scope,
    key::{InvalidKey, LockId, LockKey, Lockable},
    manager::{fleet::Servers, freezes::Freezes, log_limit::LogLimit, verbs::Verbs},
    store::{Ability, Pattern, Rules},
};

/// A manager that knows this many collections takes no more [by pattern](crate::LockManager::register_matching). Each
/// collection costs about 1 MB of memory, and a change stream while somebody waits in it or listens to events.
pub const MAX_COLLECTIONS: usize = 100;

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
