//! Only the database's clock counts; the application's clock is never sent.

use super::*;
use crate::rig::carries_a_time;

#[actix_web::test]
async fn no_command_carries_a_time_of_the_client() {
    let uri = rig::mongod::shared_replica_set().await;
    let (recorded, sent) = rig::recorded_database(uri.uri()).await;
    put_notes(&recorded).await;
    // The test changes records on another client.
    let database = rig::client(uri.uri()).await.database(recorded.name());
    let absolute = |builder: MongoSessionStoreBuilder| builder.absolute_timeout(TWO_DAYS);
    let server = Server::with(&recorded, |locks| locks, absolute).await;
    let (app, store) = (server.app().await, &server.sessions);

    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    alice.post("/theme").await;
    alice.post("/renew").await;
    age(&database, doc! {}, Duration::from_secs(3600)).await;
    store.update_ttl(&key_in(&alice), &DAY).await.unwrap();
    assert_eq!(store.list_of("alice").await.unwrap().len(), 1);
    let aid = server.holder("a").await;
    store.revoke(aid.as_str()).await.unwrap();
    store.revoke_all_of("bob").await.unwrap();
    store.update(session_key("unknown"), State::new(), &DAY).await.unwrap();

    let bob = Browser::logged_in(&app, "bob").await;
    bob.post("/note/b").await.token();
    store.delete(&key_in(&bob)).await.unwrap();
    age(&database, doc! {}, TWO_DAYS).await;
    assert!(store.sweep().await.unwrap() > 0);

    let idle = Aid::new();
    for id in ["a", "b"] {
        let _ =
            server.locks.lock_for_session(&key(id), &idle, &Holder::new("carol")).await.unwrap();
    }
    rig::age(&database, &key("a"), TTL).await;
    assert_eq!(server.locks.sweep().await.unwrap(), 0, "it still has the other one");
    rig::age(&database, &key("b"), TTL).await;
    assert_eq!(server.locks.sweep().await.unwrap(), 1);
    server.locks.end_session(&Aid::new()).await.unwrap();
    server.locks.revoke_session(&Aid::new()).await.unwrap();
    assert_eq!(server.told().await.len(), 5);

    let sent = sent.lock().unwrap();
    for part in ["doclock.session", "doclock.ended", "note.lock", "aggregate", "findAndModify"] {
        let of_part = |command: &&Document| command.to_string().contains(part);
        assert!(sent.iter().filter(of_part).count() >= 1, "{part}");
    }
    for command in sent.iter() {
        // The record of a lock carries the times that the server has told.
        let is_of_lock = command.to_string().contains("note.lock");
        assert!(is_of_lock || !carries_a_time(command), "{command}");
    }
}
