//! The waiters of a document in a fair collection, as the store knows them.
//!
//! Each waiter has a ticket, and the waiter with the lowest ticket of all servers is next. Waiters that
//! arrive while a command is under way share the next ticket, so nobody has a lower ticket than an earlier
//! arrival. The store keeps one place for each server: the tickets of its first waiter, of its first writer
//! and of its last waiter. A handover costs the same however long the queue is.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

use crate::{
    key::LockKey,
    lock::{Aid, Holder},
    manager::wait::queue::{Queue, Queues, State},
    store::{Place, Ticket, Turn, Waiters},
};

/// How long the place of a server outlives the server. The first waiter renews it once a second.
const LEASE: Duration = Duration::from_secs(5);
/// From this number on, lines without a queue are forgotten.
const MANY_LINES: usize = 64;

/// The order of the commands by which this server changes its place on one document. It outlives the
/// queue of the document until the last of these commands has ended.
#[derive(Debug, Default)]
pub(in crate::manager) struct Line {
    /// Claims and handovers go together. Each writes all waiters of this server but its own, so that of
    /// two, the later one may bring back a waiter that has left. A command that sets the place goes alone.
    /// Otherwise a claim could remove a waiter that it does not know.
    order: Arc<RwLock<()>>,
    /// The place in the store is not what it should be.
    is_stale: AtomicBool,
    /// A task waits to set the place.
    is_awaited: AtomicBool,
}

/// Until this is dropped, no command sets the place.
pub(in crate::manager) type Together = OwnedRwLockReadGuard<()>;
/// Until this is dropped, no other command changes the place.
pub(in crate::manager) type Alone = OwnedRwLockWriteGuard<()>;

/// A command that takes the turn of a waiter.
#[derive(Debug)]
pub(in crate::manager) struct InLine {
    pub(in crate::manager) turn: Turn,
    pub(in crate::manager) line: Arc<Line>,
    pub(in crate::manager) order: Together,
}

/// What a waiter of a fair collection has in addition.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) holder: Holder,
    pub(super) ticket: Option<Ticket>,
    /// What the place becomes if its last claim or handover succeeds.
    leaves: Option<Tickets>,
}

/// By which waiters a server keeps others waiting.
type Tickets = Option<(Ticket, Option<Ticket>, Aid)>;

impl Line {
    pub(in crate::manager) async fn together(&self) -> Together {
        Arc::clone(&self.order).read_owned().await
    }

    /// As [`together`](Self::together), unless a command has to go alone.
    pub(super) fn together_at_once(&self) -> Option<Together> {
        Arc::clone(&self.order).try_read_owned().ok()
    }

    pub(in crate::manager) async fn alone(&self) -> Alone {
        Arc::clone(&self.order).write_owned().await
    }

    pub(in crate::manager) fn is_stale(&self) -> bool {
        self.is_stale.load(Relaxed)
    }

    pub(in crate::manager) fn set_stale(&self, is_stale: bool) {
        self.is_stale.store(is_stale, Relaxed);
    }

    /// Returns whether this was so before.
    pub(in crate::manager) fn set_awaited(&self, is_awaited: bool) -> bool {
        self.is_awaited.swap(is_awaited, Relaxed)
    }
}

impl Queued {
    pub(super) fn new(holder: Holder) -> Self {
        Self { holder, ticket: None, leaves: None }
    }
}

impl Queues {
    /// The place as it should be, with [`Ticket::NEW`] for waiters that have no ticket, and the number of
    /// the last waiter.
    pub(in crate::manager) fn waiters(&self, key: &LockKey) -> (Waiters, u64) {
        let state = self.state();
        let queue = state.queues.get(key);
        let last = queue.and_then(|it| it.waiting.last_key_value());
        let lacks_ticket = last.is_some_and(|(_, waiter)| waiter.ticket().is_none());
        let place = queue.and_then(|it| it.place(None, lacks_ticket.then_some(Ticket::NEW)));
        (state.waiters(place), last.map_or(0, |(number, _)| *number))
    }

    /// The store has this place now. `drawn` is the ticket of all waiters up to this number that have none.
    /// Returns whether the place is still what it should be.
    pub(in crate::manager) fn was_set(
        &self,
        key: &LockKey,
        (waiters, up_to): (Waiters, u64),
        drawn: Option<Ticket>,
    ) -> bool {
        let mut state = self.state();
        let mut queue = state.queues.get_mut(key);
        if let (Some(drawn), Some(queue)) = (drawn, queue.as_mut()) {
            queue.last = queue.last.max(Some(drawn));
            let mut newcomers = queue.waiting.range_mut(..=up_to).rev();
            while let Some((_, waiter)) = newcomers.next()
                && let Some(queued) = waiter.queued.as_mut().filter(|it| it.ticket.is_none())
            {
                queued.ticket = Some(drawn);
            }
        }
        let set = waiters.place.map(|place| place.with(drawn.unwrap_or(Ticket::NEW)));
        tickets(set.as_ref()) == queue.and_then(|queue| queue.tickets())
    }
}

impl State {
    /// The line of a document, which a command of an earlier queue may still be in.
    pub(super) fn line(&mut self, key: &LockKey) -> Arc<Line> {
        if let Some(line) = self.lines.get(key).and_then(Weak::upgrade) {
            return line;
        }
        if self.lines.len() >= 2 * self.queues.len() + MANY_LINES {
            self.lines.retain(|_, line| line.strong_count() > 0);
        }
        let line = Arc::default();
        self.lines.insert(key.clone(), Arc::downgrade(&line));
        line
    }

    pub(super) fn waiters(&self, place: Option<Place>) -> Waiters {
        Waiters { server: self.server, place, lease: LEASE }
    }

    /// The turn of a waiter that has a ticket, and no waiter of this server in its way.
    pub(super) fn turn(&mut self, key: &LockKey, number: u64) -> Option<Turn> {
        let queue = self.queues.get_mut(key)?;
        let (is_next, place) = (queue.is_next(number), queue.place(Some(number), None));
        let queued = queue.waiting.get_mut(&number)?.queued.as_mut()?;
        let ticket = queued.ticket.filter(|_| is_next);
        queued.leaves = ticket.map(|_| tickets(place.as_ref()));
        let ticket = ticket?;
        Some(Turn { ticket, others: self.waiters(place) })
    }

    /// This waiter has left the queue, in which `before` were the tickets. `granted` by its last claim.
    pub(super) fn left(
        &self,
        key: &LockKey,
        gone: Option<&Queued>,
        before: Tickets,
        granted: bool,
        line: &Line,
    ) {
        let now = self.queues.get(key).and_then(Queue::tickets);
        let stored = match gone {
            Some(queued) if granted => queued.leaves.clone().unwrap_or(before),
            _ => before,
        };
        if stored != now {
            line.set_stale(true);
        }
    }
}

impl Queue {
    /// The place of this server, without one of the waiters. A waiter without a ticket counts as one
    /// with the ticket `new`.
    fn place(&self, without: Option<u64>, new: Option<Ticket>) -> Option<Place> {
        let ticket = |number| self.waiting.get(number)?.ticket().or(new);
        let stays = |number: &&u64| Some(**number) != without;
        let number = self.waiting.keys().find(stays)?;
        let (first, waiter) = (ticket(number)?, self.waiting.get(number)?);
        Some(Place {
            first,
            writer: self.writers.iter().find(stays).and_then(ticket),
            last: new.or(self.last)?,
            aid: waiter.aid.clone(),
            holder: waiter.queued.as_ref()?.holder.clone(),
            mode: waiter.mode,
        })
    }

    pub(super) fn tickets(&self) -> Tickets {
        tickets(self.place(None, None).as_ref())
    }
}

fn tickets(place: Option<&Place>) -> Tickets {
    place.map(|place| (place.first, place.writer, place.aid.clone()))
}
