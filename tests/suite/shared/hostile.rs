//! Records of foreign programs, and absurd ones.

use super::*;

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
