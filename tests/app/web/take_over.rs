//! Takeovers: who is allowed to take over, and the fate of the former lock.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use actix_doclock::store::{Deadline, TakeoverKind, verbs::*};
use actix_doclock::{Mode, Takeover, TryAcquire};
use futures_util::FutureExt;
use serde_json::json;

use super::*;
use crate::rig::{
    app::{TTL, eventually},
    claims::claim,
    log::{log_lines, logged},
    paused::Paused,
};

fn take_over() -> Value {
    json!({ "take_over": true })
}

/// A store in which another session gets the lock before each step.
#[actix_web::test]
async fn a_takeover_is_refused_if_the_holder_changes_all_the_time() {
    let store = embedded().await.1;
    let (others, changes) = (store.clone(), Arc::new(AtomicBool::new(false)));
    let is_changing = Arc::clone(&changes);
    let paused = Paused::new(store, move || {
        let (others, is_changing) = (others.clone(), is_changing.load(Relaxed));
        async move {
            if is_changing {
                others.age(&key("a"), TTL);
                let (key, claim) = (key("a"), claim(Mode::Exclusive));
                let claimed = others.try_acquire(&key, &claim, Deadline::NONE).await;
                assert!(matches!(claimed, Ok(TryAcquire::Granted(_))), "{claimed:?}");
            }
        }
        .boxed()
    });
    let locks = LockManager::builder(paused).take_over_policy(|_, _| true).without_reaper();
    let locks = locks.build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let bob = Browser::logged_in(&app, "bob").await;
    changes.store(true, Relaxed);
    assert_eq!(bob.post_json("/locks/note/a", take_over()).await.problem(423)["code"], "held");
}

#[actix_web::test]
async fn a_person_may_take_over_only_from_their_own_other_session() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let desk = Browser::logged_in(&app, "alice").await;
    let (laptop, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let on_desk = desk.post("/locks/note/a").await;

    assert_eq!(bob.post("/locks/note/a").await.problem(423)["may_take_over"], false);
    assert_eq!(bob.get("/locks/note/a").await.json()["may_take_over"], false);
    let refused = bob.post_json("/locks/note/a", take_over()).await.problem(403);
    assert_eq!(refused["code"], "take_over_refused");
    assert_eq!(desk.post("/locks/note/a").await.token(), on_desk.token(), "untouched");

    assert_eq!(laptop.post("/locks/note/a").await.problem(423)["may_take_over"], true);
    let taken = laptop.post_json("/locks/note/a", take_over()).await;
    assert_eq!(taken.status, 201);
    assert_ne!(taken.token(), on_desk.token());
    desk.with_token(Method::PUT, "/note/a", &on_desk.token()).await.problem(409);
    assert_eq!(text_of(&store, "a"), "old", "nothing is written for the former holder");
    assert_eq!(desk.get("/locks/note/a").await.json()["state"], "held");
    assert_eq!(laptop.with_token(Method::PUT, "/note/a", &taken.token()).await.status, 200);
}

#[actix_web::test]
async fn the_policy_decides_who_else_may_take_over_and_the_log_names_who_did() {
    log_lines();
    let (locks, _) = embedded_with(|settings| {
        settings.take_over_policy(|actor, lock| {
            assert!(lock.holder.as_ref().unwrap().user.is_some());
            actor.has_role("chief")
        })
    })
    .await;
    let app = serve_with_cookies(&locks).await;
    let (victim, root) =
        (Browser::logged_in(&app, "Vic%E2%80%AEtim").await, Browser::logged_in(&app, "root").await);
    victim.post("/locks/note/a").await.token();
    assert_eq!(root.post("/locks/note/a").await.problem(423)["may_take_over"], true);
    assert_eq!(root.post_json("/locks/note/a", take_over()).await.status, 201);
    assert!(logged(
        r#"was taken over by "root" (id "root"); reason: ""; it was held by "Vic\u{202e}tim" (id "Vic\u{202e}tim")"#
    ));
    let user = victim.get("/locks/note/a").await.text();
    assert!(!user.contains("user"), "a user id is shown: {user}");
}

#[actix_web::test]
async fn taking_over_a_free_or_own_document_is_a_plain_acquire() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    assert_eq!(alice.post_json("/locks/note/a", take_over()).await.status, 201);
    assert_eq!(alice.post_json("/locks/note/a", take_over()).await.status, 200);
    alice.post_json("/locks/note/missing", take_over()).await.problem(404);
}

#[actix_web::test]
async fn readers_are_not_taken_over() {
    let (locks, _) = embedded_with(|settings| settings.take_over_policy(|_, _| true)).await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    assert_eq!(alice.post("/note/a/read").await.status, 200);
    assert_eq!(bob.post("/locks/note/a").await.problem(423)["may_take_over"], false);
    bob.post_json("/locks/note/a", take_over()).await.problem(423);
}

#[actix_web::test]
async fn a_break_names_the_lock_that_was_shown_and_a_reason() {
    log_lines();
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, root) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "root").await);
    let shown = alice.post("/locks/note/a").await.json()["token"].clone();
    alice.delete("/locks/note/a").await;
    let newer = alice.post("/locks/note/a").await.token();
    let why = json!({ "token": shown, "reason": "on holiday\nsince May" });
    assert_eq!(root.post_json("/locks/note/a/break", why).await.status, 204);
    assert_eq!(alice.post("/locks/note/a").await.token(), newer, "the break named an older lock");
    let too_long = json!({ "reason": "x".repeat(501) });
    root.post_json("/locks/note/a/break", too_long).await.problem(400);
    let why = json!({ "reason": "on holiday\nsince May" });
    alice.post_json("/locks/note/a/break", why.clone()).await.problem(403);
    assert_eq!(root.post_json("/locks/note/a/break", why).await.status, 204);
    assert!(logged(
        r#"was broken by "root" (id "root"); reason: "on holiday\nsince May"; it was held by "alice" (id "alice")"#
    ));
    assert_eq!(holder_of(&locks, "a").await, None);
}

#[actix_web::test]
async fn pages_of_other_sites_change_nothing() {
    let (locks, _) =
        embedded_with(|settings| settings.take_over_policy(|_, _| true).break_policy(|_, _| true))
            .await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let token = alice.post("/locks/note/a").await.token();
    for (name, value) in [("sec-fetch-site", "cross-site"), ("origin", "https://evil.example")] {
        for (method, uri, body) in [
            (Method::POST, "/locks/note/b", json!({})),
            (Method::POST, "/locks/note/a", take_over()),
            (Method::POST, "/locks/note/a/break", json!({})),
        ] {
            let request = bob.request(method, uri).insert_header((name, value)).set_json(body);
            assert_eq!(bob.send(request).await.problem(403)["code"], "cross_site");
        }
        for (method, uri) in [
            (Method::DELETE, "/locks/note/a"),
            (Method::POST, "/locks/note/a/release"),
            (Method::POST, "/locks/heartbeat"),
        ] {
            let request = alice.request(method, uri).insert_header((name, value));
            assert_eq!(alice.send(request).await.problem(403)["code"], "cross_site");
        }
    }
    assert_eq!(alice.post("/locks/note/a").await.token(), token);
    assert!(locks.inspect(&key("b")).await.unwrap().is_none());
}

#[actix_web::test]
async fn a_takeover_is_told_to_the_application_and_a_move_to_another_tab_is_not() {
    let heard = Arc::new(Mutex::new(Vec::<Takeover>::new()));
    let hears = Arc::clone(&heard);
    let (locks, _) = embedded_with(move |settings| {
        settings.take_over_policy(|_, _| true).on_lock_taken(move |taken| {
            hears.lock().unwrap().push(taken);
            async { Ok(()) }
        })
    })
    .await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let in_tab = |tab: &str| {
        alice.request(Method::POST, "/locks/note/a").insert_header(("doclock-tab", tab.to_owned()))
    };
    alice.send(in_tab("11111111-1111-4111-8111-111111111111")).await.token();
    let moves = in_tab("22222222-2222-4222-8222-222222222222").set_json(take_over());
    let token = alice.send(moves).await.token();
    bob.post_json("/locks/note/a", take_over()).await.token();
    eventually("it is told", async || !heard.lock().unwrap().is_empty()).await;
    let told = heard.lock().unwrap().clone();
    assert_eq!(told.len(), 1);
    assert_eq!((told[0].kind, &*told[0].by.label), (TakeoverKind::TakenOver, "bob"));
    assert_eq!(told[0].from.as_ref().unwrap().user.as_deref(), Some("alice"));
    let lost = alice.with_token(Method::PUT, "/note/a", &token).await.problem(409);
    assert_eq!((&lost["cause"], &lost["by"]), (&"taken_over".into(), &"bob".into()));
}

/// A person who meets her own other session is told so, and nobody else is.
#[actix_web::test]
async fn a_refusal_says_whether_the_holder_is_the_same_person() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    for (name, is_same) in [("alice", true), ("bob", false)] {
        let other = Browser::logged_in(&app, name).await;
        let keys = serde_json::json!({ "keys": ["note/a"] });
        let status = other.post_json("/locks/status", keys).await.json();
        other.post("/note/b").await.token();
        other.delete("/locks/note/b").await;
        for said in [
            other.post("/note/a").await.problem(423),
            other.post("/locks/note/a").await.problem(423),
            other.put("/note/a", "x").await.problem(409),
            other.get("/locks/note/a").await.json(),
            status["locks"][0].clone(),
        ] {
            assert_eq!(said["same_person"], is_same, "{name}: {said}");
            assert_eq!(said["holder"], serde_json::json!({ "label": "alice" }), "no id is shown");
        }
    }
    assert_eq!(alice.get("/locks/note/a").await.json().get("same_person"), None, "her own");
    // Without ids, two people may have the same name.
    let nameless = |session: &Session| Some(Actor::new(person(session)?.label));
    let app = serve_with(&locks, |wrap| wrap.identify(nameless)).await;
    let (alice, other) =
        (Browser::logged_in(&app, "carol").await, Browser::logged_in(&app, "carol").await);
    alice.post("/note/b").await.token();
    assert_eq!(other.post("/note/b").await.problem(423)["same_person"], false);
}
