//! Locks outside requests: for jobs, workers, and whatever runs at night.

use std::{collections::BTreeSet, future::Future, time::Duration};

use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::LockError,
    key::LockKey,
    lock::{Aid, Holder, Mode},
    manager::{
        LockManager,
        claim::{Acquired, Wait, Wanted},
        guard::{LockGuard, LockGuards},
    },
};

/// One who takes locks outside a web session: a job, a worker, a command. Made by
/// [`LockManager::job`].
///
/// What one job holds and what it waits for belong together: two jobs that would wait for each other
/// are found, and the one that comes second is refused with [`LockError::WouldDeadlock`]. So a job that
/// needs several locks, one after the other, takes them by the same `Job`. Clones are the same job.
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
    manager: LockManager,
    /// Who it is, to find deadlocks. Each of its locks is held by a session of its own.
    aid: Aid,
    holder: Holder,
    ttl: Duration,
}

impl Job {
    /// How long a lock of this job outlives the process. Default and longest: the
    /// [ttl](crate::LockManagerBuilder::ttl) of the manager. At least 1 s.
    ///
    /// Guards are renewed every third of it, so shorter only means that others wait less after a
    /// crash, and a stall of the process is noticed as a loss sooner.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        let longest = self.manager.ttl();
        self.ttl = ttl.clamp(Duration::from_secs(1).min(longest), longest);
        self
    }

    /// Takes the exclusive lock on `key`, waiting as long as `wait` says.
    ///
    /// See [`LockManager::acquire`] for errors and cancel safety.
    ///
    /// # Errors
    /// As `LockManager::acquire`.
    pub async fn acquire(&self, key: &LockKey, wait: Wait) -> Result<LockGuard, LockError> {
        self.acquire_in(key, Mode::Exclusive, wait).await
    }

    /// Takes a shared lock: others may, too, but nobody gets an exclusive one.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_shared(&self, key: &LockKey, wait: Wait) -> Result<LockGuard, LockError> {
        self.acquire_in(key, Mode::Shared, wait).await
    }

    /// Takes the exclusive locks on all of these, or none. Doubles count once.
    ///
    /// They are taken one after the other in the order of their keys, so two calls cannot wait for
    /// each other, on whichever servers. `wait` is for all of them together. What was taken is given
    /// back in reverse order if one is refused.
    ///
    /// That order is all there is to it: who holds a lock already and asks for more, by another call, or
    /// mixes this with locks of web sessions, has to see to an order of its own. Within one process
    /// such a circle is found and refused; between processes it lasts until one of the waits is over.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// If the future is dropped, what was taken is given back.
    pub async fn acquire_all(
        &self,
        keys: impl IntoIterator<Item = LockKey>,
        wait: Wait,
    ) -> Result<LockGuards, LockError> {
        let began = clock::now();
        let keys: BTreeSet<LockKey> = keys.into_iter().collect();
        let mut guards = LockGuards::default();
        for key in keys {
            guards.push(self.acquire(&key, wait.since(began)).await?);
        }
        Ok(guards)
    }

    /// Does `work` while holding the exclusive lock on `key`, and drops it half-way if the lock is
    /// lost.
    ///
    /// # Errors
    /// [`LockError::Lost`] if it was dropped half-way. Else as [`acquire`](Self::acquire). That the lock
    /// could not be released at once is none: that goes on in the background.
    ///
    /// # Cancel safety
    /// If the future is dropped, `work` is, and the lock is released.
    pub async fn with_lock<T>(
        &self,
        key: &LockKey,
        wait: Wait,
        work: impl Future<Output = T>,
    ) -> Result<T, LockError> {
        let guard = self.acquire(key, wait).await?;
        tokio::select! {
            biased;
            () = guard.lost() => Err(LockError::Lost { key: key.clone(), holder: None }),
            done = work => {
                if let Err(e) = guard.release().await {
                    log::warn!(
                        target: "actix_doclock::manager",
                        "the work under the lock on {key:?} is done, the lock not yet released: {e}",
                    );
                }
                Ok(done)
            }
        }
    }

    async fn acquire_in(
        &self,
        key: &LockKey,
        mode: Mode,
        wait: Wait,
    ) -> Result<LockGuard, LockError> {
        let (aid, holder) = (Aid::new(), self.holder.clone());
        let wanted =
            Wanted { key: key.clone(), aid, holder, tab: None, page: None, mode, ttl: self.ttl };
        let (manager, scope) = (self.manager.clone(), TaskTracker::new());
        let lock = match manager.acquire_waiting(&wanted, &self.aid, wait, &scope).await? {
            Acquired::Held(lock) => return Err(LockError::Held(Box::new(lock))),
            Acquired::AlreadyMine(lock) => lock,
            Acquired::Fresh(fresh) => fresh.confirm(),
        };
        LockGuard::new(manager, lock, wanted, self.aid.clone())
    }
}

/// Locks outside requests.
impl LockManager {
    /// Somebody who takes locks under this name, which others see as the holder.
    #[must_use]
    pub fn job(&self, label: impl Into<String>) -> Job {
        Job { manager: self.clone(), aid: Aid::new(), holder: Holder::new(label), ttl: self.ttl() }
    }

    /// Takes the exclusive lock on `key`, waiting as long as `wait` says, for a [`Job`] of its own.
    ///
    /// Who waits does not ask again and again: a release in this process wakes the first one at once;
    /// on a replica set or a sharded cluster one change stream for each collection tells of those in
    /// other processes; and when the holder's lock runs out, the first one is there. Only where there
    /// is no change stream (a standalone server, or while it is lost), the first one asks every half a
    /// second; [`health`](Self::health) says so. First come, first served within this process; see
    /// [`Lockable::FAIR`](crate::Lockable::FAIR) for all processes.
    ///
    /// # Errors
    /// [`LockError::Held`] by somebody else, and the wait is over. [`LockError::WouldDeadlock`]: it
    /// would never be over. [`LockError::ShutDown`] while waiting. [`LockError::Store`]: an outage is
    /// waited for as well, and is the error if it outlasts the wait.
    /// [`LockError::Misconfigured`] if the collection is not registered.
    ///
    /// # Cancel safety
    /// If the future is dropped, its place in the queue is given up, and a grant given back.
    pub async fn acquire(&self, key: &LockKey, wait: Wait) -> Result<LockGuard, LockError> {
        self.anonymous_job().acquire(key, wait).await
    }

    /// Takes a shared lock for a [`Job`] of its own. See [`Job::acquire_shared`].
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_shared(&self, key: &LockKey, wait: Wait) -> Result<LockGuard, LockError> {
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
    ) -> Result<LockGuards, LockError> {
        self.anonymous_job().acquire_all(keys, wait).await
    }

    /// Does `work` while holding the exclusive lock on `key`. See [`Job::with_lock`].
    ///
    /// # Errors
    /// As [`Job::with_lock`].
    pub async fn with_lock<T>(
        &self,
        key: &LockKey,
        wait: Wait,
        work: impl Future<Output = T>,
    ) -> Result<T, LockError> {
        self.anonymous_job().with_lock(key, wait, work).await
    }

    fn anonymous_job(&self) -> Job {
        self.job(self.holder().label.clone())
    }
}
