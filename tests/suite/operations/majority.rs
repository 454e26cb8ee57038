//! A majority that does not follow the primary.

use std::time::{Duration, Instant};

use actix_doclock::store::verbs::*;
use actix_doclock::{Aid, MongoStore, health::HealthStatus};
use futures_util::future::join_all;
use mongodb::bson::doc;
use tokio::time::timeout;

use crate::rig::app::{App, eventually, key, put, with_deadline};
use crate::rig::fresh_name;
use crate::rig::replica_set::ReplicaSet;

/// The time for which a stuck write waits, and the time in which a read is answered on a busy machine.
const STUCK: Duration = Duration::from_secs(90);
const SOON: Duration = Duration::from_secs(30);
/// More than the connections of the pool.
const SAVES: usize = 300;

async fn replication(set: &ReplicaSet, primary: usize, mode: &str) {
    for (n, member) in set.members().iter().enumerate() {
        if n != primary {
            let command = doc! { "configureFailPoint": "stopReplProducer", "mode": mode };
            member.admin(command).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_majority_is_named_and_its_stuck_writes_leave_connections_for_reads() {
    let set = ReplicaSet::start().await;
    let store =
        MongoStore::connect(&format!("{}&maxPoolSize=40", set.uri()), &fresh_name()).await.unwrap();
    let database = store.database().clone();
    let app = App::with(&database, with_deadline(STUCK)).await;
    let mut held = Vec::new();
    for n in 0..SAVES {
        put(&database, &n.to_string(), "old").await;
        held.push(app.granted(&key(&n.to_string()), &Aid::new()).await);
    }
    // Where the deadline is short, this is worth a page for the person on call.
    let quick = App::with(&database, with_deadline(Duration::from_secs(2))).await;
    let stalled = async || {
        let found = doclock::diagnose(&store, &["workitem"], None).await.unwrap();
        found.into_iter().find(|finding| finding.code == "stalled_majority")
    };
    assert_eq!(stalled().await, None);
    assert_ne!(quick.locks.check_health().await.status, HealthStatus::Unavailable);

    let primary = set.primary().await;
    replication(&set, primary, "alwaysOn").await;
    let saves: Vec<_> = held
        .iter()
        .cloned()
        .map(|lock| {
            let app = app.clone();
            tokio::spawn(async move { app.save(&lock, "new").await.map(drop) })
        })
        .collect();
    // The saves are on their way: the first of them is written, and not acknowledged.
    eventually("saves wait for the majority", async || {
        quick
            .locks
            .check_health()
            .await
            .store
            .status
            .is_some_and(|it| it.majority_lag > Some(Duration::from_secs(2)))
    })
    .await;
    let report = quick.locks.check_health().await;
    assert_eq!(report.status, HealthStatus::Unavailable, "{report:?}");
    assert!(report.problems.iter().any(|it| it.contains("the majority is stalled")), "{report:?}");
    let finding = timeout(SOON, stalled()).await.expect("it is answered").expect("it is named");
    assert!(finding.problem.contains("no majority has followed the primary"), "{finding:?}");

    for _ in 0..10 {
        let began = Instant::now();
        let loaded = timeout(SOON, app.store.load(&key("1"), Deadline::NONE))
            .await
            .expect("a read finds a connection");
        assert!(loaded.unwrap().is_some(), "{:?}", began.elapsed());
    }
    assert!(saves.iter().any(|save| !save.is_finished()), "some are still stuck");
    replication(&set, primary, "off").await;
    for saved in join_all(saves).await {
        let _outcome = saved.unwrap();
    }
}
