//! Takes a lock at once, or after a wait: joins granting, waiting and watching.

use std::time::{Duration, Instant};

use tokio_util::task::TaskTracker;

use crate::{
    error::LockError,
    key::LockKey,
    lock::{Aid, Lock},
    manager::{
        LockManager,
        claim::{Acquired, Wait, Wanted},
        observe,
        wait::{InTurn, Needs},
        watch::changes::{Wakeup, poll_pause},
    },
};

impl LockManager {
    /// Takes the lock, and waits for it as long as `wait` says. `owner` is the waiter that a search for circles
    /// sees: the session itself, or the job that the guard belongs to.
    ///
    /// # Cancel safety
    /// If the future is dropped, it leaves the queue and gives a fresh grant back.
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.wait", skip_all,
        fields(collection = wanted.key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn acquire_or_wait(
        &self,
        wanted: &Wanted,
        owner: &Aid,
        wait: Wait,
        scope: &TaskTracker,
    ) -> Result<Acquired, LockError> {
        if wait == Wait::no() {
            let acquired = self.inner.granting.acquire_by(wanted, scope, self.until()).await;
            observe::acquired_or_not(&acquired);
            return acquired;
        }
        let label = self.inner.collections.label(&wanted.key);
        let mut waiting = observe::Waiting::begins(label, wanted.mode);
        let acquired = self.inner.seen.queues.acquire(self, wanted, owner, wait, scope).await;
        waiting.ends(&acquired);
        acquired
    }
}

impl Needs for LockManager {
    async fn claim(
        &self,
        wanted: &Wanted,
        in_turn: Option<InTurn>,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired, LockError> {
        let (turn, order) = in_turn.map(|it| (it.turn, it.order)).unzip();
        let claim = wanted.claim(self.inner.settings.max_hold, turn);
        self.inner.granting.claim(&wanted.key, claim, order, scope, until).await
    }

    async fn look(
        &self,
        key: &LockKey,
        aid: &Aid,
        until: Instant,
    ) -> Result<Option<Lock>, LockError> {
        self.inner.reads.inspect(key, Some(aid), until).await
    }

    fn watch(&self, collection: &'static str) -> Option<Duration> {
        self.watch_over(collection);
        (self.inner.watches.state(collection) != Some(Wakeup::Told)).then(poll_pause)
    }
}
