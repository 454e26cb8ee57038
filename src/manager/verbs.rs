//! Calls of the verbs of the store: each runs to its end in a task of its own, and is repeated while its outcome is
//! unknown. No caller waits longer than its deadline.

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    runtime::Handle,
    sync::{
        Notify, Semaphore,
        oneshot::{self, Receiver},
    },
    time::{sleep, timeout, timeout_at},
};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::{
    clock,
    error::{Result, StoreError, StoreErrorKind},
    lock::{Aid, Lock},
    manager::{
        claim::ClaimPermit,
        dyn_store::{Boxed, DynStore},
        observe,
        refusals::Refusals,
    },
    store::{Deadline, NewsId, Query, Settled},
};

/// The first pause before an operation is tried again; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// The longest pause while a caller waits.
pub(super) const FOREGROUND: Duration = Duration::from_millis(500);
/// The longest pause while no caller waits: a store that recovers should not be flooded.
pub(super) const BACKGROUND: Duration = Duration::from_secs(5);

/// At most this many locks are being claimed at once, or wait to be given back because nobody knows whether they were
/// granted.
pub(super) const CLAIMS: usize = 32_768;
/// How many operations that accept new work may run at once, besides claims.
const OPERATIONS: usize = 16_384;
/// The verbs of the operations that accept new work. No other verb is refused: the others keep locks or give them
/// back, or belong to a task of the manager, and are at most as many as there are sessions, locks and tasks.
const ACCEPT_NEW_WORK: &[&str] = &[
    "answer",
    "ask",
    "confirm",
    "exists",
    "has_expired",
    "inspect",
    "load",
    "locks_on",
    "save",
    "withdraw",
];

/// The store, and how it is called: each call runs to its end in a task of its own, and is repeated while its outcome
/// is unknown and its caller waits.
pub(crate) struct Verbs {
    pub(super) store: Arc<dyn DynStore>,
    pub(super) runner: Runner,
    /// How long a caller waits, unless it says otherwise.
    pub(crate) deadline: Duration,
    /// For the claims, and for the return of claims whose outcome is unknown.
    pub(super) claims: Arc<Semaphore>,
    operations: Arc<Semaphore>,
    refusals: Arc<Refusals>,
    /// Wakes the listeners: news waits for them in the store.
    pub(super) news: Notify,
}

impl Verbs {
    pub(super) fn new(store: Arc<dyn DynStore>, runner: Runner, deadline: Duration) -> Self {
        let [claims, operations] = [CLAIMS, OPERATIONS].map(|it| Arc::new(Semaphore::new(it)));
        let (refusals, news) = (Arc::default(), Notify::new());
        Self { store, runner, deadline, claims, operations, refusals, news }
    }

    /// A permit for a claim whose caller waits.
    ///
    /// # Errors
    /// [`Overloaded`](StoreErrorKind::Overloaded), at the pace of refusals.
    pub(super) async fn claim_permit_by(&self, until: Instant) -> Result<ClaimPermit, StoreError> {
        let permit = self.claim_permit();
        if permit.is_err() {
            self.refusals.wait(until).await;
        }
        permit
    }

    /// # Errors
    /// [`Overloaded`](StoreErrorKind::Overloaded).
    pub(super) fn claim_permit(&self) -> Result<ClaimPermit, StoreError> {
        let permit = Arc::clone(&self.claims).try_acquire_owned();
        permit.map(Arc::new).map_err(|_| overloaded("try_acquire"))
    }

    /// The deadline of an operation that begins now.
    pub(crate) fn until(&self) -> Instant {
        clock::now() + self.deadline
    }

    /// Calls a verb, with the usual deadline.
    pub(super) async fn ask<A, T>(
        &self,
        verb: &'static str,
        args: A,
        attempt: for<'a> fn(&'a dyn DynStore, &'a A, Deadline) -> Boxed<'a, T>,
    ) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run(verb, self.until(), args, attempt).await
    }

    /// The live locks of these sessions in one collection.
    pub(super) async fn locks_of(
        &self,
        collection: &str,
        aids: impl Into<Arc<[Aid]>>,
        limit: usize,
        until: Instant,
    ) -> Result<Vec<Lock>> {
        let args = (collection.to_owned(), aids.into(), limit);
        let locks = self.run("list", until, args, |store, (collection, aids, limit), until| {
            store.locks(collection, Query::Of(aids), *limit, until)
        });
        locks.await
    }

    /// Calls a verb.
    pub(super) async fn run<A, T>(
        &self,
        verb: &'static str,
        until: Instant,
        args: A,
        attempt: for<'a> fn(&'a dyn DynStore, &'a A, Deadline) -> Boxed<'a, T>,
    ) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let operations = Arc::clone(&self.operations);
        let place = ACCEPT_NEW_WORK.contains(&verb).then(|| operations.try_acquire_owned());
        let place = place.transpose().map_err(|_| overloaded(verb));
        if let Err(e) = &place {
            observe::failed(verb, e);
            self.refusals.wait(until).await;
        }
        let place = place?;
        let store = Arc::clone(&self.store);
        let operation = async move {
            let done = retry(until, FOREGROUND, |until| attempt(&*store, &args, until)).await;
            drop(place);
            done
        };
        self.complete(verb, until, &TaskTracker::new(), operation).await
    }

    /// Runs an operation to its end in a task of its own, which `scope` tracks as well. Returns the outcome, or an
    /// error if there is none in time.
    pub(super) fn complete<T: Send + 'static>(
        &self,
        verb: &'static str,
        until: Instant,
        scope: &TaskTracker,
        operation: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send {
        // The task begins at once, and the future of the caller is small.
        let outcome = self.runner.spawn(scope, operation);
        let refusals = Arc::clone(&self.refusals);
        async move {
            let unknown =
                |why| StoreError::new(StoreErrorKind::Unavailable, format!("{verb}: {why}"));
            let outcome = match timeout_at(until.into(), outcome).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(_)) => Err(unknown("the task of this operation has panicked")),
                Err(_) => Err(unknown("no answer within the deadline, the outcome is unknown")),
            };
            if let Err(e) = &outcome {
                observe::failed(verb, e);
                if e.kind() == StoreErrorKind::Overloaded {
                    refusals.wait(until).await;
                }
            }
            Ok(outcome?)
        }
    }

    /// Says in the background what became of this news, and wakes the listeners.
    pub(super) fn settle(
        self: &Arc<Self>,
        news: NewsId,
        worker: Uuid,
        settled: Settled,
        until: Instant,
    ) {
        let (verbs, news) = (Arc::clone(self), [news]);
        self.runner.spawn(&TaskTracker::new(), async move {
            let done = retry(until, BACKGROUND, |until| {
                verbs.store.settle_news(&news, worker, settled, until)
            });
            if let Err(e) = done.await {
                log::warn!(
                    target: "actix_doclock::manager",
                    "a listener is told later, because the store did not settle its news: {e}",
                );
            }
            verbs.news.notify_waiters();
        });
    }

    /// Takes all places of [operations that accept new work](ACCEPT_NEW_WORK).
    #[cfg(test)]
    pub(super) fn all_places(&self) -> tokio::sync::OwnedSemaphorePermit {
        let all = Arc::clone(&self.operations).try_acquire_many_owned(OPERATIONS as u32);
        all.expect("all are free")
    }
}

/// Spawns tasks on the runtime on which the manager was built.
///
/// Tasks do not run on the runtime of the request: a worker of actix-web ends with its connections and
/// drops its tasks, but a command of the driver must not be dropped half-way.
#[derive(Debug, Clone)]
pub(super) struct Runner {
    runtime: Handle,
    tasks: TaskTracker,
}

impl Runner {
    pub(super) fn on_current_runtime() -> Self {
        Self { runtime: Handle::current(), tasks: TaskTracker::new() }
    }

    /// For a task that a store spawns.
    pub(super) fn parts(&self) -> (Handle, TaskTracker) {
        (self.runtime.clone(), self.tasks.clone())
    }

    /// Spawns a task that runs `future` to its end and sends the outcome to the returned receiver.
    /// `scope` tracks this task as well.
    ///
    /// A channel instead of a `JoinHandle`: an outcome that nobody receives must be dropped *within* the
    /// calls, so that the cleanup in its drop (giving a lock back) begins before the task counts as ended.
    pub(super) fn spawn<F>(&self, scope: &TaskTracker, future: F) -> Receiver<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let task = async move {
            let _ = sender.send(future.await);
        };
        self.tasks.spawn_on(scope.track_future(task), &self.runtime);
        receiver
    }

    /// Runs `future` after a delay. [`drain`](Self::drain) does not wait for it.
    pub(super) fn spawn_after<F>(&self, delay: Duration, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.spawn_untracked(async move {
            sleep(delay).await;
            future.await;
        });
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Runs a task that ends together with the manager. [`drain`](Self::drain) does not wait for it.
    pub(super) fn spawn_untracked<F>(&self, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.runtime.spawn(future);
    }

    /// Waits until no task is left, for at most this time.
    pub(super) async fn drain(&self, at_most: Duration) {
        self.tasks.close();
        if timeout(at_most, self.tasks.wait()).await.is_err() {
            log::warn!(
                target: "actix_doclock::manager",
                "{} operations have not ended after {at_most:?}: the store does not answer",
                self.tasks.len(),
            );
        }
        self.tasks.reopen();
    }
}

/// Tries until the outcome is known, or until no time is left for another attempt.
///
/// An attempt under way is never dropped, so this may end later than `until`. A store that refuses an attempt because
/// of its load is asked again only if it must be: if an earlier attempt may have been carried out, or if no caller
/// waits for the refusal. The final error is [`Overloaded`](StoreErrorKind::Overloaded) only if no
/// attempt was carried out.
pub(super) async fn retry<T, F>(
    until: Instant,
    longest_pause: Duration,
    mut attempt: impl FnMut(Deadline) -> F,
) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let (deadline, mut pause, mut is_in_doubt) = (Deadline::at(until), FIRST_PAUSE, false);
    loop {
        let error = match attempt(deadline).await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        let error = match error.kind() {
            StoreErrorKind::Unavailable => {
                is_in_doubt = true;
                error
            }
            StoreErrorKind::Overloaded if is_in_doubt => {
                let message = format!("{error}; an earlier attempt may have been carried out");
                StoreError::new(StoreErrorKind::Unavailable, message)
            }
            StoreErrorKind::Overloaded if longest_pause > FOREGROUND => error,
            _ => return Err(error),
        };
        if clock::now() + pause >= until {
            return Err(error);
        }
        observe::tried_again(&error);
        log::debug!(target: "actix_doclock::manager", "trying again after {pause:?}: {error}");
        sleep(pause).await;
        pause = (pause * 2).min(longest_pause);
    }
}

/// The error of an operation that is refused before the store hears of it.
pub(super) fn overloaded(verb: &'static str) -> StoreError {
    let message = format!("{verb}: too many operations are under way already; try again later");
    StoreError::new(StoreErrorKind::Overloaded, message)
}

/// Runs `work`, and keeps `permit` until `work` ends, or for `at_most`: one command without an answer must not hold up
/// others.
pub(super) async fn with_permit<P, F: Future>(
    permit: Option<P>,
    at_most: Duration,
    work: F,
) -> F::Output {
    let Some(permit) = permit else { return work.await };
    let mut work = pin!(work);
    if let Ok(done) = timeout(at_most, &mut work).await {
        return done;
    }
    drop(permit);
    work.await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error of an operation whose attempts end like this, and how many there were.
    async fn after(longest: Duration, kinds: &[StoreErrorKind]) -> (StoreErrorKind, usize) {
        let (mut attempts, until) = (0, clock::now() + Duration::from_secs(60));
        let refused = retry(until, longest, |_| {
            let kind = *kinds.get(attempts).unwrap_or(&StoreErrorKind::Other);
            attempts += 1;
            async move { Err::<(), _>(StoreError::new(kind, "on purpose")) }
        });
        (refused.await.unwrap_err().kind(), attempts)
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_because_of_the_load_is_final_unless_an_earlier_attempt_is_in_doubt() {
        use StoreErrorKind::{Other, Overloaded, Unavailable};
        assert_eq!(after(FOREGROUND, &[Overloaded]).await, (Overloaded, 1));
        assert_eq!(after(FOREGROUND, &[Unavailable, Overloaded]).await, (Other, 3));
        assert_eq!(after(FOREGROUND, &[Unavailable, Overloaded].repeat(200)).await.0, Unavailable);
        assert_eq!(after(BACKGROUND, &[Overloaded]).await, (Other, 2), "nobody waits");
    }

    /// Whatever refuses them: the store, or a limit of this process.
    #[tokio::test(start_paused = true)]
    async fn callers_that_come_back_at_once_are_refused_at_a_pace() {
        let store = Arc::new(crate::MemoryStore::new());
        let verbs = Verbs::new(store, Runner::on_current_runtime(), Duration::from_secs(5));
        let _claims = verbs.claims.clone().try_acquire_many_owned(CLAIMS as u32).unwrap();
        let _operations = verbs.all_places();
        for way in 0..3 {
            let began = clock::now();
            for _ in 0..1_000 {
                let until = verbs.until();
                match way {
                    0 => {
                        let refused = async { Err::<(), _>(overloaded("save")) };
                        let scope = TaskTracker::new();
                        drop(verbs.complete("save", until, &scope, refused).await.unwrap_err());
                    }
                    1 => drop(verbs.claim_permit_by(until).await.unwrap_err()),
                    _ => {
                        let done = verbs.run("load", until, (), |_, (), _| unreachable!());
                        let done: Result<()> = done.await;
                        drop(done.unwrap_err());
                    }
                }
            }
            let took = clock::since(began);
            assert!(took >= Duration::from_millis(190), "{way}: {took:?}");
        }
    }
}
