//! The table of all locks, for administrators.

use std::collections::{BTreeMap, BTreeSet};

use actix_web::{
    HttpRequest, HttpResponse,
    http::{
        StatusCode,
        header::{self, HeaderValue},
    },
    web::ServiceConfig,
};
use serde::Serialize;

use crate::{
    freeze::Freeze,
    key::LockKey,
    lock::{Holder, LockToken, Mode},
    manager::LISTED,
    web::{
        Problem,
        assets::{JAVASCRIPT, file},
        format::{Current, KeyBody, millis, rfc3339},
        problem::only,
        request::{Locks, RequestLocks},
    },
};

/// The whole content security policy, because middleware usually adds its own only to answers without one. No other
/// page may hide this page in a frame, and lead a click of an administrator to the button that breaks a lock.
const POLICY: HeaderValue =
    HeaderValue::from_static("default-src 'self'; base-uri 'none'; frame-ancestors 'none'");

pub(super) fn routes(config: &mut ServiceConfig) {
    config
        .service(only("/admin", "GET").get(page))
        .service(only("/admin.js", "GET").get(script))
        .service(only("/admin.css", "GET").get(style))
        .service(only("/admin.json", "GET").get(all));
}

/// # Errors
/// 404 if the application has no admin policy: then there is no such page. 403 if the policy refuses.
fn allowed(locks: &RequestLocks) -> Result<(), Problem> {
    match locks.manager.core.settings.may_see_all(&locks.actor()) {
        Some(true) => Ok(()),
        Some(false) => Err(Problem::new(StatusCode::FORBIDDEN, "not_an_administrator")
            .detail("only administrators may see the locks of all users")),
        None => Err(Problem::new(StatusCode::NOT_FOUND, "no_such_route")
            .detail("this application has no table of all locks")),
    }
}

async fn page(Locks(locks): Locks, req: HttpRequest) -> Result<HttpResponse, Problem> {
    allowed(&locks)?;
    let mut page = file(&req, "text/html; charset=utf-8", include_str!("assets/admin.html"));
    page.headers_mut().insert(header::CONTENT_SECURITY_POLICY, POLICY);
    Ok(page)
}

async fn script(Locks(locks): Locks, req: HttpRequest) -> Result<HttpResponse, Problem> {
    allowed(&locks)?;
    Ok(file(&req, JAVASCRIPT, include_str!("assets/admin.js")))
}

async fn style(Locks(locks): Locks, req: HttpRequest) -> Result<HttpResponse, Problem> {
    allowed(&locks)?;
    Ok(file(&req, "text/css; charset=utf-8", include_str!("assets/admin.css")))
}

#[derive(Serialize)]
struct AllBody {
    locks: Vec<LockBody>,
    /// True if there are more locks than those listed.
    more: bool,
    /// True if changes are reported at once; false if they are reported within about a second.
    told: bool,
    /// The freezes that are on.
    frozen: Vec<Freeze>,
}

#[derive(Serialize)]
struct LockBody {
    #[serde(flatten)]
    key: KeyBody,
    title: Option<String>,
    link: Option<String>,
    mode: Mode,
    holder: Option<Holder>,
    since: String,
    expires_in_ms: u64,
    /// Identifies the acquisition, so that no other lock is broken. The token is of no use to another
    /// session.
    token: Option<LockToken>,
    may_break: bool,
}

async fn all(Locks(locks): Locks) -> Result<Current<AllBody>, Problem> {
    allowed(&locks)?;
    let (manager, actor) = (&locks.manager, locks.actor());
    let (told, frozen) = (manager.core.is_told_of_events(), manager.core.freezes.all());
    let mut all = manager.list().await?;
    let mut documents: BTreeMap<&str, BTreeSet<&LockKey>> = BTreeMap::new();
    for lock in &all {
        documents.entry(lock.key.collection()).or_default().insert(&lock.key);
    }
    let more = documents.values().any(|of_collection| of_collection.len() >= LISTED);
    let asker = locks.counts_as();
    let keys: Vec<_> = documents.into_values().flatten().cloned().collect();
    let titles = manager.core.descriptions_for(Some(&actor), Some(&asker), &keys).await;
    // The oldest lock first.
    all.sort_by_key(|lock| lock.since);
    let bodies = all.into_iter().map(|lock| {
        let described = titles.get(&lock.key).cloned();
        let (title, link) = described.map(|it| (it.title, it.link)).unzip();
        LockBody {
            key: KeyBody::from(&lock.key),
            title,
            link: link.flatten(),
            mode: lock.mode,
            since: rfc3339(lock.since),
            expires_in_ms: millis(lock.expires_in()),
            token: lock.token,
            may_break: manager.core.settings.may_break(&actor, &lock),
            holder: lock.holder,
        }
    });
    Ok(Current(AllBody { more, locks: bodies.collect(), told, frozen }))
}
