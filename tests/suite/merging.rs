//! A guarded save writes what it was given, loses nothing that nobody deleted, and never makes a document that its
//! own type cannot read; or it is refused and changes nothing. On both stores, with types that know their
//! documents in every way that serde allows, and with other programs that write at the same moment.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::Instant,
};

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, BoxError, Holder, Lock, LockError, LockKey, LockToken, Lockable, MemoryStore, Mode, Wait,
    store::{Acquisition, Claim, Format, Original, Rules, Saved, Store, StoredDocument},
};
use mongodb::{
    Database,
    bson::{Bson, Document, RawDocumentBuf, doc},
};
use proptest::{collection::vec, prelude::*, sample::select};
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use tokio::runtime::Runtime;

use crate::properties::cases;
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

fn small() -> impl Strategy<Value = i64> {
    0..4_i64
}

fn people() -> impl Strategy<Value = Person> {
    (text(), text()).prop_map(|(first, last)| Person { first, last })
}

fn lines() -> impl Strategy<Value = Vec<Line>> {
    let line = (small(), vec(text(), 0..3), proptest::option::of(people()));
    let lines = vec((0..6_i64, line), 0..5);
    lines.prop_map(|lines| {
        let lines: BTreeMap<_, _> = lines.into_iter().collect();
        let line = |(id, (qty, colors, maker))| Line { id, qty, colors, maker };
        lines.into_iter().map(line).collect()
    })
}

fn by_name() -> impl Strategy<Value = BTreeMap<String, Entry>> {
    let name = select(vec!["a", "b", "0", "a.b", "$set", ""]).prop_map(str::to_owned);
    let entry = (small(), text()).prop_map(|(n, text)| Entry { n, text });
    proptest::collection::btree_map(name, entry, 0..4)
}

fn riches() -> impl Strategy<Value = Rich> {
    let state = prop_oneof![
        Just(State::Draft),
        (text(), small()).prop_map(|(by, days)| State::Review { by, days }),
        people().prop_map(State::Done),
        small().prop_map(State::Number),
    ];
    let shape = prop_oneof![
        small().prop_map(|radius| Shape::Circle { radius }),
        (small(), small(), proptest::option::of(small()))
            .prop_map(|(width, height, radius)| Shape::Box { width, height, radius }),
    ];
    let event = prop_oneof![
        Just(Event::None),
        (small(), small()).prop_map(|(x, y)| Event::Moved { x, y }),
        text().prop_map(Event::Said),
    ];
    let either = prop_oneof![
        (text(), small()).prop_map(|(text, n)| Either::Long { text, n }),
        small().prop_map(|n| Either::Short { n }),
    ];
    let note = (text(), small()).prop_map(|(text, stars)| Note { text, stars });
    let settings = (small(), text()).prop_map(|(left, right)| Settings { left, right });
    let flat = (small(), text()).prop_map(|(flat_left, flat_right)| Flat { flat_left, flat_right });
    let tags = proptest::collection::hash_set(text(), 0..4);
    let parts = (note, settings, proptest::option::of(people()), flat, tags);
    let enums = (state, shape, event, either);
    (text(), small(), parts, enums, lines(), by_name()).prop_map(
        |(title, count, parts, enums, lines, by_name)| {
            let (note, settings, owner, flat, tags) = parts;
            let (state, shape, event, either) = enums;
            let id = "a".to_owned();
            Rich {
                id,
                title,
                count,
                note,
                settings,
                owner,
                state,
                shape,
                event,
                either,
                lines,
                by_name,
                tags,
                flat,
            }
        },
    )
}

/// How a stored document differs from what the type writes.
#[derive(Debug, Clone)]
struct Oddities {
    /// Numbers are `i32`, as another driver stores them.
    small_numbers: bool,
    /// Old names, read by aliases.
    old_names: bool,
    /// Fields with a default that are not stored, or are null.
    missing: Vec<&'static str>,
    null_note: bool,
    /// A field that the type does not know in each document.
    strangers: bool,
}

fn oddities() -> impl Strategy<Value = Oddities> {
    let optional = vec!["n", "note", "settings", "state", "lines", "by_name", "tags", "flat_right"];
    let missing = proptest::sample::subsequence(optional, 0..4);
    (any::<bool>(), any::<bool>(), missing, any::<bool>(), any::<bool>()).prop_map(
        |(small_numbers, old_names, missing, null_note, strangers)| Oddities {
            small_numbers,
            old_names,
            missing,
            null_note,
            strangers,
        },
    )
}

const STRANGER: &str = "x_stranger";

fn stored_as(rich: &Rich, odd: &Oddities) -> Document {
    let mut stored = canonical(rich);
    if odd.strangers {
        stored = add_strangers(stored);
    }
    if odd.old_names {
        rename(&mut stored, "title", "name");
        for line in stored.get_array_mut("lines").unwrap() {
            rename(line.as_document_mut().unwrap(), "qty", "quantity");
        }
    }
    for name in &odd.missing {
        stored.remove(name);
    }
    if odd.null_note {
        stored.insert("note", Bson::Null);
    }
    if odd.small_numbers { shrunk(stored.into()).as_document().unwrap().clone() } else { stored }
}

fn rename(document: &mut Document, from: &str, to: &str) {
    if let Some(value) = document.remove(from) {
        document.insert(to, value);
    }
}

fn shrunk(value: Bson) -> Bson {
    match value {
        Bson::Int64(n) => Bson::Int32(n as i32),
        Bson::Array(all) => Bson::Array(all.into_iter().map(shrunk).collect()),
        Bson::Document(all) => {
            Bson::Document(all.into_iter().map(|(name, value)| (name, shrunk(value))).collect())
        }
        other => other,
    }
}

/// Visits each document within, with a place that stays the same when arrays and enums change.
fn visit(value: &mut Bson, place: &str, visitor: &mut impl FnMut(&str, &mut Document)) {
    match value {
        Bson::Array(all) => {
            for it in all {
                let id = it.as_document().and_then(|it| it.get("id")).and_then(number);
                visit(it, &format!("{place}[{}]", id.unwrap_or_default()), visitor);
            }
        }
        Bson::Document(document) => {
            // A map and an enum with an outer tag have no members but their own.
            if !["/by_name", "/state"].contains(&place) {
                visitor(place, document);
            }
            let tag = document.get_str("t").unwrap_or_default().to_owned();
            for (name, value) in document.iter_mut() {
                let kind = value.as_document().and_then(|it| it.get_str("kind").ok());
                let variant = kind.or((name == "c").then_some(&tag)).unwrap_or_default();
                let place = format!("{place}/{name}{variant}");
                visit(value, &place, visitor);
            }
        }
        _ => {}
    }
}

fn number(value: &Bson) -> Option<i64> {
    value.as_i64().or_else(|| value.as_i32().map(Into::into))
}

/// Adds a field to each document that no type knows. Its value is its place.
fn add_strangers(document: Document) -> Document {
    let mut value = Bson::Document(document);
    visit(&mut value, "", &mut |place, it| drop(it.insert(STRANGER, place)));
    value.as_document().unwrap().clone()
}

fn places(document: &Document) -> Vec<String> {
    let mut places = Vec::new();
    visit(&mut document.clone().into(), "", &mut |place, _| places.push(place.to_owned()));
    places
}

/// The places at which there is a stranger.
fn strangers(document: &Document) -> Vec<(String, Bson)> {
    let mut found = Vec::new();
    visit(&mut document.clone().into(), "", &mut |place, it| {
        found.extend(it.get(STRANGER).map(|value| (place.to_owned(), value.clone())));
    });
    found
}

/// What another program does between the load and the save.
fn meddled(stored: &Document, how: usize) -> Document {
    let mut now = stored.clone();
    let set_within = |now: &mut Document, outer: &str, name: &str, value: Bson| {
        if let Ok(inner) = now.get_document_mut(outer) {
            inner.insert(name, value);
        }
    };
    match how {
        0 => drop(now.insert("x_new", 1)),
        1 => {
            let name = if now.contains_key("name") { "name" } else { "title" };
            now.insert(name, "theirs");
        }
        2 => {
            if let Ok(lines) = now.get_array_mut("lines") {
                lines.push(doc! { "id": 9, "qty": 1 }.into());
            }
        }
        3 => {
            if let Some(Bson::Document(line)) =
                now.get_array_mut("lines").ok().and_then(|lines| lines.first_mut())
            {
                line.insert("x_new", 1);
            }
        }
        4 => drop(now.remove("note")),
        5 => drop(now.remove("settings")),
        6 => drop(now.insert("owner", Bson::Null)),
        7 => drop(now.insert("owner", doc! { "first": "o", "last": "p", STRANGER: "/owner" })),
        8 => drop(now.insert("shape", doc! { "kind": "Circle", "radius": 7 })),
        9 => drop(now.insert("state", doc! { "Number": 5 })),
        10 => set_within(&mut now, "by_name", "z", doc! { "n": 1 }.into()),
        11 => set_within(&mut now, "settings", "left", 9.into()),
        12 => drop(now.insert("event", doc! { "t": "Moved", "c": { "x": 8, "y": 8 } })),
        13 => drop(now.insert("either", doc! { "n": 9, "text": "theirs" })),
        _ => {}
    }
    now
}

/// The three-way comparison by field. What only one side has changed is as that side has it.
fn expected(before: &Bson, mine: &Bson, theirs: &Bson) -> Bson {
    if before == mine {
        return theirs.clone();
    }
    let (Bson::Document(old), Bson::Document(mine), Bson::Document(theirs)) =
        (before, mine, theirs)
    else {
        let is_array = |it: &Bson| it.as_array().is_some();
        assert!(
            before == theirs || mine == theirs || !is_array(before),
            "an array that both changed"
        );
        return mine.clone();
    };
    let mut merged = Document::new();
    for name in mine.keys().chain(theirs.keys()) {
        let none = Bson::Undefined;
        let of = |it: &Document| it.get(name).unwrap_or(&none).clone();
        match expected(&of(old), &of(mine), &of(theirs)) {
            Bson::Undefined => {}
            value => drop(merged.insert(name, value)),
        }
    }
    merged.into()
}

/// With sorted members.
fn normal(value: &Bson) -> String {
    match value {
        Bson::Document(it) => {
            let members: BTreeMap<_, _> = it.iter().map(|(name, it)| (name, normal(it))).collect();
            format!("{members:?}")
        }
        Bson::Array(all) => format!("{:?}", all.iter().map(normal).collect::<Vec<_>>()),
        other => other.to_string(),
    }
}

/// The top-level fields that differ.
fn touched(a: &Document, b: &Document) -> Vec<String> {
    let names: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    let differ = |name: &&&String| a.get(name).map(normal) != b.get(name).map(normal);
    names.iter().filter(differ).map(|name| (**name).clone()).collect()
}

async fn check(shop: &impl Shop, before: &Rich, after: &Rich, odd: &Oddities, meddling: usize) {
    let stored = stored_as(before, odd);
    let now = meddled(&stored, meddling);
    let read_before: Rich = read(&stored).unwrap();
    let became = save::<Rich>(shop, &stored, &now, |it| *it = after.clone()).await;
    let theirs = read::<Rich>(&now);
    let (old, mine) = (canonical(&read_before), canonical(&after));
    let saved = match became {
        Became::Saved(saved) => saved,
        refused => {
            let both: Vec<_> = touched(&stored, &now);
            let is_shared = touched(&old, &mine).iter().any(|name| both.contains(name));
            let is_renamed = odd.old_names && stored != now;
            assert!(is_shared || is_renamed, "{refused:?} without a reason: {stored} {now} {mine}");
            return;
        }
    };
    let is: Rich = read(&saved).unwrap_or_else(|e| panic!("nobody can read {saved}: {e}"));
    let theirs = canonical(&theirs.unwrap());
    let should = expected(&old.clone().into(), &mine.clone().into(), &theirs.into());
    assert_eq!(normal(&canonical(&is).into()), normal(&should), "{stored} {now} {mine} {saved}");
    let (known, kept, here) = (places(&old), places(&mine), strangers(&saved));
    for (place, value) in strangers(&now) {
        let is_deleted = known.contains(&place) && !kept.contains(&place);
        let stays = here.contains(&(place.clone(), value));
        assert!(is_deleted || stays, "{place} lost its stranger: {stored} {now} {mine} {saved}");
    }
}

/// A change of some fields only, so that the others are left to other programs.
fn partly(before: &Rich, after: &Rich, which: u16) -> Rich {
    let (before, after) = (canonical(before), canonical(after));
    let names = before.keys().chain(after.keys()).collect::<BTreeSet<_>>();
    let chosen = names.into_iter().enumerate().filter_map(|(n, name)| {
        let from = if which >> (n % 16) & 1 == 1 { &after } else { &before };
        Some((name.clone(), from.get(name)?.clone()))
    });
    read(&chosen.collect()).unwrap()
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn a_save_in_memory_merges_field_by_field_or_changes_nothing(
        before in riches(), after in riches(), which in any::<u16>(), odd in oddities(), how in 0..20_usize,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let read_before = read(&stored_as(&before, &odd)).unwrap();
            let after = partly(&read_before, &after, which);
            check(&MemoryStore::new(), &before, &after, &odd, how).await;
        });
    }

}

proptest! {
    #![proptest_config(cases(80))]

    #[test]
    fn a_save_on_mongodb_merges_field_by_field_or_changes_nothing(
        before in riches(), after in riches(), which in any::<u16>(), odd in oddities(), how in 0..20_usize,
    ) {
        static RUNTIME: std::sync::OnceLock<(Runtime, OnMongo)> = std::sync::OnceLock::new();
        let (runtime, shop) = RUNTIME.get_or_init(|| {
            let runtime = Runtime::new().unwrap();
            let shop = runtime.block_on(on_mongo());
            (runtime, shop)
        });
        runtime.block_on(async {
            let read_before = read(&stored_as(&before, &odd)).unwrap();
            let after = partly(&read_before, &after, which);
            check(shop, &before, &after, &odd, how).await;
        });
    }
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

type Map = HashMap<String, i64>;

on_both_stores! {
    async fn odd_names_in_a_map_that_is_not_stored_are_written_with_all_other_fields(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, title: String, #[serde(default)] map: Map }
        for name in ["a.b", "$a", ""] {
            let stored = doc! { "_id": "a", "title": "old" };
            let became = save(shop, &stored, &stored, |it: &mut It| {
                it.title = "new".to_owned();
                it.map.insert(name.to_owned(), 1);
            });
            let Became::Saved(saved) = became.await else { panic!("{name}") };
            let map: Map = read::<It>(&saved).unwrap().map;
            assert_eq!((saved.get_str("title").unwrap(), map.get(name)), ("new", Some(&1)));
        }
    }
}

on_both_stores! {
    async fn odd_names_at_the_top_level_are_written(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, #[serde(flatten)] map: Map }
        for name in ["a.b", "0"] {
            let stored = doc! { "_id": "a", "b": 1 };
            let became = save(shop, &stored, &stored, |it: &mut It| it.map.extend([(name.to_owned(), 1)]));
            let Became::Saved(saved) = became.await else { panic!("{name}") };
            assert_eq!(read::<It>(&saved).unwrap().map.len(), 2);
        }
    }
}

on_both_stores! {
    async fn a_struct_with_a_default_is_stored_as_a_whole_the_first_time(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, #[serde(default)] settings: Settings }
        let stored = doc! { "_id": "a" };
        let Became::Saved(saved) =
            save(shop, &stored, &stored, |it: &mut It| it.settings.left = 5).await
        else { panic!() };
        assert_eq!(read::<It>(&saved).unwrap().settings, Settings { left: 5, right: String::new() });
    }
}

on_both_stores! {
    async fn a_field_that_is_read_by_an_alias_gets_its_new_name(shop) {
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(alias = "name")] title: String,
            #[serde(default)] n: i64,
        }
        let stored = doc! { "_id": "a", "name": "old", "stranger": 1 };
        let Became::Saved(saved) =
            save(shop, &stored, &stored, |it: &mut It| it.title = "new".to_owned()).await
        else { panic!() };
        assert_eq!(saved.get_str("title").unwrap(), "new");
        assert_eq!((saved.get("name"), saved.get_i32("stranger").unwrap()), (None, 1));
        // Another field leaves the old name alone.
        let Became::Saved(saved) = save(shop, &stored, &stored, |it: &mut It| it.n = 5).await else { panic!() };
        assert_eq!(saved.get_str("name").unwrap(), "old");
    }
}

on_both_stores! {
    async fn a_name_that_is_written_but_not_read_is_refused_once_it_changes(shop) {
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(rename(serialize = "shown", deserialize = "hidden"), default)] title: String,
            n: i64,
        }
        for stored in [doc! { "_id": "a", "hidden": "old", "n": 1 }, doc! { "_id": "a", "n": 1 }] {
            let became = save(shop, &stored, &stored, |it: &mut It| it.title = "new".to_owned()).await;
            assert!(matches!(&became, Became::Unfit(why) if why.contains("`shown`")), "{became:?}");
            let became = save(shop, &stored, &stored, |it: &mut It| it.n = 2).await;
            assert!(matches!(became, Became::Saved(_)), "{became:?}");
        }
    }
}

on_both_stores! {
    async fn null_that_is_read_as_a_default_can_be_saved(shop) {
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(default, deserialize_with = "null_is_default")] note: Note,
        }
        let stored = doc! { "_id": "a", "note": null };
        let Became::Saved(saved) = save(shop, &stored, &stored, |it: &mut It| it.note.stars = 5).await
        else { panic!() };
        assert_eq!(read::<It>(&saved).unwrap().note, Note { text: String::new(), stars: 5 });
    }
}

on_both_stores! {
    async fn elements_of_an_array_keep_what_the_type_does_not_name(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, rows: Vec<Row> }
        #[derive(Clone, Serialize, Deserialize)]
        struct Row { sku: String, n: i64 }
        let row = |sku: &str, n: i64| doc! { "sku": sku, "n": n as i32, "of": sku };
        let rows = |rows: Vec<Document>| doc! { "_id": "a", "rows": rows };
        let stored = rows(vec![row("a", 1), row("b", 1), row("c", 1)]);
        let new = || Row { sku: "d".to_owned(), n: 1 };
        let after = async |change: &dyn Fn(&mut Vec<Row>)| {
            match save(shop, &stored, &stored, |it: &mut It| change(&mut it.rows)).await {
                Became::Saved(saved) => saved
                    .get_array("rows")
                    .unwrap()
                    .iter()
                    .map(|row| {
                        let row = row.as_document().unwrap();
                        let n = number(row.get("n").unwrap()).unwrap();
                        format!("{}{n}{}", row.get_str("sku").unwrap(), row.get_str("of").unwrap_or("-"))
                    })
                    .collect::<Vec<_>>()
                    .join(" "),
                refused => panic!("{refused:?}"),
            }
        };
        assert_eq!(after(&|rows| rows[1].n = 2).await, "a1a b2b c1c");
        assert_eq!(after(&|rows| rows.push(new())).await, "a1a b1b c1c d1-");
        assert_eq!(after(&|rows| rows.insert(0, new())).await, "d1- a1a b1b c1c");
        assert_eq!(after(&|rows| drop(rows.remove(0))).await, "b1b c1c");
        assert_eq!(after(&|rows| rows.reverse()).await, "c1c b1b a1a");
        assert_eq!(after(&|rows| { rows[2].n = 3; rows.push(new()) }).await, "a1a b1b c3c d1-");
        assert_eq!(after(&|rows| { rows.remove(0); rows[1].n = 3 }).await, "b1b c3c");
        assert_eq!(after(&|rows| rows.iter_mut().for_each(|row| row.n = 7)).await, "a7a b7b c7c");
        assert_eq!(after(&|rows| rows[1].sku = "x".to_owned()).await, "a1a x1b c1c");

        let pushed = rows(vec![row("a", 1), row("b", 1), row("c", 1), row("p", 1)]);
        let became = save(shop, &stored, &pushed, |it: &mut It| it.rows[0].n = 9).await;
        assert_eq!(became, Became::Changed("rows".to_owned()));
    }
}

on_both_stores! {
    async fn a_member_is_not_written_into_a_document_that_has_gone(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, #[serde(default)] settings: Settings, n: i64 }
        let stored = doc! { "_id": "a", "settings": { "left": 1, "right": "r" }, "n": 1 };
        let gone = doc! { "_id": "a", "n": 1 };
        let became = save(shop, &stored, &gone, |it: &mut It| { it.settings.left = 5; it.n = 2 }).await;
        assert_eq!(became, Became::Changed("settings".to_owned()));
    }
}

on_both_stores! {
    async fn a_part_that_the_type_would_drop_is_not_rewritten(shop) {
        /// Reads only the even numbers.
        fn even<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<i64>, D::Error> {
            let all = Vec::<i64>::deserialize(deserializer)?;
            Ok(all.into_iter().filter(|n| n % 2 == 0).collect())
        }
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, #[serde(deserialize_with = "even")] even: Vec<i64> }
        let stored = doc! { "_id": "a", "even": [1_i64, 2_i64] };
        let became = save(shop, &stored, &stored, |it: &mut It| it.even.push(4)).await;
        assert!(matches!(&became, Became::Unfit(why) if why.contains("`even`")), "{became:?}");
    }
}

on_both_stores! {
    async fn a_value_that_is_read_in_another_form_can_be_saved(shop) {
        fn trimmed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
            Ok(String::deserialize(deserializer)?.trim().to_owned())
        }
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(default, deserialize_with = "trimmed")] title: String,
        }
        let stored = doc! { "_id": "a", "title": "old" };
        let became = save(shop, &stored, &stored, |it: &mut It| it.title = "new ".to_owned()).await;
        assert_eq!(became, Became::Saved(doc! { "_id": "a", "title": "new " }));
        let became = save(shop, &stored, &stored, |it: &mut It| it.title = "  ".to_owned()).await;
        assert_eq!(became, Became::Saved(doc! { "_id": "a", "title": "  " }));
    }
}

on_both_stores! {
    async fn changes_of_both_sides_that_together_cannot_be_read_are_refused(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, state: State }
        let stored = doc! { "_id": "a", "state": { "Number": 1_i64 } };
        let theirs = doc! { "_id": "a", "state": { "Review": { "by": "b", "days": 1_i64 } } };
        let done = State::Done(Person { first: String::new(), last: String::new() });
        let became = save(shop, &stored, &theirs, |it: &mut It| it.state = done).await;
        assert!(matches!(became, Became::Changed(_)), "{became:?}");
    }
}

on_both_stores! {
    async fn an_aliased_document_or_array_keeps_what_the_type_does_not_name(shop) {
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(alias = "addr")] address: Person,
            #[serde(alias = "items")] rows: Vec<Row>,
        }
        #[derive(Serialize, Deserialize)]
        struct Row { #[serde(alias = "quantity")] n: i64 }
        let row = |n: i64| doc! { "quantity": n, "of": n };
        let stored = doc! {
            "_id": "a",
            "addr": { "first": "f", "last": "l", "geo": 1 },
            "items": (0..70).map(row).collect::<Vec<_>>(),
            "quantity": "not an alias here",
        };
        let became = save(shop, &stored, &stored, |it: &mut It| {
            it.address.first = "g".to_owned();
            for (row, n) in it.rows.iter_mut().zip(1_000..) {
                row.n = n;
            }
        });
        let Became::Saved(saved) = became.await else { panic!() };
        assert_eq!(saved.get_document("address").unwrap(), &doc! { "first": "g", "last": "l", "geo": 1 });
        for (n, row) in saved.get_array("rows").unwrap().iter().enumerate() {
            let row = row.as_document().unwrap();
            let fields = ["n", "of"].map(|name| number(row.get(name).unwrap()).unwrap());
            assert_eq!(fields, [n as i64 + 1_000, n as i64]);
        }
        assert_eq!(saved.get_str("quantity").unwrap(), "not an alias here");
        assert_eq!((saved.get("addr"), saved.get("items")), (None, None));
        // Only one of the aliases changes.
        let Became::Saved(saved) = save(shop, &stored, &stored, |it: &mut It| it.rows[0].n = 9).await else { panic!() };
        assert_eq!(saved.get("addr"), stored.get("addr"));
    }
}

on_both_stores! {
    async fn a_sorted_set_of_documents_keeps_what_the_type_does_not_name(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, rows: BTreeSet<Row> }
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        struct Row { sku: String }
        let row = |sku: &str| doc! { "sku": sku, "of": sku };
        let stored = doc! { "_id": "a", "rows": [row("c"), row("a"), row("b")] };
        let became = save(shop, &stored, &stored, |it: &mut It| it.rows.retain(|row| row.sku != "a"));
        let Became::Saved(saved) = became.await else { panic!() };
        assert_eq!(saved.get_array("rows").unwrap(), &vec![row("b").into(), row("c").into()]);
    }
}

on_both_stores! {
    async fn many_changed_elements_keep_their_own_fields_or_the_save_is_refused(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, rows: Vec<Row> }
        #[derive(Serialize, Deserialize)]
        struct Row { #[serde(default, skip_serializing_if = "Option::is_none")] id: Option<i64>, n: i64 }
        for has_id in [true, false] {
            let row = |n: i64| match has_id {
                true => doc! { "id": n, "n": n, "of": n },
                false => doc! { "n": n, "of": n },
            };
            let stored = doc! { "_id": "a", "rows": (0..300).map(row).collect::<Vec<_>>() };
            let became = save(shop, &stored, &stored, |it: &mut It| {
                it.rows.remove(0);
                it.rows.iter_mut().for_each(|row| row.n += 1_000);
            });
            match became.await {
                Became::Saved(saved) if has_id => {
                    for row in saved.get_array("rows").unwrap() {
                        let row = row.as_document().unwrap();
                        assert_eq!(row.get("of"), row.get("id"));
                    }
                }
                Became::Unfit(why) if !has_id => assert!(why.contains("`rows`"), "{why}"),
                other => panic!("{other:?}"),
            }
        }
    }
}

on_both_stores! {
    async fn a_field_that_would_come_back_at_the_next_load_is_refused(shop) {
        fn one() -> i64 {
            1
        }
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(default = "one", skip_serializing_if = "is_zero")] n: i64,
        }
        fn is_zero(n: &i64) -> bool {
            *n == 0
        }
        let stored = doc! { "_id": "a", "n": 5_i64 };
        let became = save(shop, &stored, &stored, |it: &mut It| it.n = 0).await;
        assert!(matches!(&became, Became::Unfit(why) if why.contains("`n`")), "{became:?}");
    }
}

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

/// Nothing is compared with everything else.
#[test]
fn large_arrays_are_merged_in_linear_time() {
    let loaded = StoredDocument::encode(Format::Json, &vec_of(0)).unwrap();
    let original = Original::new(loaded, &vec_of(0)).unwrap();
    assert!(!original.changes_to(&vec_of(1)).unwrap().is_empty());
}

fn vec_of(n: i64) -> HashMap<String, Vec<i64>> {
    HashMap::from([("all".to_owned(), (n..n + 200_000).map(|it| it * 2 + n).collect())])
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
