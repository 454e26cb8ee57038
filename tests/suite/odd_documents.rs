//! Documents that no type of ours writes, but other drivers and programs do: a name that stands twice, a text that is not
//! UTF-8, an order of members that means something. A save keeps them, or is refused.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use actix_doclock::store::verbs::*;
use actix_doclock::{
    LockError, LockKey, LockManager, Lockable, MemoryStore, StoreErrorKind, Wait,
    store::{Acquisition, Format, Original, Removal, Saved, Store, StoredDocument},
};
use indexmap::IndexMap;
use mongodb::{
    Collection,
    bson::{Bson, Document, RawDocumentBuf, doc},
};
use proptest::{collection::vec, prelude::*, sample::select, test_runner::TestRunner};
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};

use crate::merging::{Became, Shop, key, locked, on_mongo, save};
use crate::rig::app::{App, TTL, WorkItem};
use crate::rig::random::cases;
use crate::rig::{
    self,
    mongod::Mongod,
    odd::{NOT_UTF8, Odd, odd, within},
};

/// A server of its own: some versions abort if such a document is written in the wrong way.
struct Site {
    server: Mongod,
    app: App,
    documents: Collection<RawDocumentBuf>,
}

impl Site {
    async fn new() -> Self {
        Self::of(Mongod::start_replica_set().await).await
    }

    async fn of(server: Mongod) -> Self {
        let database = rig::fresh_database(&server.uri()).await;
        let documents = database.collection(key().collection());
        Self { app: App::on(&database).await, documents, server }
    }

    async fn put(&self, document: &RawDocumentBuf) {
        self.documents.delete_many(doc! {}).await.unwrap();
        self.documents.insert_one(document).await.unwrap();
    }

    async fn get(&self) -> RawDocumentBuf {
        self.documents.find_one(doc! {}).await.unwrap().unwrap()
    }

    /// Loads the document as a `T`, changes and saves it.
    async fn save<T: Serialize + DeserializeOwned>(
        &self,
        stored: &RawDocumentBuf,
        change: impl FnOnce(&mut T),
    ) -> Result<RawDocumentBuf, String> {
        self.put(stored).await;
        let store = &self.app.store;
        let held = Acquisition::of(&locked(store).await).unwrap();
        let loaded = store.load(&key(), Deadline::NONE).await.unwrap().unwrap();
        let saved = async {
            let mut value: T = loaded.decode().map_err(|e| e.to_string())?;
            let original = Original::new(loaded, &value).map_err(|e| e.to_string())?;
            change(&mut value);
            let edit = original.changes_to(&value).map_err(|e| e.to_string())?.into();
            let until = Deadline::at(Instant::now() + TTL);
            let saved = store.save(&held, &edit, until).await.map_err(|e| e.to_string())?;
            assert_eq!(saved, Saved::Saved);
            Ok(self.get().await)
        };
        let saved = saved.await;
        let removed = store.remove_lock(Removal::Release(&held), Deadline::NONE).await;
        assert!(removed.is_ok(), "the server is gone: {removed:?}");
        if saved.is_err() {
            assert_eq!(self.get().await, *stored, "refused, but something has changed");
        }
        saved
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct It {
    #[serde(rename = "_id")]
    id: String,
    n: i64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    rows: Vec<Row>,
    #[serde(flatten)]
    more: BTreeMap<String, Bson>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Row {
    n: i64,
}

/// As `It`, but does not name other members.
#[derive(Debug, Serialize, Deserialize)]
struct Small {
    #[serde(rename = "_id")]
    id: String,
    n: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    new: Option<String>,
    #[serde(default)]
    rows: Vec<Row>,
}

fn id() -> (&'static str, Odd) {
    ("_id", "a".into())
}

#[tokio::test]
async fn a_document_with_a_name_twice_is_saved_and_keeps_both() {
    let site = Site::new().await;
    let twice = within(&[("y", 1.into()), ("y", "b".into())]);
    let stored = |n: i64, row: i64, new: Option<&str>| {
        let row = within(&[("n", row.into()), ("z", 1.into()), ("z", twice.clone())]);
        let mut members = vec![
            id(),
            ("x", 1.into()),
            ("n", n.into()),
            ("x", "two".into()),
            ("rows", Odd::Elements(vec![row])),
            ("in", twice.clone()),
        ];
        members.extend(new.map(|new| ("new", new.into())));
        odd(&members)
    };
    let before = stored(1, 1, None);
    let saved = site.save(&before, |it: &mut Small| it.n = 2).await;
    assert_eq!(saved.unwrap(), stored(2, 1, None));
    let saved = site.save(&before, |it: &mut Small| it.new = Some("it".to_owned())).await;
    assert_eq!(saved.unwrap(), stored(1, 1, Some("it")));
    let saved = site.save(&before, |it: &mut Small| it.rows[0].n = 2).await;
    assert_eq!(saved.unwrap(), stored(1, 2, None));
    let saved = site.save(&before, |it: &mut Small| it.rows.clear()).await.unwrap();
    assert!(Document::try_from(saved).unwrap().get_array("rows").unwrap().is_empty());
}

#[tokio::test]
async fn odd_names_beside_a_name_that_stands_twice_are_saved() {
    let site = Site::new().await;
    #[derive(Serialize, Deserialize)]
    struct Flat {
        #[serde(rename = "_id")]
        id: String,
        inner: Inner,
        #[serde(flatten)]
        more: BTreeMap<String, i64>,
    }
    #[derive(Serialize, Deserialize)]
    struct Inner {
        n: i64,
    }
    let inner = |n: i64| within(&[("n", n.into()), ("x", 1.into()), ("x", 2.into())]);
    let stored = odd(&[id(), ("inner", inner(1)), ("k", 1_i64.into())]);
    for name in ["a.b", "$a", "", "plain"] {
        let saved = site.save(&stored, |it: &mut Flat| it.more.extend([(name.to_owned(), 7)]));
        let should = odd(&[id(), ("inner", inner(1)), ("k", 1_i64.into()), (name, 7_i64.into())]);
        match saved.await {
            Ok(saved) => assert_eq!(saved, should),
            // The server itself allows no such names at the top.
            Err(why) => assert!(name.starts_with('$'), "{name}: {why}"),
        }
    }
    let saved =
        site.save(&stored, |it: &mut Flat| (it.inner.n, it.more) = (2, BTreeMap::new())).await;
    assert_eq!(saved.unwrap(), odd(&[id(), ("inner", inner(2))]));
}

#[tokio::test]
async fn a_name_that_stands_twice_and_that_the_type_reads_cannot_be_changed() {
    let site = Site::new().await;
    let stored = odd(&[id(), ("n", 1_i64.into()), ("x", 1_i64.into()), ("x", 2_i64.into())]);
    let saved = site.save(&stored, |it: &mut It| it.n = 2).await;
    let should = odd(&[id(), ("n", 2_i64.into()), ("x", 1_i64.into()), ("x", 2_i64.into())]);
    assert_eq!(saved.unwrap(), should);
    let refused = site.save(&stored, |it: &mut It| drop(it.more.insert("x".to_owned(), 3.into())));
    assert!(refused.await.unwrap_err().contains("`x`"));
    let twice = odd(&[id(), ("n", 1_i64.into()), ("n", 2_i64.into())]);
    let refused = site.save(&twice, |it: &mut Small| it.n = 3).await;
    assert!(refused.unwrap_err().contains("duplicate field `n`"));
}

/// Without transactions the document is written only if it is still what was read.
#[tokio::test]
async fn a_standalone_server_replaces_such_a_document_but_refuses_its_changes() {
    let site = Site::of(Mongod::start_standalone().await).await;
    let stored = odd(&[id(), ("n", 1_i64.into()), ("x", 1.into()), ("x", 2.into())]);
    let refused = site.save(&stored, |it: &mut Small| it.n = 2).await.unwrap_err();
    assert!(refused.contains("twice") && refused.contains("replica set"), "{refused}");
}

#[tokio::test]
async fn a_text_that_is_not_utf8_stays_where_the_type_does_not_ask_for_it() {
    let site = Site::new().await;
    let stored = |n: i64, row: i64| {
        let row = within(&[("n", row.into()), ("t", NOT_UTF8.into())]);
        let code = Bson::JavaScriptCode(NOT_UTF8.to_owned());
        let symbol = Bson::Symbol(NOT_UTF8.to_owned());
        odd(&[
            id(),
            ("n", n.into()),
            ("text", NOT_UTF8.into()),
            (NOT_UTF8, "a name".into()),
            ("rows", Odd::Elements(vec![row])),
            ("odd", Odd::Elements(vec![code.into(), symbol.into()])),
        ])
    };
    let saved = site.save(&stored(1, 1), |it: &mut Small| it.n = 2).await;
    assert_eq!(saved.unwrap(), stored(2, 1));
    let saved = site.save(&stored(1, 1), |it: &mut Small| it.rows[0].n = 2).await;
    assert_eq!(saved.unwrap(), stored(1, 2));
    // A map reads everything.
    let saved = site.save(&stored(1, 1), |it: &mut It| it.n = 2).await;
    assert_eq!(saved.unwrap(), stored(2, 1));
    #[derive(Debug, Serialize, Deserialize)]
    struct Asks {
        text: String,
    }
    let refused = site.save(&stored(1, 1), |it: &mut Asks| it.text.clear()).await;
    let why = refused.unwrap_err();
    assert!(why.contains("`text`") && why.contains("not UTF-8"), "{why}");
}

impl Lockable for Small {
    type Id = String;
    const COLLECTION: &'static str = "rich";
}

/// Through the manager: loads, updates by operators, lists.
#[tokio::test]
async fn a_document_with_odd_text_is_loaded_updated_and_deleted() {
    let site = Site::new().await;
    site.app.locks.register::<Small>().await.unwrap();
    let stored = |n: i64| odd(&[id(), ("n", n.into()), ("x", NOT_UTF8.into()), ("x", 2.into())]);
    site.put(&stored(1)).await;
    let guard = site.app.locks.acquire(&key(), Wait::no()).await.unwrap();
    assert_eq!(guard.load::<Small>().await.unwrap().n, 1);
    let now: Small =
        site.app.store.update(&guard.held(), doc! { "$inc": { "n": 1_i64 } }).await.unwrap();
    assert_eq!((now.n, site.get().await), (2, stored(2)));
    assert_eq!(guard.update(|it: &mut Small| it.n = 3).await.unwrap().n, 3);
    assert_eq!(site.get().await, stored(3));
    guard.delete().await.unwrap();
    assert_eq!(site.documents.count_documents(doc! {}).await.unwrap(), 0);
    drop(site.server);
}

/// A flattened entry that is named like a field.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Flattened {
    #[serde(rename = "_id")]
    id: String,
    title: String,
    inner: Within,
    #[serde(flatten)]
    more: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Within {
    n: i64,
    #[serde(flatten)]
    more: BTreeMap<String, i64>,
}

impl Lockable for Flattened {
    type Id = String;
    const COLLECTION: &'static str = "flattened";
}

async fn refuses_names_twice<S: Store + Clone>(store: S) {
    let locks =
        LockManager::builder(store.clone()).ttl(TTL).without_reaper().build().await.unwrap();
    locks.register::<Flattened>().await.unwrap();
    let document = |id: &str| Flattened {
        id: id.to_owned(),
        title: "real".to_owned(),
        inner: Within { n: 1, more: BTreeMap::new() },
        more: BTreeMap::new(),
    };
    let at_the_top =
        |it: &mut Flattened| drop(it.more.insert("title".to_owned(), "other".to_owned()));
    let of_the_id = |it: &mut Flattened| drop(it.more.insert("_id".to_owned(), "other".to_owned()));
    let below = |it: &mut Flattened| it.inner.more.extend([("n".to_owned(), 2)]);
    type Change = (&'static str, fn(&mut Flattened));
    let twice: [Change; 3] = [("`title`", at_the_top), ("`_id`", of_the_id), ("`inner.n`", below)];
    let is_refused = |done: Result<(), LockError>, name: &str| match done {
        Err(LockError::Document { source, .. }) => {
            assert!(source.to_string().contains(name), "{source}");
        }
        other => panic!("{name}: {other:?}"),
    };
    for (n, (name, change)) in twice.into_iter().enumerate() {
        let id = format!("new {n}");
        let key = LockKey::of::<Flattened>(id.clone()).unwrap();
        let guard = locks.acquire(&key, Wait::no()).await.unwrap();
        let mut new = document(&id);
        change(&mut new);
        is_refused(guard.create(&new).await, name);
        guard.create(&document(&id)).await.unwrap();
        is_refused(guard.update(change).await.map(drop), name);
        assert_eq!(guard.load::<Flattened>().await.unwrap().title, "real");
        let loaded = store.load(guard.key(), Deadline::NONE).await.unwrap().unwrap();
        let original = Original::new(loaded, &document(&id)).unwrap();
        assert!(original.replacement(&new).unwrap_err().to_string().contains(name));
        assert!(original.changes_to(&new).unwrap_err().to_string().contains(name));
        guard.delete().await.unwrap();
    }
}

#[tokio::test]
async fn an_entry_that_is_named_like_a_field_is_refused() {
    refuses_names_twice(MemoryStore::new()).await;
    refuses_names_twice(on_mongo().await.store().clone()).await;
}

macro_rules! on_both_stores {
    ($(#[$doc:meta])* async fn $name:ident($shop:ident) $body:block) => {
        $(#[$doc])*
        #[tokio::test]
        async fn $name() {
            async fn case($shop: &impl Shop) $body
            case(&MemoryStore::new()).await;
            case(&on_mongo().await).await;
        }
    };
}

fn names(document: &Document) -> Vec<&str> {
    document.keys().map(String::as_str).collect()
}

on_both_stores! {
    async fn a_new_order_of_a_map_is_stored(shop) {
        #[derive(Serialize, Deserialize)]
        struct Ordered {
            #[serde(rename = "_id")] id: String,
            map: IndexMap<String, i64>,
            rows: Vec<Document>,
        }
        let stored = doc! {
            "_id": "a",
            "map": { "a": 1_i64, "b": 2_i64, "c": 3_i64 },
            "rows": [{ "x": 1, "y": 2 }],
        };
        let map = async |change: fn(&mut IndexMap<String, i64>)| {
            match save(shop, &stored, &stored, |it: &mut Ordered| change(&mut it.map)).await {
                Became::Saved(saved) => names(saved.get_document("map").unwrap()).join(""),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(map(|map| map.reverse()).await, "cba");
        assert_eq!(map(|map| map.swap_indices(0, 1)).await, "bac");
        assert_eq!(map(|map| { map.shift_insert(1, "n".to_owned(), 5); }).await, "anbc");
        // The server orders new members by name.
        assert_eq!(map(|map| map.extend([("z", 1), ("m", 2), ("k", 3)].map(|(name, n)| (name.to_owned(), n)))).await, "abczmk");
        assert_eq!(map(|map| { map.swap_remove("a"); map.insert("d".to_owned(), 4); }).await, "cbd");
        let became = save(shop, &stored, &stored, |it: &mut Ordered| {
            let row = &mut it.rows[0];
            let x = row.remove("x").unwrap();
            row.insert("x", x);
        });
        let Became::Saved(saved) = became.await else { panic!() };
        assert_eq!(names(saved.get_array("rows").unwrap()[0].as_document().unwrap()), ["y", "x"]);
    }
}

on_both_stores! {
    async fn a_new_order_is_stored_although_the_type_refuses_other_orders(shop) {
        /// Wants `key` first.
        fn keyed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IndexMap<String, i64>, D::Error> {
            let map = IndexMap::<String, i64>::deserialize(deserializer)?;
            match map.first() {
                Some((first, _)) if first != "key" => Err(serde::de::Error::custom("key must be first")),
                _ => Ok(map),
            }
        }
        #[derive(Serialize, Deserialize)]
        struct Table {
            #[serde(rename = "_id")] id: String,
            #[serde(deserialize_with = "keyed")] columns: IndexMap<String, i64>,
            other: IndexMap<String, i64>,
        }
        let stored = doc! {
            "_id": "a",
            "columns": { "key": 1_i64, "x": 2_i64, "y": 3_i64 },
            "other": { "x": 2_i64, "y": 3_i64 },
        };
        let became = save(shop, &stored, &stored, |it: &mut Table| {
            it.columns.swap_indices(1, 2);
            it.other.reverse();
        });
        let Became::Saved(saved) = became.await else { panic!() };
        assert_eq!(names(saved.get_document("columns").unwrap()), ["key", "y", "x"]);
        assert_eq!(names(saved.get_document("other").unwrap()), ["y", "x"]);
    }
}

on_both_stores! {
    async fn a_new_order_within_an_array_that_another_program_has_changed_is_refused(shop) {
        #[derive(Serialize, Deserialize)]
        struct Listed { #[serde(rename = "_id")] id: String, list: Vec<Document> }
        let stored = doc! { "_id": "a", "list": [{ "x": 1, "y": 2 }] };
        let now = doc! { "_id": "a", "list": [{ "x": 5, "y": 6 }, { "x": 1, "y": 2 }] };
        let became = save(shop, &stored, &now, |it: &mut Listed| {
            let x = it.list[0].remove("x").unwrap();
            it.list[0].insert("x", x);
        });
        assert_eq!(became.await, Became::Changed("list".to_owned()));
    }
}

on_both_stores! {
    async fn a_new_order_is_stored_with_the_members_that_the_type_does_not_name_and_the_changes_of_others(shop) {
        #[derive(Serialize, Deserialize)]
        struct Flat { #[serde(rename = "_id")] id: String, title: String, #[serde(flatten)] map: IndexMap<String, i64> }
        #[derive(Serialize, Deserialize)]
        struct Outer { #[serde(rename = "_id")] id: String, inner: Flat }
        let flat = |more: Document| {
            let mut flat = doc! { "_id": "a", "title": "t", "a": 1_i64, "b": 2_i64 };
            flat.extend(more);
            flat
        };
        let stored = flat(doc! {});
        let Became::Saved(saved) =
            save(shop, &stored, &stored, |it: &mut Flat| it.map.reverse()).await else { panic!() };
        assert_eq!(names(&saved), ["_id", "title", "b", "a"]);
        let outer = |inner: Document| doc! { "_id": "a", "inner": inner };
        let (stored, now) = (outer(stored), outer(flat(doc! { "theirs": 3_i64 })));
        let Became::Saved(saved) =
            save(shop, &stored, &now, |it: &mut Outer| it.inner.map.reverse()).await else { panic!() };
        let inner = saved.get_document("inner").unwrap();
        assert_eq!(names(inner), ["_id", "title", "b", "a", "theirs"]);
    }
}

/// The order is the type's own business.
#[tokio::test]
async fn a_hash_map_a_sorted_map_and_a_struct_do_not_write_for_their_order() {
    #[derive(Serialize, Deserialize)]
    struct Maps {
        #[serde(rename = "_id")]
        id: String,
        hashed: HashMap<String, i64>,
        pair: HashMap<String, i64>,
        sorted: BTreeMap<String, i64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        middle: Option<i64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        last: Option<i64>,
    }
    let members =
        || ["k", "z", "a", "m"].into_iter().map(|name| (name.to_owned(), Bson::from(1_i64)));
    let stored = doc! {
        "_id": "a",
        "hashed": members().collect::<Document>(),
        "pair": { "z": 1_i64, "a": 1_i64 },
        "sorted": members().collect::<Document>(),
    };
    let loaded = StoredDocument::encode(Format::Bson, &stored).unwrap();
    let mut it: Maps = loaded.decode().unwrap();
    let original = Original::new(loaded.clone(), &it).unwrap();
    for _ in 0..200 {
        // A new map has a new order.
        it.hashed = it.hashed.into_iter().collect();
        it.pair = it.pair.into_iter().collect();
        assert!(original.changes_to(&it).unwrap().is_empty());
    }
    (it.middle, it.last) = (Some(1), Some(2));
    it.sorted.insert("b".to_owned(), 2);
    it.sorted.insert("c".to_owned(), 3);
    let saved: Document =
        original.changes_to(&it).unwrap().apply(&loaded).unwrap().decode().unwrap();
    assert_eq!(names(saved.get_document("sorted").unwrap()), ["k", "z", "a", "m", "b", "c"]);
    assert_eq!(names(saved.get_document("hashed").unwrap()), ["k", "z", "a", "m"]);
}

thread_local! {
    static READ: Cell<usize> = const { Cell::new(0) };
}

/// Counts how often a document is read.
fn counted<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    READ.set(READ.get() + 1);
    String::deserialize(deserializer)
}

#[derive(Serialize, Deserialize)]
struct Renamed {
    #[serde(rename = "_id", deserialize_with = "counted")]
    id: String,
    map: BTreeMap<String, Entry>,
    #[serde(default)]
    rows: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    #[serde(alias = "quantity")]
    n: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// How often the type reads the document to save this change.
fn reads_of(size: usize, change: impl Fn(usize, &mut Entry)) -> (usize, Renamed) {
    let entry = |n: usize| match n % 3 {
        0 => doc! { "quantity": n as i64, "of": n as i64 },
        1 => doc! { "quantity": n as i64, "text": "t" },
        // A name of its own in each of these.
        _ => doc! { "quantity": n as i64, format!("of {n}"): 1 },
    };
    let map: Document = (0..size).map(|n| (format!("key {n}"), entry(n).into())).collect();
    let stored = doc! { "_id": "a", "map": map, "rows": (0..size).map(entry).collect::<Vec<_>>() };
    let loaded = StoredDocument::encode(Format::Bson, &stored).unwrap();
    let mut it: Renamed = loaded.decode().unwrap();
    let original = Original::new(loaded.clone(), &it).unwrap();
    it.map.values_mut().enumerate().for_each(|(n, it)| change(n, it));
    it.rows.iter_mut().enumerate().for_each(|(n, it)| change(n, it));
    READ.set(0);
    let changes = original.changes_to(&it).unwrap();
    let reads = READ.get();
    let saved: Renamed = changes.apply(&loaded).unwrap().decode().unwrap();
    let stored: Document = changes.apply(&loaded).unwrap().decode().unwrap();
    let old = (stored.get_array("rows").unwrap().iter()).zip(0_i64..).all(|(row, n)| {
        let row = row.as_document().unwrap();
        n % 3 != 0 || row.get_i64("of").is_ok_and(|of| of == n)
    });
    assert!(old, "a row lost its field");
    (reads, saved)
}

#[test]
fn an_alias_is_found_once_for_a_member_and_not_once_for_each_key() {
    let all = |n: usize, it: &mut Entry| it.n = n as i64 + 10_000;
    let (few, _) = reads_of(20, all);
    let (many, saved) = reads_of(2_000, all);
    assert!(saved.map.values().chain(&saved.rows).all(|it| it.n >= 10_000));
    assert!(many <= 150, "{many} reads for 2 000 entries, {few} for 20");
    let (one, _) = reads_of(2_000, |n, it| it.n += i64::from(n == 1_500));
    assert!(one <= 150, "{one} reads for one entry of 2 000");
}

fn values() -> impl Strategy<Value = Odd> {
    let leaf = prop_oneof![
        (0..3_i32).prop_map(Odd::from),
        Just(Odd::from(NOT_UTF8)),
        Just(Odd::from("text")),
        Just(Odd::from(f64::NAN)),
        Just(Odd::from(Bson::Null)),
    ];
    leaf.prop_recursive(2, 6, 3, |inner| {
        prop_oneof![
            others(inner.clone(), 0..3).prop_map(Odd::Members),
            vec(inner, 0..3).prop_map(Odd::Elements),
        ]
    })
}

/// Members that the type does not name, some of them with the same name.
fn others(
    values: impl Strategy<Value = Odd>,
    count: std::ops::Range<usize>,
) -> impl Strategy<Value = Vec<(&'static str, Odd)>> {
    vec((select(vec!["x", "y", "a.b", "$z", "", NOT_UTF8]), values), count)
}

/// A document with these members around the known ones.
fn around(others: &[(&'static str, Odd)], at: usize, n: i64, row: i64) -> RawDocumentBuf {
    let row = [&[("n", Odd::from(row))], others].concat();
    let rows = Odd::Elements(vec![Odd::Members(row)]);
    let mut members = vec![id()];
    members.extend(others.iter().filter(|(name, _)| !name.starts_with('$')).cloned());
    let at = 1 + at % members.len();
    members.insert(at, ("n", n.into()));
    members.push(("rows", rows));
    odd(&members)
}

fn apply(
    loaded: &RawDocumentBuf,
    now: &RawDocumentBuf,
    n: i64,
    row: i64,
) -> Result<Vec<u8>, String> {
    let stored =
        |it: &RawDocumentBuf| StoredDocument::from_bytes(Format::Bson, it.as_bytes().to_vec());
    let loaded = stored(loaded);
    let mut it: Small = loaded.decode().map_err(|e| e.to_string())?;
    let original = Original::new(loaded, &it).map_err(|e| e.to_string())?;
    (it.n, it.rows[0].n) = (n, row);
    let changes = original.changes_to(&it).map_err(|e| e.to_string())?;
    Ok(changes.apply(&stored(now))?.as_bytes().to_vec())
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn a_save_of_an_odd_document_changes_what_the_type_has_changed_and_no_other_byte(
        mine in others(values(), 0..6), theirs in others(values(), 0..6), at in 0..7_usize, n in 0..3_i64, row in 0..3_i64,
    ) {
        let loaded = around(&mine, at, 0, 0);
        let saved = apply(&loaded, &loaded, n, row).unwrap();
        assert_eq!(saved, around(&mine, at, n, row).into_bytes());
        // Another program has changed the rest, and the array, too.
        let now = around(&theirs, at, 0, 0);
        match apply(&loaded, &now, n, row) {
            Ok(saved) => assert_eq!(saved, around(&theirs, at, n, row).into_bytes()),
            Err(field) => assert!(row != 0 && field == "rows", "{field}"),
        }
    }
}

/// As above, on a server, which must not stop.
#[test]
fn a_save_of_an_odd_document_on_mongodb_changes_no_other_byte_and_stops_no_server() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let site = runtime.block_on(Site::new());
    let mut runner = TestRunner::new(cases(60));
    let all = (others(values(), 0..6), 0..7_usize, 0..3_i64, 0..3_i64);
    let ran = runner.run(&all, |(others, at, n, row)| {
        let stored = around(&others, at, 0, 0);
        let saved =
            runtime.block_on(site.save(&stored, |it: &mut Small| (it.n, it.rows[0].n) = (n, row)));
        assert_eq!(saved.unwrap(), around(&others, at, n, row));
        Ok(())
    });
    ran.unwrap();
}

/// A map whose type reads the names in another form has no aliases.
#[test]
fn a_map_whose_names_are_read_in_another_form_is_not_searched_for_aliases() {
    fn lower<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<String, i64>, D::Error> {
        let map = BTreeMap::<String, i64>::deserialize(deserializer)?;
        let mut lower = BTreeMap::new();
        for (name, n) in map {
            if lower.insert(name.to_lowercase(), n).is_some() {
                return Err(serde::de::Error::custom("twice"));
            }
        }
        Ok(lower)
    }
    #[derive(Serialize, Deserialize)]
    struct Lower {
        #[serde(rename = "_id", deserialize_with = "counted")]
        id: String,
        #[serde(deserialize_with = "lower")]
        map: BTreeMap<String, i64>,
    }
    let map: Document = (0..2_000).map(|n| (format!("K{n}"), Bson::Int64(n))).collect();
    let stored = doc! { "_id": "a", "map": map };
    let loaded = StoredDocument::encode(Format::Bson, &stored).unwrap();
    let mut it: Lower = loaded.decode().unwrap();
    let original = Original::new(loaded, &it).unwrap();
    it.map.values_mut().for_each(|n| *n += 1);
    READ.set(0);
    assert!(original.changes_to(&it).is_err(), "each entry would stand twice");
    assert!(READ.get() < 10, "{} reads", READ.get());
}

/// Not in time that grows with the square of the repetitions.
#[test]
fn a_name_may_stand_many_times() {
    let mut members = vec![id(), ("n", 1_i64.into())];
    members.extend(vec![("x", Odd::from(1)); 50_000]);
    let loaded = StoredDocument::from_bytes(Format::Bson, odd(&members).into_bytes());
    let mut it: Small = loaded.decode().unwrap();
    let original = Original::new(loaded.clone(), &it).unwrap();
    it.n = 2;
    let saved = original.changes_to(&it).unwrap().apply(&loaded).unwrap();
    assert_eq!(saved.as_bytes().len(), loaded.as_bytes().len());
}

/// A document that takes long to read, by a thread that waits until `READING` is received from.
mod slow {
    use std::sync::mpsc::Receiver;

    use parking_lot::Mutex;

    use super::*;

    pub(super) static GATE: Mutex<Option<Receiver<()>>> = Mutex::new(None);

    #[derive(Debug, Clone, Serialize, Deserialize)]
    pub(super) struct Slow {
        #[serde(rename = "_id")]
        pub(super) id: String,
        #[serde(deserialize_with = "waits")]
        pub(super) text: String,
        pub(super) n: i64,
    }

    impl Lockable for Slow {
        type Id = String;
        const COLLECTION: &'static str = "slow";
    }

    fn waits<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
        if let Some(gate) = GATE.lock().take() {
            let opened = gate.recv_timeout(std::time::Duration::from_secs(60));
            opened.map_err(|_| serde::de::Error::custom("nobody else could run"))?;
        }
        String::deserialize(deserializer)
    }
}

/// The thread that serves requests goes on meanwhile; and what takes longer than the deadline says so itself.
#[tokio::test(flavor = "current_thread")]
async fn a_large_document_is_compared_by_another_thread_and_in_time_or_not_at_all() {
    use slow::{GATE, Slow};
    let store = MemoryStore::new();
    let deadline = std::time::Duration::from_secs(2);
    let locks =
        LockManager::builder(store.clone()).ttl(TTL).deadline(deadline).build().await.unwrap();
    locks.register::<Slow>().await.unwrap();
    let text = "x".repeat(100_000);
    store.put("a".to_owned(), &Slow { id: "a".to_owned(), text, n: 1 }).unwrap();
    let key = LockKey::of::<Slow>("a".to_owned()).unwrap();
    let guard = locks.acquire(&key, Wait::no()).await.unwrap();
    for is_late in [false, true] {
        let (open, gate) = std::sync::mpsc::channel();
        let opens = tokio::spawn(async move {
            if is_late {
                tokio::time::sleep(deadline * 2).await;
            }
            open.send(())
        });
        let saved = guard.update(|it: &mut Slow| {
            it.n += 1;
            // From now on, the type is read to compare the versions.
            *GATE.lock() = Some(gate);
        });
        let saved = saved.await;
        assert!(!is_late || !opens.is_finished(), "the answer comes at the deadline");
        opens.await.unwrap().unwrap();
        match saved {
            Ok(saved) => assert!(!is_late && saved.n == 2),
            Err(error) => {
                assert!(is_late && matches!(error, LockError::TooSlow { .. }), "{error:?}")
            }
        }
    }
    assert_eq!(guard.load::<Slow>().await.unwrap().n, 2, "nothing was written");
}

#[tokio::test]
async fn the_embedded_store_keeps_floats_exactly() {
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Number {
        #[serde(rename = "_id")]
        id: String,
        n: f64,
        m: f64,
    }
    impl Lockable for Number {
        type Id = String;
        const COLLECTION: &'static str = "number";
    }
    let locks = LockManager::builder(MemoryStore::new()).ttl(TTL).build().await.unwrap();
    locks.register::<Number>().await.unwrap();
    let key = LockKey::of::<Number>("a".to_owned()).unwrap();
    let guard = locks.acquire(&key, Wait::no()).await.unwrap();
    guard.create(&Number { id: "a".to_owned(), n: 0.0, m: 1.0 }).await.unwrap();
    let hard = [0.1 + 0.2, 51.24817837550540_4, 93.3108016238_2804, 1e300 / 3.0, 5e-324, -0.0, 0.0];
    for n in hard {
        let stored = guard.update(|it: &mut Number| it.n = n).await.unwrap();
        assert_eq!(stored.n.to_bits(), n.to_bits());
        assert_eq!(guard.load::<Number>().await.unwrap().n.to_bits(), n.to_bits());
    }
}

/// What was stored may differ from what the caller has made of the document: another program has changed it, too.
#[tokio::test]
async fn an_update_returns_the_document_that_was_stored() {
    let store = MemoryStore::new();
    let locks = LockManager::builder(store.clone()).ttl(TTL).build().await.unwrap();
    locks.register::<Small>().await.unwrap();
    let document = |n, new: Option<&str>| Small {
        id: "a".to_owned(),
        n,
        new: new.map(str::to_owned),
        rows: Vec::new(),
    };
    store.put("a".to_owned(), &document(1, None)).unwrap();
    let guard = locks.acquire(&key(), Wait::no()).await.unwrap();
    let stored = guard.update(|it: &mut Small| {
        store.put("a".to_owned(), &document(1, Some("theirs"))).unwrap();
        it.n = 2;
    });
    let stored = stored.await.unwrap();
    assert_eq!((stored.n, stored.new.as_deref()), (2, Some("theirs")));
}

/// Comparisons that nobody waits for any more would go before those of later saves.
#[tokio::test(flavor = "current_thread")]
async fn no_more_comparisons_begin_than_there_are_processors_and_small_documents_do_not_wait() {
    use std::{
        sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
        thread,
        time::Duration,
    };
    static IS_CLOSED: AtomicBool = AtomicBool::new(true);
    static BEGUN: AtomicUsize = AtomicUsize::new(0);
    #[derive(Debug, Serialize, Deserialize)]
    struct Page {
        #[serde(rename = "_id")]
        id: i32,
        #[serde(deserialize_with = "waits")]
        is_changed: bool,
        text: String,
    }
    impl Lockable for Page {
        type Id = i32;
        const COLLECTION: &'static str = "page";
    }
    // Only the comparison reads the changed version.
    fn waits<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
        let is_changed = bool::deserialize(deserializer)?;
        BEGUN.fetch_add(is_changed.into(), Relaxed);
        let began = Instant::now();
        while is_changed && IS_CLOSED.load(Relaxed) && began.elapsed().as_secs() < 60 {
            thread::sleep(Duration::from_millis(5));
        }
        Ok(is_changed)
    }

    let store = MemoryStore::new();
    let deadline = Duration::from_secs(1);
    let locks =
        LockManager::builder(store.clone()).ttl(TTL).deadline(deadline).build().await.unwrap();
    locks.register::<Page>().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    store.put("small".to_owned(), &WorkItem { id: "small".into(), title: "old".into() }).unwrap();
    let places = thread::available_parallelism().unwrap().get().max(2);
    let edited = async |id: i32| {
        store.put(id, &Page { id, is_changed: false, text: "x".repeat(100_000) }).unwrap();
        let guard = locks.acquire(&LockKey::of::<Page>(id).unwrap(), Wait::no()).await.unwrap();
        guard.update(|it: &mut Page| it.is_changed = true).await.unwrap_err()
    };
    let errors = futures_util::future::join_all((0..).take(places + 8).map(edited)).await;
    let late = errors.iter().filter(|it| matches!(it, LockError::TooSlow { .. })).count();
    let refused = |it: &&LockError| matches!(it, LockError::Store(e) if e.kind() == StoreErrorKind::Overloaded);
    assert_eq!((late, errors.iter().filter(refused).count()), (places, 8), "{errors:?}");
    let small = LockKey::of::<WorkItem>("small".to_owned()).unwrap();
    let small = locks.acquire(&small, Wait::no()).await.unwrap();
    small.update(|it: &mut WorkItem| it.title = "new".into()).await.unwrap();
    assert_eq!(BEGUN.load(Relaxed), places);
    IS_CLOSED.store(false, Relaxed);
}
