//! The background task that ends idle sessions: the "session-timeout listener" of a servlet container,
//! for a cluster.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::{sleep, sleep_until};

use crate::{
    clock,
    error::{Result, StoreError, StoreErrorKind},
    manager::{Core, observe, pauses::Pauses},
    random,
    store::Swept,
};

/// How many sessions are ended at once: few enough that no lock request waits long behind them, and that
/// they need little memory.
const AT_ONCE: usize = 200;
/// The pause before a sweep that has failed in some collection goes on there.
const AGAIN: Duration = Duration::from_millis(200);

impl Core {
    /// Ends all idle sessions, and returns their number.
    pub(in crate::manager) async fn sweep(&self) -> Result<usize> {
        let mut sessions = 0;
        loop {
            let swept = self.sweep_some().await?;
            sessions += swept.sessions;
            if !swept.more {
                return Ok(sessions);
            }
        }
    }

    async fn sweep_some(&self) -> Result<Swept> {
        observe::in_span!("doclock.sweep", None, async {
            let collections = self.collections.names();
            if collections.is_empty() {
                return Ok(Swept::default());
            }
            let (args, began) = ((collections, random::uuid()), clock::now());
            let (until, mut sessions) = (self.verbs.until(), 0);
            let swept = loop {
                let swept = self.verbs.run("sweep", until, args.clone(), |store, args, until| {
                    store.sweep(&args.0, args.1, AT_ONCE, until)
                });
                let mut swept = match swept.await {
                    Ok(swept) => swept,
                    Err(e) => break Err(e),
                };
                self.has_swept(&swept);
                sessions += swept.sessions;
                match swept.failed.take() {
                    None => break Ok(Swept { sessions, ..swept }),
                    Some(e) if is_final(&e) || clock::now() + AGAIN > until => break Err(e.into()),
                    Some(_) => sleep(AGAIN).await,
                }
            };
            self.sweeps.saw(&swept);
            observe::swept(began, &swept, self.sweeps.behind());
            swept
        })
    }

    /// Also after a failure in some collection.
    fn has_swept(&self, swept: &Swept) {
        for (key, token) in &swept.expired {
            let label = self.collections.label(key);
            self.beliefs.losses.count(label, Some(*token), "expired", "reaper");
        }
        if swept.sessions > 0 {
            observe::sessions_expired(swept.sessions as u64);
            log::debug!(
                target: "actix_doclock::background",
                "{} idle sessions have ended", swept.sessions,
            );
        }
        if swept.announcements {
            self.verbs.news.notify_waiters();
        }
    }
}

fn is_final(error: &StoreError) -> bool {
    error.kind() != StoreErrorKind::Unavailable
}

/// Sweeps until the manager is gone.
pub(in crate::manager) async fn run(manager: Weak<Core>, interval: Duration) {
    let mut pauses = Pauses::new("looking for idle sessions", interval);
    while let Some(core) = manager.upgrade() {
        let (all, began) = (Arc::clone(&core.collections), clock::now());
        let pause = match core.sweep_some().await {
            Ok(swept) if swept.more => Duration::ZERO,
            Ok(swept) => {
                // A lock that is granted from now on usually lives for the ttl.
                let soonest = core.settings.ttl.min(swept.next.unwrap_or(Duration::MAX));
                pauses.after_success(Some(soonest.saturating_sub(clock::since(began))))
            }
            Err(e) => pauses.after_failure(&e),
        };
        // Does not keep the manager alive while nothing is due.
        drop(core);
        let mut next = clock::now() + pause;
        loop {
            tokio::select! {
                biased;
                // Types are being registered. A server that does not know all types yet would find a session idle
                // although the session holds locks on other types.
                () = all.new.notified() => next = clock::now() + interval,
                () = sleep_until(next.into()) => break,
            }
        }
    }
}
