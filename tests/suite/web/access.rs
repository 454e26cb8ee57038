//! Who may look at and lock which documents by the lock API.

use std::{cell::RefCell, rc::Rc};

use actix_doclock::Access;
use serde_json::json;

use super::{events::open, *};

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
    *allowed.borrow_mut() = vec![Access::Look];
    assert_eq!(alice.get("/locks/note/a").await.json()["state"], "mine");
    alice.post("/locks/note/a").await.problem(404);
    assert_eq!(alice.delete("/locks/note/a").await.status, 204);
    assert_eq!(alice.get("/locks/note/a").await.json()["state"], "free");
}
