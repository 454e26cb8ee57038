//! Tells the application which sessions have ended, and which locks were taken from their holders.

use std::{
    future::{self, Future},
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
    error::{BoxError, Result},
    manager::{Core, pauses::Pauses},
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
type OutboxOf = for<'a> fn(&'a [&'a str]) -> Outbox<'a>;

/// A function that the application wants to be called, for one of the two kinds of news.
#[derive(Clone)]
pub(in crate::manager) struct Listener {
    call: Arc<dyn Fn(News) -> Outcome + Send + Sync>,
    /// Where its news waits, in an outbox that knows these collections.
    outbox: OutboxOf,
    /// For the log.
    task: &'static str,
}

impl Listener {
    pub(in crate::manager) fn of_ends<F>(
        listener: impl Fn(SessionEnded) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let call = Arc::new(move |news| match news {
            News::Ended(ended) => Box::pin(listener(ended)) as Outcome,
            News::Takeover(_) => Box::pin(future::ready(Ok(()))),
        });
        Self { call, outbox: |_| Outbox::Ends, task: "announcing the ends of sessions" }
    }

    pub(in crate::manager) fn of_takeovers<F>(
        listener: impl Fn(Takeover) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let call = Arc::new(move |news| match news {
            News::Takeover(takeover) => Box::pin(listener(takeover)) as Outcome,
            News::Ended(_) => Box::pin(future::ready(Ok(()))),
        });
        let outbox: OutboxOf = |collections| Outbox::Takeovers(collections);
        Self { call, outbox, task: "announcing breaks and takeovers" }
    }

    /// Calls the function in a task of its own, so that a panic ends only this task.
    async fn call(&self, news: &News, limit: Duration) {
        let (call, event) = (Arc::clone(&self.call), news.clone());
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
        let what = match news {
            News::Ended(it) => format!("the end of the session {:?} (event {})", it.aid, it.event),
            News::Takeover(it) => format!("the lost lock on {:?} (event {})", it.key, it.event),
        };
        log::error!(target: "actix_doclock::background", "the listener for {what} {failed}");
    }
}

/// The functions that the application wants to be called.
#[derive(Clone, Default)]
pub(in crate::manager) struct Listeners {
    pub(in crate::manager) ended: Option<Listener>,
    pub(in crate::manager) takeovers: Option<Listener>,
}

/// What one listener is told. Each listener has a task of its own, so that one that hangs does not hold up the other.
struct Announcer {
    listener: Listener,
    limit: Duration,
    /// Another id than the manager's own: a sweep of the manager must not take an end that is just being announced.
    worker: Uuid,
    /// The news that was announced, but whose announcement is not recorded yet.
    announced: Vec<NewsId>,
}

impl Announcer {
    /// Announces some of the waiting news. True if there was any.
    async fn announce_some(&mut self, core: &Arc<Core>) -> Result<bool> {
        let (worker, limit) = (self.worker, self.limit);
        if !self.announced.is_empty() {
            note(core, worker, self.announced.clone()).await?;
            self.announced.clear();
        }
        let args = (core.collections.names(), self.listener.outbox, worker, limit + TIME_TO_SAY_SO);
        let news = core.verbs.ask("take_news", args, |store, (all, outbox, by, lease), until| {
            store.take_news(outbox(all), *by, *lease, AT_ONCE, until)
        });
        let news = news.await?;
        if news.is_empty() {
            return Ok(false);
        }
        self.announced = news.iter().map(id).collect();
        // All news that was taken is announced, even if this future is dropped.
        let (own, listener, announced) =
            (Arc::clone(core), self.listener.clone(), self.announced.clone());
        let called = core.verbs.runner.spawn(&TaskTracker::new(), async move {
            join_all(news.iter().map(|it| listener.call(it, limit))).await;
            note(&own, worker, announced).await
        });
        if let Ok(noted) = called.await {
            noted?;
            self.announced.clear();
        }
        Ok(true)
    }
}

/// Records that the listener was called.
async fn note(core: &Core, worker: Uuid, announced: Vec<NewsId>) -> Result<()> {
    let noted =
        core.verbs.ask("settle_news", (worker, announced), |store, (worker, announced), until| {
            store.settle_news(announced, *worker, Settled::Told, until)
        });
    noted.await
}

fn id(news: &News) -> NewsId {
    match news {
        News::Ended(it) => NewsId::Ended(it.aid.clone(), Some(it.event)),
        News::Takeover(it) => NewsId::Takeover(it.event),
    }
}

/// Calls the listener until the manager is gone.
pub(in crate::manager) async fn run(manager: Weak<Core>, listener: Listener, limit: Duration) {
    let mut pauses = Pauses::new(listener.task, FIRST_PAUSE);
    let mut announcer =
        Announcer { listener, limit, worker: random::uuid(), announced: Vec::new() };
    while let Some(core) = manager.upgrade() {
        let verbs = Arc::clone(&core.verbs);
        // News that comes from now on is not missed.
        let news = verbs.news.notified();
        let outcome = announcer.announce_some(&core).await;
        drop(core);
        match outcome {
            Ok(true) => drop(pauses.after_success(None)),
            Ok(false) => news.await,
            Err(e) => sleep(pauses.after_failure(&e)).await,
        }
    }
}
