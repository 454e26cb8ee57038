//! Breaks and takeovers: a holder loses its lock to somebody else.

use std::{
    slice,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::{
    actor::Actor,
    clock,
    description::Description,
    error::{LockError, Result, StoreError},
    lock::{Holder, Lock, Mode},
    manager::{
        Core,
        claim::{Provisional, Wanted},
        observe, verbs,
    },
    random,
    store::{Ability, Acquisition, HandedOver, NewsId, Released, Removal, Settled, TakenBy},
    takeover::{Takeover, TakeoverKind},
    text::cut,
};

/// After the deadline of a break or takeover, the time to record its outcome. Then another server assumes
/// that this one is dead.
const TO_SETTLE: Duration = Duration::from_secs(30);

/// The longest reason for a break that is kept and shown, in bytes. A longer one is cut.
pub const MAX_REASON_BYTES: usize = 500;

impl Core {
    /// Breaks the lock that was shown to the actor.
    pub(crate) async fn break_lock(
        self: &Arc<Self>,
        lock: &Lock,
        actor: &Actor,
        reason: &str,
    ) -> Result<Released> {
        observe::in_span!("doclock.break", Some(lock.key.collection()), async {
            if !self.settings.may_break(actor, lock) {
                observe::broken(self.collections.label(&lock.key), None);
                return Err(LockError::BreakRefused { key: lock.key.clone() });
            }
            let takeover = takeover(lock, TakeoverKind::Broken, actor, reason);
            let (core, until, lock) = (Arc::clone(self), self.verbs.until(), lock.clone());
            let break_it = async move {
                core.put_news(&takeover, until).await?;
                let taken = &mark(&takeover);
                let mut attempts = 0;
                let broken = verbs::retry(until, verbs::FOREGROUND, |until| {
                    attempts += 1;
                    core.verbs.store.remove_lock(Removal::Break { seen: &lock, taken }, until)
                });
                let broken = broken.await?;
                observe::broken(core.collections.label(&lock.key), Some(broken));
                if let Some(gone) = Acquisition::of(&lock) {
                    core.beliefs.gone(&gone);
                }
                // A repetition that finds no lock: an earlier attempt may have broken it, and a waiter may have the document
                // by now. Then the news is not settled, and is told when its lease has expired.
                if broken == Released::Released || attempts == 1 {
                    core.took(&takeover, broken == Released::Released);
                }
                Ok(broken)
            };
            self.verbs.complete("break_lock", until, &TaskTracker::new(), break_it).await
        })
    }

    /// Notes that a lock is about to be taken, so that the application is told even if this server dies.
    async fn put_news(
        self: &Arc<Self>,
        takeover: &Takeover,
        until: Instant,
    ) -> Result<(), StoreError> {
        let lease = self.verbs.deadline + TO_SETTLE;
        let noted = verbs::retry(until, verbs::FOREGROUND, |until| {
            self.verbs.store.put_news(takeover, lease, until)
        });
        let noted = noted.await;
        if noted.is_err() {
            // The note may be there although the reply was lost, and nothing will be taken now.
            self.settle(takeover.event, Settled::Void);
        }
        noted
    }

    /// Tells everybody that the lock was taken; or forgets the takeover, if the lock was gone before.
    fn took(self: &Arc<Self>, takeover: &Takeover, is_taken: bool) {
        if is_taken {
            if let Some(token) = takeover.token {
                self.causes.was_taken(takeover.key.clone(), token, mark(takeover));
            }
            let label = self.collections.label(&takeover.key);
            self.beliefs.losses.count(label, takeover.token, takeover.kind.as_str(), "break");
            self.audit(takeover);
        }
        self.settle(takeover.event, if is_taken { Settled::Ready } else { Settled::Void });
    }

    /// Settles the takeover in the background.
    fn settle(&self, event: Uuid, settled: Settled) {
        let until = clock::now() + self.verbs.deadline + TO_SETTLE;
        self.verbs.settle(NewsId::Takeover(event), event, settled, until);
    }

    /// True if [`take_over`](Self::take_over) would let this actor have the lock.
    pub(crate) fn may_take_over(&self, actor: &Actor, lock: &Lock) -> bool {
        can_be_taken_over(lock)
            && self.verbs.store.can(Ability::HandOver)
            && self.freezes.on(lock.key.collection()).is_none()
            && self.settings.may_take_over(actor, lock)
    }

    /// Takes this exclusive lock from its holder in one step, so that no other caller gets it in
    /// between. `None` if that acquisition is gone.
    ///
    /// The caller checks the policy before. If a session takes the lock from itself, for another tab, it
    /// goes on with the lock: no takeover is reported.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock is given back, but not to its former holder.
    pub(crate) async fn take_over(
        self: &Arc<Self>,
        lock: &Lock,
        wanted: &Wanted,
        actor: &Actor,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Option<Provisional>> {
        let Some(held) = Acquisition::of(lock) else { return Ok(None) };
        let is_of_another = lock.aid != wanted.aid;
        if is_of_another {
            self.freezes.check(&lock.key, None, until).await?;
        }
        let mut claim = wanted.claim(self.settings.max_hold, None);
        // A session that moves its lock to another tab takes it from nobody.
        let takeover = is_of_another.then(|| takeover(lock, TakeoverKind::TakenOver, actor, ""));
        claim.taken = takeover.as_ref().map(mark);
        let (core, own_scope, permit) =
            (Arc::clone(self), scope.clone(), self.verbs.claim_permit()?);
        let take = async move {
            if let Some(takeover) = &takeover {
                core.put_news(takeover, until).await?;
            }
            let asked = clock::now();
            let handed = verbs::retry(until, verbs::FOREGROUND, |until| {
                core.verbs.store.hand_over(&held, &claim, until)
            });
            let handed = handed.await;
            if let (Some(takeover), Ok(handed)) = (&takeover, &handed) {
                core.took(takeover, !matches!(handed, HandedOver::AlreadyGone));
            }
            match handed {
                Ok(HandedOver::To(lock)) => {
                    core.beliefs.handed_over(&held, &lock, asked);
                    if takeover.is_some() {
                        observe::broken(
                            core.collections.label(&held.key),
                            Some(Released::Released),
                        );
                    }
                    Ok(Some(Provisional::new(lock, &claim, move |it, joined| {
                        core.granting.give_back(vec![it], joined, &own_scope, permit);
                    })))
                }
                // `Released`: it was taken, and is gone again.
                Ok(HandedOver::Released | HandedOver::AlreadyGone) => Ok(None),
                Err(error) => {
                    // The takeover may have been carried out, or may still be under way: then the lock
                    // belongs to the claim.
                    core.granting.claim_failed(&error, &held.key, &claim, &own_scope, &permit);
                    Err(error)
                }
            }
        };
        let fresh = self.verbs.complete("take_over", until, scope, take).await?;
        match fresh {
            Some(fresh) if is_of_another => {
                Ok(Some(self.freezes.keep_unless_frozen(fresh, until).await?))
            }
            fresh => Ok(fresh),
        }
    }

    /// If a title is needed, the line is written in the background.
    fn audit(self: &Arc<Self>, takeover: &Takeover) {
        if self.descriptions.is_none() {
            return audit(takeover, None);
        }
        let (core, takeover) = (Arc::clone(self), takeover.clone());
        drop(self.verbs.runner.spawn(&TaskTracker::new(), async move {
            let keys = slice::from_ref(&takeover.key);
            let description = core.descriptions_for(None, None, keys).await.remove(&takeover.key);
            audit(&takeover, description);
        }));
    }
}

/// True for an exclusive lock of this crate. A foreign program would not notice a takeover, and among several readers
/// there is no one holder to take the lock from.
pub(crate) fn can_be_taken_over(lock: &Lock) -> bool {
    lock.mode == Mode::Exclusive && lock.token.is_some()
}

fn takeover(lock: &Lock, kind: TakeoverKind, actor: &Actor, reason: &str) -> Takeover {
    Takeover {
        event: random::uuid(),
        key: lock.key.clone(),
        kind,
        from: lock.holder.clone(),
        aid: lock.aid.clone(),
        token: lock.token,
        by: actor.holder(),
        reason: cut(reason.to_owned(), MAX_REASON_BYTES),
        at: SystemTime::UNIX_EPOCH,
        repeated: false,
    }
}

/// The news for the watchers of the lock.
fn mark(takeover: &Takeover) -> TakenBy {
    let Takeover { kind, by, reason, .. } = takeover;
    TakenBy { kind: *kind, by: by.label.clone(), reason: reason.clone() }
}

fn audit(Takeover { key, kind, from, by, reason, .. }: &Takeover, called: Option<Description>) {
    let title = called.map(|it| format!(" ({:?})", it.title)).unwrap_or_default();
    let how = kind.as_str().replace('_', " ");
    log::info!(
        target: "actix_doclock::audit",
        "the lock on {}{title} was {how} by {}; reason: {reason:?}; it was held by {}",
        key.shown(), by.shown(), from.as_ref().map_or("another program".to_owned(), Holder::shown),
    );
}
