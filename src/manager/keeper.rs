//! Keeping the guards of this process alive: one task, one command for each collection and interval,
//! however many guards there are.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    future::pending,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use tokio::{sync::Notify, time::sleep_until};

use super::{
    Inner, LockManager,
    operations::{Acquisition, Wanted},
    queue::Held,
    rhythm::jittered,
};
use crate::{Aid, LockError, LockKey, LockToken};

/// The longest pause before a renewal that failed is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The guards whose leases are to be renewed.
#[derive(Debug, Default)]
pub(super) struct Kept {
    guards: Mutex<Guards>,
    /// There is a guard with another ttl.
    changed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Guards {
    of: HashMap<LockToken, Entry>,
    /// When those with the same ttl are to be renewed next.
    rounds: BTreeMap<Duration, Instant>,
}

#[derive(Debug, Clone)]
struct Entry {
    held: Acquisition,
    ttl: Duration,
    taken: Instant,
}

impl Kept {
    fn guards(&self) -> MutexGuard<'_, Guards> {
        self.guards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those with this ttl, by collection. Without any the round is over.
    fn round(&self, ttl: Duration) -> BTreeMap<String, Vec<Entry>> {
        let mut guards = self.guards();
        let mut due: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for entry in guards.of.values().filter(|entry| entry.ttl == ttl) {
            due.entry(entry.held.key.collection().to_owned()).or_default().push(entry.clone());
        }
        if due.is_empty() {
            guards.rounds.remove(&ttl);
        }
        due
    }

    fn next_round(&self) -> Option<(Duration, Instant)> {
        let guards = self.guards();
        guards.rounds.iter().map(|(ttl, at)| (*ttl, *at)).min_by_key(|(_, at)| *at)
    }

    fn again_at(&self, ttl: Duration, moment: Instant) {
        if let Some(at) = self.guards().rounds.get_mut(&ttl) {
            *at = moment;
        }
    }
}

impl LockManager {
    /// From now on it is renewed, and who waits for it waits for `owner`.
    pub(super) fn keep(&self, wanted: &Wanted, held: &Acquisition, owner: &Aid, taken: Instant) {
        let entry = Entry { held: held.clone(), ttl: wanted.ttl, taken };
        let mut guards = self.inner.kept.guards();
        guards.of.insert(held.token, entry);
        guards.rounds.entry(wanted.ttl).or_insert_with(|| {
            self.inner.kept.changed.notify_one();
            taken + wanted.ttl / 3
        });
        drop(guards);
        let (aid, owner, mode) = (held.aid.clone(), owner.clone(), held.mode);
        self.inner.queues.holds(&held.key, Held { aid, owner, mode });
    }

    pub(super) fn keep_no_more(&self, held: &Acquisition) {
        self.inner.kept.guards().of.remove(&held.token);
        self.inner.queues.dropped(&held.key, &held.aid);
    }

    /// Renews all guards with this ttl. Those that turn out to be lost learn it.
    async fn renew_round(&self, ttl: Duration) -> Result<(), LockError> {
        let due = self.inner.kept.round(ttl);
        let until = Instant::now() + self.deadline().min(ttl / 3);
        let renewals = due.iter().map(|(collection, entries)| {
            let aids: Vec<Aid> = entries.iter().map(|entry| entry.held.aid.clone()).collect();
            self.renew_all_of(collection, aids, entries, until)
        });
        futures_util::future::join_all(renewals).await.into_iter().collect()
    }

    async fn renew_all_of(
        &self,
        collection: &str,
        aids: Vec<Aid>,
        entries: &[Entry],
        until: Instant,
    ) -> Result<(), LockError> {
        let asked = Instant::now();
        let args = (collection.to_owned(), aids);
        let renewed = self.run("renew", until, args.clone(), |store, (collection, aids)| {
            store.renew(collection, aids)
        });
        let renewed = renewed.await?;
        let documents: BTreeSet<&LockKey> = entries.iter().map(|entry| &entry.held.key).collect();
        // Of several readers of one document the count says nothing.
        if renewed == entries.len() as u64 && documents.len() == entries.len() {
            for Entry { held, ttl, taken } in entries {
                let longest = self.inner.settings.max_hold.map(|max| *taken + max);
                let until = asked + *ttl;
                self.inner.watched.renewed(held, longest.map_or(until, |at| at.min(until)));
            }
            return Ok(());
        }
        let listed = self.run("list", until, args, |store, (collection, aids)| {
            store.list(collection, Some(aids), usize::MAX)
        });
        let listed = listed.await?;
        let live: HashMap<_, _> = listed.iter().map(|lock| (lock.token, lock)).collect();
        for Entry { held, .. } in entries {
            match live.get(&Some(held.token)) {
                Some(lock) => self.inner.watched.renewed(held, lock.expires_at),
                None => {
                    self.keep_no_more(held);
                    self.inner.gone(held);
                    log::warn!(
                        target: "actix_doclock::manager",
                        "the lock on {:?} was lost: it ran out, or somebody broke it", held.key,
                    );
                }
            }
        }
        Ok(())
    }
}

/// Renews until the manager is gone or shut down.
pub(super) async fn run(manager: Weak<Inner>) {
    while let Some(inner) = manager.upgrade() {
        let (stop, changed) = (inner.stop.token(), Arc::clone(&inner.kept.changed));
        let next = inner.kept.next_round();
        let began = Instant::now();
        if let Some((ttl, at)) = next
            && at <= began
        {
            let manager = LockManager { inner };
            let again = match manager.renew_round(ttl).await {
                Ok(()) => began + ttl / 3,
                Err(e) => {
                    let pause = jittered((ttl / 12).min(LONGEST_PAUSE));
                    log::warn!(
                        target: "actix_doclock::background",
                        "guards were not renewed, trying again in {pause:?}: {e}",
                    );
                    Instant::now() + pause
                }
            };
            manager.inner.kept.again_at(ttl, again);
            continue;
        }
        drop(inner);
        let due = async {
            match next {
                Some((_, at)) => sleep_until(at.into()).await,
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = changed.notified() => {}
            () = due => {}
        }
    }
}
