//! Locks live and die with their session, on every session store.

use std::{cell::Cell, rc::Rc};

use actix_doclock::{Aid, EndReason};
use actix_identity::IdentityMiddleware;
use actix_session::{
    config::{PersistentSession, TtlExtensionPolicy},
    storage::{LoadError, RedisSessionStore, SaveError, SessionKey, UpdateError},
};
use actix_session_mongo::MongoSessionStore;
use actix_web::cookie::CookieJar;
use mongodb::{
    Database,
    bson::{Document, doc},
};
use serde_json::json;
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};

use super::{heard::Heard, identity::serve_with_identity, *};
use crate::rig::{self, app::NO_DEADLINE};

/// A session store for the scenarios, and the effects of time and of outside changes on its sessions.
trait Sessions: Sized {
    type Store: SessionStore + 'static;
    /// The reason of the end of a session that was deleted in the store.
    const DELETED: EndReason;

    async fn fresh() -> Self;

    /// Another handle to the store, for this manager's application.
    async fn store(&self, locks: &LockManager) -> Self::Store;

    /// Deletes a browser's session in the store.
    async fn delete<S>(&self, locks: &LockManager, browser: &Browser<'_, S>) {
        let mut jar = CookieJar::new();
        jar.add_original(browser.jar.borrow()["id"].clone());
        let key = jar.private(&Key::from(&[7; 64])).get("id").unwrap().value().to_owned();
        self.store(locks).await.delete(&key.try_into().unwrap()).await.unwrap();
    }

    async fn revoke(&self, locks: &LockManager, aid: &Aid) {
        locks.revoke_session(aid).await.unwrap();
    }

    /// Lets days pass, with everything that the store does in that time.
    async fn days_pass(&self, _: &LockManager) {}
}

struct Cookies;

impl Sessions for Cookies {
    type Store = CookieSessionStore;
    const DELETED: EndReason = EndReason::Expired;

    async fn fresh() -> Self {
        Self
    }

    async fn store(&self, _: &LockManager) -> Self::Store {
        CookieSessionStore::default()
    }

    async fn delete<S>(&self, _: &LockManager, browser: &Browser<'_, S>) {
        browser.jar.borrow_mut().clear();
    }
}

struct Redis(String);

impl Sessions for Redis {
    type Store = RedisSessionStore;
    const DELETED: EndReason = EndReason::Expired;

    async fn fresh() -> Self {
        Self(rig::redis::shared().await)
    }

    async fn store(&self, _: &LockManager) -> Self::Store {
        RedisSessionStore::new(&*self.0).await.unwrap()
    }
}

struct Mongo(Database);

impl Sessions for Mongo {
    type Store = MongoSessionStore;
    const DELETED: EndReason = EndReason::LoggedOut;

    async fn fresh() -> Self {
        let server = rig::mongod::shared_replica_set().await;
        let sessions = Self(rig::fresh_database(server.uri()).await);
        // Prepares the collection without a tight deadline.
        let (locks, ..) = listening().await;
        sessions.store(&locks).await;
        sessions
    }

    async fn store(&self, locks: &LockManager) -> Self::Store {
        MongoSessionStore::builder(&self.0)
            .collection("doclock.session")
            .id_key("doclock.aid")
            .on_end(locks.session_ends())
            .deadline(NO_DEADLINE)
            .without_sweeps()
            .build()
            .await
            .unwrap()
    }

    async fn revoke(&self, locks: &LockManager, aid: &Aid) {
        self.store(locks).await.revoke(aid.as_str()).await.unwrap();
    }

    async fn days_pass(&self, locks: &LockManager) {
        let aged = |date: &str| doc! { "$subtract": [date, 2 * 24 * 60 * 60 * 1000_i64] };
        let dates = doc! { "due": aged("$due"), "expires": aged("$expires") };
        let records = self.0.collection::<Document>("doclock.session");
        records.update_many(doc! {}, vec![doc! { "$set": dates }]).await.unwrap();
        self.store(locks).await.sweep().await.unwrap();
    }
}

/// A manager that sweeps only when it is told to, with a listener.
async fn listening() -> (LockManager, MemoryStore, Heard) {
    let heard = Heard::default();
    let settings = |locks| heard.listening(locks).without_reaper().deadline(NO_DEADLINE);
    let (locks, store) = embedded_with(settings).await;
    (locks, store, heard)
}

/// Longer than any test should take, and shorter than the waits in them.
const SOON: Duration = Duration::from_secs(60);

/// An application in which each request extends its session, and some requests take long.
struct Extending<S> {
    app: S,
    /// Lets a slow request go on.
    goes_on: web::Data<Notify>,
    begun: web::Data<Begun>,
}

/// The handler of a slow request has begun.
#[derive(Default)]
struct Begun(Notify);

async fn serve_extending<K: SessionStore + 'static>(
    locks: &LockManager,
    store: K,
) -> Extending<impl Service<Request, Response = ServiceResponse, Error = Error>> {
    let lifecycle = PersistentSession::default()
        .session_ttl_extension_policy(TtlExtensionPolicy::OnEveryRequest);
    let session = SessionMiddleware::builder(store, Key::from(&[7; 64]))
        .cookie_secure(false)
        .session_lifecycle(lifecycle)
        .build();
    let session = locks.session(SessionWrap(session)).identify(person).longest_wait(SOON * 10);
    // Slow enough that its answer could follow that of a later logout.
    async fn wait(goes_on: &Notify) {
        sleep(Duration::from_millis(300)).await;
        goes_on.notified().await;
    }
    async fn slow(goes_on: web::Data<Notify>) -> impl Responder {
        wait(&goes_on).await;
        HttpResponse::Ok().cookie(Cookie::new("own", "1")).finish()
    }
    async fn edit_slowly(
        goes_on: web::Data<Notify>,
        begun: web::Data<Begun>,
        locks: SessionLocks,
        when: web::Path<String>,
    ) -> Result<impl Responder, LockError> {
        if *when == "before" {
            locks.lock::<Note>("a".to_owned()).await?;
        }
        begun.0.notify_one();
        wait(&goes_on).await;
        if *when == "after" {
            locks.lock::<Note>("a".to_owned()).await?;
        }
        Ok(HttpResponse::Ok())
    }
    async fn change_slowly(
        goes_on: web::Data<Notify>,
        session: Session,
        what: web::Path<String>,
    ) -> impl Responder {
        wait(&goes_on).await;
        if *what == "login" {
            session.renew();
            session.insert("name", "alice").unwrap();
            return HttpResponse::Ok().finish();
        }
        session.insert("flash", "it has failed").unwrap();
        HttpResponse::InternalServerError().finish()
    }
    let goes_on = web::Data::new(Notify::new());
    let begun = web::Data::new(Begun::default());
    let app = App::new()
        .wrap(session)
        .app_data(goes_on.clone())
        .app_data(begun.clone())
        .configure(routes)
        .route("/slow", web::get().to(slow))
        .route("/slow/edit/{when}", web::post().to(edit_slowly))
        .route("/slow/change/{what}", web::post().to(change_slowly));
    Extending { app: test::init_service(app).await, goes_on, begun }
}

/// The names of the cookies in an answer.
fn cookies_in(answer: &Answer) -> Vec<String> {
    let cookies = answer.headers.get_all("set-cookie");
    cookies.map(|it| it.to_str().unwrap().split('=').next().unwrap().to_owned()).collect()
}

/// One test of each scenario for each session store.
macro_rules! on_every_session_store {
    ($(async fn $scenario:ident<$k:ident>($sessions:ident: $type:ty) $body:block)*) => {
        mod scenarios {
            use super::*;
            $(pub(super) async fn $scenario<$k: Sessions>($sessions: $type) $body)*
        }
        on_every_session_store!(@on cookies Cookies: $($scenario)*);
        on_every_session_store!(@on redis Redis: $($scenario)*);
        on_every_session_store!(@on mongo Mongo: $($scenario)*);
    };
    (@on $name:ident $store:ident: $($scenario:ident)*) => {
        mod $name {
            use super::*;
            $(#[actix_web::test] async fn $scenario() {
                scenarios::$scenario($store::fresh().await).await;
            })*
        }
    };
}

on_every_session_store! {
    async fn logging_out_frees_every_document_of_the_session<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        let (alice, bob) = (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
        for note in ["/note/a", "/note/b"] {
            alice.post(note).await.token();
            assert_eq!(bob.post(note).await.status, 423);
        }
        assert_eq!(alice.post("/purge").await.status, 204);
        for note in ["/note/a", "/note/b"] {
            assert_eq!(bob.post(note).await.status, 200, "free by the time of the answer");
        }
    }

    async fn clearing_the_session_or_removing_its_aid_frees_its_documents_too<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        for end in ["/clear", "/forget"] {
            let alice = Browser::logged_in(&app, "alice").await;
            alice.post("/note/a").await.token();
            alice.post(end).await;
            assert!(locks.inspect(&key("a")).await.unwrap().is_none(), "{end}");
            // The browser goes on with the rest of its session.
            assert_eq!(alice.post("/note/a").await.status, 200);
            alice.post("/purge").await;
        }
    }

    async fn a_wait_ends_with_its_session_and_brings_nothing_back<K>(sessions: K) {
        let (locks, store) = embedded().await;
        let other_server = LockManager::builder(store.clone()).build().await.unwrap();
        other_server.register::<Note>().await.unwrap();
        let here = serve_extending(&locks, sessions.store(&locks).await).await;
        let there = serve_extending(&other_server, sessions.store(&other_server).await).await;
        let _held = locks.job("a job").acquire(&key("a"), Wait::no()).await.unwrap();
        for (end, is_elsewhere, after_ms) in [("/purge", false, 300), ("/purge", false, 20), ("/switch/bob", false, 20), ("/clear", true, 300), ("/switch/bob", true, 300)] {
            let alice = Browser::logged_in(&here.app, "alice").await;
            let waiting = alice.copy();
            let waits = waiting.post_json("/locks/note/a", json!({ "wait_ms": 600_000 }));
            let ends = async {
                sleep(Duration::from_millis(after_ms)).await;
                if is_elsewhere { alice.at(&there.app).post(end).await } else { alice.post(end).await }
            };
            let waited = timeout(SOON, async { tokio::join!(waits, ends).0 }).await.unwrap();
            assert_eq!(waited.problem(401)["code"], "session_ended", "{end}");
            assert_eq!(cookies_in(&waited), [""; 0], "{end}");
        }
    }

    async fn a_slow_answer_does_not_undo_a_logout<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let Extending { app, goes_on, .. } = serve_extending(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        let slow = alice.copy();
        let (extended, ()) = tokio::join!(slow.get("/slow"), async { goes_on.notify_one() });
        assert_eq!(cookies_in(&extended), ["own", "id"], "otherwise it extends its session");
        for end in ["/purge", "/switch/bob"] {
            let alice = Browser::logged_in(&app, "alice").await;
            let slow = alice.copy();
            let ends = async {
                alice.post(end).await;
                goes_on.notify_one();
            };
            let (answer, ()) = tokio::join!(slow.get("/slow"), ends);
            assert_eq!(cookies_in(&answer), ["own"], "{end}");
        }
    }

    async fn a_slow_failure_that_changes_the_session_does_not_undo_a_logout<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let Extending { app, goes_on, .. } = serve_extending(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        let slow = alice.copy();
        let ends = async {
            alice.post("/purge").await;
            goes_on.notify_one();
        };
        let (answer, ()) = tokio::join!(slow.post("/slow/change/fails"), ends);
        assert_eq!(answer.status, 500);
        assert_eq!(cookies_in(&answer), [""; 0]);
    }

    async fn a_slow_login_soon_after_an_end_keeps_its_cookie<K>(sessions: K) {
        let (locks, store) = embedded().await;
        let Extending { app, goes_on, .. } = serve_extending(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        alice.post("/note/a").await.token();
        let aid = locks.inspect(&key("a")).await.unwrap().unwrap().aid;
        // The browser has not heard of it.
        locks.end_session(&aid).await.unwrap();
        store.advance(Duration::from_secs(20));
        let login = alice.post("/slow/change/login");
        let (answer, ()) = tokio::join!(login, async { goes_on.notify_one() });
        assert_eq!(cookies_in(&answer), ["id"]);
    }

    async fn a_slow_request_keeps_no_lock_for_a_session_that_has_ended_meanwhile<K>(sessions: K) {
        let (locks, store) = embedded().await;
        let Extending { app, goes_on, begun } = serve_extending(&locks, sessions.store(&locks).await).await;
        for when in ["before", "after"] {
            let alice = Browser::logged_in(&app, "alice").await;
            let slow = alice.copy();
            let ends = async {
                begun.0.notified().await;
                sleep(Duration::from_millis(300)).await;
                alice.post("/purge").await;
                if when == "after" {
                    // The request began more than a minute ago, and its session has ended since.
                    store.advance(Duration::from_millis(60_200));
                }
                goes_on.notify_one();
            };
            let uri = format!("/slow/edit/{when}");
            let (answer, ()) = tokio::join!(slow.post(&uri), ends);
            if when == "after" {
                assert_eq!(answer.problem(401)["code"], "session_ended");
            }
            assert_eq!(cookies_in(&answer), [""; 0], "{when}");
            assert!(locks.list().await.unwrap().is_empty(), "{when}");
        }
    }

    async fn a_wait_that_ends_in_vain_extends_no_session<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let Extending { app, .. } = serve_extending(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        let held = locks.job("a job").acquire(&key("a"), Wait::no()).await.unwrap();
        let refused = alice.post_json("/locks/note/a", json!({ "wait_ms": 400 })).await;
        refused.problem(423);
        assert_eq!(cookies_in(&refused), [""; 0], "another tab may have changed the session meanwhile");
        assert_eq!(cookies_in(&alice.post("/locks/note/a").await), ["id"], "the next request extends it");
        drop(held);
    }

    async fn a_cookie_may_be_bound_to_its_host<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let store = sessions.store(&locks).await;
        let session = SessionMiddleware::builder(store, Key::from(&[7; 64])).cookie_name("__Host-id".to_owned());
        let session = locks.session(SessionWrap(session.build())).identify(person);
        let app = test::init_service(App::new().wrap(session).configure(routes)).await;
        let alice = Browser::new(&app);
        for (uri, has_cookie) in [("/login/alice", true), ("/renew", true), ("/note/a", false), ("/purge", true)] {
            let answer = alice.post(uri).await;
            assert!(answer.status.is_success(), "{uri}");
            // Otherwise browsers ignore a cookie of such a name.
            let cookie = answer.header("set-cookie").map(str::to_owned);
            let is_bound = |it: &String| {
                it.starts_with("__Host-id=") && it.contains("; Secure") && it.contains("; Path=/") && !it.contains("Domain")
            };
            assert_eq!(cookie.as_ref().map(is_bound), has_cookie.then_some(true), "{uri}: {cookie:?}");
        }
        assert!(!alice.has_cookie() && locks.list().await.unwrap().is_empty());
    }

    async fn a_file_carries_no_cookie<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let Extending { app, .. } = serve_extending(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        assert_eq!(cookies_in(&alice.get("/locks").await), ["id"]);
        for file in ["client.js", "client.d.ts"] {
            let answer = alice.get(&format!("/locks/{file}")).await;
            assert_eq!(answer.status, 200);
            assert_eq!(cookies_in(&answer), [""; 0]);
            assert_eq!(answer.header("cache-control"), Some("private, no-cache"));
        }
    }

    async fn a_renewed_session_keeps_its_locks<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        let (alice, bob) = (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
        let token = alice.post("/note/a").await.token();
        alice.post("/renew").await;
        alice.post("/login/alice").await;
        assert_eq!(bob.post("/note/a").await.status, 423);
        assert_eq!(alice.put("/note/a", "new").await.token(), token);
    }

    async fn a_lock_taken_before_the_login_is_released_by_it<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        let visitor = Browser::new(&app);
        visitor.post("/note/a").await.token();
        visitor.post("/login/alice").await;
        assert!(locks.list().await.unwrap().is_empty());
        visitor.post("/note/a").await.token();
        assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
    }

    async fn only_a_lock_that_is_kept_makes_a_session<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        alice.post("/note/a").await.token();
        let visitor = Browser::new(&app);
        for refused in ["/note/a", "/note/missing", "/note/b/answer/500", "/locks/note/a"] {
            assert!(visitor.post(refused).await.status.is_client_error() || refused.contains("500"));
            assert!(!visitor.has_cookie(), "{refused} has set a cookie");
        }
        for lock_free in ["/plain", "/locks"] {
            assert_eq!(visitor.get(lock_free).await.status, 200);
            assert!(!visitor.has_cookie(), "{lock_free} has set a cookie");
        }
        assert_eq!(visitor.post("/note/b").await.status, 200);
        assert!(visitor.has_cookie());
    }

    async fn the_aid_exists_from_the_login_so_simultaneous_first_requests_share_it<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        let other_tab = alice.copy();
        let token = alice.post("/note/a").await.token();
        assert_eq!(other_tab.post("/note/a").await.token(), token);
    }

    async fn a_recently_ended_session_is_refused<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        alice.post("/note/a").await.token();
        let aid = locks.inspect(&key("a")).await.unwrap().unwrap().aid;
        // The other tab logs out, but this one still sends the session: in a request under way, or with
        // a cookie that a cookie store cannot revoke.
        locks.end_session(&aid).await.unwrap();
        alice.post("/note/a").await.problem(401);
        alice.put("/note/a", "new").await.problem(401);
        alice.post("/locks/note/a").await.problem(401);
        assert_eq!(holder_of(&locks, "a").await, None);
    }

    async fn a_session_that_came_back_later_gets_a_new_aid_and_may_lock<K>(sessions: K) {
        let (locks, store) = embedded().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        let (alice, bob) = (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
        alice.post("/note/a").await.token();
        let ended = locks.inspect(&key("a")).await.unwrap().unwrap().aid;
        locks.end_session(&ended).await.unwrap();
        store.advance(Duration::from_secs(61));
        let token = alice.post("/note/a").await.token();
        assert_ne!(locks.inspect(&key("a")).await.unwrap().unwrap().aid, ended);
        assert_eq!(alice.put("/note/a", "new").await.token(), token);
        assert_eq!(bob.post("/note/a").await.status, 423);
    }

    async fn a_lock_taken_by_the_request_that_ends_the_session_goes_with_it<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        for browser in [Browser::new(&app), Browser::logged_in(&app, "alice").await] {
            assert_eq!(browser.post("/note/a/purge").await.status, 204);
            assert!(locks.inspect(&key("a")).await.unwrap().is_none());
        }
    }

    async fn locks_of_a_session_are_renewed_by_its_requests_once_in_a_third_of_the_ttl<K>(sessions: K) {
        const TTL: Duration = Duration::from_secs(600);
        let (locks, store) = embedded_with(|settings| settings.ttl(TTL)).await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        alice.post("/note/a").await.token();
        alice.post("/note/b").await.token();
        let left = async |id: &str| {
            locks.shutdown().await;
            locks.inspect(&key(id)).await.unwrap().map(|lock| lock.expires_in().as_secs())
        };
        // The login counts as activity, so no renewal is due yet.
        for id in ["a", "b"] {
            store.age(&key(id), Duration::from_secs(500));
        }
        alice.get("/plain").await;
        assert!(left("a").await.unwrap() <= 100, "not due");

        // Another server does not know of that activity.
        let other = LockManager::builder(store.clone()).ttl(TTL).build().await.unwrap();
        other.register::<Note>().await.unwrap();
        let other_app = serve(&other, sessions.store(&other).await).await;
        let there = Browser { app: &other_app, jar: alice.jar.clone() };
        there.get("/plain").await;
        other.shutdown().await;
        assert!(left("a").await.unwrap() > 300, "renewed");
        assert!(left("b").await.unwrap() > 300, "all locks are renewed");
        store.age(&key("a"), Duration::from_secs(500));
        there.get("/plain").await;
        other.shutdown().await;
        assert!(left("a").await.unwrap() <= 100, "not due again");
    }

    async fn logging_out_or_clearing_the_session_is_announced_once<K>(sessions: K) {
        for end in ["/purge", "/clear"] {
            let (locks, store, heard) = listening().await;
            let app = serve(&locks, sessions.store(&locks).await).await;
            let alice = Browser::logged_in(&app, "alice").await;
            let aid = locked_by(&alice, &locks).await;
            alice.post(end).await;
            assert!(is_free(&locks).await, "the locks are gone with the answer");
            let told = told_in_the_end(&sessions, &locks, &store, &heard).await;
            assert_eq!(told, [(aid, EndReason::LoggedOut)], "{end}");
        }
    }

    async fn a_login_that_has_passed_its_deadline_is_a_logout<K>(sessions: K) {
        let (locks, store, heard) = listening().await;
        let deadline = Some(Duration::ZERO);
        let identity = IdentityMiddleware::builder().login_deadline(deadline).build();
        let app = serve_with_identity(&locks, sessions.store(&locks).await, identity).await;
        let alice = Browser::new(&app);
        let aid = locked_by(&alice, &locks).await;
        alice.post("/identity/login").await;
        assert!(!is_free(&locks).await, "not yet");
        // The clock of actix-identity cannot be set.
        tokio::time::sleep(Duration::from_millis(20)).await;
        alice.get("/plain").await;
        assert!(is_free(&locks).await, "the locks are gone with the answer");
        let told = told_in_the_end(&sessions, &locks, &store, &heard).await;
        assert_eq!(told, [(aid, EndReason::LoggedOut)]);
    }

    async fn a_session_that_was_deleted_in_its_store_is_announced_once<K>(sessions: K) {
        let (locks, store, heard) = listening().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        let aid = locked_by(&alice, &locks).await;
        sessions.delete(&locks, &alice).await;
        assert_eq!(alice.post("/note/a").await.status, 423, "her browser has a new session now");
        let told = told_in_the_end(&sessions, &locks, &store, &heard).await;
        assert_eq!(told, [(aid, K::DELETED)]);
        assert!(is_free(&locks).await);
    }

    async fn a_revoked_session_loses_its_locks_at_once_and_is_announced_once<K>(sessions: K) {
        let (locks, store, heard) = listening().await;
        let app = serve(&locks, sessions.store(&locks).await).await;
        let alice = Browser::logged_in(&app, "alice").await;
        let aid = locked_by(&alice, &locks).await;
        sessions.revoke(&locks, &aid).await;
        assert!(is_free(&locks).await, "the locks are gone when the call returns");
        assert_eq!(alice.put("/note/a", "too late").await.status.as_u16() / 100, 4);
        let told = told_in_the_end(&sessions, &locks, &store, &heard).await;
        assert_eq!(told, [(aid, EndReason::Revoked)]);
        assert_eq!(text_of(&store, "a"), "old");
    }
}

/// Makes the browser lock both notes, and returns its session.
async fn locked_by<S>(browser: &Browser<'_, S>, locks: &LockManager) -> Aid
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    for note in ["/note/a", "/note/b"] {
        browser.post(note).await.token();
    }
    locks.inspect(&key("a")).await.unwrap().unwrap().aid
}

async fn is_free(locks: &LockManager) -> bool {
    locks.list().await.unwrap().is_empty()
}

/// The announced ends, once nothing is left that could expire. Asserts that each named both notes.
async fn told_in_the_end(
    sessions: &impl Sessions,
    locks: &LockManager,
    store: &MemoryStore,
    heard: &Heard,
) -> Vec<(Aid, EndReason)> {
    sessions.days_pass(locks).await;
    store.advance(Duration::from_secs(60));
    locks.sweep().await.unwrap();
    sessions.days_pass(locks).await;
    let ended = heard.in_the_end(locks).await;
    for ended in &ended {
        let mut notes = ended.locks.clone();
        notes.sort();
        assert_eq!(notes, [key("a"), key("b")]);
    }
    ended.into_iter().map(|ended| (ended.aid, ended.reason)).collect()
}

/// A session store whose writes fail for a while.
#[derive(Clone, Default)]
pub(super) struct Faulty(Rc<Cell<Fault>>);

#[derive(Clone, Copy, Default)]
pub(super) enum Fault {
    #[default]
    None,
    Refuses,
    Hangs,
}

impl Faulty {
    pub(super) fn set(&self, fault: Fault) {
        self.0.set(fault);
    }

    async fn check(&self) -> Result<(), anyhow::Error> {
        match self.0.get() {
            Fault::None => Ok(()),
            Fault::Refuses => anyhow::bail!("the session store is down"),
            Fault::Hangs => std::future::pending().await,
        }
    }
}

type State = std::collections::HashMap<String, String>;
type Ttl = actix_web::cookie::time::Duration;

impl SessionStore for Faulty {
    async fn load(&self, key: &SessionKey) -> Result<Option<State>, LoadError> {
        CookieSessionStore::default().load(key).await
    }

    async fn save(&self, state: State, ttl: &Ttl) -> Result<SessionKey, SaveError> {
        self.check().await.map_err(SaveError::Other)?;
        CookieSessionStore::default().save(state, ttl).await
    }

    async fn update(
        &self,
        key: SessionKey,
        state: State,
        ttl: &Ttl,
    ) -> Result<SessionKey, UpdateError> {
        self.check().await.map_err(UpdateError::Other)?;
        CookieSessionStore::default().update(key, state, ttl).await
    }

    async fn update_ttl(&self, key: &SessionKey, ttl: &Ttl) -> Result<(), anyhow::Error> {
        CookieSessionStore::default().update_ttl(key, ttl).await
    }

    async fn delete(&self, key: &SessionKey) -> Result<(), anyhow::Error> {
        self.check().await?;
        CookieSessionStore::default().delete(key).await
    }
}

#[actix_web::test]
async fn a_logout_that_could_not_be_saved_releases_nothing() {
    let (locks, _) = embedded().await;
    let sessions = Faulty::default();
    let app = serve(&locks, sessions.clone()).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    sessions.set(Fault::Refuses);
    for end in ["/purge", "/clear"] {
        assert_eq!(alice.post(end).await.status, 500);
        assert!(locks.inspect(&key("a")).await.unwrap().is_some(), "{end}");
    }
    sessions.set(Fault::None);
    assert_eq!(alice.put("/note/a", "new").await.token(), token, "the session lives on");
}

#[actix_web::test]
async fn a_first_lock_whose_session_could_not_be_saved_is_given_back() {
    let (locks, _) = embedded().await;
    let sessions = Faulty::default();
    sessions.set(Fault::Refuses);
    let app = serve(&locks, sessions).await;
    assert_eq!(Browser::new(&app).post("/note/a").await.status, 500);
    assert!(
        locks.inspect(&key("a")).await.unwrap().is_none(),
        "otherwise no session could ever release it"
    );
}

/// A cookie from before the login is somebody else's: they have set it, or have used this browser before.
#[actix_web::test]
async fn the_aid_follows_the_person() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let browser = Browser::new(&app);
    browser.post("/note/a").await.token();
    let before = browser.at(&app);
    assert_eq!(browser.post("/login/alice").await.status, 204);
    assert!(locks.list().await.unwrap().is_empty(), "the visitor's lock has gone");
    browser.post("/note/a").await.token();
    assert_eq!(before.get("/locks").await.json(), serde_json::json!([]));
    assert_eq!(before.delete("/locks/note/a").await.status, 204);
    before.post("/note/a").await.problem(423);
    let lock = locks.inspect(&key("a")).await.unwrap().expect("alice still holds it");

    // Another person in the same session.
    let hers = browser.at(&app);
    assert_eq!(browser.post("/login/bob").await.status, 204);
    assert!(locks.list().await.unwrap().is_empty());
    let form = serde_json::json!({ "text": "of bob" });
    for browser in [&browser, &hers] {
        let put = browser.request(Method::PUT, "/note/a").set_json(&form);
        assert!(browser.send(put).await.status.is_client_error());
    }
    assert_eq!(text_of(&store, "a"), "old");
    browser.post("/note/a").await.token();
    assert_ne!(locks.inspect(&key("a")).await.unwrap().unwrap().aid, lock.aid);

    // The same person logs in once more.
    assert_eq!(browser.post("/login/bob").await.status, 204);
    assert_eq!(locks.list().await.unwrap().len(), 1);
    // And the name is taken out of the session, which goes on.
    assert_eq!(browser.post("/nobody").await.status, 204);
    assert!(locks.list().await.unwrap().is_empty());
}

#[actix_web::test]
async fn a_lock_that_is_taken_right_after_the_login_belongs_to_the_new_person() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let browser = Browser::new(&app);
    browser.post("/note/a").await.token();
    for (name, id) in [("alice", "b"), ("bob", "a")] {
        let answer = browser.post(&format!("/login/{name}/edit/{id}")).await;
        assert_eq!(answer.status, 204);
        let held: Vec<_> = locks.list().await.unwrap().iter().map(|it| it.key.clone()).collect();
        assert_eq!(held, [key(id)]);
        assert_eq!(browser.put(&format!("/note/{id}"), name).await.status, 200);
    }
}
