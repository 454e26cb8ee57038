//! Rights of the database user that are missing, or go while servers run.

use std::error::Error;

use actix_doclock::{Aid, LockError, MongoStore, StoreErrorKind, health::HealthStatus};
use mongodb::bson::doc;

use crate::rig::app::{App, eventually, key, with_deadline};
use crate::rig::mongod::Mongod;
use crate::rig::{client, fresh_name};

const DEADLINE: std::time::Duration = std::time::Duration::from_secs(5);

#[tokio::test]
async fn rights_that_are_revoked_while_a_server_runs_show_in_its_health() {
    let server = Mongod::start_with_auth().await;
    let database = client(&server.uri()).await.database(&fresh_name());
    let roles = || vec!["readWrite", "dbAdmin"];
    let create = doc! { "createUser": "app", "pwd": "hunter2", "roles": roles() };
    database.run_command(create).await.unwrap();
    let uri = server.uri().replace("root:secret", "app:hunter2");
    let uri = format!("{uri}&authSource={}", database.name());
    let app = client(&uri).await.database(database.name());
    let app = App::with(&app, with_deadline(DEADLINE)).await;
    let unauthorized = async || {
        let report = app.locks.check_health().await;
        let problem = report.problems.into_iter().find(|it| it.starts_with("unauthorized"));
        (report.status, problem)
    };
    assert_eq!(unauthorized().await, (HealthStatus::Degraded, None), "only a standalone server");

    let revoke = doc! { "revokeRolesFromUser": "app", "roles": ["readWrite"] };
    database.run_command(revoke).await.unwrap();
    let (status, problem) = unauthorized().await;
    let problem = problem.unwrap();
    assert_eq!(status, HealthStatus::Unavailable);
    let lacks = "lacks find, insert, update, remove on workitem.lock";
    assert!(problem.contains(lacks), "{problem}");
    let refused = app.try_acquire(&key("a"), &Aid::new()).await;
    let Err(LockError::Store(error)) = refused else { panic!("{refused:?}") };
    assert_eq!(error.kind(), StoreErrorKind::Denied);
    assert!(error.to_string().contains("on `workitem.lock`"), "{error}");

    // All of them, also the right to look at indexes.
    let revoke = doc! { "revokeRolesFromUser": "app", "roles": ["dbAdmin"] };
    database.run_command(revoke).await.unwrap();
    assert_eq!(unauthorized().await.0, HealthStatus::Unavailable);

    let grant = doc! { "grantRolesToUser": "app", "roles": roles() };
    database.run_command(grant).await.unwrap();
    eventually("it is as before", async || unauthorized().await.1.is_none()).await;
    app.granted(&key("a"), &Aid::new()).await;
}

#[tokio::test]
async fn each_reason_why_no_server_lets_us_in_has_its_own_text() {
    let server = Mongod::start_with_auth().await;
    let text = async |uri: &str| {
        let connected = async {
            let store = MongoStore::connect(uri, "shop").await?;
            // Only a command that needs a right asks for the user.
            store.lock_collections().await.map(|_| store)
        };
        let error = connected.await.expect_err(uri);
        let told = format!("{error} {:?}", error.source());
        assert!(!told.contains("hunter2"), "{told}");
        error.to_string()
    };
    let wrong = server.uri().replace("root:secret", "root:hunter2");
    let wrong = text(&wrong).await;
    assert!(wrong.contains("does not accept the user or the password"), "{wrong}");
    let nobody = text(&server.uri().replace("root:secret@", "")).await;
    assert!(nobody.contains("asks for a user and a password"), "{nobody}");
    let dead =
        text("mongodb://127.0.0.1:1/?directConnection=true&serverSelectionTimeoutMS=500").await;
    assert!(dead.contains("the connection is refused"), "{dead}");
}

#[tokio::test]
async fn a_server_without_the_right_to_create_has_a_session_store_once_another_user_made_it() {
    use actix_session_mongo::MongoSessionStore;

    let server = Mongod::start_with_auth().await;
    let name = fresh_name();
    let root = client(&server.uri()).await.database(&name);
    App::on(&root).await;
    // The privileges of the second user in `docs/production.md`.
    let on = |collection: &str, actions: &[&str]| {
        let all: Vec<_> =
            ["find", "update", "insert", "listIndexes"].iter().chain(actions).copied().collect();
        doc! { "resource": { "db": &name, "collection": collection }, "actions": all }
    };
    let privileges = vec![
        on("workitem", &[]),
        on("workitem.lock", &["remove", "changeStream"]),
        on("doclock.ended", &["remove"]),
        on("doclock.frozen", &[]),
        on("doclock.server", &[]),
        on("doclock.session", &[]),
    ];
    root.run_command(doc! { "createRole": "run", "privileges": privileges, "roles": [] })
        .await
        .unwrap();
    root.run_command(doc! { "createUser": "run", "pwd": "secret", "roles": ["run"] })
        .await
        .unwrap();
    let uri = server.uri().replace("root:secret", "run:secret");
    let database = client(&format!("{uri}&authSource={name}")).await.database(&name);
    let app = App::on(&database).await;
    let collection = "doclock.session";
    let build = async || MongoSessionStore::builder(&database).collection(collection).build().await;
    let prepare = async || actix_session_mongo::prepare(&root, collection).await.unwrap();
    let error = build().await.unwrap_err();
    assert!(error.to_string().contains("doclock.session"), "{error}");

    prepare().await;
    app.store.also_needs(doclock::sessions(collection));
    build().await.unwrap();
    let problems = async || {
        let report = app.locks.check_health().await;
        report.problems.into_iter().filter(|it| !it.contains("standalone")).collect::<Vec<_>>()
    };
    assert_eq!(problems().await, [""; 0]);
    let codes = async || {
        let found = doclock::diagnose(&app.store, &["workitem"], None).await.unwrap();
        let found = found.into_iter().filter(|it| it.about.ends_with("doclock.session"));
        found.map(|it| (it.code, it.problem)).collect::<Vec<_>>()
    };
    // It cannot create what is already there.
    let found = codes().await;
    assert!(found.len() == 1 && found[0].1.contains("lacks createIndex"), "{found:?}");

    let records = root.collection::<mongodb::bson::Document>("doclock.session");
    for (index, name) in [("expires_1", "expires (TTL)"), ("user_1", "user")] {
        records.drop_index(index).await.unwrap();
        assert!(
            problems().await.concat().contains(&format!("doclock.session has no index on {name}"))
        );
        assert!(codes().await.iter().any(|(code, _)| *code == "missing_index"));
        prepare().await;
        assert_eq!(problems().await, [""; 0]);
    }
    app.locks.register::<crate::rig::app::WorkItem>().await.unwrap();
}
