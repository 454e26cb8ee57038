//! Collections whose names are known at run time only: one for each tenant.

use actix_doclock::{Aid, Holder, MongoStore, Released, freeze::Scope, limits::MAX_COLLECTIONS};
use actix_session::SessionExt as _;
use mongodb::{
    Database,
    bson::{Document, doc},
};
use serde_json::json;

use super::*;
use crate::rig::{
    self,
    app::{NO_DEADLINE, eventually, manager_on},
    mongod,
};

/// A database in which these tenants have the note `a`.
async fn database_of(tenants: &[&str]) -> Database {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    for tenant in tenants {
        let notes = database.collection(&format!("{tenant}_note"));
        notes.insert_one(doc! { "_id": "a", "text": "old", "tenant": tenant }).await.unwrap();
    }
    database
}

async fn tenants_on(database: &Database) -> LockManager {
    let locks = manager_on(database).ttl(Duration::from_secs(600)).build().await.unwrap();
    locks.register_matching::<Note>("*_note").await.unwrap();
    locks
}

/// A person is `name@tenant`, and may see the documents of the own tenant.
async fn serve_tenants(
    locks: &LockManager,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
    serve_with(locks, |session| {
        session
            .collection_names(|request, name| {
                let person = request.get_session().get::<String>("name").ok()??;
                let (_, tenant) = person.split_once('@')?;
                Some(format!("{tenant}_{name}"))
            })
            .access_policy(async |person: Option<Actor>, key: LockKey, _| {
                let person = person.and_then(|it| it.id().map(ToOwned::to_owned));
                let tenant = person.and_then(|it| Some(it.split_once('@')?.1.to_owned()));
                tenant.is_some_and(|tenant| key.collection() == format!("{tenant}_note"))
            })
    })
    .await
}

async fn texts(database: &Database, tenants: [&str; 2]) -> [String; 2] {
    let mut texts = tenants.map(|_| String::new());
    for (text, tenant) in texts.iter_mut().zip(tenants) {
        let notes = database.collection::<Document>(&format!("{tenant}_note"));
        let note = notes.find_one(doc! { "_id": "a" }).await.unwrap().unwrap();
        *text = note.get_str("text").unwrap().to_owned();
    }
    texts
}

#[actix_web::test]
async fn each_tenant_edits_the_document_of_its_own_collection() {
    let database = database_of(&["acme", "globex"]).await;
    let locks = tenants_on(&database).await;
    let app = serve_tenants(&locks).await;
    let (alice, bob) = (
        Browser::logged_in(&app, "alice@acme").await,
        Browser::logged_in(&app, "bob@globex").await,
    );
    for person in [&alice, &bob] {
        assert_eq!(person.post("/note/a").await.status, StatusCode::OK);
    }
    // Nobody is logged in, so there is no tenant: a document is not said to be missing.
    assert_eq!(Browser::new(&app).post("/note/a").await.problem(401)["code"], "login_required");
    assert_eq!(alice.put("/note/a", "of acme").await.status, StatusCode::OK);
    assert_eq!(texts(&database, ["acme", "globex"]).await, ["of acme", "old"]);
    let record = database.collection::<Document>("acme_note.lock").find_one(doc! {}).await.unwrap();
    assert!(record.is_some_and(|record| record.get_str("_id").is_ok_and(|id| id == "a")));

    let carol = Browser::logged_in(&app, "carol@acme").await;
    carol.post("/note/a").await.problem(423);
    assert_eq!(carol.post("/locks/acme_note/a").await.problem(423)["code"], "held");
    assert_eq!(carol.post("/locks/globex_note/a").await.problem(404)["code"], "not_found");
    assert_eq!(alice.get("/locks/acme_note/a").await.json()["state"], "mine");

    let nobody = Browser::logged_in(&app, "nobody").await;
    nobody.post("/note/a").await.problem(404);
    locks.shutdown().await;
}

#[actix_web::test]
async fn asking_for_a_lock_creates_no_collection() {
    let database = database_of(&["acme"]).await;
    let locks = tenants_on(&database).await;
    let app = serve_tenants(&locks).await;
    let mallory = Browser::logged_in(&app, "mallory@made_up").await;
    for path in ["/note/a", "/locks/made_up_note/a"] {
        mallory.post(path).await.problem(404);
    }
    mallory.get("/locks/made_up_note/a").await.problem(404);
    assert!(locks.check_health().await.problems.iter().all(|it| !it.contains("index")));
    let names = database.list_collection_names().await.unwrap();
    assert!(names.iter().all(|name| !name.starts_with("made_up")), "{names:?}");
    locks.shutdown().await;
}

#[actix_web::test]
async fn the_first_document_of_a_new_tenant_is_created() {
    let database = database_of(&[]).await;
    let locks = tenants_on(&database).await;
    let app = serve_tenants(&locks).await;
    let alice = Browser::logged_in(&app, "alice@initech").await;
    assert_eq!(alice.post("/create/a").await.status, StatusCode::CREATED);
    assert_eq!(alice.put("/note/a", "first").await.status, StatusCode::OK);
    assert_eq!(texts(&database, ["initech"; 2]).await, ["first", "first"]);
    locks.shutdown().await;
}

/// The other server has not used the collection, which exists since a moment.
#[actix_web::test]
async fn a_logout_releases_the_locks_in_collections_that_only_another_server_knows() {
    let database = database_of(&["acme"]).await;
    let (one, other) = (tenants_on(&database).await, tenants_on(&database).await);
    let (app, second) = (serve_tenants(&one).await, serve_tenants(&other).await);
    let alice = Browser::logged_in(&app, "alice@acme").await;
    let token = alice.post("/note/a").await.token();
    let believed = json!({ "locks": { "acme_note/a": token } });
    let heartbeat = alice.at(&second).post_json("/locks/heartbeat", believed).await.json();
    assert_eq!(heartbeat["lost"], json!([]), "{heartbeat}");
    assert_eq!(heartbeat["held"][0]["collection"], "acme_note");
    alice.at(&second).post("/purge").await;
    let records = database.collection::<Document>("acme_note.lock");
    assert_eq!(records.count_documents(doc! {}).await.unwrap(), 0);
    for locks in [&one, &other] {
        locks.shutdown().await;
    }
}

/// The same for servers to which no request of the session has named the collection.
#[tokio::test]
async fn the_end_of_a_session_reaches_collections_that_only_another_server_knows() {
    for all in [false, true] {
        let database = database_of(&["acme"]).await;
        let (one, other) = (tenants_on(&database).await, tenants_on(&database).await);
        let (key, aid) = (LockKey::new("acme_note", "a").unwrap(), Aid::new());
        let granted = one.lock_for_session(&key, &aid, &Holder::new("Alice")).await;
        LockError::unless_granted(granted.unwrap()).unwrap();
        let ended = match all {
            true => other.release_all(&aid).await.unwrap(),
            false => other.end_session(&aid).await.unwrap().locks,
        };
        assert_eq!(ended, std::slice::from_ref(&key));
        assert!(one.inspect(&key).await.unwrap().is_none());
        for locks in [one, other] {
            locks.shutdown().await;
        }
    }
}

#[tokio::test]
async fn a_pattern_covers_no_collection_of_this_crate() {
    let database = database_of(&["acme"]).await;
    let locks = manager_on(&database).build().await.unwrap();
    locks.register::<actix_doclock::Named>().await.unwrap();
    let other = manager_on(&database).build().await.unwrap();
    other.register_matching::<Note>("*").await.unwrap();
    assert!(other.health().collections.is_empty(), "{:?}", other.health().collections);
    for ours in ["doclock.ended", "doclock.named", "acme_note.lock"] {
        assert!(matches!(other.key(ours, "a"), Err(LockError::Misconfigured(_))), "{ours}");
    }
    other.key("acme_note", "a").unwrap();
    for locks in [locks, other] {
        locks.shutdown().await;
    }
}

#[tokio::test]
async fn a_restarted_server_knows_the_collections_with_locks() {
    let database = database_of(&["acme", "globex"]).await;
    let one = tenants_on(&database).await;
    let (key, aid) = (LockKey::new("acme_note", "a").unwrap(), Aid::new());
    let granted = one.lock_for_session(&key, &aid, &Holder::new("Alice")).await;
    let granted = LockError::unless_granted(granted.unwrap()).unwrap();
    one.shutdown().await;
    let restarted = tenants_on(&database).await;
    assert_eq!(restarted.health().collections, ["acme_note"], "not those that were never used");
    assert_eq!(restarted.list_of(&aid).await.unwrap().len(), 1);
    assert_eq!(restarted.release(&granted).await.unwrap(), Released::Released);
    restarted.shutdown().await;
}

#[tokio::test]
async fn a_freeze_of_a_tenants_collection_is_obeyed_by_servers_that_did_not_know_it() {
    let database = database_of(&["acme"]).await;
    let (one, other) = (tenants_on(&database).await, tenants_on(&database).await);
    let in_an_hour = std::time::SystemTime::now() + Duration::from_secs(3_600);
    let scope = Scope::Collection("acme_note".to_owned());
    one.freeze(scope, "migration", in_an_hour, &Actor::new("root")).await.unwrap();
    let key = LockKey::new("acme_note", "a").unwrap();
    eventually("the other server obeys", async || {
        let holder = Holder::new("Bob");
        let refused = other.lock_for_session(&key, &Aid::new(), &holder).await;
        matches!(refused, Err(LockError::Frozen { .. }))
    })
    .await;
    for locks in [one, other] {
        locks.shutdown().await;
    }
}

#[tokio::test]
async fn jobs_write_in_a_collection_that_is_registered_by_name() {
    let database = database_of(&["acme"]).await;
    let store = MongoStore::new(&database);
    let locks = LockManager::builder(store.clone()).deadline(NO_DEADLINE).build().await.unwrap();
    locks.register_in::<Note>("acme_note").await.unwrap();
    let key = locks.key("acme_note", "a").unwrap();
    let guard = locks.acquire(&key, Wait::no()).await.unwrap();
    let note = guard.update(|note: &mut Note| note.text = "by the guard".to_owned()).await.unwrap();
    assert_eq!(note.text, "by the guard");
    let set = doc! { "$set": { "text": "by the store" } };
    let note: Note = store.update(&guard.held(), set).await.unwrap();
    assert_eq!(note.text, "by the store");
    let unknown = locks.key("globex_note", "a").unwrap_err();
    assert!(matches!(unknown, LockError::Misconfigured(_)), "{unknown}");
    guard.release().await.unwrap();
    locks.shutdown().await;
}

#[tokio::test]
async fn collections_by_pattern_are_bounded() {
    let store = MemoryStore::new();
    let locks = LockManager::builder(store.clone()).build().await.unwrap();
    for n in 0..MAX_COLLECTIONS {
        locks.register_in::<Note>(&format!("t{n}_note")).await.unwrap();
    }
    let other = LockManager::builder(store).build().await.unwrap();
    for n in 0..MAX_COLLECTIONS {
        other.register_in::<Note>(&format!("u{n}_note")).await.unwrap();
    }
    let refused = other.register_matching::<Note>("t*_note").await.unwrap_err();
    assert!(matches!(refused, LockError::Misconfigured(_)), "{refused}");
    assert_eq!(other.health().collections.len(), MAX_COLLECTIONS);
    other.register_in::<Note>("by_name").await.unwrap();
}

#[actix_web::test]
async fn a_manager_for_each_tenant_serves_the_requests_for_its_host() {
    let ((acme, of_acme), (globex, of_globex)) = (embedded().await, embedded().await);
    let app = [("acme", &acme), ("globex", &globex)].into_iter().fold(
        App::new(),
        |app, (tenant, locks)| {
            let key = Key::from(&[tenant.len() as u8; 64]);
            let session = SessionMiddleware::builder(CookieSessionStore::default(), key);
            let session = locks.session(session.cookie_secure(false).build()).identify(person);
            let host = actix_web::guard::Host(format!("{tenant}.example"));
            app.service(web::scope("").guard(host).wrap(session).configure(routes))
        },
    );
    let app = test::init_service(app).await;
    let of = |tenant: &str| format!("{tenant}.example");
    for tenant in ["acme", "globex"] {
        let alice = Browser::new(&app);
        let ask = async |method, uri: &str| {
            let request = alice.request(method, uri).insert_header(("host", of(tenant)));
            alice.send(request.set_json(json!({ "text": tenant }))).await
        };
        assert_eq!(ask(Method::POST, "/login/alice").await.status, StatusCode::NO_CONTENT);
        assert_eq!(ask(Method::POST, "/note/a").await.status, StatusCode::OK, "{tenant}");
        assert_eq!(ask(Method::PUT, "/note/a").await.status, StatusCode::OK, "{tenant}");
    }
    assert_eq!([text_of(&of_acme, "a"), text_of(&of_globex, "a")], ["acme", "globex"]);
    assert_eq!([acme.list().await.unwrap().len(), globex.list().await.unwrap().len()], [1, 1]);
}

/// Behind a balancer that gives each request to another server: each verb reaches a lock in a collection that only
/// the other server has used so far.
#[actix_web::test]
async fn every_verb_reaches_a_lock_in_a_collection_that_only_another_server_knows() {
    let path = "/locks/acme_note/a";
    for verb in [
        "delete",
        "token",
        "grace",
        "own",
        "heartbeat",
        "named",
        "one",
        "status",
        "all",
        "close",
        "again",
        "break",
    ] {
        let database = database_of(&["acme"]).await;
        let (one, other) = (tenants_on(&database).await, tenants_on(&database).await);
        let (app, second) = (serve_tenants(&one).await, serve_tenants(&other).await);
        let here = Browser::logged_in(&app, "alice@acme").await;
        let there = here.at(&second);
        let taken = here.post(path).await.json();
        let lock = json!({ "acme_note/a": taken["token"] });
        let of_the_page = json!({ "token": taken["token"] });
        let names = |answer: Value, list: &str| answer[list][0]["key"].clone();
        let (told, is_released) = match verb {
            "delete" => (there.delete(path).await.status == 204, true),
            "token" => {
                let released = there.post_json(&format!("{path}/release"), of_the_page).await;
                (released.status == 204, true)
            }
            "grace" => {
                let soon = json!({ "token": taken["token"], "grace_ms": 10_000 });
                let released = there.post_json(&format!("{path}/release"), soon).await;
                let left = here.get(path).await.json()["expires_in_ms"].as_u64().unwrap();
                (released.status == 204 && left <= 10_000, false)
            }
            "own" => (there.get("/locks").await.json()[0]["key"] == "acme_note/a", false),
            "heartbeat" => {
                let answer = there.post("/locks/heartbeat").await.json();
                (names(answer, "held") == "acme_note/a", false)
            }
            "named" => {
                let answer = there.post_json("/locks/heartbeat", json!({ "locks": lock })).await;
                (names(answer.json(), "held") == "acme_note/a", false)
            }
            "one" => (there.get(path).await.json()["state"] == "mine", false),
            "status" => {
                let keys = json!({ "keys": ["acme_note/a"] });
                let answer = there.post_json("/locks/status", keys).await.json();
                (answer["locks"][0]["state"] == "mine", false)
            }
            "all" => (other.list().await.unwrap().len() == 1, false),
            "close" => (there.post("/close-all").await.json() == json!(["acme_note/a"]), true),
            "again" => (there.post(path).await.json()["token"] == taken["token"], false),
            "break" => {
                let broken = there.post_json(&format!("{path}/break"), of_the_page).await;
                (broken.status == 403, false)
            }
            other => panic!("{other}"),
        };
        assert!(told, "{verb}");
        let records = database.collection::<Document>("acme_note.lock");
        let left = records.count_documents(doc! {}).await.unwrap();
        assert_eq!(left, u64::from(!is_released), "{verb}");
        for locks in [&one, &other] {
            locks.shutdown().await;
        }
    }
}

#[actix_web::test]
async fn a_stream_tells_of_collections_that_only_another_server_knows() {
    let database = database_of(&["acme"]).await;
    let (one, other) = (tenants_on(&database).await, tenants_on(&database).await);
    let (app, second) = (serve_tenants(&one).await, serve_tenants(&other).await);
    let alice = Browser::logged_in(&app, "alice@acme").await;
    let carol = Browser::logged_in(&second, "carol@acme").await;
    alice.post("/locks/acme_note/a").await.token();
    let mut stream = carol.listen("").await;
    alice.delete("/locks/acme_note/a").await;
    while stream.next().await.unwrap().0 != "released" {}
    for locks in [&one, &other] {
        locks.shutdown().await;
    }
}

/// Whether a tenant exists is nobody's business, and a release prepares nothing.
#[actix_web::test]
async fn a_release_of_what_was_never_locked_tells_nothing_and_prepares_nothing() {
    let database = database_of(&["acme", "globex"]).await;
    let locks = tenants_on(&database).await;
    let app = serve_tenants(&locks).await;
    let alice = Browser::logged_in(&app, "alice@acme").await;
    let token = json!({ "token": "11111111-1111-4111-8111-111111111111" });
    let soon = json!({ "token": token["token"], "grace_ms": 1_000 });
    for tenant in ["globex", "made_up"] {
        let path = format!("/locks/{tenant}_note/a");
        assert_eq!(alice.delete(&path).await.status, 204, "{tenant}");
        for body in [json!({}), token.clone(), soon.clone()] {
            let released = alice.post_json(&format!("{path}/release"), body).await;
            assert_eq!(released.status, 204, "{tenant}");
        }
    }
    let status = alice.post_json("/locks/status", json!({ "keys": ["acme_note/a"] })).await.json();
    assert_eq!(status["locks"][0]["state"], "free", "nothing is locked in it yet");
    let names = database.list_collection_names().await.unwrap();
    assert!(names.iter().all(|name| !name.ends_with(".lock")), "{names:?}");
    assert!(locks.health().collections.is_empty());
    locks.shutdown().await;
}

#[actix_web::test]
async fn a_collection_in_trouble_keeps_neither_a_heartbeat_nor_a_list_from_the_others() {
    let server = mongod::Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    for tenant in ["acme", "globex"] {
        let notes = database.collection(&format!("{tenant}_note"));
        notes.insert_one(doc! { "_id": "a", "text": "old", "tenant": tenant }).await.unwrap();
    }
    let locks = tenants_on(&database).await;
    let app = serve_tenants(&locks).await;
    let alice = Browser::logged_in(&app, "alice@acme").await;
    let bob = Browser::logged_in(&app, "bob@globex").await;
    let lost = json!({ "locks": { "acme_note/a": alice.post("/note/a").await.token() } });
    let token = bob.post("/note/a").await.token();
    let in_trouble = database.collection("acme_note.lock");
    server.disturb(&in_trouble, &["find", "aggregate"], doc! { "errorCode": 13 }).await;
    let believed = json!({ "locks": { "globex_note/a": token } });
    let heartbeat = bob.post_json("/locks/heartbeat", believed).await;
    assert_eq!(heartbeat.status, StatusCode::OK);
    assert_eq!(heartbeat.json()["lost"], json!([]));

    // For a server that has to prepare both.
    let all = ["listIndexes", "createIndexes", "collMod"];
    let blocks = doc! { "blockConnection": true, "blockTimeMS": 60_000 };
    server.disturb(&in_trouble, &all, blocks).await;
    let late = manager_on(&database).deadline(Duration::from_secs(6)).build().await.unwrap();
    let registers = async { late.register_matching::<Note>("*_note").await };
    let there = serve_tenants(&late).await;
    let looks = async {
        eventually("the other tenant is listed", async || {
            let listed = late.list().await.unwrap_or_default();
            listed.iter().any(|lock| lock.key.collection() == "globex_note")
        })
        .await;
        let heartbeat = alice.at(&there).post_json("/locks/heartbeat", lost).await;
        assert_eq!(heartbeat.status, StatusCode::SERVICE_UNAVAILABLE, "no lock is called lost");
    };
    tokio::select! { _ = registers => panic!("it waits"), () = looks => {} }
    server.disturb_no_more().await;
    for locks in [&locks, &late] {
        locks.shutdown().await;
    }
}
