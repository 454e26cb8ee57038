//! The version of a document: what a page shows, and what its save expects.

use tokio::sync::Barrier;

use super::*;

const OTHER: &str = "00000000000000000000000000000000";

/// The version in an answer.
fn version(answer: &Answer) -> String {
    let tag = answer.header("etag").expect("a version");
    tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"')).expect("a strong tag").to_owned()
}

/// Another program writes without a lock.
fn written_past_the_lock(store: &MemoryStore, text: &str) {
    store.put("a".to_owned(), &Note { id: "a".to_owned(), text: text.to_owned() }).unwrap();
}

#[actix_web::test]
async fn an_answer_about_one_document_carries_its_version() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let loaded = version(&alice.post("/note/a").await);
    assert_eq!(version(&alice.post("/note/a").await), loaded, "a re-entry");
    assert_eq!(version(&alice.post("/note/a/read").await), loaded, "a reader");
    assert_eq!(version(&alice.get("/note/a/view").await), loaded);

    let saved = version(&alice.put("/note/a", "new").await);
    assert_ne!(saved, loaded);
    assert_eq!(version(&alice.post("/note/a").await), saved);
    assert_eq!(version(&alice.put("/note/a", "new").await), saved, "nothing has changed");
    let done = version(&alice.put("/note/a/done", "old").await);
    assert_eq!(done, loaded, "the same bytes, the same version");
    assert_eq!(version(&alice.post("/create/new").await).len(), 32);

    for (uri, status) in [("/note/none", 404), ("/note/a/answer/422", 422), ("/both", 200)] {
        let answer = alice.post(uri).await;
        assert_eq!((answer.status.as_u16(), answer.header("etag")), (status, None), "{uri}");
    }
    assert_eq!(text_of(&store, "a"), "old");
}

#[actix_web::test]
async fn a_save_of_what_has_changed_since_its_page_was_opened_writes_nothing_and_keeps_the_lock() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let opened = alice.post("/note/a").await;
    let shown = version(&opened);
    written_past_the_lock(&store, "foreign");
    let now = version(&alice.get("/note/a/view").await);

    let in_header = async |text: &str| {
        let form = serde_json::json!({ "text": "typed" });
        let put = alice.request(Method::PUT, "/note/a").insert_header(("if-match", text));
        alice.send(put.set_json(form)).await
    };
    let in_address =
        async |text: &str| alice.put(&format!("/note/a?version={text}"), "typed").await;
    for stale in [in_header(&format!("\"{shown}\"")).await, in_address(&shown).await] {
        let problem = stale.problem(412);
        assert_eq!(
            (&problem["code"], &problem["version"]),
            (&"stale_copy".into(), &now.clone().into())
        );
        assert_eq!(text_of(&store, "a"), "foreign");
        assert_eq!(alice.post("/note/a").await.token(), opened.token(), "the lock stays");
    }
    let saved = in_address(&now).await;
    assert_eq!((saved.status.as_u16(), text_of(&store, "a")), (200, "typed".to_owned()));
    let saved = version(&saved);
    for accepted in [
        "*",
        ",*, ",
        &format!("\"{saved}\""),
        &format!("\"x\", W/\"y\" ,\"{saved}\""),
        &format!(", ,\"{saved}\",\t,"),
        &format!("\"{saved}-gzip\""),
        &format!("\"{saved}--gzip\""),
        &format!("\"x\",, \"{saved};br\","),
    ] {
        assert_eq!(in_header(accepted).await.status, 200, "{accepted}");
    }
    for accepted in [format!("{saved}-gzip"), format!("{saved}%3Bbr")] {
        assert_eq!(in_address(&accepted).await.status, 200, "{accepted}");
    }
    // A weak tag, a tag of another program, and the version of another document.
    let of_b = version(&alice.post("/note/b").await);
    for refused in [
        &format!("W/\"{saved}\""),
        &format!("W/\"{saved}-gzip\""),
        &format!("\"{of_b}-gzip\""),
        &format!("\"{saved}{saved}\""),
        "\"x\"",
        "\"x\",",
        "\"\"",
        &format!("\"{of_b}\""),
        "\"a,b\"",
    ] {
        assert_eq!(in_header(refused).await.problem(412)["code"], "stale_copy", "{refused}");
    }
    let huge = "a".repeat(4_000);
    for malformed in [
        "",
        " ",
        ",",
        "x",
        "\"x",
        "\"x\" \"y\"",
        "\"x\"\"y\"",
        "*, \"x\"",
        "\"x\", *",
        &saved,
        "W/",
        &huge,
    ] {
        assert_eq!(in_header(malformed).await.problem(400)["code"], "bad_version", "{malformed}");
    }
    for malformed in ["", "x", "*", &saved.to_uppercase(), &huge, "%ff", &format!("%22{saved}%22")]
    {
        assert_eq!(in_address(malformed).await.problem(400)["code"], "bad_version", "{malformed}");
    }
    assert_eq!(in_address(OTHER).await.problem(412)["code"], "stale_copy");
}

#[actix_web::test]
async fn a_lock_that_is_taken_for_a_copy_that_has_changed_is_given_back() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let refused = alice.post(&format!("/note/a?version={OTHER}")).await;
    assert_eq!(refused.problem(412)["code"], "stale_copy");
    assert_eq!(holder_of(&locks, "a").await, None);
    // Without the document, too: the version is never ignored.
    let locked = alice.post(&format!("/login/alice/edit/a?version={OTHER}")).await;
    assert_eq!(locked.problem(412)["code"], "stale_copy");
    assert_eq!(holder_of(&locks, "a").await, None);
}

#[actix_web::test]
async fn a_version_is_of_one_document() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let shown = version(&alice.post("/note/a").await);
    let both = alice.post(&format!("/both?version={shown}")).await;
    assert_eq!(both.problem(400)["code"], "bad_version");
    assert_eq!(holder_of(&locks, "b").await, None);
}

#[actix_web::test]
async fn the_form_of_an_earlier_lock_saves_nothing() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let yesterday = alice.post("/note/a").await.token();
    let action = |token: &str| format!("/note/a?lock_token={}", &token[1..token.len() - 1]);
    assert_eq!(alice.put(&action(&yesterday), "mine").await.status, 200);
    store.age(&key("a"), Duration::from_secs(60));
    bob.post("/note/a").await;
    bob.put("/note/a/done", "bob's").await;
    let today = alice.post("/note/a").await.token();

    assert_eq!(
        alice.put(&action(&yesterday), "old form").await.problem(412)["code"],
        "stale_token"
    );
    assert_eq!(text_of(&store, "a"), "bob's");
    for malformed in ["", "x", "%3C%3E"] {
        let answer = alice.put(&format!("/note/a?lock_token={malformed}"), "x").await;
        assert_eq!(answer.problem(400)["code"], "bad_lock_token", "{malformed:?}");
    }
    assert_eq!(alice.put(&action(&today), "new form").await.status, 200);
}

#[actix_web::test]
async fn what_is_said_twice_is_said_in_the_same_way() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let opened = alice.post("/note/a").await;
    let (token, shown) = (opened.token(), version(&opened));
    let put = async |address: &str, header: (&'static str, &str)| {
        let uri = format!("/note/a?{address}");
        let put = alice.request(Method::PUT, &uri).insert_header(header);
        alice.send(put.set_json(serde_json::json!({ "text": "old" }))).await
    };
    let bare = &token[1..token.len() - 1];
    for (address, header) in [
        (format!("lock_token={bare}"), ("lock-token", &*token)),
        (format!("version={shown}&version={shown}"), ("if-match", &*format!("\"{shown}\""))),
        (format!("tab={ONE}"), ("doclock-tab", ONE)),
    ] {
        assert_eq!(put(&address, header).await.status, 200, "{address}");
    }
    for (address, header) in [
        (format!("lock_token={ONE}"), ("lock-token", &*token)),
        (format!("version={OTHER}"), ("if-match", &*format!("\"{shown}\""))),
        (format!("version={shown}"), ("if-match", "*")),
        (format!("version={shown}&version={OTHER}"), ("accept", "*/*")),
        (format!("tab={ONE}"), ("doclock-tab", TWO)),
    ] {
        assert_eq!(put(&address, header).await.problem(400)["code"], "said_twice", "{address}");
    }
}

#[actix_web::test]
async fn the_tab_of_a_form_may_stand_in_its_address() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let opened = alice.post(&format!("/note/a?tab={ONE}")).await;
    assert_eq!(opened.status, 200);
    let elsewhere = alice.post(&format!("/note/a?tab={TWO}")).await;
    assert_eq!(elsewhere.problem(423)["code"], "mine_elsewhere");
    // The application's own parameter of that name is no tab.
    assert_eq!(alice.post("/note/a?tab=details").await.token(), opened.token());
}

/// Otherwise a save from another tab would pass for one of the page that has the lock.
#[actix_web::test]
async fn a_malformed_tab_is_refused_wherever_it_can_be_nothing_else() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post(&format!("/note/a?tab={ONE}")).await.token();
    let token = &token[1..token.len() - 1];
    let put =
        |uri: &str| alice.request(Method::PUT, uri).set_json(serde_json::json!({ "text": "x" }));
    for tab in ["xx", "", "1"] {
        for refused in [
            put("/note/a").insert_header(("doclock-tab", tab)),
            put(&format!("/note/a?tab={tab}&lock_token={token}")),
            put(&format!("/note/a?tab={ONE}&tab={tab}&version={OTHER}")),
            alice.request(Method::GET, &format!("/locks/note/a?tab={tab}")),
            alice.request(Method::GET, &format!("/locks/events?tab={tab}")),
            alice.request(Method::POST, &format!("/locks/note/a/release?tab={tab}")),
            alice
                .request(Method::POST, "/locks/note/a/release")
                .set_json(serde_json::json!({ "tab": tab, "page": TWO })),
        ] {
            assert_eq!(alice.send(refused).await.problem(400)["code"], "bad_tab", "{tab:?}");
        }
    }
    assert_eq!(alice.send(put(&format!("/note/a?tab={ONE}&lock_token={token}"))).await.status, 200);
}

#[actix_web::test]
async fn the_lock_api_says_whether_the_page_shows_the_document_of_now() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let shown = version(&alice.get("/note/a/view").await);
    alice.delete("/locks/note/a").await;
    let lock = async |version: Value| {
        alice.post_json("/locks/note/a", serde_json::json!({ "version": version })).await
    };
    let taken = lock(shown.clone().into()).await;
    assert_eq!(taken.status, 201);
    assert_eq!(
        (&taken.json()["current"], &taken.json()["version"]),
        (&true.into(), &shown.clone().into())
    );
    assert_eq!(version(&taken), shown);

    written_past_the_lock(&store, "foreign");
    let confirmed = lock(shown.into()).await;
    assert_eq!(confirmed.status, 200);
    let now = version(&alice.get("/note/a/view").await);
    assert_eq!(
        (&confirmed.json()["current"], &confirmed.json()["version"]),
        (&false.into(), &now.into())
    );
    let without = alice.post_json("/locks/note/a", serde_json::json!({})).await;
    assert_eq!(without.json().get("version"), None);
    for malformed in ["".into(), "x".into(), 5.into(), "*".into()] {
        assert_eq!(lock(malformed).await.status, 400);
    }
}

#[actix_web::test]
async fn a_reader_asks_whether_its_version_is_still_the_stored_one() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let shown = version(&alice.get("/note/a/view").await);
    alice.delete("/locks/note/a").await;
    let ask = async |query: &str| alice.get(&format!("/locks/note/a{query}")).await;
    let says = async |query: &str| {
        let state = ask(query).await.json();
        assert_eq!(state["state"], "free");
        ["version", "current"].map(|name| state.get(name).cloned())
    };
    assert_eq!(says("").await, [None, None]);
    let query = format!("?shown={shown}");
    assert_eq!(says(&query).await, [Some(shown.clone().into()), Some(true.into())]);
    written_past_the_lock(&store, "foreign");
    let [now, is_current] = says(&query).await;
    assert_eq!(is_current, Some(false.into()));
    assert!(now.is_some_and(|now| now != shown));
    for malformed in ["?shown=", "?shown=x", &format!("{query}&shown={shown}")] {
        assert_eq!(ask(malformed).await.status, 400, "{malformed}");
    }
    let missing = alice.get(&format!("/locks/note/nothing{query}")).await.json();
    assert_eq!((&missing["version"], &missing["current"]), (&Value::Null, &false.into()));
}

/// A page that was left by a submit asks what became of it. Nothing is renewed by that, and nobody else learns it.
#[actix_web::test]
async fn a_page_learns_by_the_lock_that_it_named_whether_its_form_was_saved() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let opened = alice.post("/note/a").await;
    let (token, shown) = (opened.token(), version(&opened));
    let token = &token[10..token.len() - 1];
    let form = format!("/note/a/done?lock_token={token}&version={shown}");
    let asks = async |browser: &Browser<'_, _>, shown: &str, token: &str| {
        let answer = browser.get(&format!("/locks/note/a?shown={shown}&saved_under={token}")).await;
        let said = answer.json();
        ["saved", "version"].map(|name| said.get(name).cloned())
    };
    let stored = Some(Value::from(shown.clone()));
    assert_eq!(asks(&alice, &shown, token).await, [None, stored], "not sent yet");
    alice.put(&form, "typed").await;
    let saved = Some(Value::from(version(&alice.get("/note/a/view").await)));
    assert_eq!(asks(&alice, &shown, token).await, [saved.clone(), saved.clone()]);
    written_past_the_lock(&store, "foreign");
    let now = Some(Value::from(version(&alice.get("/note/a/view").await)));
    assert_eq!(
        asks(&alice, &shown, token).await,
        [saved.clone(), now.clone()],
        "and then replaced"
    );
    let of_save = saved.as_ref().and_then(Value::as_str).unwrap();
    assert_eq!(asks(&alice, of_save, token).await, [None, now.clone()], "a form after the save");
    assert_eq!(asks(&alice, &shown, ONE).await, [None, now.clone()], "another lock");
    let bob = Browser::logged_in(&app, "bob").await;
    bob.post("/note/b").await.token();
    assert_eq!(asks(&bob, &shown, token).await, [None, now], "another person");
    let uri = format!("/locks/note/a?shown={shown}&saved_under=x");
    assert_eq!(alice.get(&uri).await.status, 400);
}

#[actix_web::test]
async fn an_etag_of_the_handler_stays() {
    async fn edit(_: LockedDoc<Note>) -> impl Responder {
        HttpResponse::Ok().insert_header(("etag", "\"mine\"")).finish()
    }
    let (locks, _) = embedded().await;
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new().wrap(locks.session(session)).route("/note/{id}", web::post().to(edit));
    let app = test::init_service(app).await;
    let answer = Browser::new(&app).post("/note/a").await;
    assert_eq!(answer.header("etag"), Some("\"mine\""));
}

/// A shared cache would show the document, or give the token of its lock, to somebody else.
#[actix_web::test]
async fn an_answer_with_a_version_or_a_token_is_private_unless_the_handler_says_more() {
    async fn show(locks: SessionLocks) -> Result<HttpResponse, LockError> {
        let note = locks.load::<Note>("a".to_owned()).await?;
        Ok(HttpResponse::Ok().insert_header(("cache-control", "no-store")).body(note.text))
    }
    async fn load(locks: SessionLocks) -> Result<String, LockError> {
        Ok(locks.load::<Note>("a".to_owned()).await?.text)
    }
    let (locks, _) = embedded().await;
    let session = SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(locks.session(session.cookie_secure(false).build()).identify(person))
        .route("/show", web::get().to(show))
        .route("/load", web::get().to(load))
        .configure(routes);
    let app = test::init_service(app).await;
    let alice = Browser::logged_in(&app, "alice").await;
    assert_eq!(alice.get("/plain").await.header("cache-control"), None);
    let answers =
        [alice.get("/load").await, alice.post("/note/a").await, alice.post("/both").await];
    let [loaded, locked, several] = answers.each_ref().map(|it| it.header("cache-control"));
    assert_eq!([loaded, locked, several], [Some("private"), Some("private"), None]);
    assert_eq!(alice.post("/create/new").await.header("cache-control"), Some("private"));
    assert_eq!(alice.get("/show").await.header("cache-control"), Some("no-store"));
    assert_eq!(alice.post("/locks/note/a").await.header("cache-control"), Some("no-store"));
}

/// The access policy refuses a document that is there like one that was never there.
#[actix_web::test]
async fn a_document_that_a_page_has_shown_and_that_is_gone_is_called_deleted() {
    let (locks, store) = embedded().await;
    let app = serve_with(&locks, |wrap| {
        wrap.access_policy(async |_: Option<Actor>, key: LockKey, _| key.id().to_string() != "b")
    })
    .await;
    let alice = Browser::logged_in(&app, "alice").await;
    let opened = alice.post("/note/a").await;
    let (token, shown) = (opened.token(), version(&opened));
    let body = serde_json::json!({ "version": shown });
    assert!(store.remove(&key("a")));
    let says = |answer: Answer| {
        let problem = answer.problem(404);
        assert_eq!(problem["code"], "not_found");
        (problem.get("deleted").cloned(), problem["detail"].as_str().unwrap().to_owned())
    };
    let deleted = (Some(true.into()), "note/a has been deleted".to_owned());
    assert_eq!(says(alice.with_token(Method::PUT, "/note/a", &token).await), deleted);
    assert_eq!(says(alice.post(&format!("/note/a?version={shown}")).await), deleted);
    assert_eq!(says(alice.post_json("/locks/note/a", body.clone()).await), deleted);
    assert_eq!(says(alice.post("/note/a").await).0, None, "nothing says that it ever was");
    assert_eq!(says(alice.post("/locks/note/a").await).0, None);
    let hidden = says(alice.post_json("/locks/note/b", body).await);
    assert_eq!(hidden, (None, "there is no document note/b".to_owned()));
    assert_eq!(says(alice.post(&format!("/note/b?version={shown}")).await), hidden);
    assert_eq!(says(alice.with_token(Method::PUT, "/note/b", &token).await), hidden);
}

/// Both requests have loaded the document before one of them writes.
#[actix_web::test]
async fn of_two_tabs_that_show_the_same_version_only_the_first_saves() {
    async fn write(
        mut note: HeldDoc<Note>,
        path: web::Path<(String, String)>,
        form: web::Json<Form>,
        both: web::Data<Barrier>,
    ) -> Result<impl Responder, LockError> {
        both.wait().await;
        note.text = form.into_inner().text;
        match &*path.1 {
            "save" => note.save().await?,
            "replace" => note.replace().await?,
            _ => return note.delete().await.map(|()| HttpResponse::NoContent().finish()),
        }
        Ok(HttpResponse::Ok().json(&*note))
    }
    for how in ["save", "replace", "delete"] {
        let (locks, store) = embedded().await;
        let session =
            SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
        let app = App::new()
            .app_data(web::Data::new(Barrier::new(2)))
            .wrap(locks.session(session.cookie_secure(false).build()).identify(person))
            .route("/write/{id}/{how}", web::put().to(write))
            .configure(routes);
        let app = test::init_service(app).await;
        let alice = Browser::logged_in(&app, "alice").await;
        let shown = version(&alice.post("/note/a").await);
        let other_tab = alice.copy();
        let uri = |how: &str| format!("/write/a/{how}?version={shown}");
        let (first, second) = (uri("save"), uri(how));
        let (one, other) =
            tokio::join!(alice.put(&first, "first"), other_tab.put(&second, "second"));
        let (saved, refused) = if one.status == 412 { (other, one) } else { (one, other) };
        assert!(saved.status.is_success(), "{how}: {}", saved.text());
        if saved.status == 204 {
            assert_eq!(refused.problem(404)["code"], "not_found", "{how}");
            continue;
        }
        assert_eq!(refused.problem(412)["code"], "stale_copy", "{how}");
        assert_eq!(text_of(&store, "a"), saved.json()["text"].as_str().unwrap(), "{how}");
        assert_eq!(refused.json()["version"], version(&saved), "{how}");
        assert_eq!(refused.header("etag"), None, "{how}");
    }
}

/// A write of the application's own, by operators.
#[actix_web::test]
async fn an_update_by_the_application_is_of_the_named_version_too() {
    use crate::rig::{
        self,
        app::{App as Server, WorkItem},
        mongod,
    };
    use actix_doclock::MongoStore;
    use mongodb::bson::doc;

    async fn update(
        item: HeldDoc<WorkItem>,
        how: web::Path<(String, String)>,
        store: web::Data<MongoStore>,
    ) -> Result<impl Responder, LockError> {
        let items = store.database().collection::<WorkItem>(WorkItem::COLLECTION);
        let set = |title: &str| doc! { "$set": { "title": title } };
        if how.1 == "beside-another-program" {
            items.update_one(doc! {}, set("foreign")).await.unwrap();
        }
        if how.1 == "confirmed-beside-another-program" {
            items.update_one(doc! {}, set("foreign again")).await.unwrap();
            let mut session = store.database().client().start_session().await.unwrap();
            session.start_transaction().await.unwrap();
            items.update_one(doc! {}, set("one")).session(&mut session).await.unwrap();
            let confirmed = store.confirm_in(&mut session, &[item.held()]).await;
            session.abort_transaction().await.unwrap();
            confirmed?;
            return Ok(HttpResponse::Ok().finish());
        }
        for title in ["one", "two"] {
            let _: WorkItem = store.update(&item.held(), set(title)).await?;
        }
        Ok(HttpResponse::Ok().finish())
    }
    async fn open(_: LockedDoc<WorkItem>) -> impl Responder {
        HttpResponse::NoContent()
    }
    for uri in [mongod::shared_replica_set().await.uri(), &mongod::shared_standalone().await.uri()]
    {
        let database = rig::fresh_database(uri).await;
        let server = Server::on(&database).await;
        let items = database.collection::<WorkItem>(WorkItem::COLLECTION);
        items.insert_one(WorkItem { id: "a".into(), title: "old".into() }).await.unwrap();
        let session =
            SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
        let app = App::new()
            .app_data(web::Data::new(server.store.clone()))
            .wrap(server.locks.session(session.cookie_secure(false).build()))
            .route("/item/{id}", web::post().to(open))
            .route("/item/{id}/{how}", web::put().to(update));
        let app = test::init_service(app).await;
        let alice = Browser::new(&app);
        let shown = version(&alice.post("/item/a").await);
        let put = async |how: &str, shown: &str| {
            alice.put(&format!("/item/a/{how}?version={shown}"), "").await
        };
        let updated = put("alone", &shown).await;
        assert_eq!(updated.status, 200, "{}", updated.text());
        let now = version(&updated);
        assert_eq!(version(&alice.post("/item/a").await), now, "twice, each onto the one before");
        let refused = put("beside-another-program", &now).await;
        assert_eq!(refused.problem(412)["code"], "stale_copy");
        let stored = items.find_one(doc! {}).await.unwrap().unwrap();
        assert_eq!(stored.title, "foreign", "nothing was written");
        if uri == mongod::shared_replica_set().await.uri() {
            let now = version(&alice.post("/item/a").await);
            let refused = put("confirmed-beside-another-program", &now).await;
            assert_eq!(refused.problem(412)["code"], "stale_copy");
        }
    }
}

#[actix_web::test]
async fn an_answer_about_several_documents_carries_no_version() {
    async fn both(locks: SessionLocks) -> Result<impl Responder, LockError> {
        let _a = locks.open::<Note>("a".to_owned()).await?;
        let _b = locks.open::<Note>("b".to_owned()).await?;
        let _again = locks.load::<Note>("a".to_owned()).await?;
        Ok(HttpResponse::Ok())
    }
    let (locks, _) = embedded().await;
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new().wrap(locks.session(session)).route("/open", web::post().to(both));
    let app = test::init_service(app).await;
    let answer = Browser::new(&app).post("/open").await;
    assert_eq!((answer.status.as_u16(), answer.header("etag")), (200, None));
}

/// A page opens its stream of events again by itself, with its tab in the address, when its person has long left.
#[actix_web::test]
async fn a_tab_in_the_address_of_a_get_is_no_sign_of_life() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post(&format!("/note/a?tab={ONE}")).await.token();
    store.age(&key("a"), Duration::from_secs(50));
    // On a server that has renewed nothing lately, so that a renewal is due.
    let other = LockManager::builder(store.clone()).ttl(locks.ttl()).build().await.unwrap();
    other.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&other).await;
    let page = Browser { app: &app, jar: alice.jar.clone() };
    let left = async || {
        other.shutdown().await;
        other.inspect(&key("a")).await.unwrap().unwrap().expires_in().as_secs()
    };
    page.get(&format!("/plain?tab={ONE}")).await;
    assert!(left().await <= 10);
    page.post(&format!("/locks/heartbeat?tab={ONE}")).await;
    assert!(left().await > 10);
}

#[actix_web::test]
async fn a_claim_for_a_copy_that_has_changed_costs_no_other_lock() {
    let (locks, _) = embedded().await;
    let app = serve_with(&locks, |session| session).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let again = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    let take_over = serde_json::json!({ "take_over": true });
    for (address, status) in [(format!("version={OTHER}"), 412), ("version=x".to_owned(), 400)] {
        let refused = again.post_json(&format!("/locks/note/a?{address}"), take_over.clone()).await;
        refused.problem(status);
        assert_eq!(alice.post("/note/a").await.token(), token, "{address}");
    }
    // The shared lock that would become exclusive.
    let shared = alice.post("/note/b/read").await.token();
    for lock_token in [Some(&*shared), None] {
        let mut request = alice.request(Method::POST, &format!("/note/b?version={OTHER}"));
        if let Some(token) = lock_token {
            request = request.insert_header(("lock-token", token));
        }
        assert_eq!(alice.send(request).await.problem(412)["code"], "stale_copy");
        assert_eq!(alice.post("/note/b/read").await.token(), shared, "{lock_token:?}");
    }
}

#[actix_web::test]
async fn a_version_for_many_documents_and_a_contradictory_release_are_refused() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let opened = alice.post("/note/a").await;
    let (token, shown) = (opened.token(), version(&opened));
    let keys = serde_json::json!({ "keys": ["note/a", "note/b"] });
    let many = alice.post_json(&format!("/locks?version={shown}"), keys).await;
    assert_eq!(many.problem(400)["code"], "bad_version");
    let release = format!("/locks/note/a/release?lock_token={ONE}");
    let contradictory = alice.with_token(Method::POST, &release, &token).await;
    assert_eq!(contradictory.problem(400)["code"], "said_twice");
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
}
