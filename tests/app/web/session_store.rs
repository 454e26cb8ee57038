//! `MongoSessionStore` on a real replica set: sessions whose ends are known.

mod changes;
mod clock;
mod ends;
mod indexes;
mod outage;
mod records;
mod revival;
mod users;

use std::collections::HashMap;

use actix_doclock::{Aid, EndReason, Holder, LockManagerBuilder, MongoStore, TryAcquire};
use actix_session::storage::SessionKey;
use actix_session_mongo::{MongoSessionStore, MongoSessionStoreBuilder};
use actix_web::cookie::{CookieJar, time::Duration as Ttl};
use mongodb::{
    Collection, Database,
    bson::{Document, doc},
};
use serde_json::json;
use tokio::{join, sync::Semaphore, time::timeout};

use super::{heard::Heard, *};
use crate::rig::{
    self,
    app::{NO_DEADLINE, TTL, eventually},
};

const DAY: Ttl = Ttl::DAY;
/// Longer than any session or grace period of these tests.
const TWO_DAYS: Duration = Duration::from_secs(2 * 24 * 60 * 60);
const AID: &str = "doclock.aid";
const COOKIE: &str = "id";

type State = HashMap<String, String>;

/// A new database with the notes `a` and `b`.
async fn database() -> Database {
    let database = rig::fresh_database(rig::mongod::shared_replica_set().await.uri()).await;
    put_notes(&database).await;
    database
}

async fn put_notes(database: &Database) {
    let notes = ["a", "b"].map(|id| Note { id: id.to_owned(), text: "old".to_owned() });
    database.collection(Note::COLLECTION).insert_many(notes).await.unwrap();
}

/// An application server whose locks and sessions are in one database.
struct Server {
    database: Database,
    locks: LockManager,
    sessions: MongoSessionStore,
    heard: Heard,
    pause: web::Data<Pause>,
}

impl Server {
    /// A server that sweeps only when it is told to.
    async fn on(database: &Database) -> Self {
        Self::with(database, |locks| locks, |sessions| sessions).await
    }

    async fn with(
        database: &Database,
        locks: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder,
        sessions: impl FnOnce(MongoSessionStoreBuilder) -> MongoSessionStoreBuilder,
    ) -> Self {
        let store = MongoStore::new(database);
        let defaults = LockManager::builder(store.clone()).ttl(TTL).deadline(NO_DEADLINE);
        let heard = Heard::default();
        let locks = locks(heard.listening(defaults.without_reaper())).build().await.unwrap();
        locks.register::<Note>().await.unwrap();
        let builder = MongoSessionStore::builder(database)
            .collection("doclock.session")
            .user_key("name")
            .id_key(AID)
            .on_end(locks.session_ends())
            .deadline(NO_DEADLINE)
            .without_sweeps();
        let sessions = sessions(builder).build().await.unwrap();
        Self { database: database.clone(), locks, sessions, heard, pause: Default::default() }
    }

    fn middleware(&self) -> SessionWrap<MongoSessionStore> {
        let middleware = SessionMiddleware::builder(self.sessions.clone(), Key::from(&[7; 64]));
        SessionWrap(middleware.cookie_secure(false).build())
    }

    async fn app(&self) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
        let session = self.locks.session(self.middleware()).identify(person);
        let app = App::new()
            .wrap(session)
            .app_data(self.pause.clone())
            .route("/change", web::post().to(change))
            .route("/state", web::get().to(state))
            .configure(routes);
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

    async fn is_locked(&self, id: &str) -> bool {
        self.locks.inspect(&key(id)).await.unwrap().is_some()
    }

    async fn holder(&self, id: &str) -> Aid {
        self.locks.inspect(&key(id)).await.unwrap().expect("it is locked").aid
    }

    /// A session that was saved without a request, and holds the lock on `id`.
    async fn session(&self, user: &str, id: &str) -> (SessionKey, Aid) {
        let aid = Aid::new();
        let session = self.sessions.save(state_of(user, &aid), &DAY).await.unwrap();
        let taken = self.locks.lock_for_session(&key(id), &aid, &Holder::new(user)).await.unwrap();
        assert!(matches!(taken, TryAcquire::Granted(_)), "{taken:?}");
        (session, aid)
    }

    /// All announced ends, once none is left to announce.
    async fn told(&self) -> Vec<(Aid, EndReason)> {
        until_all_ends_are_announced(&self.database).await;
        self.heard.so_far().into_iter().map(|ended| (ended.aid, ended.reason)).collect()
    }

    async fn load(&self, key: &SessionKey) -> Option<State> {
        self.sessions.load(key).await.unwrap()
    }
}

async fn until_all_ends_are_announced(database: &Database) {
    let ended = database.collection::<Document>("doclock.ended");
    eventually("every end is told", async || {
        let waiting = doc! { "step": { "$exists": true } };
        ended.count_documents(waiting).await.unwrap() == 0
    })
    .await;
}

/// The changes that a request makes to its session, in this order.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Script {
    wait: bool,
    lock: Option<String>,
    clear: bool,
    remove: Vec<String>,
    set: BTreeMap<String, Value>,
    renew: bool,
}

async fn change(
    script: web::Json<Script>,
    session: Session,
    locks: SessionLocks,
    pause: web::Data<Pause>,
) -> Result<impl Responder, LockError> {
    let script = script.into_inner();
    if script.wait {
        pause.here().await;
    }
    if let Some(id) = script.lock {
        locks.lock::<Note>(id).await?;
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
    Ok(HttpResponse::NoContent())
}

/// The state of the session, without its aid.
async fn state(session: Session) -> impl Responder {
    let entries = session.entries();
    let entries = entries.iter().filter(|(name, _)| *name != AID);
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

/// The state of this user's session, as the wrap and the login of these tests leave it.
fn state_of(user: &str, aid: &Aid) -> State {
    let json = |text: &str| Value::from(text).to_string();
    State::from([("name".to_owned(), json(user)), (AID.to_owned(), json(aid.as_str()))])
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
    database.collection("doclock.session")
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
