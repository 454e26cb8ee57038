//! `LockedDoc`, `HeldDoc` and `SessionLocks` in handlers.

use super::*;
use crate::rig::log::{log_lines, logged};

#[actix_web::test]
async fn the_first_session_edits_and_the_second_is_told_by_whom() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);

    let granted = alice.post("/note/a").await;
    assert_eq!(granted.status, 200);
    assert_eq!(granted.json()["text"], "old");
    assert!(granted.token().starts_with("<urn:uuid:"));

    let refused = bob.post("/note/a").await;
    let problem = refused.problem(423);
    assert_eq!(problem["state"], "held");
    assert_eq!(problem["holder"]["label"], "alice");
    assert!(problem["since"].as_str().unwrap().ends_with('Z'), "RFC 3339");
    let left = problem["expires_in_ms"].as_u64().unwrap();
    assert!(left > 30_000 && left <= 60_000);
    let retry_after: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&retry_after));
    assert_eq!(refused.header("lock-token"), None);

    assert_eq!(alice.post("/note/a").await.token(), granted.token(), "re-entry keeps the token");
    assert_eq!(bob.post("/note/b").await.status, 200, "each document is locked separately");
}

#[actix_web::test]
async fn a_save_keeps_the_lock_and_a_release_frees_the_document() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let token = alice.post("/note/a").await.token();

    let saved = alice.put("/note/a", "new").await;
    assert_eq!((saved.status.as_u16(), saved.token()), (200, token));
    assert_eq!(text_of(&store, "a"), "new");
    assert_eq!(bob.post("/note/a").await.status, 423);

    let done = alice.put("/note/a/done", "newer").await;
    assert_eq!((done.status.as_u16(), done.header("lock-token")), (204, None));
    assert_eq!(text_of(&store, "a"), "newer");
    assert_eq!(bob.post("/note/a").await.json()["text"], "newer");
}

#[actix_web::test]
async fn a_save_needs_a_lock_that_is_already_held() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);

    assert_eq!(bob.put("/note/a", "bob's").await.problem(409)["state"], "lost");
    assert_eq!(holder_of(&locks, "a").await, None, "nothing was acquired");
    alice.post("/note/a").await;
    let problem = bob.put("/note/a", "bob's").await.problem(409);
    assert_eq!((&problem["state"], &problem["holder"]["label"]), (&"lost".into(), &"alice".into()));
    let nobody = Browser::new(&app);
    assert_eq!(nobody.put("/note/a", "nobody's").await.problem(409)["state"], "lost");
    assert!(!nobody.has_cookie());
    assert_eq!(text_of(&store, "a"), "old");
}

#[actix_web::test]
async fn a_stale_tab_cannot_overwrite_a_later_save_of_another_session() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let stale = alice.post("/note/a").await.token();

    store.age(&key("a"), Duration::from_secs(60));
    bob.post("/note/a").await;
    assert_eq!(alice.put("/note/a", "stale").await.problem(409)["state"], "lost");
    bob.put("/note/a/done", "bob's").await;
    assert_eq!(alice.put("/note/a", "stale").await.problem(409)["state"], "lost");
    let with_token = alice.with_token(Method::PUT, "/note/a", &stale).await;
    assert_eq!(with_token.problem(409)["state"], "lost");

    // She opens it again in another tab: the aid is the same, but the acquisition is new.
    let fresh = alice.post("/note/a").await.token();
    let with_stale = alice.with_token(Method::PUT, "/note/a", &stale).await;
    assert_eq!(with_stale.problem(412)["state"], "lost");
    assert_eq!(text_of(&store, "a"), "bob's", "nothing was written");
    assert_eq!(alice.with_token(Method::PUT, "/note/a", &fresh).await.status, 200);
    assert_eq!(text_of(&store, "a"), "with token");
}

#[actix_web::test]
async fn a_lock_that_is_lost_between_load_and_save_writes_nothing() {
    let (locks, store) = embedded().await;
    let (breaker, broken) = (locks.clone(), key("a"));
    let save = move |mut note: HeldDoc<Note>| {
        let (breaker, broken) = (breaker.clone(), broken.clone());
        async move {
            crate::rig::app::break_on(&breaker, &broken, &Actor::new("root").with_role("chief"))
                .await?;
            note.text = "too late".to_owned();
            note.save().await.map(|()| HttpResponse::Ok())
        }
    };
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(locks.session(session))
        .route("/late/{id}", web::put().to(save))
        .configure(routes);
    let app = test::init_service(app).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await;
    let late = alice.put("/late/a", "").await;
    assert_eq!((&late.problem(409)["state"], late.header("lock-token")), (&"lost".into(), None));
    assert_eq!(late.problem(409)["by"], "root");
    assert_eq!(text_of(&store, "a"), "old");
}

/// So that text whose lock has expired can be saved later, and a break is not undone.
#[actix_web::test]
async fn a_refused_save_says_how_the_lock_was_lost() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, root) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "root").await);
    let why = serde_json::json!({ "reason": "a mistake" });
    let token = alice.post("/note/a").await.token();
    assert_eq!(root.post_json("/locks/note/a/break", why).await.status, 204);
    let lost = alice.with_token(Method::PUT, "/note/a", &token).await.problem(409);
    let says = |lost: &Value| ["cause", "by", "reason"].map(|name| lost[name].clone());
    assert_eq!(says(&lost), ["broken", "root", "a mistake"]);
    let why = "root has broken it (a mistake); open the document again";
    assert!(lost["detail"].as_str().unwrap().ends_with(why), "{lost}");
    // Without the token, nobody knows which lock was meant.
    assert_eq!(says(&alice.put("/note/a", "").await.problem(409)), [(); 3].map(|()| Value::Null));

    let token = alice.post("/note/a").await.token();
    store.advance(Duration::from_secs(60));
    let lost = alice.with_token(Method::PUT, "/note/a", &token).await.problem(409);
    assert_eq!(says(&lost), [Value::from("expired"), Value::Null, Value::Null]);

    for names_token in [false, true] {
        let token = alice.post("/note/a").await.token();
        let named = names_token.then(|| serde_json::json!({ "token": token[10..token.len() - 1] }));
        let body = named.unwrap_or_else(|| serde_json::json!({}));
        assert_eq!(alice.post_json("/locks/note/a/release", body).await.status, 204);
        let lost = alice.with_token(Method::PUT, "/note/a", &token).await.problem(409);
        assert_eq!(says(&lost), [Value::from("released"), Value::Null, Value::Null]);
        let other = alice.with_token(Method::PUT, "/note/b", &token).await.problem(409);
        assert_eq!(other["cause"], Value::Null, "the lock was on another document");
    }
}

#[actix_web::test]
async fn a_token_in_the_request_asks_for_that_very_acquisition() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let token = alice.post("/note/a").await.token();
    assert_eq!(alice.with_token(Method::POST, "/note/a", &token).await.token(), token);

    // Several tokens at once, for a page with several documents.
    let of_b = alice.post("/note/b").await.token();
    let both = format!("{of_b}, {token}");
    assert_eq!(alice.with_token(Method::POST, "/note/a", &both).await.status, 200);

    assert_eq!(
        alice.with_token(Method::POST, "/note/a", &of_b).await.problem(412)["state"],
        "lost"
    );
    assert_eq!(bob.with_token(Method::POST, "/note/a", &token).await.problem(423)["state"], "held");
    store.age(&key("a"), Duration::from_secs(60));
    assert_eq!(
        alice.with_token(Method::POST, "/note/a", &token).await.problem(412)["state"],
        "lost"
    );
    assert_eq!(holder_of(&locks, "a").await, None, "a refusal acquires nothing");
}

#[actix_web::test]
async fn a_document_that_does_not_exist_leaves_no_lock() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/c").await.problem(404);
    assert_eq!(holder_of(&locks, "c").await, None);

    alice.post("/note/a").await;
    store.remove(&key("a"));
    alice.put("/note/a", "new").await.problem(404);
    assert_eq!(
        holder_of(&locks, "a").await,
        None,
        "no lock is left if the document was deleted while it was held"
    );
    alice.post("/note/b").await;
    store.remove(&key("b"));
    alice.post("/note/b").await.problem(404);
    assert_eq!(holder_of(&locks, "b").await, None);
}

#[actix_web::test]
async fn a_failed_request_gives_its_new_lock_back_with_its_answer() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);

    // Without `holder_of` in between: the lock must be gone by the time of the answer.
    let bad_json = alice.request(Method::POST, "/note/a/form").set_payload("{bad");
    let bad_json = bad_json.insert_header(("content-type", "application/json"));
    let refused = alice.send(bad_json).await;
    refused.problem(400);
    assert_eq!(refused.header("lock-token"), None);
    assert_eq!(bob.post("/note/a").await.status, 200);
    bob.post("/close-all").await;

    for status in [400, 404, 422, 500, 503] {
        let answer = alice.post(&format!("/note/a/answer/{status}")).await;
        assert_eq!((answer.status.as_u16(), answer.header("lock-token")), (status, None));
        assert!(locks.inspect(&key("a")).await.unwrap().is_none(), "{status}");
    }
    for status in [200, 204, 303, 304] {
        let answer = alice.post(&format!("/note/a/answer/{status}")).await;
        assert_eq!(answer.status.as_u16(), status);
        assert!(locks.inspect(&key("a")).await.unwrap().is_some(), "{status}");
        alice.post("/close-all").await;
    }

    // A document that does not fit its Rust type.
    let broken = serde_json::json!({ "_id": "broken", "words": 5 });
    store.put("broken".to_owned(), &Broken(broken)).unwrap();
    let internal = alice.post("/note/broken").await.problem(500);
    assert!(!internal["detail"].as_str().unwrap().contains("missing field"), "{internal}");
    assert!(locks.inspect(&key("broken")).await.unwrap().is_none());
}

/// A note of an older version of the application.
#[derive(Serialize, Deserialize)]
#[serde(transparent)]
struct Broken(Value);

impl Lockable for Broken {
    type Id = String;
    const COLLECTION: &'static str = "note";
}

#[actix_web::test]
async fn a_failed_request_keeps_locks_that_the_session_already_held() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    assert_eq!(alice.post("/note/a/answer/500").await.token(), token);
    let bad_json = alice.request(Method::POST, "/note/a/form").set_payload("{bad");
    alice.send(bad_json.insert_header(("content-type", "application/json"))).await.problem(400);
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
}

#[actix_web::test]
async fn an_application_may_keep_new_locks_on_errors() {
    let (locks, _) = embedded().await;
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let wrap = locks.session(session).keep_fresh_locks_on_error();
    let app = test::init_service(App::new().wrap(wrap).configure(routes)).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let answer = alice.post("/note/a/answer/422").await;
    assert!(answer.header("lock-token").is_some());
    assert!(locks.inspect(&key("a")).await.unwrap().is_some());
}

#[actix_web::test]
async fn a_handler_can_fall_back_to_a_read_only_page() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    assert_eq!(alice.get("/note/a/view").await.text(), "edit old");
    let answer = bob.get("/note/a/view").await;
    assert_eq!(answer.text(), "read only: note/a is locked by alice");
    assert_eq!(answer.header("lock-token"), None);
    let answer = bob.get("/note/missing/view").await;
    assert_eq!(answer.text(), "read only: there is no document note/missing");
    assert_eq!(holder_of(&locks, "missing").await, None, "although the answer was no error");
}

#[actix_web::test]
async fn one_lock_is_announced_and_several_are_not() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let both = alice.post("/note/a/both").await;
    assert_eq!((both.status.as_u16(), both.header("lock-token")), (204, None));
    assert_eq!(alice.post("/close-all").await.json(), serde_json::json!(["note/a", "note/b"]));
    assert_eq!(holder_of(&locks, "a").await, None);
    assert_eq!(holder_of(&locks, "b").await, None);
}

#[actix_web::test]
async fn an_id_is_read_from_the_path_as_it_was_written() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    for (path, id) in [
        ("a%2Fb", "a/b"),
        ("100%25", "100%"),
        ("%2541", "%41"),
        ("%24where", "$where"),
        ("..%2F..%2Fetc", "../../etc"),
        ("%2e%2e", ".."),
        ("gr%C3%BCn", "grün"),
        ("%00", "\0"),
        ("%7B%22%24gt%22:%22%22%7D", "{\"$gt\":\"\"}"),
    ] {
        store.put(id.to_owned(), &Note { id: id.to_owned(), text: String::new() }).unwrap();
        let answer = alice.post(&format!("/note/{path}")).await;
        assert_eq!(answer.status, 200, "{path}");
        assert_eq!(answer.json()["_id"], id);
    }
}

#[actix_web::test]
async fn a_failed_request_does_not_take_the_lock_from_a_request_that_was_told_of_it() {
    let (locks, _) = embedded().await;
    async fn slow(_: LockedDoc<Note>, turn: web::Data<tokio::sync::Notify>) -> HttpResponse {
        turn.notified().await;
        HttpResponse::InternalServerError().finish()
    }
    let turn = web::Data::new(tokio::sync::Notify::new());
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .app_data(turn.clone())
        .wrap(locks.session(session))
        .route("/slow/{id}", web::post().to(slow))
        .configure(routes);
    let app = test::init_service(app).await;
    let alice = Browser::logged_in(&app, "alice").await;

    // A double click: the first request has the lock and is still at work when the second comes.
    let second = async {
        while locks.inspect(&key("a")).await.unwrap().is_none() {
            tokio::task::yield_now().await;
        }
        let token = alice.post("/note/a").await.token();
        turn.notify_one();
        token
    };
    let (first, token) = tokio::join!(alice.post("/slow/a"), second);
    assert_eq!((first.status.as_u16(), first.header("lock-token")), (500, None));
    locks.shutdown().await;
    assert_eq!(alice.put("/note/a", "new").await.token(), token);
}

#[actix_web::test]
async fn a_lock_that_a_handler_stops_waiting_for_is_not_kept() {
    let (locks, _) = embedded().await;
    async fn impatient(locks: SessionLocks) -> impl Responder {
        let mut acquire = Box::pin(locks.lock::<Note>("a".to_owned()));
        // Until the command is sent, but not until its answer.
        assert!(futures_util::poll!(&mut acquire).is_pending());
        drop(acquire);
        HttpResponse::NoContent()
    }
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new().wrap(locks.session(session)).route("/x", web::post().to(impatient));
    let app = test::init_service(app.configure(routes)).await;
    let answer = Browser::logged_in(&app, "alice").await.post("/x").await;
    assert_eq!((answer.status.as_u16(), answer.header("lock-token")), (204, None));
    assert!(locks.inspect(&key("a")).await.unwrap().is_none());
}

#[actix_web::test]
async fn an_answer_that_says_lost_or_not_found_announces_no_lock() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    store.remove(&key("a"));
    let gone = alice.with_token(Method::POST, "/note/a", &token).await;
    gone.problem(404);
    assert_eq!(gone.header("lock-token"), None);
    assert_eq!(holder_of(&locks, "a").await, None, "even if the client sent its token");
}

/// A lock that is given back because there is no such document must not be confirmed as held.
#[actix_web::test]
async fn a_lock_on_a_missing_document_is_not_confirmed_either() {
    let (locks, store) = embedded().await;
    let other = LockManager::builder(store.clone()).without_reaper().build().await.unwrap();
    other.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/new").await.problem(404);
    store.put("new".to_owned(), &Note { id: "new".to_owned(), text: "old".to_owned() }).unwrap();
    let elsewhere = other.job("a job on another server");
    let guard = elsewhere.acquire(&key("new"), Wait::no()).await.unwrap();
    alice.post("/note/new").await.problem(423);
    guard.release().await.unwrap();
}

/// A note as a later version of the application stores it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct LaterNote {
    #[serde(rename = "_id")]
    id: String,
    text: String,
    status: String,
    views: i64,
}

impl Lockable for LaterNote {
    type Id = String;
    const COLLECTION: &'static str = Note::COLLECTION;
}

/// A stored note of any shape.
#[derive(Serialize, Deserialize)]
struct Any(Value);

impl Lockable for Any {
    type Id = String;
    const COLLECTION: &'static str = Note::COLLECTION;
}

/// A type meant for HTTP answers, which writes its id under another name than it reads.
#[derive(Debug, Serialize, Deserialize)]
struct AnswerNote {
    #[serde(rename(serialize = "id", deserialize = "_id"))]
    id: String,
    text: String,
}

impl Lockable for AnswerNote {
    type Id = String;
    const COLLECTION: &'static str = Note::COLLECTION;
}

#[actix_web::test]
async fn a_save_keeps_fields_that_its_type_does_not_name_and_concurrent_changes() {
    let (locks, store) = embedded().await;
    let note = |text: &str, views| LaterNote {
        id: "a".to_owned(),
        text: text.to_owned(),
        status: "deleted".to_owned(),
        views,
    };
    store.put("a".to_owned(), &note("old", 1)).unwrap();
    let past = store.clone();
    let save = move |mut edited: HeldDoc<Note>| {
        let past = past.clone();
        async move {
            // A counter that is written without locks.
            past.put("a".to_owned(), &note("old", 2)).unwrap();
            edited.text = "new".to_owned();
            edited.save().await.map(|()| HttpResponse::Ok())
        }
    };
    let replace = |mut edited: HeldDoc<Note>| async move {
        edited.text = "replaced".to_owned();
        edited.replace().await.map(|()| HttpResponse::Ok())
    };
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(locks.session(session))
        .route("/part/{id}", web::put().to(save))
        .route("/whole/{id}", web::put().to(replace))
        .configure(routes);
    let app = test::init_service(app).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await;
    assert_eq!(alice.put("/part/a", "").await.status, 200);
    let stored = |name: &str| {
        let Any(note) = store.all::<Any>().unwrap().remove(0);
        note.get(name).cloned()
    };
    assert_eq!(stored("text"), Some("new".into()));
    assert_eq!((stored("status"), stored("views")), (Some("deleted".into()), Some(2.into())));

    assert_eq!(alice.put("/whole/a", "").await.status, 200);
    assert_eq!((stored("text"), stored("status")), (Some("replaced".into()), None));
}

#[actix_web::test]
async fn a_type_that_writes_its_id_elsewhere_may_save_but_not_replace() {
    log_lines();
    let (locks, store) = embedded().await;
    let save = |mut edited: HeldDoc<AnswerNote>| async move {
        edited.text = "new".to_owned();
        edited.save().await.map(|()| HttpResponse::Ok())
    };
    let replace = |mut edited: HeldDoc<AnswerNote>| async move {
        edited.text = "replaced".to_owned();
        edited.replace().await.map(|()| HttpResponse::Ok())
    };
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(locks.session(session))
        .route("/answer/{id}", web::put().to(save))
        .route("/whole/{id}", web::put().to(replace))
        .configure(routes);
    let app = test::init_service(app).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await;
    assert_eq!(alice.put("/answer/a", "").await.status, 200);
    assert_eq!(alice.put("/whole/a", "").await.status, 500);
    assert!(logged("the type writes `id`, but does not read it"));
    let Any(note) = store.all::<Any>().unwrap().remove(0);
    assert_eq!(note, serde_json::json!({ "_id": "a", "text": "new" }));
}

#[actix_web::test]
async fn a_save_over_the_change_of_another_program_is_a_conflict_that_names_the_field() {
    #[derive(Debug, Serialize, Deserialize)]
    struct Tagged {
        #[serde(rename = "_id")]
        id: String,
        tags: Vec<String>,
    }
    impl Lockable for Tagged {
        type Id = String;
        const COLLECTION: &'static str = Note::COLLECTION;
    }
    let (locks, store) = embedded().await;
    let stored =
        |tags: &[&str]| Any(serde_json::json!({ "_id": "a", "text": "old", "tags": tags }));
    store.put("a".to_owned(), &stored(&["x"])).unwrap();
    let other = store.clone();
    let tag = move |mut edited: HeldDoc<Tagged>| {
        other.put("a".to_owned(), &stored(&["x", "theirs"])).unwrap();
        async move {
            edited.tags.push("mine".to_owned());
            edited.save().await.map(|()| HttpResponse::Ok())
        }
    };
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(locks.session(session))
        .route("/tag/{id}", web::put().to(tag))
        .configure(routes);
    let app = test::init_service(app).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await;
    let refused = alice.put("/tag/a", "").await;
    let problem = refused.problem(409);
    assert_eq!(problem["code"], "changed_meanwhile");
    assert_eq!(problem["field"], "tags");
    let Any(note) = store.all::<Any>().unwrap().remove(0);
    assert_eq!(note["tags"], serde_json::json!(["x", "theirs"]));
}

#[actix_web::test]
async fn a_lock_beyond_the_limit_of_a_session_is_refused_and_leaves_no_trace() {
    let limits = Limits { locks_per_session: 10, ..Limits::default() };
    let (locks, store) = embedded_with_limits(limits).await;
    for n in 0..12 {
        let note = Note { id: n.to_string(), text: String::new() };
        store.put(n.to_string(), &note).unwrap();
    }
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    for n in 0..10 {
        assert_eq!(alice.post(&format!("/note/{n}")).await.status, 200, "{n}");
    }
    for path in ["/note/10", "/locks/note/10"] {
        let refused = alice.post(path).await;
        assert_eq!(refused.problem(429)["code"], "too_many_locks");
        assert!(refused.header("retry-after").is_some());
        assert_eq!(holder_of(&locks, "10").await, None);
    }
    assert_eq!(alice.post("/note/3").await.status, 200, "it may re-enter a lock that it holds");
    assert_eq!(bob.post("/note/10").await.status, 200, "each session has its own limit");
    assert_eq!(alice.put("/note/3/done", "new").await.status, 204);
    assert_eq!(alice.post("/note/11").await.status, 200, "there is room again");
}

#[actix_web::test]
async fn a_release_says_whether_the_lock_was_still_there() {
    let (locks, _) = embedded().await;
    let manager = locks.clone();
    let release = move |note: HeldDoc<Note>, is_broken: web::Path<(String, bool)>| {
        let manager = manager.clone();
        async move {
            if is_broken.1 {
                let held = note.lock().clone();
                assert_eq!(held.token, Some(note.token()));
                manager.release(&held).await?;
            }
            note.release().await.map(|released| format!("{released:?}"))
        }
    };
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(locks.session(session))
        .route("/release/{id}/{is_broken}", web::post().to(release))
        .configure(routes);
    let app = test::init_service(app).await;
    let alice = Browser::new(&app);
    for (is_broken, says) in [(false, "Released"), (true, "AlreadyGone")] {
        alice.post("/note/a").await.token();
        assert_eq!(alice.post(&format!("/release/a/{is_broken}")).await.text(), says);
    }
}

#[actix_web::test]
async fn a_handler_answers_with_the_error_of_an_id_and_reads_the_parts_of_a_problem() {
    let wrong = LockKey::new("note", "x".repeat(2_000)).unwrap_err();
    let answer = actix_web::ResponseError::error_response(&wrong);
    assert_eq!(answer.status(), 400);
    let refused = LockError::NotFound { key: key("a") };
    let problem = Problem::from(&refused);
    assert_eq!(problem.text(), "there is no document note/a");
    assert_eq!(problem.member("code").unwrap(), "not_found");
}

/// Another program stores more in each row than the type names.
#[actix_web::test]
async fn a_row_is_removed_and_another_one_added_by_two_saves_and_one_save_says_so() {
    #[derive(Serialize, Deserialize)]
    struct Row {
        text: String,
    }
    #[derive(Serialize, Deserialize)]
    struct Order {
        #[serde(rename = "_id")]
        id: String,
        rows: Vec<Row>,
    }
    impl Lockable for Order {
        type Id = String;
        const COLLECTION: &'static str = Note::COLLECTION;
    }
    async fn save(
        mut order: HeldDoc<Order>,
        rows: web::Json<Vec<String>>,
    ) -> Result<impl Responder, LockError> {
        order.rows = rows.into_inner().into_iter().map(|text| Row { text }).collect();
        order.save().await.map(|()| HttpResponse::Ok())
    }
    let (locks, store) = embedded().await;
    let row = |text: &str, price: u8| serde_json::json!({ "text": text, "price": price });
    let rows = [row("nails", 1), row("screws", 2), row("glue", 3)];
    store.put("a".to_owned(), &Any(serde_json::json!({ "_id": "a", "rows": rows }))).unwrap();
    let session = SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(locks.session(session.cookie_secure(false).build()))
        .route("/order/{id}", web::put().to(save))
        .configure(routes);
    let app = test::init_service(app).await;
    let alice = Browser::new(&app);
    assert_eq!(alice.post("/locks/note/a").await.status, 201);
    let send =
        async |rows: Value| alice.send(alice.request(Method::PUT, "/order/a").set_json(rows)).await;
    log_lines();
    let refused = send(serde_json::json!(["nails", "glue", "paint"])).await.problem(409);
    assert_eq!((&refused["code"], &refused["field"]), (&"unclear_change".into(), &"rows".into()));
    assert!(refused["detail"].as_str().unwrap().contains("then add the new ones"));
    assert!(logged(
        "elements of `rows` are which, and some of them have fields that the type does not name"
    ));
    assert_eq!(send(serde_json::json!(["nails", "glue"])).await.status, 200);
    assert_eq!(send(serde_json::json!(["nails", "glue", "paint"])).await.status, 200);
    let stored: Vec<Any> = store.all().unwrap();
    let stored = stored.into_iter().find(|it| it.0["_id"] == "a").unwrap().0;
    let rows = serde_json::json!([row("nails", 1), row("glue", 3), { "text": "paint" }]);
    assert_eq!(stored["rows"], rows);
}
