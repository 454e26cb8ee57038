//! The crate inside an application: an in-process server, and browsers with cookie jars.

mod access;
mod admin;
mod api;
mod asks;
mod cancellation;
mod clients;
mod collections;
mod commands;
mod documents;
mod editor;
mod events;
mod forms;
mod freeze;
mod greed;
mod heard;
mod identity;
mod idle;
mod lost_replies;
mod metrics;
mod person_changed;
mod problems;
mod renewals;
mod session_store;
mod sessions;
mod several;
mod shared;
mod spelling;
mod tabs;
mod take_over;
mod titles;
mod two_tenants;
mod versions;
mod waiting;

use std::{cell::RefCell, collections::BTreeMap, time::Duration};

use actix_doclock::limits::Limits;
use actix_doclock::web::{LockingSession, Problem};
use actix_doclock::{
    Actor, HeldDoc, Lock, LockError, LockKey, LockManager, LockManagerBuilder, Lockable, LockedDoc,
    MemoryStore, SessionLocks, SharedDoc, Wait, lock_api,
};
use actix_http::Request;
use actix_session::{
    Session, SessionMiddleware,
    storage::{CookieSessionStore, SessionStore},
};
use actix_session_mongo::SessionWrap;
use actix_web::{
    App, Error, HttpResponse, Responder,
    body::to_bytes,
    cookie::{Cookie, Key},
    dev::{Service, ServiceResponse},
    http::{Method, StatusCode, header::HeaderMap},
    test::{self, TestRequest},
    web,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The document that these tests edit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    #[serde(rename = "_id")]
    id: String,
    text: String,
}

impl Lockable for Note {
    type Id = String;
    const COLLECTION: &'static str = "note";
}

/// Two tabs of a browser.
const ONE: &str = "11111111-1111-4111-8111-111111111111";
const TWO: &str = "22222222-2222-4222-8222-222222222222";

#[derive(Deserialize)]
struct Form {
    text: String,
}

fn key(id: &str) -> LockKey {
    LockKey::of::<Note>(id.to_owned()).unwrap()
}

/// A manager on a new embedded store with the notes `a` and `b`.
async fn embedded() -> (LockManager, MemoryStore) {
    embedded_with(|settings| settings).await
}

async fn embedded_with_limits(limits: Limits) -> (LockManager, MemoryStore) {
    embedded_with(|settings| settings.limits(limits)).await
}

async fn embedded_with(
    settings: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder,
) -> (LockManager, MemoryStore) {
    let store = MemoryStore::new();
    for id in ["a", "b"] {
        store.put(id.to_owned(), &Note { id: id.to_owned(), text: "old".to_owned() }).unwrap();
    }
    let defaults = LockManager::builder(store.clone())
        .ttl(Duration::from_secs(60))
        .break_policy(|actor, _| actor.has_role("chief"));
    let locks = settings(defaults).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    (locks, store)
}

fn text_of(store: &MemoryStore, id: &str) -> String {
    let notes = store.all::<Note>().unwrap();
    notes.into_iter().find(|note| note.id == id).unwrap().text
}

/// A session stores its user under "name"; "root" is a chief.
fn person(session: &Session) -> Option<Actor> {
    let name = session.get::<String>("name").ok()??;
    let actor = Actor::new(&name).with_id(&name);
    Some(if name == "root" { actor.with_role("chief") } else { actor })
}

/// The routes of a small application.
fn routes(config: &mut web::ServiceConfig) {
    async fn login(session: Session, name: web::Path<String>) -> impl Responder {
        session.renew();
        session.insert("name", name.into_inner()).unwrap();
        HttpResponse::NoContent()
    }
    async fn switch(session: Session, name: web::Path<String>) -> impl Responder {
        session.clear();
        session.renew();
        session.insert("name", name.into_inner()).unwrap();
        HttpResponse::NoContent()
    }
    async fn edit(note: LockedDoc<Note>) -> impl Responder {
        HttpResponse::Ok().json(&*note)
    }
    async fn edit_with_form(_: LockedDoc<Note>, _: web::Json<Form>) -> impl Responder {
        HttpResponse::NoContent()
    }
    async fn edit_and_answer(_: LockedDoc<Note>, path: web::Path<(String, u16)>) -> impl Responder {
        HttpResponse::build(StatusCode::from_u16(path.1).unwrap()).finish()
    }
    async fn edit_slowly_and_answer(
        _: LockedDoc<Note>,
        path: web::Path<(String, u16)>,
    ) -> impl Responder {
        tokio::time::sleep(Duration::from_millis(200)).await;
        HttpResponse::build(StatusCode::from_u16(path.1).unwrap()).finish()
    }
    async fn edit_both(
        _: LockedDoc<Note>,
        locks: SessionLocks,
    ) -> Result<impl Responder, LockError> {
        locks.lock::<Note>("b".to_owned()).await?;
        Ok(HttpResponse::NoContent())
    }
    async fn read(note: SharedDoc<Note>) -> impl Responder {
        HttpResponse::Ok().json(&*note)
    }
    async fn read_to_the_end(note: SharedDoc<Note>) -> Result<impl Responder, LockError> {
        note.release().await?;
        Ok(HttpResponse::NoContent())
    }
    async fn login_and_edit(
        session: Session,
        locks: SessionLocks,
        path: web::Path<(String, String)>,
    ) -> Result<impl Responder, LockError> {
        session.renew();
        session.insert("name", &path.0).unwrap();
        locks.lock::<Note>(path.1.clone()).await?;
        Ok(HttpResponse::NoContent())
    }
    async fn create(
        locks: SessionLocks,
        id: web::Path<String>,
    ) -> Result<impl Responder, LockError> {
        let note = Note { id: id.clone(), text: "created".to_owned() };
        let _created = locks.create::<Note>(id.into_inner(), note).await?;
        Ok(HttpResponse::Created())
    }
    async fn take_both(locks: SessionLocks) -> Result<impl Responder, LockError> {
        // A handler may treat a refusal as an answer.
        match locks.lock_all(["b", "a", "b"].map(key), Wait::no()).await {
            Ok(taken) => Ok(taken.len().to_string()),
            Err(LockError::Held(lock)) => Ok(format!("{} is held", lock.key)),
            Err(e) => Err(e),
        }
    }
    async fn edit_and_purge(_: LockedDoc<Note>, session: Session) -> impl Responder {
        session.purge();
        HttpResponse::NoContent()
    }
    async fn view(note: Result<LockedDoc<Note>, LockError>) -> impl Responder {
        match note {
            Ok(note) => format!("edit {}", note.text),
            Err(error) => format!("read only: {error}"),
        }
    }
    async fn save(
        mut note: HeldDoc<Note>,
        form: web::Json<Form>,
    ) -> Result<impl Responder, LockError> {
        note.text = form.into_inner().text;
        note.save().await?;
        Ok(HttpResponse::Ok().json(&*note))
    }
    async fn save_and_release(
        mut note: HeldDoc<Note>,
        form: web::Json<Form>,
    ) -> Result<impl Responder, LockError> {
        note.text = form.into_inner().text;
        note.save_and_release().await?;
        Ok(HttpResponse::NoContent())
    }
    async fn close_all(locks: SessionLocks) -> Result<impl Responder, LockError> {
        let keys = locks.release_all().await?;
        Ok(HttpResponse::Ok().json(keys.iter().map(ToString::to_string).collect::<Vec<_>>()))
    }
    let session = |change: fn(&Session)| {
        web::post().to(move |session: Session| {
            change(&session);
            async { HttpResponse::NoContent().finish() }
        })
    };
    config
        .app_data(Problem::json_config())
        .route("/login/{name}", web::post().to(login))
        .route("/switch/{name}", web::post().to(switch))
        .route("/renew", session(Session::renew))
        .route("/purge", session(Session::purge))
        .route("/clear", session(Session::clear))
        .route("/forget", session(|session| drop(session.remove("doclock.aid"))))
        .route("/login/{name}/edit/{id}", web::post().to(login_and_edit))
        .route("/create/{id}", web::post().to(create))
        .route("/nobody", session(|session| drop(session.remove("name"))))
        .route("/theme", session(|session| session.insert("theme", "dark").unwrap()))
        .route("/plain", web::get().to(HttpResponse::Ok))
        .route("/close-all", web::post().to(close_all))
        .service(web::resource("/note/{id}").post(edit).put(save))
        .route("/note/{id}/done", web::put().to(save_and_release))
        .route("/note/{id}/form", web::post().to(edit_with_form))
        .route("/note/{id}/both", web::post().to(edit_both))
        .route("/note/{id}/purge", web::post().to(edit_and_purge))
        .route("/note/{id}/read", web::post().to(read))
        .route("/note/{id}/read-to-the-end", web::post().to(read_to_the_end))
        .route("/both", web::post().to(take_both))
        .route("/note/{id}/view", web::get().to(view))
        .route("/nowhere/{other}", web::post().to(edit))
        .route("/note/{id}/slow/{status}", web::post().to(edit_slowly_and_answer))
        .service(web::resource("/note/{id}/answer/{status}").post(edit_and_answer))
        .service(web::scope("/locks").configure(lock_api));
}

/// The application in this process, on a session store.
async fn serve<K: SessionStore + 'static>(
    locks: &LockManager,
    sessions: K,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
    let session =
        SessionMiddleware::builder(sessions, Key::from(&[7; 64])).cookie_secure(false).build();
    let session = locks.session(SessionWrap(session)).identify(person);
    let app = App::new().wrap(session).configure(routes);
    test::init_service(app).await
}

async fn serve_with_cookies(
    locks: &LockManager,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
    serve(locks, CookieSessionStore::default()).await
}

/// The same, with other settings of the wrap.
async fn serve_with(
    locks: &LockManager,
    settings: impl FnOnce(
        LockingSession<SessionMiddleware<CookieSessionStore>>,
    ) -> LockingSession<SessionMiddleware<CookieSessionStore>>,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
    let session = SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
    let session = locks.session(session.cookie_secure(false).build()).identify(person);
    test::init_service(App::new().wrap(settings(session)).configure(routes)).await
}

/// A client that keeps cookies.
struct Browser<'a, S> {
    app: &'a S,
    jar: RefCell<BTreeMap<String, Cookie<'static>>>,
}

/// The answer to a request.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e}: {:?}", String::from_utf8_lossy(&self.body)))
    }

    fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    fn token(&self) -> String {
        self.header("lock-token").expect("a lock is announced").to_owned()
    }

    /// Asserts an RFC 9457 answer of this status and returns its members.
    fn problem(&self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        let body = self.json();
        assert_eq!(body["status"], status);
        assert!(body["title"].is_string() && body["detail"].is_string(), "{body}");
        body
    }
}

impl<'a, S> Browser<'a, S>
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    fn new(app: &'a S) -> Self {
        Self { app, jar: RefCell::default() }
    }

    /// Another browser with the same cookies: a copied cookie, or a request sent before the answer to
    /// another one has arrived.
    fn copy(&self) -> Self {
        Self { app: self.app, jar: self.jar.clone() }
    }

    /// The same browser at another server.
    fn at<'b, T>(&self, server: &'b T) -> Browser<'b, T> {
        Browser { app: server, jar: self.jar.clone() }
    }

    fn has_cookie(&self) -> bool {
        !self.jar.borrow().is_empty()
    }

    fn request(&self, method: Method, uri: &str) -> TestRequest {
        let request = TestRequest::default().method(method).uri(uri);
        self.jar.borrow().values().fold(request, |request, cookie| request.cookie(cookie.clone()))
    }

    async fn send(&self, request: TestRequest) -> Answer {
        let response = match self.app.call(request.to_request()).await {
            Ok(response) => response.into_parts().1,
            Err(error) => error.error_response(),
        };
        for cookie in response.cookies() {
            let (name, cookie) = (cookie.name().to_owned(), cookie.into_owned());
            if cookie.value().is_empty() {
                self.jar.borrow_mut().remove(&name);
            } else {
                self.jar.borrow_mut().insert(name, cookie);
            }
        }
        let (head, body) = response.into_parts();
        let body = to_bytes(body).await.unwrap_or_else(|_| panic!("the body can be read"));
        Answer { status: head.status(), headers: head.headers().clone(), body: body.to_vec() }
    }

    async fn get(&self, uri: &str) -> Answer {
        self.send(self.request(Method::GET, uri)).await
    }

    async fn post(&self, uri: &str) -> Answer {
        self.send(self.request(Method::POST, uri)).await
    }

    async fn delete(&self, uri: &str) -> Answer {
        self.send(self.request(Method::DELETE, uri)).await
    }

    async fn put(&self, uri: &str, text: &str) -> Answer {
        let form = serde_json::json!({ "text": text });
        self.send(self.request(Method::PUT, uri).set_json(form)).await
    }

    async fn post_json(&self, uri: &str, body: Value) -> Answer {
        self.send(self.request(Method::POST, uri).set_json(body)).await
    }

    async fn with_token(&self, method: Method, uri: &str, token: &str) -> Answer {
        let form = serde_json::json!({ "text": "with token" });
        let request = self.request(method, uri).insert_header(("lock-token", token));
        self.send(request.set_json(form)).await
    }

    async fn logged_in(app: &'a S, name: &str) -> Self {
        let browser = Self::new(app);
        let answer = browser.post(&format!("/login/{name}")).await;
        assert_eq!(answer.status, StatusCode::NO_CONTENT);
        browser
    }
}

/// The label of the holder of the lock on a note, once all work under way has ended.
async fn holder_of(locks: &LockManager, id: &str) -> Option<String> {
    locks.shutdown().await;
    let lock: Option<Lock> = locks.inspect(&key(id)).await.unwrap();
    lock.and_then(|lock| lock.holder).map(|holder| holder.label)
}
