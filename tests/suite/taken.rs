//! The listener that hears of breaks and takeovers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix_doclock::store::TakeoverKind;
use actix_doclock::{Actor, Aid, Holder, Lock, LockManagerBuilder, Released, Takeover, TryAcquire};
use mongodb::Database;

use crate::rig::app::{App, eventually, key};
use crate::rig::{self, mongod};

type Heard = Arc<Mutex<Vec<Takeover>>>;

/// A server whose listener adds to `heard`.
async fn server(database: &Database, heard: &Heard) -> App {
    let heard = Arc::clone(heard);
    server_with(database, move |settings| {
        settings.on_lock_taken(move |taken| {
            heard.lock().unwrap().push(taken);
            async { Ok(()) }
        })
    })
    .await
}

async fn server_with(
    database: &Database,
    settings: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder,
) -> App {
    let interval = Duration::from_millis(50);
    let may_break =
        |settings: LockManagerBuilder| settings.break_policy(|_, _| true).reaper_interval(interval);
    App::with(database, |defaults| settings(may_break(defaults))).await
}

async fn database() -> Database {
    rig::fresh_database(mongod::shared_replica_set().await.uri()).await
}

async fn hers(app: &App) -> Lock {
    let alice = Holder::new("Alice").of_user("alice@example.org");
    match app.locks.lock_for_session(&key("a"), &Aid::new(), &alice).await.unwrap() {
        TryAcquire::Granted(lock) => lock,
        other => panic!("not newly granted: {other:?}"),
    }
}

async fn until_heard(heard: &Heard, many: usize) -> Vec<Takeover> {
    eventually("the listener is called", async || heard.lock().unwrap().len() >= many).await;
    heard.lock().unwrap().clone()
}

#[tokio::test]
async fn a_break_is_told_once_in_the_cluster_with_the_people_and_the_reason() {
    let (database, heard) = (database().await, Heard::default());
    // Two servers listen, and a third one, like the command, does not.
    let _listen = [server(&database, &heard).await, server(&database, &heard).await];
    let third = server_with(&database, |settings| settings.without_reaper()).await;
    let lock = hers(&third).await;
    let root = Actor::new("Root").with_id("root@example.org");
    third.locks.break_lock(&lock, &root, "on holiday").await.unwrap();
    let told = until_heard(&heard, 1).await;
    let from = told[0].from.as_ref().unwrap();
    assert_eq!((&*from.label, from.user.as_deref()), ("Alice", Some("alice@example.org")));
    let by = &told[0].by;
    assert_eq!((&*by.label, by.user.as_deref()), ("Root", Some("root@example.org")));
    assert_eq!((told[0].kind, &*told[0].reason), (TakeoverKind::Broken, "on holiday"));
    assert_eq!((&told[0].key, &told[0].aid, told[0].token), (&lock.key, &lock.aid, lock.token));

    // A second break of the same lock finds nothing, and the next one is the next event.
    let gone = third.locks.break_lock(&lock, &root, "again").await.unwrap();
    assert_eq!(gone, Released::AlreadyGone);
    let lock = hers(&third).await;
    third.locks.break_lock(&lock, &root, "the next lock").await.unwrap();
    let told = until_heard(&heard, 2).await;
    assert_eq!(
        told.iter().map(|it| &*it.reason).collect::<Vec<_>>(),
        ["on holiday", "the next lock"]
    );
    assert!(told.iter().all(|it| !it.repeated));
}

#[tokio::test]
async fn a_listener_that_fails_or_panics_or_hangs_is_not_called_again_and_the_next_event_is_told() {
    let (database, heard) = (database().await, Heard::default());
    let calls = Arc::clone(&heard);
    let app = server_with(&database, move |settings| {
        settings.listener_timeout(Duration::from_millis(100)).on_lock_taken(move |taken| {
            let nth = {
                let mut calls = calls.lock().unwrap();
                calls.push(taken);
                calls.len()
            };
            async move {
                match nth {
                    1 => Err("on purpose".into()),
                    2 => panic!("on purpose"),
                    3 => std::future::pending().await,
                    _ => Ok(()),
                }
            }
        })
    })
    .await;
    for nth in 1..=4 {
        let lock = hers(&app).await;
        app.locks.break_lock(&lock, &Actor::new("root"), &nth.to_string()).await.unwrap();
        let told = until_heard(&heard, nth).await;
        assert_eq!(told.last().unwrap().reason, nth.to_string());
        assert_eq!(told.len(), nth);
    }
}

#[tokio::test]
async fn both_listeners_hear_their_own_events() {
    let (database, heard) = (database().await, Heard::default());
    let ends = Arc::new(Mutex::new(Vec::new()));
    let (taken, ended) = (Arc::clone(&heard), Arc::clone(&ends));
    let app = server_with(&database, move |settings| {
        let settings = settings.on_lock_taken(move |event| {
            taken.lock().unwrap().push(event);
            async { Ok(()) }
        });
        settings.on_session_end(move |end| {
            ended.lock().unwrap().push(end);
            async { Ok(()) }
        })
    })
    .await;
    let lock = hers(&app).await;
    app.locks.break_lock(&lock, &Actor::new("root"), "").await.unwrap();
    let other = hers(&app).await;
    app.locks.end_session(&other.aid).await.unwrap();
    until_heard(&heard, 1).await;
    eventually("the end is told", async || ends.lock().unwrap().len() == 1).await;
    assert_eq!(ends.lock().unwrap()[0].aid, other.aid);
    assert_eq!(heard.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_listener_that_hangs_does_not_hold_up_the_other_one() {
    let (database, heard) = (database().await, Heard::default());
    let (taken, hangs) = (Arc::clone(&heard), Arc::new(Mutex::new(false)));
    let has_begun = Arc::clone(&hangs);
    let app = server_with(&database, move |settings| {
        let settings = settings.on_lock_taken(move |event| {
            taken.lock().unwrap().push(event);
            async { Ok(()) }
        });
        settings.listener_timeout(Duration::from_secs(600)).on_session_end(move |_| {
            *has_begun.lock().unwrap() = true;
            std::future::pending()
        })
    })
    .await;
    let lock = hers(&app).await;
    app.locks.end_session(&lock.aid).await.unwrap();
    eventually("it hangs", async || *hangs.lock().unwrap()).await;
    let lock = hers(&app).await;
    app.locks.break_lock(&lock, &Actor::new("root"), "").await.unwrap();
    until_heard(&heard, 1).await;
}
