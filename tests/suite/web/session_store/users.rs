//! The sessions of one user.

use actix_doclock::store::StoredSession;

use super::*;

#[actix_web::test]
async fn all_sessions_of_a_user_are_revoked_and_counted() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let desk = Browser::logged_in(&app, "alice").await;
    desk.post("/note/a").await.token();
    let desks = server.holder("a").await;
    let phone = Browser::logged_in(&app, "alice").await;
    let bob = Browser::logged_in(&app, "bob").await;
    let token = bob.post("/note/b").await.token();
    let name = State::from([("name".to_owned(), "\"alice\"".to_owned())]);
    let without_aid = server.sessions.save(name, &DAY).await.unwrap();

    assert_eq!(server.sessions.revoke_all_of("alice").await.unwrap(), 3);
    for browser in [&desk, &phone] {
        assert_eq!(browser.get("/state").await.json(), json!({}));
    }
    assert_eq!(server.load(&without_aid).await, None);
    assert!(!server.is_locked("a").await);
    assert_eq!(bob.put("/note/b", "new").await.token(), token);
    let told = server.told().await;
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told.iter().all(|(_, reason)| *reason == EndReason::Revoked), "{told:?}");
    assert!(told.iter().any(|(aid, _)| *aid == desks), "{told:?}");
    for nobody in ["alice", "", "$name", "carol"] {
        assert_eq!(server.sessions.revoke_all_of(nobody).await.unwrap(), 0, "{nobody}");
    }
}

/// After a login, a session has a new key, and the old key is not forgotten yet.
#[actix_web::test]
async fn a_session_with_a_new_key_counts_as_one() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/renew").await;
    alice.post("/renew").await;
    assert_eq!(server.sessions.revoke_all_of("alice").await.unwrap(), 1);
    assert_eq!(alice.get("/state").await.json(), json!({}));
    assert_eq!(server.told().await.len(), 1);
}

/// The same for all sessions of a user: a session between two keys is found too.
#[actix_web::test]
async fn a_session_between_two_keys_is_revoked_with_all_sessions_of_its_user() {
    let server = Server::on(&database().await).await;
    let (old, alice) = server.session("alice", "a").await;
    server.sessions.delete(&old).await.unwrap();
    server.sessions.revoke_all_of("alice").await.unwrap();
    let new = server.sessions.save(state_of("alice", &alice), &DAY).await.unwrap();
    assert_eq!(server.load(&new).await, None);
    assert!(!server.is_locked("a").await);
}

#[actix_web::test]
async fn the_sessions_of_a_user_are_listed_without_their_keys() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let desk = Browser::logged_in(&app, "alice").await;
    let phone = Browser::logged_in(&app, "alice").await;
    Browser::logged_in(&app, "bob").await;
    let list = async || server.sessions.list_of("alice").await.unwrap();
    assert_eq!(list().await.len(), 2);
    age(&server.database, doc! {}, Duration::from_secs(3600)).await;
    desk.post("/theme").await;
    let mut sessions = list().await;
    sessions.sort_by_key(|session| session.seen);
    let [of_phone, of_desk]: [StoredSession; 2] = sessions.try_into().unwrap();
    let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3600));
    let between = |from: std::time::SystemTime, to| to > from && to < from + hour + 10 * minute;
    assert!(between(of_desk.created, of_desk.seen), "{of_desk:?}");
    assert!(of_desk.created <= of_phone.created + minute, "{of_desk:?}, {of_phone:?}");
    assert_eq!((&of_phone.user[..], of_phone.seen), ("alice", of_phone.created));
    assert_eq!(of_phone.expires.duration_since(of_phone.seen).unwrap(), 24 * hour);
    assert!(of_desk.expires > of_phone.expires + hour - minute);
    for session in [&of_phone, &of_desk] {
        let text = format!("{session:?}");
        assert!(!text.contains(key_in(&desk).as_ref()) && !text.contains(key_in(&phone).as_ref()));
        assert!(!text.contains(session.aid.as_str()), "{text}");
    }

    // A listed session can be ended by its aid.
    server.sessions.revoke(&of_phone.aid).await.unwrap();
    assert_eq!(phone.get("/state").await.json(), json!({}));
    assert_eq!(list().await, [of_desk]);
    desk.post("/purge").await;
    assert_eq!(list().await, []);
    server.sessions.save(state_of("alice", &Aid::new()), &Ttl::HOUR).await.unwrap();
    assert_eq!(list().await.len(), 1);
    age(&server.database, doc! {}, hour).await;
    assert_eq!(list().await, [], "expired sessions are not listed");
    assert_eq!(server.sessions.list_of("$name").await.unwrap(), []);
}

#[actix_web::test]
async fn the_user_of_a_session_follows_its_state() {
    let database = database().await;
    let sessions = |builder: MongoSessionStoreBuilder| builder.user_key("uid");
    let server = Server::with(&database, |locks| locks, sessions).await;
    let app = server.app().await;
    let users = async |uid: &str| server.sessions.list_of(uid).await.unwrap().len();
    let browser = Browser::new(&app);
    browser.post_json("/change", json!({ "set": { "name": "alice" } })).await;
    assert_eq!(users("alice").await, 0);
    browser.post_json("/change", json!({ "set": { "uid": 42 } })).await;
    assert_eq!((users("42").await, users("alice").await), (1, 0));
    browser.post_json("/change", json!({ "set": { "uid": "$name" }, "renew": true })).await;
    assert_eq!((users("42").await, users("$name").await), (0, 1));
    browser.post_json("/change", json!({ "set": { "theme": "dark" } })).await;
    assert_eq!(users("$name").await, 1);
    browser.post_json("/change", json!({ "remove": ["uid"] })).await;
    assert_eq!(users("$name").await, 0);
}
