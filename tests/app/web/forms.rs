//! Pages without JavaScript: forms for the lock API, and what a template says of a refusal.

use actix_doclock::Description;
use mongodb::bson::doc;

use super::*;
use crate::rig;

async fn form<S>(browser: &Browser<'_, S>, uri: &str, fields: &str, from: &str) -> Answer
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    let request = browser
        .request(Method::POST, uri)
        .insert_header(("content-type", "application/x-www-form-urlencoded"))
        .insert_header(("host", "shop.example"))
        .insert_header(("referer", from));
    browser.send(request.set_payload(fields.to_owned())).await
}

#[actix_web::test]
async fn a_form_releases_a_lock_and_leads_to_a_page_of_this_site_only() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let here = "http://shop.example/note/a?x=1";
    for (fields, from, place) in [
        ("to=%2Fnotes%3Fpage%3D2", here, Some("/notes?page=2")),
        ("", here, Some("/note/a?x=1")),
        ("", "http://evil.example/note/a", None),
        ("", "http://shop.example//evil.example", None),
        ("", "not an address", None),
    ] {
        let token = alice.post("/note/a").await.token();
        let token = format!("token={}&{fields}", &token[10..token.len() - 1]);
        let gone = form(&alice, "/locks/note/a/release", &token, from).await;
        let status = if place.is_some() { 303 } else { 204 };
        assert_eq!((gone.status.as_u16(), gone.header("location")), (status, place), "{from}");
        assert_eq!(holder_of(&locks, "a").await, None);
    }
    alice.post("/note/a").await;
    for to in
        ["%2F%2Fevil.example", "%2F%5Cevil.example", "http%3A%2F%2Fevil.example", "%2F%09%2Fx", ""]
    {
        let refused = form(&alice, "/locks/note/a/release", &format!("to={to}"), here).await;
        assert_eq!(refused.problem(400)["code"], "bad_request", "{to:?}");
    }
    for fields in ["tokens=x", "token=x", "grace_ms=soon", "%ff=x", "token=x&token=y"] {
        assert_eq!(
            form(&alice, "/locks/note/a/release", fields, here).await.status,
            400,
            "{fields}"
        );
    }
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"), "nothing was released");
    // A form without fields is a button.
    assert_eq!(form(&alice, "/locks/note/a/release", "", here).await.status, 303);
    assert_eq!(holder_of(&locks, "a").await, None);
}

#[actix_web::test]
async fn a_form_breaks_a_lock_and_json_under_the_type_of_a_form_is_json() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, root) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "root").await);
    let here = "http://shop.example/locks";
    alice.post("/note/a").await;
    let refused = form(&alice, "/locks/note/a/break", "reason=mine&to=/", here).await;
    assert_eq!(refused.problem(403)["code"], "break_refused");
    let broken = form(&root, "/locks/note/a/break", "reason=gone+home&to=/list", here).await;
    assert_eq!((broken.status.as_u16(), broken.header("location")), (303, Some("/list")));
    assert_eq!(broken.header("doclock-broken"), Some("1"));
    alice.post("/note/a").await;
    let broken = form(&root, "/locks/note/a/break", r#"{"reason": "by curl"}"#, here).await;
    assert_eq!((broken.status.as_u16(), broken.header("doclock-broken")), (204, Some("1")));
}

#[actix_web::test]
async fn a_template_learns_who_has_the_lock_and_what_its_person_may_do() {
    async fn open(locks: SessionLocks, path: web::Path<String>) -> impl Responder {
        match locks.open::<Note>(path.into_inner()).await {
            Ok(note) => HttpResponse::Ok().json(&*note),
            Err(error) => HttpResponse::Ok().json(locks.refused(&error)),
        }
    }
    async fn hold(locks: SessionLocks, id: web::Path<String>) -> Result<impl Responder, LockError> {
        Ok(HttpResponse::Ok().json(&*locks.held::<Note>(id.into_inner()).await?))
    }
    async fn take(locks: SessionLocks, id: web::Path<String>) -> Result<impl Responder, LockError> {
        Ok(HttpResponse::Ok().json(&*locks.take_over::<Note>(id.into_inner()).await?))
    }
    let (locks, store) = embedded().await;
    let session = SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(locks.session(session.cookie_secure(false).build()).identify(person))
        .route("/open/{id}", web::post().to(open))
        .route("/hold/{id}", web::post().to(hold))
        .route("/take/{id}", web::post().to(take))
        .configure(routes);
    let app = test::init_service(app).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let again = Browser::logged_in(&app, "alice").await;
    assert_eq!(alice.post("/open/a").await.json()["text"], "old");

    let refused = bob.post("/open/a").await.json();
    assert_eq!((&refused["code"], &refused["status"]), (&"held".into(), &423.into()));
    assert_eq!((&refused["holder"], &refused["may_take_over"]), (&"alice".into(), &false.into()));
    assert!(refused["since"].as_str().unwrap().ends_with('Z'), "RFC 3339");
    let why = "This document is being edited by alice. Wait until it is free.";
    assert_eq!((&refused["why"], &refused["same_person"]), (&why.into(), &false.into()));
    let refused = again.post("/open/a").await.json();
    assert_eq!((&refused["may_take_over"], &refused["same_person"]), (&true.into(), &true.into()));
    assert!(
        refused["why"].as_str().unwrap().starts_with("You are editing this document in another")
    );
    let stale = alice.post("/open/a?version=00000000000000000000000000000000").await;
    assert_eq!(stale.json()["code"], "stale_copy");
    assert_eq!(stale.json()["version"].as_str().unwrap().len(), 32);
    assert_eq!(alice.post("/open/none").await.json()["code"], "not_found");

    assert_eq!(bob.post("/hold/a").await.problem(409)["code"], "lost");
    let token = alice.post("/hold/a").await.token();
    assert_eq!(bob.post("/take/a").await.problem(403)["code"], "take_over_refused");
    let taken = again.post("/take/a").await;
    assert_eq!((taken.status.as_u16(), taken.token() != token), (200, true));
    assert_eq!(alice.post("/hold/a").await.problem(409)["code"], "lost");
    assert_eq!(text_of(&store, "a"), "old");
}

#[actix_web::test]
async fn a_form_that_is_submitted_twice_is_told_that_it_was_saved_already() {
    let (locks, store) = embedded().await;
    let put = async |note: &Note| store.put(note.id.clone(), note).unwrap();
    submitted_twice(&locks, put).await;
    assert_eq!(text_of(&store, "a"), "done");
}

#[actix_web::test]
async fn on_mongodb_too_a_form_that_is_submitted_twice_is_told_that_it_was_saved_already() {
    let database = rig::fresh_database(rig::mongod::shared_replica_set().await.uri()).await;
    let notes = database.collection::<Note>(Note::COLLECTION);
    let put = async |note: &Note| {
        let whole = notes.replace_one(doc! { "_id": &note.id }, note).upsert(true);
        whole.await.unwrap();
    };
    for id in ["a", "b"] {
        put(&Note { id: id.to_owned(), text: "old".to_owned() }).await;
    }
    let locks = crate::rig::app::manager_on(&database).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    submitted_twice(&locks, put).await;
    assert_eq!(notes.find_one(doc! { "_id": "a" }).await.unwrap().unwrap().text, "done");
}

/// A form names its lock, and the version of the document that it shows.
async fn submitted_twice(locks: &LockManager, put: impl AsyncFn(&Note)) {
    let app = serve_with_cookies(locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let version = |answer: &Answer| answer.header("etag").unwrap().replace('"', "");
    let open = async |how: &str| {
        let opened = alice.post("/note/a").await;
        let token = opened.token();
        let token = &token[10..token.len() - 1];
        format!("/note/a{how}?lock_token={token}&version={}", version(&opened))
    };
    let says = |refused: Value| {
        ["code", "cause", "saved", "version"].map(|name| refused[name].as_str().map(str::to_owned))
    };
    let (stale_copy, lost) = (Some("stale_copy".to_owned()), Some("lost".to_owned()));

    // The page keeps its lock.
    let form = open("").await;
    let saved = Some(version(&alice.put(&form, "typed").await));
    let question = form.replace("/note/a?lock_token=", "/locks/note/a?saved_under=");
    let answer = says(alice.get(&question.replace("version=", "shown=")).await.json());
    assert_eq!(answer[2..], [saved.clone(), saved.clone()]);
    for typed in ["typed", "typed later"] {
        let again = says(alice.put(&form, typed).await.problem(412));
        assert_eq!(again, [stale_copy.clone(), None, saved.clone(), saved.clone()]);
    }
    let again = alice.put(&form, "typed").await.problem(412);
    let detail = again["detail"].as_str().unwrap();
    let says_so = "; the document was saved under this lock before, perhaps in another tab";
    assert!(detail.ends_with(says_so), "{detail}");
    // The form that came after the save.
    let next = open("").await;
    assert_eq!(alice.put(&next, "typed").await.status, 200, "nothing has changed");
    assert_eq!(says(alice.put(&form, "typed").await.problem(412))[2], saved);
    // Somebody else has written since.
    put(&Note { id: "a".to_owned(), text: "foreign".to_owned() }).await;
    let now = Some(version(&alice.get("/note/a/view").await));
    let again = says(alice.put(&form, "typed").await.problem(412));
    assert_eq!(again, [stale_copy.clone(), None, saved, now.clone()]);
    let first = says(alice.put(&next, "typed").await.problem(412));
    assert_eq!(first, [stale_copy, None, None, now]);

    // The page releases its lock.
    let form = open("/done").await;
    let saved = Some(version(&alice.put(&form, "done").await));
    let released = Some("released".to_owned());
    let again = says(alice.put(&form, "done").await.problem(409));
    assert_eq!(again, [lost.clone(), released, saved.clone(), None]);
    // The session has a new lock meanwhile, under which it has saved nothing.
    let later = open("/done").await;
    let again = says(alice.put(&form, "done").await.problem(412));
    assert_eq!(again, [Some("stale_token".to_owned()), None, saved, None]);
    let other = later.replace("version=", "version=00000000000000000000000000000000&x=");
    assert_eq!(says(alice.put(&other, "x").await.problem(412))[2], None);
    // Another person goes back to this form.
    bob.post("/note/b").await.token();
    assert_eq!(says(bob.put(&form, "done").await.problem(409))[..3], [lost, None, None]);
}

/// As by a double click: the browser drops the first request when it sends the second.
#[actix_web::test]
async fn the_second_submit_knows_of_a_first_one_whose_answer_nobody_waited_for() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let mut saved_unheard = 0;
    for polls in 1..10_000 {
        let opened = alice.post("/note/a").await;
        let (token, version) = (opened.token(), opened.header("etag").unwrap().replace('"', ""));
        let token = &token[10..token.len() - 1];
        let (form, text) =
            (format!("/note/a?lock_token={token}&version={version}"), polls.to_string());
        let is_answered = {
            let mut first = std::pin::pin!(alice.put(&form, &text));
            let mut is_answered = false;
            for _ in 0..polls {
                is_answered = is_answered || futures_util::poll!(first.as_mut()).is_ready();
                tokio::task::yield_now().await;
            }
            is_answered
        };
        if is_answered {
            break;
        }
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        if text_of(&store, "a") == text {
            saved_unheard += 1;
            let again = alice.put(&form, &text).await.problem(412);
            assert!(again["saved"].is_string(), "after {polls} polls: {again}");
        }
    }
    assert!(saved_unheard > 0, "no request was dropped between its save and its answer");
}

/// Each refusal says what happened and what to do, in the language of the browser, and in no words of programmers.
#[actix_web::test]
async fn a_refusal_is_explained_to_people_in_their_language_and_in_the_words_of_the_application() {
    async fn try_it(locks: SessionLocks, path: web::Path<(String, String)>) -> HttpResponse {
        let (how, id) = path.into_inner();
        let tried = match &*how {
            "open" => locks.open::<Note>(id).await.map(drop),
            "hold" => locks.held::<Note>(id).await.map(drop),
            _ => locks.take_over::<Note>(id).await.map(drop),
        };
        HttpResponse::Ok().body(tried.err().map(|it| locks.refused(&it).why).unwrap_or_default())
    }
    let (locks, store) = embedded_with(|settings| {
        settings.describe(|keys: Vec<LockKey>| async move {
            let title = |key: &LockKey| match &*key.id().to_string() {
                "a" => "Prices {by}\n\u{202e}".to_owned(),
                id => id.to_owned(),
            };
            Ok(keys.into_iter().map(|key| (key.clone(), Description::new(title(&key)))).collect())
        })
    })
    .await;
    let session = SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
    let wrap = locks.session(session.cookie_secure(false).build()).identify(person);
    let wrap = wrap.explain(|request, problem| {
        let is_french = request.headers().get("accept-language")?.to_str().ok()? == "fr";
        is_french.then(|| format!("code {}", problem.member("code").unwrap()))
    });
    let wrap = wrap
        .access_policy(async |_: Option<Actor>, key: LockKey, _| key.id().to_string() != "hidden");
    let app = App::new().wrap(wrap).route("/try/{how}/{id}", web::post().to(try_it));
    let app = test::init_service(app.configure(routes)).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let root = Browser::logged_in(&app, "root").await;
    let says = async |browser: &Browser<'_, _>, uri: &str, language: &'static str| {
        let request = browser.request(Method::POST, &format!("/try/{uri}"));
        browser.send(request.insert_header(("accept-language", language))).await.text()
    };
    let opened = alice.post("/note/a").await;
    let (token, shown) = (opened.token(), opened.header("etag").unwrap().replace('"', ""));
    let token = &token[10..token.len() - 1];
    let held = "“Prices {by}” is being edited by alice. Wait until it is free.";
    for language in [
        "",
        "en",
        "fr-FR, en;q=0.5",
        "de;q=0, x",
        "de;q=0.1, en-GB;q=0.9",
        "ä",
        "de; q=0, en; q=0.1",
    ] {
        assert_eq!(says(&bob, "open/a", language).await, held, "{language}");
    }
    for language in
        ["de", "DE-at", "fr, de;q=0.7, en;q=0.3", "de, en", "fr; q=0.9, de; q=0.8, en; q=0.7"]
    {
        let said = says(&bob, "open/a", language).await;
        assert!(
            said.ends_with("wird gerade von alice bearbeitet. Warten Sie, bis es frei ist."),
            "{said}"
        );
    }
    assert_eq!(says(&bob, "open/a", "fr").await, "code \"held\"", "the words of the application");
    let other = Browser::logged_in(&app, "alice").await;
    let own = says(&other, "open/a", "en").await;
    assert!(
        own.starts_with("You are editing “Prices {by}” in another window or browser."),
        "{own}"
    );
    assert!(own.ends_with("Or take it over: then nothing can be saved there any more."), "{own}");

    let named = format!("hold/a?lock_token={token}&version={shown}");
    store.put("a".to_owned(), &Note { id: "a".to_owned(), text: "foreign".to_owned() }).unwrap();
    assert!(says(&alice, &named, "en").await.starts_with("This document has been saved since you"));
    let body = serde_json::json!({ "reason": "to the printer {title}" });
    assert_eq!(root.post_json("/locks/note/a/break", body).await.status, 204);
    let broken = says(&alice, &named, "en").await;
    assert!(
        broken.starts_with("root has ended your lock on this document. Nothing was saved."),
        "{broken}"
    );
    assert!(broken.ends_with("The reason: to the printer {title}"), "{broken}");
    assert!(
        says(&bob, "hold/a", "de")
            .await
            .starts_with("Sie haben die Sperre für dieses Dokument nicht mehr.")
    );
    bob.post("/note/a").await.token();
    assert!(
        says(&other, "hold/a", "en")
            .await
            .contains("is being edited by bob now. Nothing was saved.")
    );
    assert!(store.remove(&key("a")));
    for (uri, says_so) in [
        (format!("open/b?version={shown}"), "has been saved since"),
        (format!("open/a?version={shown}"), "has been deleted. Nothing was saved."),
        (
            format!("open/hidden?version={shown}"),
            "There is no such document, or you may not edit it.",
        ),
        ("open/b?version=x".to_owned(), "The server does not understand what this page has sent."),
        ("over/a".to_owned(), "There is no such document"),
    ] {
        let said = says(&bob, &uri, "en").await;
        assert!(said.contains(says_so), "{uri}: {said}");
        for word in ["note/", "session", "cookie", "token", "409", "Lock-Token"] {
            assert!(!said.contains(word), "{uri}: {said}");
        }
    }
}
