//! Asking the holder of a lock for it: over HTTP, by events, and of a job.

use std::rc::Rc;

use actix_doclock::{Actor, Aid, Ask, LockEvent, Named, web::Access};
use serde_json::json;
use tokio::time::timeout;
use uuid::Uuid;

use super::{events::open, *};
use crate::rig::app::eventually;

const SOON: Duration = Duration::from_secs(60);

fn message(text: &str) -> Value {
    json!({ "message": text })
}

impl<S> Browser<'_, S>
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    async fn asks(&self, text: &str) -> Answer {
        self.post_json("/locks/note/a/ask", message(text)).await
    }

    async fn answers(&self, token: &str, body: Value) -> Answer {
        let request = self.request(Method::POST, "/locks/note/a/answer");
        self.send(request.insert_header(("lock-token", token)).set_json(body)).await
    }

    /// The asks for the lock of this session, as its heartbeat says.
    async fn hears(&self) -> Vec<Value> {
        let held = self.post("/locks/heartbeat").await.json();
        held["held"][0]["asks"].as_array().unwrap_or_else(|| panic!("{held}")).clone()
    }

    async fn may_hear_nothing(&self) {
        assert_eq!(self.hears().await, Vec::<Value>::new());
    }
}

#[actix_web::test]
async fn the_holder_hears_who_asks_and_the_asker_hears_the_answer() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let token = alice.post("/locks/note/a").await.token();
    alice.may_hear_nothing().await;

    let asked = bob.asks("for the meeting").await;
    assert_eq!(asked.status, 202);
    let asked = asked.json();
    assert_eq!((&asked["ahead"], &asked["answer"]), (&json!(0), &Value::Null));
    let heard = alice.hears().await;
    let first = &heard[0];
    assert_eq!((&first["by"], &first["message"]), (&json!("bob"), &json!("for the meeting")));
    assert_eq!(first["ask"], asked["ask"]);
    assert!(first["at"].as_str().unwrap().ends_with('Z'), "{first}");
    assert_eq!(alice.post("/locks/note/a").await.token(), token, "the lock is the same");

    let soon = json!({ "ask": asked["ask"], "answer": "soon", "message": "one more line" });
    assert_eq!(alice.answers(&token, soon).await.status, 204);
    let seen = bob.get("/locks/note/a").await.json();
    assert_eq!(seen["state"], "held");
    assert_eq!(
        (&seen["ask"]["answer"], &seen["ask"]["reply"]),
        (&json!("soon"), &json!("one more line"))
    );
    let many = bob.post_json("/locks/status", json!({ "keys": ["note/a"] })).await.json();
    assert_eq!(many["locks"][0]["ask"]["ask"], asked["ask"], "{many}");
    assert_eq!(bob.asks("for the meeting").await.json()["answer"], "soon", "the same text");
    let again = json!({ "ask": asked["ask"] });
    assert_eq!(bob.post_json("/locks/note/a/ask", again.clone()).await.json()["answer"], "soon");

    let other = Browser::logged_in(&app, "carol").await;
    assert_eq!(
        other.post_json("/locks/note/a/ask", again).await.problem(404)["code"],
        "no_such_ask"
    );
    assert_eq!(other.get("/locks/note/a").await.json().get("ask"), None, "not hers");
    for shown in
        [bob.get("/locks/note/a").await.text(), alice.post("/locks/heartbeat").await.text()]
    {
        for aid in
            locks.list().await.unwrap().iter().flat_map(|lock| &lock.asks).map(|ask| &ask.aid)
        {
            assert!(!shown.contains(aid.as_str()), "an aid is shown: {shown}");
        }
    }
}

#[actix_web::test]
async fn nobody_is_asked_for_a_free_document_or_for_one_s_own() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let free = bob.asks("x").await.problem(409);
    assert_eq!((&free["code"], &free["state"]), (&json!("free"), &json!("free")));
    assert_eq!(bob.get("/locks/note/a").await.json()["state"], "free", "no lock either");
    alice.post("/locks/note/a").await.token();
    assert_eq!(alice.asks("x").await.problem(409)["code"], "nobody_hears");
    alice.delete("/locks/note/a").await;
    alice.post("/note/a/read").await;
    assert_eq!(bob.asks("x").await.problem(409)["code"], "nobody_hears", "a reader");
    assert_eq!(
        bob.post_json("/locks/nothing/a/ask", message("x")).await.problem(404)["code"],
        "no_such_collection"
    );
}

#[actix_web::test]
async fn an_ask_is_one_line_without_marks_that_turn_the_text_around() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/locks/note/a").await.token();
    bob.asks(" <b>now</b>\r\n\u{202e}please\u{2066}\u{7}\u{2028}שלום ").await;
    assert_eq!(alice.hears().await[0]["message"], "<b>now</b>  please  שלום");
    for (text, status) in [("ä".repeat(250), 202), ("ä".repeat(250) + "x", 400)] {
        assert_eq!(bob.asks(&text).await.status, status);
    }
    assert_eq!(alice.hears().await[0]["message"], "ä".repeat(250));
    // What nobody sees is no message; what joins two characters stays.
    for unseen in
        ["\u{200b}", " \u{2060}\u{feff} ", "\u{ad}\u{3164}", "\u{e0041}\u{fe0f}", "\u{0}\u{200d}"]
    {
        assert_eq!(bob.asks(unseen).await.status, 202);
        assert_eq!(alice.hears().await[0]["message"], "", "{unseen:?}");
    }
    bob.asks("👩\u{200d}🚒 می\u{200c}خواهم").await;
    assert_eq!(alice.hears().await[0]["message"], "👩\u{200d}🚒 می\u{200c}خواهم");
    for wrong in [json!({ "message": 7 }), json!({ "massage": "x" })] {
        bob.post_json("/locks/note/a/ask", wrong).await.problem(400);
    }
}

#[actix_web::test]
async fn eight_people_may_ask_and_a_person_30_times_a_minute() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/locks/note/a").await.token();
    for n in 0..8 {
        let asked = Browser::logged_in(&app, &format!("p{n}")).await.asks("x").await;
        assert_eq!((asked.status.as_u16(), &asked.json()["ahead"]), (202, &json!(n)));
    }
    let bob = Browser::logged_in(&app, "bob").await;
    let refused = bob.asks("x").await;
    assert!(refused.header("retry-after").is_some());
    assert_eq!(refused.problem(429)["code"], "too_many_asks");
    let mut accepted = 1;
    for _ in 0..10 {
        let session = Browser::logged_in(&app, "p0").await;
        for _ in 0..10 {
            accepted += usize::from(session.asks("x").await.status == 202);
        }
    }
    assert_eq!(accepted, 30, "in all sessions of this person");
    assert_eq!(alice.hears().await.len(), 8);
}

#[actix_web::test]
async fn an_ask_goes_with_the_lock_with_its_asker_and_at_a_logout() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/locks/note/a").await.token();
    for withdraw in [Method::DELETE, Method::POST] {
        bob.asks("x").await;
        assert_eq!(alice.hears().await.len(), 1);
        let path = if withdraw == Method::DELETE { "ask" } else { "withdraw" };
        let request = bob.request(withdraw, &format!("/locks/note/a/{path}"));
        assert_eq!(bob.send(request).await.status, 204);
        alice.may_hear_nothing().await;
    }
    let carol = Browser::logged_in(&app, "carol").await;
    carol.asks("x").await;
    bob.asks("y").await;
    bob.delete("/locks/note/a").await;
    assert_eq!(alice.hears().await.len(), 2, "a release withdraws nothing");
    let old = carol.copy();
    carol.post("/purge").await;
    assert_eq!(old.asks("x").await.problem(401)["code"], "session_ended", "a copied cookie");
    let heard = alice.hears().await;
    assert_eq!(heard.iter().map(|it| &it["by"]).collect::<Vec<_>>(), ["bob"], "carol has left");
    alice.delete("/locks/note/a").await;
    carol.post("/login/carol").await;
    carol.post("/locks/note/a").await.token();
    carol.may_hear_nothing().await;
}

#[actix_web::test]
async fn only_the_tab_with_the_token_answers() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let old = alice.post("/locks/note/a").await.token();
    alice.delete("/locks/note/a").await;
    let token = alice.post("/locks/note/a").await.token();
    let ask = bob.asks("x").await.json()["ask"].clone();
    let soon = json!({ "ask": ask, "answer": "soon", "message": "" });
    assert_eq!(alice.answers(&old, soon.clone()).await.problem(412)["code"], "stale_token");
    assert_eq!(
        bob.answers(&token, soon.clone()).await.problem(412)["code"],
        "stale_token",
        "not his"
    );
    assert_eq!(
        alice.post_json("/locks/note/a/answer", soon.clone()).await.problem(400)["code"],
        "bad_request"
    );
    let of_nobody = json!({ "ask": Uuid::new_v4(), "answer": "soon" });
    assert_eq!(alice.answers(&token, of_nobody).await.problem(404)["code"], "no_such_ask");
    let wrong = [
        json!({ "ask": ask, "answer": "yes" }),
        json!({ "ask": "x", "answer": "no" }),
        json!({ "answer": "no" }),
    ];
    for wrong in wrong {
        assert_eq!(alice.answers(&token, wrong).await.problem(400)["code"], "bad_request");
    }
    assert_eq!(bob.get("/locks/note/a").await.json()["ask"].get("answer"), None, "no answer yet");
    let path = format!("/locks/note/a/answer?lock_token={}", token.trim_matches(['<', '>']));
    assert_eq!(alice.post_json(&path, soon).await.status, 204, "the token in the address");
    let no = json!({ "ask": ask, "answer": "no", "message": "sorry" });
    assert_eq!(alice.answers(&token, no).await.status, 204, "another answer");
    assert_eq!(bob.get("/locks/note/a").await.json()["ask"]["answer"], "no");
}

#[actix_web::test]
async fn a_page_without_javascript_asks_and_answers_by_forms() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let token = alice.post("/locks/note/a").await.token();
    let form = |browser: &Browser<_>, path: &str, fields: &[(&str, &str)]| {
        let request =
            browser.request(Method::POST, path).insert_header(("sec-fetch-mode", "navigate"));
        request.set_form(
            fields.iter().map(|it| (it.0.to_owned(), it.1.to_owned())).collect::<BTreeMap<_, _>>(),
        )
    };
    let asked =
        bob.send(form(&bob, "/locks/note/a/ask", &[("message", "x"), ("to", "/note/a")])).await;
    assert_eq!((asked.status.as_u16(), asked.header("location")), (303, Some("/note/a")));
    let elsewhere = form(&bob, "/locks/note/a/ask", &[("message", "y"), ("to", "https://a.test/")]);
    bob.send(elsewhere).await.problem(400);
    let heard = alice.hears().await;
    assert_eq!((heard.len(), &heard[0]["message"]), (1, &json!("x")));
    let ask = heard[0]["ask"].as_str().unwrap();
    let path = format!("/locks/note/a/answer?lock_token={}", token.trim_matches(['<', '>']));
    let answer =
        form(&alice, &path, &[("ask", ask), ("answer", "no"), ("message", ""), ("to", "/")]);
    assert_eq!(alice.send(answer).await.status, 303);
    assert_eq!(bob.get("/locks/note/a").await.json()["ask"]["answer"], "no");
}

#[actix_web::test]
async fn a_page_of_another_site_cannot_ask_or_answer() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/locks/note/a").await.token();
    bob.asks("mine").await;
    for path in ["ask", "answer", "withdraw"] {
        let request = bob.request(Method::POST, &format!("/locks/note/a/{path}"));
        let foreign = request.insert_header(("sec-fetch-site", "cross-site"));
        assert_eq!(bob.send(foreign.set_json(message("theirs"))).await.status, 403, "{path}");
    }
    assert_eq!(alice.hears().await[0]["message"], "mine");
}

#[actix_web::test]
async fn a_page_of_the_person_before_withdraws_nothing_of_the_next_one() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let browser = Browser::logged_in(&app, "bob").await;
    alice.post("/locks/note/a").await.token();
    let page = browser.request(Method::GET, "/locks/note/a").insert_header(("doclock-page", ONE));
    let bob = browser.send(page).await.header("doclock-person").unwrap().to_owned();
    browser.post("/switch/carol").await;
    browser.asks("of carol").await;
    for method in [Method::POST, Method::DELETE] {
        let path = if method == Method::POST { "withdraw" } else { "ask" };
        let old = browser.request(method, &format!("/locks/note/a/{path}"));
        let old = browser.send(old.insert_header(("doclock-person", bob.as_str()))).await;
        assert_eq!(old.problem(409)["code"], "person_changed");
    }
    assert_eq!(alice.hears().await[0]["message"], "of carol");
}

#[actix_web::test]
async fn whoever_may_not_lock_a_document_cannot_ask_for_it() {
    let (locks, _) = embedded().await;
    let looks_only: Rc<RefCell<Vec<&str>>> = Rc::new(vec!["bob"].into());
    let these = Rc::clone(&looks_only);
    let app = serve_with(&locks, |wrap| {
        wrap.access_policy(async move |person: Option<Actor>, _: LockKey, access| {
            let may_lock = |it: &Actor| !these.borrow().contains(&it.label.as_str());
            access == Access::Look || person.as_ref().is_some_and(may_lock)
        })
    })
    .await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/locks/note/a").await.token();
    assert_eq!(bob.asks("x").await.problem(404)["code"], "not_found");
    assert_eq!(Browser::new(&app).asks("x").await.problem(401)["code"], "login_required");
    alice.may_hear_nothing().await;
    Browser::logged_in(&app, "carol").await.asks("for carol").await;
    looks_only.borrow_mut().push("alice");
    let own = alice.get("/locks").await.json();
    assert_eq!((&own[0]["token"], &own[0]["asks"]), (&Value::Null, &json!([])), "{own}");
}

#[actix_web::test]
async fn only_the_holder_is_told_of_an_ask_and_only_the_asker_of_the_answer() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let carol = Browser::logged_in(&app, "carol").await;
    let token = alice.post("/locks/note/a").await.token();
    let mut streams = [alice.listen("").await, open(&bob, "").await, open(&carol, "").await];
    let ask = bob.asks("please").await.json()["ask"].clone();
    let (event, data) = streams[0].event().await;
    assert_eq!(
        (&*event, &data["by"], &data["message"]),
        ("asked", &json!("bob"), &json!("please"))
    );
    assert_eq!(
        (&data["key"], &data["ask"], &data["whose"]),
        (&json!("note/a"), &ask, &json!("mine"))
    );
    bob.asks("please").await;
    alice.answers(&token, json!({ "ask": ask, "answer": "no", "message": "not now" })).await;
    let (event, data) = streams[1].event().await;
    assert_eq!(
        (&*event, &data["answer"], &data["reply"]),
        ("answered", &json!("no"), &json!("not now"))
    );
    alice.delete("/locks/note/a").await;
    for stream in &mut streams {
        assert_eq!(stream.event().await.0, "released", "nothing else was told");
    }
}

#[actix_web::test]
async fn a_session_without_an_aid_gets_one_with_its_first_ask_and_by_no_refused_one() {
    let (locks, _) = embedded().await;
    let app = serve_with(&locks, |wrap| wrap.identify(|_| Some(Actor::new("anybody")))).await;
    let (alice, bob) = (Browser::new(&app), Browser::new(&app));
    bob.asks("nobody has it").await.problem(409);
    assert!(!bob.has_cookie());
    alice.post("/locks/note/a").await.token();
    assert_eq!(bob.asks("x").await.status, 202);
    assert_eq!(bob.get("/locks/note/a").await.json()["ask"]["message"], "x", "its next request");
    bob.post("/locks/note/b").await.token();
    let lock = async |id| locks.inspect(&key(id)).await.unwrap().unwrap();
    assert_eq!(lock("a").await.asks[0].aid, lock("b").await.aid);
}

#[actix_web::test]
async fn a_job_hears_each_ask_once_and_answers() {
    let (locks, _) = embedded().await;
    locks.register::<Named>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let bob = Browser::logged_in(&app, "bob").await;
    let job =
        locks.job("nightly report").hears_asks().acquire(&key("a"), Wait::no()).await.unwrap();
    let hears = async || timeout(SOON, job.asked()).await.expect("somebody asks").unwrap();
    let (heard, _) = tokio::join!(hears(), bob.asks("first"));
    assert_eq!((&*heard.by.label, &*heard.message), ("bob", "first"));
    bob.asks("first").await;
    bob.asks("second").await;
    let second = hears().await;
    assert_eq!(second.message, "second");
    job.answer(&second, actix_doclock::Answer::Soon("at\n3 \u{202e}".to_owned())).await.unwrap();
    assert_eq!(bob.get("/locks/note/a").await.json()["ask"]["reply"], "at 3");
    let old = job.answer(&heard, actix_doclock::Answer::No(String::new())).await;
    assert!(matches!(old, Err(LockError::NoSuchAsk { .. })), "{old:?}");
    {
        let mut again = std::pin::pin!(job.asked());
        tokio::select! {
            biased;
            heard = &mut again => panic!("told twice: {heard:?}"),
            () = async { for _ in 0..100 { tokio::task::yield_now().await } } => {}
        }
    }
    locks.begin_shutdown();
    assert_eq!(timeout(SOON, job.asked()).await.unwrap(), None::<Ask>);
}

/// Nobody is offered to ask where nobody would hear it.
#[actix_web::test]
async fn only_a_job_that_hears_asks_can_be_asked() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let may_ask = async || {
        let many = bob.post_json("/locks/status", json!({ "keys": ["note/a"] })).await.json();
        let each = [
            bob.get("/locks/note/a").await.json(),
            many["locks"][0].clone(),
            bob.post("/locks/note/a").await.problem(423),
            bob.post_json("/locks", json!({ "keys": ["note/a"] })).await.json()["refused"][0]
                .clone(),
        ];
        let said = each.map(|body| body["may_ask"].as_bool().unwrap_or_else(|| panic!("{body}")));
        assert!(said.iter().all(|it| *it == said[0]), "{said:?}");
        said[0]
    };
    let job = locks.job("report").acquire(&key("a"), Wait::no()).await.unwrap();
    assert!(!may_ask().await);
    assert_eq!(bob.asks("x").await.problem(409)["code"], "nobody_hears");
    assert_eq!(timeout(SOON, job.asked()).await.unwrap(), None::<Ask>, "it can hear nothing");
    job.release().await.unwrap();
    let job = locks.job("report").hears_asks().acquire(&key("a"), Wait::no()).await.unwrap();
    assert!(may_ask().await);
    assert_eq!(bob.asks("x").await.status, 202);
    job.release().await.unwrap();
    let reader = locks.job("report").hears_asks().acquire_shared(&key("a"), Wait::no()).await;
    assert!(!may_ask().await, "a reader");
    reader.unwrap().release().await.unwrap();
    alice.post("/note/a").await.token();
    assert!(may_ask().await, "a person");
}

#[actix_web::test]
async fn events_tell_each_ask_and_each_answer_once() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let token = alice.post("/locks/note/a").await.token();
    let mut events = locks.events();
    eventually("the events are followed", async || {
        bob.asks("x").await;
        bob.delete("/locks/note/a/ask").await;
        let next = timeout(Duration::from_millis(100), events.next()).await;
        matches!(next.as_ref().map(|it| it.as_deref()), Ok(Some(LockEvent::Asked(..))))
    })
    .await;
    let ask = bob.asks("last").await.json()["ask"].clone();
    let (mut asked, mut answered) = (0, Vec::new());
    for answer in ["no", "soon"] {
        for _ in 0..2 {
            bob.asks("last").await;
            alice.answers(&token, json!({ "ask": ask, "answer": answer, "message": "" })).await;
        }
        loop {
            match &*timeout(SOON, events.next()).await.unwrap().unwrap() {
                LockEvent::Asked(_, ask) if ask.message == "last" => asked += 1,
                LockEvent::Answered(_, ask) => {
                    answered.push(ask.answer.as_ref().unwrap().name());
                    break;
                }
                _ => {}
            }
        }
    }
    assert_eq!((asked, answered), (1, vec!["no", "soon"]));
}

#[actix_web::test]
async fn a_person_without_an_id_counts_by_the_session() {
    let (locks, _) = embedded().await;
    let lock =
        locks.lock_for_session(&key("a"), &Aid::new(), &actix_doclock::Holder::new("alice")).await;
    drop(lock.unwrap());
    let app = serve_with(&locks, |wrap| wrap.identify(|_| Some(Actor::new("anybody")))).await;
    for _ in 0..2 {
        assert_eq!(Browser::logged_in(&app, "x").await.asks("x").await.status, 202);
    }
    assert_eq!(locks.inspect(&key("a")).await.unwrap().unwrap().asks.len(), 2);
}
