//! The functions that handlers call, dropped with their request.

#![allow(clippy::async_yields_async, reason = "the futures are dropped half-way, not awaited")]

use std::rc::Rc;

use actix_doclock::{HeldDoc, LockError, LockKey, LockedDoc, SessionLocks, Wait};
use actix_session::{SessionMiddleware, storage::CookieSessionStore};
use actix_web::{
    App, HttpResponse,
    cookie::{Cookie, Key},
    dev::Service,
    test::{self, TestRequest},
    web,
};

use super::{
    scene::{Paper, Scene},
    table::{After, Case, Pending},
};

fn key(id: &str) -> LockKey {
    LockKey::of::<Paper>(id.to_owned()).unwrap()
}

/// A handler that calls one function, and answers with an error, so that a newly taken lock is not
/// kept.
async fn call(
    locks: SessionLocks,
    path: web::Path<(String, String)>,
) -> Result<HttpResponse, LockError> {
    let (what, id) = path.into_inner();
    match &*what {
        "list" => drop(locks.list().await?),
        "lock" => drop(locks.lock::<Paper>(id).await?),
        "create" => {
            let id = format!("{id} new");
            drop(locks.create(id.clone(), Paper { id }).await?);
        }
        "lock_all" => {
            drop(locks.lock_all([key(&format!("{id} other")), key(&id)], Wait::no()).await?);
        }
        "lock_each" => {
            drop(locks.lock_each([key(&format!("{id} other")), key(&id)]).await?);
        }
        "open" => drop(locks.open::<Paper>(id).await?),
        "held" => drop(locks.held::<Paper>(id).await?),
        "take_over" => drop(locks.take_over::<Paper>(id).await?),
        "open_all" => drop(locks.open_all::<Paper>([id], Wait::no()).await?),
        "open_each" => drop(locks.open_each::<Paper>([id]).await?),
        "load" => drop(locks.load::<Paper>(id).await?),
        "load_without_policy" => drop(locks.load_without_policy::<Paper>(id).await?),
        "release" => drop(locks.release::<Paper>(id).await?),
        _ => drop(locks.release_all().await?),
    }
    Ok(HttpResponse::NotFound().finish())
}

async fn edit(_: LockedDoc<Paper>) -> HttpResponse {
    HttpResponse::NoContent().finish()
}

async fn held(
    mut paper: HeldDoc<Paper>,
    path: web::Path<(String, String)>,
) -> Result<HttpResponse, LockError> {
    match &*path.0 {
        "save" => paper.save().await?,
        "save_and_release" => paper.save_and_release().await?,
        "replace" => paper.replace().await?,
        "delete" => paper.delete().await?,
        _ => drop(paper.release().await?),
    }
    Ok(HttpResponse::NoContent().finish())
}

/// A request to `uri`, by a session that already has the lock or by one that does not.
async fn request(scene: Rc<Scene>, uri: &str, has_it: bool) -> Pending {
    let session = SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(scene.locks.session(session.cookie_secure(false).build()))
        .route("/call/{what}/{id}", web::post().to(call))
        .route("/edit/{id}", web::post().to(edit))
        .route("/held/{what}/{id}", web::post().to(held));
    let app = test::init_service(app).await;
    let id = scene.key.id();
    let mut request = TestRequest::post().uri(&format!("{uri}/{id}"));
    if has_it {
        let edit = TestRequest::post().uri(&format!("/edit/{id}")).to_request();
        let answer = app.call(edit).await.unwrap();
        let cookies: Vec<Cookie<'static>> =
            answer.response().cookies().map(Cookie::into_owned).collect();
        assert!(!cookies.is_empty() && answer.status().is_success());
        request = cookies.into_iter().fold(request, TestRequest::cookie);
    }
    Box::pin(async move {
        let _ = app.call(request.to_request()).await;
        drop(scene);
    })
}

macro_rules! requests {
    ($($name:literal => $after:ident, $has_it:literal, $uri:literal;)*) => {
        vec![$(Case {
            name: $name,
            after: After::$after,
            at_least: 0,
            begin: |scene| Box::pin(async move { request(scene, $uri, $has_it).await }),
        }),*]
    };
}

pub(super) fn cases() -> Vec<Case> {
    requests! {
        "web/session_locks.rs::list" => Free, false, "/call/list";
        "web/session_locks.rs::lock" => Free, false, "/call/lock";
        "web/session_locks.rs::create" => Free, false, "/call/create";
        "web/session_locks.rs::lock_all" => Free, false, "/call/lock_all";
        "web/session_locks.rs::lock_each" => Free, false, "/call/lock_each";
        "web/session_locks.rs::open" => Free, false, "/call/open";
        "web/session_locks.rs::held" => Somebodys, true, "/call/held";
        "web/session_locks.rs::take_over" => Free, false, "/call/take_over";
        "web/session_locks.rs::open_all" => Free, false, "/call/open_all";
        "web/session_locks.rs::open_each" => Free, false, "/call/open_each";
        "web/session_locks.rs::load" => Free, false, "/call/load";
        "web/session_locks.rs::load_without_policy" => Free, false, "/call/load_without_policy";
        "web/session_locks.rs::release" => SomebodysOrFree, true, "/call/release";
        "web/session_locks.rs::release_all" => SomebodysOrFree, true, "/call/release_all";
        "web/locked_doc.rs::save" => Somebodys, true, "/held/save";
        "web/locked_doc.rs::replace" => Somebodys, true, "/held/replace";
        "web/locked_doc.rs::delete" => SomebodysOrFree, true, "/held/delete";
        "web/locked_doc.rs::save_and_release" => SomebodysOrFree, true, "/held/save_and_release";
        "web/locked_doc.rs::release" => SomebodysOrFree, true, "/held/release";
        "LockedDoc (the extractor)" => Free, false, "/edit";
    }
}
