//! The news in the answers of the store, for the watchers of a lock, for the waiters and for the session.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::poll_fn,
    hash::Hash,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{sleep_until, timeout_at},
};

use crate::{
    clock,
    key::LockKey,
    lock::{Aid, Lock, LockToken, Mode},
    manager::{Core, activity::Activity, observe::Losses, store_time::StoreTime, wait::Queues},
    random::HashMap,
    store::{Acquisition, Active},
};

/// How long before the lock expires the server is asked, at most: another server may have renewed the lock.
const ASK_BEFORE: Duration = Duration::from_secs(5);

/// What this process believes about locks and sessions: the news in the answers of the store changes it.
pub(super) struct Beliefs {
    pub(super) activity: Activity,
    pub(super) watched: Watched,
    pub(super) queues: Arc<Queues>,
    pub(super) losses: Losses,
    pub(super) time: Arc<StoreTime>,
}

impl Beliefs {
    /// The store was asked at the moment `asked`, and answered: this is the live lock on its document.
    pub(super) fn saw(&self, lock: &Lock, asked: Instant) {
        self.watched.saw(lock, asked);
        self.activity.saw(&lock.aid, lock.expires_in());
    }

    /// The store was asked at the moment `asked`, and answered: the session holds these locks and no others.
    pub(super) fn saw_all_of(&self, aid: &Aid, locks: &[Lock], asked: Instant) {
        self.watched.saw_all_of(aid, locks, asked);
        if let Some(left) = locks.iter().map(Lock::expires_in).min() {
            self.activity.saw(aid, left);
        }
    }

    /// This acquisition has ended, for whatever reason.
    pub(super) fn gone(&self, lock: &Acquisition) {
        self.activity.unlearn(&lock.aid, &lock.key);
        self.watched.ended(lock);
        self.queues.machine.lock().ended(lock);
    }

    /// The store has replaced this acquisition by the lock of a claim that was sent at that moment.
    pub(super) fn handed_over(&self, from: &Acquisition, to: &Lock, asked: Instant) {
        self.watched.ended(from);
        self.watched.saw(to, asked);
        self.queues.machine.lock().held(to);
    }

    /// The session held these documents, and holds nothing now.
    pub(super) fn gone_all_of(&self, aid: &Aid, keys: &[LockKey], asked: Instant) {
        self.watched.saw_all_of(aid, &[], asked);
        for key in keys {
            self.activity.unlearn(aid, key);
            self.queues.machine.lock().freed(key);
        }
    }
}

/// The watched locks, and the latest news of them from the operations of this process. Every guard watches its lock.
#[derive(Debug, Clone, Default)]
pub(in crate::manager) struct Watched {
    locks: Arc<Mutex<WatchedLocks>>,
}

/// Indexed by acquisition, by document and by session: each answer of the store is about one of these. So
/// an answer costs the same however many locks are watched.
#[derive(Debug, Default)]
struct WatchedLocks {
    of: HashMap<LockToken, WatchedLock>,
    by_key: HashMap<LockKey, Vec<LockToken>>,
    by_aid: HashMap<Aid, Vec<LockToken>>,
    /// The ttls whose guards have a task that renews them. One task for all ttls would not do: a collection that does not
    /// answer would delay the renewal of shorter leases elsewhere until they expire.
    with_task: BTreeSet<Duration>,
}

impl WatchedLocks {
    fn watch(&mut self, lock: &Lock, token: LockToken) -> &mut WatchedLock {
        if !self.of.contains_key(&token) {
            self.by_key.entry(lock.key.clone()).or_default().push(token);
            self.by_aid.entry(lock.aid.clone()).or_default().push(token);
        }
        let live = Belief::Live { expires_at: lock.expires_at, known: clock::now() };
        self.of.entry(token).or_insert_with(|| WatchedLock {
            held: Acquisition {
                key: lock.key.clone(),
                aid: lock.aid.clone(),
                token,
                mode: lock.mode,
            },
            news: watch::Sender::new(live),
            watchers: 0,
            guarded: None,
        })
    }

    fn forget(&mut self, token: LockToken) {
        let Some(WatchedLock { held, .. }) = self.of.remove(&token) else { return };
        remove(&mut self.by_key, &held.key, token);
        remove(&mut self.by_aid, &held.aid, token);
    }
}

/// True for a waiter that is shown in place of a lock: its document is reserved for it. The lock of a foreign program names
/// no holder.
fn is_waiter(lock: &Lock) -> bool {
    lock.token.is_none() && lock.holder.is_some()
}

fn remove<K: Eq + Hash>(index: &mut HashMap<K, Vec<LockToken>>, of: &K, token: LockToken) {
    if let Some(tokens) = index.get_mut(of) {
        tokens.retain(|other| *other != token);
        if tokens.is_empty() {
            index.remove(of);
        }
    }
}

#[derive(Debug)]
struct WatchedLock {
    held: Acquisition,
    news: watch::Sender<Belief>,
    watchers: usize,
    /// The ttl of the guard that has this lock. `None` if no guard has it.
    guarded: Option<Duration>,
}

/// The belief of this process about a lock.
#[derive(Debug, Clone, Copy)]
enum Belief {
    /// Live until `expires_at`, according to an answer at the moment `known`.
    Live {
        expires_at: Instant,
        known: Instant,
    },
    Gone,
}

/// One watcher of a lock. Dropping it ends the watch.
#[derive(Debug)]
pub(in crate::manager) struct LockWatch {
    watched: Watched,
    token: LockToken,
    news: watch::Receiver<Belief>,
}

impl Watched {
    pub(in crate::manager) fn watch(&self, lock: &Lock, token: LockToken) -> LockWatch {
        let mut locks = self.locks.lock();
        let entry = locks.watch(lock, token);
        entry.watchers += 1;
        LockWatch { watched: self.clone(), token, news: entry.news.subscribe() }
    }

    /// A guard has this watched lock from now on. True if the guard is new, and true if its ttl has no task yet.
    pub(in crate::manager) fn guard_taken(&self, token: LockToken, ttl: Duration) -> (bool, bool) {
        let mut locks = self.locks.lock();
        let guarded = locks.of.get_mut(&token).map(|entry| entry.guarded.replace(ttl));
        (guarded == Some(None), locks.with_task.insert(ttl))
    }

    /// True if a guard had this lock until now.
    pub(in crate::manager) fn guard_dropped(&self, token: LockToken) -> bool {
        let mut locks = self.locks.lock();
        locks.of.get_mut(&token).is_some_and(|entry| entry.guarded.take().is_some())
    }

    fn is_guarded(&self, token: LockToken) -> bool {
        self.locks.lock().of.get(&token).is_some_and(|entry| entry.guarded.is_some())
    }

    pub(in crate::manager) fn guards(&self) -> usize {
        self.locks.lock().of.values().filter(|entry| entry.guarded.is_some()).count()
    }

    /// The sessions of the guards with this ttl, by collection. If there are none, the task of this ttl ends.
    pub(in crate::manager) fn guards_of(&self, ttl: Duration) -> BTreeMap<String, Vec<Active>> {
        let mut locks = self.locks.lock();
        let mut due = BTreeMap::<_, Vec<_>>::new();
        for WatchedLock { held, .. } in locks.of.values().filter(|it| it.guarded == Some(ttl)) {
            let of_collection = due.entry(held.key.collection().to_owned()).or_default();
            of_collection.push(Active::all_of(&held.aid));
        }
        if due.is_empty() {
            locks.with_task.remove(&ttl);
        }
        due
    }

    /// The watched locks of these sessions in this collection.
    pub(in crate::manager) fn of(&self, aids: &[Aid], collection: &str) -> Vec<Acquisition> {
        let locks = self.locks.lock();
        let tokens = aids.iter().filter_map(|aid| locks.by_aid.get(aid)).flatten();
        let watched = tokens.filter_map(|token| locks.of.get(token)).map(|entry| &entry.held);
        watched.filter(|held| held.key.collection() == collection).cloned().collect()
    }

    /// The store was asked at the moment `asked`, and answered: this is the live lock on its document.
    pub(in crate::manager) fn saw(&self, lock: &Lock, asked: Instant) {
        let locks = self.locks.lock();
        locks.learn(locks.by_key.get(&lock.key), asked, |entry, token| {
            let live = Belief::Live { expires_at: lock.expires_at, known: clock::now() };
            match lock.token {
                Some(seen) if seen == token => Some(live),
                // There may be more readers than the one in the answer, which may be the waiter that is next.
                _ if entry.held.mode == Mode::Shared
                    && (lock.mode == Mode::Shared || is_waiter(lock)) =>
                {
                    None
                }
                _ => Some(Belief::Gone),
            }
        });
    }

    /// The store was asked at the moment `asked`, and answered: no lock on this document is live.
    pub(in crate::manager) fn saw_free(&self, key: &LockKey, asked: Instant) {
        let locks = self.locks.lock();
        locks.learn(locks.by_key.get(key), asked, |_, _| Some(Belief::Gone));
    }

    /// The store was asked at the moment `asked`, and answered: the session holds these locks and no others.
    pub(in crate::manager) fn saw_all_of(&self, aid: &Aid, held: &[Lock], asked: Instant) {
        let held: HashMap<_, _> = held.iter().map(|lock| (lock.token, lock.expires_at)).collect();
        let locks = self.locks.lock();
        locks.learn(locks.by_aid.get(aid), asked, |_, token| {
            Some(match held.get(&Some(token)) {
                Some(&expires_at) => Belief::Live { expires_at, known: clock::now() },
                None => Belief::Gone,
            })
        });
    }

    /// This acquisition lives until then, unless it has ended.
    pub(in crate::manager) fn renewed(&self, lock: &Acquisition, expires_at: Instant) {
        if let Some(entry) = self.locks.lock().of.get(&lock.token) {
            entry.news.send_if_modified(|belief| {
                let Belief::Live { expires_at: end, known } = belief else { return false };
                (*end, *known) = (expires_at, clock::now());
                true
            });
        }
    }

    /// This acquisition has ended, for whatever reason.
    pub(in crate::manager) fn ended(&self, lock: &Acquisition) {
        if let Some(entry) = self.locks.lock().of.get(&lock.token)
            && (&entry.held.key, &entry.held.aid) == (&lock.key, &lock.aid)
        {
            entry.news.send_replace(Belief::Gone);
        }
    }
}

impl WatchedLocks {
    /// Passes the news on to the watchers of these locks.
    fn learn(
        &self,
        about: Option<&Vec<LockToken>>,
        asked: Instant,
        belief: impl Fn(&WatchedLock, LockToken) -> Option<Belief>,
    ) {
        for token in about.into_iter().flatten() {
            let Some(entry) = self.of.get(token) else { continue };
            let Some(new) = belief(entry, *token) else { continue };
            entry.news.send_if_modified(|old| {
                let is_news = match (&*old, new) {
                    (Belief::Gone, _) => false,
                    // The question may have been asked before the lock was seen to be live, so the answer
                    // may be older than the lock.
                    (Belief::Live { known, .. }, _) if asked >= *known => true,
                    (Belief::Live { expires_at, .. }, Belief::Live { expires_at: later, .. }) => {
                        later > *expires_at
                    }
                    (Belief::Live { .. }, Belief::Gone) => false,
                };
                if is_news {
                    *old = new;
                }
                is_news
            });
        }
    }
}

impl Drop for LockWatch {
    fn drop(&mut self) {
        let mut locks = self.watched.locks.lock();
        if let Some(entry) = locks.of.get_mut(&self.token) {
            entry.watchers -= 1;
            if entry.watchers == 0 {
                locks.forget(self.token);
            }
        }
    }
}

/// Checks the clock at each poll, because timers are late after a pause of the process.
async fn has_passed(until: Instant) {
    poll_fn(|_| if clock::now() < until { Poll::Pending } else { Poll::Ready(()) }).await;
}

impl Core {
    /// Waits until this acquisition of a lock is gone, as far as this process can know.
    pub(crate) fn lost(self: &Arc<Self>, lock: &Lock) -> impl Future<Output = ()> + Send + use<> {
        let (core, lock) = (Arc::clone(self), lock.clone());
        // Watches from now on, not from the first poll.
        let watch = lock.token.map(|token| core.beliefs.watched.watch(&lock, token));
        let mut standstills = self.beliefs.time.standstills();
        async move {
            // A lock of a foreign program has no token, and this process does not hold it.
            let Some(mut watch) = watch else { return };
            // It may have been released before this call.
            let mut ask_now = !core.beliefs.watched.is_guarded(watch.token);
            loop {
                let Belief::Live { expires_at, .. } = *watch.news.borrow_and_update() else {
                    return;
                };
                let left = expires_at.saturating_duration_since(clock::now());
                if left.is_zero() {
                    return;
                }
                let ask_at =
                    if ask_now { clock::now() } else { expires_at - (left / 4).min(ASK_BEFORE) };
                ask_now = false;
                let ask = async {
                    tokio::select! {
                        () = sleep_until(ask_at.into()) => {}
                        // Never an error: the manager is there.
                        _ = standstills.changed() => {}
                    }
                    // The answer arrives through the watch, as all others do.
                    let _ = timeout_at(
                        expires_at.into(),
                        core.reads.inspect(&lock.key, Some(&lock.aid), core.verbs.until()),
                    )
                    .await;
                    sleep_until(expires_at.into()).await;
                };
                tokio::select! {
                    biased;
                    _ = watch.news.changed() => {}
                    () = has_passed(expires_at) => {}
                    () = ask => {}
                }
            }
        }
    }
}
