//! Records that other programs write into the collections of this crate: with a name twice, or with a text that is not
//! UTF-8. None of them stops a server, holds up another record, or makes a document unlockable for ever.

use std::time::{Duration, SystemTime};

use actix_doclock::{
    Actor, Aid, Holder, Lock, LockError, LockKey, LockManager, Lockable, Released, TryAcquire, Wait,
};
use mongodb::{
    Database,
    bson::{DateTime, Document, RawDocumentBuf, doc},
};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use crate::rig::app::{TTL, WorkItem, key};
use crate::rig::faulty::Faulty;
use crate::rig::{
    self,
    mongod::{Mongod, shared_replica_set},
    odd::{NOT_UTF8, Odd, odd, within},
};

macro_rules! types {
    ($($name:ident $collection:literal { $($rule:ident)* };)*) => {$(
        #[derive(Serialize, Deserialize)]
        struct $name {
            #[serde(rename = "_id")]
            id: String,
        }

        impl Lockable for $name {
            type Id = String;
            const COLLECTION: &'static str = $collection;
            $(const $rule: bool = true;)*
        }
    )*};
}

types! {
    Plain "plain" {};
    Fenced "fenced" { FENCED };
    Fair "fair" { FAIR };
    Both "both" { FENCED FAIR };
}

const COLLECTIONS: [&str; 4] = ["plain", "fenced", "fair", "both"];

async fn manager(database: &Database) -> LockManager {
    let locks = crate::rig::app::manager_on(database).ttl(TTL).without_reaper();
    let locks = locks.break_policy(|_, _| true).build().await.unwrap();
    locks.register::<Plain>().await.unwrap();
    locks.register::<Fenced>().await.unwrap();
    locks.register::<Fair>().await.unwrap();
    locks.register::<Both>().await.unwrap();
    locks
}

async fn put(database: &Database, collection: &str, record: &RawDocumentBuf) {
    let records = database.collection::<RawDocumentBuf>(&format!("{collection}.lock"));
    records.delete_many(doc! {}).await.unwrap();
    // The driver's own method would look for the id.
    let insert = odd(&[
        ("insert", format!("{collection}.lock").into()),
        ("documents", Odd::Elements(vec![Odd::Raw(record.as_bytes().to_vec())])),
    ]);
    database.run_raw_command(insert).await.unwrap();
}

type Members = Vec<(&'static str, Odd)>;

fn record(members: Members) -> RawDocumentBuf {
    let mut all: Members = vec![("_id", "a".into())];
    all.extend(members);
    odd(&all)
}

fn date(is_live: bool) -> DateTime {
    if is_live { DateTime::from_system_time(SystemTime::now()) } else { DateTime::from_millis(1) }
}

/// Records in which a name stands twice. The first of each pair says what it is.
fn repeating(is_live: bool) -> Vec<(&'static str, Members)> {
    let ts = || ("ts", Odd::from(date(is_live)));
    let aid = || ("aid", Odd::from("theirs"));
    let label = |text: &str| ("label", Odd::from(text));
    let token = || ("token", Odd::from("6f3b1a52-6c2e-4a5e-9f00-000000000000"));
    let reader = || {
        let ttl = ("ttl", Odd::from(60_000_i64));
        within(&[aid(), ts(), ttl, token(), label("x"), label("y")])
    };
    vec![
        ("the date", vec![ts(), ts(), aid()]),
        ("the session", vec![ts(), aid(), aid()]),
        ("a stranger", vec![("x", 1.into()), ts(), ("x", 2.into()), aid()]),
        ("the holder's label", vec![ts(), aid(), ("holder", within(&[label("a"), label("b")]))]),
        ("a reader", vec![ts(), ("readers", Odd::Elements(vec![reader(), reader()]))]),
        ("in the queue", vec![ts(), aid(), ("queue", Odd::Elements(vec![reader()]))]),
        ("a token", vec![ts(), aid(), ("token", "t".into()), ("token", "u".into())]),
        ("a lock of this crate", vec![ts(), aid(), aid(), token(), ("ttl", 60_000_i64.into())]),
    ]
}

async fn claim(locks: &LockManager, key: &LockKey) -> TryAcquire {
    locks.lock_for_session(key, &Aid::new(), &Holder::new("alice")).await.unwrap()
}

/// On a server of its own, which must not stop.
#[tokio::test]
async fn an_expired_record_with_a_name_twice_is_replaced_and_stops_no_server() {
    let server = Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    let locks = manager(&database).await;
    for collection in COLLECTIONS {
        let key = LockKey::new(collection, "a").unwrap();
        for (what, members) in repeating(false) {
            // With and without a date.
            let undated = members.iter().filter(|(name, _)| *name != "ts").cloned().collect();
            for members in [members.clone(), undated] {
                put(&database, collection, &record(members.clone())).await;
                let taken = claim(&locks, &key).await;
                assert!(matches!(taken, TryAcquire::Granted(_)), "{collection}, {what}: {taken:?}");
                put(&database, collection, &record(members.clone())).await;
                let guard = locks.acquire_shared(&key, Wait::no()).await;
                assert!(guard.is_ok(), "shared, {collection}, {what}: {guard:?}");
                guard.unwrap().release().await.unwrap();
            }
        }
    }
    locks.sweep().await.unwrap();
}

#[tokio::test]
async fn a_live_record_with_a_name_twice_is_a_lock_that_can_be_broken() {
    let server = Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    let locks = manager(&database).await;
    for collection in COLLECTIONS {
        let key = LockKey::new(collection, "a").unwrap();
        for (what, members) in repeating(true) {
            put(&database, collection, &record(members)).await;
            let refused = claim(&locks, &key).await;
            assert!(matches!(refused, TryAcquire::Held(_)), "{collection}, {what}: {refused:?}");
            locks.renew(&Aid::from("theirs".to_owned())).await.unwrap();
            let mut broken = Vec::new();
            for lock in locks.locks_on(&key).await.unwrap() {
                broken.push(locks.break_lock(&lock, &Actor::new("root"), "odd").await.unwrap());
            }
            assert_eq!(broken.first(), Some(&Released::Released), "{collection}, {what}");
            let taken = claim(&locks, &key).await;
            assert!(matches!(taken, TryAcquire::Granted(_)), "{collection}, {what}: {taken:?}");
            put(&database, collection, &record(Vec::new())).await;
        }
    }
}

/// Another program has written a name twice into the record of a lock that a session of this server holds. On a server of
/// its own, which must not stop.
#[tokio::test]
async fn no_verb_on_a_lock_whose_record_has_got_a_name_twice_stops_the_server() {
    let server = Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    let locks = manager(&database).await;
    for collection in COLLECTIONS {
        let key = LockKey::new(collection, "a").unwrap();
        for verb in ["again", "renew", "release", "hand over", "end"] {
            put(&database, collection, &record(Vec::new())).await;
            let (aid, holder) = (Aid::new(), Holder::new("alice"));
            let taken = locks.lock_for_session(&key, &aid, &holder).await.unwrap();
            let TryAcquire::Granted(lock) = taken else { panic!("{collection}: {taken:?}") };
            let wait = Wait::for_at_most(Duration::from_secs(2));
            let next = (verb == "hand over").then(|| {
                let (locks, key) = (locks.clone(), key.clone());
                tokio::spawn(async move {
                    if let Ok(next) = locks.acquire(&key, wait).await {
                        let _ = next.release().await;
                    }
                })
            });
            if next.is_some() {
                sleep(Duration::from_millis(300)).await;
            }
            let records = database.collection::<Document>(&format!("{collection}.lock"));
            let stored = records.find_one(doc! { "_id": "a" }).await.unwrap().unwrap();
            put(&database, collection, &with_a_name_twice(&stored)).await;
            match verb {
                "again" => drop(locks.lock_for_session(&key, &aid, &holder).await),
                "renew" => drop(locks.renew(&aid).await),
                "end" => drop(locks.end_session(&aid).await),
                _ => drop(locks.release(&lock).await),
            }
            if let Some(next) = next {
                next.await.unwrap();
            }
            database.run_command(doc! { "ping": 1 }).await.unwrap();
        }
    }
}

fn with_a_name_twice(record: &Document) -> RawDocumentBuf {
    let mut bytes = RawDocumentBuf::try_from(record).unwrap().into_bytes();
    bytes.pop();
    for value in [1, 2] {
        bytes.extend([0x10, b'x', 0, value, 0, 0, 0]);
    }
    bytes.push(0);
    let length = i32::try_from(bytes.len()).unwrap();
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    RawDocumentBuf::from_bytes(bytes).unwrap()
}

/// Records with texts that are not UTF-8.
fn unreadable(is_live: bool) -> Vec<(&'static str, Members)> {
    let ts = || ("ts", Odd::from(date(is_live)));
    let aid = || ("aid", Odd::from("theirs"));
    let bad = |name| (name, Odd::from(NOT_UTF8));
    vec![
        ("the session", vec![ts(), bad("aid")]),
        ("a stranger", vec![ts(), aid(), bad("x")]),
        ("the token", vec![ts(), aid(), bad("token")]),
        ("the label", vec![ts(), aid(), ("holder", within(&[bad("label"), bad("user")]))]),
        ("a name", vec![ts(), aid(), (NOT_UTF8, 1.into())]),
        ("a tab", vec![ts(), aid(), bad("tab"), bad("page"), ("since", date(is_live).into())]),
    ]
}

#[tokio::test]
async fn a_record_with_odd_text_is_a_lock_and_holds_up_no_other() {
    let database = rig::fresh_database(shared_replica_set().await.uri()).await;
    let locks = manager(&database).await;
    let other = LockKey::new("plain", "other").unwrap();
    for collection in COLLECTIONS {
        let key = LockKey::new(collection, "a").unwrap();
        for (what, members) in unreadable(true) {
            put(&database, collection, &record(members)).await;
            let TryAcquire::Held(lock) = claim(&locks, &key).await else {
                panic!("{collection}, {what}")
            };
            assert!(!lock.expires_in().is_zero());
            let mine = locks.acquire(&other, Wait::no()).await.unwrap();
            let listed: Vec<Lock> = locks.list().await.unwrap();
            assert!(listed.iter().any(|lock| lock.key == key), "{collection}, {what}: {listed:?}");
            assert!(listed.iter().any(|lock| lock.key == other), "{collection}, {what}");
            assert!(locks.inspect(&key).await.unwrap().is_some(), "{collection}, {what}");
            let broken = locks.break_lock(&lock, &Actor::new("root"), "odd").await.unwrap();
            assert_eq!(broken, Released::Released, "{collection}, {what}");
            mine.release().await.unwrap();
        }
        for (what, members) in unreadable(false) {
            put(&database, collection, &record(members)).await;
            locks.sweep().await.unwrap();
            let taken = claim(&locks, &key).await;
            assert!(matches!(taken, TryAcquire::Granted(_)), "{collection}, {what}: {taken:?}");
        }
    }
}

/// A lock whose id is no text cannot be named, so it is left out.
#[tokio::test]
async fn a_record_whose_id_is_not_utf8_leaves_the_list_to_the_others() {
    let database = rig::fresh_database(shared_replica_set().await.uri()).await;
    let locks = manager(&database).await;
    put(&database, "plain", &odd(&[("_id", NOT_UTF8.into()), ("ts", date(true).into())])).await;
    let other = LockKey::new("plain", "other").unwrap();
    let _mine = locks.acquire(&other, Wait::no()).await.unwrap();
    let listed = locks.list().await.unwrap();
    assert_eq!(listed.iter().map(|lock| &lock.key).collect::<Vec<_>>(), [&other]);
}

/// One end with an odd text holds up neither the listener nor the ends of others.
#[tokio::test]
async fn an_end_with_odd_text_holds_up_no_other_end() {
    let database = rig::fresh_database(shared_replica_set().await.uri()).await;
    let locks = manager(&database).await;
    let ended = database.collection::<RawDocumentBuf>("doclock.ended");
    for (n, bad) in ["holder", "reason", "event", "locks"].into_iter().enumerate() {
        let end = odd(&[
            ("_id", format!("foreign {n}").into()),
            ("ts", date(true).into()),
            ("step", "announce".into()),
            ("reason", "logged_out".into()),
            (bad, within(&[("label", NOT_UTF8.into()), ("x", NOT_UTF8.into())])),
            ("text", NOT_UTF8.into()),
        ]);
        ended.insert_one(end).await.unwrap();
    }
    let aid = Aid::new();
    let key = LockKey::new("plain", "mine").unwrap();
    let holder = Holder::new("alice");
    assert!(matches!(
        locks.lock_for_session(&key, &aid, &holder).await.unwrap(),
        TryAcquire::Granted(_)
    ));
    let (told, mut heard) = tokio::sync::mpsc::unbounded_channel();
    let listening = crate::rig::app::manager_on(&database)
        .ttl(TTL)
        .on_session_end(move |end| {
            let told = told.clone();
            async move {
                drop(told.send(end.aid));
                Ok(())
            }
        })
        .build()
        .await
        .unwrap();
    listening.register::<Plain>().await.unwrap();
    locks.end_session(&aid).await.unwrap();
    while heard.recv().await.expect("the listener is there") != aid {}
}

/// Perhaps the command has made the server abort. It would be sent to the next primary, too.
#[tokio::test]
async fn a_command_after_which_a_server_was_lost_is_not_sent_again_for_an_odd_record() {
    let faulty = Faulty::new().await;
    let database = &faulty.database;
    let key = key("a");
    let expired = || ("ts", Odd::from(date(false)));
    put(database, key.collection(), &record(vec![expired(), ("aid", NOT_UTF8.into())])).await;
    faulty.proxy.drop_request("delete");
    let refused = faulty.app.try_acquire(&key, &Aid::new()).await.unwrap_err();
    let LockError::Store(error) = &refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("a server was lost"), "{error}");
    assert_eq!(faulty.proxy.passed("delete"), 0, "sent again without a look");
    // Once its odd text is gone, the record is written again.
    put(database, key.collection(), &record(vec![expired(), ("aid", "theirs".into())])).await;
    faulty.app.granted(&key, &Aid::new()).await;
    faulty.assert_fired(1);
}

#[tokio::test]
async fn a_save_during_which_a_server_was_lost_is_not_sent_again_for_an_odd_document() {
    let faulty = Faulty::new().await;
    let documents = faulty.database.collection::<RawDocumentBuf>("workitem");
    let stored = record(vec![("title", "old".into()), ("x", 1.into()), ("x", 2.into())]);
    documents.insert_one(&stored).await.unwrap();
    let guard = faulty.app.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    faulty.proxy.drop_request("update");
    let refused = guard.update(|it: &mut WorkItem| it.title = "new".to_owned()).await.unwrap_err();
    let LockError::Rejected { source, .. } = &refused else { panic!("{refused:?}") };
    assert!(source.to_string().contains("a server was lost"), "{source}");
    assert_eq!(documents.find_one(doc! {}).await.unwrap().unwrap(), stored);
    // Once it is repaired, it can be saved.
    let repaired = record(vec![("title", "old".into()), ("x", 1.into())]);
    documents.replace_one(doc! {}, repaired).await.unwrap();
    let saved = guard.update(|it: &mut WorkItem| it.title = "new".to_owned()).await.unwrap();
    assert_eq!(saved.title, "new");
}
