//! Renews the sessions that are due, many by one command.
//!
//! A session that is due is renewed at once if there was no round for a while. Those that become due during
//! a round, and for half a second from its begin, are renewed together in the next one.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use tokio::{
    sync::oneshot::{self, Receiver, Sender},
    time::sleep_until,
};
use tokio_util::task::TaskTracker;

use crate::{clock, lock::Aid, manager::LockManager};

/// How many sessions or guards one command renews.
pub(in crate::manager) const AT_ONCE: usize = 1_000;
/// How many such commands may be under way at once for a collection, so that connections are left for
/// requests.
pub(in crate::manager) const COMMANDS: usize = 4;
/// How long after the begin of a round the next one begins at the earliest, unless the ttl is short.
const APART: Duration = Duration::from_millis(500);

/// The sessions that are due. A session is due once in a third of the ttl, so the active sessions bound their
/// number.
#[derive(Debug, Default)]
pub(in crate::manager) struct Renewals(Mutex<Due>);

#[derive(Debug, Default)]
struct Due {
    sessions: Vec<(Aid, Sender<()>)>,
    has_task: bool,
    /// When the next round may begin.
    next: Option<Instant>,
}

impl Renewals {
    fn due(&self) -> MutexGuard<'_, Due> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sessions of the next round. If there are none, the task ends.
    fn round(&self, ttl: Duration) -> Vec<(Aid, Sender<()>)> {
        let mut due = self.due();
        due.has_task = !due.sessions.is_empty();
        due.next = Some(clock::now() + APART.min(ttl / 12));
        mem::take(&mut due.sessions)
    }
}

/// If the task panics, the next session that is due starts a new one.
struct Task<'a>(&'a Renewals);

impl Drop for Task<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.due().has_task = false;
        }
    }
}

impl LockManager {
    /// Renews this session with the next round. Resolves when that is done or has failed.
    pub(in crate::manager) fn renew_soon(&self, aid: Aid) -> Receiver<()> {
        let (done, renewed) = oneshot::channel();
        let mut due = self.inner.renewals.due();
        due.sessions.push((aid, done));
        if !mem::replace(&mut due.has_task, true) {
            let manager = self.clone();
            self.inner.runner.spawn(&TaskTracker::new(), manager.renew_in_rounds());
        }
        renewed
    }

    async fn renew_in_rounds(self) {
        let renewals = &self.inner.renewals;
        let _task = Task(renewals);
        loop {
            let next = renewals.due().next;
            tokio::select! {
                biased;
                // A shutdown waits for the sessions that are due.
                () = self.inner.stop.0.cancelled() => {}
                () = sleep_until(next.unwrap_or_else(clock::now).into()) => {}
            }
            let due = renewals.round(self.ttl());
            if due.is_empty() {
                return;
            }
            let (aids, done): (Vec<_>, Vec<_>) = due.into_iter().unzip();
            for some in aids.chunks(AT_ONCE * COMMANDS) {
                join_all(some.chunks(AT_ONCE).map(|piece| self.renew_due(piece))).await;
            }
            drop(done);
        }
    }

    /// A round that fails takes no longer than a third of the ttl, so that there is time for another one.
    async fn renew_due(&self, aids: &[Aid]) {
        let until = clock::now() + self.deadline().min(self.ttl() / 3);
        let aids = Arc::<[Aid]>::from(aids);
        if let Err(e) = self.renew_all_of(&aids, until).await {
            aids.iter().for_each(|aid| self.inner.activity.forget(aid));
            log::warn!(
                target: "actix_doclock::manager",
                "the locks of {} sessions were not renewed, their next requests try again: {e}",
                aids.len(),
            );
        }
        if let Err(e) = self.look_for_losses(&aids, until).await {
            log::debug!(target: "actix_doclock::manager", "watchers hear of losses later: {e}");
        }
    }
}
