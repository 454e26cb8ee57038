//! However a session ends, the hook is told of it, at least once.

use actix_session_mongo::prepare;

use super::*;

/// So that another server takes a session over that the hook has failed for.
const LEASE: Duration = Duration::from_secs(30);

#[actix_web::test]
async fn each_end_is_told_with_its_reason_and_the_id() {
    let server = Server::on(&database().await).await;
    let deleted = server.session("alice", "1").await;
    server.session("bob", "2").await;
    server.session("carol", "3").await;
    // Nothing tells whose session it was.
    server.sessions.save(State::from([("x".to_owned(), "1".to_owned())]), &DAY).await.unwrap();
    server.sessions.revoke("2").await.unwrap();
    assert_eq!(server.told(), [("2".to_owned(), EndReason::Revoked)], "by the end of the call");
    server.sessions.delete(&deleted).await.unwrap();
    age(&server.database, doc! {}, TWO_DAYS).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 4);
    let mut told = server.told();
    told.sort_by_key(|(id, _)| id.clone());
    told.dedup();
    let expected = [
        ("1".to_owned(), EndReason::LoggedOut),
        ("2".to_owned(), EndReason::Revoked),
        ("3".to_owned(), EndReason::Expired),
    ];
    assert_eq!(told, expected);
    assert_eq!(server.sessions.sweep().await.unwrap(), 0);
}

#[actix_web::test]
async fn an_end_that_the_hook_refused_is_told_again_by_any_server() {
    let database = database().await;
    let (one, other) = (Server::on(&database).await, Server::on(&database).await);
    one.session("alice", "1").await;
    one.session("bob", "2").await;
    age(&database, doc! {}, TWO_DAYS).await;
    *one.hook.failures.lock().unwrap() = 1;
    one.sessions.sweep().await.unwrap_err();
    assert_eq!(one.told().len(), 1, "one failure does not hold up the other session");
    assert_eq!(other.sessions.sweep().await.unwrap(), 0, "not at once");
    age(&database, doc! { "due": { "$exists": true } }, LEASE).await;
    assert_eq!(other.sessions.sweep().await.unwrap(), 1);
    let told = [one.told(), other.told()].concat();
    assert!(told.contains(&("1".to_owned(), EndReason::Expired)));
    assert!(told.contains(&("2".to_owned(), EndReason::Expired)));
}

#[actix_web::test]
async fn a_revocation_fails_with_the_hook_and_is_completed_by_a_sweep() {
    let server = Server::on(&database().await).await;
    let key = server.session("alice", "1").await;
    *server.hook.failures.lock().unwrap() = 1;
    let error = server.sessions.revoke("1").await.unwrap_err();
    assert!(!error.is_outage() && error.to_string().contains("on purpose"), "{error}");
    assert_eq!(server.load(&key).await, None, "the session has ended nevertheless");
    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
    assert_eq!(server.told(), [("1".to_owned(), EndReason::Revoked)]);
}

#[actix_web::test]
async fn a_renewed_session_has_not_ended() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/renew").await;
    age(&server.database, doc! { "ended": { "$exists": true } }, TWO_DAYS).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 1, "the former key");
    assert_eq!(server.told(), []);
    alice.post("/purge").await;
    age(&server.database, doc! { "due": { "$exists": true } }, TWO_DAYS).await;
    server.sessions.sweep().await.unwrap();
    assert_eq!(server.told().len(), 1);
}

#[actix_web::test]
async fn a_session_that_is_cleared_has_ended_although_its_key_goes_on() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    for set in [json!({}), json!({ "name": "bob", ID: "another" })] {
        let alice = Browser::logged_in(&app, "alice").await;
        let before = server.told().len();
        alice.post_json("/change", json!({ "clear": true, "set": set })).await;
        server.sessions.sweep().await.unwrap();
        assert_eq!(server.told().len(), before, "not before its time of grace");
        age(&server.database, doc! { "ended": { "$exists": true } }, TWO_DAYS).await;
        server.sessions.sweep().await.unwrap();
        let told = server.told();
        assert_eq!(told.len(), before + 1, "{told:?}");
        assert_eq!(told[before].1, EndReason::LoggedOut);
    }
}

#[actix_web::test]
async fn a_logout_that_comes_after_a_revocation_is_not_told() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = browser_with(&app, &server.session("alice", "1").await);
    let clear = alice.post_json("/change", json!({ "wait": true, "clear": true }));
    let (_, revoked) = server.while_it_waits(clear, server.sessions.revoke("1")).await;
    revoked.unwrap();
    age(&server.database, doc! {}, TWO_DAYS).await;
    server.sessions.sweep().await.unwrap();
    assert!(server.told().iter().all(|(_, why)| *why == EndReason::Revoked), "{:?}", server.told());
}

/// The hook takes longer than the time for which a sweep has its sessions for itself.
#[actix_web::test]
async fn an_end_that_was_told_is_finished_although_another_sweep_has_taken_it_too() {
    let database = database().await;
    let (one, other) = (Server::on(&database).await, Server::on(&database).await);
    one.session("alice", "1").await;
    age(&database, doc! {}, TWO_DAYS).await;
    *one.hook.waits.lock().unwrap() = true;
    *other.hook.failures.lock().unwrap() = 1;
    let later = async {
        eventually("it is taken", async || {
            let taken = doc! { "by": { "$exists": true } };
            records(&database).count_documents(taken).await.unwrap() == 1
        })
        .await;
        age(&database, doc! {}, LEASE).await;
        other.sessions.sweep().await.unwrap_err();
        *one.hook.waits.lock().unwrap() = false;
    };
    let (swept, ()) = join!(one.sessions.sweep(), later);
    assert_eq!(swept.unwrap(), 1);
    age(&database, doc! {}, TWO_DAYS).await;
    assert_eq!(other.sessions.sweep().await.unwrap(), 0);
}

/// As after a failover from a server whose clock was ahead.
#[actix_web::test]
async fn a_session_that_turns_out_to_be_live_during_a_sweep_is_not_ended() {
    let server = Server::on(&database().await).await;
    let key = server.session("alice", "1").await;
    age(&server.database, doc! {}, TWO_DAYS).await;
    *server.hook.extends.lock().unwrap() = Some(records(&server.database));
    server.sessions.sweep().await.unwrap();
    assert_eq!(server.told().len(), 1, "it was taken for ended");
    assert_eq!(server.load(&key).await, Some(state_of("alice", "1")));
}

#[actix_web::test]
async fn an_end_is_told_without_a_request_and_without_a_call() {
    let often =
        |sessions: MongoSessionStoreBuilder| sessions.sweep_interval(Duration::from_millis(20));
    let server = Server::with(&database().await, often).await;
    server.session("alice", "1").await;
    age(&server.database, doc! {}, TWO_DAYS).await;
    eventually("it is told", async || !server.told().is_empty()).await;
    assert_eq!(server.told(), [("1".to_owned(), EndReason::Expired)]);
}

#[actix_web::test]
async fn a_request_under_way_does_not_revive_an_ended_session_and_gets_no_cookie() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let late = || json!({ "late": 1 });
    let somebody = |name: Value| json!({ "name": name });
    for (set, renew) in [
        (late(), false),
        (late(), true),
        (somebody(json!(null)), true),
        (somebody(json!("bob")), true),
    ] {
        let alice = Browser::logged_in(&app, "alice").await;
        let key = key_in(&alice);
        let request = json!({ "wait": true, "set": set, "renew": renew });
        let request = alice.post_json("/change", request);
        let (answer, ended) = server.while_it_waits(request, server.sessions.delete(&key)).await;
        ended.unwrap();
        assert_eq!((answer.status, answer.header("set-cookie")), (StatusCode::NO_CONTENT, None));
        assert_eq!(server.load(&key).await, None);
        assert_eq!(alice.get("/state").await.json(), json!({}));
    }
}

/// A double click on "log in".
#[actix_web::test]
async fn a_login_that_is_sent_twice_logs_in() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let visitor = Browser::new(&app);
    visitor.post("/theme").await;
    let login = json!({ "wait": true, "set": { "name": "alice" }, "renew": true });
    let both = join!(
        visitor.post_json("/change", login.clone()),
        visitor.post_json("/change", login),
        async {
            server.pause.until_there_are(2).await;
            server.pause.let_go(2);
        }
    );
    for answer in [both.0, both.1] {
        assert_eq!(answer.status, StatusCode::NO_CONTENT);
        assert!(answer.header("set-cookie").is_some());
    }
    let state = visitor.get("/state").await.json();
    assert_eq!(state, json!({ "name": "alice", "theme": "dark" }));
}

#[actix_web::test]
async fn the_collection_can_be_prepared_before_and_again() {
    let database = database().await;
    for _ in 0..2 {
        prepare(&database, "session").await.unwrap();
    }
    Server::on(&database).await;
    let names = records(&database).list_index_names().await.unwrap();
    assert_eq!(names, ["_id_", "expires_1", "due_1", "by_1", "aid_1", "user_1"]);
}

#[actix_web::test]
async fn a_collection_of_somebody_else_is_refused_and_gets_no_index() {
    let database = database().await;
    let offers: Vec<_> =
        (0..50).map(|n| doc! { "_id": n, "expires": 1, "state": "open" }).collect();
    let locked = doc! { "_id": "a" };
    database.collection::<Document>("workitem.lock").insert_one(&locked).await.unwrap();
    database.collection::<Document>("offer").insert_many(&offers).await.unwrap();
    for name in ["offer", "workitem", "workitem.lock", "doclock.ended"] {
        let built = MongoSessionStore::builder(&database).collection(name).build().await;
        let error = built.unwrap_err();
        assert!(!error.is_outage() && error.to_string().contains(name), "{error}");
        let records = database.collection::<Document>(name);
        let indexes = records.list_index_names().await.unwrap_or_default();
        assert!(indexes.len() <= 1, "{name}: {indexes:?}");
    }
}

#[actix_web::test]
async fn sessions_and_notes_of_sessions_are_adopted_without_their_indexes() {
    let database = database().await;
    let server = Server::on(&database).await;
    let session = server.session("alice", "one").await;
    for _ in 0..2 {
        records(&database).drop_indexes().await.unwrap();
        records(&database).insert_one(doc! { "odd": true }).await.unwrap();
        prepare(&database, "session").await.unwrap();
        assert_eq!(records(&database).list_index_names().await.unwrap().len(), 6);
        // Then only the notes are left.
        server.sessions.delete(&session).await.unwrap();
    }
    records(&database).drop().await.unwrap();
    server.sessions.revoke("one").await.unwrap();
    prepare(&database, "session").await.unwrap();
}
