//! Giving locks back: to the next waiter, without a waiter, when the user of a closed page does not return in time,
//! and when a request does not want its grant.

use std::{
    slice,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::{Result, StoreError, StoreErrorKind},
    key::LockKey,
    lock::{LockToken, Mode, PageId},
    manager::{
        claim::{ClaimPermit, Joined, Provisional, upgraded_from},
        granting::Granting,
        observe,
        pauses::jittered,
        verbs,
        wait::Heir,
    },
    store::{Acquisition, Claim, HandedOver, Query, Released, Removal, TryAcquire},
};

impl Granting {
    /// If the failed claim was sent, it may have been granted anyway, or may still be under way. No caller knows of
    /// it.
    pub(super) fn claim_failed(
        self: &Arc<Self>,
        error: &StoreError,
        key: &LockKey,
        claim: &Claim,
        scope: &TaskTracker,
        permit: &ClaimPermit,
    ) {
        if error.kind() == StoreErrorKind::Overloaded {
            return;
        }
        if let Some(shared) = upgraded_from(key, claim) {
            // If it was granted, the shared lock is gone with it.
            self.beliefs.gone(&shared);
        }
        let attempts = attempts(key, claim, claim.token.attempts());
        self.give_back(attempts.clone(), Joined::Keep, scope, permit.clone());
        self.give_back_later(attempts, permit.clone());
    }

    /// One attempt of the claim was answered. Earlier attempts without an answer may still be under way,
    /// and could be granted the lock after it was released.
    pub(super) fn earlier_may_be_late(
        self: &Arc<Self>,
        key: &LockKey,
        claim: &Claim,
        answer: &TryAcquire,
        permit: &ClaimPermit,
    ) {
        let answered = match answer {
            TryAcquire::Granted(lock) => lock.token,
            TryAcquire::AlreadyMine(_) | TryAcquire::Held(_) | TryAcquire::Lost(_) => {
                Some(claim.token)
            }
        };
        let late = claim.token.attempts().filter(|token| Some(*token) != answered);
        let late = attempts(key, claim, late);
        if !late.is_empty() {
            self.give_back_later(late, permit.clone());
        }
    }

    /// Gives back a grant that its request does not want. Nobody waits for this. With [`Joined::Keep`] the lock stays if
    /// another request of the session was told of it. It is repeated for one ttl, because a lock that nobody renews has
    /// expired by then. But another page may have renewed the lock, while this process or the database stood still: so it is
    /// then repeated for one more ttl.
    pub(super) fn give_back(
        self: &Arc<Self>,
        attempts: Vec<Acquisition>,
        joined: Joined,
        scope: &TaskTracker,
        permit: ClaimPermit,
    ) {
        let (granting, until) = (Arc::clone(self), clock::now() + self.ttl);
        self.verbs.runner.spawn(scope, async move {
            let removal = match (joined, attempts.first()) {
                (Joined::Lose, Some(granted)) => Removal::Release(granted),
                _ => Removal::Retract(&attempts),
            };
            let retract = |until| granting.verbs.store.remove_lock(removal, until);
            let mut retracted = verbs::retry(until, verbs::BACKGROUND, retract).await;
            if retracted.is_err() {
                let until = clock::now() + granting.ttl;
                retracted = verbs::retry(until, verbs::BACKGROUND, retract).await;
            }
            match retracted {
                // The lock was never granted, or was given back before, or it is still there for another
                // request that was told of it. The first waiter asks the store.
                Ok(Released::AlreadyGone) => {
                    attempts.iter().for_each(|it| granting.beliefs.queues.machine.lock().ended(it));
                }
                retracted => granting.released_in_background(retracted, &attempts),
            }
            drop(permit);
        });
    }

    /// Gives the lock back once more, for an acquire that was delayed on its way and arrived after the
    /// first attempt to give it back. Otherwise this orphaned lock would live as long as its session,
    /// which renews all its locks.
    fn give_back_later(self: &Arc<Self>, attempts: Vec<Acquisition>, permit: ClaimPermit) {
        let granting = Arc::downgrade(self);
        self.verbs.runner.spawn_after(jittered(self.ttl / 3), async move {
            if let Some(granting) = granting.upgrade() {
                granting.give_back(attempts, Joined::Keep, &TaskTracker::new(), permit);
            }
        });
    }

    /// Releases a lock without making the caller wait.
    pub(crate) fn release_in_background(self: &Arc<Self>, held: Acquisition) {
        if let Some(heir) = self.heir(&held) {
            let until = clock::now() + self.ttl;
            let handed = self.hand_over(held, heir, until, verbs::BACKGROUND);
            self.verbs.runner.spawn(&TaskTracker::new(), handed);
        } else {
            self.release_alone_in_background(held);
        }
    }

    fn release_alone_in_background(self: &Arc<Self>, held: Acquisition) {
        let (granting, until) = (Arc::clone(self), clock::now() + self.ttl);
        self.verbs.runner.spawn(&TaskTracker::new(), async move {
            let released = verbs::retry(until, verbs::BACKGROUND, |until| {
                granting.verbs.store.remove_lock(Removal::Release(&held), until)
            });
            granting.released_in_background(released.await, slice::from_ref(&held));
        });
    }

    /// The next waiter. `None` also if there is no permit for its claim: it asks when the lock is released.
    fn heir(&self, held: &Acquisition) -> Option<(Heir, ClaimPermit)> {
        let is_fair = self.beliefs.queues.machine.lock().is_fair(&held.key)?;
        let permit = self.verbs.claim_permit().ok()?;
        Some((self.beliefs.queues.heir(held, is_fair)?, permit))
    }

    /// Releases a lock by a handover to the next waiter. One command replaces two commands, each of which
    /// would wait for a majority.
    fn hand_over(
        self: &Arc<Self>,
        held: Acquisition,
        (heir, permit): (Heir, ClaimPermit),
        until: Instant,
        longest_pause: Duration,
    ) -> impl Future<Output = Result<Released, StoreError>> + use<> {
        let Heir { wanted, gift, in_turn } = heir;
        let (turn, order) = in_turn.map(|it| (it.turn, it.order)).unzip();
        let claim = wanted.claim(self.max_hold, turn);
        let granting = Arc::clone(self);
        let hand_over = async move {
            let asked = clock::now();
            let handed = verbs::retry(until, longest_pause, |until| {
                granting.verbs.store.hand_over(&held, &claim, until)
            });
            match handed.await {
                Ok(HandedOver::To(lock)) => {
                    observe::handed_over(granting.collections.label(&held.key));
                    granting.beliefs.handed_over(&held, &lock, asked);
                    let fresh = Provisional::new(lock, &claim, move |it, joined| {
                        granting.give_back(vec![it], joined, &gift.scope, permit);
                    });
                    // If the waiter has left in the meantime, the lock is given back.
                    drop(gift.sender.send(fresh));
                    Ok(Released::Released)
                }
                Ok(HandedOver::Released) => {
                    granting.beliefs.gone(&held);
                    Ok(Released::Released)
                }
                Ok(HandedOver::AlreadyGone) => {
                    granting.beliefs.gone(&held);
                    Ok(Released::AlreadyGone)
                }
                Err(error) => {
                    granting.beliefs.queues.refresh_place(&held.key);
                    // The handover may have been carried out, or may still be under way: then the lock
                    // belongs to the claim.
                    granting.claim_failed(&error, &held.key, &claim, &gift.scope, &permit);
                    // Otherwise the lock is still recorded under its old holder, and may be renewed
                    // there.
                    granting.release_alone_in_background(held);
                    Err(error)
                }
            }
        };
        verbs::with_permit(order, self.verbs.deadline, hand_over)
    }

    /// `these` are the attempts of one claim.
    pub(super) fn released_in_background(
        &self,
        released: Result<Released, StoreError>,
        these: &[Acquisition],
    ) {
        let Some(Acquisition { key, .. }) = these.first() else { return };
        observe::released(self.collections.label(key), &released);
        match released {
            Ok(_) => these.iter().for_each(|it| self.beliefs.gone(it)),
            Err(e) => log::warn!(
                target: "actix_doclock::manager",
                "a lock on {key:?} could not be given back; it has expired by now: {e}",
            ),
        }
    }

    pub(crate) async fn release_by(
        self: &Arc<Self>,
        held: &Acquisition,
        until: Instant,
    ) -> Result<Released> {
        observe::in_span!("doclock.release", Some(held.key.collection()), async {
            if !self.collections.may_have_locks(held.key.collection(), until).await? {
                return Ok(Released::AlreadyGone);
            }
            if let Some(heir) = self.heir(held) {
                let handed = self.hand_over(held.clone(), heir, until, verbs::FOREGROUND);
                return self.verbs.complete("release", until, &TaskTracker::new(), handed).await;
            }
            let (granting, own) = (Arc::clone(self), held.clone());
            let release = async move {
                let released = verbs::retry(until, verbs::FOREGROUND, |until| {
                    granting.verbs.store.remove_lock(Removal::Release(&own), until)
                });
                let released = released.await;
                // The command was not sent. If nobody repeats the release, the session goes on renewing a lock that its user
                // believes to be released.
                if released.as_ref().is_err_and(|e| e.kind() == StoreErrorKind::Overloaded) {
                    granting.release_alone_in_background(own);
                }
                released
            };
            let released =
                self.verbs.complete("release", until, &TaskTracker::new(), release).await;
            observe::released(self.collections.label(&held.key), &released);
            let released = released?;
            self.beliefs.gone(held);
            Ok(released)
        })
    }

    /// Makes an exclusive lock expire after `grace`. A shared lock is released at once: a reader that
    /// returns takes it again, and excludes no other reader.
    pub(crate) async fn release_in(
        self: &Arc<Self>,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
        until: Instant,
    ) -> Result<()> {
        if !self.collections.may_have_locks(held.key.collection(), until).await? {
            return Ok(());
        }
        let args = (held.clone(), page, grace);
        let shortened =
            self.verbs.run("expire_in", until, args, |store, (it, page, grace), until| {
                store.expire_in(it, *page, *grace, until)
            });
        if shortened.await? == Released::AlreadyGone {
            // This page holds no exclusive lock with this token: the lock may belong to a newer page of this tab.
            let args = (held.key.clone(), held.aid.clone());
            let reader = self.verbs.run("expire_in", until, args, |store, (key, aid), until| {
                let each = Query::Each { keys: slice::from_ref(key), aid: Some(aid) };
                store.locks(key.collection(), each, 1, until)
            });
            let reader = reader.await?.pop();
            if reader.is_some_and(|it| it.token == Some(held.token) && it.mode == Mode::Shared) {
                self.release_by(held, until).await?;
            }
        }
        // The waiters learn that the lock expires earlier now.
        self.beliefs.queues.machine.lock().freed(&held.key);
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
    use crate::{
        LockError, LockManager, MemoryStore, lock::Aid, lock::Holder, manager::verbs::CLAIMS,
    };

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
        let all = locks.core.verbs.claims.try_acquire_many(CLAIMS as u32).unwrap();
        match claim(1).await {
            Err(LockError::Store(e)) => assert_eq!(e.kind(), StoreErrorKind::Overloaded),
            other => panic!("{other:?}"),
        }
        assert!(locks.list().await.unwrap().is_empty());
        drop(all);
        drop(claim(1).await.unwrap());
        assert_eq!(locks.core.verbs.claims.available_permits(), CLAIMS, "it is given back");
    }

    #[tokio::test]
    async fn however_many_requests_are_under_way_a_lock_is_renewed_and_released() {
        let locks = LockManager::builder(MemoryStore::new()).build().await.unwrap();
        locks.register::<Page>().await.unwrap();
        let (key, aid) = (LockKey::of::<Page>(1).unwrap(), Aid::new());
        let alice = Holder::new("alice");
        drop(locks.lock_for_session(&key, &aid, &alice).await.unwrap());
        let all = locks.core.verbs.all_places();
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
