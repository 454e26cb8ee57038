//! First come, first served, across all servers.

use actix_doclock::{
    Aid, Holder, LockToken, Lockable, Mode, TryAcquire,
    store::{Claim, Rules, Store},
};
use mongodb::bson::{Document, doc};
use serde::{Deserialize, Serialize};

use super::*;
use crate::rig::faulty::Faulty;

#[derive(Serialize, Deserialize)]
struct Counter {}

impl Lockable for Counter {
    type Id = String;
    const COLLECTION: &'static str = "counter";
    const FAIR: bool = true;
}

fn counter() -> LockKey {
    LockKey::of::<Counter>("one".into()).unwrap()
}

async fn servers(cluster: &Cluster) -> [LockManager; 2] {
    let servers = [cluster.server().await, cluster.server().await];
    for locks in &servers {
        locks.register::<Counter>().await.unwrap();
    }
    servers
}

/// Starts a waiter, which becomes the `n`-th in the queue.
async fn queues(cluster: &Cluster, locks: &LockManager, n: usize) -> JoinHandle<LockGuard> {
    let waiting = waiting(locks, &counter()).await;
    match cluster {
        // All ready tasks run before a timer fires.
        Cluster::Memory(_) => sleep(Duration::from_millis(20)).await,
        Cluster::Mongo(database) => {
            let records = database.collection::<Document>("counter.lock");
            eventually("it has a place", async || {
                let record = records.find_one(doc! { "_id": "one" }).await.unwrap().unwrap();
                record.get_array("queue").is_ok_and(|queue| queue.len() == n)
            })
            .await;
        }
    }
    waiting
}

/// A place of a dead process, which does not even give up its place.
async fn dies_while_waiting(cluster: &Cluster) {
    let claim = Claim {
        aid: Aid::new(),
        token: LockToken::new(),
        holder: Holder::new("dead"),
        mode: Mode::Exclusive,
        ttl: TTL,
        tab: None,
        page: None,
        taken: None,
        max_hold: None,
        place: Some(Duration::from_secs(15)),
    };
    let answer = match cluster {
        Cluster::Memory(store) => store.try_acquire(&counter(), &claim).await,
        Cluster::Mongo(database) => {
            let store = MongoStore::new(database);
            store.prepare(Counter::COLLECTION, &Rules::new(TTL).fair()).await.unwrap();
            store.try_acquire(&counter(), &claim).await
        }
    };
    assert!(matches!(answer, Ok(TryAcquire::Held(_))), "{answer:?}");
}

on_each_store! {
    async fn waiters_are_served_in_the_order_of_arrival_across_servers(cluster: Cluster) {
        let servers = servers(&cluster).await;
        let held = servers[0].acquire(&counter(), Wait::no()).await.unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut all = JoinSet::new();
        for (n, server) in [0, 1, 1, 0, 0, 1, 0, 1].into_iter().enumerate() {
            let waiting = queues(&cluster, &servers[server], n + 1).await;
            let order = Arc::clone(&order);
            all.spawn(async move {
                let guard = waiting.await.unwrap();
                order.lock().unwrap().push(n);
                guard.release().await.unwrap();
            });
        }
        held.release().await.unwrap();
        in_time("all are served", all.join_all()).await;
        assert_eq!(*order.lock().unwrap(), Vec::from_iter(0..8));
    }

    async fn a_contender_that_does_not_wait_cannot_overtake_the_waiters(cluster: Cluster) {
        let servers = servers(&cluster).await;
        let held = servers[0].acquire(&counter(), Wait::no()).await.unwrap();
        let waiting = queues(&cluster, &servers[1], 1).await;
        // Released on a server that is busy with other work.
        servers[0].release(held.lock()).await.unwrap();
        let guard = loop {
            match servers[0].acquire(&counter(), Wait::no()).await {
                Err(LockError::Held(_)) if waiting.is_finished() => break waiting.await.unwrap(),
                Err(LockError::Held(_)) => sleep(Duration::from_millis(1)).await,
                other => panic!("{other:?}"),
            }
        };
        guard.release().await.unwrap();
        let free = servers[0].acquire(&counter(), Wait::no()).await.unwrap();
        free.release().await.unwrap();
    }

    async fn a_waiter_that_gives_up_or_dies_costs_the_next_one_little(cluster: Cluster) {
        let servers = servers(&cluster).await;
        let held = servers[0].acquire(&counter(), Wait::no()).await.unwrap();
        let gives_up = queues(&cluster, &servers[0], 1).await;
        dies_while_waiting(&cluster).await;
        let third = queues(&cluster, &servers[0], 3).await;
        gives_up.abort();
        held.release().await.unwrap();
        in_time("the third one is let in", third).await.unwrap().release().await.unwrap();
    }
}

/// Its place has expired, for example because the store did not answer, so it is in the queue again, at
/// the end. It asks for all waiters of its process, and must not keep out those ahead of it.
#[tokio::test]
async fn a_waiter_that_has_lost_its_place_does_not_keep_out_waiters_of_its_process() {
    let cluster = Cluster::mongo().await;
    let Cluster::Mongo(database) = &cluster else { unreachable!("asked for") };
    let [locks, _] = servers(&cluster).await;
    let held = locks.acquire(&counter(), Wait::no()).await.unwrap();
    let first = queues(&cluster, &locks, 1).await;
    let second = queues(&cluster, &locks, 2).await;
    let third = queues(&cluster, &locks, 3).await;
    let records = database.collection::<Document>("counter.lock");
    let gone = doc! { "$pop": { "queue": -1 } };
    assert_eq!(records.update_one(doc! { "_id": "one" }, gone).await.unwrap().modified_count, 1);
    held.release().await.unwrap();
    for waiting in [second, third, first] {
        in_time("in the store's order", waiting).await.unwrap().release().await.unwrap();
    }
}

/// A server whose network carries nothing, and many calls that wait there for one document.
async fn wait_in_an_outage(faulty: &Faulty, many: usize, wait: Wait) -> JoinSet<LockError> {
    let locks = &faulty.app.locks;
    locks.register::<Counter>().await.unwrap();
    faulty.proxy.blackhole();
    let mut all = JoinSet::new();
    for _ in 0..many {
        let locks = locks.clone();
        all.spawn(async move { locks.acquire(&counter(), wait).await.map(drop).unwrap_err() });
    }
    faulty.proxy.until_fired(1).await;
    all
}

/// One deadline for each waiter would take many minutes.
#[tokio::test]
async fn an_outage_is_reported_after_the_wait_and_a_deadline_for_any_number_of_waiters() {
    const MANY: usize = 300;
    let faulty = Faulty::with_deadline(Duration::from_secs(1)).await;
    let began = Instant::now();
    let wait = Wait::for_at_most(Duration::from_secs(2));
    let all = wait_in_an_outage(&faulty, MANY, wait).await;
    for error in in_time("all are answered", all.join_all()).await {
        assert!(matches!(error, LockError::Store(_)), "{error:?}");
    }
    eprintln!("{MANY} answers in {:?}", began.elapsed());
}

#[tokio::test]
async fn a_server_that_is_stopped_in_an_outage_releases_its_waiters() {
    // Longer than this test waits for any step.
    let faulty = Faulty::with_deadline(2 * SOON).await;
    let all = wait_in_an_outage(&faulty, 8, Wait::until_acquired()).await;
    faulty.app.locks.begin_shutdown();
    for error in in_time("all are answered", all.join_all()).await {
        assert!(matches!(error, LockError::ShutDown), "{error:?}");
    }
    faulty.proxy.heal();
}
