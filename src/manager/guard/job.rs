//! Locks outside requests: for jobs, workers and scheduled tasks.

use std::{collections::BTreeSet, future::Future, sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::{LockError, Result},
    key::LockKey,
    lock::{Aid, Holder, Mode},
    manager::{
        Core, LockManager,
        claim::{Acquired, Wait, Wanted},
        guard::{LockGuard, LockGuards},
    },
};

/// How many locks are taken at the same time.
const AT_ONCE: usize = 64;

/// Takes locks outside a web session: a job, a worker, a command. Made by [`LockManager::job`].
///
/// All locks that a job holds or waits for count as its own. If two jobs would wait for each other, the
/// second one is refused with [`LockError::WouldDeadlock`]. So a job that needs several locks, one after
/// the other, takes them by the same `Job`. Clones are the same job.
///
/// ```
/// use std::time::Duration;
/// use actix_doclock::{LockKey, LockManager, MemoryStore, Named, Wait};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let locks = LockManager::builder(MemoryStore::new()).build().await?;
/// locks.register::<Named>().await?;
///
/// let job = locks.job("nightly report").ttl(Duration::from_secs(30));
/// let key = LockKey::named("nightly-report")?;
/// match job.acquire(&key, Wait::no()).await {
///     Ok(guard) => {
///         // … write the report; give up if `guard.lost()` …
///         guard.release().await?;
///     }
///     Err(actix_doclock::LockError::Held(_)) => println!("another server writes it"),
///     Err(e) => return Err(e.into()),
/// }
/// # locks.shutdown().await;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Job {
    core: Arc<Core>,
    /// The identity of the job in a deadlock search. Each of its locks is held by a session of its own.
    aid: Aid,
    holder: Holder,
    ttl: Duration,
    hears_asks: bool,
}

impl Job {
    /// How long a lock of this job outlives the process. Default and longest: the
    /// [ttl](crate::LockManagerBuilder::ttl) of the manager. At least 1 s.
    ///
    /// Guards are renewed every third of the ttl. A shorter ttl means that others wait less after a
    /// crash, and that a stall of the process is noticed as a loss sooner.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        let longest = self.core.settings.ttl;
        self.ttl = ttl.clamp(Duration::from_secs(1).min(longest), longest);
        self
    }

    /// Lets people ask for the exclusive locks that this job takes from now on, because its guards wait for
    /// [`asked`](LockGuard::asked). Default: nobody is offered to ask, and an ask is refused (409 `nobody_hears`).
    #[must_use]
    pub fn hears_asks(mut self) -> Self {
        self.hears_asks = true;
        self
    }

    /// Takes the exclusive lock on `key`, waiting as long as `wait` says.
    ///
    /// See [`LockManager::acquire`] for errors and cancel safety.
    ///
    /// # Errors
    /// As `LockManager::acquire`.
    pub async fn acquire(&self, key: &LockKey, wait: Wait) -> Result<LockGuard> {
        self.acquire_in(key, Mode::Exclusive, wait).await
    }

    /// Takes a shared lock: others may take a shared lock as well, but no exclusive one.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_shared(&self, key: &LockKey, wait: Wait) -> Result<LockGuard> {
        self.acquire_in(key, Mode::Shared, wait).await
    }

    /// Takes the exclusive locks on all of these documents, or none. Duplicate keys count once.
    ///
    /// The locks are taken one after the other in the order of their keys, so two calls cannot wait for
    /// each other, on any servers. `wait` is for all of them together. If one lock is refused, the locks
    /// already taken are given back in reverse order.
    ///
    /// This method guarantees nothing more than that order. A caller that already holds a lock and takes
    /// more by another call, or that combines this with locks of web sessions, needs its own order.
    /// Within one process such a circle is found and refused; between processes it lasts until one of the
    /// waits is over.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// If the future is dropped, the locks already taken are given back.
    pub async fn acquire_all(
        &self,
        keys: impl IntoIterator<Item = LockKey>,
        wait: Wait,
    ) -> Result<LockGuards> {
        let began = clock::now();
        let keys: BTreeSet<LockKey> = keys.into_iter().collect();
        let mut guards = LockGuards::default();
        for key in keys {
            guards.push(self.acquire(&key, wait.since(began)).await?);
        }
        Ok(guards)
    }

    /// Takes the exclusive locks on the free ones of these documents, without waiting, for a bulk edit. The other
    /// documents are returned with their refusals, which name the holders. Duplicate keys count once.
    ///
    /// # Cancel safety
    /// If the future is dropped, the locks already taken are given back.
    pub async fn acquire_each(
        &self,
        keys: impl IntoIterator<Item = LockKey>,
    ) -> (LockGuards, Vec<(LockKey, LockError)>) {
        let keys: BTreeSet<LockKey> = keys.into_iter().collect();
        let take = async |key: LockKey| (self.acquire(&key, Wait::no()).await, key);
        // At the same time, so that the claims travel together.
        let attempts: Vec<_> = stream::iter(keys).map(take).buffered(AT_ONCE).collect().await;
        let (mut guards, mut refused) = (LockGuards::default(), Vec::new());
        for (attempt, key) in attempts {
            match attempt {
                Ok(guard) => guards.push(guard),
                Err(e) => refused.push((key, e)),
            }
        }
        (guards, refused)
    }

    /// Runs `work` while holding the exclusive lock on `key`, and drops `work` half-way if the lock is
    /// lost.
    ///
    /// # Errors
    /// [`LockError::Lost`] if `work` was dropped half-way. Otherwise as [`acquire`](Self::acquire). A
    /// failed release is no error: the release goes on in the background.
    ///
    /// # Cancel safety
    /// If the future is dropped, `work` is dropped too, and the lock is released.
    pub async fn with_lock<T>(
        &self,
        key: &LockKey,
        wait: Wait,
        work: impl Future<Output = T>,
    ) -> Result<T> {
        let guard = self.acquire(key, wait).await?;
        tokio::select! {
            biased;
            () = guard.lost() => Err(LockError::lost(key.clone())),
            done = work => {
                if let Err(e) = guard.release().await {
                    log::warn!(
                        target: "actix_doclock::manager",
                        "the work under the lock on {key:?} is done, but the lock is not released yet: {e}",
                    );
                }
                Ok(done)
            }
        }
    }

    async fn acquire_in(&self, key: &LockKey, mode: Mode, wait: Wait) -> Result<LockGuard> {
        let (key, aid, holder) = (key.clone(), Aid::of_job(self.hears_asks), self.holder.clone());
        let ttl = self.ttl;
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
        let (core, scope) = (Arc::clone(&self.core), TaskTracker::new());
        let lock = match core.acquire_or_wait(&wanted, &self.aid, wait, &scope).await? {
            Acquired::Held(lock) => return Err(LockError::Held(Box::new(lock))),
            Acquired::Lost(key) => return Err(LockError::lost(key)),
            Acquired::AlreadyMine(lock) => lock,
            Acquired::Granted(fresh) => fresh.confirm(),
        };
        LockGuard::new(core, lock, wanted, self.aid.clone())
    }
}

/// Locks outside requests.
impl LockManager {
    /// A job that takes locks under this name, which others see as the holder.
    #[must_use]
    pub fn job(&self, label: impl Into<String>) -> Job {
        Job {
            core: Arc::clone(&self.core),
            aid: Aid::of_job(false),
            holder: Holder::new(label),
            ttl: self.ttl(),
            hears_asks: false,
        }
    }

    /// Takes the exclusive lock on `key`, waiting as long as `wait` says, for a [`Job`] of its own.
    ///
    /// Waiters do not poll. A release in this process wakes the first waiter at once. On a replica set or
    /// a sharded cluster, one change stream for each collection reports the releases of other processes.
    /// When the holder's lock expires, the first waiter asks the store. Without a change stream (on a standalone
    /// server, or while the stream is lost), the first waiter asks every half a second;
    /// [`health`](Self::health) says so. Within this process the order is first come, first served; see
    /// [`Lockable::FAIR`](crate::Lockable::FAIR) for all processes.
    ///
    /// # Errors
    /// [`LockError::Held`]: another holder has the lock, and the wait is over.
    /// [`LockError::WouldDeadlock`]: the wait would never be over. [`LockError::ShutDown`] while waiting.
    /// [`LockError::Store`]: the wait outlasts a shorter outage of the store, and fails with this error
    /// in a longer one. [`LockError::Misconfigured`] if the collection is not registered.
    ///
    /// # Cancel safety
    /// If the future is dropped, it leaves the queue, and a grant is given back.
    pub async fn acquire(&self, key: &LockKey, wait: Wait) -> Result<LockGuard> {
        self.anonymous_job().acquire(key, wait).await
    }

    /// Takes a shared lock for a [`Job`] of its own. See [`Job::acquire_shared`].
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_shared(&self, key: &LockKey, wait: Wait) -> Result<LockGuard> {
        self.anonymous_job().acquire_shared(key, wait).await
    }

    /// Takes several exclusive locks, all or none, for a [`Job`] of its own. See [`Job::acquire_all`].
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_all(
        &self,
        keys: impl IntoIterator<Item = LockKey>,
        wait: Wait,
    ) -> Result<LockGuards> {
        self.anonymous_job().acquire_all(keys, wait).await
    }

    /// Runs `work` while holding the exclusive lock on `key`. See [`Job::with_lock`].
    ///
    /// # Errors
    /// As [`Job::with_lock`].
    pub async fn with_lock<T>(
        &self,
        key: &LockKey,
        wait: Wait,
        work: impl Future<Output = T>,
    ) -> Result<T> {
        self.anonymous_job().with_lock(key, wait, work).await
    }

    fn anonymous_job(&self) -> Job {
        self.job(self.core.settings.holder.label.clone())
    }
}
