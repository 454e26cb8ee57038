//! What the log says of the current request if it fails.

use std::{cell::RefCell, future::Future};

use actix_web::http::{Method, Uri};

use crate::{key::LockKey, manager::LockManager};

tokio::task_local! {
    static MEMORY: RefCell<Memory>;
}

#[derive(Default)]
pub(super) struct Memory {
    /// The log says already why the application is not set up correctly.
    pub(super) is_told: bool,
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
