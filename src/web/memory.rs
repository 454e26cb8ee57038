//! What the session store of a request and the wrap know of each other, past actix-session: a store is
//! given a key and a state, and not what it was asked before. Only `MongoSessionStore` uses it.

use std::{cell::RefCell, collections::HashMap, future::Future, time::Duration};

use crate::error::StoreError;

tokio::task_local! {
    static MEMORY: RefCell<Memory>;
}

/// What the current request has to do with its session.
#[derive(Default)]
#[cfg_attr(
    not(all(feature = "mongo-session", feature = "_mongo")),
    allow(dead_code, reason = "nobody else uses it")
)]
pub(super) struct Memory {
    /// The key of the session that it has loaded, and the state as it was.
    pub(super) loaded: Option<(String, HashMap<String, String>)>,
    /// The aid that it has given its session holds nothing.
    pub(super) aid_is_spare: bool,
    /// What was left of the absolute time-out when the session gave up its key.
    pub(super) absolute_left: Option<Duration>,
    /// The session had ended by the time it was to be saved.
    pub(super) has_ended: bool,
    /// Why the session middleware could not do its work.
    pub(super) failed: Option<StoreError>,
}

pub(super) fn with_memory<F: Future>(request: F) -> impl Future<Output = F::Output> {
    MEMORY.scope(RefCell::default(), request)
}

/// Outside of the wrap there is none.
pub(super) fn memory<T>(access: impl FnOnce(&mut Memory) -> T) -> Option<T> {
    MEMORY.try_with(|memory| access(&mut memory.borrow_mut())).ok()
}
