//! The session store on a real replica set, in an application without locks.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod acceptance;
mod changes;
mod ends;
mod keys;
mod timeouts;
mod users;

/// Real servers, shared with the tests of the other crates.
#[path = "../../../../tests/rig"]
mod rig {
    #![allow(dead_code)]

    mod clients;
    mod faketime;
    pub(crate) mod mongod;
    mod server;

    pub(crate) use clients::*;
}

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use actix_http::Request;
use actix_session::{
    Session, SessionMiddleware,
    storage::{SessionKey, SessionStore},
};
use actix_session_mongo::{
    BoxError, EndReason, MongoSessionStore, MongoSessionStoreBuilder, SessionEnd, SessionWrap,
};
use actix_web::{
    App, Error, HttpResponse, Responder,
    body::to_bytes,
    cookie::{Cookie, CookieJar, Key, time::Duration as Ttl},
    dev::{Service, ServiceResponse},
    http::{Method, StatusCode, header::HeaderMap},
    test::{self, TestRequest},
    web,
};
use mongodb::{
    Collection, Database,
    bson::{Document, doc},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    join,
    sync::Semaphore,
    time::{sleep, timeout},
};
use uuid::Uuid;

const DAY: Ttl = Ttl::DAY;
/// Longer than any session or grace period of these tests.
const TWO_DAYS: Duration = Duration::from_secs(2 * 24 * 60 * 60);
/// For what usually takes milliseconds, however slow the machine.
const NO_DEADLINE: Duration = Duration::from_secs(60);
/// The entry that identifies a session.
const ID: &str = "id";
/// The session cookie.
const COOKIE: &str = "id";

type State = HashMap<String, String>;

async fn database() -> Database {
    rig::fresh_database(rig::mongod::shared_replica_set().await.uri()).await
}

/// The ends that the hook was told, in order.
type Told = Vec<(String, EndReason)>;

/// The hook of the tests. Fails as often as it should, waits, and once extends all sessions.
#[derive(Clone, Default)]
struct Hook {
    told: Arc<Mutex<Told>>,
    failures: Arc<Mutex<usize>>,
    extends: Arc<Mutex<Option<Collection<Document>>>>,
    waits: Arc<Mutex<bool>>,
}

impl Hook {
    async fn call(self, end: SessionEnd) -> Result<(), BoxError> {
        while *self.waits.lock().unwrap() {
            sleep(Duration::from_millis(20)).await;
        }
        let extends = self.extends.lock().unwrap().take();
        if let Some(records) = extends {
            let later = doc! { "$add": ["$$NOW", i64::try_from(TWO_DAYS.as_millis())?] };
            records.update_many(doc! {}, vec![doc! { "$set": { "expires": later } }]).await?;
        }
        let mut failures = self.failures.lock().unwrap();
        if *failures > 0 {
            *failures -= 1;
            return Err("on purpose".into());
        }
        self.told.lock().unwrap().push((end.id, end.reason));
        Ok(())
    }
}

/// An application server.
struct Server {
    database: Database,
    sessions: MongoSessionStore,
    hook: Hook,
    pause: web::Data<Pause>,
}

impl Server {
    /// A server that sweeps only when it is told to.
    async fn on(database: &Database) -> Self {
        Self::with(database, |sessions| sessions).await
    }

    async fn with(
        database: &Database,
        settings: impl FnOnce(MongoSessionStoreBuilder) -> MongoSessionStoreBuilder,
    ) -> Self {
        let hook = Hook::default();
        let called = hook.clone();
        let builder = MongoSessionStore::builder(database)
            .user_key("name")
            .id_key(ID)
            .on_end(move |end| called.clone().call(end))
            .deadline(NO_DEADLINE)
            .without_sweeps();
        let sessions = settings(builder).build().await.unwrap();
        Self { database: database.clone(), sessions, hook, pause: Default::default() }
    }

    async fn app(&self) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
        let session = SessionMiddleware::builder(self.sessions.clone(), Key::from(&[7; 64]));
        let session = SessionWrap(session.cookie_secure(false).build());
        let app = App::new().wrap(session).app_data(self.pause.clone()).configure(routes);
        test::init_service(app).await
    }

    /// Runs something after a request with `"wait": true` has loaded its session, and before the
    /// request saves it.
    async fn while_it_waits<T>(
        &self,
        request: impl Future<Output = Answer>,
        happens: impl Future<Output = T>,
    ) -> (Answer, T) {
        join!(request, async {
            self.pause.until_there_are(1).await;
            let happened = happens.await;
            self.pause.let_go(1);
            happened
        })
    }

    /// A session that was saved without a request.
    async fn session(&self, user: &str, id: &str) -> SessionKey {
        self.sessions.save(state_of(user, id), &DAY).await.unwrap()
    }

    fn told(&self) -> Told {
        self.hook.told.lock().unwrap().clone()
    }

    async fn load(&self, key: &SessionKey) -> Option<State> {
        self.sessions.load(key).await.unwrap()
    }
}

fn routes(config: &mut web::ServiceConfig) {
    async fn login(session: Session, name: web::Path<String>) -> impl Responder {
        session.renew();
        begin(&session, &name)
    }
    async fn switch(session: Session, name: web::Path<String>) -> impl Responder {
        session.clear();
        session.renew();
        begin(&session, &name)
    }
    fn begin(session: &Session, name: &str) -> HttpResponse {
        session.insert("name", name).unwrap();
        if !session.contains_key(ID) {
            session.insert(ID, Uuid::new_v4()).unwrap();
        }
        HttpResponse::NoContent().finish()
    }
    async fn do_it(session: Session, what: web::Path<String>) -> impl Responder {
        match &**what {
            "theme" => session.insert("theme", "dark").unwrap(),
            "renew" => session.renew(),
            "clear" => session.clear(),
            "purge" => session.purge(),
            other => panic!("{other}"),
        }
        HttpResponse::NoContent()
    }
    async fn left(_: Session) -> impl Responder {
        let left = actix_session_mongo::session_ends_in();
        HttpResponse::Ok().json(left.map(|left| left.as_secs()))
    }
    config
        .route("/left", web::get().to(left))
        .route("/login/{name}", web::post().to(login))
        .route("/switch/{name}", web::post().to(switch))
        .route("/change", web::post().to(change))
        .route("/state", web::get().to(state))
        .route("/{what}", web::post().to(do_it));
}

/// The changes that a request makes to its session, in this order.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Script {
    wait: bool,
    clear: bool,
    remove: Vec<String>,
    set: BTreeMap<String, Value>,
    renew: bool,
    purge: bool,
}

async fn change(
    script: web::Json<Script>,
    session: Session,
    pause: web::Data<Pause>,
) -> impl Responder {
    let script = script.into_inner();
    if script.wait {
        pause.here().await;
    }
    if script.clear {
        session.clear();
    }
    for name in script.remove {
        session.remove(&name);
    }
    for (name, value) in script.set {
        session.insert(name, value).unwrap();
    }
    if script.renew {
        session.renew();
    }
    if script.purge {
        session.purge();
    }
    HttpResponse::NoContent()
}

/// The state of the session, without its id.
async fn state(session: Session) -> impl Responder {
    let entries = session.entries();
    let entries = entries.iter().filter(|(name, _)| *name != ID);
    let entries = entries.map(|(name, json)| (name.clone(), serde_json::from_str(json).unwrap()));
    HttpResponse::Ok().json(entries.collect::<BTreeMap<String, Value>>())
}

/// The point at which requests wait for the test.
#[derive(Debug)]
struct Pause {
    here: Semaphore,
    gone: Semaphore,
}

impl Default for Pause {
    fn default() -> Self {
        Self { here: Semaphore::new(0), gone: Semaphore::new(0) }
    }
}

impl Pause {
    async fn here(&self) {
        self.here.add_permits(1);
        self.gone.acquire().await.unwrap().forget();
    }

    async fn until_there_are(&self, requests: u32) {
        let there = timeout(NO_DEADLINE, self.here.acquire_many(requests)).await;
        there.expect("the requests get to their pause").unwrap().forget();
    }

    fn let_go(&self, requests: usize) {
        self.gone.add_permits(requests);
    }
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
}

impl<'a, S> Browser<'a, S>
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    fn new(app: &'a S) -> Self {
        Self { app, jar: RefCell::default() }
    }

    async fn logged_in(app: &'a S, name: &str) -> Self {
        let browser = Self::new(app);
        assert_eq!(browser.post(&format!("/login/{name}")).await.status, StatusCode::NO_CONTENT);
        browser
    }

    /// Another browser with the same cookies: a copied cookie, or a request sent before the answer to
    /// another one has arrived.
    fn copy(&self) -> Self {
        Self { app: self.app, jar: self.jar.clone() }
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

    async fn post_json(&self, uri: &str, body: Value) -> Answer {
        self.send(self.request(Method::POST, uri).set_json(body)).await
    }
}

/// The state of this user's session, as the login of these tests leaves it.
fn state_of(user: &str, id: &str) -> State {
    let json = |text: &str| Value::from(text).to_string();
    State::from([("name".to_owned(), json(user)), (ID.to_owned(), json(id))])
}

fn session_key(text: impl Into<String>) -> SessionKey {
    text.into().try_into().unwrap()
}

/// The session key in the browser's cookie.
fn key_in<S>(browser: &Browser<'_, S>) -> SessionKey {
    let mut jar = CookieJar::new();
    jar.add_original(browser.jar.borrow()[COOKIE].clone());
    session_key(jar.private(&Key::from(&[7; 64])).get(COOKIE).unwrap().value())
}

/// A browser with this key in its cookie.
fn browser_with<'a, S>(app: &'a S, key: &SessionKey) -> Browser<'a, S> {
    let mut jar = CookieJar::new();
    jar.private_mut(&Key::from(&[7; 64])).add(Cookie::new(COOKIE, key.as_ref().to_owned()));
    let cookie = jar.get(COOKIE).unwrap().clone();
    Browser { app, jar: RefCell::new(BTreeMap::from([(COOKIE.to_owned(), cookie)])) }
}

fn records(database: &Database) -> Collection<Document> {
    database.collection("session")
}

/// Makes sessions older by the server's clock, as if everything had happened that much earlier.
async fn age(database: &Database, which: Document, by: Duration) {
    let by = i64::try_from(by.as_millis()).unwrap();
    let mut older = Document::new();
    for field in ["created", "seen", "until", "expires", "due"] {
        let (path, date) = (format!("${field}"), doc! { "$type": format!("${field}") });
        let aged = doc! { "$subtract": [&path, by] };
        older.insert(field, doc! { "$cond": [{ "$eq": [date, "date"] }, aged, "$$REMOVE"] });
    }
    let aged = records(database).update_many(which, vec![doc! { "$set": older }]).await.unwrap();
    assert!(aged.matched_count > 0, "there are such sessions");
}

/// The time until the only matching session expires, by the server's clock.
async fn left(database: &Database, which: Document) -> Duration {
    let left = doc! { "left": { "$subtract": ["$expires", "$$NOW"] } };
    let found = records(database).find_one(which).projection(left).await.unwrap();
    let left = found.expect("there is such a session").get_i64("left").unwrap();
    Duration::from_millis(left.try_into().unwrap_or(0))
}

async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < NO_DEADLINE, "{what}: not within {NO_DEADLINE:?}");
        sleep(Duration::from_millis(20)).await;
    }
}
