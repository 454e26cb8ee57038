//! Unusual records in the collection: edited by hand, or written by another program.

use mongodb::bson::{Bson, DateTime};
use proptest::prelude::any;

use super::*;
use crate::rig::{
    log::log_lines,
    random::{check, fields},
};

/// States that no session can have.
fn broken_states() -> Vec<Bson> {
    vec![
        Bson::Null,
        "dark".into(),
        7.into(),
        doc! { "k": "theme", "v": "\"dark\"" }.into(),
        vec![Bson::from("theme")].into(),
        vec![Bson::from(doc! { "k": "theme" })].into(),
        vec![Bson::from(doc! { "k": 1, "v": "\"dark\"" })].into(),
        vec![Bson::from(doc! { "k": "theme", "v": ["dark"] })].into(),
        vec![Bson::from(vec![Bson::from("theme")])].into(),
    ]
}

#[actix_web::test]
async fn a_session_with_a_broken_state_is_over_and_logged_once() {
    log_lines();
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    let namespace = records(&server.database).namespace().to_string();
    let logged = || {
        let lines = log_lines().lock().unwrap();
        lines.iter().filter(|line| line.contains(&namespace)).count()
    };
    for (n, state) in broken_states().into_iter().enumerate() {
        let (session, bob) = server.session("bob", "b").await;
        let breaking = doc! { "$set": { "state": state.clone() } };
        records(&server.database).update_one(doc! { "user": "bob" }, breaking).await.unwrap();
        let browser = browser_with(&app, &session);
        for _ in 0..3 {
            assert_eq!(browser.get("/state").await.json(), json!({}), "{state}");
        }
        assert_eq!(logged(), n + 1, "{state}");
        // Its locks go with it.
        assert_eq!(server.sessions.sweep().await.unwrap(), 1);
        assert!(!server.is_locked("b").await);
        assert!(server.told().await.contains(&(bob, EndReason::Expired)));
    }
    assert_eq!(alice.put("/note/a", "new").await.token(), token);
}

/// The request had loaded the session before its state was broken.
#[actix_web::test]
async fn a_broken_state_does_not_break_the_request_that_writes_to_it() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    for state in broken_states() {
        let alice = Browser::logged_in(&app, "alice").await;
        let break_it = async {
            let breaking = doc! { "$set": { "state": state.clone() } };
            records(&server.database).update_many(doc! { "user": "alice" }, breaking).await.unwrap()
        };
        let change = alice.post_json("/change", json!({ "wait": true, "set": { "theme": 1 } }));
        let (answer, _) = server.while_it_waits(change, break_it).await;
        assert_eq!(answer.status, 204, "{state}");
        assert_eq!(alice.get("/state").await.status, 200, "{state}");
        records(&server.database).delete_many(doc! {}).await.unwrap();
    }
}

#[actix_web::test]
async fn foreign_records_are_handled_once_and_do_not_affect_others() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    let (_, bob) = server.session("bob", "b").await;
    age(&server.database, doc! { "user": "bob" }, TWO_DAYS).await;

    let past = DateTime::from_millis(1_000);
    let far_future = DateTime::from_millis(i64::MAX);
    let strange = vec![
        doc! { "_id": 7, "due": past },
        doc! { "_id": Bson::Null, "due": past },
        doc! { "_id": { "a": [1, { "b": "c" }] }, "due": past },
        doc! { "_id": f64::NAN, "due": past },
        doc! { "_id": past, "due": past },
        doc! { "_id": true, "due": past, "aid": 7, "user": { "name": "alice" } },
        doc! { "_id": "text", "due": past, "aid": ["a"], "user": ["alice"], "by": 7 },
        doc! { "_id": "reason", "due": past, "ended": 7, "state": "dark", "expires": "soon" },
        doc! { "_id": "old", "due": DateTime::from_millis(i64::MIN), "expires": past },
        doc! { "_id": "list", "due": [past], "expires": [past] },
        doc! { "_id": "never due", "due": far_future, "expires": past },
        doc! { "_id": "no date", "due": "soon", "expires": 7, "user": "alice" },
        doc! { "_id": "$$ROOT", "user": { "$gt": "" }, "aid": { "$gt": "" }, "state": [[[]]] },
    ];
    let records = records(&server.database);
    records.insert_many(&strange).await.unwrap();
    let swept = timeout(NO_DEADLINE, server.sessions.sweep()).await.expect("it ends").unwrap();
    assert!(swept >= 10, "{swept}");
    assert_eq!(server.sessions.sweep().await.unwrap(), 0, "once");
    assert_eq!(records.count_documents(doc! {}).await.unwrap(), 15, "nothing is removed");

    assert!(!server.is_locked("b").await, "the due session among them was swept");
    assert!(server.told().await.contains(&(bob, EndReason::Expired)));
    assert_eq!(alice.put("/note/a", "new").await.token(), token);
    assert_eq!(server.sessions.list_of("alice").await.unwrap().len(), 1);
    server.sessions.revoke_all_of("alice").await.unwrap();
    assert_eq!(alice.get("/state").await.json(), json!({}));
}

/// All fields of the records of web sessions.
const FIELDS: &[&str] =
    &["aid", "user", "state", "created", "seen", "until", "expires", "due", "by", "ended", "x"];

/// Each record replaces a session, or some of its fields, while a request of the session is under way.
#[test]
fn no_record_of_a_web_session_makes_a_verb_fail_or_hides_another_session() {
    let system = actix_web::rt::System::new();
    let server = system.block_on(async { Server::on(&database().await).await });
    let app = system.block_on(server.app());
    check("web sessions", 15, &(fields(FIELDS), any::<bool>()), |(stored, is_all)| {
        system.block_on(async {
            let (sessions, records) = (&server.sessions, records(&server.database));
            records.delete_many(doc! {}).await.unwrap();
            let (alice, eve) =
                (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "eve").await);
            let hers = doc! { "user": "eve" };
            let mut strange = records.find_one(hers.clone()).await.unwrap().expect("eve's");
            let id = strange.get("_id").cloned();
            if is_all {
                strange.clear();
            }
            strange.extend(stored);
            strange.insert("_id", id);
            let edit = async { records.replace_one(hers, &strange).await };
            let key = key_in(&eve);
            let change = json!({ "wait": true, "set": { "theme": 1 }, "remove": ["name"] });
            let (answer, edited) =
                server.while_it_waits(eve.post_json("/change", change), edit).await;
            assert_eq!(answer.status, 204);
            if edited.is_err() {
                return;
            }
            assert_eq!(eve.get("/state").await.status, 200);
            let sweep = async || timeout(NO_DEADLINE, sessions.sweep()).await.expect("it ends");
            sessions.update_ttl(&key, &DAY).await.expect("update_ttl");
            sessions.list_of("eve").await.expect("list_of");
            sweep().await.expect("sweep");
            server.load(&key).await;
            sessions.revoke_all_of("eve").await.expect("revoke_all_of");
            sessions.delete(&key).await.expect("delete");
            assert_eq!(server.load(&key).await, None, "a deleted session lets nobody in");
            sweep().await.expect("sweep");

            assert_eq!(alice.get("/state").await.json(), json!({ "name": "alice" }));
            sessions.revoke_all_of("alice").await.expect("revoke_all_of");
            assert_eq!(alice.get("/state").await.json(), json!({}));
        });
    });
}

/// An operator has changed the record, or a primary with a fast clock has been replaced.
#[actix_web::test]
async fn a_live_session_survives_an_early_sweep() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    let aid = server.holder("a").await;
    let early = doc! { "$set": { "due": DateTime::from_millis(1_000) } };
    records(&server.database).update_one(doc! {}, early).await.unwrap();
    timeout(NO_DEADLINE, server.sessions.sweep()).await.expect("it ends").unwrap();
    assert_eq!(alice.get("/state").await.json(), json!({ "name": "alice" }));
    assert_eq!(alice.put("/note/a", "new").await.token(), token);
    age(&server.database, doc! {}, TWO_DAYS).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 1, "once it has expired");
    assert_eq!(server.told().await, [(aid, EndReason::Expired)]);
}

#[actix_web::test]
async fn other_collection_names_keep_separate_sessions() {
    let database = database().await;
    let one = Server::on(&database).await;
    let sessions = |builder: MongoSessionStoreBuilder| builder.collection("other.sessions");
    let other = Server::with(&database, |locks| locks, sessions).await;
    let (session, _) = one.session("alice", "a").await;
    assert_eq!(other.load(&session).await, None);
    assert_eq!(other.sessions.revoke_all_of("alice").await.unwrap(), 0);
    assert!(one.load(&session).await.is_some());
}
