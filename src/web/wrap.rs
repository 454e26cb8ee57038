//! What both wraps have in common: the settings, and the service.

use std::{fmt, future::Future, pin::Pin, rc::Rc, time::Duration};

use actix_web::{
    Error, HttpRequest,
    dev::{Service, ServiceRequest, ServiceResponse, forward_ready},
};

use crate::{
    actor::Actor,
    key::LockKey,
    lock::Aid,
    manager::{LockManager, watch::streams::Limits},
    web::{
        access::{Access, AccessPolicy, Answers},
        memory::{Served, with_memory},
        request::{RequestLocks, Settings},
    },
};

pub(super) type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// Tells whose request it is.
pub(super) type Whose = Rc<dyn Fn(&ServiceRequest) -> Option<(Aid, Actor)>>;

/// Well below the minute after which proxies stop waiting for an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// An idle stream costs some kilobytes and a file descriptor. The limit for descriptors is often 1 024 or
/// a few thousand.
const EVENT_STREAMS: usize = 4096;

/// A few browsers; where each tab opens a stream, a few dozen tabs.
const EVENT_STREAMS_PER_PERSON: usize = 64;

/// A wrap around the application, with its settings. Made by
/// [`locks.session(…)`](LockManager::session) or by [`locks.clients(…)`](LockManager::clients).
#[must_use = "wrap the application in it: `App::new().wrap(…)`"]
pub struct Locking<W> {
    pub(super) manager: LockManager,
    pub(super) inner: W,
    pub(super) settings: Settings,
}

impl<W> Locking<W> {
    pub(super) fn new(manager: &LockManager, inner: W) -> Self {
        let settings = Settings {
            identify: None,
            collection_names: None,
            access: None,
            answers: Answers::new(),
            admits_visitors: false,
            extractors_do_not_ask: false,
            keep_fresh_on_error: false,
            wait_for_documents: Duration::ZERO,
            longest_wait: LONGEST_WAIT,
            idle_after: None,
            streams: Limits {
                total: EVENT_STREAMS,
                per_address: EVENT_STREAMS,
                per_person: EVENT_STREAMS_PER_PERSON,
            },
            same_site: Rc::default(),
        };
        Self { manager: manager.clone(), inner, settings }
    }

    /// Decides for each document who may look at its lock, and who may lock it. Asked before the store: by the
    /// [lock API](crate::lock_api), the status of many documents and the events, and by the extractors
    /// ([`LockedDoc`](crate::LockedDoc), [`SharedDoc`](crate::SharedDoc), [`HeldDoc`](crate::HeldDoc)) and by
    /// [`SessionLocks::lock`](crate::SessionLocks::lock) and [`lock_all`](crate::SessionLocks::lock_all).
    /// [`create`](crate::SessionLocks::create) asks it only if there is such a document; releases never ask. Default: if
    /// people are [identified](crate::web::LockingSession::identify), only identified people may use the lock API;
    /// otherwise everybody may. The extractors then serve every session.
    ///
    /// A person without permission gets 404, as for a document that does not exist; nothing is locked or announced.
    /// The policy should refuse ids that do not exist, too: otherwise its "no" tells that the document
    /// exists. If people are identified, a visitor without a login gets 401, and the policy is not asked, unless you
    /// [admit visitors](Self::admit_visitors). A refusal names the holder and the title also to a person who may
    /// lock, but not look.
    ///
    /// The policy is asked at each request, before any wait, for at most 5 s: then, or if it panics, the answer is
    /// 503. The streams of events of a worker share its answers for 10 s, for each person and document; while a
    /// stream waits for one, further events gather, and are asked for together. A stream keeps the person with whom
    /// it began. An [administrator](crate::LockManagerBuilder::admin_policy) may look at all locks. If the policy
    /// cannot tell, it should answer `false`.
    ///
    /// ```no_run
    /// # use actix_doclock::{Actor, LockKey, LockManager, web::Access};
    /// # use actix_session::{SessionMiddleware, storage::SessionStore};
    /// # async fn is_in_team(_: &str, _: &LockKey) -> bool { true }
    /// # fn wrap<S: SessionStore + 'static>(locks: LockManager, session: SessionMiddleware<S>) {
    /// let wrap = locks.session(session).access_policy(async |person: Option<Actor>, key: LockKey, access| {
    ///     match person {
    ///         Some(person) => is_in_team(&person.label, &key).await,
    ///         None => access == Access::Look,
    ///     }
    /// })
    /// // Visitors see who edits, but lock nothing.
    /// .admit_visitors();
    /// # }
    /// ```
    pub fn access_policy(
        mut self,
        allows: impl AsyncFn(Option<Actor>, LockKey, Access) -> bool + 'static,
    ) -> Self {
        self.settings.access = Some(AccessPolicy::of_one(allows));
        self
    }

    /// As [`access_policy`](Self::access_policy), for many documents with one call: a status asks for up to 200, a
    /// stream of events for those that changed meanwhile. The answer has one value for each key, in their order.
    ///
    /// ```no_run
    /// # use actix_doclock::{Actor, LockKey, LockManager};
    /// # use actix_session::{SessionMiddleware, storage::SessionStore};
    /// # use std::collections::HashSet;
    /// # async fn of_team(_: &str, _: &[LockKey]) -> HashSet<LockKey> { HashSet::new() }
    /// # fn wrap<S: SessionStore + 'static>(locks: LockManager, session: SessionMiddleware<S>) {
    /// let wrap = locks.session(session).access_policy_for_many(
    ///     async |person: Option<Actor>, keys: Vec<LockKey>, _| {
    ///         let Some(person) = person else { return vec![false; keys.len()] };
    ///         let of_team = of_team(&person.label, &keys).await; // one query
    ///         keys.iter().map(|key| of_team.contains(key)).collect()
    ///     },
    /// );
    /// # }
    /// ```
    pub fn access_policy_for_many(
        mut self,
        allows: impl AsyncFn(Option<Actor>, Vec<LockKey>, Access) -> Vec<bool> + 'static,
    ) -> Self {
        self.settings.access = Some(AccessPolicy::of_many(allows));
        self
    }

    /// Names the collection of a type for each request, where it is known at run time only: that of a tenant, for
    /// example. Gets the request and [`Lockable::COLLECTION`](crate::Lockable::COLLECTION). With `None`, the request is
    /// answered as if there were no such document. Default: the collection of the type.
    ///
    /// For the extractors and for [`SessionLocks`](crate::SessionLocks). The collections have to be registered,
    /// [by name](LockManager::register_in) or [by a pattern](LockManager::register_matching).
    ///
    /// The [lock API](crate::lock_api) takes collections by their own names, so a client may name those of another
    /// tenant: refuse that in the [access policy](Self::access_policy).
    ///
    /// ```no_run
    /// # use actix_doclock::LockManager;
    /// # use actix_session::{SessionMiddleware, storage::SessionStore};
    /// # fn wrap<S: SessionStore + 'static>(locks: LockManager, session: SessionMiddleware<S>) {
    /// let wrap = locks.session(session).collection_names(|request, name| {
    ///     let tenant = request.headers().get("x-tenant")?.to_str().ok()?; // set by the proxy
    ///     Some(format!("{tenant}_{name}"))
    /// });
    /// # }
    /// ```
    pub fn collection_names(
        mut self,
        name: impl Fn(&HttpRequest, &'static str) -> Option<String> + 'static,
    ) -> Self {
        self.settings.collection_names = Some(Rc::new(name));
        self
    }

    /// Asks the [access policy](Self::access_policy) for visitors without a login, too, where people are
    /// [identified](crate::web::LockingSession::identify). Default: they get 401.
    pub fn admit_visitors(mut self) -> Self {
        self.settings.admits_visitors = true;
        self
    }

    /// Asks the [access policy](Self::access_policy) in the lock API only: the routes of the application with
    /// extractors have guards of their own, which run before the extractors. A guard inside the handler is too late:
    /// by then the lock is taken, or its holder named.
    pub fn access_policy_for_lock_api_only(mut self) -> Self {
        self.settings.extractors_do_not_ask = true;
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
    /// HTTP/1 only with [`h1_allow_half_closed(false)`](actix_web::HttpServer::h1_allow_half_closed), which
    /// [`serve`](LockManager::serve) sets, and
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
        self.settings.streams = Limits { total: in_all, per_address, ..self.settings.streams };
        self
    }

    /// How many [event streams](crate::lock_api) this server keeps open for one person. Default 64. More
    /// streams are answered as by [`event_streams`](Self::event_streams).
    ///
    /// A person is known by the [id](crate::Actor::with_id) that the application gives. A person without an
    /// id counts by the session, and visitors without a session count together by their address. So raise
    /// the limit if many visitors listen from behind one proxy.
    pub fn event_streams_per_person(mut self, streams: usize) -> Self {
        self.settings.streams.per_person = streams;
        self
    }

    /// Lets the pages of another origin change locks by the [lock API](crate::lock_api), for example a
    /// single-page application with a host of its own. Otherwise they get 403 `cross_site`. May be called
    /// several times.
    ///
    /// The browser also asks for permission by CORS, with credentials if you use cookies: add a CORS
    /// middleware.
    ///
    /// # Panics
    /// Unless the origin is written as browsers send it, such as `https://spa.example` or
    /// `http://localhost:5173`: in lower case, and without a path.
    pub fn trusted_origin(mut self, origin: &str) -> Self {
        Rc::make_mut(&mut self.settings.same_site).trust(origin);
        self
    }

    /// Keeps a fresh lock even if the answer of its request is an error (4xx, 5xx). Default: the lock is
    /// given back, because the client does not know that it holds the lock.
    pub fn keep_fresh_locks_on_error(mut self) -> Self {
        self.settings.keep_fresh_on_error = true;
        self
    }
}

impl<W> fmt::Debug for Locking<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locking").field("manager", &self.manager).finish_non_exhaustive()
    }
}

/// The service that [`Locking`] makes: for a session, the part outside the session middleware.
pub struct LockingMiddleware<S> {
    pub(super) service: S,
    pub(super) manager: LockManager,
    pub(super) settings: Rc<Settings>,
    /// For clients without a session.
    pub(super) whose: Option<Whose>,
}

impl<S> fmt::Debug for LockingMiddleware<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockingMiddleware").finish_non_exhaustive()
    }
}

impl<S, B> Service<ServiceRequest> for LockingMiddleware<S>
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
        if let Some(whose) = &self.whose {
            locks.client_came(whose(&req));
        }
        let served = Served {
            manager: self.manager.clone(),
            method: req.method().clone(),
            uri: req.uri().clone(),
            document: None,
        };
        let call = self.service.call(req);
        Box::pin(with_memory(served, async move {
            match call.await {
                Ok(mut response) => {
                    locks.session_saved(response.response_mut()).await?;
                    Ok(response)
                }
                Err(error) => {
                    locks.session_not_saved().await;
                    Err(locks.explained(error))
                }
            }
        }))
    }
}
