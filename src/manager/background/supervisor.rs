//! Restarts background tasks that panic, and reports the panics in the manager's health.

use std::{
    any::Any,
    collections::BTreeMap,
    future::Future,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::{
    task::{AbortHandle, JoinHandle},
    time::sleep,
};

use crate::{
    clock,
    manager::{Core, observe, pauses::jittered},
    text::cut,
    text::millis,
};

/// The pause before a task is started again. It is doubled with each panic, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A task that has run for this long starts with the first pause again.
const PROVEN: Duration = Duration::from_secs(60);
/// The maximum length of a stored panic message.
const MESSAGE_BYTES: usize = 500;

/// The panics of one kind of background calls, as part of [`Health`](crate::health::Health).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TaskPanics {
    /// How often a task of this kind has panicked and was started again.
    pub count: u32,
    /// The time since the last panic.
    #[serde(rename = "last_ms", serialize_with = "millis")]
    pub last: Duration,
    /// The message of the last panic.
    pub message: String,
}

/// The panics of all background tasks, by the kind of task.
#[derive(Debug, Default)]
pub(in crate::manager) struct Panics(Mutex<BTreeMap<&'static str, (u32, Instant, String)>>);

impl Panics {
    fn note(&self, task: &'static str, message: String) {
        let mut all = self.0.lock();
        let count = all.get(task).map_or(0, |(count, ..)| *count);
        all.insert(task, (count.saturating_add(1), clock::now(), message));
    }

    pub(in crate::manager) fn all(&self) -> BTreeMap<&'static str, TaskPanics> {
        let report = |(count, at, message): &(u32, Instant, String)| TaskPanics {
            count: *count,
            last: clock::since(*at),
            message: message.clone(),
        };
        self.0.lock().iter().map(|(task, panics)| (*task, report(panics))).collect()
    }
}

impl Core {
    /// Runs a background task to its end, or until the manager is shut down or gone, and starts it again whenever it
    /// panics. Such a stop drops the task at an `await`: the commands that the task has sent are tasks of their own.
    ///
    /// `panicked` is called after each panic, to make sure that nothing relies on the task until it runs
    /// again. The task gets a weak handle, so it does not keep the manager alive.
    pub(in crate::manager) fn supervise<F>(
        self: &Arc<Self>,
        task: &'static str,
        panicked: impl Fn(&Self) + Send + 'static,
        start: impl Fn(Weak<Core>) -> F + Send + 'static,
    ) -> AbortHandle
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let weak = Arc::downgrade(self);
        let (runtime, stop) = (self.verbs.runner.runtime().clone(), self.stop.token());
        let supervisor = async move {
            let mut pause = FIRST_PAUSE;
            loop {
                let began = clock::now();
                let mut running = Running(tokio::spawn(start(Weak::clone(&weak))));
                let Err(error) = (&mut running.0).await else { return };
                let (Ok(panic), Some(core)) = (error.try_into_panic(), weak.upgrade()) else {
                    return;
                };
                if clock::since(began) >= PROVEN {
                    pause = FIRST_PAUSE;
                }
                let (message, now) = (message(&*panic), jittered(pause));
                log::error!(
                    target: "actix_doclock::background",
                    "the background task `{task}` has panicked and is started again in {now:?}; report \
                     this with the message: {message}",
                );
                observe::panicked(task);
                core.panics.note(task, message);
                panicked(&core);
                drop(core);
                sleep(now).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        };
        runtime.spawn(stop.run_until_cancelled_owned(supervisor)).abort_handle()
    }
}

/// A task that ends with its supervisor.
struct Running(JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The message of the panic, cut to the maximum length.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no message)");
    cut(text.to_owned(), MESSAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::sync::Semaphore;

    use super::*;
    use crate::{LockManager, store::MemoryStore};

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_is_started_again_and_its_panics_are_told() {
        let manager = LockManager::builder(MemoryStore::new()).build().await.unwrap();
        let (starts, noticed) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let runs = Arc::new(Semaphore::new(0));
        let (started, counted, running) =
            (Arc::clone(&starts), Arc::clone(&noticed), Arc::clone(&runs));
        let supervisor = manager.core.supervise(
            "test",
            move |_| {
                counted.fetch_add(1, Ordering::SeqCst);
            },
            move |_| {
                let (nth, running) = (started.fetch_add(1, Ordering::SeqCst), Arc::clone(&running));
                async move {
                    assert!(nth >= 2, "start number {nth}");
                    running.add_permits(1);
                    std::future::pending::<()>().await;
                }
            },
        );
        runs.acquire().await.unwrap().forget();
        assert_eq!((starts.load(Ordering::SeqCst), noticed.load(Ordering::SeqCst)), (3, 2));
        let panics = manager.health().panics;
        assert_eq!((panics.len(), panics["test"].count), (1, 2));
        assert!(panics["test"].message.contains("start number 1"), "{panics:?}");
        assert!(!supervisor.is_finished());
        let report = manager.check_health().await;
        assert!(!report.is_healthy() && report.is_ready(), "{report:?}");
        assert!(report.problems.concat().contains("`test` has panicked 2 times"), "{report:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_ends_by_itself_and_one_of_a_manager_that_was_shut_down_stay_ended() {
        let manager = LockManager::builder(MemoryStore::new()).build().await.unwrap();
        let ends = manager.core.supervise("ends", |_| {}, |_| async {});
        let panics = manager.core.supervise("panics", |_| {}, |_| async { panic!("on purpose") });
        while !ends.is_finished() {
            tokio::task::yield_now().await;
        }
        assert!(!panics.is_finished());
        manager.shutdown().await;
        while !panics.is_finished() {
            sleep(Duration::from_millis(10)).await;
        }
    }
}
