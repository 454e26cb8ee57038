//! Requests that no browser sends. Every answer keeps to the contract, and no other session's lock or
//! document is touched.

use std::time::Duration;

use actix_doclock::{
    Actor, Aid, HeldDoc, Holder, Lock, LockError, LockKey, LockManager, Lockable, LockedDoc,
    MemoryStore, TryAcquire, lock_api,
};
use actix_http::Request;
use actix_session::{Session, SessionMiddleware, storage::CookieSessionStore};
use actix_web::{
    App, Error, HttpResponse, Responder,
    body::to_bytes,
    cookie::Key,
    dev::{Service, ServiceResponse},
    http::StatusCode,
    test::{self, TestRequest},
    web,
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use proptest::{collection::vec, prelude::*};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::hostile::Hostile;
use crate::rig::random::check;

macro_rules! documents {
    ($($type:ident, $id:ty, $collection:literal;)*) => { $(
        #[derive(Debug, Clone, Serialize, Deserialize)]
        struct $type {
            #[serde(rename = "_id")]
            id: $id,
        }

        impl Lockable for $type {
            type Id = $id;
            const COLLECTION: &'static str = $collection;
        }
    )* };
}

documents! {
    Note, String, "note";
    Number, i64, "number";
    Short, i32, "short";
    Named, uuid::Uuid, "uuid";
}

/// The attacker's target, which must stay unharmed: the lock on the note `a`, and the note's text.
struct Victim {
    locks: LockManager,
    store: MemoryStore,
    lock: Lock,
}

impl Victim {
    async fn new() -> Self {
        let store = MemoryStore::new();
        store.put("a".to_owned(), &Note { id: "a".to_owned() }).unwrap();
        let locks = LockManager::builder(store.clone()).ttl(Duration::from_secs(600));
        let locks = locks.without_reaper().build().await.unwrap();
        locks.register::<Note>().await.unwrap();
        locks.register::<Number>().await.unwrap();
        locks.register::<Short>().await.unwrap();
        locks.register::<Named>().await.unwrap();
        let alice =
            locks.lock_for_session(&note("a"), &Aid::new(), &Holder::new("alice")).await.unwrap();
        let TryAcquire::Granted(lock) = alice else { panic!("not granted") };
        Self { locks, store, lock }
    }

    async fn is_unharmed(&self) -> bool {
        let now = self.locks.inspect(&note("a")).await.unwrap();
        let same =
            now.is_some_and(|now| (now.token, now.aid) == (self.lock.token, self.lock.aid.clone()));
        same && self.store.all::<Note>().unwrap().iter().any(|it| it.id == "a")
    }

    async fn app(
        &self,
    ) -> impl Service<Request, Response = ServiceResponse, Error = Error> + use<> {
        async fn edit(note: LockedDoc<Note>) -> impl Responder {
            HttpResponse::Ok().json(&*note)
        }
        async fn save(mut note: HeldDoc<Note>) -> Result<impl Responder, LockError> {
            note.save().await?;
            Ok(HttpResponse::NoContent())
        }
        let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
        let mallory = |_: &Session| Some(Actor::new("mallory").with_id("mallory"));
        let app = App::new()
            .wrap(self.locks.session(session).identify(mallory))
            .service(web::resource("/note/{id}").post(edit).put(save))
            .service(web::scope("/locks").configure(lock_api));
        test::init_service(app).await
    }
}

fn note(id: &str) -> LockKey {
    LockKey::of::<Note>(id.to_owned()).unwrap()
}

async fn answer(
    app: &impl Service<Request, Response = ServiceResponse, Error = Error>,
    request: TestRequest,
) -> (StatusCode, Value) {
    let response = match app.call(request.to_request()).await {
        Ok(response) => response.into_parts().1,
        Err(error) => error.error_response(),
    };
    let status = response.status();
    let is_stream = (response.headers().get("content-type"))
        .is_some_and(|it| it.as_bytes().starts_with(b"text/event-stream"));
    let is_text =
        response.headers().get("content-type").is_none_or(|it| !it.as_bytes().ends_with(b"json"));
    if is_stream || is_text {
        return (status, Value::Null);
    }
    let body = to_bytes(response.into_body()).await.unwrap_or_else(|_| panic!("a body"));
    (status, serde_json::from_slice(&body).unwrap_or_else(|e| panic!("{e}: {body:?}")))
}

/// JSON that resembles a body of the API.
fn bodies() -> impl Strategy<Value = Vec<u8>> {
    let leaf = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        Just(json!("00000000-0000-0000-0000-000000000000")),
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
    ];
    let value = leaf.prop_recursive(3, 12, 4, |inner| {
        let key = prop_oneof!["note/a", "/", ".*", "[a-z]{1,8}/.{0,8}"];
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            vec((key, inner), 0..4).prop_map(|it| Value::Object(it.into_iter().collect())),
        ]
    });
    let name = prop_oneof![
        Just("mode"),
        Just("wait_ms"),
        Just("take_over"),
        Just("token"),
        Just("page"),
        Just("grace_ms"),
        Just("locks"),
        Just("reason"),
        Just("other"),
    ];
    let object = vec((name, value), 0..4).prop_map(|fields| {
        let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value));
        Value::Object(fields.collect()).to_string().into_bytes()
    });
    let deep = (1..200_usize).prop_map(|n| [b"[".repeat(n), b"]".repeat(n)].concat());
    prop_oneof![4 => object, 2 => vec(any::<u8>(), 0..64), 1 => deep]
}

fn requests() -> impl Strategy<Value = Hostile> {
    let value = prop_oneof![
        vec(any::<u8>(), 0..80),
        "<?(urn:uuid:)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}>?(,.{0,4})?"
            .prop_map(String::into_bytes),
        "[0-9]{0,30}".prop_map(String::into_bytes),
        "id=[ -~]{0,80}".prop_map(String::into_bytes),
    ];
    let id = prop_oneof![
        vec((any::<u8>(), any::<u8>()), 0..24),
        "[0-9-]{0,24}".prop_map(|it| it.bytes().map(|byte| (byte, 0)).collect()),
        "(\\.\\./|%2e|%2f|\\$ne|\\{|\\}|\0|a){0,6}"
            .prop_map(|it| it.bytes().map(|byte| (byte, 1)).collect()),
    ];
    let headers = vec((any::<u8>(), value), 0..4);
    (any::<u8>(), any::<u8>(), id, headers, bodies())
        .prop_map(|(method, place, id, headers, body)| Hostile { method, place, id, headers, body })
}

#[test]
fn every_answer_keeps_to_the_contract() {
    let runtime = actix_web::rt::System::new();
    let victim = runtime.block_on(Victim::new());
    let app = runtime.block_on(victim.app());
    let mut answered = 0;
    check("requests", 1_000, &requests(), |hostile: Hostile| {
        let Some(request) = hostile.request() else { return };
        answered += 1;
        runtime.block_on(async {
            let (status, body) = answer(&app, request).await;
            assert!(!status.is_server_error(), "{status}: {body}");
            if body.get("status").is_some() {
                assert_eq!(body["status"], status.as_u16(), "{body}");
                assert!(!body.to_string().contains(victim.lock.aid.as_str()), "an aid: {body}");
            }
            assert!(victim.is_unharmed().await);
        });
    });
    assert!(answered > 300, "most requests must get through to be answered: {answered}");
}

/// Whatever the string, it is the id of exactly one document.
#[test]
fn an_id_in_a_path_arrives_unchanged() {
    let runtime = actix_web::rt::System::new();
    let victim = runtime.block_on(Victim::new());
    let app = runtime.block_on(victim.app());
    let ids =
        prop_oneof![any::<String>(), "(\\.|/|%|2e|2F|\\\\|\\$|\u{0}|é|a){1,12}", "[^a]{340,345}",];
    check("ids in paths", 300, &ids, |id: String| {
        let encoded = utf8_percent_encode(&id, NON_ALPHANUMERIC).to_string();
        let post = || TestRequest::post().uri(&format!("/locks/note/{encoded}"));
        runtime.block_on(async {
            if id.len() > actix_doclock::limits::MAX_ID_BYTES {
                assert_eq!(answer(&app, post()).await.0, StatusCode::BAD_REQUEST);
                return;
            }
            // An empty segment does not count as a segment, and `a` belongs to another session.
            if id.is_empty() || id == "a" {
                return;
            }
            victim.store.put(id.clone(), &Note { id: id.clone() }).unwrap();
            let (status, body) = answer(&app, post()).await;
            assert_eq!(status, StatusCode::CREATED, "{body}");
            assert_eq!(body["id"], id.as_str());
            let lock = victim.locks.inspect(&note(&id)).await.unwrap().expect("it is locked");
            victim.locks.release(&lock).await.unwrap();
            victim.store.remove(&note(&id));
            assert!(victim.is_unharmed().await);
        });
    });
}

#[test]
fn only_a_token_parses_as_a_token() {
    let texts = prop_oneof![any::<String>(), "<?(urn:uuid:)?[{]?[0-9a-fA-F-]{30,38}[}]?>?"];
    check("tokens", 2_000, &texts, |text: String| {
        if let Ok(token) = text.parse::<actix_doclock::LockToken>() {
            assert_eq!(token.to_string().parse(), Ok(token));
        }
    });
}
