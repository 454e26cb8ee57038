//! The queue of a document in a [fair](crate::store::Rules::fair) collection: tickets, and the places of servers.

use std::time::Duration;

use uuid::Uuid;

use crate::lock::{Aid, Holder, Mode};

/// A number in the queue of a document in a [fair](crate::store::Rules::fair) collection: the waiter with the lowest
/// ticket is next. All waiters of a server that arrive while one command is under way share the next
/// ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

impl Ticket {
    /// The ticket of a waiter that has drawn none yet. The store replaces it by the ticket that the store draws.
    pub const NEW: Self = Self(u64::MAX);
}

/// The turn of a waiter. The waiter may take the lock if no other server has a waiter with a lower ticket in the way.
/// The waiter's own server is never in the way: that server keeps the order of its own waiters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// The ticket of the waiter.
    pub ticket: Ticket,
    /// The server and its other waiters, which make up its place once the claim is granted.
    pub others: Waiters,
}

/// The place of one server in the queue of a document, however many waiters the server has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiters {
    /// The server.
    pub server: Uuid,
    /// `None` if no waiter of the server has a ticket.
    pub place: Option<Place>,
    /// How long the place outlives this command.
    pub lease: Duration,
}

/// The waiters of one server that have a ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The lowest ticket.
    pub first: Ticket,
    /// The lowest ticket of the waiters that want the exclusive lock.
    pub writer: Option<Ticket>,
    /// The last ticket that was drawn for these waiters.
    pub last: Ticket,
    /// The session of the first waiter.
    pub aid: Aid,
    /// The first waiter as others see it.
    pub holder: Holder,
    /// The mode that the first waiter wants.
    pub mode: Mode,
}

impl Place {
    /// The place with `drawn` wherever it has [`Ticket::NEW`].
    #[doc(hidden)]
    pub fn with(mut self, drawn: Ticket) -> Self {
        let all = [Some(&mut self.first), self.writer.as_mut(), Some(&mut self.last)];
        all.into_iter().flatten().filter(|it| **it == Ticket::NEW).for_each(|it| *it = drawn);
        self
    }
}
