//! `locks.clients(…)`: a wrap for clients without a session of actix-session.

use std::{
    fmt,
    future::{Ready, ready},
    rc::Rc,
};

use actix_web::{
    Error,
    body::MessageBody,
    dev::{Service, ServiceRequest, ServiceResponse, Transform},
};

use crate::{
    actor::Actor,
    lock::Aid,
    manager::LockManager,
    web::{
        settings::Locking,
        wrap::{Identified, LockingMiddleware},
    },
};

/// A wrap for clients without cookies. Made by [`LockManager::clients`].
pub type LockingClients = Locking<Clients>;

/// Tells for each request whose it is; see [`LockManager::clients`].
#[derive(Clone)]
pub struct Clients(Identified);

impl fmt::Debug for Clients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clients")
    }
}

impl LockManager {
    /// Locks for clients that have no session of actix-session, but send a token with each request. The
    /// application says for each request whose it is; the rest works as with
    /// [`session`](Self::session): the extractors, [`SessionLocks`](crate::SessionLocks), the
    /// [lock API](crate::lock_api).
    ///
    /// ```no_run
    /// # use actix_doclock::{Actor, Aid, LockManager};
    /// # use actix_web::{App, HttpMessage, dev::ServiceRequest};
    /// # #[derive(Clone)] struct Claims { sub: String, sid: String }
    /// # fn app(locks: LockManager) {
    /// # let authentication = actix_web::middleware::from_fn(|req, next: actix_web::middleware::Next<actix_web::body::BoxBody>| next.call(req));
    /// App::new()
    ///     .wrap(locks.clients(|req: &ServiceRequest| {
    ///         let claims = req.extensions().get::<Claims>()?.clone();
    ///         Some((Aid::of_client(&claims.sub, &claims.sid), Actor::new(&claims.sub).with_id(&claims.sub)))
    ///     }))
    ///     // The last wrap is the first to see a request: it checks the token, and leaves the claims.
    ///     .wrap(authentication);
    /// # }
    /// ```
    ///
    /// If `whose` returns `None`, the request may lock nothing: if it asks for a lock, it gets
    /// [`LockError::LoginRequired`](crate::LockError::LoginRequired), 401.
    ///
    /// A page of another site may change locks only with a token that browsers do not add by themselves:
    /// `Authorization: Bearer`, or a header that you [name](LockingClients::token_header).
    ///
    /// # The end of such a session
    /// The locks of a client expire after their ttl, when its requests stop. At a logout, and when you revoke a
    /// token, call [`end_session`](Self::end_session) with the same aid: this releases all its locks, and
    /// for a day the aid gets no new ones (401). Your authentication must refuse the token itself. The
    /// listener [`on_session_end`](crate::LockManagerBuilder::on_session_end) hears of both kinds of end.
    pub fn clients(
        &self,
        whose: impl Fn(&ServiceRequest) -> Option<(Aid, Actor)> + 'static,
    ) -> LockingClients {
        Locking::new(self, Clients(Rc::new(whose)))
    }
}

impl LockingClients {
    /// The header in which your clients send their token, if it is not `Authorization: Bearer`: for example
    /// `x-api-key`. May be called several times.
    ///
    /// A request with such a token, and without cookies, may change locks even if it comes from a page of
    /// another site: browsers add cookies and Basic authentication to a request, but never such a token. So
    /// name no header that a proxy adds for a person whom the proxy knows by a cookie.
    pub fn token_header(mut self, name: &str) -> Self {
        Rc::make_mut(&mut self.settings.same_site).token_headers.push(name.to_owned());
        self
    }
}

impl<S, B> Transform<S, ServiceRequest> for LockingClients
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    type Response = ServiceResponse<B>;
    type Error = Error;
    type Transform = LockingMiddleware<S>;
    type InitError = ();
    type Future = Ready<Result<Self::Transform, ()>>;

    fn new_transform(&self, service: S) -> Self::Future {
        let (manager, settings) = (Rc::clone(&self.manager), Rc::new(self.settings.clone()));
        let whose = Some(Rc::clone(&self.inner.0));
        ready(Ok(LockingMiddleware { service, manager, settings, whose }))
    }
}
