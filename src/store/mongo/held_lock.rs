//! Locks for guarded writes of the application's own.

use std::{fmt, sync::Arc, time::Duration};

use tokio::{runtime::Handle, task::JoinHandle};
use tokio_util::task::TaskTracker;

use crate::{
    store::Acquisition,
    version::{SharedVersion, Version},
};

/// A lock that a session or job holds, for guarded writes of the application's own: from
/// [`HeldDoc::held`](crate::web::Guarded::held) or [`LockGuard::held`](crate::LockGuard::held).
#[derive(Debug, Clone)]
pub struct HeldLock {
    pub(crate) acquisition: Acquisition,
    /// [`Lockable::COLLECTION`](crate::Lockable::COLLECTION) of the type of the document.
    pub(crate) declared: Option<&'static str>,
    /// How long a guarded write may take.
    pub(crate) deadline: Duration,
    /// A worker of a web server drops its tasks when it ends, so a commit runs on the manager's runtime.
    pub(crate) runtime: Handle,
    /// The shutdown waits for these tasks.
    pub(crate) tasks: TaskTracker,
    pub(crate) forget: Forget,
    /// The version that a guarded update has stored.
    pub(crate) version: SharedVersion,
    /// The only version onto which a guarded write may be written, if there is such a condition.
    pub(crate) onto: SharedVersion,
}

/// Makes the manager forget the state of the lock, because a guarded write may be under way.
#[derive(Clone)]
pub(crate) struct Forget(pub(crate) Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for Forget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Forget")
    }
}

impl HeldLock {
    /// The version of the document after the last [update](crate::MongoStore::update) under this lock. `None` if there was
    /// none.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        *self.version.lock()
    }

    pub(crate) fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.tasks.spawn_on(task, &self.runtime)
    }
}
