//! The answers to a readiness probe, on each store, also during failures.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use actix_doclock::{
    LockManager, LockManagerBuilder, MemoryStore, Wait,
    health::{HealthReport, HealthStatus, ReaperState},
    store::Topology,
};
use mongodb::Database;
use mongodb::bson::doc;
use serde_json::{Value, json};

use crate::rig::app::{App, NO_DEADLINE, WorkItem, eventually, key, lock_records, with_deadline};
use crate::rig::faulty::Faulty;
use crate::rig::mongod::{self, Mongod};
use crate::rig::{BY_THE_DEADLINE, client, fresh_database, fresh_name, patient_client};

const DEADLINE: Duration = Duration::from_secs(1);
/// So often that the reaper is seen at work.
const OFTEN: Duration = Duration::from_millis(50);

async fn embedded(settings: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder) -> LockManager {
    let locks = settings(LockManager::builder(MemoryStore::new())).build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    locks
}

/// Asserts that this problem is reported, and no other.
fn assert_only_problem(report: &HealthReport, text: &str) {
    assert!(report.problems.len() == 1 && report.problems[0].contains(text), "{report:?}");
}

/// The report of a healthy manager whose reaper has swept.
async fn in_order(locks: &LockManager) -> HealthReport {
    eventually("the reaper has swept", async || locks.health().reaper.last_sweep.is_some()).await;
    let report = locks.check_health().await;
    assert_eq!(report.problems, [""; 0]);
    assert!(report.is_ready() && report.is_healthy() && report.store.reachable);
    report
}

fn topology(report: &HealthReport) -> Topology {
    report.store.status.as_ref().expect("it has answered").topology
}

#[tokio::test]
async fn an_embedded_store_is_healthy() {
    let locks = embedded(|settings| settings.reaper_interval(OFTEN)).await;
    assert_eq!(topology(&in_order(&locks).await), Topology::Embedded);
}

#[tokio::test]
async fn a_server_of_each_topology_is_healthy_and_reports_its_topology() {
    let replica_set = mongod::shared_replica_set().await;
    let standalone = mongod::shared_standalone().await.uri();
    for (uri, expected) in
        [(replica_set.uri(), Topology::ReplicaSet), (&standalone, Topology::Standalone)]
    {
        let app = App::with(&fresh_database(uri).await, |it| it.reaper_interval(OFTEN)).await;
        let report = if expected == Topology::Standalone {
            let report = app.locks.check_health().await;
            assert_only_problem(&report, "is a standalone server");
            report
        } else {
            in_order(&app.locks).await
        };
        assert_eq!(topology(&report), expected);
        let lag = report.store.status.unwrap().majority_lag;
        assert_eq!(lag.is_some(), expected == Topology::ReplicaSet, "{lag:?}");
    }
}

/// Programs read the report: a field that disappears or changes its meaning breaks them.
#[tokio::test]
async fn the_report_is_stable_json() {
    let locks = embedded(|settings| settings.without_reaper()).await;
    let report = serde_json::to_value(locks.check_health().await).unwrap();
    let expected = json!({
        "status": "ok",
        "problems": [],
        "store": {
            "reachable": true, "took_ms": report["store"]["took_ms"].as_u64().unwrap(),
            "error": null, "topology": "embedded", "writable": true, "majority_lag_ms": null,
            "missing_indexes": {}, "dangers": {}, "missing_privileges": {},
        },
        "collections": ["workitem"],
        "wakeups": {},
        "waiting": 0,
        "guards": 0,
        "event_streams": 0,
        "reaper": {
            "state": "off", "last_sweep_ms": null, "overdue": false, "failures": 0,
            "last_error": null, "behind_ms": null,
        },
        "panics": {},
        "frozen": [],
        "servers": 0,
        "stopping": false,
    });
    assert_eq!(report, expected);
}

/// A server that the test may break.
async fn breakable() -> (Mongod, Database, LockManager) {
    let server = Mongod::start_replica_set().await;
    let database = patient_client(&server.uri()).await.database(&fresh_name());
    let app = App::with(&database, with_deadline(DEADLINE)).await;
    (server, database, app.locks)
}

async fn unavailable_in_time(locks: &LockManager) -> HealthReport {
    let began = Instant::now();
    let report = locks.check_health().await;
    assert!(began.elapsed() < BY_THE_DEADLINE, "{report:?}");
    assert_eq!(report.status, HealthStatus::Unavailable, "{report:?}");
    assert!(!report.is_ready() && !report.is_healthy());
    report
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_reported_unreachable_by_the_deadline() {
    let (server, _, locks) = breakable().await;
    server.pause();
    let report = unavailable_in_time(&locks).await;
    assert!(!report.store.reachable && report.store.took >= DEADLINE, "{report:?}");
    assert_only_problem(
        &report,
        "the store gives no answer: status: no answer within the deadline",
    );
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(
        (&json["status"], &json["store"]["writable"]),
        (&json!("unavailable"), &Value::Null)
    );
    server.resume();
    eventually("it is ready again", async || locks.check_health().await.is_healthy()).await;

    server.kill9();
    assert!(!unavailable_in_time(&locks).await.store.reachable);
    server.restart().await;
    eventually("it is ready again", async || locks.check_health().await.is_healthy()).await;
}

#[tokio::test]
async fn a_replica_set_without_a_primary_is_reachable_and_not_ready() {
    let (server, _, locks) = breakable().await;
    // There is no other member to elect.
    server.admin(doc! { "replSetStepDown": 120, "force": true }).await;
    let mut report = locks.check_health().await;
    // On a busy machine, the deadline may pass before the answer.
    eventually("its driver has noticed, and the store answers", async || {
        report = locks.check_health().await;
        report.store.reachable && report.status == HealthStatus::Unavailable
    })
    .await;
    assert_only_problem(&report, "the store takes no writes: there is no primary");
}

#[tokio::test]
async fn a_missing_index_is_reported_until_a_server_is_started() {
    let server = mongod::shared_replica_set().await;
    let database = fresh_database(server.uri()).await;
    let app = App::on(&database).await;
    for (index, name) in
        [("ts", "ts (TTL)"), ("aid", "aid"), ("readers.aid", "readers.aid"), ("due", "due")]
    {
        lock_records(&database).drop_index(format!("{index}_1")).await.unwrap();
        let report = app.locks.check_health().await;
        assert_eq!(report.status, HealthStatus::Degraded);
        assert!(report.is_ready(), "locks work without it");
        assert_only_problem(&report, &format!("workitem.lock has no index on {name}:"));
        App::on(&database).await;
        assert!(app.locks.check_health().await.is_healthy());
    }
    // Without its TTL it is a different index.
    lock_records(&database).drop_index("ts_1").await.unwrap();
    let plain = mongodb::IndexModel::builder().keys(doc! { "ts": 1 }).build();
    lock_records(&database).create_index(plain).await.unwrap();
    database.collection::<mongodb::bson::Document>("doclock.ended").drop().await.unwrap();
    let report = app.locks.check_health().await;
    let missing =
        [("doclock.ended", vec!["ts (TTL)", "step"]), ("workitem.lock", vec!["ts (TTL)"])].map(
            |(name, missing)| (name.to_owned(), missing.into_iter().map(String::from).collect()),
        );
    assert_eq!(report.store.status.unwrap().missing_indexes, BTreeMap::from(missing));
}

#[tokio::test]
async fn a_reaper_that_fails_or_is_stopped_or_switched_off_is_reported() {
    let off = embedded(|settings| settings.without_reaper()).await;
    assert_eq!(off.health().reaper.state, ReaperState::Off);
    off.sweep().await.unwrap();
    assert!(off.health().reaper.last_sweep.is_some(), "swept by hand");

    let faulty = Faulty::new().await;
    let database = client(&faulty.proxy.uri()).await.database(&fresh_name());
    let locks = crate::rig::app::manager_on(&database)
        .deadline(DEADLINE)
        .reaper_interval(OFTEN)
        .build()
        .await
        .unwrap();
    locks.register::<WorkItem>().await.unwrap();
    in_order(&locks).await;
    assert_eq!(locks.health().reaper.state, ReaperState::Running);

    faulty.proxy.blackhole();
    eventually("it has failed", async || locks.health().reaper.failures > 0).await;
    let reaper = locks.health().reaper;
    assert!(reaper.last_error.unwrap().starts_with("sweep: "), "and says why");
    assert!(reaper.last_sweep.unwrap() >= DEADLINE, "the last successful sweep");
    faulty.proxy.heal();
    eventually("it works again", async || locks.health().reaper.failures == 0).await;
    eventually("all is well again", async || locks.check_health().await.is_healthy()).await;

    locks.shutdown().await;
    eventually("it has ended", async || locks.health().reaper.state == ReaperState::Stopped).await;
    let report = locks.check_health().await;
    assert!(!report.is_ready() && report.server.stopping);
    assert_only_problem(&report, "this server is being stopped");
}

#[tokio::test]
async fn a_reaper_whose_runtime_is_gone_is_reported() {
    let build = || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        // The runtime and all its tasks end when this returns.
        runtime.block_on(embedded(|settings| settings))
    };
    let locks = tokio::task::spawn_blocking(build).await.unwrap();
    assert_eq!(locks.health().reaper.state, ReaperState::Stopped);
    let report = locks.check_health().await;
    assert!(report.problems.iter().any(|it| it.contains("the reaper has ended")), "{report:?}");
}

#[tokio::test]
async fn waiters_and_locks_held_by_guards_are_counted() {
    let locks = embedded(|settings| settings.deadline(NO_DEADLINE)).await;
    let counts = || (locks.health().waiting, locks.health().guards);
    let held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
    let waiting = {
        let (locks, key) = (locks.clone(), key("a"));
        tokio::spawn(async move { locks.acquire(&key, Wait::until_acquired()).await.unwrap() })
    };
    eventually("it waits", async || counts() == (1, 1)).await;
    held.release().await.unwrap();
    let guard = waiting.await.unwrap();
    assert_eq!(counts(), (0, 1));
    drop(guard);
    assert_eq!(counts(), (0, 0));
}
