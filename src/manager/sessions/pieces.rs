//! Renews many sessions or guards in pieces that fit the time limits of the store.
//!
//! A piece is one call of the store. If the call says that sessions are late, these are asked for again in
//! smaller pieces, down to a single one; all others are done. So nobody waits for the locks of somebody else
//! for longer than one call. After each call, the watchers of the locks are told whether their locks live on.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use futures_util::stream::{self, FuturesUnordered, Stream, StreamExt};
use parking_lot::Mutex;
use tokio::{
    sync::{
        Semaphore,
        mpsc::{UnboundedSender, unbounded_channel},
    },
    time::timeout_at,
};
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::{LockError, Result, StoreError, StoreErrorKind},
    lock::Aid,
    manager::{observe, sessions::Sessions},
    store::{Acquisition, Active, Renewed},
};

/// How many sessions or guards one call renews at most.
const AT_ONCE: usize = 1_000;
/// How many such calls may be under way at once for a collection, so that connections are left for requests.
const CALLS: usize = 4;
/// Into how many parts late sessions are split.
const PARTS: usize = 10;
/// After a call that took no longer than this, the next one may be twice as large.
const QUICK: Duration = Duration::from_millis(100);

/// The pace of the renewals in each registered collection.
#[derive(Debug, Default)]
pub(in crate::manager) struct Paces(Mutex<HashMap<String, Arc<Pace>>>);

#[derive(Debug)]
struct Pace {
    /// How many sessions the next call renews.
    size: AtomicUsize,
    calls: Semaphore,
}

impl Paces {
    fn of(&self, collection: &str) -> Arc<Pace> {
        let mut all = self.0.lock();
        let pace = || Pace { size: AtomicUsize::new(AT_ONCE), calls: Semaphore::new(CALLS) };
        Arc::clone(all.entry(collection.to_owned()).or_insert_with(|| Arc::new(pace())))
    }
}

impl Pace {
    fn learn(&self, asked_for: usize, renewed: &Renewed, took: Duration) {
        if renewed.late.len() == asked_for {
            self.size.fetch_min((asked_for / PARTS).max(1), Relaxed);
        } else if took <= QUICK {
            self.size.fetch_max((2 * asked_for).min(AT_ONCE), Relaxed);
        }
    }
}

/// What became of some of the sessions in one collection.
pub(in crate::manager) struct Piece {
    collection: Arc<str>,
    pub(in crate::manager) aids: Vec<Aid>,
    /// The moment before the store was asked.
    asked: Instant,
    /// On how many documents their locks were renewed. An error also if the store did not tell which of the watched
    /// locks live on.
    pub(in crate::manager) renewed: Result<u64>,
}

impl Sessions {
    /// Renews these sessions, each in its collection, for at least `ttl`. Each session comes once for each of its
    /// collections, as soon as the renewal of its locks has ended there and their watchers know. Each call has the deadline
    /// of the manager; `until` bounds all of them together.
    pub(in crate::manager) fn renew_in_pieces(
        self: &Arc<Self>,
        due: BTreeMap<String, Vec<Active>>,
        ttl: Duration,
        until: Instant,
    ) -> impl Stream<Item = Piece> + Unpin + use<> {
        let (done, mut pieces) = unbounded_channel();
        for (collection, active) in due {
            let (sessions, done) = (Arc::clone(self), done.clone());
            let collection = Arc::from(collection);
            let renewal =
                async move { sessions.renew_in(&collection, active, ttl, until, done).await };
            drop(self.verbs.runner.spawn(&TaskTracker::new(), renewal));
        }
        let sessions = Arc::clone(self);
        let pieces = stream::poll_fn(move |context| pieces.poll_recv(context));
        let announced = pieces.map(move |it| Arc::clone(&sessions).tell_watchers(it, ttl, until));
        // A piece whose watchers wait for the store holds up no other.
        announced.buffer_unordered(usize::MAX)
    }

    async fn renew_in(
        &self,
        collection: &Arc<str>,
        mut active: Vec<Active>,
        ttl: Duration,
        until: Instant,
        done: UnboundedSender<Piece>,
    ) {
        let pace = self.paces.of(collection);
        let call = |active| self.renew_piece(collection, &pace, active, ttl, until);
        let mut calls = FuturesUnordered::new();
        loop {
            while calls.len() < CALLS && !active.is_empty() {
                let size = pace.size.load(Relaxed).min(active.len());
                calls.push(call(active.split_off(active.len() - size)));
            }
            let Some((piece, late)) = calls.next().await else { return };
            // Perhaps nobody waits for it any more.
            let _ = done.send(piece);
            let parts = late.chunks(late.len().div_ceil(PARTS).max(1));
            calls.extend(parts.map(|part| call(part.to_vec())));
        }
    }

    /// One call of the store. Also returns the sessions that are late, except for a call for a single session: if that
    /// session is late, its renewal has failed.
    async fn renew_piece(
        &self,
        collection: &Arc<str>,
        pace: &Pace,
        active: Vec<Active>,
        ttl: Duration,
        until: Instant,
    ) -> (Piece, Vec<Active>) {
        let turn = timeout_at(until.into(), pace.calls.acquire()).await;
        let asked = clock::now();
        let until = until.min(asked + self.verbs.deadline);
        let args = (Arc::clone(collection), active.clone(), ttl);
        let renewed = match turn {
            Ok(_turn) => {
                self.verbs
                    .run("renew", until, args, |store, (collection, active, ttl), until| {
                        store.renew(collection, active, *ttl, until)
                    })
                    .await
            }
            Err(_) => Err(blocked(collection)),
        };
        let (done, renewed, late) = match renewed {
            Err(e) => (active, Err(e), Vec::new()),
            Ok(Renewed { late, .. }) if active.len() == 1 && !late.is_empty() => {
                (active, Err(blocked(collection)), Vec::new())
            }
            Ok(renewed) => {
                pace.learn(active.len(), &renewed, clock::since(asked));
                let late: HashSet<_> = renewed.late.into_iter().collect();
                let (late, done) = active.into_iter().partition(|it| late.contains(&it.aid));
                (done, Ok(renewed.documents), late)
            }
        };
        let aids = done.into_iter().map(|it| it.aid).collect();
        (Piece { collection: Arc::clone(collection), aids, asked, renewed }, late)
    }

    /// Tells the watchers of these sessions which of their locks live on. Asks the store, unless the piece consists of
    /// jobs, each of which has one lock, and the count shows that all of them were renewed.
    async fn tell_watchers(
        self: Arc<Self>,
        mut piece: Piece,
        ttl: Duration,
        until: Instant,
    ) -> Piece {
        let Piece { collection, aids, asked, renewed } = &piece;
        let (watched, lives) = (self.beliefs.watched.of(aids, collection), *asked + ttl);
        let documents: HashSet<_> = watched.iter().map(|held| &held.key).collect();
        let are_jobs = aids.iter().all(Aid::is_job);
        // If a document has several readers, the count does not tell which of them were renewed. When a `max_hold` ends,
        // only the server knows: it may have granted the lock to an earlier attempt whose answer was lost.
        let count_tells = are_jobs && documents.len() == watched.len() && self.max_hold.is_none();
        match renewed {
            _ if watched.is_empty() => {}
            Ok(renewed) if count_tells && *renewed == aids.len() as u64 => {
                watched.iter().for_each(|held| self.beliefs.watched.renewed(held, lives));
            }
            // Guards are renewed again in a moment.
            Err(_) if are_jobs => {}
            _ => {
                if let Err(e) = self.look_for_losses(collection, &watched, until).await {
                    piece.renewed = Err(e);
                }
            }
        }
        piece
    }

    /// Asks the store which of these locks live on. Tells their watchers.
    async fn look_for_losses(
        &self,
        collection: &str,
        watched: &[Acquisition],
        until: Instant,
    ) -> Result<()> {
        let aids: HashSet<_> = watched.iter().map(|held| held.aid.clone()).collect();
        let (aids, until) = (Vec::from_iter(aids), until.min(self.verbs.until()));
        let listed = self.verbs.locks_of(collection, aids, usize::MAX, until).await?;
        let live: HashMap<_, _> = listed.iter().map(|lock| (lock.token, lock)).collect();
        for held in watched {
            match live.get(&Some(held.token)) {
                Some(lock) => self.beliefs.watched.renewed(held, lock.expires_at),
                None => {
                    // Unless its guard has given the lock back in the meantime, or it has none.
                    if self.keep_no_more(held) {
                        let label = self.collections.label(&held.key);
                        self.beliefs.losses.count(label, Some(held.token), "unknown", "renewal");
                        log::warn!(
                            target: "actix_doclock::manager",
                            "the lock on {:?} was lost: it expired, or somebody broke it", held.key,
                        );
                    }
                    self.beliefs.gone(held);
                }
            }
        }
        Ok(())
    }

    /// True if a guard had this lock until now.
    pub(in crate::manager) fn keep_no_more(&self, held: &Acquisition) -> bool {
        let was_kept = self.beliefs.watched.guard_dropped(held.token);
        self.beliefs.queues.machine.lock().guard_dropped(held);
        if was_kept {
            observe::guard(self.collections.label(&held.key), false);
        }
        was_kept
    }
}

fn blocked(collection: &str) -> LockError {
    let message = format!(
        "renewing locks in {collection}: not all of them were renewed, because open transactions block them"
    );
    StoreError::new(StoreErrorKind::Unavailable, message).into()
}
