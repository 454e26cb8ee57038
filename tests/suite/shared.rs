//! Stored readers, fences and places: the cost of each verb. Also: no record, whoever wrote it, blocks
//! a document forever.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, EndReason, Holder, Lock, LockKey, LockToken, Mode, MongoStore, Released, TabId,
    TryAcquire,
    limits::MAX_READERS,
    store::{
        Acquisition, Active, Claim, NamedBy, PageId, Place, Removal, Rules, Saved, StoredDocument,
        Ticket, Turn, Waiters,
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

use crate::rig::app::{TTL, WorkItem, by_root, count, eventually, key, lock_records, put, record};
use crate::rig::faulty::Faulty;
use crate::rig::mongod::{self, Mongod};
use crate::rig::{self, Commands, depth, some};
use crate::rules::{carries_our_time, with_another_clock};

const COLLECTION: &str = "workitem";
const LEASE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(60 * 60);

pub(crate) fn claim(mode: Mode) -> Claim {
    Claim {
        aid: Aid::new(),
        token: LockToken::new(),
        holder: Holder::new("alice"),
        mode,
        ttl: TTL,
        tab: None,
        page: None,
        taken: None,
        max_hold: None,
        turn: None,
        upgrades: None,
    }
}

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
    let server = mongod::patient_replica_set().await;
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

/// The waiters of a server: one, with this ticket.
fn one_waiter(claim: &Claim, first: Ticket) -> Waiters {
    let Claim { aid, holder, mode, .. } = claim.clone();
    let writer = (mode == Mode::Exclusive).then_some(first);
    let place = Place { first, writer, last: first, aid, holder, mode };
    Waiters { server: Uuid::new_v4(), place: Some(place), lease: LEASE }
}

/// The claim of a waiter with a ticket, alone at its server. In a collection that is
/// not fair, a mere claim.
pub(crate) async fn queues(store: &MongoStore, key: &LockKey, mode: Mode) -> Claim {
    let claim = claim(mode);
    let waiter = one_waiter(&claim, Ticket::NEW);
    let drawn = store.set_place(key, &waiter, Deadline::NONE).await.unwrap();
    let others = Waiters { place: None, ..waiter };
    let ticket = drawn.unwrap_or(Ticket::NEW);
    Claim { turn: Some(Turn { ticket, others }), ..claim }
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
async fn each_verb_on_readers_is_a_read_and_a_write_except_the_first_and_refusals() {
    let (store, commands, _) = counted(Rules::new(TTL)).await;
    let alone = takes(&store, "a", Mode::Shared).await;
    assert_eq!(commands.take(), ["findAndModify"]);
    let other = takes(&store, "a", Mode::Shared).await;
    assert_eq!(commands.take(), ["find", "update"]);
    refused(&store, "a", &claim(Mode::Exclusive)).await;
    assert_eq!(commands.take(), ["find"]);
    let exclusive = Claim { aid: alone.aid.clone(), ..claim(Mode::Exclusive) };
    let _ = store.try_acquire(&key("b"), &exclusive, Deadline::NONE).await.unwrap();
    commands.take();
    assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&alone.aid)).await.unwrap(), 2);
    let mut renewed = commands.take();
    renewed.sort();
    assert_eq!(renewed, ["find", "find", "update", "update"], "one record of each kind");
    store.inspect(&key("a"), Some(&alone.aid)).await.unwrap();
    store.list(COLLECTION, None, 10).await.unwrap();
    assert_eq!(commands.take(), ["find", "find"]);
    release(&store, &other).await;
    assert_eq!(commands.take(), ["delete", "find", "update"], "it took the last lock");
    release(&store, &alone).await;
    assert_eq!(commands.take(), ["find", "delete"], "the only reader's record is deleted");
}

#[tokio::test]
async fn a_stuck_shared_lock_holds_up_the_renewal_of_no_other_session_once_it_is_known() {
    let (store, database) = store(Rules::new(TTL)).await;
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

/// The usual re-entry is a command of its own. A server that does not know the holder takes a step.
#[tokio::test]
async fn a_reentry_by_one_command_changes_what_the_rules_change() {
    let (knows, commands, database) = counted(Rules::new(TTL)).await;
    let learns = on(&database, Rules::new(TTL)).await;
    for n in 0..8 {
        let (tab, page) = (n & 1 > 0, n & 2 > 0);
        let id = |name: &str| key(&format!("{name} {n}"));
        let first = Claim {
            ttl: if n & 4 > 0 { 2 * TTL } else { TTL },
            tab: tab.then(TabId::new),
            page: Some(PageId::new()),
            ..claim(Mode::Exclusive)
        };
        let again = Claim {
            ttl: TTL,
            page: page.then(PageId::new),
            holder: Holder::new("another name").of_user("her id"),
            ..first.clone()
        };
        let mut changed = Vec::new();
        for (name, store) in [("a", &knows), ("b", &learns)] {
            for (server, of) in [(&knows, &first), (store, &again)] {
                commands.take();
                let claim = Claim { token: LockToken::new(), ..of.clone() };
                let _ = server.try_acquire(&id(name), &claim, Deadline::NONE).await.unwrap();
            }
            let is_one = commands.take() == ["findAndModify"];
            assert_eq!(is_one, name == "a", "{n}");
            let mut stored = record(&database, &id(name)).await.unwrap();
            assert!(stored.get_bool("again").unwrap());
            for differs in ["_id", "ts", "token", "since"] {
                assert!(stored.remove(differs).is_some(), "{differs}");
            }
            changed.push(stored.into_iter().collect::<BTreeMap<_, _>>());
        }
        assert_eq!(changed[0], changed[1], "{n}");
    }
}

#[tokio::test]
async fn the_cost_of_fences_and_places() {
    let (store, commands, _) = counted(Rules::new(TTL).fenced()).await;
    let lock = takes(&store, "a", Mode::Exclusive).await;
    release(&store, &lock).await;
    assert_eq!(commands.take(), ["findAndModify", "update"]);

    let (store, commands, database) = counted(Rules::new(TTL).fair()).await;
    let lock = takes(&store, "a", Mode::Exclusive).await;
    release(&store, &lock).await;
    assert_eq!(commands.take(), ["findAndModify", "delete"], "the queue is empty");
    let lock = takes(&store, "a", Mode::Exclusive).await;
    let waiting = one_waiter(&claim(Mode::Exclusive), Ticket::NEW);
    commands.take();
    refused(&store, "a", &claim(Mode::Exclusive)).await;
    assert_eq!(commands.take(), ["find"]);
    store.set_place(&key("a"), &waiting, Deadline::NONE).await.unwrap().unwrap();
    assert_eq!(commands.take(), ["find", "update"]);
    release(&store, &lock).await;
    assert_eq!(commands.take(), ["delete", "find", "update"]);
    let stored = record(&database, &key("a")).await.unwrap();
    assert_eq!(fields(&stored), ["_id", "queue", "due"]);
    commands.take();
    let nobody = Waiters { place: None, ..waiting };
    store.set_place(&key("a"), &nobody, Deadline::NONE).await.unwrap();
    assert_eq!(commands.take(), ["find", "delete"]);
    assert_eq!(count(&database).await, 0);
}

#[tokio::test]
async fn a_refusal_because_of_readers_or_waiters_writes_nothing() {
    let (store, database) = store(Rules::new(TTL).fair()).await;
    let lock = takes(&store, "a", Mode::Exclusive).await;
    queues(&store, &key("a"), Mode::Exclusive).await;
    release(&store, &lock).await;
    for _ in 0..2 {
        takes(&store, "b", Mode::Shared).await;
    }
    let log = database.client().database("local").collection::<Document>("oplog.rs");
    let namespace = lock_records(&database).namespace().to_string();
    let written = async || log.count_documents(doc! { "ns": &namespace }).await.unwrap();
    let before = written().await;
    assert!(before > 0);
    for id in ["a", "b"] {
        refused(&store, id, &claim(Mode::Exclusive)).await;
    }
    refused(&store, "a", &claim(Mode::Shared)).await;
    assert_eq!(written().await, before);
}

#[tokio::test]
async fn no_command_carries_a_time_of_the_client() {
    let server = with_another_clock().await;
    let (database, sent) = rig::recorded_database(&server.uri()).await;
    for rules in [Rules::new(TTL), Rules::new(TTL).fenced(), Rules::new(TTL).fair()] {
        let store = on(&database, rules).await;
        let short = Claim { max_hold: Some(TTL / 2), ..claim(Mode::Shared) };
        let _ = store.try_acquire(&key("a"), &short, Deadline::NONE).await.unwrap();
        let lock = takes(&store, "a", Mode::Shared).await;
        let waiting = queues(&store, &key("a"), Mode::Exclusive).await;
        refused(&store, "a", &waiting).await;
        store.renew_all(COLLECTION, std::slice::from_ref(&lock.aid)).await.unwrap();
        store.inspect(&key("a"), None).await.unwrap();
        store.list(COLLECTION, Some(&[lock.aid.clone(), short.aid.clone()]), 5).await.unwrap();
        release(&store, &lock).await;
        let nobody = waiting.turn.map(|turn| turn.others);
        store.set_place(&key("a"), &nobody.unwrap(), Deadline::NONE).await.unwrap();
        rig::age(&database, &key("a"), TTL).await;
        sent.lock().unwrap().retain(|command| !command.to_string().contains("$$it"));
        sweep(&store).await;
        store
            .end_session(
                &lock.aid,
                EndReason::Revoked,
                &[COLLECTION],
                Uuid::new_v4(),
                Deadline::NONE,
            )
            .await
            .unwrap();
    }
    let sent = sent.lock().unwrap();
    assert!(sent.len() >= 30, "{}", sent.len());
    for command in sent.iter() {
        assert!(!carries_our_time(command), "{command}");
    }
}

/// All values of fields with this name, at any depth.
fn all_of<'a>(bson: &'a Bson, field: &str) -> Vec<&'a Bson> {
    match bson {
        Bson::Array(array) => array.iter().flat_map(|bson| all_of(bson, field)).collect(),
        Bson::Document(document) => {
            let within = document.iter().flat_map(|(name, value)| {
                let mut found = all_of(value, field);
                found.extend((name == field).then_some(value));
                found
            });
            within.collect()
        }
        _ => Vec::new(),
    }
}

async fn explain(database: &Database, command: Document) -> Bson {
    let explain = doc! { "explain": command, "verbosity": "executionStats" };
    database.run_command(explain).await.unwrap().into()
}

fn strings(explained: &Bson, field: &str) -> BTreeSet<String> {
    all_of(explained, field).into_iter().filter_map(Bson::as_str).map(str::to_owned).collect()
}

#[tokio::test]
async fn a_renewal_finds_locks_of_both_kinds_by_index() {
    let uri = mongod::shared_replica_set().await;
    let (database, sent) = rig::recorded_database(uri.uri()).await;
    let store = on(&database, Rules::new(TTL)).await;
    for n in 0..50 {
        takes(&store, &format!("{n}"), if n % 2 == 0 { Mode::Shared } else { Mode::Exclusive })
            .await;
    }
    let mine = takes(&store, "0", Mode::Shared).await;
    let _ = store
        .try_acquire(
            &key("b"),
            &Claim { aid: mine.aid.clone(), ..claim(Mode::Exclusive) },
            Deadline::NONE,
        )
        .await;
    sent.lock().unwrap().clear();
    store.renew_all(COLLECTION, std::slice::from_ref(&mine.aid)).await.unwrap();
    let named = vec![NamedBy::Tab(TabId::new()), NamedBy::Token(mine.token.unwrap())];
    let tab = Active { aid: mine.aid.clone(), named: Some(named) };
    store.renew(COLLECTION, &[tab], TTL, Deadline::NONE).await.unwrap();
    store.list(COLLECTION, Some(std::slice::from_ref(&mine.aid)), 10).await.unwrap();
    let sent = sent.lock().unwrap().clone();
    let mut used = BTreeSet::new();
    for command in sent {
        let ours = ["update", "updates", "find", "filter"];
        let command: Document =
            command.into_iter().filter(|(name, _)| ours.contains(&name.as_str())).collect();
        let explained = explain(&database, command).await;
        let indexes = strings(&explained, "indexName");
        assert!(!strings(&explained, "stage").contains("COLLSCAN"), "{explained}");
        used.extend(indexes);
        let examined: Vec<_> = all_of(&explained, "totalKeysExamined");
        println!("keys examined for 2 of 51 locks: {examined:?}");
        assert!(examined.iter().all(|n| n.as_i32().unwrap() <= 4), "{examined:?}");
    }
    assert!(["aid_1", "readers.aid_1"].iter().all(|it| used.contains(*it)), "{used:?}");
}

#[tokio::test]
async fn a_sweep_that_finds_nothing_is_one_query_of_index_ranges() {
    let uri = mongod::shared_replica_set().await;
    let (database, sent) = rig::recorded_database(uri.uri()).await;
    let store = on(&database, Rules::new(TTL)).await;
    for n in 0..100 {
        takes(&store, &format!("{n}"), if n % 2 == 0 { Mode::Shared } else { Mode::Exclusive })
            .await;
    }
    sent.lock().unwrap().clear();
    assert_eq!(sweep(&store).await.sessions, 0);
    let sent = sent.lock().unwrap().clone();
    let [query] = &sent[..] else { panic!("{sent:?}") };
    let mut parts = 0;
    for stage in query.get_array("pipeline").unwrap() {
        let Ok(part) = stage.as_document().unwrap().get_document("$unionWith") else { continue };
        let collection = part.get_str("coll").unwrap();
        let query = doc! {
            "aggregate": collection, "pipeline": part.get("pipeline").unwrap(), "cursor": {},
        };
        let explained = explain(&database, query).await;
        let keys: i64 = all_of(&explained, "totalKeysExamined")
            .iter()
            .map(|n| n.as_i64().or(n.as_i32().map(i64::from)).unwrap())
            .sum();
        let indexes = strings(&explained, "indexName");
        println!("{collection}: {keys} keys of {indexes:?}, {:?}", strings(&explained, "stage"));
        if collection != "doclock.ended" {
            assert!(keys <= 2, "{keys} keys: {explained}");
            assert!(!strings(&explained, "stage").contains("COLLSCAN"), "{explained}");
            parts += 1;
        }
    }
    assert_eq!(parts, 4);
}

async fn foreign_insert(database: &Database, id: &str) -> bool {
    let lock = doc! { "_id": id, "ts": DateTime::now(), "aid": "my_app_4711" };
    match lock_records(database).insert_one(lock).await.map_err(|e| *e.kind) {
        Ok(_) => true,
        Err(ErrorKind::Write(WriteFailure::WriteError(e))) if e.code == 11000 => false,
        Err(error) => panic!("neither locked nor refused: {error:?}"),
    }
}

#[tokio::test]
async fn a_foreign_program_is_kept_out_by_readers_and_keeps_them_out() {
    let (store, database) = store(Rules::new(TTL)).await;
    let reader = takes(&store, "a", Mode::Shared).await;
    assert!(!foreign_insert(&database, "a").await);
    release(&store, &reader).await;
    assert!(foreign_insert(&database, "a").await);
    let seen = refused(&store, "a", &claim(Mode::Shared)).await;
    assert_eq!((seen.mode, seen.token), (Mode::Exclusive, None));
    assert_eq!(store.break_lock(&seen, &by_root()).await.unwrap(), Released::Released);
    takes(&store, "a", Mode::Shared).await;
}

#[tokio::test]
async fn a_foreign_lock_can_be_waited_for_and_broken_in_every_collection() {
    let rules = Rules::new(TTL);
    for rules in [rules.fenced(), rules.fair(), rules.fair().fenced()] {
        let (store, database) = store(rules).await;
        assert!(foreign_insert(&database, "a").await);
        let waiting = queues(&store, &key("a"), Mode::Exclusive).await;
        let seen = refused(&store, "a", &waiting).await;
        assert_eq!(seen.token, None);
        let stored = record(&database, &key("a")).await.unwrap();
        assert_eq!(stored.get_str("aid").unwrap(), "my_app_4711");
        assert_eq!(
            store.break_lock(&seen, &by_root()).await.unwrap(),
            Released::Released,
            "{rules:?}"
        );
        let granted = store.try_acquire(&key("a"), &waiting, Deadline::NONE).await.unwrap();
        assert!(matches!(granted, TryAcquire::Granted(_)), "{rules:?}: {granted:?}");
    }
}

/// Values that a program may have written where ours are expected.
fn absurd() -> Vec<Bson> {
    let at = |millis| Bson::DateTime(DateTime::from_millis(millis));
    vec![
        Bson::Null,
        i64::MAX.into(),
        i64::MIN.into(),
        f64::NAN.into(),
        Bson::Decimal128("1E6000".parse().unwrap()),
        "$$ROOT".into(),
        at(i64::MIN),
        at(i64::MAX),
        vec![Bson::Array(vec![Bson::Null])].into(),
        doc! { "$gt": "" }.into(),
    ]
}

/// Valid records in which one value is absurd.
fn hostile_records() -> Vec<(String, Document)> {
    let now = DateTime::now();
    let token = || LockToken::new().to_string();
    let hour = 3_600_000_i64;
    let reader = || {
        doc! {
            "ts": now, "ttl": hour, "aid": "x", "token": token(), "since": now,
            "holder": { "label": "x" }, "until": DateTime::from_millis(now.timestamp_millis() + hour),
            "again": true, "fence": 5_i64,
        }
    };
    let place = || {
        doc! {
            "server": "s", "aid": "y", "holder": { "label": "y" }, "mode": "shared",
            "first": now.timestamp_millis(), "last": now.timestamp_millis(), "until": DateTime::from_millis(now.timestamp_millis() + hour),
        }
    };
    let shared = || {
        doc! {
            "_id": "a", "readers": [reader(), reader()], "queue": [place()],
            "ts": now, "ttl": hour, "due": now, "fence": 5_i64,
        }
    };
    let mut records = Vec::new();
    for value in absurd() {
        for field in ["readers", "queue", "ts", "ttl", "due", "fence", "aid"] {
            let mut record = shared();
            record.insert(field, value.clone());
            records.push((format!("{field}: {value:?}"), record));
        }
        // The other fields are only for display.
        for field in ["ts", "ttl", "aid", "token", "until", "again", "fence"] {
            let (mut record, mut odd) = (shared(), reader());
            odd.insert(field, value.clone());
            record.insert("readers", vec![Bson::from(odd), reader().into(), value.clone()]);
            records.push((format!("reader's {field}: {value:?}"), record));
        }
        for field in ["server", "aid", "mode", "until", "first", "last", "writer"] {
            let (mut record, mut odd) = (shared(), place());
            odd.insert(field, value.clone());
            record.insert("queue", vec![Bson::from(odd), place().into(), value.clone()]);
            records.push((format!("place's {field}: {value:?}"), record));
        }
        // Records without a lock.
        for field in ["queue", "fence", "due"] {
            let mut record = doc! { "_id": "a", "fence": 5_i64, "due": now, "queue": [place()] };
            record.insert(field, value.clone());
            records.push((format!("free, {field}: {value:?}"), record));
        }
        // An exclusive lock with fields of other kinds of locks.
        for field in ["due", "fence", "until", "queue", "readers"] {
            let mut record = reader();
            record.insert("_id", "a");
            record.insert(field, value.clone());
            records.push((format!("exclusive, {field}: {value:?}"), record));
        }
    }
    records
}

/// Every verb, on each of these records; in the end the document can be locked.
#[tokio::test(flavor = "multi_thread")]
async fn no_record_makes_an_operation_fail_or_locks_a_document_forever() {
    const LANES: usize = 4;
    let rules = Rules::new(TTL);
    let all = [rules, rules.fair().fenced()];
    let mut running = JoinSet::new();
    for (lane, rules) in all.into_iter().cycle().take(LANES * all.len()).enumerate() {
        running.spawn(async move {
            // A standalone server does not wait for its journal, and there are many records.
            let server = mongod::shared_standalone().await;
            let database = rig::fresh_database(&server.uri()).await;
            let store = on(&database, rules).await;
            put(&database, "a", "old").await;
            let records = some(hostile_records()).skip(lane / all.len()).step_by(LANES);
            for (what, record) in records {
                let what = format!("{rules:?}: {what}");
                every_verb(&store, &database, rules.fair, &what, record).await;
            }
        });
    }
    running.join_all().await;
}

async fn every_verb(
    store: &MongoStore,
    database: &Database,
    fair: bool,
    what: &str,
    hostile: Document,
) {
    let a = key("a");
    let alice = Aid::new();
    let x = Aid::from("x".to_owned());
    let records = lock_records(database);
    let fresh = async || {
        records.delete_many(doc! {}).await.unwrap();
        records.insert_one(&hostile).await.unwrap();
    };
    let failed = |verb: &str, e: &dyn std::error::Error| -> ! {
        panic!("{what}: {verb}: {e}: {:?}", e.source())
    };
    fresh().await;
    let seen = store.inspect(&a, Some(&alice)).await.unwrap_or_else(|e| failed("inspect", &e));
    let seen_by_x = store.inspect(&a, Some(&x)).await.unwrap_or_else(|e| failed("inspect", &e));
    assert_eq!(seen.is_some(), seen_by_x.is_some(), "{what}");
    let listed = store.list(COLLECTION, None, 10).await.unwrap_or_else(|e| failed("list", &e));
    assert_eq!(listed.is_empty(), seen.is_none(), "{what}: {listed:?}");
    store
        .list(COLLECTION, Some(std::slice::from_ref(&x)), 10)
        .await
        .unwrap_or_else(|e| failed("list", &e));
    for aid in [&alice, &x] {
        let renewed = store.renew_all(COLLECTION, std::slice::from_ref(aid)).await;
        renewed.unwrap_or_else(|e| failed("renew", &e));
    }
    let swept = store.sweep(&[COLLECTION], Uuid::new_v4(), 100, Deadline::NONE).await;
    swept.unwrap_or_else(|e| failed("sweep", &e));
    for mode in [Mode::Exclusive, Mode::Shared] {
        for waits in [false, true].into_iter().take(if fair { 2 } else { 1 }) {
            fresh().await;
            let mut claim = Claim { aid: alice.clone(), ..claim(mode) };
            let waiter = one_waiter(&claim, Ticket::NEW);
            let nobody = Waiters { place: None, ..waiter.clone() };
            if waits {
                let drawn = store.set_place(&a, &waiter, Deadline::NONE).await;
                let ticket = drawn.unwrap_or_else(|e| failed("set_place", &e));
                let ticket = ticket.unwrap_or(Ticket::NEW);
                claim.turn = Some(Turn { ticket, others: nobody.clone() });
            }
            let answer = store.try_acquire(&a, &claim, Deadline::NONE).await;
            let answer = answer.unwrap_or_else(|e| failed("try_acquire", &e));
            let _ = store
                .try_acquire(&a, &claim, Deadline::NONE)
                .await
                .unwrap_or_else(|e| failed("again", &e));
            match answer {
                TryAcquire::Granted(lock) => {
                    assert_eq!((lock.aid, lock.mode), (alice.clone(), mode), "{what}");
                    let document = StoredDocument::encode(
                        store.format(),
                        &WorkItem { id: "a".into(), title: "x".into() },
                    )
                    .unwrap();
                    let until = Instant::now() + TTL;
                    let saved = store
                        .save(
                            &Acquisition::exclusive(&a, &alice, claim.token),
                            &document.into(),
                            Deadline::at(until),
                        )
                        .await;
                    let saved = saved.unwrap_or_else(|e| failed("save", &e));
                    assert_eq!(saved == Saved::Saved, mode == Mode::Exclusive, "{what}");
                }
                TryAcquire::Held(lock) => assert_ne!(lock.aid, alice, "{what}"),
                other => panic!("{what}: {other:?}"),
            }
            store
                .set_place(&a, &nobody, Deadline::NONE)
                .await
                .unwrap_or_else(|e| failed("set_place", &e));
            let released = store.release(&a, &alice, claim.token, mode).await;
            released.unwrap_or_else(|e| failed("release", &e));
            let released = store.retract(&a, &alice, &[claim.token], mode).await;
            released.unwrap_or_else(|e| failed("retract", &e));
        }
    }
    fresh().await;
    store
        .release_all(COLLECTION, &x, Deadline::NONE)
        .await
        .unwrap_or_else(|e| failed("release_session", &e));
    store
        .end_session(&x, EndReason::Revoked, &[COLLECTION], Uuid::new_v4(), Deadline::NONE)
        .await
        .unwrap_or_else(|e| failed("end_session", &e));
    // Anything in the way can be seen and broken, except for waiters with valid places.
    fresh().await;
    for _ in 0..8 {
        let TryAcquire::Held(held) =
            store.try_acquire(&a, &claim(Mode::Exclusive), Deadline::NONE).await.unwrap()
        else {
            return;
        };
        let Some(seen) = store.inspect(&a, None).await.unwrap() else {
            assert!(held.token.is_none() && held.expires_in() <= HOUR, "{what}: {held:?}");
            return;
        };
        store.break_lock(&seen, &by_root()).await.unwrap_or_else(|e| failed("break", &e));
    }
    panic!("{what}: cannot be broken");
}

#[tokio::test]
async fn a_record_with_nothing_but_its_fence_stays_and_is_no_lock() {
    let (store, database) = store(Rules::new(TTL).fenced()).await;
    let lock = takes(&store, "a", Mode::Exclusive).await;
    release(&store, &lock).await;
    let stored = record(&database, &key("a")).await.unwrap();
    assert_eq!(stored, doc! { "_id": "a", "fence": lock.fence.unwrap().get() as i64 });
    let reader = takes(&store, "a", Mode::Shared).await;
    assert!(reader.fence > lock.fence);
    store
        .end_session(&reader.aid, EndReason::Revoked, &[COLLECTION], Uuid::new_v4(), Deadline::NONE)
        .await
        .unwrap();
    let stored = record(&database, &key("a")).await.unwrap();
    assert_eq!(stored, doc! { "_id": "a", "fence": reader.fence.unwrap().get() as i64 });
    assert_eq!(sweep(&store).await.next, None);
    assert_eq!(count(&database).await, 1);
    assert!(!foreign_insert(&database, "a").await, "this is documented");
    // Once the collection is no longer fenced, the document is free for all programs again.
    let ordinary = on(&database, Rules::new(TTL)).await;
    assert_eq!(count(&database).await, 0);
    assert!(foreign_insert(&database, "a").await);
    assert_eq!(refused(&ordinary, "a", &claim(Mode::Shared)).await.fence, None);
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

/// As if the last reader to leave had died before it could remove the record.
#[tokio::test]
async fn an_empty_record_blocks_nobody_and_is_swept() {
    let (store, database) = store(Rules::new(TTL)).await;
    let readers = [takes(&store, "a", Mode::Shared).await, takes(&store, "a", Mode::Shared).await];
    let gone: Vec<_> = readers.iter().map(|lock| lock.aid.as_str()).collect();
    // The result of `update`, without the last step.
    let empty = vec![doc! { "$replaceWith": { "_id": "$_id", "due": "$$NOW" } }];
    let filter = doc! { "readers.aid": { "$all": gone } };
    assert_eq!(lock_records(&database).update_one(filter, empty).await.unwrap().matched_count, 1);
    assert!(store.inspect(&key("a"), None).await.unwrap().is_none());
    let swept = sweep(&store).await;
    assert_eq!((swept.sessions, swept.more, swept.announcements), (0, false, false));
    assert_eq!(count(&database).await, 0);
}

/// Readers and writers observe each other from the inside: a writer is always alone.
#[tokio::test(flavor = "multi_thread")]
async fn readers_and_writers_at_random_keep_to_the_rules() {
    let mut all = [0; 2];
    for rules in [Rules::new(TTL), Rules::new(TTL).fair(), Rules::new(TTL).fair().fenced()] {
        let granted = at_random(rules).await;
        all = [0, 1].map(|mode| all[mode] + granted[mode]);
    }
    assert!(all[0] > 20 && all[1] > 100, "both kinds had their turn: {all:?}");
}

/// How many exclusive and shared locks were granted.
async fn at_random(rules: Rules) -> [i32; 2] {
    const TASKS: u64 = 16;
    let turns = 5 * depth() as usize;
    let (store, database) = store(rules).await;
    // Each reader adds one, a writer adds a thousand.
    let inside: Arc<Vec<AtomicI64>> = Arc::new((0..3).map(|_| AtomicI64::new(0)).collect());
    let mut running = JoinSet::new();
    for task in 0..TASKS {
        let (store, inside) = (store.clone(), inside.clone());
        running.spawn(async move {
            let mut random = task.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut next = move |below: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % below
            };
            let mut granted = [0; 2];
            for _ in 0..turns {
                let document = next(3) as usize;
                let key = key(&format!("{document}"));
                let shared = next(3) > 0;
                let mode = if shared { Mode::Shared } else { Mode::Exclusive };
                let claim = queues(&store, &key, mode).await;
                let mut tries = 0;
                let lock = loop {
                    match store.try_acquire(&key, &claim, Deadline::NONE).await.unwrap() {
                        TryAcquire::Granted(lock) => break Some(lock),
                        TryAcquire::Held(lock) => assert_ne!(lock.aid, claim.aid),
                        other => panic!("{other:?}"),
                    }
                    tries += 1;
                    if tries > 10 {
                        break None;
                    }
                    sleep(Duration::from_millis(next(20))).await;
                };
                let Some(lock) = lock else {
                    let nobody = claim.turn.map(|turn| turn.others).unwrap();
                    store.set_place(&key, &nobody, Deadline::NONE).await.unwrap();
                    continue;
                };
                granted[usize::from(shared)] += 1;
                let weight = if shared { 1 } else { 1_000 };
                let before = inside[document].fetch_add(weight, SeqCst);
                assert!(if shared { before < 1_000 } else { before == 0 }, "{mode:?}: {before}");
                sleep(Duration::from_millis(next(4))).await;
                if next(3) == 0 {
                    store.renew_all(COLLECTION, std::slice::from_ref(&lock.aid)).await.unwrap();
                }
                // A reader becomes a writer if it is alone.
                let upgrade = Claim {
                    mode: Mode::Exclusive,
                    token: LockToken::new(),
                    upgrades: lock.token,
                    turn: None,
                    ..claim
                };
                let mut held = lock;
                if shared
                    && next(4) == 0
                    && let TryAcquire::Granted(lock) =
                        store.try_acquire(&key, &upgrade, Deadline::NONE).await.unwrap()
                {
                    let before = inside[document].fetch_add(999, SeqCst);
                    assert_eq!(before, 1, "alone");
                    held = lock;
                }
                let weight = if held.mode == Mode::Shared { 1 } else { 1_000 };
                inside[document].fetch_sub(weight, SeqCst);
                assert_eq!(release(&store, &held).await, Released::Released);
            }
            granted
        });
    }
    let granted = running.join_all().await;
    let granted = [0, 1].map(|mode| granted.iter().map(|granted| granted[mode]).sum());
    println!("{rules:?}: {granted:?} exclusive and shared");
    assert!(store.list(COLLECTION, None, 10).await.unwrap().is_empty());
    let left = lock_records(&database).count_documents(doc! { "ts": { "$exists": true } }).await;
    assert_eq!(left.unwrap(), 0);
    if !rules.fenced {
        assert_eq!(count(&database).await, 0);
    }
    granted
}
