//! Servers that disagree are named.

use std::time::Duration;

use actix_doclock::MongoStore;
use actix_web::cookie::Key;
use doclock::{Finding, diagnose};
use mongodb::{
    Database,
    bson::{Document, doc},
};

use crate::rig::app::{App, TTL, WorkItem, eventually};
use crate::rig::log::{count_logged, log_lines, logged};
use crate::rig::{fresh_database, mongod};

/// A server that notes itself. Without a reaper it would not.
async fn server(database: &Database, ttl: Duration) -> App {
    App::with(database, |settings| settings.ttl(ttl).reaper_interval(Duration::from_secs(1))).await
}

async fn findings(database: &Database, code: &str) -> Vec<Finding> {
    let found = diagnose(&MongoStore::new(database), &["workitem"], None).await.unwrap();
    found.into_iter().filter(|finding| finding.code == code).collect()
}

async fn knows(app: &App, servers: usize) {
    eventually("all are known", async || app.locks.health().servers == servers).await;
}

#[tokio::test]
async fn servers_that_disagree_are_named_by_health_doctor_and_log() {
    log_lines();
    let uri = mongod::shared_replica_set().await;
    let database = fresh_database(uri.uri()).await;
    let one = server(&database, TTL).await;
    one.locks.note_session_key(&Key::generate());
    knows(&one, 1).await;
    assert!(one.locks.check_health().await.is_healthy());
    assert_eq!(findings(&database, "servers_disagree").await, []);
    assert!(logged("locks documents: replica set, ttl"), "the line at the start");

    let other_ttl = TTL + Duration::from_secs(7_001);
    let two = server(&database, other_ttl).await;
    two.locks.note_session_key(&Key::generate());
    knows(&two, 2).await;
    let report = two.locks.check_health().await;
    assert!(report.is_ready() && !report.is_healthy(), "{report:?}");
    let problems = report.problems.concat();
    let ttls = format!("a ttl of {TTL:?} instead of {other_ttl:?}");
    assert!(problems.contains(&ttls) && problems.contains("another session key"), "{problems}");
    let [finding] = &findings(&database, "servers_disagree").await[..] else { panic!("one") };
    assert!(finding.problem.contains("a ttl of"), "{finding:?}");
    // The second registration writes the note again, and is no news.
    two.locks.register::<WorkItem>().await.unwrap();
    one.locks.register::<WorkItem>().await.unwrap();
    knows(&one, 2).await;
    assert_eq!(count_logged(&["WARN", "instead of", &ttls]), 1);

    two.locks.shutdown().await;
    assert_eq!(findings(&database, "servers_disagree").await, [], "its note is gone with it");
    one.locks.register::<WorkItem>().await.unwrap();
    eventually("it is healthy again", async || one.locks.check_health().await.is_healthy()).await;
    one.locks.shutdown().await;
    assert_eq!(findings(&database, "servers").await, []);
}

#[tokio::test]
async fn a_server_that_has_died_is_forgotten_after_some_minutes() {
    let uri = mongod::shared_replica_set().await;
    let database = fresh_database(uri.uri()).await;
    let app = server(&database, TTL).await;
    knows(&app, 1).await;
    assert_eq!(findings(&database, "servers").await.len(), 1);
    let notes = database.collection::<Document>("doclock.server");
    let age = |millis: i64| {
        let at = doc! { "$subtract": [{ "$first": "$of.at" }, millis] };
        let of = doc! { "$mergeObjects": [{ "$first": "$of" }, { "at": at }] };
        vec![doc! { "$set": { "of": [of] } }]
    };
    notes.update_one(doc! {}, age(60_000)).await.unwrap();
    assert_eq!(findings(&database, "servers").await.len(), 1, "refreshed once a minute");
    notes.update_one(doc! {}, age(180_000)).await.unwrap();
    assert_eq!(findings(&database, "servers").await, []);
}

#[tokio::test]
async fn a_standalone_server_is_warned_of() {
    log_lines();
    let uri = mongod::shared_standalone().await.uri();
    let app = server(&fresh_database(&uri).await, TTL).await;
    knows(&app, 1).await;
    assert!(logged("WARN the database is a standalone server"));
    let report = app.locks.check_health().await;
    assert!(report.is_ready() && !report.is_healthy(), "{report:?}");
}
