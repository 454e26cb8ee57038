//! Errors as answers: `application/problem+json`, RFC 9457.

use std::{fmt, time::Duration};

use actix_web::{
    HttpRequest, HttpResponse, Resource, ResponseError,
    error::JsonPayloadError,
    http::{
        StatusCode,
        header::{self, HeaderValue},
    },
    web::{self, JsonConfig},
};
use serde_json::{Map, Value, json};

use crate::{
    error::{LockError, StoreErrorKind},
    lock::Lock,
    takeover::{LossCause, TakenBy},
    web::{
        current_request::{asker, log_fault, saved_before, was_deleted},
        format::{millis, rfc3339},
    },
};

/// When to ask again for a lock that another session holds. The lock may become free at any moment before
/// it expires, so this is shorter than its lease; and a waiter that asks again within 3 s keeps its place.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(2);
/// When a person may ask again, if too many people are asking the holder.
const ASK_LATER: Duration = Duration::from_secs(60);
const STORE_MAY_BE_BACK_AFTER: Duration = Duration::from_secs(2);

/// An answer of the type `application/problem+json`.
///
/// [`LockError`] answers with this type, and handlers may do so as well. It reveals no internals: the
/// `detail` is written for the client.
///
/// ```
/// use actix_doclock::web::Problem;
/// use actix_web::http::StatusCode;
///
/// let problem = Problem::new(StatusCode::UNAUTHORIZED, "login_required").detail("Log in first.");
/// ```
#[derive(Debug)]
pub struct Problem {
    status: StatusCode,
    body: Map<String, Value>,
    retry_after: Option<Duration>,
}

impl Problem {
    /// A problem with this status. `code` is for programs, as in `"login_required"`.
    #[must_use]
    pub fn new(status: StatusCode, code: &str) -> Self {
        let mut body = Map::new();
        body.insert("type".into(), "about:blank".into());
        body.insert("title".into(), status.canonical_reason().unwrap_or("Error").into());
        body.insert("status".into(), status.as_u16().into());
        body.insert("code".into(), code.into());
        Self { status, body, retry_after: None }
    }

    /// Says what happened to this request and what to do, for the person who reads the answer.
    #[must_use]
    pub fn detail(self, detail: impl fmt::Display) -> Self {
        self.with("detail", detail.to_string())
    }

    /// The detail, for answers in a style of your own. The text is written for clients, also that of a
    /// [`LockError`]: `Problem::from(&error).text()`.
    #[must_use]
    pub fn text(&self) -> &str {
        self.body.get("detail").and_then(Value::as_str).unwrap_or_default()
    }

    /// A member by its name, such as `"code"` or `"holder"`.
    #[must_use]
    pub fn member(&self, name: &str) -> Option<&Value> {
        self.body.get(name)
    }

    pub(super) fn into_body(self) -> Value {
        Value::Object(self.body)
    }

    /// Adds a member.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.body.insert(name.into(), value.into());
        self
    }

    pub(super) fn retry_after(mut self, duration: Duration) -> Self {
        self.retry_after = Some(duration);
        self
    }

    fn lock(self, lock: Option<&Lock>) -> Self {
        let Some(lock) = lock else { return self };
        let problem = self
            .with("holder", json!(lock.holder))
            .with("same_person", asker().is_some_and(|it| it.is_holder_of(lock)))
            .with("since", rfc3339(lock.since))
            .with("expires_in_ms", millis(lock.expires_in()));
        match &lock.description {
            Some(it) => problem.with("document", json!({ "title": it.title, "link": it.link })),
            None => problem,
        }
    }

    /// Settings for `web::Json` that answer a malformed body with a problem, as the lock API does:
    /// `App::new().app_data(Problem::json_config())`.
    #[must_use]
    pub fn json_config() -> JsonConfig {
        let answer = |error: JsonPayloadError, _: &HttpRequest| Self::of_body(&error).into();
        JsonConfig::default().error_handler(answer)
    }

    /// A problem for a malformed body of a request.
    pub(super) fn of_body(error: &(impl ResponseError + ?Sized)) -> Self {
        Self::new(error.status_code(), "bad_body").detail(error)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status, self.text())
    }
}

impl ResponseError for Problem {
    fn status_code(&self) -> StatusCode {
        self.status
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status);
        response.content_type("application/problem+json");
        // An answer about a lock is outdated at once.
        response.insert_header((header::CACHE_CONTROL, "no-store"));
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_millis().div_ceil(1000).max(1);
            response.insert_header((header::RETRY_AFTER, seconds.to_string()));
        }
        response.body(Value::Object(self.body.clone()).to_string())
    }
}

impl From<&LockError> for Problem {
    fn from(error: &LockError) -> Self {
        let problem = |status, code| Self::new(status, code).detail(error);
        let busy = |code| problem(StatusCode::SERVICE_UNAVAILABLE, code);
        let locked = |code, state| problem(StatusCode::LOCKED, code).with("state", state);
        let lost = |status, code| problem(status, code).with("state", "lost");
        let problem = match error {
            LockError::Held(lock) => locked("held", "held")
                .lock(Some(lock))
                .retry_after(lock.expires_in().min(ASK_AGAIN_AFTER)),
            LockError::HeldByOtherTab(lock) => locked("mine_elsewhere", "mine_elsewhere")
                .lock(Some(lock))
                .retry_after(lock.expires_in().min(ASK_AGAIN_AFTER)),
            LockError::WouldDeadlock { holder, .. } => locked("would_deadlock", "held")
                .lock(holder.as_deref())
                .retry_after(ASK_AGAIN_AFTER),
            LockError::Frozen { freeze, .. } => locked("frozen", "frozen")
                .with("reason", freeze.reason.as_str())
                .with("until", rfc3339(freeze.until))
                .retry_after(freeze.ends_in().min(ASK_AGAIN_AFTER)),
            LockError::PastFreeze => problem(StatusCode::BAD_REQUEST, "past_freeze"),
            LockError::Lost { holder, cause, .. } => {
                let lost = lost(StatusCode::CONFLICT, "lost").lock(holder.as_deref());
                let lost = match cause {
                    Some(cause) => lost.with("cause", cause.as_str()),
                    None => lost,
                };
                match cause {
                    Some(LossCause::Taken(TakenBy { by, reason, .. })) => {
                        lost.with("by", by.as_str()).with("reason", reason.as_str())
                    }
                    _ => lost,
                }
            }
            LockError::ChangedMeanwhile { field, .. } => {
                problem(StatusCode::CONFLICT, "changed_meanwhile").with("field", field.as_str())
            }
            LockError::UnclearChange { field, .. } => {
                problem(StatusCode::CONFLICT, "unclear_change").with("field", field.as_str())
            }
            LockError::WrongSession { lock, asked: true } => {
                locked("wrong_session", "held").lock(Some(lock))
            }
            LockError::WrongSession { .. } => lost(StatusCode::CONFLICT, "wrong_session"),
            LockError::LoginRequired => problem(StatusCode::UNAUTHORIZED, "login_required"),
            LockError::StaleToken { .. } => lost(StatusCode::PRECONDITION_FAILED, "stale_token"),
            LockError::StaleCopy { version, .. } => {
                problem(StatusCode::PRECONDITION_FAILED, "stale_copy")
                    .with("version", version.to_string())
            }
            LockError::MalformedToken => problem(StatusCode::BAD_REQUEST, "bad_lock_token"),
            LockError::MalformedTab => problem(StatusCode::BAD_REQUEST, "bad_tab"),
            LockError::MalformedVersion => problem(StatusCode::BAD_REQUEST, "bad_version"),
            LockError::SaidTwice { .. } => problem(StatusCode::BAD_REQUEST, "said_twice"),
            LockError::NotFound { key } if was_deleted() => {
                Self::new(StatusCode::NOT_FOUND, "not_found")
                    .detail(format_args!("{key} has been deleted"))
                    .with("deleted", true)
            }
            LockError::NotFound { .. } => problem(StatusCode::NOT_FOUND, "not_found"),
            LockError::InvalidKey(_) => problem(StatusCode::BAD_REQUEST, "bad_id"),
            LockError::SessionEnded { .. } => problem(StatusCode::UNAUTHORIZED, "session_ended"),
            LockError::BreakRefused { .. } => problem(StatusCode::FORBIDDEN, "break_refused"),
            LockError::TakeOverRefused { .. } => {
                problem(StatusCode::FORBIDDEN, "take_over_refused").with("state", "held")
            }
            LockError::TooManyLocks { .. } => {
                problem(StatusCode::TOO_MANY_REQUESTS, "too_many_locks")
                    .retry_after(ASK_AGAIN_AFTER)
            }
            LockError::NotLocked { .. } => {
                problem(StatusCode::CONFLICT, "free").with("state", "free")
            }
            LockError::NobodyHears { .. } => problem(StatusCode::CONFLICT, "nobody_hears"),
            LockError::TooManyAsks { .. } => {
                problem(StatusCode::TOO_MANY_REQUESTS, "too_many_asks").retry_after(ASK_LATER)
            }
            LockError::NoSuchAsk { .. } => problem(StatusCode::NOT_FOUND, "no_such_ask"),
            LockError::Speculative => problem(StatusCode::FORBIDDEN, "speculative"),
            LockError::PageLeft => problem(StatusCode::CONFLICT, "page_left"),
            LockError::PersonChanged => lost(StatusCode::CONFLICT, "person_changed"),
            LockError::Rejected { .. } => problem(StatusCode::UNPROCESSABLE_ENTITY, "rejected"),
            LockError::TooManyWaiters { .. } => {
                busy("too_many_waiters").retry_after(ASK_AGAIN_AFTER)
            }
            LockError::ShutDown => busy("shutting_down").retry_after(STORE_MAY_BE_BACK_AFTER),
            // No `Retry-After`: a repetition may write twice.
            LockError::OutcomeUnknown(_) => busy("outcome_unknown"),
            LockError::TooSlow { .. } => problem(StatusCode::INTERNAL_SERVER_ERROR, "too_slow"),
            LockError::Store(e) if e.kind() == StoreErrorKind::Overloaded => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded")
                    .detail("too much is asked at the moment, so nothing was done; try again")
                    .retry_after(STORE_MAY_BE_BACK_AFTER)
            }
            LockError::Store(e)
                if matches!(
                    e.kind(),
                    StoreErrorKind::Unavailable | StoreErrorKind::OutcomeUnknown
                ) =>
            {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable")
                    .detail("the database gives no answer at the moment; try again")
                    .retry_after(STORE_MAY_BE_BACK_AFTER)
            }
            LockError::Store(_) | LockError::Document { .. } | LockError::Misconfigured(_) => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal")
                    .detail("this is a fault of the application; its log says more")
            }
        };
        match saved_before(error) {
            Some(saved) => {
                let detail = format!(
                    "{}; the document was saved under this lock before, perhaps in another tab",
                    problem.text()
                );
                problem.detail(detail).with("saved", saved.to_string())
            }
            None => problem,
        }
    }
}

/// A resource that refuses all methods but these, for which the caller adds the routes.
pub(super) fn only(path: &str, methods: &'static str) -> Resource {
    let refuse = move || {
        let mut refusal = Problem::new(StatusCode::METHOD_NOT_ALLOWED, "wrong_method")
            .detail(format_args!("this path accepts {methods}"))
            .error_response();
        refusal.headers_mut().insert(header::ALLOW, HeaderValue::from_static(methods));
        std::future::ready(refusal)
    };
    web::resource(path).default_service(web::to(refuse))
}

/// For handlers that also answer with their own problems.
impl From<LockError> for Problem {
    fn from(error: LockError) -> Self {
        log_fault(&error);
        Self::from(&error)
    }
}

impl ResponseError for LockError {
    fn status_code(&self) -> StatusCode {
        Problem::from(self).status
    }

    fn error_response(&self) -> HttpResponse {
        log_fault(self);
        Problem::from(self).error_response()
    }
}

/// An error of the application's own part answers as the application defines it.
#[cfg(feature = "_mongo")]
impl<E: ResponseError> ResponseError for crate::store::TransactionError<E> {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::Lock(error) => error.status_code(),
            Self::Work(error) => error.status_code(),
        }
    }

    fn error_response(&self) -> HttpResponse {
        match self {
            Self::Lock(error) => error.error_response(),
            Self::Work(error) => error.error_response(),
        }
    }
}
