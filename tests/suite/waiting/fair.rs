//! First come, first served, across all servers.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, Holder, Lockable, Mode, Released,
    store::{Place, Rules, Ticket, Waiters},
};
use futures_util::FutureExt as _;
use mongodb::bson::{Document, doc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::*;
use crate::rig::{self, faulty::Faulty, mongod};

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

/// Starts a waiter, and waits until it has its ticket.
async fn queues(cluster: &Cluster, locks: &LockManager) -> JoinHandle<LockGuard> {
    let before = last_ticket(cluster).await;
    let waiting = waiting(locks, &counter()).await;
    match cluster {
        // All ready tasks run before a timer fires.
        Cluster::Memory(_) => sleep(Duration::from_millis(20)).await,
        Cluster::Mongo(_) => {
            eventually("it has a ticket", async || last_ticket(cluster).await > before).await;
        }
    }
    waiting
}

/// The queue as MongoDB keeps it.
async fn stored_queue(cluster: &Cluster) -> Vec<Document> {
    let Cluster::Mongo(database) = cluster else { return Vec::new() };
    let records = database.collection::<Document>("counter.lock");
    let record = records.find_one(doc! { "_id": "one" }).await.unwrap().unwrap_or_default();
    let queue = record.get_array("queue").into_iter().flatten();
    queue.map(|place| place.as_document().unwrap().clone()).collect()
}

async fn last_ticket(cluster: &Cluster) -> Option<i64> {
    stored_queue(cluster).await.iter().map(|place| place.get_i64("last").unwrap()).max()
}

/// A place of a dead server, which does not even give up its place.
async fn dies_while_waiting(cluster: &Cluster) {
    let first = Ticket::NEW;
    let place = Place {
        first,
        writer: Some(first),
        last: first,
        aid: Aid::new(),
        holder: Holder::new("dead"),
        mode: Mode::Exclusive,
    };
    let lease = Duration::from_secs(5);
    let waiters = Waiters { server: Uuid::new_v4(), place: Some(place), lease };
    let drawn = match cluster {
        Cluster::Memory(store) => store.set_place(&counter(), &waiters, Deadline::NONE).await,
        Cluster::Mongo(database) => {
            let store = MongoStore::new(database);
            store
                .prepare(Counter::COLLECTION, &Rules::new(TTL).fair(), Deadline::NONE)
                .await
                .unwrap();
            store.set_place(&counter(), &waiters, Deadline::NONE).await
        }
    };
    assert!(drawn.unwrap().is_some());
}

on_each_store! {
    async fn waiters_are_served_in_the_order_of_arrival_across_servers(cluster: Cluster) {
        let servers = servers(&cluster).await;
        let held = servers[0].acquire(&counter(), Wait::no()).await.unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut all = JoinSet::new();
        for (n, server) in [0, 1, 1, 0, 0, 1, 0, 1].into_iter().enumerate() {
            let waiting = queues(&cluster, &servers[server]).await;
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
        let waiting = queues(&cluster, &servers[1]).await;
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

    async fn a_reader_that_is_refused_for_a_waiter_says_nothing_about_other_readers(cluster: Cluster) {
        let [locks, _] = servers(&cluster).await;
        let reader = locks.acquire_shared(&counter(), Wait::no()).await.unwrap();
        let writer = queues(&cluster, &locks).await;
        let refused = locks.acquire_shared(&counter(), Wait::no()).await;
        assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
        assert!(reader.lost().now_or_never().is_none());
        reader.release().await.unwrap();
        in_time("the writer is served", writer).await.unwrap().release().await.unwrap();
    }

    async fn a_waiter_that_asks_again_in_time_keeps_its_turn_among_all_servers(cluster: Cluster) {
        let servers = servers(&cluster).await;
        let held = servers[0].acquire(&counter(), Wait::no()).await.unwrap();
        let job = servers[0].job("asks again");
        let asks = async |wait| job.acquire(&counter(), wait).await;
        let before = last_ticket(&cluster).await;
        let wait = Wait::for_at_most(Duration::from_secs(2));
        let is_back = AtomicBool::new(false);
        let asked = async {
            assert!(matches!(asks(wait).await, Err(LockError::Held(_))));
            is_back.store(true, Relaxed);
            asks(Wait::until_acquired()).await.unwrap()
        };
        let other = async {
            if matches!(cluster, Cluster::Mongo(_)) {
                let drawn = async || last_ticket(&cluster).await > before;
                eventually("it has a ticket", drawn).await;
            } else {
                sleep(Duration::from_millis(20)).await;
            }
            let other = queues(&cluster, &servers[1]).await;
            let waits = async || is_back.load(Relaxed) && servers[0].health().waiting == 1;
            eventually("it waits again", waits).await;
            held.release().await.unwrap();
            (other,)
        };
        let (first, (other,)) = in_time("the first one is back", async { tokio::join!(asked, other) }).await;
        assert!(!other.is_finished());
        first.release().await.unwrap();
        in_time("the other one", other).await.unwrap().release().await.unwrap();
    }

    async fn a_waiter_that_gives_up_or_dies_costs_the_next_one_little(cluster: Cluster) {
        let servers = servers(&cluster).await;
        let held = servers[0].acquire(&counter(), Wait::no()).await.unwrap();
        let gives_up = queues(&cluster, &servers[0]).await;
        dies_while_waiting(&cluster).await;
        let third = queues(&cluster, &servers[0]).await;
        gives_up.abort();
        held.release().await.unwrap();
        in_time("the third one is let in", third).await.unwrap().release().await.unwrap();
    }
}

/// Its place has expired, for example because the store did not answer.
#[tokio::test]
async fn waiters_whose_place_is_lost_keep_their_order() {
    let cluster = Cluster::mongo().await;
    let Cluster::Mongo(database) = &cluster else { unreachable!("asked for") };
    let [locks, _] = servers(&cluster).await;
    let held = locks.acquire(&counter(), Wait::no()).await.unwrap();
    let mut all = Vec::new();
    for _ in 0..3 {
        all.push(queues(&cluster, &locks).await);
    }
    let records = database.collection::<Document>("counter.lock");
    let gone = doc! { "$unset": { "queue": 1 } };
    assert_eq!(records.update_one(doc! { "_id": "one" }, gone).await.unwrap().modified_count, 1);
    eventually("the place is back", async || stored_queue(&cluster).await.len() == 1).await;
    held.release().await.unwrap();
    for waiting in all {
        in_time("in the order of arrival", waiting).await.unwrap().release().await.unwrap();
    }
}

/// However many wait, the record has one place for each server, and a handover is one command.
#[tokio::test]
async fn a_crowd_costs_one_place_few_tickets_and_one_command_for_each_handover() {
    const CROWD: usize = 200;
    let server = mongod::local_replica_set().await;
    let (database, commands) = rig::counted_database(&server.uri()).await;
    let locks = crate::rig::app::manager_on(&database).without_reaper().build();
    let locks = locks.await.unwrap();
    locks.register::<Counter>().await.unwrap();
    let held = locks.acquire(&counter(), Wait::no()).await.unwrap();
    commands.take();
    let mut crowd = JoinSet::new();
    for _ in 0..CROWD {
        let locks = locks.clone();
        crowd.spawn(async move {
            let guard = locks.acquire(&counter(), Wait::until_acquired()).await.unwrap();
            guard.release().await.unwrap();
        });
    }
    let cluster = Cluster::Mongo(database);
    eventually("all wait", async || locks.health().waiting == CROWD).await;
    until_told(&locks, Counter::COLLECTION).await;
    eventually("they have tickets", async || !stored_queue(&cluster).await.is_empty()).await;
    assert_eq!(stored_queue(&cluster).await.len(), 1);
    held.release().await.unwrap();
    in_time("all are served", crowd.join_all()).await;
    let writes = commands.take().into_iter().filter(|it| it == "update").count();
    // A draw that some of them missed, the place that is kept each second, and handovers that met one of
    // these, which cost a release and a claim.
    assert!(writes < CROWD + CROWD / 2, "{writes}");
    assert!(stored_queue(&cluster).await.is_empty(), "nobody waits");
}

/// The primary has released the lock for the waiter of the other server, and the repetition finds nothing.
#[tokio::test]
async fn a_handover_that_is_majority_committed_late_is_reported_as_a_release() {
    let mongod = mongod::Mongod::start_replica_set().await;
    let cluster = Cluster::Mongo(rig::fresh_database(&mongod.uri()).await);
    let servers = servers(&cluster).await;
    let held = servers[0].acquire(&counter(), Wait::no()).await.unwrap();
    let first = queues(&cluster, &servers[1]).await;
    let second = queues(&cluster, &servers[0]).await;
    mongod.majority_is_late_for("update").await;
    assert_eq!(servers[0].release(held.lock()).await.unwrap(), Released::Released);
    in_time("the other server's waiter", first).await.unwrap().release().await.unwrap();
    in_time("this server's waiter", second).await.unwrap().release().await.unwrap();
}

/// A waiter that leaves does not keep the waiters of another server out.
#[tokio::test]
async fn the_place_of_a_server_moves_on_when_its_first_waiter_leaves() {
    let cluster = Cluster::mongo().await;
    let servers = servers(&cluster).await;
    let held = servers[0].acquire(&counter(), Wait::no()).await.unwrap();
    let first = queues(&cluster, &servers[0]).await;
    let second = queues(&cluster, &servers[1]).await;
    let third = queues(&cluster, &servers[0]).await;
    let before = stored_queue(&cluster).await;
    first.abort();
    eventually("the place moves on", async || {
        let now = stored_queue(&cluster).await;
        now.len() == 2 && now[0].get_i64("first").unwrap() > before[0].get_i64("first").unwrap()
    })
    .await;
    held.release().await.unwrap();
    for waiting in [second, third] {
        in_time("in the order of arrival", waiting).await.unwrap().release().await.unwrap();
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
