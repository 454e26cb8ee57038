//! Records that an open transaction of a dead or paused server blocks. No other record waits for them.

use std::cell::Cell;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use actix_doclock::store::{Active, Deadline, Removal, Renewed, verbs::*};
use actix_doclock::{
    Actor, Aid, EndReason, LockError, LockKey, Lockable, Named, Released, StoreErrorKind,
};
use futures_util::{TryStreamExt, future::join_all};
use mongodb::Database;
use mongodb::bson::{Bson, Document, doc};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::rig;
use crate::rig::app::{
    App, NO_DEADLINE, TTL, WorkItem, by_root, count, eventually, key, lock_records, stuck,
    with_deadline,
};
use crate::rig::faulty::Faulty;
use crate::rig::mongod::{self, Mongod};

/// More than the connections of a default pool.
const STUCK: usize = 12;
/// More than one command writes in its time.
const MANY: usize = 12_000;

fn keys() -> Vec<LockKey> {
    (0..STUCK).map(|n| key(&format!("stuck-{n}"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn twelve_stuck_records_under_constant_requests_hold_up_no_other_document() {
    // The server itself aborts the transaction after a minute.
    const DEADLINE: Duration = Duration::from_secs(45);
    let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
    let app = App::with(&database, with_deadline(DEADLINE)).await;
    let aid = Aid::new();
    for key in keys() {
        app.granted(&key, &aid).await;
    }
    let mut transaction = stuck(&database, &keys()).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let mut askers = JoinSet::new();
    for key in keys().into_iter().flat_map(|key| [key.clone(), key]) {
        let (app, aid, is_over) = (app.clone(), aid.clone(), Arc::clone(&is_over));
        askers.spawn(async move {
            while !is_over.load(Ordering::Relaxed) {
                // A re-entry, which renews the lock. (A refusal writes nothing, so nothing blocks it.)
                let _ = app.try_acquire(&key, &aid).await;
            }
        });
    }
    let mut took = Vec::new();
    for n in 0..100 {
        let began = Instant::now();
        let lock = app.granted(&key(&format!("free-{n}")), &Aid::new()).await;
        // On a slow machine, the reply may be late: the repetition finds the lock gone.
        let _: Released = app.locks.release(&lock).await.unwrap();
        took.push(began.elapsed());
    }
    took.sort();
    println!("median {:?}, worst {:?}", took[took.len() / 2], took[took.len() - 1]);
    // If each of them kept a connection, the first of these cycles would take the whole deadline.
    assert!(took[took.len() / 2] < DEADLINE / 10, "{took:?}");

    transaction.abort_transaction().await.unwrap();
    is_over.store(true, Ordering::Relaxed);
    askers.join_all().await;
    for key in keys() {
        app.already_mine(&key, &aid).await;
    }
}

#[tokio::test]
async fn a_request_for_a_stuck_record_fails_within_the_deadline_as_unavailable() {
    let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
    let (app, aid) = (App::on(&database).await, Aid::new());
    app.granted(&key("a"), &aid).await;
    let mut transaction = stuck(&database, &[key("a")]).await;
    let hurried = App::with(&database, with_deadline(Duration::from_secs(1))).await;
    match hurried.try_acquire(&key("a"), &aid).await {
        Err(LockError::Store(e)) => assert_eq!(e.kind(), StoreErrorKind::Unavailable, "{e}"),
        other => panic!("{other:?}"),
    }
    transaction.abort_transaction().await.unwrap();
    eventually("the lock can be acquired again", async || {
        app.try_acquire(&key("a"), &aid).await.is_ok()
    })
    .await;
}

/// A session with so many locks that one command does not write them all, half of the ttl old. Their keys in the
/// order in which the server finds them.
async fn with_many_locks(app: &App, database: &Database, aid: &Aid) -> Vec<LockKey> {
    let keys: Vec<_> = (0..MANY).map(|n| key(&format!("{n:05}"))).collect();
    app.granted(&keys[0], aid).await;
    rig::age(database, &keys[0], TTL / 2).await;
    rig::copies_of(database, &keys[0], &keys[1..]).await;
    keys
}

/// The records that were not renewed since they were half of the ttl old.
async fn not_renewed(database: &Database) -> Vec<String> {
    let age = doc! { "$subtract": ["$$NOW", "$ts"] };
    let old = doc! { "$gte": [age, i64::try_from((TTL / 2).as_millis()).unwrap()] };
    let found = lock_records(database).find(doc! { "$expr": old }).await.unwrap();
    let found: Vec<_> = found.try_collect().await.unwrap();
    found.iter().map(|record| record.get_str("_id").unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_session_with_a_lock_that_is_known_to_be_stuck_does_not_delay_the_renewal_of_others() {
    let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
    let app = App::on(&database).await;
    let (lucky, unlucky) = (Aid::new(), Aid::new());
    for (id, aid) in [("a", &lucky), ("b", &unlucky), ("c", &unlucky)] {
        app.granted(&key(id), aid).await;
    }
    let mut transaction = stuck(&database, &[key("b")]).await;
    app.locks.renew(&unlucky).await.unwrap_err();
    let both = [lucky, unlucky.clone()];
    // A store that is too busy to know the answer is asked again.
    let renew = async |aids: &[Aid]| loop {
        let active: Vec<_> = aids.iter().map(Active::all_of).collect();
        match app.store.renew(WorkItem::COLLECTION, &active, TTL, Deadline::NONE).await {
            Err(e) if e.kind() == StoreErrorKind::Unavailable => {}
            renewed => break renewed.unwrap(),
        }
    };
    assert_eq!(renew(&both).await, Renewed { documents: 1, late: vec![unlucky.clone()] });
    // Alone, it gets what can be renewed.
    assert_eq!(renew(&both[1..]).await, Renewed { documents: 1, late: vec![unlucky] });
    transaction.abort_transaction().await.unwrap();
    eventually("it is not stuck any more", async || renew(&both[1..]).await.documents == 2).await;
    assert_eq!(renew(&both).await, Renewed { documents: 3, late: Vec::new() });
}

#[tokio::test]
async fn a_stuck_record_does_not_keep_thousands_of_other_locks_from_being_renewed() {
    let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
    let (app, aid) = (App::on(&database).await, Aid::new());
    let keys = with_many_locks(&app, &database, &aid).await;
    let stuck_one = &keys[MANY - 2];
    let mut transaction = stuck(&database, slice::from_ref(stuck_one)).await;
    // On a slow machine, one call does not reach them all; and the server itself aborts the transaction after a minute.
    eventually("all others are renewed", async || {
        let _ = app.locks.renew(&aid).await;
        not_renewed(&database).await.iter().all(|id| *id == stuck_one.id().to_string())
    })
    .await;
    let _ = transaction.abort_transaction().await;
    eventually("all are renewed", async || {
        app.locks.renew(&aid).await.is_ok_and(|renewed| renewed == MANY as u64)
    })
    .await;
    assert_eq!(not_renewed(&database).await, [""; 0]);
}

#[tokio::test]
async fn thousands_of_locks_are_all_removed_or_the_removal_fails() {
    let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
    let (app, aid) = (App::on(&database).await, Aid::new());
    let keys = with_many_locks(&app, &database, &aid).await;
    let mut transaction = stuck(&database, &keys[MANY - 2..MANY - 1]).await;
    // The store knows the stuck record, so it does not even try to remove all by one command.
    app.locks.renew(&aid).await.unwrap_err();
    let release = async || app.store.release_all(WorkItem::COLLECTION, &aid, Deadline::NONE).await;
    // On a slow machine, one call does not reach them all; and the server itself aborts the transaction after a minute.
    eventually("all others are removed", async || match release().await {
        Ok(_) => count(&database).await == 0,
        Err(_) => count(&database).await == 1,
    })
    .await;
    let _ = transaction.abort_transaction().await;
    eventually("the last one is removed", async || release().await.is_ok()).await;
    assert_eq!(count(&database).await, 0);
}

/// They share commands until one of the commands is late, and that one is late soon.
#[tokio::test]
async fn a_stuck_record_does_not_keep_other_releases_and_acquires_from_being_answered() {
    const DEADLINE: Duration = Duration::from_secs(20);
    const LOCKS: usize = 60;
    let (database, sent) = rig::recorded_database(&mongod::strict_replica_set().await.uri()).await;
    let app = App::with(&database, with_deadline(DEADLINE)).await;
    let aid = Aid::new();
    let name = |n: usize| key(&n.to_string());
    let locks = join_all((0..LOCKS).map(async |n| app.granted(&name(n), &aid).await)).await;
    let mut transaction = stuck(&database, &[name(7)]).await;
    let release = async |n: usize| match app.locks.release(&locks[n]).await {
        Ok(released) => assert_eq!((released, n == 7), (Released::Released, false)),
        Err(e) => assert_eq!(n, 7, "{e}"),
    };
    let acquire = async |n: usize| drop(app.granted(&name(n), &Aid::new()).await);
    let is_given_up = Cell::new(false);
    let others = async {
        join_all((0..LOCKS).filter(|n| *n != 7).map(release)).await;
        join_all((LOCKS..2 * LOCKS).map(acquire)).await;
        assert!(!is_given_up.get(), "they waited until the deadline of the stuck one");
    };
    let stuck = async {
        release(7).await;
        is_given_up.set(true);
    };
    tokio::join!(others, stuck);
    transaction.abort_transaction().await.unwrap();
    // The stuck one was sent with others once only, and all others that were with it once more, alone.
    let sent = sent.lock().unwrap();
    let deletes = sent.iter().filter_map(|it| it.get_array("deletes").ok());
    let (alone, shared): (Vec<_>, Vec<_>) = deletes.partition(|it| it.len() == 1);
    let has = |it: &&Vec<Bson>, id: &str| format!("{it:?}").contains(&format!("{id:?}"));
    assert!(shared.iter().filter(|it| has(it, "7")).count() <= 1);
    for n in (0..LOCKS).filter(|n| *n != 7) {
        assert!(alone.iter().filter(|it| has(it, &n.to_string())).count() <= 1, "{n}");
    }
}

/// Otherwise each repetition would make another command late, with the releases of all others in it.
#[tokio::test]
async fn the_release_of_a_stuck_record_is_repeated_alone() {
    const DEADLINE: Duration = Duration::from_secs(4);
    let (database, sent) = rig::recorded_database(&mongod::strict_replica_set().await.uri()).await;
    let app = App::with(&database, with_deadline(DEADLINE)).await;
    let lock = app.granted(&key("stuck"), &Aid::new()).await;
    let mut transaction = stuck(&database, &[key("stuck")]).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let mut others = JoinSet::new();
    for n in 0..8 {
        let (app, is_over, key) = (app.clone(), Arc::clone(&is_over), key(&n.to_string()));
        others.spawn(async move {
            while !is_over.load(Ordering::Relaxed) {
                let lock = app.granted(&key, &Aid::new()).await;
                app.locks.release(&lock).await.unwrap();
            }
        });
    }
    app.locks.release(&lock).await.unwrap_err();
    is_over.store(true, Ordering::Relaxed);
    others.join_all().await;
    transaction.abort_transaction().await.unwrap();
    let (mut shared, mut alone) = (0, 0);
    for command in sent.lock().unwrap().iter().filter(|it| it.contains_key("delete")) {
        let deletes = command.get_array("deletes").unwrap();
        let id = |it: &Bson| {
            it.as_document()?.get_document("q").ok()?.get_str("_id").ok().map(str::to_owned)
        };
        if deletes.iter().filter_map(id).any(|id| id == "stuck") {
            *(if deletes.len() > 1 { &mut shared } else { &mut alone }) += 1;
        }
    }
    assert!(shared <= 1 && alone > 1, "{shared} times with others, {alone} times alone");
}

#[tokio::test]
async fn the_end_of_a_session_releases_stuck_locks_later_and_all_others_at_once() {
    let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
    let (patient, aid) = (App::on(&database).await, Aid::new());
    let app = App::with(&database, with_deadline(Duration::from_secs(2))).await;
    let ids: Vec<_> = (0..20).map(|n| key(&format!("{n}"))).collect();
    for key in &ids {
        patient.granted(key, &aid).await;
    }
    let mut transaction = stuck(&database, &ids[7..8]).await;
    let left = async || lock_records(&database).count_documents(doc! {}).await.unwrap();
    while left().await > 1 {
        assert!(app.locks.end_session(&aid).await.is_err(), "one lock is still there");
    }
    transaction.abort_transaction().await.unwrap();
    patient.locks.end_session(&aid).await.unwrap();
    assert_eq!(left().await, 0);
}

/// The primary has changed the record, and the repetition finds nothing.
#[tokio::test]
async fn a_break_that_is_majority_committed_late_is_reported_as_a_break() {
    let server = Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    let app = App::with(&database, |settings| settings.break_policy(|_, _| true)).await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    server.majority_is_late_for("update").await;
    let root = Actor::new("root");
    assert_eq!(app.locks.break_lock(&lock, &root, "").await.unwrap(), Released::Released);
    assert_eq!(app.locks.break_lock(&lock, &root, "").await.unwrap(), Released::AlreadyGone);
}

/// The lock of a break has expired, so a sweep or a claim of another server may come before the repetition.
#[tokio::test]
async fn a_break_is_reported_as_a_break_although_its_lock_was_removed_before_its_majority() {
    let server = Mongod::start_replica_set().await;
    let faulty = Faulty::on(&server, "", NO_DEADLINE).await;
    let (by, lock) = (by_root(), faulty.app.granted(&key("a"), &Aid::new()).await);
    server.majority_is_late_for("update").await;
    faulty.proxy.hold_reply_to("update");
    let sweep = async {
        faulty.proxy.until_fired(1).await;
        let records = lock_records(&faulty.database);
        assert_eq!(records.delete_many(doc! {}).await.unwrap().deleted_count, 1);
        faulty.proxy.let_go();
    };
    let (removal, until) =
        (Removal::Break { seen: &lock, taken: &by }, Instant::now() + NO_DEADLINE);
    let broken = faulty.app.store.remove_lock(removal, Deadline::at(until));
    let (broken, ()) = tokio::join!(broken, sweep);
    assert_eq!(broken.unwrap(), Released::Released);
}

/// The majority is slow: the primary has deleted the lock, and the repetition finds nothing.
#[tokio::test]
async fn a_release_that_is_majority_committed_late_is_reported_as_a_release() {
    let server = Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    let (app, aid) = (App::on(&database).await, Aid::new());
    let lock = app.granted(&key("a"), &aid).await;
    server.majority_is_late_for("delete").await;
    assert_eq!(app.locks.release(&lock).await.unwrap(), Released::Released);
    assert_eq!(app.locks.release(&lock).await.unwrap(), Released::AlreadyGone);
}

const BOTH: [&str; 2] = [WorkItem::COLLECTION, Named::COLLECTION];

async fn with_two_collections(database: &Database) -> App {
    let app = App::on(database).await;
    app.locks.register::<Named>().await.unwrap();
    app
}

fn named(id: &str) -> LockKey {
    LockKey::of::<Named>(id.to_owned()).unwrap()
}

/// The sessions whose ends a listener may tell.
async fn announced(database: &Database) -> Vec<String> {
    let ended = database.collection::<Document>("doclock.ended");
    let found = ended.find(doc! { "step": "announce" }).await.unwrap();
    let found: Vec<_> = found.try_collect().await.unwrap();
    found.iter().map(|end| end.get_str("_id").unwrap().to_owned()).collect()
}

#[tokio::test]
async fn an_expired_lock_that_is_stuck_delays_the_end_of_no_other_session() {
    for is_active in [true, false] {
        let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
        let app = with_two_collections(&database).await;
        let (unlucky, idle, worker) = (Aid::new(), Aid::new(), Uuid::new_v4());
        app.granted(&key("a"), &unlucky).await;
        app.granted(&named("a"), &idle).await;
        if is_active {
            app.granted(&named("b"), &unlucky).await;
        }
        for key in [key("a"), named("a")] {
            rig::age(&database, &key, TTL).await;
        }
        let mut transaction = stuck(&database, &[key("a")]).await;
        let until = || Deadline::at(Instant::now() + NO_DEADLINE);
        let sweep = async || app.store.sweep(&BOTH, worker, 200, until()).await;
        let swept = sweep().await.unwrap();
        assert!(swept.failed.is_some() && swept.announcements, "{swept:?}");
        assert_eq!(announced(&database).await, [idle.as_str()]);
        transaction.abort_transaction().await.unwrap();
        let is_done = async || sweep().await.unwrap().failed.is_none();
        eventually("it is not stuck any more", is_done).await;
        assert_eq!(count(&database).await, 0);
        assert_eq!(announced(&database).await.len(), if is_active { 1 } else { 2 });
    }
}

#[tokio::test]
async fn a_listener_hears_of_the_other_ends_while_an_expired_lock_is_stuck() {
    let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
    let app = with_two_collections(&database).await;
    let (unlucky, idle) = (Aid::new(), Aid::new());
    app.granted(&key("a"), &unlucky).await;
    app.granted(&named("a"), &idle).await;
    for key in [key("a"), named("a")] {
        rig::age(&database, &key, TTL).await;
    }
    let mut transaction = stuck(&database, &[key("a")]).await;
    let heard = Arc::new(std::sync::Mutex::new(Vec::new()));
    let hears = Arc::clone(&heard);
    let listening = App::with(&database, |settings| {
        settings.reaper_interval(Duration::from_millis(200)).on_session_end(move |ended| {
            hears.lock().unwrap().push(ended.aid);
            async { Ok(()) }
        })
    });
    let listening = listening.await;
    listening.locks.register::<Named>().await.unwrap();
    eventually("it is told", async || heard.lock().unwrap().contains(&idle)).await;
    transaction.abort_transaction().await.unwrap();
    listening.locks.shutdown().await;
}

#[tokio::test]
async fn a_collection_that_cannot_be_read_keeps_no_lock_in_another_one_after_a_logout() {
    let server = Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    let app = with_two_collections(&database).await;
    let (alice, worker) = (Aid::new(), Uuid::new_v4());
    app.granted(&key("a"), &alice).await;
    app.granted(&named("a"), &alice).await;
    let end = async || {
        app.store.end_session(&alice, EndReason::LoggedOut, &BOTH, worker, Deadline::NONE).await
    };
    server
        .disturb(&lock_records(&database), &["find", "aggregate"], doc! { "errorCode": 13 })
        .await;
    end().await.unwrap_err();
    let others = database.collection::<Document>("doclock.named.lock");
    assert_eq!(others.count_documents(doc! {}).await.unwrap(), 0);
    server.disturb_no_more().await;
    assert_eq!(end().await.unwrap().locks, [named("a"), key("a")]);
    assert_eq!(count(&database).await, 0);
}

/// The change of an index needs the whole collection, so it waits for the transaction, and each write waits for the change.
#[tokio::test]
async fn a_server_that_raises_the_ttl_behind_an_open_transaction_holds_up_no_lock() {
    let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
    let app = App::on(&database).await;
    app.granted(&key("a"), &Aid::new()).await;
    let mut transaction = stuck(&database, &[key("a")]).await;
    let (raised, until) = (database.clone(), NO_DEADLINE);
    let raises = tokio::spawn(async move { App::with(&raised, |it| it.ttl(2 * TTL)).await });
    let began = Instant::now();
    // So long that the other server has begun.
    while began.elapsed() < until / 10 {
        app.granted(&key(&format!("{:?}", began.elapsed())), &Aid::new()).await;
    }
    assert!(!raises.is_finished(), "it waits");
    transaction.abort_transaction().await.unwrap();
    raises.await.unwrap();
}
