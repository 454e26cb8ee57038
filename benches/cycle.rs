//! The cost of a lock, compared with the cost of the database itself: `cargo bench --features
//! test-util`.
//!
//! The database is a replica set with one member that the benchmark starts, or the one at
//! `MONGODB_URI`. Everything runs on one machine and with majority write concern. Compare the ratios
//! within one run, not the figures of two runs.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use std::time::Duration;

use actix_doclock::{
    Aid, Holder, LockKey, LockManager, Lockable, MemoryStore, MongoStore, TryAcquire,
};
use criterion::{Criterion, criterion_group, criterion_main};
use mongodb::{
    Collection,
    bson::{Document, doc},
    options::{CollectionOptions, WriteConcern},
};
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

#[derive(Serialize, Deserialize)]
struct Page {
    #[serde(rename = "_id")]
    id: i64,
}

impl Lockable for Page {
    type Id = i64;
    const COLLECTION: &'static str = "page";
}

async fn manager(store: impl actix_doclock::store::Store) -> LockManager {
    let locks = LockManager::builder(store).build().await.unwrap();
    locks.register::<Page>().await.unwrap();
    locks
}

fn verbs(criterion: &mut Criterion, runtime: &Runtime, name: &str, locks: &LockManager) {
    let (alice, bob, holder) = (Aid::new(), Aid::new(), Holder::new("alice"));
    let (free, held) = (LockKey::of::<Page>(1).unwrap(), LockKey::of::<Page>(2).unwrap());
    let mut group = criterion.benchmark_group(name);
    group.measurement_time(Duration::from_secs(5)).sample_size(50);
    group.bench_function("acquire + release", |b| {
        b.to_async(runtime).iter(async || {
            match locks.lock_for_session(&free, &alice, &holder).await.unwrap() {
                TryAcquire::Granted(lock) => locks.release(&lock).await.unwrap(),
                other => panic!("not granted: {other:?}"),
            }
        });
    });
    let _ = runtime.block_on(locks.lock_for_session(&held, &alice, &holder)).unwrap();
    group.bench_function("re-entry", |b| {
        b.to_async(runtime)
            .iter(async || locks.lock_for_session(&held, &alice, &holder).await.unwrap());
    });
    group.bench_function("refusal with holder", |b| {
        b.to_async(runtime)
            .iter(async || locks.lock_for_session(&held, &bob, &holder).await.unwrap());
    });
    group.bench_function("renew a session", |b| {
        b.to_async(runtime).iter(async || locks.renew(&alice).await.unwrap());
    });
    group.finish();
}

fn floors(criterion: &mut Criterion, runtime: &Runtime, raw: &Collection<Document>) {
    let mut group = criterion.benchmark_group("floor of MongoDB");
    group.measurement_time(Duration::from_secs(5)).sample_size(50);
    group.bench_function("insert_one + delete_one", |b| {
        b.to_async(runtime).iter(async || {
            raw.insert_one(doc! { "_id": 1, "aid": "x" }).await.unwrap();
            raw.delete_one(doc! { "_id": 1 }).await.unwrap();
        });
    });
    runtime.block_on(raw.insert_one(doc! { "_id": 2, "aid": "x" }).into_future()).unwrap();
    group.bench_function("find_one by _id", |b| {
        b.to_async(runtime).iter(async || raw.find_one(doc! { "_id": 2 }).await.unwrap());
    });
    group.bench_function("update_one by _id", |b| {
        let touch = doc! { "$currentDate": { "ts": true } };
        b.to_async(runtime)
            .iter(async || raw.update_one(doc! { "_id": 2 }, touch.clone()).await.unwrap());
    });
    group.finish();
}

fn cycle(criterion: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let (database, on_mongo, in_memory) = runtime.block_on(async {
        let uri = rig::mongod::shared_replica_set().await;
        let database = rig::fresh_database(uri.uri()).await;
        let on_mongo = manager(MongoStore::new(&database)).await;
        (database, on_mongo, manager(MemoryStore::new()).await)
    });
    let options = CollectionOptions::builder().write_concern(WriteConcern::majority()).build();
    floors(criterion, &runtime, &database.collection_with_options("raw", options));
    verbs(criterion, &runtime, "MongoStore", &on_mongo);
    verbs(criterion, &runtime, "MemoryStore", &in_memory);
}

criterion_group!(benches, cycle);
criterion_main!(benches);
