use super::*;
use crate::rig::app::{TTL, eventually, put, with_deadline};
use crate::rig::log::{count_logged, log_lines};
use crate::rig::mongod::Mongod;
use actix_doclock::{LockKey, Lockable, Named, Wait};
use mongodb::bson::{Binary, Bson, spec::BinarySubtype};
use uuid::Uuid;

#[tokio::test]
async fn a_strict_validator_on_locks_is_named_at_the_start_by_health_and_by_each_refusal() {
    log_lines();
    let schema = doc! { "$jsonSchema": { "required": ["resource"] } };
    for (collection, rules) in [
        ("workitem.lock", doc! { "validator": schema.clone() }),
        ("workitem.lock", doc! { "validator": { "aid": "me" }, "validationLevel": "moderate" }),
    ] {
        let database = fresh_database().await;
        let mut create = doc! { "create": collection };
        create.extend(rules);
        database.run_command(create).await.unwrap();
        let before = count_logged(&["WARN", "workitem.lock has a validator"]);
        let app = App::on(&database).await;
        assert!(count_logged(&["WARN", "workitem.lock has a validator"]) > before);
        assert!(problems(&app).await.contains("workitem.lock has a validator"));
        let began = Instant::now();
        let error = refused_at_once(began, &app, app.try_acquire(&key("a"), &Aid::new()).await);
        assert!(error.to_string().contains("the validator of the collection"), "{error}");
        assert!(error.to_string().contains("validationAction"), "{error}");
    }
    // Validators that refuse nothing, and validators of documents, which are the application's own.
    for create in [
        doc! { "create": "workitem.lock", "validator": schema.clone(), "validationAction": "warn" },
        doc! { "create": "workitem.lock", "validator": schema.clone(), "validationLevel": "off" },
        doc! { "create": "workitem", "validator": schema },
    ] {
        let database = fresh_database().await;
        database.run_command(create).await.unwrap();
        let app = App::on(&database).await;
        assert_eq!(problems(&app).await, "");
        app.granted(&key("a"), &Aid::new()).await;
    }
    // On the collection of ended sessions.
    let database = fresh_database().await;
    let create =
        doc! { "create": "doclock.ended", "validator": { "resource": { "$exists": true } } };
    database.run_command(create).await.unwrap();
    let app = App::on(&database).await;
    assert!(problems(&app).await.contains("doclock.ended has a validator"));
    let error = refused_at_once(Instant::now(), &app, app.locks.end_session(&Aid::new()).await);
    assert!(error.to_string().contains("the validator of the collection"), "{error}");
}

#[tokio::test]
async fn an_answer_of_the_server_is_not_told_as_no_answer() {
    let server = Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    let app = App::with(&database, with_deadline(Duration::from_secs(1))).await;
    for (code, text) in [(112, "other writes"), (246, "was changed"), (24, "did not carry it out")]
    {
        let data = doc! { "failCommands": ["findAndModify"], "errorCode": code };
        let on = doc! { "configureFailPoint": "failCommand", "mode": "alwaysOn", "data": data };
        server.admin(on).await;
        let refused = app.try_acquire(&key("a"), &Aid::new()).await;
        // The deadline may come before the last answer.
        let Err(LockError::Store(error)) = refused else { panic!("not refused: {refused:?}") };
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
        let told = error.to_string();
        assert!(told.contains(text) || told.contains("within the deadline"), "{code}: {told}");
        let off = doc! { "configureFailPoint": "failCommand", "mode": "off" };
        server.admin(off).await;
    }
}

/// No query of the store reads a whole collection without an index.
#[tokio::test]
async fn everything_works_on_a_server_that_refuses_to_scan_collections() {
    #[derive(Debug, serde::Serialize, serde::Deserialize)]
    struct Fenced {
        #[serde(rename = "_id")]
        id: String,
    }
    impl Lockable for Fenced {
        type Id = String;
        const COLLECTION: &'static str = "fenced";
        const FENCED: bool = true;
        const FAIR: bool = true;
    }
    let server = Mongod::start_replica_set().await;
    server.parameter("notablescan", true).await;
    let database = rig::fresh_database(&server.uri()).await;
    let app = App::with(&database, |settings| settings.break_policy(|_, _| true)).await;
    app.locks.register::<Fenced>().await.unwrap();
    app.locks.register::<Named>().await.unwrap();
    put(&database, "a", "old").await;
    let alice = Aid::new();
    for key in [key("a"), LockKey::new("fenced", "a").unwrap()] {
        let lock = app.granted(&key, &alice).await;
        app.held(&key).await;
        assert_eq!(app.locks.renew(&alice).await.unwrap(), 1);
        app.locks.release(&lock).await.unwrap();
        app.granted(&key, &alice).await;
        assert_eq!(app.locks.list().await.unwrap().len(), 1);
        app.break_lock(&key).await.unwrap();
    }
    let mut events = app.locks.events();
    events.next().await.unwrap();
    let guard = app.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    guard.update(|it: &mut WorkItem| it.title = "new".to_owned()).await.unwrap();
    guard.release().await.unwrap();
    app.granted(&key("a"), &alice).await;
    rig::age(&database, &key("a"), 2 * TTL).await;
    eventually("the idle session is swept", async || {
        app.locks.sweep().await.unwrap();
        app.locks.list().await.unwrap().is_empty()
    })
    .await;
    app.granted(&key("a"), &Aid::new()).await;
    app.locks.end_session(&alice).await.unwrap();
    assert_eq!(problems(&app).await, "");
    let findings = doclock::diagnose(&app.store, &["workitem", "fenced"], Some(TTL)).await.unwrap();
    assert!(findings.iter().all(|it| it.severity < doclock::Severity::Warning), "{findings:?}");
    // The records of a collection that is fenced no more are removed.
    let unfenced = App::unregistered(&database, |settings| settings).await;
    unfenced.locks.register_in::<WorkItem>("fenced").await.unwrap();
}

#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Case {
    #[serde(rename = "_id")]
    id: Uuid,
}

impl Lockable for Case {
    type Id = Uuid;
    const COLLECTION: &'static str = "case";
}

#[tokio::test]
async fn a_document_of_the_same_text_and_another_type_is_hinted_at_once() {
    log_lines();
    let uuid = Uuid::new_v4();
    let legacy = |bytes: [u8; 16]| {
        Bson::from(Binary { subtype: BinarySubtype::UuidOld, bytes: bytes.to_vec() })
    };
    let mut java = *uuid.as_bytes();
    java[..8].reverse();
    java[8..].reverse();
    let stored = [
        (legacy(*uuid.as_bytes()), "legacy UUID"),
        (legacy(uuid.to_bytes_le()), "legacy UUID"),
        (legacy(java), "legacy UUID"),
        (uuid.to_string().into(), "a string"),
    ];
    for (id, hint) in stored {
        let database = fresh_database().await;
        let app = App::unregistered(&database, |settings| settings).await;
        app.locks.register::<Case>().await.unwrap();
        database.collection("case").insert_one(doc! { "_id": id.clone() }).await.unwrap();
        let before = count_logged(&["WARN", &uuid.to_string(), hint]);
        for _ in 0..2 {
            let key = LockKey::of::<Case>(uuid).unwrap();
            assert!(app.store.load(&key, Deadline::NONE).await.unwrap().is_none());
        }
        assert_eq!(count_logged(&["WARN", &uuid.to_string(), hint]) - before, 1, "{id}");
    }
    // Ids of the type String whose documents have numbers or UUIDs.
    let uuid = Uuid::new_v4();
    let four = Binary { subtype: BinarySubtype::Uuid, bytes: uuid.as_bytes().to_vec() };
    for (text, id, hint) in [
        ("4711".to_owned(), Bson::Int32(4711), "a number"),
        (uuid.to_string(), four.into(), "a UUID"),
    ] {
        let database = fresh_database().await;
        let app = App::on(&database).await;
        database.collection("workitem").insert_one(doc! { "_id": id, "title": "x" }).await.unwrap();
        assert!(app.store.load(&key(&text), Deadline::NONE).await.unwrap().is_none());
        assert_eq!(count_logged(&["WARN", &text, hint]), 1, "{text}");
    }
}
