//! Who waits in this process, in the order of arrival.
//!
//! Only the first one for a document asks the store, so that a hand-over costs the same however many
//! wait. Readers at the front follow the first of them together.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::{
    Notify,
    oneshot::{self, Sender},
};
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    key::LockKey,
    lock::{Aid, Lock, LockToken, Mode},
    manager::{
        claim::{Acquired, Acquisition, Wanted},
        wait::queue::deadlock::{Edge, Found, Obstacle},
    },
    random::HashMap,
};

pub(in crate::manager) mod deadlock;
mod owners;
mod place;
mod turns;

use owners::Owners;
pub(in crate::manager) use place::{Place, Step};
use turns::Turns;

/// After the bound on local hand-overs in "Lock Cohorting" (Dice, Marathe, Shavit: PPoPP 2012): enough
/// to win what there is to win, few enough not to starve the others.
const IN_A_ROW: u32 = 64;
/// How long nobody asks here after that: long enough for news of the release to reach the others, and
/// for one of them to ask.
const STAND_BACK: Duration = Duration::from_millis(10);

/// How long after a doubtful grant the next waiter looks whether it still stands.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// How many readers go in at the same time; the others follow them.
const READERS_AT_ONCE: usize = 64;
/// How many queues are gone through before others have their chance at them.
const QUEUES_AT_ONCE: usize = 64;

/// How many may wait.
#[derive(Debug, Clone, Copy)]
pub(in crate::manager) struct Limits {
    pub(in crate::manager) per_session: usize,
    pub(in crate::manager) all: usize,
}

/// A limit is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::manager) struct TooMany {
    pub(in crate::manager) limit: usize,
    pub(in crate::manager) per_session: bool,
}

/// The queues of a manager, and what is known about who holds what they wait for.
#[derive(Debug, Clone)]
pub(in crate::manager) struct Queues(Arc<Mutex<State>>);

/// All requests of a server meet at this lock, so each change takes time that grows with the logarithm of the
/// number of waiters at most.
#[derive(Debug)]
pub(in crate::manager) struct State {
    limits: Limits,
    pub(in crate::manager) queues: HashMap<LockKey, Queue>,
    /// The documents that have a queue, by their collection.
    waited_for: HashMap<String, BTreeSet<LockKey>>,
    /// The guards of this process: for whom, and of which job each is.
    pub(in crate::manager) held: HashMap<LockKey, Vec<Held>>,
    pub(in crate::manager) owners: Owners,
    /// How many wait, for whatever, and for how many of them that has turned out to be so.
    waiting: usize,
    counted: usize,
    next: u64,
    turns: Turns,
    /// How much searches for deadlocks have looked at.
    looked_at: usize,
}

#[derive(Debug, Default)]
pub(in crate::manager) struct Queue {
    /// In the order of their numbers, which is that of arrival.
    pub(in crate::manager) waiting: BTreeMap<u64, Waiter>,
    /// Those that want it for themselves.
    pub(in crate::manager) writers: BTreeSet<u64>,
    /// Those from which a search for deadlocks learns more than from their place here.
    pub(in crate::manager) linked: BTreeSet<u64>,
    /// The waiter that came first, as long as the limits do not take it into account.
    uncounted: Option<u64>,
    /// In a fair collection, under which session who asks: that of a guard is its own.
    sessions: HashMap<Aid, u64>,
    /// Who was last seen to hold it.
    pub(in crate::manager) holder: Option<Lock>,
    /// How often in a row the lock went from hand to hand in this process.
    handed: u32,
    /// Until when those elsewhere have the first chance.
    stands_back: Option<Instant>,
    /// When the first waiter asks the store even if it hears nothing.
    looks_again: Option<Instant>,
    /// In a fair collection the first attempts are made one after the other, as they arrive.
    arrivals: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
pub(in crate::manager) struct Waiter {
    pub(in crate::manager) owner: Aid,
    /// Under which it asks: that of a guard is its own.
    aid: Aid,
    pub(in crate::manager) mode: Mode,
    /// The limits take it into account: somebody is ahead of it, or the store has not let it in. Before that
    /// it does no more than one who does not want to wait.
    is_counted: bool,
    /// How to hand it the lock. Taken by one who does.
    will: Option<Will>,
    /// Somebody is about to.
    is_heir: bool,
    /// Its own request is on the way. Were it handed the lock as well, the two grants would be one, and
    /// giving back what comes second would leave the first.
    is_asking: bool,
    /// Its place in the queue of a fair collection.
    token: Option<LockToken>,
    /// It shall ask the store, as soon as it is its turn.
    asked: bool,
    /// The circle in which it waits. It will go, so it counts as one who waits for nobody.
    pub(in crate::manager) deadlock: Option<Vec<Edge>>,
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
pub(in crate::manager) struct Heir {
    pub(in crate::manager) wanted: Wanted,
    pub(in crate::manager) scope: TaskTracker,
    gift: Sender<Acquired>,
}

impl Heir {
    /// If it does not wait any more, the lock is given back.
    pub(in crate::manager) fn give(self, gift: Acquired) {
        drop(self.gift.send(gift));
    }
}

/// A guard of this process.
#[derive(Debug)]
pub(in crate::manager) struct Held {
    pub(in crate::manager) token: LockToken,
    pub(in crate::manager) owner: Aid,
    pub(in crate::manager) mode: Mode,
}

impl Queues {
    pub(in crate::manager) fn new(limits: Limits) -> Self {
        Self(Arc::new(Mutex::new(State::new(limits))))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In a fair collection nobody `may_inherit`: others may have come first.
    ///
    /// # Errors
    /// Others wait for this document, so this one would too, and it is one too many.
    pub(in crate::manager) fn join(
        &self,
        wanted: &Wanted,
        owner: &Aid,
        scope: &TaskTracker,
        may_inherit: bool,
    ) -> Result<Place, TooMany> {
        let (key, call) = (&wanted.key, Arc::new(Notify::new()));
        let (gift, receiver) = oneshot::channel();
        let will = Will { wanted: wanted.clone(), scope: scope.clone(), gift };
        let waiter = Waiter {
            owner: owner.clone(),
            aid: wanted.aid.clone(),
            mode: wanted.mode,
            is_counted: false,
            will: may_inherit.then_some(will),
            is_heir: false,
            is_asking: false,
            token: None,
            asked: false,
            deadlock: None,
            call: Arc::clone(&call),
        };
        let mut state = self.state();
        let is_first = !state.queues.contains_key(key);
        if !is_first {
            // The room goes to whoever came first, too.
            state.count_first_comer(key)?;
            state.has_room_for(&waiter)?;
        }
        let number = state.enter(key, waiter);
        if is_first {
            state.queues.entry(key.clone()).or_default().uncounted = Some(number);
        } else {
            state.counts(key, number);
        }
        // One at the end of a queue has been passed by the news that let others see the holder.
        state.refuse_deadlocks(key, number);
        drop(state);
        let (queues, key, gift) = (self.clone(), key.clone(), may_inherit.then_some(receiver));
        Ok(Place { queues, key, number, call, gift, granted: None, keeps_turn: false })
    }

    pub(in crate::manager) fn somebody_waits_for(&self, key: &LockKey) -> bool {
        self.state().queues.contains_key(key)
    }

    pub(in crate::manager) fn somebody_waits_in(&self, collection: &str) -> bool {
        self.state().waited_for.contains_key(collection)
    }

    /// How many wait, for whatever.
    pub(in crate::manager) fn waiting(&self) -> usize {
        self.state().waiting
    }

    /// The lock on this document is gone, or excludes less.
    pub(in crate::manager) fn freed(&self, key: &LockKey) {
        self.state().freed(key);
    }

    /// As [`freed`](Self::freed), for this acquisition. Old news once somebody else is known to have it.
    pub(in crate::manager) fn ended(&self, lock: &Acquisition) {
        let mut state = self.state();
        let is_old_news = (state.queues.get(&lock.key))
            .and_then(|queue| queue.holder.as_ref())
            .is_some_and(|it| it.mode == Mode::Exclusive && it.token != Some(lock.token));
        if !is_old_news {
            state.freed(&lock.key);
        }
    }

    /// It went from hand to hand, to one who may not wait any more.
    pub(in crate::manager) fn was_handed(&self, lock: &Lock) {
        self.state().has_holder(lock);
    }

    /// Who is to be handed this lock, instead of its being released. Not more often in a row than
    /// [`IN_A_ROW`], so that those who wait in other processes get in as well.
    ///
    /// Not one whose own request is on the way.
    pub(in crate::manager) fn heir(&self, lock: &Acquisition) -> Option<Heir> {
        let mut state = self.state();
        let queue = state.queues.get_mut(&lock.key)?;
        // A client need not say in which mode it has what it releases.
        let is_known_as_exclusive = queue
            .holder
            .as_ref()
            .is_some_and(|it| it.token == Some(lock.token) && it.mode == Mode::Exclusive);
        if lock.mode != Mode::Exclusive && !is_known_as_exclusive {
            return None;
        }
        if queue.handed >= IN_A_ROW {
            queue.handed = 0;
            queue.stands_back = Some(clock::now() + STAND_BACK);
            return None;
        }
        let first = queue.waiting.values_mut().next().filter(|first| !first.is_asking)?;
        let Will { wanted, scope, gift } = first.will.take()?;
        first.is_heir = true;
        first.asked = false;
        queue.handed += 1;
        Some(Heir { wanted, scope, gift })
    }

    /// That may be so for any document of the collection.
    pub(in crate::manager) fn ask_all(&self, collection: &str) {
        let mut after: Option<LockKey> = None;
        loop {
            let mut state = self.state();
            let State { queues, waited_for, .. } = &mut *state;
            let Some(keys) = waited_for.get(collection) else { return };
            let from = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
            let next: Vec<_> = keys.range((from, Bound::Unbounded)).take(QUEUES_AT_ONCE).collect();
            for key in &next {
                if let Some(queue) = queues.get_mut(*key) {
                    queue.ask_first();
                }
            }
            let Some(last) = next.last() else { return };
            after = Some((*last).clone());
        }
    }

    /// A guard was made. Until [`dropped`](Self::dropped), who waits for it waits for its owner.
    pub(in crate::manager) fn holds(&self, key: &LockKey, held: Held) {
        let mut state = self.state();
        let (owner, mode) = (held.owner.clone(), held.mode);
        state.held.entry(key.clone()).or_default().push(held);
        if state.queues.contains_key(key) {
            state.gets_in_the_way(&owner);
            let guard = Obstacle { owner: &owner, mode, is_seen: false, number: 0 };
            state.refuse_those_behind(key, guard);
        }
    }

    pub(in crate::manager) fn dropped(&self, key: &LockKey, token: LockToken) {
        let mut state = self.state();
        let Some(held) = state.held.get_mut(key) else { return };
        let Some(at) = held.iter().position(|held| held.token == token) else { return };
        let gone = held.swap_remove(at);
        if held.is_empty() {
            state.held.remove(key);
        }
        if state.queues.contains_key(key) {
            state.gets_out_of_the_way(&gone.owner);
        }
    }
}

impl State {
    fn new(limits: Limits) -> Self {
        Self {
            limits,
            queues: HashMap::default(),
            waited_for: HashMap::default(),
            held: HashMap::default(),
            owners: Owners::default(),
            waiting: 0,
            counted: 0,
            next: 0,
            turns: Turns::default(),
            looked_at: 0,
        }
    }

    /// A job has no limit of its own. Its guards have sessions of their own.
    fn has_room_for(&self, waiter: &Waiter) -> Result<(), TooMany> {
        let Limits { per_session, all } = self.limits;
        let is_session = waiter.aid == waiter.owner;
        if is_session && self.owners.counted(&waiter.owner) >= per_session {
            return Err(TooMany { limit: per_session, per_session: true });
        }
        if self.counted >= all {
            return Err(TooMany { limit: all, per_session: false });
        }
        Ok(())
    }

    fn count_first_comer(&mut self, key: &LockKey) -> Result<(), TooMany> {
        let Some(queue) = self.queues.get(key) else { return Ok(()) };
        let Some(number) = queue.uncounted else { return Ok(()) };
        if let Some(waiter) = queue.waiting.get(&number) {
            self.has_room_for(waiter)?;
        }
        self.counts(key, number);
        Ok(())
    }

    fn counts(&mut self, key: &LockKey, number: u64) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        queue.uncounted.take_if(|it| *it == number);
        let waiter = queue.waiting.get_mut(&number);
        if let Some(waiter) = waiter.filter(|waiter| !waiter.is_counted) {
            waiter.is_counted = true;
            self.owners.counts(&waiter.owner);
            self.counted += 1;
        }
    }

    /// Gives it a number: a new one, or that from before.
    fn enter(&mut self, key: &LockKey, mut waiter: Waiter) -> u64 {
        self.next += 1;
        let number = self.turns.take(key, &waiter.owner).unwrap_or(self.next);
        let owner = waiter.owner.clone();
        if !self.queues.contains_key(key) {
            let keys = self.waited_for.entry(key.collection().to_owned()).or_default();
            keys.insert(key.clone());
            for owner in self.guarding(key) {
                self.gets_in_the_way(&owner);
            }
        }
        let queue = self.queues.entry(key.clone()).or_default();
        let is_first = queue.waiting.first_key_value().is_none_or(|(first, _)| number < *first);
        waiter.asked = is_first || queue.is_held_by(&owner);
        if waiter.mode == Mode::Exclusive {
            queue.writers.insert(number);
        }
        if waiter.will.is_none() {
            queue.sessions.insert(waiter.aid.clone(), number);
        }
        queue.waiting.insert(number, waiter);
        self.waiting += 1;
        self.owners.waits(&owner, key, number);
        if self.owners.is_linked(&owner)
            && let Some(queue) = self.queues.get_mut(key)
        {
            queue.linked.insert(number);
        }
        self.relink(&owner);
        number
    }

    fn leave(&mut self, key: &LockKey, number: u64) -> Option<Waiter> {
        let queue = self.queues.get_mut(key)?;
        let gone = queue.waiting.remove(&number)?;
        queue.uncounted.take_if(|it| *it == number);
        queue.writers.remove(&number);
        queue.linked.remove(&number);
        if queue.sessions.get(&gone.aid) == Some(&number) {
            queue.sessions.remove(&gone.aid);
        }
        self.waiting -= 1;
        self.counted -= usize::from(gone.is_counted);
        self.owners.waits_no_more(&gone.owner, key, number, gone.is_counted);
        self.relink(&gone.owner);
        let is_empty = self.queues.get(key).is_some_and(|queue| queue.waiting.is_empty());
        if is_empty && let Some(queue) = self.queues.remove(key) {
            let in_the_way = queue.holder.map(|holder| holder.aid);
            for owner in self.guarding(key).into_iter().chain(in_the_way) {
                self.gets_out_of_the_way(&owner);
            }
            if let Some(keys) = self.waited_for.get_mut(key.collection()) {
                keys.remove(key);
                if keys.is_empty() {
                    self.waited_for.remove(key.collection());
                }
            }
        }
        Some(gone)
    }

    /// Whose guards of this document are in this process.
    fn guarding(&self, key: &LockKey) -> Vec<Aid> {
        self.held.get(key).into_iter().flatten().map(|held| held.owner.clone()).collect()
    }

    fn gets_in_the_way(&mut self, owner: &Aid) {
        self.owners.gets_in_the_way(owner);
        self.relink(owner);
    }

    fn gets_out_of_the_way(&mut self, owner: &Aid) {
        self.owners.gets_out_of_the_way(owner);
        self.relink(owner);
    }

    /// Has the queues know whether more can be learnt from its places. Of more than two they know already.
    fn relink(&mut self, owner: &Aid) {
        let is_linked = self.owners.is_linked(owner);
        for (key, number) in self.owners.places(owner).into_iter().flatten().take(2) {
            let Some(queue) = self.queues.get_mut(key) else { continue };
            if is_linked {
                queue.linked.insert(*number);
            } else {
                queue.linked.remove(number);
            }
        }
    }

    fn freed(&mut self, key: &LockKey) {
        self.has_no_holder(key);
        if let Some(queue) = self.queues.get_mut(key) {
            queue.ask_first();
        }
    }

    fn has_no_holder(&mut self, key: &LockKey) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        if let Some(before) = queue.holder.take() {
            self.gets_out_of_the_way(&before.aid);
            self.refuse_deadlocks_of(key, &before.aid);
        }
    }

    /// Who waits for it now waits for somebody else: that may close a circle for anybody, and the
    /// holder's own session need not wait.
    fn has_holder(&mut self, lock: &Lock) {
        let (key, owner, mode) = (&lock.key, &lock.aid, lock.mode);
        let Some(queue) = self.queues.get_mut(key) else { return };
        let before = queue.holder.replace(lock.clone());
        if before.as_ref().is_some_and(|before| before.aid == *owner && before.mode == mode) {
            return;
        }
        queue.looks_again = None;
        self.gets_in_the_way(owner);
        if let Some(before) = &before {
            self.gets_out_of_the_way(&before.aid);
        }
        self.ask_own(lock);
        self.refuse_those_behind(key, Obstacle { owner, mode, is_seen: true, number: 0 });
        if let Some(before) = before {
            self.refuse_deadlocks_of(key, &before.aid);
        }
    }

    /// Other requests of the session that has it now. In a fair collection also the one that the store
    /// shows as the next: that may be another than the first here, who is in line again, at its end,
    /// after its place had run out.
    fn ask_own(&mut self, lock: &Lock) {
        let own = self.owners.numbers_in(&lock.aid, &lock.key);
        let Some(queue) = self.queues.get_mut(&lock.key) else { return };
        let shown = queue.sessions.get(&lock.aid).copied();
        for number in own.into_iter().chain(shown) {
            if let Some(waiter) = queue.waiting.get_mut(&number) {
                waiter.ask();
            }
        }
    }

    /// While it held the lock, its other requests had nobody to wait for.
    fn refuse_deadlocks_of(&mut self, key: &LockKey, owner: &Aid) {
        for number in self.owners.numbers_in(owner, key) {
            self.refuse_deadlocks(key, number);
        }
    }

    /// This one waits from now on: that may close a circle, also for those behind it if it has a number
    /// from before.
    fn refuse_deadlocks(&mut self, key: &LockKey, number: u64) {
        let found = deadlock::of_waiter(self, key, number);
        self.refuse(key, found);
        let Some(queue) = self.queues.get(key) else { return };
        let is_last = queue.waiting.last_key_value().is_some_and(|(last, _)| *last == number);
        if !is_last
            && let Some(waiter) = queue.waiting.get(&number).filter(|it| it.deadlock.is_none())
        {
            let (owner, mode) = (waiter.owner.clone(), waiter.mode);
            let obstacle = Obstacle { owner: &owner, mode, is_seen: false, number };
            self.refuse_those_behind(key, obstacle);
        }
    }

    fn refuse_those_behind(&mut self, key: &LockKey, obstacle: Obstacle<'_>) {
        let found = deadlock::by_obstacle(self, key, obstacle);
        self.refuse(key, found);
    }

    fn refuse(&mut self, key: &LockKey, found: Found) {
        self.looked_at += found.looked_at;
        let Some(queue) = self.queues.get_mut(key) else { return };
        for (number, circle) in found.circles {
            if let Some(waiter) = queue.waiting.get_mut(&number) {
                waiter.deadlock = Some(circle);
                waiter.call.notify_one();
            }
        }
    }
}

impl Queue {
    fn is_first(&self, number: u64) -> bool {
        self.waiting.first_key_value().is_some_and(|(first, _)| *first == number)
    }

    fn ask_first(&mut self) {
        if let Some(first) = self.waiting.values_mut().next() {
            first.ask();
        }
    }

    /// The readers at the front may go in together.
    fn ask_readers(&mut self) {
        let readers = self.waiting.values_mut().take_while(|waiter| waiter.mode == Mode::Shared);
        for waiter in readers.take(READERS_AT_ONCE) {
            waiter.ask();
        }
    }

    /// A guard has a session of its own, so nobody waits under the name that its lock has.
    pub(in crate::manager) fn is_held_by(&self, owner: &Aid) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.aid == *owner)
    }

    /// Whether it is the turn of this one: the first, a reader behind readers only, one whose session has
    /// the lock already, or who is the next in the store.
    fn may_try(&self, number: u64) -> bool {
        let Some(it) = self.waiting.get(&number) else { return false };
        let has_writers_ahead = self.writers.first().is_some_and(|writer| *writer < number);
        self.is_first(number)
            || it.mode == Mode::Shared && !has_writers_ahead
            || self.is_held_by(&it.owner)
            || self.is_held_by(&it.aid)
    }
}

impl Waiter {
    fn ask(&mut self) {
        self.asked = true;
        self.call.notify_one();
    }
}

#[cfg(test)]
mod tests;
