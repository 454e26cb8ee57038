//! How long the caller of a verb still waits: a store passes that on to its server.

use std::{future::Future, time::Instant};

tokio::task_local! {
    static UNTIL: Instant;
}

/// Runs `verb` for a caller who stops waiting at `until`.
pub(crate) fn with_deadline<F: Future>(
    until: Instant,
    verb: F,
) -> impl Future<Output = F::Output> + use<F> {
    UNTIL.scope(until, verb)
}

/// When the caller of the running verb stops waiting, if it has said so: then it also asks again.
#[cfg(feature = "_mongo")]
pub(super) fn deadline() -> Option<Instant> {
    UNTIL.try_with(|until| *until).ok()
}
