//! The manager: decides who gets a lock, for how long, and what happens if the store does not answer.

use std::{fmt, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    actor::Person,
    manager::{
        background::{reaper_health::Sweeps, supervisor::Panics},
        causes::Causes,
        collections::Collections,
        counts::InAMinute,
        describe::Descriptions,
        fleet::Servers,
        freezes::Freezes,
        granting::Granting,
        log_limit::LogLimit,
        person_queues::PersonQueues,
        reads::Reads,
        saves::Saves,
        sessions::Sessions,
        settings::Settings,
        verbs::Verbs,
        watch::{changes::Watches, ends::Served, events::Events, streams::Streams},
        watched::Beliefs,
    },
};

mod activity;
mod asking;
mod background;
pub(crate) mod batches;
mod builder;
mod causes;
mod claim;
mod collections;
mod counts;
mod describe;
mod dyn_store;
mod facade;
mod fleet;
mod freezes;
mod granting;
mod guard;
mod health;
mod limits;
pub(crate) mod log_limit;
mod observe;
mod parts;
pub(crate) mod pauses;
pub(crate) mod person_queues;
mod reads;
mod recent;
mod refusals;
mod release;
mod saves;
mod sessions;
mod settings;
mod store_time;
mod takeover;
mod verbs;
mod wait;
pub(crate) mod watch;
mod watched;

pub use background::{
    reaper_health::{ReaperHealth, ReaperState},
    supervisor::TaskPanics,
};
pub use builder::LockManagerBuilder;
pub use claim::Wait;
#[cfg(feature = "web")]
pub(crate) use claim::Wanted;
#[cfg(feature = "web")]
pub(crate) use claim::{Acquired, Provisional};
pub use collections::MAX_COLLECTIONS;
#[cfg(feature = "web")]
pub(crate) use granting::Availability;
pub use guard::{LockGuard, LockGuards, job::Job};
pub use health::{Health, HealthReport, HealthStatus, StoreHealth};
pub use limits::Limits;
pub use observe::names as metrics;
#[cfg(feature = "web")]
pub(crate) use reads::LISTED;
#[cfg(feature = "web")]
pub(crate) use reads::decode;
pub use settings::BuildError;
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
///     TryAcquire::Lost(_) => unreachable!("only an upgrade can be lost"),
/// }
/// locks.shutdown().await;
/// # Ok(()) }
/// ```
///
/// # Deadlines and cancel safety
/// Every operation answers within the [deadline](LockManagerBuilder::deadline) of the builder. The
/// operation runs in a task of its own on the runtime on which the manager was built. The task goes on if the future
/// is dropped or the deadline passes. If the task is then granted a lock that nobody waits for any more, it gives the
/// lock back. So all methods may be dropped at any point.
///
/// # Errors
/// All operations can fail with [`LockError::Store`](crate::LockError::Store): the store was not reached in time, or
/// it refused the operation. The [kind](crate::StoreError::kind) of the error tells whether the outcome is unknown. In
/// that case the manager has tried until the deadline, and a lock that may be left behind expires within the ttl. An
/// operation on a collection that was never [registered](Self::register) fails with
/// [`LockError::Misconfigured`](crate::LockError::Misconfigured).
#[derive(Clone)]
pub struct LockManager {
    pub(crate) core: Arc<Core>,
}

/// The parts of a manager, each with its dependencies as fields.
pub(crate) struct Core {
    pub(crate) verbs: Arc<Verbs>,
    pub(crate) collections: Arc<Collections>,
    pub(crate) freezes: Arc<Freezes>,
    beliefs: Arc<Beliefs>,
    pub(crate) reads: Arc<Reads>,
    pub(crate) granting: Arc<Granting>,
    pub(crate) saves: Saves,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) settings: Settings,
    watches: Watches,
    /// Only for health: cancelled when a stop has begun, and when `stop` is cancelled.
    pub(crate) stop_begins: CancellationToken,
    pub(crate) servers: Arc<Servers>,
    pub(crate) events: Arc<Events>,
    pub(crate) causes: Arc<Causes>,
    /// `None` if the application does not describe its documents.
    descriptions: Option<Arc<Descriptions>>,
    pub(crate) event_streams: Streams,
    /// For the requests that name many documents.
    pub(crate) long_requests: PersonQueues<Person>,
    asks: InAMinute<Person>,
    served: Arc<Served>,
    pub(crate) log_limit: Arc<LogLimit>,
    /// Ends the background tasks, also when the last handle is dropped.
    stop: Stop,
    /// The results of the reaper's sweeps.
    sweeps: Sweeps,
    panics: Panics,
}

/// Cancels its token when it is dropped.
#[derive(Debug, Default)]
struct Stop(CancellationToken);

impl Stop {
    fn token(&self) -> CancellationToken {
        self.0.clone()
    }

    fn cancel(&self) {
        self.0.cancel();
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl LockManager {
    /// Starts a manager over this store. See [`LockManagerBuilder`] for the settings.
    pub fn builder(store: impl crate::store::Store) -> LockManagerBuilder {
        LockManagerBuilder::new(Arc::new(store))
    }

    /// How long a lock outlives the last activity of its session.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.core.settings.ttl
    }

    /// How long an operation may take at most.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.core.settings.deadline
    }

    /// Stops the reaper, the listener and the renewal of guards, refuses all waiters, and waits until the
    /// operations under way have ended: releases in the background, requests whose callers have gone, and
    /// listener calls. Waits at most twice the deadline.
    ///
    /// Call it after `HttpServer::run`. Sessions outlive the process, so their locks stay. Ends of
    /// sessions that were not announced are left to the other servers, or to the next start.
    pub async fn shutdown(&self) {
        self.begin_shutdown();
        self.core.stop.cancel();
        let drained = self.core.verbs.runner.drain(self.deadline() * 2);
        tokio::join!(self.core.servers.forget(), drained);
    }
}

impl LockManager {
    /// A request has failed for this reason.
    #[cfg(feature = "web")]
    pub(crate) fn request_failed(&self, why: &'static str, line: String) {
        self.core.log_limit.request_failed(
            why,
            line,
            &self.core.verbs.runner,
            self.core.stop.token(),
        );
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl fmt::Debug for LockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockManager").field("settings", &self.core.settings).finish_non_exhaustive()
    }
}
