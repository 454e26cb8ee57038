//! The lock API, call by call.

use serde_json::json;

use actix_doclock::Named;

use super::*;
use crate::rig::log::{count_logged, log_lines};

#[actix_web::test]
async fn a_lock_is_taken_confirmed_shown_and_released() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    assert_eq!(alice.get("/locks/note/a").await.json(), json!({ "state": "free" }));

    let created =
        alice.post_json("/locks/note/a", json!({ "mode": "exclusive", "wait_ms": 0 })).await;
    assert_eq!(created.status, 201);
    let body = created.json();
    assert_eq!(
        (&body["collection"], &body["id"], &body["mode"], &body["state"]),
        (&"note".into(), &"a".into(), &"exclusive".into(), &"mine".into())
    );
    assert_eq!(created.token(), format!("<urn:uuid:{}>", body["token"].as_str().unwrap()));
    assert!(body["since"].is_string() && body["expires_in_ms"].as_u64().unwrap() <= 60_000);

    let again = alice.post("/locks/note/a").await;
    assert_eq!((again.status.as_u16(), &again.json()["token"]), (200, &body["token"]));
    assert_eq!(bob.post("/locks/note/a").await.problem(423)["holder"]["label"], "alice");

    let mine = alice.get("/locks/note/a").await.json();
    assert_eq!((&mine["state"], &mine["mode"]), (&"mine".into(), &"exclusive".into()));
    let held = bob.get("/locks/note/a").await.json();
    assert_eq!((&held["state"], &held["holder"]["label"]), (&"held".into(), &"alice".into()));
    assert!(held["since"].is_string() && held["expires_in_ms"].is_u64());
    assert!(held.get("token").is_none(), "no other session learns the token");

    assert_eq!(alice.get("/locks").await.json().as_array().unwrap().len(), 1);
    assert_eq!(bob.get("/locks").await.json(), json!([]));

    assert_eq!(bob.delete("/locks/note/a").await.status, 204);
    assert_eq!(bob.post("/locks/note/a/release").await.status, 204);
    assert_eq!(
        holder_of(&locks, "a").await.as_deref(),
        Some("alice"),
        "another session's lock is never released"
    );

    assert_eq!(alice.delete("/locks/note/a").await.status, 204);
    assert_eq!(holder_of(&locks, "a").await, None);
    assert_eq!(alice.delete("/locks/note/a").await.status, 204, "a second release succeeds too");
    assert_eq!(Browser::new(&app).delete("/locks/note/a").await.status, 204);
}

#[actix_web::test]
async fn a_lock_on_a_document_that_does_not_exist_is_not_left() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    Browser::logged_in(&app, "alice").await.post("/locks/note/missing").await.problem(404);
    assert!(locks.inspect(&key("missing")).await.unwrap().is_none());
}

#[actix_web::test]
async fn a_late_beacon_of_a_closed_tab_does_not_release_the_lock_of_a_newer_one() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let old = alice.post("/locks/note/a").await.json()["token"].as_str().unwrap().to_owned();
    alice.delete("/locks/note/a").await;
    let new = alice.post("/locks/note/a").await.json()["token"].as_str().unwrap().to_owned();

    // A beacon is text, and cannot carry headers of its own.
    let beacon = |token: &str| {
        alice
            .request(Method::POST, "/locks/note/a/release")
            .insert_header(("content-type", "text/plain;charset=UTF-8"))
            .set_payload(json!({ "token": token }).to_string())
    };
    assert_eq!(alice.send(beacon(&old)).await.status, 204);
    let release = alice.request(Method::DELETE, "/locks/note/a");
    assert_eq!(alice.send(release.insert_header(("lock-token", old))).await.status, 204);
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
    assert_eq!(alice.send(beacon(&new)).await.status, 204);
    assert_eq!(holder_of(&locks, "a").await, None);
}

#[actix_web::test]
async fn a_heartbeat_reports_held_and_lost_locks() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let a = alice.post("/locks/note/a").await.json()["token"].as_str().unwrap().to_owned();
    let b = alice.post("/locks/note/b").await.json()["token"].as_str().unwrap().to_owned();
    let believed = json!({ "locks": { "note/a": a, "note/b": format!("urn:uuid:{b}") } });

    let answer = alice.post_json("/locks/heartbeat", believed.clone()).await.json();
    assert_eq!((answer["held"].as_array().unwrap().len(), &answer["lost"]), (2, &json!([])));
    assert_eq!(alice.post("/locks/heartbeat").await.json()["held"].as_array().unwrap().len(), 2);

    // b expires and is locked again; the heartbeat still refers to the first acquisition.
    store.age(&key("b"), Duration::from_secs(60));
    for _ in 0..2 {
        let answer = alice.post_json("/locks/heartbeat", believed.clone()).await.json();
        assert_eq!(answer["held"].as_array().unwrap().len(), 1, "{answer}");
        assert_eq!(answer["held"][0]["id"], "a");
        assert_eq!(answer["lost"], json!([{ "key": "note/b", "collection": "note", "id": "b" }]));
        alice.post("/locks/note/b").await;
    }

    let stranger = Browser::new(&app).post_json("/locks/heartbeat", believed).await.json();
    assert_eq!((&stranger["held"], stranger["lost"].as_array().unwrap().len()), (&json!([]), 2));
}

#[actix_web::test]
async fn only_people_allowed_by_the_policy_may_break_locks() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    Browser::logged_in(&app, "bob").await.post("/locks/note/a/break").await.problem(403);
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));

    let root = Browser::logged_in(&app, "root").await;
    assert_eq!(root.post("/locks/note/a/break").await.status, 204);
    assert_eq!(holder_of(&locks, "a").await, None);
    assert_eq!(root.post("/locks/note/a/break").await.status, 204, "there is nothing to break");
    alice.put("/note/a", "too late").await.problem(409);
    assert_eq!(text_of(&store, "a"), "old");

    let nobody = LockManager::builder(store).build().await.unwrap();
    nobody.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&nobody).await;
    alice.post("/note/a").await;
    Browser::logged_in(&app, "root").await.post("/locks/note/a/break").await.problem(403);
}

#[actix_web::test]
async fn a_page_of_another_site_changes_nothing() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "root").await;
    let token = alice.post("/locks/note/b").await.token();
    for header in
        [("sec-fetch-site", "cross-site"), ("origin", "https://evil.example"), ("origin", "null")]
    {
        for (method, uri) in [
            (Method::POST, "/locks/note/a"),
            (Method::DELETE, "/locks/note/b"),
            (Method::POST, "/locks/note/b/release"),
            (Method::POST, "/locks/note/b/break"),
            (Method::POST, "/locks/heartbeat"),
        ] {
            let request = alice.request(method, uri).insert_header(header);
            assert_eq!(alice.send(request).await.problem(403)["code"], "cross_site");
        }
    }
    assert_eq!(holder_of(&locks, "a").await, None);
    assert_eq!(alice.post("/locks/note/b").await.token(), token);
}

#[actix_web::test]
async fn a_page_of_http_changes_nothing_on_https_of_the_same_host() {
    let (locks, _) = embedded().await;
    let forwarded = [("x-forwarded-proto", "https"), ("x-forwarded-host", "shop.example")];
    for proxy in [&forwarded[..], &[]] {
        let app = serve_with(
            &locks,
            |session| {
                if proxy.is_empty() { session.https_only() } else { session }
            },
        )
        .await;
        let alice = Browser::logged_in(&app, "alice").await;
        let ask = async |page: &'static [(&'static str, &'static str)]| {
            let mut request = alice.request(Method::POST, "/locks/note/a");
            for header in [("host", "shop.example")].iter().chain(proxy).chain(page) {
                request = request.insert_header(*header);
            }
            alice.send(request).await
        };
        for page in [
            &[("origin", "http://shop.example")][..],
            &[("origin", "http://shop.example"), ("sec-fetch-site", "cross-site")],
            &[("origin", "https://shop.example"), ("sec-fetch-site", "cross-site")],
            &[("origin", "ftp://shop.example")],
            &[("origin", "moz-extension://shop.example")],
            &[("origin", "https://shop.example:8443")],
        ] {
            assert_eq!(ask(page).await.problem(403)["code"], "cross_site", "{page:?}");
        }
        assert_eq!(ask(&[("origin", "https://shop.example")]).await.status, 201);
        assert_eq!(alice.delete("/locks/note/a").await.status, 204);
    }
}

#[actix_web::test]
async fn an_own_route_checks_the_origin_too_if_the_application_wants_it() {
    let (locks, store) = embedded().await;
    let app = serve_with(&locks, |session| session.refuse_cross_site()).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    let from = |method, uri: &str, origin: &'static str| {
        let body = json!({ "text": "new" });
        alice.request(method, uri).insert_header(("origin", origin)).set_json(body)
    };
    for (method, uri) in [
        (Method::PUT, "/note/a"),
        (Method::POST, "/purge"),
        (Method::POST, "/note/b"),
        (Method::DELETE, "/locks/note/a"),
        (Method::PATCH, "/nowhere"),
    ] {
        let refused = alice.send(from(method, uri, "https://evil.example")).await;
        assert_eq!(refused.problem(403)["code"], "cross_site", "{uri}");
    }
    assert_eq!(text_of(&store, "a"), "old");
    assert_eq!(alice.send(from(Method::GET, "/plain", "https://evil.example")).await.status, 200);
    assert_eq!(
        alice.send(from(Method::OPTIONS, "/plain", "https://evil.example")).await.status,
        404
    );
    assert_eq!(alice.send(from(Method::PUT, "/note/a", "http://localhost:8080")).await.status, 200);
}

#[actix_web::test]
async fn a_page_of_a_sister_host_or_another_port_changes_nothing_unless_it_is_trusted() {
    let (locks, _) = embedded().await;
    let app =
        serve_with(&locks, |session| session.trusted_origin("https://spa.shop.example")).await;
    let root = Browser::logged_in(&app, "root").await;
    let ask = async |site: &'static str, origin: &'static str| {
        let request = root
            .request(Method::POST, "/locks/note/a")
            .insert_header(("host", "shop.example"))
            .insert_header(("sec-fetch-site", site))
            .insert_header(("origin", origin));
        root.send(request).await
    };
    for origin in ["https://wiki.shop.example", "https://shop.example:8443", "null"] {
        assert_eq!(ask("same-site", origin).await.problem(403)["code"], "cross_site", "{origin}");
    }
    assert_eq!(ask("same-site", "https://spa.shop.example").await.status, 201);
    assert_eq!(ask("same-origin", "https://shop.example").await.status, 200);
}

#[actix_web::test]
async fn no_answer_about_locks_is_cached() {
    let (locks, _) =
        embedded_with(|settings| settings.admin_policy(|person| person.has_role("chief"))).await;
    let app = serve_with_cookies(&locks).await;
    let root = Browser::logged_in(&app, "root").await;
    for answer in [
        root.post("/locks/note/a").await,
        root.post("/locks/note/a").await,
        root.get("/locks/note/a").await,
        root.get("/locks").await,
        root.post("/locks/heartbeat").await,
        root.post_json("/locks/status", json!({ "keys": ["note/a"] })).await,
        root.get("/locks/admin.json").await,
    ] {
        assert!(answer.status.is_success());
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("cache-control"), Some("no-store"), "{}", answer.text());
    }
}

#[actix_web::test]
async fn a_visitor_writes_few_short_and_harmless_lines_into_the_log() {
    log_lines();
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let visitor = Browser::new(&app);
    let line = "the lock API for the collection";
    tokio::time::pause();
    let name = "evil\n\u{1b}[31m\u{202e}ERROR the database is gone";
    let path = name.replace('\n', "%0A").replace('\u{1b}', "%1B").replace('\u{202e}', "%E2%80%AE");
    visitor.get(&format!("/locks/{}/1", path.replace(' ', "%20"))).await.problem(401);
    let alice = Browser::logged_in(&app, "alice").await;
    alice.get(&format!("/locks/{}/1", path.replace(' ', "%20"))).await.problem(404);
    assert_eq!(count_logged(&[line, "evil\\n\\u{1b}[31m\\u{202e}ERROR the database is gone"]), 1);
    assert_eq!(count_logged(&[line, "evil\n"]), 0);
    for n in 0..500 {
        let keys: Vec<_> = (0..200).map(|i| format!("flood{n}/{i}")).collect();
        alice.post_json("/locks/status", json!({ "keys": keys })).await.problem(404);
    }
    assert_eq!(count_logged(&[line, "flood"]), 0, "within ten seconds of the first line");
    tokio::time::advance(Duration::from_secs(10)).await;
    let long = "flood".repeat(1_000);
    for _ in 0..2 {
        alice.get(&format!("/locks/{long}/1")).await.problem(404);
    }
    assert_eq!(count_logged(&[line, "flood"]), 1);
    assert_eq!(count_logged(&[line, &long[..200]]), 1);
    assert_eq!(count_logged(&[line, &long[..201]]), 0);
}

#[actix_web::test]
async fn the_status_of_many_documents_is_that_of_each_in_their_order() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/locks/note/a").await;
    bob.post("/locks/note/b").await;
    let shared = json!({ "mode": "shared" });
    bob.post_json("/locks/note/b/release", json!({})).await;
    for reader in [&alice, &bob] {
        assert_eq!(reader.post_json("/locks/note/b", shared.clone()).await.status, 201);
    }
    let keys = ["note/b", "note/nobody's", "note/a", "note/b"];
    let answer = alice.post_json("/locks/status", json!({ "keys": keys })).await;
    assert_eq!(answer.status, 200);
    let found = answer.json()["locks"].as_array().unwrap().clone();
    assert_eq!(found.len(), keys.len());
    for (key, mut of) in keys.iter().zip(found) {
        let name = |field: &str, of: &mut Value| of.as_object_mut().unwrap().remove(field);
        assert_eq!(name("key", &mut of), Some((*key).into()));
        let (collection, id) = key.split_once('/').unwrap();
        assert_eq!(name("collection", &mut of), Some(collection.into()));
        assert_eq!(name("id", &mut of), Some(id.into()));
        let mut alone = alice.get(&format!("/locks/{key}")).await.json();
        for state in [&mut of, &mut alone] {
            name("expires_in_ms", state);
        }
        assert_eq!(of, alone, "{key}");
    }
    assert_eq!(alice.post_json("/locks/status", json!({})).await.json(), json!({ "locks": [] }));
}

#[actix_web::test]
async fn the_status_of_too_many_or_misnamed_documents_is_refused() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let ask =
        async |keys: Vec<String>| alice.post_json("/locks/status", json!({ "keys": keys })).await;
    let many = |n: usize| (0..n).map(|n| format!("note/{n}")).collect::<Vec<_>>();
    assert_eq!(ask(many(200)).await.json()["locks"].as_array().unwrap().len(), 200);
    ask(many(201)).await.problem(400);
    ask(vec!["elsewhere/a".to_owned()]).await.problem(404);
}

#[actix_web::test]
async fn a_request_has_at_most_a_hundred_tokens() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    for (tokens, status) in [(101, 400), (100, 204)] {
        let all = vec![token.clone(); tokens].join(", ");
        let release = alice.request(Method::POST, "/locks/note/a/release");
        let answer = alice.send(release.insert_header(("lock-token", all))).await;
        assert_eq!(answer.status, status);
    }
    alice.get("/locks/events?keys=note/a&keys=note/b").await.problem(400);
}

#[actix_web::test]
async fn a_malformed_key_among_many_does_not_hide_the_states_of_the_others() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/locks/note/a").await.token();
    let too_long = format!("note/{}", "a".repeat(1025));
    let keys = json!({ "keys": ["note", too_long, "note/a"] });
    let answer = alice.post_json("/locks/status", keys).await.json();
    assert_eq!(answer["locks"][0]["state"], "mine");
    for (row, key) in [(1, "note"), (2, &*too_long)] {
        let unknown = json!({ "key": key, "state": "unknown", "problem": "malformed_key" });
        assert_eq!(answer["locks"][row], unknown);
    }
}

/// Ids of 1 KiB, each character of which JSON escapes.
#[actix_web::test]
async fn a_hundred_locks_with_long_ids_fit_into_a_heartbeat_and_two_hundred_into_a_status() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let key = |n: usize| format!("note/{}{n:03}", "\"".repeat(1021));
    let token = "00000000-0000-4000-8000-000000000000";
    let believed: serde_json::Map<_, _> = (0..100).map(|n| (key(n), token.into())).collect();
    let answer = alice.post_json("/locks/heartbeat", json!({ "locks": believed })).await;
    assert_eq!(answer.json()["lost"].as_array().unwrap().len(), 100);
    let keys: Vec<_> = (0..200).map(key).collect();
    let answer = alice.post_json("/locks/status", json!({ "keys": keys })).await;
    assert_eq!(answer.json()["locks"].as_array().unwrap().len(), 200);

    let too_much = json!({ "locks": { "x".repeat(512 * 1024): token } });
    alice.post_json("/locks/heartbeat", too_much).await.problem(413);
}

#[actix_web::test]
async fn named_locks_of_jobs_are_out_of_reach_of_visitors() {
    let (locks, _) =
        embedded_with(|settings| settings.admin_policy(|person| person.has_role("chief"))).await;
    locks.register::<Named>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let visitor = Browser::logged_in(&app, "alice").await;
    let path = "/locks/doclock.named/nightly-report";
    visitor.post(path).await.problem(404);
    visitor.get(path).await.problem(404);
    visitor.delete(path).await.problem(404);
    visitor.post(&format!("{path}/break")).await.problem(404);
    let status = json!({ "keys": ["doclock.named/nightly-report"] });
    visitor.post_json("/locks/status", status).await.problem(404);
    let name = LockKey::named("nightly-report").unwrap();
    let job = locks.acquire(&name, Wait::no()).await.expect("nobody keeps the job from its lock");
    visitor.get(path).await.problem(404);
    drop(job);
}
