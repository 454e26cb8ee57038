//! The application's memory for a held lock and for a waiter.

use std::time::Duration;

use actix_doclock::{Aid, Holder, Wait};
use futures_util::future::join_all;
use tokio::time::sleep;

use super::{Bench, fresh};
use crate::{
    count,
    load::Turn,
    ours::{self, key},
    report::{Role, Row},
};

const AT_ONCE: usize = 100;

pub async fn measure(bench: &mut Bench<'_>) {
    let many = bench.effort.pick(200, 10_000);
    let locks = ours::on(&fresh(&bench.servers.one).await).await;
    // Connections and streams, which exist once, are set up before the measurement.
    drop(guards(&locks, 20_000..20_100).await);
    sleep(Duration::from_millis(500)).await;

    count::start();
    let held = guards(&locks, 0..many).await;
    sleep(Duration::from_millis(500)).await;
    add(bench, "a lock held by a guard", many);
    // Dropping the guards would release the locks in the background, which takes seconds.
    for guard in held {
        guard.release().await.unwrap();
    }
    sleep(Duration::from_secs(1)).await;

    count::start();
    let aid = Aid::new();
    let mut held = Vec::with_capacity(many);
    for some in (0..many).collect::<Vec<_>>().chunks(AT_ONCE) {
        let acquire = some.iter().map(async |&n| {
            let key = key(Turn { task: 0, key: n + 30_000 });
            locks.lock_for_session(&key, &aid, &Holder::new("alice")).await.unwrap()
        });
        held.extend(join_all(acquire).await);
    }
    drop(held);
    sleep(Duration::from_millis(500)).await;
    add(bench, "a lock held by a web session", many);
    let _ = locks.end_session(&aid).await.unwrap();

    let crowd = bench.effort.pick(100, 1_000);
    let turn = Turn { task: 0, key: 99_999 };
    let first = locks.acquire(&key(turn), Wait::until_acquired()).await.unwrap();
    count::start();
    let waiting: Vec<_> = (0..crowd)
        .map(|_| {
            let locks = locks.clone();
            tokio::spawn(async move {
                let guard = locks.acquire(&key(turn), Wait::until_acquired()).await.unwrap();
                guard.release().await.unwrap();
            })
        })
        .collect();
    sleep(Duration::from_secs(1)).await;
    add(bench, "a waiter, with its task", crowd);
    first.release().await.unwrap();
    join_all(waiting).await;
}

async fn guards(
    locks: &actix_doclock::LockManager,
    keys: std::ops::Range<usize>,
) -> Vec<actix_doclock::LockGuard> {
    let keys: Vec<_> = keys.collect();
    let mut held = Vec::with_capacity(keys.len());
    for some in keys.chunks(AT_ONCE) {
        let acquire = some.iter().map(async |&n| {
            locks.acquire(&key(Turn { task: 0, key: n }), Wait::no()).await.unwrap()
        });
        held.extend(join_all(acquire).await);
    }
    held
}

fn add(bench: &mut Bench<'_>, who: &str, of: usize) {
    let (bytes, _) = count::stop();
    let row = Row::new("memory", "one", who, Role::Ours).load(of, of);
    bench.report.add(row.value("bytes", bytes as f64 / of as f64));
}
