//! Who may look at and lock which documents by the lock API.

mod slow_policies;

use actix_doclock::web::Access;
use actix_doclock::{Aid, Holder};
use serde_json::json;
use std::{cell::RefCell, rc::Rc};

use super::{
    events::{Stream, open},
    *,
};

use crate::rig::{
    app::eventually,
    log::{log_lines, logged},
};

/// Two tenants in one application: the documents of each begin with its first letter. The `asked` are the
/// documents that the policy was asked for.
async fn two_tenants(
    locks: &LockManager,
) -> (impl Service<Request, Response = ServiceResponse, Error = Error>, Rc<RefCell<Vec<String>>>) {
    let asked = Rc::new(RefCell::new(Vec::new()));
    let asks = Rc::clone(&asked);
    let app = serve_with(locks, move |session| {
        session.access_policy(async move |person: Option<Actor>, key: LockKey, _| {
            asks.borrow_mut().push(key.to_string());
            let tenant = person.and_then(|person| person.label.chars().next());
            tenant.is_some_and(|tenant| key.id().to_string().starts_with(tenant))
        })
    });
    (app.await, asked)
}

#[actix_web::test]
async fn where_people_are_identified_only_they_may_look_and_lock() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, visitor) = (Browser::logged_in(&app, "alice").await, Browser::new(&app));
    alice.post("/locks/note/a").await.token();
    let status = json!({ "keys": ["note/a"] });
    for refused in [
        visitor.get("/locks/note/a").await,
        visitor.get("/locks/events").await,
        visitor.post("/locks/note/a").await,
        visitor.post("/locks/note/b").await,
        visitor.post("/locks/note/a/break").await,
        visitor.post_json("/locks/status", status).await,
    ] {
        assert_eq!(refused.problem(401)["code"], "login_required");
        assert!(!refused.text().contains("alice"));
    }
    assert_eq!(visitor.get("/locks").await.json(), json!([]));
}

#[actix_web::test]
async fn where_nobody_is_identified_everybody_may_look_and_lock() {
    let (locks, _) = embedded().await;
    let session = SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
    let session = locks.session(session.cookie_secure(false).build());
    let app = test::init_service(App::new().wrap(session).configure(routes)).await;
    let (one, other) = (Browser::new(&app), Browser::new(&app));
    one.post("/locks/note/a").await.token();
    assert_eq!(other.get("/locks/note/a").await.json()["state"], "held");
}

#[actix_web::test]
async fn a_tenant_learns_nothing_of_the_locks_of_another_tenant() {
    let (locks, _) = embedded().await;
    let (app, _) = two_tenants(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/locks/note/a").await.token();
    bob.post("/locks/note/b").await.token();

    // What is not to be seen looks like what is not there.
    for path in ["/locks/note/a", "/locks/note/absent"] {
        for answer in [
            bob.get(path).await,
            bob.post(path).await,
            bob.post_json(path, json!({ "take_over": true })).await,
            bob.post(&format!("{path}/break")).await,
        ] {
            assert_eq!(answer.problem(404)["code"], "not_found");
            assert!(answer.header("lock-token").is_none() && !answer.text().contains("alice"));
        }
    }
    let keys = json!({ "keys": ["note/a", "note/b", "note/absent"] });
    let told = bob.post_json("/locks/status", keys).await.json();
    let told: Vec<_> = told["locks"].as_array().unwrap().iter().map(|it| &it["key"]).collect();
    assert_eq!(told, ["note/b"]);
    let own = bob.get("/locks").await.json();
    assert_eq!(own.as_array().unwrap().len(), 1);
    assert_eq!(bob.delete("/locks/note/a").await.status, 204);
    assert_eq!(alice.get("/locks/note/a").await.json()["state"], "mine", "he has released nothing");
}

#[actix_web::test]
async fn a_tenant_hears_nothing_of_the_locks_of_another_tenant() {
    let (locks, _) = embedded().await;
    let (app, _) = two_tenants(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let mut hers = alice.listen("").await;
    let mut his = open(&bob, "?keys=note/a,note/b").await;
    alice.post("/locks/note/a").await.token();
    assert_eq!(hers.event().await.1["key"], "note/a");
    bob.post("/locks/note/b").await.token();
    assert_eq!(his.event().await.1["key"], "note/b");
    alice.delete("/locks/note/a").await;
    let (event, data) = hers.event().await;
    assert_eq!((event.as_str(), &data["key"]), ("released", &"note/a".into()));
}

#[actix_web::test]
async fn the_policy_is_asked_for_the_person_of_each_request() {
    let (locks, _) = embedded().await;
    let (app, asked) = two_tenants(&locks).await;
    let browser = Browser::logged_in(&app, "alice").await;
    assert_eq!(browser.get("/locks/note/a").await.status, 200);
    browser.post("/switch/bob").await;
    browser.get("/locks/note/a").await.problem(404);
    assert_eq!(*asked.borrow(), ["note/a", "note/a"]);
}

#[actix_web::test]
async fn who_may_look_may_not_always_lock_and_who_may_no_longer_lock_may_release() {
    let (locks, _) = embedded().await;
    let allowed = Rc::new(RefCell::new(vec![Access::Look, Access::Lock]));
    let asked = Rc::clone(&allowed);
    let app = serve_with(&locks, move |session| {
        session.access_policy(async move |_: Option<Actor>, _: LockKey, access| {
            asked.borrow().contains(&access)
        })
    })
    .await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/locks/note/a").await.token();
    let token = |own: Answer| own.json()["held"][0]["token"].clone();
    assert!(token(alice.post("/locks/heartbeat").await).is_string());
    assert!(alice.get("/locks").await.json()[0]["token"].is_string());
    *allowed.borrow_mut() = vec![Access::Look];
    assert!(token(alice.post("/locks/heartbeat").await).is_null());
    assert!(alice.get("/locks").await.json()[0]["token"].is_null());
    assert_eq!(alice.get("/locks/note/a").await.json()["state"], "mine");
    assert_eq!(alice.delete("/locks/note/a").await.status, 204);
    assert_eq!(alice.get("/locks/note/a").await.json()["state"], "free");
}

/// A policy that a test changes: the documents that nobody may have, and how often it was asked.
async fn changing(
    locks: &LockManager,
) -> (
    impl Service<Request, Response = ServiceResponse, Error = Error>,
    Rc<RefCell<Vec<&'static str>>>,
    Rc<RefCell<usize>>,
) {
    let (forbidden, asked) = (Rc::new(RefCell::new(Vec::new())), Rc::new(RefCell::new(0)));
    let (forbids, asks) = (Rc::clone(&forbidden), Rc::clone(&asked));
    let app = serve_with(locks, move |session| {
        session.access_policy_for_many(async move |_: Option<Actor>, keys: Vec<LockKey>, _| {
            *asks.borrow_mut() += 1;
            let may = |key: &LockKey| !forbids.borrow().contains(&key.id().to_string().as_str());
            keys.iter().map(may).collect::<Vec<_>>()
        })
    });
    (app.await, forbidden, asked)
}

#[actix_web::test]
async fn a_document_that_a_person_may_no_longer_have_is_given_back_by_every_refusal() {
    let (locks, _) = embedded().await;
    let (app, forbidden, _) = changing(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    for (what, mode) in [
        ("save", Method::PUT),
        ("edit", Method::POST),
        ("read", Method::POST),
        ("both", Method::POST),
        ("lock", Method::POST),
        ("many", Method::POST),
    ] {
        forbidden.borrow_mut().clear();
        // Whichever tab has taken it.
        assert_eq!(alice.acquire_in(ONE).await.status, 201, "{what}");
        assert_eq!(alice.post("/locks/note/b").await.status, 201, "{what}");
        forbidden.borrow_mut().push("a");
        let uri = match what {
            "read" => "/note/a/read",
            "both" => "/both",
            "lock" => "/locks/note/a",
            "many" => "/locks",
            _ => "/note/a",
        };
        let body = match what {
            "lock" | "both" | "read" => json!({}),
            "many" => json!({ "keys": ["note/a"] }),
            _ => json!({ "text": "new" }),
        };
        let request = alice.request(mode, uri).insert_header(("doclock-tab", TWO)).set_json(body);
        let answer = alice.send(request).await;
        assert_eq!(
            answer.status,
            if what == "many" { 200 } else { 404 },
            "{what}: {}",
            answer.text()
        );
        let left: Vec<_> =
            locks.list().await.unwrap().iter().map(|it| it.key.to_string()).collect();
        assert_eq!(left, ["note/b"], "{what}: the other lock stays");
        alice.delete("/locks/note/b").await;
    }
}

#[actix_web::test]
async fn a_policy_that_cannot_tell_is_an_outage_and_takes_no_lock_away() {
    tokio::time::pause();
    let _ = log_lines();
    let (locks, _) = embedded_with(|it| it.deadline(Duration::from_millis(700))).await;
    let how = Rc::new(RefCell::new("works"));
    let [one, many] = [Rc::clone(&how), Rc::clone(&how)];
    let answers = async |how: Rc<RefCell<&'static str>>| {
        let how = *how.borrow();
        match how {
            "fails" => Err("the database of the teams\nis away"),
            "hangs" => std::future::pending().await,
            _ => Ok(true),
        }
    };
    let for_one = serve_with(&locks, |session| {
        session
            .access_policy(async move |_: Option<Actor>, _: LockKey, _| answers(one.clone()).await)
    });
    let for_many = serve_with(&locks, |session| {
        session.access_policy_for_many(async move |_: Option<Actor>, keys: Vec<LockKey>, _| {
            answers(many.clone()).await.map(|may| vec![may; keys.len()])
        })
    });
    let (for_one, for_many) = (for_one.await, for_many.await);
    let alice = Browser::logged_in(&for_one, "alice").await;
    let at_many = alice.at(&for_many);
    let token = alice.post("/locks/note/a").await.json()["token"].clone();
    let beat = json!({ "locks": { "note/a": token } });
    for does in ["fails", "hangs"] {
        *how.borrow_mut() = does;
        for alice in [&alice.copy().at(&for_one), &alice.copy()] {
            alice.put("/note/a", "new").await.problem(503);
        }
        for answer in [
            at_many.put("/note/a", "new").await,
            at_many.post("/note/b").await,
            at_many.post("/locks/note/a").await,
            at_many.post_json("/locks/status", json!({ "keys": ["note/a"] })).await,
            alice.post("/note/b/read").await,
            alice.get("/locks/note/a").await,
            alice.post("/both").await,
        ] {
            assert_eq!(answer.problem(503)["code"], "store_unavailable", "{does}");
            assert!(!answer.text().contains("teams"), "the text is for the log");
        }
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_secs(15)).await;
            let kept = alice.post_json("/locks/heartbeat", beat.clone()).await.json();
            assert_eq!(
                (kept["held"].as_array().unwrap().len(), &kept["lost"]),
                (1, &json!([])),
                "{does}"
            );
        }
    }
    assert!(logged("has failed: the database of the teams\\nis away"));
    assert!(logged("did not answer within 700ms"), "the deadline of the manager");
    *how.borrow_mut() = "works";
    assert_eq!(alice.put("/note/a", "new").await.status, 200);
}

/// A stranger must not even take a free lock before the handler finds out.
#[actix_web::test]
async fn the_extractors_ask_the_policy_before_they_lock() {
    let (locks, store) = embedded().await;
    let (app, _) = two_tenants(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let visitor = Browser::new(&app);
    let mut events = locks.events();
    assert_eq!(events.next().await.unwrap().name(), "resync");
    let text = json!({ "text": "new" });
    let all_refused = async || {
        let absent = bob.post("/note/absent").await;
        for method in [Method::POST, Method::PUT] {
            let request = bob.request(method.clone(), "/note/a").set_json(&text);
            let refused = bob.send(request).await;
            assert_eq!(refused.problem(404)["code"], "not_found");
            assert_eq!(refused.text(), absent.text().replace("absent", "a"));
            visitor.send(visitor.request(method, "/note/a").set_json(&text)).await.problem(401);
        }
        bob.post("/note/a/read").await.problem(404);
        bob.post("/both").await.problem(404);
        assert!(!bob.get("/note/a/view").await.text().contains("alice"));
    };
    all_refused().await;
    assert!(locks.list().await.unwrap().is_empty());
    let token = alice.post("/note/a").await.token();
    all_refused().await;
    assert_eq!(bob.post("/note/b").await.status, 200);
    assert_eq!(alice.with_token(Method::PUT, "/note/a", &token).await.status, 200);
    assert_eq!(text_of(&store, "b"), "old");
    // Nothing of the attempts was announced.
    let mut told = Vec::new();
    while told.len() < 2 {
        let event = events.next().await.unwrap();
        told.extend(event.lock().map(|lock| (event.name(), lock.key.to_string())));
    }
    assert_eq!(told, [("acquired", "note/a".to_owned()), ("acquired", "note/b".to_owned())]);
}

#[actix_web::test]
async fn a_policy_for_the_lock_api_only_leaves_the_extractors_alone() {
    let (locks, _) = embedded().await;
    let app = serve_with(&locks, |session| {
        session
            .access_policy(async |_: Option<Actor>, _: LockKey, _| false)
            .access_policy_for_lock_api_only()
    })
    .await;
    let alice = Browser::logged_in(&app, "alice").await;
    assert_eq!(alice.post("/note/a").await.status, 200);
    alice.get("/locks/note/a").await.problem(404);
    // Nor does the lock API take away what the routes of the application have granted.
    alice.post("/locks/note/a").await.problem(404);
    let both = alice.post_json("/locks", json!({ "keys": ["note/a"] })).await.json();
    assert_eq!(both["refused"][0]["status"], 404);
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
}

#[actix_web::test]
async fn visitors_are_refused_unless_they_are_admitted() {
    let (locks, _) = embedded().await;
    for is_admitted in [false, true] {
        let app = serve_with(&locks, |session| {
            let session = session
                .access_policy(async |_: Option<Actor>, _: LockKey, access| access == Access::Look);
            if is_admitted { session.admit_visitors() } else { session }
        })
        .await;
        let visitor = Browser::new(&app);
        let status = visitor.post_json("/locks/status", json!({ "keys": ["note/a"] })).await;
        let expected = if is_admitted { 200 } else { 401 };
        assert_eq!(visitor.get("/locks/note/a").await.status, expected);
        assert_eq!(status.status, expected);
        if is_admitted {
            drop(open(&visitor, "").await);
        } else {
            visitor.get("/locks/events").await.problem(401);
        }
        visitor.post("/locks/note/a").await.problem(401);
        visitor.post("/note/a").await.problem(401);
    }
    assert!(locks.list().await.unwrap().is_empty());
}

#[actix_web::test]
async fn a_permission_that_is_withdrawn_during_a_wait_lets_nobody_in() {
    let (locks, _) = embedded().await;
    let may = Rc::new(RefCell::new(true));
    let allows = Rc::clone(&may);
    let app = serve_with(&locks, move |session| {
        session
            .wait_for_documents(Duration::from_secs(60))
            .access_policy(async move |_: Option<Actor>, _: LockKey, _| *allows.borrow())
    })
    .await;
    let bob = Browser::logged_in(&app, "bob").await;
    for extracts in [false, true] {
        *may.borrow_mut() = true;
        let held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        let waits = async || {
            if extracts {
                return bob.post("/note/a").await;
            }
            bob.post_json("/locks/note/a", json!({ "wait_ms": 60_000 })).await
        };
        let withdraw = async {
            tokio::time::sleep(Duration::from_millis(1_200)).await;
            *may.borrow_mut() = false;
            held.release().await.unwrap();
        };
        // The other one joins the grant of the first.
        let (refused, too, ()) = tokio::join!(waits(), waits(), withdraw);
        refused.problem(404);
        too.problem(404);
        assert!(locks.list().await.unwrap().is_empty());
    }
}

/// An application that gives no ids may tell people of two tenants apart by their roles.
#[actix_web::test]
async fn people_of_one_name_and_different_roles_are_different_people() {
    let (locks, _) = embedded().await;
    let tenant = |session: &Session| {
        let tenant = session.get::<String>("name").ok()??;
        Some(Actor::new("alice").with_role(tenant))
    };
    let app = serve_with(&locks, |session| session.identify(tenant)).await;
    let browser = Browser::logged_in(&app, "north").await;
    browser.post("/note/a").await.token();
    browser.post("/login/south").await;
    assert!(locks.list().await.unwrap().is_empty());
    assert_eq!(browser.get("/locks").await.json(), json!([]));
}

#[actix_web::test]
async fn a_document_cannot_be_created_to_learn_who_edits_it() {
    let (locks, _) = embedded().await;
    let (app, _) = two_tenants(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/note/a").await.token();
    bob.post("/create/a").await.problem(404);
    assert!(bob.post("/create/bobs").await.status.is_success());
}

/// The handlers of docs/server-rendered.md.
#[actix_web::test]
async fn neither_a_page_nor_a_refused_save_shows_a_document_that_its_person_may_not_lock() {
    async fn read(locks: SessionLocks, id: web::Path<String>) -> Result<String, LockError> {
        let note = locks.load::<Note>(id.into_inner()).await?;
        Ok(format!("{} {:?}", note.text, locks.version()))
    }
    async fn save(locks: SessionLocks, id: web::Path<String>, text: String) -> HttpResponse {
        let saved = async {
            let mut note: HeldDoc<Note> = locks.held(id.clone()).await?;
            note.text.clone_from(&text);
            note.save().await
        };
        let Err(error) = saved.await else { return HttpResponse::Ok().finish() };
        let stored = locks.load::<Note>(id.clone()).await.ok().map(|note| note.text);
        let (version, refused) = (locks.version(), locks.refused(&error));
        HttpResponse::build(StatusCode::from_u16(refused.status).unwrap())
            .body(format!("{text} {stored:?} {version:?} {refused:?}"))
    }
    async fn public(locks: SessionLocks, id: web::Path<String>) -> Result<String, LockError> {
        Ok(locks.load_without_policy::<Note>(id.into_inner()).await?.text)
    }
    let (locks, store) = embedded().await;
    let secret = Note { id: "a".to_owned(), text: "a secret".to_owned() };
    store.put("a".to_owned(), &secret).unwrap();
    let session = SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
    let wrap = locks.session(session.cookie_secure(false).build()).identify(person);
    let wrap = wrap.access_policy(async |person: Option<Actor>, _: LockKey, access| {
        access == Access::Look || person.is_some_and(|it| it.label == "alice")
    });
    let page = web::resource("/page/{id}").get(read).post(save);
    let app = App::new().wrap(wrap).service(page).route("/public/{id}", web::get().to(public));
    let app = test::init_service(app.configure(routes)).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let shown = alice.get("/page/a").await;
    assert!(shown.text().contains("a secret"));
    let typed =
        |browser: &Browser<'_, _>| browser.request(Method::POST, "/page/a").set_payload("typed");
    let lost = alice.send(typed(&alice)).await;
    assert_eq!(lost.status, 409);
    assert!(lost.text().contains("a secret"), "she may see it: {}", lost.text());
    let visitor = Browser::new(&app);
    for (other, status) in [(&bob, 404), (&visitor, 401)] {
        for answer in [other.get("/page/a").await, other.send(typed(other)).await] {
            assert_eq!(answer.status, status);
            assert!(!answer.text().contains("secret"), "{}", answer.text());
            assert!(!answer.text().contains("Version"), "{}", answer.text());
            assert_eq!(answer.header("etag"), None);
        }
        assert_eq!(other.get("/public/a").await.text(), "a secret");
    }
}
