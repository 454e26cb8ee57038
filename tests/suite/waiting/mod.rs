//! Waiting for locks, and work under locks outside requests. On both stores: two managers on one store
//! behave like two processes.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use actix_doclock::{
    Job, LockError, LockGuard, LockKey, LockManager, LockManagerBuilder, Lockable, MemoryStore,
    MongoStore, Wait, health::Wakeup,
};
use futures_util::future::join_all;
use mongodb::Database;
use tokio::task::{JoinHandle, JoinSet, yield_now};
use tokio::time::{sleep, timeout};

use crate::rig::app::{NO_DEADLINE, TTL, WorkItem, eventually, key};
use crate::rig::{fresh_database, mongod};

mod cohort;
mod commands;
mod crash;
mod deadlock;
mod events;
mod fair;
mod fence;
mod guards;
mod kept;
mod limits;
mod missed;
mod read_write;
mod stream;

/// Long enough for anything that should happen at all.
const SOON: Duration = Duration::from_secs(60);
/// Long enough to see that nothing happens.
const A_WHILE: Duration = Duration::from_millis(150);

/// The store that all managers of one cluster share.
enum Cluster {
    Memory(MemoryStore),
    Mongo(Database),
}

impl Cluster {
    async fn memory() -> Self {
        Self::Memory(MemoryStore::new())
    }

    async fn mongo() -> Self {
        Self::Mongo(fresh_database(mongod::shared_replica_set().await.uri()).await)
    }

    async fn standalone() -> Self {
        Self::Mongo(fresh_database(&mongod::shared_standalone().await.uri()).await)
    }

    /// The same database, by a client of its own, whose commands nobody counts.
    async fn uncounted(&self) -> Self {
        let Self::Mongo(database) = self else { panic!("commands are counted on MongoDB only") };
        let client = crate::rig::client(&mongod::local_replica_set().await.uri()).await;
        Self::Mongo(client.database(database.name()))
    }

    async fn server(&self) -> LockManager {
        self.server_with(|settings| settings).await
    }

    async fn server_with(
        &self,
        settings: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder,
    ) -> LockManager {
        let builder = match self {
            Self::Memory(store) => LockManager::builder(store.clone()),
            Self::Mongo(database) => crate::rig::app::manager_on(database),
        };
        let builder = builder.ttl(TTL).deadline(NO_DEADLINE).without_reaper();
        let locks = settings(builder).build().await.unwrap();
        locks.register::<WorkItem>().await.unwrap();
        locks
    }
}

/// The same test on each store.
macro_rules! on_each_store {
    ($(async fn $test:ident($cluster:ident: Cluster) $body:block)*) => {
        mod memory {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Cluster::memory().await).await;
            })*
        }
        mod mongo {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Cluster::mongo().await).await;
            })*
        }
        $(async fn $test($cluster: Cluster) $body)*
    };
}
use on_each_store;

async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(SOON, future).await.unwrap_or_else(|_| panic!("{what}: not within {SOON:?}"))
}

/// A waiter in its own task that is known to be in the queue.
async fn waiting(locks: &LockManager, key: &LockKey) -> JoinHandle<LockGuard> {
    let (locks, key) = (locks.clone(), key.clone());
    let waiting =
        tokio::spawn(async move { locks.acquire(&key, Wait::until_acquired()).await.unwrap() });
    // Its task runs as far as it can before this one continues.
    for _ in 0..10 {
        yield_now().await;
    }
    waiting
}

/// Waits until the store reports changes in the collection to this server.
async fn until_told(locks: &LockManager, collection: &str) {
    until_wakeup(locks, collection, Wakeup::Told).await;
}

async fn until_wakeup(locks: &LockManager, collection: &str, wakeup: Wakeup) {
    eventually(&format!("{wakeup:?}"), async || {
        locks.health().wakeups.get(collection) == Some(&wakeup)
    })
    .await;
}

on_each_store! {
    async fn waiters_here_and_elsewhere_are_let_in_by_a_release(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        let held = one.acquire(&key("a"), Wait::no()).await.unwrap();
        let waiting = [waiting(&one, &key("a")).await, waiting(&other, &key("a")).await];
        sleep(A_WHILE).await;
        assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
        held.release().await.unwrap();
        // In either order.
        let all = waiting.map(async |waiting| drop(waiting.await.unwrap()));
        in_time("both are let in", join_all(all)).await;
    }

    async fn one_process_keeps_the_order_of_arrival(cluster: Cluster) {
        let locks = cluster.server().await;
        let held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut all = JoinSet::new();
        for n in 0..50 {
            let waiting = waiting(&locks, &key("a")).await;
            let order = Arc::clone(&order);
            all.spawn(async move {
                let guard = waiting.await.unwrap();
                order.lock().unwrap().push(n);
                guard.release().await.unwrap();
            });
        }
        held.release().await.unwrap();
        in_time("all are served", all.join_all()).await;
        assert_eq!(*order.lock().unwrap(), Vec::from_iter(0..50));
    }

    async fn a_wait_that_times_out_names_the_holder(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        let _held = one.job("alice").acquire(&key("a"), Wait::no()).await.unwrap();
        for locks in [&one, &other] {
            for wait in [Wait::no(), Wait::for_at_most(A_WHILE)] {
                let began = Instant::now();
                match locks.acquire(&key("a"), wait).await {
                    Err(LockError::Held(lock)) => assert_eq!(lock.holder.unwrap().label, "alice"),
                    other => panic!("{other:?}"),
                }
                assert!(wait == Wait::no() || began.elapsed() >= A_WHILE);
            }
        }
    }

    async fn a_waiter_that_gives_up_does_not_hold_up_the_next(cluster: Cluster) {
        let locks = cluster.server().await;
        let held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        let first = waiting(&locks, &key("a")).await;
        let second = waiting(&locks, &key("a")).await;
        first.abort();
        held.release().await.unwrap();
        drop(in_time("the second one is let in", second).await.unwrap());
    }

    async fn a_waiter_is_let_in_when_the_lock_expires(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        let ttl = Duration::from_secs(6);
        let crashed = one.job("crashed").ttl(ttl).acquire(&key("a"), Wait::no()).await.unwrap();
        // Like a killed process: no server renews the lock any more.
        one.shutdown().await;
        let waiting = waiting(&other, &key("a")).await;
        drop(in_time("it is let in", waiting).await.unwrap());
        assert!(Instant::now() >= crashed.lock().expires_at, "not before the expiry");
        drop(crashed);
    }

    async fn a_server_that_is_stopped_ends_all_waits(cluster: Cluster) {
        let locks = cluster.server().await;
        let _held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        let (key, waits) = (key("a"), locks.clone());
        let waiting =
            tokio::spawn(async move { waits.acquire(&key, Wait::until_acquired()).await });
        yield_now().await;
        locks.shutdown().await;
        let refused = in_time("it is refused", waiting).await.unwrap();
        assert!(matches!(refused, Err(LockError::ShutDown)), "{refused:?}");
    }
}

#[tokio::test]
async fn without_change_reports_waiters_poll_and_health_says_so() {
    let cluster = Cluster::standalone().await;
    let (one, other) = (cluster.server().await, cluster.server().await);
    let held = one.acquire(&key("a"), Wait::no()).await.unwrap();
    assert!(other.health().wakeups.is_empty(), "there is no waiter");
    let waiting = waiting(&other, &key("a")).await;
    until_wakeup(&other, "workitem", Wakeup::Polling).await;
    held.release().await.unwrap();
    drop(in_time("it is let in", waiting).await.unwrap());
}
