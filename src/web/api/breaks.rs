//! Breaks the locks of other people.

use actix_web::{HttpRequest, HttpResponse, http::header::HeaderName};
use serde::Deserialize;

use crate::{
    error::LockError,
    key::LockKey,
    lock::Lock,
    manager::MAX_REASON_BYTES,
    store::Released,
    web::{
        Problem,
        access::Access,
        api::{Body, allowed, bad_request, by_name, form, parse_token},
        request::{Locks, RequestLocks},
        same_site::SameSite,
    },
};

/// How many locks a break has removed: 0 if the lock was already gone.
const DOCLOCK_BROKEN: HeaderName = HeaderName::from_static("doclock-broken");

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct BreakBody {
    reason: String,
    /// The lock that the person was shown.
    token: Option<String>,
    /// Where the browser goes after a form.
    to: Option<String>,
}

pub(super) async fn break_lock(
    _: SameSite,
    Locks(locks): Locks,
    req: HttpRequest,
    body: Body,
) -> Result<HttpResponse, Problem> {
    let key = allowed(&locks, &req, Access::Look).await?;
    let call = form::read::<BreakBody>(&req, body)?;
    let done = call.done(&req, call.said.to.as_deref())?;
    broken(&locks, key, call.said, done).await
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct BreakNamedBody {
    /// The document, as `"collection/id"`.
    key: String,
    reason: String,
    token: Option<String>,
    to: Option<String>,
}

pub(super) async fn break_named(
    _: SameSite,
    Locks(locks): Locks,
    req: HttpRequest,
    body: Body,
) -> Result<HttpResponse, Problem> {
    let permissions = locks.permissions();
    permissions.check_any()?;
    let call = form::read::<BreakNamedBody>(&req, body)?;
    let done = call.done(&req, call.said.to.as_deref())?;
    let BreakNamedBody { key, reason, token, to } = call.said;
    let key = by_name(&permissions, &key)?;
    permissions.check(&key, Access::Look).await?;
    broken(&locks, key, BreakBody { reason, token, to }, done).await
}

/// Breaks the locks on a document that this person may see.
async fn broken(
    locks: &RequestLocks,
    key: LockKey,
    BreakBody { reason, token, .. }: BreakBody,
    mut done: HttpResponse,
) -> Result<HttpResponse, Problem> {
    if reason.len() > MAX_REASON_BYTES {
        return Err(bad_request(format_args!("a reason has at most {MAX_REASON_BYTES} bytes")));
    }
    let token = token.map(|token| parse_token(&token)).transpose()?;
    let on_it = locks.manager.locks_on(&key).await?;
    let is_meant = |lock: &&Lock| token.is_none() || lock.token == token;
    // If the document has several readers, all of their locks must be broken, or none.
    let (meant, actor): (Vec<_>, _) = (on_it.iter().filter(is_meant).collect(), locks.actor());
    if !meant.iter().all(|lock| locks.manager.core.settings.may_break(&actor, lock)) {
        return Err(LockError::BreakRefused { key }.into());
    }
    let mut broken = 0;
    for lock in meant {
        let outcome = locks.manager.break_lock(lock, &actor, &reason).await?;
        broken += usize::from(outcome == Released::Released);
    }
    done.headers_mut().insert(DOCLOCK_BROKEN, broken.into());
    Ok(done)
}
