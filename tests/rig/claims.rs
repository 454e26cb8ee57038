//! Claims of locks, as the manager makes them.

use std::time::Duration;

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, Holder, LockKey, LockToken, Mode, MongoStore,
    store::{Claim, Place, Ticket, Turn, Waiters},
};
use uuid::Uuid;

use super::app::TTL;

pub(crate) const LEASE: Duration = Duration::from_secs(60);

pub(crate) fn claim(mode: Mode) -> Claim {
    Claim {
        aid: Aid::new(),
        token: LockToken::new(),
        holder: Holder::new("alice"),
        mode,
        ttl: TTL,
        tab: None,
        page: None,
        taken: None,
        max_hold: None,
        turn: None,
        upgrades: None,
    }
}

/// The waiters of a server: one, with this ticket.
pub(crate) fn one_waiter(claim: &Claim, first: Ticket) -> Waiters {
    let Claim { aid, holder, mode, .. } = claim.clone();
    let writer = (mode == Mode::Exclusive).then_some(first);
    let place = Place { first, writer, last: first, aid, holder, mode };
    Waiters { server: Uuid::new_v4(), place: Some(place), lease: LEASE }
}

/// The claim of a waiter with a ticket, alone at its server. In a collection that is
/// not fair, a mere claim.
pub(crate) async fn queues(store: &MongoStore, key: &LockKey, mode: Mode) -> Claim {
    let claim = claim(mode);
    let waiter = one_waiter(&claim, Ticket::NEW);
    let drawn = store.set_place(key, &waiter, Deadline::NONE).await.unwrap();
    let others = Waiters { place: None, ..waiter };
    let ticket = drawn.unwrap_or(Ticket::NEW);
    Claim { turn: Some(Turn { ticket, others }), ..claim }
}
