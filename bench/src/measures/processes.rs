//! The time from a release until a waiter in another process holds the lock. For comparison, between the same two
//! processes: the change stream alone, and polling every 100 ms, as the articles do that this crate goes back to.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix_doclock::{LockError, LockGuard, LockManager, Wait};
use mongodb::{Client, Database, bson::doc};
use tokio::{
    io::{AsyncBufReadExt, BufReader, stdin},
    time::sleep,
};

use super::{Bench, fresh};
use crate::{
    child::Child,
    floors::{self, majority},
    load::{Random, Turn},
    ours::{self, key},
    report::{Role, Row},
    stats::Samples,
};

const TURN: Turn = Turn { task: 0, key: 0 };
const POLL: Duration = Duration::from_millis(100);

pub async fn measure(bench: &mut Bench<'_>) {
    let (rounds, few) = bench.effort.pick((5, 2), (1_000, 200));
    let mongo = &bench.servers.one;
    let (uri, database) = (mongo.uri(), fresh(mongo).await);
    let measured = [
        ("change stream: delete_one → event", Role::Floor, events(&uri, &database, rounds).await),
        ("LockManager, waiting", Role::Ours, grants(&uri, &database, "waiter", rounds).await),
        ("asks every 100 ms", Role::Peer, grants(&uri, &database, "poller", few).await),
    ];
    for (who, role, took) in measured {
        bench.report.add(Row::new("processes", "one", who, role).samples(&Samples::of(took)));
    }
}

/// Both processes are on one machine, so its clock is good enough.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock that is set")
}

/// Random, so that the rounds do not run in step with the server's periodic work.
async fn a_while(random: &mut Random) {
    sleep(Duration::from_micros(20_000 + random.below(25_000) as u64)).await;
}

async fn start(role: &str, uri: &str, database: &Database) -> Child {
    let mut child = Child::start(&[role, uri, database.name()]);
    assert_eq!(child.line().await, "ready");
    child
}

/// When the other process has noticed it.
async fn noticed(child: &mut Child) -> Duration {
    Duration::from_nanos(child.line().await.parse().expect("a time"))
}

async fn grants(uri: &str, database: &Database, role: &str, rounds: usize) -> Vec<Duration> {
    let locks = ours::on(database).await;
    let mut waiter = start(role, uri, database).await;
    let (mut took, mut random) = (Vec::new(), Random::of(rounds));
    for _ in 0..rounds {
        let held = locks.acquire(&key(TURN), Wait::until_acquired()).await.unwrap();
        waiter.tell("wait").await;
        a_while(&mut random).await;
        let began = now();
        held.release().await.unwrap();
        took.push(noticed(&mut waiter).await - began);
    }
    locks.shutdown().await;
    took
}

async fn events(uri: &str, database: &Database, rounds: usize) -> Vec<Duration> {
    let raw = majority(database, "raw");
    assert!(floors::insert(&raw, TURN).await, "a collection to watch");
    let mut watcher = start("watcher", uri, database).await;
    let (mut took, mut random) = (Vec::new(), Random::of(rounds));
    for _ in 0..rounds {
        a_while(&mut random).await;
        let began = now();
        raw.delete_one(doc! { "_id": TURN.name() }).await.unwrap();
        took.push(noticed(&mut watcher).await - began);
        assert!(floors::insert(&raw, TURN).await);
    }
    took
}

/// The other process: prints the time at which it has noticed a release.
pub async fn child(role: &str, uri: &str, database: &str) {
    let database = Client::with_uri_str(uri).await.unwrap().database(database);
    if role == "watcher" {
        return watch(&database).await;
    }
    let locks = ours::on(&database).await;
    let mut told = BufReader::new(stdin()).lines();
    println!("ready");
    while told.next_line().await.unwrap().is_some() {
        let guard = if role == "poller" {
            poll(&locks).await
        } else {
            locks.acquire(&key(TURN), Wait::until_acquired()).await.unwrap()
        };
        let held = now();
        guard.release().await.unwrap();
        println!("{}", held.as_nanos());
    }
}

async fn poll(locks: &LockManager) -> LockGuard {
    loop {
        match locks.acquire(&key(TURN), Wait::no()).await {
            Ok(guard) => return guard,
            Err(LockError::Held(_)) => sleep(POLL).await,
            Err(e) => panic!("{e}"),
        }
    }
}

async fn watch(database: &Database) {
    let deletes = [doc! { "$match": { "operationType": "delete" } }];
    let mut stream = majority(database, "raw").watch().pipeline(deletes).await.unwrap();
    println!("ready");
    loop {
        if stream.next_if_any().await.unwrap().is_some() {
            println!("{}", now().as_nanos());
        }
    }
}
