//! What is counted and timed, for whatever the application has installed for the crate [`metrics`].
//!
//! ```
//! actix_doclock::metrics::describe();     // once, after the recorder was installed
//! ```
//!
//! [`metrics`]: ::metrics
//!
//! Times are in seconds. Each server counts what it has done itself; sum over all servers. Labels are
//! bounded: `collection` is a registered one, or `other`; the rest are words of this crate. No id, no
//! session and no name is ever a label.
//!
//! | metric | labels |
//! |---|---|
//! | [`ACQUIRE_SECONDS`] | `collection`, `mode` = exclusive, shared, `outcome` = granted, already_mine, held, error |
//! | [`WAIT_SECONDS`] | `collection`, `mode`, `outcome` = granted, already_mine, held, would_deadlock, too_many_waiters, shutting_down, error, dropped |
//! | [`SAVE_SECONDS`] | `collection`, `outcome` = saved, lost, not_found, rejected, error |
//! | [`SWEEP_SECONDS`] | `outcome` = ok, error |
//! | [`REFUSALS`] | `collection`, `mode` |
//! | [`HAND_OVERS`] | `collection` |
//! | [`RELEASES`] | `collection`, `outcome` = released, already_gone, error |
//! | [`BREAKS`] | `collection`, `outcome` = broken, already_gone, refused |
//! | [`LOST`] | `collection`, `noticed` = renewal, save |
//! | [`RENEWALS`] | `of` = session, guards, `outcome` = ok, error |
//! | [`SESSIONS_ENDED`] | `reason` = logged_out, expired, revoked |
//! | [`STORE_ERRORS`] | `verb`, `kind` = unavailable, outcome_unknown, denied, rejected, other |
//! | [`STORE_RETRIES`] | `kind` |
//! | [`LOCKS_REFUSED`] | |
//! | [`TASK_PANICS`] | `task` = reaper, listener, renewal of guards, wake-ups, events |
//! | [`WAITERS_REFUSED`] | `collection`, `limit` = session, server |
//! | [`DEADLOCK_SEARCHES_GIVEN_UP`] | |
//! | [`WAITING`] | `collection` |
//! | [`GUARDS`] | `collection` |

macro_rules! names {
    ($($(#[doc = $text:literal])+ $kind:ident $unit:ident $name:ident = $metric:literal;)*) => {
        $(
            $(#[doc = $text])+
            pub const $name: &str = $metric;
        )*

        /// Tells the recorder the unit and the meaning of each metric.
        pub fn describe() {
            $(names!(@$kind $metric, ::metrics::Unit::$unit, concat!($($text),+).trim_start());)*
        }

        /// All of them.
        pub const ALL: &[&str] = &[$($metric),*];
    };
    (@histogram $($arg:expr),*) => { ::metrics::describe_histogram!($($arg),*) };
    (@counter $($arg:expr),*) => { ::metrics::describe_counter!($($arg),*) };
    (@gauge $($arg:expr),*) => { ::metrics::describe_gauge!($($arg),*) };
}

names! {
    /// Each attempt to take a lock, until the store has answered. Of who waits each attempt counts.
    histogram Seconds ACQUIRE_SECONDS = "doclock_acquire_seconds";
    /// Each call that may wait for a lock, from its beginning to its answer, contended or not.
    histogram Seconds WAIT_SECONDS = "doclock_wait_seconds";
    /// Each guarded save.
    histogram Seconds SAVE_SECONDS = "doclock_save_seconds";
    /// Each time that silent sessions were looked for.
    histogram Seconds SWEEP_SECONDS = "doclock_sweep_seconds";
    /// Calls that were refused because somebody else holds the lock, after a wait if there was one.
    counter Count REFUSALS = "doclock_refusals_total";
    /// Locks that went from one to the next one waiting on this server, without becoming free.
    counter Count HAND_OVERS = "doclock_hand_overs_total";
    /// Locks given back: by their holder, or because the request that took them failed.
    counter Count RELEASES = "doclock_releases_total";
    /// Locks broken by somebody else, and attempts at it.
    counter Count BREAKS = "doclock_breaks_total";
    /// Locks that were gone while they were wanted: of guards at their renewal, else at a save.
    counter Count LOST = "doclock_lost_total";
    /// Renewals of the locks of one session, and of all guards with one ttl.
    counter Count RENEWALS = "doclock_renewals_total";
    /// Ends of sessions that this server has carried out, repeated ones included.
    counter Count SESSIONS_ENDED = "doclock_sessions_ended_total";
    /// Operations that ended with an error of the store, after all attempts.
    counter Count STORE_ERRORS = "doclock_store_errors_total";
    /// Attempts that failed and were made again.
    counter Count STORE_RETRIES = "doclock_store_retries_total";
    /// Locks that a session was refused because it holds as many as it may.
    counter Count LOCKS_REFUSED = "doclock_locks_refused_total";
    /// Panics of background tasks, each of which was started again.
    counter Count TASK_PANICS = "doclock_task_panics_total";
    /// Calls that would have had to wait, where too many did already: of their session or on this server.
    counter Count WAITERS_REFUSED = "doclock_waiters_refused_total";
    /// Searches for a deadlock that were too long: one may last until the first of its waits is over.
    counter Count DEADLOCK_SEARCHES_GIVEN_UP = "doclock_deadlock_searches_given_up_total";
    /// Calls under way that may wait for a lock.
    gauge Count WAITING = "doclock_waiting";
    /// Locks held by guards of this process. Not those of web sessions, which belong to no server.
    gauge Count GUARDS = "doclock_guards";
}
