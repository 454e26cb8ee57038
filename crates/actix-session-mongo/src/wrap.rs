//! The wrap around a session middleware. actix-session gives a store only a key and a state, not the results of earlier
//! calls of the same request. So the wrap gives each request a place for them.

use std::{cell::RefCell, fmt, future::Future, time::Duration};

use actix_service::{
    Transform, apply_fn,
    boxed::{self, BoxService},
};
use actix_session::{SessionMiddleware, storage::SessionStore};
use actix_web::{
    Error,
    body::MessageBody,
    dev::{Service, ServiceRequest, ServiceResponse},
    http::header::SET_COOKIE,
};
use futures_util::future::LocalBoxFuture;

use crate::change::State;

tokio::task_local! {
    static REQUEST: RefCell<Request>;
}

/// The session of the current request.
#[derive(Default)]
pub(crate) struct Request {
    /// The key of the loaded session, and the state as it was loaded.
    pub(crate) loaded: Option<(String, State)>,
    /// How much time the session had left when it was loaded.
    pub(crate) left: Option<Duration>,
    /// The rest of the absolute time-out when the session gave up its key.
    pub(crate) absolute_left: Option<Duration>,
    /// True if the session had ended before it could be saved or extended.
    pub(crate) has_ended: bool,
    /// The number of cookies in the answer that the session middleware gets.
    cookies: usize,
    /// Why the session middleware has failed.
    pub(crate) failed: Option<crate::Error>,
}

/// `None` outside of the wrap.
pub(crate) fn request<T>(access: impl FnOnce(&mut Request) -> T) -> Option<T> {
    REQUEST.try_with(|request| access(&mut request.borrow_mut())).ok()
}

/// How much time the session of this request had left when it was loaded. Later requests extend it only if the
/// session middleware says so (`TtlExtensionPolicy::OnEveryRequest`), or if they change the session. `None` for a new
/// session, and outside of the [wrap](SessionWrap).
#[must_use]
pub fn session_ends_in() -> Option<Duration> {
    request(|it| it.left).flatten()
}

/// A wrap around a session middleware with a [`MongoSessionStore`](crate::MongoSessionStore).
///
/// Without the wrap, a later request overwrites the changes of a concurrent one, as in all other stores; a renewed
/// session begins a new absolute time-out; a request of a session that has ended meanwhile sends the dead key to
/// the browser; and an outage of the database is an empty 500 instead of a 503. With another store the wrap does
/// nothing.
#[must_use = "wrap the application in it: `App::new().wrap(…)`"]
#[derive(Clone)]
pub struct SessionWrap<K: SessionStore>(pub SessionMiddleware<K>);

impl<K: SessionStore> fmt::Debug for SessionWrap<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionWrap")
    }
}

impl<K, S, B> Transform<S, ServiceRequest> for SessionWrap<K>
where
    K: SessionStore + 'static,
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    S::Future: 'static,
    B: MessageBody + 'static,
{
    type Response = ServiceResponse<B>;
    type Error = Error;
    type Transform = BoxService<ServiceRequest, ServiceResponse<B>, Error>;
    type InitError = ();
    type Future = LocalBoxFuture<'static, Result<Self::Transform, ()>>;

    fn new_transform(&self, service: S) -> Self::Future {
        let inside = apply_fn(service, |req, service: &S| {
            let call = service.call(req);
            async move {
                let response = call.await?;
                let cookies = response.headers().get_all(SET_COOKIE).count();
                request(|it| it.cookies = cookies);
                Ok(response)
            }
        });
        let session = self.0.new_transform(inside);
        Box::pin(async {
            let whole = apply_fn(session.await?, |req, session| {
                REQUEST.scope(RefCell::default(), answer(session.call(req)))
            });
            Ok(boxed::service(whole))
        })
    }
}

async fn answer<B>(
    session: impl Future<Output = Result<ServiceResponse<B>, Error>>,
) -> Result<ServiceResponse<B>, Error> {
    match session.await {
        Ok(mut response) => {
            if let Some(cookies) = request(|it| it.has_ended.then_some(it.cookies)).flatten() {
                // The browser may already have another key, and should not get the dead one again. The session
                // middleware adds its cookie last.
                let headers = response.headers_mut();
                let all: Vec<_> = headers.remove(SET_COOKIE).collect();
                all.into_iter().take(cookies).for_each(|it| headers.append(SET_COOKIE, it));
            }
            Ok(response)
        }
        // The error of the session middleware does not tell the error that the store has met.
        Err(error) => {
            let failed = request(|it| it.failed.take()).flatten();
            Err(failed.map_or(error, Into::into))
        }
    }
}
