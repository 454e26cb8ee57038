//! The settings of the wraps.

use std::{fmt, rc::Rc, time::Duration};

use actix_session::Session;
use actix_web::{HttpRequest, HttpResponse, dev::RequestHead};

use crate::{
    actor::Actor,
    key::LockKey,
    manager::LockManager,
    web::{
        access::{Access, AccessPolicy, Answers, Identify, PolicyAnswer},
        problem::Problem,
        same_site,
    },
};

/// Renders an error of the wrap.
type Render = dyn Fn(&RequestHead, &Problem) -> Option<HttpResponse>;

/// Says to a person what happened.
type Explain = dyn Fn(&RequestHead, &Problem) -> Option<String>;

/// Tells how much of its fixed lifetime a session has left.
type SessionEndsIn = dyn Fn(&Session) -> Option<Duration>;

/// Names the collection of a type for a request.
type CollectionNames = dyn Fn(&HttpRequest, &'static str) -> Option<String>;

/// The settings of the application at a wrap.
#[derive(Clone, Default)]
pub(super) struct Settings {
    pub(super) identify: Option<Identify>,
    pub(super) collection_names: Option<Rc<CollectionNames>>,
    pub(super) access: Option<AccessPolicy>,
    pub(super) answers: Rc<Answers>,
    pub(super) admits_visitors: bool,
    /// True if the policy is for the lock API only.
    pub(super) extractors_do_not_ask: bool,
    pub(super) keep_fresh_on_error: bool,
    /// How long the extractors wait for locks of other sessions.
    pub(super) wait_for_documents: Duration,
    /// The longest wait that a client may ask for.
    pub(super) longest_wait: Duration,
    pub(super) idle_after: Option<Duration>,
    pub(super) session_ends_in: Option<Rc<SessionEndsIn>>,
    pub(super) same_site: Rc<same_site::Rules>,
    pub(super) render: Option<Rc<Render>>,
    pub(super) explain: Option<Rc<Explain>>,
}

/// Well below the minute after which proxies stop waiting for an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// A wrap around the application, with its settings. Made by
/// [`locks.session(…)`](LockManager::session) or by [`locks.clients(…)`](LockManager::clients).
#[must_use = "wrap the application in it: `App::new().wrap(…)`"]
pub struct Locking<W> {
    pub(super) manager: Rc<LockManager>,
    pub(super) inner: W,
    pub(super) settings: Settings,
}

impl<W> Locking<W> {
    pub(super) fn new(manager: &LockManager, inner: W) -> Self {
        let settings = Settings { longest_wait: LONGEST_WAIT, ..Settings::default() };
        Self { manager: Rc::new(manager.clone()), inner, settings }
    }

    /// Decides for each document whether a person may look at its lock, and may lock it. Asked before the store: by the
    /// [lock API](crate::lock_api), the status of many documents and the events, and by the extractors
    /// ([`LockedDoc`](crate::LockedDoc), [`SharedDoc`](crate::SharedDoc), [`HeldDoc`](crate::HeldDoc)) and by
    /// [`SessionLocks::lock`](crate::SessionLocks::lock), [`lock_all`](crate::SessionLocks::lock_all) and
    /// [`load`](crate::SessionLocks::load).
    /// [`create`](crate::SessionLocks::create) asks it only if there is such a document; releases never ask. Default: if
    /// people are [identified](crate::web::LockingSession::identify), only identified people may use the lock API;
    /// otherwise everybody may. Without a policy, the extractors serve every session.
    ///
    /// A person without permission gets 404, as for a document that does not exist; nothing is locked or announced.
    /// The policy should refuse ids that do not exist, too: otherwise its "no" tells that the document
    /// exists. If people are identified, a visitor without a login gets 401, and the policy is not asked, unless you
    /// [admit visitors](Self::admit_visitors). A refusal names the holder and the title also to a person who may
    /// lock, but not look.
    ///
    /// The policy is asked by each request for a lock, before any wait, and on each server once a minute by any request of
    /// the session, for all of its locks. A lock
    /// that its person may no longer have is given back. If the policy cannot tell, let it return an error: a policy may
    /// return a [`Result`] (see [`PolicyAnswer`]). Then the response is 503, and the log has the text, as if the policy
    /// panics, or has not answered within the [deadline](crate::LockManagerBuilder::deadline). The streams of events of a worker share the answers of the policy for 10 s, for each person and
    /// document. While a stream waits for an answer, further events gather, and the policy is asked about all of them
    /// together. A stream keeps the person with whom it began. An
    /// [administrator](crate::LockManagerBuilder::admin_policy) may look at all locks. A policy that asks the database is an
    /// [`async move` closure](crate::guide::existing_application#roles-and-policies-that-ask-the-database).
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
    pub fn access_policy<A: PolicyAnswer<bool>>(
        mut self,
        allows: impl AsyncFn(Option<Actor>, LockKey, Access) -> A + 'static,
    ) -> Self {
        self.settings.access = Some(AccessPolicy::of_one(allows, self.manager.deadline()));
        self
    }

    /// As [`access_policy`](Self::access_policy), for many documents with one call: a status asks about up to 200, a
    /// stream of events about those that changed meanwhile. The answer has one value for each key, in the same order.
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
    pub fn access_policy_for_many<A: PolicyAnswer<Vec<bool>>>(
        mut self,
        allows: impl AsyncFn(Option<Actor>, Vec<LockKey>, Access) -> A + 'static,
    ) -> Self {
        self.settings.access = Some(AccessPolicy::of_many(allows, self.manager.deadline()));
        self
    }

    /// Names the collection of a type for each request, if the collection is known at run time only: the collection of
    /// a tenant, for example. `name` gets the request and [`Lockable::COLLECTION`](crate::Lockable::COLLECTION). If it
    /// returns `None`, the answer is the one for a missing document. Default: the collection of the type.
    ///
    /// For the extractors and for [`SessionLocks`](crate::SessionLocks). The collections have to be registered,
    /// [by name](LockManager::register_in) or [by a pattern](LockManager::register_matching).
    ///
    /// The [lock API](crate::lock_api) takes collections by their own names, so a client may name a collection of
    /// another tenant: refuse that in the [access policy](Self::access_policy).
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

    /// Asks the [access policy](Self::access_policy) in the lock API only. For applications whose routes with
    /// extractors have guards of their own, which run before the extractors. A guard inside the handler is too late:
    /// by then the lock is taken, or its holder named. Then no "no" of the policy gives a lock back.
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

    /// Says that browsers reach this application by https only, for a proxy that removes TLS and does not forward the
    /// scheme. Then a page of `http` on the same host changes no locks. Default: the scheme that the proxy forwards
    /// (`Forwarded`, `X-Forwarded-Proto`), or that of the connection; where nobody tells it, pages of both schemes may.
    pub fn https_only(mut self) -> Self {
        Rc::make_mut(&mut self.settings.same_site).is_https = true;
        self
    }

    /// Refuses the requests of pages of other origins in all routes, not in the lock API only: 403 `cross_site`, for
    /// every method but GET, HEAD, OPTIONS and TRACE. Otherwise your own routes rely on the `SameSite` of the cookie. A
    /// login that comes back by a form of the identity provider (`form_post`) is such a request: mount its route outside
    /// this wrap, or [trust](Self::trusted_origin) the provider.
    ///
    /// ```no_run
    /// # use actix_doclock::LockManager;
    /// # use actix_session::{SessionMiddleware, storage::SessionStore};
    /// # fn wrap<S: SessionStore + 'static>(locks: LockManager, session: SessionMiddleware<S>) {
    /// let wrap = locks.session(session).refuse_cross_site();
    /// # }
    /// ```
    pub fn refuse_cross_site(mut self) -> Self {
        Rc::make_mut(&mut self.settings.same_site).is_for_all_routes = true;
        self
    }

    /// Renders the errors of the wrap itself, for example as a page that keeps the text of a posted form. These are: the
    /// session has ended before its lock could be kept, the session store does not answer, and `cross_site`. Where
    /// `render` returns `None`, and by default, the answer is `application/problem+json`. The errors of the extractors
    /// are for your handlers, or for a middleware inside.
    ///
    /// ```no_run
    /// # use actix_doclock::{LockManager, web::Problem};
    /// # use actix_session::{SessionMiddleware, storage::SessionStore};
    /// # use actix_web::{HttpResponse, ResponseError, dev::RequestHead, http::header::ACCEPT};
    /// # fn wrap<S: SessionStore + 'static>(locks: LockManager, session: SessionMiddleware<S>) {
    /// let wrap = locks.session(session).render_errors(|request: &RequestHead, problem: &Problem| {
    ///     let accepts = request.headers().get(ACCEPT)?.to_str().ok()?;
    ///     accepts.contains("text/html").then(|| {
    ///         HttpResponse::build(problem.status_code()).body(format!("Go back, and try again: {}", problem.text()))
    ///     })
    /// });
    /// # }
    /// ```
    pub fn render_errors(
        mut self,
        render: impl Fn(&RequestHead, &Problem) -> Option<HttpResponse> + 'static,
    ) -> Self {
        self.settings.render = Some(Rc::new(render));
        self
    }

    /// Says in other words, or in another language, what [`Refused::why`](crate::web::Refused) tells people. Where `explain`
    /// returns `None`, and by default, it is [`Problem::for_people`].
    ///
    /// ```no_run
    /// # use actix_doclock::{LockManager, web::Problem};
    /// # use actix_session::{SessionMiddleware, storage::SessionStore};
    /// # use actix_web::dev::RequestHead;
    /// # fn wrap<S: SessionStore + 'static>(locks: LockManager, session: SessionMiddleware<S>) {
    /// let wrap = locks.session(session).explain(|_: &RequestHead, problem: &Problem| {
    ///     let is_old = problem.member("code")? == "stale_copy";
    ///     is_old.then(|| "Un collègue a enregistré ce document. Comparez les deux textes.".to_owned())
    /// });
    /// # }
    /// ```
    pub fn explain(
        mut self,
        explain: impl Fn(&RequestHead, &Problem) -> Option<String> + 'static,
    ) -> Self {
        self.settings.explain = Some(Rc::new(explain));
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
