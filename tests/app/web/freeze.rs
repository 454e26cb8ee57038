//! What people meet while a collection is frozen.

use std::time::SystemTime;

use actix_doclock::freeze::Scope;
use serde_json::json;

use super::*;

fn admin() -> Actor {
    Actor::new("root")
}

fn in_an_hour() -> SystemTime {
    SystemTime::now() + Duration::from_secs(60 * 60)
}

#[actix_web::test]
async fn a_frozen_document_is_refused_with_the_reason_and_a_holder_may_save_and_release() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/note/a").await.token();
    locks.freeze("note", "New numbers until noon", in_an_hour(), &admin()).await.unwrap();

    for refused in [
        bob.post("/note/b").await,
        bob.post("/note/a").await,
        bob.post("/locks/note/b").await,
        bob.post_json("/locks/note/b", json!({ "mode": "shared" })).await,
        bob.post_json("/locks/note/b", json!({ "wait_ms": 60_000 })).await,
        alice.post("/note/b").await,
    ] {
        let problem = refused.problem(423);
        assert_eq!((&problem["code"], &problem["state"]), (&json!("frozen"), &json!("frozen")));
        assert_eq!(problem["reason"], "New numbers until noon");
        assert!(problem["detail"].as_str().unwrap().contains("New numbers until noon"));
        assert!(problem["until"].as_str().unwrap().ends_with('Z'), "{problem}");
        assert_eq!(refused.header("retry-after").unwrap(), "2");
    }
    alice.post("/note/a").await.token();
    assert!(alice.put("/note/a", "under the freeze").await.status.is_success());
    assert_eq!(text_of(&store, "a"), "under the freeze");
    assert_eq!(alice.delete("/locks/note/a").await.status, 204);
    assert_eq!(alice.post("/note/a").await.problem(423)["code"], "frozen");

    locks.thaw("note").await.unwrap();
    bob.post("/note/a").await.token();
}

#[actix_web::test]
async fn the_status_of_a_document_says_that_it_is_frozen() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/note/a").await.token();
    assert!(bob.get("/locks/note/b").await.json().get("frozen").is_none());
    locks.freeze(Scope::All, "migration", in_an_hour(), &admin()).await.unwrap();
    let (free, held) =
        (bob.get("/locks/note/b").await.json(), bob.get("/locks/note/a").await.json());
    assert_eq!((&free["state"], &held["state"]), (&json!("free"), &json!("held")));
    let both = bob.post_json("/locks/status", json!({ "keys": ["note/a", "note/b"] })).await.json();
    for state in [&free, &held, &both["locks"][0], &both["locks"][1]] {
        assert_eq!(state["frozen"]["reason"], "migration", "{state}");
        assert!(state["frozen"]["until"].is_string(), "{state}");
    }
    assert_eq!(held["may_take_over"], false);
}

#[actix_web::test]
async fn nobody_takes_a_lock_over_during_a_freeze_but_a_person_moves_it_to_another_tab() {
    let (locks, _) = embedded_with(|settings| settings.take_over_policy(|_, _| true)).await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let take_over = json!({ "take_over": true });
    let in_tab = |tab: &str| {
        alice.request(Method::POST, "/locks/note/a").insert_header(("doclock-tab", tab.to_owned()))
    };
    alice.send(in_tab("11111111-1111-4111-8111-111111111111")).await.token();
    locks.freeze("note", "migration", in_an_hour(), &admin()).await.unwrap();
    let moves = in_tab("22222222-2222-4222-8222-222222222222").set_json(take_over.clone());
    alice.send(moves).await.token();
    let refused = bob.post_json("/locks/note/a", take_over).await;
    assert_eq!(refused.problem(423)["code"], "frozen");
    assert_eq!(alice.get("/locks/note/a").await.json()["state"], "mine");
}

#[actix_web::test]
async fn pages_are_told_to_look_again_when_a_freeze_begins_and_ends() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let mut stream = alice.listen("").await;
    for is_frozen in [true, false] {
        if is_frozen {
            locks.freeze("note", "migration", in_an_hour(), &admin()).await.unwrap();
        } else {
            locks.thaw("note").await.unwrap();
        }
        assert_eq!(stream.next().await.unwrap().0, "resync");
    }
}

#[actix_web::test]
async fn administrators_see_what_is_frozen() {
    let (locks, _) =
        embedded_with(|settings| settings.admin_policy(|actor| actor.has_role("chief"))).await;
    let app = serve_with_cookies(&locks).await;
    let root = Browser::logged_in(&app, "root").await;
    locks.freeze("note", "migration", in_an_hour(), &admin()).await.unwrap();
    let frozen = root.get("/locks/admin.json").await.json()["frozen"].clone();
    assert_eq!(
        (&frozen[0]["collection"], &frozen[0]["reason"]),
        (&json!("note"), &json!("migration"))
    );
    assert!(frozen[0]["ends_in_ms"].as_u64().unwrap() > 3_000_000, "{frozen}");
}
