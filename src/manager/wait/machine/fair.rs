//! Waiting in a fair collection: one order for the waiters of all servers.
//!
//! Each waiter has a ticket, and the waiter with the lowest ticket of all servers is next. The store draws the
//! tickets. It keeps one *place* for each server, however long the queue is: the tickets of its first waiter, of
//! its first writer and of its last waiter. Waiters that arrive while a command is under way share the next
//! ticket, so nobody has a lower ticket than an earlier arrival.

use crate::{
    key::LockKey,
    manager::wait::machine::{Machine, Queue, TicketAndPlace, Tickets},
    store::{Place, Ticket},
};

fn tickets(place: Option<&Place>) -> Tickets {
    place.map(|place| (place.first, place.writer, place.aid.clone()))
}

impl<H> Machine<H> {
    pub(in crate::manager::wait) fn tickets(&self, queue: &Queue) -> Tickets {
        tickets(self.place(queue, None, None).as_ref())
    }

    /// The place of this server, without one of the waiters. A waiter without a ticket counts as one with the
    /// ticket `new`.
    fn place(&self, queue: &Queue, without: Option<u64>, new: Option<Ticket>) -> Option<Place> {
        let stays = |number: &&u64| Some(**number) != without;
        let ticket = |number| self.waiters.get(number)?.ticket.or(new);
        let first = queue.waiting.iter().find(stays)?;
        let wanted = &self.waiters.get(first)?.wanted;
        Some(Place {
            first: ticket(first)?,
            writer: queue.writers.iter().find(stays).and_then(ticket),
            last: new.or(queue.last_ticket)?,
            aid: wanted.aid.clone(),
            holder: wanted.holder.clone(),
            mode: wanted.mode,
        })
    }

    /// The turn of this waiter, if it has a ticket and no waiter of this server is in its way.
    pub(in crate::manager::wait) fn turn(&mut self, number: u64) -> Option<TicketAndPlace> {
        let waiter = self.waiters.get(&number)?;
        let queue = self.queues.get(&waiter.wanted.key)?;
        let ticket = waiter.ticket.filter(|_| queue.is_next(number));
        let place = self.place(queue, Some(number), None);
        self.waiters.get_mut(&number)?.leaves = ticket.map(|_| tickets(place.as_ref()));
        Some((ticket?, place))
    }

    pub(in crate::manager::wait) fn has_ticket(&self, number: u64) -> bool {
        self.waiters.get(&number).is_none_or(|waiter| waiter.ticket.is_some())
    }

    /// If this waiter is the first, its claim is sent now.
    pub(in crate::manager::wait) fn asks_if_first(&mut self, key: &LockKey, number: u64) -> bool {
        let is_first = self.first(key) == Some(number);
        if is_first {
            self.asks(number);
        }
        is_first
    }

    /// The place of this server as it should be, with [`Ticket::NEW`] for waiters without a ticket, and the number
    /// of the last waiter.
    pub(in crate::manager::wait) fn place_to_set(&self, key: &LockKey) -> (Option<Place>, u64) {
        let Some(queue) = self.queues.get(key) else { return (None, 0) };
        let last = queue.waiting.last().copied().unwrap_or(0);
        let new = (!self.has_ticket(last)).then_some(Ticket::NEW);
        (self.place(queue, None, new), last)
    }

    /// The store has this place now. `drawn` is the ticket of all waiters up to this number that have none. True if
    /// the place is up to date.
    pub(in crate::manager::wait) fn was_set(
        &mut self,
        key: &LockKey,
        (place, up_to): (Option<Place>, u64),
        drawn: Option<Ticket>,
    ) -> bool {
        let set = tickets(place.map(|it| it.with(drawn.unwrap_or(Ticket::NEW))).as_ref());
        let Some(queue) = self.queues.get_mut(key) else { return set.is_none() };
        if drawn.is_some() {
            queue.last_ticket = queue.last_ticket.max(drawn);
            for number in queue.waiting.range(..=up_to).rev() {
                match self.waiters.get_mut(number) {
                    Some(waiter) if waiter.ticket.is_none() => waiter.ticket = drawn,
                    _ => break,
                }
            }
            // Nobody holds the lock, and no news will come.
            if queue.holder.as_ref().is_none_or(|holder| holder.token.is_none()) {
                self.call_first(key);
            }
        }
        set == self.queues.get(key).and_then(|queue| self.tickets(queue))
    }
}
