//! What clients and this server say in the headers of requests and answers.

use std::{str::FromStr, time::Duration};

use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use uuid::Uuid;

use crate::{
    error::{LockError, Result},
    lock::{LockToken, PageId, TabId},
    store::Named,
};

/// Announces a granted lock in an answer, and identifies the same acquisition in a request.
const LOCK_TOKEN: HeaderName = HeaderName::from_static("lock-token");

/// How many tokens one request may send: each may be a command.
const MOST_TOKENS: usize = 100;

/// The time since the person last touched the page that sends this request, in milliseconds.
const IDLE_MS: HeaderName = HeaderName::from_static("doclock-idle-ms");

/// The tab that sends this request: a UUID chosen by its page.
const TAB: HeaderName = HeaderName::from_static("doclock-tab");

/// The load of that page: a UUID that is new at each load.
const PAGE: HeaderName = HeaderName::from_static("doclock-page");

/// In an answer, the person of the request. In a request, the person for whom its page was opened.
const PERSON: HeaderName = HeaderName::from_static("doclock-person");

/// By these headers a browser says that it loads a page in advance, which the person may never look at. The first one is
/// the standard; older browsers and crawlers send one of the others.
const PURPOSES: [&str; 4] = ["sec-purpose", "purpose", "x-purpose", "x-moz"];

/// What the headers of a request say. Malformed values are ignored, except tokens.
pub(in crate::web) struct Headers {
    /// True if the page has sent this request automatically, and its person has been away for long.
    pub(super) is_idle: bool,
    pub(in crate::web) tab: Option<TabId>,
    /// The load of the page that sent this request.
    pub(in crate::web) page: Option<PageId>,
    /// The person for whom that page was opened, if it says so.
    pub(super) opened_for: Option<Uuid>,
    /// True if the page is preloaded: nobody has asked for it yet.
    pub(super) is_speculative: bool,
    /// `None` if the header is malformed.
    tokens: Option<Vec<LockToken>>,
}

impl Headers {
    /// A person who has been away for `idle_after` is idle.
    pub(super) fn of(headers: &HeaderMap, idle_after: Option<Duration>) -> Self {
        let idle = value(headers, IDLE_MS).map(Duration::from_millis);
        Self {
            is_idle: idle.zip(idle_after).is_some_and(|(idle, limit)| idle >= limit),
            tab: value(headers, TAB),
            page: value(headers, PAGE),
            opened_for: value(headers, PERSON),
            is_speculative: is_loaded_in_advance(headers),
            tokens: tokens(headers),
        }
    }

    /// The tokens that the client sent; empty if there were none.
    pub(in crate::web) fn tokens(&self) -> Result<&[LockToken]> {
        self.tokens.as_deref().ok_or(LockError::MalformedToken)
    }

    /// The locks that the request names: those of its tab, or else the acquisitions of its tokens.
    pub(super) fn named(&self) -> Vec<Named> {
        match (self.tab, &self.tokens) {
            (Some(tab), _) => vec![Named::Tab(tab)],
            (None, tokens) => tokens.iter().flatten().map(|token| Named::Token(*token)).collect(),
        }
    }
}

/// Says in an answer which lock its request holds, if there is only one, and whose request it was.
pub(super) fn announce(headers: &mut HeaderMap, held: &[LockToken], person: Option<Uuid>) {
    let token = if let [token] = held { Some(format!("<urn:uuid:{token}>")) } else { None };
    for (name, value) in [(LOCK_TOKEN, token), (PERSON, person.map(|it| it.to_string()))] {
        if let Some(Ok(value)) = value.map(HeaderValue::try_from) {
            headers.insert(name, value);
        }
    }
}

fn value<T: FromStr>(headers: &HeaderMap, name: HeaderName) -> Option<T> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

fn is_loaded_in_advance(headers: &HeaderMap) -> bool {
    let purposes = PURPOSES.iter().filter_map(|name| headers.get(*name)?.to_str().ok());
    let mut purposes = purposes.map(str::to_ascii_lowercase);
    purposes.any(|it| ["prefetch", "prerender", "preview"].iter().any(|name| it.contains(name)))
}

/// One token, or several separated by commas.
fn tokens(headers: &HeaderMap) -> Option<Vec<LockToken>> {
    let mut tokens = Vec::new();
    for value in headers.get_all(LOCK_TOKEN) {
        for token in value.to_str().ok()?.split(',') {
            tokens.push(token.trim().parse().ok()?);
        }
    }
    (tokens.len() <= MOST_TOKENS).then_some(tokens)
}
