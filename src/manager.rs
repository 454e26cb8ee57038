//! Policy over a store: who gets a lock, for how long, and what happens when nobody answers.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    Aid, EndReason, Holder, InvalidKey, Lock, LockError, LockId, LockKey, Lockable, Mode, clock,
    random,
    store::{DynStore, Released, Rules, TryAcquire},
};

mod activity;
#[cfg(feature = "_mongo")]
mod attach;
mod builder;
mod deadlock;
mod events;
#[cfg(all(feature = "mongo-session", feature = "_mongo"))]
mod for_session_store;
mod guard;
mod health;
mod job;
mod keeper;
mod leases;
mod listener;
mod lost;
#[cfg(feature = "metrics")]
pub mod metrics;
mod observe;
mod operations;
mod policy;
mod provisional;
mod queue;
mod reaper;
mod release;
pub(crate) mod rhythm;
mod run;
pub(crate) mod streams;
mod supervisor;
mod sweeps;
mod take_over;
mod wait;
mod wakeups;

pub use builder::{BuildError, LockManagerBuilder};
pub use events::LockEvents;
pub use guard::{LockGuard, LockGuards};
pub use health::{Health, HealthReport, HealthStatus, StoreHealth};
pub use job::Job;
pub(crate) use operations::{Acquired, Acquisition, LISTED, Wanted};
pub use policy::Actor;
pub(crate) use provisional::Provisional;
pub use supervisor::TaskPanics;
pub use sweeps::{ReaperHealth, ReaperState};
pub use take_over::MAX_REASON_BYTES;
pub(crate) use take_over::can_be_taken_over;
pub use wait::Wait;
pub use wakeups::Wakeup;

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
    watched: lost::Watched,
    queues: queue::Queues,
    wakeups: wakeups::Wakeups,
    kept: keeper::Kept,
    leases: leases::Leases,
    /// Ends the waits, also when all of that ends.
    waits: CancellationToken,
    events: events::Events,
    event_streams: streams::Streams,
    /// Ends the background tasks, also when the last handle goes.
    stop: Stop,
    /// Has the reaper wait for other types to be registered.
    register: Arc<Notify>,
    /// Has the reaper look soon: whoever is granted a lock may have taken it over from an idle session.
    granted: Arc<Notify>,
    /// Has the listener called: some session has ended.
    announce: Arc<Notify>,
    /// What came of looking for silent sessions.
    sweeps: sweeps::Sweeps,
    panics: supervisor::Panics,
}

impl Inner {
    /// This acquisition is over, by whomever.
    fn gone(&self, lock: &Acquisition) {
        self.watched.ended(lock);
        self.queues.ended(lock);
    }

    /// The session held these, and holds nothing now.
    fn gone_all_of(&self, aid: &Aid, keys: &[LockKey], asked: Instant) {
        self.watched.saw_all_of(aid, &[], asked);
        for key in keys {
            self.queues.freed(key);
        }
    }
}

/// Cancels its token when it is dropped.
#[derive(Debug, Default)]
struct Stop(CancellationToken);

impl Stop {
    fn token(&self) -> CancellationToken {
        self.0.clone()
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[derive(Clone, Copy)]
struct Registered {
    parse_id: fn(&str) -> Option<LockId>,
    fair: bool,
}

impl LockManager {
    /// Starts a manager over this store. See [`LockManagerBuilder`] for what can be set.
    pub fn builder(store: impl crate::Store) -> LockManagerBuilder {
        LockManagerBuilder::new(Arc::new(store))
    }

    /// Makes the documents of `T` lockable: creates the lock collection and its indexes.
    ///
    /// Call it once for each type when the server starts. Idempotent. A longer ttl raises the TTL index;
    /// a shorter one never lowers it, because servers with the longer ttl may hold locks.
    ///
    /// # Errors
    /// [`LockError::Store`] if the store is not reached, or the database user lacks a privilege;
    /// the message names it; or if `T::Id` may be a string and the collection has a collation by which
    /// different strings are equal. [`LockError::InvalidKey`] for an impossible collection name.
    pub async fn register<T: Lockable>(&self) -> Result<(), LockError> {
        LockKey::new(T::COLLECTION, 0)?;
        // Building an index may take longer than a request is allowed to.
        let until = clock::now() + self.deadline().max(Duration::from_secs(60));
        let text_ids = LockId::may_be_text::<T::Id>();
        let rules = Rules { ttl: self.ttl(), fenced: T::FENCED, fair: T::FAIR, text_ids };
        self.run("register", until, (T::COLLECTION, rules), |store, (collection, rules)| {
            store.prepare(collection, rules)
        })
        .await?;
        let parse_id = |text: &str| text.parse::<T::Id>().ok().map(Into::into);
        let registered = Registered { parse_id, fair: T::FAIR };
        let mut all = self.inner.collections.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(T::COLLECTION, registered);
        drop(all);
        self.inner.register.notify_one();
        self.follow_all();
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
        let (mode, ttl) = (Mode::Exclusive, self.ttl());
        let (key, aid, holder) = (key.clone(), aid.clone(), holder.clone());
        let wanted = Wanted { key, aid, holder, tab: None, page: None, mode, ttl };
        let acquired = self.acquire_by(&wanted, &TaskTracker::new(), self.until()).await?;
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
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.renew", skip_all,
        fields(outcome = tracing::field::Empty),
    ))]
    pub async fn renew(&self, aid: &Aid) -> Result<u64, LockError> {
        let until = self.until();
        let renewed = self.in_each_collection(|collection| {
            self.run("renew", until, (collection, aid.clone()), |store, (collection, aid)| {
                store.renew(collection, std::slice::from_ref(aid))
            })
        });
        let renewed = renewed.await;
        observe::renewed("session", &renewed);
        let renewed = renewed?.into_iter().sum();
        if self.inner.watched.watches(aid) {
            // Which of them it was, for those who wait for a loss.
            self.list_by(Some(aid), until).await?;
        }
        Ok(renewed)
    }

    /// Gives a lock back. One command.
    ///
    /// Releases exactly the acquisition that `lock` stands for, never a newer one.
    ///
    /// # Errors
    /// See [`LockManager`]. That the lock had gone already is no error.
    pub async fn release(&self, lock: &Lock) -> Result<Released, LockError> {
        match Acquisition::of(lock) {
            Some(held) => self.release_by(&held, self.until()).await,
            None => Ok(Released::AlreadyGone),
        }
    }

    /// Ends the session, as its logout does: all its locks are released, and for a minute the
    /// extractors and the lock API give it no new one. Names what it held. The listener is called in
    /// the background.
    ///
    /// # Errors
    /// See [`LockManager`]. After an error the locks go by a repeated call, by the next
    /// [sweep](Self::sweep) of any server if the end was noted, or with their ttl.
    ///
    /// # Cancel safety
    /// If the future is dropped, the session is ended all the same.
    pub async fn release_session(&self, aid: &Aid) -> Result<Vec<LockKey>, LockError> {
        self.end_session(aid, EndReason::LoggedOut).await
    }

    /// Ends somebody else's session: as [`release_session`](Self::release_session), with the reason
    /// [`Revoked`](EndReason::Revoked).
    ///
    /// This takes the locks away, not the session: what the session store still accepts goes on, and
    /// after a minute may lock again.
    ///
    /// # Errors
    /// As `release_session`, and as cancel safe.
    pub async fn revoke_session(&self, aid: &Aid) -> Result<Vec<LockKey>, LockError> {
        self.end_session(aid, EndReason::Revoked).await
    }

    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.end_session", skip_all,
        fields(outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn end_session(
        &self,
        aid: &Aid,
        reason: EndReason,
    ) -> Result<Vec<LockKey>, LockError> {
        // A name of its own for each operation: two of one server are as far apart as those of two.
        let args = (aid.clone(), reason, self.registered_names(), random::uuid());
        let asked = clock::now();
        let ended =
            self.run("end_session", self.until(), args, |store, (aid, reason, names, worker)| {
                store.end_session(aid, *reason, names, *worker)
            });
        let ended = ended.await?;
        observe::session_ended(reason);
        self.inner.gone_all_of(aid, &ended, asked);
        self.inner.announce.notify_one();
        Ok(ended)
    }

    /// Releases all locks of the session, which goes on and may take new ones. Names what it held.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn release_all(&self, aid: &Aid) -> Result<Vec<LockKey>, LockError> {
        let until = self.until();
        let asked = clock::now();
        let released = self.in_each_collection(|collection| {
            let args = (collection, aid.clone());
            self.run("release_session", until, args, |store, (collection, aid)| {
                store.release_session(collection, aid)
            })
        });
        let released: Vec<_> = released.await?.into_iter().flatten().collect();
        self.inner.gone_all_of(aid, &released, asked);
        Ok(released)
    }

    /// The live lock on this document, if there is one. For display: it may change at any moment.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn inspect(&self, key: &LockKey) -> Result<Option<Lock>, LockError> {
        self.inspect_by(key, None, self.until()).await
    }

    /// All live locks on this document: one that is exclusive, or those of its readers.
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

    /// Stops the reaper, the listener and the renewal of guards, refuses those who wait for a lock, and
    /// waits until what is under way has ended: releases that
    /// were handed over, requests whose callers have gone, listeners that were called. At most twice
    /// the deadline.
    ///
    /// Call it after `HttpServer::run`. Sessions outlive the process, so their locks stay. What was
    /// not announced is left to the other servers, or to the next start.
    pub async fn shutdown(&self) {
        self.begin_shutdown();
        self.inner.stop.0.cancel();
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

impl fmt::Debug for LockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockManager")
            .field("settings", &self.inner.settings)
            .finish_non_exhaustive()
    }
}
