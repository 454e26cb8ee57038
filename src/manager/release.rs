//! Giving locks back: to the next waiter, without a waiter, or when the user of a closed page does not
//! return in time.

use std::{
    slice,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::oneshot::Receiver;
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::{LockError, StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Lock, LockToken, Mode, PageId},
    manager::{
        LockManager,
        claim::{Acquired, ClaimPermit, Provisional},
        observe,
        rhythm::jittered,
        task,
        wait::queue::{Heir, line::InLine},
    },
    store::{Acquisition, Claim, HandedOver, Query, Released, Removal, TryAcquire},
};

impl LockManager {
    /// Gives a lock back. One command.
    ///
    /// Releases exactly the acquisition that `lock` stands for, never a newer one.
    ///
    /// # Errors
    /// See [`LockManager`]. It is no error if the lock is already gone.
    pub async fn release(&self, lock: &Lock) -> Result<Released, LockError> {
        match Acquisition::of(lock) {
            Some(held) => self.release_by(&held, self.until()).await,
            None => Ok(Released::AlreadyGone),
        }
    }

    /// Unless it was never sent, the claim may have been granted anyway, or may still be under way. No caller
    /// knows of it.
    pub(super) fn claim_failed(
        &self,
        error: &StoreError,
        key: &LockKey,
        claim: &Claim,
        scope: &TaskTracker,
        permit: &ClaimPermit,
    ) {
        if error.kind() == StoreErrorKind::Overloaded {
            return;
        }
        let attempts = attempts(key, claim, claim.token.attempts());
        self.give_back(attempts.clone(), scope, permit.clone());
        self.give_back_later(attempts, permit.clone());
    }

    /// One attempt of the claim was answered. Earlier attempts without an answer may still be under way,
    /// and could be granted the lock after it was released.
    pub(super) fn earlier_may_be_late(
        &self,
        key: &LockKey,
        claim: &Claim,
        answer: &TryAcquire,
        permit: &ClaimPermit,
    ) {
        let answered = match answer {
            TryAcquire::Granted(lock) => lock.token,
            TryAcquire::AlreadyMine(_) | TryAcquire::Held(_) => Some(claim.token),
        };
        let late = claim.token.attempts().filter(|token| Some(*token) != answered);
        let late = attempts(key, claim, late);
        if !late.is_empty() {
            self.give_back_later(late, permit.clone());
        }
    }

    /// Gives back a grant that its request does not want. Nobody waits for this, and it is tried until
    /// the lock would expire.
    pub(super) fn give_back(
        &self,
        attempts: Vec<Acquisition>,
        scope: &TaskTracker,
        permit: ClaimPermit,
    ) {
        let (manager, until) = (self.clone(), clock::now() + self.ttl());
        self.inner.runner.spawn(scope, async move {
            let retracted = task::retry(until, task::BACKGROUND, || {
                manager.inner.store.remove_lock(Removal::Retract(&attempts))
            });
            match retracted.await {
                // The lock was never granted, or was given back before, or it is still there for another
                // request that was told of it. The first waiter asks the store.
                Ok(Released::AlreadyGone) => {
                    attempts.iter().for_each(|it| manager.inner.queues.ended(it));
                }
                retracted => manager.released_in_background(retracted, &attempts),
            }
            drop(permit);
        });
    }

    /// Gives the lock back once more, for an acquire that was delayed on its way and arrived after the
    /// first attempt to give it back. Otherwise this orphaned lock would live as long as its session,
    /// which renews all its locks.
    fn give_back_later(&self, attempts: Vec<Acquisition>, permit: ClaimPermit) {
        let manager = Arc::downgrade(&self.inner);
        self.inner.runner.spawn_after(jittered(self.ttl() / 3), async move {
            if let Some(inner) = manager.upgrade() {
                Self { inner }.give_back(attempts, &TaskTracker::new(), permit);
            }
        });
    }

    /// Releases a lock without making the caller wait.
    pub(crate) fn release_in_background(&self, held: Acquisition) {
        if let Some(heir) = self.heir(&held) {
            let until = clock::now() + self.ttl();
            drop(self.hand_over(held, heir, until, task::BACKGROUND));
        } else {
            self.release_alone_in_background(held);
        }
    }

    fn release_alone_in_background(&self, held: Acquisition) {
        let (manager, until) = (self.clone(), clock::now() + self.ttl());
        self.inner.runner.spawn(&TaskTracker::new(), async move {
            let released = task::retry(until, task::BACKGROUND, || {
                manager.inner.store.remove_lock(Removal::Release(&held))
            });
            manager.released_in_background(released.await, slice::from_ref(&held));
        });
    }

    /// The next waiter. `None` also if there is no permit for its claim: it asks when the lock is released.
    fn heir(&self, held: &Acquisition) -> Option<(Heir, ClaimPermit)> {
        let permit = self.claim_permit().ok()?;
        Some((self.inner.queues.heir(held)?, permit))
    }

    /// Releases a lock by a handover to the next waiter. One command replaces two commands, each of which
    /// would wait for a majority.
    fn hand_over(
        &self,
        held: Acquisition,
        (mut heir, permit): (Heir, ClaimPermit),
        until: Instant,
        longest_pause: Duration,
    ) -> Receiver<Result<Released, StoreError>> {
        let (turn, line, order) = match heir.in_line.take() {
            Some(InLine { turn, line, order }) => (Some(turn), Some(line), Some(order)),
            None => (None, None, None),
        };
        let claim = heir.wanted.claim(self.inner.settings.max_hold, turn);
        let manager = self.clone();
        let hand_over = async move {
            let asked = clock::now();
            let handed =
                task::retry(until, longest_pause, || manager.inner.store.hand_over(&held, &claim));
            match handed.await {
                Ok(HandedOver::To(lock)) => {
                    observe::handed_over(&manager, &held.key);
                    manager.inner.watched.ended(&held);
                    manager.inner.watched.saw(&lock, asked);
                    manager.inner.queues.was_handed(&lock);
                    let fresh = Provisional::new(manager, lock, &claim, heir.scope.clone(), permit);
                    heir.give(Acquired::Fresh(fresh));
                    Ok(Released::Released)
                }
                Ok(HandedOver::Released) => {
                    manager.inner.gone(&held);
                    Ok(Released::Released)
                }
                Ok(HandedOver::AlreadyGone) => {
                    manager.inner.gone(&held);
                    Ok(Released::AlreadyGone)
                }
                Err(error) => {
                    if let Some(line) = line {
                        manager.set_place_in_background(&held.key, &line);
                    }
                    // The handover may have been carried out, or may still be under way: then the lock
                    // belongs to the claim.
                    manager.claim_failed(&error, &held.key, &claim, &heir.scope, &permit);
                    // Otherwise the lock is still recorded under its old holder, and may be renewed
                    // there.
                    manager.release_alone_in_background(held);
                    Err(error)
                }
            }
        };
        let hand_over = task::with_permit(order, self.deadline(), hand_over);
        self.inner.runner.spawn(&TaskTracker::new(), hand_over)
    }

    /// `these` are the attempts of one claim.
    fn released_in_background(
        &self,
        released: Result<Released, StoreError>,
        these: &[Acquisition],
    ) {
        let Some(Acquisition { key, .. }) = these.first() else { return };
        observe::released(self, key, &released);
        match released {
            Ok(_) => these.iter().for_each(|it| self.inner.gone(it)),
            Err(e) => log::warn!(
                target: "actix_doclock::manager",
                "a lock on {key:?} could not be given back; it has expired by now: {e}",
            ),
        }
    }

    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.release", skip_all,
        fields(collection = held.key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn release_by(
        &self,
        held: &Acquisition,
        until: Instant,
    ) -> Result<Released, LockError> {
        if let Some(heir) = self.heir(held) {
            let handed = self.hand_over(held.clone(), heir, until, task::FOREGROUND);
            return Ok(task::answer("release", until, handed).await?);
        }
        let (manager, own) = (self.clone(), held.clone());
        let release = async move {
            let released = task::retry(until, task::FOREGROUND, || {
                manager.inner.store.remove_lock(Removal::Release(&own))
            });
            let released = released.await;
            // Its session would renew the lock, although its user believes that it is released.
            if released.as_ref().is_err_and(|e| e.kind() == StoreErrorKind::Overloaded) {
                manager.release_alone_in_background(own);
            }
            released
        };
        let release = self.inner.runner.spawn(&TaskTracker::new(), release);
        let released = task::answer("release", until, release).await.map_err(LockError::from);
        observe::released(self, &held.key, &released);
        let released = released?;
        self.inner.gone(held);
        Ok(released)
    }

    /// Makes an exclusive lock expire after `grace`. A shared lock is released at once: a reader that
    /// returns takes it again, and excludes no other reader.
    pub(crate) async fn release_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
        until: Instant,
    ) -> Result<(), LockError> {
        let args = (held.clone(), page, grace);
        let shortened = self.run("expire_in", until, args, |store, (it, page, grace)| {
            store.expire_in(it, *page, *grace)
        });
        if shortened.await? == Released::AlreadyGone {
            // This page holds no exclusive lock with this token: it may belong to a newer page of this
            // tab.
            let args = (held.key.clone(), held.aid.clone());
            let reader = self.run("expire_in", until, args, |store, (key, aid)| {
                let each = Query::Each { keys: slice::from_ref(key), aid: Some(aid) };
                store.locks(key.collection(), each, 1)
            });
            let reader = reader.await?.pop();
            if reader.is_some_and(|it| it.token == Some(held.token) && it.mode == Mode::Shared) {
                self.release_by(held, until).await?;
            }
        }
        // The waiters learn that the lock expires earlier now.
        self.inner.queues.freed(&held.key);
        Ok(())
    }
}

/// Attempts of one claim.
fn attempts(
    key: &LockKey,
    Claim { aid, mode, .. }: &Claim,
    tokens: impl Iterator<Item = LockToken>,
) -> Vec<Acquisition> {
    let attempt = |token| Acquisition { key: key.clone(), aid: aid.clone(), token, mode: *mode };
    tokens.map(attempt).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryStore, lock::Aid, lock::Holder, manager::claim::CLAIMS};

    #[derive(serde::Serialize, serde::Deserialize)]
    struct Page {
        #[serde(rename = "_id")]
        id: i64,
    }

    impl crate::Lockable for Page {
        type Id = i64;
        const COLLECTION: &'static str = "page";
    }

    /// A claim without a permit could be granted unheard, and nobody would give the lock back.
    #[tokio::test]
    async fn no_claim_is_sent_without_a_permit() {
        let locks = LockManager::builder(MemoryStore::new()).build().await.unwrap();
        locks.register::<Page>().await.unwrap();
        let claim = async |n: i64| {
            let key = LockKey::of::<Page>(n).unwrap();
            locks.lock_for_session(&key, &Aid::new(), &Holder::new("alice")).await
        };
        let all = locks.inner.claims.try_acquire_many(CLAIMS as u32).unwrap();
        match claim(1).await {
            Err(LockError::Store(e)) => assert_eq!(e.kind(), StoreErrorKind::Overloaded),
            other => panic!("{other:?}"),
        }
        assert!(locks.list().await.unwrap().is_empty());
        drop(all);
        drop(claim(1).await.unwrap());
        assert_eq!(locks.inner.claims.available_permits(), CLAIMS, "it is given back");
    }

    #[tokio::test]
    async fn however_many_requests_are_under_way_a_lock_is_renewed_and_released() {
        let locks = LockManager::builder(MemoryStore::new()).build().await.unwrap();
        locks.register::<Page>().await.unwrap();
        let (key, aid) = (LockKey::of::<Page>(1).unwrap(), Aid::new());
        let alice = Holder::new("alice");
        drop(locks.lock_for_session(&key, &aid, &alice).await.unwrap());
        let all = locks.inner.runner.all_places();
        match locks.inspect(&key).await {
            Err(LockError::Store(e)) => assert_eq!(e.kind(), StoreErrorKind::Overloaded),
            other => panic!("{other:?}"),
        }
        assert_eq!(locks.renew(&aid).await.unwrap(), 1);
        let lock = locks.list().await.unwrap().pop().unwrap();
        assert_eq!(locks.release(&lock).await.unwrap(), Released::Released);
        drop(locks.lock_for_session(&key, &aid, &alice).await.unwrap());
        assert_eq!(locks.release_all(&aid).await.unwrap(), std::slice::from_ref(&key));
        drop(all);
        assert!(locks.inspect(&key).await.unwrap().is_none());
    }
}
