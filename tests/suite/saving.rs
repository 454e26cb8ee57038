//! A guarded save writes only the changes, and always marks the lock record.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, Lock, LockError, LockKey, Lockable, MemoryStore, Mode, StoreErrorKind, TryAcquire, Wait,
    store::{Acquisition, Original, Rules, Saved, Store, StoredDocument},
};
use mongodb::Database;
use mongodb::bson::{
    Bson, DateTime, Decimal128, Document, RawDocumentBuf, Timestamp, doc, oid::ObjectId,
};
use proptest::collection::vec;
use proptest::prelude::*;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::rig::app::{App, TTL, WorkItem, key, lock_records, put, record, title};
use crate::rig::faulty::Faulty;
use crate::rig::log::{count_logged, log_lines};
use crate::rig::{self, mongod};
use crate::rig::{claims::claim, random::cases};

async fn app() -> (App, Database) {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    (App::on(&database).await, database)
}

/// Sets the lock's `ts` ahead of the clock, as after a failover from a primary with a fast clock.
async fn turn_ahead(database: &Database, key: &LockKey) {
    let ahead = doc! { "$add": ["$$NOW", 60_000] };
    let (records, it) = (lock_records(database), doc! { "_id": key.id().to_string() });
    let turned = records.update_one(it, vec![doc! { "$set": { "ts": ahead } }]).await.unwrap();
    assert_eq!(turned.modified_count, 1);
}

#[tokio::test]
async fn every_save_changes_the_lock_record_even_if_its_ts_is_ahead_of_the_clock() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    turn_ahead(&database, &key("a")).await;
    assert_eq!(app.save(&lock, "1").await.unwrap(), Saved::Saved);
    let before = record(&database, &key("a")).await;
    assert_eq!(app.save(&lock, "2").await.unwrap(), Saved::Saved);
    assert_ne!(record(&database, &key("a")).await, before, "the save would conflict with nothing");
}

#[tokio::test]
async fn a_break_waits_for_a_save_under_way_even_if_ts_is_ahead_of_the_clock() {
    let Faulty { proxy, app, database, other } = Faulty::new().await;
    put(&database, "a", "old").await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    turn_ahead(&database, &key("a")).await;
    assert_eq!(app.save(&lock, "first").await.unwrap(), Saved::Saved);
    proxy.hold_request("commitTransaction");
    let next_holder = async {
        proxy.until_fired(1).await;
        let released = other.locks.release(&lock);
        tokio::pin!(released);
        let early = timeout(Duration::from_millis(300), &mut released).await;
        assert!(early.is_err(), "the lock went under a save: {early:?}");
        proxy.let_go();
        released.await.unwrap();
        other.granted(&key("a"), &Aid::new()).await;
        title(&database, "a").await
    };
    let (saved, seen) = tokio::join!(app.save(&lock, "second"), next_holder);
    assert_eq!(saved.unwrap(), Saved::Saved);
    assert_eq!(seen, "second", "the next holder would overwrite an acknowledged save");
}

/// A type that names only a part of the stored fields, in every way that serde allows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Part {
    #[serde(rename = "_id")]
    id: String,
    /// Stored as an `i32`.
    count: i64,
    title: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hint: Option<f64>,
    #[serde(default, skip_serializing)]
    secret: Option<String>,
    #[serde(default)]
    tags: Vec<String>,
    inner: Inner,
    #[serde(default)]
    by_name: BTreeMap<String, i64>,
}

/// Names only a part of the stored fields, too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Inner {
    left: i64,
    right: Option<String>,
}

impl Lockable for Part {
    type Id = String;
    const COLLECTION: &'static str = "part";
}

fn names() -> impl Strategy<Value = String> {
    prop_oneof![
        5 => "[a-z]{1,3}",
        1 => Just("a.b".to_owned()),
        1 => Just("$set".to_owned()),
        1 => Just("0".to_owned()),
        1 => Just(String::new()),
    ]
}

/// Values of fields that no Rust type of the test names.
fn unnamed() -> impl Strategy<Value = Bson> {
    let leaf = prop_oneof![
        any::<i32>().prop_map(Bson::Int32),
        any::<f64>().prop_map(Bson::Double),
        Just(Bson::Double(f64::NAN)),
        any::<i64>().prop_map(|ms| Bson::DateTime(DateTime::from_millis(ms))),
        Just(Bson::Decimal128("1.10".parse::<Decimal128>().unwrap())),
        Just(Bson::Timestamp(Timestamp { time: 1, increment: 2 })),
        any::<[u8; 12]>().prop_map(|it| ObjectId::from_bytes(it).into()),
        Just(Bson::Null),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        vec(("[a-z]{1,2}", inner), 0..3)
            .prop_map(|fields| Bson::Document(fields.into_iter().collect()))
    })
}

fn parts() -> impl Strategy<Value = Part> {
    let text = || proptest::option::of("[a-z]{0,4}");
    let inner = (any::<i32>(), text()).prop_map(|(left, right)| Inner { left: left.into(), right });
    let by_name = proptest::collection::btree_map(names(), 0..9_i64, 0..4);
    let hint = (0..9_u8).prop_map(|quarters| f64::from(quarters) / 4.0);
    let fields = (any::<i32>(), text(), proptest::option::of(hint), vec("[a-z]", 0..3));
    (fields, inner, by_name).prop_map(|((count, title, hint, tags), inner, by_name)| Part {
        id: "a".to_owned(),
        count: count.into(),
        title,
        hint,
        secret: None,
        tags,
        inner,
        by_name,
    })
}

/// The stored document: the fields of a [`Part`] with other number types, and fields that it does not
/// name.
fn stored_as(part: &Part, unnamed: &[(String, Bson)]) -> Document {
    let by_name: Document =
        part.by_name.iter().map(|(name, n)| (name.clone(), Bson::Int64(*n))).collect();
    let mut inner = doc! { "left": part.inner.left as i32, "right": part.inner.right.clone() };
    let mut stored = doc! {
        "_id": &part.id,
        "count": part.count as i32,
        "title": part.title.clone(),
        "secret": "kept",
        "tags": part.tags.clone(),
        "by_name": by_name,
    };
    if let Some(hint) = part.hint {
        stored.insert("hint", hint);
    }
    for (name, value) in unnamed {
        inner.insert(format!("unnamed_{name}"), value.clone());
        stored.insert(format!("unnamed_{name}"), value.clone());
    }
    stored.insert("inner", inner);
    stored
}

async fn locked(store: &impl Store, key: &LockKey) -> Lock {
    store.prepare(key.collection(), &Rules::new(TTL), Deadline::NONE).await.unwrap();
    match store.try_acquire(key, &claim(Mode::Exclusive), Deadline::NONE).await.unwrap() {
        TryAcquire::Granted(lock) => lock,
        other => panic!("{other:?}"),
    }
}

/// Loads a part, replaces it by `after` and saves it.
async fn edit(store: &impl Store, lock: &Lock, after: &Part) {
    let stored = store.load(&lock.key, Deadline::NONE).await.unwrap().unwrap();
    let loaded: Part = stored.decode().unwrap();
    let edit = Original::new(stored, &loaded).unwrap().changes_to(after).unwrap().into();
    let until = Instant::now() + TTL;
    let saved =
        store.save(&Acquisition::of(lock).unwrap(), &edit, Deadline::at(until)).await.unwrap();
    assert_eq!(saved, Saved::Saved);
}

/// A stored field, byte for byte.
fn bytes(document: &RawDocumentBuf, path: &[&str]) -> Option<Vec<u8>> {
    let mut value = document.get(path[0]).unwrap()?;
    for name in &path[1..] {
        value = value.as_document()?.get(name).unwrap()?;
    }
    let value = Bson::try_from(value).unwrap();
    Some(RawDocumentBuf::try_from(&doc! { "": value }).unwrap().into_bytes())
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn a_save_writes_the_changes_and_leaves_all_other_bytes_unchanged(
        before in parts(), after in parts(), unnamed in vec(("[a-z]", unnamed()), 0..4),
    ) {
        static RUNTIME: std::sync::OnceLock<(Runtime, App, Database)> = std::sync::OnceLock::new();
        let (runtime, app, database) = RUNTIME.get_or_init(|| {
            let runtime = Runtime::new().unwrap();
            let (app, database) = runtime.block_on(app());
            (runtime, app, database)
        });
        runtime.block_on(async {
            let parts = database.collection::<Document>(Part::COLLECTION);
            parts.delete_many(doc! {}).await.unwrap();
            parts.insert_one(stored_as(&before, &unnamed)).await.unwrap();
            let raw = database.collection::<RawDocumentBuf>(Part::COLLECTION);
            let was = raw.find_one(doc! {}).await.unwrap().unwrap();
            let key = LockKey::of::<Part>("a".to_owned()).unwrap();
            let lock = locked(&app.store, &key).await;
            edit(&app.store, &lock, &after).await;
            app.locks.release(&lock).await.unwrap();

            let is = raw.find_one(doc! {}).await.unwrap().unwrap();
            let loaded: Part = parts.clone_with_type().find_one(doc! {}).await.unwrap().unwrap();
            let expected = Part { secret: Some("kept".to_owned()), ..after.clone() };
            assert_eq!(loaded, expected);
            let unnamed: Vec<_> = unnamed.iter().map(|(it, _)| format!("unnamed_{it}")).collect();
            let mut untouched: Vec<Vec<&str>> = vec![vec!["_id"], vec!["secret"]];
            untouched.extend(unnamed.iter().map(|name| vec![name.as_str()]));
            untouched.extend(unnamed.iter().map(|name| vec!["inner", name.as_str()]));
            for (name, same) in [
                ("count", before.count == after.count),
                ("title", before.title == after.title),
                ("tags", before.tags == after.tags),
                ("by_name", before.by_name == after.by_name),
                ("inner", before.inner == after.inner),
            ] {
                untouched.extend(same.then(|| vec![name]));
            }
            for path in untouched {
                assert_eq!(bytes(&is, &path), bytes(&was, &path), "{path:?} of {was:?}");
            }
        });
    }

    #[test]
    fn a_save_in_memory_keeps_fields_that_the_type_does_not_name(before in parts(), after in parts()) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let store = MemoryStore::new();
            let whole = Whole(stored_as(&before, &[("x".to_owned(), Bson::Int32(5))]));
            store.put("a".to_owned(), &whole).unwrap();
            let key = LockKey::of::<Part>("a".to_owned()).unwrap();
            let lock = locked(&store, &key).await;
            edit(&store, &lock, &after).await;
            let Whole(is) = store.all::<Whole>().unwrap().remove(0);
            assert_eq!(is.get("unnamed_x"), Some(&Bson::Int32(5)));
            assert_eq!(is.get_document("inner").unwrap().get("unnamed_x"), Some(&Bson::Int32(5)));
            let loaded = store.all::<Part>().unwrap().remove(0);
            assert_eq!(loaded, Part { secret: Some("kept".to_owned()), ..after.clone() });
        });
    }
}

/// Any document of the same collection.
#[derive(Serialize, Deserialize)]
struct Whole(Document);

impl Lockable for Whole {
    type Id = String;
    const COLLECTION: &'static str = Part::COLLECTION;
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Large {
    #[serde(rename = "_id")]
    id: String,
    title: String,
    text: String,
    parts: BTreeMap<String, Bson>,
}

impl Lockable for Large {
    type Id = String;
    const COLLECTION: &'static str = "large";
}

impl Large {
    fn of(bytes: usize) -> Self {
        let (id, title) = ("a".to_owned(), "old".to_owned());
        Self { id, title, text: "x".repeat(bytes), parts: BTreeMap::new() }
    }
}

#[tokio::test]
async fn only_the_changed_field_of_a_large_document_is_sent() {
    let (database, commands) =
        rig::recorded_database(mongod::shared_replica_set().await.uri()).await;
    let app = App::on(&database).await;
    let (before, key) = (Large::of(100_000), LockKey::of::<Large>("a".to_owned()).unwrap());
    database.collection::<Large>(Large::COLLECTION).insert_one(&before).await.unwrap();
    let lock = locked(&app.store, &key).await;
    commands.lock().unwrap().clear();
    let after = Large { title: "new".to_owned(), ..before.clone() };
    assert_eq!(save(&app, &lock, &before, &after).await.unwrap(), Saved::Saved);
    let sent: usize = commands.lock().unwrap().iter().map(size).sum();
    println!("{sent} bytes for three commands");
    assert!(sent < 5_000, "{sent} bytes for a title of three letters");
    let stored = database.collection::<Large>(Large::COLLECTION).find_one(doc! {}).await.unwrap();
    assert_eq!(stored.unwrap().title, "new");
}

fn size(command: &Document) -> usize {
    RawDocumentBuf::try_from(command).unwrap().as_bytes().len()
}

async fn save(
    app: &App,
    lock: &Lock,
    before: &Large,
    after: &Large,
) -> Result<Saved, StoreErrorKind> {
    let stored = StoredDocument::encode(app.store.format(), before).unwrap();
    let edit = Original::new(stored, before).unwrap().changes_to(after).unwrap().into();
    let until = Instant::now() + TTL;
    let saved = app.store.save(&Acquisition::of(lock).unwrap(), &edit, Deadline::at(until)).await;
    saved.map_err(|e| e.kind())
}

#[tokio::test]
async fn documents_of_sixteen_megabytes_are_saved_and_larger_ones_are_refused() {
    let server = mongod::Mongod::start_replica_set().await;
    server.parameter("wiredTigerEngineRuntimeConfig", "cache_size=1G").await;
    let database = rig::fresh_database(&server.uri()).await;
    let app = App::on(&database).await;
    let (before, key) = (Large::of(16_000_000), LockKey::of::<Large>("a".to_owned()).unwrap());
    database.collection::<Large>(Large::COLLECTION).insert_one(&before).await.unwrap();
    let lock = locked(&app.store, &key).await;
    // A change of almost the whole document, and one that no path can express.
    let part = BTreeMap::from([("a.b".to_owned(), Bson::from("y".repeat(700_000)))]);
    for (text, parts) in [("y", BTreeMap::new()), ("y", part)] {
        let after = Large { text: text.repeat(16_000_000), parts, ..before.clone() };
        assert_eq!(save(&app, &lock, &before, &after).await, Ok(Saved::Saved));
    }
    let parts = BTreeMap::from([("c".to_owned(), Bson::from("y".repeat(1_000_000)))]);
    let larger = Large { parts, ..before.clone() };
    assert_eq!(save(&app, &lock, &before, &larger).await, Err(StoreErrorKind::Rejected));
}

#[tokio::test]
async fn a_save_without_changes_renews_the_lock_and_writes_no_document() {
    let (database, commands) =
        rig::counted_database(&mongod::local_replica_set().await.uri()).await;
    let app = App::on(&database).await;
    put(&database, "a", "old").await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    rig::age(&database, &key("a"), TTL / 2).await;
    commands.take();
    let item = WorkItem { id: "a".to_owned(), title: "whatever".to_owned() };
    let stored = StoredDocument::encode(app.store.format(), &item).unwrap();
    let edit = Original::new(stored, &item).unwrap().changes_to(&item).unwrap().into();
    let (held, until) = (Acquisition::of(&lock).unwrap(), Instant::now() + TTL);
    let save = || app.store.save(&held, &edit, Deadline::at(until));
    assert_eq!(save().await.unwrap(), Saved::Saved);
    assert_eq!(commands.take(), ["update", "find"]);
    assert_eq!(title(&database, "a").await, "old");
    let lease = app.locks.inspect(&lock.key).await.unwrap().unwrap().expires_in();
    assert!(lease > TTL * 3 / 4, "{lease:?}");

    database.collection::<Document>("workitem").delete_many(doc! {}).await.unwrap();
    assert_eq!(save().await.unwrap(), Saved::DocumentGone);
    app.locks.release(&lock).await.unwrap();
    assert_eq!(save().await.unwrap(), Saved::Lost);
}

#[tokio::test]
async fn a_changed_id_is_refused() {
    let item = |id: &str| WorkItem { id: id.to_owned(), title: "new".to_owned() };
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let guard = app.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    let refused = guard.update(|it: &mut WorkItem| *it = item("b")).await.unwrap_err();
    let LockError::Rejected { source, .. } = refused else { panic!("{refused:?}") };
    assert!(source.to_string().contains("keeps its `_id`"), "{source}");
    assert_eq!(title(&database, "a").await, "old");
}

#[tokio::test]
async fn a_wrong_type_of_the_ids_is_logged_beside_the_missing_document() {
    log_lines();
    let (app, database) = app().await;
    let id = ObjectId::new();
    let items = database.collection::<Document>("workitem");
    items.insert_one(doc! { "_id": id, "title": "old" }).await.unwrap();
    let guard = app.locks.acquire(&key(&id.to_hex()), Wait::no()).await.unwrap();
    let missing = guard.load::<WorkItem>().await;
    assert!(matches!(missing, Err(LockError::NotFound { .. })), "{missing:?}");
    assert_eq!(count_logged(&[&id.to_hex(), "but a document of the same text"]), 1);
}

#[tokio::test]
async fn an_answer_to_an_acquire_becomes_a_lock_or_an_error() {
    let (app, _) = app().await;
    let (alice, bob) = (Aid::new(), Aid::new());
    for _ in ["granted", "already hers"] {
        let mine =
            LockError::unless_granted(app.try_acquire(&key("a"), &alice).await.unwrap()).unwrap();
        assert_eq!(mine.aid, alice);
    }
    let refused = LockError::unless_granted(app.try_acquire(&key("a"), &bob).await.unwrap());
    assert!(matches!(refused, Err(LockError::Held(lock)) if lock.aid == alice));
}
