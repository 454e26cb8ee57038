//! The life of a session, as far as the manager knows it: its activity, and its end.

use std::time::{Duration, Instant};

use tokio::sync::oneshot::Receiver;
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    ended::EndReason,
    error::LockError,
    key::LockKey,
    lock::Aid,
    manager::{LockManager, observe},
    random,
};

impl LockManager {
    /// Renews the lease of every live lock of the session, and counts these locks.
    ///
    /// One command for each registered collection, all at the same time. An expired lock is not revived:
    /// a lower count than expected means that some locks are lost.
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
            // Tells the watchers which of the locks are gone.
            self.list_by(Some(aid), until).await?;
        }
        Ok(renewed)
    }

    /// Ends the session, as its logout does: all its locks are released, and for a minute the extractors
    /// and the lock API refuse it new locks, or for a day if it is the login of a client without a session.
    /// Returns the documents that it had locked. The listener is
    /// called in the background.
    ///
    /// # Errors
    /// See [`LockManager`]. After an error the locks remain until a repeated call, until the next
    /// [sweep](Self::sweep) of any server if the end was recorded, or until they expire.
    ///
    /// # Cancel safety
    /// If the future is dropped, the session is still ended.
    pub async fn end_session(&self, aid: &Aid) -> Result<Vec<LockKey>, LockError> {
        self.end(aid, EndReason::LoggedOut).await
    }

    /// Ends another session: as [`end_session`](Self::end_session), with the reason
    /// [`Revoked`](EndReason::Revoked).
    ///
    /// This takes away the locks, not the session: if the session store still accepts the session, it
    /// goes on, and may lock again after a minute.
    ///
    /// # Errors
    /// As `end_session`. It is also as cancel safe.
    pub async fn revoke_session(&self, aid: &Aid) -> Result<Vec<LockKey>, LockError> {
        self.end(aid, EndReason::Revoked).await
    }

    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.end_session", skip_all,
        fields(outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn end(
        &self,
        aid: &Aid,
        reason: EndReason,
    ) -> Result<Vec<LockKey>, LockError> {
        // Each operation has a name of its own: two operations of one server are as independent as those
        // of two servers.
        let args = (aid.clone(), reason, self.registered_names(), random::uuid());
        let asked = clock::now();
        let ended =
            self.run("end_session", self.until(), args, |store, (aid, reason, names, worker)| {
                store.end_session(aid, *reason, names, *worker)
            });
        let ended = ended.await?;
        observe::session_ended(reason);
        self.inner.gone_all_of(aid, &ended, asked);
        self.inner.announce.notify();
        Ok(ended)
    }

    /// Ends a session without making the caller wait.
    pub(crate) fn end_session_in_background(&self, aid: Aid) {
        let manager = self.clone();
        self.inner.runner.spawn(&TaskTracker::new(), async move {
            if let Err(e) = manager.end_session(&aid).await {
                log::error!(
                    target: "actix_doclock::manager",
                    "the locks of the ended session {aid:?} were not released, and remain until they \
                     expire: {e}",
                );
            }
        });
    }

    /// Releases all locks of the session, which goes on and may take new locks. Returns the documents
    /// that it had locked.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn release_all(&self, aid: &Aid) -> Result<Vec<LockKey>, LockError> {
        let until = self.until();
        let asked = clock::now();
        let released = self.in_each_collection(|collection| {
            let args = (collection, aid.clone());
            self.run("release_all", until, args, |store, (collection, aid)| {
                store.release_all(collection, aid)
            })
        });
        let released: Vec<_> = released.await?.into_iter().flatten().collect();
        self.inner.gone_all_of(aid, &released, asked);
        Ok(released)
    }

    /// How long ago the session ended, if it has ended.
    pub(crate) async fn session_ended(
        &self,
        aid: &Aid,
        until: Instant,
    ) -> Result<Option<Duration>, LockError> {
        let end =
            self.run("last_end", until, aid.clone(), |store, aid| store.last_end(aid)).await?;
        Ok(end.filter(|end| end.for_good).map(|end| end.ago))
    }

    /// Renews all locks of an active session, at most once in a third of the ttl, and without making the
    /// caller wait. Returns the task if this call started one.
    pub(crate) fn touch(&self, aid: &Aid) -> Option<Receiver<()>> {
        if !self.inner.activity.is_due(aid, self.ttl() / 3) {
            return None;
        }
        let (manager, aid) = (self.clone(), aid.clone());
        Some(self.inner.runner.spawn(&TaskTracker::new(), async move {
            match manager.renew(&aid).await {
                Ok(locks) => manager.inner.activity.counted(&aid, locks.try_into().unwrap_or(0)),
                Err(e) => {
                    manager.inner.activity.forget(&aid);
                    log::warn!(
                        target: "actix_doclock::manager",
                        "the locks of {aid:?} were not renewed, the next request tries again: {e}",
                    );
                }
            }
        }))
    }

    /// A new session holds no locks, so none are due for renewal.
    pub(crate) fn session_begins(&self, aid: &Aid) {
        self.inner.activity.is_due(aid, self.ttl() / 3);
    }
}
