//! Pages without any JavaScript: the recipe of docs/typed-text.md.

use actix_doclock::{
    HeldDoc, LockKey, LockManager, Lockable, LockedDoc, MemoryStore, Released, SessionLocks,
};
use actix_session::{SessionMiddleware, storage::CookieSessionStore};
use actix_web::{App, HttpResponse, HttpServer, ResponseError, cookie::Key, web};
use serde::{Deserialize, Serialize};

use super::*;

#[derive(Serialize, Deserialize)]
struct Item {
    #[serde(rename = "_id")]
    id: i64,
    text: String,
}

impl Lockable for Item {
    type Id = i64;
    const COLLECTION: &'static str = "item";
}

#[derive(Deserialize)]
struct Form {
    text: String,
}

fn page(action: &str, typed: &str, stored: &str, why: &str) -> String {
    format!(
        "<!DOCTYPE html><title>Item</title><link rel=icon href=data:,>\
         <meta http-equiv=Content-Security-Policy content=\"script-src 'none'\">\
         <p id=why>{why}</p><p id=stored>{stored}</p>\
         <form method=post action='{action}'><input id=text name=text value='{typed}'>\
         <button id=save>Save</button></form>"
    )
}

fn html(mut answer: actix_web::HttpResponseBuilder, page: String) -> HttpResponse {
    answer.content_type("text/html").body(page)
}

async fn edit(item: LockedDoc<Item>) -> HttpResponse {
    let action =
        format!("/item/{}?lock_token={}&version={}", item.id, item.token(), item.version());
    html(HttpResponse::Ok(), page(&action, &item.text, "", "You are editing."))
}

async fn save(id: web::Path<i64>, locks: SessionLocks, form: web::Form<Form>) -> HttpResponse {
    let done =
        || HttpResponse::SeeOther().insert_header(("Location", format!("/item/{id}"))).finish();
    let saved = async {
        let mut item: HeldDoc<Item> = locks.held(*id).await?;
        item.text.clone_from(&form.text);
        item.save().await
    };
    let Err(error) = saved.await else { return done() };
    let refused = locks.refused(&error);
    if refused.saved.is_some()
        && locks.load::<Item>(*id).await.is_ok_and(|item| item.text == form.text)
    {
        return done();
    }
    let page = page(&format!("/item/{id}/again"), &form.text, "", &refused.why);
    html(HttpResponse::build(error.status_code()), page)
}

async fn again(id: web::Path<i64>, locks: SessionLocks, form: web::Form<Form>) -> HttpResponse {
    match locks.open::<Item>(*id).await {
        Ok(item) => {
            let action =
                format!("/item/{id}?lock_token={}&version={}", item.token(), item.version());
            html(HttpResponse::Ok(), page(&action, &form.text, &item.text, "Compare"))
        }
        Err(error) => {
            let why = locks.refused(&error).why;
            let page = page(&format!("/item/{id}/again"), &form.text, "", &why);
            html(HttpResponse::build(error.status_code()), page)
        }
    }
}

/// The text that is stored.
fn stored(store: &MemoryStore) -> String {
    store.all::<Item>().unwrap().remove(0).text
}

/// Presses the button of a page that no save has led to, and waits for the page that a save leads to.
async fn saves(page: &Page) {
    page.click("save").await;
    page.until("performance.getEntriesByType('navigation')[0].redirectCount === 1").await;
    page.until_says("why", "You are editing.").await;
}

/// Ends the lock on the item.
async fn released(locks: &LockManager) {
    let lock = locks.inspect(&LockKey::of::<Item>(1).unwrap()).await.unwrap().expect("a lock");
    assert_eq!(locks.release(&lock).await.unwrap(), Released::Released);
}

#[actix_web::test]
async fn without_javascript_nothing_typed_is_lost_and_nothing_stored_is_overwritten_unseen() {
    let _turn = STAGES.acquire().await.unwrap();
    let store = MemoryStore::new();
    store.put(1, &Item { id: 1, text: "old".to_owned() }).unwrap();
    let locks = LockManager::builder(store.clone()).build().await.unwrap();
    locks.register::<Item>().await.unwrap();
    let manager = locks.clone();
    let server = HttpServer::new(move || {
        let session =
            SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
        App::new()
            .wrap(manager.session(session.cookie_secure(false).build()))
            .route("/item/{id}", web::get().to(edit))
            .route("/item/{id}", web::post().to(save))
            .route("/item/{id}/again", web::post().to(again))
    });
    let server = server.workers(1).bind(("127.0.0.1", 0)).unwrap();
    let url = format!("http://{}/item/1", server.addrs()[0]);
    actix_web::rt::spawn(server.run());

    let (alices, bobs) = (Browser::start().await, Browser::start().await);
    let older = alices.open(&url).await;
    let newer = older.beside(&url).await;
    newer.write("text", "newer").await;
    saves(&newer).await;
    assert_eq!((newer.value("text").await, stored(&store)), ("newer".into(), "newer".to_owned()));

    // The older of two tabs.
    older.write("text", "older").await;
    older.click("save").await;
    older.until_says("why", "has been saved since you opened it").await;
    assert_eq!((older.value("text").await, stored(&store)), ("older".into(), "newer".to_owned()));
    older.click("save").await;
    older.until_says("stored", "newer").await;
    assert_eq!((older.value("text").await, stored(&store)), ("older".into(), "newer".to_owned()));
    saves(&older).await;
    assert_eq!(stored(&store), "older");

    // The same text twice, as by a double click.
    let twice = [older.beside(&url).await, older.beside(&url).await];
    for page in &twice {
        page.write("text", "twice").await;
    }
    for page in &twice {
        saves(page).await;
        assert_eq!(stored(&store), "twice");
    }

    // The lock is gone, and another person has it.
    released(&locks).await;
    let bob = bobs.open(&url).await;
    older.write("text", "once more").await;
    older.click("save").await;
    older.until_says("why", "Nothing was saved").await;
    older.click("save").await;
    older.until_says("why", "is being edited by").await;
    assert_eq!(older.value("text").await, "once more");
    bob.write("text", "bob's").await;
    saves(&bob).await;
    assert_eq!(stored(&store), "bob's");
    released(&locks).await;
    older.click("save").await;
    older.until_says("stored", "bob's").await;
    assert_eq!(older.value("text").await, "once more");
    drop((older, newer, twice, bob));
    for browser in [alices, bobs] {
        assert_eq!(browser.complaints().await, [""; 0]);
        browser.leave(&url).await;
    }
}
