//! The effect of registering a type on its lock collection, and the reasons for which it fails.

use std::collections::BTreeMap;
use std::error::Error;
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use actix_doclock::store::verbs::*;
use actix_doclock::{Aid, LockError, LockKey, Lockable, MongoStore, StoreErrorKind, store::Saved};
use doclock_conformance::Shorthand;
use futures_util::future::join_all;
use mongodb::bson::{Bson, DateTime, Document, doc};
use mongodb::{Database, IndexModel};

use serde::{Deserialize, Serialize};

use crate::rig::app::{App, TTL, WorkItem, count, eventually, key, lock_records, put, record};
use crate::rig::mongod::{self, Mongod};
use crate::rig::{self, fresh_name};

async fn fresh_database() -> Database {
    rig::fresh_database(mongod::shared_replica_set().await.uri()).await
}

/// A server with this ttl that has registered.
async fn with_ttl(database: &Database, ttl: Duration) -> App {
    App::with(database, |settings| settings.ttl(ttl)).await
}

/// The indexes of the lock collection: their keys, and their expiry in seconds.
async fn indexes(database: &Database) -> BTreeMap<String, Option<u64>> {
    let mut cursor = lock_records(database).list_indexes().await.unwrap();
    let mut indexes = BTreeMap::new();
    while cursor.advance().await.unwrap() {
        let index = cursor.deserialize_current().unwrap();
        let expires = index.options.unwrap().expire_after.map(|after| after.as_secs());
        let keys: Vec<_> = index.keys.keys().map(String::as_str).collect();
        assert_eq!(indexes.insert(keys.join(","), expires), None, "{keys:?} is there twice");
    }
    indexes
}

/// The documented indexes, for this ttl, with the margin of the TTL index.
fn expected(ttl: u64) -> BTreeMap<String, Option<u64>> {
    let seconds = ttl + ttl.min(60);
    [("_id", None), ("aid", None), ("due", None), ("readers.aid", None), ("ts", Some(seconds))]
        .map(|(keys, expires)| (keys.to_owned(), expires))
        .into()
}

#[tokio::test]
async fn a_lock_collection_has_a_ttl_index_and_indexes_for_each_query_by_session() {
    let database = fresh_database().await;
    for _ in 0..2 {
        App::on(&database).await;
        assert_eq!(indexes(&database).await, expected(TTL.as_secs()));
    }
}

/// If a server with the old, shorter ttl could lower the index when it starts again, MongoDB would
/// remove the live locks of all servers with the longer ttl, even of servers that hold none at this
/// moment.
#[tokio::test]
async fn the_ttl_index_is_raised_and_never_lowered() {
    let database = fresh_database().await;
    for (seconds, index) in [(60, 60), (600, 600), (60, 600), (3_600, 3_600), (60, 3_600)] {
        with_ttl(&database, Duration::from_secs(seconds)).await;
        assert_eq!(indexes(&database).await, expected(index));
    }
}

/// There, `Home` and `home` are one document to the database but two keys to us.
#[tokio::test]
async fn a_collection_whose_collation_equates_different_strings_is_refused() {
    let create = async |name: &str| {
        let database = fresh_database().await;
        let collation = mongodb::options::Collation::builder().locale("en").build();
        database.create_collection(name).collation(collation).await.unwrap();
        App::unregistered(&database, |settings| settings).await
    };
    for name in ["workitem", "workitem.lock"] {
        let error = create(name).await.locks.register::<WorkItem>().await.unwrap_err().to_string();
        assert!(error.contains(&format!("{name} has the collation `en`")), "{error}");
    }
    // An ObjectId or a number is not affected by a collation.
    create("numbered").await.locks.register::<Numbered>().await.unwrap();
}

#[derive(Serialize, Deserialize)]
struct Numbered {
    #[serde(rename = "_id")]
    id: i64,
}

impl Lockable for Numbered {
    type Id = i64;
    const COLLECTION: &'static str = "numbered";
}

/// Databases of earlier versions have such indexes.
#[tokio::test]
async fn sparse_indexes_become_partial_ones() {
    let database = fresh_database().await;
    let ended = database.collection::<Document>("doclock.ended");
    let locks = lock_records(&database);
    let all = [(&locks, "due"), (&locks, "readers.aid"), (&ended, "step")];
    for (collection, field) in all {
        let sparse = mongodb::options::IndexOptions::builder().sparse(true).build();
        let index = IndexModel::builder().keys(doc! { field: 1 }).options(sparse).build();
        collection.create_index(index).await.unwrap();
    }
    for _ in 0..2 {
        App::on(&database).await;
        assert_eq!(indexes(&database).await, expected(TTL.as_secs()));
        for (collection, field) in all {
            let mut cursor = collection.list_indexes().await.unwrap();
            let mut filters = Vec::new();
            while cursor.advance().await.unwrap() {
                let index = cursor.deserialize_current().unwrap();
                if index.keys == doc! { field: 1 } {
                    let options = index.options.unwrap();
                    filters.push((options.sparse, options.partial_filter_expression));
                }
            }
            assert_eq!(filters, [(None, Some(doc! { field: { "$exists": true } }))]);
        }
    }
}

/// With `apiStrict` the server does not use sparse indexes.
#[tokio::test]
async fn a_strict_client_finds_due_locks_by_an_index() {
    let database = rig::strict_database(mongod::shared_replica_set().await.uri()).await;
    App::on(&database).await;
    let lock =
        |n: i32| doc! { "_id": n, "ts": DateTime::now(), "aid": "x", "token": "y", "ttl": 1 };
    lock_records(&database).insert_many((0..200).map(lock)).await.unwrap();
    let due = doc! { "due": { "$type": "date" }, "$expr": { "$lte": ["$due", "$$NOW"] } };
    let reader = doc! { "readers.aid": { "$in": ["x"] } };
    let sorted = vec![doc! { "$match": due }, doc! { "$sort": { "due": 1 } }];
    for pipeline in [sorted, vec![doc! { "$match": reader }]] {
        let explained = database
            .run_command(doc! { "explain": {
                "aggregate": "workitem.lock", "pipeline": pipeline, "cursor": {},
            }, "verbosity": "executionStats" })
            .await
            .unwrap()
            .to_string();
        assert!(explained.contains("IXSCAN") && !explained.contains("COLLSCAN"), "{explained}");
    }
}

#[tokio::test]
async fn a_ttl_with_a_fraction_of_a_second_is_rounded_up() {
    let database = fresh_database().await;
    with_ttl(&database, Duration::from_millis(1_500)).await;
    assert_eq!(indexes(&database).await["ts"], Some(3));
}

#[tokio::test]
async fn an_ordinary_index_on_ts_becomes_a_ttl_index() {
    let database = fresh_database().await;
    let index = IndexModel::builder().keys(doc! { "ts": 1 }).build();
    lock_records(&database).create_index(index).await.unwrap();
    App::on(&database).await;
    assert_eq!(indexes(&database).await, expected(TTL.as_secs()));
}

/// No record may keep a server from starting.
#[tokio::test]
async fn a_foreign_lock_with_an_absurd_ttl_does_not_stop_a_server() {
    for ttl in [Bson::Int64(i64::MAX), Bson::Double(f64::INFINITY), Bson::Double(1e300)] {
        let database = fresh_database().await;
        with_ttl(&database, Duration::from_secs(3_600)).await;
        let foreign = doc! { "_id": "a", "ts": DateTime::now(), "aid": "x", "ttl": &ttl };
        lock_records(&database).insert_one(foreign).await.unwrap();
        for _ in 0..2 {
            let app = App::unregistered(&database, |s| s.ttl(Duration::from_secs(60))).await;
            let registered = app.locks.register::<WorkItem>().await;
            registered.unwrap_or_else(|e| panic!("{ttl:?}: {e}: {:?}", e.source()));
            assert!(indexes(&database).await["ts"] >= Some(60), "{ttl:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_register_at_the_same_moment_all_succeed() {
    let uri = mongod::shared_replica_set().await;
    for round in 0..10_u64 {
        let name = fresh_name();
        // Half of the rounds begin without a collection, half with one.
        if round % 2 == 1 {
            with_ttl(&rig::client(uri.uri()).await.database(&name), TTL).await;
        }
        let ttls = [60, 120, 60, 180];
        let servers = ttls.map(|seconds| {
            let (uri, name) = (uri.uri().to_owned(), name.clone());
            tokio::spawn(async move {
                let database = rig::client(&uri).await.database(&name);
                with_ttl(&database, Duration::from_secs(seconds)).await;
            })
        });
        for server in servers {
            server.await.unwrap_or_else(|e| panic!("round {round}: {e}"));
        }
        let database = rig::client(uri.uri()).await.database(&name);
        let highest = if round % 2 == 1 { TTL.as_secs() } else { 180 };
        assert_eq!(indexes(&database).await, expected(highest), "round {round}");
    }
}

/// Two versions, with other ttls, that start for the first time on a database of a third one. Each drops and creates
/// indexes that the others are creating.
#[tokio::test(flavor = "multi_thread")]
async fn versions_that_start_at_the_same_moment_end_with_the_same_indexes() {
    let uri = mongod::shared_replica_set().await;
    for round in 0..5 {
        let name = fresh_name();
        let database = rig::client(uri.uri()).await.database(&name);
        for field in ["due", "readers.aid"] {
            let sparse = mongodb::options::IndexOptions::builder().sparse(true).build();
            let index = IndexModel::builder().keys(doc! { field: 1 }).options(sparse).build();
            lock_records(&database).create_index(index).await.unwrap();
        }
        let servers = (0..12).map(|n| {
            let (uri, name) = (uri.uri().to_owned(), name.clone());
            tokio::spawn(async move {
                let database = rig::client(&uri).await.database(&name);
                with_ttl(&database, Duration::from_secs(60 + n)).await;
            })
        });
        for server in servers.collect::<Vec<_>>() {
            server.await.unwrap_or_else(|e| panic!("round {round}: {e}"));
        }
        assert_eq!(indexes(&database).await, expected(71), "round {round}");
    }
}

/// A mongod with authentication, and a new database on it.
struct Guarded {
    server: Mongod,
    name: String,
}

impl Guarded {
    async fn new() -> Self {
        Self { server: Mongod::start_with_auth().await, name: fresh_name() }
    }

    async fn as_root(&self) -> Database {
        rig::client(&self.server.uri()).await.database(&self.name)
    }

    /// The URI of a new user with these roles on the database.
    async fn user(&self, roles: &[&str]) -> String {
        let user = fresh_name();
        let create = doc! { "createUser": &user, "pwd": "hunter2", "roles": roles.to_vec() };
        self.as_root().await.run_command(create).await.unwrap();
        self.uri(&user, "hunter2")
    }

    fn uri(&self, user: &str, password: &str) -> String {
        let (port, source) = (self.server.port(), &self.name);
        format!(
            "mongodb://{user}:{password}@127.0.0.1:{port}/?directConnection=true&authSource={source}"
        )
    }

    /// A server that connects with this URI and has not registered yet.
    async fn app(&self, uri: &str, ttl: Duration) -> App {
        let database = rig::client(uri).await.database(&self.name);
        App::unregistered(&database, |settings| settings.ttl(ttl)).await
    }
}

/// Asserts a refusal because of a missing privilege, with a message that says which privilege to grant.
fn assert_explained(outcome: Result<(), LockError>, database: &str) {
    let Err(LockError::Store(error)) = outcome else { panic!("not refused: {outcome:?}") };
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");
    let message = error.to_string();
    let locks = format!("{database}.workitem.lock");
    for part in ["readWrite", "dbAdmin", "collMod", "createIndex", database, &locks] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[tokio::test]
async fn a_user_who_may_only_read_is_told_what_to_grant() {
    let guarded = Guarded::new().await;
    let app = guarded.app(&guarded.user(&["read"]).await, TTL).await;
    let began = Instant::now();
    assert_explained(app.locks.register::<WorkItem>().await, &guarded.name);
    assert!(began.elapsed() < app.locks.deadline() / 2, "a refusal is not retried");
}

#[tokio::test]
async fn an_index_of_an_earlier_version_gets_its_margin_or_is_accepted_without() {
    let guarded = Guarded::new().await;
    let database = guarded.as_root().await;
    let uri = guarded.user(&["readWrite"]).await;
    let without_margin = async |seconds: i64| {
        guarded.app(&uri, TTL).await.locks.register::<WorkItem>().await.unwrap();
        let index = doc! { "keyPattern": { "ts": 1 }, "expireAfterSeconds": seconds };
        database.run_command(doc! { "collMod": "workitem.lock", "index": index }).await.unwrap();
    };
    let ttl = TTL.as_secs() as i64;
    without_margin(ttl).await;
    let app = guarded.app(&uri, TTL).await;
    app.locks.register::<WorkItem>().await.unwrap();
    app.granted(&key("a"), &Aid::new()).await;
    assert_eq!(indexes(&database).await["ts"], Some(TTL.as_secs()));
    let admin = guarded.user(&["readWrite", "dbAdmin"]).await;
    guarded.app(&admin, TTL).await.locks.register::<WorkItem>().await.unwrap();
    assert_eq!(indexes(&database).await, expected(TTL.as_secs()));
    // An index that is too short removes live locks.
    without_margin(ttl - 1).await;
    assert_explained(
        guarded.app(&uri, TTL).await.locks.register::<WorkItem>().await,
        &guarded.name,
    );
}

#[tokio::test]
async fn a_user_who_may_not_change_indexes_is_told_what_to_grant_when_the_ttl_changes() {
    let guarded = Guarded::new().await;
    let uri = guarded.user(&["readWrite"]).await;
    for _ in 0..2 {
        let app = guarded.app(&uri, TTL).await;
        app.locks.register::<WorkItem>().await.unwrap();
        let lock = app.granted(&key("a"), &Aid::new()).await;
        app.locks.release(&lock).await.unwrap();
    }
    let app = guarded.app(&uri, TTL * 2).await;
    assert_explained(app.locks.register::<WorkItem>().await, &guarded.name);

    let uri = guarded.user(&["readWrite", "dbAdmin"]).await;
    guarded.app(&uri, TTL * 2).await.locks.register::<WorkItem>().await.unwrap();
    assert_eq!(indexes(&guarded.as_root().await).await, expected(TTL.as_secs() * 2));
}

/// All texts of an error that a log could show.
fn everything_said(error: &dyn Error) -> String {
    let mut said = format!("{error:?} {error:#?}");
    let mut cause = Some(error);
    while let Some(error) = cause {
        said += &format!(" {error} {error:?}");
        cause = error.source();
    }
    said
}

/// A port on which nothing listens any more.
fn closed_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_unavailable_and_no_password_is_shown() {
    let uri = format!("mongodb://user:hunter2@127.0.0.1:{}/", closed_port());
    let began = Instant::now();
    let error = MongoStore::connect(&uri, "shop").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    let said = everything_said(&error);
    assert!(!said.contains("hunter2"), "{said}");
}

#[tokio::test]
async fn a_wrong_password_is_denied_and_not_shown() {
    let guarded = Guarded::new().await;
    guarded.user(&["readWrite"]).await;
    let uri = guarded.uri("nobody", "hunter2");
    let error = MongoStore::connect(&uri, &guarded.name).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");
    let said = everything_said(&error);
    assert!(!said.contains("hunter2"), "{said}");
}

/// Common mistakes in a URI, each close to a password.
#[tokio::test]
async fn a_malformed_uri_is_reported_and_no_password_is_shown() {
    let malformed = [
        "mongodb://user:hunter2@",
        "mongodb://user:hunter2@host:port/",
        "mongodb://user:hunter2@host:99999/",
        "mongodb://user:hunter2@host:27017,/",
        "mongodb://user:hunter2@host/?w=-1",
        "mongodb://user:hunter2@host/?authMechanism=NONE",
        "mongodb://user:hunter2@host/?tls=maybe",
        "mongodb://user:hunter2@host/?replicaSet",
        "mongodb://user:hunter2@host/a b$c",
        // Percent-encoding that is missing or wrong.
        "mongodb://user:hunter2%zz@host/",
        "mongodb://user:hunter2@x@host/",
        "mongodb://user:hunter2:x@host/",
        "mongodb://user:hunter2/x@host/",
        "mongodb://us/er:hunter2@host/",
        // Another scheme, or none.
        "http://user:hunter2@host/",
        "user:hunter2@host/",
        "user:hunter2@host:27017",
        "",
    ];
    let mut shown = Vec::new();
    for uri in malformed {
        let error = MongoStore::connect(uri, "shop").await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Other, "{uri}: {error:?}");
        assert!(error.to_string().contains("mongodb://host:27017"), "{uri}: {error}");
        if everything_said(&error).contains("hunter2") {
            shown.push((uri, error.source().map(ToString::to_string)));
        }
    }
    assert!(shown.is_empty(), "a password is shown: {shown:#?}");
}

#[tokio::test]
async fn an_unregistered_type_is_misconfigured_and_the_error_says_so() {
    let database = fresh_database().await;
    let app = App::on(&database).await;
    let other = LockKey::new("invoice", 1).unwrap();
    let outcomes = [
        app.try_acquire(&other, &Aid::new()).await.map(drop),
        app.locks.inspect(&other).await.map(drop),
        crate::rig::app::break_on(&app.locks, &other, &actix_doclock::Actor::new("admin"))
            .await
            .map(drop),
        app.locks.key("invoice", "1").map(drop),
    ];
    for outcome in outcomes {
        let Err(LockError::Misconfigured(message)) = outcome else { panic!("{outcome:?}") };
        assert!(message.contains("register") && message.contains("invoice"), "{message}");
    }
    let unregistered = crate::rig::app::manager_on(&database).build().await.unwrap();
    assert_eq!(unregistered.renew(&Aid::new()).await.unwrap(), 0);
}

/// No application server is left, and the index alone cleans up.
#[tokio::test]
async fn the_ttl_index_removes_only_expired_locks() {
    let server = Mongod::start_with_eager_ttl_monitor().await;
    let database = rig::fresh_database(&server.uri()).await;
    let app = App::on(&database).await;
    let live = app.granted(&key("live"), &Aid::new()).await;
    app.granted(&key("expired"), &Aid::new()).await;
    let foreign = doc! { "_id": "foreign", "ts": DateTime::from_millis(5), "aid": "x" };
    lock_records(&database).insert_one(foreign).await.unwrap();
    rig::age(&database, &key("expired"), TTL + Duration::from_secs(61)).await;

    eventually("the monitor comes round", async || count(&database).await == 1).await;
    let record = record(&database, &key("live")).await.expect("the live one stays");
    assert_eq!(record.get_str("token").unwrap(), live.token.unwrap().to_string());
}

/// Otherwise a failover could bring the shorter ttl back, which removes live locks.
#[tokio::test]
async fn a_change_of_the_ttl_waits_for_a_majority_too() {
    let uri = mongod::shared_replica_set().await;
    let (database, sent) = rig::recorded_database(uri.uri()).await;
    with_ttl(&database, TTL).await;
    with_ttl(&database, 2 * TTL).await;
    let sent = sent.lock().unwrap();
    let is_change = |command: &Document| command.contains_key("collMod");
    assert_eq!(sent.iter().filter(|it| is_change(it)).count(), 1, "{sent:?}");
    // By a command of its own, which no time limit of the change cuts short.
    let after = sent.iter().skip_while(|it| !is_change(it)).nth(1).expect("a command that waits");
    let concern = after.get_document("writeConcern").expect("a write concern");
    assert_eq!(concern.get_str("w").ok(), Some("majority"), "{after:?}");
}

/// With `w=1` a lagging primary could grant one lock twice, and a secondary could show old locks.
#[tokio::test]
async fn writes_wait_for_a_majority_and_reads_use_the_primary_whatever_the_uri_says() {
    let uri = mongod::shared_replica_set().await;
    let join = if uri.uri().contains('?') { '&' } else { '?' };
    let lax = format!(
        "{}{join}w=1&journal=false&readPreference=secondaryPreferred&readConcernLevel=available",
        uri.uri()
    );
    let (database, sent) = rig::recorded_database(&lax).await;
    let app = App::with(&database, |settings| settings.break_policy(|_, _| true)).await;
    put(&database, "a", "old").await;
    sent.lock().unwrap().retain(|command| !command.contains_key("insert"));

    let (a, alice) = (key("a"), Aid::new());
    // Several claims share an insert.
    let several = (0..9).map(|n| key(&n.to_string()));
    join_all(several.map(async |key| app.granted(&key, &alice).await)).await;
    let lock = app.granted(&a, &alice).await;
    assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Saved);
    app.locks.renew(&alice).await.unwrap();
    app.locks.list().await.unwrap();
    app.store.exists(&a, Deadline::NONE).await.unwrap();
    app.store.load(&a, Deadline::NONE).await.unwrap();
    app.locks.release(&lock).await.unwrap();
    app.granted(&a, &alice).await;
    app.break_lock(&a).await.unwrap();
    app.locks.end_session(&alice).await.unwrap();
    app.store.session_ended(&alice).await.unwrap();

    let mut seen = BTreeMap::<&str, usize>::new();
    let sent = sent.lock().unwrap();
    for command in sent.iter() {
        let name = command.keys().next().unwrap().as_str();
        *seen.entry(name).or_default() += 1;
        let in_transaction = command.contains_key("autocommit") && name != "commitTransaction";
        let writes =
            ["insert", "findAndModify", "update", "delete", "createIndexes", "commitTransaction"];
        let concern = command.get_document("writeConcern").ok();
        if writes.contains(&name) && !in_transaction {
            let concern = concern.unwrap_or_else(|| panic!("no write concern: {command}"));
            assert_eq!(concern.get_str("w").ok(), Some("majority"), "{command}");
            assert!(concern.get_bool("j").unwrap_or(true), "{command}");
        } else if name != "aggregate" {
            // The driver sends one with an aggregate, which writes nothing.
            assert_eq!(
                concern, None,
                "a transaction has its write concern at the commit: {command}"
            );
        }
        if let Ok(preference) = command.get_document("$readPreference") {
            assert_eq!(preference.get_str("mode").ok(), Some("primary"), "{command}");
        }
        if let Ok(concern) = command.get_document("readConcern") {
            let level = concern.get_str("level").unwrap_or("local");
            assert!(["local", "majority", "snapshot"].contains(&level), "{command}");
        }
    }
    for (name, at_least) in [
        ("insert", 1),
        ("findAndModify", 2),
        ("update", 4),
        ("delete", 3),
        ("find", 5),
        ("commitTransaction", 1),
    ] {
        assert!(seen.get(name).is_some_and(|&n| n >= at_least), "{name}: {seen:?}");
    }
}

#[tokio::test]
async fn a_strict_client_is_checked_too() {
    let database = rig::strict_database(mongod::shared_replica_set().await.uri()).await;
    let app = App::on(&database).await;
    let findings = doclock::diagnose(&app.store, &["workitem"], Some(TTL)).await.unwrap();
    assert!(
        findings.iter().all(|it| it.code != "missing_index" && it.code != "sparse_index"),
        "{findings:?}"
    );
}

#[tokio::test]
async fn a_lock_collection_of_somebody_else_is_refused_and_gets_no_index() {
    let database = fresh_database().await;
    let rows = (0..30).map(|n| doc! { "_id": n, "ts": DateTime::MIN, "title": "bread" });
    lock_records(&database).insert_many(rows).await.unwrap();
    let app = App::unregistered(&database, |settings| settings).await;
    let error = app.locks.register::<WorkItem>().await.unwrap_err().to_string();
    assert!(error.contains("workitem.lock contains documents that are no locks"), "{error}");
    assert_eq!(indexes(&database).await, [("_id".to_owned(), None)].into());
    // One lock among them shows whose collection it is.
    lock_records(&database).insert_one(doc! { "_id": -1, "ts": DateTime::now() }).await.unwrap();
    app.locks.register::<WorkItem>().await.unwrap();
    for reserved in ["workitem.lock", "doclock.ended", "doclock.shop.server"] {
        let error = app.locks.register_in::<WorkItem>(reserved).await.unwrap_err().to_string();
        assert!(error.contains("name the collection of"), "{error}");
    }
}

#[tokio::test]
async fn lock_records_of_every_kind_are_adopted() {
    let now = DateTime::now();
    for record in [
        doc! { "ts": now, "aid": "x" },
        doc! { "ts": now },
        doc! { "ts": now, "aid": "x", "comment": "do not touch" },
        doc! { "ts": "yesterday" },
        doc! { "fence": 7 },
        doc! { "ts": now, "readers": [{ "aid": "x", "ts": now }] },
        doc! { "queue": [] },
        doc! {},
    ] {
        let database = fresh_database().await;
        let mut stored = doc! { "_id": "a" };
        stored.extend(record.clone());
        lock_records(&database).insert_one(stored).await.unwrap();
        let app = App::unregistered(&database, |settings| settings).await;
        let registered = app.locks.register::<WorkItem>().await;
        registered.unwrap_or_else(|e| panic!("{record}: {e}"));
        assert_eq!(indexes(&database).await, expected(TTL.as_secs()));
    }
}

#[tokio::test]
async fn what_is_no_ordinary_collection_is_refused() {
    let capped = doc! { "capped": true, "size": 100_000 };
    let view = doc! { "viewOn": "offer", "pipeline": [] };
    let time_series = doc! { "timeseries": { "timeField": "at" } };
    for (options, kind) in [(capped, "capped"), (view, "a view"), (time_series, "a time series")] {
        for name in ["workitem", "workitem.lock", "doclock.ended"] {
            let database = fresh_database().await;
            let mut create = doc! { "create": name };
            create.extend(options.clone());
            database.run_command(create).await.unwrap();
            let app = App::unregistered(&database, |settings| settings).await;
            let error = app.locks.register::<WorkItem>().await.unwrap_err().to_string();
            assert!(error.contains(&format!("{name} is {kind}")), "{error}");
        }
    }
}
