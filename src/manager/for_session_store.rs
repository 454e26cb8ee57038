//! What a session store needs of a manager.

use std::time::Duration;

use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{LockManager, run};
use crate::StoreError;

impl LockManager {
    /// Runs an operation to its end in a task of its own, again and again while its outcome is unknown
    /// and there is time, as the verbs of the store are.
    pub(crate) async fn in_own_task<T, F>(
        &self,
        what: &'static str,
        attempt: impl FnMut() -> F + Send + 'static,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let until = self.until();
        let operation = run::retry(until, run::FOREGROUND, attempt);
        let outcome = self.inner.runner.spawn(&TaskTracker::new(), operation);
        run::answer(what, until, outcome).await
    }

    pub(crate) fn reaper_interval(&self) -> Option<Duration> {
        self.inner.settings.reaper_interval
    }

    /// Whether any type is registered.
    pub(crate) fn has_types(&self) -> bool {
        !self.registered_names().is_empty()
    }

    /// Cancelled when the manager is shut down, or gone.
    pub(crate) fn stop(&self) -> CancellationToken {
        self.inner.stop.token()
    }
}
