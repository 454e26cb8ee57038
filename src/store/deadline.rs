//! How long the caller of a verb will still wait. A store passes this limit on to its server.
#![cfg_attr(not(feature = "_mongo"), allow(dead_code, reason = "the embedded store has no server"))]

use std::{
    future::Future,
    time::{Duration, Instant},
};

tokio::task_local! {
    static CALLER: Caller;
}

#[derive(Clone, Copy)]
struct Caller {
    asked: Instant,
    until: Instant,
}

/// Runs `verb`, with all its attempts, for a caller who stops waiting at `until`.
pub(crate) fn with_deadline<F: Future>(
    until: Instant,
    verb: F,
) -> impl Future<Output = F::Output> + use<F> {
    CALLER.scope(Caller { asked: Instant::now(), until }, verb)
}

/// When the caller of the running verb stops waiting, if it set a deadline. Such a caller also retries.
pub(super) fn deadline() -> Option<Instant> {
    CALLER.try_with(|caller| caller.until).ok()
}

/// How long the caller of the running verb has waited so far.
pub(super) fn waited() -> Duration {
    CALLER.try_with(|caller| caller.asked.elapsed()).unwrap_or_default()
}
