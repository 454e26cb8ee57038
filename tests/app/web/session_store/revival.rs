//! An ended session stays ended, whatever was under way at that moment.

use super::*;

/// All the ways to end Alice's session, which holds the note `a`, while one of its requests is under
/// way. Each time the request does something else.
#[actix_web::test]
async fn a_request_under_way_does_not_revive_an_ended_session() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    for end in ["purge", "delete", "revoke", "revoke all", "expire", "expire and sweep"] {
        for late in [json!({ "set": { "late": 1 } }), json!({ "remove": ["name"] })] {
            let alice = Browser::logged_in(&app, "alice").await;
            alice.post("/note/a").await.token();
            let (session, aid) = (key_in(&alice), server.holder("a").await);
            let mut request = late.clone();
            request["wait"] = true.into();
            let request = alice.post_json("/change", request);
            let other_tab = alice.copy();
            let ended = async {
                match end {
                    "purge" => drop(other_tab.post("/purge").await),
                    "delete" => server.sessions.delete(&session).await.unwrap(),
                    "revoke" => server.sessions.revoke(aid.as_str()).await.unwrap(),
                    "revoke all" => drop(server.sessions.revoke_all_of("alice").await.unwrap()),
                    _ => age(&server.database, doc! { "aid": aid.as_str() }, TWO_DAYS).await,
                }
                if end == "expire and sweep" {
                    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
                }
            };
            let (answer, ()) = server.while_it_waits(request, ended).await;
            assert_eq!(answer.status, 204);
            assert_eq!(server.load(&session).await, None, "{end}, {late}");
            assert_eq!(alice.get("/state").await.json(), json!({}), "{end}, {late}");
            assert_eq!(server.sessions.list_of("alice").await.unwrap(), [], "{end}, {late}");
            records(&server.database).delete_many(doc! {}).await.unwrap();
            server.locks.end_session(&aid).await.unwrap();
        }
    }
}

/// A renewal saves under a new key, so the end must be recorded for the aid.
#[actix_web::test]
async fn a_renewal_under_way_does_not_revive_a_revoked_session() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    let aid = server.holder("a").await;
    let renewal = alice.post_json("/change", json!({ "wait": true, "renew": true }));
    server.while_it_waits(renewal, server.sessions.revoke(aid.as_str())).await.1.unwrap();
    assert_eq!(alice.get("/state").await.json(), json!({}));
    assert!(!server.is_locked("a").await);
    assert_eq!(alice.put("/note/a", "new").await.status, 409);
}

#[actix_web::test]
async fn a_renewal_under_way_does_not_revive_a_session_that_has_ended_otherwise() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    for end in ["purge", "clear", "delete", "expire", "expire and sweep"] {
        let alice = Browser::logged_in(&app, "alice").await;
        let (session, other_tab) = (key_in(&alice), alice.copy());
        let renewal = alice.post_json("/change", json!({ "wait": true, "renew": true }));
        let ended = async {
            match end {
                "purge" | "clear" => drop(other_tab.post(&format!("/{end}")).await),
                "delete" => server.sessions.delete(&session).await.unwrap(),
                _ => age(&server.database, doc! { "ended": { "$exists": false } }, TWO_DAYS).await,
            }
            if end == "expire and sweep" {
                server.sessions.sweep().await.unwrap();
            }
        };
        let (renewed, ()) = server.while_it_waits(renewal, ended).await;
        assert_eq!(renewed.header("set-cookie"), None, "{end}: a cookie would carry a dead key");
        assert_eq!(alice.get("/state").await.json(), json!({}), "{end}");
        assert_eq!(server.sessions.list_of("alice").await.unwrap(), [], "{end}");
    }
}

/// The session is gone and cannot release the lock, and nobody else knows of it.
#[actix_web::test]
async fn a_first_lock_of_a_session_that_has_just_ended_is_given_back() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let name = State::from([("name".to_owned(), "\"alice\"".to_owned())]);
    let session = server.sessions.save(name, &DAY).await.unwrap();
    let alice = browser_with(&app, &session);
    let lock = alice.post_json("/change", json!({ "wait": true, "lock": "a" }));
    let (answer, ended) = server.while_it_waits(lock, server.sessions.delete(&session)).await;
    ended.unwrap();
    answer.problem(401);
    assert_eq!(answer.header("lock-token"), None);
    assert!(!server.is_locked("a").await);
}

/// A renewal deletes the session and saves it under another key. A revocation can come before, between
/// and after these two steps.
#[actix_web::test]
async fn a_revocation_at_the_moment_of_a_renewal_leaves_no_usable_session() {
    for revoke_at in 0..3 {
        let server = Server::on(&database().await).await;
        let (old, alice) = server.session("alice", "a").await;
        let mut new = None;
        for step in 0..3 {
            if step == revoke_at {
                server.sessions.revoke(alice.as_str()).await.unwrap();
            }
            match step {
                0 => server.sessions.delete(&old).await.unwrap(),
                1 => {
                    let state = state_of("alice", &alice);
                    new = Some(server.sessions.save(state, &DAY).await.unwrap());
                }
                _ => {}
            }
        }
        for key in [old, new.unwrap()] {
            assert_eq!(server.load(&key).await, None, "revoked at step {revoke_at}");
            let state = state_of("alice", &alice);
            server.sessions.update(session_key(key.as_ref()), state, &DAY).await.unwrap();
            assert_eq!(server.load(&key).await, None, "revoked at step {revoke_at}");
        }
        assert_eq!(server.sessions.list_of("alice").await.unwrap(), []);
        assert!(!server.is_locked("a").await);
        age(&server.database, doc! {}, TWO_DAYS).await;
        server.sessions.sweep().await.unwrap();
        assert_eq!(server.told().await, [(alice, EndReason::Revoked)]);
    }
}

/// As if a primary with a slow clock had written the dates: the end is a fact, not a date.
#[actix_web::test]
async fn an_ended_session_stays_ended_whatever_its_dates_say() {
    let server = Server::on(&database().await).await;
    for reason in [EndReason::LoggedOut, EndReason::Revoked] {
        let (session, alice) = server.session("alice", "a").await;
        match reason {
            EndReason::Revoked => server.sessions.revoke(alice.as_str()).await.unwrap(),
            _ => server.sessions.delete(&session).await.unwrap(),
        }
        let later = doc! { "$set": { "expires": { "$add": ["$$NOW", 3_600_000] } } };
        records(&server.database).update_many(doc! {}, vec![later]).await.unwrap();
        assert_eq!(server.load(&session).await, None, "{reason:?}");
        let state = state_of("alice", &alice);
        server.sessions.update(session_key(session.as_ref()), state, &DAY).await.unwrap();
        server.sessions.update_ttl(&session, &DAY).await.unwrap();
        assert_eq!(server.load(&session).await, None, "{reason:?}");
        assert_eq!(server.sessions.list_of("alice").await.unwrap(), []);
        let due = vec![doc! { "$set": { "due": "$$NOW" } }];
        records(&server.database).update_one(doc! { "user": "alice" }, due).await.unwrap();
        assert_eq!(server.sessions.sweep().await.unwrap(), 1);
        assert!(!server.is_locked("a").await, "{reason:?}");
        assert!(server.told().await.contains(&(alice, reason)));
    }
}
