//! Tells the application which sessions have ended, and which locks were taken from their holders.

use std::{
    fmt::Display,
    future::Future,
    pin::Pin,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::{join_all, try_join_all};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};
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

/// What a listener hears of.
pub(in crate::manager) trait Announced: Clone + Send + Sync + 'static {
    /// For the log.
    const ALL: &'static str;

    fn name(&self) -> String;

    /// Some events that wait to be announced.
    fn take(
        manager: &LockManager,
        worker: Uuid,
        lease: Duration,
    ) -> impl Future<Output = Result<Vec<Self>, LockError>> + Send;

    /// Records that the listener was called.
    fn note(
        manager: &LockManager,
        worker: Uuid,
        told: &[Self],
    ) -> impl Future<Output = Result<(), LockError>> + Send;

    /// Wakes the announcer.
    fn wakes(inner: &Inner) -> Arc<Notify>;
}

impl Announced for SessionEnded {
    const ALL: &'static str = "announcing the ends of sessions";

    fn name(&self) -> String {
        format!("the end of the session {:?} (event {})", self.aid, self.event)
    }

    async fn take(
        manager: &LockManager,
        worker: Uuid,
        lease: Duration,
    ) -> Result<Vec<Self>, LockError> {
        let args = (worker, lease);
        let taken =
            manager.run("take_announcements", manager.until(), args, |store, (by, lease)| {
                store.take_announcements(*by, *lease, AT_ONCE)
            });
        taken.await
    }

    async fn note(manager: &LockManager, worker: Uuid, told: &[Self]) -> Result<(), LockError> {
        let args = (worker, told.to_vec());
        let noted = manager.run("announced", manager.until(), args, |store, (worker, told)| {
            store.announced(*worker, told)
        });
        noted.await
    }

    fn wakes(inner: &Inner) -> Arc<Notify> {
        Arc::clone(&inner.announce.ended)
    }
}

impl Announced for LockTaken {
    const ALL: &'static str = "announcing taken locks";

    fn name(&self) -> String {
        format!("the taken lock on {:?} (event {})", self.key, self.event)
    }

    async fn take(
        manager: &LockManager,
        worker: Uuid,
        lease: Duration,
    ) -> Result<Vec<Self>, LockError> {
        let args = (manager.registered_names(), worker, lease);
        let taken = manager.run("takings", manager.until(), args, |store, (all, by, lease)| {
            store.takings(all, *by, *lease, AT_ONCE)
        });
        taken.await
    }

    async fn note(manager: &LockManager, worker: Uuid, told: &[Self]) -> Result<(), LockError> {
        let noted = told.iter().map(|taken| {
            manager.run(
                "settle_taking",
                manager.until(),
                (taken.event, worker),
                |store, (it, by)| store.settle_taking(*it, *by, Settled::Told),
            )
        });
        try_join_all(noted).await.map(drop)
    }

    fn wakes(inner: &Inner) -> Arc<Notify> {
        Arc::clone(&inner.announce.taken)
    }
}

/// What wakes the announcers.
#[derive(Debug, Default)]
pub(in crate::manager) struct Announce {
    ended: Arc<Notify>,
    taken: Arc<Notify>,
}

impl Announce {
    /// Something waits to be announced.
    pub(in crate::manager) fn notify(&self) {
        self.ended.notify_one();
        self.taken.notify_one();
    }
}

/// Announces some of the events that wait for it. Returns whether there were any.
///
/// `told` contains events that have been announced although that could not be recorded.
async fn announce_some<E: Announced>(
    manager: &LockManager,
    listener: &Listener<E>,
    limit: Duration,
    worker: Uuid,
    told: &mut Vec<E>,
) -> Result<bool, LockError> {
    if !told.is_empty() {
        E::note(manager, worker, told).await?;
        told.clear();
    }
    let taken = E::take(manager, worker, limit + TIME_TO_SAY_SO).await?;
    if taken.is_empty() {
        return Ok(false);
    }
    told.clone_from(&taken);
    // What was taken is announced completely, even if this future is dropped.
    let (own, listener) = (manager.clone(), listener.clone());
    let called = manager.inner.runner.spawn(&TaskTracker::new(), async move {
        join_all(taken.iter().map(|event| listener.call(event.clone(), limit, event.name()))).await;
        E::note(&own, worker, &taken).await
    });
    if let Ok(noted) = called.await {
        noted?;
        told.clear();
    }
    Ok(true)
}

/// Calls the listener until the manager is gone or shut down.
pub(in crate::manager) async fn run<E: Announced>(
    manager: Weak<Inner>,
    listener: Listener<E>,
    limit: Duration,
) {
    // Not the manager's own name: a sweep of the manager must not take an end that is just being
    // announced.
    let worker = random::uuid();
    let mut rhythm = Rhythm::new(E::ALL, FIRST_PAUSE);
    let mut told = Vec::new();
    while let Some(inner) = manager.upgrade() {
        let manager = LockManager { inner };
        let (stop, wakes) = (manager.inner.stop.token(), E::wakes(&manager.inner));
        let outcome = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            outcome = announce_some(&manager, &listener, limit, worker, &mut told) => outcome,
        };
        drop(manager);
        let wait = async {
            match outcome {
                Ok(true) => drop(rhythm.after_success(None)),
                Ok(false) => wakes.notified().await,
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
