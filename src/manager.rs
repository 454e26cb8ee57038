//! Policy over a store: who gets a lock, for how long, and what happens when nobody answers.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use tokio::sync::oneshot::Receiver;
use tokio_util::task::TaskTracker;

use crate::{
    Aid, Holder, InvalidKey, Lock, LockError, LockId, LockKey, LockToken, Lockable,
    store::{Answer, Claim, Document, DynStore, Released, Saved, TryAcquire},
};

mod activity;
mod builder;
mod policy;
mod provisional;
mod run;

pub use builder::{BuildError, LockManagerBuilder};
pub use policy::Actor;
pub(crate) use provisional::Provisional;

/// Locks documents for web sessions, jobs and workers. The heart of the crate, without HTTP.
///
/// Clones are handles to one manager. Make one for each application server, in `main`:
///
/// ```
/// use std::time::Duration;
/// use actix_doclock::{Aid, Holder, LockKey, LockManager, Lockable, MemoryStore, TryAcquire};
///
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct Invoice { #[serde(rename = "_id")] number: i64, total: f64 }
/// # impl Lockable for Invoice { type Id = i64; const COLLECTION: &'static str = "invoice"; }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let locks = LockManager::builder(MemoryStore::new()).ttl(Duration::from_secs(150)).build().await?;
/// locks.register::<Invoice>().await?;
///
/// // In a request, the extractors do this. A job does it by itself:
/// let (job, name) = (Aid::new(), Holder::new("nightly report"));
/// match locks.try_acquire(&LockKey::of::<Invoice>(4711)?, &job, &name).await? {
///     TryAcquire::Granted(lock) | TryAcquire::AlreadyMine(lock) => {
///         // … work on it …
///         locks.release(&lock).await?;
///     }
///     TryAcquire::Held(lock) => println!("in use by {:?}", lock.holder),
/// }
/// locks.shutdown().await;
/// # Ok(()) }
/// ```
///
/// # Deadlines and cancel safety
/// Every operation answers within the [deadline](LockManagerBuilder::deadline) of the builder. It
/// runs in a task of its own on the runtime on which the manager was built, and goes on there if
/// its future is dropped or the deadline passes: a lock that is granted after nobody waits for it
/// any more is given back by that task. So all methods may be dropped at any point.
///
/// # Errors
/// All operations can fail with [`LockError::Store`]: the store was not reached in time, or
/// refused. Its [kind](crate::StoreError::kind) tells whether the outcome is unknown; then the manager has
/// tried until the deadline, and what may be left behind lives no longer than the ttl. An operation
/// on a collection that was never [registered](Self::register) fails with
/// [`LockError::Misconfigured`].
#[derive(Clone)]
pub struct LockManager {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn DynStore>,
    collections: RwLock<BTreeMap<&'static str, Registered>>,
    settings: builder::Settings,
    runner: run::Runner,
    activity: activity::Activity,
}

#[derive(Clone, Copy)]
struct Registered {
    parse_id: fn(&str) -> Option<LockId>,
}

impl LockManager {
    /// Starts a manager over this store. See [`LockManagerBuilder`] for what can be set.
    pub fn builder(store: impl crate::Store) -> LockManagerBuilder {
        LockManagerBuilder::new(Arc::new(store))
    }

    /// Makes the documents of `T` lockable: creates the lock collection and its indexes.
    ///
    /// Call it once for each type when the server starts. Idempotent; a changed ttl is carried over
    /// to the index. While locks with a longer ttl are held (a rolling change), the index keeps to
    /// theirs.
    ///
    /// # Errors
    /// [`LockError::Store`] if the store is not reached, or the database user lacks a privilege;
    /// the message names it. [`LockError::InvalidKey`] for an impossible collection name.
    pub async fn register<T: Lockable>(&self) -> Result<(), LockError> {
        LockKey::new(T::COLLECTION, 0)?;
        // Building an index may take longer than a request is allowed to.
        let until = Instant::now() + self.deadline().max(Duration::from_secs(60));
        self.run("register", until, (T::COLLECTION, self.ttl()), |store, (collection, ttl)| {
            store.prepare(collection, *ttl)
        })
        .await?;
        let registered = Registered { parse_id: |text| text.parse::<T::Id>().ok().map(Into::into) };
        let mut all = self.inner.collections.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(T::COLLECTION, registered);
        Ok(())
    }

    /// Takes the lock on `key` for the session `aid`, or says who holds it. One command.
    ///
    /// For a web session use the extractors or [`SessionLocks`](crate::SessionLocks): they also
    /// see to it that a session which ends at the same moment leaves no lock behind.
    ///
    /// # Errors
    /// See [`LockManager`]. That somebody else holds it is no error but an answer.
    ///
    /// # Cancel safety
    /// If the future is dropped, a fresh grant is given back.
    pub async fn try_acquire(
        &self,
        key: &LockKey,
        aid: &Aid,
        holder: &Holder,
    ) -> Result<TryAcquire, LockError> {
        let acquired = self.acquire_by(key, aid, holder, &TaskTracker::new(), self.until()).await?;
        Ok(match acquired {
            Acquired::Fresh(fresh) => TryAcquire::Granted(fresh.confirm()),
            Acquired::AlreadyMine(lock) => TryAcquire::AlreadyMine(lock),
            Acquired::Held(lock) => TryAcquire::Held(lock),
        })
    }

    /// Starts the lease of every live lock of the session anew, and counts them.
    ///
    /// One command for each registered collection, at the same time. A lock that has run out is not
    /// revived: fewer than expected means that some are lost.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn renew(&self, aid: &Aid) -> Result<u64, LockError> {
        let until = self.until();
        let renewed = self.in_each_collection(|collection| {
            self.run("renew", until, (collection, aid.clone()), |store, (collection, aid)| {
                store.renew(collection, aid)
            })
        });
        Ok(renewed.await?.into_iter().sum())
    }

    /// Gives a lock back. One command.
    ///
    /// Releases exactly the acquisition that `lock` stands for, never a newer one.
    ///
    /// # Errors
    /// See [`LockManager`]. That the lock had gone already is no error.
    pub async fn release(&self, lock: &Lock) -> Result<Released, LockError> {
        match lock.token {
            Some(token) => self.release_by(&lock.key, &lock.aid, token, self.until()).await,
            None => Ok(Released::AlreadyGone),
        }
    }

    /// Ends the session: all its locks are released, and it gets no new one. Names what it held.
    ///
    /// # Errors
    /// See [`LockManager`]. After an error the locks go with their ttl, or by a repeated call.
    pub async fn release_session(&self, aid: &Aid) -> Result<Vec<LockKey>, LockError> {
        let until = self.until();
        let (manager, aid) = (self.clone(), aid.clone());
        // Both steps in one task, so that the second follows whatever becomes of the caller. First
        // the tombstone, then the locks: an acquire at the same moment either comes before the
        // removal, or sees the tombstone.
        let steps = async move {
            let ended = aid.clone();
            manager.run("end_session", until, ended, |store, aid| store.end_session(aid)).await?;
            manager.release_all_by(&aid, until).await
        };
        let outcome = self.inner.runner.spawn(&TaskTracker::new(), steps);
        run::answer("release_session", until, outcome).await
    }

    /// Releases all locks of the session, which goes on and may take new ones. Names what it held.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn release_all(&self, aid: &Aid) -> Result<Vec<LockKey>, LockError> {
        self.release_all_by(aid, self.until()).await
    }

    /// Removes somebody else's lock, if the [policy](LockManagerBuilder::break_policy) allows it to
    /// `actor`. Returns the lock that was broken; `None` if the document was free.
    ///
    /// What the holder writes afterwards through a guarded save is refused.
    ///
    /// # Errors
    /// [`LockError::BreakRefused`] by the policy. Else see [`LockManager`].
    pub async fn break_lock(
        &self,
        key: &LockKey,
        actor: &Actor,
    ) -> Result<Option<Lock>, LockError> {
        let until = self.until();
        let Some(lock) = self.inspect_by(key, until).await? else {
            return Ok(None);
        };
        if !self.inner.settings.may_break(actor, &lock) {
            return Err(LockError::BreakRefused { key: key.clone() });
        }
        let broken =
            self.run("break_lock", until, lock.clone(), |store, lock| store.break_lock(lock));
        if broken.await? == Released::AlreadyGone {
            return Ok(None);
        }
        log::info!(
            target: "actix_doclock::audit",
            "the lock on {key:?} was broken by {:?}; it was held by {:?}",
            actor.label, lock.holder.as_ref().map(|holder| &holder.label),
        );
        Ok(Some(lock))
    }

    /// The live lock on this document, if there is one. For display: it may change at any moment.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn inspect(&self, key: &LockKey) -> Result<Option<Lock>, LockError> {
        self.inspect_by(key, self.until()).await
    }

    /// All live locks, at most 1 000 in each registered collection.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn list(&self) -> Result<Vec<Lock>, LockError> {
        self.list_by(None, self.until()).await
    }

    /// The live locks of one session, at most 1 000 in each registered collection.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn list_of(&self, aid: &Aid) -> Result<Vec<Lock>, LockError> {
        self.list_by(Some(aid), self.until()).await
    }

    /// Waits until what is under way has ended: releases that were handed over, and requests whose
    /// callers have gone. At most twice the deadline.
    ///
    /// Call it after `HttpServer::run`. Sessions outlive the process, so their locks stay.
    pub async fn shutdown(&self) {
        self.inner.runner.drain(self.deadline() * 2).await;
    }

    /// How long a lock outlives the last sign of life of its session.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.inner.settings.ttl
    }

    /// How long an operation may take at most.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.inner.settings.deadline
    }

    /// Names a document by what stands in a URL. The collection must be registered.
    ///
    /// # Errors
    /// [`LockError::InvalidKey`] if `id` is not of the collection's id type;
    /// [`LockError::Misconfigured`] if the collection is not registered.
    pub fn key(&self, collection: &str, id: &str) -> Result<LockKey, LockError> {
        let (name, registered) = self.registered(collection)?;
        match (registered.parse_id)(id) {
            Some(id) => Ok(LockKey::new(name, id)?),
            None => Err(InvalidKey::NotOfType { collection: name }.into()),
        }
    }
}

/// What [`LockManager::acquire_by`] found.
pub(crate) enum Acquired {
    /// Granted anew, and given back unless it is confirmed.
    Fresh(Provisional),
    AlreadyMine(Lock),
    Held(Lock),
}

/// The same verbs for the layer above, which has a deadline for a whole request.
impl LockManager {
    pub(crate) fn holder(&self) -> &Holder {
        &self.inner.settings.holder
    }

    /// The deadline of an operation that begins now.
    pub(crate) fn until(&self) -> Instant {
        Instant::now() + self.deadline()
    }

    /// # Errors
    /// [`LockError::Misconfigured`] if it is not.
    pub(crate) fn must_be_registered(&self, collection: &str) -> Result<(), LockError> {
        self.registered(collection).map(|_| ())
    }

    /// Everything that a grant leaves to be done if it is not wanted is tracked by `scope` too.
    pub(crate) async fn acquire_by(
        &self,
        key: &LockKey,
        aid: &Aid,
        holder: &Holder,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired, LockError> {
        self.registered(key.collection())?;
        // The token is chosen here, before the first attempt, so that a repetition finds its own.
        let claim = Claim {
            aid: aid.clone(),
            token: LockToken::new(),
            holder: holder.clone(),
            ttl: self.ttl(),
        };
        let (manager, key, own_scope) = (self.clone(), key.clone(), scope.clone());
        let acquire = async move {
            let answer = run::retry(until, || manager.inner.store.try_acquire(&key, &claim)).await;
            match answer {
                // Dropped with the answer if nobody waits for it any more, and then given back.
                Ok(TryAcquire::Granted(lock)) => {
                    Ok(Acquired::Fresh(Provisional::new(manager, lock, claim.token, own_scope)))
                }
                Ok(TryAcquire::AlreadyMine(lock)) => Ok(Acquired::AlreadyMine(lock)),
                Ok(TryAcquire::Held(lock)) => Ok(Acquired::Held(lock)),
                Err(error) => {
                    if error.is_unknown() {
                        // One of the attempts may have been carried out.
                        manager.give_back(key, claim.aid, claim.token, &own_scope);
                    }
                    Err(error)
                }
            }
        };
        let outcome = self.inner.runner.spawn(scope, acquire);
        Ok(run::answer("try_acquire", until, outcome).await?)
    }

    /// Releases without anybody waiting. Best effort: what it misses goes with its ttl.
    pub(crate) fn give_back(&self, key: LockKey, aid: Aid, token: LockToken, scope: &TaskTracker) {
        let (manager, until) = (self.clone(), self.until());
        self.inner.runner.spawn(scope, async move {
            let store = &manager.inner.store;
            if let Err(e) = run::retry(until, || store.release(&key, &aid, token)).await {
                log::warn!(
                    target: "actix_doclock::manager",
                    "a lock on {key:?} could not be given back and goes with its ttl: {e}",
                );
            }
        });
    }

    pub(crate) async fn release_by(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        until: Instant,
    ) -> Result<Released, LockError> {
        let args = (key.clone(), aid.clone(), token);
        self.run("release", until, args, |store, (key, aid, token)| store.release(key, aid, *token))
            .await
    }

    pub(crate) async fn inspect_by(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<Option<Lock>, LockError> {
        self.registered(key.collection())?;
        self.run("inspect", until, key.clone(), |store, key| store.inspect(key)).await
    }

    pub(crate) async fn list_by(
        &self,
        aid: Option<&Aid>,
        until: Instant,
    ) -> Result<Vec<Lock>, LockError> {
        const LIMIT: usize = 1_000;
        let lists = self.in_each_collection(|collection| {
            self.run("list", until, (collection, aid.cloned()), |store, (collection, aid)| {
                store.list(collection, aid.as_ref(), LIMIT)
            })
        });
        Ok(lists.await?.into_iter().flatten().collect())
    }

    async fn release_all_by(&self, aid: &Aid, until: Instant) -> Result<Vec<LockKey>, LockError> {
        let released = self.in_each_collection(|collection| {
            let args = (collection, aid.clone());
            self.run("release_session", until, args, |store, (collection, aid)| {
                store.release_session(collection, aid)
            })
        });
        Ok(released.await?.into_iter().flatten().collect())
    }

    /// How long ago the session ended, if it has.
    pub(crate) async fn session_ended(
        &self,
        aid: &Aid,
        until: Instant,
    ) -> Result<Option<Duration>, LockError> {
        self.run("session_ended", until, aid.clone(), |store, aid| store.session_ended(aid)).await
    }

    pub(crate) async fn exists(&self, key: &LockKey, until: Instant) -> Result<bool, LockError> {
        self.run("exists", until, key.clone(), |store, key| store.exists(key)).await
    }

    /// # Errors
    /// [`LockError::NotFound`], [`LockError::Document`], and those of the store.
    pub(crate) async fn load<T: Lockable>(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<T, LockError> {
        match self.run("load", until, key.clone(), |store, key| store.load(key)).await? {
            None => Err(LockError::NotFound { key: key.clone() }),
            Some(document) => {
                document.decode().map_err(|source| LockError::Document { key: key.clone(), source })
            }
        }
    }

    /// # Errors
    /// [`LockError::Lost`], [`LockError::NotFound`], [`LockError::Document`], and the store's.
    pub(crate) async fn save<T: Lockable>(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        document: &T,
        until: Instant,
    ) -> Result<(), LockError> {
        let document = Document::encode(self.inner.store.format(), document)
            .map_err(|source| LockError::Document { key: key.clone(), source })?;
        let args = (key.clone(), aid.clone(), token, document);
        let saved = self.run("save", until, args, |store, (key, aid, token, document)| {
            store.save(key, aid, *token, document)
        });
        match saved.await? {
            Saved::Saved => Ok(()),
            Saved::Lost => Err(LockError::Lost { key: key.clone(), holder: None }),
            Saved::DocumentGone => Err(LockError::NotFound { key: key.clone() }),
        }
    }

    /// Renews all locks of an active session, at most once in a third of the ttl and without
    /// anybody waiting. Returns the task if this call started one.
    pub(crate) fn touch(&self, aid: &Aid) -> Option<Receiver<()>> {
        if !self.inner.activity.is_due(aid, self.ttl() / 3) {
            return None;
        }
        let (manager, aid) = (self.clone(), aid.clone());
        Some(self.inner.runner.spawn(&TaskTracker::new(), async move {
            if let Err(e) = manager.renew(&aid).await {
                manager.inner.activity.forget(&aid);
                log::warn!(
                    target: "actix_doclock::manager",
                    "the locks of {aid:?} were not renewed, the next request tries again: {e}",
                );
            }
        }))
    }

    /// A session that has just begun holds nothing, so nothing of it is due for renewal.
    pub(crate) fn session_begins(&self, aid: &Aid) {
        self.inner.activity.is_due(aid, self.ttl() / 3);
    }

    fn registered(&self, collection: &str) -> Result<(&'static str, Registered), LockError> {
        let all = self.inner.collections.read().unwrap_or_else(PoisonError::into_inner);
        all.get_key_value(collection).map(|(name, registered)| (*name, *registered)).ok_or_else(
            || {
                LockError::Misconfigured(format!(
                    "the collection `{collection}` is not registered: call \
                     `locks.register::<T>().await?` for its type when the server starts"
                ))
            },
        )
    }

    /// Runs one operation to its end in a task of its own, again and again while its outcome is
    /// unknown and there is time.
    async fn run<A, T>(
        &self,
        verb: &'static str,
        until: Instant,
        args: A,
        attempt: for<'a> fn(&'a dyn DynStore, &'a A) -> Answer<'a, T>,
    ) -> Result<T, LockError>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let store = Arc::clone(&self.inner.store);
        let operation = async move { run::retry(until, || attempt(&*store, &args)).await };
        let outcome = self.inner.runner.spawn(&TaskTracker::new(), operation);
        Ok(run::answer(verb, until, outcome).await?)
    }

    /// One operation in each registered collection, all at the same time.
    async fn in_each_collection<T, F>(
        &self,
        operation: impl Fn(&'static str) -> F,
    ) -> Result<Vec<T>, LockError>
    where
        F: Future<Output = Result<T, LockError>>,
    {
        let names: Vec<_> = {
            let all = self.inner.collections.read().unwrap_or_else(PoisonError::into_inner);
            all.keys().copied().collect()
        };
        run::all(names.into_iter().map(operation)).await
    }
}

impl fmt::Debug for LockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockManager")
            .field("settings", &self.inner.settings)
            .finish_non_exhaustive()
    }
}
