//! The guarantees of a critical section in a cluster: one task at a time; others wait for a crashed
//! holder until the ttl of its lock is over, and no longer; a late release by that holder does no harm.
//! Only the clock of the database server counts.
//!
//! `cargo run --example jobs -- critical-section` keeps the locks in this process,
//! `cargo run --example jobs -- critical-section --mongodb mongodb://127.0.0.1/?replicaSet=rs0` in MongoDB.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use actix_doclock::{BoxError, LockError, LockKey, LockManager, Named, Wait};
use clap::Args;
use tokio::{task::JoinSet, time::sleep};

const TASKS: u32 = 20;
/// The ttl of the managers. A lock may have a shorter ttl.
const TTL: Duration = Duration::from_secs(60);
const SHORT_TTL: Duration = Duration::from_secs(2);

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    locks: crate::support::Locks,
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), BoxError> {
    let servers = arguments.locks.servers(2, TTL).await?;
    let [one, other] = &servers[..] else { return Err("two servers were asked for".into()) };
    for locks in &servers {
        locks.register::<Named>().await?;
    }
    one_at_a_time(one, other).await?;
    refused_at_once(one, other).await?;
    crashed(one, other).await?;
    other.shutdown().await;
    Ok(())
}

async fn one_at_a_time(one: &LockManager, other: &LockManager) -> Result<(), BoxError> {
    let key = LockKey::named("section")?;
    let (inside, most, entered) = <(Arc<AtomicU32>, Arc<AtomicU32>, Arc<AtomicU32>)>::default();
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let locks = if task % 2 == 0 { one.clone() } else { other.clone() };
        let (key, inside, most, entered) =
            (key.clone(), inside.clone(), most.clone(), entered.clone());
        tasks.spawn(async move {
            locks
                .with_lock(&key, Wait::until_acquired(), async {
                    most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    sleep(Duration::from_millis(2)).await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    entered.fetch_add(1, Ordering::SeqCst);
                })
                .await
        });
    }
    for done in tasks.join_all().await {
        done?;
    }
    println!(
        "{} of {TASKS} tasks were in the section, at most {} at a time",
        entered.load(Ordering::SeqCst),
        most.load(Ordering::SeqCst),
    );
    Ok(())
}

async fn refused_at_once(one: &LockManager, other: &LockManager) -> Result<(), BoxError> {
    let key = LockKey::named("refused")?;
    let held = one.job("the first one").acquire(&key, Wait::no()).await?;
    match other.acquire(&key, Wait::no()).await {
        Err(LockError::Held(lock)) => {
            let holder = lock.holder.map_or_else(String::new, |holder| holder.label);
            println!("who does not wait is told who is in: {holder}");
        }
        other => return Err(format!("not refused: {other:?}").into()),
    }
    held.release().await?;
    Ok(())
}

async fn crashed(one: &LockManager, other: &LockManager) -> Result<(), BoxError> {
    let key = LockKey::named("crashed")?;
    let crashed = one.job("crashes").ttl(SHORT_TTL).acquire(&key, Wait::no()).await?;
    let taken = Instant::now();
    // For its lock, this server is dead from here on: it renews nothing.
    one.shutdown().await;

    let next = other.acquire(&key, Wait::until_acquired()).await?;
    let waited = taken.elapsed().as_secs_f64();
    println!("the next one was in after {waited:.2} s; the crashed one's ttl was {SHORT_TTL:?}");

    println!("late release of the crashed one: {:?}", crashed.release().await?);
    let is_held = other.inspect(&key).await?.is_some_and(|lock| lock.token == Some(next.token()));
    println!("the next one still holds it: {is_held}");
    next.release().await?;
    Ok(())
}
