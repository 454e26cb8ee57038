//! The waiters of this process: one queue for each document, in the order of arrival.
//!
//! A caller that is willing to wait joins the queue of the document and receives a number, then asks the
//! store if it is the first. Afterwards only the first waiter asks: when news of a release arrives, when
//! the holder's lock expires, and, where there is no change stream, twice a second. So a handover costs
//! the same however long the queue is. A waiter that leaves without having asked passes the call on to its
//! successor. A waiter whose time is over keeps its number, and its ticket, for 3 s, because HTTP clients ask
//! again and again.
//!
//! Two other waiters may ask as well: a reader with only readers ahead of it, and a waiter whose own session
//! holds the lock.
//!
//! *Handover.* A release in this process does not free an exclusive lock for which others wait. One
//! command passes the lock on to the first waiter, its heir, unless that waiter has a request of its own
//! under way. After 64 handovers in a row the lock is really released, and the waiters here stand back for
//! 10 ms, so that other processes get a turn. In a fair collection, the store refuses the handover if a
//! waiter of another process has a lower [ticket](line).
//!
//! *Readers.* When a reader is granted the lock, the readers at the front of the queue ask the store
//! together, up to 64 at a time.
//!
//! *Deadlocks.* A waiter that joins, a new holder or a new guard can close a circle. Each such event
//! starts a [search](deadlock), and the waiters that it finds in a circle are refused.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use tokio::sync::{Notify, oneshot};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::{
    actor::Person,
    clock,
    key::LockKey,
    lock::{Aid, Lock, LockToken, Mode},
    manager::{
        claim::Wanted,
        counts::Counts,
        wait::queue::deadlock::{Found, Obstacle},
    },
    random::{self, HashMap},
    store::{Acquisition, Ticket},
};

pub(in crate::manager) mod deadlock;
mod limits;
pub(in crate::manager) mod line;
mod owners;
mod place;
mod turns;
mod waiter;

pub(in crate::manager) use limits::{Limits, TooMany};
use line::{InLine, Line};
use owners::Owners;
pub(in crate::manager) use place::{Place, Step};
use turns::Turns;
pub(in crate::manager) use waiter::{Heir, Waiter};

/// Bounded as in "Lock Cohorting" (Dice, Marathe, Shavit: PPoPP 2012): enough handovers to gain most of
/// what they save, few enough not to starve waiters of other processes.
const IN_A_ROW: u32 = 64;
/// How long no waiter of this process asks after that. It is long enough for news of the release to reach
/// the other processes, and for one of them to ask.
const STAND_BACK: Duration = Duration::from_millis(10);

/// After a doubtful grant, the next waiter asks the store again after this time.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// How many readers ask the store at the same time; the others follow them.
const READERS_AT_ONCE: usize = 64;
/// How many queues one pass wakes before it unlocks the state for other requests.
const QUEUES_AT_ONCE: usize = 64;

/// The queues of a manager, and the known holders of the documents that they wait for.
#[derive(Debug, Clone)]
pub(in crate::manager) struct Queues(Arc<Mutex<State>>);

/// All requests of a server meet at this mutex. So the time for one change grows at most with the
/// logarithm of the number of waiters.
#[derive(Debug)]
pub(in crate::manager) struct State {
    limits: Limits,
    pub(in crate::manager) queues: HashMap<LockKey, Queue>,
    /// The documents that have a queue, by collection.
    waited_for: HashMap<String, BTreeSet<LockKey>>,
    /// The guards of this process, with the session or job that owns each guard.
    pub(in crate::manager) held: HashMap<LockKey, Vec<Held>>,
    pub(in crate::manager) owners: Owners,
    /// How many waiters of each person count towards the limits.
    persons: Counts<Person>,
    /// The number of all waiters, and of those that count towards the limits.
    waiting: usize,
    counted: usize,
    next: u64,
    turns: Turns,
    /// This process, in the queues of the store.
    server: Uuid,
    /// In fair collections.
    lines: HashMap<LockKey, Weak<Line>>,
    /// How many places, guards and waiters all deadlock searches have visited.
    looked_at: usize,
}

#[derive(Debug, Default)]
pub(in crate::manager) struct Queue {
    /// By number, which is the order of arrival.
    pub(in crate::manager) waiting: BTreeMap<u64, Waiter>,
    /// The waiters that want the exclusive lock.
    pub(in crate::manager) writers: BTreeSet<u64>,
    /// The waiters whose owner also waits elsewhere or holds something: only from these a deadlock search
    /// can go on to other queues.
    pub(in crate::manager) linked: BTreeSet<u64>,
    /// The first waiter of this queue, until it counts towards the limits.
    uncounted: Option<u64>,
    /// The last known holder.
    pub(in crate::manager) holder: Option<Lock>,
    /// How many handovers in a row this process has made.
    handed: u32,
    /// Until this moment, other processes have the first chance.
    stands_back: Option<Instant>,
    /// When the first waiter asks the store even without news.
    looks_again: Option<Instant>,
    /// In a fair collection.
    line: Option<Arc<Line>>,
    /// The last ticket that was drawn for this queue.
    last: Option<Ticket>,
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

    /// # Errors
    /// This caller would have to wait, and a limit is reached.
    pub(in crate::manager) fn join(
        &self,
        wanted: &Wanted,
        owner: &Aid,
        scope: &TaskTracker,
        fair: bool,
    ) -> Result<Place, TooMany> {
        let (key, call) = (&wanted.key, Arc::new(Notify::new()));
        let (gift, receiver) = oneshot::channel();
        let heir = Heir { wanted: wanted.clone(), scope: scope.clone(), gift, in_line: None };
        let queued = fair.then(|| line::Queued::new(wanted.holder.clone()));
        let waiter = Waiter::new(owner, wanted, heir, queued, Arc::clone(&call));
        let mut state = self.state();
        let is_first = !state.queues.contains_key(key);
        if !is_first {
            // The waiter that came first now counts as well, and it counts first.
            state.count_first_comer(key)?;
            state.has_room_for(&waiter)?;
        }
        let number = state.enter(key, waiter);
        if is_first {
            state.queues.entry(key.clone()).or_default().uncounted = Some(number);
        } else {
            state.counts(key, number);
        }
        if fair && is_first {
            let line = state.line(key);
            state.queues.entry(key.clone()).or_default().line = Some(line);
        }
        // A waiter that joins at the end has missed the news by which the earlier waiters learnt of the
        // holder.
        state.refuse_deadlocks(key, number);
        drop(state);
        let (queues, key) = (self.clone(), key.clone());
        Ok(Place {
            queues,
            key,
            number,
            call,
            gift: Some(receiver),
            granted: None,
            keeps_turn: false,
        })
    }

    pub(in crate::manager) fn somebody_waits_for(&self, key: &LockKey) -> bool {
        self.state().queues.contains_key(key)
    }

    pub(in crate::manager) fn somebody_waits_in(&self, collection: &str) -> bool {
        self.state().waited_for.contains_key(collection)
    }

    /// The number of all waiters.
    pub(in crate::manager) fn waiting(&self) -> usize {
        self.state().waiting
    }

    /// The lock on this document is gone, or excludes less than before.
    pub(in crate::manager) fn freed(&self, key: &LockKey) {
        self.state().freed(key);
    }

    /// As [`freed`](Self::freed), for this acquisition. The news is too old if another exclusive holder
    /// is known.
    pub(in crate::manager) fn ended(&self, lock: &Acquisition) {
        let mut state = self.state();
        let is_old_news = (state.queues.get(&lock.key))
            .and_then(|queue| queue.holder.as_ref())
            .is_some_and(|it| it.mode == Mode::Exclusive && it.token != Some(lock.token));
        if !is_old_news {
            state.freed(&lock.key);
        }
    }

    /// The lock was handed over, to a waiter that may have left in the meantime.
    pub(in crate::manager) fn was_handed(&self, lock: &Lock) {
        self.state().has_holder(lock);
    }

    /// The waiter to hand this lock over to, instead of releasing it. Refuses after [`IN_A_ROW`]
    /// handovers in a row, so that waiters of other processes get in as well.
    ///
    /// Also refuses if the first waiter has a request of its own under way, or has no ticket in a fair
    /// collection.
    pub(in crate::manager) fn heir(&self, lock: &Acquisition) -> Option<Heir> {
        let mut state = self.state();
        let queue = state.queues.get_mut(&lock.key)?;
        // A client that releases a lock need not say whether the lock is shared or exclusive.
        let is_known_as_exclusive = queue
            .holder
            .as_ref()
            .is_some_and(|it| it.token == Some(lock.token) && it.mode == Mode::Exclusive);
        if lock.mode != Mode::Exclusive && !is_known_as_exclusive {
            return None;
        }
        let (first, _) =
            queue.waiting.first_key_value().filter(|(_, waiter)| waiter.can_inherit())?;
        let first = *first;
        let in_line = match queue.line.clone() {
            Some(line) => {
                let order = line.together_at_once()?;
                Some(InLine { turn: state.turn(&lock.key, first)?, line, order })
            }
            None if queue.handed >= IN_A_ROW => {
                queue.handed = 0;
                queue.stands_back = Some(clock::now() + STAND_BACK);
                return None;
            }
            None => None,
        };
        let queue = state.queues.get_mut(&lock.key)?;
        let heir = queue.waiting.values_mut().next()?.inherits()?;
        queue.handed += 1;
        Some(Heir { in_line, ..heir })
    }

    /// Wakes the first waiter of every document of the collection.
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

    /// A guard was created. Until it is [`dropped`](Self::dropped), the waiters for its lock wait for its
    /// owner.
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
            persons: Counts::default(),
            waiting: 0,
            counted: 0,
            next: 0,
            turns: Turns::default(),
            server: random::uuid(),
            lines: HashMap::default(),
            looked_at: 0,
        }
    }

    /// Gives the waiter a number: a new one, or the number that it had before.
    fn enter(&mut self, key: &LockKey, mut waiter: Waiter) -> u64 {
        self.next += 1;
        let (number, ticket) = self.turns.take(key, &waiter.owner).unwrap_or((self.next, None));
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
        waiter.is_called = is_first || queue.is_held_by(&owner);
        if let Some(queued) = &mut waiter.queued {
            queued.ticket = ticket;
            queue.last = queue.last.max(ticket);
        }
        if waiter.mode == Mode::Exclusive {
            queue.writers.insert(number);
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
        self.waiting -= 1;
        self.counted -= usize::from(gone.is_counted);
        if let Some(person) = gone.person.as_ref().filter(|_| gone.is_counted) {
            self.persons.remove(person);
        }
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

    /// The owners of the guards that hold this document in this process.
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

    /// Tells the queues whether a deadlock search can go on from this owner's places. An owner with more
    /// than two places is linked already.
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

    /// Its waiters now wait for another holder. That may close a circle for any of them. Waiters of the
    /// holder's own session need not wait at all.
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

    /// Wakes the waiters of the session that holds the lock now.
    fn ask_own(&mut self, lock: &Lock) {
        let own = self.owners.numbers_in(&lock.aid, &lock.key);
        let Some(queue) = self.queues.get_mut(&lock.key) else { return };
        for number in own {
            if let Some(waiter) = queue.waiting.get_mut(&number) {
                waiter.call();
            }
        }
    }

    /// While this owner held the lock, its other waiters did not wait for anybody.
    fn refuse_deadlocks_of(&mut self, key: &LockKey, owner: &Aid) {
        for number in self.owners.numbers_in(owner, key) {
            self.refuse_deadlocks(key, number);
        }
    }

    /// This waiter waits from now on. That may close a circle. If it has its earlier number, it may also
    /// close one for the waiters behind it.
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
                waiter.refuse(circle);
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
            first.call();
        }
    }

    /// The readers at the front may be granted the lock together.
    fn ask_readers(&mut self) {
        let readers = self.waiting.values_mut().take_while(|waiter| waiter.mode == Mode::Shared);
        for waiter in readers.take(READERS_AT_ONCE) {
            waiter.call();
        }
    }

    /// Compares with the owner, not with the session: each guard has a session of its own, under which
    /// nothing waits.
    pub(in crate::manager) fn is_held_by(&self, owner: &Aid) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.aid == *owner)
    }

    /// Whether no waiter of this queue is in the way: for the first one, and for a reader with only readers
    /// ahead.
    fn is_next(&self, number: u64) -> bool {
        let is_reader = self.waiting.get(&number).is_some_and(|it| it.mode == Mode::Shared);
        let has_writers_ahead = self.writers.first().is_some_and(|writer| *writer < number);
        self.is_first(number) || is_reader && !has_writers_ahead
    }

    /// Whether this waiter may ask: the next one, or a waiter whose session holds the lock.
    fn may_try(&self, number: u64) -> bool {
        self.is_next(number)
            || self.waiting.get(&number).is_some_and(|it| self.is_held_by(&it.owner))
    }
}

#[cfg(test)]
mod tests;
