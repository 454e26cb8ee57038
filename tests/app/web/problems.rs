//! What bad input and bad days get.

use actix_doclock::{
    Aid, EndReason, Released, StoreError, StoreErrorKind, TryAcquire,
    store::{
        Acquisition, Active, Claim, Deadline, Documents, Edit, Ended, HandedOver, LastEnd, Locks,
        Query, Removal, Renewed, Rules, Saved, Servers, Sessions, StoreStatus, StoredDocument,
        Swept,
    },
};
use actix_web::ResponseError;
use uuid::Uuid;

use super::*;
use crate::rig::{
    app::eventually,
    fresh_database,
    log::{count_logged, log_lines, logged},
    mongod::Mongod,
};

#[actix_web::test]
async fn without_the_wrap_the_log_says_which_line_to_add() {
    log_lines();
    let app = test::init_service(App::new().configure(routes)).await;
    let answer = Browser::new(&app).post("/note/a").await.problem(500);
    assert!(!answer.to_string().contains("wrap"), "that is for the developer: {answer}");
    assert!(logged(".wrap(locks.session(SessionMiddleware::new(store, key)))"));
    Browser::new(&app).get("/locks").await.problem(500);

    // The usual session middleware alone is not enough either.
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = test::init_service(App::new().wrap(session).configure(routes)).await;
    Browser::new(&app).post("/note/a").await.problem(500);
}

/// The core writes the answer to an invalid key itself, because it does not know the problems of the web layer.
#[actix_web::test]
async fn an_invalid_key_has_the_same_answer_as_the_error_that_contains_it() {
    let invalid = LockKey::new("note", "x".repeat(2_000)).unwrap_err();
    let told = async |answer: HttpResponse| {
        let headers: BTreeMap<_, _> = answer
            .headers()
            .iter()
            .map(|(name, value)| (name.to_string(), value.clone()))
            .collect();
        let body = to_bytes(answer.into_body()).await.unwrap();
        (headers, serde_json::from_slice::<Value>(&body).unwrap())
    };
    let plain = told(invalid.error_response()).await;
    assert_eq!(plain, told(LockError::from(invalid).error_response()).await);
}

#[actix_web::test]
async fn a_type_that_is_not_registered_and_a_route_without_its_parameter_are_explained() {
    log_lines();
    let locks = LockManager::builder(MemoryStore::new()).build().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    Browser::new(&app).post("/note/a").await.problem(500);
    assert!(logged(
        "the collection `note` is not registered: call `locks.register::<app::web::Note>()"
    ));

    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    Browser::new(&app).post("/nowhere/a").await.problem(500);
    assert!(logged("the route `/nowhere/{other}` has no parameter `{id}`"));
}

#[actix_web::test]
async fn malformed_and_hostile_requests_get_a_problem_and_leave_no_lock() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;

    let too_long = "x".repeat(actix_doclock::limits::MAX_ID_BYTES + 1);
    alice.post(&format!("/note/{too_long}")).await.problem(400);
    alice.post(&format!("/locks/note/{too_long}")).await.problem(400);
    for invalid_utf8 in ["%ff", "a%C3", "%ED%A0%80"] {
        alice.post(&format!("/note/{invalid_utf8}")).await.problem(404);
        alice.post(&format!("/locks/note/{invalid_utf8}")).await.problem(404);
    }
    for collection in ["other", "note.lock", "$cmd", "system.users", "%2e%2e", "note%00"] {
        alice.post(&format!("/locks/{collection}/a")).await.problem(404);
        alice.get(&format!("/locks/{collection}/a")).await.problem(404);
    }

    for token in ["x", "<urn:uuid:>", "<urn:uuid:$where>", "<>", "'; --", ",", "<urn:uuid:0>"] {
        alice.with_token(Method::POST, "/note/a", token).await.problem(400);
        alice.with_token(Method::PUT, "/note/a", token).await.problem(400);
        alice.with_token(Method::POST, "/locks/note/a", token).await.problem(400);
        alice.with_token(Method::DELETE, "/locks/note/a", token).await.problem(400);
    }
    let binary =
        alice.request(Method::POST, "/note/a").insert_header(("lock-token", &b"\xff\xfe"[..]));
    alice.send(binary).await.problem(400);

    for body in [
        "{",
        "5",
        "null",
        "\"x\"",
        "{\"mode\":\"both\"}",
        "{\"mode\":{\"$gt\":\"\"}}",
        "{\"wait_ms\":-1}",
        "{\"surprise\":1}",
        "\u{0}",
    ] {
        let request = alice.request(Method::POST, "/locks/note/a").set_payload(body);
        alice.send(request).await.problem(400);
    }
    for body in [
        "{",
        "5",
        "{\"locks\":[]}",
        "{\"locks\":{\"note/a\":\"x\"}}",
        "{\"locks\":{\"note/a\":{}}}",
    ] {
        let request = alice.request(Method::POST, "/locks/heartbeat").set_payload(body);
        alice.send(request).await.problem(400);
    }
    for (route, kib) in
        [("/locks/note/a", 65), ("/locks/note/a/release", 65), ("/locks/heartbeat", 513)]
    {
        let request = alice.request(Method::POST, route).set_payload(vec![b' '; kib * 1024]);
        alice.send(request).await.problem(413);
    }
    assert_eq!(holder_of(&locks, "a").await, None);
    assert!(locks.list().await.unwrap().is_empty());
}

#[actix_web::test]
async fn a_hostile_cookie_is_no_session() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    for value in ["x", "$where", "%00", &"A".repeat(4000)] {
        let mallory = Browser::new(&app);
        mallory.jar.borrow_mut().insert("id".to_owned(), Cookie::new("id", value.to_owned()));
        mallory.post("/note/a").await.problem(423);
        mallory.put("/note/a", "hostile").await.problem(409);
    }
    // An aid of another type in the session is none.
    let odd = Browser::new(&app);
    odd.post("/note/b").await.token();
    assert_eq!(odd.post("/purge").await.status, 204);
}

#[actix_web::test]
async fn no_answer_and_no_log_line_shows_an_aid_or_the_key_of_a_session() {
    log_lines();
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/note/a").await.token();
    let aid = locks.inspect(&key("a")).await.unwrap().unwrap().aid;
    let mut answers = String::new();
    for browser in [&alice, &bob] {
        for answer in [
            browser.post("/note/a").await,
            browser.get("/locks").await,
            browser.get("/locks/note/a").await,
            browser.post("/locks/note/a").await,
            browser.post("/locks/heartbeat").await,
            browser.put("/note/a", "new").await,
        ] {
            answers += &answer.text();
            answers += &format!("{:?}", answer.headers);
        }
    }
    let cookie = alice.jar.borrow().values().next().unwrap().value().to_owned();
    assert!(!answers.contains(aid.as_str()));
    alice.post("/purge").await;
    assert!(!logged(aid.as_str()) && !logged(&cookie));
}

/// A store that is not there.
struct Down(MemoryStore, StoreErrorKind);

impl Down {
    fn error<T>(&self) -> Result<T, StoreError> {
        Err(StoreError::new(self.1, "connecting to mongodb://user:secret@db.internal failed"))
    }
}

/// Only the required verbs: whatever else a manager asks for has a default.
impl Locks for Down {
    async fn prepare(
        &self,
        collection: &str,
        rules: &Rules,
        _: Deadline,
    ) -> Result<(), StoreError> {
        self.0.prepare(collection, rules, Deadline::NONE).await
    }
    async fn try_acquire(
        &self,
        _: &LockKey,
        _: &Claim,
        _: Deadline,
    ) -> Result<TryAcquire, StoreError> {
        self.error()
    }
    async fn renew(
        &self,
        _: &str,
        _: &[Active],
        _: Duration,
        _: Deadline,
    ) -> Result<Renewed, StoreError> {
        self.error()
    }
    async fn remove_lock(&self, _: Removal<'_>, _: Deadline) -> Result<Released, StoreError> {
        self.error()
    }
    async fn hand_over(
        &self,
        _: &Acquisition,
        _: &Claim,
        _: Deadline,
    ) -> Result<HandedOver, StoreError> {
        self.error()
    }
    async fn locks(
        &self,
        _: &str,
        _: Query<'_>,
        _: usize,
        _: Deadline,
    ) -> Result<Vec<Lock>, StoreError> {
        self.error()
    }
    async fn status(&self, _: &[&str], _: Deadline) -> Result<StoreStatus, StoreError> {
        self.error()
    }
}

impl Documents for Down {
    async fn load(&self, _: &LockKey, _: Deadline) -> Result<Option<StoredDocument>, StoreError> {
        self.error()
    }
    async fn save(&self, _: &Acquisition, _: &Edit, _: Deadline) -> Result<Saved, StoreError> {
        self.error()
    }
}

impl Sessions for Down {
    async fn end_session(
        &self,
        _: &Aid,
        _: EndReason,
        _: &[&str],
        _: Uuid,
        _: Deadline,
    ) -> Result<Ended, StoreError> {
        self.error()
    }
    async fn last_ends(&self, _: &[Aid], _: Deadline) -> Result<Vec<Option<LastEnd>>, StoreError> {
        self.error()
    }
    async fn sweep(&self, _: &[&str], _: Uuid, _: usize, _: Deadline) -> Result<Swept, StoreError> {
        self.error()
    }
}

impl Servers for Down {}

#[actix_web::test]
async fn a_store_that_is_down_is_a_503_and_says_nothing_of_the_inside() {
    let store = Down(MemoryStore::new(), StoreErrorKind::Unavailable);
    let locks =
        LockManager::builder(store).deadline(Duration::from_millis(200)).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    for answer in [
        alice.post("/note/a").await,
        alice.put("/note/a", "new").await,
        alice.get("/locks").await,
        alice.get("/locks/note/a").await,
        alice.post("/locks/note/a").await,
        alice.post("/locks/heartbeat").await,
        alice.delete("/locks/note/a").await,
        alice.post("/locks/note/a/break").await,
        alice.post("/close-all").await,
    ] {
        let problem = answer.problem(503).to_string();
        assert!(!problem.contains("secret") && !problem.contains("internal"), "{problem}");
        assert!(answer.header("retry-after").is_some());
    }
    assert_eq!(alice.get("/plain").await.status, 200, "what needs no lock goes on");
    assert_eq!(alice.post("/purge").await.status, 204, "and so does a logout");
}

#[actix_web::test]
async fn a_store_that_is_overloaded_is_a_503_of_its_own() {
    let store = Down(MemoryStore::new(), StoreErrorKind::Overloaded);
    let locks = LockManager::builder(store).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let answer = Browser::logged_in(&app, "alice").await.post("/note/a").await;
    assert!(answer.header("retry-after").is_some());
    let problem = answer.problem(503);
    assert_eq!(problem["code"], "overloaded", "{problem}");
    assert!(!problem.to_string().contains("secret"), "{problem}");
}

#[actix_web::test]
async fn a_store_that_refuses_is_a_fault_of_the_server() {
    let store = Down(MemoryStore::new(), StoreErrorKind::Denied);
    let locks = LockManager::builder(store).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let problem = Browser::new(&app).post("/note/a").await.problem(500).to_string();
    assert!(!problem.contains("secret"), "{problem}");
}

#[actix_web::test]
async fn a_setting_out_of_range_says_what_to_write() {
    let zero = LockManager::builder(MemoryStore::new()).ttl(Duration::ZERO).build().await;
    let message = zero.unwrap_err().to_string();
    assert!(message.contains("ttl") && message.contains("1s"), "{message}");
    let long = LockManager::builder(MemoryStore::new()).deadline(Duration::from_secs(3600));
    assert!(long.build().await.unwrap_err().to_string().contains("deadline"));
}

#[actix_web::test]
async fn a_second_session_middleware_is_explained_and_ends_no_session() {
    log_lines();
    let (locks, _) = embedded().await;
    let session = || {
        SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]))
            .cookie_secure(false)
            .build()
    };
    let outside = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&outside, "alice").await;
    alice.post("/note/a").await.token();

    // Left over inside: it empties the session before the wrap sees it.
    let app = App::new().wrap(session()).wrap(locks.session(session())).configure(routes);
    let app = test::init_service(app).await;
    let there = Browser { app: &app, jar: alice.jar.clone() };
    there.get("/plain").await;
    assert!(logged("there is another session middleware inside `locks.session(…)`"));
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));

    // The wrap itself, twice.
    let scope = web::scope("/scope").wrap(locks.session(session())).configure(routes);
    let app = App::new().wrap(locks.session(session())).service(scope);
    let app = test::init_service(app).await;
    let there = Browser { app: &app, jar: alice.jar.clone() };
    there.post("/scope/note/a").await.problem(500);
    assert!(logged("the request passes `locks.session(…)` or `locks.clients(…)` twice"));
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
}

/// A server on a database that can be paused.
async fn pausable(
    settings: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder,
) -> (Mongod, LockManager) {
    let server = Mongod::start_replica_set().await;
    let database = fresh_database(&server.uri()).await;
    let builder = LockManager::builder(actix_doclock::MongoStore::new(&database)).without_reaper();
    let locks = settings(builder).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    (server, locks)
}

#[actix_web::test]
async fn requests_that_fail_in_an_outage_share_lines_with_method_path_and_document() {
    log_lines();
    let (server, locks) = pausable(|it| it.deadline(Duration::from_millis(300))).await;
    let app = serve_with_cookies(&locks).await;
    let people: Vec<_> = futures_util::future::join_all(
        // After 18 reads without an answer, more are refused at once, which is another line.
        (0..16).map(|n| Browser::logged_in(&app, ["alice", "bob"][n % 2])),
    )
    .await;
    server.pause();
    people[0].post("/note/outage?secret=1").await.problem(503);
    let first = r#"ERROR POST /note/outage for note/"outage" has failed: "#;
    assert_eq!(count_logged(&[first]), 1);
    assert!(!logged("secret=1"));
    for person in &people[1..] {
        person.post("/note/outage").await.problem(503);
    }
    assert!(count_logged(&[first]) == 1, "the others wait for their line");
    eventually("they are counted", async || {
        let lines = log_lines().lock().unwrap();
        let more = lines.iter().filter(|line| line.contains("for note/\"outage\""));
        let counted = more.filter_map(|line| {
            let (count, _) =
                line.strip_prefix("ERROR ")?.split_once(" more requests have failed")?;
            count.parse::<usize>().ok()
        });
        counted.sum::<usize>() == 15
    })
    .await;
    server.resume();
}

/// An operator corrects them one by one, and must not wait ten seconds for the name of each.
#[actix_web::test]
async fn each_document_that_does_not_fit_its_type_is_named_or_counted() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Unfit {
        text: i32,
    }
    impl Lockable for Unfit {
        type Id = String;
        const COLLECTION: &'static str = Note::COLLECTION;
    }
    log_lines();
    let (locks, store) = embedded().await;
    let unfit: Vec<_> = (0..13).map(|n| format!("unfit{n}")).collect();
    for id in &unfit {
        store.put(id.clone(), &Unfit { text: 7 }).unwrap();
    }
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    for id in unfit.iter().chain(&unfit) {
        alice.post(&format!("/note/{id}")).await.problem(500);
    }
    let more = ["25 more requests have failed", "because a document does not fit its type"];
    eventually("the others are named", async || count_logged(&more) == 1).await;
    // The first one has its own line; it, and nine of the others, are in the line about all.
    for id in &unfit[..10] {
        assert!(logged(&format!("for note/\"{id}\" has failed")), "{id}");
    }
    assert!(count_logged(&[more[0], "; and 5 others"]) == 1);
}

#[actix_web::test]
async fn describe_is_not_blamed_for_an_outage_of_the_database() {
    log_lines();
    let failing = |why: &'static str| {
        move |it: LockManagerBuilder| {
            let it = it.deadline(Duration::from_millis(300));
            it.describe(move |_| async move { Err(why.into()) })
        }
    };
    let (server, locks) = pausable(failing("no connection for titles")).await;
    server.pause();
    assert!(locks.descriptions(&[key("a")]).await.is_empty());
    let told = ["`describe` failed: no connection for titles"];
    eventually("a line for developers", async || count_logged(&["DEBUG", told[0]]) == 1).await;
    assert_eq!(count_logged(&["WARN", told[0]]), 0);
    server.resume();

    let (_server, locks) = pausable(failing("a fault of the function")).await;
    assert!(locks.descriptions(&[key("a")]).await.is_empty());
    let told = ["WARN", "`describe` failed: a fault of the function"];
    eventually("the function is blamed", async || count_logged(&told) == 1).await;
}

/// With cookies the session needs no database. With `MongoSessionStore` it does.
#[actix_web::test]
async fn a_page_that_needs_no_lock_is_served_while_there_is_no_primary() {
    let server = crate::rig::mongod::Mongod::start_replica_set().await;
    let database = crate::rig::fresh_database(&server.uri()).await;
    let waits_long = std::time::Duration::from_secs(120);
    let store = actix_doclock::MongoStore::new(&database);
    let locks = LockManager::builder(store).deadline(waits_long).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    assert!(alice.post("/create/7").await.status.is_success());
    server.admin(mongodb::bson::doc! { "replSetStepDown": 120, "force": true }).await;
    let soon = std::time::Duration::from_secs(30);
    for _ in 0..3 {
        let page =
            tokio::time::timeout(soon, alice.get("/plain")).await.expect("it waits for nothing");
        assert_eq!(page.status, StatusCode::OK);
        let theme = tokio::time::timeout(soon, alice.post("/theme")).await.expect("nor does this");
        assert!(theme.status.is_success());
    }
}

/// The documents have got a collation, by which the document of another id would be found.
#[actix_web::test]
async fn a_document_of_a_similar_id_is_a_fault_that_the_log_explains_and_leaves_no_lock() {
    log_lines();
    let database =
        crate::rig::fresh_database(crate::rig::mongod::shared_replica_set().await.uri()).await;
    let store = actix_doclock::MongoStore::new(&database);
    let locks = LockManager::builder(store).without_reaper().build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let collation = mongodb::bson::doc! { "locale": "en", "strength": 2 };
    let create = mongodb::bson::doc! { "create": "note", "collation": collation };
    database.run_command(create).await.unwrap();
    let note = Note { id: "Home".to_owned(), text: "old".to_owned() };
    database.collection(Note::COLLECTION).insert_one(note).await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    assert_eq!(alice.post("/note/Home").await.status, 200);
    bob.post("/note/home").await.problem(500);
    assert!(logged("note has the collation `en`"));
    assert_eq!(holder_of(&locks, "home").await, None);
    assert_eq!(alice.put("/note/Home", "new").await.status, 200);
}

/// A form of a page without scripts keeps its text.
#[actix_web::test]
async fn the_application_renders_the_errors_of_the_wrap_itself() {
    let (locks, _) = embedded().await;
    let app = serve_with(&locks, |session| {
        session.refuse_cross_site().render_errors(|request, problem| {
            let accepts = request.headers().get("accept")?.to_str().ok()?;
            accepts.contains("text/html").then(|| {
                let code = problem.member("code").and_then(Value::as_str).unwrap_or_default();
                let page = format!("<p>{} {code}: {}", request.uri, problem.text());
                HttpResponse::Forbidden().content_type("text/html").body(page)
            })
        })
    })
    .await;
    let alice = Browser::logged_in(&app, "alice").await;
    let post = |accept: &'static str| {
        let request = alice.request(Method::POST, "/note/a").insert_header(("accept", accept));
        alice.send(request.insert_header(("origin", "https://evil.example")))
    };
    let page = post("text/html,*/*").await;
    assert_eq!(
        (page.status, page.header("content-type")),
        (StatusCode::FORBIDDEN, Some("text/html"))
    );
    assert!(page.text().starts_with("<p>/note/a cross_site: only pages"), "{}", page.text());
    post("application/json").await.problem(403);
}

#[actix_web::test]
async fn a_wrong_method_is_answered_with_those_that_the_path_accepts() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    for (method, path, accepted) in [
        (Method::PUT, "/locks", "GET, POST"),
        (Method::GET, "/locks/heartbeat", "POST"),
        (Method::GET, "/locks/status", "POST"),
        (Method::POST, "/locks/events", "GET"),
        (Method::PATCH, "/locks/note/a", "GET, POST, DELETE"),
        (Method::GET, "/locks/note/a/release", "POST"),
        (Method::DELETE, "/locks/note/a/break", "POST"),
        (Method::POST, "/locks/client.js", "GET, HEAD"),
        (Method::POST, "/locks/admin.json", "GET"),
    ] {
        let refused = alice.send(alice.request(method, path)).await;
        assert_eq!(refused.problem(405)["code"], "wrong_method", "{path}");
        assert_eq!(refused.header("allow"), Some(accepted), "{path}");
    }
}

#[actix_web::test]
async fn a_member_that_a_call_does_not_know_is_refused() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/locks/note/a").await.token();
    for path in [
        "/locks",
        "/locks/heartbeat",
        "/locks/status",
        "/locks/break",
        "/locks/note/a",
        "/locks/note/a/break",
        "/locks/note/a/release",
    ] {
        let mistyped = serde_json::json!({ "tokne": "11111111-1111-4111-8111-111111111111" });
        let refused = alice.post_json(path, mistyped).await.problem(400);
        assert_eq!(refused["code"], "bad_request", "{path}");
        assert!(refused["detail"].as_str().unwrap().contains("tokne"), "{refused}");
    }
    assert_eq!(alice.get("/locks/note/a").await.json()["state"], "mine");
}
