//! Freezes: no new locks for a while, on all servers.

use std::time::{Duration, SystemTime};

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Actor, Aid, Holder, LockError, LockKey, LockManager, Lockable, MemoryStore, Named, Released,
    TryAcquire, Wait, freeze::Scope, store::Saved,
};
use mongodb::Database;
use mongodb::bson::{Document, doc};
use tokio::time::{sleep, timeout};

use crate::rig::app::{App, NO_DEADLINE, WorkItem, eventually, key, put, title};
use crate::rig::faulty::Faulty;
use crate::rig::log::{count_logged, log_lines, logged};
use crate::rig::{self, mongod};

async fn two_servers() -> ([App; 2], Database) {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    ([App::on(&database).await, App::on(&database).await], database)
}

fn root() -> Actor {
    Actor::new("root")
}

fn in_an_hour() -> SystemTime {
    SystemTime::now() + Duration::from_secs(60 * 60)
}

/// Waits until this server knows of as many freezes.
async fn knows(app: &App, freezes: usize) {
    eventually("the server asks for freezes", async || app.locks.health().frozen.len() == freezes)
        .await;
}

async fn why(app: &App, id: &str) -> String {
    match app.try_acquire(&key(id), &Aid::new()).await {
        Err(LockError::Frozen { freeze, .. }) => freeze.reason,
        other => panic!("not refused by a freeze: {other:?}"),
    }
}

#[tokio::test]
async fn every_server_refuses_new_locks_until_the_thaw_and_holders_go_on() {
    let ([one, other], database) = two_servers().await;
    put(&database, "a", "before").await;
    let alice = Aid::new();
    let lock = one.granted(&key("a"), &alice).await;
    other.locks.freeze("workitem", "migration", in_an_hour(), &root()).await.unwrap();
    assert_eq!(why(&other, "b").await, "migration", "the server itself, at once");
    knows(&one, 1).await;
    for app in [&one, &other] {
        assert_eq!(why(app, "b").await, "migration");
        assert_eq!(why(app, "a").await, "migration", "another session, on a held lock");
        assert_eq!(app.already_mine(&key("a"), &alice).await.token, lock.token);
    }
    assert_eq!(one.save(&lock, "under the freeze").await.unwrap(), Saved::Saved);
    assert_eq!(title(&database, "a").await, "under the freeze");
    assert_eq!(other.locks.release(&lock).await.unwrap(), Released::Released);
    assert_eq!(why(&one, "a").await, "migration", "also the former holder");

    assert!(one.locks.thaw("workitem").await.unwrap());
    assert!(!one.locks.thaw("workitem").await.unwrap());
    knows(&other, 0).await;
    one.granted(&key("a"), &alice).await;
    other.granted(&key("b"), &alice).await;
}

#[tokio::test]
async fn a_freeze_says_who_until_when_by_the_servers_clock_and_how_many_servers_obey() {
    log_lines();
    let ([one, other], database) = two_servers().await;
    // A program that only looks at the locks is no server.
    let looks = App::unregistered(&database, |settings| settings).await;
    looks.store.attach("workitem").await.unwrap();
    looks.locks.attach("workitem");
    let reason = format!("of {}", database.name());
    one.locks
        .freeze("workitem", &reason, Duration::from_secs(3_600), &Actor::new("Root"))
        .await
        .unwrap();
    knows(&looks, 1).await;
    eventually("both servers have noted it", async || {
        other.store.freezes(Deadline::NONE).await.unwrap().on[0].obeyed_by == 2
    })
    .await;
    let stored = database.collection::<Document>("doclock.frozen");
    let stored = stored.find_one(doc! {}).await.unwrap().unwrap();
    let freeze = stored.get_array("of").unwrap()[0].as_document().unwrap().clone();
    assert!(matches!(freeze.get_str("by"), Ok("Root")), "{freeze}");
    let of = |field| freeze.get_datetime(field).unwrap().timestamp_millis();
    assert_eq!(of("until") - of("since"), 3_600_000, "by one clock");
    assert_eq!(other.locks.health().frozen[0].by.as_deref(), Some("Root"));
    // The servers and the program that looks; the lines of other tests have other reasons.
    let begins = ["this server grants no new locks", &reason];
    eventually("each server's log says so", async || count_logged(&begins) == 3).await;
    assert!(one.locks.thaw("workitem").await.unwrap());
    knows(&other, 0).await;
    assert!(logged("INFO the collection `workitem` is not frozen any more: this server grants"));
}

#[tokio::test]
async fn a_freeze_of_all_collections_needs_one() {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    let app = App::unregistered(&database, |settings| settings).await;
    let refused = app.locks.freeze(Scope::All, "nothing", in_an_hour(), &root()).await;
    assert!(matches!(refused, Err(LockError::Misconfigured(_))), "{refused:?}");
}

#[tokio::test]
async fn a_freeze_leaves_no_lock_record_and_writes_none() {
    let ([one, _], database) = two_servers().await;
    one.locks.freeze(Scope::All, "migration", in_an_hour(), &root()).await.unwrap();
    why(&one, "a").await;
    let locks = database.collection::<Document>("workitem.lock");
    assert_eq!(locks.count_documents(doc! {}).await.unwrap(), 0);
}

#[tokio::test]
async fn a_server_that_starts_during_a_freeze_obeys_from_its_first_lock() {
    let ([one, _], database) = two_servers().await;
    one.locks.freeze("workitem", "migration", in_an_hour(), &root()).await.unwrap();
    let late = App::on(&database).await;
    assert_eq!(why(&late, "a").await, "migration");
}

#[tokio::test]
async fn waiters_are_told_of_a_freeze_at_once() {
    let ([one, other], _) = two_servers().await;
    let lock = one.granted(&key("a"), &Aid::new()).await;
    let waiters: Vec<_> = [&one, &other]
        .map(|app| {
            let locks = app.locks.clone();
            tokio::spawn(async move { locks.acquire(&key("a"), Wait::until_acquired()).await })
        })
        .into();
    eventually("both wait", async || {
        one.locks.health().waiting == 1 && other.locks.health().waiting == 1
    })
    .await;
    one.locks.freeze("workitem", "migration", in_an_hour(), &root()).await.unwrap();
    for waiter in waiters {
        let ended = timeout(NO_DEADLINE, waiter).await.expect("the wait ends").unwrap();
        assert!(matches!(ended, Err(LockError::Frozen { .. })), "{ended:?}");
    }
    one.locks.release(&lock).await.unwrap();
    assert!(one.locks.inspect(&key("a")).await.unwrap().is_none());
}

#[tokio::test]
async fn all_collections_are_frozen_but_the_named_locks_of_jobs() {
    let ([one, _], _) = two_servers().await;
    one.locks.register::<Named>().await.unwrap();
    one.locks.freeze(Scope::All, "migration", in_an_hour(), &root()).await.unwrap();
    why(&one, "a").await;
    let job = one.locks.acquire(&LockKey::named("migration").unwrap(), Wait::no()).await.unwrap();
    job.release().await.unwrap();
    one.locks.freeze(Named::COLLECTION, "no jobs", in_an_hour(), &root()).await.unwrap();
    let refused = one.locks.acquire(&LockKey::named("migration").unwrap(), Wait::no()).await;
    assert!(matches!(refused, Err(LockError::Frozen { .. })), "{refused:?}");
}

#[tokio::test]
async fn a_freeze_that_has_passed_or_names_no_collection_is_refused() {
    let ([one, _], _) = two_servers().await;
    let past = SystemTime::now() - Duration::from_secs(60 * 60);
    let refused = one.locks.freeze("workitem", "late", past, &root()).await;
    assert!(matches!(refused, Err(LockError::PastFreeze)), "{refused:?}");
    let refused = one.locks.freeze("workitme", "typo", in_an_hour(), &root()).await;
    assert!(matches!(refused, Err(LockError::Misconfigured(_))), "{refused:?}");
    assert_eq!(one.locks.health().frozen, []);
    one.granted(&key("a"), &Aid::new()).await;
}

#[tokio::test]
async fn the_freeze_that_lasts_longest_is_named_and_each_ends_for_itself() {
    let ([one, _], _) = two_servers().await;
    let later = in_an_hour() + Duration::from_secs(60);
    one.locks.freeze("workitem", "the collection", later, &root()).await.unwrap();
    one.locks.freeze(Scope::All, "all", in_an_hour(), &root()).await.unwrap();
    assert_eq!(why(&one, "a").await, "the collection");
    assert!(one.locks.thaw("workitem").await.unwrap());
    assert_eq!(why(&one, "a").await, "all");
    assert_eq!(one.locks.health().frozen.len(), 1);
}

#[tokio::test]
async fn a_reason_is_cut_to_its_limit() {
    let ([one, _], _) = two_servers().await;
    one.locks.freeze("workitem", &"ä".repeat(300), in_an_hour(), &root()).await.unwrap();
    assert_eq!(why(&one, "a").await, "ä".repeat(250));
}

#[tokio::test]
async fn a_broken_record_of_freezes_freezes_nothing() {
    let ([one, other], database) = two_servers().await;
    let frozen = database.collection::<Document>("doclock.frozen");
    for of in [doc! { "of": 7 }, doc! { "of": [7, { "until": "soon" }, { "collection": 5 }] }] {
        frozen
            .update_one(doc! { "_id": "freezes" }, doc! { "$set": of })
            .upsert(true)
            .await
            .unwrap();
        one.granted(&key("a"), &Aid::new()).await;
        // And it can be used again.
        other.locks.freeze("workitem", "migration", in_an_hour(), &root()).await.unwrap();
        knows(&one, 1).await;
        other.locks.thaw("workitem").await.unwrap();
        knows(&one, 0).await;
        let gone = one.locks.inspect(&key("a")).await.unwrap().unwrap();
        one.locks.release(&gone).await.unwrap();
    }
}

#[tokio::test]
async fn the_embedded_store_freezes_too() {
    let store = MemoryStore::new();
    let locks = LockManager::builder(store.clone()).build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    let (aid, alice) = (Aid::new(), Holder::new("alice"));
    let acquire = async |id: &str| locks.lock_for_session(&key(id), &aid, &alice).await;
    assert!(matches!(acquire("a").await, Ok(TryAcquire::Granted(_))));
    let soon = SystemTime::now() + Duration::from_secs(600);
    locks.freeze(Scope::All, "migration", soon, &root()).await.unwrap();
    assert!(matches!(acquire("b").await, Err(LockError::Frozen { .. })));
    assert!(matches!(acquire("a").await, Ok(TryAcquire::AlreadyMine(_))));
    store.advance(Duration::from_secs(600));
    eventually("it ends by itself", async || acquire("b").await.is_ok()).await;
}

#[tokio::test]
async fn a_grant_that_arrives_after_the_freeze_is_given_back() {
    let Faulty { proxy, app, other, .. } = Faulty::new().await;
    proxy.hold_reply_to("findAndModify");
    let (key, aid) = (key("a"), Aid::new());
    let freezes = async {
        proxy.until_fired(1).await;
        other.locks.freeze("workitem", "migration", in_an_hour(), &root()).await.unwrap();
        knows(&app, 1).await;
        proxy.let_go();
    };
    let (granted, ()) = tokio::join!(app.try_acquire(&key, &aid), freezes);
    assert!(matches!(granted, Err(LockError::Frozen { .. })), "{granted:?}");
    eventually("it is given back", async || other.locks.inspect(&key).await.unwrap().is_none())
        .await;
}

/// As after a pause of the process: its own question for freezes is not answered.
#[tokio::test]
async fn a_lock_that_is_handed_over_in_a_freeze_that_its_server_has_not_heard_of_is_given_back() {
    let Faulty { proxy, app, other, .. } = Faulty::new().await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    let locks = app.locks.clone();
    let waiter =
        tokio::spawn(async move { locks.acquire(&key("a"), Wait::until_acquired()).await });
    eventually("it waits", async || app.locks.health().waiting == 1).await;
    proxy.hold_request("find");
    proxy.until_fired(1).await;
    other.locks.freeze("workitem", "migration", in_an_hour(), &root()).await.unwrap();
    // Now its last answer is too old.
    sleep(Duration::from_secs(3)).await;
    app.locks.release(&lock).await.unwrap();
    let refused = timeout(NO_DEADLINE, waiter).await.expect("the wait ends").unwrap();
    assert!(matches!(refused, Err(LockError::Frozen { .. })), "{refused:?}");
    eventually("it is given back", async || {
        other.locks.inspect(&key("a")).await.unwrap().is_none()
    })
    .await;
    proxy.let_go();
}

#[tokio::test]
async fn a_freeze_beyond_all_dates_holds_and_is_thawed_by_its_own_name_only() {
    let ([one, _], _) = two_servers().await;
    let beyond = SystemTime::now() + Duration::from_secs(20_000 * 366 * 24 * 60 * 60);
    one.locks.freeze(Scope::All, "for ever", beyond, &root()).await.unwrap();
    let wrong = one.locks.thaw("*").await;
    assert!(matches!(wrong, Err(LockError::Misconfigured(_))), "{wrong:?}");
    assert_eq!(why(&one, "a").await, "for ever");
    assert!(one.locks.thaw(Scope::All).await.unwrap());
}
