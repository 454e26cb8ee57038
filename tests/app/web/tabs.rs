//! Several tabs of one browser, and reloaded pages.

use serde_json::json;

use super::*;

/// Two loads of a page.
const BEFORE: &str = "aaaaaaaa-1111-4111-8111-111111111111";
const AFTER: &str = "bbbbbbbb-1111-4111-8111-111111111111";

impl<S> Browser<'_, S>
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    /// Acquires the lock for tab one, in this load of its page.
    async fn acquire_as(&self, page: &str) -> Answer {
        let request = self.request(Method::POST, "/locks/note/a");
        let request = request.insert_header(("doclock-tab", ONE));
        self.send(request.insert_header(("doclock-page", page))).await
    }

    async fn in_tab(&self, tab: &str, method: Method, uri: &str, body: Value) -> Answer {
        let request = self.request(method, uri).insert_header(("doclock-tab", tab));
        self.send(request.set_json(body)).await
    }

    pub(super) async fn acquire_in(&self, tab: &str) -> Answer {
        self.in_tab(tab, Method::POST, "/locks/note/a", json!({})).await
    }

    async fn state_in(&self, tab: &str) -> Value {
        self.in_tab(tab, Method::GET, "/locks/note/a", json!({})).await.json()
    }
}

#[actix_web::test]
async fn a_lock_of_one_tab_does_not_belong_to_another_until_it_is_moved() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let first = alice.acquire_in(ONE).await;
    assert_eq!(first.status, 201);

    let refused = alice.acquire_in(TWO).await.problem(423);
    assert_eq!(
        (&refused["code"], &refused["state"], &refused["may_take_over"]),
        (&"mine_elsewhere".into(), &"mine_elsewhere".into(), &true.into())
    );
    assert_eq!(refused["holder"]["label"], "alice");
    assert!(refused.get("token").is_none());
    assert_eq!(alice.state_in(ONE).await["state"], "mine");
    assert_eq!(alice.state_in(TWO).await["state"], "mine_elsewhere");
    // The other tab cannot read under this lock either, nor use it by the routes of documents.
    let reads = json!({ "mode": "shared" });
    alice.in_tab(TWO, Method::POST, "/locks/note/a", reads).await.problem(423);
    alice.in_tab(TWO, Method::POST, "/note/a", json!({})).await.problem(423);
    alice.in_tab(TWO, Method::PUT, "/note/a", json!({ "text": "two" })).await.problem(412);
    // A form without a tab id gets the lock, as before.
    assert_eq!(alice.post("/note/a").await.status, 200);

    let moved =
        alice.in_tab(TWO, Method::POST, "/locks/note/a", json!({ "take_over": true })).await;
    assert_eq!(moved.status, 201);
    assert_ne!(moved.token(), first.token());
    assert_eq!(moved.json()["since"], first.json()["since"], "the work of one person continues");
    assert_eq!(alice.state_in(ONE).await["state"], "mine_elsewhere");
    alice.with_token(Method::PUT, "/note/a", &first.token()).await.problem(412);
    assert_eq!(text_of(&store, "a"), "old");
    let beat = json!({ "locks": { "note/a": first.json()["token"] } });
    let beat = alice.post_json("/locks/heartbeat", beat).await.json();
    assert_eq!((&beat["held"], &beat["lost"][0]["key"]), (&json!([]), &"note/a".into()));
    let saved = alice.with_token(Method::PUT, "/note/a", &moved.token()).await;
    assert_eq!(saved.status, 200);
}

#[actix_web::test]
async fn the_lock_of_a_crashed_tab_expires_however_busy_the_other_tabs_are() {
    tokio::time::pause();
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    assert_eq!(alice.acquire_in(ONE).await.status, 201);
    let other = alice.in_tab(TWO, Method::POST, "/locks/note/b", json!({})).await;
    let beat = json!({ "locks": { "note/b": other.json()["token"] } });
    for beats in 1..=5 {
        tokio::time::sleep(Duration::from_secs(15)).await;
        if beats <= 3 {
            alice.acquire_in(TWO).await.problem(423);
        }
        alice.in_tab(TWO, Method::POST, "/locks/heartbeat", beat.clone()).await;
        assert_eq!(alice.get("/plain").await.status, 200);
    }
    assert_eq!(bob.post("/locks/note/a").await.status, 201);
    assert_eq!(bob.post("/locks/note/b").await.status, 423);
}

/// The lock lives on requests that name its tab or its token, whatever else they name.
#[actix_web::test]
async fn a_lock_of_a_tab_lives_on_requests_that_name_it() {
    tokio::time::pause();
    for names in ["tab", "token", "token in another tab", "heartbeat", "heartbeat in another tab"] {
        let (locks, _) = embedded().await;
        let app = serve_with_cookies(&locks).await;
        let alice = Browser::logged_in(&app, "alice").await;
        let taken = alice.acquire_in(ONE).await;
        let beat = json!({ "locks": { "note/a": taken.json()["token"] } });
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_secs(15)).await;
            let get = alice.request(Method::GET, "/plain");
            let put = alice.request(Method::PUT, "/note/a").set_json(json!({ "text": "new" }));
            let put = put.insert_header(("lock-token", taken.token().as_str()));
            let post = alice.request(Method::POST, "/locks/heartbeat").set_json(&beat);
            let request = match names {
                "tab" => get.insert_header(("doclock-tab", ONE)),
                "token" => get.insert_header(("lock-token", taken.token().as_str())),
                "token in another tab" => put.insert_header(("doclock-tab", TWO)),
                "heartbeat" => post,
                _ => post.insert_header(("doclock-tab", TWO)),
            };
            assert_eq!(alice.send(request).await.status, 200, "{names}");
        }
        assert_eq!(alice.state_in(ONE).await["state"], "mine", "{names}");
    }
}

#[actix_web::test]
async fn a_lock_without_a_tab_lives_on_its_session() {
    tokio::time::pause();
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    assert_eq!(alice.post("/locks/note/a").await.status, 201);
    let shared = json!({ "mode": "shared" });
    assert_eq!(alice.in_tab(ONE, Method::POST, "/locks/note/b", shared).await.status, 201);
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_secs(15)).await;
        assert_eq!(alice.in_tab(TWO, Method::GET, "/plain", json!({})).await.status, 200);
    }
    assert_eq!(locks.list().await.unwrap().len(), 2, "a shared lock belongs to all tabs");
}

#[actix_web::test]
async fn a_reloaded_page_keeps_its_lock_and_its_old_beacon_is_too_late() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let before = alice.acquire_as(BEFORE).await;
    let beacon = json!({ "token": before.json()["token"], "page": BEFORE, "grace_ms": 5_000 });

    // The beacon arrives first, as it should.
    assert_eq!(alice.post_json("/locks/note/a/release", beacon.clone()).await.status, 204);
    let left = alice.state_in(ONE).await["expires_in_ms"].as_u64().unwrap();
    assert!(left <= 5_000, "{left}");
    bob.post("/locks/note/a").await.problem(423);
    let after = alice.acquire_as(AFTER).await;
    assert_eq!((after.status.as_u16(), after.token()), (200, before.token()));
    assert_eq!(after.json()["since"], before.json()["since"]);
    assert!(after.json()["expires_in_ms"].as_u64().unwrap() > 50_000);

    // It arrives once more, after the new page has asked.
    alice.post_json("/locks/note/a/release", beacon).await;
    assert!(alice.state_in(ONE).await["expires_in_ms"].as_u64().unwrap() > 50_000);
    assert_eq!(alice.with_token(Method::PUT, "/note/a", &after.token()).await.status, 200);
}

#[actix_web::test]
async fn a_page_that_comes_back_with_the_token_of_its_lock_keeps_the_lock() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    for (uri, tab) in [("/locks/note/a", ONE), ("/note/a", ONE), ("/locks/note/a", TWO)] {
        let before = alice.acquire_in(ONE).await;
        let beacon = json!({ "token": before.json()["token"], "grace_ms": 5_000 });
        alice.post_json("/locks/note/a/release", beacon).await;
        let again = alice.request(Method::POST, uri).insert_header(("lock-token", before.token()));
        let again = alice.send(again.insert_header(("doclock-tab", tab))).await;
        assert_eq!(again.status, 200, "{uri}: {}", again.text());
        assert_eq!(again.token(), before.token(), "{uri}");
        store.age(&key("a"), Duration::from_secs(10));
        assert_eq!(bob.post("/locks/note/a").await.status, 423, "{uri}: the grace period is over");
    }
}

#[actix_web::test]
async fn a_closed_page_keeps_its_lock_only_for_the_grace_period() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let token = alice.acquire_in(ONE).await.json()["token"].clone();
    let hour = json!({ "token": token, "grace_ms": 3_600_000 });
    alice.post_json("/locks/note/a/release", hour).await;
    assert!(
        alice.state_in(ONE).await["expires_in_ms"].as_u64().unwrap() <= 10_000,
        "at most the grace period"
    );
    // Another page of the session is still open and renews the session's locks.
    store.age(&key("a"), Duration::from_secs(4));
    alice.post("/locks/heartbeat").await;
    store.age(&key("a"), Duration::from_secs(6));
    assert_eq!(bob.post("/locks/note/a").await.status, 201);
}

#[actix_web::test]
async fn a_reader_that_leaves_has_no_grace_period() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let read = alice.post_json("/locks/note/a", json!({ "mode": "shared" })).await.json();
    let beacon = json!({ "token": read["token"], "grace_ms": 5_000 });
    assert_eq!(alice.post_json("/locks/note/a/release", beacon).await.status, 204);
    assert_eq!(bob.post("/locks/note/a").await.status, 201);
}

#[actix_web::test]
async fn an_invalid_tab_id_locks_nothing() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    for tab in ["", "one", "{\"$gt\":\"\"}", &"1".repeat(4000)] {
        assert_eq!(alice.acquire_in(tab).await.problem(400)["code"], "bad_tab", "{tab:?}");
        assert_eq!(alice.state_in(TWO).await["state"], "free");
    }
}

#[actix_web::test]
async fn no_lock_is_taken_for_a_prerendered_page() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    for (header, purpose) in [
        ("sec-purpose", "prefetch"),
        ("sec-purpose", "prefetch;prerender"),
        ("purpose", "prefetch"),
        ("x-purpose", "preview"),
        ("x-moz", "Prefetch"),
    ] {
        for (method, uri) in [
            (Method::POST, "/locks/note/a"),
            (Method::POST, "/note/a"),
            (Method::POST, "/note/a/read"),
        ] {
            let request = alice.request(method, uri).insert_header((header, purpose));
            assert_eq!(alice.send(request).await.problem(403)["code"], "speculative");
            assert!(locks.inspect(&key("a")).await.unwrap().is_none());
        }
    }
}

/// A waiting page takes the document over. Its waiting request may still be under way for a while after
/// the page has given it up.
#[actix_web::test]
async fn a_waiting_request_does_not_take_over_the_lock_of_its_own_tab() {
    let (locks, _) = embedded_with(|settings| settings.take_over_policy(|_, _| true)).await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    bob.post("/locks/note/a").await.token();
    let waits = alice.in_tab(ONE, Method::POST, "/locks/note/a", json!({ "wait_ms": 30_000 }));
    let takes = async {
        // The other request is in the queue.
        tokio::time::sleep(Duration::from_millis(100)).await;
        alice.in_tab(ONE, Method::POST, "/locks/note/a", json!({ "take_over": true })).await
    };
    let (waited, took) = tokio::join!(waits, takes);
    assert_eq!((waited.status.as_u16(), took.status.as_u16()), (200, 201));
    assert_eq!(waited.token(), took.token());
    assert_eq!(alice.with_token(Method::PUT, "/note/a", &took.token()).await.status, 200);
}

/// Requests of its handlers do not count as a reload.
#[actix_web::test]
async fn a_tab_keeps_its_token_whatever_other_requests_it_sends() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.in_tab(ONE, Method::POST, "/locks/note/b", json!({})).await.token();
    assert_eq!(alice.in_tab(ONE, Method::POST, "/note/a/both", json!({})).await.status, 204);
    assert_eq!(alice.in_tab(ONE, Method::POST, "/note/b", json!({})).await.token(), token);
    assert_eq!(alice.with_token(Method::PUT, "/note/b", &token).await.status, 200);
}

/// Otherwise no page that knows of the lock would have it, and all others would be kept out.
#[actix_web::test]
async fn a_failed_request_gives_its_lock_back_although_another_tab_has_asked_for_it() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    // During the first request.
    let asks = async {
        while locks.inspect(&key("a")).await.unwrap().is_none() {
            tokio::task::yield_now().await;
        }
        alice.acquire_in(TWO).await.problem(423)
    };
    let fails = alice.in_tab(ONE, Method::POST, "/note/a/slow/500", json!({}));
    let (failed, _) = tokio::join!(fails, asks);
    assert_eq!(failed.status, 500);
    assert_eq!(holder_of(&locks, "a").await, None);
}

#[actix_web::test]
async fn a_waiter_in_one_tab_is_told_that_another_tab_has_the_lock() {
    let (locks, _) = embedded_with(|settings| settings.take_over_policy(|_, _| true)).await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    bob.post("/locks/note/a").await.token();
    let waits = alice.in_tab(ONE, Method::POST, "/locks/note/a", json!({ "wait_ms": 30_000 }));
    let takes = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        alice.in_tab(TWO, Method::POST, "/locks/note/a", json!({ "take_over": true })).await
    };
    let began = std::time::Instant::now();
    let (waited, took) = tokio::join!(waits, takes);
    assert_eq!(took.status, 201);
    assert_eq!(waited.problem(423)["state"], "mine_elsewhere");
    assert!(began.elapsed() < Duration::from_secs(29), "at once, not when the wait times out");
}

/// What a page sends when it is left and does not know whether its request was granted.
fn beacon_of(page: &str) -> Value {
    json!({ "tab": ONE, "page": page, "grace_ms": 4_000 })
}

async fn release<S>(person: &Browser<'_, S>, body: Value)
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    assert_eq!(person.post_json("/locks/note/a/release", body).await.status, 204);
}

#[actix_web::test]
async fn a_page_that_is_left_before_it_hears_of_its_lock_keeps_it_for_the_grace_period_only() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let unheard = alice.acquire_as(BEFORE).await;
    // Of another person, of another load, and of another tab.
    release(&bob, beacon_of(BEFORE)).await;
    release(&alice, beacon_of(AFTER)).await;
    let other_tab = json!({ "tab": TWO, "page": BEFORE, "grace_ms": 4_000 });
    release(&alice, other_tab).await;
    let left = async || alice.state_in(ONE).await["expires_in_ms"].as_u64().unwrap();
    assert!(left().await > 50_000);

    release(&alice, beacon_of(BEFORE)).await;
    assert!(left().await <= 4_000);
    let reloaded = "cccccccc-1111-4111-8111-111111111111";
    let after = alice.acquire_as(reloaded).await;
    assert_eq!((after.status.as_u16(), after.token()), (200, unheard.token()));
    release(&alice, beacon_of(BEFORE)).await;
    assert!(left().await > 50_000, "a beacon of the older load");

    release(&alice, beacon_of(reloaded)).await;
    store.age(&key("a"), Duration::from_secs(5));
    assert_eq!(bob.post("/locks/note/a").await.status, 201);
    let malformed = json!({ "page": "one" });
    bob.post_json("/locks/note/a/release", malformed).await.problem(400);
    assert_eq!(bob.post("/locks/note/a").await.status, 200);
}

/// The beacon may overtake the request, and reach another server.
#[actix_web::test]
async fn what_a_page_is_granted_after_its_beacon_is_given_back_at_once_on_every_server() {
    let (locks, store) = embedded_with(|settings| settings.take_over_policy(|_, _| true)).await;
    let elsewhere = LockManager::builder(store.clone()).build().await.unwrap();
    elsewhere.register::<Note>().await.unwrap();
    let (app, other) = (serve_with_cookies(&locks).await, serve_with_cookies(&elsewhere).await);
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    release(&alice.at(&other), beacon_of(BEFORE)).await;

    for body in [json!({}), json!({ "mode": "shared" }), json!({ "take_over": true })] {
        if body["take_over"] == true {
            assert_eq!(bob.post("/locks/note/a").await.status, 201);
        }
        let request = alice.request(Method::POST, "/locks/note/a").set_json(&body);
        let request = request.insert_header(("doclock-tab", ONE));
        let late = alice.send(request.insert_header(("doclock-page", BEFORE))).await;
        assert_eq!(late.problem(409)["code"], "page_left", "{body}");
        assert_eq!(holder_of(&locks, "a").await, None, "{body}");
    }
    for uri in ["/note/a", "/note/a/read"] {
        let request = alice.request(Method::POST, uri).insert_header(("doclock-page", BEFORE));
        assert_eq!(alice.send(request).await.problem(409)["code"], "page_left", "{uri}");
        assert_eq!(holder_of(&locks, "a").await, None, "{uri}");
    }
    assert_eq!(alice.acquire_as(AFTER).await.status, 201, "the page that was loaded instead");
}

/// The connection of a page that is left may stay open for long: behind a proxy, or by HTTP/2.
#[actix_web::test]
async fn the_wait_of_a_page_ends_when_the_page_is_left() {
    let (locks, store) = embedded().await;
    let elsewhere = LockManager::builder(store.clone()).build().await.unwrap();
    elsewhere.register::<Note>().await.unwrap();
    let (app, other) = (serve_with_cookies(&locks).await, serve_with_cookies(&elsewhere).await);
    for beacon_at_another_server in [false, true] {
        let (alice, bob) =
            (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
        let held = bob.post("/locks/note/a").await;
        assert_eq!(held.status, 201);
        let waits = async {
            let body = json!({ "wait_ms": 300_000 });
            let request = alice.request(Method::POST, "/locks/note/a").set_json(body);
            let request = request.insert_header(("doclock-tab", ONE));
            alice.send(request.insert_header(("doclock-page", BEFORE))).await
        };
        let leaves = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            match beacon_at_another_server {
                true => release(&alice.at(&other), beacon_of(BEFORE)).await,
                false => release(&alice, beacon_of(BEFORE)).await,
            }
        };
        let waits = tokio::time::timeout(Duration::from_secs(60), waits);
        let (waited, ()) = tokio::join!(waits, leaves);
        assert_eq!(waited.expect("not when its time is over").problem(409)["code"], "page_left");
        assert_eq!(bob.delete("/locks/note/a").await.status, 204);
        assert_eq!(holder_of(&elsewhere, "a").await, None);
    }
}

/// As when the person goes back to a page, and leaves it again before the page hears of its lock.
#[actix_web::test]
async fn a_page_that_is_left_before_its_re_entry_does_not_revive_the_lock_of_its_tab() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.acquire_as(BEFORE).await.json()["token"].clone();
    for page in [BEFORE, AFTER] {
        release(&alice, json!({ "token": token, "page": page, "grace_ms": 4_000 })).await;
    }
    release(&alice, beacon_of(AFTER)).await;
    assert_eq!(alice.acquire_as(AFTER).await.problem(409)["code"], "page_left");
    let left = alice.state_in(ONE).await["expires_in_ms"].as_u64().unwrap();
    assert!(left <= 4_000, "{left}");
}

#[actix_web::test]
async fn a_shared_lock_survives_a_page_that_is_left_because_another_one_may_know_of_it() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let shared = json!({ "mode": "shared" });
    let read_in =
        async |tab| alice.in_tab(tab, Method::POST, "/locks/note/a", shared.clone()).await;
    assert_eq!(read_in(ONE).await.status, 201);
    assert_eq!(read_in(TWO).await.status, 200);
    release(&alice, beacon_of(BEFORE)).await;
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
    alice.delete("/locks/note/a").await;
    assert_eq!(read_in(ONE).await.status, 201);
    // A page that has got nothing yet.
    release(&alice, json!({ "tab": TWO, "page": AFTER })).await;
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
}

/// The session has asked for a missing document before, so the store is asked first.
#[actix_web::test]
async fn a_document_that_is_gone_is_missing_for_every_tab_and_leaves_no_lock() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    assert_eq!(alice.acquire_in(ONE).await.status, 201);
    store.remove(&key("a"));
    alice.post("/locks/note/missing").await.problem(404);
    assert_eq!(alice.acquire_in(TWO).await.problem(404)["code"], "not_found");
    assert_eq!(holder_of(&locks, "a").await, None);
}

/// A page that gives up a wait releases without a token.
#[actix_web::test]
async fn a_release_without_a_token_leaves_the_shared_lock_of_another_tab() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let reads = json!({ "mode": "shared" });
    assert_eq!(alice.in_tab(ONE, Method::POST, "/locks/note/a", reads).await.status, 201);
    for (tab, left) in [(TWO, 1), (ONE, 0)] {
        let released = alice.in_tab(tab, Method::POST, "/locks/note/a/release", json!({})).await;
        assert_eq!(released.status, 204);
        assert_eq!(locks.list().await.unwrap().len(), left, "{tab}");
    }
}
