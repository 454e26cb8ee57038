//! The sessions of one user, with their locks.

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
