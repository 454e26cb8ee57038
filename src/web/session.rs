//! `locks.session(…)`: wraps a session middleware, with one part of the locks around it and one inside
//! it.

use std::{fmt, future::Future, pin::Pin, rc::Rc, time::Duration};

use actix_session::{Session, SessionExt, SessionMiddleware, storage::SessionStore};
use actix_web::{
    Error, HttpMessage,
    body::MessageBody,
    dev::{Service, ServiceRequest, ServiceResponse, Transform, forward_ready},
};

use tokio::sync::Semaphore;

use crate::{
    actor::Actor,
    error::LockError,
    key::LockKey,
    manager::{LockManager, watch::streams::Limits},
    web::{
        access::{AT_ONCE, Access},
        memory::{memory, with_memory},
        problem::misconfigured,
        request::{RequestLocks, Settings},
    },
};

/// Well below the minute after which proxies stop waiting for an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// An idle stream costs some kilobytes and a file descriptor. The limit for descriptors is often 1 024 or
/// a few thousand.
const EVENT_STREAMS: usize = 4096;

type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

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
    pub fn session<K: SessionStore>(&self, session: SessionMiddleware<K>) -> LockingSession<K> {
        LockingSession {
            manager: self.clone(),
            session,
            settings: Settings {
                identify: None,
                access: None,
                policy_turns: Rc::new(Semaphore::new(AT_ONCE)),
                keep_fresh_on_error: false,
                wait_for_documents: Duration::ZERO,
                longest_wait: LONGEST_WAIT,
                idle_after: None,
                streams: Limits { total: EVENT_STREAMS, per_address: EVENT_STREAMS },
            },
        }
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
#[must_use = "wrap the application in it: `App::new().wrap(…)`"]
pub struct LockingSession<K: SessionStore + 'static> {
    manager: LockManager,
    session: SessionMiddleware<K>,
    settings: Settings,
}

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

    /// Decides for each document who may look at its lock, and who may lock it. This applies to the
    /// [lock API](crate::lock_api) only: to its calls, to the list of the states of many documents, and
    /// to the events. Default: if people are [identified](Self::identify), only identified people may;
    /// otherwise everybody may.
    ///
    /// A person without permission gets 404, as for a document that does not exist, before the store is
    /// asked for anything. If people are [identified](Self::identify), a visitor without a login gets 401.
    /// The policy should refuse ids that do not exist, too: otherwise its "no" tells that the document
    /// exists. A refusal names the holder and the title also to a person who may lock, but not look. The policy is asked
    /// at each request, before any wait, and by a stream of events at most once in 10 s for each document.
    /// A stream keeps the person with whom it began, for at most 15 minutes. An [administrator](
    /// crate::LockManagerBuilder::admin_policy) may look at all locks. If the policy cannot tell, it
    /// should answer `false`.
    ///
    /// The extractors do not ask: guard your own routes as before.
    ///
    /// ```no_run
    /// # use actix_doclock::{Access, Actor, LockKey, LockManager};
    /// # use actix_session::{SessionMiddleware, storage::SessionStore};
    /// # async fn is_in_team(_: &str, _: &LockKey) -> bool { true }
    /// # fn wrap<S: SessionStore + 'static>(locks: LockManager, session: SessionMiddleware<S>) {
    /// let wrap = locks.session(session).access_policy(async |person: Option<Actor>, key: LockKey, access| {
    ///     match person {
    ///         Some(person) => is_in_team(&person.label, &key).await,
    ///         // Visitors see who edits, but lock nothing.
    ///         None => access == Access::Look,
    ///     }
    /// });
    /// # }
    /// ```
    pub fn access_policy(
        mut self,
        allows: impl AsyncFn(Option<Actor>, LockKey, Access) -> bool + 'static,
    ) -> Self {
        let allows = Rc::new(allows);
        self.settings.access = Some(Rc::new(move |person, key, access| {
            let allows = Rc::clone(&allows);
            Box::pin(async move { allows(person, key, access).await })
        }));
        self
    }

    /// How long the person may do nothing while the page keeps the session alive. Default: no limit.
    ///
    /// A page reports this in the header `Doclock-Idle-Ms`: the milliseconds since the person's last key
    /// or click. A heartbeat or any other request with at least this value does not count as activity, so
    /// the session's locks expire. Requests without the header count as activity, and so does each
    /// request that takes or saves a document. The server trusts the page: this setting is for people who
    /// left their desk, and is no protection against them.
    pub fn idle_after(mut self, idle_after: Duration) -> Self {
        self.settings.idle_after = Some(idle_after);
        self
    }

    /// How long [`LockedDoc`](crate::LockedDoc) and [`SharedDoc`](crate::SharedDoc) wait for a lock of
    /// another session. Default: not at all.
    ///
    /// The connection stays open meanwhile, so stay below the time-outs of proxies and browsers. A client
    /// that gives up loses its place in the queue, once the server notices. The server notices it over
    /// HTTP/1 only with [`h1_allow_half_closed(false)`](actix_web::HttpServer::h1_allow_half_closed), and
    /// over HTTP/2 not at all. Otherwise the request goes on, and if the lock is granted to it, the
    /// session holds the lock.
    pub fn wait_for_documents(mut self, time: Duration) -> Self {
        self.settings.wait_for_documents = time;
        self
    }

    /// How long a client of the [lock API](crate::lock_api) may wait: a longer `wait_ms` is shortened to
    /// this. Default 30 s.
    pub fn longest_wait(mut self, time: Duration) -> Self {
        self.settings.longest_wait = time;
        self
    }

    /// How many [event streams](crate::lock_api) this server keeps open at most, in total and for one
    /// address. Default 4 096 each. More streams are answered with 503, and their pages poll instead.
    ///
    /// The address is the peer of the connection: the reverse proxy, if there is one. So lower the second
    /// limit only if browsers connect to this server directly, and not below the number of people behind
    /// one company's gateway.
    pub fn event_streams(mut self, in_all: usize, per_address: usize) -> Self {
        self.settings.streams = Limits { total: in_all, per_address };
        self
    }

    /// Keeps a fresh lock even if the answer of its request is an error (4xx, 5xx). Default: the lock is
    /// given back, because the client does not know that it holds the lock.
    pub fn keep_fresh_locks_on_error(mut self) -> Self {
        self.settings.keep_fresh_on_error = true;
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
        if req.extensions().contains::<RequestLocks>() {
            let error = misconfigured(
                "the request passes `locks.session(…)` twice: keep the wrap of the whole \
                 application, remove the wrap of the scope",
            );
            return Box::pin(async { Err(error.into()) });
        }
        let locks =
            RequestLocks::new(self.manager.clone(), Rc::clone(&self.settings), req.headers());
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
