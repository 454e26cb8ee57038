//! The current request: its name in the log, and facts that its answer may add to the error.

use std::{cell::RefCell, error::Error, iter::successors, rc::Rc};

use actix_web::{
    ResponseError,
    http::{Method, Uri},
};

use crate::{
    error::LockError,
    key::LockKey,
    lock::Lock,
    manager::{LockManager, log_limit::LogLimit},
    text::{printable, short},
    version::Version,
};

tokio::task_local! {
    pub(super) static CURRENT_REQUEST: RefCell<CurrentRequest>;
}

/// Facts that the answer to a request may add to its error.
pub(super) trait Asker {
    /// The version of the document that was saved before under the lock of the request.
    fn saved_before(&self, key: &LockKey) -> Option<Version>;
    /// True if the page of the request has shown its document.
    fn has_shown_it(&self) -> bool;
    /// True if the person of the request holds this lock, in whatever session.
    fn is_holder_of(&self, lock: &Lock) -> bool;
}

/// The current request, as the log names it.
pub(super) struct CurrentRequest {
    pub(super) manager: Rc<LockManager>,
    pub(super) method: Method,
    pub(super) uri: Uri,
    /// The document that it asked for last.
    pub(super) document: Option<LockKey>,
    pub(super) asker: Rc<dyn Asker>,
    /// True if a document was not there only for the person of the request.
    pub(super) is_hidden: bool,
    /// True if the log says already why the application is not set up correctly.
    pub(super) is_told: bool,
}

pub(super) fn asker() -> Option<Rc<dyn Asker>> {
    current_request(|it| Rc::clone(&it.asker))
}

/// Reads or changes the notes on the current request. `None` outside of the wraps.
fn current_request<T>(access: impl FnOnce(&mut CurrentRequest) -> T) -> Option<T> {
    CURRENT_REQUEST.try_with(|it| access(&mut it.borrow_mut())).ok()
}

/// The version that was saved under the lock that the refused request names, as for the second submit of a form.
pub(super) fn saved_before(error: &LockError) -> Option<Version> {
    match error {
        LockError::Lost { key, .. }
        | LockError::StaleToken { key }
        | LockError::StaleCopy { key, .. } => asker()?.saved_before(key),
        _ => None,
    }
}

/// The answer about a document of which this person may learn nothing: it looks missing.
pub(super) fn hidden(key: LockKey) -> LockError {
    current_request(|it| it.is_hidden = true);
    LockError::NotFound { key }
}

/// True if the page of this request has shown its document, which is missing now.
pub(super) fn was_deleted() -> bool {
    current_request(|it| !it.is_hidden) == Some(true) && asker().is_some_and(|it| it.has_shown_it())
}

/// The client is told nothing about a fault of the server, so the fault is logged, with its request. The
/// faults of an outage of the database share lines.
pub(super) fn log_fault(error: &LockError) {
    // A wrong configuration that this module found was logged at once. The other errors here are not faults, and
    // clients can cause any number of them.
    let is_told = matches!(error, LockError::Misconfigured(_))
        && current_request(|it| it.is_told) != Some(false);
    let is_known = matches!(error, LockError::ShutDown | LockError::TooManyWaiters { .. })
        || error.is_overload()
        || is_told;
    // The person can do it in another way, but the application should not ask for that.
    let is_unclear = matches!(error, LockError::UnclearChange { .. });
    if is_unclear || error.status_code().is_server_error() && !is_known {
        let causes = successors(error.source(), |&it| it.source());
        // The id of a document may come from the URL.
        let line = printable(&causes.fold(error.to_string(), |line, it| format!("{line}: {it}")));
        let why = match error {
            _ if error.is_outage() => "because the database cannot be reached",
            LockError::Misconfigured(_) => "because the application is not set up correctly",
            LockError::Document { .. } | LockError::UnclearChange { .. } => {
                "because a document does not fit its type"
            }
            _ => "for other reasons",
        };
        match current_request(|it| named(it)) {
            Some(request) => log_failure(why, format!("{request}: {line}")),
            None => log_failure(why, line),
        }
    }
}

thread_local! {
    /// For what fails outside of the wraps, or in a task of its own.
    static LIMIT: LogLimit = LogLimit::default();
}

/// Logs a fault that a client can cause in any number: the first one of a kind at once, the next ones together.
pub(super) fn log_failure(why: &'static str, line: String) {
    match current_request(|it| it.manager.clone()) {
        Some(manager) => manager.request_failed(why, line),
        None => LIMIT.with(|limit| limit.error(why, &line)),
    }
}

fn named(CurrentRequest { method, uri, document, .. }: &CurrentRequest) -> String {
    let document = document.as_ref().map(|key| format!(" for {}", key.shown())).unwrap_or_default();
    format!("{method} {}{document} has failed", printable(&short(uri.path())))
}

/// Logs the advice for the developer. The client does not see it, and a handler that takes an `Option`
/// would not notice the error at all.
pub(super) fn misconfigured(what_to_do: impl Into<String>) -> LockError {
    let what_to_do = what_to_do.into();
    log_failure("because the application is not wired correctly", what_to_do.clone());
    current_request(|it| it.is_told = true);
    LockError::Misconfigured(what_to_do)
}
