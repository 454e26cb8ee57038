//! The formats of the HTTP API.

use std::time::{Duration, SystemTime};

use actix_web::{
    HttpRequest, HttpResponse, Responder,
    body::BoxBody,
    http::header::{CACHE_CONTROL, HeaderValue},
    web::Json,
};
use serde::Serialize;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use uuid::Uuid;

use crate::{
    key::LockKey,
    lock::{Aid, Answer, Ask, Lock, TabId},
};

/// An answer about locks in JSON. No cache may keep it: it is outdated at once, and for this person only.
pub(super) struct Current<T>(pub(super) T);

impl<T: Serialize> Responder for Current<T> {
    type Body = BoxBody;

    fn respond_to(self, req: &HttpRequest) -> HttpResponse {
        let mut answer = Json(self.0).respond_to(req).map_into_boxed_body();
        answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        answer
    }
}

/// The name of a document.
#[derive(Serialize)]
pub(super) struct KeyBody {
    /// As in a heartbeat.
    key: String,
    collection: String,
    id: String,
}

impl KeyBody {
    /// A name as a client has written it: `"collection/id"`, if it is well-formed.
    pub(super) fn named(name: &str) -> Self {
        let (collection, id) = name.split_once('/').unwrap_or_default();
        Self { key: name.to_owned(), collection: collection.to_owned(), id: id.to_owned() }
    }
}

impl From<&LockKey> for KeyBody {
    fn from(key: &LockKey) -> Self {
        Self::named(&key.to_string())
    }
}

/// An ask, as its asker and the holder see it.
#[derive(Serialize)]
pub(super) struct AskBody {
    ask: Uuid,
    by: String,
    message: String,
    at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reply: Option<String>,
}

impl From<&Ask> for AskBody {
    fn from(ask: &Ask) -> Self {
        Self {
            ask: ask.id,
            by: ask.by.label.clone(),
            message: ask.message.clone(),
            at: rfc3339(ask.at),
            answer: ask.answer.as_ref().map(Answer::name),
            reply: ask.answer.as_ref().map(|it| it.message().to_owned()),
        }
    }
}

/// Whose lock it is, from the view of this tab of this session.
pub(super) fn whose(lock: &Lock, aid: Option<&Aid>, tab: Option<TabId>) -> &'static str {
    match lock.is_of_another_tab(tab) {
        _ if aid != Some(&lock.aid) => "held",
        true => "mine_elsewhere",
        false => "mine",
    }
}

pub(super) fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    let time = time.replace_millisecond(time.millisecond()).unwrap_or(time);
    // Stores give dates between 1970 and 9999, which can be formatted.
    time.format(&Rfc3339).unwrap_or_default()
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
