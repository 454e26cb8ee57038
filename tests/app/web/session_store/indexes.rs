//! Indexes that another library or a person has left on the collection.

use super::*;
use crate::rig::mongod::Mongod;

const SESSIONS: &str = "doclock.session";

async fn create_index(database: &Database, index: Document) {
    let command = doc! { "createIndexes": SESSIONS, "indexes": [index] };
    database.run_command(command).await.unwrap();
}

async fn build(database: &Database) -> Result<MongoSessionStore, actix_session_mongo::Error> {
    let settings = MongoSessionStore::builder(database).collection(SESSIONS).id_key(AID);
    settings.deadline(NO_DEADLINE).without_sweeps().build().await
}

async fn expiry(database: &Database) -> Vec<i64> {
    let listed = database.run_command(doc! { "listIndexes": SESSIONS }).await.unwrap();
    let batch = listed.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
    let expiry = |index: &mongodb::bson::Bson| {
        let seconds = index.as_document()?.get("expireAfterSeconds")?;
        seconds.as_i64().or(seconds.as_i32().map(Into::into))
    };
    batch.iter().filter_map(expiry).collect()
}

/// As other libraries leave it: a session goes at the moment at which it expires, and nobody is told of its end.
#[actix_web::test]
async fn a_ttl_index_of_another_library_is_corrected_whatever_its_name() {
    for index in [
        doc! { "key": { "expires": 1 }, "name": "expires_1", "expireAfterSeconds": 0 },
        doc! { "key": { "expires": 1 }, "name": "ttl", "expireAfterSeconds": 3_600 },
        doc! { "key": { "expires": 1 }, "name": "expires_1" },
        doc! { "key": { "expires": 1 }, "name": "ttl", "hidden": true, "expireAfterSeconds": 0 },
    ] {
        let database = rig::fresh_database(rig::mongod::shared_replica_set().await.uri()).await;
        create_index(&database, index.clone()).await;
        for _ in 0..2 {
            build(&database).await.unwrap();
            assert_eq!(expiry(&database).await, [86_400], "{index}");
        }
        let listed = database.run_command(doc! { "listIndexes": SESSIONS }).await.unwrap();
        assert!(!listed.to_string().contains("hidden"), "{listed}");
    }
}

#[actix_web::test]
async fn indexes_of_other_names_are_used() {
    let database = rig::fresh_database(rig::mongod::shared_replica_set().await.uri()).await;
    for (n, field) in ["expires", "due", "by", "aid", "user"].into_iter().enumerate() {
        let mut index = doc! { "key": { field: 1.0 }, "name": format!("mine{n}") };
        if field == "expires" {
            index.insert("expireAfterSeconds", 86_400);
        }
        create_index(&database, index).await;
    }
    let store = build(&database).await.unwrap();
    let names = records(&database).list_index_names().await.unwrap();
    assert_eq!(names.len(), 6, "{names:?}");
    let session = store.save(state_of("bob", &Aid::new()), &DAY).await.unwrap();
    assert!(store.load(&session).await.unwrap().is_some());
}

#[actix_web::test]
async fn an_index_with_which_sessions_are_lost_or_refused_is_refused_by_its_name_and_health_names_it()
 {
    let database = database().await;
    let server = Server::on(&database).await;
    let store = MongoStore::new(&database);
    store.also_needs(doclock::sessions(SESSIONS));
    let locks = LockManager::builder(store).without_reaper().build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    assert_eq!(locks.check_health().await.problems, [""; 0]);
    for index in [
        doc! { "key": { "user": 1 }, "name": "odd", "unique": true },
        doc! { "key": { "seen": 1 }, "name": "odd", "expireAfterSeconds": 60 },
        doc! { "key": { "expires": -1 }, "name": "odd", "expireAfterSeconds": 0 },
        doc! { "key": { "created": 1 }, "name": "odd", "expireAfterSeconds": 86_400 },
    ] {
        create_index(&database, index.clone()).await;
        let error = build(&database).await.unwrap_err();
        assert!(!error.is_outage(), "{error}");
        let text = error.to_string();
        assert!(text.contains("`odd`") && text.contains("drop it"), "{index}: {text}");
        let text = locks.check_health().await.problems.join("; ");
        assert!(text.contains(SESSIONS) && text.contains("`odd`"), "{index}: {text}");
        records(&database).drop_index("odd").await.unwrap();
    }
    // A TTL index that was shortened since.
    let shorter = doc! { "keyPattern": { "expires": 1 }, "expireAfterSeconds": 0 };
    database.run_command(doc! { "collMod": SESSIONS, "index": shorter }).await.unwrap();
    let text = locks.check_health().await.problems.join("; ");
    assert!(text.contains("removes records after 0 s instead of 86400 s"), "{text}");
    drop(server);
    build(&database).await.unwrap();
    assert_eq!(locks.check_health().await.problems, [""; 0]);
}

/// A unique index that comes while servers run.
#[actix_web::test]
async fn a_session_that_a_unique_index_refuses_is_an_error_at_once() {
    let database = database().await;
    let server = Server::on(&database).await;
    server.sessions.save(state_of("bob", &Aid::new()), &DAY).await.unwrap();
    create_index(&database, doc! { "key": { "user": 1 }, "name": "odd", "unique": true }).await;
    let began = std::time::Instant::now();
    let refused = server.sessions.save(state_of("bob", &Aid::new()), &DAY).await.unwrap_err();
    assert!(began.elapsed() < NO_DEADLINE / 2, "it is not repeated");
    let text = format!("{refused}");
    let source = std::error::Error::source(&refused).map(ToString::to_string).unwrap_or_default();
    let text = format!("{text} {source} {refused:?}");
    assert!(text.contains("unique index `odd`") && !text.contains("bob"), "{text}");
}

#[actix_web::test]
async fn a_user_who_may_not_correct_an_index_is_told_which_and_what_to_grant() {
    let server = Mongod::start_with_auth().await;
    let database = rig::client(&server.uri()).await.database(&rig::fresh_name());
    let index = doc! { "key": { "expires": 1 }, "name": "ttl", "expireAfterSeconds": 0 };
    create_index(&database, index).await;
    let user = doc! { "createUser": "app", "pwd": "secret", "roles": ["readWrite"] };
    database.run_command(user).await.unwrap();
    let uri = server.uri().replace("root:secret", "app:secret");
    let uri = format!("{uri}&authSource={}", database.name());
    let as_app = rig::client(&uri).await.database(database.name());
    let text = build(&as_app).await.unwrap_err().to_string();
    assert!(text.contains("`ttl`") && text.contains("collMod"), "{text}");
}

#[actix_web::test]
async fn a_collection_with_a_collation_is_refused() {
    let database = database().await;
    let create = doc! { "create": SESSIONS, "collation": { "locale": "en", "strength": 2 } };
    database.run_command(create).await.unwrap();
    let text = build(&database).await.unwrap_err().to_string();
    assert!(text.contains("collation `en`"), "{text}");
}
