//! The network loses the replies to a save, as a request sees it.

use actix_doclock::{HeldDoc, LockError, LockedDoc};
use actix_session::{SessionMiddleware, storage::CookieSessionStore};
use actix_web::{HttpResponse, cookie::Key, http::StatusCode, test, web};
use mongodb::bson::doc;

use crate::rig::app::{WorkItem, lock_records, put, title};
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
