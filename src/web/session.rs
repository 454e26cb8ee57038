//! The one wrap: a session middleware with the locks around and inside it.

use std::{fmt, future::Future, pin::Pin, rc::Rc, time::Duration};

use actix_session::{Session, SessionExt, SessionMiddleware, storage::SessionStore};
use actix_web::{
    Error, HttpMessage,
    body::MessageBody,
    dev::{Service, ServiceRequest, ServiceResponse, Transform, forward_ready},
};

use crate::{
    actor::Actor,
    error::LockError,
    manager::{LockManager, watch::streams::Limits},
    web::{
        memory::{memory, with_memory},
        problem::misconfigured,
        request::{Identify, RequestLocks, Waits},
    },
};

/// Well below the minute after which proxies give up on an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// A stream that is silent costs some kilobytes and a file descriptor, of which there are often 1 024
/// or a few thousand.
const EVENT_STREAMS: usize = 4096;

type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

impl LockManager {
    /// Puts the locks around a session middleware: wrap the application in this *instead of* the
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
    /// One wrap of two parts. The inner one sees the session as handlers leave it; the outer one
    /// knows whether the session was saved. So a missing or a wrongly ordered middleware, which
    /// actix-session answers with an empty session in silence, cannot happen.
    /// `IdentityMiddleware` goes inside: `.wrap(IdentityMiddleware::default()).wrap(locks.session(…))`.
    pub fn session<K: SessionStore>(&self, session: SessionMiddleware<K>) -> LockingSession<K> {
        LockingSession {
            manager: self.clone(),
            session,
            identify: Rc::new(|_| None),
            keep_fresh_on_error: false,
            waits: Waits { documents: Duration::ZERO, longest: LONGEST_WAIT },
            idle_after: None,
            streams: Limits { total: EVENT_STREAMS, per_address: EVENT_STREAMS },
        }
    }
}

/// A [`SessionMiddleware`] with locks. Made by [`LockManager::session`].
///
/// - The first lock of a session, or a request that saves the session anyway (a login), writes an
///   aid into the session under the key `doclock.aid`. Refusals and lock-free requests write nothing.
/// - A request of a session that has an aid renews all its locks, at most once in a third of the
///   ttl, and does not wait for that. A session that holds nothing costs nothing after its login,
///   and later an update that finds nothing: another server may have granted it something.
/// - When the aid vanishes from the session (`purge`, `clear`, `Identity::logout`), and the session
///   store has accepted that, all locks of the session are released before the answer is sent.
///   `renew` keeps them.
/// - A lock that was freshly taken by a request whose answer is an error (4xx, 5xx) is given back
///   before the answer is sent.
#[must_use = "wrap the application in it: `App::new().wrap(…)`"]
pub struct LockingSession<K: SessionStore + 'static> {
    manager: LockManager,
    session: SessionMiddleware<K>,
    identify: Identify,
    keep_fresh_on_error: bool,
    waits: Waits,
    idle_after: Option<Duration>,
    streams: Limits,
}

impl<K: SessionStore + 'static> LockingSession<K> {
    /// Who the person of a session is: the label that others see, and the roles that policies ask
    /// for. Default: nobody, shown as the manager's
    /// [`holder_label`](crate::LockManagerBuilder::holder_label).
    pub fn identify(mut self, identify: impl Fn(&Session) -> Option<Actor> + 'static) -> Self {
        self.identify = Rc::new(identify);
        self
    }

    /// How long the person may do nothing while the page keeps the session alive by itself. Default:
    /// for good.
    ///
    /// A page says so with the header `Doclock-Idle-Ms`: the milliseconds since the last key or click
    /// of its person. A heartbeat, or any other request, that says at least this much does not count
    /// as a sign of life: the session's locks go with their ttl. Requests without the header do count;
    /// so does whatever takes or saves a document. It is the page's word: this is for people who left
    /// their desk, not against them.
    pub fn idle_after(mut self, idle_after: Duration) -> Self {
        self.idle_after = Some(idle_after);
        self
    }

    /// How long [`LockedDoc`](crate::LockedDoc) and [`SharedDoc`](crate::SharedDoc) wait for a lock
    /// that another session holds. Default: not at all.
    ///
    /// The connection is kept open meanwhile, so stay below the time-outs of proxies and browsers. A
    /// client that gives up takes its place in the queue along, if the server hears of it: over HTTP/1
    /// only with [`h1_allow_half_closed(false)`](actix_web::HttpServer::h1_allow_half_closed), over HTTP/2
    /// not at all. Otherwise its request goes on, and if the lock is granted to it, the session has it.
    pub fn wait_for_documents(mut self, time: Duration) -> Self {
        self.waits.documents = time;
        self
    }

    /// How long a client of the [lock API](crate::lock_api) may wait: longer `wait_ms` are cut. Default
    /// 30 s.
    pub fn longest_wait(mut self, time: Duration) -> Self {
        self.waits.longest = time;
        self
    }

    /// How many streams of [events](crate::lock_api) this server holds open at most, and how many of them
    /// to one address. Default 4 096 each; more are answered with 503, and their pages ask now and then
    /// instead.
    ///
    /// The address is that of the other end of the connection: of the reverse proxy, where there is one.
    /// So set the second lower only if browsers connect to this server themselves, and then not below
    /// the number of people behind one company's gateway.
    pub fn event_streams(mut self, in_all: usize, per_address: usize) -> Self {
        self.streams = Limits { total: in_all, per_address };
        self
    }

    /// Keeps a fresh lock although the answer of its request is an error (4xx, 5xx). Default: it is
    /// given back, because the client does not know that it has it.
    pub fn keep_fresh_locks_on_error(mut self) -> Self {
        self.keep_fresh_on_error = true;
        self
    }
}

impl<K: SessionStore + 'static> fmt::Debug for LockingSession<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockingSession").field("manager", &self.manager).finish_non_exhaustive()
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
        let session = self.session.new_transform(Inner { service });
        let manager = self.manager.clone();
        let identify = Rc::clone(&self.identify);
        let keep_fresh_on_error = self.keep_fresh_on_error;
        let waits = self.waits;
        let idle_after = self.idle_after;
        let streams = self.streams;
        Box::pin(async move {
            let service = session.await?;
            Ok(LockingSessionMiddleware {
                service,
                manager,
                identify,
                keep_fresh_on_error,
                waits,
                idle_after,
                streams,
            })
        })
    }
}

/// The service that [`LockingSession`] makes: the part outside the session middleware.
pub struct LockingSessionMiddleware<S> {
    service: S,
    manager: LockManager,
    identify: Identify,
    keep_fresh_on_error: bool,
    waits: Waits,
    idle_after: Option<Duration>,
    streams: Limits,
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
        if req.extensions().contains::<RequestLocks>() {
            let error = misconfigured(
                "the request passes `locks.session(…)` twice: keep the wrap of the whole \
                 application, remove that of the scope",
            );
            return Box::pin(async { Err(error.into()) });
        }
        let locks = RequestLocks::new(
            self.manager.clone(),
            Rc::clone(&self.identify),
            self.keep_fresh_on_error,
            self.waits,
            self.idle_after,
            self.streams,
            req.headers(),
        );
        req.extensions_mut().insert(locks.clone());
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
                    // actix-session makes an empty 500 of what is an outage of our database.
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
