//! The network loses the replies to a save, as a request sees it.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use actix_doclock::{HeldDoc, LockError, Lockable, LockedDoc, MongoStore};
use actix_session::{SessionMiddleware, storage::CookieSessionStore};
use actix_web::{HttpResponse, cookie::Key, http::StatusCode, test, web};
use mongodb::{
    ClientSession,
    bson::{Document, doc},
};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::rig::app::{WorkItem, key, lock_records, put, take_away, title};
use crate::rig::faulty::Faulty;

/// The commit is never confirmed. Before the whole save is repeated, the lock is broken. The repetition
/// finds the lock lost, but the document is written, so "lost, nothing written" would be wrong.
#[actix_web::test]
async fn a_save_that_was_written_is_never_called_lost() {
    async fn edit(_: LockedDoc<WorkItem>) -> HttpResponse {
        HttpResponse::Ok().finish()
    }
    async fn save(mut item: HeldDoc<WorkItem>, title: String) -> Result<HttpResponse, LockError> {
        item.title = title;
        item.save().await?;
        Ok(HttpResponse::Ok().finish())
    }

    let faulty = Faulty::new().await;
    put(&faulty.database, "a", "old").await;
    let sessions = SessionMiddleware::new(CookieSessionStore::default(), Key::generate());
    let server = test::init_service(
        actix_web::App::new()
            .wrap(faulty.app.locks.session(sessions))
            .route("/{id}/edit", web::post().to(edit))
            .route("/{id}", web::put().to(save)),
    )
    .await;
    let opened = test::TestRequest::post().uri("/a/edit").send_request(&server).await;
    let cookie = opened.response().cookies().next().expect("a session").into_owned();

    // Holds up all commits of one save, each sent twice by the driver, and then the first update of the
    // next.
    for _ in 0..10 {
        faulty.proxy.drop_reply_to("commitTransaction");
    }
    let saving = test::TestRequest::put().uri("/a").cookie(cookie).set_payload("new");
    let saving = async {
        let answer = saving.send_request(&server).await;
        faulty.proxy.let_go();
        answer
    };
    let meanwhile = async {
        faulty.proxy.until_fired(1).await;
        faulty.proxy.hold_request("update");
        faulty.proxy.until_fired(10).await;
        lock_records(&faulty.database).delete_many(doc! {}).await.unwrap();
        faulty.proxy.let_go();
    };
    let (answer, ()) = tokio::join!(saving, meanwhile);
    assert_eq!(title(&faulty.database, "a").await, "new", "it was written");
    assert_ne!(answer.status(), StatusCode::CONFLICT, "lost, nothing written");
}

/// While the transaction runs, another request of the session opens the document, so the server knows the lock
/// again. Then nobody knows whether the transaction is committed.
#[actix_web::test]
async fn after_a_transaction_of_unknown_outcome_the_next_reentry_waits_for_it() {
    #[derive(Debug, Default)]
    struct Gate {
        inside: Notify,
        go: Notify,
        attempts: AtomicUsize,
    }

    async fn edit(_: LockedDoc<WorkItem>) -> HttpResponse {
        HttpResponse::Ok().finish()
    }
    async fn book(
        item: HeldDoc<WorkItem>,
        store: web::Data<MongoStore>,
        gate: web::Data<Gate>,
    ) -> Result<HttpResponse, LockError> {
        let items = store.database().collection::<Document>("workitem");
        let work = async |session: &mut ClientSession| {
            if gate.attempts.fetch_add(1, Relaxed) == 0 {
                gate.inside.notify_one();
                gate.go.notified().await;
            }
            let booked = doc! { "$set": { "title": "booked" } };
            items.update_one(doc! { "_id": "a" }, booked).session(session).await
        };
        store.transaction(&[item.held()], work).await?;
        Ok(HttpResponse::Ok().finish())
    }

    let faulty = Faulty::with_deadline(Duration::from_secs(15)).await;
    put(&faulty.database, "a", "old").await;
    let sessions = SessionMiddleware::new(CookieSessionStore::default(), Key::generate());
    let gate = web::Data::new(Gate::default());
    let server = test::init_service(
        actix_web::App::new()
            .wrap(faulty.app.locks.session(sessions))
            .app_data(web::Data::new(faulty.app.store.clone()))
            .app_data(gate.clone())
            .route("/{id}/edit", web::post().to(edit))
            .route("/{id}/book", web::post().to(book)),
    )
    .await;
    let opened = test::TestRequest::post().uri("/a/edit").send_request(&server).await;
    let cookie = opened.response().cookies().next().expect("a session").into_owned();
    let post = async |uri: &str| {
        let request = test::TestRequest::post().uri(uri).cookie(cookie.clone());
        request.send_request(&server).await.status()
    };
    let meanwhile = async {
        gate.inside.notified().await;
        // Until a re-entry is a read.
        loop {
            let written = faulty.proxy.passed("findAndModify");
            assert_eq!(post("/a/edit").await, StatusCode::OK);
            if faulty.proxy.passed("findAndModify") == written {
                break;
            }
        }
        faulty.proxy.hold_replies_to("commitTransaction");
        gate.go.notify_one();
    };
    let (booked, ()) = tokio::join!(post("/a/book"), meanwhile);
    assert_eq!(booked, StatusCode::SERVICE_UNAVAILABLE);
    faulty.proxy.let_go();
    let written = faulty.proxy.passed("findAndModify");
    assert_eq!(post("/a/edit").await, StatusCode::OK);
    assert!(faulty.proxy.passed("findAndModify") > written, "a read would not wait");
}

/// The first save is committed, but nobody hears of it. Then another program changes the same array, or the lock is lost, so
/// the same save cannot be carried out again: "nothing was written" would be wrong.
#[actix_web::test]
async fn a_save_of_unknown_outcome_that_is_repeated_is_never_called_unwritten() {
    #[derive(Serialize, Deserialize)]
    struct Tagged {
        #[serde(rename = "_id")]
        id: String,
        tags: Vec<String>,
    }
    impl Lockable for Tagged {
        type Id = String;
        const COLLECTION: &'static str = "workitem";
    }
    #[derive(Debug, Default)]
    struct Gate {
        failed: Notify,
        go: Notify,
    }
    async fn edit(_: LockedDoc<Tagged>) -> HttpResponse {
        HttpResponse::Ok().finish()
    }
    async fn save(
        mut item: HeldDoc<Tagged>,
        how: web::Path<(String, String)>,
        gate: web::Data<Gate>,
    ) -> Result<HttpResponse, LockError> {
        item.tags.push("mine".to_owned());
        let first = item.save().await;
        assert!(matches!(first, Err(LockError::OutcomeUnknown(_) | LockError::Store(_))));
        gate.failed.notify_one();
        gate.go.notified().await;
        if how.1 == "save" {
            item.save().await?
        } else {
            item.replace().await?
        };
        Ok(HttpResponse::Ok().finish())
    }

    for how in ["save", "replace"] {
        let faulty = Faulty::with_deadline(Duration::from_secs(10)).await;
        let items = faulty.database.collection::<Document>("workitem");
        items.insert_one(doc! { "_id": "a", "tags": ["x"] }).await.unwrap();
        let sessions = SessionMiddleware::new(CookieSessionStore::default(), Key::generate());
        let gate = web::Data::new(Gate::default());
        let server = test::init_service(
            actix_web::App::new()
                .wrap(faulty.app.locks.session(sessions))
                .app_data(gate.clone())
                .route("/{id}/edit", web::post().to(edit))
                .route("/{id}/{how}", web::put().to(save)),
        )
        .await;
        let opened = test::TestRequest::post().uri("/a/edit").send_request(&server).await;
        let cookie = opened.response().cookies().next().expect("a session").into_owned();
        faulty.proxy.hold_replies_to("commitTransaction");
        let meanwhile = async {
            gate.failed.notified().await;
            faulty.proxy.let_go();
            let theirs = doc! { "$push": { "tags": "theirs" } };
            items.update_one(doc! { "_id": "a", "tags": "mine" }, theirs).await.unwrap();
            if how == "replace" {
                take_away(&faulty.database, &key("a")).await;
            }
            gate.go.notify_one();
        };
        let saving =
            test::TestRequest::put().uri(&format!("/a/{how}")).cookie(cookie).send_request(&server);
        let (answer, ()) = tokio::join!(saving, meanwhile);
        let stored = items.find_one(doc! {}).await.unwrap().unwrap();
        assert_eq!(stored.get_array("tags").unwrap().len(), 3, "it was written");
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "unknown, not unwritten");
    }
}
