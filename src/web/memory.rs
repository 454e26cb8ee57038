//! Data that the session store and `locks.session(…)` share within a request. actix-session cannot pass
//! them: it gives a store only a key and a state, not the results of earlier calls. Only
//! `MongoSessionStore` uses this.

use std::{cell::RefCell, collections::HashMap, future::Future, time::Duration};

use actix_web::http::{Method, Uri};

use crate::{error::StoreError, key::LockKey, manager::LockManager};

tokio::task_local! {
    static MEMORY: RefCell<Memory>;
}

/// The session of the current request.
#[derive(Default)]
#[cfg_attr(
    not(all(feature = "mongo-session", feature = "_mongo")),
    allow(dead_code, reason = "only MongoSessionStore uses it")
)]
pub(super) struct Memory {
    /// The key of the loaded session, and the state as it was loaded.
    pub(super) loaded: Option<(String, HashMap<String, String>)>,
    /// The session holds no locks under the aid that this request has given it.
    pub(super) aid_is_spare: bool,
    /// The rest of the absolute time-out when the session gave up its key.
    pub(super) absolute_left: Option<Duration>,
    /// The session had ended before it could be saved.
    pub(super) has_ended: bool,
    /// Why the session middleware has failed.
    pub(super) failed: Option<StoreError>,
    /// The log says already why the application is not set up correctly.
    pub(super) is_told: bool,
    /// What the log says of the request if it fails.
    pub(super) request: Option<Served>,
}

/// A request, as the log names it.
pub(super) struct Served {
    pub(super) manager: LockManager,
    pub(super) method: Method,
    pub(super) uri: Uri,
    /// The document that it asked for last.
    pub(super) document: Option<LockKey>,
}

/// This request is about that document.
pub(super) fn is_about(key: &LockKey) {
    memory(|it| {
        if let Some(request) = &mut it.request {
            request.document = Some(key.clone());
        }
    });
}

pub(super) fn with_memory<F: Future>(
    served: Served,
    request: F,
) -> impl Future<Output = F::Output> {
    let memory = Memory { request: Some(served), ..Memory::default() };
    MEMORY.scope(RefCell::new(memory), request)
}

/// `None` outside of `locks.session(…)`.
pub(super) fn memory<T>(access: impl FnOnce(&mut Memory) -> T) -> Option<T> {
    MEMORY.try_with(|memory| access(&mut memory.borrow_mut())).ok()
}
