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

pub(super) fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    let time = time.replace_millisecond(time.millisecond()).unwrap_or(time);
    // Stores give dates between 1970 and 9999, which can be formatted.
    time.format(&Rfc3339).unwrap_or_default()
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
