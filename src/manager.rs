//! The manager: decides who gets a lock, for how long, and what happens if the store does not answer.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::{
    clock,
    error::LockError,
    key::{InvalidKey, LockId, LockKey, Lockable},
    lock::{Aid, Holder, Lock},
    store::{Acquisition, DynStore, Rules},
};

mod acquire;
mod activity;
#[cfg(feature = "_mongo")]
mod attach;
mod background;
mod builder;
mod claim;
#[cfg(feature = "web")]
mod confirm;
mod counts;
mod describe;
mod document;
mod freeze;
mod guard;
mod health;
mod observe;
mod query;
mod release;
pub(crate) mod rhythm;
mod seldom;
mod session;
mod takeover;
mod task;
mod wait;
pub(crate) mod watch;

pub use background::{
    supervisor::TaskPanics,
    sweeps::{ReaperHealth, ReaperState},
};
pub use builder::{BuildError, LockManagerBuilder};
pub use claim::Wait;
#[cfg(feature = "web")]
pub(crate) use claim::{Acquired, Provisional, Wanted};
#[cfg(feature = "web")]
pub(crate) use document::decode;
pub use guard::{LockGuard, LockGuards, job::Job};
pub use health::{Health, HealthReport, HealthStatus, StoreHealth};
#[cfg(feature = "metrics")]
pub use observe::metrics;
#[cfg(feature = "web")]
pub(crate) use query::LISTED;
pub use takeover::MAX_REASON_BYTES;
#[cfg(feature = "web")]
pub(crate) use takeover::can_be_taken_over;
pub use watch::{changes::Wakeup, events::LockEvents};

/// Locks documents for web sessions, jobs and workers. The core of the crate, without HTTP.
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
/// // In a request, the extractors do this. A job calls the manager itself:
/// let (job, name) = (Aid::new(), Holder::new("nightly report"));
/// match locks.lock_for_session(&LockKey::of::<Invoice>(4711)?, &job, &name).await? {
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
/// Every operation answers within the [deadline](LockManagerBuilder::deadline) of the builder. The
/// operation runs in a task of its own on the runtime on which the manager was built. The task goes on if
/// the future is dropped or the deadline passes, and it gives a lock back that is granted when nobody
/// waits for it any more. So all methods may be dropped at any point.
///
/// # Errors
/// All operations can fail with [`LockError::Store`]: the store was not reached in time, or it refused
/// the operation. The [kind](crate::StoreError::kind) of the error tells whether the outcome is unknown.
/// In that case the manager has tried until the deadline, and a lock that may be left behind expires
/// within the ttl. An operation on a collection that was never [registered](Self::register) fails with
/// [`LockError::Misconfigured`].
#[derive(Clone)]
pub struct LockManager {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn DynStore>,
    collections: RwLock<BTreeMap<&'static str, Registered>>,
    settings: builder::Settings,
    runner: task::Runner,
    activity: activity::Activity,
    watched: guard::lost::Watched,
    queues: wait::queue::Queues,
    /// For the waiters that ask the store.
    asking: Arc<Semaphore>,
    /// For the claims, and for what is given back because nobody knows whether it was granted.
    claims: Arc<Semaphore>,
    watches: watch::changes::Watches,
    kept: guard::keeper::Kept,
    renewals: background::renewals::Renewals,
    paces: background::pieces::Paces,
    /// Ends all waits. It is also cancelled when `stop` is.
    waits: CancellationToken,
    freezes: freeze::Freezes,
    events: watch::events::Events,
    /// `None` if the application does not describe its documents.
    descriptions: Option<Arc<describe::Descriptions>>,
    event_streams: watch::streams::Streams,
    served: watch::ends::Served,
    seldom: seldom::Seldom,
    /// Ends the background tasks, also when the last handle is dropped.
    stop: Stop,
    /// Makes the reaper wait until all types are registered.
    register: Arc<Notify>,
    /// Makes the reaper sweep soon: a grant may be a takeover from an idle session.
    granted: Arc<Notify>,
    /// Wakes the listeners.
    announce: background::listener::Announce,
    /// The results of the reaper's sweeps.
    sweeps: background::sweeps::Sweeps,
    panics: background::supervisor::Panics,
}

impl Inner {
    /// An answer to a question asked at that moment: this is the live lock on its document.
    fn saw(&self, lock: &Lock, asked: Instant) {
        self.watched.saw(lock, asked);
        self.activity.saw(&lock.aid, lock.expires_in(), self.settings.ttl / 3);
    }

    /// An answer to a question asked at that moment: the session holds these locks and no others.
    fn saw_all_of(&self, aid: &Aid, locks: &[Lock], asked: Instant) {
        self.watched.saw_all_of(aid, locks, asked);
        if let Some(left) = locks.iter().map(Lock::expires_in).min() {
            self.activity.saw(aid, left, self.settings.ttl / 3);
        }
    }

    /// This acquisition has ended, for whatever reason.
    fn gone(&self, lock: &Acquisition) {
        self.activity.gone(&lock.aid, &lock.key);
        self.watched.ended(lock);
        self.queues.ended(lock);
    }

    /// The session held these documents, and holds nothing now.
    fn gone_all_of(&self, aid: &Aid, keys: &[LockKey], asked: Instant) {
        self.watched.saw_all_of(aid, &[], asked);
        for key in keys {
            self.activity.gone(aid, key);
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
    over_http: bool,
}

impl LockManager {
    /// Starts a manager over this store. See [`LockManagerBuilder`] for the settings.
    pub fn builder(store: impl crate::store::Store) -> LockManagerBuilder {
        LockManagerBuilder::new(Arc::new(store))
    }

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
        LockKey::new(T::COLLECTION, 0)?;
        // Building an index may take longer than the deadline of a request.
        let until = clock::now() + self.deadline().max(Duration::from_secs(60));
        let text_ids = LockId::may_be_text::<T::Id>();
        let rules = Rules { ttl: self.ttl(), fenced: T::FENCED, fair: T::FAIR, text_ids };
        self.run("register", until, (T::COLLECTION, rules), |store, (collection, rules)| {
            store.prepare(collection, rules)
        })
        .await?;
        // Before this server grants the first lock in the collection.
        self.ask_for_freezes(until).await?;
        let parse_id = |text: &str| text.parse::<T::Id>().ok().map(Into::into);
        let registered = Registered { parse_id, fair: T::FAIR, over_http: T::OVER_HTTP };
        let mut all = self.inner.collections.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(T::COLLECTION, registered);
        drop(all);
        self.inner.register.notify_one();
        self.follow_all();
        Ok(())
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

    fn registered_names(&self) -> Vec<&'static str> {
        let all = self.inner.collections.read().unwrap_or_else(PoisonError::into_inner);
        all.keys().copied().collect()
    }

    pub(crate) fn is_over_http(&self, collection: &str) -> bool {
        self.registered(collection).is_ok_and(|(_, registered)| registered.over_http)
    }

    pub(crate) fn is_registered(&self, collection: &str) -> bool {
        self.registered(collection).is_ok()
    }

    /// Names a document by the id in a URL. The collection must be registered.
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

    /// How long a lock outlives the last activity of its session.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.inner.settings.ttl
    }

    /// How long an operation may take at most.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.inner.settings.deadline
    }

    /// The deadline of an operation that begins now.
    pub(crate) fn until(&self) -> Instant {
        clock::now() + self.deadline()
    }

    pub(crate) fn holder(&self) -> &Holder {
        &self.inner.settings.holder
    }

    fn longest_hold(&self) -> Option<Duration> {
        self.inner.settings.max_hold
    }

    /// Stops the reaper, the listener and the renewal of guards, refuses all waiters, and waits until the
    /// operations under way have ended: releases in the background, requests whose callers have gone, and
    /// listener calls. Waits at most twice the deadline.
    ///
    /// Call it after `HttpServer::run`. Sessions outlive the process, so their locks stay. Ends of
    /// sessions that were not announced are left to the other servers, or to the next start.
    pub async fn shutdown(&self) {
        self.begin_shutdown();
        self.inner.stop.0.cancel();
        self.inner.runner.drain(self.deadline() * 2).await;
    }
}

/// For the session store.
#[cfg(all(feature = "mongo-session", feature = "_mongo"))]
impl LockManager {
    pub(crate) fn reaper_interval(&self) -> Option<Duration> {
        self.inner.settings.reaper_interval
    }

    /// Whether any type is registered.
    pub(crate) fn has_types(&self) -> bool {
        !self.registered_names().is_empty()
    }

    /// Cancelled when the manager is shut down or dropped.
    pub(crate) fn stop(&self) -> CancellationToken {
        self.inner.stop.token()
    }
}

impl fmt::Debug for LockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockManager")
            .field("settings", &self.inner.settings)
            .finish_non_exhaustive()
    }
}
