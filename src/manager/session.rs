//! The life of a session, as far as the manager knows it: its activity, and its end.

use std::{
    slice,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::oneshot::{self, Receiver};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::{
    clock,
    ended::EndReason,
    error::LockError,
    key::LockKey,
    lock::{Aid, Lock},
    manager::{LockManager, observe, task},
    random::{self, HashMap},
    store::{Active, LastEnd, Named, Query},
};

impl LockManager {
    /// Renews the lease of every live lock of the session, in all its tabs, and counts these locks.
    ///
    /// One command for each registered collection, all at the same time. An expired lock is not revived:
    /// a lower count than expected means that some locks are lost.
    ///
    /// # Errors
    /// See [`LockManager`]. Also if an open transaction blocks one of the locks; the others are then renewed.
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.renew", skip_all,
        fields(outcome = tracing::field::Empty),
    ))]
    pub async fn renew(&self, aid: &Aid) -> Result<u64, LockError> {
        let (until, aids) = (self.until(), slice::from_ref(aid));
        let active = [Active::whole(aid)];
        let mut pieces = self.renew_in_pieces(self.registered_names(), &active, self.ttl(), until);
        let mut renewed = Ok(0);
        while let Some(piece) = pieces.recv().await {
            renewed = renewed.and_then(|documents| Ok(documents + piece.renewed?));
        }
        observe::renewed("session", &renewed);
        self.look_for_losses(aids, until).await?;
        renewed
    }

    /// Tells the watchers of these sessions which of the locks are gone.
    pub(super) async fn look_for_losses(
        &self,
        aids: &[Aid],
        until: Instant,
    ) -> Result<(), LockError> {
        let is_watched = |aid: &&Aid| self.inner.watched.watches(aid);
        let aids: Arc<[Aid]> = aids.iter().filter(is_watched).cloned().collect();
        if aids.is_empty() {
            return Ok(());
        }
        let asked = clock::now();
        let lists = self.in_each_collection(|collection| {
            let args = (collection, Arc::clone(&aids));
            self.run("list", until, args, |store, (collection, aids)| {
                store.locks(collection, Query::Of(aids), usize::MAX)
            })
        });
        let mut held = HashMap::<Aid, Vec<Lock>>::default();
        for lock in lists.await?.into_iter().flatten() {
            held.entry(lock.aid.clone()).or_default().push(lock);
        }
        for aid in &*aids {
            let locks = held.get(aid).map_or(&[][..], Vec::as_slice);
            self.inner.watched.saw_all_of(aid, locks, asked);
        }
        Ok(())
    }

    /// Ends the session, as its logout does: all its locks are released, and for a minute the extractors
    /// and the lock API refuse it new locks, or for a day if it is the login of a client without a session.
    /// Returns the documents that it had locked. The listener is called in the background.
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
        let worker = random::uuid();
        let (asked, until) = (clock::now(), self.until());
        let (answer, ended) = oneshot::channel();
        let (manager, aid_of) = (self.clone(), aid.clone());
        let end = async move {
            let end_in = async |names: &[&str]| {
                let store = &manager.inner.store;
                let end = || store.end_session(&aid_of, reason, names, worker);
                task::retry(until, task::FOREGROUND, end).await
            };
            let names = manager.registered_names();
            let mut ended = end_in(&names).await;
            // After the tombstone: whoever takes a lock in a collection that is new by then, meets the tombstone.
            let all = manager.all_collections(Duration::ZERO, until).await;
            if ended.is_ok() && all != names {
                ended = end_in(&all).await;
            }
            let is_ended = ended.is_ok();
            let _ = answer.send(ended);
            if is_ended {
                manager.allow_announcement(&aid_of, worker).await;
            }
        };
        // The end goes on without its caller, and the caller does not wait for all of it.
        drop(self.inner.runner.spawn(&TaskTracker::new(), end));
        let ended = task::answer("end_session", until, ended).await?;
        observe::session_ended(reason);
        self.inner.gone_all_of(aid, &ended, asked);
        self.inner.served.ended(aid);
        Ok(ended)
    }

    /// Leaves the end to the listeners.
    async fn allow_announcement(&self, aid: &Aid, worker: Uuid) {
        let store = &self.inner.store;
        let allowed =
            task::retry(self.until(), task::BACKGROUND, || store.allow_announcement(aid, worker));
        if let Err(e) = allowed.await {
            log::warn!(
                target: "actix_doclock::manager",
                "the end of a session is left to the reaper: {e}",
            );
        }
        self.inner.announce.notify();
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
        self.all_collections(Duration::ZERO, until).await;
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

    pub(super) async fn last_end(
        &self,
        aid: &Aid,
        until: Instant,
    ) -> Result<Option<LastEnd>, LockError> {
        let ends = self.run("last_ends", until, aid.clone(), |store, aid| {
            store.last_ends(slice::from_ref(aid))
        });
        Ok(ends.await?.pop().flatten())
    }

    /// How long ago the session ended, if it has ended.
    pub(crate) async fn session_ended(
        &self,
        aid: &Aid,
        until: Instant,
    ) -> Result<Option<Duration>, LockError> {
        let end = self.last_end(aid, until).await?;
        Ok(end.filter(|end| end.for_good).map(|end| end.ago))
    }

    /// Renews the locks of an active session, of its tabs only those that are named, at most once in a third of the
    /// ttl, and without making the caller wait. Returns the end of the renewal if one is due.
    pub(crate) fn touch(&self, aid: &Aid, named: &[Named]) -> Option<Receiver<()>> {
        let is_due = self.inner.activity.is_due(aid, named, self.ttl() / 3);
        is_due.then(|| self.renew_soon(aid.clone(), named.to_vec()))
    }

    /// A new session holds no locks, so none are due for renewal.
    pub(crate) fn session_begins(&self, aid: &Aid) {
        self.inner.activity.session_begins(aid, self.ttl() / 3);
    }
}
