//! Hearing of documents that become free: one watch of the store for each collection, as long as
//! somebody waits there.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use serde::Serialize;
use tokio::time::{sleep, timeout_at};
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::{StoreError, StoreErrorKind},
    manager::{
        Inner, LockManager,
        rhythm::{Rhythm, jittered},
        task::answer,
    },
    store::{Change, Interest, Watch},
};

/// How long a watch is kept when nobody waits any more: the next one comes soon, or not for long.
const KEEP: Duration = Duration::from_secs(30);
/// How long a watch has lasted when it counts as one that works: some can be opened, and fail at once.
const PROVEN: Duration = Duration::from_secs(10);
/// The first pause before a watch that was lost is opened again.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// How often one who waits asks where nobody is told, a quarter more or less: not all at once.
const POLL: Duration = Duration::from_millis(500);

/// How those who wait for a document of a collection learn that it is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Wakeup {
    /// The store is being asked to tell.
    Opening,
    /// The store tells it, at once.
    Told,
    /// The store cannot tell (a standalone server), or does not at the moment: the first one waiting
    /// for each document asks every half a second.
    Polling,
}

/// By collection. Where nobody waits, there is none.
#[derive(Debug, Default)]
pub(in crate::manager) struct Wakeups(Mutex<BTreeMap<&'static str, Wakeup>>);

impl Wakeups {
    fn states(&self) -> MutexGuard<'_, BTreeMap<&'static str, Wakeup>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::manager) fn all(&self) -> BTreeMap<&'static str, Wakeup> {
        self.states().clone()
    }

    pub(in crate::manager) fn must_poll(&self, collection: &str) -> bool {
        self.states().get(collection) != Some(&Wakeup::Told)
    }
}

/// How long until the next attempt of one that is not told.
pub(in crate::manager) fn poll_pause() -> Duration {
    jittered(POLL)
}

impl LockManager {
    /// Sees to it that those who wait in this collection are told. Call it with a place in a queue
    /// taken, and ask the store again when called: what happened before is not told.
    pub(in crate::manager) fn watch_over(&self, collection: &'static str) {
        let mut states = self.inner.wakeups.states();
        if states.contains_key(collection) || self.inner.stop.token().is_cancelled() {
            return;
        }
        states.insert(collection, Wakeup::Opening);
        drop(states);
        // Those who wait ask by themselves until it listens again.
        let panicked = move |now: &Self| now.is_told(collection, Wakeup::Polling);
        self.supervise("wake-ups", panicked, move |inner| listen(inner, collection));
    }

    /// Ends the watch if nobody waits, so that the next one opens it anew.
    fn ends_watch(&self, collection: &'static str) -> bool {
        let mut states = self.inner.wakeups.states();
        // Who waits has its place before it looks whether there is a watch.
        let is_idle = !self.inner.queues.somebody_waits_in(collection);
        if is_idle {
            states.remove(collection);
        }
        is_idle
    }

    /// Once: there are pauses enough, and at a server that closes connections each attempt costs
    /// those who ask in the meantime theirs.
    async fn open_watch(&self, collection: &'static str) -> Result<Option<Watch>, StoreError> {
        let store = Arc::clone(&self.inner.store);
        let opening = async move { store.watch(collection, Interest::Freed).await };
        let opened = self.inner.runner.spawn(&TaskTracker::new(), opening);
        answer("watch", self.until(), opened).await
    }

    fn is_told(&self, collection: &'static str, wakeup: Wakeup) {
        self.inner.wakeups.states().insert(collection, wakeup);
        // They look again: for what happened before, or to go over to asking by themselves.
        self.inner.queues.ask_all(collection);
    }
}

/// Tells those who wait, until nobody does, or the manager is gone or shut down.
async fn listen(manager: Weak<Inner>, collection: &'static str) {
    let mut rhythm =
        Rhythm::new(format!("watching the locks in {collection}, those who wait ask"), FIRST_PAUSE);
    while let Some(inner) = manager.upgrade() {
        let manager_now = LockManager { inner };
        let stop = manager_now.inner.stop.token();
        let opened = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            opened = manager_now.open_watch(collection) => opened,
        };
        let pause = match opened {
            Ok(Some(watch)) => {
                manager_now.is_told(collection, Wakeup::Told);
                drop(manager_now);
                let lost = tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    lost = pass_on(&manager, collection, watch, &mut rhythm) => lost,
                };
                let (Some(why), Some(inner)) = (lost, manager.upgrade()) else { return };
                let manager_now = LockManager { inner };
                manager_now.is_told(collection, Wakeup::Polling);
                if manager_now.ends_watch(collection) {
                    return;
                }
                rhythm.after_failure(&why)
            }
            Ok(None) => {
                if !matches!(manager_now.inner.wakeups.all().get(collection), Some(Wakeup::Polling))
                {
                    log::info!(
                        target: "actix_doclock::background",
                        "this server does not tell of changes (it is no replica set): who waits for a \
                         lock in {collection} asks for it every {POLL:?}",
                    );
                    manager_now.is_told(collection, Wakeup::Polling);
                }
                if manager_now.ends_watch(collection) {
                    return;
                }
                KEEP
            }
            Err(e) => {
                manager_now.is_told(collection, Wakeup::Polling);
                if manager_now.ends_watch(collection) {
                    return;
                }
                rhythm.after_failure(&e)
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep(pause) => {}
        }
    }
}

/// Why it was lost; `None` if nobody waits any more.
async fn pass_on(
    manager: &Weak<Inner>,
    collection: &'static str,
    mut watch: Watch,
    rhythm: &mut Rhythm,
) -> Option<StoreError> {
    let opened = clock::now();
    let mut keep_until = opened + KEEP;
    loop {
        let change = timeout_at(keep_until.into(), watch.next()).await;
        let inner = manager.upgrade()?;
        if matches!(change, Ok(Some(Ok(_))) | Err(_)) && clock::since(opened) >= PROVEN {
            rhythm.works();
        }
        match change {
            Ok(Some(Ok(Change::Changed(key)))) => inner.queues.freed(&key),
            // Not told to one who asked for what is freed; and if so, the next change tells of it.
            Ok(Some(Ok(Change::Taken(..)))) => {}
            Ok(Some(Ok(Change::Missed))) => inner.queues.ask_all(collection),
            Ok(Some(Err(e))) => return Some(e),
            Ok(None) => {
                let message = "the store does not tell any more";
                return Some(StoreError::new(StoreErrorKind::Unavailable, message));
            }
            Err(_) => {}
        }
        // Not by the silence: where nobody waits, locks are released all the same.
        if inner.queues.somebody_waits_in(collection) {
            keep_until = clock::now() + KEEP;
        } else if keep_until <= clock::now() && (LockManager { inner }).ends_watch(collection) {
            return None;
        }
    }
}
