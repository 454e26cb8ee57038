//! The public methods of the manager; each calls one of its parts.

use std::collections::HashMap;

use futures_util::future::BoxFuture;
use tokio_util::task::TaskTracker;

use crate::{
    actor::Actor,
    description::Description,
    ended::EndReason,
    error::{LockError, Result},
    freeze::{End, Scope},
    key::{LockKey, Lockable},
    lock::{Aid, Holder, Lock, Mode},
    manager::{
        LockEvents, LockManager,
        claim::{Acquired, Wanted},
    },
    store::{Acquisition, Ended, Released, TryAcquire},
};

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
    /// [`LockError::Misconfigured`] if the type is [fair](Lockable::FAIR) or [fenced](Lockable::FENCED) and the store
    /// cannot do that.
    pub async fn register<T: Lockable>(&self) -> Result<()> {
        self.register_in::<T>(T::COLLECTION).await
    }

    /// As [`register`](Self::register), for documents of `T` in a collection with another name: of one tenant, or made
    /// by a user. Also creates the lock collection of a collection that does not exist yet.
    ///
    /// Every server has to know the collection: register it on each, or by [a pattern](Self::register_matching).
    ///
    /// # Errors
    /// As `register`.
    pub async fn register_in<T: Lockable>(&self, collection: &str) -> Result<()> {
        self.core.collections.register::<T>(collection).await
    }

    /// Makes the documents of `T` lockable in every collection that the pattern covers: one `*` stands for one or more
    /// characters, as in `*_invoice`. Collections of this crate (`doclock.…`, `….lock`) are never covered.
    ///
    /// A collection is prepared on its first use, if it exists: nobody can create collections by asking for locks, only
    /// by [`SessionLocks::create`](crate::SessionLocks::create). So the
    /// first lock in it takes some commands more, and the database user needs the rights to create indexes, unless
    /// `doclock init` has prepared it. All servers learn of it within ten seconds, or when a request names it. A session
    /// that ends on one server releases its locks in all collections, whether or not that server has used them.
    ///
    /// A manager takes no collection by pattern if it knows 100 collections already. For more tenants, keep the
    /// tenants in one collection, or use a manager for each database.
    ///
    /// # Errors
    /// [`LockError::InvalidKey`] if no collection can have such a name. [`LockError::Misconfigured`] if more than 100
    /// collections have locks already. Also the errors of [`register`](Self::register), for the collections that have
    /// locks already. Even after such an error the pattern is registered, and the other collections are prepared.
    pub async fn register_matching<T: Lockable>(&self, pattern: &str) -> Result<()> {
        self.core.collections.register_matching::<T>(pattern).await
    }

    /// Names a document by the id in a URL. The collection must be registered.
    ///
    /// # Errors
    /// [`LockError::InvalidKey`] if `id` is not of the collection's id type;
    /// [`LockError::Misconfigured`] if the collection is not registered.
    pub fn key(&self, collection: &str, id: &str) -> Result<LockKey> {
        self.core.collections.key(collection, id)
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
        self.core.collections.attach(collection);
    }

    /// The live lock on this document, if there is one. Only for display: it may change at any moment.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn inspect(&self, key: &LockKey) -> Result<Option<Lock>> {
        self.core.reads.inspect(key, None, self.core.verbs.until()).await
    }

    /// The live locks on these documents, in their order: for each document what
    /// [`inspect`](Self::inspect) returns. One query for each collection.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn inspect_many(&self, keys: &[LockKey]) -> Result<Vec<Option<Lock>>> {
        self.core.reads.inspect_many(keys, None, self.core.verbs.until()).await
    }

    /// All live locks on this document: one exclusive lock, or the locks of its readers.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn locks_on(&self, key: &LockKey) -> Result<Vec<Lock>> {
        let (collection, keys) = (key.collection(), vec![key.clone()]);
        self.core.reads.locks_on(collection, keys, self.core.verbs.until()).await
    }

    /// All live locks, at most 1 000 in each registered collection.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn list(&self) -> Result<Vec<Lock>> {
        self.core.reads.list(None, self.core.verbs.until()).await
    }

    /// The live locks of one session.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn list_of(&self, aid: &Aid) -> Result<Vec<Lock>> {
        self.core.reads.list(Some(aid), self.core.verbs.until()).await
    }

    /// Renews the lease of every live lock of the session, in all its tabs, and counts these locks.
    ///
    /// One command for each registered collection, all at the same time. An expired lock is not revived:
    /// a lower count than expected means that some locks are lost.
    ///
    /// # Errors
    /// See [`LockManager`]. Also if an open transaction blocks one of the locks; the others are then renewed.
    pub async fn renew(&self, aid: &Aid) -> Result<u64> {
        self.core.sessions.renew(aid).await
    }

    /// Ends the session, as its logout does. All its locks are released. The extractors and the lock API refuse the
    /// session new locks for a minute, or for a day if it is the login of a client without a session.
    /// Returns the documents that it had locked, also if their locks had expired and nobody was told yet, and [how many
    /// more](Ended::more) there were. The listener is called in the background.
    ///
    /// # Errors
    /// See [`LockManager`]. After an error the locks remain until a repeated call, until the next
    /// [sweep](Self::sweep) of any server if the end was recorded, or until they expire.
    ///
    /// # Cancel safety
    /// If the future is dropped, the session is still ended.
    pub async fn end_session(&self, aid: &Aid) -> Result<Ended> {
        self.core.sessions.end(aid, EndReason::LoggedOut).await
    }

    /// Ends another session: as [`end_session`](Self::end_session), with the reason
    /// [`Revoked`](EndReason::Revoked).
    ///
    /// This takes away the locks, not the session: if the session store still accepts the session, it
    /// goes on, and may lock again after a minute.
    ///
    /// # Errors
    /// As `end_session`. It is also as cancel safe.
    pub async fn revoke_session(&self, aid: &Aid) -> Result<Ended> {
        self.core.sessions.end(aid, EndReason::Revoked).await
    }

    /// A hook for a session store that tells when its sessions end: the locks of the session are released before the
    /// hook returns, and the listener is called in the background. The hook takes what such a store tells, as a pair:
    /// the value of the session's entry `doclock.aid`, and the name of the [reason](EndReason).
    ///
    /// ```no_run
    /// # use actix_doclock::{LockManager, MongoStore};
    /// # use actix_session_mongo::{Error, MongoSessionStore};
    /// # async fn sessions(store: MongoStore, locks: LockManager) -> Result<(), Error> {
    /// // Register your types before.
    /// let sessions = MongoSessionStore::builder(store.database())
    ///     .collection("doclock.session")
    ///     .id_key("doclock.aid")
    ///     .on_end(locks.session_ends())
    ///     .build()
    ///     .await?;
    /// # Ok(()) }
    /// ```
    ///
    /// If the store does not answer, or while no type is registered, the hook fails, and is to be called again later.
    pub fn session_ends<E: Into<(String, &'static str)>>(
        &self,
    ) -> impl Fn(E) -> BoxFuture<'static, Result<()>> + Clone + Send + Sync + use<E> {
        self.core.sessions.ends()
    }

    /// Releases all locks of the session, which goes on and may take new locks. Returns the documents
    /// that it had locked.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn release_all(&self, aid: &Aid) -> Result<Vec<LockKey>> {
        self.core.sessions.release_all(aid).await
    }

    /// Takes the lock on `key` for the session `aid`, or says who holds it. One command.
    ///
    /// For a web session use the extractors or [`SessionLocks`](crate::SessionLocks): they also make sure
    /// that a session which ends at the same moment leaves no lock behind.
    ///
    /// # Errors
    /// See [`LockManager`]. Another holder is not an error, but an answer.
    ///
    /// # Cancel safety
    /// If the future is dropped, a fresh grant is given back.
    pub async fn lock_for_session(
        &self,
        key: &LockKey,
        aid: &Aid,
        holder: &Holder,
    ) -> Result<TryAcquire> {
        let (mode, ttl) = (Mode::Exclusive, self.ttl());
        let (key, aid, holder) = (key.clone(), aid.clone(), holder.clone());
        let wanted = Wanted {
            key,
            aid,
            person: None,
            holder,
            tab: None,
            page: None,
            mode,
            upgrades: None,
            ttl,
        };
        let acquired = self
            .core
            .granting
            .acquire(&wanted, &TaskTracker::new(), self.core.verbs.until())
            .await?;
        Ok(match acquired {
            Acquired::Granted(fresh) => TryAcquire::Granted(fresh.confirm()),
            Acquired::AlreadyMine(lock) => TryAcquire::AlreadyMine(lock),
            Acquired::Held(lock) => TryAcquire::Held(lock),
            Acquired::Lost(key) => TryAcquire::Lost(key),
        })
    }

    /// Gives a lock back. One command.
    ///
    /// Releases exactly the acquisition that `lock` stands for, never a newer one.
    ///
    /// # Errors
    /// See [`LockManager`]. It is no error if the lock is already gone.
    pub async fn release(&self, lock: &Lock) -> Result<Released> {
        match Acquisition::of(lock) {
            Some(held) => self.core.granting.release_by(&held, self.core.verbs.until()).await,
            None => Ok(Released::AlreadyGone),
        }
    }

    /// Breaks this lock of another session, as `actor` has seen it, if the
    /// [policy](crate::LockManagerBuilder::break_policy) allows that. Later guarded saves of the former holder are refused.
    /// A newer lock on the document stays.
    ///
    /// The `reason`, cut to [`MAX_REASON_BYTES`](crate::limits::MAX_REASON_BYTES), is written to the log and sent to the
    /// subscribers of [events](Self::events). The log line has the actor, the reason and the holder, and the target
    /// `actix_doclock::audit`. If the application [describes](crate::LockManagerBuilder::describe) its documents, the line
    /// also has the title, and is written up to 2 s later.
    ///
    /// # Errors
    /// [`LockError::BreakRefused`] by the policy. Otherwise see [`LockManager`]. It is no error if the lock is already
    /// gone.
    pub async fn break_lock(&self, lock: &Lock, actor: &Actor, reason: &str) -> Result<Released> {
        self.core.break_lock(lock, actor, reason).await
    }

    /// Waits until this acquisition of a lock is gone, as far as this process can know.
    ///
    /// Resolves when an operation of this manager learns of its end: the lock was released or broken, its session
    /// ended, or another session holds it. Without news, the server is asked shortly before the lock
    /// expires, because other servers may have renewed it. Without an answer, the lock counts as gone when it expires.
    /// Its lease counts from before the last renewal was sent, so the lock counts as gone before the server grants it
    /// to anybody else.
    ///
    /// This method does not renew the lock.
    ///
    /// ```
    /// # use actix_doclock::{Aid, Holder, LockKey, LockManager, Lockable, MemoryStore, TryAcquire};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Invoice { #[serde(rename = "_id")] number: i64 }
    /// # impl Lockable for Invoice { type Id = i64; const COLLECTION: &'static str = "invoice"; }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let locks = LockManager::builder(MemoryStore::new()).build().await?;
    /// # locks.register::<Invoice>().await?;
    /// # async fn print_all_pages() {}
    /// # let (key, aid) = (LockKey::of::<Invoice>(4711)?, Aid::new());
    /// if let TryAcquire::Granted(lock) = locks.lock_for_session(&key, &aid, &Holder::new("job")).await? {
    ///     tokio::select! {
    ///         () = print_all_pages() => {}
    ///         () = locks.lost(&lock) => eprintln!("somebody broke the lock: stopped printing"),
    ///     }
    ///     locks.release(&lock).await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    /// May be dropped and called again. In a loop, keep one future: a new one knows no renewal that came before it, so it ends
    /// at once if the lease in `lock` has passed.
    pub fn lost(&self, lock: &Lock) -> impl Future<Output = ()> + Send + use<> {
        self.core.lost(lock)
    }

    /// The events of all locks in all registered collections from now on, on any server.
    ///
    /// On a replica set the server reports each event within milliseconds; elsewhere the locks are listed
    /// once a second. In both cases, one watch for each collection serves all subscribers. A subscriber
    /// that takes the events too slowly misses some, and is told so.
    ///
    /// ```no_run
    /// # use actix_doclock::{LockEvent, LockManager};
    /// # async fn follow(locks: LockManager) {
    /// let mut events = locks.events();
    /// while let Some(event) = events.next().await {
    ///     match &*event {
    ///         LockEvent::Resync => println!("read everything again: locks.list()"),
    ///         other => println!("{}: {:?}", other.name(), other.lock()),
    ///     }
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn events(&self) -> LockEvents {
        LockEvents::of(&self.core)
    }

    /// The titles and links of these documents, as far as the application
    /// [describes](crate::LockManagerBuilder::describe) them. Never fails, and answers within 2 s: a
    /// document without a title is left out.
    pub async fn descriptions(&self, keys: &[LockKey]) -> HashMap<LockKey, Description> {
        self.core.descriptions_for(None, None, keys).await
    }

    /// Freezes a collection, or all of them: until the given end no new locks are granted. Instead of a lock,
    /// callers get [`LockError::Frozen`] with the reason, and waiters get it at once. Held locks stay:
    /// their holders may save, and release them. The documents are at rest when [`list`](Self::list) shows no lock in the
    /// frozen collections.
    ///
    /// All servers of the cluster obey within two seconds. The freeze survives their restarts, and ends by
    /// itself, by the store's clock: at a time, or after a duration. A second freeze of the same scope replaces the
    /// first. The `reason` is cut to [`MAX_REASON_BYTES`](crate::limits::MAX_REASON_BYTES). `by` is recorded with the freeze, and stands in the
    /// log. [`Freeze::obeyed_by`](crate::freeze::Freeze::obeyed_by) tells how many servers have noted that they obey.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use actix_doclock::{Actor, LockError, LockManager};
    /// # async fn migrate(locks: &LockManager) -> Result<(), LockError> {
    /// let (why, an_hour) = ("The numbers of all work items are changed.", Duration::from_secs(60 * 60));
    /// locks.freeze("workitem", why, an_hour, &Actor::new("migration 12")).await?;
    /// // … wait for the held locks, or break them; migrate …
    /// locks.thaw("workitem").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`LockError::PastFreeze`] if the end has passed; nothing changes then. [`LockError::Misconfigured`] if the
    /// collection is not registered, or for all collections if none is. Otherwise see [`LockManager`].
    pub async fn freeze(
        &self,
        scope: impl Into<Scope>,
        reason: &str,
        until: impl Into<End>,
        by: &Actor,
    ) -> Result<()> {
        let scope = self.core.collections.scope(scope.into()).await?;
        if !self.core.collections.has_any() {
            let message = "a freeze of all collections without any that is registered";
            return Err(LockError::Misconfigured(message.to_owned()));
        }
        self.core.freezes.begin(scope, reason, until.into(), by).await
    }

    /// Ends the freeze of this scope. True if the scope was frozen. A freeze of [`Scope::All`] and a freeze of a
    /// collection end independently.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn thaw(&self, scope: impl Into<Scope>) -> Result<bool> {
        let scope = self.core.collections.scope(scope.into()).await?;
        self.core.freezes.end(scope).await
    }

    /// Removes expired locks, and ends the idle sessions, in all registered collections. Returns the
    /// number of these sessions. The [reaper](crate::LockManagerBuilder::reaper_interval) does the same
    /// continuously; this method is for tests, and for processes without a reaper.
    ///
    /// The listener is called in the background; [`shutdown`](Self::shutdown) waits for it.
    ///
    /// # Errors
    /// [`LockError::Store`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the current batch of sessions is still ended.
    pub async fn sweep(&self) -> Result<usize> {
        self.core.sweep().await
    }

    /// Ends all [streams of events](Self::events), those over HTTP too, refuses all waiters
    /// ([`LockError::ShutDown`](crate::LockError::ShutDown)), and accepts no new ones. Everything else goes on.
    ///
    /// Call it before a graceful stop of the HTTP server, which waits for requests to end;
    /// [`serve`](Self::serve) does so. [`shutdown`](Self::shutdown) comes afterwards.
    pub fn begin_shutdown(&self) {
        self.core.stop_begins.cancel();
        self.core.events.close();
        self.core.beliefs.queues.stop.cancel();
    }
}
