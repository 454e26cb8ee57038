//! The health of a manager and its store.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

use crate::{
    clock,
    freeze::Freeze,
    manager::{
        LockManager,
        background::{
            reaper_health::{ReaperHealth, ReaperState},
            supervisor::TaskPanics,
        },
        fleet::STANDALONE,
        wait::is_outage,
        watch::changes::Wakeup,
    },
    store::{StoreStatus, Topology},
    text::millis,
};

/// A reaper that is behind for so long is a problem: half the margin of the TTL index.
const TOO_FAR_BEHIND: Duration = Duration::from_secs(30);
/// How long a panic of a background task counts as a problem.
const PANIC_IS_NEWS_FOR: Duration = Duration::from_secs(10 * 60);

/// The health of a manager, as far as it knows without asking the store.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Health {
    /// The registered collections.
    pub collections: Vec<&'static str>,
    /// How the waiters of each collection learn that a lock is free. A collection without waiters for
    /// half a minute has no entry.
    pub wakeups: BTreeMap<&'static str, Wakeup>,
    /// How many waiters there are on this server.
    pub waiting: usize,
    /// How many locks the guards of this process hold.
    pub guards: usize,
    /// How many event streams are open over HTTP.
    pub event_streams: usize,
    /// The background task that ends idle sessions.
    pub reaper: ReaperHealth,
    /// The background tasks that have panicked since the start of this server, by kind.
    pub panics: BTreeMap<&'static str, TaskPanics>,
    /// The freezes that are on.
    pub frozen: Vec<Freeze>,
    /// How many servers have [noted themselves](crate::store::ServerNote), this one included. 0 until a second
    /// after the last registration, and for a manager without a reaper, which does not note itself.
    pub servers: usize,
    /// How other servers differ from this one.
    #[serde(skip)]
    disagreements: Vec<String>,
    /// True if this server is being stopped: [`serve`](LockManager::serve) was told to stop, or
    /// [`begin_shutdown`](LockManager::begin_shutdown) or [`shutdown`](LockManager::shutdown) was called.
    pub stopping: bool,
}

/// The health of a manager and its store. Made by [`LockManager::check_health`]. As JSON it answers the
/// route that a load balancer or an orchestrator asks.
///
/// ```json
/// {
///   "status": "degraded",
///   "problems": ["workitem.lock has no index on aid: restart a server, or create it"],
///   "store": { "reachable": true, "took_ms": 2, "error": null, "topology": "replica_set",
///     "writable": true, "majority_lag_ms": 0, "missing_indexes": { "workitem.lock": ["aid"] },
///     "dangers": {}, "missing_privileges": {} },
///   "collections": ["workitem"], "wakeups": { "workitem": "told" }, "waiting": 3, "guards": 1,
///   "event_streams": 12,
///   "panics": {}, "frozen": [], "servers": 3,
///   "reaper": { "state": "running", "last_sweep_ms": 412, "overdue": false, "failures": 0, "last_error": null,
///     "behind_ms": null },
///   "stopping": false
/// }
/// ```
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct HealthReport {
    /// The overall status. Alert on this.
    pub status: HealthStatus,
    /// The problems, for people to read. They name collections and errors of the store, but no sessions
    /// and no ids.
    pub problems: Vec<String>,
    /// The store.
    pub store: StoreHealth,
    /// This server.
    #[serde(flatten)]
    pub server: Health,
}

/// The overall status of a [`HealthReport`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HealthStatus {
    /// There are no problems.
    Ok,
    /// Requests are answered, but something needs attention in working hours: an index is missing, sweeps
    /// of the reaper are overdue, or waiters have to poll.
    Degraded,
    /// Requests for locks are answered with 503: the store does not answer in time, refuses requests or
    /// takes no writes, its majority lags behind by more than the deadline, or this server is being stopped.
    Unavailable,
}

/// The state of the store, as part of a [`HealthReport`].
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct StoreHealth {
    /// True if the store has answered.
    pub reachable: bool,
    /// How long the answer took, or how long the check waited for it.
    #[serde(rename = "took_ms", serialize_with = "millis")]
    pub took: Duration,
    /// The error, if there was no answer.
    pub error: Option<String>,
    /// The answer of the store.
    #[serde(flatten)]
    pub status: Option<StoreStatus>,
}

impl HealthReport {
    /// True if requests for locks can be answered. For a readiness probe, which takes a server out of the load
    /// balancer. Not for a liveness probe, because a restart of this server does not repair a
    /// database.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.status != HealthStatus::Unavailable
    }

    /// True if there are no problems.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.status == HealthStatus::Ok
    }

    fn new(store: StoreHealth, server: Health, deadline: Duration) -> Self {
        let blocking = blocking(&store, &server, deadline);
        let others = others(&store, &server);
        let status = match (blocking.is_empty(), others.is_empty()) {
            (false, _) => HealthStatus::Unavailable,
            (true, false) => HealthStatus::Degraded,
            (true, true) => HealthStatus::Ok,
        };
        let problems = blocking.into_iter().chain(others).collect();
        Self { status, problems, store, server }
    }
}

/// The problems that prevent requests from being answered.
fn blocking(store: &StoreHealth, server: &Health, deadline: Duration) -> Vec<String> {
    let mut problems = Vec::new();
    if server.stopping {
        problems.push("this server is being stopped".to_owned());
    }
    if let Some(error) = &store.error {
        problems.push(format!("the store gives no answer: {error}"));
    }
    let status = store.status.as_ref();
    problems.extend(status.into_iter().flat_map(|status| unauthorized(status, true)));
    if status.is_some_and(|status| !status.writable) {
        problems.push("the store takes no writes: there is no primary".to_owned());
    }
    let lag = status.and_then(|status| status.majority_lag).filter(|lag| *lag > deadline);
    if let Some(lag) = lag {
        problems.push(format!(
            "the majority is stalled: its newest write is {lag:?} behind the primary's, and every grant and save \
             waits for a majority; check the secondaries"
        ));
    }
    problems
}

/// One problem for each collection on which the database user lacks actions. If `is_blocking`, the collections of locks
/// in which nothing can be locked without them; otherwise all others.
fn unauthorized(status: &StoreStatus, is_blocking: bool) -> impl Iterator<Item = String> {
    let is_vital = |action: &String| ["find", "insert", "update"].contains(&&**action);
    let blocks = move |collection: &str, actions: &[String]| {
        collection.ends_with(".lock") && actions.iter().any(is_vital)
    };
    let missing = status
        .missing_privileges
        .iter()
        .filter(move |(collection, actions)| blocks(collection, actions) == is_blocking);
    missing.map(|(collection, actions)| {
        let actions = actions.join(", ");
        format!(
            "unauthorized: the database user lacks {actions} on {collection}; `doclock doctor` says what to grant"
        )
    })
}

fn others(store: &StoreHealth, server: &Health) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(status) = &store.status {
        problems.extend(unauthorized(status, false));
        for (collection, indexes) in &status.missing_indexes {
            let indexes = indexes.join(", ");
            problems.push(format!(
                "{collection} has no index on {indexes}: restart a server, or create it"
            ));
        }
        for (collection, dangers) in &status.dangers {
            problems.extend(dangers.iter().map(|danger| format!("{collection} {danger}")));
        }
        if status.topology == Topology::Standalone {
            problems.push(STANDALONE.to_owned());
        }
        if matches!(status.topology, Topology::ReplicaSet | Topology::Sharded) {
            let polling = server.wakeups.iter().filter(|(_, wakeup)| **wakeup == Wakeup::Polling);
            problems.extend(polling.map(|(collection, _)| {
                format!("the change stream of {collection} is lost: waiters have to poll")
            }));
        }
    }
    problems.extend(server.disagreements.iter().cloned());
    let ReaperHealth { state, failures, last_error, overdue, .. } = &server.reaper;
    if *state == ReaperState::Stopped && !server.stopping {
        problems.push("the reaper has ended: the runtime of the manager is gone".to_owned());
    }
    if let Some(error) = last_error {
        problems.push(format!("the reaper has failed {failures} times in a row: {error}"));
    } else if *overdue {
        problems.push("the reaper does not get through: the runtime is busy".to_owned());
    }
    if let Some(behind) = server.reaper.behind.filter(|it| *it >= TOO_FAR_BEHIND) {
        problems.push(format!(
            "the reaper has been behind for {}s, because more sessions become idle than it ends: a minute after locks have \
             expired, MongoDB removes them, and nobody is told of their sessions",
            behind.as_secs()
        ));
    }
    let recent = server.panics.iter().filter(|(_, panics)| panics.last < PANIC_IS_NEWS_FOR);
    problems.extend(recent.map(|(task, TaskPanics { count, message, .. })| {
        format!("the background task `{task}` has panicked {count} times and was started again: {message}")
    }));
    problems
}

impl LockManager {
    /// The health of this manager, as far as it knows without asking the store. Costs nothing.
    #[must_use]
    pub fn health(&self) -> Health {
        Health {
            collections: self.core.collections.names(),
            wakeups: self.core.watches.states(),
            waiting: self.core.beliefs.queues.machine.lock().waiting(),
            guards: self.core.beliefs.watched.guards(),
            event_streams: self.core.event_streams.count(),
            reaper: self.core.sweeps.health(self.core.settings.reaper_interval, self.deadline()),
            panics: self.core.panics.all(),
            frozen: self.core.freezes.all(),
            servers: self.core.servers.count(),
            disagreements: self.core.servers.problems(),
            stopping: self.core.stop_begins.is_cancelled(),
        }
    }

    /// The health of this manager and its store. For a readiness probe:
    ///
    /// ```
    /// use actix_doclock::LockManager;
    ///
    /// /// The status to answer with, and the body.
    /// async fn health(locks: &LockManager) -> (u16, String) {
    ///     let report = locks.check_health().await;
    ///     let status = if report.is_ready() { 200 } else { 503 };
    ///     (status, serde_json::to_string(&report).unwrap_or_default())
    /// }
    /// ```
    ///
    /// It asks the store as a request would: with repetitions, until the
    /// [deadline](crate::LockManagerBuilder::deadline). So allow the probe a little more time than that.
    /// On MongoDB this takes a few commands, and one for each registered collection, all at the same time.
    /// It never fails: an outage is part of the answer. The answer contains no secrets, but a client that
    /// may ask without a limit can keep the database busy.
    ///
    /// # Cancel safety
    /// May be dropped.
    pub async fn check_health(&self) -> HealthReport {
        let asked = clock::now();
        let answer =
            self.core.verbs.ask("status", self.core.collections.names(), |store, names, until| {
                store.status(names, until)
            });
        let (reachable, error, status) = match answer.await {
            Ok(status) => (true, None, Some(status)),
            Err(e) => (!is_outage(&e), Some(e.to_string()), None),
        };
        let store = StoreHealth { reachable, took: clock::since(asked), error, status };
        HealthReport::new(store, self.health(), self.deadline())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(5);

    /// A healthy report, changed by `breaks`. Returns its status and its only problem.
    fn report(breaks: impl FnOnce(&mut StoreStatus, &mut Health)) -> (HealthStatus, String) {
        let mut status = StoreStatus::new(Topology::ReplicaSet, true);
        let reaper = ReaperHealth {
            state: ReaperState::Running,
            last_sweep: Some(Duration::from_secs(1)),
            overdue: false,
            failures: 0,
            last_error: None,
            behind: None,
        };
        let mut server = Health {
            collections: vec!["page"],
            wakeups: BTreeMap::from([("page", Wakeup::Told)]),
            waiting: 1,
            guards: 1,
            event_streams: 0,
            reaper,
            panics: BTreeMap::new(),
            frozen: Vec::new(),
            servers: 1,
            disagreements: Vec::new(),
            stopping: false,
        };
        breaks(&mut status, &mut server);
        let store =
            StoreHealth { reachable: true, took: DEADLINE, error: None, status: Some(status) };
        let report = HealthReport::new(store, server, DEADLINE);
        assert!(report.problems.len() < 2, "{report:?}");
        (report.status, report.problems.concat())
    }

    #[test]
    fn of_each_problem_it_is_said_how_bad_it_is() {
        use HealthStatus::{Degraded, Ok, Unavailable};
        type Breaks = fn(&mut StoreStatus, &mut Health);
        let cases: &[(HealthStatus, &str, Breaks)] = &[
            (Ok, "", |_, _| {}),
            (Unavailable, "there is no primary", |status, _| status.writable = false),
            (Unavailable, "is being stopped", |_, server| {
                server.stopping = true;
                server.reaper.state = ReaperState::Stopped;
            }),
            (Degraded, "page.lock has no index on aid, due", |status, _| {
                let missing = ["aid", "due"].map(str::to_owned).into();
                status.missing_indexes.insert("page.lock".to_owned(), missing);
            }),
            (
                Unavailable,
                "unauthorized: the database user lacks update on page.lock",
                |status, _| {
                    let missing = vec!["update".to_owned()];
                    status.missing_privileges.insert("page.lock".to_owned(), missing);
                },
            ),
            (Degraded, "unauthorized: the database user lacks find on page;", |status, _| {
                status.missing_privileges.insert("page".to_owned(), vec!["find".to_owned()]);
            }),
            (Ok, "", |status, _| status.majority_lag = Some(DEADLINE)),
            (Unavailable, "is 6s behind", |status, _| {
                status.majority_lag = Some(Duration::from_secs(6));
            }),
            (Ok, "", |_, server| {
                server.wakeups.insert("page", Wakeup::Opening);
            }),
            (Ok, "", |_, server| server.reaper.behind = Some(Duration::from_secs(29))),
            (Degraded, "the reaper has been behind for 30s", |_, server| {
                server.reaper.behind = Some(Duration::from_secs(30));
            }),
            (Degraded, "the change stream of page is lost", |_, server| {
                server.wakeups.insert("page", Wakeup::Polling);
            }),
            (Degraded, "differs", |_, server| server.disagreements.push("it differs".to_owned())),
            (Degraded, "is a standalone server", |status, server| {
                status.topology = Topology::Standalone;
                server.wakeups.insert("page", Wakeup::Polling);
            }),
            (Ok, "", |_, server| server.reaper.state = ReaperState::Off),
            (Degraded, "the reaper has ended", |_, server| {
                server.reaper.state = ReaperState::Stopped;
            }),
            (Degraded, "the reaper does not get through", |_, server| server.reaper.overdue = true),
            (Degraded, "`events` has panicked 2 times and was started again: oh", |_, server| {
                let last = Duration::from_secs(1);
                let panics = TaskPanics { count: 2, last, message: "oh".to_owned() };
                server.panics.insert("events", panics);
            }),
            (Degraded, "failed 3 times in a row: down", |_, server| {
                server.reaper.overdue = true;
                server.reaper.failures = 3;
                server.reaper.last_error = Some("down".to_owned());
            }),
        ];
        for (expected, text, breaks) in cases {
            let (status, problem) = report(breaks);
            assert!(status == *expected && problem.contains(text), "{text}: {status:?} {problem}");
            assert_eq!(problem.is_empty(), text.is_empty(), "{problem}");
        }
    }
}
