//! A waiter of this process, and what it does at the moment.
//!
//! ```text
//!              news, and its turn
//!   Waiting ───────────────────────▶ Asking the store ── granted ──▶ leaves
//!     ▲ │  ▲                              │
//!     │ │  └────────── refused ───────────┘
//!     │ │
//!     │ └── a release hands the lock over to it ──▶ Heir ── given ──▶ leaves
//!     └───────────── the handover has failed ─────────┘
//! ```
//!
//! News calls a waiter in every phase: the waiter asks the store as soon as it has its turn. A waiter that
//! is part of a circle of waiters is refused: it leaves when it waits, not while it asks or inherits.

use std::sync::Arc;

use tokio::sync::{Notify, oneshot::Sender};
use tokio_util::task::TaskTracker;

use crate::{
    actor::Person,
    lock::{Aid, Mode},
    manager::{
        claim::{Acquired, Wanted},
        wait::queue::{
            deadlock::Edge,
            line::{InLine, Queued},
        },
    },
    store::Ticket,
};

#[derive(Debug)]
pub(in crate::manager) struct Waiter {
    pub(in crate::manager) owner: Aid,
    /// The session that asks the store. A guard has a session of its own.
    pub(super) aid: Aid,
    /// Whose waiters are limited together.
    pub(super) person: Option<Person>,
    pub(in crate::manager) mode: Mode,
    /// It counts towards the limits: another waiter is ahead of it, or the store has refused it. Before
    /// that, it costs no more than a caller that does not want to wait.
    pub(super) is_counted: bool,
    phase: Phase,
    /// It asks the store as soon as it has its turn.
    pub(super) is_called: bool,
    /// How to hand the lock over to it, until a handover begins.
    pub(super) heir: Option<Heir>,
    /// In a fair collection.
    pub(super) queued: Option<Queued>,
    /// The circle that it is part of. It is about to leave, so it counts as waiting for nobody.
    pub(in crate::manager) deadlock: Option<Vec<Edge>>,
    wakes: Arc<Notify>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting,
    /// Its own request is under way. A handover at the same time would lead to two grants of one lock,
    /// and giving back the second grant would leave the first one behind.
    Asking,
    /// A handover to it has begun.
    Heir,
}

/// How to hand the lock over to a waiter. If this is dropped without a gift, the waiter asks the store.
#[derive(Debug)]
pub(in crate::manager) struct Heir {
    pub(in crate::manager) wanted: Wanted,
    pub(in crate::manager) scope: TaskTracker,
    pub(super) gift: Sender<Acquired>,
    /// In a fair collection.
    pub(in crate::manager) in_line: Option<InLine>,
}

impl Heir {
    /// If the waiter has left in the meantime, the lock is given back.
    pub(in crate::manager) fn give(self, gift: Acquired) {
        drop(self.gift.send(gift));
    }
}

impl Waiter {
    pub(super) fn new(
        owner: &Aid,
        wanted: &Wanted,
        heir: Heir,
        queued: Option<Queued>,
        wakes: Arc<Notify>,
    ) -> Self {
        Self {
            owner: owner.clone(),
            aid: wanted.aid.clone(),
            person: wanted.person.clone(),
            mode: wanted.mode,
            is_counted: false,
            phase: Phase::Waiting,
            is_called: false,
            heir: Some(heir),
            queued,
            deadlock: None,
            wakes,
        }
    }

    /// In a fair collection.
    pub(super) fn ticket(&self) -> Option<Ticket> {
        self.queued.as_ref()?.ticket
    }

    /// News has come.
    pub(super) fn call(&mut self) {
        self.is_called = true;
        self.wake();
    }

    pub(super) fn wake(&self) {
        self.wakes.notify_one();
    }

    /// Asks the store.
    pub(super) fn asks(&mut self) {
        self.is_called = false;
        self.phase = Phase::Asking;
    }

    /// The answer of the store has come. Returns whether the waiter is free to do something else.
    pub(super) fn was_answered(&mut self) -> bool {
        if self.phase == Phase::Asking {
            self.phase = Phase::Waiting;
        }
        self.phase == Phase::Waiting
    }

    /// It does not ask, and no handover to it has begun.
    pub(super) fn can_inherit(&self) -> bool {
        self.phase == Phase::Waiting && self.heir.is_some()
    }

    /// Begins a handover to this waiter.
    pub(super) fn inherits(&mut self) -> Option<Heir> {
        let heir = self.heir.take()?;
        self.phase = Phase::Heir;
        self.is_called = false;
        Some(heir)
    }

    /// The handover to this waiter has failed.
    pub(super) fn was_not_given(&mut self) {
        self.phase = Phase::Waiting;
        self.is_called = true;
    }

    /// Has the waiter ask once more, if it was called for this attempt.
    pub(super) fn asks_again(&mut self) {
        self.is_called |= self.phase == Phase::Asking;
    }

    pub(super) fn refuse(&mut self, circle: Vec<Edge>) {
        self.deadlock = Some(circle);
        self.wake();
    }
}
