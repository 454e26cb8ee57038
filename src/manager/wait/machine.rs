//! The waiters of this process, as a state machine without I/O: a [driver](super::driver) tells it what
//! happens, and executes its steps.
//!
//! Each document that somebody waits for has a queue, in the order of arrival. A caller that is willing to
//! wait joins the queue. Then its driver asks again and again for the [next step](Machine::next), and
//! sleeps as long as there is nothing to do. The first waiter asks the store; all others sleep. So a
//! handover costs the same however long the queue is.
//!
//! ```text
//!              called, and may ask
//!   Waiting ───────────────────────▶ Asking ── granted ──▶ leaves
//!     ▲ │  ▲                            │
//!     │ │  └──── refused, failed ───────┘
//!     │ └─── heir ──▶ Inheriting ── granted ──▶ leaves
//!     │                   │
//!     └── not inherited ──┘
//! ```
//!
//! News *calls* a waiter in every state: the waiter asks as soon as it waits and may ask. The first waiter
//! is called when the lock is free, when the lock of the known holder expires, and when a waiter ahead of
//! it leaves without having asked. Two other waiters may ask as well: a reader with only readers ahead of
//! it, and a waiter whose own session holds the lock. When a reader is granted the lock, the readers at the
//! front are called together, up to 64 at a time.
//!
//! *Handover.* A release in this process does not free an exclusive lock for which others wait. It passes
//! the lock on to the first waiter, its heir, unless that waiter asks already. After 64 handovers in a row
//! the lock is really released, and then nobody here asks for an eighth of the time that these took, from 30 to 250 ms,
//! so that other processes get in.
//!
//! *Circles.* A waiter that joins, a new holder or a new guard can close a circle. Each such event starts a
//! [search](deadlock), and the waiters that it finds in a circle are refused.
//!
//! *Leaving.* A waiter may leave in every state. If its time is over, its number is kept for 3 s, because
//! HTTP clients ask again and again.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Bound,
    task::Waker,
    time::{Duration, Instant},
};

use crate::{
    actor::Person,
    error::{LockError, Result},
    key::LockKey,
    lock::{Aid, Lock, LockToken, Mode},
    manager::{claim::Wanted, counts::Counts, limits::Limits},
    random::HashMap,
    store::{Acquisition, Place, Ticket},
};

mod deadlock;
mod fair;

pub(super) use deadlock::Circle;
use deadlock::Obstacle;

/// The tickets by which a server keeps others waiting: its first waiter's and its first writer's. And the session of
/// the first waiter.
pub(super) type Tickets = Option<(Ticket, Option<Ticket>, Aid)>;

/// The ticket of a waiter, and the place of its server without this waiter.
pub(super) type TicketAndPlace = (Ticket, Option<Place>);

/// Bounded as in "Lock Cohorting" (Dice, Marathe, Shavit: PPoPP 2012): enough handovers to gain most of
/// what they save, few enough not to starve waiters of other processes.
const IN_A_ROW: u32 = 64;
/// How long no waiter of this process asks after that: long enough for news of the release to reach the other processes,
/// and for one of them to ask. Where each command is slow, an eighth of the time of the handovers, up to the longer one.
const STAND_BACK: [Duration; 2] = [Duration::from_millis(30), Duration::from_millis(250)];
/// After a doubtful grant, the next waiter asks after this time.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// How many readers ask at the same time; the others follow them.
const READERS_AT_ONCE: usize = 64;
/// How many queues one event calls: while it lasts, all other requests wait.
const QUEUES_AT_ONCE: usize = 64;
/// How many waiters before an asker, and how many behind it, are counted.
const MOST_TOLD: usize = 100;
/// How long a waiter whose request has ended keeps its place: its next request gets the old number. An HTTP request cannot
/// wait for as long as a person does; `client.js` and `web/problem.rs` ask again in time.
const KEEP_PLACE: Duration = Duration::from_secs(3);
/// How often the place of this server is renewed in the queue of the store, in a fair collection.
const RENEW_PLACE: Duration = Duration::from_secs(1);

/// All requests of a server meet here. So the time for one event grows at most with the logarithm of the
/// number of waiters. `H` is the means to hand the lock over to a waiter.
#[derive(Debug)]
pub(in crate::manager) struct Machine<H> {
    limits: Limits,
    /// By number, which is new for each waiter. All waiters of a document are in the order of their numbers.
    pub(super) waiters: HashMap<u64, Waiter<H>>,
    last_number: u64,
    pub(super) queues: BTreeMap<LockKey, Queue>,
    /// The guards of this process.
    pub(super) guards: HashMap<LockKey, Vec<Guard>>,
    pub(super) owners: HashMap<Aid, Owner>,
    /// How many waiters count towards the limits: in all, and of each person.
    counted: usize,
    persons: Counts<Person>,
    kept: KeptNumbers,
    /// How much all searches for circles have visited.
    pub(super) visited: usize,
}

#[derive(Debug)]
pub(super) struct Waiter<H> {
    pub(super) wanted: Wanted,
    /// The session, or the job that the guard will belong to.
    pub(super) owner: Aid,
    phase: Phase,
    is_called: bool,
    /// True if the waiter counts towards the limits: it was refused, or it is not alone. Before that, it costs no more
    /// than a caller that does not wait.
    is_counted: bool,
    /// The circle that it is part of. It is about to leave, so it waits for nobody.
    pub(super) circle: Option<Circle>,
    /// In a fair collection.
    pub(super) ticket: Option<Ticket>,
    /// The place in the store after a grant to this waiter.
    pub(super) leaves: Option<Tickets>,
    /// The means of a handover, until a handover to this waiter begins.
    heir: Option<H>,
    is_woken: bool,
    waker: Option<Waker>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting,
    /// Its own claim is under way. A handover at the same time would lead to two grants of one lock, and
    /// giving back the second grant would leave the first one behind.
    Asking,
    /// A handover to it has begun.
    Inheriting,
}

/// The waiters of a document.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) waiting: BTreeSet<u64>,
    /// The waiters that want the exclusive lock.
    pub(super) writers: BTreeSet<u64>,
    /// The waiters whose owner also waits elsewhere, or holds something that others wait for.
    pub(super) linked: BTreeSet<u64>,
    /// The last known holder.
    pub(super) holder: Option<Lock>,
    /// How many handovers in a row there were, and since when.
    handed: u32,
    handed_since: Option<Instant>,
    /// For how long nobody asks after the release that is under way: other processes have the first chance.
    will_stand_back: Option<Duration>,
    stands_back: Option<Instant>,
    /// When the first waiter asks even without news.
    looks_again: Option<Instant>,
    is_fair: bool,
    /// The last ticket that was drawn, and when the place in the store is renewed.
    pub(super) last_ticket: Option<Ticket>,
    renew_at: Option<Instant>,
}

/// A guard of this process.
#[derive(Debug)]
pub(super) struct Guard {
    token: LockToken,
    pub(super) owner: Aid,
    pub(super) mode: Mode,
}

/// A session or job that waits here, or holds a lock that others wait for here.
#[derive(Debug, Default)]
pub(super) struct Owner {
    /// The documents that it waits for, with its numbers in their queues.
    pub(super) places: BTreeSet<(LockKey, u64)>,
    /// How many locks it holds that others wait for here.
    pub(super) in_the_way: usize,
}

/// The next step of a waiter.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// Ask the store. The waiter is now asking.
    Ask,
    /// Draw a ticket, in a fair collection.
    Draw,
    /// Renew the place of this server in the store, in a fair collection.
    Renew,
    /// Sleep until woken, or until this moment. The first waiter makes sure that the store reports releases.
    Sleep { is_first: bool, wake_at: Option<Instant> },
    /// This waiter would wait for itself.
    Refuse(Circle),
}

/// How a waiter leaves.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each waiter, for a moment")]
pub(super) enum Leaving {
    Granted(Lock),
    TimeOver,
    Gone,
}

impl<H> Machine<H> {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            waiters: HashMap::default(),
            last_number: 0,
            queues: BTreeMap::new(),
            guards: HashMap::default(),
            owners: HashMap::default(),
            counted: 0,
            persons: Counts::default(),
            kept: KeptNumbers::default(),
            visited: 0,
        }
    }

    /// Returns the number of the new waiter: a new number, or the number that its owner had before.
    ///
    /// # Errors
    /// [`LockError::TooManyWaiters`] if this caller would have to wait.
    pub(super) fn join(
        &mut self,
        wanted: &Wanted,
        owner: &Aid,
        heir: H,
        is_fair: bool,
        now: Instant,
    ) -> Result<u64> {
        let key = &wanted.key;
        let first = self.first(key);
        if let Some(first) = first {
            // The waiter that came first now counts as well, and it counts first. If only its own session or person has
            // too many waiters, it is refused itself when it has to wait.
            match self.count(first) {
                Ok(()) | Err(LockError::TooManyWaiters { per_session: true, .. }) => {}
                refused => refused?,
            }
            self.has_room(wanted, owner)?;
        } else {
            for owner in self.guarding(key) {
                self.change(&owner, |it| it.in_the_way += 1);
            }
        }
        self.last_number += 1;
        let kept = self.kept.take((key.clone(), owner.clone()), now);
        let (number, ticket) = kept.unwrap_or((self.last_number, None));
        let queue = self.queues.entry(key.clone()).or_default();
        queue.is_fair = is_fair;
        if ticket.is_some() {
            // The place in the store lacks this waiter.
            queue.last_ticket = queue.last_ticket.max(ticket);
            queue.renew_at = Some(now);
        }
        queue.waiting.insert(number);
        if wanted.mode == Mode::Exclusive {
            queue.writers.insert(number);
        }
        let waiter = Waiter {
            wanted: wanted.clone(),
            owner: owner.clone(),
            phase: Phase::Waiting,
            is_called: first.is_none_or(|first| number < first) || queue.is_held_by(owner),
            is_counted: false,
            circle: None,
            ticket,
            leaves: None,
            heir: Some(heir),
            is_woken: false,
            waker: None,
        };
        self.waiters.insert(number, waiter);
        let is_linked = self.change(owner, |it| _ = it.places.insert((key.clone(), number)));
        if is_linked && let Some(queue) = self.queues.get_mut(key) {
            queue.linked.insert(number);
        }
        if first.is_some() {
            self.count(number)?;
        }
        // A waiter that joins at the end has missed the news by which the earlier waiters learnt of the holder.
        self.wait_from_now_on(vec![number]);
        Ok(number)
    }

    pub(super) fn next(&mut self, number: u64, now: Instant) -> Step {
        let Some(waiter) = self.waiters.get_mut(&number) else { return Step::Ask };
        let Some(queue) = self.queues.get_mut(&waiter.wanted.key) else { return Step::Ask };
        waiter.is_woken = false;
        let is_first = queue.waiting.first() == Some(&number);
        if waiter.phase == Phase::Inheriting {
            return Step::Sleep { is_first, wake_at: None };
        }
        if let Some(circle) = &waiter.circle {
            return Step::Refuse(circle.clone());
        }
        if queue.is_fair && waiter.ticket.is_none() {
            return Step::Draw;
        }
        let expires_at = queue.holder.as_ref().map(|holder| holder.expires_at);
        let look_at = expires_at.into_iter().chain(queue.looks_again).min();
        waiter.is_called |= is_first && look_at.is_some_and(|at| at <= now);
        let may_ask = queue.is_next(number) || queue.is_held_by(&waiter.owner);
        if waiter.is_called && may_ask {
            if let Some(pause) = queue.will_stand_back.take() {
                queue.stands_back = Some(now + pause);
            }
            if queue.stands_back.is_some_and(|until| until > now) {
                return Step::Sleep { is_first, wake_at: queue.stands_back };
            }
            self.asks(number);
            return Step::Ask;
        }
        if !is_first {
            return Step::Sleep { is_first, wake_at: None };
        }
        let renew_at = queue.is_fair.then(|| *queue.renew_at.get_or_insert(now + RENEW_PLACE));
        if renew_at.is_some_and(|at| at <= now) {
            queue.renew_at = None;
            return Step::Renew;
        }
        Step::Sleep { is_first, wake_at: look_at.into_iter().chain(renew_at).min() }
    }

    /// True if the waiter was woken since its last step. Otherwise wakes this task when that happens.
    pub(super) fn is_woken(&mut self, number: u64, waker: &Waker) -> bool {
        let Some(waiter) = self.waiters.get_mut(&number) else { return true };
        waiter.waker = Some(waker.clone());
        waiter.is_woken
    }

    /// The claim of this waiter is sent now.
    pub(super) fn asks(&mut self, number: u64) {
        let Some(waiter) = self.waiters.get_mut(&number) else { return };
        (waiter.phase, waiter.is_called) = (Phase::Asking, false);
        if let Some(queue) = self.queues.get_mut(&waiter.wanted.key) {
            queue.looks_again = None;
        }
    }

    /// The store has refused the claim of this waiter, so the waiter waits, and counts towards the limits.
    ///
    /// # Errors
    /// [`LockError::TooManyWaiters`].
    pub(super) fn refused(&mut self, number: u64, holder: &Lock) -> Result<()> {
        self.held(holder);
        if let Some(waiter) = self.waiters.get_mut(&number) {
            waiter.phase = Phase::Waiting;
        }
        self.count(number)
    }

    /// The claim of this waiter was not answered, or the handover to it has failed. Until the waiter has asked again,
    /// no holder is known.
    pub(super) fn failed(&mut self, number: u64) {
        let Some(waiter) = self.waiters.get_mut(&number) else { return };
        (waiter.phase, waiter.is_called) = (Phase::Waiting, true);
        let key = waiter.wanted.key.clone();
        self.freed(&key);
    }

    /// The circle that was found is gone. There may be another one.
    pub(super) fn goes_on(&mut self, number: u64) {
        if let Some(waiter) = self.waiters.get_mut(&number) {
            waiter.circle = None;
            self.wait_from_now_on(vec![number]);
        }
    }

    /// True if the place of this server in the store is out of date now, in a fair collection.
    #[must_use]
    pub(super) fn leaves(&mut self, number: u64, end: Leaving, now: Instant) -> bool {
        let Some(waiter) = self.waiters.get(&number) else { return false };
        let key = waiter.wanted.key.clone();
        let tickets = |it: &Self| {
            it.queues.get(&key).filter(|queue| queue.is_fair).and_then(|queue| it.tickets(queue))
        };
        let before = tickets(self);
        let Some(gone) = self.waiters.remove(&number) else { return false };
        let Some(queue) = self.queues.get_mut(&key) else { return false };
        let was_first = queue.waiting.first() == Some(&number);
        if was_first {
            // The command that makes the next waiter the first also renews the place.
            queue.renew_at = None;
        }
        for numbers in [&mut queue.waiting, &mut queue.writers, &mut queue.linked] {
            numbers.remove(&number);
        }
        let (is_fair, is_empty) = (queue.is_fair, queue.waiting.is_empty());
        let stored = match end {
            Leaving::Granted(_) => gone.leaves.unwrap_or(before),
            _ => before,
        };
        let is_stale = stored != tickets(self);
        // Without a ticket, a number is worth nothing in a fair collection: the store keeps the order.
        if matches!(end, Leaving::TimeOver) && (!is_fair || gone.ticket.is_some()) {
            self.kept.keep((key.clone(), gone.owner.clone()), number, gone.ticket, now);
        }
        if gone.is_counted {
            self.counted -= 1;
            gone.wanted.person.iter().for_each(|person| self.persons.remove(person));
        }
        self.change(&gone.owner, |it| _ = it.places.remove(&(key.clone(), number)));
        if is_empty {
            let holder = self.queues.remove(&key).and_then(|queue| queue.holder);
            for owner in self.guarding(&key).into_iter().chain(holder.map(|it| it.aid)) {
                self.change(&owner, |it| it.in_the_way -= 1);
            }
            return is_stale;
        }
        match end {
            Leaving::Granted(lock) => {
                self.held(&lock);
                if lock.mode == Mode::Shared {
                    self.call_readers(&key);
                } else if gone.is_called
                    && let Some(queue) = self.queues.get_mut(&key)
                {
                    // News arrived before the grant. Nearly always this is late news of the release that
                    // led to this grant. If the next waiter asked at once, it could not be handed the lock,
                    // and the next release would bring such late news again.
                    queue.looks_again = Some(now + LOOK_AGAIN);
                }
            }
            // It may have been called, and leaves without having asked.
            _ if was_first => self.call_first(&key),
            _ => {}
        }
        if was_first && let Some(next) = self.first(&key).and_then(|it| self.waiters.get_mut(&it)) {
            // The next waiter watches the time from now on.
            next.wake();
        }
        is_stale
    }

    pub(super) fn has_waiters(&self, key: &LockKey) -> bool {
        self.queues.contains_key(key)
    }

    /// `None` if nobody waits for the document.
    pub(in crate::manager) fn is_fair(&self, key: &LockKey) -> Option<bool> {
        Some(self.queues.get(key)?.is_fair)
    }

    pub(in crate::manager) fn has_waiters_in(&self, collection: &str) -> bool {
        let next = self.queues.range(from(collection, None)).next();
        next.is_some_and(|(key, _)| key.collection() == collection)
    }

    /// The number of all waiters.
    pub(in crate::manager) fn waiting(&self) -> usize {
        self.waiters.len()
    }

    pub(super) fn holder(&self, key: &LockKey) -> Option<Lock> {
        self.queues.get(key)?.holder.clone()
    }

    /// The lock on this document is gone, or excludes less than before.
    pub(in crate::manager) fn freed(&mut self, key: &LockKey) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        if let Some(before) = queue.holder.take() {
            self.change(&before.aid, |it| it.in_the_way -= 1);
            // While this session held the lock, its own waiters for the lock waited for nobody.
            self.wait_from_now_on(self.numbers(&before.aid, key));
        }
        self.call_first(key);
    }

    /// As [`freed`](Self::freed), for this acquisition. The news is too old if another exclusive holder is
    /// known.
    pub(in crate::manager) fn ended(&mut self, lock: &Acquisition) {
        let Some(queue) = self.queues.get(&lock.key) else { return };
        if queue
            .holder
            .as_ref()
            .is_none_or(|it| it.mode == Mode::Shared || it.token == Some(lock.token))
        {
            self.freed(&lock.key);
        }
    }

    /// The document has this holder. Its waiters wait for the holder from now on, which may close a circle for any
    /// of them. Waiters of the holder's own session need not wait at all.
    pub(in crate::manager) fn held(&mut self, lock: &Lock) {
        let (key, owner, mode) = (&lock.key, &lock.aid, lock.mode);
        let Some(queue) = self.queues.get_mut(key) else { return };
        let before = queue.holder.replace(lock.clone());
        if before.as_ref().is_some_and(|before| before.aid == *owner && before.mode == mode) {
            return;
        }
        queue.looks_again = None;
        self.change(owner, |it| it.in_the_way += 1);
        if let Some(before) = &before {
            self.change(&before.aid, |it| it.in_the_way -= 1);
        }
        for number in self.numbers(owner, key) {
            self.call(number);
        }
        self.refuse_behind(key, Obstacle { owner, mode, is_seen: true, number: 0 });
        if let Some(before) = before {
            // While this session held the lock, its own waiters for the lock waited for nobody.
            self.wait_from_now_on(self.numbers(&before.aid, key));
        }
    }

    /// A guard was created. Until it is [dropped](Self::guard_dropped), the waiters for its lock wait for its
    /// owner.
    pub(in crate::manager) fn guard_taken(&mut self, held: &Acquisition, owner: &Aid) {
        let Acquisition { key, token, mode, .. } = held;
        let guard = Guard { token: *token, owner: owner.clone(), mode: *mode };
        self.guards.entry(key.clone()).or_default().push(guard);
        if self.has_waiters(key) {
            self.change(owner, |it| it.in_the_way += 1);
            self.refuse_behind(key, Obstacle { owner, mode: *mode, is_seen: false, number: 0 });
        }
    }

    pub(in crate::manager) fn guard_dropped(&mut self, held: &Acquisition) {
        let Some(guards) = self.guards.get_mut(&held.key) else { return };
        let Some(at) = guards.iter().position(|it| it.token == held.token) else { return };
        let gone = guards.swap_remove(at);
        if guards.is_empty() {
            self.guards.remove(&held.key);
        }
        if self.has_waiters(&held.key) {
            self.change(&gone.owner, |it| it.in_the_way -= 1);
        }
    }

    /// The waiter that gets this lock by a handover. In a fair collection, also the turn of that waiter.
    pub(super) fn heir(
        &mut self,
        released: &Acquisition,
        now: Instant,
    ) -> Option<(Wanted, H, Option<TicketAndPlace>)> {
        let queue = self.queues.get_mut(&released.key)?;
        // A client that releases a lock need not say whether the lock is shared or exclusive.
        let is_known = |it: &Lock| it.token == Some(released.token) && it.mode == Mode::Exclusive;
        if released.mode == Mode::Shared && !queue.holder.as_ref().is_some_and(is_known) {
            return None;
        }
        let first = *queue.waiting.first()?;
        let waiter = self.waiters.get_mut(&first)?;
        if waiter.phase != Phase::Waiting || waiter.heir.is_none() {
            return None;
        }
        let since = *queue.handed_since.get_or_insert(now);
        if queue.handed >= IN_A_ROW && !queue.is_fair {
            let pause = ((now - since) / 8).clamp(STAND_BACK[0], STAND_BACK[1]);
            queue.will_stand_back = Some(pause);
            (queue.handed, queue.handed_since) = (0, None);
            return None;
        }
        queue.handed += 1;
        let turn = if queue.is_fair { Some(self.turn(first)?) } else { None };
        let waiter = self.waiters.get_mut(&first)?;
        (waiter.phase, waiter.is_called) = (Phase::Inheriting, false);
        Some((waiter.wanted.clone(), waiter.heir.take()?, turn))
    }

    /// Calls the first waiters of some documents of the collection, beginning after this document. Returns
    /// the last of them.
    pub(super) fn call_some(
        &mut self,
        collection: &str,
        after: Option<LockKey>,
    ) -> Option<LockKey> {
        let keys = self.queues.range(from(collection, after)).map(|(key, _)| key);
        let keys = keys.take_while(|key| key.collection() == collection).take(QUEUES_AT_ONCE);
        let keys: Vec<_> = keys.cloned().collect();
        keys.iter().for_each(|key| self.call_first(key));
        keys.last().cloned()
    }

    pub(super) fn call(&mut self, number: u64) {
        if let Some(waiter) = self.waiters.get_mut(&number) {
            waiter.is_called = true;
            waiter.wake();
        }
    }

    pub(super) fn call_first(&mut self, key: &LockKey) {
        if let Some(first) = self.first(key) {
            self.call(first);
        }
    }

    /// The readers at the front may be granted the lock together.
    fn call_readers(&mut self, key: &LockKey) {
        let Some(queue) = self.queues.get(key) else { return };
        let front = ..queue.writers.first().copied().unwrap_or(u64::MAX);
        let readers: Vec<_> = queue.waiting.range(front).take(READERS_AT_ONCE).copied().collect();
        readers.into_iter().for_each(|number| self.call(number));
    }

    pub(super) fn first(&self, key: &LockKey) -> Option<u64> {
        self.queues.get(key)?.waiting.first().copied()
    }

    /// The numbers of this owner in the queue of this document.
    pub(super) fn numbers(&self, owner: &Aid, key: &LockKey) -> Vec<u64> {
        let Some(owner) = self.owners.get(owner) else { return Vec::new() };
        let in_queue = (key.clone(), 0)..=(key.clone(), u64::MAX);
        owner.places.range(in_queue).map(|(_, number)| *number).collect()
    }

    /// The sessions that wait before this one (all, if it does not wait), and those that wait behind it; of each the first.
    pub(in crate::manager) fn around(&self, key: &LockKey, aid: &Aid) -> (Vec<Aid>, Vec<Aid>) {
        let own = self.numbers(aid, key).first().copied().unwrap_or(u64::MAX);
        let Some(queue) = self.queues.get(key) else { return Default::default() };
        let owner = |number: &u64| Some(self.waiters.get(number)?.owner.clone());
        let before = queue.waiting.range(..own).take(MOST_TOLD).filter_map(owner).collect();
        let behind = queue.waiting.range(own..).skip(1).take(MOST_TOLD).filter_map(owner).collect();
        (before, behind)
    }

    /// The owners of the guards of this document.
    fn guarding(&self, key: &LockKey) -> Vec<Aid> {
        self.guards.get(key).into_iter().flatten().map(|guard| guard.owner.clone()).collect()
    }

    /// Changes what is known of an owner. True if a search for circles can go on from the owner: it waits in a second
    /// place, or holds a lock that others wait for.
    fn change(&mut self, owner: &Aid, change: impl FnOnce(&mut Owner)) -> bool {
        let it = self.owners.entry(owner.clone()).or_default();
        change(it);
        let is_linked = it.places.len() + it.in_the_way > 1;
        // If it has more than two places, all but a new one are linked already.
        for (key, number) in it.places.iter().take(2) {
            let Some(queue) = self.queues.get_mut(key) else { continue };
            if is_linked {
                queue.linked.insert(*number)
            } else {
                queue.linked.remove(number)
            };
        }
        if it.places.is_empty() && it.in_the_way == 0 {
            self.owners.remove(owner);
        }
        is_linked
    }

    /// From now on this waiter counts.
    ///
    /// # Errors
    /// [`LockError::TooManyWaiters`].
    pub(super) fn count(&mut self, number: u64) -> Result<()> {
        let Some(waiter) = self.waiters.get(&number).filter(|it| !it.is_counted) else {
            return Ok(());
        };
        self.has_room(&waiter.wanted, &waiter.owner)?;
        if let Some(waiter) = self.waiters.get_mut(&number) {
            waiter.is_counted = true;
            waiter.wanted.person.iter().for_each(|person| self.persons.add(person.clone()));
            self.counted += 1;
        }
        Ok(())
    }

    /// Refuses one more waiter that counts if there are as many as allowed. A job has only the limit of the server: each
    /// of its guards has a session of its own, so `aid` is not `owner`.
    fn has_room(&self, wanted: &Wanted, owner: &Aid) -> Result<()> {
        let Limits { waiters_per_session, waiters_per_person, waiters, .. } = self.limits;
        let is_counted = |number: &u64| self.waiters.get(number).is_some_and(|it| it.is_counted);
        let places = self.owners.get(owner).filter(|_| wanted.aid == *owner).map(|it| &it.places);
        let of_session = places.into_iter().flatten().filter(|(_, number)| is_counted(number));
        let of_person = wanted.person.as_ref().map_or(0, |person| self.persons.of(person));
        let limits = [
            (of_session.count(), waiters_per_session, true),
            (of_person, waiters_per_person.max(waiters_per_session), true),
            (self.counted, waiters, false),
        ];
        match limits.into_iter().find(|(counted, limit, _)| counted >= limit) {
            None => Ok(()),
            Some((_, limit, per_session)) => {
                Err(LockError::TooManyWaiters { key: wanted.key.clone(), limit, per_session })
            }
        }
    }
}

impl Queue {
    /// True for the first waiter, and for a reader with only readers ahead of it.
    pub(super) fn is_next(&self, number: u64) -> bool {
        let is_reader = !self.writers.contains(&number);
        self.waiting.first() == Some(&number)
            || is_reader && self.writers.first().is_none_or(|writer| *writer > number)
    }

    /// True if the known holder is this owner. The owner counts, not the session: each guard has a session of its own,
    /// under which nothing waits.
    pub(super) fn is_held_by(&self, owner: &Aid) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.aid == *owner)
    }
}

impl<H> Waiter<H> {
    pub(super) fn wake(&mut self) {
        self.is_woken = true;
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// From this document on, or from the first one of the collection.
fn from(collection: &str, after: Option<LockKey>) -> (Bound<LockKey>, Bound<LockKey>) {
    let first = || LockKey::new(collection, i64::MIN).map_or(Bound::Unbounded, Bound::Included);
    (after.map_or_else(first, Bound::Excluded), Bound::Unbounded)
}

/// The numbers of waiters that have timed out and may be back at once, with their tickets.
#[derive(Debug, Default)]
struct KeptNumbers {
    of: HashMap<(LockKey, Aid), (u64, Option<Ticket>, Instant)>,
    /// In the order in which they expire.
    expiring: VecDeque<(Instant, (LockKey, Aid))>,
}

impl KeptNumbers {
    fn keep(&mut self, whose: (LockKey, Aid), number: u64, ticket: Option<Ticket>, now: Instant) {
        // Forgets a few expired numbers for each new one, never all at once.
        for _ in 0..4 {
            if self.expiring.front().is_none_or(|(expires_at, _)| *expires_at > now) {
                break;
            }
            let Some((expires_at, whose)) = self.expiring.pop_front() else { break };
            // Otherwise the number was kept again in the meantime.
            if self.of.get(&whose).is_some_and(|kept| kept.2 == expires_at) {
                self.of.remove(&whose);
            }
        }
        self.expiring.push_back((now + KEEP_PLACE, whose.clone()));
        self.of.insert(whose, (number, ticket, now + KEEP_PLACE));
    }

    fn take(&mut self, whose: (LockKey, Aid), now: Instant) -> Option<(u64, Option<Ticket>)> {
        let (number, ticket, expires_at) = self.of.remove(&whose)?;
        (expires_at > now).then_some((number, ticket))
    }
}

#[cfg(test)]
mod tests;
