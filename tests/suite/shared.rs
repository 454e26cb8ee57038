//! Stored readers, fences and places: the cost of each verb. Also: no record, whoever wrote it, blocks
//! a document forever.

mod cost;
mod hostile;
mod random;

use actix_doclock::store::verbs::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use crate::rig::app::{TTL, WorkItem, by_root, count, eventually, key, lock_records, put, record};
use crate::rig::claims::{LEASE, claim, one_waiter, queues};
use crate::rig::faulty::Faulty;
use crate::rig::mongod::{self, Mongod};
use crate::rig::{self, Commands, depth, some};
use crate::rules::{carries_our_time, with_another_clock};
use actix_doclock::{
    Aid, EndReason, Holder, Lock, LockToken, Mode, MongoStore, Released, TabId, TryAcquire,
    limits::MAX_READERS,
    store::{
        Acquisition, Active, Claim, NamedBy, PageId, Removal, Rules, Saved, StoredDocument, Ticket,
        Turn, Waiters,
    },
};
use doclock_conformance::Shorthand;
use futures_util::future::join_all;
use mongodb::Database;
use mongodb::bson::{Bson, DateTime, Document, doc};
use mongodb::error::{ErrorKind, WriteFailure};
use tokio::task::JoinSet;
use tokio::time::sleep;
use uuid::Uuid;

const COLLECTION: &str = "workitem";
const HOUR: Duration = Duration::from_secs(60 * 60);

async fn store(rules: Rules) -> (MongoStore, Database) {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    (on(&database, rules).await, database)
}

async fn on(database: &Database, rules: Rules) -> MongoStore {
    let store = MongoStore::new(database);
    store.prepare(COLLECTION, &rules, Deadline::NONE).await.unwrap();
    store
}

async fn counted(rules: Rules) -> (MongoStore, Commands, Database) {
    let server = mongod::local_replica_set().await;
    let (database, commands) = rig::counted_database(&server.uri()).await;
    let store = on(&database, rules).await;
    commands.take();
    (store, commands, database)
}

async fn takes(store: &MongoStore, id: &str, mode: Mode) -> Lock {
    match store.try_acquire(&key(id), &claim(mode), Deadline::NONE).await.unwrap() {
        TryAcquire::Granted(lock) => lock,
        other => panic!("not granted: {other:?}"),
    }
}

async fn refused(store: &MongoStore, id: &str, claim: &Claim) -> Lock {
    match store.try_acquire(&key(id), claim, Deadline::NONE).await.unwrap() {
        TryAcquire::Held(lock) => lock,
        other => panic!("not refused: {other:?}"),
    }
}

async fn release(store: &MongoStore, lock: &Lock) -> Released {
    store.release(&lock.key, &lock.aid, lock.token.unwrap(), lock.mode).await.unwrap()
}

async fn sweep(store: &MongoStore) -> actix_doclock::store::Swept {
    store.sweep(&[COLLECTION], Uuid::new_v4(), 100, Deadline::NONE).await.unwrap()
}

fn fields(record: &Document) -> Vec<&str> {
    record.keys().map(String::as_str).collect()
}

#[tokio::test]
async fn a_shared_lock_is_one_record_whose_dates_follow_its_readers() {
    let (store, database) = store(Rules::new(TTL)).await;
    let first = takes(&store, "a", Mode::Shared).await;
    rig::age(&database, &key("a"), TTL / 2).await;
    let second = takes(&store, "a", Mode::Shared).await;
    let stored = record(&database, &key("a")).await.unwrap();
    assert_eq!(fields(&stored), ["_id", "readers", "ts", "ttl", "due"]);
    let readers = stored.get_array("readers").unwrap();
    let reader = |n: usize| readers[n].as_document().unwrap();
    let ends = |n: usize| {
        let ts = reader(n).get_datetime("ts").unwrap().timestamp_millis();
        ts + reader(n).get_i64("ttl").unwrap()
    };
    assert_eq!(readers.len(), 2);
    for (n, lock) in [&first, &second].into_iter().enumerate() {
        assert_eq!(fields(reader(n)), ["ts", "ttl", "aid", "token", "since", "holder"]);
        assert_eq!(reader(n).get_str("aid").unwrap(), lock.aid.as_str());
    }
    let ts = stored.get_datetime("ts").unwrap();
    assert_eq!(ts, reader(1).get_datetime("ts").unwrap(), "of the newest reader");
    assert_eq!(
        ts.timestamp_millis() + stored.get_i64("ttl").unwrap(),
        ends(1),
        "of the reader that expires last"
    );
    assert_eq!(
        stored.get_datetime("due").unwrap().timestamp_millis(),
        ends(0),
        "of the reader that expires first"
    );
    assert_eq!(release(&store, &second).await, Released::Released);
    let stored = record(&database, &key("a")).await.unwrap();
    let ts = stored.get_datetime("ts").unwrap().timestamp_millis();
    assert_eq!(ts + stored.get_i64("ttl").unwrap(), ends(0));
    assert_eq!(release(&store, &first).await, Released::Released);
    assert_eq!(count(&database).await, 0, "a free document has no record");
}

/// Expired readers wait for the sweep as long as there is room for them.
#[tokio::test]
async fn the_list_of_readers_does_not_grow_beyond_its_limit() {
    let (store, database) = store(Rules::new(TTL)).await;
    let run_out = |n: usize| {
        doc! {
            "ts": DateTime::from_millis(5), "ttl": 5_i64,
            "aid": format!("{n}"), "token": LockToken::new().to_string(),
        }
    };
    let readers: Vec<_> = (0..MAX_READERS - 1).map(run_out).collect();
    let old = doc! {
        "_id": "a", "readers": readers, "ts": DateTime::from_millis(5), "ttl": 5_i64,
        "due": DateTime::from_millis(10),
    };
    lock_records(&database).insert_one(old).await.unwrap();
    let listed = async || {
        let stored = record(&database, &key("a")).await.unwrap();
        stored.get_array("readers").unwrap().len()
    };
    let mut lock = takes(&store, "a", Mode::Shared).await;
    assert_eq!(listed().await, MAX_READERS);
    takes(&store, "a", Mode::Shared).await;
    assert_eq!(listed().await, 2);
    // Nor does it grow when a reader expires and comes back.
    for _ in 0..3 {
        rig::age(&database, &key("a"), TTL).await;
        let again = Claim { aid: lock.aid.clone(), ..claim(Mode::Shared) };
        match store.try_acquire(&key("a"), &again, Deadline::NONE).await.unwrap() {
            TryAcquire::Granted(again) => lock = again,
            other => panic!("{other:?}"),
        }
        assert_eq!(listed().await, 2);
    }
}

#[tokio::test]
async fn the_queue_does_not_grow_beyond_its_limit() {
    let (store, database) = store(Rules::new(TTL).fair()).await;
    takes(&store, "a", Mode::Exclusive).await;
    let place = |n: usize| {
        let now = DateTime::now().timestamp_millis();
        let until = DateTime::from_millis(now + 600_000);
        doc! {
            "server": Uuid::new_v4().to_string(), "aid": format!("{n}"), "first": now, "last": now,
            "holder": { "label": "alice" }, "mode": "exclusive", "until": until,
        }
    };
    let queue: Vec<_> = (0..MAX_READERS - 1).map(place).collect();
    let written = doc! { "$set": { "queue": queue } };
    lock_records(&database).update_one(doc! { "_id": "a" }, written).await.unwrap();
    for has_room in [true, false, false] {
        let waiter = one_waiter(&claim(Mode::Exclusive), Ticket::NEW);
        let drawn = store.set_place(&key("a"), &waiter, Deadline::NONE).await.unwrap();
        assert_eq!(drawn.is_some(), has_room);
        let stored = record(&database, &key("a")).await.unwrap();
        assert_eq!(stored.get_array("queue").unwrap().len(), MAX_READERS);
    }
}

#[tokio::test]
async fn a_stuck_shared_lock_holds_up_the_renewal_of_no_other_session_once_it_is_known() {
    let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
    let store = on(&database, Rules::new(TTL)).await;
    let stuck = takes(&store, "stuck", Mode::Shared).await;
    let reader = takes(&store, "read", Mode::Shared).await;
    let writer = takes(&store, "written", Mode::Exclusive).await;
    let mut in_the_way = database.client().start_session().await.unwrap();
    in_the_way.start_transaction().await.unwrap();
    let touch = doc! { "$set": { "touched": true } };
    let records = lock_records(&database);
    records.update_one(doc! { "_id": "stuck" }, touch).session(&mut in_the_way).await.unwrap();
    let all = [&stuck, &reader, &writer].map(|lock| Active::all_of(&lock.aid));
    let renew = async || {
        let until = Deadline::at(Instant::now() + Duration::from_secs(30));
        store.renew(COLLECTION, &all, TTL, until).await.unwrap()
    };
    let first = renew().await;
    assert!(first.late.contains(&stuck.aid), "{first:?}");
    let known = renew().await;
    assert_eq!((known.documents, known.late), (2, vec![stuck.aid.clone()]));
    in_the_way.abort_transaction().await.unwrap();
    // A single session is asked for, and its lock is found to be free again.
    assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&stuck.aid)).await.unwrap(), 1);
    assert_eq!(renew().await.documents, 3);
}

/// The command of the second release changes nothing, and its majority is late.
#[tokio::test]
async fn a_release_that_finds_nothing_is_not_called_a_release_because_its_majority_is_late() {
    let server = Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    let store = on(&database, Rules::new(TTL)).await;
    let goes = takes(&store, "a", Mode::Shared).await;
    takes(&store, "a", Mode::Shared).await;
    assert_eq!(release(&store, &goes).await, Released::Released);
    server.majority_is_late_for("update").await;
    let goes = Acquisition::of(&goes).unwrap();
    let until = Deadline::at(Instant::now() + Duration::from_secs(30));
    let again = store.remove_lock(Removal::Release(&goes), until).await.unwrap();
    assert_eq!(again, Released::AlreadyGone);
}

#[tokio::test]
async fn the_fence_of_a_fenced_document_outlives_its_queue() {
    let (store, database) = store(Rules::new(TTL).fair().fenced()).await;
    let lock = takes(&store, "a", Mode::Exclusive).await;
    queues(&store, &key("a"), Mode::Exclusive).await;
    release(&store, &lock).await;
    rig::age(&database, &key("a"), LEASE).await;
    sweep(&store).await;
    let stored = record(&database, &key("a")).await.unwrap();
    assert_eq!(stored, doc! { "_id": "a", "fence": lock.fence.unwrap().get() as i64 });
}

/// A session wakes up and reads again, at each moment of a sweep that has found it idle.
#[tokio::test]
async fn a_sweep_never_removes_a_reader_that_has_come_back() {
    for commands in 0.. {
        let faulty = Faulty::new().await;
        let aids = [Aid::new(), Aid::new()];
        let read = async |aid: &Aid| {
            let claim = Claim { aid: aid.clone(), ..claim(Mode::Shared) };
            match faulty.other.store.try_acquire(&key("a"), &claim, Deadline::NONE).await.unwrap() {
                TryAcquire::Granted(lock) => lock,
                other => panic!("{other:?}"),
            }
        };
        for aid in &aids {
            read(aid).await;
        }
        rig::age(&faulty.database, &key("a"), TTL).await;
        faulty.proxy.hold_any_request(commands);
        let app = faulty.app.clone();
        let sweep = tokio::spawn(async move { app.locks.sweep().await });
        while faulty.proxy.fired() == 0 && !sweep.is_finished() {
            sleep(Duration::from_millis(1)).await;
        }
        if sweep.is_finished() {
            assert!(commands >= 5, "it has more commands than that");
            return;
        }
        let again = read(&aids[0]).await;
        faulty.proxy.let_go();
        sweep.await.unwrap().unwrap();
        let seen = faulty.other.store.inspect(&key("a"), None).await.unwrap();
        assert_eq!(seen.and_then(|lock| lock.token), again.token, "before command {commands}");
    }
}

/// For example after a failover to a server whose clock is behind.
#[tokio::test]
async fn fences_rise_even_if_the_clock_does_not() {
    let (store, database) = store(Rules::new(TTL).fenced()).await;
    let ahead = DateTime::now().timestamp_millis() + 1_000_000;
    lock_records(&database).insert_one(doc! { "_id": "a", "fence": ahead }).await.unwrap();
    for n in 1..=6 {
        let mode = if n % 2 == 0 { Mode::Shared } else { Mode::Exclusive };
        let lock = takes(&store, "a", mode).await;
        assert_eq!(lock.fence.map(|fence| fence.get()), Some(ahead as u64 + n));
        release(&store, &lock).await;
    }
    for absurd in [i64::MAX.into(), i64::MIN.into(), f64::NAN.into(), Bson::from("x")] {
        let written = doc! { "$set": { "fence": absurd } };
        lock_records(&database).update_one(doc! { "_id": "a" }, written).await.unwrap();
        let first = takes(&store, "a", Mode::Exclusive).await;
        release(&store, &first).await;
        let second = takes(&store, "a", Mode::Exclusive).await;
        release(&store, &second).await;
        assert!(first.fence.is_some() && second.fence > first.fence, "{first:?}, {second:?}");
    }
}

#[tokio::test]
async fn the_ttl_index_of_a_fenced_collection_never_fires() {
    let server = Mongod::start_with_eager_ttl_monitor().await;
    let database = rig::fresh_database(&server.uri()).await;
    let ordinary = on(&database, Rules::new(TTL)).await;
    takes(&ordinary, "before", Mode::Exclusive).await;
    let store = on(&database, Rules::new(TTL).fenced()).await;
    let fence = takes(&store, "a", Mode::Exclusive).await.fence;
    rig::age(&database, &key("a"), 1_000 * TTL).await;
    rig::age(&database, &key("before"), 1_000 * TTL).await;
    // A few passes of the monitor.
    let passes = async || {
        let status = database.run_command(doc! { "serverStatus": 1 }).await.unwrap();
        let ttl = status.get_document("metrics").unwrap().get_document("ttl").unwrap().clone();
        ttl.get_i64("passes").unwrap()
    };
    let before = passes().await;
    eventually("the monitor comes round", async || passes().await > before + 2).await;
    assert_eq!(count(&database).await, 2);
    assert!(takes(&store, "a", Mode::Exclusive).await.fence > fence);
    // In a collection that is ordinary again, it fires again.
    rig::age(&database, &key("a"), 1_000 * TTL).await;
    on(&database, Rules::new(TTL)).await;
    eventually("it fires again", async || count(&database).await == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_leave_at_the_same_moment_leave_no_record() {
    let rounds = 15 * depth() as usize;
    let (store, database) = store(Rules::new(TTL)).await;
    let mut lanes = JoinSet::new();
    for lane in 0..4 {
        let store = store.clone();
        lanes.spawn(async move {
            for round in 0..rounds {
                let id = format!("{lane} {round}");
                let mut readers = Vec::new();
                for _ in 0..2 + round % 3 {
                    readers.push(takes(&store, &id, Mode::Shared).await);
                }
                let left = join_all(readers.iter().map(|lock| release(&store, lock))).await;
                assert!(left.iter().all(|it| *it == Released::Released), "{left:?}");
            }
        });
    }
    lanes.join_all().await;
    let left: Vec<_> = lock_records(&database).distinct("_id", doc! {}).await.unwrap();
    assert!(left.is_empty(), "{} records: {left:?}", left.len());
}
