//! Concurrent requests of one session.

use actix_session::config::{
    BrowserSession, PersistentSession, SessionLifecycle, TtlExtensionPolicy,
};

use super::*;

/// An application in which each request extends its session, and one request waits and sends a cookie of its own.
async fn extending(
    server: &Server,
    lifecycle: impl Into<SessionLifecycle>,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
    async fn own(pause: web::Data<Pause>) -> impl Responder {
        pause.here().await;
        HttpResponse::Ok().cookie(Cookie::new("own", "1")).finish()
    }
    let session = SessionMiddleware::builder(server.sessions.clone(), Key::from(&[7; 64]));
    let session = session.cookie_secure(false).session_lifecycle(lifecycle.into()).build();
    let app = App::new().wrap(SessionWrap(session)).app_data(server.pause.clone());
    test::init_service(app.configure(routes).route("/own", web::get().to(own))).await
}

/// The browser may have another session by then, whose cookie a dead key would overwrite.
#[actix_web::test]
async fn an_answer_carries_no_cookie_of_a_session_that_it_could_not_extend() {
    let server = Server::on(&database().await).await;
    let every = TtlExtensionPolicy::OnEveryRequest;
    let app =
        extending(&server, PersistentSession::default().session_ttl_extension_policy(every)).await;
    // Its cookie ends with the browser, so an extension sends none.
    let app_of_browser = extending(
        &server,
        BrowserSession::default().state_ttl_extension_policy(TtlExtensionPolicy::OnEveryRequest),
    )
    .await;
    for end in ["nothing", "logout", "renewal", "revocation", "expiry", "removal"] {
        let [tab, other] = two_tabs(&app, json!({})).await;
        let ends = async {
            match end {
                "logout" => drop(tab.post("/purge").await),
                "renewal" => drop(tab.post_json("/change", json!({ "renew": true })).await),
                "revocation" => server.sessions.revoke("1").await.unwrap(),
                "expiry" => age(&server.database, doc! {}, TWO_DAYS).await,
                "removal" => drop(records(&server.database).delete_many(doc! {}).await.unwrap()),
                _ => {}
            }
        };
        let (answer, ()) = server.while_it_waits(other.get("/own"), ends).await;
        assert_eq!(answer.status, 200, "{end}");
        let cookies = answer.headers.get_all("set-cookie").count();
        assert_eq!(cookies, if end == "nothing" { 2 } else { 1 }, "{end}");
        assert!(answer.header("set-cookie").unwrap().starts_with("own="), "{end}");
        records(&server.database).delete_many(doc! {}).await.unwrap();

        let [_, other] = two_tabs(&app_of_browser, json!({})).await;
        let ends = server.sessions.revoke("1");
        let (answer, _) = server.while_it_waits(other.get("/own"), ends).await;
        assert_eq!(answer.header("set-cookie"), Some("own=1"));
        records(&server.database).delete_many(doc! {}).await.unwrap();
    }
}

/// Two tabs of one session, which has these entries and an id.
async fn two_tabs<'a, S>(app: &'a S, mut state: Value) -> [Browser<'a, S>; 2]
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    state[ID] = "1".into();
    let tab = Browser::new(app);
    assert_eq!(tab.post_json("/change", json!({ "set": state })).await.status, 204);
    let other = tab.copy();
    [tab, other]
}

#[actix_web::test]
async fn concurrent_requests_do_not_undo_each_others_changes() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    for round in 0..5 {
        let [tab, other] = two_tabs(&app, json!({ "c": 1, "d": 1, "kept": 1 })).await;
        let send = |change: Value| {
            let tab = &tab;
            async move { assert_eq!(tab.post_json("/change", change).await.status, 204) }
        };
        join!(
            send(json!({ "wait": true, "set": { "a": 1 } })),
            send(json!({ "wait": true, "set": { "b": 1 } })),
            send(json!({ "wait": true, "remove": ["c"] })),
            send(json!({ "wait": true, "set": { "d": 2 } })),
            // All have loaded the same state, and now save in arbitrary order.
            async {
                server.pause.until_there_are(4).await;
                server.pause.let_go(4);
            },
        );
        let expected = json!({ "a": 1, "b": 1, "d": 2, "kept": 1 });
        assert_eq!(other.get("/state").await.json(), expected, "round {round}");
    }
}

/// The same in each order, one request after the other.
#[actix_web::test]
async fn a_late_request_writes_only_its_own_changes() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let before = json!({ "a": 1, "b": 1 });
    for (late, early, expected) in [
        (json!({ "set": { "c": 1 } }), json!({ "remove": ["a"] }), json!({ "b": 1, "c": 1 })),
        (json!({ "remove": ["a"] }), json!({ "set": { "b": 2 } }), json!({ "b": 2 })),
        (json!({ "set": { "a": 2 } }), json!({ "set": { "a": 3 } }), json!({ "a": 2, "b": 1 })),
        (json!({ "set": { "a": 2 } }), json!({ "remove": ["a"] }), json!({ "a": 2, "b": 1 })),
        (json!({ "remove": ["a"] }), json!({ "set": { "a": 3 } }), json!({ "b": 1 })),
        // Sets the value that it has loaded, which is no change of its own.
        (json!({ "set": { "a": 1 } }), json!({ "set": { "a": 3 } }), json!({ "a": 3, "b": 1 })),
    ] {
        let [tab, other] = two_tabs(&app, before.clone()).await;
        let mut request = late.clone();
        request["wait"] = true.into();
        let late_one = tab.post_json("/change", request);
        server.while_it_waits(late_one, other.post_json("/change", early.clone())).await;
        assert_eq!(other.get("/state").await.json(), expected, "{early}, then {late}");
    }
}

#[actix_web::test]
async fn an_entry_that_is_changed_repeatedly_is_stored_once() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let [tab, _] = two_tabs(&app, json!({ "counter": 0, "other": 1 })).await;
    for counter in 1..4 {
        tab.post_json("/change", json!({ "set": { "counter": counter } })).await;
    }
    let record = records(&server.database).find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(record.get_array("state").unwrap().len(), 3, "with the id: {record}");
}

#[actix_web::test]
async fn clearing_removes_concurrent_additions_too() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    for (what_else, left) in [
        (json!({}), json!({})),
        // Another user, without any entry of the previous one.
        (json!({ "name": "bob" }), json!({ "name": "bob" })),
        (json!({ "new": 1 }), json!({ "new": 1 })),
    ] {
        let [tab, other] = two_tabs(&app, json!({ "name": "alice" })).await;
        let clear = json!({ "wait": true, "clear": true, "set": what_else.clone() });
        let add = other.post_json("/change", json!({ "set": { "cart": 1 } }));
        let (cleared, _) = server.while_it_waits(tab.post_json("/change", clear), add).await;
        assert_eq!(cleared.status, 204);
        assert_eq!(other.get("/state").await.json(), left, "clear, {what_else}");
    }
}

/// The session that the late request has loaded has ended, although its key goes on.
#[actix_web::test]
async fn a_late_request_changes_nothing_in_a_session_that_was_cleared_meanwhile() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let bob = json!({ "name": "bob" });
    for (early, left) in [
        (json!({ "clear": true }), json!({})),
        (json!({ "clear": true, "set": { "name": "bob", ID: "2" } }), bob),
    ] {
        for late in [
            json!({ "wait": true, "set": { "cart": 1 } }),
            json!({ "wait": true, "set": { "name": "alice2" } }),
            json!({ "wait": true, "remove": ["cart"], "set": { "name": "alice", "theme": 1 } }),
        ] {
            let [tab, other] = two_tabs(&app, json!({ "name": "alice", "cart": 0 })).await;
            let late_one = tab.post_json("/change", late.clone());
            let early_one = other.post_json("/change", early.clone());
            server.while_it_waits(late_one, early_one).await;
            assert_eq!(other.get("/state").await.json(), left, "{early}, then {late}");
        }
    }
    let [tab, other] = two_tabs(&app, json!({ "name": "alice" })).await;
    let late = tab.post_json("/change", json!({ "wait": true, "clear": true }));
    let login = json!({ "clear": true, "set": { "name": "bob", ID: "2" } });
    server.while_it_waits(late, other.post_json("/change", login)).await;
    assert_eq!(other.get("/state").await.json(), json!({ "name": "bob" }), "a clear of alice's");
}

#[actix_web::test]
async fn a_login_goes_before_the_clear_of_a_visitor_at_the_same_moment() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let tab = Browser::new(&app);
    tab.post_json("/change", json!({ "set": { "theme": 1 } })).await;
    let other = tab.copy();
    let clear = tab.post_json("/change", json!({ "wait": true, "clear": true }));
    let login = json!({ "set": { "name": "bob", ID: "2" } });
    server.while_it_waits(clear, other.post_json("/change", login)).await;
    assert_eq!(other.get("/state").await.json(), json!({ "theme": 1, "name": "bob" }));
}

/// By an older server, for example.
#[actix_web::test]
async fn a_session_that_was_saved_without_its_id_is_changed_and_ended_like_any_other() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let older = MongoSessionStore::builder(&server.database).user_key("name").without_sweeps();
    let older = older.build().await.unwrap();
    let of_alice = async |id: &str| older.save(state_of("alice", id), &DAY).await.unwrap();

    let alice = browser_with(&app, &of_alice("1").await);
    alice.post_json("/change", json!({ "set": { "cart": 1 } })).await;
    assert_eq!(alice.get("/state").await.json(), json!({ "name": "alice", "cart": 1 }));
    server.sessions.revoke("1").await.unwrap();
    assert_eq!(alice.get("/state").await.json(), json!({}), "the first change has named it");

    let key = of_alice("2").await;
    let alice = browser_with(&app, &key);
    alice.post("/renew").await;
    assert_eq!(server.load(&key).await, None);
    assert_eq!(alice.get("/state").await.json(), json!({ "name": "alice" }));

    let key = of_alice("3").await;
    browser_with(&app, &key).post("/purge").await;
    assert_eq!(server.load(&key).await, None);
    age(&server.database, doc! {}, TWO_DAYS).await;
    server.sessions.sweep().await.unwrap();
    assert!(server.told().contains(&("3".to_owned(), EndReason::LoggedOut)), "{:?}", server.told());
}

#[actix_web::test]
async fn a_late_logout_of_a_visitor_leaves_a_login_alone_and_a_late_logout_of_a_person_ends_the_session()
 {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let purge = || json!({ "wait": true, "purge": true });
    let visitor = Browser::new(&app);
    visitor.post_json("/change", json!({ "set": { "theme": 1 } })).await;
    let other = visitor.copy();
    let login = other.post_json("/change", json!({ "set": { "name": "bob", ID: "2" } }));
    server.while_it_waits(visitor.post_json("/change", purge()), login).await;
    for browser in [visitor, other] {
        assert_eq!(browser.get("/state").await.json(), json!({ "theme": 1, "name": "bob" }));
    }

    // Another request of the visitor names the session, without a login.
    let key = server.sessions.save(State::new(), &DAY).await.unwrap();
    let (tab, other) = (browser_with(&app, &key), browser_with(&app, &key));
    let named = other.post_json("/change", json!({ "set": { ID: "4" } }));
    server.while_it_waits(tab.post_json("/change", purge()), named).await;
    assert_eq!(server.load(&key).await, None);

    // A person whose session gets its id only now.
    for script in [purge(), json!({ "wait": true, "clear": true })] {
        let name = State::from([("name".to_owned(), "\"alice\"".to_owned())]);
        let key = server.sessions.save(name, &DAY).await.unwrap();
        let (tab, other) = (browser_with(&app, &key), browser_with(&app, &key));
        let named = other.post_json("/change", json!({ "set": { ID: "3" } }));
        server.while_it_waits(tab.post_json("/change", script.clone()), named).await;
        assert_eq!(other.get("/state").await.json(), json!({}), "{script}");
    }
}

/// Here no id vanishes, so only the empty state shows that the session was cleared.
#[actix_web::test]
async fn clearing_a_session_without_an_id_removes_everything_too() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let name = State::from([("name".to_owned(), "\"alice\"".to_owned())]);
    let key = server.sessions.save(name, &DAY).await.unwrap();
    let (tab, other) = (browser_with(&app, &key), browser_with(&app, &key));
    let clear = tab.post_json("/change", json!({ "wait": true, "clear": true }));
    let add = other.post_json("/change", json!({ "set": { "cart": 1 } }));
    server.while_it_waits(clear, add).await;
    assert_eq!(server.load(&key).await, Some(State::new()));
}

#[actix_web::test]
async fn names_and_values_of_any_text_are_stored_unchanged() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let odd = [
        "",
        "a.b",
        ".",
        "$set",
        "$$ROOT",
        "$$REMOVE",
        "_id",
        "k",
        "state",
        "0",
        "a\"b",
        "'",
        "\\",
        "{\"$gt\": \"\"}",
        "ключ 🗝",
        "a\nb",
        "a\u{0}b",
        "id2",
    ];
    let all: Value = odd.iter().map(|odd| (odd.to_string(), json!(odd))).collect();
    let [tab, other] = two_tabs(&app, all.clone()).await;
    assert_eq!(other.get("/state").await.json(), all);
    for odd in odd {
        // Each entry is changed and removed while another one is changed.
        let set = json!({ "wait": true, "set": { odd: { odd: [odd] } } });
        let plain = json!({ "set": { "plain": odd } });
        server
            .while_it_waits(tab.post_json("/change", set), other.post_json("/change", plain))
            .await;
        let mut expected = all.clone();
        expected[odd] = json!({ odd: [odd] });
        expected["plain"] = odd.into();
        assert_eq!(other.get("/state").await.json(), expected, "{odd}");
        tab.post_json("/change", json!({ "remove": [odd, "plain"] })).await;
        expected.as_object_mut().unwrap().retain(|name, _| name != odd && name != "plain");
        assert_eq!(other.get("/state").await.json(), expected, "{odd}");
        tab.post_json("/change", json!({ "set": { odd: odd } })).await;
    }
}

#[actix_web::test]
async fn changes_during_a_renewal_are_lost_with_the_old_key() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let [tab, other] = two_tabs(&app, json!({ "name": "alice" })).await;
    let add = json!({ "wait": true, "set": { "cart": 1 } });
    let (added, _) =
        server.while_it_waits(other.post_json("/change", add), tab.post("/renew")).await;
    assert_eq!(added.status, 204);
    assert_eq!(added.header("set-cookie"), None, "the browser has a newer key by now");
    assert_eq!(tab.get("/state").await.json(), json!({ "name": "alice" }));
    assert_eq!(other.get("/state").await.json(), json!({}), "its key is the old one");
}

/// Then the state that the request has loaded is not known.
#[actix_web::test]
async fn without_the_wrap_the_later_request_overwrites() {
    let server = Server::on(&database().await).await;
    let key = server.sessions.save(State::new(), &DAY).await.unwrap();
    for name in ["a", "b"] {
        let state = State::from([(name.to_owned(), "1".to_owned())]);
        server.sessions.update(session_key(key.as_ref()), state.clone(), &DAY).await.unwrap();
        assert_eq!(server.load(&key).await, Some(state));
    }
}
