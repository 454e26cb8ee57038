//! Files that browsers load.

use std::{
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

pub(super) fn routes(config: &mut ServiceConfig) {
    let file = |path| only(path, "GET, HEAD");
    config
        .service(file("/client.js").get(client).route(web::head().to(client)))
        .service(file("/keep.js").get(keep).route(web::head().to(keep)))
        .service(file("/client.d.ts").get(client_types).route(web::head().to(client_types)));
}

async fn client(req: HttpRequest) -> HttpResponse {
    file(&req, JAVASCRIPT, include_str!("assets/client.js"))
}

async fn keep(req: HttpRequest) -> HttpResponse {
    file(&req, JAVASCRIPT, include_str!("assets/keep.js"))
}

async fn client_types(req: HttpRequest) -> HttpResponse {
    file(&req, "text/plain; charset=utf-8", include_str!("assets/client.d.ts"))
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
