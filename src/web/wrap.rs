//! The service of the wraps: from the arrival of a request until its answer leaves.

use std::{cell::RefCell, fmt, future::Future, pin::Pin, rc::Rc};

use actix_web::{
    Error,
    dev::{Service, ServiceRequest, ServiceResponse, forward_ready},
    error::InternalError,
};

use crate::{
    actor::Actor,
    error::LockError,
    lock::Aid,
    manager::LockManager,
    web::{
        current_request::{Asker, CURRENT_REQUEST, CurrentRequest, log_fault},
        problem::Problem,
        request::{RequestLocks, Whose},
        settings::Settings,
    },
};

pub(super) type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// Tells whose request it is.
pub(super) type Identified = Rc<dyn Fn(&ServiceRequest) -> Option<(Aid, Actor)>>;

/// The service that a [`Locking`](crate::web::Locking) makes: for a session, the part outside the session middleware.
pub struct LockingMiddleware<S> {
    pub(super) service: S,
    pub(super) manager: Rc<LockManager>,
    pub(super) settings: Rc<Settings>,
    /// For clients without a session.
    pub(super) whose: Option<Identified>,
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
        let rendered = rendered(&req, &self.settings);
        let locks = match self.begin(&req) {
            Ok(locks) => locks,
            Err(error) => return Box::pin(async { Err(rendered(error)) }),
        };
        let of_request: Rc<dyn Asker> = locks.clone();
        let current = CurrentRequest {
            manager: Rc::clone(&self.manager),
            method: req.method().clone(),
            uri: req.uri().clone(),
            document: None,
            asker: of_request,
            is_hidden: false,
            is_told: false,
        };
        let (call, is_client) = (self.service.call(req), self.whose.is_some());
        let answer = async move {
            let answered = call.await;
            if is_client {
                locks.ask_again_in_passing().await;
            }
            match answered {
                Ok(mut response) => match locks.session_saved(response.response_mut()).await {
                    Ok(()) => Ok(response),
                    Err(error) => Err(rendered(error.into())),
                },
                Err(error) => {
                    locks.session_not_saved().await;
                    Err(rendered(locks.explained(error)))
                }
            }
        };
        Box::pin(CURRENT_REQUEST.scope(RefCell::new(current), answer))
    }
}

impl<S> LockingMiddleware<S> {
    /// Puts the locks into the request.
    fn begin(&self, req: &ServiceRequest) -> Result<Rc<RequestLocks>, Error> {
        let rules = &self.settings.same_site;
        if rules.is_for_all_routes && !req.method().is_safe() {
            rules.check(req.request(), req.app_config().secure())?;
        }
        let locks = RequestLocks::begin_request(req, &self.manager, &self.settings)?;
        if let Some(whose) = &self.whose {
            let (aid, actor) = whose(req).unzip();
            locks.belongs_to(Whose::Client(actor), aid);
        }
        Ok(locks)
    }
}

/// Renders an error of this request as the application wants it.
fn rendered(req: &ServiceRequest, settings: &Settings) -> impl FnOnce(Error) -> Error + use<> {
    let render = settings.render.clone().map(|render| (render, req.head().clone()));
    move |error| {
        let Some((render, head)) = render else { return error };
        let of_lock = error.as_error::<LockError>().map(Problem::from);
        let problem = of_lock.as_ref().or_else(|| error.as_error());
        match problem.and_then(|problem| render(&head, problem)) {
            Some(response) => {
                error.as_error().inspect(|it| log_fault(it));
                InternalError::from_response(error, response).into()
            }
            None => error,
        }
    }
}
