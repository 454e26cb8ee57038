//! What a session store remembers during one request. The interface of actix-session has no place
//! for it: a store is given a key and a state, and not what it was asked before.

use std::cell::RefCell;

use actix_session::storage::SessionKey;
use actix_web::Error;

use crate::{LockError, StoreError, store::mongo::sessions::State};

tokio::task_local! {
    static MEMORY: RefCell<Memory>;
}

#[derive(Default)]
struct Memory {
    /// The session that the request has loaded, as it was.
    loaded: Option<(String, State)>,
    /// Why the session middleware could not do its work.
    failed: Option<StoreError>,
}

/// Runs a request with a memory. Where the session store did not answer, neither does the request,
/// with the 503 that locks have; actix-session would make an empty 500 of it.
pub(in crate::web) async fn with_memory<T>(
    request: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let request = async {
        let outcome = request.await;
        let failed = MEMORY.with(|memory| memory.borrow_mut().failed.take());
        match (outcome, failed) {
            (Err(_), Some(failed)) => Err(LockError::Store(failed).into()),
            (outcome, _) => outcome,
        }
    };
    MEMORY.scope(RefCell::default(), request).await
}

pub(super) fn loaded(key: &SessionKey, state: Option<&State>) {
    let loaded = state.map(|state| (key.as_ref().to_owned(), state.clone()));
    // Outside of the wrap there is nowhere to keep it.
    let _ = MEMORY.try_with(|memory| memory.borrow_mut().loaded = loaded);
}

/// The state with which this request began, if it is known.
pub(super) fn base(key: &SessionKey) -> Option<State> {
    let base = MEMORY.try_with(|memory| {
        let memory = memory.borrow();
        let (_, state) = memory.loaded.as_ref().filter(|(loaded, _)| loaded == key.as_ref())?;
        Some(state.clone())
    });
    base.ok().flatten()
}

/// Keeps the error for the wrap, and returns what actix-session is told.
pub(super) fn failed(error: StoreError) -> anyhow::Error {
    let told = anyhow::Error::msg(error.to_string());
    let _ = MEMORY.try_with(|memory| memory.borrow_mut().failed = Some(error));
    told
}
