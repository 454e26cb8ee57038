//! Reports documents that become free: one watch of the store for each collection, as long as it has
//! waiters.

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

/// How long a watch is kept without waiters: the next waiter comes soon, or not for a long time.
const KEEP: Duration = Duration::from_secs(30);
/// After this time a watch counts as working: some watches can be opened, but fail at once.
const PROVEN: Duration = Duration::from_secs(10);
/// The first pause before a lost watch is opened again.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// How often a waiter asks the store without a watch, a quarter more or less, so that not all ask at
/// once.
const POLL: Duration = Duration::from_millis(500);

/// How the waiters of a collection learn that a document is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Wakeup {
    /// The watch is being opened.
    Opening,
    /// The store reports it at once.
    Told,
    /// The store cannot report it (a standalone server), or does not report it at the moment: the first
    /// waiter of each document asks every half a second.
    Polling,
}

/// The state of each collection. A collection without waiters has no entry.
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

/// The pause until the next attempt of a waiter without a watch.
pub(in crate::manager) fn poll_pause() -> Duration {
    jittered(POLL)
}

impl LockManager {
    /// Makes sure that the waiters of this collection are told. Call it after joining a queue, and ask
    /// the store again when called: earlier changes are not reported.
    pub(in crate::manager) fn watch_over(&self, collection: &'static str) {
        let mut states = self.inner.wakeups.states();
        if states.contains_key(collection) || self.inner.stop.token().is_cancelled() {
            return;
        }
        states.insert(collection, Wakeup::Opening);
        drop(states);
        // The waiters poll until the watch works again.
        let panicked = move |now: &Self| now.is_told(collection, Wakeup::Polling);
        self.supervise("wake-ups", panicked, move |inner| listen(inner, collection));
    }

    /// Ends the watch if there are no waiters, so that the next waiter opens a new one.
    fn ends_watch(&self, collection: &'static str) -> bool {
        let mut states = self.inner.wakeups.states();
        // A waiter joins its queue before it checks whether there is a watch.
        let is_idle = !self.inner.queues.somebody_waits_in(collection);
        if is_idle {
            states.remove(collection);
        }
        is_idle
    }

    /// Makes one attempt only. The caller pauses before the next one anyway, and on a server that closes
    /// connections each attempt would cost other operations their connections.
    async fn open_watch(&self, collection: &'static str) -> Result<Option<Watch>, StoreError> {
        let store = Arc::clone(&self.inner.store);
        let opening = async move { store.watch(collection, Interest::Freed).await };
        let opened = self.inner.runner.spawn(&TaskTracker::new(), opening);
        answer("watch", self.until(), opened).await
    }

    fn is_told(&self, collection: &'static str, wakeup: Wakeup) {
        self.inner.wakeups.states().insert(collection, wakeup);
        // The waiters ask again: because of earlier changes, or because they must poll from now on.
        self.inner.queues.ask_all(collection);
    }
}

/// Wakes the waiters until there are none, or until the manager is gone or shut down.
async fn listen(manager: Weak<Inner>, collection: &'static str) {
    let mut rhythm =
        Rhythm::new(format!("watching the locks in {collection}, the waiters poll"), FIRST_PAUSE);
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
                        "this server has no change streams (it is not a replica set): the first waiter for \
                         each lock in {collection} asks for it every {POLL:?}",
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

/// Returns why the watch was lost; `None` if there are no more waiters.
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
            // This watch asks only for freed documents, so this does not occur. If it does, the next
            // change reports it.
            Ok(Some(Ok(Change::Taken(..)))) => {}
            Ok(Some(Ok(Change::Missed))) => inner.queues.ask_all(collection),
            Ok(Some(Err(e))) => return Some(e),
            Ok(None) => {
                let message = "the store has ended the change stream";
                return Some(StoreError::new(StoreErrorKind::Unavailable, message));
            }
            Err(_) => {}
        }
        // Does not rely on quiet periods: locks are also released in a collection without waiters.
        if inner.queues.somebody_waits_in(collection) {
            keep_until = clock::now() + KEEP;
        } else if keep_until <= clock::now() && (LockManager { inner }).ends_watch(collection) {
            return None;
        }
    }
}
