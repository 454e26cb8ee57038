//! Clients without cookies, which send a token with each request.

use actix_doclock::Aid;
use actix_web::dev::ServiceRequest;

use super::*;
use crate::rig::log::{log_lines, logged};

/// `Authorization: alice laptop` stands for a token that was checked: the person, and the login. A cookie
/// and a header of the application may carry such a token, too.
fn whose(req: &ServiceRequest) -> Option<(Aid, Actor)> {
    let cookie = req.cookie("jwt").map(|it| it.value().to_owned());
    let header = |name| Some(req.headers().get(name)?.to_str().ok()?.to_owned());
    let token = header("authorization").or(header("x-api-key")).or(cookie)?;
    let token = token.trim_start_matches("Bearer ");
    let (person, login) = token.split_once(' ')?;
    Some((Aid::of_client(person, login), Actor::new(person).with_id(person)))
}

async fn serve_clients(
    locks: &LockManager,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> + use<> {
    let manager = web::Data::new(locks.clone());
    async fn log_out(
        req: actix_web::HttpRequest,
        locks: web::Data<LockManager>,
    ) -> Result<impl Responder, LockError> {
        let token = req.headers().get("authorization").unwrap().to_str().unwrap().to_owned();
        let (person, login) = token.split_once(' ').unwrap();
        locks.end_session(&Aid::of_client(person, login)).await?;
        Ok(HttpResponse::NoContent())
    }
    let app = App::new().app_data(manager).route("/log-out", web::post().to(log_out));
    test::init_service(app.wrap(locks.clients(whose)).configure(routes)).await
}

/// A client that keeps no cookies.
struct Client<'a, S> {
    app: &'a S,
    token: &'static str,
}

impl<S> Client<'_, S>
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    async fn send(&self, method: Method, uri: &str) -> Answer {
        let browser = Browser::new(self.app);
        let request = browser.request(method.clone(), uri);
        let request = request.insert_header(("authorization", self.token));
        let form = serde_json::json!({ "text": "new" });
        let request = if method == Method::PUT { request.set_json(form) } else { request };
        let answer = browser.send(request).await;
        assert!(!browser.has_cookie(), "no session is begun");
        answer
    }

    async fn post(&self, uri: &str) -> Answer {
        self.send(Method::POST, uri).await
    }
}

#[actix_web::test]
async fn a_token_holds_its_locks_over_requests_without_cookies() {
    let (locks, store) = embedded().await;
    let app = serve_clients(&locks).await;
    let client = |token| Client { app: &app, token };
    let (alice, phone, bob) = (client("alice laptop"), client("alice phone"), client("bob laptop"));
    let token = alice.post("/note/a").await.token();
    assert_eq!(alice.post("/note/a").await.token(), token, "the next request has it");
    let refused = bob.post("/note/a").await.problem(423);
    assert_eq!(refused["holder"]["label"], "alice");
    bob.send(Method::PUT, "/note/a").await.problem(409);
    assert_eq!(alice.send(Method::PUT, "/note/a").await.status, 200);
    assert_eq!(text_of(&store, "a"), "new");

    // The lock API: her list, her heartbeat, and a takeover from her own other login.
    assert_eq!(alice.send(Method::GET, "/locks").await.json()[0]["key"], "note/a");
    let beat = alice.post("/locks/heartbeat").await.json();
    assert_eq!(beat["held"][0]["key"], "note/a");
    assert_eq!(phone.post("/locks/note/a").await.problem(423)["may_take_over"], true);
    assert_eq!(bob.post("/locks/note/a").await.problem(423)["may_take_over"], false);
    // An answer with an error keeps no lock, as with sessions.
    alice.post("/note/b/answer/400").await;
    assert!(locks.inspect(&key("b")).await.unwrap().is_none());
}

#[actix_web::test]
async fn a_logout_releases_the_locks_of_one_token_and_ends_it() {
    let (locks, _) = embedded().await;
    let app = serve_clients(&locks).await;
    let client = |token| Client { app: &app, token };
    let (alice, phone, bob) = (client("alice laptop"), client("alice phone"), client("bob laptop"));
    alice.post("/note/a").await.token();
    phone.post("/note/b").await.token();
    assert_eq!(alice.post("/log-out").await.status, 204);
    bob.post("/note/a").await.token();
    bob.post("/note/b").await.problem(423);
    assert_eq!(alice.post("/note/a").await.problem(423)["holder"]["label"], "bob");
    bob.send(Method::DELETE, "/locks/note/a").await;
    assert_eq!(alice.post("/note/a").await.problem(401)["code"], "session_ended");
    assert!(locks.inspect(&key("a")).await.unwrap().is_none(), "and keeps nothing");
    phone.post("/note/b").await.token();
}

#[actix_web::test]
async fn a_request_without_a_valid_login_is_told_to_log_in_and_not_that_a_lock_is_lost() {
    let (locks, _) = embedded().await;
    let app = serve_clients(&locks).await;
    let visitor = Browser::new(&app);
    for refused in [
        visitor.post("/note/a").await,
        visitor.post("/locks/note/a").await,
        visitor.get("/locks/note/a").await,
        visitor.post("/note/a/read").await,
        visitor.put("/note/a", "new").await,
        visitor.delete("/locks/note/a").await,
        visitor.post("/locks/heartbeat").await,
    ] {
        assert_eq!(refused.problem(401)["code"], "login_required");
    }
    assert!(locks.list().await.unwrap().is_empty());
    assert_eq!(visitor.get("/plain").await.status, 200);
}

#[actix_web::test]
async fn first_requests_at_the_same_moment_belong_to_one_client() {
    let (locks, _) = embedded().await;
    let app = serve_clients(&locks).await;
    let alice = Client { app: &app, token: "alice laptop" };
    let all = futures_util::future::join_all((0..8).map(|_| alice.post("/note/a"))).await;
    let tokens: std::collections::BTreeSet<_> = all.iter().map(Answer::token).collect();
    assert_eq!(tokens.len(), 1);
}

#[test]
fn the_aid_of_a_client_depends_on_both_texts_and_shows_neither() {
    let aid = Aid::of_client("alice", "laptop");
    assert_eq!(aid, Aid::of_client("alice", "laptop"));
    for other in [("alice", "phone"), ("alicel", "aptop"), ("", "alicelaptop"), ("laptop", "alice")]
    {
        assert_ne!(aid, Aid::of_client(other.0, other.1), "{other:?}");
    }
    assert!(!aid.as_str().contains("alice") && aid.as_str().len() == 36);
}

#[actix_web::test]
async fn a_client_that_sends_the_token_but_not_the_cookie_is_told_so() {
    log_lines();
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let with_cookies = Browser::new(&app);
    let token = with_cookies.post("/note/a").await.token();
    // Without a session, and with another one.
    let (without, other) = (Browser::new(&app), Browser::logged_in(&app, "bob").await);
    for client in [&without, &other] {
        for (method, status, state) in [(Method::PUT, 409, "lost"), (Method::POST, 423, "held")] {
            let refused = client.with_token(method, "/note/a", &token).await.problem(status);
            assert_eq!(
                (&refused["code"], &refused["state"]),
                (&"wrong_session".into(), &state.into())
            );
            assert!(refused["detail"].as_str().unwrap().contains("cookie"), "{refused}");
        }
    }
    assert!(logged("in a request of another session"));
    assert_eq!(text_of(&store, "a"), "old");
    // Another token is a lost lock, as ever.
    let stale = "<urn:uuid:11111111-1111-4111-8111-111111111111>";
    assert_eq!(
        without.with_token(Method::PUT, "/note/a", stale).await.problem(409)["code"],
        "lost"
    );
    with_cookies.with_token(Method::PUT, "/note/a", &token).await.token();
}

#[actix_web::test]
async fn a_reader_that_sends_its_own_token_and_wants_to_write_is_in_its_own_session() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let reads = alice.post("/note/a/read").await.token();
    let edits = alice.with_token(Method::POST, "/note/a", &reads).await.token();
    assert_ne!(edits, reads, "the shared lock has become an exclusive one");
    let stale = alice.with_token(Method::PUT, "/note/a", &reads).await.problem(412);
    assert_eq!(stale["code"], "stale_token");
}

#[actix_web::test]
async fn a_page_of_another_site_may_send_a_token_but_no_cookie() {
    let (locks, _) = embedded().await;
    let elsewhere = |request: TestRequest| {
        request
            .insert_header(("sec-fetch-site", "cross-site"))
            .insert_header(("origin", "https://evil.example"))
    };
    let app = test::init_service(
        App::new().wrap(locks.clients(whose).token_header("X-Api-Key")).configure(routes),
    )
    .await;
    let client = Browser::new(&app);
    let sends = async |headers: &[(&'static str, &'static str)]| {
        let request = client.request(Method::POST, "/locks/note/a");
        let request = headers.iter().fold(request, |request, it| request.insert_header(*it));
        client.send(elsewhere(request)).await
    };
    // A browser adds these to the requests of any page.
    for added in [
        &[("cookie", "jwt=alice laptop")][..],
        &[("authorization", "Basic YWxpY2U6eA==")],
        &[("authorization", "alice laptop")],
        &[("authorization", "Bearer alice laptop"), ("cookie", "theme=dark")],
        &[("x-api-key", "alice laptop"), ("cookie", "theme=dark")],
    ] {
        assert_eq!(sends(added).await.problem(403)["code"], "cross_site", "{added:?}");
    }
    assert!(locks.list().await.unwrap().is_empty());
    assert_eq!(sends(&[("authorization", "Bearer alice laptop")]).await.status, 201);
    assert_eq!(sends(&[("x-api-key", "alice laptop")]).await.status, 200);
    // The browser sends a cookie with the requests of all sites.
    let app = serve_with_cookies(&locks).await;
    let bob = Browser::logged_in(&app, "bob").await;
    let request = elsewhere(bob.request(Method::POST, "/locks/note/b"));
    assert_eq!(bob.send(request).await.problem(403)["code"], "cross_site");
}
