//! Tells the application which sessions have ended.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::{
    ended::SessionEnded,
    error::{BoxError, LockError},
    manager::{Inner, LockManager, rhythm::Rhythm},
    random,
};

/// How many sessions are announced at the same time.
const AT_ONCE: usize = 16;
/// Time to record that the listener was called. After that, another server assumes that this one is dead.
const TIME_TO_SAY_SO: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_secs(1);

type Outcome = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

/// The function that the application wants to be called.
#[derive(Clone)]
pub(in crate::manager) struct Listener(Arc<dyn Fn(SessionEnded) -> Outcome + Send + Sync>);

impl Listener {
    pub(in crate::manager) fn new<F>(
        listener: impl Fn(SessionEnded) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        Self(Arc::new(move |ended| Box::pin(listener(ended))))
    }

    /// In a task of its own, so that a panic ends only this task.
    fn call(&self, ended: SessionEnded, limit: Duration) -> JoinHandle<()> {
        let Self(call) = self.clone();
        tokio::spawn(async move {
            let (aid, event) = (ended.aid.clone(), ended.event);
            let called = async { call(ended).await };
            let failed = match timeout(limit, called).await {
                Ok(Ok(())) => return,
                Ok(Err(e)) => format!("failed: {e}"),
                Err(_) => format!("did not return within {limit:?}, and was dropped"),
            };
            log::error!(
                target: "actix_doclock::background",
                "the listener for the end of the session {aid:?} (event {event}) {failed}",
            );
        })
    }
}

impl LockManager {
    /// Announces some of the ends that are waiting for it. Returns whether there were any.
    ///
    /// `told` contains ends that have been announced although that could not be recorded.
    async fn announce_some(
        &self,
        listener: &Listener,
        limit: Duration,
        worker: Uuid,
        told: &mut Vec<SessionEnded>,
    ) -> Result<bool, LockError> {
        self.note_announced(worker, told).await?;
        told.clear();
        let args = (worker, limit + TIME_TO_SAY_SO);
        let taken = self.run("take_announcements", self.until(), args, |store, (worker, lease)| {
            store.take_announcements(*worker, *lease, AT_ONCE)
        });
        let taken = taken.await?;
        if taken.is_empty() {
            return Ok(false);
        }
        told.clone_from(&taken);
        // The taken ends are announced completely, even if this future is dropped.
        let (manager, listener) = (self.clone(), listener.clone());
        let called = self.inner.runner.spawn(&TaskTracker::new(), async move {
            let calls = taken.iter().map(|ended| listener.call(ended.clone(), limit));
            for called in join_all(calls).await {
                if let Err(e) = called {
                    log::error!(
                        target: "actix_doclock::background",
                        "the listener for the ends of sessions has panicked: {e}",
                    );
                }
            }
            manager.note_announced(worker, &taken).await
        });
        match called.await {
            Ok(noted) => noted?,
            Err(_) => return Ok(true),
        }
        told.clear();
        Ok(true)
    }

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
}

/// Calls the listener until the manager is gone or shut down.
pub(in crate::manager) async fn run(manager: Weak<Inner>, listener: Listener, limit: Duration) {
    // Not the manager's own name: a sweep of the manager must not take an end that is just being
    // announced.
    let worker = random::uuid();
    let mut rhythm = Rhythm::new("announcing the ends of sessions", FIRST_PAUSE);
    let mut told = Vec::new();
    while let Some(inner) = manager.upgrade() {
        let manager = LockManager { inner };
        let (stop, announce) = (manager.inner.stop.token(), Arc::clone(&manager.inner.announce));
        let outcome = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            outcome = manager.announce_some(&listener, limit, worker, &mut told) => outcome,
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
