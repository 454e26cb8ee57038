//! Tells the subscribers what happens to locks: one watch of the store for each collection, as long as
//! there are subscribers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use futures_util::FutureExt;
use tokio::{
    sync::broadcast::{self, Receiver, error::RecvError},
    time::{sleep, timeout},
};
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::{LockError, StoreError, StoreErrorKind},
    event::LockEvent,
    lock::{Lock, LockToken},
    manager::{
        Inner, LockManager,
        rhythm::{Rhythm, jittered},
        task::answer,
        watch::{streams::Streams, wakeups::Wakeup},
    },
    store::{Change, Interest, Taken, Watch},
};

mod known;

use known::{Known, Looked};

/// How many events are kept for a slow subscriber. If there are more, it gets a [`LockEvent::Resync`].
const KEPT: usize = 1024;
/// How many changed documents of a collection are read together.
const AT_ONCE: usize = 200;
/// How long a watch without events is kept when there are no more subscribers.
const KEEP: Duration = Duration::from_secs(30);
/// How often the locks are listed if the store does not report changes.
const POLL: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// After this time a watch counts as working: some watches can be opened, but fail at once.
const PROVEN: Duration = Duration::from_secs(10);
/// How long it is remembered who took a lock: long enough for this process to see the change.
const REMEMBER_TAKEN: Duration = Duration::from_secs(60);

/// The subscribers, and what they were told last.
#[derive(Debug, Default)]
pub(in crate::manager) struct Events(Mutex<State>);

#[derive(Debug)]
struct State {
    sender: Option<broadcast::Sender<Arc<LockEvent>>>,
    /// The watched collections, and how each is watched.
    told: BTreeMap<&'static str, Wakeup>,
    taken: HashMap<LockToken, (Taken, Instant)>,
}

impl Default for State {
    fn default() -> Self {
        let sender = Some(broadcast::Sender::new(KEPT));
        Self { sender, told: BTreeMap::new(), taken: HashMap::new() }
    }
}

impl Events {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This lock is about to be taken from its holder.
    pub(in crate::manager) fn took(&self, lock: &Lock, taken: &Taken) {
        if let Some(token) = lock.token {
            self.was_taken(token, taken.clone());
        }
    }

    fn was_taken(&self, token: LockToken, taken: Taken) {
        let taken_by = &mut self.state().taken;
        taken_by.retain(|_, (_, at)| clock::since(*at) < REMEMBER_TAKEN);
        taken_by.insert(token, (taken, clock::now()));
    }

    fn taken_by(&self, lock: &Lock) -> Option<Taken> {
        let state = self.state();
        state.taken.get(&lock.token?).map(|(taken, _)| taken.clone())
    }

    fn tell(&self, event: LockEvent) {
        if let Some(sender) = &self.state().sender {
            // There may be no subscriber.
            let _ = sender.send(Arc::new(event));
        }
    }

    fn is_told(&self, collection: &'static str, how: Wakeup) {
        self.state().told.insert(collection, how);
        self.tell(LockEvent::Resync);
    }

    /// Ends the watch if there are no subscribers, so that the next subscriber opens a new one.
    fn ends_watch(&self, collection: &'static str) -> bool {
        let mut state = self.state();
        let is_idle = state.sender.as_ref().is_none_or(|sender| sender.receiver_count() == 0);
        if is_idle {
            state.told.remove(collection);
        }
        is_idle
    }

    fn close(&self) {
        self.state().sender = None;
    }
}

/// The events of all locks in all registered collections, from [`LockManager::events`].
#[derive(Debug)]
pub struct LockEvents {
    receiver: Option<Receiver<Arc<LockEvent>>>,
    is_new: bool,
}

impl LockEvents {
    /// The next event. The first event is [`Resync`](LockEvent::Resync), which also follows whenever
    /// events were missed. `None` once the manager is shut down, or its [shutdown has
    /// begun](LockManager::begin_shutdown).
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

impl LockManager {
    /// The events of all locks in all registered collections from now on, on any server.
    ///
    /// On a replica set the server reports each event within milliseconds; elsewhere the locks are listed
    /// once a second. In both cases, one watch for each collection serves all subscribers. A subscriber
    /// that takes the events too slowly misses some, and is told so.
    ///
    /// ```no_run
    /// # use actix_doclock::{LockEvent, LockManager};
    /// # async fn follow(locks: LockManager) {
    /// let mut events = locks.events();
    /// while let Some(event) = events.next().await {
    ///     match &*event {
    ///         LockEvent::Resync => println!("read everything again: locks.list()"),
    ///         other => println!("{}: {:?}", other.name(), other.lock()),
    ///     }
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn events(&self) -> LockEvents {
        let receiver = self.inner.events.state().sender.as_ref().map(broadcast::Sender::subscribe);
        self.follow_all();
        LockEvents { receiver, is_new: true }
    }

    /// Watches all registered collections, if there are subscribers.
    pub(in crate::manager) fn follow_all(&self) {
        let names = self.registered_names();
        let mut state = self.inner.events.state();
        let is_idle = state.sender.as_ref().is_none_or(|sender| sender.receiver_count() == 0);
        if is_idle || self.inner.stop.token().is_cancelled() {
            return;
        }
        for collection in names {
            if !state.told.contains_key(collection) {
                state.told.insert(collection, Wakeup::Opening);
                let panicked =
                    move |now: &Self| now.inner.events.is_told(collection, Wakeup::Polling);
                self.supervise("events", panicked, move |inner| follow(inner, collection));
            }
        }
    }

    /// Ends all [streams of events](Self::events), those over HTTP too, refuses all waiters
    /// ([`LockError::ShutDown`]), and accepts no new ones. Everything else goes on.
    ///
    /// Call it before a graceful stop of the HTTP server, which waits for requests to end;
    /// [`serve`](Self::serve) does so. [`shutdown`](Self::shutdown) comes afterwards.
    pub fn begin_shutdown(&self) {
        self.inner.events.close();
        self.inner.waits.cancel();
    }

    /// Counts the streams of events over HTTP.
    pub(crate) fn event_streams(&self) -> &Streams {
        &self.inner.event_streams
    }

    /// Whether the store reports changes in all watched collections. Otherwise the locks are listed once
    /// a second.
    pub(crate) fn is_told_of_events(&self) -> bool {
        self.inner.events.state().told.values().all(|how| *how != Wakeup::Polling)
    }
}

/// Watches until there are no subscribers, or until the manager is gone or shut down.
async fn follow(manager: Weak<Inner>, collection: &'static str) {
    let Some(stop) = manager.upgrade().map(|inner| inner.stop.token()) else { return };
    tokio::select! {
        biased;
        () = stop.cancelled() => {
            if let Some(inner) = manager.upgrade() {
                inner.events.close();
            }
        }
        () = watch_and_tell(&manager, collection) => {}
    }
}

async fn watch_and_tell(manager: &Weak<Inner>, collection: &'static str) {
    let mut rhythm =
        Rhythm::new(format!("watching all changes of the locks in {collection}"), FIRST_PAUSE);
    let mut known = Known::new(collection);
    loop {
        let Some(opened) = open(manager, collection).await else { return };
        let pause = match opened {
            Ok(Some(watch)) => match tell(manager, &mut known, watch, &mut rhythm).await {
                None => return,
                Some(why) => rhythm.after_failure(&why),
            },
            Ok(None) => Duration::MAX,
            Err(why) => rhythm.after_failure(&why),
        };
        if !poll(manager, &mut known, pause).await {
            return;
        }
    }
}

async fn open(
    manager: &Weak<Inner>,
    collection: &'static str,
) -> Option<Result<Option<Watch>, StoreError>> {
    let manager = LockManager { inner: manager.upgrade()? };
    let store = Arc::clone(&manager.inner.store);
    let opening = async move { store.watch(collection, Interest::All).await };
    let opened = manager.inner.runner.spawn(&TaskTracker::new(), opening);
    Some(answer("watch", manager.until(), opened).await)
}

/// Returns why the watch was lost; `None` if there are no more subscribers.
async fn tell(
    manager: &Weak<Inner>,
    known: &mut Known,
    mut watch: Watch,
    rhythm: &mut Rhythm,
) -> Option<StoreError> {
    let lost = |why: LockError| StoreError::new(StoreErrorKind::Unavailable, why.to_string());
    if let Err(why) = known.look_at_all(&LockManager { inner: manager.upgrade()? }).await {
        return Some(lost(why));
    }
    manager.upgrade()?.events.is_told(known.collection, Wakeup::Told);
    let opened = clock::now();
    loop {
        let change = timeout(KEEP, watch.next()).await;
        let now = LockManager { inner: manager.upgrade()? };
        if matches!(change, Ok(Some(Ok(_))) | Err(_)) && clock::since(opened) >= PROVEN {
            rhythm.works();
        }
        // All changes that have arrived since are read together: by one read, however many there are.
        let (mut changed, mut has_missed) = (BTreeSet::new(), false);
        let mut next = change.ok();
        while let Some(change) = next {
            match change {
                Some(Ok(Change::Changed(key))) => drop(changed.insert(key)),
                Some(Ok(Change::Taken(key, token, taken))) => {
                    now.inner.events.was_taken(token, taken);
                    changed.insert(key);
                }
                Some(Ok(Change::Missed)) => has_missed = true,
                Some(Err(why)) => return Some(why),
                None => {
                    let message = "the store has ended the change stream";
                    return Some(StoreError::new(StoreErrorKind::Unavailable, message));
                }
            }
            next = (changed.len() < AT_ONCE).then(|| watch.next().now_or_never()).flatten();
        }
        let looked = if has_missed {
            let looked = known.look_at_all(&now).await.map(drop);
            now.inner.events.tell(LockEvent::Resync);
            looked
        } else if changed.is_empty() {
            Ok(())
        } else {
            known.look_at(&now, changed).await
        };
        if let Err(why) = looked {
            return Some(lost(why));
        }
        if now.inner.events.ends_watch(known.collection) {
            return None;
        }
    }
}

/// Lists the locks repeatedly for this long. Says whether there are still subscribers.
async fn poll(manager: &Weak<Inner>, known: &mut Known, pause: Duration) -> bool {
    let began = clock::now();
    let mut is_first = true;
    while is_first || clock::since(began) < pause {
        let Some(inner) = manager.upgrade() else { return false };
        let now = LockManager { inner };
        if now.inner.events.ends_watch(known.collection) {
            return false;
        }
        let looked = known.look_at_all(&now).await;
        // The subscribers are told when polling begins, and again when some changes were not seen. During
        // an outage they are not told, because all of them would then ask in vain.
        let missed = matches!(looked, Ok(Looked::Anew));
        if std::mem::take(&mut is_first) || missed {
            now.inner.events.is_told(known.collection, Wakeup::Polling);
        }
        if let Err(why) = looked {
            log::debug!(
                target: "actix_doclock::background",
                "the locks in {} could not be listed for the subscribers of events: {why}",
                known.collection,
            );
        }
        drop(now);
        sleep(jittered(POLL)).await;
    }
    true
}
