//! Two servers on one database, people of two tenants, and clients that only speak HTTP.

mod crowds;
mod one_person;

use actix_doclock::web::Access;
use actix_doclock::{Aid, Holder};
use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use actix_web::{
    HttpServer,
    body::{BodyStream, BoxBody},
    rt,
};
use awc::{Client, ClientRequest, ClientResponse};
use futures_util::future::join_all;

use mongodb::{
    Collection, Database,
    bson::{Document, doc},
};
use serde_json::json;

use super::{events::Stream, *};
use crate::rig::{self, app::eventually, mongod};
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    sync::oneshot,
    time::{interval, sleep, timeout},
};

/// So long that no lock expires unless a test ages it.
const TTL: Duration = Duration::from_secs(600);

/// Longer than `eventually` waits.
const LONGEST_WAIT: Duration = Duration::from_secs(120);

const SOON: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize, Deserialize)]
struct WorkItem {
    #[serde(rename = "_id")]
    id: String,
    tenant: String,
    title: String,
}

impl Lockable for WorkItem {
    type Id = String;
    const COLLECTION: &'static str = "workitem";
}

fn item(id: &str) -> WorkItem {
    let tenant = id.split('-').next().unwrap().to_owned();
    WorkItem { id: id.to_owned(), tenant, title: "old".to_owned() }
}

fn key(id: &str) -> LockKey {
    LockKey::of::<WorkItem>(id.to_owned()).unwrap()
}

fn lock_records(database: &Database) -> Collection<Document> {
    database.collection("workitem.lock")
}

async fn record(database: &Database, id: &str) -> Document {
    lock_records(database).find_one(doc! { "_id": id }).await.unwrap().expect("it is locked")
}

/// How the access policy finds the tenant of a document.
#[derive(Clone, Copy)]
enum Tenant {
    Stored,
    /// In the id, so that missing documents have one, too. It takes 20 ms.
    Named,
}

#[derive(Clone)]
struct Policy {
    tenant: Tenant,
    items: Collection<WorkItem>,
    /// The number of calls to look, and of documents in them.
    calls: Arc<AtomicUsize>,
    asked: Arc<AtomicUsize>,
}

impl Policy {
    async fn allows(&self, person: Option<Actor>, keys: Vec<LockKey>, access: Access) -> Vec<bool> {
        if access == Access::Look {
            self.calls.fetch_add(1, Ordering::Relaxed);
            self.asked.fetch_add(keys.len(), Ordering::Relaxed);
        }
        let person = person.expect("visitors are not admitted");
        let (_, own) = person.id().unwrap().split_once('@').unwrap();
        let ids: Vec<_> = keys.iter().map(|key| key.id().to_string()).collect();
        match self.tenant {
            Tenant::Stored => {
                let own = doc! { "_id": { "$in": &ids }, "tenant": own };
                let own = self.items.distinct("_id", own).await.unwrap_or_default();
                ids.iter().map(|id| own.iter().any(|own| own.as_str() == Some(id))).collect()
            }
            Tenant::Named => {
                sleep(Duration::from_millis(20)).await;
                ids.iter().map(|id| item(id).tenant == own).collect()
            }
        }
    }
}

/// In the session, a person is `name@tenant`.
fn person(session: &Session) -> Option<Actor> {
    let name = session.get::<String>("name").ok()??;
    let (label, _) = name.split_once('@')?;
    Some(Actor::new(label).with_id(&name))
}

async fn edit(item: LockedDoc<WorkItem>) -> impl Responder {
    web::Json(item.into_inner())
}

async fn save(mut item: HeldDoc<WorkItem>, title: String) -> Result<impl Responder, LockError> {
    item.title = title;
    item.save().await?;
    Ok(HttpResponse::NoContent())
}

async fn read(item: SharedDoc<WorkItem>) -> impl Responder {
    web::Json(item.into_inner())
}

async fn create(locks: SessionLocks, id: web::Path<String>) -> Result<impl Responder, LockError> {
    let created = locks.create::<WorkItem>(id.clone(), item(&id)).await?;
    created.release().await?;
    Ok(HttpResponse::Created())
}

async fn login(session: Session, name: web::Path<String>) -> impl Responder {
    session.renew();
    session.insert("name", name.into_inner()).unwrap();
    HttpResponse::NoContent()
}

async fn logout(session: Session) -> impl Responder {
    session.purge();
    HttpResponse::NoContent()
}

#[derive(Clone, Copy)]
struct Settings {
    manager: fn(LockManagerBuilder) -> LockManagerBuilder,
    tenant: Tenant,
    /// How long extractors wait.
    wait: Duration,
}

const USUAL: Settings = Settings { manager: |it| it, tenant: Tenant::Stored, wait: Duration::ZERO };

/// A server of the application, on a runtime of its own, as a process would have.
struct Server {
    address: SocketAddr,
    locks: LockManager,
    policy: Policy,
    _stops_when_dropped: oneshot::Sender<()>,
}

impl Server {
    /// The `first` server asks its policy for many documents at once, the others for each.
    async fn start(database: &Database, settings: Settings, first: bool) -> Self {
        let (uri, name) = (mongod::shared_replica_set().await, database.name().to_owned());
        let (tells, is_told) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let run = move || async move {
            let database = rig::client(uri.uri()).await.database(&name);
            let builder = crate::rig::app::manager_on(&database).ttl(TTL);
            let locks = (settings.manager)(builder).build().await.unwrap();
            locks.register::<WorkItem>().await.unwrap();
            let policy = Policy {
                tenant: settings.tenant,
                items: database.collection(WorkItem::COLLECTION),
                calls: Arc::default(),
                asked: Arc::default(),
            };
            let (manager, asks) = (locks.clone(), policy.clone());
            let server = HttpServer::new(move || {
                let session =
                    SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
                let session = manager
                    .session(session.cookie_secure(false).build())
                    .identify(person)
                    .wait_for_documents(settings.wait)
                    .longest_wait(LONGEST_WAIT);
                let asks = asks.clone();
                let session = if first {
                    session.access_policy_for_many(async move |person, keys, access| {
                        asks.allows(person, keys, access).await
                    })
                } else {
                    session.access_policy(async move |person, key, access| {
                        asks.allows(person, vec![key], access).await == [true]
                    })
                };
                App::new()
                    .wrap(session)
                    .route("/login/{name}", web::post().to(login))
                    .route("/logout", web::post().to(logout))
                    .route("/plain", web::get().to(HttpResponse::NoContent))
                    .route("/create/{id}", web::post().to(create))
                    .route("/workitem/{id}/read", web::post().to(read))
                    .service(web::resource("/workitem/{id}").post(edit).put(save))
                    .service(web::scope("/locks").configure(lock_api))
            });
            let server = server.workers(2).bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            // From now on the server watches, and all streams hear everything.
            let mut watches = locks.events();
            for _ in 0..2 {
                assert_eq!(watches.next().await.unwrap().name(), "resync");
            }
            drop(tells.send((server.addrs()[0], locks.clone(), policy)));
            tokio::select! {
                served = locks.serve(server) => served.unwrap(),
                _ = stopped => locks.shutdown().await,
            }
        };
        thread::spawn(move || rt::System::new().block_on(run()));
        let (address, locks, policy) = is_told.await.expect("the server starts");
        Self { address, locks, policy, _stops_when_dropped: stop }
    }

    async fn waiting(&self, callers: usize) {
        let what = format!("{callers} wait");
        eventually(&what, async || self.locks.health().waiting == callers).await;
    }
}

/// Two servers on a new database with these documents.
async fn two_servers(settings: Settings, ids: &[&str]) -> (Database, [Server; 2]) {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    let items = database.collection::<WorkItem>(WorkItem::COLLECTION);
    items.insert_many(ids.iter().map(|id| item(id))).await.unwrap();
    let first = Server::start(&database, settings, true).await;
    let second = Server::start(&database, settings, false).await;
    (database, [first, second])
}

/// A browser with its cookies. The load balancer sends each request to some server.
#[derive(Default, Clone)]
struct Visitor {
    cookie: RefCell<Option<Cookie<'static>>>,
}

/// All that a client sees of an answer, without its date. (`connection` tells whether the body of the request had
/// arrived.)
#[derive(Debug, PartialEq)]
struct Seen {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

impl Seen {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    #[track_caller]
    fn is(&self, status: u16) -> &Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }

    #[track_caller]
    fn is_problem(&self, status: u16, code: &str) {
        assert_eq!(self.is(status).json()["code"], code);
    }

    fn token(&self) -> &str {
        &self.headers["lock-token"]
    }
}

impl Visitor {
    async fn logged_in(server: &Server, name: &str) -> Self {
        let visitor = Self::default();
        visitor.post(server, &format!("/login/{name}")).await.is(204);
        visitor
    }

    fn request(&self, server: &Server, method: Method, path: &str) -> ClientRequest {
        // A client of its own for each request: no connection is reused while the server closes it.
        let client = Client::builder().disable_timeout().finish();
        let request = client.request(method, format!("http://{}{path}", server.address));
        match &*self.cookie.borrow() {
            Some(cookie) => request.cookie(cookie.clone()),
            None => request,
        }
    }

    async fn send(&self, request: ClientRequest, body: Value) -> Seen {
        let answer = if body.is_null() { request.send() } else { request.send_json(&body) };
        let mut answer = timeout(SOON, answer).await.expect("the server answers").unwrap();
        for cookie in answer.cookies().unwrap().iter() {
            self.cookie.replace((!cookie.value().is_empty()).then(|| cookie.clone()));
        }
        let headers =
            answer.headers().iter().filter(|(name, _)| *name != "date" && *name != "connection");
        let text =
            |value: &actix_web::http::header::HeaderValue| value.to_str().unwrap().to_owned();
        let headers = headers.map(|(name, value)| (name.to_string(), text(value))).collect();
        let body = String::from_utf8(answer.body().await.unwrap().to_vec()).unwrap();
        Seen { status: answer.status().as_u16(), headers, body }
    }

    async fn post(&self, server: &Server, path: &str) -> Seen {
        self.send(self.request(server, Method::POST, path), Value::Null).await
    }

    async fn post_json(&self, server: &Server, path: &str, body: Value) -> Seen {
        self.send(self.request(server, Method::POST, path), body).await
    }

    async fn delete(&self, server: &Server, path: &str) -> Seen {
        self.send(self.request(server, Method::DELETE, path), Value::Null).await
    }

    async fn in_tab(&self, server: &Server, tab: &str, path: &str, body: Value) -> Seen {
        let request = self.request(server, Method::POST, path);
        self.send(request.insert_header(("doclock-tab", tab)), body).await
    }

    async fn asks_for_stream(&self, server: &Server) -> ClientResponse<impl Unpin + Body> {
        self.request(server, Method::GET, "/locks/events").send().await.unwrap()
    }

    async fn listen(&self, server: &Server) -> Stream {
        let response = self.asks_for_stream(server).await;
        assert_eq!(response.status(), 200);
        let mut stream = Stream::new(BoxBody::new(BodyStream::new(response)));
        assert_eq!(stream.next().await.unwrap().0, "resync");
        stream
    }
}

/// A body of an answer.
trait Body:
    futures_util::Stream<Item = Result<web::Bytes, awc::error::PayloadError>> + 'static
{
}

impl<T> Body for T where
    T: futures_util::Stream<Item = Result<web::Bytes, awc::error::PayloadError>> + 'static
{
}

/// Whoever is not of the tenant must not learn from any answer whether there is such a document.
#[actix_web::test]
async fn a_document_of_another_tenant_is_missing_whichever_way_it_is_asked_for() {
    let (database, [a, b]) = two_servers(USUAL, &["north-1", "north-2", "south-1"]).await;
    let ann = Visitor::logged_in(&a, "ann@north").await;
    let bob = Visitor::logged_in(&a, "bob@south").await;
    let mut hers = ann.listen(&b).await;
    let mut changes = lock_records(&database).watch().await.unwrap();
    let token = "ae3e0c9f-b50e-4374-a4f9-a9e7ee409a62";
    let ask = async |server: &Server, id: &str| {
        let (document, lock) = (format!("/workitem/{id}"), format!("/locks/workitem/{id}"));
        let name = format!("workitem/{id}");
        let mut answers = Vec::new();
        for (method, path, body, status) in [
            (Method::POST, document.clone(), Value::Null, 404),
            (Method::PUT, document.clone(), json!("new"), 404),
            (Method::POST, format!("{document}/read"), Value::Null, 404),
            (Method::GET, lock.clone(), Value::Null, 404),
            (Method::POST, lock.clone(), Value::Null, 404),
            (Method::POST, lock.clone(), json!({ "mode": "shared" }), 404),
            (Method::POST, lock.clone(), json!({ "take_over": true }), 404),
            (Method::POST, lock.clone(), json!({ "wait_ms": 30_000 }), 404),
            (Method::POST, format!("{lock}/break"), json!({ "reason": "why" }), 404),
            (Method::POST, format!("{lock}/release"), json!({ "token": token }), 204),
            (Method::DELETE, lock.clone(), Value::Null, 204),
            (Method::POST, "/locks/status".to_owned(), json!({ "keys": [&name] }), 200),
            (Method::POST, "/locks/heartbeat".to_owned(), json!({ "locks": { name: token } }), 200),
        ] {
            for header in [None, Some(token)] {
                let mut request = bob.request(server, method.clone(), &path);
                if let Some(token) = header {
                    request = request.insert_header(("lock-token", token));
                }
                let answer = bob.send(request, body.clone()).await;
                assert_eq!(answer.status, status, "{method} {path} {body}: {answer:?}");
                answers.push(answer);
            }
        }
        answers
    };
    let learns_nothing = async || {
        for server in [&a, &b] {
            let absent = ask(server, "north-9").await;
            for (there, absent) in ask(server, "north-1").await.into_iter().zip(absent) {
                let body = there.body.replace("north-1", "north-9");
                assert_eq!(Seen { body, ..there }, absent);
            }
        }
    };

    learns_nothing().await;
    ann.post(&a, "/workitem/north-1").await.is(200);
    let (event, data) = hers.event().await;
    assert_eq!((event.as_str(), &data["id"]), ("acquired", &"north-1".into()));
    let held = record(&database, "north-1").await;
    learns_nothing().await;
    ann.post(&b, "/workitem/north-2").await.is(200);
    let (event, data) = hers.event().await;
    assert_eq!((event.as_str(), &data["id"]), ("acquired", &"north-2".into()));

    let without_ts = |mut record: Document| {
        record.remove("ts");
        record
    };
    let still_held = record(&database, "north-1").await;
    assert_eq!(without_ts(still_held), without_ts(held), "at most her own renewal");
    let mut written = Vec::new();
    while !written.contains(&"north-2".to_owned()) {
        let change = timeout(SOON, changes.next_if_any()).await.expect("it goes on").unwrap();
        let Some(change) = change else { continue };
        if change.operation_type != mongodb::change_stream::event::OperationType::Update {
            written.push(change.document_key.unwrap().get_str("_id").unwrap().to_owned());
        }
    }
    assert_eq!(written, ["north-1", "north-2"]);
}

#[actix_web::test]
async fn a_creation_under_the_id_of_another_tenants_document_locks_and_tells_nothing() {
    let (database, [a, b]) = two_servers(USUAL, &["north-1", "north-2"]).await;
    let ann = Visitor::logged_in(&a, "ann@north").await;
    let bob = Visitor::logged_in(&a, "bob@south").await;
    let mut hers = ann.listen(&b).await;
    let mut changes = lock_records(&database).watch().await.unwrap();
    let is_refused = async || {
        for server in [&a, &b] {
            let absent = bob.post(server, "/workitem/north-9").await;
            let refused = bob.post(server, "/create/north-1").await;
            refused.is(404);
            let body = refused.body.replace("north-1", "north-9");
            assert_eq!(Seen { body, ..refused }, absent);
        }
    };
    is_refused().await;
    ann.post(&a, "/workitem/north-1").await.is(200);
    is_refused().await;
    ann.post(&a, "/workitem/north-2").await.is(200);
    for id in ["north-1", "north-2"] {
        let (event, data) = hers.event().await;
        assert_eq!((event.as_str(), &data["id"]), ("acquired", &id.into()));
        let written = timeout(SOON, async {
            loop {
                if let Some(change) = changes.next_if_any().await.unwrap() {
                    return change.document_key.unwrap();
                }
            }
        });
        assert_eq!(written.await.unwrap(), doc! { "_id": id });
    }
    // A document that ann is just creating.
    let (aid, holder) = (Aid::new(), Holder::new("ann"));
    drop(a.locks.lock_for_session(&key("north-3"), &aid, &holder).await.unwrap());
    bob.post(&b, "/create/north-3").await.is_problem(404, "not_found");
    bob.post(&a, "/create/south-1").await.is(201);
}
