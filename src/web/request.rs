//! What one request does with the locks of its session.

use std::{
    cell::{Cell, RefCell},
    fmt,
    future::Future,
    rc::Rc,
    time::{Duration, Instant},
};

use actix_session::{Session, SessionStatus};
use actix_web::{
    HttpMessage, HttpRequest, HttpResponse,
    http::{
        StatusCode,
        header::{HeaderMap, HeaderName, HeaderValue},
    },
};
use tokio::{sync::oneshot::Receiver, time::timeout_at};
use tokio_util::task::TaskTracker;

use crate::{
    Actor, Aid, Holder, Lock, LockError, LockKey, LockManager, LockToken,
    manager::{Acquired, Provisional},
};

/// Where the aid is kept in the state of the session.
const AID: &str = "doclock.aid";

/// Announces a granted lock, and proves in a request that it is the same acquisition.
const LOCK_TOKEN: HeaderName = HeaderName::from_static("lock-token");

/// How long the tombstone of a session is taken as a logout that another tab has not noticed yet.
///
/// Later it is a session that came back, with a copied cookie or from a cookie store, which cannot
/// forget: the application has accepted it as a session, so it gets a new aid and may lock.
const LOGOUT_IS_NEWS_FOR: Duration = Duration::from_secs(60);

pub(super) type Identify = Rc<dyn Fn(&Session) -> Option<Actor>>;

/// The locks in one request: lives in its extensions, shared by the wrap and the extractors.
#[derive(Clone)]
pub(crate) struct RequestLocks(Rc<State>);

struct State {
    manager: LockManager,
    identify: Identify,
    keep_fresh_on_error: bool,
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
}

/// A lock of this session, with the token that is never missing from our own.
pub(super) struct Mine {
    pub(super) lock: Lock,
    pub(super) token: LockToken,
    pub(super) is_fresh: bool,
}

/// For the extractors.
impl RequestLocks {
    pub(super) fn of(req: &HttpRequest) -> Result<Self, LockError> {
        req.extensions().get::<Self>().cloned().ok_or_else(|| {
            misconfigured(
                "the application is not wrapped in `locks.session(…)`: replace \
                 `.wrap(SessionMiddleware::new(store, key))` with \
                 `.wrap(locks.session(SessionMiddleware::new(store, key)))`",
            )
        })
    }

    pub(super) fn manager(&self) -> &LockManager {
        &self.0.manager
    }

    /// The deadline of an operation that begins now.
    pub(super) fn begin(&self) -> Instant {
        let until = self.0.manager.until();
        self.0.until.set(Some(until));
        until
    }

    /// The aid of the session, if it has ever locked anything or been saved.
    pub(super) fn aid(&self) -> Option<Aid> {
        self.0.aid.borrow().clone()
    }

    pub(super) fn actor(&self) -> Actor {
        let session = self.0.session.borrow();
        let actor = session.as_ref().and_then(|session| (self.0.identify)(session));
        actor.unwrap_or_else(|| Actor::new(self.0.manager.holder().label.clone()))
    }

    /// The tokens that the client sent; empty if none.
    pub(super) fn offered(&self) -> Result<&[LockToken], LockError> {
        self.0.offered.as_deref().ok_or(LockError::MalformedToken)
    }

    /// Takes or confirms the lock and does `work` with it; takes no lock if that fails.
    ///
    /// If tokens are `offered`, only the acquisition of one of them will do.
    ///
    /// # Cancel safety
    /// If the future is dropped, a fresh grant is given back.
    pub(super) async fn acquire<T, F>(
        &self,
        key: &LockKey,
        offered: &[LockToken],
        until: Instant,
        work: impl Fn(bool) -> F,
    ) -> Result<(Mine, T), LockError>
    where
        F: Future<Output = Result<T, LockError>>,
    {
        if !offered.is_empty() {
            let mine = self.confirm(key, offered, until).await.map_err(|e| match e {
                LockError::Lost { holder: Some(lock), .. } => LockError::Held(lock),
                LockError::Lost { key, .. } => LockError::StaleToken { key },
                other => other,
            })?;
            let worked = work(false).await;
            return self.keep_if_found(mine, None, worked, until).await;
        }
        let mut aid = self.0.aid.borrow_mut().get_or_insert_with(Aid::new).clone();
        loop {
            let (mine, fresh) = self.take(key, &aid, until).await?;
            // A session that ends at this moment either finds the lock, or has left its tombstone.
            // A lock that was there before was found by it.
            let alive = async {
                if mine.is_fresh { self.session_is_alive(&aid, until).await } else { Ok(()) }
            };
            let (alive, worked) = tokio::join!(alive, work(mine.is_fresh));
            match alive {
                Ok(()) => return self.keep_if_found(mine, fresh, worked, until).await,
                Err(LockError::SessionEnded { ago }) => {
                    // Outright, and before anything else is tried: whatever other request of the
                    // ended session was told that it has the lock, it has not.
                    self.release(&mine, until).await?;
                    if ago <= LOGOUT_IS_NEWS_FOR {
                        return Err(LockError::SessionEnded { ago });
                    }
                    aid = self.replace_aid(&aid);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// One command: the lock, and if it is fresh, what gives it back.
    async fn take(
        &self,
        key: &LockKey,
        aid: &Aid,
        until: Instant,
    ) -> Result<(Mine, Option<Provisional>), LockError> {
        let holder = Holder::new(self.actor().label);
        match self.0.manager.acquire_by(key, aid, &holder, &self.0.scope, until).await? {
            Acquired::Held(lock) => Err(LockError::Held(Box::new(lock))),
            Acquired::AlreadyMine(lock) => Ok((Mine::new(lock)?, None)),
            Acquired::Fresh(fresh) => {
                let (lock, token) = (fresh.lock().clone(), fresh.token());
                Ok((Mine { lock, token, is_fresh: true }, Some(fresh)))
            }
        }
    }

    async fn keep_if_found<T>(
        &self,
        mine: Mine,
        fresh: Option<Provisional>,
        worked: Result<T, LockError>,
        until: Instant,
    ) -> Result<(Mine, T), LockError> {
        match worked {
            Ok(value) => {
                self.0.fresh.borrow_mut().extend(fresh);
                self.remember(&mine);
                Ok((mine, value))
            }
            Err(e) => {
                if let LockError::NotFound { .. } = e {
                    // Nobody needs a lock on what is not there, not even one held before.
                    self.release(&mine, until).await?;
                }
                Err(e)
            }
        }
    }

    fn remember(&self, mine: &Mine) {
        let mut held = self.0.held.borrow_mut();
        if !held.contains(&mine.token) {
            held.push(mine.token);
        }
    }

    /// A new aid for a session that came back, unless another extractor has given it one.
    fn replace_aid(&self, dead: &Aid) -> Aid {
        let mut aid = self.0.aid.borrow_mut();
        if aid.as_ref() == Some(dead) {
            *aid = None;
        }
        aid.get_or_insert_with(Aid::new).clone()
    }

    async fn session_is_alive(&self, aid: &Aid, until: Instant) -> Result<(), LockError> {
        match self.0.manager.session_ended(aid, until).await? {
            None => Ok(()),
            Some(ago) => Err(LockError::SessionEnded { ago }),
        }
    }

    /// Makes sure that this session holds the lock already, by one of the tokens if any are offered.
    pub(super) async fn confirm(
        &self,
        key: &LockKey,
        offered: &[LockToken],
        until: Instant,
    ) -> Result<Mine, LockError> {
        let lost = |holder| LockError::Lost { key: key.clone(), holder };
        let Some(aid) = self.aid() else {
            return Err(lost(None));
        };
        let lock = match self.0.manager.inspect_by(key, until).await? {
            Some(lock) if lock.aid == aid => lock,
            other => {
                return Err(match self.session_is_alive(&aid, until).await {
                    Err(LockError::SessionEnded { ago }) if ago > LOGOUT_IS_NEWS_FOR => lost(None),
                    Err(e) => e,
                    Ok(()) => lost(other.map(Box::new)),
                });
            }
        };
        let mine = Mine::new(lock)?;
        if !offered.is_empty() && !offered.contains(&mine.token) {
            return Err(LockError::StaleToken { key: key.clone() });
        }
        self.remember(&mine);
        Ok(mine)
    }

    /// Releases this acquisition, also if other requests were told that the session has it.
    pub(super) async fn release(&self, mine: &Mine, until: Instant) -> Result<(), LockError> {
        let (key, aid) = (&mine.lock.key, &mine.lock.aid);
        self.0.manager.release_by(key, aid, mine.token, until).await?;
        self.forget(mine.token);
        Ok(())
    }

    /// This acquisition is not held any more, as far as this request is concerned.
    pub(super) fn forget(&self, token: LockToken) {
        self.0.held.borrow_mut().retain(|held| *held != token);
        for gone in self.0.fresh.borrow_mut().extract_if(.., |fresh| fresh.token() == token) {
            gone.confirm();
        }
    }

    /// Nor is any other.
    pub(super) fn forget_all(&self) {
        self.0.held.take();
        for gone in self.0.fresh.take() {
            gone.confirm();
        }
    }

    /// Waits for the renewal that this request has started, if it has.
    pub(super) async fn renewed(&self, until: Instant) {
        let renewal = self.0.renewal.take();
        if let Some(renewal) = renewal {
            let _ = timeout_at(until.into(), renewal).await;
        }
    }
}

/// For the wrap: the life of a request, in the order in which it happens.
impl RequestLocks {
    pub(super) fn new(
        manager: LockManager,
        identify: Identify,
        keep_fresh_on_error: bool,
        headers: &HeaderMap,
    ) -> Self {
        Self(Rc::new(State {
            manager,
            identify,
            keep_fresh_on_error,
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
        }))
    }

    pub(super) fn session_loaded(&self, session: Session) {
        let aid = aid_in(&session);
        if let Some(aid) = &aid {
            self.0.renewal.replace(self.0.manager.touch(aid));
        }
        self.0.aid_before.replace(aid.clone());
        self.0.aid.replace(aid);
        self.0.session.replace(Some(session));
    }

    /// The handler has answered; what is put into the session now is saved with it.
    pub(super) fn before_session_is_saved(&self, status: StatusCode) {
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

/// For the developer, in the log. The client is told nothing of it; a handler that takes an
/// `Option` would not even know.
pub(super) fn misconfigured(what_to_do: impl Into<String>) -> LockError {
    let what_to_do = what_to_do.into();
    log::error!(target: "actix_doclock::web", "{what_to_do}");
    LockError::Misconfigured(what_to_do)
}

impl Mine {
    fn new(lock: Lock) -> Result<Self, LockError> {
        // Only by the hand of somebody who edits lock records.
        let token =
            lock.token.ok_or_else(|| LockError::Lost { key: lock.key.clone(), holder: None })?;
        Ok(Self { lock, token, is_fresh: false })
    }
}

fn aid_in(session: &Session) -> Option<Aid> {
    session.get(AID).ok().flatten()
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
