//! Renews the sessions that are due, many by one command.
//!
//! A session that is due is renewed at once if there was no round for a while. Sessions that become due during a
//! round, or within half a second of its start, are renewed together in the next round.

use std::{
    collections::HashSet,
    mem,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{
    sync::oneshot::{self, Receiver, Sender},
    time::sleep_until,
};
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    lock::Aid,
    manager::{observe, sessions::Sessions, sessions::pieces::Piece},
    random::HashMap,
    store::{Active, NamedBy},
};

/// The shortest time between the starts of two rounds, unless the ttl is short.
const APART: Duration = Duration::from_millis(500);

/// The sessions that are due. A session is due once in a third of the ttl, so the active sessions bound their
/// number.
#[derive(Debug, Default)]
pub(in crate::manager) struct Renewals(Mutex<Due>);

/// How many tabs and tokens of one session a round names at most. More come from no browser.
const MOST_NAMES: usize = 256;

/// A request of a session that is due.
#[derive(Debug)]
struct DueSession {
    aid: Aid,
    named: Vec<NamedBy>,
    done: Sender<()>,
}

#[derive(Debug, Default)]
struct Due {
    sessions: Vec<DueSession>,
    has_task: bool,
    /// When the next round may begin.
    next: Option<Instant>,
}

impl Renewals {
    /// The sessions of the next round. If there are none, the task ends.
    fn round(&self, ttl: Duration) -> Vec<DueSession> {
        let mut due = self.0.lock();
        due.has_task = !due.sessions.is_empty();
        due.next = Some(clock::now() + APART.min(ttl / 12));
        mem::take(&mut due.sessions)
    }
}

/// A session that is being renewed.
struct BeingRenewed {
    /// In how many collections its locks are not done yet.
    collections: usize,
    /// Dropped when the locks are done in all collections.
    told: Vec<Sender<()>>,
}

/// If the task panics, the next session that is due starts a new one.
struct Task<'a>(&'a Renewals);

impl Drop for Task<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.0.lock().has_task = false;
        }
    }
}

impl Sessions {
    /// Renews this session with the next round. Resolves when that is done or has failed.
    pub(in crate::manager) fn renew_soon(
        self: &Arc<Self>,
        aid: Aid,
        named: Vec<NamedBy>,
    ) -> Receiver<()> {
        let (done, renewed) = oneshot::channel();
        let mut due = self.renewals.0.lock();
        due.sessions.push(DueSession { aid, named, done });
        if !mem::replace(&mut due.has_task, true) {
            let sessions = Arc::clone(self);
            self.verbs.runner.spawn(&TaskTracker::new(), sessions.renew_in_rounds());
        }
        renewed
    }

    async fn renew_in_rounds(self: Arc<Self>) {
        let renewals = &self.renewals;
        let _task = Task(renewals);
        loop {
            let next = renewals.0.lock().next;
            tokio::select! {
                biased;
                // A shutdown waits for the sessions that are due.
                () = self.stop.cancelled() => {}
                () = sleep_until(next.unwrap_or_else(clock::now).into()) => {}
            }
            let due = renewals.round(self.ttl);
            if due.is_empty() {
                return;
            }
            // The next round does not wait for a session with a stuck lock in this one.
            let round = Arc::clone(&self).renew_sessions(due);
            drop(self.verbs.runner.spawn(&TaskTracker::new(), round));
        }
    }

    /// Tells each session when its own locks are done. A round takes no longer than a third of the ttl, so
    /// that there is time for another attempt.
    async fn renew_sessions(self: Arc<Self>, due: Vec<DueSession>) {
        let until = clock::now() + self.ttl / 3;
        let collections = self.collections.names();
        let mut waiting = HashMap::<Aid, BeingRenewed>::default();
        let mut names = HashMap::<Aid, HashSet<NamedBy>>::default();
        for DueSession { aid, named, done } in due {
            let new = || BeingRenewed { collections: collections.len(), told: Vec::new() };
            waiting.entry(aid.clone()).or_insert_with(new).told.push(done);
            names.entry(aid).or_default().extend(named);
        }
        let active = |(aid, named): (Aid, HashSet<NamedBy>)| {
            // With so many tabs, all locks of the session are renewed: rather too many than too few.
            let named = (named.len() <= MOST_NAMES).then(|| named.into_iter().collect());
            Active { aid, named }
        };
        let active: Vec<_> = names.into_iter().map(active).collect();
        let mut pieces = self.renew_in_pieces(collections, &active, self.ttl, until);
        let (mut failed, mut outcome) = (HashSet::new(), Ok(()));
        while let Some(Piece { aids, renewed, .. }) = pieces.recv().await {
            if let Err(e) = renewed {
                failed.extend(aids.iter().cloned());
                outcome = Err(e);
            }
            let is_done = |aid: &Aid| {
                waiting.get_mut(aid).is_some_and(|session| {
                    session.collections -= 1;
                    session.collections == 0
                })
            };
            let done: Vec<_> = aids.into_iter().filter(is_done).collect();
            if let Err(e) = self.look_for_losses(&done, self.verbs.until()).await {
                log::debug!(target: "actix_doclock::manager", "watchers hear of losses later: {e}");
            }
            for aid in done {
                if failed.contains(&aid) {
                    self.seen.activity.forget(&aid);
                }
                waiting.remove(&aid);
            }
        }
        observe::renewed("session", &outcome);
        if let Err(e) = outcome {
            log::warn!(
                target: "actix_doclock::manager",
                "the locks of {} sessions were not all renewed, their next requests try again: {e}",
                failed.len(),
            );
        }
    }
}
