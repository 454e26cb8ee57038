//! The cost of a request in database commands, measured by the driver's own events.

use actix_doclock::MongoStore;

use super::*;
use crate::rig::{self, app::eventually, proxy::Proxy};

#[actix_web::test]
async fn a_request_sends_no_more_commands_than_necessary() {
    let server = rig::mongod::shared_replica_set().await;
    let (database, commands) = rig::counted_database(server.uri()).await;
    let note = Note { id: "a".to_owned(), text: "old".to_owned() };
    database.collection::<Note>(Note::COLLECTION).insert_one(&note).await.unwrap();
    let locks = LockManager::builder(MongoStore::new(&database)).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    commands.take();
    let sent = async || {
        locks.shutdown().await;
        commands.take()
    };

    let alice = Browser::logged_in(&app, "alice").await;
    let bob = Browser::logged_in(&app, "bob").await;
    Browser::new(&app).get("/plain").await;
    alice.get("/plain").await;
    assert!(sent().await.is_empty(), "a request that locks nothing sends nothing");

    alice.post("/note/a").await.token();
    // The document and the tombstone are read at the same time, so there are two round trips.
    assert_eq!(sent().await, ["findAndModify", "find", "find"], "a fresh lock");
    alice.post("/note/a").await.token();
    assert_eq!(sent().await, ["findAndModify", "find"], "a document that the session holds");
    bob.post("/note/a").await.problem(423);
    assert_eq!(sent().await, ["findAndModify"], "a refusal, with its holder");
    alice.get("/plain").await;
    assert!(sent().await.is_empty(), "nothing is due for renewal");

    alice.put("/note/a", "new").await;
    let confirm_load_save = ["find", "find", "update", "update", "commitTransaction"];
    assert_eq!(sent().await, confirm_load_save);
    alice.put("/note/a/done", "newer").await;
    assert_eq!(
        sent().await.split_last().unwrap(),
        (&"delete".into(), &confirm_load_save.map(Into::into)[..])
    );

    alice.post("/purge").await;
    let end = ["update", "find", "delete", "findAndModify"];
    assert_eq!(sent().await, end, "tombstone, names, locks; it may be announced");
}

/// A session that was told of an acquisition had it before, so no other session can have written in
/// between.
#[actix_web::test]
async fn a_named_acquisition_is_confirmed_and_loaded_at_the_same_time() {
    let server = rig::mongod::local_replica_set().await;
    let proxy = Proxy::start(server.port());
    let database = rig::fresh_database(&proxy.uri()).await;
    let note = Note { id: "a".to_owned(), text: "old".to_owned() };
    database.collection::<Note>(Note::COLLECTION).insert_one(&note).await.unwrap();
    let locks = LockManager::builder(MongoStore::new(&database)).without_reaper();
    let locks = locks.deadline(Duration::from_secs(60)).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    for method in [Method::POST, Method::PUT] {
        let before = proxy.passed("find");
        proxy.hold_request("find");
        let answer = alice.with_token(method.clone(), "/note/a", &token);
        let (answer, ()) = tokio::join!(answer, async {
            eventually("the other query", async || proxy.passed("find") > before).await;
            proxy.let_go();
        });
        assert_eq!(answer.token(), token, "{method}");
        assert_eq!(proxy.passed("find"), before + 2, "{method}");
    }
}

/// Whatever a page does: a key that hangs, or a timer out of control.
#[actix_web::test]
async fn a_thousand_heartbeats_of_a_client_cost_at_most_one_write() {
    let server = rig::mongod::shared_replica_set().await;
    let (database, commands) = rig::counted_database(server.uri()).await;
    let note = Note { id: "a".to_owned(), text: "old".to_owned() };
    database.collection::<Note>(Note::COLLECTION).insert_one(&note).await.unwrap();
    let locks = LockManager::builder(MongoStore::new(&database)).without_reaper();
    // So long that a third of it does not pass in the meantime.
    let locks = locks.ttl(Duration::from_secs(3_600)).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/locks/note/a").await.json()["token"].clone();
    commands.take();
    for _ in 0..1_000 {
        let beat = serde_json::json!({ "locks": { "note/a": token } });
        let beat = alice.post_json("/locks/heartbeat", beat).await.json();
        assert_eq!(beat["held"][0]["token"], token);
    }
    locks.shutdown().await;
    let writes: Vec<_> = commands.take().into_iter().filter(|it| it != "find").collect();
    assert!(writes.len() <= 1, "{writes:?}");
}
