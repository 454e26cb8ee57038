//! One attempt to take a lock.

use std::{slice, time::Instant};

use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::LockError,
    key::LockKey,
    lock::{Aid, Holder, Mode},
    manager::{
        LockManager,
        claim::{Acquired, Provisional, Wanted},
        observe, task,
        wait::queue::line::Together,
    },
    store::{Claim, Query, TryAcquire, with_deadline},
};

impl LockManager {
    /// Takes the lock on `key` for the session `aid`, or says who holds it. One command.
    ///
    /// For a web session use the extractors or [`SessionLocks`](crate::SessionLocks): they also make sure
    /// that a session which ends at the same moment leaves no lock behind.
    ///
    /// # Errors
    /// See [`LockManager`]. Another holder is not an error, but an answer.
    ///
    /// # Cancel safety
    /// If the future is dropped, a fresh grant is given back.
    pub async fn lock_for_session(
        &self,
        key: &LockKey,
        aid: &Aid,
        holder: &Holder,
    ) -> Result<TryAcquire, LockError> {
        let (mode, ttl) = (Mode::Exclusive, self.ttl());
        let (key, aid, holder) = (key.clone(), aid.clone(), holder.clone());
        let wanted = Wanted { key, aid, person: None, holder, tab: None, page: None, mode, ttl };
        let acquired = self.acquire_by(&wanted, &TaskTracker::new(), self.until()).await?;
        Ok(match acquired {
            Acquired::Fresh(fresh) => TryAcquire::Granted(fresh.confirm()),
            Acquired::AlreadyMine(lock) => TryAcquire::AlreadyMine(lock),
            Acquired::Held(lock) => TryAcquire::Held(lock),
        })
    }

    /// `scope` also tracks the cleanup of an unwanted grant.
    pub(crate) async fn acquire_by(
        &self,
        wanted: &Wanted,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired, LockError> {
        self.ready(&wanted.key, until).await?;
        let claim = wanted.claim(self.inner.settings.max_hold, None);
        let answer = self.claim(&wanted.key, claim, None, scope, until).await?;
        observe::answered(self, wanted, &answer);
        Ok(answer)
    }

    /// `order` is kept until the outcome is known, or for a deadline. A claim that comes later is corrected by
    /// the next command.
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.acquire", skip_all,
        fields(collection = key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(super) async fn claim(
        &self,
        key: &LockKey,
        claim: Claim,
        order: Option<Together>,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired, LockError> {
        let timer = observe::Timer::start(self, key, claim.mode);
        if let Err(refused) = self.refuse_if_frozen(key, &claim, until).await {
            timer.refused(&refused);
            return Err(refused);
        }
        let permit = self.claim_permit()?;
        let (manager, own_scope, key) = (self.clone(), scope.clone(), key.clone());
        let acquire = async move {
            let (mut claim, mut attempts) = (claim, task::Attempts::new(until, task::FOREGROUND));
            let answer = loop {
                let mut answer = manager.inner.store.try_acquire(&key, &claim).await;
                let Some(pause) = attempts.pause_after(&mut answer) else { break answer };
                tokio::time::sleep(pause).await;
                claim.token = claim.token.next_attempt();
            };
            if let Ok(answer) = &answer {
                manager.earlier_may_be_late(&key, &claim, answer, &permit);
            }
            match answer {
                // If nobody waits for the answer any more, it is dropped, and the lock is given back.
                Ok(TryAcquire::Granted(lock)) => {
                    let fresh = Provisional::new(manager, lock, &claim, own_scope, permit);
                    Ok(Acquired::Fresh(fresh))
                }
                Ok(TryAcquire::AlreadyMine(lock)) => Ok(Acquired::AlreadyMine(lock)),
                Ok(TryAcquire::Held(lock)) => Ok(Acquired::Held(lock)),
                Err(error) => {
                    // An attempt may have been carried out anyway, or may still be under way.
                    manager.claim_failed(&error, &key, &claim, &own_scope, &permit);
                    Err(error)
                }
            }
        };
        let asked = clock::now();
        let acquire = task::with_permit(order, self.deadline(), with_deadline(until, acquire));
        let outcome = self.inner.runner.spawn(scope, acquire);
        let acquired = task::answer("try_acquire", until, outcome).await;
        timer.acquired(&acquired);
        let acquired = acquired?;
        if let Acquired::Fresh(fresh) = &acquired {
            self.refuse_if_frozen_meanwhile(&fresh.lock().key, until).await?;
            self.inner.granted.notify_one();
        }
        self.inner.watched.saw(acquired.lock(), asked);
        Ok(acquired)
    }

    /// Whether a web session that was just granted a lock may keep it. Asks the store only if the session
    /// may be close to the limit.
    pub(crate) async fn may_hold_another(
        &self,
        aid: &Aid,
        until: Instant,
    ) -> Result<(), LockError> {
        let limit = self.inner.settings.max_locks_per_session;
        if !self.inner.activity.granted(aid, limit, self.ttl() / 3) {
            return Ok(());
        }
        let lists = self.in_each_collection(|collection| {
            let args = (collection, aid.clone(), limit + 1);
            self.run("list", until, args, |store, (collection, aid, limit)| {
                store.locks(collection, Query::Of(slice::from_ref(aid)), *limit)
            })
        });
        let locks = lists.await?.iter().map(Vec::len).sum();
        self.inner.activity.counted(aid, locks);
        if locks <= limit {
            return Ok(());
        }
        observe::locks_refused();
        Err(LockError::TooManyLocks { limit })
    }
}
