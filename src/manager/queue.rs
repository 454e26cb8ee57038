//! Who waits in this process, in the order of arrival.
//!
//! Only the first one for a document asks the store, so that a hand-over costs the same however many
//! wait. Readers at the front follow the first of them together.

use std::{
    collections::{HashMap, VecDeque},
    future::pending,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use tokio::sync::{
    Notify,
    oneshot::{self, Receiver, Sender},
};
use tokio_util::task::TaskTracker;

use super::{
    deadlock::{self, Edge},
    operations::{Acquired, Acquisition, Wanted},
};
use crate::{Aid, Lock, LockKey, LockToken, Mode};

/// After the bound on local hand-overs in "Lock Cohorting" (Dice, Marathe, Shavit: PPoPP 2012): enough
/// to win what there is to win, few enough not to starve the others.
const IN_A_ROW: u32 = 32;

/// The queues of a manager, and what is known about who holds what they wait for.
#[derive(Debug, Clone, Default)]
pub(super) struct Queues(Arc<Mutex<State>>);

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) queues: HashMap<LockKey, Queue>,
    /// The guards of this process: for whom, and of which job each is.
    pub(super) held: HashMap<LockKey, Vec<Held>>,
    next: u64,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) waiting: VecDeque<Waiter>,
    /// Who was last seen to hold it.
    pub(super) holder: Option<Lock>,
    /// How often in a row the lock went from hand to hand in this process.
    handed: u32,
    /// In a fair collection the first attempts are made one after the other, as they arrive.
    arrivals: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
pub(super) struct Waiter {
    number: u64,
    pub(super) owner: Aid,
    pub(super) mode: Mode,
    /// How to hand it the lock. Taken by one who does.
    will: Option<Will>,
    /// Somebody is about to.
    is_heir: bool,
    /// Its place in the queue of a fair collection.
    token: Option<LockToken>,
    /// It shall ask the store, as soon as it is its turn.
    asked: bool,
    deadlock: Option<Vec<Edge>>,
    call: Arc<Notify>,
}

/// What the first one in a queue leaves with those who may hand it the lock.
#[derive(Debug)]
struct Will {
    wanted: Wanted,
    scope: TaskTracker,
    gift: Sender<Acquired>,
}

/// One who is to be handed the lock. Dropped without a gift, it asks for itself.
#[derive(Debug)]
pub(super) struct Heir {
    pub(super) wanted: Wanted,
    pub(super) scope: TaskTracker,
    gift: Sender<Acquired>,
}

impl Heir {
    /// If it does not wait any more, the lock is given back.
    pub(super) fn give(self, gift: Acquired) {
        drop(self.gift.send(gift));
    }
}

/// A guard of this process.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) aid: Aid,
    pub(super) owner: Aid,
    pub(super) mode: Mode,
}

/// A place in a queue, given up when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    queues: Queues,
    key: LockKey,
    number: u64,
    call: Arc<Notify>,
    gift: Option<Receiver<Acquired>>,
    granted: Option<Lock>,
}

/// What one who waits has to do.
#[derive(Debug)]
pub(super) enum Step {
    /// Ask the store.
    Try,
    /// Wait to be called.
    Wait,
    /// The first one: wait to be called, or until the holder's lock runs out.
    WaitFirst(Option<Instant>),
    /// It would wait for itself.
    Refuse(Vec<Edge>),
}

impl Queues {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In a fair collection nobody `may_inherit`: others may have come first.
    pub(super) fn join(
        &self,
        wanted: &Wanted,
        owner: &Aid,
        scope: &TaskTracker,
        may_inherit: bool,
    ) -> Place {
        let (key, call) = (&wanted.key, Arc::new(Notify::new()));
        let (gift, receiver) = oneshot::channel();
        let will = Will { wanted: wanted.clone(), scope: scope.clone(), gift };
        let mut state = self.state();
        state.next += 1;
        let number = state.next;
        let queue = state.queues.entry(key.clone()).or_default();
        queue.waiting.push_back(Waiter {
            number,
            owner: owner.clone(),
            mode: wanted.mode,
            will: may_inherit.then_some(will),
            is_heir: false,
            token: None,
            asked: queue.waiting.is_empty(),
            deadlock: None,
            call: Arc::clone(&call),
        });
        // One at the end of a queue has been passed by the news that let others see the holder.
        state.refuse_if_deadlocked(key, number);
        drop(state);
        let (queues, key, gift) = (self.clone(), key.clone(), may_inherit.then_some(receiver));
        Place { queues, key, number, call, gift, granted: None }
    }

    pub(super) fn somebody_waits_for(&self, key: &LockKey) -> bool {
        self.state().queues.contains_key(key)
    }

    pub(super) fn somebody_waits_in(&self, collection: &str) -> bool {
        self.state().queues.keys().any(|key| key.collection() == collection)
    }

    /// The lock on this document is gone, or excludes less.
    pub(super) fn freed(&self, key: &LockKey) {
        if let Some(queue) = self.state().queues.get_mut(key) {
            queue.holder = None;
            queue.ask_first();
        }
    }

    /// As [`freed`](Self::freed), for this acquisition. Old news once somebody else is known to have it.
    pub(super) fn ended(&self, lock: &Acquisition) {
        if let Some(queue) = self.state().queues.get_mut(&lock.key) {
            let is_old_news = queue.holder.as_ref().is_some_and(|holder| {
                holder.mode == Mode::Exclusive && holder.token != Some(lock.token)
            });
            if !is_old_news {
                queue.holder = None;
                queue.ask_first();
            }
        }
    }

    /// Who is to be handed this lock, instead of its being released. Not more often in a row than
    /// [`IN_A_ROW`], so that those who wait in other processes get in as well.
    pub(super) fn heir(&self, lock: &Acquisition) -> Option<Heir> {
        let mut state = self.state();
        let queue = state.queues.get_mut(&lock.key)?;
        if lock.mode != Mode::Exclusive || queue.handed >= IN_A_ROW {
            queue.handed = 0;
            return None;
        }
        let first = queue.waiting.front_mut()?;
        let Will { wanted, scope, gift } = first.will.take()?;
        first.is_heir = true;
        queue.handed += 1;
        Some(Heir { wanted, scope, gift })
    }

    /// That may be so for any document of the collection.
    pub(super) fn ask_all(&self, collection: &str) {
        for (key, queue) in &mut self.state().queues {
            if key.collection() == collection {
                queue.ask_first();
            }
        }
    }

    /// A guard was made. Until [`dropped`](Self::dropped), who waits for it waits for its owner.
    pub(super) fn holds(&self, key: &LockKey, held: Held) {
        self.state().held.entry(key.clone()).or_default().push(held);
    }

    pub(super) fn dropped(&self, key: &LockKey, aid: &Aid) {
        let mut state = self.state();
        if let Some(held) = state.held.get_mut(key) {
            held.retain(|held| held.aid != *aid);
            if held.is_empty() {
                state.held.remove(key);
            }
        }
    }
}

impl State {
    fn refuse_if_deadlocked(&mut self, key: &LockKey, number: u64) {
        let Some(waiter) = self.queues.get(key).and_then(|queue| queue.find(number)) else {
            return;
        };
        if let Some(cycle) = deadlock::cycle(self, &waiter.owner)
            && let Some(queue) = self.queues.get_mut(key)
            && let Some(waiter) = queue.find_mut(number)
        {
            waiter.deadlock = Some(cycle);
            waiter.call.notify_one();
        }
    }
}

impl Queue {
    fn find(&self, number: u64) -> Option<&Waiter> {
        self.waiting.iter().find(|waiter| waiter.number == number)
    }

    fn find_mut(&mut self, number: u64) -> Option<&mut Waiter> {
        self.waiting.iter_mut().find(|waiter| waiter.number == number)
    }

    fn ask_first(&mut self) {
        if let Some(first) = self.waiting.front_mut() {
            first.ask();
        }
    }

    /// The readers at the front may go in together.
    fn ask_readers(&mut self) {
        for waiter in self.waiting.iter_mut().take_while(|waiter| waiter.mode == Mode::Shared) {
            waiter.ask();
        }
    }

    /// Whether it is the turn of this one: the first, or a reader behind readers only.
    fn may_try(&self, number: u64) -> bool {
        let mut ahead = self.waiting.iter().take_while(|waiter| waiter.number != number).peekable();
        ahead.peek().is_none()
            || self.find(number).is_some_and(|it| it.mode == Mode::Shared)
                && ahead.all(|waiter| waiter.mode == Mode::Shared)
    }
}

impl Waiter {
    fn ask(&mut self) {
        self.asked = true;
        self.call.notify_one();
    }
}

impl Place {
    /// Forgets the request to ask, if there is one and it is this one's turn.
    pub(super) fn next_step(&self) -> Step {
        let mut state = self.queues.state();
        let Some(queue) = state.queues.get_mut(&self.key) else { return Step::Try };
        let may_try = queue.may_try(self.number);
        let is_first = queue.waiting.front().is_some_and(|first| first.number == self.number);
        let expires_at = queue.holder.as_ref().map(|holder| holder.expires_at);
        let Some(waiter) = queue.find_mut(self.number) else { return Step::Try };
        if let Some(cycle) = waiter.deadlock.take() {
            return Step::Refuse(cycle);
        }
        if waiter.is_heir {
            return Step::Wait;
        }
        if may_try && waiter.asked {
            waiter.asked = false;
            return Step::Try;
        }
        if is_first { Step::WaitFirst(expires_at) } else { Step::Wait }
    }

    /// With the lock, if somebody hands it over.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub(super) async fn called(&mut self) -> Option<Acquired> {
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
    pub(super) fn ask(&self) {
        let mut state = self.queues.state();
        let waiter = state.queues.get_mut(&self.key).and_then(|it| it.find_mut(self.number));
        if let Some(waiter) = waiter {
            waiter.asked = true;
        }
    }

    /// The store said who holds it. That may close a circle for anybody in this queue.
    pub(super) fn saw(&self, holder: &Lock) {
        let mut state = self.queues.state();
        let Some(queue) = state.queues.get_mut(&self.key) else { return };
        let is_news = queue.holder.as_ref().is_none_or(|known| known.aid != holder.aid);
        queue.holder = Some(holder.clone());
        if is_news {
            let numbers: Vec<_> = queue.waiting.iter().map(|waiter| waiter.number).collect();
            for number in numbers {
                state.refuse_if_deadlocked(&self.key, number);
            }
        }
    }

    pub(super) fn holder(&self) -> Option<Lock> {
        self.queues.state().queues.get(&self.key)?.holder.clone()
    }

    /// It was granted: who comes next waits for this one.
    pub(super) fn granted(mut self, lock: Lock) {
        self.granted = Some(lock);
    }

    /// The place under this token in the queue of a fair collection is to be kept.
    pub(super) fn keep(&self, token: LockToken) {
        let mut state = self.queues.state();
        let waiter = state.queues.get_mut(&self.key).and_then(|it| it.find_mut(self.number));
        if let Some(waiter) = waiter {
            waiter.token = Some(token);
        }
    }

    /// Those that are to be kept for this document.
    pub(super) fn kept(&self) -> Vec<LockToken> {
        let state = self.queues.state();
        let queue = state.queues.get(&self.key);
        queue.map_or(Vec::new(), |queue| queue.waiting.iter().filter_map(|it| it.token).collect())
    }

    pub(super) fn arrivals(&self) -> Arc<tokio::sync::Mutex<()>> {
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
        if queue.waiting.is_empty() {
            state.queues.remove(&self.key);
            return;
        }
        match self.granted.take() {
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
    }
}
