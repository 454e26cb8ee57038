//! Streams of events, as pages receive them.

use std::{future::poll_fn, pin::pin};

use actix_web::body::{BoxBody, MessageBody};
use serde_json::json;
use tokio::time::timeout;

use super::*;

const SOON: Duration = Duration::from_secs(60);

/// An open stream of events.
pub(super) struct Stream {
    body: BoxBody,
    text: String,
}

impl Stream {
    pub(super) fn new(body: BoxBody) -> Self {
        Self { body, text: String::new() }
    }

    /// The next message with its data; `None` at the end of the stream.
    pub(super) async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some((message, rest)) = self.text.split_once("\n\n") {
                let (message, rest) = (message.to_owned(), rest.to_owned());
                self.text = rest;
                let field = |name: &str| {
                    message.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
                };
                let (event, data) = (field("event").unwrap(), field("data").unwrap());
                return Some((event.to_owned(), serde_json::from_str(data).unwrap()));
            }
            let more = poll_fn(|context| pin!(&mut self.body).as_mut().poll_next(context));
            let more = timeout(SOON, more).await.expect("it goes on")?.unwrap();
            self.text.push_str(std::str::from_utf8(&more).unwrap());
        }
    }

    /// The next event that is neither a request to resync nor a beat.
    pub(super) async fn event(&mut self) -> (String, Value) {
        loop {
            let (event, data) = self.next().await.expect("it goes on");
            if event != "resync" && event != "beat" {
                return (event, data);
            }
        }
    }
}

impl<S> Browser<'_, S>
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    /// Opens a stream, and waits until the server watches.
    pub(super) async fn listen(&self, query: &str) -> Stream {
        let request = self.request(Method::GET, &format!("/locks/events{query}"));
        let response = self.app.call(request.to_request()).await.unwrap_or_else(|e| panic!("{e}"));
        let (head, body) = response.into_parts().1.into_parts();
        assert_eq!(head.status(), 200);
        let header = |name: &str| head.headers().get(name).unwrap().to_str().unwrap();
        assert_eq!(header("content-type"), "text/event-stream");
        assert_eq!(header("cache-control"), "no-store");
        assert_eq!(header("content-encoding"), "identity");
        let mut stream = Stream::new(body);
        for _ in 0..2 {
            let (event, data) = stream.next().await.unwrap();
            assert_eq!((event.as_str(), data), ("resync", json!({ "told": true })));
        }
        stream
    }
}

#[actix_web::test]
async fn each_page_is_told_whether_the_lock_is_its_own() {
    let (locks, _) =
        embedded_with(|settings| settings.admin_policy(|person| person.has_role("chief"))).await;
    let app = serve_with_cookies(&locks).await;
    let (alice, root) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "root").await);
    let (bob, phone) =
        (Browser::logged_in(&app, "bob").await, Browser::logged_in(&app, "alice").await);
    let mut here = alice.listen(&format!("?tab={ONE}")).await;
    let request = alice.request(Method::POST, "/locks/note/a").insert_header(("doclock-tab", ONE));
    let token = alice.send(request).await.token();
    let (event, data) = here.event().await;
    assert_eq!(event, "acquired");
    assert_eq!(
        (&data["key"], &data["collection"], &data["id"], &data["mode"]),
        (&"note/a".into(), &"note".into(), &"a".into(), &"exclusive".into())
    );
    assert_eq!((&data["state"], &data["holder"]), (&"mine".into(), &json!({ "label": "alice" })));
    assert!(data["since"].is_string() && data["expires_in_ms"].as_u64().unwrap() > 0);
    let bare = token.trim_start_matches("<urn:uuid:").trim_end_matches('>');
    assert!(!data.to_string().contains(bare) && !data.to_string().contains(ONE));

    // Streams that other sessions open later are told of all further events.
    let query = format!("?tab={TWO}");
    let request = Browser::copy(&alice);
    let (mut there, mut roots) = (open(&request, &query).await, open(&root, "").await);
    let (mut bobs, mut phones) = (open(&bob, "").await, open(&phone, "").await);
    let why = json!({ "reason": "gone \"home\"\n\nat noon" });
    assert_eq!(root.post_json("/locks/note/a/break", why.clone()).await.status, 204);
    // The reason is for the session that has lost the lock, and for administrators.
    for (stream, was, reason) in [
        (&mut here, "mine", Some(&why["reason"])),
        (&mut there, "mine_elsewhere", Some(&why["reason"])),
        (&mut roots, "held", Some(&why["reason"])),
        (&mut bobs, "held", None),
        (&mut phones, "held", None),
    ] {
        let (event, data) = stream.event().await;
        assert_eq!(
            (event.as_str(), &data["state"], &data["was"]),
            ("broken", &"free".into(), &was.into())
        );
        assert_eq!((&data["by"], data.get("reason")), (&"root".into(), reason));
        assert_eq!(data["holder"]["label"], "alice");
    }
}

/// Another stream of a server that already watches.
pub(super) async fn open<S>(browser: &Browser<'_, S>, query: &str) -> Stream
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    let request = browser.request(Method::GET, &format!("/locks/events{query}"));
    let response = browser.app.call(request.to_request()).await.unwrap_or_else(|e| panic!("{e}"));
    let mut stream = Stream::new(response.into_body());
    assert_eq!(stream.next().await.unwrap().0, "resync");
    stream
}

#[actix_web::test]
async fn a_reload_of_a_page_is_not_reported() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let mut stream = alice.listen("").await;
    let asks = || alice.request(Method::POST, "/locks/note/a").insert_header(("doclock-tab", ONE));
    let first = alice.send(asks()).await.token();
    assert_eq!(alice.send(asks()).await.token(), first);
    alice.delete("/locks/note/a").await;
    assert_eq!(stream.event().await.0, "acquired");
    assert_eq!(stream.event().await.0, "released");
}

#[actix_web::test]
async fn a_page_that_names_documents_hears_of_no_others() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let mut stream = alice.listen("?keys=note/b,note/c").await;
    alice.post("/locks/note/a").await.token();
    alice.post("/locks/note/b").await.token();
    assert_eq!(stream.event().await.1["key"], "note/b");
}

#[actix_web::test]
async fn a_save_is_reported_with_its_person_and_the_new_version() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let mut mine = alice.listen("").await;
    let mut elsewhere = open(&Browser::copy(&alice), &format!("?tab={TWO}")).await;
    let mut bobs = open(&bob, "").await;
    let edit = alice.request(Method::POST, "/note/a").insert_header(("doclock-tab", ONE));
    let token = alice.send(edit).await.token();
    let put = |of: &str| {
        let put = alice.request(Method::PUT, "/note/a");
        put.insert_header(("lock-token", of.to_owned())).insert_header(("doclock-tab", ONE))
    };
    // One that is refused is not told.
    let wrong = format!("<urn:uuid:{}>", actix_doclock::LockToken::new());
    assert_eq!(alice.send(put(&wrong).set_json(json!({ "text": "never" }))).await.status, 412);
    let saved = alice.send(put(&token).set_json(json!({ "text": "saved" }))).await;
    assert_eq!(saved.status, 200);
    let version = saved.header("etag").unwrap().trim_matches('"').to_owned();
    // A stream without a tab sees all locks of its session as its own.
    for (stream, whose) in
        [(&mut mine, "mine"), (&mut elsewhere, "mine_elsewhere"), (&mut bobs, "held")]
    {
        assert_eq!(stream.event().await.0, "acquired");
        let told = json!({
            "key": "note/a", "collection": "note", "id": "a", "whose": whose, "by": "alice",
            "version": version,
        });
        assert_eq!(stream.event().await, ("saved".to_owned(), told));
    }
}

#[actix_web::test]
async fn a_takeover_is_reported_to_the_former_holder() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (desk, laptop) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "alice").await);
    desk.post("/locks/note/a").await.token();
    let mut stream = desk.listen("").await;
    laptop.post_json("/locks/note/a", json!({ "take_over": true })).await.token();
    let (event, data) = stream.event().await;
    assert_eq!(
        (event.as_str(), &data["was"], &data["by"]),
        ("broken", &"mine".into(), &"alice".into())
    );
    let (event, data) = stream.event().await;
    assert_eq!((event.as_str(), &data["state"]), ("acquired", &"held".into()));
}

#[actix_web::test]
async fn the_number_of_streams_is_limited_and_a_closed_stream_makes_room() {
    let limits = Limits { event_streams: 3, event_streams_per_address: 2, ..Limits::default() };
    let (locks, _) = embedded_with_limits(limits).await;
    let app = serve_with_cookies(&locks).await;
    let browser = Browser::logged_in(&app, "alice").await;
    let from = |host: u8| {
        browser.request(Method::GET, "/locks/events").peer_addr(([10, 0, 0, host], 1).into())
    };
    let open = async |host: u8| app.call(from(host).to_request()).await.unwrap();
    let (first, second, third) = (open(1).await, open(1).await, open(2).await);
    assert!([&first, &second, &third].iter().all(|it| it.status() == 200));
    for host in [1, 2] {
        let refused = browser.send(from(host)).await;
        assert_eq!(refused.problem(503)["code"], "too_many_streams");
        assert!(refused.header("retry-after").is_some());
    }
    drop(first);
    assert_eq!(open(2).await.status(), 200);
    drop((second, third));
}

#[actix_web::test]
async fn one_person_has_a_limit_of_streams_and_shuts_nobody_out() {
    let limits = Limits { event_streams_per_person: 2, ..Limits::default() };
    let (locks, _) = embedded_with_limits(limits).await;
    let app = serve_with_cookies(&locks).await;
    let (desk, laptop, bob) = (
        Browser::logged_in(&app, "alice").await,
        Browser::logged_in(&app, "alice").await,
        Browser::logged_in(&app, "bob").await,
    );
    let (_one, _two) = (desk.listen("").await, open(&laptop, "").await);
    for alice in [&desk, &laptop] {
        let one_more = alice.request(Method::GET, "/locks/events").to_request();
        assert_eq!(app.call(one_more).await.unwrap().status(), 503);
    }
    let _his = open(&bob, "").await;
}

/// Where anybody may look.
#[actix_web::test]
async fn visitors_from_one_address_share_a_limit_of_streams() {
    let limits = Limits { event_streams_per_person: 2, ..Limits::default() };
    let (locks, _) = embedded_with_limits(limits).await;
    let anybody = async |_, _, _| true;
    let app = serve_with(&locks, |session| session.access_policy(anybody).admit_visitors()).await;
    let from = |host: u8| {
        let visitor = Browser::new(&app).request(Method::GET, "/locks/events");
        visitor.peer_addr(([10, 0, 0, host], 1).into()).to_request()
    };
    let _both = (app.call(from(1)).await.unwrap(), app.call(from(1)).await.unwrap());
    assert_eq!(app.call(from(1)).await.unwrap().status(), 503);
    assert_eq!(app.call(from(2)).await.unwrap().status(), 200);
}

#[actix_web::test]
async fn a_stream_without_events_shows_that_it_is_alive() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let mut stream = Browser::logged_in(&app, "alice").await.listen("").await;
    tokio::time::pause();
    assert_eq!(stream.next().await.unwrap().0, "beat");
}

/// Otherwise the pages of a busy site would open their streams again and again.
#[actix_web::test]
async fn a_stream_shows_that_it_is_alive_however_much_happens_that_it_does_not_tell() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let mut stream = alice.listen("?keys=note/a").await;
    tokio::time::pause();
    let others = async {
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_secs(3)).await;
            bob.post("/locks/note/b").await.token();
            bob.delete("/locks/note/b").await;
        }
    };
    let beats = async {
        while stream.next().await.unwrap().0 != "beat" {}
        tokio::time::Instant::now()
    };
    let began = tokio::time::Instant::now();
    tokio::select! {
        beat = beats => assert!(beat - began < Duration::from_secs(20)),
        () = others => panic!("no beat for half a minute"),
    }
}

#[actix_web::test]
async fn a_stream_ends_with_its_session() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/locks/note/a").await.token();
    let (mut hers, mut his) = (alice.listen("").await, open(&bob, "").await);
    alice.post("/purge").await;
    assert_eq!(hers.event().await.0, "session_ended");
    assert!(hers.next().await.is_none());
    assert_eq!(his.event().await.0, "session_ended");
    bob.post("/locks/note/a").await.token();
    assert_eq!(his.event().await.0, "acquired", "the others go on");
}

#[actix_web::test]
async fn streams_end_at_once_when_the_server_is_stopped() {
    let limits = Limits { event_streams_per_person: 100, ..Limits::default() };
    let (locks, _) = embedded_with_limits(limits).await;
    let app = serve_with_cookies(&locks).await;
    let browser = Browser::logged_in(&app, "alice").await;
    let mut streams = vec![browser.listen("").await];
    for _ in 1..100 {
        streams.push(open(&browser, "").await);
    }
    // Time goes on only when nobody has anything to do, and brings a heartbeat then.
    tokio::time::pause();
    locks.begin_shutdown();
    for stream in &mut streams {
        assert!(stream.next().await.is_none(), "at once, not with the next heartbeat");
    }
}

#[actix_web::test]
async fn visitors_hear_nothing_of_the_named_locks_of_jobs() {
    let (locks, _) =
        embedded_with(|settings| settings.admin_policy(|person| person.has_role("chief"))).await;
    locks.register::<actix_doclock::Named>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let (alice, root) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "root").await);
    let mut roots = root.listen("").await;
    let mut alices = open(&alice, "").await;
    let name = LockKey::named("nightly-report").unwrap();
    let job = locks.acquire(&name, Wait::no()).await.unwrap();
    alice.post("/locks/note/a").await.token();
    assert_eq!(roots.event().await.1["key"], "doclock.named/nightly-report");
    assert_eq!(alices.event().await.1["key"], "note/a");
    drop(job);
}

/// Otherwise the next person in this browser would hear what concerned the previous one.
#[actix_web::test]
async fn a_stream_ends_with_its_session_on_every_server_also_if_it_held_no_lock() {
    let (locks, store) = embedded().await;
    let other = LockManager::builder(store).ttl(Duration::from_secs(60)).build().await.unwrap();
    other.register::<Note>().await.unwrap();
    let (app, elsewhere) = (serve_with_cookies(&locks).await, serve_with_cookies(&other).await);
    for ends in ["/purge", "/clear", "/login/bob", "revoked"] {
        let alice = Browser::logged_in(&app, "alice").await;
        let carol = Browser::logged_in(&app, "carol").await;
        let mut others = open(&carol, "").await;
        let at_other = alice.at(&elsewhere);
        let streams = [
            open(&alice, "").await,
            open(&alice, &format!("?tab={ONE}")).await,
            open(&at_other, "").await,
        ];
        let aid = if ends == "revoked" {
            alice.post("/locks/note/a").await.token();
            let held = locks.list().await.unwrap().pop();
            held.map(|lock| lock.aid)
        } else {
            None
        };
        match aid {
            Some(aid) => drop(locks.revoke_session(&aid).await.unwrap()),
            None => drop(alice.post(ends).await),
        }
        carol.post("/locks/note/b").await.token();
        for (n, mut stream) in streams.into_iter().enumerate() {
            // A stream that has not noticed goes on for a quarter of an hour.
            let ends_soon = timeout(SOON, async {
                while let Some((event, data)) = stream.next().await {
                    // The other server learns of the end a moment later.
                    let is_told = event == "resync" || data["key"] == "note/a" || n == 2;
                    assert!(is_told, "{ends}: {event} {data}");
                }
            });
            ends_soon.await.expect("it ends with its session");
        }
        while others.event().await.1["key"] != "note/b" {}
        carol.delete("/locks/note/b").await;
    }
}
