//! Taking a lock from its holder: by breaking it, or by taking it over.

use std::time::{Duration, Instant, SystemTime};

use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::{
    actor::Actor,
    clock,
    description::Description,
    error::{LockError, StoreError},
    key::LockKey,
    lock::{Holder, Lock, Mode},
    manager::{
        LockManager,
        claim::{Provisional, Wanted},
        observe, task,
    },
    random,
    store::{Acquisition, HandedOver, Released, Removal, Taken},
    taken::{LockTaken, Settled, Taking},
    text::cut,
};

/// After the deadline of a break or takeover, the time to record its outcome. Then another server assumes
/// that this one is dead.
const TO_SETTLE: Duration = Duration::from_secs(30);

/// The longest reason for a break that is kept and shown, in bytes. A longer one is cut.
pub const MAX_REASON_BYTES: usize = 500;

impl LockManager {
    /// Removes another session's lock, if the [policy](crate::LockManagerBuilder::break_policy) allows
    /// `actor` to do so. Returns the lock that was broken; `None` if the document was free.
    ///
    /// Later guarded saves of the former holder are refused.
    ///
    /// # Errors
    /// [`LockError::BreakRefused`] by the policy. Otherwise see [`LockManager`].
    pub async fn break_lock(
        &self,
        key: &LockKey,
        actor: &Actor,
    ) -> Result<Option<Lock>, LockError> {
        let Some(lock) = self.inspect(key).await? else {
            return Ok(None);
        };
        let released = self.break_seen(&lock, actor, "").await?;
        Ok((released == Released::Released).then_some(lock))
    }

    /// As [`break_lock`](Self::break_lock), but breaks only the lock that was shown to the actor. The
    /// `reason`, cut to [`MAX_REASON_BYTES`], is written to the log and sent to the subscribers of
    /// [events](Self::events).
    ///
    /// Writes a log line with the actor, the reason and the holder, with the target
    /// `actix_doclock::audit`. If the application [describes](crate::LockManagerBuilder::describe) its
    /// documents, the line also has the title, and is written up to 2 s later.
    ///
    /// # Errors
    /// As `break_lock`. It is no error if the lock is already gone.
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.break", skip_all,
        fields(collection = lock.key.collection(), outcome = tracing::field::Empty),
    ))]
    pub async fn break_seen(
        &self,
        lock: &Lock,
        actor: &Actor,
        reason: &str,
    ) -> Result<Released, LockError> {
        if !self.inner.settings.may_break(actor, lock) {
            observe::broken(self, &lock.key, None);
            return Err(LockError::BreakRefused { key: lock.key.clone() });
        }
        let taking = taking(lock, Taking::Broken, actor, reason);
        let (manager, until, lock) = (self.clone(), self.until(), lock.clone());
        let broken = self.inner.runner.spawn(&TaskTracker::new(), async move {
            manager.begin_taking(&taking, until).await?;
            let taken = &mark(&taking);
            let broken = task::retry(until, task::FOREGROUND, || {
                manager.inner.store.remove_lock(Removal::Break { seen: &lock, taken })
            });
            let broken = broken.await?;
            observe::broken(&manager, &lock.key, Some(broken));
            if let Some(gone) = Acquisition::of(&lock) {
                manager.inner.gone(&gone);
            }
            manager.took(&taking, broken == Released::Released);
            Ok(broken)
        });
        Ok(task::answer("break_lock", until, broken).await?)
    }

    /// Notes that a lock is about to be taken, so that the application is told even if this server dies.
    async fn begin_taking(&self, taking: &LockTaken, until: Instant) -> Result<(), StoreError> {
        let lease = self.deadline() + TO_SETTLE;
        let noted =
            task::retry(until, task::FOREGROUND, || self.inner.store.begin_taking(taking, lease));
        let noted = noted.await;
        if noted.is_err() {
            // The note may be there although the reply was lost, and nothing will be taken now.
            self.settle(taking.event, Settled::NotTaken);
        }
        noted
    }

    /// Tells everybody that the lock was taken; or forgets it, if the lock was gone before.
    fn took(&self, taking: &LockTaken, is_taken: bool) {
        if is_taken {
            if let Some(token) = taking.token {
                self.inner.events.was_taken(token, mark(taking));
            }
            let reason = match taking.how {
                Taking::Broken => "broken",
                Taking::TakenOver => "taken_over",
            };
            observe::lost(self, &taking.key, taking.token, reason, "break");
            self.audit(taking);
        }
        self.settle(taking.event, if is_taken { Settled::Taken } else { Settled::NotTaken });
    }

    /// Nobody waits for this.
    fn settle(&self, event: Uuid, settled: Settled) {
        let (manager, until) = (self.clone(), clock::now() + self.deadline() + TO_SETTLE);
        self.inner.runner.spawn(&TaskTracker::new(), async move {
            let done = task::retry(until, task::BACKGROUND, || {
                manager.inner.store.settle_taking(event, event, settled)
            });
            match done.await {
                Ok(()) => manager.inner.announce.notify(),
                Err(e) => log::warn!(
                    target: "actix_doclock::manager",
                    "a break or takeover is told later, because its note could not be settled: {e}",
                ),
            }
        });
    }

    /// Whether [`break_seen`](Self::break_seen) would let this actor break the lock.
    pub(crate) fn may_break(&self, actor: &Actor, lock: &Lock) -> bool {
        self.inner.settings.may_break(actor, lock)
    }

    /// Whether this actor may see the locks of all users; `None` if nobody may.
    pub(crate) fn may_see_all(&self, actor: &Actor) -> Option<bool> {
        self.inner.settings.may_see_all(actor)
    }

    /// Whether [`take_over`](Self::take_over) would let this actor have the lock.
    pub(crate) fn may_take_over(&self, actor: &Actor, lock: &Lock) -> bool {
        can_be_taken_over(lock)
            && self.freeze_of(lock.key.collection()).is_none()
            && self.inner.settings.may_take_over(actor, lock)
    }

    /// Takes the exclusive lock `from` its holder in one step, so that no other caller gets it in
    /// between. `None` if that acquisition is gone.
    ///
    /// The caller checks the policy before. If a session takes the lock from itself, for another tab, it
    /// goes on with the lock: no takeover is reported.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock is given back, but not to its former holder.
    pub(crate) async fn take_over(
        &self,
        from: &Lock,
        wanted: &Wanted,
        actor: &Actor,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Option<Provisional>, LockError> {
        let Some(held) = Acquisition::of(from) else { return Ok(None) };
        let is_new = from.aid != wanted.aid;
        if is_new {
            self.refuse_if_frozen_meanwhile(&from.key, until).await?;
        }
        let mut claim = wanted.claim(self.longest_hold(), None);
        // A session that moves its lock to another tab takes it from nobody.
        let taking = is_new.then(|| taking(from, Taking::TakenOver, actor, ""));
        claim.taken = taking.as_ref().map(mark);
        let (manager, own_scope, permit) = (self.clone(), scope.clone(), self.claim_permit()?);
        let take = async move {
            if let Some(taking) = &taking {
                manager.begin_taking(taking, until).await?;
            }
            let asked = clock::now();
            let handed = task::retry(until, task::FOREGROUND, || {
                manager.inner.store.hand_over(&held, &claim)
            });
            let handed = handed.await.map(HandedOver::lock);
            if let (Some(taking), Ok(lock)) = (&taking, &handed) {
                manager.took(taking, lock.is_some());
            }
            match handed {
                Ok(Some(lock)) => {
                    manager.inner.granted.notify_one();
                    manager.inner.watched.ended(&held);
                    manager.inner.watched.saw(&lock, asked);
                    manager.inner.queues.was_handed(&lock);
                    if taking.is_some() {
                        observe::broken(&manager, &held.key, Some(Released::Released));
                    }
                    Ok(Some(Provisional::new(manager, lock, &claim, own_scope, permit)))
                }
                Ok(None) => Ok(None),
                Err(error) => {
                    // The takeover may have been carried out, or may still be under way: then the lock
                    // belongs to the claim.
                    manager.claim_failed(&error, &held.key, &claim, &own_scope, &permit);
                    Err(error)
                }
            }
        };
        let fresh = task::answer("take_over", until, self.inner.runner.spawn(scope, take)).await?;
        if is_new && fresh.is_some() {
            self.refuse_if_frozen_meanwhile(&from.key, until).await?;
        }
        Ok(fresh)
    }

    /// If a title is needed, the line is written in the background.
    fn audit(&self, taking: &LockTaken) {
        if !self.describes() {
            return audit(taking, None);
        }
        let (manager, taking) = (self.clone(), taking.clone());
        drop(self.inner.runner.spawn(&TaskTracker::new(), async move {
            let description = manager.description(None, &taking.key).await;
            audit(&taking, description);
        }));
    }
}

/// A foreign program would not notice a takeover; and among several readers there is no one holder to
/// take it from.
pub(crate) fn can_be_taken_over(lock: &Lock) -> bool {
    lock.mode == Mode::Exclusive && lock.token.is_some()
}

fn taking(lock: &Lock, how: Taking, actor: &Actor, reason: &str) -> LockTaken {
    LockTaken {
        event: random::uuid(),
        key: lock.key.clone(),
        how,
        from: lock.holder.clone(),
        aid: lock.aid.clone(),
        token: lock.token,
        by: actor.holder(),
        reason: cut(reason.to_owned(), MAX_REASON_BYTES),
        at: SystemTime::UNIX_EPOCH,
        repeated: false,
    }
}

/// What the watchers of the lock are told.
fn mark(taking: &LockTaken) -> Taken {
    Taken { by: taking.by.label.clone(), reason: taking.reason.clone() }
}

fn audit(LockTaken { key, how, from, by, reason, .. }: &LockTaken, called: Option<Description>) {
    let title = called.map(|it| format!(" ({:?})", it.title)).unwrap_or_default();
    let how = match how {
        Taking::Broken => "broken",
        Taking::TakenOver => "taken over",
    };
    log::info!(
        target: "actix_doclock::audit",
        "the lock on {}{title} was {how} by {}; reason: {reason:?}; it was held by {}",
        key.shown(), by.shown(), from.as_ref().map_or("another program".to_owned(), Holder::shown),
    );
}
