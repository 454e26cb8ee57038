//! The sessions of one user.

use actix_session_mongo::StoredSession;

use super::*;

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
    assert_eq!(server.told().len(), 1);
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
        assert!(!text.contains(&session.id), "{text}");
    }

    // A listed session can be ended by its id.
    server.sessions.revoke(&of_phone.id).await.unwrap();
    assert_eq!(phone.get("/state").await.json(), json!({}));
    assert_eq!(list().await, [of_desk]);
    desk.post("/purge").await;
    assert_eq!(list().await, []);
    server.sessions.save(state_of("alice", "5"), &Ttl::HOUR).await.unwrap();
    assert_eq!(list().await.len(), 1);
    age(&server.database, doc! {}, hour).await;
    assert_eq!(list().await, [], "expired sessions are not listed");
    assert_eq!(server.sessions.list_of("$name").await.unwrap(), []);
}

#[actix_web::test]
async fn the_user_of_a_session_follows_its_state() {
    let database = database().await;
    let sessions = |builder: MongoSessionStoreBuilder| builder.user_key("uid");
    let server = Server::with(&database, sessions).await;
    let app = server.app().await;
    let users = async |uid: &str| server.sessions.list_of(uid).await.unwrap().len();
    let browser = Browser::new(&app);
    browser.post_json("/change", json!({ "set": { "name": "alice", ID: "1" } })).await;
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
