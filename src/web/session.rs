//! `locks.session(…)`: wraps a session middleware, with one part of the locks around it and one inside
//! it.

use std::{fmt, future::Future, pin::Pin, rc::Rc};

use actix_session::{Session, SessionExt, SessionMiddleware, storage::SessionStore};
use actix_web::{
    Error, HttpMessage,
    body::MessageBody,
    dev::{Service, ServiceRequest, ServiceResponse, Transform, forward_ready},
};

use crate::{
    actor::Actor,
    error::LockError,
    manager::LockManager,
    web::{
        memory::{memory, with_memory},
        request::{RequestLocks, Settings},
        wrap::Locking,
    },
};

pub(super) type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

impl LockManager {
    /// Puts the locks around a session middleware: wrap the application in the result *instead of* the
    /// [`SessionMiddleware`].
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
    pub fn session<K: SessionStore>(&self, session: SessionMiddleware<K>) -> LockingSession<K> {
        Locking::new(self, session)
    }
}

/// A [`SessionMiddleware`] with locks. Made by [`LockManager::session`].
///
/// - The first lock of a session, or a request that saves the session anyway (a login), writes an aid
///   into the session under the key `doclock.aid`. Refusals and requests without locks write nothing.
/// - A request of a session with an aid renews all its locks, at most once in a third of the ttl, and
///   does not wait for the renewal. A session without locks costs nothing in the first third of the ttl
///   after its login. Later the session costs, at most once in a third of the ttl, an update that matches
///   nothing. The update is sent because another server may have granted the session a lock.
/// - When the aid is removed from the session (`purge`, `clear`, `Identity::logout`), and the session
///   store has accepted this, all locks of the session are released before the answer is sent. `renew`
///   keeps the locks.
/// - If the answer of a request is an error (4xx, 5xx), a lock that this request has freshly taken is
///   given back before the answer is sent.
pub type LockingSession<K> = Locking<SessionMiddleware<K>>;

impl<K: SessionStore + 'static> LockingSession<K> {
    /// Identifies the person of a session: the label that others see, and the roles for the policies.
    /// Default: no person; the manager's [`holder_label`](crate::LockManagerBuilder::holder_label) is
    /// shown.
    ///
    /// With this setting, the [lock API](crate::lock_api) is for identified people only, unless there is an
    /// [access policy](Self::access_policy).
    pub fn identify(mut self, identify: impl Fn(&Session) -> Option<Actor> + 'static) -> Self {
        self.settings.identify = Some(Rc::new(identify));
        self
    }
}

impl<K, S, B> Transform<S, ServiceRequest> for LockingSession<K>
where
    K: SessionStore + 'static,
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    type Response = ServiceResponse<B>;
    type Error = Error;
    type Transform = LockingSessionMiddleware<
        <SessionMiddleware<K> as Transform<Inner<S>, ServiceRequest>>::Transform,
    >;
    type InitError = ();
    type Future = LocalFuture<Result<Self::Transform, ()>>;

    fn new_transform(&self, service: S) -> Self::Future {
        let session = self.inner.new_transform(Inner { service });
        let manager = self.manager.clone();
        let settings = Rc::new(self.settings.clone());
        Box::pin(async move {
            let service = session.await?;
            Ok(LockingSessionMiddleware { service, manager, settings })
        })
    }
}

/// The service that [`LockingSession`] makes: the part outside the session middleware.
pub struct LockingSessionMiddleware<S> {
    service: S,
    manager: LockManager,
    settings: Rc<Settings>,
}

impl<S> fmt::Debug for LockingSessionMiddleware<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockingSessionMiddleware").finish_non_exhaustive()
    }
}

impl<S, B> Service<ServiceRequest> for LockingSessionMiddleware<S>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error>,
    S::Future: 'static,
{
    type Response = ServiceResponse<B>;
    type Error = Error;
    type Future = LocalFuture<Result<Self::Response, Error>>;

    forward_ready!(service);

    fn call(&self, req: ServiceRequest) -> Self::Future {
        let locks = match RequestLocks::begin_request(&req, &self.manager, &self.settings) {
            Ok(locks) => locks,
            Err(error) => return Box::pin(async { Err(error.into()) }),
        };
        let call = self.service.call(req);
        Box::pin(with_memory(async move {
            match call.await {
                Ok(mut response) => {
                    if memory(|it| it.has_ended) == Some(true) {
                        locks.session_has_ended(response.response_mut()).await?;
                    }
                    locks.session_saved(response.response_mut()).await;
                    Ok(response)
                }
                Err(error) => {
                    locks.session_not_saved().await;
                    // actix-session turns an outage of our database into an empty 500.
                    let outage = memory(|it| it.failed.take()).flatten();
                    Err(outage.map_or(error, |outage| LockError::Store(outage).into()))
                }
            }
        }))
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
        let locks = req.extensions().get::<RequestLocks>().cloned();
        if let Some(locks) = &locks {
            locks.session_loaded(req.get_session());
        }
        let call = self.service.call(req);
        Box::pin(async move {
            let response = call.await?;
            if let Some(locks) = locks {
                locks.before_session_is_saved(response.response());
            }
            Ok(response)
        })
    }
}
