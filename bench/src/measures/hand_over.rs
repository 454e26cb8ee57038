//! The time from a release until the waiter holds the lock, and a queue of a thousand waiters.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use actix_doclock::{LockGuard, LockKey, LockManager, Wait};
use futures_util::future::{BoxFuture, join_all};
use mongodb::{Database, bson::doc, change_stream::event::OperationType};
use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};

use super::{Bench, fresh};
use crate::{
    floors::{self, majority},
    load::{Random, Turn},
    ours::{self, fair_key, key},
    peers::{mongo_lock, redis::RSLOCK, seeds::Upsert},
    report::{Role, Row},
    servers::Mongo,
    stats::Samples,
};

pub const STREAM: &str = "change stream: delete_one → event";
pub const SAME: &str = "LockManager, same process";
pub const OTHER: &str = "LockManager, another process's";
pub const FAIR: &str = "LockManager, fair collection, two processes";
pub const TWO: &str = "LockManager, two processes";
const TURN: Turn = Turn { task: 0, key: 0 };

/// Waits for the lock as this side, 0 or 1, and returns a function that gives it back.
type Acquire = Arc<dyn Fn(usize) -> BoxFuture<'static, Option<Release>> + Send + Sync>;
type Release = Box<dyn FnOnce() -> BoxFuture<'static, ()> + Send>;

struct Waiter {
    at: &'static str,
    who: &'static str,
    role: Role,
    acquire: Acquire,
}

fn waiter<F>(
    at: &'static str,
    who: &'static str,
    role: Role,
    acquire: impl Fn(usize) -> F + Send + Sync + 'static,
) -> Waiter
where
    F: Future<Output = Option<Release>> + Send + 'static,
{
    Waiter { at, who, role, acquire: Arc::new(move |side| Box::pin(acquire(side))) }
}

fn release<F: Future<Output = ()> + Send + 'static>(
    release: impl FnOnce() -> F + Send + 'static,
) -> Option<Release> {
    Some(Box::new(move || Box::pin(release())))
}

pub async fn measure(bench: &mut Bench<'_>) {
    let mut waiters = Vec::new();
    for (at, mongo) in bench.sets() {
        stream(bench, at, &fresh(mongo).await).await;
        let [a, b] = two(mongo).await;
        waiters.push(ours_of(at, SAME, [a.clone(), a.clone()], key(TURN)));
        waiters.push(ours_of(at, OTHER, [a, b], key(TURN)));
    }
    waiters.push(asking("one", &bench.servers.one).await);
    waiters.push(article("one", &bench.servers.one).await);
    if let Some(server) = &bench.servers.redis {
        waiters.push(rslock(server.url()));
    }
    for waiter in &waiters {
        // The first two rounds open a stream and cache a plan. They are not counted.
        let rounds = bench.effort.pick(5, if waiter.role == Role::Ours { 150 } else { 60 });
        let took = handed_over(&waiter.acquire, rounds + 2).await;
        let row = Row::new("hand-over", waiter.at, waiter.who, waiter.role);
        bench.report.add(row.samples(&Samples::of(took.into_iter().skip(2))));
    }
}

async fn two(mongo: &Mongo) -> [LockManager; 2] {
    let a = fresh(mongo).await;
    // On separate clients, as two processes would be.
    let b = mongo.client().await.database(a.name());
    [ours::on(&a).await, ours::on(&b).await]
}

fn ours_of(at: &'static str, who: &'static str, locks: [LockManager; 2], key: LockKey) -> Waiter {
    waiter(at, who, Role::Ours, move |side| {
        let (locks, key) = (locks[side % 2].clone(), key.clone());
        async move {
            let guard: LockGuard = locks.acquire(&key, Wait::until_acquired()).await.unwrap();
            release(async move || {
                guard.release().await.unwrap();
            })
        }
    })
}

async fn asking(at: &'static str, mongo: &Mongo) -> Waiter {
    let client = mongo_lock::client(mongo).await;
    waiter(at, "mongo-lock-async 0.4, asks every 100 ms", Role::Peer, move |_| {
        let client = client.clone();
        async move {
            let [ttl, patience] = [150, 10].map(Duration::from_secs);
            let poll = Duration::from_millis(100);
            let lock = mongo_lock_async::Lock::try_acquire_with_timeout(
                &client,
                "handed over",
                ttl,
                patience,
                poll,
            );
            let lock = lock.await.unwrap()?;
            release(async move || {
                lock.release().await.unwrap();
            })
        }
    })
}

async fn article(at: &'static str, mongo: &Mongo) -> Waiter {
    let upsert = Upsert::on(&mongo.client().await).await;
    let turn = Turn { task: 0, key: 77 };
    waiter(at, "upsert, asks every 100 ms (article)", Role::Peer, move |_| {
        let upsert = upsert.clone();
        async move {
            if !upsert.acquire(turn).await {
                return None;
            }
            release(async move || upsert.release(turn).await)
        }
    })
}

fn rslock(url: String) -> Waiter {
    let managers = [0, 1].map(|_| rslock::LockManager::new(vec![url.clone()]));
    waiter("redis", RSLOCK, Role::Peer, move |side| {
        let manager = managers[side % 2].clone();
        async move {
            let guard = manager.acquire("handed over", Duration::from_secs(150)).await.unwrap();
            release(async move || guard.release().await)
        }
    })
}

/// One side holds the lock and the other waits; then the first gives it back.
async fn handed_over(acquire: &Acquire, rounds: usize) -> Vec<Duration> {
    let mut random = Random::of(rounds);
    let mut took = Vec::new();
    for _ in 0..rounds {
        let give_back = acquire(0).await.expect("nobody has it");
        let (sender, receiver) = oneshot::channel();
        let acquire = acquire.clone();
        tokio::spawn(async move {
            let acquired = acquire(1).await;
            let _ = sender.send((acquired, Instant::now()));
        });
        // A random pause, so that the rounds do not run in step with any periodic work.
        sleep(Duration::from_micros(20_000 + random.below(25_000) as u64)).await;
        let began = Instant::now();
        give_back().await;
        let (acquired, at) = receiver.await.expect("an answer");
        let Some(give_back) = acquired else { continue };
        took.push(at - began);
        give_back().await;
    }
    took
}

/// The floor: how long the database takes to tell another process that a record is gone.
async fn stream(bench: &mut Bench<'_>, at: &'static str, database: &Database) {
    let raw = majority(database, "raw");
    assert!(floors::insert(&raw, TURN).await);
    let watching = majority(&database.client().database(database.name()), "raw");
    let mut stream = watching.watch().await.unwrap();
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let watcher = tokio::spawn(async move {
        loop {
            if let Some(event) = stream.next_if_any().await.unwrap()
                && event.operation_type == OperationType::Delete
            {
                let _ = sender.send(Instant::now());
            }
        }
    });
    let mut random = Random::of(1);
    let mut took = Vec::new();
    for _ in 0..bench.effort.pick(5, 150) {
        sleep(Duration::from_micros(20_000 + random.below(25_000) as u64)).await;
        let began = Instant::now();
        raw.delete_one(doc! { "_id": TURN.name() }).await.unwrap();
        took.push(receiver.recv().await.expect("an event") - began);
        assert!(floors::insert(&raw, TURN).await);
    }
    watcher.abort();
    let row = Row::new("hand-over", at, STREAM, Role::Floor);
    bench.report.add(row.samples(&Samples::of(took)));
}

/// The number of waiters for one key.
pub const CROWD: usize = 1_000;
const PATIENCE: Duration = Duration::from_secs(60);

pub async fn waiters(bench: &mut Bench<'_>) {
    let crowd = bench.effort.pick(100, CROWD);
    let mut waiters = Vec::new();
    for (at, mongo) in bench.sets() {
        let [a, b] = two(mongo).await;
        waiters.push((ours_of(at, SAME, [a.clone(), a.clone()], key(TURN)), crowd));
        waiters.push((ours_of(at, TWO, [a.clone(), b.clone()], key(TURN)), crowd));
        waiters.push((ours_of(at, FAIR, [a, b], fair_key(TURN)), crowd));
    }
    waiters.push((article("one", &bench.servers.one).await, crowd));
    if let Some(server) = &bench.servers.redis {
        waiters.push((rslock(server.url()), crowd));
    }
    for (waiter, crowd) in waiters {
        let row = Row::new("waiters", waiter.at, waiter.who, waiter.role).load(crowd, 1);
        let row = in_line(&waiter.acquire, crowd, row).await;
        bench.report.add(row);
    }
}

/// All wait, in the order of their numbers, and each gives the lock back as soon as it has it.
async fn in_line(acquire: &Acquire, crowd: usize, row: Row) -> Row {
    let first = acquire(0).await.expect("nobody has it");
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..crowd)
        .map(|n| {
            let (acquire, order) = (acquire.clone(), order.clone());
            tokio::spawn(async move {
                // 1 ms apart, for a clear order of arrival.
                sleep(Duration::from_millis(n as u64)).await;
                if let Some(give_back) = acquire(n).await {
                    order.lock().unwrap().push((n, Instant::now()));
                    give_back().await;
                }
            })
        })
        .collect();
    sleep(Duration::from_millis(crowd as u64 + 500)).await;
    let began = Instant::now();
    first().await;
    let aborts: Vec<_> = tasks.iter().map(|task| task.abort_handle()).collect();
    let all = timeout(PATIENCE, join_all(tasks)).await;
    for task in aborts {
        task.abort();
    }
    let order = std::mem::take(&mut *order.lock().unwrap());
    let last = order.iter().map(|(_, at)| *at - began).max().unwrap_or_default();
    // By how many positions a waiter came too early or too late.
    let mut moved: Vec<_> =
        order.iter().enumerate().map(|(is, (was, _))| is.abs_diff(*was)).collect();
    moved.sort_unstable();
    let moved_at = |part: f64| moved.get((moved.len() as f64 * part) as usize).copied();
    let row = row.value("in", order.len() as f64).value("in_time", f64::from(all.is_ok()));
    let row = row.value("ms", last.as_secs_f64() * 1e3);
    let each = last.as_secs_f64() * 1e6 / order.len().max(1) as f64;
    let row = row.value("each", each).value("moved_p50", moved_at(0.5).unwrap_or(0) as f64);
    row.value("moved_max", moved.last().copied().unwrap_or(0) as f64)
}
