//! The changes of locks: one watch of the store for each collection, as long as it has waiters or
//! subscribers of events.
//!
//! The watch wakes the waiters itself. It passes each change on to the [events](super::events), which
//! read the documents in a task of their own, so that a slow read delays no waiter.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::{
    sync::broadcast::{Receiver, Sender},
    time::{sleep, timeout_at},
};
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::{Result, StoreError, StoreErrorKind},
    manager::{
        Core,
        pauses::{Pauses, jittered},
    },
    store::{Change, Deadline, Watch},
};

/// How many changes are kept for the events of a collection. If there are more, all locks of the
/// collection are listed instead.
const KEPT: usize = 1024;
/// How long a watch is kept without waiters and subscribers: the next one comes soon, or not for a long
/// time.
pub(super) const KEEP: Duration = Duration::from_secs(30);
/// After this time a watch counts as working: some watches can be opened, but fail at once.
const PROVEN: Duration = Duration::from_secs(10);
/// The first pause before a lost watch is opened again.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// How often a waiter asks the store without a watch, a quarter more or less, so that not all ask at
/// once.
const POLL: Duration = Duration::from_millis(500);

/// How this process learns of changes in a collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Wakeup {
    /// The watch is being opened.
    Opening,
    /// The store reports them at once.
    Told,
    /// The store cannot report them (a standalone server), or does not report them at the moment: the
    /// first waiter of each document asks every half a second, and the locks are listed every second for
    /// the subscribers of events.
    Polling,
}

/// The watched collections. A collection without waiters and subscribers has no entry.
#[derive(Debug, Default)]
pub(in crate::manager) struct Watches(Mutex<BTreeMap<&'static str, WatchedCollection>>);

#[derive(Debug)]
struct WatchedCollection {
    how: Wakeup,
    changes: Sender<Change>,
}

impl Watches {
    pub(in crate::manager) fn states(&self) -> BTreeMap<&'static str, Wakeup> {
        self.0.lock().iter().map(|(collection, watched)| (*collection, watched.how)).collect()
    }

    pub(in crate::manager) fn state(&self, collection: &str) -> Option<Wakeup> {
        self.0.lock().get(collection).map(|watched| watched.how)
    }
}

/// The pause until the next attempt of a waiter without a watch.
pub(in crate::manager) fn poll_pause() -> Duration {
    jittered(POLL)
}

impl Core {
    /// Makes sure that the waiters of this collection are woken. Call it after joining a queue, and ask
    /// the store again when called: earlier changes are not reported.
    pub(in crate::manager) fn watch_over(self: &Arc<Self>, collection: &'static str) {
        self.watched(collection, |_| ());
    }

    /// All changes in this collection from now on. A [`Missed`](Change::Missed) also reports that the
    /// collection is watched in another way than before. `None` once the manager is shut down.
    pub(super) fn changes(self: &Arc<Self>, collection: &'static str) -> Option<Receiver<Change>> {
        self.watched(collection, Sender::subscribe)
    }

    fn watched<T>(
        self: &Arc<Self>,
        collection: &'static str,
        join: impl FnOnce(&Sender<Change>) -> T,
    ) -> Option<T> {
        let mut all = self.watches.0.lock();
        if let Some(watched) = all.get(collection) {
            return Some(join(&watched.changes));
        }
        if self.stop.token().is_cancelled() {
            return None;
        }
        let changes = Sender::new(KEPT);
        let joined = join(&changes);
        all.insert(
            collection,
            WatchedCollection { how: Wakeup::Opening, changes: changes.clone() },
        );
        drop(all);
        // The waiters poll until the watch works again.
        let panicked = move |now: &Self| now.is_watched(collection, Wakeup::Polling);
        self.supervise("watch", panicked, move |core| listen(core, collection, changes.clone()));
        Some(joined)
    }

    fn is_wanted(&self, collection: &str, changes: &Sender<Change>) -> bool {
        changes.receiver_count() > 0
            || self.beliefs.queues.machine.lock().has_waiters_in(collection)
    }

    /// Ends the watch if nobody wants it, so that the next waiter or subscriber opens a new one.
    fn ends_watch(&self, collection: &'static str, changes: &Sender<Change>) -> bool {
        let mut all = self.watches.0.lock();
        // A waiter joins its queue before it looks for a watch. A subscriber joins under this mutex.
        let is_idle = !self.is_wanted(collection, changes);
        if is_idle {
            all.remove(collection);
        }
        is_idle
    }

    /// Makes one attempt only. The caller pauses before the next one anyway, and on a server that closes
    /// connections each attempt would cost other operations their connections.
    async fn open_watch(&self, collection: &'static str) -> Result<Option<Watch>> {
        let store = Arc::clone(&self.verbs.store);
        let opening = async move { store.watch(collection, Deadline::NONE).await };
        self.verbs.complete("watch", self.verbs.until(), &TaskTracker::new(), opening).await
    }

    fn is_watched(&self, collection: &'static str, how: Wakeup) {
        if let Some(watched) = self.watches.0.lock().get_mut(collection) {
            watched.how = how;
        }
        // The waiters ask again: because of earlier changes, or because they must poll from now on.
        self.tell(collection, Change::Missed);
    }

    /// This process stood still: its beliefs are older than they seem.
    pub(in crate::manager) fn look_again(&self) {
        self.beliefs.activity.all_are_due();
        for collection in self.watches.states().into_keys() {
            self.tell(collection, Change::Missed);
        }
    }

    fn tell(&self, collection: &str, change: Change) {
        match &change {
            Change::Freed(key) | Change::Broken(key, ..) => {
                self.beliefs.queues.machine.lock().freed(key);
            }
            Change::Granted(_) | Change::Saved(..) | Change::Asked(_) => {}
            _ => self.beliefs.queues.call_all(collection),
        }
        if let Some(watched) = self.watches.0.lock().get(collection) {
            // There may be no subscriber.
            let _ = watched.changes.send(change);
        }
    }
}

/// Passes the changes on as long as somebody wants them, until the manager is gone.
async fn listen(manager: Weak<Core>, collection: &'static str, changes: Sender<Change>) {
    let mut pauses = Pauses::new(format!("watching the locks in {collection}"), FIRST_PAUSE);
    while let Some(core) = manager.upgrade() {
        let pause = match core.open_watch(collection).await {
            Ok(Some(watch)) => {
                core.is_watched(collection, Wakeup::Told);
                drop(core);
                let lost = pass_on(&manager, collection, &changes, watch, &mut pauses).await;
                let (Some(why), Some(core)) = (lost, manager.upgrade()) else { return };
                core.is_watched(collection, Wakeup::Polling);
                if core.ends_watch(collection, &changes) {
                    return;
                }
                pauses.after_failure(&why)
            }
            Ok(None) => {
                if core.watches.state(collection) != Some(Wakeup::Polling) {
                    log::info!(
                        target: "actix_doclock::background",
                        "this server has no change streams (it is not a replica set): the first waiter for \
                         each lock in {collection} asks for it every {POLL:?}",
                    );
                    core.is_watched(collection, Wakeup::Polling);
                }
                if core.ends_watch(collection, &changes) {
                    return;
                }
                KEEP
            }
            Err(e) => {
                core.is_watched(collection, Wakeup::Polling);
                if core.ends_watch(collection, &changes) {
                    return;
                }
                pauses.after_failure(&e)
            }
        };
        sleep(pause).await;
    }
}

/// Returns why the watch was lost; `None` if nobody wants it any more.
async fn pass_on(
    manager: &Weak<Core>,
    collection: &'static str,
    changes: &Sender<Change>,
    mut watch: Watch,
    pauses: &mut Pauses,
) -> Option<StoreError> {
    let opened = clock::now();
    let mut keep_until = opened + KEEP;
    loop {
        let change = timeout_at(keep_until.into(), watch.next()).await;
        let now = manager.upgrade()?;
        if matches!(change, Ok(Some(Ok(_))) | Err(_)) && clock::since(opened) >= PROVEN {
            pauses.works();
        }
        match change {
            Ok(Some(Ok(change))) => now.tell(collection, change),
            Ok(Some(Err(e))) => return Some(e),
            Ok(None) => {
                let message = "the store has ended the change stream";
                return Some(StoreError::new(StoreErrorKind::Unavailable, message));
            }
            Err(_) => {}
        }
        // Does not rely on quiet periods: locks also change in a collection without waiters.
        if now.is_wanted(collection, changes) {
            keep_until = clock::now() + KEEP;
        } else if keep_until <= clock::now() && now.ends_watch(collection, changes) {
            return None;
        }
    }
}
