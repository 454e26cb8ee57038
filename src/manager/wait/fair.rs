//! Waiting in a fair collection: tickets, and the place of this server in the store's queue.

use std::{sync::Arc, time::Instant};

use tokio_util::task::TaskTracker;

use crate::{
    error::LockError,
    key::LockKey,
    manager::{
        LockManager,
        claim::Acquired,
        task,
        wait::{
            Caller,
            queue::{
                Place,
                line::{Alone, InLine, Line},
            },
        },
    },
};

/// Brings the place of this server up to date once a waiter has left.
#[derive(Debug)]
pub(super) struct Leaving<'a> {
    pub(super) manager: &'a LockManager,
    pub(super) key: &'a LockKey,
    /// `None` if the collection is not fair.
    pub(super) line: Option<Arc<Line>>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if let Some(line) = self.line.take().filter(|line| line.is_stale()) {
            self.manager.set_place_in_background(self.key, &line);
        }
    }
}

impl LockManager {
    /// One attempt in a fair collection, for which the waiter may need a ticket. `None` if the lock was not
    /// granted.
    pub(super) async fn asks_in_line(
        &self,
        caller: &Caller<'_>,
        place: &Place,
        line: Arc<Line>,
    ) -> Result<Option<Acquired>, LockError> {
        if !place.has_ticket() {
            return self.arrives(caller, place, &line).await;
        }
        let Some(order) = caller.in_time(line.together()).await else { return Ok(None) };
        // A waiter that asks out of turn, because its session has the lock, asks as a newcomer.
        let in_line = place.turn().map(|turn| InLine { turn, line, order });
        self.asks(caller, place, in_line).await
    }

    /// The first waiter of this server makes an attempt before it draws a ticket: nearly always the lock is
    /// free. All others that have arrived in the meantime share its ticket.
    async fn arrives(
        &self,
        caller: &Caller<'_>,
        place: &Place,
        line: &Arc<Line>,
    ) -> Result<Option<Acquired>, LockError> {
        let Some(alone) = caller.in_time(line.alone()).await else { return Ok(None) };
        if place.has_ticket() {
            // The command of another waiter has drawn it. If this waiter was called, it asks with its ticket.
            place.ask_again();
            return Ok(None);
        }
        // Its own server may keep it out.
        let is_stale = line.is_stale();
        if !is_stale
            && place.asks_if_first()
            && let Some(granted) = self.asks(caller, place, None).await?
        {
            return Ok(Some(granted));
        }
        let until = self.until_at_most(caller.give_up);
        self.set_place(&caller.wanted.key, line, alone, until).await?;
        // Nobody holds the lock, and no news will come.
        let is_free = || place.holder().is_none_or(|holder| holder.token.is_none());
        if place.has_ticket() && is_free() {
            place.ask();
        }
        Ok(None)
    }

    /// Tells the store which waiters of this server have a ticket, and draws one for those that have none.
    async fn set_place(
        &self,
        key: &LockKey,
        line: &Arc<Line>,
        alone: Alone,
        until: Instant,
    ) -> Result<(), LockError> {
        let (manager, key, line) = (self.clone(), key.clone(), Arc::clone(line));
        let set = async move {
            line.set_stale(false);
            let (waiters, up_to) = manager.inner.queues.waiters(&key);
            let set = task::retry(until, task::FOREGROUND, || {
                manager.inner.store.set_place(&key, &waiters)
            });
            let drawn = set.await.inspect_err(|_| line.set_stale(true))?;
            if !manager.inner.queues.was_set(&key, (waiters, up_to), drawn) {
                line.set_stale(true);
            }
            if line.is_stale() {
                manager.set_place_in_background(&key, &line);
            }
            Ok(())
        };
        // A command that comes late is corrected by the next one.
        let set = task::with_permit(Some(alone), self.deadline(), set);
        let set = self.inner.runner.spawn(&TaskTracker::new(), set);
        Ok(task::answer("set_place", until, set).await?)
    }

    /// Renews the place in the store, or corrects it. A place that is not renewed expires, and an outdated
    /// place keeps others waiting until then.
    pub(in crate::manager) fn set_place_in_background(&self, key: &LockKey, line: &Arc<Line>) {
        line.set_stale(true);
        if line.set_awaited(true) {
            return;
        }
        let (manager, key, line) = (self.clone(), key.clone(), Arc::clone(line));
        self.inner.runner.spawn(&TaskTracker::new(), async move {
            let alone = line.alone().await;
            line.set_awaited(false);
            // Perhaps another command has done this already.
            if line.is_stale()
                && let Err(e) = manager.set_place(&key, &line, alone, manager.until()).await
            {
                log::debug!(
                    target: "actix_doclock::manager",
                    "the place for {key:?} stays as it is until it expires: {e}",
                );
            }
        });
    }
}
