//! Reports operations to the crates `metrics` and `tracing`, for the recorder and the subscriber of the application.
//!
//! Spans are named `doclock.<verb>`, and carry the collection and the outcome. The metrics are in
//! `manager/observe/names.rs`. Neither a span nor a metric carries an id, a session, a token or a name. A span covers the
//! caller that waits for the answer, from the beginning of the verb: its queue, or its calls of the store in many
//! collections. The task of the operation has no span: it may outlive the request by far, and the request's span would
//! then last as long.
pub mod names;

use std::{
    mem,
    time::{Duration, Instant},
};

use ::metrics::{counter, gauge, histogram};
use parking_lot::Mutex;

use crate::{
    clock,
    ended::EndReason,
    error::{LockError, Result, StoreError},
    lock::{LockToken, Mode},
    manager::{claim::Acquired, observe::names::*, recent::Recent},
    store::{Released, Swept},
};

/// Runs an operation within the span of its verb. If the application has no subscriber, there is no span: actix-web
/// switches on the feature `log` of `tracing`, with which each span would write lines into the log.
macro_rules! in_span {
    ($name:literal, $collection:expr, $operation:expr) => {{
        use tracing::{Instrument, Span, field::Empty, info_span, level_filters::LevelFilter};
        let is_wanted = LevelFilter::current() >= LevelFilter::INFO;
        let collection: Option<&str> = $collection;
        let span = || info_span!($name, collection, outcome = Empty);
        $operation.instrument(if is_wanted { span() } else { Span::none() }).await
    }};
}
pub(super) use in_span;

/// Times an operation on one lock.
pub(super) struct Timer {
    collection: &'static str,
    mode: Mode,
    began: Instant,
}

impl Timer {
    pub(super) fn start(collection: &'static str, mode: Mode) -> Self {
        Self { collection, mode, began: clock::now() }
    }

    /// The acquire ends.
    pub(super) fn ends(self, outcome: &'static str) {
        into_span(outcome);
        histogram!(
            ACQUIRE_SECONDS,
            "collection" => self.collection, "mode" => self.mode.as_str(), "outcome" => outcome,
        )
        .record(clock::since(self.began));
    }

    pub(super) fn saved<T>(self, saved: &Result<T>) {
        let outcome = match saved {
            Ok(_) => "saved",
            Err(LockError::Lost { .. }) => "lost",
            Err(LockError::NotFound { .. }) => "not_found",
            Err(LockError::Rejected { .. }) => "rejected",
            Err(LockError::ChangedMeanwhile { .. }) => "changed_meanwhile",
            Err(_) => "error",
        };
        into_span(outcome);
        histogram!(SAVE_SECONDS, "collection" => self.collection, "outcome" => outcome)
            .record(clock::since(self.began));
    }
}

/// A caller that may wait. It is counted as long as this value lives.
pub(super) struct Waiting {
    timer: Timer,
    outcome: &'static str,
}

impl Waiting {
    pub(super) fn begins(collection: &'static str, mode: Mode) -> Self {
        gauge!(WAITING, "collection" => collection).increment(1);
        Self { timer: Timer::start(collection, mode), outcome: "dropped" }
    }

    pub(super) fn ends(&mut self, acquired: &Result<Acquired>) {
        let outcome = outcome(acquired);
        into_span(outcome);
        self.outcome = outcome;
        let Timer { collection, mode, .. } = self.timer;
        match acquired {
            Ok(Acquired::Held(_)) => refused(collection, mode),
            Err(LockError::TooManyWaiters { per_session, .. }) => {
                let limit = if *per_session { "session" } else { "server" };
                counter!(WAITERS_REFUSED, "collection" => collection, "limit" => limit)
                    .increment(1);
            }
            _ => {}
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Timer { collection, mode, began } = self.timer;
        gauge!(WAITING, "collection" => collection).decrement(1);
        histogram!(
            WAIT_SECONDS,
            "collection" => collection, "mode" => mode.as_str(), "outcome" => self.outcome,
        )
        .record(clock::since(began));
    }
}

/// A caller that does not wait was refused.
pub(super) fn refused(collection: &'static str, mode: Mode) {
    counter!(REFUSALS, "collection" => collection, "mode" => mode.as_str()).increment(1);
}

/// A search gave up, so it may have missed a deadlock.
pub(super) fn search_gave_up(looked_at: usize) {
    log::debug!(
        target: "actix_doclock::manager",
        "a search for deadlocks has given up after {looked_at} steps: a deadlock may last until one of its \
         waits is over",
    );
    counter!(DEADLOCK_SEARCHES_GIVEN_UP).increment(1);
}

pub(super) fn handed_over(collection: &'static str) {
    counter!(HAND_OVERS, "collection" => collection).increment(1);
}

pub(super) fn released<E>(collection: &'static str, released: &Result<Released, E>) {
    let outcome = match released {
        Ok(Released::Released) => "released",
        Ok(Released::AlreadyGone) => "already_gone",
        Err(_) => "error",
    };
    into_span(outcome);
    counter!(RELEASES, "collection" => collection, "outcome" => outcome).increment(1);
}

/// `None` if the policy refused the break.
pub(super) fn broken(collection: &'static str, broken: Option<Released>) {
    let outcome = match broken {
        Some(Released::Released) => "broken",
        Some(Released::AlreadyGone) => "already_gone",
        None => "refused",
    };
    into_span(outcome);
    counter!(BREAKS, "collection" => collection, "outcome" => outcome).increment(1);
}

/// How many lost acquisitions are remembered as counted, at least.
const COUNTED: usize = 10_000;

/// The losses that this server has counted: a lock that was broken here counts once, although its holder
/// notices the loss later.
#[derive(Debug, Default)]
pub(super) struct Losses {
    counted: Mutex<Recent<LockToken, bool, COUNTED>>,
}

impl Losses {
    /// Counts a lost lock, once on this server, with the reason of the first call: a later call with the reason `unknown`
    /// changes nothing. `noticed` names the operation that noticed the loss.
    pub(super) fn count(
        &self,
        collection: &'static str,
        token: Option<LockToken>,
        reason: &'static str,
        noticed: &'static str,
    ) {
        let was_counted = |token| mem::replace(self.counted.lock().used(token), true);
        if !token.is_some_and(was_counted) {
            counter!(LOST, "collection" => collection, "reason" => reason, "noticed" => noticed)
                .increment(1);
        }
    }
}

pub(super) fn confirmed(is_confirmed: bool) {
    into_span(if is_confirmed { "confirmed" } else { "not_known" });
}

pub(super) fn renewed<T>(of: &'static str, renewed: &Result<T>) {
    let outcome = ok_or_error(renewed);
    into_span(outcome);
    counter!(RENEWALS, "of" => of, "outcome" => outcome).increment(1);
}

pub(super) fn session_ended(reason: EndReason) {
    ended(reason, 1);
}

/// `behind` is for how long each sweep has reached its limit.
pub(super) fn swept(began: Instant, swept: &Result<Swept>, behind: Option<Duration>) {
    let outcome = ok_or_error(swept);
    into_span(outcome);
    histogram!(SWEEP_SECONDS, "outcome" => outcome).record(clock::since(began));
    gauge!(SWEEP_BEHIND).set(behind.unwrap_or_default().as_secs_f64());
}

pub(super) fn sessions_expired(sessions: u64) {
    ended(EndReason::Expired, sessions);
}

pub(super) fn failed(verb: &'static str, error: &StoreError) {
    into_span("error");
    counter!(STORE_ERRORS, "verb" => verb, "kind" => error.kind().as_str()).increment(1);
}

/// A session has asked for more locks than it may hold.
pub(super) fn locks_refused() {
    counter!(LOCKS_REFUSED).increment(1);
}

pub(super) fn panicked(task: &'static str) {
    counter!(TASK_PANICS, "task" => task).increment(1);
}

pub(super) fn tried_again(error: &StoreError) {
    counter!(STORE_RETRIES, "kind" => error.kind().as_str()).increment(1);
}

/// A guard has begun or ceased to hold a lock.
pub(super) fn guard(collection: &'static str, holds: bool) {
    let guards = gauge!(GUARDS, "collection" => collection);
    if holds { guards.increment(1) } else { guards.decrement(1) }
}

/// The outcome of an acquire, in one word.
pub(super) fn outcome(acquired: &Result<Acquired>) -> &'static str {
    match acquired {
        Ok(Acquired::Granted(_)) => "granted",
        Ok(Acquired::AlreadyMine(_)) => "already_mine",
        Ok(Acquired::Held(_)) => "held",
        Ok(Acquired::Lost(_)) => "lost",
        Err(LockError::WouldDeadlock { .. }) => "would_deadlock",
        Err(LockError::ShutDown) => "shutting_down",
        Err(LockError::TooManyWaiters { .. }) => "too_many_waiters",
        Err(LockError::Frozen { .. }) => "frozen",
        Err(_) => "error",
    }
}

fn ok_or_error<T, E>(result: &Result<T, E>) -> &'static str {
    if result.is_ok() { "ok" } else { "error" }
}

fn ended(reason: EndReason, sessions: u64) {
    counter!(SESSIONS_ENDED, "reason" => reason.as_str()).increment(sessions);
}

/// Records the outcome in the span of the current verb.
fn into_span(outcome: &'static str) {
    tracing::Span::current().record("outcome", outcome);
}
