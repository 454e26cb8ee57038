//! Log lines that clients can cause in any number.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
#[cfg(feature = "web")]
use tokio::time::sleep;
#[cfg(feature = "web")]
use tokio_util::sync::CancellationToken;

use crate::clock;
#[cfg(feature = "web")]
use crate::manager::calls::Runner;

/// How often a line of one kind is logged at most.
const EVERY: Duration = Duration::from_secs(10);

/// When a line of each kind was logged last. The code has few kinds.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    logged: Mutex<HashMap<&'static str, Instant>>,
    failed: Arc<Mutex<Failed>>,
}

/// The requests that have failed since the last line about them, because the database is down.
#[derive(Debug, Default)]
struct Failed {
    /// True if a task will write the next line.
    is_counted: bool,
    requests: u64,
    latest: String,
}

impl LogLimit {
    /// Logs a warning, unless one of this kind was logged within the last 10 s.
    pub(crate) fn warn(&self, kind: &'static str, line: impl FnOnce() -> String) {
        let mut logged = self.logged.lock();
        if logged.get(kind).is_none_or(|at| clock::since(*at) >= EVERY) {
            logged.insert(kind, clock::now());
            drop(logged);
            log::warn!(target: "actix_doclock::web", "{}", line());
        }
    }

    /// A request has failed because the database is down. Logs the first one at once, and then one line in 10 s
    /// with their number, until none fails any more.
    #[cfg(feature = "web")]
    pub(super) fn request_failed(&self, line: String, runner: &Runner, stop: CancellationToken) {
        let all = Arc::clone(&self.failed);
        let mut failed = all.lock();
        if failed.is_counted {
            failed.requests += 1;
            failed.latest = line;
            return;
        }
        failed.is_counted = true;
        drop(failed);
        log::error!(target: "actix_doclock::web", "{line}");
        runner.spawn_untracked(async move {
            loop {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => {}
                    () = sleep(EVERY) => {}
                }
                let mut failed = all.lock();
                let (requests, latest) = (failed.requests, std::mem::take(&mut failed.latest));
                failed.requests = 0;
                failed.is_counted = requests > 0 && !stop.is_cancelled();
                let goes_on = failed.is_counted;
                drop(failed);
                if requests > 0 {
                    log::error!(
                        target: "actix_doclock::web",
                        "{requests} more requests have failed within {EVERY:?}, because the database cannot be \
                         reached; the latest: {latest}",
                    );
                }
                if !goes_on {
                    return;
                }
            }
        });
    }
}
