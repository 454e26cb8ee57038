//! The other verbs, by one task: refusal, re-entry, renewal, the end of a session.

use std::time::{Duration, Instant};

use actix_doclock::{Aid, Holder, LockManager, MongoStore, TryAcquire, store::verbs::*};
use mongodb::{
    Collection, IndexModel,
    bson::{Document, doc},
};

use super::{Bench, cycle::in_turn, fresh};
use crate::{
    floors::{self, majority},
    load::{Contender, Cycle, Turn, cycle},
    ours::{self, MANAGER, STORE, key},
    peers::{mongo_lock, redis, seeds},
    report::{Role, Row},
    servers::Mongo,
    stats::Samples,
};

pub const FIND: &str = "find_one by _id";
pub const UPDATE: &str = "update_one by _id";
pub const UPDATE_MANY: &str = "update_many by indexed field";
pub const DELETE_MANY: &str = "delete_many by indexed field";
pub const DUPLICATE: &str = "insert_one that is a duplicate";
pub const SIZES: [usize; 3] = [1, 100, 1_000];

/// The key that every contender is refused.
const HELD: Turn = Turn { task: 0, key: 0 };

pub async fn measure(bench: &mut Bench<'_>) {
    for (at, mongo) in bench.sets() {
        let refusals = refusals(bench, at, mongo).await;
        run(bench, "refusal", &refusals).await;
        let re_entries = re_entries(at, mongo).await;
        run(bench, "re-entry", &re_entries).await;
        sessions(bench, at, mongo).await;
    }
}

async fn run(bench: &mut Bench<'_>, measure: &str, contenders: &[Contender]) {
    let all: Vec<_> = contenders.iter().collect();
    let (time, rounds) = bench.effort.slices();
    for tasks in [1, 16] {
        let samples = in_turn(&all, tasks, 1, time, rounds).await;
        for (it, samples) in all.iter().zip(samples) {
            let row = Row::new(measure, it.at, &it.who, it.role).load(tasks, 1);
            bench.report.add(row.samples(&samples));
        }
    }
}

/// Each cycle returns true if it was refused.
async fn refusals(bench: &Bench<'_>, at: &'static str, mongo: &Mongo) -> Vec<Contender> {
    let database = fresh(mongo).await;
    let raw = majority(&database, "raw");
    assert!(floors::insert(&raw, HELD).await);
    let (found, duplicate) = (raw.clone(), raw);
    let find = cycle(move |turn| {
        let raw = found.clone();
        async move { raw.find_one(doc! { "_id": turn.name() }).await.unwrap().is_some() }
    });
    let insert = cycle(move |turn| {
        let raw = duplicate.clone();
        async move { !floors::insert(&raw, turn).await }
    });
    let locks = ours::on(&database).await;
    hold(&locks, &Aid::new(), 0..1).await;
    let store = MongoStore::new(&database);
    ours::manager(store.clone()).await.shutdown().await;
    let store = cycle(move |turn| {
        let store = store.clone();
        async move {
            let claim = ours::claim(&ours::session(turn.task));
            matches!(
                store.try_acquire(&key(turn), &claim, Deadline::NONE).await.unwrap(),
                TryAcquire::Held(_)
            )
        }
    });
    let mut all = vec![
        Contender::new(at, FIND, Role::Floor, find),
        Contender::new(at, DUPLICATE, Role::Floor, insert),
        Contender::new(at, STORE, Role::Ours, store),
        Contender::new(at, MANAGER, Role::Ours, refused(locks)),
    ];
    all.extend(refusing_peers(bench, at, mongo).await);
    all
}

/// Another session asks for a held lock.
pub fn refused(locks: LockManager) -> Cycle {
    cycle(move |turn| {
        let locks = locks.clone();
        async move {
            let (aid, holder) = (ours::session(turn.task), Holder::new("bob"));
            let answer = locks.lock_for_session(&key(turn), &aid, &holder).await.unwrap();
            matches!(answer, TryAcquire::Held(_))
        }
    })
}

async fn refusing_peers(bench: &Bench<'_>, at: &'static str, mongo: &Mongo) -> Vec<Contender> {
    let client = mongo_lock::client(mongo).await;
    let name = HELD.name();
    let held = mongo_lock_async::Lock::try_acquire(&client, &name, Duration::from_secs(3600)).await;
    assert!(held.unwrap().is_some(), "no other contender holds it");
    let upsert = seeds::Upsert::on(&mongo.client().await).await;
    assert!(upsert.try_acquire(HELD).await);
    let crate_async = cycle(move |turn| {
        let client = client.clone();
        async move {
            let ttl = Duration::from_secs(3600);
            let lock = mongo_lock_async::Lock::try_acquire(&client, &turn.name(), ttl).await;
            lock.unwrap().is_none()
        }
    });
    let article = cycle(move |turn| {
        let upsert = upsert.clone();
        async move { !upsert.try_acquire(turn).await }
    });
    let mut all = vec![
        Contender::new(at, "mongo-lock-async 0.4", Role::Peer, crate_async),
        Contender::new(at, seeds::UPSERT, Role::Peer, article),
    ];
    if at != "one" {
        return all;
    }
    // Contenders without a replica set are measured only once.
    if let Some(server) = &bench.servers.redis {
        all.push(redis::refused(server).await);
    }
    all
}

/// A holder asks for its lock once more.
async fn re_entries(at: &'static str, mongo: &Mongo) -> Vec<Contender> {
    let database = fresh(mongo).await;
    let raw = majority(&database, "raw");
    assert!(floors::insert(&raw, HELD).await);
    let update = cycle(move |turn| {
        let raw = raw.clone();
        async move {
            let touch = doc! { "$currentDate": { "ts": true } };
            raw.update_one(doc! { "_id": turn.name() }, touch).await.unwrap().matched_count == 1
        }
    });
    let locks = ours::on(&database).await;
    let aid = Aid::new();
    hold(&locks, &aid, 0..1).await;
    let store = MongoStore::new(&database);
    ours::manager(store.clone()).await.shutdown().await;
    let mine = aid.clone();
    let store = cycle(move |turn| {
        let (store, claim) = (store.clone(), ours::claim(&mine));
        async move {
            let answer = store.try_acquire(&key(turn), &claim, Deadline::NONE).await.unwrap();
            matches!(answer, TryAcquire::AlreadyMine(_))
        }
    });
    vec![
        Contender::new(at, UPDATE, Role::Floor, update),
        Contender::new(at, STORE, Role::Ours, store),
        Contender::new(at, MANAGER, Role::Ours, again(locks, aid)),
    ]
}

/// The session asks for its own lock.
pub fn again(locks: LockManager, aid: Aid) -> Cycle {
    cycle(move |turn| {
        let (locks, aid) = (locks.clone(), aid.clone());
        async move {
            let (key, holder) = (key(turn), Holder::new("alice"));
            let answer = locks.lock_for_session(&key, &aid, &holder).await.unwrap();
            matches!(answer, TryAcquire::AlreadyMine(_))
        }
    })
}

/// The cost of a session with that many locks: to keep it, and to end it.
async fn sessions(bench: &mut Bench<'_>, at: &'static str, mongo: &Mongo) {
    let database = fresh(mongo).await;
    let locks = ours::on(&database).await;
    let raw = majority(&database, "raw");
    raw.create_index(IndexModel::builder().keys(doc! { "aid": 1 }).build()).await.unwrap();
    for size in SIZES {
        let aid = Aid::new();
        hold(&locks, &aid, 0..size).await;
        fill(&raw, aid.as_str(), size).await;
        let (mut floor, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..bench.effort.pick(5, 60) {
            let touch = doc! { "$currentDate": { "ts": true } };
            let began = Instant::now();
            let touched = raw.update_many(doc! { "aid": aid.as_str() }, touch).await.unwrap();
            floor.push(began.elapsed());
            assert_eq!(touched.matched_count, size as u64);
            let began = Instant::now();
            assert_eq!(locks.renew(&aid).await.unwrap(), size as u64);
            ours.push(began.elapsed());
        }
        for (who, role, took) in [(UPDATE_MANY, Role::Floor, floor), (MANAGER, Role::Ours, ours)] {
            let row = Row::new("renew", at, who, role).load(1, size);
            bench.report.add(row.samples(&Samples::of(took)));
        }
        ends(bench, at, &locks, &raw, (aid, size)).await;
    }
}

async fn ends(
    bench: &mut Bench<'_>,
    at: &'static str,
    locks: &LockManager,
    raw: &Collection<Document>,
    (mut aid, size): (Aid, usize),
) {
    let (mut floor, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..bench.effort.pick(2, 12) {
        let began = Instant::now();
        let deleted = raw.delete_many(doc! { "aid": aid.as_str() }).await.unwrap().deleted_count;
        floor.push(began.elapsed());
        assert_eq!(deleted, size as u64);
        let began = Instant::now();
        assert_eq!(locks.end_session(&aid).await.unwrap().locks.len(), size);
        ours.push(began.elapsed());
        // An ended session gets no more locks.
        aid = Aid::new();
        hold(locks, &aid, 0..size).await;
        fill(raw, aid.as_str(), size).await;
    }
    let _ = locks.end_session(&aid).await.unwrap();
    raw.delete_many(doc! {}).await.unwrap();
    for (who, role, took) in [(DELETE_MANY, Role::Floor, floor), (MANAGER, Role::Ours, ours)] {
        let row = Row::new("end session", at, who, role).load(1, size);
        bench.report.add(row.samples(&Samples::of(took)));
    }
}

/// So many at once that it does not take long, but no more than a connection pool carries.
pub async fn hold(locks: &LockManager, aid: &Aid, keys: std::ops::Range<usize>) {
    let keys: Vec<_> = keys.collect();
    for some in keys.chunks(50) {
        let acquire = some.iter().map(async |&n| {
            let key = key(Turn { task: 0, key: n });
            let answer = locks.lock_for_session(&key, aid, &Holder::new("alice")).await.unwrap();
            assert!(matches!(answer, TryAcquire::Granted(_)), "{answer:?}");
        });
        futures_util::future::join_all(acquire).await;
    }
}

async fn fill(raw: &Collection<Document>, aid: &str, size: usize) {
    let records = (0..size).map(|n| doc! { "_id": format!("{aid}-{n}"), "aid": aid });
    raw.insert_many(records).await.unwrap();
}
