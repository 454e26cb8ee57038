//! The locks of a session during one request.

mod confirm;
mod each;
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

use actix_session::{Session, SessionStatus};
use actix_web::{
    Error, FromRequest, HttpMessage, HttpRequest, HttpResponse,
    dev::{Payload, ServiceRequest},
    http::{StatusCode, header::SET_COOKIE},
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
    ended::EndReason,
    error::{LockError, Result, StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Lock, LockToken},
    manager::{LockManager, Provisional},
    store::NamedBy,
    web::{current_request::misconfigured, problem::Problem, settings::Settings},
};

/// The key of the aid in the state of the session.
pub(super) const AID: &str = "doclock.aid";

/// From this time on, the answer of a request may reach the browser after a logout that began later.
const SLOW: Duration = Duration::from_millis(250);

/// How long a request that the browser has sent before a logout may take to arrive.
const UNDER_WAY: Duration = Duration::from_secs(5);

/// How long an answer waits at most to learn whether its session has ended, or whether its person may keep the locks.
const LONGEST_LOOK: Duration = Duration::from_secs(1);

/// How long the tombstone of a session is taken as a logout that another tab has not noticed yet.
///
/// A later request belongs to a session that came back: with a copied cookie, or from a cookie store,
/// which cannot forget. The application has accepted the session, so it gets a new aid and may lock.
const LOGOUT_IS_NEWS_FOR: Duration = Duration::from_secs(60);

/// What happened to a session while one of its requests was served. The answer carries the cookie of the session only if
/// nothing did: otherwise the answer would undo a logout, or the login of the next person in this browser. A cookie store
/// would log the ended session in again, and another store would send a dead key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    /// Nobody knows, and this request has changed nothing itself.
    Perhaps,
    Ended,
}

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

    /// Called when the handler has answered. Changes to the session are still saved after this call.
    pub(super) fn before_session_is_saved(&self, response: &HttpResponse<impl Sized>) {
        let status = response.status();
        self.cookies.set(Some(response.headers().get_all(SET_COOKIE).count()));
        let whose = self.whose.borrow();
        let Whose::Session(session) = &*whose else { return };
        let (before, mut now) = (self.aid_before.borrow().clone(), aid_in(session));
        if before.is_some() && now.is_none() && session.status() == SessionStatus::Unchanged {
            // No handler has purged or cleared the session, or removed the aid: another middleware has emptied it.
            misconfigured(
                "there is another session middleware inside `locks.session(…)`: remove its \
                 `.wrap(SessionMiddleware::new(store, key))`",
            );
            return;
        }
        let is_another_person = *self.person_before.borrow() != self.who();
        if now.is_some() && is_another_person {
            // The locks go with their person: whoever has an older cookie of this browser, or sits at it now, would
            // hold them too.
            session.remove(AID);
            now = None;
        }
        let vanished = before.is_some() && now != before;
        // A lock that a handler has taken after a login belongs to the new aid already.
        let has_new_aid = *self.aid.borrow() != before;
        if vanished {
            self.ending.replace(before);
            // If a handler turns the session into another one (`clear`, then a login), the new session
            // gets a new aid.
            self.aid.borrow_mut().take_if(|_| !has_new_aid);
        }
        let needs_aid = !self.fresh.borrow().is_empty() || self.has_asked.get();
        let keeps_locks = (!vanished || has_new_aid) && self.keeps(status) && needs_aid;
        // A login saves the session anyway, so it begins the aid: if the aid is there before the first lock, two
        // simultaneous first requests cannot lose it. No other request of a session without an aid does so: its aid
        // could replace the aid of a simultaneous first lock.
        let begins = match session.status() {
            SessionStatus::Renewed => true,
            SessionStatus::Changed => self.began_empty.get() || vanished || is_another_person,
            _ => false,
        };
        let is_saved_anyway = begins && !session.entries().is_empty() && now.is_none();
        if keeps_locks || is_saved_anyway {
            let aid = self.aid.borrow_mut().get_or_insert_with(Aid::new).clone();
            if now.as_ref() != Some(&aid) {
                // Cannot fail for a string, and does nothing in a purged session.
                let _ = session.insert(AID, &aid);
                self.manager.core.sessions.session_begins(&aid);
            }
        }
        if keeps_locks && aid_in(session) != *self.aid.borrow() {
            // The session was purged by the same request that began it.
            self.fresh.take();
            self.held.take();
        }
        let is_changed =
            [SessionStatus::Changed, SessionStatus::Renewed].contains(&session.status());
        self.is_to_be_saved.set(is_changed && !session.entries().is_empty());
        self.goes_on.set(!vanished && !session.entries().is_empty());
    }

    /// Called when the session middleware has finished.
    ///
    /// # Errors
    /// If the request was granted a lock, but its session was not saved: no session has the aid of that lock.
    pub(super) async fn session_saved(
        &self,
        response: &mut HttpResponse<impl Sized>,
    ) -> Result<()> {
        // A session store does not send the cookie of a session that another request has ended meanwhile.
        let cookies = response.headers().get_all(SET_COOKIE).count();
        let of_others = self.cookies.get().filter(|of_others| cookies > *of_others);
        let mut is_saved = !self.is_to_be_saved.get() || of_others.is_some();
        if let Some(of_others) = of_others {
            let meanwhile = self.meanwhile(response.status()).await;
            is_saved = meanwhile != Meanwhile::Ended;
            if meanwhile != Meanwhile::Nothing {
                let headers = response.headers_mut();
                let all: Vec<_> = headers.remove(SET_COOKIE).collect();
                all.into_iter().take(of_others).for_each(|it| headers.append(SET_COOKIE, it));
            }
        }
        if !is_saved && !self.fresh.borrow().is_empty() {
            self.session_not_saved().await;
            return Err(LockError::SessionEnded { ago: Duration::ZERO });
        }
        let ending = self.ending.take();
        if let Some(aid) = ending {
            let mut fresh = self.fresh.take();
            fresh.retain(|fresh| fresh.lock.aid != aid);
            self.held.replace(fresh.iter().map(|fresh| fresh.token).collect());
            self.fresh.replace(fresh);
            if let Err(e) = self.manager.core.sessions.end(&aid, EndReason::LoggedOut).await {
                log::error!(
                    target: "actix_doclock::session",
                    "the locks of the ended session {aid:?} were not released, and remain until they \
                     expire: {e}",
                );
            }
        }
        let fresh = self.fresh.take();
        if self.keeps(response.status()) {
            for fresh in fresh {
                fresh.confirm();
            }
        } else {
            let given_back = |token| fresh.iter().any(|fresh| fresh.token == token);
            self.held.borrow_mut().retain(|token| !given_back(*token));
            // The handler may have taken longer than its last operation might. In an outage, the answer does not wait for a
            // second deadline.
            if !fresh.is_empty() && response.status() != StatusCode::SERVICE_UNAVAILABLE {
                self.begin();
            }
            drop(fresh);
        }
        self.settle().await;
        let version = self.versions.borrow().shown().filter(|_| response.status().is_success());
        let person = self.name_of_person.get();
        headers::announce(response.headers_mut(), &self.held.borrow(), person, version);
        Ok(())
    }

    /// What other requests have done to the session while this one was served, perhaps at another server.
    async fn meanwhile(&self, answer: StatusCode) -> Meanwhile {
        // Only a change that this request has made itself needs the cookie.
        let unknown =
            if self.is_to_be_saved.get() { Meanwhile::Nothing } else { Meanwhile::Perhaps };
        if self.is_for_everybody.get() {
            return unknown;
        }
        if self.has_ended.get() {
            return Meanwhile::Ended;
        }
        if !self.goes_on.get() || clock::since(self.began) < SLOW {
            return Meanwhile::Nothing;
        }
        let aid = self.aid_before.borrow().clone();
        let end = match &aid {
            // In an outage, the answer does not wait for a second deadline.
            _ if answer.is_server_error() => return Meanwhile::Perhaps,
            Some(aid) => {
                let until = clock::now() + LONGEST_LOOK.min(self.manager.core.verbs.deadline);
                self.manager.core.sessions.refuse_ended(aid, None, until).await
            }
            None => Ok(()),
        };
        // A request that began later belongs to a session that came back, or logs in again.
        let during = clock::since(self.began) + UNDER_WAY;
        match end {
            Err(LockError::SessionEnded { ago }) if ago <= during => Meanwhile::Ended,
            Ok(()) | Err(LockError::SessionEnded { .. }) if !self.has_waited.get() => {
                Meanwhile::Nothing
            }
            _ => unknown,
        }
    }

    /// How long ago a session may have ended for its end to be news to this request.
    fn news_for(&self) -> Duration {
        clock::since(self.began) + LOGOUT_IS_NEWS_FOR
    }

    /// Called if the request has failed, or its session could not be saved: no lock is kept, and no session
    /// has ended.
    pub(super) async fn session_not_saved(&self) {
        self.ending.take();
        self.fresh.take();
        self.settle().await;
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

    fn keeps(&self, status: StatusCode) -> bool {
        self.settings.keep_fresh_on_error || !(status.is_client_error() || status.is_server_error())
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

    /// Waits until the operations of this request are complete, so that its answer is final: "400" means
    /// "not locked". Does not wait longer than the operations may take.
    async fn settle(&self) {
        if let Some(until) = self.until.get() {
            self.scope.close();
            let _ = timeout_at(until.into(), self.scope.wait()).await;
        }
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
