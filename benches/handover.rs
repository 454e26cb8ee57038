//! Measures the time from a release until the waiter holds the lock: `cargo bench --features test-util
//! --bench handover`, or a part of it: `… -- stream`, `other`, `same`, `polling`. Three minutes.
//!
//! The database is a replica set with one member that the benchmark starts, or the one at
//! `MONGODB_URI`. For comparison, the same run also measures, between the same two processes, the
//! change stream alone and polling every 100 ms. The articles that this crate goes back to poll like
//! that.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use std::{
    env,
    process::Stdio,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use actix_doclock::{LockError, LockGuard, LockKey, LockManager, MongoStore, Named, Wait};
use mongodb::{
    Collection,
    bson::{Document, doc},
    options::WriteConcern,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines, stdin},
    process::{Child, ChildStdout, Command},
    sync::oneshot,
    time::sleep,
};

const ROUNDS: usize = 1_000;
const ROUNDS_OF_POLLING: usize = 200;
/// As in the articles.
const POLL: Duration = Duration::from_millis(100);

#[tokio::main]
async fn main() {
    let arguments: Vec<_> = env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    if let [role, uri, database] = &arguments[..]
        && uri.starts_with("mongodb://")
    {
        return match role.as_str() {
            "waiter" => waiter(uri, database, false).await,
            "poller" => waiter(uri, database, true).await,
            _ => watcher(uri, database).await,
        };
    }
    let server = rig::mongod::shared_replica_set().await;
    let database = rig::fresh_name();
    println!("From before the release to the one who waited, in ms\n");
    println!("| | rounds | p50 | p90 | p99 | max |\n|---|---|---|---|---|---|");
    let (uri, database) = (server.uri(), database.as_str());
    let wanted = |part| arguments.is_empty() || arguments.iter().any(|argument| argument == part);
    if wanted("stream") {
        report("change stream alone: delete, event in another process", raw(uri, database).await);
    }
    if wanted("other") {
        report("release, waiter in another process holds", other(uri, database, "waiter").await);
    }
    if wanted("same") {
        report("release, waiter in the same process holds", same(uri, database).await);
    }
    if wanted("polling") {
        let took = other(uri, database, "poller").await;
        report("release, another process that asks every 100 ms holds", took);
    }
}

async fn manager(uri: &str, database: &str) -> LockManager {
    let store = MongoStore::new(&rig::client(uri).await.database(database));
    let locks = LockManager::builder(store).without_reaper().build().await.unwrap();
    locks.register::<Named>().await.unwrap();
    locks
}

fn key() -> LockKey {
    LockKey::named("handed over").unwrap()
}

/// Both processes are on one machine, so its clock is good enough.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64() * 1e3
}

/// Random, so that the rounds do not run in step with the server's periodic work.
async fn a_while() {
    let random = uuid::Uuid::new_v4().into_bytes()[0];
    sleep(Duration::from_millis(20) + Duration::from_micros(100) * u32::from(random)).await;
}

async fn other(uri: &str, database: &str, role: &str) -> Vec<f64> {
    let locks = manager(uri, database).await;
    let mut waiter = Process::start(role, uri, database).await;
    let rounds = if role == "poller" { ROUNDS_OF_POLLING } else { ROUNDS };
    let mut took = Vec::new();
    for _ in 0..rounds {
        let held = locks.acquire(&key(), Wait::until_acquired()).await.unwrap();
        waiter.says("wait").await;
        a_while().await;
        let began = now();
        held.release().await.unwrap();
        took.push(waiter.hears().await - began);
    }
    took
}

async fn same(uri: &str, database: &str) -> Vec<f64> {
    let locks = manager(uri, database).await;
    let mut took = Vec::new();
    let mut held = locks.acquire(&key(), Wait::until_acquired()).await.unwrap();
    for _ in 0..ROUNDS {
        let (sender, receiver) = oneshot::channel();
        let waiting = locks.clone();
        tokio::spawn(async move {
            let guard = waiting.acquire(&key(), Wait::until_acquired()).await.unwrap();
            let _ = sender.send((guard, now()));
        });
        a_while().await;
        let began = now();
        held.release().await.unwrap();
        let (next, at): (LockGuard, f64) = receiver.await.unwrap();
        took.push(at - began);
        held = next;
    }
    held.release().await.unwrap();
    took
}

async fn raw(uri: &str, database: &str) -> Vec<f64> {
    let records = raw_records(uri, database).await;
    records.insert_one(doc! { "_id": "begin" }).await.unwrap();
    let mut watcher = Process::start("watcher", uri, database).await;
    let mut took = Vec::new();
    for _ in 0..ROUNDS {
        records.insert_one(doc! { "_id": 1 }).await.unwrap();
        a_while().await;
        let began = now();
        let majority = WriteConcern::majority();
        records.delete_one(doc! { "_id": 1 }).write_concern(majority).await.unwrap();
        took.push(watcher.hears().await - began);
    }
    took
}

async fn raw_records(uri: &str, database: &str) -> Collection<Document> {
    rig::client(uri).await.database(database).collection("raw")
}

// The other process

/// On each order: waits for the lock, says when it holds it, and gives it back.
async fn waiter(uri: &str, database: &str, polls: bool) {
    let locks = manager(uri, database).await;
    let mut told = BufReader::new(stdin()).lines();
    println!("ready");
    while told.next_line().await.unwrap().is_some() {
        let guard = if polls {
            poll(&locks).await
        } else {
            locks.acquire(&key(), Wait::until_acquired()).await.unwrap()
        };
        let held = now();
        guard.release().await.unwrap();
        println!("{held}");
    }
}

async fn poll(locks: &LockManager) -> LockGuard {
    loop {
        match locks.acquire(&key(), Wait::no()).await {
            Ok(guard) => return guard,
            Err(LockError::Held(_)) => sleep(POLL).await,
            Err(e) => panic!("{e}"),
        }
    }
}

async fn watcher(uri: &str, database: &str) {
    let records = raw_records(uri, database).await;
    let deletes = [doc! { "$match": { "operationType": "delete" } }];
    let mut stream = records.watch().pipeline(deletes).await.unwrap();
    println!("ready");
    loop {
        if stream.next_if_any().await.unwrap().is_some() {
            println!("{}", now());
        }
    }
}

struct Process {
    child: Child,
    output: Lines<BufReader<ChildStdout>>,
}

impl Process {
    async fn start(role: &str, uri: &str, database: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([role, uri, database])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut process = Self { child, output };
        assert_eq!(process.line().await, "ready");
        process
    }

    async fn says(&mut self, line: &str) {
        let input = self.child.stdin.as_mut().unwrap();
        input.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    async fn line(&mut self) -> String {
        self.output.next_line().await.unwrap().expect("the other process has ended")
    }

    async fn hears(&mut self) -> f64 {
        self.line().await.parse().unwrap()
    }
}

fn report(what: &str, mut took: Vec<f64>) {
    took.sort_by(f64::total_cmp);
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    let rounds = took.len();
    println!(
        "| {what} | {rounds} | {:.2} | {:.2} | {:.2} | {:.2} |",
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0)
    );
}
