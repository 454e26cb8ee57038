//! Many sessions of two application servers compete for the same documents.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use actix_doclock::{Aid, Released, TryAcquire};
use mongodb::Database;
use tokio::sync::Barrier;
use tokio::task::{JoinSet, yield_now};
use tokio::time::sleep;

use crate::rig::app::{App, TTL, count, key};
use crate::rig::{self, mongod};

/// Two application servers, each with its own client, on one database.
async fn two_servers() -> ([App; 2], Database) {
    let uri = mongod::shared_replica_set().await;
    let one = rig::fresh_database(uri.uri()).await;
    let other = rig::client(uri.uri()).await.database(one.name());
    ([App::on(&one).await, App::on(&other).await], one)
}

/// The resource behind a lock: a counter that is only right if one session at a time is inside.
#[derive(Debug, Default)]
struct Guarded {
    inside: AtomicBool,
    counter: AtomicU64,
}

impl Guarded {
    /// Adds one like two programs that do not know of each other: reads first, and writes later.
    async fn increment(&self) {
        assert!(!self.inside.swap(true, SeqCst), "another session is inside");
        let read = self.counter.load(SeqCst);
        yield_now().await;
        self.counter.store(read + 1, SeqCst);
        self.inside.store(false, SeqCst);
    }
}

/// `tasks` sessions share `acquisitions` among themselves, on `documents` documents.
async fn count_under_locks(tasks: u64, documents: u64, acquisitions: u64) {
    let (apps, database) = two_servers().await;
    let guarded: Arc<Vec<Guarded>> = Arc::new((0..documents).map(|_| Guarded::default()).collect());
    let began = Instant::now();
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let (app, guarded) = (apps[task as usize % apps.len()].clone(), guarded.clone());
        running.spawn(async move {
            let aid = Aid::new();
            let mut refusals = 0_u64;
            for turn in (task..acquisitions).step_by(tasks as usize) {
                // Consecutive turns want different documents, unless there is only one.
                let document = (turn % documents) as usize;
                let key = key(&format!("{document}"));
                let lock = loop {
                    match app.try_acquire(&key, &aid).await.unwrap() {
                        TryAcquire::Granted(lock) => break lock,
                        TryAcquire::Held(_) => {
                            refusals += 1;
                            sleep(Duration::from_millis(80)).await;
                        }
                        TryAcquire::AlreadyMine(_) | TryAcquire::Lost(_) => {
                            panic!("it was given back")
                        }
                    }
                };
                guarded[document].increment().await;
                let asked = Instant::now();
                let released = app.locks.release(&lock).await.unwrap();
                // A release that is repeated after its time limit finds nothing more.
                let is_repeated = asked.elapsed() > Duration::from_millis(500);
                assert!(released == Released::Released || is_repeated, "lost");
            }
            refusals
        });
    }
    let refusals: u64 = running.join_all().await.into_iter().sum();
    let counted: u64 = guarded.iter().map(|g| g.counter.load(SeqCst)).sum();
    println!("{acquisitions} acquisitions, {refusals} refusals in {:?}", began.elapsed());
    assert_eq!(counted, acquisitions);
    assert!(refusals > 0, "the sessions competed for locks");
    assert_eq!(count(&database).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_sessions_on_one_document_are_inside_one_at_a_time() {
    count_under_locks(64, 1, 100 * u64::from(rig::depth())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_sessions_on_many_documents_are_inside_one_at_a_time() {
    count_under_locks(64, 16, 600 * u64::from(rig::depth())).await;
}

/// Every other round uses a document without a record, and the others a document with an expired lock.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_simultaneous_sessions_exactly_one_wins() {
    const CONTENDERS: usize = 32;
    let rounds = 15 * rig::depth() as usize;
    let (apps, database) = two_servers().await;
    for round in 0..rounds {
        let key = key(&format!("{}", round / 2));
        if round % 2 == 1 {
            rig::age(&database, &key, TTL).await;
        }
        let barrier = Arc::new(Barrier::new(CONTENDERS));
        let mut running = JoinSet::new();
        for contender in 0..CONTENDERS {
            let (app, key, barrier) =
                (apps[contender % apps.len()].clone(), key.clone(), barrier.clone());
            running.spawn(async move {
                let aid = Aid::new();
                barrier.wait().await;
                app.try_acquire(&key, &aid).await.unwrap()
            });
        }
        let (mut won, mut seen) = (Vec::new(), Vec::new());
        for answer in running.join_all().await {
            match answer {
                TryAcquire::Granted(lock) => won.push(lock.token),
                TryAcquire::Held(lock) => seen.push(lock.token),
                other => panic!("round {round}: {other:?}"),
            }
        }
        assert_eq!((won.len(), seen.len()), (1, CONTENDERS - 1), "round {round}");
        assert!(seen.iter().all(|token| *token == won[0]), "round {round}: all see the winner");
    }
}
