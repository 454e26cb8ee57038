//! A page that keeps its session alive although its user has left.

use actix_web::test::TestRequest;
use serde_json::json;

use super::*;

const IDLE_AFTER: Duration = Duration::from_secs(600);

/// One application with `idle_after` and one without.
async fn serve_idle(
    locks: &LockManager,
    idle_after: Option<Duration>,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
    let key = Key::from(&[7; 64]);
    let session = SessionMiddleware::builder(CookieSessionStore::default(), key);
    let wrap = locks.session(session.cookie_secure(false).build()).identify(person);
    let wrap = match idle_after {
        Some(idle_after) => wrap.idle_after(idle_after),
        None => wrap,
    };
    test::init_service(App::new().wrap(wrap).configure(routes)).await
}

/// The time left of a lock that was renewed 50 s ago, after a request with this header.
async fn left_after(idle_after: Option<Duration>, says: Option<&str>, path: &str) -> u64 {
    let (locks, store) = embedded().await;
    let app = serve_idle(&locks, idle_after).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    store.age(&key("a"), Duration::from_secs(50));
    // On a server that has renewed nothing lately, so that a renewal is due.
    let other = LockManager::builder(store.clone()).ttl(locks.ttl()).build().await.unwrap();
    other.register::<Note>().await.unwrap();
    let app = serve_idle(&other, idle_after).await;
    let page = Browser { app: &app, jar: alice.jar.clone() };
    let method = if path == "/plain" { Method::GET } else { Method::POST };
    let request = page.request(method, path);
    let request = match says {
        Some(ms) => request.insert_header(("doclock-idle-ms", ms)),
        None => request,
    };
    assert_eq!(page.send(request).await.status, 200);
    other.shutdown().await;
    other.inspect(&key("a")).await.unwrap().unwrap().expires_in().as_secs()
}

#[actix_web::test]
async fn requests_of_an_idle_page_do_not_renew() {
    for path in ["/locks/heartbeat", "/plain"] {
        for ms in ["600000", "86400000", " 600000 "] {
            assert!(left_after(Some(IDLE_AFTER), Some(ms), path).await <= 10, "{path} {ms}");
        }
    }
}

#[actix_web::test]
async fn all_other_requests_renew() {
    let cases = [
        (Some(IDLE_AFTER), Some("599999")),
        (Some(IDLE_AFTER), None),
        (Some(IDLE_AFTER), Some("for ages")),
        (Some(IDLE_AFTER), Some("-600000")),
        (Some(IDLE_AFTER), Some("99999999999999999999999999")),
        (None, Some("600000")),
    ];
    for (idle_after, says) in cases {
        let left = left_after(idle_after, says, "/locks/heartbeat").await;
        assert!(left > 30, "{idle_after:?} {says:?}: {left} s");
    }
}

#[actix_web::test]
async fn an_idle_page_learns_when_its_lock_will_expire_and_then_that_it_is_lost() {
    let (locks, store) = embedded().await;
    let app = serve_idle(&locks, Some(IDLE_AFTER)).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let token = alice.post("/note/a").await.token();
    let token = token.trim_start_matches("<urn:uuid:").trim_end_matches('>').to_owned();
    let beat = async || {
        let believed = serde_json::json!({ "locks": { "note/a": token } });
        let beat = alice.request(Method::POST, "/locks/heartbeat").set_json(believed);
        alice.send(beat.insert_header(("doclock-idle-ms", "700000"))).await.json()
    };
    store.advance(Duration::from_secs(40));
    let left = beat().await["held"][0]["expires_in_ms"].as_u64().unwrap();
    assert!(left <= 20_000, "{left} ms");
    store.advance(Duration::from_secs(20));
    assert_eq!(beat().await["lost"][0]["key"], "note/a");
    assert_eq!(bob.post("/note/a").await.status, 200);
}

/// The end of the lock in the answers to a page that was granted `note/a` and sends heartbeats.
async fn ends(
    app: &impl Service<Request, Response = ServiceResponse, Error = Error>,
    idle_ms: Option<u64>,
) -> Vec<(Option<u64>, Value)> {
    let alice = Browser::logged_in(app, "alice").await;
    let send = async |path: &str, body: Value| {
        let request = alice.request(Method::POST, path).set_json(body);
        let idle = idle_ms.map(|ms| ("doclock-idle-ms", ms.to_string()));
        let request = idle.into_iter().fold(request, TestRequest::insert_header);
        alice.send(request).await.json()
    };
    let granted = send("/locks/note/a", json!({})).await;
    let believed = json!({ "locks": { "note/a": granted["token"] } });
    let beat = send("/locks/heartbeat", believed).await["held"][0].take();
    assert_eq!(alice.delete("/locks/note/a").await.status, 204);
    let all = [granted, beat];
    all.into_iter().map(|it| (it["ends_in_ms"].as_u64(), it["ends_why"].clone())).collect()
}

#[actix_web::test]
async fn a_page_is_told_of_the_end_that_no_heartbeat_moves() {
    let minute = 60_000;
    let hour = Duration::from_secs(3600);
    let (locks, _) = embedded().await;
    let app = serve_idle(&locks, None).await;
    assert_eq!(ends(&app, Some(0)).await, [(None, Value::Null), (None, Value::Null)]);

    let app = serve_idle(&locks, Some(IDLE_AFTER)).await;
    assert_eq!(ends(&app, None).await[1], (None, Value::Null), "the page does not say");
    for (idle, left) in [(0, 10 * minute), (9 * minute, minute), (9 * minute + 30_000, minute)] {
        for (ends_in, why) in ends(&app, Some(idle)).await {
            // Not before the lock expires, which a heartbeat has just renewed.
            let ends_in = ends_in.unwrap();
            assert!(ends_in <= left && ends_in + 20_000 > left, "{idle}: {ends_in}");
            assert_eq!(why, "idle");
        }
    }

    let (locks, _) = embedded_with(|it| it.max_hold(Duration::from_secs(300))).await;
    let app = serve_idle(&locks, Some(IDLE_AFTER)).await;
    for (ends_in, why) in ends(&app, Some(0)).await {
        assert!((280_000..=300_000).contains(&ends_in.unwrap()), "{ends_in:?}");
        assert_eq!(why, "max_hold");
    }

    let app = serve_with(&locks, |wrap| wrap.session_ends_in(move |_| Some(hour / 60))).await;
    assert_eq!(ends(&app, Some(0)).await, vec![(Some(minute), "session".into()); 2]);
    let app = serve_with(&locks, |wrap| wrap.session_ends_in(move |_| Some(hour))).await;
    assert_eq!(ends(&app, Some(0)).await[0].1, "max_hold", "the sooner one");
}
