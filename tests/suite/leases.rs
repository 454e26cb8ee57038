//! Where the application trusts leases, a lock is not asked for again.

use std::time::Duration;

use actix_doclock::{Aid, LockEvent, TryAcquire, store::Saved};
use mongodb::Database;
use tokio::time::sleep;

use crate::rig::app::{App, eventually, key, lock_records, put, title};
use crate::rig::{self, Commands, mongod};

async fn trusting(database: &Database) -> App {
    App::with(database, |settings| settings.trust_leases()).await
}

async fn counted() -> (App, Commands, Database) {
    let uri = mongod::shared_replica_set().await.uri().to_owned();
    let (database, commands) = rig::counted_database(&uri).await;
    let app = trusting(&database).await;
    // When the watch begins, all earlier leases are forgotten.
    let mut events = app.locks.events();
    let witness = key("witness");
    let aid = Aid::new();
    eventually("the watch has begun", async || {
        let lock = app.granted(&witness, &aid).await;
        app.locks.release(&lock).await.unwrap();
        let event = tokio::time::timeout(Duration::from_millis(500), events.next()).await;
        matches!(event.as_ref().map(|it| it.as_deref()), Ok(Some(LockEvent::Acquired(_))))
    })
    .await;
    commands.take();
    (app, commands, database)
}

fn acquires(commands: &Commands) -> usize {
    commands.take().iter().filter(|name| *name == "findAndModify").count()
}

#[tokio::test]
async fn a_session_that_asks_again_is_answered_without_a_command() {
    let (app, commands, _database) = counted().await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    assert_eq!(acquires(&commands), 1);
    let again = app.already_mine(&key("a"), &lock.aid).await;
    assert_eq!(acquires(&commands), 0);
    assert_eq!((again.token, again.since), (lock.token, lock.since));
    assert!(again.expires_at <= lock.expires_at);
    // Other sessions still get their answer from the server.
    assert_eq!(app.held(&key("a")).await.token, lock.token);
    assert_eq!(acquires(&commands), 1);
}

#[tokio::test]
async fn a_lock_that_was_released_or_went_with_its_session_is_asked_for_again() {
    let (app, _, _database) = counted().await;
    let (aid, a) = (Aid::new(), key("a"));
    let first = app.granted(&a, &aid).await;
    app.locks.release(&first).await.unwrap();
    let second = app.granted(&a, &aid).await;
    app.locks.release_all(&aid).await.unwrap();
    let third = app.granted(&a, &aid).await;
    assert!(first.token != second.token && second.token != third.token);
}

#[tokio::test]
async fn a_break_by_another_server_is_noticed() {
    let (app, _, database) = counted().await;
    let root = App::with(&database, |settings| settings.break_policy(|_, _| true)).await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    root.break_lock(&key("a")).await.expect("there is a lock");
    eventually("the holder asks again", async || {
        match app.try_acquire(&key("a"), &lock.aid).await.unwrap() {
            TryAcquire::Granted(new) => new.token != lock.token,
            _ => false,
        }
    })
    .await;
}

#[tokio::test]
async fn a_save_asks_the_server_although_the_lease_is_trusted() {
    let (app, _, database) = counted().await;
    put(&database, "a", "old").await;
    let aid = Aid::new();
    app.granted(&key("a"), &aid).await;
    let trusted = app.already_mine(&key("a"), &aid).await;
    lock_records(&database).delete_many(mongodb::bson::doc! {}).await.unwrap();
    assert_eq!(app.save(&trusted, "new").await.unwrap(), Saved::Lost);
    assert_eq!(title(&database, "a").await, "old");
}

#[tokio::test]
async fn a_lease_is_not_trusted_beyond_its_end() {
    let uri = mongod::shared_replica_set().await.uri().to_owned();
    let database = rig::fresh_database(&uri).await;
    let ttl = Duration::from_secs(1);
    let app = App::with(&database, |settings| settings.trust_leases().ttl(ttl)).await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    sleep(ttl).await;
    assert_ne!(app.granted(&key("a"), &lock.aid).await.token, lock.token);
}
