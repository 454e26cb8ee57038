//! Renews the guards of this process: one task for each ttl, and one command for each collection and
//! interval, for any number of guards.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::sleep_until;

use crate::{
    clock,
    error::Result,
    key::LockKey,
    lock::{Aid, LockToken},
    manager::{Parts, claim::Wanted, observe, pauses::jittered, sessions::pieces::Piece},
    random::HashMap,
    store::{Acquisition, Active},
};

/// The longest pause before a failed renewal is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The guards whose leases are renewed.
#[derive(Debug, Default)]
pub(in crate::manager) struct Kept(Mutex<Guards>);

#[derive(Debug, Default)]
struct Guards {
    of: HashMap<LockToken, KeptGuard>,
    /// The ttls that have a task. One task for all ttls would not do: a collection that does not answer
    /// would delay the renewal of shorter leases elsewhere until they expire.
    ttls: BTreeSet<Duration>,
}

#[derive(Debug, Clone)]
struct KeptGuard {
    held: Acquisition,
    ttl: Duration,
}

impl Kept {
    pub(in crate::manager) fn len(&self) -> usize {
        self.0.lock().of.len()
    }

    /// The guards with this ttl, by collection and session: each guard has a session of its own. If there are no
    /// guards, the task of this ttl ends.
    fn round(&self, ttl: Duration) -> BTreeMap<String, HashMap<Aid, Acquisition>> {
        let mut guards = self.0.lock();
        let mut due: BTreeMap<_, HashMap<_, _>> = BTreeMap::new();
        for KeptGuard { held, .. } in guards.of.values().filter(|entry| entry.ttl == ttl) {
            let of_collection = due.entry(held.key.collection().to_owned()).or_default();
            of_collection.insert(held.aid.clone(), held.clone());
        }
        if due.is_empty() {
            guards.ttls.remove(&ttl);
        }
        due
    }
}

impl Parts {
    /// From now on the lock is renewed, and its waiters wait for `owner`.
    pub(in crate::manager) fn keep(
        self: &Arc<Self>,
        wanted: &Wanted,
        held: &Acquisition,
        owner: &Aid,
    ) {
        let entry = KeptGuard { held: held.clone(), ttl: wanted.ttl };
        let mut guards = self.kept.0.lock();
        let is_new = guards.of.insert(held.token, entry).is_none();
        if guards.ttls.insert(wanted.ttl) {
            let (ttl, first) = (wanted.ttl, clock::now() + wanted.ttl / 3);
            // Starts again at once after a panic: leases may be about to expire.
            self.supervise("renewal of guards", |_| {}, move |parts| run(parts, ttl, first));
        }
        drop(guards);
        if is_new {
            observe::guard(self.collections.label(&held.key), true);
        }
        self.seen.queues.machine.lock().guard_taken(held, owner);
    }

    /// True if the guard was kept until now.
    pub(in crate::manager) fn keep_no_more(&self, held: &Acquisition) -> bool {
        let kept = self.kept.0.lock().of.remove(&held.token);
        self.seen.queues.machine.lock().guard_dropped(held);
        if kept.is_some() {
            observe::guard(self.collections.label(&held.key), false);
        }
        kept.is_some()
    }

    /// Renews all guards with this ttl. Guards that have lost their lock are told.
    async fn renew_round(
        &self,
        ttl: Duration,
        due: &BTreeMap<String, HashMap<Aid, Acquisition>>,
    ) -> Result<()> {
        let until = clock::now() + ttl / 3;
        // A collection that does not answer does not delay the others.
        let renewals = due.iter().map(|(name, guards)| self.renew_guards(name, guards, ttl, until));
        let renewed = join_all(renewals).await.into_iter().collect();
        observe::renewed("guards", &renewed);
        renewed
    }

    /// Renews all of these guards, even if some fail.
    async fn renew_guards(
        &self,
        collection: &str,
        guards: &HashMap<Aid, Acquisition>,
        ttl: Duration,
        until: Instant,
    ) -> Result<()> {
        let active: Vec<_> = guards.keys().map(Active::all_of).collect();
        let mut pieces = self.sessions.renew_in_pieces([collection], &active, ttl, until);
        let mut all = Ok(());
        while let Some(Piece { aids, asked, renewed }) = pieces.recv().await {
            let guards: Vec<_> = aids.iter().filter_map(|aid| guards.get(aid)).collect();
            let lives = asked + ttl;
            let told = match renewed {
                Ok(n) => self.tell_guards(collection, aids, &guards, n, lives, until).await,
                Err(e) => Err(e),
            };
            all = all.and(told);
        }
        all
    }

    /// Tells the guards of a piece that they are renewed or lost.
    async fn tell_guards(
        &self,
        collection: &str,
        aids: Vec<Aid>,
        guards: &[&Acquisition],
        renewed: u64,
        lives: Instant,
        until: Instant,
    ) -> Result<()> {
        let until = until.min(self.verbs.until());
        let documents: BTreeSet<&LockKey> = guards.iter().map(|held| &held.key).collect();
        // If a document has several readers, the count does not tell which of them were renewed. When a
        // `max_hold` ends, only the server knows: it may have granted the lock to an earlier attempt
        // whose answer was lost.
        let has_max_hold = self.settings.max_hold.is_some();
        let is_one_each = documents.len() == guards.len();
        if renewed == guards.len() as u64 && is_one_each && !has_max_hold {
            for held in guards {
                self.seen.watched.renewed(held, lives);
            }
            return Ok(());
        }
        let listed = self.verbs.locks_of(collection, aids, usize::MAX, until).await?;
        let live: HashMap<_, _> = listed.iter().map(|lock| (lock.token, lock)).collect();
        for held in guards {
            match live.get(&Some(held.token)) {
                Some(lock) => self.seen.watched.renewed(held, lock.expires_at),
                // Its guard has given the lock back in the meantime.
                None if !self.keep_no_more(held) => {}
                None => {
                    self.seen.gone(held);
                    let label = self.collections.label(&held.key);
                    self.seen.losses.count(label, Some(held.token), "unknown", "renewal");
                    log::warn!(
                        target: "actix_doclock::manager",
                        "the lock on {:?} was lost: it expired, or somebody broke it", held.key,
                    );
                }
            }
        }
        Ok(())
    }
}

/// Renews the guards with this ttl until there are none, or until the manager is gone.
async fn run(manager: Weak<Parts>, ttl: Duration, first: Instant) {
    let mut next = first;
    loop {
        sleep_until(next.into()).await;
        let Some(parts) = manager.upgrade() else { return };
        let due = parts.kept.round(ttl);
        if due.is_empty() {
            return;
        }
        let began = clock::now();
        next = match parts.renew_round(ttl, &due).await {
            Ok(()) => began + ttl / 3,
            Err(e) => {
                let pause = jittered((ttl / 12).min(LONGEST_PAUSE));
                log::warn!(
                    target: "actix_doclock::background",
                    "guards were not renewed, trying again in {pause:?}: {e}",
                );
                clock::now() + pause
            }
        };
    }
}
