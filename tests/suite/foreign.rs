//! Programs that lock by hand, as in the article from which this crate's schema comes: `insert {_id,
//! ts, aid}` takes a lock, a delete by `_id` or by `aid` gives it back, and a TTL index on `ts` removes
//! forgotten locks. Such programs and this crate keep each other out, whatever either of them writes.

use std::time::Duration;

use actix_doclock::{Aid, LockKey, Released, TryAcquire, store::Saved};
use mongodb::bson::spec::{BinarySubtype, ElementType};
use mongodb::bson::{Binary, Bson, DateTime, Decimal128, Document, Timestamp, doc, oid::ObjectId};
use mongodb::error::{ErrorKind, WriteFailure};
use mongodb::{Database, IndexModel};

use crate::rig;
use crate::rig::app::{App, TTL, by_root, count, key, lock_records, put, record, title};
use crate::rig::mongod;

/// The aid of the article.
const FOREIGN: &str = "my_app_my_session_id_4711";
const DAY: i64 = 24 * 60 * 60 * 1_000;

/// An application server where any session may break locks, and its database.
async fn app() -> (App, Database) {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    (App::with(&database, |settings| settings.break_policy(|_, _| true)).await, database)
}

/// Takes a lock as in the article; false if the document is locked.
async fn foreign_acquire(database: &Database, id: &str) -> bool {
    let lock = doc! { "_id": id, "ts": DateTime::now(), "aid": FOREIGN };
    match lock_records(database).insert_one(lock).await.map_err(|e| *e.kind) {
        Ok(_) => true,
        Err(ErrorKind::Write(WriteFailure::WriteError(e))) if e.code == 11000 => false,
        Err(error) => panic!("neither locked nor refused: {error:?}"),
    }
}

async fn foreign_release(database: &Database, filter: Document) -> u64 {
    lock_records(database).delete_many(filter).await.unwrap().deleted_count
}

#[tokio::test]
async fn a_foreign_lock_is_a_live_lock_of_an_unknown_holder() {
    let (app, database) = app().await;
    assert!(foreign_acquire(&database, "a").await);
    let lock = app.held(&key("a")).await;
    assert_eq!((lock.token, lock.holder.clone(), lock.aid.as_str()), (None, None, FOREIGN));
    let record = record(&database, &key("a")).await.unwrap();
    assert_eq!(lock.since, record.get_datetime("ts").unwrap().to_system_time());
    assert!(lock.expires_in() <= TTL && lock.expires_in() > TTL / 2);
    assert_eq!(app.locks.list().await.unwrap().len(), 1);
    assert_eq!(app.locks.release(&lock).await.unwrap(), Released::AlreadyGone);
    assert!(!foreign_acquire(&database, "a").await, "still there");
}

#[tokio::test]
async fn a_foreign_lock_lives_for_the_ttl_of_the_collection_and_is_then_taken_over() {
    let (app, database) = app().await;
    assert!(foreign_acquire(&database, "a").await);
    rig::age(&database, &key("a"), TTL / 2).await;
    let lock = app.held(&key("a")).await;
    assert!(lock.expires_in() <= TTL / 2 && !lock.expires_in().is_zero());
    rig::age(&database, &key("a"), TTL / 2).await;
    app.granted(&key("a"), &Aid::new()).await;
}

#[tokio::test]
async fn a_foreign_program_finds_our_lock_and_can_lock_after_our_release() {
    let (app, database) = app().await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    assert!(!foreign_acquire(&database, "a").await);
    app.locks.release(&lock).await.unwrap();
    assert_eq!(count(&database).await, 0, "a free document has no record");
    assert!(foreign_acquire(&database, "a").await);
    assert_eq!(app.held(&key("a")).await.aid.as_str(), FOREIGN);
}

#[tokio::test]
async fn after_a_foreign_release_the_document_is_free_for_us() {
    let (app, database) = app().await;
    for by in [doc! { "_id": "a" }, doc! { "aid": FOREIGN }] {
        assert!(foreign_acquire(&database, "a").await);
        app.held(&key("a")).await;
        assert_eq!(foreign_release(&database, by).await, 1);
        let lock = app.granted(&key("a"), &Aid::new()).await;
        app.locks.release(&lock).await.unwrap();
    }
}

#[tokio::test]
async fn when_a_foreign_program_removes_our_lock_our_save_is_refused() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    for by in ["_id", "aid"] {
        let lock = app.granted(&key("a"), &Aid::new()).await;
        let filter = if by == "_id" {
            doc! { by: "a" }
        } else {
            doc! { by: lock.aid.as_str() }
        };
        assert_eq!(foreign_release(&database, filter).await, 1);
        assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Lost);
        assert_eq!(app.locks.renew(&lock.aid).await.unwrap(), 0);
        assert!(foreign_acquire(&database, "a").await);
        assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Lost);
        foreign_release(&database, doc! { "aid": FOREIGN }).await;
    }
    assert_eq!(title(&database, "a").await, "old");
}

#[tokio::test]
async fn a_late_foreign_release_by_aid_leaves_the_lock_that_took_over() {
    let (app, database) = app().await;
    assert!(foreign_acquire(&database, "a").await);
    rig::age(&database, &key("a"), TTL).await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    assert_eq!(foreign_release(&database, doc! { "aid": FOREIGN }).await, 0);
    assert_eq!(app.already_mine(&key("a"), &lock.aid).await.token, lock.token);
}

#[tokio::test]
async fn a_foreign_lock_can_be_broken_and_no_later_one_with_it() {
    let (app, database) = app().await;
    assert!(foreign_acquire(&database, "a").await);
    let seen = app.locks.inspect(&key("a")).await.unwrap().unwrap();
    assert_eq!(app.break_lock(&key("a")).await.unwrap().aid.as_str(), FOREIGN);
    assert_eq!(count(&database).await, 0);

    // The same foreign program takes the lock again, at another moment.
    assert!(foreign_acquire(&database, "a").await);
    rig::age(&database, &key("a"), Duration::from_secs(1)).await;
    let store = &app.store;
    let broken =
        doclock_conformance::Shorthand::break_lock(store, &seen, &by_root()).await.unwrap();
    assert_eq!(broken, Released::AlreadyGone);
    assert_eq!(count(&database).await, 1);
}

#[tokio::test]
async fn a_takeover_leaves_the_fields_of_the_schema_and_nothing_else() {
    let (app, database) = app().await;
    let run_out = doc! {
        "_id": "a", "ts": DateTime::from_millis(5), "aid": FOREIGN, "ttl": "PT1H",
        "token": 7, "since": "yesterday", "holder": { "label": "bob", "phone": 4711 },
        "readers": [{ "aid": "x" }], "again": true, "comment": "by hand",
    };
    lock_records(&database).insert_one(run_out).await.unwrap();
    let lock = app.granted(&key("a"), &Aid::new()).await;
    let record = record(&database, &key("a")).await.unwrap();
    let fields: Vec<_> =
        record.iter().map(|(name, value)| (name.as_str(), value.element_type())).collect();
    let schema = [
        ("_id", ElementType::String),
        ("ts", ElementType::DateTime),
        ("ttl", ElementType::Int64),
        ("aid", ElementType::String),
        ("token", ElementType::String),
        ("since", ElementType::DateTime),
        ("holder", ElementType::EmbeddedDocument),
    ];
    assert_eq!(fields, schema);
    assert_eq!(record.get("ts"), record.get("since"));
    assert_eq!(record.get("ttl"), Some(&Bson::Int64(TTL.as_millis() as i64)));
    assert_eq!(record.get("aid"), Some(&lock.aid.as_str().into()));
    assert_eq!(record.get_str("token").unwrap(), lock.token.unwrap().to_string());
    assert_eq!(record.get("holder"), Some(&doc! { "label": "alice" }.into()));
}

/// A re-entry changes the lease, and the label if the person's name has changed.
#[tokio::test]
async fn a_reentry_keeps_token_and_since() {
    let (app, database) = app().await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    rig::age(&database, &key("a"), TTL / 2).await;
    let before = record(&database, &key("a")).await.unwrap();
    app.already_mine(&key("a"), &lock.aid).await;
    let after = record(&database, &key("a")).await.unwrap();
    assert!(after.get_datetime("ts").unwrap() > before.get_datetime("ts").unwrap());
    for kept in ["_id", "ttl", "aid", "token", "since", "holder"] {
        assert_eq!(after.get(kept), before.get(kept), "{kept}");
    }
}

/// The article's set-up, with the number types that today's shell and the shell of its time send.
#[tokio::test]
async fn a_collection_that_was_set_up_by_hand_is_adopted() {
    for one in [Bson::Int32(1), Bson::Double(1.0)] {
        for thirty in [Bson::Int32(30), Bson::Double(30.0)] {
            let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
            let locks = lock_records(&database);
            database.create_collection(locks.name()).await.unwrap();
            let indexes = doc! { "createIndexes": locks.name(), "indexes": [
                { "key": { "ts": &one }, "name": "ts_1", "expireAfterSeconds": thirty },
                { "key": { "aid": &one }, "name": "aid_1", "unique": false },
            ] };
            database.run_command(indexes).await.unwrap();
            assert!(foreign_acquire(&database, "a").await);

            let app = App::unregistered(&database, |settings| settings).await;
            let registered = app.locks.register::<rig::app::WorkItem>().await;
            registered
                .unwrap_or_else(|e| panic!("{one:?}: {e}: {:?}", std::error::Error::source(&e)));
            let mut names = Vec::new();
            for index in indexes_of(&database).await {
                let options = index.options.unwrap();
                if options.name.as_deref() == Some("ts_1") {
                    let expiry = actix_doclock::store::Rules::new(TTL).expiry();
                    assert_eq!(options.expire_after, Some(expiry), "changed in place");
                }
                names.push(options.name.unwrap());
            }
            names.sort();
            assert_eq!(
                names,
                ["_id_", "aid_1", "due_1", "readers.aid_1", "ts_1"],
                "no index is there twice"
            );
            assert_eq!(app.held(&key("a")).await.aid.as_str(), FOREIGN);
        }
    }
}

async fn indexes_of(database: &Database) -> Vec<IndexModel> {
    let mut cursor = lock_records(database).list_indexes().await.unwrap();
    let mut indexes = Vec::new();
    while cursor.advance().await.unwrap() {
        indexes.push(cursor.deserialize_current().unwrap());
    }
    indexes
}

/// Whether a foreign record counts as a lock, and the fields that differ from the article's.
fn strange_records() -> Vec<(bool, &'static str, Document)> {
    let now = DateTime::now().timestamp_millis();
    let at = |millis| Bson::DateTime(DateTime::from_millis(millis));
    let decimal = |text: &str| Bson::Decimal128(text.parse::<Decimal128>().unwrap());
    let ttl = |ttl: Bson| doc! { "ttl": ttl };
    vec![
        (false, "ts missing", doc! { "ts": Bson::Undefined }),
        (false, "ts null", doc! { "ts": Bson::Null }),
        (false, "ts a string", doc! { "ts": "2012-10-24T09:38:41.173Z" }),
        (false, "ts a number", doc! { "ts": now }),
        (false, "ts a timestamp", doc! { "ts": Timestamp { time: u32::MAX, increment: 1 } }),
        (false, "ts an array of dates", doc! { "ts": [at(now), at(now + DAY)] }),
        (false, "ts the first of all dates", doc! { "ts": at(i64::MIN) }),
        (false, "ts before 1970", doc! { "ts": at(-1) }),
        (true, "ts tomorrow", doc! { "ts": at(now + DAY) }),
        (true, "ts in microseconds", doc! { "ts": at(now * 1_000) }),
        (true, "ts the last of all dates", doc! { "ts": at(i64::MAX) }),
        (true, "ttl null", ttl(Bson::Null)),
        (true, "ttl a string", ttl("30".into())),
        (true, "ttl a document", ttl(doc! { "seconds": 30 }.into())),
        (true, "ttl an Int32", ttl(600_000.into())),
        (true, "ttl a double", ttl(600_000.5.into())),
        (true, "ttl a decimal", ttl(decimal("600000"))),
        (true, "ttl the largest number", ttl(i64::MAX.into())),
        (true, "ttl infinite", ttl(f64::INFINITY.into())),
        (true, "ttl an infinite decimal", ttl(decimal("Infinity"))),
        (false, "ttl 0", ttl(0.into())),
        (false, "ttl negative", ttl((-600_000_i64).into())),
        (false, "ttl the smallest number", ttl(i64::MIN.into())),
        (false, "ttl minus infinity", ttl(f64::NEG_INFINITY.into())),
        (false, "ttl not a number", ttl(f64::NAN.into())),
        (false, "ttl a decimal that is none", ttl(decimal("NaN"))),
        (true, "aid missing", doc! { "aid": Bson::Undefined }),
        (true, "aid null", doc! { "aid": Bson::Null }),
        (true, "aid a number", doc! { "aid": 4711 }),
        (true, "aid a document", doc! { "aid": { "$gt": "" } }),
        (true, "aid an array", doc! { "aid": ["x", "y"] }),
        (true, "aid like an expression", doc! { "aid": "$$ROOT" }),
        (true, "token a number", doc! { "token": 7 }),
        (true, "token no UUID", doc! { "token": "mine" }),
        (true, "since a string", doc! { "since": "yesterday" }),
        (true, "since another moment", doc! { "since": at(now - DAY) }),
        (true, "since the first of all dates", doc! { "since": at(i64::MIN) }),
        (true, "holder a string", doc! { "holder": "bob" }),
        (true, "label a number", doc! { "holder": { "label": 5 } }),
        (true, "a field of their own", doc! { "comment": "do not touch", "$ref": "x" }),
    ]
}

/// The article's record with these fields; `undefined` removes a field.
fn foreign_record(fields: Document) -> Document {
    let mut record = doc! { "_id": "a", "ts": DateTime::now(), "aid": FOREIGN };
    record.extend(fields);
    record.into_iter().filter(|(_, value)| *value != Bson::Undefined).collect()
}

#[tokio::test]
async fn no_foreign_record_makes_an_operation_fail() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let (locks, alice) = (&app.locks, Aid::new());
    for (live, what, fields) in strange_records() {
        let stored = foreign_record(fields);
        lock_records(&database).insert_one(&stored).await.unwrap();

        let failed = |verb: &str, e: actix_doclock::LockError| -> ! {
            panic!("{what}: {verb}: {e}: {:?}", std::error::Error::source(&e))
        };
        let seen = locks.inspect(&key("a")).await.unwrap_or_else(|e| failed("inspect", e));
        assert_eq!(seen.is_some(), live, "{what}: inspect");
        let listed = locks.list().await.unwrap_or_else(|e| failed("list", e));
        assert_eq!(listed.len(), usize::from(live), "{what}: list");
        assert_eq!(locks.renew(&alice).await.unwrap_or_else(|e| failed("renew", e)), 0, "{what}");
        let released = locks.release_all(&alice).await.unwrap_or_else(|e| failed("release", e));
        assert_eq!(released, [], "{what}");
        if let Some(lock) = seen {
            let _ = (format!("{lock:?}"), lock.expires_in());
            let renewed = locks.renew(&lock.aid).await.unwrap_or_else(|e| failed("renew", e));
            assert!(renewed <= 1, "{what}: renewal of the same aid");
        }

        let answer = app.try_acquire(&key("a"), &alice).await;
        match answer.unwrap_or_else(|e| failed("try_acquire", e)) {
            TryAcquire::Held(lock) => {
                assert!(live, "{what}: held");
                assert!(lock.token.is_none() && lock.aid != alice, "{what}");
            }
            TryAcquire::Granted(lock) => {
                assert!(!live, "{what}: granted");
                assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Saved, "{what}");
            }
            other => panic!("{what}: {other:?}"),
        }
        lock_records(&database).delete_many(doc! {}).await.unwrap();
    }
}

/// A record that never expires, for example with a date in the far future, must not lock its document
/// forever.
#[tokio::test]
async fn every_foreign_lock_can_be_broken() {
    let (app, database) = app().await;
    let mut kept = Vec::new();
    for (_, what, fields) in strange_records().into_iter().filter(|(live, ..)| *live) {
        lock_records(&database).insert_one(foreign_record(fields)).await.unwrap();
        let broken = app.break_lock(&key("a")).await;
        if broken.is_none() || count(&database).await > 0 {
            kept.push(what);
        }
        lock_records(&database).delete_many(doc! {}).await.unwrap();
    }
    assert!(kept.is_empty(), "not broken: {kept:?}");
}

/// The reported time left must not exceed the server's own count (rule 9).
#[tokio::test]
async fn the_ttl_of_a_foreign_record_is_reported_as_the_server_counts_it() {
    let (app, database) = app().await;
    let minute = [
        Bson::Int32(60_000),
        Bson::Int64(60_000),
        Bson::Double(60_000.0),
        Bson::Decimal128("60000".parse().unwrap()),
    ];
    for ttl in minute {
        let record = foreign_record(doc! { "ttl": &ttl });
        lock_records(&database).insert_one(record).await.unwrap();
        assert!(app.held(&key("a")).await.expires_in() <= Duration::from_secs(60), "{ttl:?}");
        rig::age(&database, &key("a"), Duration::from_secs(60)).await;
        let lock = app.granted(&key("a"), &Aid::new()).await;
        app.locks.release(&lock).await.unwrap();
    }
}

#[tokio::test]
async fn a_list_leaves_out_locks_that_it_cannot_name() {
    let (app, database) = app().await;
    let unnameable: Vec<Bson> = vec![
        0.5.into(),
        f64::NAN.into(),
        1e300.into(),
        Bson::Null,
        true.into(),
        doc! { "_id": 1 }.into(),
        DateTime::now().into(),
        Binary { subtype: BinarySubtype::Generic, bytes: vec![1, 2] }.into(),
        "x".repeat(2_000).into(),
        Bson::MinKey,
    ];
    for id in unnameable.iter().cloned().chain([7.0.into(), ObjectId::new().into(), "a".into()]) {
        let record = doc! { "_id": id, "ts": DateTime::now(), "aid": FOREIGN };
        lock_records(&database).insert_one(record).await.unwrap();
    }
    let listed = app.locks.list().await.unwrap();
    assert_eq!(listed.len(), 3, "{listed:?}");
    let foreign = Aid::from(FOREIGN.to_owned());
    assert_eq!(app.locks.list_of(&foreign).await.unwrap().len(), 3);
    // The shell's 7 is a double, and counts as the same id as ours.
    app.held(&LockKey::new("workitem", 7_i64).unwrap()).await;
    // The end of the session removes all its locks, even those that cannot be named.
    assert_eq!(app.locks.end_session(&foreign).await.unwrap().locks.len(), 3);
    assert_eq!(count(&database).await, 0);
}
