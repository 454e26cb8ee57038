//! A handler that is dropped half-way leaves nothing behind.

use std::{future::Future, pin::pin, task::Context, time::Instant};

use actix_doclock::{
    Aid, EndReason, MongoStore, PageId, Released, SessionEnded, StoreError, TryAcquire,
    store::{
        Acquisition, Claim, Edit, HandedOver, LastEnd, Query, Removal, Rules, Saved, Store,
        StoreStatus, StoredDocument, Swept, Ticket, Waiters, Watch,
    },
};
use futures_util::task::noop_waker_ref;
use tokio::task::yield_now;
use uuid::Uuid;

use super::{
    sessions::{Fault, Faulty},
    *,
};
use crate::rig;

/// A store that pauses before and after everything it does, so that there are many points to be
/// dropped at.
struct Pausing(MemoryStore);

impl Pausing {
    async fn paused<T>(&self, verb: impl Future<Output = T>) -> T {
        yield_now().await;
        let outcome = verb.await;
        yield_now().await;
        outcome
    }
}

impl Store for Pausing {
    async fn prepare(&self, collection: &str, rules: &Rules) -> Result<(), StoreError> {
        self.0.prepare(collection, rules).await
    }
    async fn try_acquire(&self, key: &LockKey, claim: &Claim) -> Result<TryAcquire, StoreError> {
        self.paused(self.0.try_acquire(key, claim)).await
    }
    async fn renew(&self, collection: &str, aids: &[Aid]) -> Result<u64, StoreError> {
        self.paused(self.0.renew(collection, aids)).await
    }
    async fn remove_lock(&self, removal: Removal<'_>) -> Result<Released, StoreError> {
        self.paused(self.0.remove_lock(removal)).await
    }
    async fn hand_over(&self, from: &Acquisition, claim: &Claim) -> Result<HandedOver, StoreError> {
        self.paused(self.0.hand_over(from, claim)).await
    }
    async fn end_session(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        worker: Uuid,
    ) -> Result<Vec<LockKey>, StoreError> {
        self.paused(self.0.end_session(aid, reason, collections, worker)).await
    }
    async fn last_end(&self, aid: &Aid) -> Result<Option<LastEnd>, StoreError> {
        self.paused(self.0.last_end(aid)).await
    }
    async fn sweep(&self, names: &[&str], worker: Uuid, limit: usize) -> Result<Swept, StoreError> {
        self.paused(self.0.sweep(names, worker, limit)).await
    }
    async fn locks(
        &self,
        collection: &str,
        query: Query<'_>,
        limit: usize,
    ) -> Result<Vec<Lock>, StoreError> {
        self.paused(self.0.locks(collection, query, limit)).await
    }
    async fn load(&self, key: &LockKey) -> Result<Option<StoredDocument>, StoreError> {
        self.paused(self.0.load(key)).await
    }
    async fn save(
        &self,
        held: &Acquisition,
        edit: &Edit,
        until: Instant,
    ) -> Result<Saved, StoreError> {
        self.paused(self.0.save(held, edit, until)).await
    }
    async fn status(&self, names: &[&str]) -> Result<StoreStatus, StoreError> {
        self.0.status(names).await
    }
    async fn release_all(&self, collection: &str, aid: &Aid) -> Result<Vec<LockKey>, StoreError> {
        self.paused(self.0.release_all(collection, aid)).await
    }
    async fn set_place(
        &self,
        key: &LockKey,
        waiters: &Waiters,
    ) -> Result<Option<Ticket>, StoreError> {
        self.paused(self.0.set_place(key, waiters)).await
    }
    async fn expire_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
    ) -> Result<Released, StoreError> {
        self.paused(self.0.expire_in(held, page, grace)).await
    }
    async fn take_announcements(
        &self,
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<SessionEnded>, StoreError> {
        self.paused(self.0.take_announcements(worker, lease, limit)).await
    }
    async fn announced(&self, worker: Uuid, ended: &[SessionEnded]) -> Result<(), StoreError> {
        self.paused(self.0.announced(worker, ended)).await
    }
    async fn watch(&self, collection: &str) -> Result<Option<Watch>, StoreError> {
        self.0.watch(collection).await
    }
}

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
    let locks = LockManager::builder(Pausing(store)).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;

    for uri in ["/note/a", "/note/missing", "/locks/note/a", "/note/a/form", "/note/a/both"] {
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

#[actix_web::test]
async fn a_logout_that_is_dropped_is_carried_out() {
    let (_, store) = embedded().await;
    let locks = LockManager::builder(Pausing(store)).build().await.unwrap();
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
    let locks = LockManager::builder(MongoStore::new(&database)).build().await.unwrap();
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
