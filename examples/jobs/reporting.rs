//! Several servers update reports in an outside system without locks: they read a report by its id,
//! change it, and write it back. Only one server may do this with the same report at a time.
//!
//! `cargo run --example jobs -- reporting` keeps the locks in this process,
//! `cargo run --example jobs -- reporting --mongodb mongodb://127.0.0.1/?replicaSet=rs0` in MongoDB.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use actix_doclock::{BoxError, LockKey, LockManager, Named, Wait};
use clap::Args;
use tokio::{task::JoinSet, time::sleep};

const SERVERS: usize = 3;
const REPORTS: u32 = 2;
const REQUESTS: u32 = 24;
/// As long as the clients of such an API expect to wait.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    locks: crate::support::Locks,
}

/// The outside system: a report is a number here. It answers slowly, and accepts every write.
#[derive(Default)]
struct ReportingSystem(Mutex<BTreeMap<u32, u32>>);

impl ReportingSystem {
    async fn read(&self, id: u32) -> u32 {
        sleep(Duration::from_millis(2)).await;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&id).copied().unwrap_or(0)
    }

    async fn update(&self, id: u32, report: u32) {
        sleep(Duration::from_millis(2)).await;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id, report);
    }
}

/// One request to one of the servers. Returns how long it waited, and how long it worked.
async fn handle(
    locks: &LockManager,
    reports: &ReportingSystem,
    id: u32,
) -> Result<(Duration, Duration), BoxError> {
    let began = Instant::now();
    let key = LockKey::named(format!("report/{id}"))?;
    let guard = locks.acquire(&key, Wait::for_at_most(PATIENCE)).await?;
    let waited = began.elapsed();

    let report = reports.read(id).await;
    sleep(Duration::from_millis(5)).await;
    reports.update(id, report + 1).await;

    guard.release().await?;
    Ok((waited, began.elapsed() - waited))
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), BoxError> {
    let servers = arguments.locks.servers(SERVERS, Duration::from_secs(60)).await?;
    for locks in &servers {
        locks.register::<Named>().await?;
    }
    let reports = Arc::new(ReportingSystem::default());

    let mut requests = JoinSet::new();
    for number in 0..REQUESTS {
        let server = number as usize % SERVERS;
        let (locks, reports) = (servers[server].clone(), Arc::clone(&reports));
        requests.spawn(async move {
            let id = number % REPORTS;
            let (waited, worked) = handle(&locks, &reports, id).await?;
            println!(
                "request {number:2}, server {server}, report {id}: waited {:6.1} ms, worked {:5.1} ms",
                waited.as_secs_f64() * 1e3,
                worked.as_secs_f64() * 1e3,
            );
            Ok::<_, BoxError>(())
        });
    }
    while let Some(request) = requests.join_next().await {
        request??;
    }

    for id in 0..REPORTS {
        let updates = reports.read(id).await;
        println!("report {id}: {updates} updates by {} requests", REQUESTS / REPORTS);
    }
    for locks in &servers {
        locks.shutdown().await;
    }
    Ok(())
}
