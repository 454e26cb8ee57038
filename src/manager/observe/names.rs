//! The counters and timings, for the recorder of the crate [`metrics`] that the application has
//! installed.
//!
//! ```
//! actix_doclock::metrics::describe();     // once, after the recorder was installed
//! ```
//!
//! [`metrics`]: ::metrics
//!
//! Times are in seconds. Each server counts its own operations; sum over all servers. Labels are bounded:
//! `collection` is a registered collection, or `other`; all other labels are words of this crate. No id,
//! no session and no name is ever a label.
//!
//! | metric | labels |
//! |---|---|
//! | [`ACQUIRE_SECONDS`] | `collection`, `mode` = exclusive, shared, `outcome` = granted, already_mine, held, lost, frozen, error |
//! | [`WAIT_SECONDS`] | `collection`, `mode`, `outcome` = granted, already_mine, held, lost, frozen, would_deadlock, too_many_waiters, shutting_down, error, dropped |
//! | [`SAVE_SECONDS`] | `collection`, `outcome` = saved, lost, not_found, rejected, changed_meanwhile, error |
//! | [`SWEEP_SECONDS`] | `outcome` = ok, error |
//! | [`REFUSALS`] | `collection`, `mode` |
//! | [`HAND_OVERS`] | `collection` |
//! | [`RELEASES`] | `collection`, `outcome` = released, already_gone, error |
//! | [`BREAKS`] | `collection`, `outcome` = broken, already_gone, refused |
//! | [`LOST`] | `collection`, `reason` = broken, taken_over, expired, unknown, `noticed` = break, reaper, save, renewal, heartbeat, request |
//! | [`RENEWALS`] | `of` = session, guards, `outcome` = ok, error |
//! | [`SESSIONS_ENDED`] | `reason` = logged_out, expired, revoked |
//! | [`SWEEP_BEHIND`] | |
//! | [`STORE_ERRORS`] | `verb`, `kind` = unavailable, outcome_unknown, denied, rejected, other |
//! | [`STORE_RETRIES`] | `kind` |
//! | [`LOCKS_REFUSED`] | |
//! | [`TASK_PANICS`] | `task` = reaper, listener, renewal of guards, watch, events |
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

        /// All metrics.
        pub const ALL: &[&str] = &[$($metric),*];
    };
    (@histogram $($arg:expr),*) => { ::metrics::describe_histogram!($($arg),*) };
    (@counter $($arg:expr),*) => { ::metrics::describe_counter!($($arg),*) };
    (@gauge $($arg:expr),*) => { ::metrics::describe_gauge!($($arg),*) };
}

names! {
    /// Each attempt to take a lock, until the answer of the store. A waiter may make several attempts.
    histogram Seconds ACQUIRE_SECONDS = "doclock_acquire_seconds";
    /// Each call that may wait for a lock, from its beginning to its answer, contended or not.
    histogram Seconds WAIT_SECONDS = "doclock_wait_seconds";
    /// Each guarded save.
    histogram Seconds SAVE_SECONDS = "doclock_save_seconds";
    /// Each search for idle sessions.
    histogram Seconds SWEEP_SECONDS = "doclock_sweep_seconds";
    /// Calls that were refused because of another holder, after their wait if they waited.
    counter Count REFUSALS = "doclock_refusals_total";
    /// Handovers of a lock to the next waiter on this server, without the lock becoming free.
    counter Count HAND_OVERS = "doclock_hand_overs_total";
    /// Locks given back: by their holder, or because the request that took them failed.
    counter Count RELEASES = "doclock_releases_total";
    /// Locks broken by another person, and attempts at it.
    counter Count BREAKS = "doclock_breaks_total";
    /// Locks that their holders lost: broken, taken over or expired. Each loss counts once on a server, by whoever
    /// notices it there first.
    counter Count LOST = "doclock_lost_total";
    /// Renewals of the locks of one session, and of all guards with one ttl.
    counter Count RENEWALS = "doclock_renewals_total";
    /// Ends of sessions that this server has carried out, including repeated ones.
    counter Count SESSIONS_ENDED = "doclock_sessions_ended_total";
    /// For how long each sweep has found more idle sessions than it ends at once; 0 if the sweeps keep up. Of several
    /// managers in a process, the one that has swept last. See [`ReaperHealth::behind`](crate::health::ReaperHealth).
    gauge Seconds SWEEP_BEHIND = "doclock_sweep_behind_seconds";
    /// Operations that ended with an error of the store, after all attempts.
    counter Count STORE_ERRORS = "doclock_store_errors_total";
    /// Attempts that failed and were made again.
    counter Count STORE_RETRIES = "doclock_store_retries_total";
    /// Locks that a session was refused because it already holds the maximum.
    counter Count LOCKS_REFUSED = "doclock_locks_refused_total";
    /// Panics of background tasks. Each task was started again.
    counter Count TASK_PANICS = "doclock_task_panics_total";
    /// Calls that were refused because too many waiters of their session or of this server existed
    /// already.
    counter Count WAITERS_REFUSED = "doclock_waiters_refused_total";
    /// Searches for a deadlock that gave up: a deadlock may last until the first of its waits is over.
    counter Count DEADLOCK_SEARCHES_GIVEN_UP = "doclock_deadlock_searches_given_up_total";
    /// Calls under way that may wait for a lock.
    gauge Count WAITING = "doclock_waiting";
    /// Locks held by guards of this process. Locks of web sessions do not count, because they belong to
    /// no server.
    gauge Count GUARDS = "doclock_guards";
}
