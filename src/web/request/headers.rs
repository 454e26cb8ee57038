//! What a client says in the headers and the address of a request, and this server in the headers of the answer.

use std::{iter, str::FromStr, time::Duration};

use actix_web::{
    dev::ServiceRequest,
    http::header::{CACHE_CONTROL, ETAG, HeaderMap, HeaderName, HeaderValue, IF_MATCH},
    web::Query,
};
use uuid::Uuid;

use crate::{
    error::{LockError, Result},
    lock::{LockToken, PageId, TabId},
    store::NamedBy,
    version::Version,
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

/// What a request says by its headers or, because an HTML form sends none, by `lock_token`, `tab` and `version` in its
/// address. Malformed values are ignored, except tokens, versions and tabs.
pub(in crate::web) struct Headers {
    /// True if the page has sent this request automatically, and its person has been away for long.
    pub(super) is_idle: bool,
    /// After this time the person counts as idle, if the page says for how long the person has been away.
    pub(super) idle_in: Option<Duration>,
    pub(in crate::web) tab: Option<TabId>,
    /// True if the request is a sign of life of its tab.
    renews_tab: bool,
    /// The load of the page that sent this request.
    pub(in crate::web) page: Option<PageId>,
    /// The person for whom that page was opened, if it says so.
    pub(super) opened_for: Option<Uuid>,
    /// True if the page is preloaded: nobody has asked for it yet.
    pub(super) is_speculative: bool,
    /// `None` if one of them is malformed.
    tokens: Option<Vec<LockToken>>,
    /// The versions of which a document must have one, if there is such a condition; or else the condition is malformed.
    versions: Result<Option<Vec<Version>>, ()>,
    /// What the request says twice, and differently.
    said_twice: Option<&'static str>,
    /// True if a tab is malformed that can be meant for nobody else.
    has_bad_tab: bool,
    /// True if the `tab` of the address is none. In an address of the application it may be a parameter of its own.
    is_other_tab: bool,
}

impl Headers {
    /// A person who has been away for `idle_after` is idle.
    pub(super) fn of(req: &ServiceRequest, idle_after: Option<Duration>) -> Self {
        let headers = req.headers();
        let idle = value(headers, IDLE_MS).map(Duration::from_millis).zip(idle_after);
        let query = Query::<Vec<(String, String)>>::from_query(req.query_string());
        let query = query.map(Query::into_inner).unwrap_or_default();
        let in_address = |name: &'static str| {
            query.iter().filter(move |(it, _)| it == name).map(|(_, value)| &**value)
        };
        let mut said_twice = None;
        let tabs = in_address("tab").filter_map(|it| it.trim().parse().ok());
        let is_other_tab = in_address("tab").any(|it| it.trim().parse::<TabId>().is_err());
        let speaks_of_locks =
            ["lock_token", "version"].iter().any(|it| in_address(it).next().is_some());
        let tokens = in_address("lock_token").map(|it| tokens_in(iter::once(it)));
        let versions = in_address("version").map(|it| Ok(Some(vec![it.parse().map_err(drop)?])));
        let tab = once("tab", value(headers, TAB).into_iter().chain(tabs), &mut said_twice);
        let tokens = tokens_of(headers).into_iter().chain(tokens);
        let tokens = once("lock_token", tokens, &mut said_twice);
        let versions = versions_of(headers).into_iter().chain(versions);
        let versions = once("version", versions, &mut said_twice);
        // A page opens its stream of events again by itself, with its tab in the address.
        let renews_tab = !req.method().is_safe() || headers.contains_key(TAB);
        Self {
            renews_tab,
            is_idle: idle.is_some_and(|(idle, limit)| idle >= limit),
            idle_in: idle.map(|(idle, limit)| limit.saturating_sub(idle)),
            tab,
            page: value(headers, PAGE),
            opened_for: value(headers, PERSON),
            is_speculative: is_loaded_in_advance(headers),
            tokens: tokens.unwrap_or_else(|| Some(Vec::new())),
            versions: versions.unwrap_or(Ok(None)),
            said_twice,
            has_bad_tab: headers.contains_key(TAB) && value::<TabId>(headers, TAB).is_none()
                || is_other_tab && speaks_of_locks,
            is_other_tab,
        }
    }

    /// # Errors
    /// If the request contradicts itself, or names a malformed tab.
    pub(super) fn check(&self) -> Result<()> {
        if self.has_bad_tab {
            return Err(LockError::MalformedTab);
        }
        self.said_twice.map_or(Ok(()), |name| Err(LockError::SaidTwice { name }))
    }

    /// # Errors
    /// If `tab` in an address of the lock API is none.
    pub(in crate::web) fn check_in_api(&self) -> Result<()> {
        if self.is_other_tab { Err(LockError::MalformedTab) } else { Ok(()) }
    }

    /// The versions of which a document must have one, if there is such a condition.
    pub(super) fn versions(&self) -> Result<Option<&[Version]>> {
        match &self.versions {
            Ok(versions) => Ok(versions.as_deref()),
            Err(()) => Err(LockError::MalformedVersion),
        }
    }

    /// The tokens that the client sent; empty if there were none.
    pub(in crate::web) fn tokens(&self) -> Result<&[LockToken]> {
        self.tokens.as_deref().ok_or(LockError::MalformedToken)
    }

    /// The locks that the request renews. A sign of life of a tab renews the locks of that tab, any other request the locks
    /// of its tokens. None if a token is malformed.
    pub(super) fn named(&self) -> Vec<NamedBy> {
        match self.tab {
            Some(tab) if self.renews_tab => vec![NamedBy::Tab(tab)],
            _ => self.tokens.iter().flatten().map(|token| NamedBy::Token(*token)).collect(),
        }
    }
}

/// Says in an answer which lock its request holds, if there is only one, whose request it was, and which version of a
/// document it has loaded or saved, unless the handler says so itself. Then no shared cache may keep the answer.
pub(super) fn announce(
    headers: &mut HeaderMap,
    held: &[LockToken],
    person: Option<Uuid>,
    version: Option<Version>,
) {
    let token = if let [token] = held { Some(format!("<urn:uuid:{token}>")) } else { None };
    let version = version.filter(|_| !headers.contains_key(ETAG));
    let is_private = token.is_some() || version.is_some();
    let privacy = is_private && !headers.contains_key(CACHE_CONTROL);
    let said = [
        (CACHE_CONTROL, privacy.then(|| "private".to_owned())),
        (LOCK_TOKEN, token),
        (PERSON, person.map(|it| it.to_string())),
        (ETAG, version.map(|it| format!("\"{it}\""))),
    ];
    for (name, value) in said {
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

/// What is said once, or again in the same way.
fn once<T: PartialEq>(
    name: &'static str,
    mut said: impl Iterator<Item = T>,
    said_twice: &mut Option<&'static str>,
) -> Option<T> {
    let first = said.next()?;
    if said.any(|it| it != first) {
        *said_twice = Some(name);
    }
    Some(first)
}

/// `None` if there is no such header.
fn tokens_of(headers: &HeaderMap) -> Option<Option<Vec<LockToken>>> {
    let mut all = headers.get_all(LOCK_TOKEN).map(|it| it.to_str()).peekable();
    all.peek()?;
    let all: Result<Vec<_>, _> = all.collect();
    Some(all.ok().and_then(|all| tokens_in(all.into_iter())))
}

/// One token, or several separated by commas.
fn tokens_in<'a>(all: impl Iterator<Item = &'a str>) -> Option<Vec<LockToken>> {
    let tokens = all.flat_map(|text| text.split(',')).map(|token| token.trim().parse().ok());
    tokens.collect::<Option<Vec<_>>>().filter(|tokens| tokens.len() <= MOST_TOKENS)
}

/// The versions among the entity tags of `If-Match`. A weak tag, and a tag that is not of this crate, names none. `None`
/// if there is no such header; `*` is no condition.
fn versions_of(headers: &HeaderMap) -> Option<Result<Option<Vec<Version>>, ()>> {
    let mut all = headers.get_all(IF_MATCH).map(|it| it.to_str()).peekable();
    all.peek()?;
    let all: Result<Vec<_>, _> = all.collect();
    Some(all.map_err(drop).and_then(|all| versions_in(&all.join(","))))
}

/// A recipient ignores empty elements of a list: RFC 9110, section 5.6.1.
fn versions_in(list: &str) -> Result<Option<Vec<Version>>, ()> {
    let is_between = |it| matches!(it, ',' | ' ' | '\t');
    let mut rest = list.trim_matches(is_between);
    if rest == "*" {
        return Ok(None);
    }
    let mut versions = Vec::new();
    loop {
        let tag = rest.strip_prefix("W/").unwrap_or(rest);
        let (tag, more) = tag.strip_prefix('"').and_then(|it| it.split_once('"')).ok_or(())?;
        versions.extend(tag.parse::<Version>().ok().filter(|_| !rest.starts_with('W')));
        if more.is_empty() {
            return Ok(Some(versions));
        }
        if !more.trim_start().starts_with(',') {
            return Err(());
        }
        rest = more.trim_start_matches(is_between);
    }
}
