//! Documents that several sessions read, and several documents of one session.

use std::{future::ready, sync::Arc};

use actix_doclock::{Aid, Holder, Mode};
use futures_util::FutureExt;
use parking_lot::Mutex;
use serde_json::json;

use super::*;
use crate::rig::paused::Paused;

async fn labels(locks: &LockManager) -> Vec<String> {
    let mut labels: Vec<_> = (locks.list().await.unwrap().into_iter())
        .map(|lock| format!("{} {:?}", lock.holder.unwrap().label, lock.mode))
        .collect();
    labels.sort();
    labels
}

#[actix_web::test]
async fn several_sessions_read_and_nobody_edits_until_the_last_reader_has_gone() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let bob = Browser::logged_in(&app, "bob").await;
    let carol = Browser::logged_in(&app, "carol").await;
    let read = [alice.post("/note/a/read").await, bob.post("/note/a/read").await];
    assert!(read.iter().all(|answer| answer.status == 200 && answer.json()["text"] == "old"));
    assert_ne!(read[0].token(), read[1].token(), "each reader has its own token");
    assert_eq!(carol.post("/note/a").await.problem(423)["state"], "held");

    assert_eq!(alice.post("/note/a/read-to-the-end").await.status, 204);
    assert_eq!(carol.post("/note/a").await.problem(423)["holder"]["label"], "bob");
    assert_eq!(bob.post("/purge").await.status, 204);
    assert_eq!(carol.post("/note/a").await.status, 200);
    assert_eq!(alice.post("/note/a/read").await.problem(423)["holder"]["label"], "carol");
    assert_eq!(carol.post("/note/a/read").await.status, 200, "the holder may read too");
    assert_eq!(labels(&locks).await, ["carol Exclusive"]);
}

#[actix_web::test]
async fn the_only_reader_may_edit_and_one_of_several_is_refused_at_once() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let read = alice.post("/note/a/read").await.token();
    bob.post("/note/a/read").await;
    alice.put("/note/a", "new").await.problem(409);
    assert_eq!(alice.post("/note/a").await.problem(423)["holder"]["label"], "bob");
    assert_eq!(
        labels(&locks).await,
        ["alice Shared", "bob Shared"],
        "the refusal costs nobody a lock"
    );
    let beat = alice.post_json("/locks/heartbeat", json!({ "locks": { "note/a": read } })).await;
    assert_eq!(beat.json()["lost"], json!([]));

    bob.delete("/locks/note/a").await;
    let edit = alice.post("/note/a").await;
    assert_eq!(edit.status, 200);
    assert_ne!(edit.token(), read, "an upgrade is a new grant");
    assert_eq!(alice.put("/note/a", "new").await.status, 200);
    // The tab that only reads is closed later.
    alice.post_json("/locks/note/a/release", json!({ "token": read })).await;
    assert_eq!(labels(&locks).await, ["alice Exclusive"]);
}

#[actix_web::test]
async fn an_upgrade_is_refused_at_once_although_requests_may_wait() {
    let (locks, _) = embedded().await;
    let session = SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]))
        .cookie_secure(false)
        .build();
    let wrap = locks.session(session).identify(person).wait_for_documents(Duration::from_secs(600));
    let app = test::init_service(App::new().wrap(wrap).configure(routes)).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    alice.post("/note/a/read").await;
    bob.post("/note/a/read").await;
    assert_eq!(alice.post("/note/a").await.problem(423)["holder"]["label"], "bob");
}

#[actix_web::test]
async fn a_page_that_names_its_shared_lock_edits_only_if_nobody_wrote_in_between() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    for (api, way) in [(true, "/locks/note/a"), (false, "/note/a")] {
        let edits = async |token: &str| {
            let request = alice.request(Method::POST, way).insert_header(("lock-token", token));
            alice.send(request).await
        };
        let read = alice.post("/note/a/read").await.token();
        // Still there: the upgrade is granted, or another reader is in the way.
        bob.post("/note/a/read").await;
        assert_eq!(edits(&read).await.problem(423)["holder"]["label"], "bob", "{way}");
        bob.delete("/locks/note/a").await;
        let edit = edits(&read).await;
        assert_eq!(edit.status, if api { 201 } else { 200 }, "{way}");
        assert_ne!(edit.token(), read);
        assert_eq!(labels(&locks).await, ["alice Exclusive"]);
        edits(&read).await.problem(412);
        assert_eq!(edits(&edit.token()).await.status, 200, "the new token is confirmed");
        alice.delete("/locks/note/a").await;
        // Expired, and another person has written: whatever Alice has by now, the page must read again.
        for then in ["nothing", "a shared lock", "the exclusive lock"] {
            let read = alice.post("/note/a/read").await.token();
            store.advance(Duration::from_secs(61));
            bob.post("/note/a").await;
            assert_eq!(edits(&read).await.problem(423)["holder"]["label"], "bob", "{way}");
            bob.put("/note/a", "of bob").await;
            bob.delete("/locks/note/a").await;
            match then {
                "a shared lock" => drop(alice.post("/note/a/read").await),
                "the exclusive lock" => drop(alice.post("/note/a").await),
                _ => {}
            }
            let before = labels(&locks).await;
            assert_eq!(edits(&read).await.problem(412)["state"], "lost", "{way}, {then}");
            assert_eq!(labels(&locks).await, before, "{way}, {then}: nothing is taken");
            alice.delete("/locks/note/a").await;
        }
        // A page that names nothing loads the document again.
        assert_eq!(alice.post(way).await.status, if api { 201 } else { 200 });
        alice.delete("/locks/note/a").await;
    }
}

/// How a shared lock is lost, and what its session has by the time at which it asks for the upgrade.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Loss {
    Expired,
    Broken,
    /// Other requests of the session have the exclusive lock by now.
    TakenAgain,
}

/// Between any two calls of the store in one request, until the upgrade is granted.
#[actix_web::test]
async fn a_shared_lock_that_is_lost_while_its_page_asks_for_the_upgrade_is_not_upgraded() {
    for loss in [Loss::Expired, Loss::Broken, Loss::TakenAgain] {
        for way in ["/locks/note/a", "/note/a"] {
            let mut moments = 0;
            while is_refused_if_lost_at(moments, loss, way).await {
                moments += 1;
            }
            // Before and after the read of the lock at least, and before the claim.
            assert!(moments >= 3, "{loss:?}, {way}: only {moments} moments");
        }
    }
}

/// False if the upgrade is granted before this moment comes.
async fn is_refused_if_lost_at(moment: usize, loss: Loss, way: &str) -> bool {
    let (other_server, store) = embedded().await;
    let left: Arc<Mutex<Option<usize>>> = Arc::default();
    let pause = {
        let (left, store) = (Arc::clone(&left), store.clone());
        move || {
            let mut left = left.lock();
            *left = left.and_then(|left| left.checked_sub(1));
            if *left != Some(0) {
                return ready(()).boxed();
            }
            lose_and_write(other_server.clone(), store.clone(), loss).boxed()
        }
    };
    let locks = LockManager::builder(Paused::new(store.clone(), pause)).without_reaper();
    let locks = locks.ttl(Duration::from_secs(60)).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let read = alice.post("/note/a/read").await.token();
    // Two requests know the lock, so the next one may confirm it by a read.
    assert_eq!(alice.post("/note/a/read").await.token(), read);
    *left.lock() = Some(moment + 1);
    let answer =
        alice.send(alice.request(Method::POST, way).insert_header(("lock-token", read))).await;
    if text_of(&store, "a") == "old" {
        assert!(answer.status.is_success(), "{loss:?}, {way}: nothing was lost");
        return false;
    }
    assert_eq!(answer.problem(412)["state"], "lost", "{loss:?}, {way}, moment {moment}");
    let left = if loss == Loss::TakenAgain { vec!["alice Exclusive"] } else { vec![] };
    assert_eq!(labels(&locks).await, left, "{loss:?}, {way}, moment {moment}: nothing is taken");
    true
}

/// Alice loses her shared lock, and Bob writes. Nothing happens if the lock is exclusive already.
async fn lose_and_write(locks: LockManager, store: MemoryStore, loss: Loss) {
    let lock = locks.inspect(&key("a")).await.unwrap().unwrap();
    if lock.mode == Mode::Exclusive {
        return;
    }
    match loss {
        Loss::Broken => {
            let chief = Actor::new("root").with_role("chief");
            locks.break_lock(&lock, &chief, "vacation").await.unwrap();
        }
        Loss::Expired | Loss::TakenAgain => store.advance(Duration::from_secs(61)),
    }
    let take = async |aid: &Aid, holder: &Holder| {
        let taken = locks.lock_for_session(&key("a"), aid, holder).await.unwrap();
        LockError::unless_granted(taken).unwrap()
    };
    let bob = take(&Aid::new(), &Holder::new("bob")).await;
    store.put("a".to_owned(), &Note { id: "a".to_owned(), text: "of bob".to_owned() }).unwrap();
    locks.release(&bob).await.unwrap();
    if loss == Loss::TakenAgain {
        for _ in 0..2 {
            take(&lock.aid, lock.holder.as_ref().unwrap()).await;
        }
    }
}

#[actix_web::test]
async fn an_upgrade_that_names_its_lock_does_not_wait() {
    let (locks, _) = embedded().await;
    let app = serve_with(&locks, |wrap| wrap.wait_for_documents(Duration::from_secs(600))).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let read = alice.post("/note/a/read").await.token();
    bob.post("/note/a/read").await;
    let edit = alice.request(Method::POST, "/note/a").insert_header(("lock-token", read));
    assert_eq!(alice.send(edit).await.problem(423)["holder"]["label"], "bob");
}

#[actix_web::test]
async fn the_lock_api_shares_too() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let shared = json!({ "mode": "shared" });
    let taken = alice.post_json("/locks/note/a", shared.clone()).await;
    assert_eq!((taken.status.as_u16(), &taken.json()["mode"]), (201, &"shared".into()));
    assert_eq!(alice.post_json("/locks/note/a", shared.clone()).await.status, 200);
    let seen = bob.get("/locks/note/a").await.json();
    assert_eq!((&seen["state"], &seen["mode"]), (&"held".into(), &"shared".into()));
    let bobs = bob.post_json("/locks/note/a", shared).await;
    assert_eq!(bobs.status, 201);
    assert_eq!(bob.get("/locks/note/a").await.json()["state"], "mine");
    let token = bobs.json()["token"].clone();
    bob.post_json("/locks/note/a/release", json!({ "token": token })).await;
    assert_eq!(labels(&locks).await, ["alice Shared"]);
    bob.post_json("/locks/note/a", json!({ "mode": "both" })).await.problem(400);
}

#[actix_web::test]
async fn several_documents_are_taken_together_or_not_at_all() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    assert_eq!(alice.post("/both").await.text(), "2");
    alice.post("/close-all").await;
    bob.post("/note/b").await;
    assert_eq!(alice.post("/both").await.text(), "note/b is held");
    assert_eq!(holder_of(&locks, "a").await, None, "the first lock was given back");
    alice.post("/note/a").await;
    assert_eq!(alice.post("/both").await.text(), "note/b is held");
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"), "locks held before stay");
}
