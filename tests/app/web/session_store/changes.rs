//! Concurrent requests of one session with locks.

use super::*;

/// Two tabs of one session, which has these entries and an aid.
async fn two_tabs<'a, S>(app: &'a S, state: Value) -> [Browser<'a, S>; 2]
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    let tab = Browser::new(app);
    assert_eq!(tab.post_json("/change", json!({ "set": state })).await.status, 204);
    let other = tab.copy();
    [tab, other]
}

/// A session from before the application had locks, or one that was cleared: it has no aid until a
/// lock, or another change, gives it one.
#[actix_web::test]
async fn a_first_lock_and_a_concurrent_change_are_both_kept() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let lock: fn(_) -> _ = |wait: bool| json!({ "wait": wait, "lock": "a" });
    let theme: fn(_) -> _ = |wait: bool| json!({ "wait": wait, "set": { "theme": "dark" } });
    for lock_is_late in [true, false] {
        let name = State::from([("name".to_owned(), "\"alice\"".to_owned())]);
        let key = server.sessions.save(name, &DAY).await.unwrap();
        let (tab, other) = (browser_with(&app, &key), browser_with(&app, &key));
        let (late, early) = if lock_is_late { (lock, theme) } else { (theme, lock) };
        let late = tab.post_json("/change", late(true));
        let (late, early) =
            server.while_it_waits(late, other.post_json("/change", early(false))).await;
        assert_eq!((late.status, early.status), (StatusCode::NO_CONTENT, StatusCode::NO_CONTENT));

        let both = json!({ "name": "alice", "theme": "dark" });
        assert_eq!(other.get("/state").await.json(), both);
        // The lock belongs to the session, and goes with it.
        let note = "the lock is kept; the lock came late: ";
        assert_eq!(tab.post("/note/a").await.status, 200, "{note}{lock_is_late}");
        assert_eq!(tab.post("/purge").await.status, 204);
        assert!(!server.is_locked("a").await, "{note}{lock_is_late}");
    }
}

/// The other order: the session that the late request has loaded has ended.
#[actix_web::test]
async fn a_late_request_does_not_bring_a_cleared_state_back() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let [tab, other] = two_tabs(&app, json!({ "name": "alice", "role": "chief" })).await;
    tab.post("/note/a").await.token();
    let add = json!({ "wait": true, "set": { "cart": 1 } });
    server.while_it_waits(tab.post_json("/change", add), other.post("/clear")).await;
    assert_eq!(other.get("/state").await.json(), json!({}));
    assert!(!server.is_locked("a").await);
    assert_eq!(tab.put("/note/a", "new").await.status, 409, "the aid does not come back either");
}
