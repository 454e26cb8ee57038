//! Files that browsers load.

use std::{
    future::ready,
    hash::{DefaultHasher, Hash, Hasher},
    rc::Rc,
};

use actix_web::{
    HttpMessage, HttpRequest, HttpResponse,
    http::header::{self, ETag, EntityTag, Header, IfNoneMatch},
    web::{self, ServiceConfig},
};

use crate::web::{problem::only, request::RequestLocks};

pub(super) const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
const TYPES: &str = "text/plain; charset=utf-8";

/// The modules for pages, and their types.
const FILES: [(&str, &str, &str); 5] = [
    ("/client.js", JAVASCRIPT, include_str!("../../web/client.js")),
    ("/client.d.ts", TYPES, include_str!("../../web/client.d.ts")),
    ("/elements.js", JAVASCRIPT, include_str!("../../web/elements.js")),
    ("/elements.d.ts", TYPES, include_str!("../../web/elements.d.ts")),
    ("/keep.js", JAVASCRIPT, include_str!("../../web/keep.js")),
];

pub(super) fn routes(config: &mut ServiceConfig) {
    for (path, content_type, text) in FILES {
        let answer = move |req: HttpRequest| ready(file(&req, content_type, text));
        config.service(only(path, "GET, HEAD").get(answer).route(web::head().to(answer)));
    }
}

/// A file that browsers cache, and revalidate at each use. It is the same for everybody, so a cookie in it would be for
/// nobody.
pub(super) fn file(req: &HttpRequest, content_type: &str, text: &'static str) -> HttpResponse {
    if let Some(locks) = req.extensions().get::<Rc<RequestLocks>>() {
        locks.is_for_everybody.set(true);
    }
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let tag = EntityTag::new_strong(format!("{:x}", hasher.finish()));
    let is_known = match IfNoneMatch::parse(req) {
        Ok(IfNoneMatch::Items(known)) => known.iter().any(|it| it.weak_eq(&tag)),
        _ => false,
    };
    let mut response = if is_known { HttpResponse::NotModified() } else { HttpResponse::Ok() };
    response
        .insert_header(ETag(tag))
        .insert_header((header::CACHE_CONTROL, "private, no-cache"))
        .insert_header((header::X_CONTENT_TYPE_OPTIONS, "nosniff"));
    if is_known { response.finish() } else { response.content_type(content_type).body(text) }
}
