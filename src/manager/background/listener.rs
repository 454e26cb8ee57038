//! Tells the application which sessions have ended, and which locks were taken from their holders.

use std::{
    fmt::Display,
    future::Future,
    pin::Pin,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::{
    ended::SessionEnded,
    error::{BoxError, LockError},
    manager::{Inner, LockManager, rhythm::Rhythm},
    random,
    taken::{LockTaken, Settled},
};

/// How many sessions, and how many taken locks, are announced at the same time.
const AT_ONCE: usize = 16;
/// Time to record that the listener was called. After that, another server assumes that this one is dead.
const TIME_TO_SAY_SO: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_secs(1);

type Outcome = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

/// A function that the application wants to be called.
pub(in crate::manager) struct Listener<E>(Arc<dyn Fn(E) -> Outcome + Send + Sync>);

impl<E> Clone for Listener<E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<E: Send + 'static> Listener<E> {
    pub(in crate::manager) fn new<F>(listener: impl Fn(E) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        Self(Arc::new(move |event| Box::pin(listener(event))))
    }

    /// In a task of its own, so that a panic ends only this task. `what` is for the log.
    async fn call(&self, event: E, limit: Duration, what: impl Display) {
        let Self(call) = self.clone();
        let called = tokio::spawn(async move {
            let called = async { call(event).await };
            match timeout(limit, called).await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(e)) => Err(format!("failed: {e}")),
                Err(_) => Err(format!("did not return within {limit:?}, and was dropped")),
            }
        });
        let failed = match called.await {
            Ok(Ok(())) => return,
            Ok(Err(failed)) => failed,
            Err(e) => format!("has panicked: {e}"),
        };
        log::error!(target: "actix_doclock::background", "the listener for {what} {failed}");
    }
}

/// The functions that the application wants to be called.
#[derive(Clone, Default)]
pub(in crate::manager) struct Listeners {
    pub(in crate::manager) ended: Option<Listener<SessionEnded>>,
    pub(in crate::manager) taken: Option<Listener<LockTaken>>,
}

/// What was announced although that could not be recorded.
#[derive(Default)]
struct Told {
    ended: Vec<SessionEnded>,
    taken: Vec<Uuid>,
}

/// Announces on behalf of this worker.
#[derive(Clone)]
struct Announcer {
    listeners: Listeners,
    limit: Duration,
    // Not the manager's own name: a sweep of the manager must not take an end that is just being
    // announced.
    worker: Uuid,
}

impl Announcer {
    fn lease(&self) -> Duration {
        self.limit + TIME_TO_SAY_SO
    }

    /// Announces some of the events that wait for it. Returns whether there were any.
    async fn announce_some(
        &self,
        manager: &LockManager,
        told: &mut Told,
    ) -> Result<bool, LockError> {
        let mut is_any = false;
        if let Some(listener) = &self.listeners.ended {
            is_any |= self.announce_ended(manager, listener, &mut told.ended).await?;
        }
        if let Some(listener) = &self.listeners.taken {
            is_any |= self.announce_taken(manager, listener, &mut told.taken).await?;
        }
        Ok(is_any)
    }

    async fn announce_ended(
        &self,
        manager: &LockManager,
        listener: &Listener<SessionEnded>,
        told: &mut Vec<SessionEnded>,
    ) -> Result<bool, LockError> {
        let (worker, limit) = (self.worker, self.limit);
        manager.note_announced(worker, told).await?;
        told.clear();
        let args = (worker, self.lease());
        let ended =
            manager.run("take_announcements", manager.until(), args, |store, (by, lease)| {
                store.take_announcements(*by, *lease, AT_ONCE)
            });
        let ended = ended.await?;
        if ended.is_empty() {
            return Ok(false);
        }
        told.clone_from(&ended);
        // What was taken is announced completely, even if this future is dropped.
        let (own, listener) = (manager.clone(), listener.clone());
        let called = manager.inner.runner.spawn(&TaskTracker::new(), async move {
            let calls = ended.iter().map(|end| {
                let what = format!("the end of the session {:?} (event {})", end.aid, end.event);
                listener.call(end.clone(), limit, what)
            });
            join_all(calls).await;
            own.note_announced(worker, &ended).await
        });
        if let Ok(noted) = called.await {
            noted?;
            told.clear();
        }
        Ok(true)
    }

    async fn announce_taken(
        &self,
        manager: &LockManager,
        listener: &Listener<LockTaken>,
        told: &mut Vec<Uuid>,
    ) -> Result<bool, LockError> {
        let (worker, limit) = (self.worker, self.limit);
        manager.note_told(worker, told).await?;
        told.clear();
        let args = (worker, self.lease());
        let taken = manager.run("takings", manager.until(), args, |store, (by, lease)| {
            store.takings(*by, *lease, AT_ONCE)
        });
        let taken = taken.await?;
        if taken.is_empty() {
            return Ok(false);
        }
        let events: Vec<_> = taken.iter().map(|taken| taken.event).collect();
        told.clone_from(&events);
        let (own, listener) = (manager.clone(), listener.clone());
        let called = manager.inner.runner.spawn(&TaskTracker::new(), async move {
            let calls = taken.into_iter().map(|taken| {
                let what = format!("the taken lock on {:?} (event {})", taken.key, taken.event);
                listener.call(taken, limit, what)
            });
            join_all(calls).await;
            own.note_told(worker, &events).await
        });
        if let Ok(noted) = called.await {
            noted?;
            told.clear();
        }
        Ok(true)
    }
}

impl LockManager {
    async fn note_announced(&self, worker: Uuid, told: &[SessionEnded]) -> Result<(), LockError> {
        if told.is_empty() {
            return Ok(());
        }
        let args = (worker, told.to_vec());
        self.run("announced", self.until(), args, |store, (worker, told)| {
            store.announced(*worker, told)
        })
        .await
    }

    async fn note_told(&self, worker: Uuid, told: &[Uuid]) -> Result<(), LockError> {
        for event in told {
            let args = (*event, worker);
            let noted = self.run("settle_taking", self.until(), args, |store, (event, worker)| {
                store.settle_taking(*event, *worker, Settled::Told)
            });
            noted.await?;
        }
        Ok(())
    }
}

/// Calls the listeners until the manager is gone or shut down.
pub(in crate::manager) async fn run(manager: Weak<Inner>, listeners: Listeners, limit: Duration) {
    let announcer = Announcer { listeners, limit, worker: random::uuid() };
    let mut rhythm = Rhythm::new("announcing the ends of sessions", FIRST_PAUSE);
    let mut told = Told::default();
    while let Some(inner) = manager.upgrade() {
        let manager = LockManager { inner };
        let (stop, announce) = (manager.inner.stop.token(), Arc::clone(&manager.inner.announce));
        let outcome = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            outcome = announcer.announce_some(&manager, &mut told) => outcome,
        };
        drop(manager);
        let wait = async {
            match outcome {
                Ok(true) => drop(rhythm.after_success(None)),
                Ok(false) => announce.notified().await,
                Err(e) => sleep(rhythm.after_failure(&e)).await,
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = wait => {}
        }
    }
}
