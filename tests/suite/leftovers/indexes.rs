use super::*;
use crate::rig::app::{TTL, eventually};
use crate::rig::mongod::Mongod;
use actix_doclock::{EndReason, Wait};
use mongodb::bson::{Bson, DateTime};

async fn drop_index(database: &Database, collection: &str, name: &str) {
    database.collection::<Document>(collection).drop_index(name).await.unwrap();
}

#[tokio::test]
async fn a_unique_index_on_locks_is_named_at_once_by_locks_by_health_and_at_the_start() {
    for field in ["resource", "aid", "holder.label"] {
        let database = fresh_database().await;
        let app = App::on(&database).await;
        let unique = doc! { "key": { field: 1 }, "name": "left over", "unique": true };
        create_index(&database, "workitem.lock", unique).await;
        let alice = Aid::new();
        app.granted(&key("a"), &alice).await;
        let began = Instant::now();
        let error = refused_at_once(began, &app, app.try_acquire(&key("b"), &alice).await);
        let locks = format!("{}.workitem.lock", database.name());
        let text = error.to_string();
        assert!(text.contains("unique index `left over`") && text.contains(&locks), "{text}");
        assert!(text.contains("drop the index"), "{text}");
        assert!(!format!("{error:?}").contains(alice.as_str()), "it shows a session: {error:?}");

        for text in [problems(&app).await, start_error(&database).await] {
            assert!(text.contains("workitem.lock has the unique index `left over`"), "{text}");
            assert!(text.contains("drop the index"), "{text}");
        }
        drop_index(&database, "workitem.lock", "left over").await;
        assert_eq!(problems(&app).await, "");
        app.granted(&key("b"), &alice).await;
        assert!(starts(&database).await);
    }
}

/// The claims of one command are refused one by one.
#[tokio::test]
async fn a_unique_index_refuses_each_claim_of_a_group_by_its_name() {
    let database = fresh_database().await;
    let app = App::on(&database).await;
    let unique = doc! { "key": { "resource": 1 }, "name": "resource_1", "unique": true };
    create_index(&database, "workitem.lock", unique).await;
    app.granted(&key("first"), &Aid::new()).await;
    let began = Instant::now();
    let claims = (0..40).map(|n| {
        let app = app.clone();
        tokio::spawn(async move { app.try_acquire(&key(&n.to_string()), &Aid::new()).await })
    });
    for claim in claims.collect::<Vec<_>>() {
        let error = refused_at_once(began, &app, claim.await.unwrap());
        assert!(error.to_string().contains("`resource_1`"), "{error}");
    }
}

#[tokio::test]
async fn a_unique_index_on_ended_sessions_is_an_error_and_no_end_of_another_server() {
    let database = fresh_database().await;
    let app = App::on(&database).await;
    let unique = doc! { "key": { "reason": 1 }, "name": "reason_1", "unique": true };
    create_index(&database, "doclock.ended", unique).await;
    app.locks.end_session(&Aid::new()).await.unwrap();
    let began = Instant::now();
    let error = refused_at_once(began, &app, app.locks.end_session(&Aid::new()).await);
    assert!(error.to_string().contains("`reason_1`"), "{error}");
    for text in [problems(&app).await, start_error(&database).await] {
        assert!(text.contains("doclock.ended has the unique index `reason_1`"), "{text}");
    }
    // Idle sessions are claimed together.
    drop_index(&database, "doclock.ended", "reason_1").await;
    let idle = [Aid::new(), Aid::new()];
    for (id, aid) in ["a", "b"].into_iter().zip(&idle) {
        app.granted(&key(id), aid).await;
        rig::age(&database, &key(id), 2 * TTL).await;
    }
    database.collection::<Document>("doclock.ended").delete_many(doc! {}).await.unwrap();
    let unique = doc! { "key": { "reason": 1 }, "name": "reason_1", "unique": true };
    create_index(&database, "doclock.ended", unique).await;
    let error = refused_at_once(Instant::now(), &app, app.locks.sweep().await);
    assert!(error.to_string().contains("`reason_1`"), "{error}");
    drop_index(&database, "doclock.ended", "reason_1").await;
    app.locks.sweep().await.unwrap();
    let ends = app.store.last_ends(&idle, Deadline::NONE).await.unwrap();
    assert!(ends.iter().all(|end| end.as_ref().is_some_and(|it| it.reason == EndReason::Expired)));
}

/// Another index of the records of a session that MongoDB would remove while it is needed.
fn dangerous() -> Vec<(&'static str, Document)> {
    let partial = doc! { "aid": { "$exists": true } };
    let ttl = |keys: Document| doc! { "key": keys, "name": "odd", "expireAfterSeconds": 30 };
    let mut of_some = ttl(doc! { "ts": 1 });
    of_some.insert("partialFilterExpression", partial);
    vec![
        ("workitem.lock", ttl(doc! { "ts": -1 })),
        ("workitem.lock", ttl(doc! { "since": 1 })),
        ("workitem.lock", ttl(doc! { "until": 1 })),
        ("workitem.lock", ttl(doc! { "readers.ts": 1 })),
        ("workitem.lock", of_some),
        ("doclock.ended", ttl(doc! { "ts": -1 })),
        ("doclock.ended", ttl(doc! { "lease": 1 })),
    ]
}

#[tokio::test]
async fn a_second_ttl_index_that_removes_what_is_needed_is_refused_and_named() {
    let database = fresh_database().await;
    let app = App::on(&database).await;
    for (collection, index) in dangerous() {
        create_index(&database, collection, index.clone()).await;
        for text in [problems(&app).await, start_error(&database).await] {
            assert!(text.contains(&format!("{collection} has the TTL index `odd`")), "{text}");
            assert!(text.contains("30 s after") && text.contains("drop the index"), "{text}");
        }
        drop_index(&database, collection, "odd").await;
    }
    // Nothing at the start, because no type is looked at; but these lose the notes of servers and the freezes.
    for (collection, field) in [("doclock.server", "of.at"), ("doclock.frozen", "of.since")] {
        let index = doc! { "key": { field: 1 }, "name": "odd", "expireAfterSeconds": 30 };
        create_index(&database, collection, index).await;
        let text = problems(&app).await;
        assert!(text.contains(&format!("{collection} has the TTL index `odd`")), "{text}");
        drop_index(&database, collection, "odd").await;
    }
    assert_eq!(problems(&app).await, "");
    let harmless = [
        // Longer than any lock lives.
        doc! { "key": { "ts": -1 }, "name": "odd", "expireAfterSeconds": 2 * TTL.as_secs() as i64 },
        // Only records of another program have the field.
        doc! { "key": { "expireAt": 1 }, "name": "odd", "expireAfterSeconds": 0 },
        doc! { "key": { "ts": "hashed" }, "name": "odd" },
    ];
    for index in harmless {
        create_index(&database, "workitem.lock", index).await;
        assert_eq!(problems(&app).await, "");
        assert!(starts(&database).await);
        drop_index(&database, "workitem.lock", "odd").await;
    }
}

/// What the refusal is about.
#[tokio::test]
async fn a_second_ttl_index_would_remove_a_lock_that_is_renewed() {
    let server = Mongod::start_with_eager_ttl_monitor().await;
    let database = rig::fresh_database(&server.uri()).await;
    let app = App::on(&database).await;
    app.granted(&key("a"), &Aid::new()).await;
    let since = doc! { "key": { "since": 1 }, "name": "odd", "expireAfterSeconds": 0 };
    create_index(&database, "workitem.lock", since).await;
    let gone = async || app.locks.inspect(&key("a")).await.unwrap().is_none();
    eventually("MongoDB removes a live lock", gone).await;
    assert!(problems(&app).await.contains("`odd`"));
}

#[tokio::test]
async fn a_ttl_index_that_was_shortened_is_named_until_a_server_is_started() {
    let database = fresh_database().await;
    let app = App::on(&database).await;
    for (collection, needed) in [("workitem.lock", 660), ("doclock.ended", 86_400)] {
        let shorter = doc! { "keyPattern": { "ts": 1 }, "expireAfterSeconds": 5 };
        database.run_command(doc! { "collMod": collection, "index": shorter }).await.unwrap();
        let text = problems(&app).await;
        let expected =
            format!("{collection} has the TTL index `ts_1`, which removes records after 5 s");
        assert!(text.contains(&expected) && text.contains(&format!("{needed} s")), "{text}");
        App::on(&database).await;
        assert_eq!(problems(&app).await, "");
    }
}

/// The indexes of a lock collection that lack one on `aid`, and other indexes in its place.
#[tokio::test]
async fn an_index_that_no_query_uses_is_missing_and_gets_another_one_beside_it() {
    let others = [
        doc! { "key": { "aid": "hashed" }, "name": "aid_1" },
        doc! { "key": { "aid": -1 }, "name": "aid_1" },
        doc! { "key": { "aid": 1, "ts": 1 }, "name": "aid_1" },
        doc! { "key": { "aid": 1 }, "name": "aid_1", "collation": { "locale": "en" } },
        doc! { "key": { "aid": 1 }, "name": "aid_1", "partialFilterExpression": { "mine": true } },
        doc! { "key": { "aid": 1 }, "name": "aid_1", "hidden": true },
    ];
    for other in others {
        let database = fresh_database().await;
        let app = App::on(&database).await;
        drop_index(&database, "workitem.lock", "aid_1").await;
        create_index(&database, "workitem.lock", other.clone()).await;
        assert!(problems(&app).await.contains("workitem.lock has no index on aid"), "{other}");
        for _ in 0..2 {
            App::on(&database).await;
        }
        assert_eq!(problems(&app).await, "", "{other}");
        app.granted(&key("a"), &Aid::new()).await;
        let of_session = doc! { "explain": { "find": "workitem.lock", "filter": { "aid": "x" } } };
        let plan = database.run_command(of_session).await.unwrap().to_string();
        assert!(plan.contains("IXSCAN"), "{other}: {plan}");
    }
}

#[tokio::test]
async fn an_index_of_another_name_that_does_the_same_is_used() {
    let database = fresh_database().await;
    let indexes = [
        doc! { "key": { "ts": 1.0 }, "name": "mine", "expireAfterSeconds": 10 },
        doc! { "key": { "aid": 1 }, "name": "yours" },
        doc! { "key": { "due": 1 }, "name": "theirs" },
    ];
    for index in indexes {
        create_index(&database, "workitem.lock", index).await;
    }
    let app = App::on(&database).await;
    assert_eq!(problems(&app).await, "");
    let names = lock_records(&database).list_index_names().await.unwrap();
    assert_eq!(names.len(), 5, "{names:?}");
    let removes = doc! { "listIndexes": "workitem.lock" };
    let listed = database.run_command(removes).await.unwrap().to_string();
    assert!(
        listed.contains(&format!("\"expireAfterSeconds\": {}", TTL.as_secs() + 60)),
        "{listed}"
    );
}

/// A hidden TTL index still removes records, but the reaper does not find idle sessions by it.
#[tokio::test]
async fn a_hidden_ttl_index_is_unhidden() {
    let database = fresh_database().await;
    let app = App::on(&database).await;
    let hide = doc! { "name": "ts_1", "hidden": true };
    database.run_command(doc! { "collMod": "workitem.lock", "index": hide }).await.unwrap();
    assert!(problems(&app).await.contains("has no index on ts (TTL)"));
    App::on(&database).await;
    assert_eq!(problems(&app).await, "");
}

/// Foreign dates in the fields of the store do no harm by themselves.
#[tokio::test]
async fn a_lock_under_odd_indexes_is_taken_saved_and_released() {
    let database = fresh_database().await;
    for (n, keys) in [doc! { "$**": 1 }, doc! { "since": -1 }, doc! { "aid": 1, "ts": -1 }]
        .into_iter()
        .enumerate()
    {
        let index = doc! { "key": keys, "name": format!("odd{n}") };
        create_index(&database, "workitem.lock", index).await;
    }
    let app = App::on(&database).await;
    crate::rig::app::put(&database, "a", "old").await;
    let foreign = doc! { "_id": "b", "ts": DateTime::now(), "aid": Bson::Null };
    lock_records(&database).insert_one(foreign).await.unwrap();
    let guard = app.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    guard.update(|it: &mut WorkItem| it.title = "new".to_owned()).await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(problems(&app).await, "");
}
