//! The commands of a fair collection.
//!
//! The first waiter of a server makes an attempt before it draws a ticket: nearly always the lock is free. A claim with a turn,
//! like a handover, writes the place of its server without the waiter that it serves. If the place is out of date
//! because another waiter has left, a separate command sets the place. The first waiter also renews the place once a
//! second; a place that is not renewed expires.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock, TryLockError};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::{
    error::Result,
    key::LockKey,
    manager::{
        claim::Acquired,
        verbs,
        wait::{
            driver::{Driver, ForWaiters, Queues},
            machine::TicketAndPlace,
        },
    },
    random::{self, HashMap},
    store::{self, Place, Waiters},
};

/// How long the place of a server outlives the server.
const LEASE: Duration = Duration::from_secs(5);

/// The documents of fair collections that have waiters, or had waiters a moment ago.
type Documents = Arc<Mutex<HashMap<LockKey, Weak<Commands>>>>;

/// The places of this server in the queues of the store.
#[derive(Debug)]
pub(in crate::manager::wait) struct Places {
    server: Uuid,
    documents: Documents,
}

/// The commands that change the place on one document. This value lives until the last of these commands has ended,
/// which may be after the last waiter has left.
#[derive(Debug)]
pub(in crate::manager::wait) struct Commands {
    key: LockKey,
    documents: Documents,
    /// Claims and handovers run together. Each of them writes all waiters of this server but its own, so the later of
    /// two may bring back a waiter that has left. A command that sets the place runs alone. Otherwise a claim
    /// could remove a waiter that it does not know.
    order: Arc<RwLock<()>>,
    /// True if the place in the store is out of date. A task is about to set it.
    is_stale: AtomicBool,
}

/// A command that takes the turn of a waiter.
#[derive(Debug)]
pub(in crate::manager) struct InTurn {
    pub(in crate::manager) turn: store::Turn,
    pub(in crate::manager) order: Together,
}

/// Until this is dropped, no command sets the place.
#[derive(Debug)]
pub(in crate::manager) struct Together {
    _order: OwnedRwLockReadGuard<()>,
    _commands: Arc<Commands>,
}

type Alone = OwnedRwLockWriteGuard<()>;

impl Drop for Commands {
    fn drop(&mut self) {
        let mut documents = self.documents.lock();
        if documents.get(&self.key).is_some_and(|it| it.strong_count() == 0) {
            documents.remove(&self.key);
        }
    }
}

impl Places {
    pub(in crate::manager::wait) fn new() -> Self {
        Self { server: random::uuid(), documents: Documents::default() }
    }

    /// `None` also if the collection is not fair.
    fn known(&self, key: &LockKey) -> Option<Arc<Commands>> {
        self.documents.lock().get(key)?.upgrade()
    }

    pub(in crate::manager::wait) fn of(&self, key: &LockKey) -> Arc<Commands> {
        let mut documents = self.documents.lock();
        if let Some(commands) = documents.get(key).and_then(Weak::upgrade) {
            return commands;
        }
        let commands = Arc::new(Commands {
            key: key.clone(),
            documents: Arc::clone(&self.documents),
            order: Arc::default(),
            is_stale: AtomicBool::new(false),
        });
        documents.insert(key.clone(), Arc::downgrade(&commands));
        commands
    }

    /// For a handover. `Err` if a command that has to go alone is in the way, `None` if the collection is not fair.
    pub(in crate::manager::wait) fn together_at_once(
        &self,
        key: &LockKey,
    ) -> Result<Option<Together>, TryLockError> {
        let Some(commands) = self.known(key) else { return Ok(None) };
        let _order = Arc::clone(&commands.order).try_read_owned()?;
        Ok(Some(Together { _order, _commands: commands }))
    }

    /// `place` is the place of this server without the waiter that is served.
    pub(in crate::manager::wait) fn in_turn(
        &self,
        (ticket, place): TicketAndPlace,
        order: Together,
    ) -> InTurn {
        InTurn { turn: store::Turn { ticket, others: self.waiters(place) }, order }
    }

    fn waiters(&self, place: Option<Place>) -> Waiters {
        Waiters { server: self.server, place, lease: LEASE }
    }
}

impl Queues {
    /// Has the place of this server set in the background, if the collection is fair: to renew the place, or
    /// because it is out of date, and would keep others waiting until it expires.
    pub(in crate::manager) fn refresh_place(self: &Arc<Self>, key: &LockKey) {
        let Some(commands) = self.places.known(key) else { return };
        if commands.is_stale.swap(true, Relaxed) {
            return;
        }
        let queues = Arc::clone(self);
        self.verbs.runner.spawn(&TaskTracker::new(), async move {
            let alone = Arc::clone(&commands.order).write_owned().await;
            // Perhaps another command has done this already.
            if commands.is_stale.load(Relaxed)
                && let Err(e) = queues.set_place(&commands, alone, queues.until(None)).await
            {
                log::debug!(
                    target: "actix_doclock::manager",
                    "the place for {:?} stays as it is until it expires: {e}", commands.key,
                );
            }
        });
    }

    /// Tells the store which waiters of this server have a ticket, and draws one for those that have none.
    async fn set_place(
        self: &Arc<Self>,
        commands: &Arc<Commands>,
        alone: Alone,
        until: Instant,
    ) -> Result<()> {
        let (queues, commands) = (Arc::clone(self), Arc::clone(commands));
        let set = async move {
            commands.is_stale.store(false, Relaxed);
            let (key, store) = (&commands.key, &queues.verbs.store);
            let (place, up_to) = queues.machine.lock().place_to_set(key);
            let waiters = queues.places.waiters(place);
            let drawn = verbs::retry(until, verbs::FOREGROUND, |until| {
                store.set_place(key, &waiters, until)
            })
            .await?;
            if !queues.machine.lock().was_set(key, (waiters.place, up_to), drawn) {
                queues.refresh_place(key);
            }
            Ok(())
        };
        // A command that comes late is corrected by the next one.
        let set = verbs::with_permit(Some(alone), self.verbs.deadline, set);
        self.verbs.complete("set_place", until, &TaskTracker::new(), set).await
    }
}

impl<M: ForWaiters> Driver<'_, M> {
    /// One attempt of a waiter that has a ticket. `None` if the lock was not granted.
    pub(in crate::manager::wait) async fn ask_in_turn(
        &self,
        commands: &Arc<Commands>,
    ) -> Result<Option<Acquired>> {
        let order = Arc::clone(&commands.order).read_owned();
        let Some(_order) = self.in_time(order).await else { return Ok(None) };
        let order = Together { _order, _commands: Arc::clone(commands) };
        // A waiter that asks out of turn, because its session has the lock, asks as a newcomer.
        let turn = self.queues.machine.lock().turn(self.number);
        self.ask(turn.map(|turn| self.queues.places.in_turn(turn, order))).await
    }

    /// Draws a ticket, which all waiters that have arrived in the meantime share. The first waiter of this server makes
    /// an attempt before that.
    pub(in crate::manager::wait) async fn draw(
        &self,
        commands: &Arc<Commands>,
    ) -> Result<Option<Acquired>> {
        let alone = Arc::clone(&commands.order).write_owned();
        let Some(alone) = self.in_time(alone).await else { return Ok(None) };
        if self.queues.machine.lock().has_ticket(self.number) {
            // Drawn by the command of another waiter.
            return Ok(None);
        }
        let is_first = self.queues.machine.lock().asks_if_first(&self.wanted.key, self.number);
        if is_first && let Some(granted) = self.ask(None).await? {
            return Ok(Some(granted));
        }
        self.queues.set_place(commands, alone, self.queues.until(self.give_up)).await?;
        Ok(None)
    }
}
