//! Metrics that only requests change.

use actix_doclock::metrics as names;

use super::*;
use crate::rig::recorded::Recorded;

#[actix_web::test]
async fn saves_are_timed_by_outcome_and_lost_locks_are_counted() {
    let mut seen = Recorded::start();
    let (locks, store) = embedded().await;
    let breaker = locks.clone();
    let save = move |mut note: HeldDoc<Note>| {
        let breaker = breaker.clone();
        async move {
            crate::rig::app::break_on(&breaker, &key("a"), &Actor::new("root").with_role("chief"))
                .await?;
            note.text = "too late".to_owned();
            note.save().await.map(|()| HttpResponse::Ok())
        }
    };
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new().wrap(locks.session(session)).route("/late/{id}", web::put().to(save));
    let app = test::init_service(app.configure(routes)).await;
    let alice = Browser::logged_in(&app, "alice").await;

    alice.post("/note/a").await;
    assert_eq!(alice.put("/note/a", "new").await.status, 200);
    alice.put("/late/a", "").await.problem(409);
    alice.post("/note/a").await;
    store.remove(&key("a"));
    // The document cannot be loaded either, so this does not count as a save.
    alice.put("/note/a", "gone").await.problem(404);
    seen.assert_only(
        names::SAVE_SECONDS,
        &[("collection=note,outcome=saved", 1.0), ("collection=note,outcome=lost", 1.0)],
    );
    // The save that was refused because of the break is the same loss.
    seen.assert_only(names::LOST, &[("collection=note,reason=broken,noticed=break", 1.0)]);

    // Another server breaks the lock, and two heartbeats on this one miss it.
    let token = alice.post("/note/b").await.token();
    let other = LockManager::builder(store).without_reaper().break_policy(|_, _| true);
    let other = other.build().await.unwrap();
    other.register::<Note>().await.unwrap();
    crate::rig::app::break_on(&other, &key("b"), &Actor::new("root")).await.unwrap().unwrap();
    let believed = serde_json::json!({ "locks": { "note/b": token } });
    for _ in 0..2 {
        let answer = alice.post_json("/locks/heartbeat", believed.clone()).await;
        assert_eq!(answer.json()["lost"][0]["key"], "note/b");
    }
    let lost = "collection=note,reason=unknown,noticed=heartbeat";
    seen.assert_only(
        names::LOST,
        &[("collection=note,reason=broken,noticed=break", 2.0), (lost, 1.0)],
    );
}
