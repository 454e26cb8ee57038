//! The cost of a request in database commands, measured by the driver's own events.

use super::*;
use crate::rig;

#[actix_web::test]
async fn a_request_sends_no_more_commands_than_necessary() {
    let server = rig::mongod::local_replica_set().await;
    let (database, commands) = rig::counted_database(&server.uri()).await;
    let note = Note { id: "a".to_owned(), text: "old".to_owned() };
    database.collection::<Note>(Note::COLLECTION).insert_one(&note).await.unwrap();
    let locks = crate::rig::app::manager_on(&database).without_reaper().build().await.unwrap();
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
    assert_eq!(
        sent().await,
        ["findAndModify", "find", "find"],
        "the record notes that a second request knows, which checks as the first one"
    );
    let token = alice.post("/note/a").await.token();
    assert_eq!(sent().await, ["aggregate"], "a document that the session holds");
    assert_eq!(alice.with_token(Method::POST, "/note/a", &token).await.token(), token);
    assert_eq!(sent().await, ["aggregate"], "the same for a client that names the lock");
    bob.post("/note/a").await.problem(423);
    assert_eq!(sent().await, ["find"], "a refusal, with its holder");
    alice.get("/plain").await;
    assert!(sent().await.is_empty(), "nothing is due for renewal");

    // The save could be late, and only a write waits for it.
    alice.put("/note/a", "old").await;
    sent().await;
    alice.post("/note/a").await.token();
    assert_eq!(sent().await, ["findAndModify", "find", "find"], "the first reentry after a save");
    alice.put("/note/a", "new").await;
    let confirm_load_save = ["aggregate", "find", "update", "update", "commitTransaction"];
    assert_eq!(sent().await, confirm_load_save);
    let shown = alice.get("/note/a/view").await.header("etag").unwrap().replace('"', "");
    sent().await;
    assert_eq!(alice.put(&format!("/note/a?version={shown}"), "next").await.status, 200);
    assert_eq!(sent().await, confirm_load_save, "a version costs no command");
    alice.put("/note/a/done", "newer").await;
    assert_eq!(
        sent().await.split_last().unwrap(),
        (&"delete".into(), &confirm_load_save.map(Into::into)[..])
    );

    alice.post("/note/a").await.token();
    sent().await;
    alice.post("/purge").await;
    let end = ["find", "findAndModify", "find"];
    let mut ended = sent().await;
    assert_eq!(ended[..3], end, "before the answer: the tombstone with the names");
    ended[3..5].sort();
    assert_eq!(ended[3..5], ["aggregate", "delete"], "the traces, and at once the removal");
    assert_eq!(ended[5..], ["update"], "after the answer: it may be announced");
}

/// Otherwise the time of the answer would tell whether others edit the document.
#[actix_web::test]
async fn a_release_without_a_token_costs_the_same_whatever_others_hold() {
    let server = rig::mongod::local_replica_set().await;
    let (database, commands) = rig::counted_database(&server.uri()).await;
    let locks = crate::rig::app::manager_on(&database).without_reaper();
    let locks = locks.build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let held = locks.acquire(&key("held"), Wait::no()).await.unwrap();
    for id in ["held", "free"] {
        commands.take();
        assert_eq!(alice.delete(&format!("/locks/note/{id}")).await.status, 204);
        assert_eq!(commands.take(), ["find", "find"], "{id}");
    }
    held.release().await.unwrap();
}

/// Otherwise everybody would hear of a lock for each of its requests.
#[actix_web::test]
async fn a_session_that_asks_for_missing_documents_again_locks_none_of_them() {
    let server = rig::mongod::local_replica_set().await;
    let (database, commands) = rig::counted_database(&server.uri()).await;
    let notes = database.collection::<Note>(Note::COLLECTION);
    let locks = crate::rig::app::manager_on(&database).without_reaper();
    let locks = locks.build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let writes = async |path: &str| {
        commands.take();
        alice.post(path).await.problem(404);
        locks.shutdown().await;
        let is_write =
            |it: &String| ["insert", "findAndModify", "update", "delete"].contains(&&**it);
        commands.take().into_iter().filter(is_write).count()
    };
    assert_eq!(writes("/note/1").await, 2, "the lock, and its release");
    for path in ["/note/2", "/locks/note/3", "/note/1"] {
        assert_eq!(writes(path).await, 0, "{path}");
    }
    let note = Note { id: "a".to_owned(), text: "old".to_owned() };
    notes.insert_one(&note).await.unwrap();
    alice.post("/note/a").await.token();
    // Nor does a lock stay on a document that is deleted meanwhile.
    notes.delete_one(mongodb::bson::doc! { "_id": "a" }).await.unwrap();
    alice.post("/note/a").await.problem(404);
    assert!(locks.list().await.unwrap().is_empty());
}

/// The requests of a session renew its leases in the background, once in a third of the ttl.
#[actix_web::test]
async fn a_reentry_writes_only_if_its_lease_is_about_to_expire() {
    let server = rig::mongod::local_replica_set().await;
    let (database, commands) = rig::counted_database(&server.uri()).await;
    let note = Note { id: "a".to_owned(), text: "old".to_owned() };
    database.collection::<Note>(Note::COLLECTION).insert_one(&note).await.unwrap();
    let ttl = Duration::from_secs(600);
    let locks = crate::rig::app::manager_on(&database).without_reaper().ttl(ttl);
    let locks = locks.build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    let token = alice.post("/note/a").await.token();
    rig::age(&database, &key("a"), ttl / 2).await;
    commands.take();
    for _ in 0..3 {
        assert_eq!(alice.post("/note/a").await.token(), token);
    }
    locks.shutdown().await;
    assert_eq!(commands.take(), ["aggregate"; 3]);
    rig::age(&database, &key("a"), ttl / 4).await;
    commands.take();
    assert_eq!(alice.post("/note/a").await.token(), token);
    locks.shutdown().await;
    let last = ["aggregate", "findAndModify", "find", "find"];
    assert_eq!(commands.take(), last, "the answer must be a new lease");
    let lock = locks.inspect(&key("a")).await.unwrap().unwrap();
    assert!(lock.expires_in() > ttl / 2, "{lock:?}");
}

#[actix_web::test]
async fn sessions_that_are_due_at_the_same_time_are_renewed_together() {
    const SESSIONS: usize = 40;
    let server = rig::mongod::local_replica_set().await;
    let (database, commands) = rig::counted_database(&server.uri()).await;
    let notes = (0..SESSIONS).map(|n| Note { id: n.to_string(), text: "old".to_owned() });
    database.collection::<Note>(Note::COLLECTION).insert_many(notes).await.unwrap();
    let start = async || {
        let locks = crate::rig::app::manager_on(&database).without_reaper();
        let locks = locks.ttl(Duration::from_secs(600)).build().await.unwrap();
        locks.register::<Note>().await.unwrap();
        locks
    };
    let locks = start().await;
    let app = serve_with_cookies(&locks).await;
    let mut people = Vec::new();
    for n in 0..SESSIONS {
        let person = Browser::logged_in(&app, &format!("person{n}")).await;
        let token = person.post(&format!("/locks/note/{n}")).await.json()["token"].clone();
        people.push((person, n, token));
    }
    // To a server that has just started, all sessions are due.
    let restarted = start().await;
    let second = serve_with_cookies(&restarted).await;
    for n in 0..SESSIONS {
        rig::age(&database, &key(&n.to_string()), Duration::from_secs(300)).await;
    }
    commands.take();
    let beats = people.iter().map(async |(person, n, token)| {
        let body = serde_json::json!({ "locks": { format!("note/{n}"): token } });
        person.at(&second).post_json("/locks/heartbeat", body).await.json()
    });
    for answer in futures_util::future::join_all(beats).await {
        let left = answer["held"][0]["expires_in_ms"].as_u64().unwrap();
        assert!(left > 500_000, "each answer waits for its renewal: {answer}");
    }
    let updates = commands.take().iter().filter(|it| *it == "update").count();
    assert!(updates <= 3, "the first alone, the others together: {updates}");
}

/// Whatever a page does: a key that hangs, or a timer out of control.
#[actix_web::test]
async fn many_heartbeats_of_a_client_cost_at_most_one_write() {
    let server = rig::mongod::local_replica_set().await;
    let (database, commands) = rig::counted_database(&server.uri()).await;
    let note = Note { id: "a".to_owned(), text: "old".to_owned() };
    database.collection::<Note>(Note::COLLECTION).insert_one(&note).await.unwrap();
    let locks = crate::rig::app::manager_on(&database).without_reaper();
    // So long that a third of it does not pass in the meantime.
    let locks = locks.ttl(Duration::from_secs(3_600)).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/locks/note/a").await.json()["token"].clone();
    commands.take();
    for _ in 0..200 {
        let beat = serde_json::json!({ "locks": { "note/a": token } });
        let beat = alice.post_json("/locks/heartbeat", beat).await.json();
        assert_eq!(beat["held"][0]["token"], token);
    }
    locks.shutdown().await;
    let writes: Vec<_> = commands.take().into_iter().filter(|it| it != "find").collect();
    assert!(writes.len() <= 1, "{writes:?}");
}
