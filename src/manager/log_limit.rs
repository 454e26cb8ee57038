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
use crate::manager::verbs::Runner;

/// How often a line of one kind is logged at most.
const EVERY: Duration = Duration::from_secs(10);
/// How many different failures a line about several requests names.
#[cfg(feature = "web")]
const MOST_NAMED: usize = 10;

/// When a line of each kind was logged last. The code has few kinds.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    logged: Mutex<HashMap<&'static str, Instant>>,
    /// For each reason for which a task will write the next line.
    failed: Arc<Mutex<HashMap<&'static str, Failed>>>,
}

/// The requests that have failed for one reason since the last line about them.
#[derive(Debug, Default)]
struct Failed {
    requests: u64,
    /// The first different ones.
    named: Vec<String>,
    /// How many requests have failed otherwise.
    unnamed: u64,
}

impl LogLimit {
    /// Logs a warning, unless one of this kind was logged within the last 10 s.
    pub(crate) fn warn(&self, kind: &'static str, line: impl FnOnce() -> String) {
        if self.may_log(kind) {
            log::warn!(target: "actix_doclock::web", "{}", line());
        }
    }

    /// As [`warn`](Self::warn), for an error.
    #[cfg(feature = "web")]
    pub(crate) fn error(&self, kind: &'static str, line: &str) {
        if self.may_log(kind) {
            log::error!(target: "actix_doclock::web", "{line}");
        }
    }

    fn may_log(&self, kind: &'static str) -> bool {
        let mut logged = self.logged.lock();
        let may = logged.get(kind).is_none_or(|at| clock::since(*at) >= EVERY);
        if may {
            logged.insert(kind, clock::now());
        }
        may
    }

    /// A request has failed for this reason, of which the code has few. Logs the first one at once, and then one line in
    /// 10 s with their number and the first different failures, until none fails any more.
    #[cfg(feature = "web")]
    pub(super) fn request_failed(
        &self,
        why: &'static str,
        line: String,
        runner: &Runner,
        stop: CancellationToken,
    ) {
        let all = Arc::clone(&self.failed);
        let mut failed = all.lock();
        if let Some(failed) = failed.get_mut(why) {
            failed.requests += 1;
            match failed.named.contains(&line) {
                true => {}
                false if failed.named.len() < MOST_NAMED => failed.named.push(line),
                false => failed.unnamed += 1,
            }
            return;
        }
        failed.insert(why, Failed::default());
        drop(failed);
        log::error!(target: "actix_doclock::web", "{line}");
        runner.spawn_untracked(async move {
            loop {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => {}
                    () = sleep(EVERY) => {}
                }
                let Failed { requests, named, unnamed } = {
                    let mut all = all.lock();
                    let failed = all.remove(why).unwrap_or_default();
                    if failed.requests > 0 && !stop.is_cancelled() {
                        all.insert(why, Failed::default());
                    }
                    failed
                };
                if requests > 0 {
                    log::error!(
                        target: "actix_doclock::web",
                        "{requests} more requests have failed within {EVERY:?}, {why}: {}{}",
                        named.join("; "),
                        if unnamed > 0 { format!("; and {unnamed} others") } else { String::new() },
                    );
                }
                if requests == 0 || stop.is_cancelled() {
                    return;
                }
            }
        });
    }
}
