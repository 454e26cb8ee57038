//! Renews the sessions that are due, many by one command.
//!
//! A session that is due is renewed at once if there was no round for a while. Sessions that become due during a
//! round, or within half a second of its start, are renewed together in the next round.

use std::{
    collections::HashSet,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::StreamExt;
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
    /// The sessions of the next round. The first of them has started its task.
    sessions: Vec<DueSession>,
    /// When the round after that may begin.
    next: Option<Instant>,
}

/// A session that is being renewed.
#[derive(Default)]
struct BeingRenewed {
    named: HashSet<NamedBy>,
    /// In how many collections its locks are not done yet.
    collections: usize,
    has_failed: bool,
    /// Dropped when the locks are done in all collections.
    callers: Vec<Sender<()>>,
}

impl BeingRenewed {
    fn active(&self, aid: &Aid) -> Active {
        // With so many tabs, all locks of the session are renewed: rather too many than too few.
        let names = (self.named.len() <= MOST_NAMES).then_some(&self.named);
        Active { aid: aid.clone(), named: names.map(|named| named.iter().copied().collect()) }
    }
}

impl Sessions {
    /// Renews this session with the next round, which the first session that is due begins. Resolves when that is done or
    /// has failed.
    pub(in crate::manager) fn renew_soon(
        self: &Arc<Self>,
        aid: Aid,
        named: Vec<NamedBy>,
    ) -> Receiver<()> {
        let (done, renewed) = oneshot::channel();
        let mut due = self.renewals.0.lock();
        due.sessions.push(DueSession { aid, named, done });
        if due.sessions.len() == 1 {
            let now = clock::now();
            let begins = due.next.map_or(now, |next| next.max(now));
            due.next = Some(begins + APART.min(self.ttl / 12));
            let round = Arc::clone(self).renew_due(begins);
            // No scope of a caller waits for it.
            drop(self.verbs.runner.spawn(&TaskTracker::new(), round));
        }
        renewed
    }

    /// One round. The next one does not wait for a session with a stuck lock in this one.
    async fn renew_due(self: Arc<Self>, begins: Instant) {
        tokio::select! {
            biased;
            // A shutdown waits for the sessions that are due.
            () = self.stop.cancelled() => {}
            () = sleep_until(begins.into()) => {}
        }
        let due = mem::take(&mut self.renewals.0.lock().sessions);
        self.renew_sessions(due).await;
    }

    /// Tells each session when its own locks are done. A round takes no longer than a third of the ttl, so
    /// that there is time for another attempt.
    async fn renew_sessions(self: &Arc<Self>, due: Vec<DueSession>) {
        let until = clock::now() + self.ttl / 3;
        let collections = self.collections.names();
        let mut waiting = HashMap::<Aid, BeingRenewed>::default();
        for DueSession { aid, named, done } in due {
            let session = waiting.entry(aid).or_default();
            session.collections = collections.len();
            session.named.extend(named);
            session.callers.push(done);
        }
        let active: Vec<_> = waiting.iter().map(|(aid, it)| it.active(aid)).collect();
        let due = collections.into_iter().map(|name| (name.to_owned(), active.clone())).collect();
        let mut pieces = self.renew_in_pieces(due, self.ttl, until);
        let (mut failed, mut outcome) = (0, Ok(()));
        while let Some(Piece { aids, renewed, .. }) = pieces.next().await {
            for aid in aids {
                let Some(session) = waiting.get_mut(&aid) else { continue };
                session.collections -= 1;
                session.has_failed |= renewed.is_err();
                if session.collections > 0 {
                    continue;
                }
                if session.has_failed {
                    failed += 1;
                    self.beliefs.activity.forget(&aid);
                }
                waiting.remove(&aid);
            }
            outcome = renewed.map(drop).and(outcome);
        }
        observe::renewed("session", &outcome);
        if let Err(e) = outcome {
            log::warn!(
                target: "actix_doclock::manager",
                "the locks of {failed} sessions were not all renewed, their next requests try again: {e}",
            );
        }
    }
}
