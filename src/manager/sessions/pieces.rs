//! Renews many sessions or guards in pieces that fit the time limits of the store.
//!
//! A piece is one call of the store. If the call says that sessions are late, these are asked for again in
//! smaller pieces, down to a single one; all others are done. So nobody waits for the locks of somebody else
//! for longer than one call.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use tokio::{
    sync::{
        Semaphore,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    },
    time::timeout_at,
};
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::{LockError, Result, StoreError, StoreErrorKind},
    lock::Aid,
    manager::sessions::Sessions,
    store::{Active, Renewed},
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

/// What became of some of the sessions.
pub(in crate::manager) struct Piece {
    pub(in crate::manager) aids: Vec<Aid>,
    /// The moment before the store was asked.
    pub(in crate::manager) asked: Instant,
    /// On how many documents their locks were renewed.
    pub(in crate::manager) renewed: Result<u64>,
}

impl Sessions {
    /// Renews these sessions in these collections, for at least `ttl`. The receiver gets each session once for each
    /// collection, as soon as the renewal of that session's locks has ended there. Each call has the deadline of the
    /// manager; `until` bounds all of them together.
    pub(in crate::manager) fn renew_in_pieces(
        self: &Arc<Self>,
        collections: impl IntoIterator<Item = impl Into<String>>,
        active: &[Active],
        ttl: Duration,
        until: Instant,
    ) -> UnboundedReceiver<Piece> {
        let (told, pieces) = unbounded_channel();
        for collection in collections {
            let (sessions, collection, told) = (Arc::clone(self), collection.into(), told.clone());
            let active = active.to_vec();
            let renewal =
                async move { sessions.renew_in(&collection, active, ttl, until, told).await };
            drop(self.verbs.runner.spawn(&TaskTracker::new(), renewal));
        }
        pieces
    }

    async fn renew_in(
        &self,
        collection: &str,
        mut active: Vec<Active>,
        ttl: Duration,
        until: Instant,
        told: UnboundedSender<Piece>,
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
            let _ = told.send(piece);
            let parts = late.chunks(late.len().div_ceil(PARTS).max(1));
            calls.extend(parts.map(|part| call(part.to_vec())));
        }
    }

    /// One call of the store. Also returns the sessions that are late, except for a call for a single session: if that
    /// session is late, its renewal has failed.
    async fn renew_piece(
        &self,
        collection: &str,
        pace: &Pace,
        active: Vec<Active>,
        ttl: Duration,
        until: Instant,
    ) -> (Piece, Vec<Active>) {
        let turn = timeout_at(until.into(), pace.calls.acquire()).await;
        let asked = clock::now();
        let until = until.min(asked + self.verbs.deadline);
        let args = (collection.to_owned(), active.clone(), ttl);
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
        (Piece { aids, asked, renewed }, late)
    }
}

fn blocked(collection: &str) -> LockError {
    let message = format!(
        "renewing locks in {collection}: not all of them were renewed, because open transactions block them"
    );
    StoreError::new(StoreErrorKind::Unavailable, message).into()
}
