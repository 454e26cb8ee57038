//! Tells the application which sessions have ended, and which locks were taken from their holders.

use std::{
    fmt::Display,
    future::Future,
    pin::Pin,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::{
    ended::SessionEnded,
    error::{BoxError, Result},
    manager::{Parts, pauses::Pauses},
    random,
    store::{News, NewsId, Outbox, Settled},
    takeover::Takeover,
};

/// How many sessions, and how many taken locks, are announced at the same time.
const AT_ONCE: usize = 16;
/// The time in which this server has to record that the listener was called. After that time, another server assumes
/// that this one is dead.
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

    /// Calls the function in a task of its own, so that a panic ends only this task. `what` is for the log.
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
    pub(in crate::manager) taken: Option<Listener<Takeover>>,
}

/// Wakes the announcers: something waits to be announced.
#[derive(Debug, Default)]
pub(in crate::manager) struct Announce {
    ended: Arc<Notify>,
    taken: Arc<Notify>,
}

impl Announce {
    pub(in crate::manager) fn notify(&self) {
        self.ended.notify_one();
        self.taken.notify_one();
    }
}

/// The news for a listener.
pub(in crate::manager) trait Announced: Clone + Send + Sync + 'static {
    /// For the log.
    const ALL: &'static str;

    fn name(&self) -> String;

    /// Where such events wait to be announced.
    fn outbox<'a>(collections: &'a [&'a str]) -> Outbox<'a>;

    fn of(news: News) -> Option<Self>;

    fn id(&self) -> NewsId;

    /// Wakes the announcer.
    fn wakes(parts: &Parts) -> Arc<Notify>;
}

impl Announced for SessionEnded {
    const ALL: &'static str = "announcing the ends of sessions";

    fn name(&self) -> String {
        format!("the end of the session {:?} (event {})", self.aid, self.event)
    }

    fn outbox<'a>(_collections: &'a [&'a str]) -> Outbox<'a> {
        Outbox::Ends
    }

    fn of(news: News) -> Option<Self> {
        if let News::Ended(ended) = news { Some(ended) } else { None }
    }

    fn id(&self) -> NewsId {
        NewsId::Ended(self.aid.clone(), Some(self.event))
    }

    fn wakes(parts: &Parts) -> Arc<Notify> {
        Arc::clone(&parts.announce.ended)
    }
}

impl Announced for Takeover {
    const ALL: &'static str = "announcing breaks and takeovers";

    fn name(&self) -> String {
        format!("the lost lock on {:?} (event {})", self.key, self.event)
    }

    fn outbox<'a>(collections: &'a [&'a str]) -> Outbox<'a> {
        Outbox::Takeovers(collections)
    }

    fn of(news: News) -> Option<Self> {
        if let News::Takeover(takeover) = news { Some(takeover) } else { None }
    }

    fn id(&self) -> NewsId {
        NewsId::Takeover(self.event)
    }

    fn wakes(parts: &Parts) -> Arc<Notify> {
        Arc::clone(&parts.announce.taken)
    }
}

/// Some events that wait to be announced.
async fn take<E: Announced>(parts: &Arc<Parts>, worker: Uuid, lease: Duration) -> Result<Vec<E>> {
    let args = (parts.collections.names(), worker, lease);
    let taken = parts.verbs.ask("take_news", args, |store, (all, by, lease), until| {
        store.take_news(E::outbox(all), *by, *lease, AT_ONCE, until)
    });
    Ok(taken.await?.into_iter().filter_map(E::of).collect())
}

/// Records that the listener was called.
async fn note<E: Announced>(parts: &Arc<Parts>, worker: Uuid, told: &[E]) -> Result<()> {
    let args = (worker, told.iter().map(E::id).collect::<Vec<_>>());
    let noted = parts.verbs.ask("settle_news", args, |store, (worker, told), until| {
        store.settle_news(told, *worker, Settled::Told, until)
    });
    noted.await
}

/// Announces some of the waiting events. True if there were any.
///
/// `told` contains the events that were announced, but whose announcement is not recorded yet.
async fn announce_some<E: Announced>(
    parts: &Arc<Parts>,
    listener: &Listener<E>,
    limit: Duration,
    worker: Uuid,
    told: &mut Vec<E>,
) -> Result<bool> {
    if !told.is_empty() {
        note(parts, worker, told).await?;
        told.clear();
    }
    let taken = take::<E>(parts, worker, limit + TIME_TO_SAY_SO).await?;
    if taken.is_empty() {
        return Ok(false);
    }
    told.clone_from(&taken);
    // All news that was taken is announced, even if this future is dropped.
    let (own, listener) = (Arc::clone(parts), listener.clone());
    let called = parts.verbs.runner.spawn(&TaskTracker::new(), async move {
        join_all(taken.iter().map(|event| listener.call(event.clone(), limit, event.name()))).await;
        note(&own, worker, &taken).await
    });
    if let Ok(noted) = called.await {
        noted?;
        told.clear();
    }
    Ok(true)
}

/// Calls the listener until the manager is gone.
pub(in crate::manager) async fn run<E: Announced>(
    manager: Weak<Parts>,
    listener: Listener<E>,
    limit: Duration,
) {
    // Another id than the manager's own: a sweep of the manager must not take an end that is just being announced.
    let worker = random::uuid();
    let mut pauses = Pauses::new(E::ALL, FIRST_PAUSE);
    let mut told = Vec::new();
    while let Some(parts) = manager.upgrade() {
        let wakes = E::wakes(&parts);
        let outcome = announce_some(&parts, &listener, limit, worker, &mut told).await;
        drop(parts);
        match outcome {
            Ok(true) => drop(pauses.after_success(None)),
            Ok(false) => wakes.notified().await,
            Err(e) => sleep(pauses.after_failure(&e)).await,
        }
    }
}
