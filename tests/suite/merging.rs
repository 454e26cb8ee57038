//! A guarded save writes what it was given, loses nothing that nobody deleted, and never makes a document that its
//! own type cannot read; or it is refused and changes nothing. On both stores, with types that know their
//! documents in every way that serde allows, and with other programs that write at the same moment.

mod property;
mod written;

use actix_doclock::store::verbs::*;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::Instant,
};

use actix_doclock::{
    Aid, BoxError, Holder, Lock, LockError, LockKey, LockToken, Lockable, MemoryStore, Mode, Wait,
    store::{Acquisition, Claim, Format, Original, Rules, Saved, Store, StoredDocument},
};

use crate::rig::random::cases;
use mongodb::{
    Database,
    bson::{Bson, Document, RawDocumentBuf, doc},
};
use proptest::{collection::vec, prelude::*, sample::select};
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use tokio::runtime::Runtime;

use crate::rig::{
    self,
    app::{App, TTL},
    mongod,
};

const COLLECTION: &str = "rich";

/// A store whose documents other programs read and write.
pub(crate) trait Shop {
    type Store: Store;
    fn store(&self) -> &Self::Store;
    async fn put(&self, document: &Document);
    async fn get(&self) -> Document;
}

#[derive(Serialize, Deserialize)]
struct Whole(Document);

impl Lockable for Whole {
    type Id = String;
    const COLLECTION: &'static str = COLLECTION;
}

impl Shop for MemoryStore {
    type Store = Self;

    fn store(&self) -> &Self {
        self
    }

    async fn put(&self, document: &Document) {
        MemoryStore::put(self, "a".to_owned(), &Whole(document.clone())).unwrap();
    }

    async fn get(&self) -> Document {
        self.all::<Whole>().unwrap().remove(0).0
    }
}

pub(crate) struct OnMongo(App, Database);

impl Shop for OnMongo {
    type Store = actix_doclock::MongoStore;

    fn store(&self) -> &Self::Store {
        &self.0.store
    }

    async fn put(&self, document: &Document) {
        let documents = self.1.collection::<Document>(COLLECTION);
        let it = doc! { "_id": "a" };
        documents.replace_one(it, document).upsert(true).await.unwrap();
    }

    async fn get(&self) -> Document {
        self.1.collection(COLLECTION).find_one(doc! {}).await.unwrap().unwrap()
    }
}

pub(crate) async fn on_mongo() -> OnMongo {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    OnMongo(App::on(&database).await, database)
}

pub(crate) fn key() -> LockKey {
    LockKey::new(COLLECTION, "a").unwrap()
}

pub(crate) async fn locked(store: &impl Store) -> Lock {
    store.prepare(COLLECTION, &Rules::new(TTL), Deadline::NONE).await.unwrap();
    let claim = Claim {
        aid: Aid::new(),
        token: LockToken::new(),
        holder: Holder::new("alice"),
        ttl: TTL,
        tab: None,
        page: None,
        taken: None,
        max_hold: None,
        mode: Mode::Exclusive,
        turn: None,
        upgrades: None,
    };
    let answer = store.try_acquire(&key(), &claim, Deadline::NONE).await.unwrap();
    LockError::unless_granted(answer).unwrap()
}

/// What became of a save.
#[derive(Debug, PartialEq)]
pub(crate) enum Became {
    Saved(Document),
    Changed(String),
    Unfit(String),
}

/// Loads `stored` as a `T`, lets another program store `now`, and saves the change.
pub(crate) async fn save<T: Serialize + DeserializeOwned>(
    shop: &impl Shop,
    stored: &Document,
    now: &Document,
    change: impl FnOnce(&mut T),
) -> Became {
    shop.put(stored).await;
    let lock = locked(shop.store()).await;
    let loaded = shop.store().load(&key(), Deadline::NONE).await.unwrap().unwrap();
    let mut value: T = loaded.decode().unwrap();
    let original = Original::new(loaded, &value).unwrap();
    change(&mut value);
    shop.put(now).await;
    let stored = shop.get().await;
    let version =
        async || shop.store().load(&key(), Deadline::NONE).await.unwrap().unwrap().version();
    let is_unchanged = version().await == original.version();
    let held = Acquisition::of(&lock).unwrap();
    let became = match original.changes_to(&value) {
        Err(why) => Became::Unfit(why.to_string()),
        Ok(changes) => {
            let until = Instant::now() + TTL;
            let edit = changes.clone().into();
            match shop.store().save(&held, &edit, Deadline::at(until)).await.unwrap() {
                Saved::Saved => {
                    if is_unchanged {
                        assert_eq!(changes.into_original().version(), version().await);
                    }
                    Became::Saved(shop.get().await)
                }
                Saved::ChangedMeanwhile(field) => Became::Changed(field),
                other => panic!("{other:?}"),
            }
        }
    };
    if !matches!(became, Became::Saved(_)) {
        assert_eq!(shop.get().await, stored, "refused, but something has changed");
    }
    let removal = actix_doclock::store::Removal::Release(&held);
    let _ = shop.store().remove_lock(removal, Deadline::NONE).await.unwrap();
    became
}

pub(crate) fn canonical(value: &impl Serialize) -> Document {
    let encoded = StoredDocument::encode(Format::Bson, value).unwrap();
    let mut document: Document = encoded.decode().unwrap();
    if let Ok(tags) = document.get_array_mut("tags") {
        tags.sort_by_key(Bson::to_string);
    }
    document
}

fn read<T: DeserializeOwned>(document: &Document) -> Result<T, BoxError> {
    StoredDocument::encode(Format::Bson, document)?.decode()
}

// The types.

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Rich {
    #[serde(rename = "_id")]
    id: String,
    #[serde(alias = "name")]
    title: String,
    #[serde(default, rename = "n")]
    count: i64,
    #[serde(default, deserialize_with = "null_is_default")]
    note: Note,
    #[serde(default)]
    settings: Settings,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<Person>,
    #[serde(default)]
    state: State,
    shape: Shape,
    event: Event,
    either: Either,
    #[serde(default)]
    lines: Vec<Line>,
    #[serde(default)]
    by_name: BTreeMap<String, Entry>,
    #[serde(default)]
    tags: HashSet<String>,
    #[serde(flatten)]
    flat: Flat,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Note {
    text: String,
    stars: i64,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Settings {
    left: i64,
    right: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Person {
    first: String,
    last: String,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
enum State {
    #[default]
    Draft,
    Review {
        by: String,
        days: i64,
    },
    Done(Person),
    Number(i64),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
enum Shape {
    Circle { radius: i64 },
    Box { width: i64, height: i64, radius: Option<i64> },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", content = "c")]
enum Event {
    None,
    Moved { x: i64, y: i64 },
    Said(String),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Either {
    Long { text: String, n: i64 },
    Short { n: i64 },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Line {
    id: i64,
    #[serde(alias = "quantity")]
    qty: i64,
    #[serde(default)]
    colors: Vec<String>,
    #[serde(default)]
    maker: Option<Person>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    n: i64,
    #[serde(default)]
    text: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Flat {
    flat_left: i64,
    #[serde(default)]
    flat_right: String,
}

fn null_is_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

// Their values.

fn text() -> impl Strategy<Value = String> {
    "[a-z]{0,2}"
}

fn number(value: &Bson) -> Option<i64> {
    value.as_i64().or_else(|| value.as_i32().map(Into::into))
}

// The cases of the past, one by one.

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
use on_both_stores;

/// With names that have a meaning in extended JSON.
#[tokio::test]
async fn documents_that_look_like_extended_json_stay_documents() {
    #[derive(Serialize, Deserialize)]
    struct It {
        #[serde(rename = "_id")]
        id: String,
        rows: Vec<Row>,
    }
    #[derive(Serialize, Deserialize)]
    struct Row {
        n: i64,
    }
    let shop = on_mongo().await;
    for odd in [
        doc! { "$oid": "507f1f77bcf86cd799439011" },
        doc! { "$oid": "no" },
        doc! { "$date": "x" },
        doc! { "$regularExpression": { "pattern": "a\0b", "options": "" } },
    ] {
        let stored =
            doc! { "_id": "a", "rows": [{ "n": 1_i64, "x": odd.clone() }], "x": odd.clone() };
        let raw = |it: &Document| RawDocumentBuf::try_from(it).unwrap();
        let documents = shop.1.collection::<RawDocumentBuf>(COLLECTION);
        documents.delete_many(doc! {}).await.unwrap();
        documents.insert_one(raw(&stored)).await.unwrap();
        let lock = locked(shop.store()).await;
        let loaded = shop.store().load(&key(), Deadline::NONE).await.unwrap().unwrap();
        let mut it: It = loaded.decode().unwrap();
        let original = Original::new(loaded, &it).unwrap();
        it.rows[0].n = 2;
        let held = Acquisition::of(&lock).unwrap();
        let changes = original.changes_to(&it).unwrap();
        let saved = shop
            .store()
            .save(&held, &changes.into(), Deadline::at(Instant::now() + TTL))
            .await
            .unwrap();
        assert_eq!(saved, Saved::Saved);
        let is = documents.find_one(doc! {}).await.unwrap().unwrap();
        let should = doc! { "_id": "a", "rows": [{ "n": 2_i64, "x": odd.clone() }], "x": odd };
        assert_eq!(is.as_bytes(), raw(&should).as_bytes());
        let removal = actix_doclock::store::Removal::Release(&held);
        let _ = shop.store().remove_lock(removal, Deadline::NONE).await.unwrap();
    }
}

/// As after a lost reply, when nobody knows whether the save was carried out.
#[tokio::test]
async fn a_save_that_is_repeated_finds_its_own_document() {
    #[derive(Serialize, Deserialize)]
    struct It {
        #[serde(rename = "_id")]
        id: String,
        #[serde(alias = "name")]
        title: String,
        tags: Vec<i64>,
    }
    let store = MemoryStore::new();
    Shop::put(&store, &doc! { "_id": "a", "name": "old", "tags": [1], "x": 1 }).await;
    let held = Acquisition::of(&locked(&store).await).unwrap();
    let loaded = store.load(&key(), Deadline::NONE).await.unwrap().unwrap();
    let mut it: It = loaded.decode().unwrap();
    let original = Original::new(loaded, &it).unwrap();
    it.title = "new".to_owned();
    it.tags.push(2);
    let edit = original.changes_to(&it).unwrap().into();
    for _ in ["carried out", "repeated"] {
        let saved = store.save(&held, &edit, Deadline::at(Instant::now() + TTL)).await.unwrap();
        assert_eq!(saved, Saved::Saved);
    }
}

#[tokio::test]
async fn a_second_save_of_the_same_value_keeps_the_changes_of_others() {
    #[derive(Serialize, Deserialize)]
    struct It {
        #[serde(rename = "_id")]
        id: String,
        title: String,
        n: i64,
    }
    let store = MemoryStore::new();
    Shop::put(&store, &doc! { "_id": "a", "title": "old", "n": 1 }).await;
    let lock = locked(&store).await;
    let held = Acquisition::of(&lock).unwrap();
    let loaded = store.load(&key(), Deadline::NONE).await.unwrap().unwrap();
    let mut it: It = loaded.decode().unwrap();
    let mut original = Original::new(loaded, &it).unwrap();
    Shop::put(&store, &doc! { "_id": "a", "title": "old", "n": 2 }).await;
    for title in ["first", "second"] {
        it.title = title.to_owned();
        let changes = original.changes_to(&it).unwrap();
        let edit = changes.clone().into();
        let saved = store.save(&held, &edit, Deadline::at(Instant::now() + TTL)).await.unwrap();
        assert_eq!(saved, Saved::Saved);
        original = changes.into_original();
        let now: It = read(&Shop::get(&store).await).unwrap();
        assert_eq!((now.title.as_str(), now.n), (title, 2));
    }
}

#[tokio::test]
async fn a_guard_says_which_part_another_program_has_changed() {
    #[derive(Debug, Serialize, Deserialize)]
    struct It {
        #[serde(rename = "_id")]
        id: String,
        tags: Vec<String>,
    }
    impl Lockable for It {
        type Id = String;
        const COLLECTION: &'static str = COLLECTION;
    }
    let store = MemoryStore::new();
    Shop::put(&store, &doc! { "_id": "a", "tags": ["x"] }).await;
    let manager = actix_doclock::LockManager::builder(store.clone()).build().await.unwrap();
    manager.register::<It>().await.unwrap();
    let guard = manager.acquire(&key(), Wait::no()).await.unwrap();
    let update = guard.update(|it: &mut It| {
        let pushed = Whole(doc! { "_id": "a", "tags": ["x", "theirs"] });
        store.put("a".to_owned(), &pushed).unwrap();
        it.tags.push("mine".to_owned());
    });
    let refused = update.await.unwrap_err();
    assert!(
        matches!(&refused, LockError::ChangedMeanwhile { field, .. } if field == "tags"),
        "{refused:?}"
    );
    assert_eq!(Shop::get(&store).await, doc! { "_id": "a", "tags": ["x", "theirs"] });
}
