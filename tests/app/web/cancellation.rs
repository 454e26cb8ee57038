//! A handler that is dropped half-way leaves nothing behind.

use std::{
    future::{Future, pending},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::Context,
};

use futures_util::{FutureExt, task::noop_waker_ref};
use tokio::task::yield_now;

use super::{
    sessions::{Fault, Faulty},
    *,
};
use crate::rig::{self, paused::Paused};

/// Polls `future` that often, letting everything else run in between, and drops it. Says whether it
/// had ended before.
async fn drop_after<F: Future>(future: F, polls: usize) -> bool {
    let mut future = pin!(future);
    let mut context = Context::from_waker(noop_waker_ref());
    for _ in 0..polls {
        if future.as_mut().poll(&mut context).is_ready() {
            return true;
        }
        yield_now().await;
    }
    false
}

#[actix_web::test]
async fn a_request_that_is_dropped_at_any_await_point_leaves_no_lock() {
    let (_, store) = embedded().await;
    let locks =
        LockManager::builder(Paused::new(store, || yield_now().boxed())).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;

    for uri in ["/note/a", "/locks/note/a", "/note/a/form", "/note/a/both", "/note/missing"] {
        let mut dropped = 0;
        for polls in 0.. {
            let request = alice.request(Method::POST, uri).to_request();
            if drop_after(app.call(request), polls).await {
                break;
            }
            dropped = polls;
            locks.shutdown().await;
            assert!(locks.list().await.unwrap().is_empty(), "{uri}, dropped after {polls} polls");
        }
        assert!(dropped >= 3, "{uri} has only {dropped} await points");
        locks.shutdown().await;
        alice.post("/close-all").await;
    }
}

#[actix_web::test]
async fn a_handler_that_is_dropped_with_its_connection_leaves_no_fresh_lock() {
    let (locks, _) = embedded().await;
    async fn never(_: LockedDoc<Note>) -> HttpResponse {
        std::future::pending().await
    }
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new().wrap(locks.session(session)).route("/never/{id}", web::post().to(never));
    let app = test::init_service(app.configure(routes)).await;
    let alice = Browser::new(&app);
    let request = alice.request(Method::POST, "/never/a").to_request();
    assert!(!drop_after(app.call(request), 50).await);
    assert_eq!(holder_of(&locks, "a").await, None, "its client never heard of it");

    let token = alice.post("/note/a").await.token();
    let request = alice.request(Method::POST, "/never/a").to_request();
    assert!(!drop_after(app.call(request), 50).await);
    locks.shutdown().await;
    assert_eq!(alice.post("/note/a").await.token(), token, "what it had before stays");
}

/// What may have been granted is given back afterwards.
#[actix_web::test]
async fn a_store_that_does_not_answer_is_an_answer_within_one_deadline() {
    let (_, store) = embedded().await;
    let hangs = Arc::new(AtomicBool::new(false));
    let does_hang = Arc::clone(&hangs);
    let pause =
        move || if does_hang.load(Relaxed) { pending().boxed() } else { yield_now().boxed() };
    let locks = LockManager::builder(Paused::new(store, pause)).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    tokio::time::pause();
    hangs.store(true, Relaxed);
    for uri in ["/note/a", "/locks/note/a", "/note/b/both"] {
        let asked = tokio::time::Instant::now();
        alice.post(uri).await.problem(503);
        assert!(asked.elapsed() < locks.deadline() * 3 / 2, "{uri}: {:?}", asked.elapsed());
    }
}

#[actix_web::test]
async fn a_logout_that_is_dropped_is_carried_out() {
    let (_, store) = embedded().await;
    let locks =
        LockManager::builder(Paused::new(store, || yield_now().boxed())).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    let request = alice.request(Method::POST, "/purge").to_request();
    // Far enough for the session to be saved, not far enough for its locks to be released.
    assert!(!drop_after(app.call(request), 2).await);
    assert_eq!(holder_of(&locks, "a").await, None);
}

#[actix_web::test]
async fn a_logout_that_is_dropped_while_its_session_is_saved_frees_the_documents() {
    let (locks, _) = embedded().await;
    let sessions = Faulty::default();
    let app = serve(&locks, sessions.clone()).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    sessions.set(Fault::Hangs);
    let request = alice.request(Method::POST, "/purge").to_request();
    assert!(!drop_after(app.call(request), 20).await);
    assert_eq!(holder_of(&locks, "a").await, None);
}

#[actix_web::test]
async fn on_mongodb_too_a_request_that_is_dropped_at_any_moment_leaves_no_lock() {
    let database = rig::fresh_database(rig::mongod::shared_replica_set().await.uri()).await;
    let note = Note { id: "a".to_owned(), text: "old".to_owned() };
    database.collection::<Note>(Note::COLLECTION).insert_one(&note).await.unwrap();
    let locks = crate::rig::app::manager_on(&database).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;

    let mut dropped = 0;
    for step in 0..60 {
        let request = alice.request(Method::POST, "/note/a").to_request();
        let patience = Duration::from_micros(250 * step);
        if tokio::time::timeout(patience, app.call(request)).await.is_err() {
            dropped += 1;
            locks.shutdown().await;
            assert!(locks.list().await.unwrap().is_empty(), "dropped after {patience:?}");
        } else {
            alice.post("/close-all").await;
        }
    }
    assert!(dropped > 0);
}
