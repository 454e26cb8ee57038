//! Requests with arbitrary bytes to an application in this process, as in
//! `tests/suite/properties/requests.rs`. No answer may be a 500, and no other session's lock may be
//! touched.
#![no_main]

#[path = "../../tests/suite/properties/hostile.rs"]
mod hostile;

use std::{cell::RefCell, time::Duration};

use actix_doclock::{
    Aid, HeldDoc, Holder, Lock, LockError, LockKey, LockManager, Lockable, LockedDoc, MemoryStore,
    TryAcquire, lock_api,
};
use actix_session::{SessionMiddleware, storage::CookieSessionStore};
use actix_web::{
    App, HttpResponse,
    cookie::Key,
    dev::Service,
    rt::{System, SystemRunner},
    test, web,
};
use libfuzzer_sys::fuzz_target;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Note {
    #[serde(rename = "_id")]
    id: String,
}

impl Lockable for Note {
    type Id = String;
    const COLLECTION: &'static str = "note";
}

async fn edit(_: LockedDoc<Note>) -> HttpResponse {
    HttpResponse::NoContent().finish()
}

async fn save(mut note: HeldDoc<Note>) -> Result<HttpResponse, LockError> {
    note.save().await?;
    Ok(HttpResponse::NoContent().finish())
}

fn key() -> LockKey {
    LockKey::of::<Note>("a".to_owned()).expect("a key")
}

async fn alice() -> (LockManager, Lock) {
    let store = MemoryStore::new();
    store.put("a".to_owned(), &Note { id: "a".to_owned() }).expect("JSON");
    let locks = LockManager::builder(store).ttl(Duration::from_secs(86_400)).without_reaper();
    let locks = locks.build().await.expect("settings");
    locks.register::<Note>().await.expect("a collection");
    match locks.lock_for_session(&key(), &Aid::new(), &Holder::new("alice")).await {
        Ok(TryAcquire::Granted(lock)) => (locks, lock),
        other => panic!("{other:?}"),
    }
}

async fn survives(locks: &LockManager, lock: &Lock, hostile: &hostile::Hostile) {
    let Some(request) = hostile.request() else { return };
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(locks.session(session))
        .service(web::resource("/note/{id}").post(edit).put(save))
        .service(web::scope("/locks").configure(lock_api));
    let app = test::init_service(app).await;
    let status = match app.call(request.to_request()).await {
        Ok(response) => response.status(),
        Err(error) => error.as_response_error().status_code(),
    };
    assert!(!status.is_server_error(), "{status}");
    let now = locks.inspect(&key()).await.expect("an answer").expect("Alice's lock");
    assert_eq!((now.token, &now.aid), (lock.token, &lock.aid));
}

thread_local! {
    static SERVER: RefCell<Option<(SystemRunner, LockManager, Lock)>> = const { RefCell::new(None) };
}

fuzz_target!(|bytes: &[u8]| {
    let Some(hostile) = hostile::Hostile::from_bytes(bytes) else { return };
    SERVER.with_borrow_mut(|server| {
        let (system, locks, lock) = server.get_or_insert_with(|| {
            let system = System::new();
            let (locks, lock) = system.block_on(alice());
            (system, locks, lock)
        });
        system.block_on(survives(locks, lock, &hostile));
    });
});
