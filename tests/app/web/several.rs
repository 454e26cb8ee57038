//! Several documents in one request.

use actix_doclock::{Aid, Holder, TryAcquire};
use futures_util::FutureExt;
use serde_json::json;

use super::*;
use crate::rig::paused::Paused;

async fn notes(ids: &[&str]) -> (LockManager, MemoryStore) {
    let (locks, store) = embedded().await;
    for id in ids {
        store
            .put((*id).to_owned(), &Note { id: (*id).to_owned(), text: "old".to_owned() })
            .unwrap();
    }
    (locks, store)
}

/// An application that books two notes, all of them, or some of many; the ids are in the body.
async fn serve_bookings(
    locks: &LockManager,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
    async fn book(
        locks: SessionLocks,
        ids: web::Json<(String, String)>,
    ) -> Result<impl Responder, LockError> {
        let (first, second) = ids.into_inner();
        let (mut first, mut second) =
            (locks.open::<Note>(first).await?, locks.open::<Note>(second).await?);
        (first.text, second.text) = ("booked".to_owned(), "booked".to_owned());
        first.save().await?;
        second.save_and_release().await?;
        Ok(HttpResponse::NoContent())
    }
    async fn book_all(
        locks: SessionLocks,
        ids: web::Json<Vec<String>>,
    ) -> Result<impl Responder, LockError> {
        for mut note in locks.open_all::<Note>(ids.into_inner(), Wait::no()).await? {
            note.text = "all".to_owned();
            note.save().await?;
        }
        Ok(HttpResponse::NoContent())
    }
    async fn book_all_or_wait(
        locks: SessionLocks,
        ids: web::Json<Vec<String>>,
    ) -> Result<impl Responder, LockError> {
        let wait = Wait::for_at_most(Duration::from_secs(600));
        locks.open_all::<Note>(ids.into_inner(), wait).await?;
        Ok(HttpResponse::NoContent())
    }
    async fn book_some(
        locks: SessionLocks,
        ids: web::Json<Vec<String>>,
    ) -> Result<impl Responder, LockError> {
        let mut refused = Vec::new();
        for (key, note) in locks.open_each::<Note>(ids.into_inner()).await? {
            match note {
                Ok(mut note) => {
                    note.text = "some".to_owned();
                    note.save().await?;
                }
                Err(e) => refused.push(format!("{key}: {e}")),
            }
        }
        Ok(HttpResponse::Ok().json(refused))
    }
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let session = locks.session(session).identify(person);
    let session = session
        .access_policy(async |_: Option<Actor>, key: LockKey, _| key.id().to_string() != "secret");
    let app = App::new()
        .wrap(session)
        .route("/book", web::post().to(book))
        .route("/book/all", web::post().to(book_all))
        .route("/book/all-or-wait", web::post().to(book_all_or_wait))
        .route("/book/some", web::post().to(book_some))
        .configure(routes);
    test::init_service(app).await
}

#[actix_web::test]
async fn two_documents_of_one_type_are_opened_by_ids_of_the_body() {
    let (locks, store) = embedded().await;
    let app = serve_bookings(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    // A client that has one of the two locks sends its token.
    let token = alice.post("/note/a").await.token();
    let request = alice.request(Method::POST, "/book").insert_header(("lock-token", token));
    assert_eq!(alice.send(request.set_json(("a", "b"))).await.status, 204);
    assert_eq!((text_of(&store, "a"), text_of(&store, "b")), ("booked".into(), "booked".into()));
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
    assert_eq!(holder_of(&locks, "b").await, None);
    for (ids, status) in [(("a", "missing"), 404), (("a", "secret"), 404)] {
        assert_eq!(alice.post_json("/book", json!(ids)).await.status, status);
    }
}

#[actix_web::test]
async fn all_documents_are_opened_or_none() {
    let (locks, store) = notes(&["c"]).await;
    let app = serve_bookings(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/note/a").await.token();
    bob.post("/note/c").await.token();
    for refused in
        [json!(["a", "b", "c"]), json!(["a", "b", "missing"]), json!(["a", "b", "secret"])]
    {
        assert!(alice.post_json("/book/all", refused).await.status.is_client_error());
        assert_eq!(locks.list().await.unwrap().len(), 2);
    }
    assert_eq!(alice.post_json("/book/all", json!(["b", "a", "a"])).await.status, 204);
    assert_eq!((text_of(&store, "a"), text_of(&store, "b")), ("all".into(), "all".into()));
    assert_eq!(text_of(&store, "c"), "old");
}

#[actix_web::test]
async fn a_request_that_gets_not_all_locks_keeps_those_that_another_request_was_told_of() {
    for is_told in [false, true] {
        let (locks, store) = notes(&["c"]).await;
        let app = serve_bookings(&locks).await;
        let (alice, bob) =
            (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
        let token = bob.post("/note/c").await.token();
        let meanwhile = async {
            while locks.inspect(&key("b")).await.unwrap().is_none() {
                tokio::task::yield_now().await;
            }
            if is_told {
                assert_eq!(alice.post("/locks/note/a").await.status, 200);
            }
            // The request waits for a document that is deleted.
            assert!(store.remove(&key("c")));
            let release = bob.request(Method::DELETE, "/locks/note/c");
            assert_eq!(bob.send(release.insert_header(("lock-token", token))).await.status, 204);
        };
        let (refused, ()) = futures_util::join!(
            alice.post_json("/book/all-or-wait", json!(["a", "b", "c"])),
            meanwhile
        );
        assert_eq!(refused.status, 404, "{}", refused.text());
        let kept = if is_told { Some("alice") } else { None };
        assert_eq!(holder_of(&locks, "a").await.as_deref(), kept, "told: {is_told}");
        assert_eq!(holder_of(&locks, "b").await, None, "nobody knows of it");
    }
}

#[actix_web::test]
async fn of_many_documents_those_that_are_free_are_opened_and_the_others_are_named() {
    let (locks, store) = notes(&["c", "secret"]).await;
    let app = serve_bookings(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    // Her own lock, of another tab, is in nobody's way.
    let request = alice.request(Method::POST, "/locks/note/a").insert_header(("doclock-tab", ONE));
    let token = alice.send(request).await.token();
    bob.post("/note/b").await.token();
    let request = alice.request(Method::POST, "/book/some").insert_header(("doclock-tab", TWO));
    let ids = json!(["a", "b", "c", "missing", "secret"]);
    let refused = alice.send(request.set_json(ids)).await.json();
    assert_eq!(
        refused,
        json!([
            "note/b: note/b is locked by bob",
            "note/missing: there is no document note/missing",
            "note/secret: there is no document note/secret",
        ])
    );
    assert_eq!((text_of(&store, "a"), text_of(&store, "c")), ("some".into(), "some".into()));
    let lock = locks.inspect(&key("a")).await.unwrap().unwrap();
    assert_eq!(lock.tab.map(|tab| tab.to_string()), Some(ONE.to_owned()));
    assert!(token.contains(&lock.token.unwrap().to_string()), "the other tab keeps it");
}

#[actix_web::test]
async fn the_lock_api_locks_of_many_documents_those_that_are_free() {
    let (locks, _) = notes(&["c", "secret"]).await;
    let app = serve_bookings(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    bob.post("/note/b").await.token();
    let keys =
        ["note/c", "note/b", "note/a", "note/a", "note/missing", "note/secret", "nix/a", "note"];
    let answer = alice.post_json("/locks", json!({ "keys": keys })).await.json();
    let of = |list: &str, member: &str| -> Vec<_> {
        let list = answer[list].as_array().unwrap().iter();
        list.map(|it| it[member].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(of("held", "key"), ["note/a", "note/c"]);
    assert!(of("held", "token").iter().all(|token| token.len() == 36));
    assert_eq!(of("refused", "key"), ["nix/a", "note", "note/b", "note/missing", "note/secret"]);
    let codes = of("refused", "code");
    assert_eq!(codes, ["no_such_collection", "bad_request", "held", "not_found", "not_found"]);
    assert_eq!(answer["refused"][2]["holder"]["label"], "bob");
    assert_eq!(locks.list().await.unwrap().len(), 3);

    let many: Vec<_> = (0..101).map(|n| format!("note/{n}")).collect();
    alice.post_json("/locks", json!({ "keys": many })).await.problem(400);
    Browser::new(&app).post_json("/locks", json!({ "keys": ["note/a"] })).await.problem(401);
}

#[actix_web::test]
async fn a_job_takes_of_many_locks_those_that_are_free() {
    let (locks, _) = embedded().await;
    let job = locks.job("bulk");
    let theirs = locks.acquire(&key("b"), Wait::no()).await.unwrap();
    let keys = ["a", "b", "c"].map(key);
    let task = tokio::spawn(async move { job.acquire_each(keys).await });
    let (guards, refused) = task.await.unwrap();
    let held: Vec<_> = guards.iter().map(|guard| guard.key().clone()).collect();
    assert_eq!(held, [key("a"), key("c")]);
    assert!(matches!(&refused[..], [(b, LockError::Held(_))] if *b == key("b")), "{refused:?}");
    guards.release().await.unwrap();
    theirs.release().await.unwrap();
    let aid = Aid::new();
    let free = locks.lock_for_session(&key("a"), &aid, &Holder::new("x")).await;
    assert!(matches!(free, Ok(TryAcquire::Granted(_))));
}

/// Opening a document twice in one request is no second request that was told of its lock.
#[actix_web::test]
async fn a_request_that_fails_gives_back_what_it_has_locked_and_opened() {
    async fn lock_open_and_fail(locks: SessionLocks) -> Result<HttpResponse, LockError> {
        locks.lock_all([key("a"), key("b")], Wait::no()).await?;
        let first = locks.open::<Note>("a".to_owned()).await?;
        let again = locks.open::<Note>("a".to_owned()).await?;
        assert_eq!(first.is_fresh(), again.is_fresh());
        drop(locks.open::<Note>("b".to_owned()).await?);
        Ok(HttpResponse::Conflict().finish())
    }
    let (locks, _) = embedded().await;
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app =
        App::new().wrap(locks.session(session)).route("/fail", web::post().to(lock_open_and_fail));
    let app = test::init_service(app.configure(routes)).await;
    let alice = Browser::new(&app);
    assert_eq!(alice.post("/fail").await.status, StatusCode::CONFLICT);
    assert!(locks.list().await.unwrap().is_empty(), "{:?}", locks.list().await);
    // What the session held before stays.
    alice.post("/note/a").await;
    assert_eq!(alice.post("/fail").await.status, StatusCode::CONFLICT);
    let left = locks.list().await.unwrap();
    assert_eq!(left.iter().map(|lock| lock.key.clone()).collect::<Vec<_>>(), [key("a")]);
}

/// The extractors of a handler are polled together: the second one must not look like another request that was told of
/// the lock.
#[actix_web::test]
async fn a_request_with_two_extractors_of_one_document_gives_its_lock_back() {
    async fn fails(first: LockedDoc<Note>, again: LockedDoc<Note>) -> HttpResponse {
        let are_fresh = first.is_fresh() && again.is_fresh();
        let status = if are_fresh { StatusCode::CONFLICT } else { StatusCode::IM_A_TEAPOT };
        HttpResponse::new(status)
    }
    let (locks, _) = notes(&["a"]).await;
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new().wrap(locks.session(session)).route("/fails/{id}", web::post().to(fails));
    let app = test::init_service(app).await;
    let alice = Browser::new(&app);
    assert_eq!(alice.post("/fails/a").await.status, StatusCode::CONFLICT);
    assert!(locks.list().await.unwrap().is_empty(), "{:?}", locks.list().await);
}

/// The handler goes on with the document that its extractor has locked.
#[actix_web::test]
async fn all_or_none_gives_back_no_older_lock_of_the_request() {
    async fn books(
        mut note: LockedDoc<Note>,
        locks: SessionLocks,
    ) -> Result<HttpResponse, LockError> {
        let refused = locks.lock_all([key("a"), key("b")], Wait::no()).await;
        note.text = format!("{}", refused.is_err());
        note.save().await?;
        Ok(HttpResponse::NoContent().finish())
    }
    let (locks, store) = notes(&["a", "b"]).await;
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new().wrap(locks.session(session)).route("/books/{id}", web::post().to(books));
    let app = test::init_service(app).await;
    let of_bob = locks.lock_for_session(&key("b"), &Aid::new(), &Holder::new("bob")).await;
    assert!(matches!(of_bob, Ok(TryAcquire::Granted(_))));
    assert_eq!(Browser::new(&app).post("/books/a").await.status, StatusCode::NO_CONTENT);
    assert_eq!(text_of(&store, "a"), "true", "refused, and saved");
}

/// The handler has asked another service, for longer than the deadline.
#[actix_web::test]
async fn a_lock_is_given_back_before_the_answer_of_a_slow_handler() {
    async fn fails(_: LockedDoc<Note>) -> HttpResponse {
        tokio::time::sleep(Duration::from_secs(60)).await;
        HttpResponse::BadGateway().finish()
    }
    let (_, store) = notes(&["a"]).await;
    let pause = || tokio::time::sleep(Duration::from_millis(100)).boxed();
    let paused = Paused::new(store.clone(), pause);
    let locks = LockManager::builder(paused).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new().wrap(locks.session(session)).route("/fails/{id}", web::post().to(fails));
    let app = test::init_service(app).await;
    tokio::time::pause();
    assert_eq!(Browser::new(&app).post("/fails/a").await.status, StatusCode::BAD_GATEWAY);
    let other = LockManager::builder(store).build().await.unwrap();
    other.register::<Note>().await.unwrap();
    assert!(other.inspect(&key("a")).await.unwrap().is_none());
}
