//! Being in a queue.

use std::{future::pending, sync::Arc, time::Instant};

use tokio::sync::{Notify, oneshot::Receiver};

use super::{KEEP_TURN, Queues};
use crate::{
    Lock, LockKey, LockToken, Mode,
    manager::{deadlock::Edge, operations::Acquired},
};

/// A place in a queue, given up when it is dropped.
#[derive(Debug)]
pub(in crate::manager) struct Place {
    pub(super) queues: Queues,
    pub(super) key: LockKey,
    pub(super) number: u64,
    pub(super) call: Arc<Notify>,
    pub(super) gift: Option<Receiver<Acquired>>,
    pub(super) granted: Option<Lock>,
    pub(super) keeps_turn: bool,
}

/// What one who waits has to do.
#[derive(Debug)]
pub(in crate::manager) enum Step {
    /// Ask the store.
    Try,
    /// Wait to be called.
    Wait,
    /// The first one: wait to be called, or until the holder's lock runs out.
    WaitFirst(Option<Instant>),
    /// It would wait for itself.
    Refuse(Vec<Edge>),
}

impl Place {
    /// Forgets the request to ask, if there is one and it is this one's turn.
    pub(in crate::manager) fn next_step(&self) -> Step {
        let mut state = self.queues.state();
        let Some(queue) = state.queues.get_mut(&self.key) else { return Step::Try };
        let may_try = queue.may_try(self.number);
        let is_first = queue.waiting.front().is_some_and(|first| first.number == self.number);
        let expires_at = queue.holder.as_ref().map(|holder| holder.expires_at);
        let stands_back = queue.stands_back;
        let Some(waiter) = queue.find_mut(self.number) else { return Step::Try };
        waiter.is_asking = false;
        if waiter.is_heir {
            return Step::Wait;
        }
        if let Some(cycle) = &waiter.deadlock {
            return Step::Refuse(cycle.clone());
        }
        if may_try && waiter.asked {
            if let Some(until) = stands_back.filter(|until| *until > Instant::now()) {
                return Step::WaitFirst(Some(until));
            }
            waiter.asked = false;
            waiter.is_asking = true;
            return Step::Try;
        }
        if is_first { Step::WaitFirst(expires_at) } else { Step::Wait }
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

    /// Who wanted to hand the lock over could not.
    fn is_no_heir(&self) {
        let mut state = self.queues.state();
        let waiter = state.queues.get_mut(&self.key).and_then(|it| it.find_mut(self.number));
        if let Some(waiter) = waiter {
            waiter.is_heir = false;
            waiter.asked = true;
        }
    }

    /// It shall ask the store again.
    pub(in crate::manager) fn ask(&self) {
        let mut state = self.queues.state();
        let waiter = state.queues.get_mut(&self.key).and_then(|it| it.find_mut(self.number));
        if let Some(waiter) = waiter {
            waiter.asked = true;
        }
    }

    /// It does not wait in that circle any more. Perhaps in another one.
    pub(in crate::manager) fn goes_on(&self) {
        let mut state = self.queues.state();
        let waiter = state.queues.get_mut(&self.key).and_then(|it| it.find_mut(self.number));
        if let Some(waiter) = waiter {
            waiter.deadlock = None;
            state.refuse_if_deadlocked(&self.key, self.number);
        }
    }

    /// It shall ask the store again, and until then nobody is told that somebody holds it.
    pub(in crate::manager) fn ask_anew(&self) {
        let mut state = self.queues.state();
        let Some(queue) = state.queues.get_mut(&self.key) else { return };
        queue.holder = None;
        if let Some(waiter) = queue.find_mut(self.number) {
            waiter.asked = true;
        }
    }

    /// The store said who holds it.
    pub(in crate::manager) fn saw(&self, holder: &Lock) {
        let mut state = self.queues.state();
        let Some(queue) = state.queues.get_mut(&self.key) else { return };
        let is_news = queue.holder.as_ref().is_none_or(|known| known.aid != holder.aid);
        queue.holder = Some(holder.clone());
        if is_news {
            state.has_new_holder(&self.key);
        }
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
        let mut state = self.queues.state();
        let waiter = state.queues.get_mut(&self.key).and_then(|it| it.find_mut(self.number));
        if let Some(waiter) = waiter {
            waiter.token = Some(token);
        }
    }

    /// Those that are to be kept for this document.
    pub(in crate::manager) fn kept(&self) -> Vec<LockToken> {
        let state = self.queues.state();
        let queue = state.queues.get(&self.key);
        queue.map_or(Vec::new(), |queue| queue.waiting.iter().filter_map(|it| it.token).collect())
    }

    pub(in crate::manager) fn arrivals(&self) -> Arc<tokio::sync::Mutex<()>> {
        let state = self.queues.state();
        state.queues.get(&self.key).map_or_else(Default::default, |it| Arc::clone(&it.arrivals))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.queues.state();
        let Some(queue) = state.queues.get_mut(&self.key) else { return };
        let Some(at) = queue.waiting.iter().position(|it| it.number == self.number) else { return };
        let Some(gone) = queue.waiting.remove(at) else { return };
        if self.keeps_turn && self.granted.is_none() {
            let until = Instant::now() + KEEP_TURN;
            state.keep_turn(&self.key, &gone.owner, self.number, until);
        }
        let Some(queue) = state.queues.get_mut(&self.key) else { return };
        if queue.waiting.is_empty() {
            state.queues.remove(&self.key);
            return;
        }
        let granted = self.granted.take();
        let has_new_holder = granted.is_some();
        match granted {
            Some(lock) => {
                let is_shared = lock.mode == Mode::Shared;
                queue.holder = Some(lock);
                if is_shared {
                    queue.ask_readers();
                } else if gone.asked {
                    // It has become free again in the meantime.
                    queue.ask_first();
                }
            }
            // What this one was called for, and did not come to ask.
            None if at == 0 => queue.ask_first(),
            None => {}
        }
        if at == 0
            && let Some(first) = queue.waiting.front()
        {
            // To watch the time from now on.
            first.call.notify_one();
        }
        if has_new_holder {
            state.has_new_holder(&self.key);
        }
    }
}
