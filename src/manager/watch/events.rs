//! Tells the subscribers what happens to locks: one task for each collection compares the locks with
//! what the subscribers know, as long as there are subscribers.

use std::{
    collections::BTreeSet,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::{
    sync::broadcast::{self, Receiver, error::RecvError},
    time::{sleep, timeout},
};

use crate::{
    event::LockEvent,
    manager::{
        Core,
        pauses::jittered,
        watch::changes::{KEEP, Wakeup},
    },
    store::Change,
};

mod known;

use known::{KnownLocks, Listing};

/// How many events are kept for a slow subscriber. If there are more, it gets a [`LockEvent::Resync`].
const KEPT: usize = 1024;
/// How many changed documents of a collection are read together.
const AT_ONCE: usize = 200;
/// How often the locks are listed if the store does not report changes.
const POLL: Duration = Duration::from_secs(1);

/// The subscribers, and the collections that have a task.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<Feed>);

#[derive(Debug)]
struct Feed {
    sender: Option<broadcast::Sender<Arc<LockEvent>>>,
    /// The collections that have a task.
    followed: BTreeSet<&'static str>,
}

impl Default for Feed {
    fn default() -> Self {
        let sender = Some(broadcast::Sender::new(KEPT));
        Self { sender, followed: BTreeSet::new() }
    }
}

impl Events {
    pub(in crate::manager) fn tell(&self, event: LockEvent) {
        if let Some(sender) = &self.0.lock().sender {
            // There may be no subscriber.
            let _ = sender.send(Arc::new(event));
        }
    }

    /// Ends the task if there are no subscribers, so that the next subscriber starts a new one.
    fn ends(&self, collection: &'static str) -> bool {
        let mut state = self.0.lock();
        let is_idle = state.is_idle();
        if is_idle {
            state.followed.remove(collection);
        }
        is_idle
    }

    pub(in crate::manager) fn close(&self) {
        self.0.lock().sender = None;
    }
}

impl Feed {
    fn is_idle(&self) -> bool {
        self.sender.as_ref().is_none_or(|sender| sender.receiver_count() == 0)
    }
}

/// The events of all locks in all registered collections, from [`LockManager::events`](crate::LockManager::events).
#[derive(Debug)]
pub struct LockEvents {
    receiver: Option<Receiver<Arc<LockEvent>>>,
    is_new: bool,
}

impl LockEvents {
    /// The next event. The first event is [`Resync`](LockEvent::Resync), which also follows whenever
    /// events were missed. `None` once the manager is shut down, or its [shutdown has
    /// begun](crate::LockManager::begin_shutdown).
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub async fn next(&mut self) -> Option<Arc<LockEvent>> {
        if std::mem::take(&mut self.is_new) && self.receiver.is_some() {
            return Some(Arc::new(LockEvent::Resync));
        }
        match self.receiver.as_mut()?.recv().await {
            Ok(event) => Some(event),
            Err(RecvError::Lagged(_)) => Some(Arc::new(LockEvent::Resync)),
            Err(RecvError::Closed) => None,
        }
    }
}

impl LockEvents {
    /// The events from now on.
    pub(in crate::manager) fn of(core: &Arc<Core>) -> Self {
        let receiver = core.events.0.lock().sender.as_ref().map(broadcast::Sender::subscribe);
        core.follow_all();
        Self { receiver, is_new: true }
    }
}

impl Core {
    /// Watches all registered collections, if there are subscribers.
    pub(in crate::manager) fn follow_all(self: &Arc<Self>) {
        let names = self.collections.names();
        let mut state = self.events.0.lock();
        if state.is_idle() || self.stop.token().is_cancelled() {
            return;
        }
        for collection in names {
            if state.followed.insert(collection) {
                // The subscribers are told when the task works again.
                self.supervise("events", |_| {}, move |core| follow(core, collection));
            }
        }
    }

    /// True if the store reports changes in all watched collections. Otherwise the locks are listed once
    /// a second.
    pub(crate) fn is_told_of_events(&self) -> bool {
        self.watches.states().values().all(|how| *how != Wakeup::Polling)
    }
}

/// Tells the changes until there are no subscribers, or until the manager is gone.
///
/// The subscribers are asked to [resync](LockEvent::Resync) when the changes begin to be told, when
/// polling begins, and whenever some changes were not seen. During an outage they are not asked, because
/// all of them would then ask in vain.
async fn follow(manager: Weak<Core>, collection: &'static str) {
    let Some(mut changes) = manager.upgrade().and_then(|now| now.changes(collection)) else {
        return;
    };
    let (mut known, mut was) = (KnownLocks::new(collection), Wakeup::Opening);
    while let Some(now) = manager.upgrade() {
        if now.events.ends(collection) {
            return;
        }
        let how = now.watches.state(collection).unwrap_or(Wakeup::Opening);
        if how == Wakeup::Opening {
            drop(now);
            // The state has changed, or there may be no more subscribers.
            let _ = timeout(KEEP, changes.recv()).await;
            continue;
        }
        let listed = known.list(&now).await;
        let is_told = how == Wakeup::Told && listed.is_ok();
        let begins_to_poll = how == Wakeup::Polling && was != how;
        if is_told || begins_to_poll || matches!(listed, Ok(Listing::Anew)) {
            now.events.tell(LockEvent::Resync);
        }
        was = how;
        if let Err(why) = listed {
            log::debug!(
                target: "actix_doclock::background",
                "the locks in {collection} could not be listed for the subscribers of events: {why}",
            );
        }
        drop(now);
        if is_told {
            tell(&manager, &mut known, &mut changes).await;
        } else if how == Wakeup::Told {
            // The locks could not be listed. The changes wait.
            sleep(jittered(POLL)).await;
        } else {
            // Without a watch, the only change is another state.
            let _ = timeout(jittered(POLL), changes.recv()).await;
        }
    }
}

/// Tells each change, until a change was missed or could not be read, or until there are no subscribers.
async fn tell(manager: &Weak<Core>, known: &mut KnownLocks, changes: &mut Receiver<Change>) {
    loop {
        let change = timeout(KEEP, changes.recv()).await;
        let Some(now) = manager.upgrade() else { return };
        // All changes that have arrived since are read together: by one read, however many there are.
        let (mut changed, mut next) = (BTreeSet::new(), change.ok());
        while let Some(change) = next {
            match change {
                Ok(Change::Freed(key) | Change::Granted(key) | Change::Asked(key)) => {
                    changed.insert(key);
                }
                Ok(Change::Broken(key, token, taken_by)) => {
                    now.causes.was_taken(key.clone(), token, taken_by);
                    changed.insert(key);
                }
                Ok(Change::Saved(key, save)) => {
                    let lock = known.writer_of(&key);
                    now.events.tell(LockEvent::Saved(key, save, lock));
                }
                Ok(_) | Err(_) => return,
            }
            next = (changed.len() < AT_ONCE).then(|| changes.recv().now_or_never()).flatten();
        }
        let is_read = changed.is_empty() || known.read(&now, changed).await.is_ok();
        if !is_read || now.events.0.lock().is_idle() {
            return;
        }
    }
}
