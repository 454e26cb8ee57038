//! Taking a lock from its holder: by breaking it, or by taking it over.

use std::time::Instant;

use tokio_util::task::TaskTracker;

use crate::{
    actor::Actor,
    clock,
    description::Description,
    error::LockError,
    key::LockKey,
    lock::{Lock, Mode},
    manager::{
        LockManager,
        claim::{Provisional, Wanted},
        observe, task,
    },
    store::{Acquisition, Released, Removal, Taken},
    text::cut,
};

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
        let taken = taken_by(actor, reason);
        let args = (lock.clone(), taken.clone());
        let broken = self.run("break_lock", self.until(), args, |store, (lock, taken)| {
            store.remove_lock(Removal::Break { seen: lock, taken })
        });
        let broken = broken.await?;
        observe::broken(self, &lock.key, Some(broken));
        if let Some(gone) = Acquisition::of(lock) {
            self.inner.gone(&gone);
        }
        if broken == Released::Released {
            self.inner.events.took(lock, &taken);
            self.audit("broken", lock, &taken);
        }
        Ok(broken)
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
        can_be_taken_over(lock) && self.inner.settings.may_take_over(actor, lock)
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
        let mut claim = wanted.claim(self.longest_hold(), None);
        let taken = (from.aid != wanted.aid).then(|| taken_by(actor, ""));
        claim.taken = taken.clone();
        let (manager, own_scope, from) = (self.clone(), scope.clone(), from.clone());
        let asked = clock::now();
        let take = async move {
            let handed = task::retry(until, task::FOREGROUND, || {
                manager.inner.store.hand_over(&held, &claim)
            });
            match handed.await {
                Ok(Some(lock)) => {
                    manager.inner.granted.notify_one();
                    manager.inner.watched.ended(&held);
                    manager.inner.watched.saw(&lock, asked);
                    manager.inner.queues.was_handed(&lock);
                    if let Some(taken) = taken {
                        observe::broken(&manager, &from.key, Some(Released::Released));
                        manager.inner.events.took(&from, &taken);
                        manager.audit("taken over", &from, &taken);
                    }
                    Ok(Some(Provisional::new(manager, lock, &claim, own_scope)))
                }
                Ok(None) => Ok(None),
                Err(error) => {
                    // The takeover may have been carried out, or may still be under way: then the lock
                    // belongs to the claim.
                    manager.claim_is_unknown(&held.key, &claim, &own_scope);
                    Err(error)
                }
            }
        };
        Ok(task::answer("take_over", until, self.inner.runner.spawn(scope, take)).await?)
    }

    /// Nobody waits for the title of the document: then a task writes the line.
    fn audit(&self, what: &'static str, lock: &Lock, taken: &Taken) {
        if !self.describes() {
            return audit(what, lock, None, taken);
        }
        let (manager, lock, taken) = (self.clone(), lock.clone(), taken.clone());
        drop(self.inner.runner.spawn(&TaskTracker::new(), async move {
            let description = manager.description(&lock.key).await;
            audit(what, &lock, description, &taken);
        }));
    }
}

/// A foreign program would not notice a takeover; and among several readers there is no one holder to
/// take it from.
pub(crate) fn can_be_taken_over(lock: &Lock) -> bool {
    lock.mode == Mode::Exclusive && lock.token.is_some()
}

fn taken_by(actor: &Actor, reason: &str) -> Taken {
    Taken { by: actor.holder().label, reason: cut(reason.to_owned(), MAX_REASON_BYTES) }
}

fn audit(what: &str, lock: &Lock, called: Option<Description>, Taken { by, reason }: &Taken) {
    let title = called.map(|it| format!(" ({:?})", it.title)).unwrap_or_default();
    log::info!(
        target: "actix_doclock::audit",
        "the lock on {:?}{title} was {what} by {by:?}; reason: {reason:?}; it was held by {:?}",
        lock.key, lock.holder.as_ref().map(|holder| &holder.label),
    );
}
