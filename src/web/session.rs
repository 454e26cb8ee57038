//! `locks.session(…)`: a wrap around a session middleware, with one part of the locks around it and one inside it.

use std::{rc::Rc, time::Duration};

use actix_session::{Session, SessionExt};
use actix_web::{
    Error, HttpMessage,
    body::MessageBody,
    cookie::Key,
    dev::{Service, ServiceRequest, ServiceResponse, Transform, forward_ready},
};
use sha2::{Digest, Sha256};

use crate::{
    actor::Actor,
    manager::LockManager,
    web::{
        request::{RequestLocks, Whose, aid_in},
        settings::Locking,
        wrap::{LocalFuture, LockingMiddleware},
    },
};

impl LockManager {
    /// Puts the locks around a session middleware: wrap the application in the result *instead of* the
    /// [`SessionMiddleware`](actix_session::SessionMiddleware). A wrap around a `SessionMiddleware` will do, too, such
    /// as `SessionWrap` of the crate `actix-session-mongo`.
    ///
    /// ```no_run
    /// # use actix_doclock::{Actor, LockManager, MemoryStore};
    /// # use actix_session::{Session, SessionMiddleware, storage::SessionStore};
    /// # use actix_web::{App, cookie::Key};
    /// # fn app<S: SessionStore + 'static>(locks: LockManager, session_store: S, key: Key) {
    /// App::new().wrap(
    ///     locks
    ///         .session(SessionMiddleware::new(session_store, key))
    ///         .identify(|session: &Session| Some(Actor::new(session.get::<String>("name").ok()??))),
    /// );
    /// # }
    /// ```
    ///
    /// This is one wrap with two parts. The inner part sees the session as the handlers leave it; the
    /// outer part knows whether the session was saved. So a session middleware cannot be missing or in
    /// the wrong order, which actix-session would not report: it would hand out an empty session.
    /// `IdentityMiddleware` goes inside: `.wrap(IdentityMiddleware::default()).wrap(locks.session(…))`.
    ///
    /// For clients without cookies see [`clients`](Self::clients).
    pub fn session<M>(&self, session: M) -> LockingSession<M> {
        Locking::new(self, InSession(session))
    }

    /// Notes a fingerprint of the session key, so that servers with different keys
    /// [find out](crate::store::ServerNote): otherwise people are logged out at random. Call it once, in `main`,
    /// with the key of the [`SessionMiddleware`](actix_session::SessionMiddleware).
    ///
    /// The fingerprint is 32 bits of a SHA-256 digest, and tells nothing about a random key.
    pub fn note_session_key(&self, key: &Key) {
        let digest =
            Sha256::new().chain_update("actix-doclock session key").chain_update(key.master());
        let digest = digest.finalize();
        self.core
            .servers
            .note_key(digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect());
    }
}

/// A [`SessionMiddleware`](actix_session::SessionMiddleware) with locks. Made by [`LockManager::session`].
///
/// - The first lock of a session, or a request that begins or renews the session anyway (a login), writes an aid
///   into the session under the key `doclock.aid`. Refusals and requests without locks write nothing.
/// - A request of a session with an aid renews its locks, at most once in a third of the ttl, and
///   does not wait for the renewal. Of the locks that tabs have taken, the request renews those that it names by
///   their tab or their token. A session without locks costs nothing in the first third of the ttl
///   after its login. Later the session costs, at most once in a third of the ttl, an update that matches
///   nothing. The update is sent because another server may have granted the session a lock.
/// - When the aid is removed from the session (`purge`, `clear`, `Identity::logout`), and the session
///   store has accepted this, all locks of the session are released before the answer is sent. `renew`
///   keeps the locks.
/// - If the answer of a request is an error (4xx, 5xx), a lock that this request has freshly taken is
///   given back before the answer is sent.
pub type LockingSession<M> = Locking<InSession<M>>;

/// A session middleware, in [`LockingSession`].
#[derive(Debug, Clone)]
pub struct InSession<M>(M);

impl<M> LockingSession<M> {
    /// Identifies the person of a session: the label that others see, and the roles for the policies.
    /// Default: no person; the manager's [`holder_label`](crate::LockManagerBuilder::holder_label) is
    /// shown.
    ///
    /// When a request changes the person of its session, or is the first with a person, the session gets a new aid,
    /// and the locks of the old one are released. People are distinguished by their [id](Actor::with_id), or else by
    /// their label and roles. A page that was opened for one person neither locks nor saves for another one; without ids,
    /// only the labels count for this. All wraps and all servers must identify people in the same way.
    ///
    /// With this setting, the [lock API](crate::lock_api) is for identified people only, unless there is an
    /// [access policy](Self::access_policy).
    pub fn identify(mut self, identify: impl Fn(&Session) -> Option<Actor> + 'static) -> Self {
        self.settings.identify = Some(Rc::new(identify));
        self
    }

    /// How much time a session has left if its lifetime is fixed, as twelve hours after the login: pages
    /// [warn](crate::guide::typed_text#before-the-lock-ends) their person before it ends. Default: unknown, and no page warns.
    ///
    /// Return `None` if each request extends the session. The store `actix-session-mongo` knows the time:
    /// `.session_ends_in(|_| actix_session_mongo::session_ends_in())`.
    pub fn session_ends_in(
        mut self,
        left: impl Fn(&Session) -> Option<Duration> + 'static,
    ) -> Self {
        self.settings.session_ends_in = Some(Rc::new(left));
        self
    }
}

impl<M, S, B> Transform<S, ServiceRequest> for LockingSession<M>
where
    M: Transform<Inner<S>, ServiceRequest, Response = ServiceResponse<B>, Error = Error>,
    M::Transform: 'static,
    M::InitError: 'static,
    M::Future: 'static,
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    type Response = ServiceResponse<B>;
    type Error = Error;
    type Transform = LockingMiddleware<M::Transform>;
    type InitError = M::InitError;
    type Future = LocalFuture<Result<Self::Transform, M::InitError>>;

    fn new_transform(&self, service: S) -> Self::Future {
        let session = self.inner.0.new_transform(Inner { service });
        let (manager, settings) = (Rc::clone(&self.manager), Rc::new(self.settings.clone()));
        Box::pin(async move {
            Ok(LockingMiddleware { service: session.await?, manager, settings, whose: None })
        })
    }
}

/// The part inside the session middleware.
#[doc(hidden)]
#[expect(missing_debug_implementations, reason = "only public as a part of an associated type")]
pub struct Inner<S> {
    service: S,
}

impl<S, B> Service<ServiceRequest> for Inner<S>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error>,
    S::Future: 'static,
{
    type Response = ServiceResponse<B>;
    type Error = Error;
    type Future = LocalFuture<Result<Self::Response, Error>>;

    forward_ready!(service);

    fn call(&self, req: ServiceRequest) -> Self::Future {
        let locks = req.extensions().get::<Rc<RequestLocks>>().cloned();
        if let Some(locks) = &locks {
            let session = req.get_session();
            let aid = aid_in(&session);
            locks.belongs_to(Whose::Session(session), aid);
        }
        let call = self.service.call(req);
        Box::pin(async move {
            let response = call.await?;
            if let Some(locks) = locks {
                locks.ask_again_in_passing().await;
                locks.before_session_is_saved(response.response());
            }
            Ok(response)
        })
    }
}
