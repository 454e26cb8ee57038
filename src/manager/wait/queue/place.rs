//! Being in a queue.

use std::{future::pending, sync::Arc, time::Instant};

use tokio::sync::{Notify, oneshot::Receiver};

use crate::{
    clock,
    key::LockKey,
    lock::{Lock, LockToken, Mode},
    manager::{
        claim::Acquired,
        wait::queue::{LOOK_AGAIN, Queues, State, TooMany, Waiter, deadlock::Edge},
    },
    store::MAX_READERS,
};

/// A place in a queue, given up when it is dropped.
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

/// What one who waits has to do.
#[derive(Debug)]
pub(in crate::manager) enum Step {
    /// Ask the store.
    Try,
    /// Wait to be called.
    Wait,
    /// The first one: wait to be called, or until the holder's lock may be gone.
    WaitFirst(Option<Instant>),
    /// It would wait for itself.
    Refuse(Vec<Edge>),
}

impl Place {
    /// Forgets the request to ask, if there is one and it is this one's turn.
    pub(in crate::manager) fn next_step(&self) -> Step {
        let mut state = self.queues.state();
        let Some(queue) = state.queues.get_mut(&self.key) else { return Step::Try };
        let (may_try, is_first) = (queue.may_try(self.number), queue.is_first(self.number));
        let expires_at = queue.holder.as_ref().map(|holder| holder.expires_at);
        let look_at = [expires_at, queue.looks_again].into_iter().flatten().min();
        let stands_back = queue.stands_back;
        let Some(waiter) = queue.waiting.get_mut(&self.number) else { return Step::Try };
        waiter.is_asking = false;
        if waiter.is_heir {
            return Step::Wait;
        }
        if let Some(cycle) = &waiter.deadlock {
            return Step::Refuse(cycle.clone());
        }
        if may_try && waiter.asked {
            if let Some(until) = stands_back.filter(|until| *until > clock::now()) {
                return Step::WaitFirst(Some(until));
            }
            waiter.asked = false;
            waiter.is_asking = true;
            queue.looks_again = None;
            return Step::Try;
        }
        if is_first { Step::WaitFirst(look_at) } else { Step::Wait }
    }

    /// With the lock, if somebody hands it over.
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

    /// The store has not let it in, so it waits.
    ///
    /// # Errors
    /// It is one too many.
    pub(in crate::manager) fn waits(&self) -> Result<(), TooMany> {
        let mut state = self.queues.state();
        let waiter = state.queues.get(&self.key).and_then(|it| it.waiting.get(&self.number));
        if let Some(waiter) = waiter.filter(|waiter| !waiter.is_counted) {
            state.has_room_for(waiter)?;
            state.counts(&self.key, self.number);
        }
        Ok(())
    }

    /// Who wanted to hand the lock over could not.
    fn is_no_heir(&self) {
        if let Some(waiter) = self.waiter(&mut self.queues.state()) {
            waiter.is_heir = false;
            waiter.asked = true;
        }
    }

    /// It shall ask the store again.
    pub(in crate::manager) fn ask(&self) {
        if let Some(waiter) = self.waiter(&mut self.queues.state()) {
            waiter.asked = true;
        }
    }

    /// It does not wait in that circle any more. Perhaps in another one.
    pub(in crate::manager) fn goes_on(&self) {
        let mut state = self.queues.state();
        if let Some(waiter) = self.waiter(&mut state) {
            waiter.deadlock = None;
            state.refuse_deadlocks(&self.key, self.number);
        }
    }

    /// It shall ask the store again, and until then nobody is told that somebody holds it.
    pub(in crate::manager) fn ask_anew(&self) {
        let mut state = self.queues.state();
        state.has_no_holder(&self.key);
        if let Some(waiter) = self.waiter(&mut state) {
            waiter.asked = true;
        }
    }

    /// The store said who holds it.
    pub(in crate::manager) fn saw(&self, holder: &Lock) {
        self.queues.state().has_holder(holder);
    }

    pub(in crate::manager) fn holder(&self) -> Option<Lock> {
        self.queues.state().queues.get(&self.key)?.holder.clone()
    }

    /// Its time is over. Should its owner be back at once, it is this place that is gone on with: once
    /// it has been given up, so that there are no two with one number.
    pub(in crate::manager) fn keep_turn(&mut self) {
        self.keeps_turn = true;
    }

    /// It was granted: who comes next waits for this one.
    pub(in crate::manager) fn granted(mut self, lock: Lock) {
        self.granted = Some(lock);
    }

    /// The place under this token in the queue of a fair collection is to be kept.
    pub(in crate::manager) fn keep(&self, token: LockToken) {
        if let Some(waiter) = self.waiter(&mut self.queues.state()) {
            waiter.token = Some(token);
        }
    }

    /// Those that are to be kept for this document. The store has no more.
    pub(in crate::manager) fn kept(&self) -> Vec<LockToken> {
        let state = self.queues.state();
        let waiting = state.queues.get(&self.key).into_iter().flat_map(|it| it.waiting.values());
        waiting.filter_map(|waiter| waiter.token).take(MAX_READERS).collect()
    }

    pub(in crate::manager) fn arrivals(&self) -> Arc<tokio::sync::Mutex<()>> {
        let state = self.queues.state();
        state.queues.get(&self.key).map_or_else(Default::default, |it| Arc::clone(&it.arrivals))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.queues.state();
        let was_first = state.queues.get(&self.key).is_some_and(|it| it.is_first(self.number));
        let Some(gone) = state.leave(&self.key, self.number) else { return };
        let granted = self.granted.take();
        if self.keeps_turn && granted.is_none() {
            state.turns.keep(&self.key, &gone.owner, self.number);
        }
        if let Some(lock) = &granted {
            state.has_holder(lock);
        }
        let Some(queue) = state.queues.get_mut(&self.key) else { return };
        match granted {
            Some(lock) if lock.mode == Mode::Shared => queue.ask_readers(),
            // Something was heard before the grant was. Nearly always it is late news of the release that
            // led to the grant. If the next waiter asked at once, it could not be handed the lock, and the
            // release would bring such news again.
            Some(_) if gone.asked => queue.looks_again = Some(clock::now() + LOOK_AGAIN),
            Some(_) => {}
            // What this one was called for, and did not come to ask.
            None if was_first => queue.ask_first(),
            None => {}
        }
        if was_first && let Some(first) = queue.waiting.values().next() {
            // To watch the time from now on.
            first.call.notify_one();
        }
    }
}
