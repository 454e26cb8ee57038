//! Releases a lock, also by the beacon of a page that is being closed.

use std::time::Duration;

use actix_web::{HttpRequest, HttpResponse};
use serde::Deserialize;

use crate::{
    error::LockError,
    lock::Mode,
    store::Acquisition,
    web::{
        Problem,
        api::{Body, bad_request, form, key, parse_token},
        request::RequestLocks,
        same_site::SameSite,
    },
};

/// The longest grace period for a page that is closed. A page that needs longer should not release its
/// lock.
const LONGEST_GRACE: Duration = Duration::from_secs(10);

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ReleaseBody {
    /// The acquisition to release. `sendBeacon` cannot set a header, neither for this nor for what follows.
    token: Option<String>,
    /// The tab of the page that is being left.
    tab: Option<String>,
    /// The load of that page.
    page: Option<String>,
    grace_ms: u64,
    /// Where the browser goes after a form.
    to: Option<String>,
}

pub(super) async fn release(
    _: SameSite,
    req: HttpRequest,
    body: Body,
) -> Result<HttpResponse, Problem> {
    // A page that may no longer lock the document may still release its lock.
    let locks = RequestLocks::of_any_page(&req)?;
    locks.headers.check_in_api()?;
    let key = key(&locks.permissions(), &req)?;
    locks.check_client()?;
    let mut tokens = locks.headers.tokens()?.to_vec();
    let call = form::read::<ReleaseBody>(&req, body)?;
    let done = call.done(&req, call.said.to.as_deref())?;
    let ReleaseBody { token, tab, page, grace_ms, .. } = call.said;
    if let Some(token) = token {
        tokens.push(parse_token(&token)?);
    }
    let page = page.map(|page| page.parse()).transpose();
    let page = page.map_err(|_| bad_request("a page must be a UUID"))?;
    let grace = Duration::from_millis(grace_ms).min(LONGEST_GRACE);
    if tokens.is_empty() {
        match page {
            None => drop(locks.release_of_tab(&key).await?),
            Some(page) => {
                let tab = tab.map(|tab| tab.parse()).transpose();
                let tab = tab.map_err(|_| LockError::MalformedTab)?;
                locks.leave(&key, tab, page, grace).await?;
            }
        }
    }
    let page = page.or(locks.headers.page);
    let until = locks.begin();
    if let Some(aid) = locks.aid() {
        for token in tokens {
            // Stands for an exclusive lock, too: a beacon does not name the mode.
            let mode = Mode::Shared;
            let held = Acquisition { key: key.clone(), aid: aid.clone(), token, mode };
            if grace.is_zero() {
                let released = locks.manager.core.granting.release_by(&held, until).await?;
                locks.has_released(&held, released);
            } else {
                locks.manager.core.granting.release_in(&held, page, grace, until).await?;
            }
        }
    }
    Ok(done)
}
