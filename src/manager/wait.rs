//! Waiting for a lock that somebody else holds.

use std::{
    future::{Future, pending},
    time::{Duration, Instant},
};

use tokio::time::{interval_at, sleep};
use tokio_util::task::TaskTracker;

use super::{
    LockManager,
    deadlock::Edge,
    observe,
    operations::{Acquired, Wanted},
    queue::{Place, Step},
    wakeups::poll_pause,
};
use crate::{Aid, Lock, LockError, LockKey, LockToken, Mode, StoreErrorKind};

/// How long a place in the queue of a fair collection outlives its process, and how often it is kept.
const PLACE: Duration = Duration::from_secs(5);
const KEEP_PLACES: Duration = Duration::from_secs(1);

/// Whether to wait for a lock that somebody else holds, and how long.
///
/// Who waits is woken when the lock is released, in the order of arrival within this process. See
/// [`LockManager::acquire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait(Patience);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Patience {
    No,
    ForAtMost(Duration),
    UntilAcquired,
}

impl Wait {
    /// Not at all: one command, and its answer.
    #[must_use]
    pub fn no() -> Self {
        Self(Patience::No)
    }

    /// So long. Zero is [`no`](Self::no). An answer of the store that is under way then is still
    /// waited for, at most for the [deadline](crate::LockManagerBuilder::deadline).
    #[must_use]
    pub fn for_at_most(time: Duration) -> Self {
        Self(if time.is_zero() { Patience::No } else { Patience::ForAtMost(time) })
    }

    /// For good. Outages of the store are waited for as well.
    #[must_use]
    pub fn until_acquired() -> Self {
        Self(Patience::UntilAcquired)
    }

    /// What is left of it for the next one. What began as a wait is one to its end.
    pub(crate) fn since(self, began: Instant) -> Self {
        match self.0 {
            Patience::ForAtMost(time) => Self::for_at_most(time.saturating_sub(began.elapsed())),
            _ => self,
        }
    }
}

/// Gives the place of one that does not wait any more up, in a fair collection.
struct Kept<'a> {
    manager: &'a LockManager,
    key: &'a LockKey,
    /// Of the last claim.
    token: Option<LockToken>,
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        if let Some(token) = self.token {
            self.manager.leave_in_background(self.key.clone(), token.of_place());
        }
    }
}

impl LockManager {
    /// Takes the lock, waiting for it if need be. `owner` is who waits, as deadlocks are found by: the
    /// session itself, or the job that a guard is for.
    ///
    /// # Cancel safety
    /// If the future is dropped, the place in the queue is given up, and a fresh grant given back.
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.wait", skip_all,
        fields(collection = wanted.key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn acquire_waiting(
        &self,
        wanted: &Wanted,
        owner: &Aid,
        wait: Wait,
        scope: &TaskTracker,
    ) -> Result<Acquired, LockError> {
        let mut waiting = observe::Waiting::begins(self, wanted, wait);
        let acquired = self.acquire_in_turn(wanted, owner, wait, scope).await;
        waiting.ends(&acquired);
        acquired
    }

    async fn acquire_in_turn(
        &self,
        wanted: &Wanted,
        owner: &Aid,
        wait: Wait,
        scope: &TaskTracker,
    ) -> Result<Acquired, LockError> {
        let key = &wanted.key;
        let (collection, registered) = self.registered(key.collection())?;
        let give_up = match wait.0 {
            Patience::No => return self.acquire_by(wanted, scope, self.until()).await,
            // Beyond what a clock can count: for good.
            Patience::ForAtMost(time) => Instant::now().checked_add(time),
            Patience::UntilAcquired => None,
        };
        // Who holds it already must not wait behind those who wait for that to end. A guard's session
        // is new and holds nothing.
        let may_hold = wanted.aid == *owner;
        if may_hold && self.inner.queues.somebody_waits_for(key) && self.holds(wanted).await? {
            return self.acquire_by(wanted, scope, self.until()).await;
        }
        let mut place = self.inner.queues.join(wanted, owner, scope, !registered.fair);
        let mut kept = Kept { manager: self, key, token: None };
        if registered.fair {
            // In the order of arrival, also for the store.
            let arrivals = place.arrivals();
            let _turn = arrivals.lock().await;
            place.ask();
            match self.try_waiting(wanted, &mut kept, &place, true, scope).await {
                Ok(Some(answer)) => return Ok(granted(answer, &mut kept, place)),
                Ok(None) => {}
                Err(e) => self.sit_out(e, key, give_up).await?,
            }
        }
        let mut keep_places = interval_at((Instant::now() + KEEP_PLACES).into(), KEEP_PLACES);
        loop {
            let (is_first, expires_at) = match place.next_step() {
                Step::Try => {
                    match self.try_waiting(wanted, &mut kept, &place, registered.fair, scope).await
                    {
                        Ok(Some(answer)) => return Ok(granted(answer, &mut kept, place)),
                        Ok(None) if may_hold && self.is_upgrade(wanted, &place).await? => {
                            return self.refusal(wanted, &place, scope).await;
                        }
                        Ok(None) => {}
                        Err(e) => {
                            self.sit_out(e, key, give_up).await?;
                            place.ask_anew();
                        }
                    }
                    if give_up.is_some_and(|at| at <= Instant::now()) {
                        return self.refusal(wanted, &place, scope).await;
                    }
                    continue;
                }
                Step::Refuse(cycle) => {
                    match self.is_certain(&cycle, wanted, &place).await {
                        Ok(Some(holder)) => {
                            return Err(LockError::WouldDeadlock { key: key.clone(), holder });
                        }
                        Ok(None) => place.goes_on(),
                        Err(e) => self.sit_out(e, key, give_up).await?,
                    }
                    continue;
                }
                Step::Wait => (false, None),
                Step::WaitFirst(expires_at) => {
                    self.watch_over(collection);
                    (true, expires_at)
                }
            };
            let must_poll = is_first && self.inner.wakeups.must_poll(collection);
            let keeps = is_first && registered.fair;
            tokio::select! {
                gift = place.called() => {
                    if let Some(gift) = gift {
                        return Ok(granted(gift, &mut kept, place));
                    }
                }
                () = at(expires_at.filter(|_| is_first)) => place.ask(),
                () = after(must_poll.then(poll_pause)) => place.ask(),
                _ = keep_places.tick(), if keeps => self.keep_places(key, &place).await,
                () = at(give_up) => {
                    // In a fair collection the store keeps the order, and has forgotten this one.
                    if !registered.fair {
                        place.keep_turn();
                    }
                    return self.refusal(wanted, &place, scope).await;
                }
                () = self.inner.waits.cancelled() => return Err(LockError::ShutDown),
            }
        }
    }

    /// One attempt. `None` if somebody else holds it, or comes first.
    async fn try_waiting(
        &self,
        wanted: &Wanted,
        kept: &mut Kept<'_>,
        place: &Place,
        fair: bool,
        scope: &TaskTracker,
    ) -> Result<Option<Acquired>, LockError> {
        let mut claim = wanted.claim(self.inner.settings.max_hold, fair.then_some(PLACE));
        if let Some(token) = kept.token {
            claim.token = token.next_claim();
        } else if fair {
            place.keep(claim.token);
        }
        if fair {
            kept.token = Some(claim.token);
        }
        match self.claim(&wanted.key, claim, scope, self.until()).await {
            Ok(Acquired::Held(lock)) => {
                place.saw(&lock);
                Ok(None)
            }
            Ok(granted) => Ok(Some(granted)),
            Err(e) => {
                // That claim is being given back, and must not be granted after all.
                if let Some(token) = kept.token.take() {
                    self.leave_in_background(wanted.key.clone(), token.of_place());
                }
                Err(e)
            }
        }
    }

    /// A pause, if this is an outage that the wait may outlast. Else it is the answer.
    async fn sit_out(
        &self,
        error: LockError,
        key: &LockKey,
        give_up: Option<Instant>,
    ) -> Result<(), LockError> {
        let pause = poll_pause();
        if !is_outage(&error) || give_up.is_some_and(|at| at <= Instant::now() + pause) {
            return Err(error);
        }
        log::warn!(
            target: "actix_doclock::manager",
            "still waiting for {key:?} although the store does not answer: {error}",
        );
        tokio::select! {
            () = self.inner.waits.cancelled() => Err(LockError::ShutDown),
            () = sleep(pause) => Ok(()),
        }
    }

    async fn keep_places(&self, key: &LockKey, place: &Place) {
        let args = (key.clone(), place.kept());
        let kept = self.run("keep_places", self.until(), args, |store, (key, tokens)| {
            store.keep_places(key, tokens, PLACE)
        });
        if let Err(e) = kept.await {
            log::debug!(target: "actix_doclock::manager", "places for {key:?} were not kept: {e}");
        }
    }

    fn leave_in_background(&self, key: LockKey, token: LockToken) {
        let manager = self.clone();
        self.inner.runner.spawn(&TaskTracker::new(), async move {
            let args = (key, token);
            let left = manager.run("leave", manager.until(), args, |store, (key, token)| {
                store.leave(key, *token)
            });
            if let Err(e) = left.await {
                log::debug!(target: "actix_doclock::manager", "a place goes with its lease: {e}");
            }
        });
    }

    async fn holds(&self, wanted: &Wanted) -> Result<bool, LockError> {
        let lock = self.inspect_by(&wanted.key, Some(&wanted.aid), self.until()).await?;
        Ok(lock.is_some_and(|lock| lock.aid == wanted.aid))
    }

    /// A reader that wants to write beside other readers does not wait: two of them would for good.
    async fn is_upgrade(&self, wanted: &Wanted, place: &Place) -> Result<bool, LockError> {
        let has_readers = place.holder().is_some_and(|lock| lock.mode == Mode::Shared);
        Ok(has_readers && wanted.mode == Mode::Exclusive && self.holds(wanted).await?)
    }

    /// Who holds it, or at last the lock itself if nobody is known to.
    async fn refusal(
        &self,
        wanted: &Wanted,
        place: &Place,
        scope: &TaskTracker,
    ) -> Result<Acquired, LockError> {
        match place.holder() {
            Some(lock) => {
                let refused = Acquired::Held(lock);
                observe::answered(self, wanted, &refused);
                Ok(refused)
            }
            None => self.acquire_by(wanted, scope, self.until()).await,
        }
    }

    /// Makes sure of what was seen, perhaps a while ago, before somebody is refused for it.
    async fn is_certain(
        &self,
        cycle: &[Edge],
        wanted: &Wanted,
        place: &Place,
    ) -> Result<Option<Option<Box<Lock>>>, LockError> {
        for edge in cycle {
            let Some(aid) = &edge.seen else { continue };
            let lock = self.inspect_by(&edge.key, Some(aid), self.until()).await?;
            if lock.is_none_or(|lock| lock.aid != *aid) {
                self.inner.queues.freed(&edge.key);
                return Ok(None);
            }
        }
        // One who has just come has not asked yet.
        let holder = match place.holder() {
            None => self.inspect_by(&wanted.key, Some(&wanted.aid), self.until()).await?,
            seen => seen,
        };
        Ok(Some(holder.map(Box::new)))
    }
}

/// Who comes next waits for this one from now on.
fn granted(answer: Acquired, kept: &mut Kept<'_>, place: Place) -> Acquired {
    kept.token = None;
    place.granted(answer.lock().clone());
    answer
}

pub(super) fn is_outage(error: &LockError) -> bool {
    matches!(error, LockError::Store(e) if e.kind() == StoreErrorKind::Unavailable)
}

fn at(moment: Option<Instant>) -> impl Future<Output = ()> {
    after(moment.map(|moment| moment.saturating_duration_since(Instant::now())))
}

async fn after(pause: Option<Duration>) {
    match pause {
        Some(pause) => sleep(pause).await,
        None => pending().await,
    }
}
