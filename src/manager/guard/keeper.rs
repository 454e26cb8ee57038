//! Renews the guards of this process: one task for each ttl, and one command for each collection and
//! interval, for any number of guards.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use futures_util::StreamExt;
use tokio::time::sleep_until;

use crate::{
    clock,
    error::Result,
    lock::Aid,
    manager::{Core, claim::Wanted, observe, pauses::jittered},
    store::{Acquisition, Active},
};

/// The longest pause before a failed renewal is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

impl Core {
    /// From now on the watched lock is renewed, and its waiters wait for `owner`.
    pub(in crate::manager) fn keep(
        self: &Arc<Self>,
        wanted: &Wanted,
        held: &Acquisition,
        owner: &Aid,
    ) {
        let ttl = wanted.ttl;
        let (is_new, needs_task) = self.beliefs.watched.guard_taken(held.token, ttl);
        if needs_task {
            let first = clock::now() + ttl / 3;
            // Starts again at once after a panic: leases may be about to expire.
            self.supervise("renewal of guards", |_| {}, move |core| run(core, ttl, first));
        }
        if is_new {
            observe::guard(self.collections.label(&held.key), true);
        }
        self.beliefs.queues.machine.lock().guard_taken(held, owner);
    }

    /// Renews these guards, even if some fail. A collection that does not answer does not delay the others.
    async fn renew_guards(&self, due: BTreeMap<String, Vec<Active>>, ttl: Duration) -> Result<()> {
        let mut pieces = self.sessions.renew_in_pieces(due, ttl, clock::now() + ttl / 3);
        let mut all = Ok(());
        while let Some(piece) = pieces.next().await {
            all = all.and(piece.renewed.map(drop));
        }
        observe::renewed("guards", &all);
        all
    }
}

/// Renews the guards with this ttl until there are none, or until the manager is gone.
async fn run(manager: Weak<Core>, ttl: Duration, first: Instant) {
    let mut next = first;
    let Some(mut standstills) = manager.upgrade().map(|core| core.beliefs.time.standstills())
    else {
        return;
    };
    loop {
        tokio::select! {
            () = sleep_until(next.into()) => {}
            // The leases are shorter than this process believes. (An error: the manager is gone.)
            _ = standstills.changed() => {}
        }
        let Some(core) = manager.upgrade() else { return };
        let due = core.beliefs.watched.guards_of(ttl);
        if due.is_empty() {
            return;
        }
        let began = clock::now();
        next = match core.renew_guards(due, ttl).await {
            Ok(()) => began + ttl / 3,
            Err(e) => {
                let pause = jittered((ttl / 12).min(LONGEST_PAUSE));
                log::warn!(
                    target: "actix_doclock::background",
                    "guards were not renewed, trying again in {pause:?}: {e}",
                );
                clock::now() + pause
            }
        };
    }
}
