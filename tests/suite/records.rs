//! The records of each version, kept for the next one, which has to read them. `tests/records/0.1.0.json` is what this
//! version writes; `DOCLOCK_RECORDS=write` writes it anew. Once a version is released its file stays as it is, and the next
//! version gets another one.

use std::{collections::BTreeMap, env, fs, future::pending, path::Path, time::Duration};

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Actor, Aid, Holder, LockError, LockKey, LockManagerBuilder, Lockable, Mode, TryAcquire, Wait,
    freeze::Scope,
    store::{Acquisition, Claim, Saved},
};
use doclock_conformance::Shorthand as _;
use mongodb::{
    Database,
    bson::{Bson, DateTime, Document, doc},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::rig::{
    self,
    app::{App, eventually, key, put},
    claims, mongod,
};

const CURRENT: &str = concat!("tests/records/", env!("CARGO_PKG_VERSION"), ".json");

#[derive(Serialize, Deserialize)]
struct Fenced {}

impl Lockable for Fenced {
    type Id = String;
    const COLLECTION: &'static str = "fenced";
    const FENCED: bool = true;
}

#[derive(Serialize, Deserialize)]
struct Fair {}

impl Lockable for Fair {
    type Id = String;
    const COLLECTION: &'static str = "fair";
    const FAIR: bool = true;
}

fn alice() -> Aid {
    Aid::from("alice-of-an-earlier-version".to_owned())
}

fn ended() -> Aid {
    Aid::from("ended-in-an-earlier-version".to_owned())
}

async fn server(
    database: &Database,
    settings: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder,
) -> App {
    let app = App::with(database, settings).await;
    app.locks.register::<Fenced>().await.unwrap();
    app.locks.register::<Fair>().await.unwrap();
    app
}

async fn database() -> Database {
    rig::fresh_database(mongod::shared_replica_set().await.uri()).await
}

/// One record of each kind. The waiter keeps its place until it is aborted.
async fn write_records(database: &Database) -> JoinHandle<()> {
    // The listeners never answer, so that their notes stay.
    let app = server(database, |settings| {
        settings
            .break_policy(|_, _| true)
            .on_lock_taken(|_| pending())
            .on_session_end(|_| pending())
            .reaper_interval(Duration::from_millis(100))
    })
    .await;
    let lock = async |key: LockKey, aid, name: &str| {
        let holder = Holder::new(name).of_user(format!("{name}@example.org"));
        let answer = app.locks.lock_for_session(&key, &aid, &holder).await.unwrap();
        LockError::unless_granted(answer).unwrap()
    };
    let held = lock(key("held"), alice(), "alice").await;
    put(database, "held", "before").await;
    assert_eq!(app.save(&held, "after").await.unwrap(), Saved::Saved);
    let claim = Claim {
        tab: Some("11111111-1111-4111-8111-111111111111".parse().unwrap()),
        page: Some("22222222-2222-4222-8222-222222222222".parse().unwrap()),
        ..claims::claim(Mode::Exclusive)
    };
    let TryAcquire::Granted(of_tab) =
        app.store.try_acquire(&key("closed"), &claim, Deadline::NONE).await.unwrap()
    else {
        panic!("not granted")
    };
    let of_tab = Acquisition::of(&of_tab).unwrap();
    app.store
        .expire_in(&of_tab, claim.page, Duration::from_secs(600), Deadline::NONE)
        .await
        .unwrap();
    for name in ["bob", "carol"] {
        let claim = Claim { holder: Holder::new(name), ..claims::claim(Mode::Shared) };
        let answer = app.store.try_acquire(&key("read"), &claim, Deadline::NONE).await.unwrap();
        assert!(matches!(answer, TryAcquire::Granted(_)));
    }
    let fenced = LockKey::of::<Fenced>("f".to_owned()).unwrap();
    let guard = app.locks.acquire(&fenced, Wait::no()).await.unwrap();
    guard.release().await.unwrap();
    let fair = LockKey::of::<Fair>("f".to_owned()).unwrap();
    lock(fair.clone(), Aid::new(), "dave").await;
    let (locks, waits_for) = (app.locks.clone(), fair.clone());
    let waiter = tokio::spawn(async move {
        drop(locks.acquire(&waits_for, Wait::for_at_most(Duration::from_secs(300))).await);
    });
    let records = database.collection::<Document>("fair.lock");
    eventually("the waiter has its place", async || {
        let queued = doc! { "queue.last": { "$exists": true } };
        records.find_one(queued).await.unwrap().is_some()
    })
    .await;
    lock(key("logged out"), ended(), "erin").await;
    app.locks.end_session(&ended()).await.unwrap();
    let broken = lock(key("broken"), Aid::new(), "frank").await;
    let chief = Actor::new("chief").with_id("chief@example.org");
    app.locks.break_lock(&broken, &chief, "goes home").await.unwrap();
    let in_an_hour = Duration::from_secs(3_600);
    app.locks.freeze("fenced", "migration", in_an_hour, &Actor::new("chief")).await.unwrap();
    for (collection, condition, records) in [
        ("doclock.server", doc! {}, 1),
        ("doclock.frozen", doc! { "of.0.obeyed.0": { "$exists": true } }, 1),
        ("doclock.ended", doc! { "lease": { "$exists": true }, "by": { "$exists": true } }, 2),
    ] {
        let all = database.collection::<Document>(collection);
        eventually(collection, async || {
            all.count_documents(condition.clone()).await.unwrap() == records
        })
        .await;
    }
    waiter
}

/// All records of our collections.
async fn dump(database: &Database) -> BTreeMap<String, Vec<Document>> {
    let mut all = BTreeMap::new();
    for name in database.list_collection_names().await.unwrap() {
        if name.ends_with(".lock") || name.starts_with("doclock.") {
            let mut records = Vec::new();
            let mut cursor = database
                .collection::<Document>(&name)
                .find(doc! {})
                .sort(doc! { "_id": 1 })
                .await
                .unwrap();
            while cursor.advance().await.unwrap() {
                records.push(cursor.deserialize_current().unwrap());
            }
            all.insert(name, records);
        }
    }
    all
}

/// The fields of a value and their types, without the values.
fn shape(value: &Bson) -> Value {
    match value {
        Bson::Document(document) => {
            document.iter().map(|(name, value)| (name.clone(), shape(value))).collect()
        }
        Bson::Array(values) => values.iter().take(1).map(shape).collect(),
        other => Value::from(format!("{:?}", other.element_type())),
    }
}

fn shapes(all: &BTreeMap<String, Vec<Document>>) -> BTreeMap<String, Vec<String>> {
    let shapes = |records: &Vec<Document>| {
        let mut shapes: Vec<_> =
            records.iter().map(|it| shape(&it.clone().into()).to_string()).collect();
        shapes.sort();
        shapes
    };
    all.iter().map(|(name, records)| (name.clone(), shapes(records))).collect()
}

fn read(file: &Path) -> BTreeMap<String, Vec<Document>> {
    let all: BTreeMap<String, Vec<Value>> =
        serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let document = |value| match Bson::try_from(value).unwrap() {
        Bson::Document(document) => document,
        other => panic!("no record: {other}"),
    };
    all.into_iter().map(|(name, all)| (name, all.into_iter().map(document).collect())).collect()
}

fn at_root(file: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

#[tokio::test]
async fn the_records_of_this_version_have_the_kept_shape() {
    let database = database().await;
    let waiter = write_records(&database).await;
    let now = dump(&database).await;
    waiter.abort();
    if env::var("DOCLOCK_RECORDS").is_ok_and(|it| it == "write") {
        let as_json = |record: &Document| Bson::from(record.clone()).into_canonical_extjson();
        let all: BTreeMap<_, Vec<_>> =
            now.iter().map(|(name, it)| (name, it.iter().map(as_json).collect())).collect();
        let text = serde_json::to_string_pretty(&all).unwrap() + "\n";
        fs::create_dir_all(at_root("tests/records")).unwrap();
        fs::write(at_root(CURRENT), text).unwrap();
    }
    assert_eq!(
        shapes(&now),
        shapes(&read(&at_root(CURRENT))),
        "write {CURRENT} anew with DOCLOCK_RECORDS=write, unless that version is released",
    );
}

/// Sets all dates forward by as much.
fn later(value: Bson, by: i64) -> Bson {
    match value {
        Bson::DateTime(at) => DateTime::from_millis(at.timestamp_millis() + by).into(),
        Bson::Array(all) => all.into_iter().map(|it| later(it, by)).collect::<Vec<_>>().into(),
        Bson::Document(document) => {
            let fields = document.into_iter().map(|(name, value)| (name, later(value, by)));
            fields.collect::<Document>().into()
        }
        other => other,
    }
}

#[tokio::test]
async fn the_records_of_every_version_are_read_as_they_were_meant() {
    for file in fs::read_dir(at_root("tests/records")).unwrap() {
        let (file, database) = (file.unwrap().path(), database().await);
        let all = read(&file);
        let held =
            all["workitem.lock"].iter().find(|it| it.get_str("_id").is_ok_and(|id| id == "held"));
        let written = held.unwrap().get_datetime("ts").unwrap().timestamp_millis();
        // As if they had been written a moment ago.
        let by = DateTime::now().timestamp_millis() - written;
        for (name, records) in all {
            let ahead = match name.as_str() {
                // The listeners of that server have died since.
                "doclock.ended" => -3_600_000,
                // A place lasts for a few seconds, and this machine may be slow.
                "fair.lock" => 60_000,
                _ => 0,
            };
            let records = records.into_iter().map(|it| later(it.into(), by + ahead));
            let records = records.map(|it| it.as_document().unwrap().clone());
            database.collection::<Document>(&name).insert_many(records).await.unwrap();
        }
        put(&database, "held", "of then").await;
        let app = server(&database, |settings| settings).await;

        assert_eq!(app.held(&key("held")).await.holder.unwrap().label, "alice");
        let mine = app.already_mine(&key("held"), &alice()).await;
        assert_eq!(app.save(&mine, "of now").await.unwrap(), Saved::Saved);
        app.locks.release(&mine).await.unwrap();
        app.granted(&key("held"), &Aid::new()).await;

        let closed = app.held(&key("closed")).await;
        assert!(
            closed.expires_in() > Duration::from_secs(60) && closed.tab.is_some(),
            "{closed:?}"
        );
        let mut readers: Vec<_> = app.locks.locks_on(&key("read")).await.unwrap();
        readers.sort_by_key(|lock| lock.holder.as_ref().unwrap().label.clone());
        let names: Vec<_> = readers.iter().map(|it| it.holder.clone().unwrap().label).collect();
        assert_eq!(names, ["bob", "carol"]);

        let fenced = LockKey::of::<Fenced>("f".to_owned()).unwrap();
        let record =
            database.collection::<Document>("fenced.lock").find_one(doc! {}).await.unwrap();
        let before = record.unwrap().get_i64("fence").unwrap();
        assert!(matches!(
            app.locks.acquire(&fenced, Wait::no()).await,
            Err(LockError::Frozen { freeze, .. }) if freeze.scope == Scope::from("fenced")
        ));
        assert!(app.locks.thaw("fenced").await.unwrap());
        let guard = app.locks.acquire(&fenced, Wait::no()).await.unwrap();
        let fence = guard.lock().fence.unwrap().to_string().parse::<i64>().unwrap();
        assert!(fence > before, "{fence} after {before}");
        guard.release().await.unwrap();

        let fair = LockKey::of::<Fair>("f".to_owned()).unwrap();
        let dave = app.held(&fair).await;
        assert_eq!(dave.holder.clone().unwrap().label, "dave");
        app.locks.release(&dave).await.unwrap();
        // The waiter of that server is next.
        let ahead = app.held(&fair).await;
        assert!(ahead.token.is_none() && ahead.aid != dave.aid, "{ahead:?}");

        let ends = app.store.last_ends(&[ended(), alice()], Deadline::NONE).await.unwrap();
        assert!(ends[0].is_some_and(|end| end.for_good) && ends[1].is_none(), "{ends:?}");
        let worker = uuid::Uuid::new_v4();
        let names = ["workitem", "fenced", "fair"];
        let an_hour = Duration::from_secs(3_600);
        let notes = app.store.take_takeovers(&names, worker, an_hour, 10).await.unwrap();
        let announced = app.store.take_ends(worker, an_hour, 10).await.unwrap();
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert_eq!((&*notes[0].reason, &*notes[0].by.label), ("goes home", "chief"));
        assert_eq!(announced.len(), 1, "{announced:?}");
        assert_eq!(announced[0].aid, ended());
    }
}
