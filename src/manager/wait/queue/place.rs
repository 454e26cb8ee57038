//! A waiter's place in a queue, and what the waiter does next.

use std::{future::pending, sync::Arc, time::Instant};

use tokio::sync::{Notify, oneshot::Receiver};

use crate::{
    clock,
    key::LockKey,
    lock::{Lock, Mode},
    manager::{
        claim::Acquired,
        wait::queue::{LOOK_AGAIN, Queues, State, TooMany, Waiter, deadlock::Edge, line::Line},
    },
    store::Turn,
};

/// A place in a queue. Dropping it leaves the queue.
#[derive(Debug)]
pub(in crate::manager) struct Place {
    pub(in crate::manager) queues: Queues,
    pub(in crate::manager) key: LockKey,
    pub(in crate::manager) number: u64,
    pub(in crate::manager) call: Arc<Notify>,
    pub(in crate::manager) gift: Option<Receiver<Acquired>>,
    pub(in crate::manager) granted: Option<Lock>,
    pub(in crate::manager) keeps_turn: bool,
}

/// What a waiter does next.
#[derive(Debug)]
pub(in crate::manager) enum Step {
    /// Ask the store.
    Try,
    /// Wait to be called.
    Wait,
    /// The first waiter: wait to be called, or until the holder's lock may have expired.
    WaitFirst(Option<Instant>),
    /// This waiter would wait for itself.
    Refuse(Vec<Edge>),
}

impl Place {
    /// Returns what to do next. On [`Step::Try`] the call is consumed.
    pub(in crate::manager) fn next_step(&self) -> Step {
        let mut state = self.queues.state();
        let Some(queue) = state.queues.get_mut(&self.key) else { return Step::Try };
        let (may_try, is_first) = (queue.may_try(self.number), queue.is_first(self.number));
        let expires_at = queue.holder.as_ref().map(|holder| holder.expires_at);
        let look_at = [expires_at, queue.looks_again].into_iter().flatten().min();
        let stands_back = queue.stands_back;
        let Some(waiter) = queue.waiting.get_mut(&self.number) else { return Step::Try };
        if !waiter.was_answered() {
            return Step::Wait;
        }
        if let Some(cycle) = &waiter.deadlock {
            return Step::Refuse(cycle.clone());
        }
        if may_try && waiter.is_called {
            if let Some(until) = stands_back.filter(|until| *until > clock::now()) {
                return Step::WaitFirst(Some(until));
            }
            waiter.asks();
            queue.looks_again = None;
            return Step::Try;
        }
        if is_first { Step::WaitFirst(look_at) } else { Step::Wait }
    }

    /// Waits to be called. Returns the lock if it is handed over.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub(in crate::manager) async fn called(&mut self) -> Option<Acquired> {
        let gift = async {
            match &mut self.gift {
                Some(gift) => gift.await,
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            gift = gift => {
                self.gift = None;
                if gift.is_err() {
                    self.is_no_heir();
                }
                gift.ok()
            }
            () = self.call.notified() => None,
        }
    }

    fn waiter<'a>(&self, state: &'a mut State) -> Option<&'a mut Waiter> {
        state.queues.get_mut(&self.key)?.waiting.get_mut(&self.number)
    }

    /// The store has refused the lock, so this waiter waits and counts.
    ///
    /// # Errors
    /// A limit is reached.
    pub(in crate::manager) fn waits(&self) -> Result<(), TooMany> {
        let mut state = self.queues.state();
        let waiter = state.queues.get(&self.key).and_then(|it| it.waiting.get(&self.number));
        if let Some(waiter) = waiter.filter(|waiter| !waiter.is_counted) {
            state.has_room_for(waiter)?;
            state.counts(&self.key, self.number);
        }
        Ok(())
    }

    /// The handover to this waiter has failed.
    fn is_no_heir(&self) {
        if let Some(waiter) = self.waiter(&mut self.queues.state()) {
            waiter.was_not_given();
        }
    }

    /// Has this waiter ask the store again.
    pub(in crate::manager) fn ask(&self) {
        if let Some(waiter) = self.waiter(&mut self.queues.state()) {
            waiter.is_called = true;
        }
    }

    /// Has this waiter ask once more, if it was called for this attempt.
    pub(in crate::manager) fn ask_again(&self) {
        if let Some(waiter) = self.waiter(&mut self.queues.state()) {
            waiter.asks_again();
        }
    }

    /// The circle that was found is gone. There may be another one.
    pub(in crate::manager) fn goes_on(&self) {
        let mut state = self.queues.state();
        if let Some(waiter) = self.waiter(&mut state) {
            waiter.deadlock = None;
            state.refuse_deadlocks(&self.key, self.number);
        }
    }

    /// Has this waiter ask the store again. Until then, the queue knows no holder.
    pub(in crate::manager) fn ask_anew(&self) {
        let mut state = self.queues.state();
        state.has_no_holder(&self.key);
        if let Some(waiter) = self.waiter(&mut state) {
            waiter.is_called = true;
        }
    }

    /// The store has answered with the holder.
    pub(in crate::manager) fn saw(&self, holder: &Lock) {
        self.queues.state().has_holder(holder);
    }

    pub(in crate::manager) fn holder(&self) -> Option<Lock> {
        self.queues.state().queues.get(&self.key)?.holder.clone()
    }

    /// The time is over. If the owner returns within 3 s, it resumes this position. The number is kept
    /// only once this place has been left, so that no two places have one number.
    pub(in crate::manager) fn keep_turn(&mut self) {
        self.keeps_turn = true;
    }

    /// The lock was granted: the waiters behind this one wait for it from now on.
    pub(in crate::manager) fn granted(mut self, lock: Lock) {
        self.granted = Some(lock);
    }

    /// `None` if the collection is not fair.
    pub(in crate::manager) fn line(&self) -> Option<Arc<Line>> {
        self.queues.state().queues.get(&self.key)?.line.clone()
    }

    pub(in crate::manager) fn has_ticket(&self) -> bool {
        let mut state = self.queues.state();
        self.waiter(&mut state).is_some_and(|waiter| waiter.ticket().is_some())
    }

    /// The turn of this waiter, if it has a ticket, and no waiter of this server is in its way.
    pub(in crate::manager) fn turn(&self) -> Option<Turn> {
        self.queues.state().turn(&self.key, self.number)
    }

    /// Whether this is the first waiter, which asks the store now. Any other waiter asks once it has a
    /// ticket.
    pub(in crate::manager) fn asks_if_first(&self) -> bool {
        let mut state = self.queues.state();
        let Some(queue) = state.queues.get_mut(&self.key) else { return false };
        let is_first = queue.is_first(self.number);
        match queue.waiting.get_mut(&self.number) {
            Some(waiter) if is_first => waiter.asks(),
            Some(waiter) => waiter.asks_again(),
            None => {}
        }
        is_first
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.queues.state();
        let queue = state.queues.get(&self.key);
        let was_first = queue.is_some_and(|it| it.is_first(self.number));
        let stored = queue.and_then(|it| Some((it.line.clone()?, it.tickets())));
        let Some(gone) = state.leave(&self.key, self.number) else { return };
        let granted = self.granted.take();
        // In a fair collection, a number without a ticket is worth nothing: the store keeps the order.
        let has_turn = gone.queued.is_none() || gone.ticket().is_some();
        if self.keeps_turn && granted.is_none() && has_turn {
            state.turns.keep(&self.key, &gone.owner, (self.number, gone.ticket()));
        }
        if let Some((line, before)) = stored {
            state.left(&self.key, gone.queued.as_ref(), before, granted.is_some(), &line);
        }
        if let Some(lock) = &granted {
            state.has_holder(lock);
        }
        let Some(queue) = state.queues.get_mut(&self.key) else { return };
        match granted {
            Some(lock) if lock.mode == Mode::Shared => queue.ask_readers(),
            // News arrived before the grant did. Nearly always it is late news of the release that led to
            // this grant. If the next waiter asked at once, it could not be handed the lock, and the next
            // release would bring such late news again.
            Some(_) if gone.is_called => queue.looks_again = Some(clock::now() + LOOK_AGAIN),
            Some(_) => {}
            // This waiter was called and leaves without having asked.
            None if was_first => queue.ask_first(),
            None => {}
        }
        if was_first && let Some(first) = queue.waiting.values().next() {
            // The next waiter now watches the time.
            first.wake();
        }
    }
}
