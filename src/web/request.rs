//! The locks of a session during one request.

mod confirm;
mod each;
mod finish;
mod headers;
mod path;
mod permissions;
mod person;
mod release;
mod take;
mod terms;
mod titles;
mod version;

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    fmt,
    future::{Ready, ready},
    net::IpAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use actix_session::Session;
use actix_web::{
    Error, FromRequest, HttpMessage, HttpRequest,
    dev::{Payload, ServiceRequest},
    http::StatusCode,
};
use tokio::{
    sync::{Mutex, oneshot::Receiver},
    time::timeout_at,
};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use self::{headers::Headers, version::ShownVersions};
pub(super) use self::{
    path::path_param,
    terms::{Document, Elsewhere, Got, OwnLock, Terms},
};
use crate::{
    actor::Actor,
    clock,
    error::{LockError, Result, StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Lock, LockToken},
    manager::{LockManager, Provisional},
    store::NamedBy,
    web::{current_request::misconfigured, problem::Problem, settings::Settings},
};

/// The key of the aid in the state of the session.
pub(super) const AID: &str = "doclock.aid";

/// How long an answer waits at most to learn whether its session has ended, or whether its person may keep the locks.
const LONGEST_LOOK: Duration = Duration::from_secs(1);

/// How long the tombstone of a session is taken as a logout that another tab has not noticed yet.
///
/// A later request belongs to a session that came back: with a copied cookie, or from a cookie store,
/// which cannot forget. The application has accepted the session, so it gets a new aid and may lock.
const LOGOUT_IS_NEWS_FOR: Duration = Duration::from_secs(60);

/// Whose request it is.
pub(crate) enum Whose {
    /// Not known yet.
    Nobodys,
    Session(Session),
    /// Of a client without a session, if the application knows it.
    Client(Option<Actor>),
}

/// The locks in one request. Lives in the extensions of the request, shared by `locks.session(…)` and the
/// extractors.
pub(crate) struct RequestLocks {
    pub(super) manager: Rc<LockManager>,
    pub(super) settings: Rc<Settings>,
    pub(super) headers: Headers,
    /// The other end of the connection.
    pub(super) address: Option<IpAddr>,
    whose: RefCell<Whose>,
    /// The person when the request arrived.
    person_before: RefCell<Option<String>>,
    /// The name of that person, for an answer to a page.
    name_of_person: Cell<Option<Uuid>>,
    /// The aid of the session when the request arrived.
    aid_before: RefCell<Option<Aid>>,
    /// The aid for new locks. It is put into the session when a lock is kept.
    aid: RefCell<Option<Aid>>,
    /// The aid of the session that this request has ended, if the session store accepts this.
    ending: RefCell<Option<Aid>>,
    /// The locks that were granted to this request. They are given back unless the request succeeds.
    fresh: RefCell<Vec<Provisional>>,
    /// A handler polls its extractors together: those of one document take its lock in turn.
    taking: RefCell<HashMap<LockKey, Rc<Mutex<()>>>>,
    /// The locks that were acquired or confirmed, and not released since.
    held: RefCell<Vec<LockToken>>,
    pub(super) versions: RefCell<ShownVersions>,
    /// Tracks the background operations of this request.
    scope: TaskTracker,
    began: Instant,
    /// True if an operation has waited for the lock of another session.
    has_waited: Cell<bool>,
    /// True if an operation has met the end of the session.
    has_ended: Cell<bool>,
    /// The deadline of the latest operation.
    until: Cell<Option<Instant>>,
    renewal: RefCell<Option<Receiver<()>>>,
    /// The number of cookies in the answer that the session middleware gets, once there is an answer.
    cookies: Cell<Option<usize>>,
    /// True if the session had no entry when the request arrived.
    began_empty: Cell<bool>,
    /// True if the session middleware has to save the session, and to send its cookie.
    is_to_be_saved: Cell<bool>,
    /// True if the session middleware has to extend the session, or to save it: this request does not end it.
    goes_on: Cell<bool>,
    /// True if this request has asked the holder of a lock: its session needs an aid, to hear the answer.
    pub(super) has_asked: Cell<bool>,
    /// True if the body of the request names the version that its page shows.
    pub(super) shows_version: Cell<bool>,
    /// True if the answer is a file, which is the same for everybody, and carries no cookie.
    pub(super) is_for_everybody: Cell<bool>,
}

/// For the handlers of this crate.
pub(super) struct Locks(pub(super) Rc<RequestLocks>);

impl FromRequest for Locks {
    type Error = LockError;
    type Future = Ready<Result<Self>>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        let locks = RequestLocks::of(req);
        ready(locks.and_then(|locks| locks.headers.check_in_api().map(|()| Self(locks))))
    }
}

/// For the extractors and the lock API.
impl RequestLocks {
    /// # Errors
    /// If there is no wrap around the route, or if the page of this request was opened for another person.
    pub(super) fn of(req: &HttpRequest) -> Result<Rc<Self>> {
        let locks = Self::of_any_page(req)?;
        locks.check_person()?;
        Ok(locks)
    }

    /// # Errors
    /// If there is no wrap around the route.
    pub(super) fn of_any_page(req: &HttpRequest) -> Result<Rc<Self>> {
        let locks = req.extensions().get::<Rc<Self>>().cloned().ok_or_else(|| {
            misconfigured(
                "the application is not wrapped in `locks.session(…)` or `locks.clients(…)`: replace \
                 `.wrap(SessionMiddleware::new(store, key))` with \
                 `.wrap(locks.session(SessionMiddleware::new(store, key)))`",
            )
        })?;
        locks.headers.check()?;
        Ok(locks)
    }

    /// The deadline of an operation that begins now.
    pub(super) fn begin(&self) -> Instant {
        let until = self.manager.core.verbs.until();
        self.until.set(Some(until));
        until
    }

    /// The aid of the session, if the session has ever locked anything or been saved.
    pub(super) fn aid(&self) -> Option<Aid> {
        self.aid.borrow().clone()
    }

    /// The live locks of the session.
    pub(super) async fn list(&self, until: Instant) -> Result<Vec<Lock>> {
        match self.aid() {
            Some(aid) => self.manager.core.reads.list(Some(&aid), until).await,
            None => Ok(Vec::new()),
        }
    }

    /// # Errors
    /// If this request may take no lock at all.
    fn check_may_lock(&self) -> Result<()> {
        if self.headers.is_speculative { Err(LockError::Speculative) } else { self.check_client() }
    }

    /// Waits for the renewal that this request has started, if it has started one.
    pub(super) async fn renewed(&self, until: Instant) {
        let renewal = self.renewal.take();
        if let Some(renewal) = renewal {
            let _ = timeout_at(until.into(), renewal).await;
        }
    }
}

/// The life of a request, in order. For `locks.session(…)`.
impl RequestLocks {
    /// Puts the locks into the request.
    ///
    /// # Errors
    /// If they are there already.
    pub(super) fn begin_request(
        req: &ServiceRequest,
        manager: &Rc<LockManager>,
        settings: &Rc<Settings>,
    ) -> Result<Rc<Self>> {
        if req.extensions().contains::<Rc<Self>>() {
            return Err(misconfigured(
                "the request passes `locks.session(…)` or `locks.clients(…)` twice: keep the wrap of \
                 the whole application, remove the wrap of the scope",
            ));
        }
        let locks = Rc::new(Self {
            manager: Rc::clone(manager),
            settings: Rc::clone(settings),
            headers: Headers::of(req, settings.idle_after),
            address: req.peer_addr().map(|it| it.ip()),
            whose: RefCell::new(Whose::Nobodys),
            person_before: RefCell::default(),
            name_of_person: Cell::default(),
            aid_before: RefCell::default(),
            aid: RefCell::default(),
            ending: RefCell::default(),
            fresh: RefCell::default(),
            taking: RefCell::default(),
            held: RefCell::default(),
            versions: RefCell::default(),
            scope: TaskTracker::new(),
            began: clock::now(),
            has_waited: Cell::default(),
            has_ended: Cell::default(),
            until: Cell::default(),
            renewal: RefCell::default(),
            cookies: Cell::default(),
            began_empty: Cell::default(),
            is_to_be_saved: Cell::default(),
            goes_on: Cell::default(),
            has_asked: Cell::default(),
            shows_version: Cell::default(),
            is_for_everybody: Cell::default(),
        });
        req.extensions_mut().insert(Rc::clone(&locks));
        req.extensions_mut().insert(Rc::clone(&settings.same_site));
        Ok(locks)
    }

    /// Called when the wrap knows whose request this is.
    pub(super) fn belongs_to(&self, whose: Whose, aid: Option<Aid>) {
        let began_empty = matches!(&whose, Whose::Session(it) if it.entries().is_empty());
        self.began_empty.set(began_empty);
        self.whose.replace(whose);
        self.person_before.replace(self.who());
        let is_asked = self.headers.page.is_some();
        self.name_of_person
            .set(is_asked.then(|| self.person()).flatten().as_ref().map(person::name_of));
        if let Some(aid) = aid.as_ref().filter(|_| !self.headers.is_idle) {
            self.renewal.replace(self.manager.core.sessions.touch(aid, &self.headers.named()));
        }
        self.aid_before.replace(aid.clone());
        self.aid.replace(aid);
    }

    /// Notes that this request holds this lock.
    fn remember(&self, own: &OwnLock) {
        let mut held = self.held.borrow_mut();
        if !held.contains(&own.held.token) {
            held.push(own.held.token);
        }
        self.also_renew(&own.lock);
    }

    /// Also renews this lock, which the request names, if it is not a lock of the request's own tab.
    pub(super) fn also_renew(&self, lock: &Lock) {
        if let (Some(token), Some(tab)) = (lock.token, lock.tab)
            && self.headers.tab != Some(tab)
            && !self.headers.is_idle
        {
            drop(self.manager.core.sessions.touch(&lock.aid, &[NamedBy::Token(token)]));
        }
    }

    /// The next end of this lock that no heartbeat moves, and why it comes. An idle person moves it by any sign of life.
    pub(super) fn end_of(&self, lock: &Lock) -> Option<(Duration, &'static str)> {
        let now = clock::now();
        let max_hold = lock.ends_at.map(|at| (at.saturating_duration_since(now), "max_hold"));
        // The last heartbeat before that moment may still have renewed the lock.
        let idle = self.headers.idle_in.map(|left| (left.max(lock.expires_in()), "idle"));
        let session = match (&*self.whose.borrow(), &self.settings.session_ends_in) {
            (Whose::Session(session), Some(ends_in)) => {
                ends_in(session).map(|left| (left, "session"))
            }
            _ => None,
        };
        [max_hold, idle, session].into_iter().flatten().min_by_key(|(left, _)| *left)
    }

    /// How long ago a session may have ended for its end to be news to this request.
    fn news_for(&self) -> Duration {
        clock::since(self.began) + LOGOUT_IS_NEWS_FOR
    }

    /// The error of this request. actix-session turns an outage of its store into an empty 500, but a wrap around
    /// actix-session may report the outage.
    pub(super) fn explained(&self, error: Error) -> Error {
        let was_loaded = !matches!(*self.whose.borrow(), Whose::Nobodys);
        let is_of_session = !was_loaded || self.cookies.get().is_some();
        let status = error.as_response_error().status_code();
        if !is_of_session || status != StatusCode::SERVICE_UNAVAILABLE {
            return error;
        }
        let outage = StoreError::new(StoreErrorKind::Unavailable, error.to_string());
        self.manager.core.sessions.failed(&outage);
        Problem::from(LockError::Store(outage)).into()
    }

    /// The aid for a new lock.
    ///
    /// # Errors
    /// If the application does not know the client of this request.
    fn aid_for_lock(&self) -> Result<Aid> {
        self.check_client()?;
        let mut aid = self.aid.borrow_mut();
        // The aid of the person before the login ends with this request.
        let is_before = *aid == *self.aid_before.borrow();
        let is_session = matches!(*self.whose.borrow(), Whose::Session(_));
        if is_session && is_before && *self.person_before.borrow() != self.who() {
            *aid = None;
        }
        Ok(aid.get_or_insert_with(Aid::new).clone())
    }

    /// # Errors
    /// 401 if a client has no valid login, or has it no longer: its locks are not known, and so not reported as lost.
    pub(super) fn check_client(&self) -> Result<()> {
        let is_unknown = self.is_client() && self.aid.borrow().is_none();
        if is_unknown { Err(LockError::LoginRequired) } else { Ok(()) }
    }

    /// True if the aid belongs to the client's token, and not to a session.
    pub(super) fn is_client(&self) -> bool {
        matches!(*self.whose.borrow(), Whose::Client(_))
    }
}

impl fmt::Debug for RequestLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestLocks").field("held", &self.held).finish_non_exhaustive()
    }
}

impl Drop for RequestLocks {
    fn drop(&mut self) {
        // The connection was lost while the session was being saved. The person has logged out, so the
        // locks are released. If the session store did not save the logout, the session gets a new aid
        // later.
        if let Some(aid) = self.ending.take() {
            self.manager.core.sessions.end_in_background(aid);
        }
    }
}

pub(super) fn aid_in(session: &Session) -> Option<Aid> {
    session.get(AID).ok().flatten()
}
