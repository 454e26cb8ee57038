//! What one request does with the locks of its session.

mod locking;

use std::{
    cell::{Cell, RefCell},
    fmt,
    rc::Rc,
    str::FromStr,
    time::{Duration, Instant},
};

use actix_session::{Session, SessionStatus};
use actix_web::{
    HttpResponse,
    http::{
        StatusCode,
        header::{HeaderMap, HeaderName, HeaderValue, SET_COOKIE},
    },
};
use tokio::{sync::oneshot::Receiver, time::timeout_at};
use tokio_util::task::TaskTracker;

pub(super) use self::locking::{Ask, Mine};
use crate::{
    actor::Actor,
    error::LockError,
    lock::{Aid, LockToken, PageId, TabId},
    manager::{LockManager, Provisional, watch::streams::Limits},
    web::{memory::memory, problem::misconfigured},
};

/// Where the aid is kept in the state of the session.
pub(super) const AID: &str = "doclock.aid";

/// Announces a granted lock, and proves in a request that it is the same acquisition.
const LOCK_TOKEN: HeaderName = HeaderName::from_static("lock-token");

/// How long ago the person has last touched the page that sends this request, in milliseconds.
const IDLE_MS: HeaderName = HeaderName::from_static("doclock-idle-ms");

/// The tab that sends this request: a UUID that its page has chosen.
const TAB: HeaderName = HeaderName::from_static("doclock-tab");

/// The load of that page, which is new each time.
const PAGE: HeaderName = HeaderName::from_static("doclock-page");

/// A browser loads a page that its person may never look at.
const SEC_PURPOSE: HeaderName = HeaderName::from_static("sec-purpose");

pub(super) type Identify = Rc<dyn Fn(&Session) -> Option<Actor>>;

/// How long requests wait for locks that others hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waits {
    /// What extractors do.
    pub(super) documents: Duration,
    /// What a client may ask for.
    pub(super) longest: Duration,
}

/// The locks in one request: lives in its extensions, shared by the wrap and the extractors.
#[derive(Clone)]
pub(crate) struct RequestLocks(Rc<State>);

struct State {
    manager: LockManager,
    identify: Identify,
    keep_fresh_on_error: bool,
    waits: Waits,
    streams: Limits,
    /// The page has sent this request by itself, and its person has been away for long.
    idle: bool,
    tab: Option<TabId>,
    page: Option<PageId>,
    /// Nobody has asked for this page so far.
    speculative: bool,
    /// The tokens that the client sent; `None` if the header is not one.
    offered: Option<Vec<LockToken>>,
    session: RefCell<Option<Session>>,
    /// The aid that was in the session when the request came.
    aid_before: RefCell<Option<Aid>>,
    /// The aid that locks are taken with. It is put into the session when one is kept.
    aid: RefCell<Option<Aid>>,
    /// The session that this request has ended, if it is saved like that.
    ending: RefCell<Option<Aid>>,
    /// Granted to this request, and given back unless the request succeeds.
    fresh: RefCell<Vec<Provisional>>,
    /// Acquired or confirmed, and not released since.
    held: RefCell<Vec<LockToken>>,
    /// What goes on in the background on account of this request.
    scope: TaskTracker,
    /// The deadline of the latest operation.
    until: Cell<Option<Instant>>,
    renewal: RefCell<Option<Receiver<()>>>,
    /// How many cookies the answer had before that of the session.
    cookies: Cell<usize>,
}

/// The life of a request, in the order in which it happens. For the wrap.
impl RequestLocks {
    pub(super) fn new(
        manager: LockManager,
        identify: Identify,
        keep_fresh_on_error: bool,
        waits: Waits,
        idle_after: Option<Duration>,
        streams: Limits,
        headers: &HeaderMap,
    ) -> Self {
        let idle = (idle_for(headers).zip(idle_after)).is_some_and(|(idle, limit)| idle >= limit);
        Self(Rc::new(State {
            manager,
            identify,
            keep_fresh_on_error,
            waits,
            streams,
            idle,
            tab: named(headers, TAB),
            page: named(headers, PAGE),
            speculative: headers.contains_key(SEC_PURPOSE),
            offered: offered_tokens(headers),
            session: RefCell::default(),
            aid_before: RefCell::default(),
            aid: RefCell::default(),
            ending: RefCell::default(),
            fresh: RefCell::default(),
            held: RefCell::default(),
            scope: TaskTracker::new(),
            until: Cell::default(),
            renewal: RefCell::default(),
            cookies: Cell::default(),
        }))
    }

    pub(super) fn session_loaded(&self, session: Session) {
        let aid = aid_in(&session);
        if let Some(aid) = aid.as_ref().filter(|_| !self.0.idle) {
            self.0.renewal.replace(self.0.manager.touch(aid));
        }
        self.0.aid_before.replace(aid.clone());
        self.0.aid.replace(aid);
        self.0.session.replace(Some(session));
    }

    /// The handler has answered; what is put into the session now is saved with it.
    pub(super) fn before_session_is_saved(&self, response: &HttpResponse<impl Sized>) {
        let status = response.status();
        self.0.cookies.set(response.headers().get_all(SET_COOKIE).count());
        let session = self.0.session.borrow();
        let Some(session) = session.as_ref() else { return };
        let (before, now) = (self.0.aid_before.borrow().clone(), aid_in(session));
        if before.is_some() && now.is_none() && session.status() == SessionStatus::Unchanged {
            // Neither purged nor cleared nor removed: somebody else has emptied the session.
            misconfigured(
                "there is another session middleware inside `locks.session(…)`: remove its \
                 `.wrap(SessionMiddleware::new(store, key))`",
            );
            return;
        }
        let vanished = before.is_some() && now != before;
        if vanished {
            self.0.ending.replace(before);
            // A handler that changes the session into another one (`clear`, then a login) begins
            // a new aid with it.
            self.0.aid.take();
        }
        let keeps_locks = !vanished && self.keeps(status) && !self.0.fresh.borrow().is_empty();
        // Piggybacks on a login: an aid that is there before the first lock cannot be lost between
        // two first requests at the same moment.
        let is_saved_anyway =
            matches!(session.status(), SessionStatus::Changed | SessionStatus::Renewed)
                && !session.entries().is_empty()
                && now.is_none();
        if keeps_locks || is_saved_anyway {
            let aid = self.0.aid.borrow_mut().get_or_insert_with(Aid::new).clone();
            if now.as_ref() != Some(&aid) {
                // Cannot fail for a string, and does nothing in a purged session.
                let _ = session.insert(AID, &aid);
                memory(|it| it.aid_is_spare = !keeps_locks);
                self.0.manager.session_begins(&aid);
            }
        }
        if keeps_locks && aid_in(session) != *self.0.aid.borrow() {
            // Purged by the very request that began it.
            self.0.fresh.take();
            self.0.held.take();
        }
    }

    /// The session middleware has done its work.
    pub(super) async fn session_saved(&self, response: &mut HttpResponse<impl Sized>) {
        let ending = self.0.ending.take();
        if let Some(aid) = ending {
            self.0.held.take();
            self.0.fresh.take();
            if let Err(e) = self.0.manager.release_session(&aid).await {
                log::error!(
                    target: "actix_doclock::session",
                    "the locks of the ended session {aid:?} go with their ttl: {e}",
                );
            }
        }
        let fresh = self.0.fresh.take();
        if self.keeps(response.status()) {
            for fresh in fresh {
                fresh.confirm();
            }
        } else {
            let given_back = |token| fresh.iter().any(|fresh| fresh.token() == token);
            self.0.held.borrow_mut().retain(|token| !given_back(*token));
            drop(fresh);
        }
        self.settle().await;
        if let [token] = self.0.held.borrow().as_slice()
            && let Ok(announced) = HeaderValue::from_str(&format!("<urn:uuid:{token}>"))
        {
            response.headers_mut().insert(LOCK_TOKEN, announced);
        }
    }

    /// The request has failed, or its session could not be saved: nothing was granted, nothing ended.
    pub(super) async fn session_not_saved(&self) {
        self.0.ending.take();
        self.0.fresh.take();
        self.settle().await;
    }

    /// The session store was too late: another request has ended the session, or given it another key.
    ///
    /// # Errors
    /// If the request was granted a lock: no session has the aid that it was granted to.
    pub(super) async fn session_has_ended(
        &self,
        response: &mut HttpResponse<impl Sized>,
    ) -> Result<(), LockError> {
        if !self.0.fresh.borrow().is_empty() {
            self.session_not_saved().await;
            return Err(LockError::SessionEnded { ago: Duration::ZERO });
        }
        // The browser may have another key by now; it is not to get the dead one again.
        let cookies: Vec<_> = response.headers().get_all(SET_COOKIE).cloned().collect();
        response.headers_mut().remove(SET_COOKIE);
        for cookie in cookies.into_iter().take(self.0.cookies.get()) {
            response.headers_mut().append(SET_COOKIE, cookie);
        }
        Ok(())
    }

    fn keeps(&self, status: StatusCode) -> bool {
        self.0.keep_fresh_on_error || !(status.is_client_error() || status.is_server_error())
    }

    /// Waits until nothing of this request is under way, so that its answer is the last word: "400"
    /// means "not locked". Not longer than its operations were allowed to take.
    async fn settle(&self) {
        if let Some(until) = self.0.until.get() {
            self.0.scope.close();
            let _ = timeout_at(until.into(), self.0.scope.wait()).await;
        }
    }
}

impl fmt::Debug for RequestLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestLocks").field("held", &self.0.held).finish_non_exhaustive()
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // The connection was lost while the session was being saved. The person has logged out, so
        // their locks go; if the session store has not heard of it, it gets a new aid later.
        if let Some(aid) = self.ending.take() {
            self.manager.release_session_in_background(aid);
        }
    }
}

fn aid_in(session: &Session) -> Option<Aid> {
    session.get(AID).ok().flatten()
}

/// How long the person has been away, as far as the page says; anything that is not a number says
/// nothing.
fn idle_for(headers: &HeaderMap) -> Option<Duration> {
    let ms = headers.get(IDLE_MS)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_millis(ms))
}

/// A name that the page has chosen. One that is malformed counts as none.
fn named<T: FromStr>(headers: &HeaderMap, header: HeaderName) -> Option<T> {
    headers.get(header)?.to_str().ok()?.trim().parse().ok()
}

/// One token, or several separated by commas.
fn offered_tokens(headers: &HeaderMap) -> Option<Vec<LockToken>> {
    let mut tokens = Vec::new();
    for value in headers.get_all(LOCK_TOKEN) {
        for token in value.to_str().ok()?.split(',') {
            tokens.push(token.trim().parse().ok()?);
        }
    }
    Some(tokens)
}
