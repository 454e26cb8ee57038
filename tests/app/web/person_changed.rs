//! A page that was opened for one person, in a browser where another person has logged in since.

use serde_json::json;

use super::*;

const PAGE: &str = "aaaaaaaa-1111-4111-8111-111111111111";

/// A page as `client.js` is: it says for whom it was opened.
struct Page<'a, S> {
    browser: &'a Browser<'a, S>,
    opened_for: String,
}

impl<'a, S> Page<'a, S>
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    /// The page learns its person from the first answer, such as that of a page that only shows who has the lock.
    async fn opened(browser: &'a Browser<'a, S>) -> Self {
        let request = browser.request(Method::GET, "/locks/note/a");
        let answer = browser.send(request.insert_header(("doclock-page", PAGE))).await;
        let opened_for = answer.header("doclock-person").expect("the page has a person").to_owned();
        Self { browser, opened_for }
    }

    async fn ask(&self, method: Method, uri: &str, body: Value) -> Answer {
        let request = self.browser.request(method, uri).insert_header(("doclock-page", PAGE));
        let request = request.insert_header(("doclock-person", self.opened_for.as_str()));
        self.browser.send(request.set_json(body)).await
    }
}

#[actix_web::test]
async fn a_page_of_another_person_neither_locks_nor_saves_and_its_own_person_does() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let browser = Browser::logged_in(&app, "alice").await;
    let page = Page::opened(&browser).await;
    assert_eq!(page.ask(Method::POST, "/locks/note/a", json!({})).await.status, 201);
    let form = json!({ "text": "of alice" });
    assert_eq!(page.ask(Method::PUT, "/note/a", form.clone()).await.status, 200);

    browser.post("/login/bob").await;
    for (method, uri, body) in [
        (Method::POST, "/locks/note/a", json!({})),
        (Method::POST, "/locks/note/a", json!({ "take_over": true, "wait_ms": 5000 })),
        (Method::POST, "/locks", json!({ "keys": ["note/a"] })),
        (Method::POST, "/locks/heartbeat", json!({})),
        (Method::POST, "/locks/note/a/break", json!({ "reason": "mine" })),
        (Method::POST, "/note/a", json!({})),
        (Method::POST, "/note/a/read", json!({})),
        (Method::PUT, "/note/a", json!({ "text": "of alice, saved by bob" })),
        (Method::POST, "/both", json!({})),
        (Method::POST, "/create/c", json!({})),
    ] {
        let refused = page.ask(method, uri, body).await.problem(409);
        assert_eq!(
            (&refused["code"], &refused["state"]),
            (&"person_changed".into(), &"lost".into()),
            "{uri}"
        );
    }
    assert_eq!(store.all::<Note>().unwrap().len(), 2);
    // Bob's own page does, and even while he holds the lock, the other page cannot save under it.
    let of_bob = Page::opened(&browser).await;
    assert_eq!(of_bob.ask(Method::POST, "/locks/note/a", json!({})).await.status, 201);
    assert_eq!(
        page.ask(Method::PUT, "/note/a", form.clone()).await.problem(409)["code"],
        "person_changed"
    );
    assert_eq!(text_of(&store, "a"), "of alice");
    of_bob.ask(Method::DELETE, "/locks/note/a", json!({})).await;

    browser.post("/login/alice").await;
    assert_eq!(page.ask(Method::POST, "/locks/note/a", json!({})).await.status, 201);
    assert_eq!(page.ask(Method::PUT, "/note/a", form).await.status, 200);
}

#[actix_web::test]
async fn a_page_whose_person_has_logged_out_has_to_log_in_also_where_visitors_may_lock() {
    let (locks, _) = embedded().await;
    let app =
        serve_with(&locks, |wrap| wrap.access_policy(async |_, _, _| true).admit_visitors()).await;
    let browser = Browser::new(&app);
    // A visitor has no person to change from.
    let request = browser.request(Method::GET, "/locks/note/a");
    let answer = browser.send(request.insert_header(("doclock-page", PAGE))).await;
    assert_eq!((answer.status.as_u16(), answer.header("doclock-person")), (200, None));
    assert_eq!(browser.post("/locks/note/b").await.status, 201);

    browser.post("/login/alice").await;
    let page = Page::opened(&browser).await;
    browser.post("/nobody").await;
    for uri in ["/locks/note/a", "/note/a"] {
        let refused = page.ask(Method::POST, uri, json!({})).await.problem(401);
        assert_eq!(refused["code"], "login_required", "{uri}");
    }
    assert!(locks.inspect(&key("a")).await.unwrap().is_none());
}

/// Roles may change while a page is open.
#[actix_web::test]
async fn a_person_is_told_by_the_id_or_else_the_name_and_never_by_the_roles() {
    let (locks, _) = embedded().await;
    let app = serve_with(&locks, |wrap| {
        wrap.identify(|session| {
            let name = session.get::<String>("name").ok()??;
            let [id, label, role] = name.split('-').collect::<Vec<_>>().try_into().ok()?;
            let person = Actor::new(label).with_role(role);
            Some(if id == "none" { person } else { person.with_id(id) })
        })
    })
    .await;
    let mut seen = Vec::new();
    for (name, is_like) in [
        ("7-alice-editor", 0),
        ("7-alicia-chief", 0),
        ("8-alice-editor", 2),
        ("none-alice-editor", 3),
        ("none-alice-chief", 3),
        ("none-7-editor", 5),
    ] {
        let browser = Browser::logged_in(&app, name).await;
        let plain = browser.post("/locks/note/a").await;
        assert_eq!(plain.header("doclock-person"), None, "no page has asked");
        browser.delete("/locks/note/a").await;
        let one = Page::opened(&browser).await.opened_for;
        assert!(!one.contains("alice") && one.len() == 36, "{one}");
        assert_eq!(seen.iter().position(|it| *it == one).unwrap_or(seen.len()), is_like, "{name}");
        seen.push(one);
    }
}

#[actix_web::test]
async fn a_page_of_another_person_may_still_release_and_a_malformed_name_is_nobody() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let browser = Browser::logged_in(&app, "alice").await;
    let mut page = Page::opened(&browser).await;
    // The aid stays, as after a login outside of the wrap.
    page.opened_for = ONE.to_owned();
    assert_eq!(browser.post("/locks/note/a").await.status, 201);
    assert_eq!(
        page.ask(Method::POST, "/locks/note/a", json!({})).await.problem(409)["code"],
        "person_changed"
    );
    assert_eq!(page.ask(Method::POST, "/locks/note/a/release", json!({})).await.status, 204);
    assert!(locks.inspect(&key("a")).await.unwrap().is_none());
    for malformed in ["null", "", "undefined", "alice", &"f".repeat(31)] {
        page.opened_for = malformed.to_owned();
        assert_eq!(page.ask(Method::POST, "/note/a", json!({})).await.status, 200, "{malformed}");
    }
}

#[actix_web::test]
async fn where_people_are_not_identified_nobody_is_another_person() {
    let (locks, _) = embedded().await;
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new().wrap(locks.session(session)).configure(routes);
    let app = test::init_service(app).await;
    let browser = Browser::new(&app);
    let page = Page { browser: &browser, opened_for: ONE.to_owned() };
    let answer = page.ask(Method::POST, "/note/a", json!({})).await;
    assert_eq!((answer.status.as_u16(), answer.header("doclock-person")), (200, None));
}
