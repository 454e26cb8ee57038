//! The cost of waiting for the server.

use mongodb::bson::doc;

use super::*;
use crate::rig::mongod::Mongod;
use crate::rig::{Commands, counted_database};

/// A cluster that counts the commands of all its servers together.
async fn counted() -> (Cluster, Commands) {
    let (database, commands) = counted_database(&mongod::local_replica_set().await.uri()).await;
    (Cluster::Mongo(database), commands)
}

/// Waits until the stream is open and the waiter has asked again.
async fn is_told(locks: &LockManager, commands: &Commands) {
    until_told(locks, WorkItem::COLLECTION).await;
    eventually("nobody asks any more", async || {
        commands.take();
        sleep(4 * A_WHILE).await;
        !commands.take().iter().any(|name| ["findAndModify", "update"].contains(&&**name))
    })
    .await;
}

/// Serves waiters in the order of arrival; each holds the lock for a while. Returns the order.
async fn all_served(waiting: Vec<JoinHandle<LockGuard>>, hold: Duration) -> Vec<usize> {
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut all = JoinSet::new();
    for (n, waiting) in waiting.into_iter().enumerate() {
        let order = Arc::clone(&order);
        all.spawn(async move {
            let guard = waiting.await.unwrap();
            order.lock().unwrap().push(n);
            sleep(hold).await;
            guard.release().await.unwrap();
        });
    }
    // There is no limit for all together, because the server may be slow.
    while let Some(served) = in_time("the next one is served", all.join_next()).await {
        served.unwrap();
    }
    Arc::into_inner(order).unwrap().into_inner().unwrap()
}

/// The writes that take, hand over and release locks, per waiter of a crowd.
fn writes_for_each(sent: &[String], crowd: usize) -> f64 {
    let writes =
        sent.iter().filter(|it| ["findAndModify", "update", "delete"].contains(&it.as_str()));
    writes.count() as f64 / crowd as f64
}

#[tokio::test]
async fn a_handover_costs_the_same_for_any_number_of_waiters_and_keeps_their_order() {
    const AT_MOST: f64 = 6.0;
    const WRITES: f64 = 1.3;
    for crowd in [100, 1_000] {
        let (cluster, commands) = counted().await;
        let locks = cluster.server().await;
        let held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        commands.take();
        let mut all = vec![waiting(&locks, &key("a")).await];
        is_told(&locks, &commands).await;

        for _ in 1..crowd {
            all.push(waiting(&locks, &key("a")).await);
        }
        sleep(A_WHILE).await;
        let joining: Vec<_> = commands.take().into_iter().filter(|it| it != "getMore").collect();
        assert_eq!(joining, [""; 0], "only the first waiter asks the server");

        let began = Instant::now();
        held.release().await.unwrap();
        assert_eq!(all_served(all, Duration::ZERO).await, Vec::from_iter(0..crowd));
        let took = began.elapsed();
        let sent = commands.take();
        let of = |name: &str| sent.iter().filter(|it| *it == name).count();
        let each = sent.len() as f64 / crowd as f64;
        eprintln!(
            "{crowd} wait: {each:.2} commands for each handover ({} update, {} delete, {} getMore), \
             {:?} each",
            of("update"),
            of("delete"),
            of("getMore"),
            took / crowd as u32,
        );
        assert!(each <= AT_MOST, "{crowd}: {each} commands for each handover");
        let writes = writes_for_each(&sent, crowd);
        assert!(writes <= WRITES, "{crowd}: {writes} writes for each handover");
    }
}

/// Makes each write take at least this long, as on a busy disk.
async fn slow_down(server: &Mongod, write: Duration) {
    let slow = doc! {
        "failCommands": ["findAndModify", "delete", "update"],
        "blockConnection": true,
        "blockTimeMS": write.as_millis() as i64,
    };
    let slow = doc! { "configureFailPoint": "failCommand", "mode": "alwaysOn", "data": slow };
    server.admin(slow).await;
}

/// Waiters must not ask before their turn: each answer takes time, and in that time no lock can be
/// handed over to them. This also holds after a release in between that lets other processes in.
#[tokio::test]
async fn on_a_slow_server_a_handover_takes_no_more_writes_than_on_a_fast_one() {
    const CROWD: usize = 80;
    const AT_MOST: f64 = 1.3;
    let write = Duration::from_millis(50);
    let server = Mongod::start_replica_set().await;
    let max_hold = Some(Duration::from_secs(600));
    let cases = [(Duration::ZERO, None), (write / 2, None), (write * 2, None), (write, max_hold)];
    let cases = cases.map(async |(hold, max_hold)| {
        let (database, commands) = counted_database(&server.uri()).await;
        let cluster = Cluster::Mongo(database);
        let locks = cluster.server_with(|settings| match max_hold {
            Some(max_hold) => settings.max_hold(max_hold),
            None => settings,
        });
        let locks = locks.await;
        let held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        let mut all = vec![waiting(&locks, &key("a")).await];
        is_told(&locks, &commands).await;
        for _ in 1..CROWD {
            all.push(waiting(&locks, &key("a")).await);
        }
        slow_down(&server, write).await;
        commands.take();
        held.release().await.unwrap();
        assert_eq!(all_served(all, hold).await, Vec::from_iter(0..CROWD));
        let writes = writes_for_each(&commands.take(), CROWD);
        eprintln!("held for {hold:?}, max_hold {max_hold:?}: {writes:.2} writes for each handover");
        assert!(writes <= AT_MOST, "held for {hold:?}: {writes} writes for each handover");
    });
    join_all(cases).await;
}

#[tokio::test]
async fn a_free_lock_is_acquired_by_one_command_without_a_change_stream() {
    let (cluster, commands) = counted().await;
    let locks = cluster.server().await;
    commands.take();
    let guard = locks.acquire(&key("a"), Wait::until_acquired()).await.unwrap();
    assert!(locks.health().wakeups.is_empty());
    guard.release().await.unwrap();
    sleep(A_WHILE).await;
    assert_eq!(commands.take(), ["findAndModify", "delete"]);
    assert!(locks.health().wakeups.is_empty());
}

#[tokio::test]
async fn two_servers_with_a_hundred_waiters_each_serve_all_at_a_constant_cost() {
    const EACH: usize = 100;
    const AT_MOST: f64 = 10.0;
    let (cluster, commands) = counted().await;
    let (one, other) = (cluster.server().await, cluster.server().await);
    let held = one.acquire(&key("a"), Wait::no()).await.unwrap();
    let mut all = Vec::new();
    for _ in 0..EACH {
        for locks in [&one, &other] {
            all.push(waiting(locks, &key("a")).await);
        }
    }
    is_told(&one, &commands).await;
    held.release().await.unwrap();
    let order = all_served(all, Duration::ZERO).await;
    assert_eq!(order.len(), 2 * EACH);
    for server in 0..2 {
        let of_it = order.iter().copied().filter(|n| n % 2 == server);
        assert!(of_it.is_sorted(), "in each process the order of arrival: {order:?}");
    }
    let each = commands.take().len() as f64 / order.len() as f64;
    eprintln!("2 x {EACH} wait on two servers: {each:.2} commands for each handover");
    assert!(each <= AT_MOST, "{each} commands for each handover");
}

/// The first waiter checks once more after it has opened the stream, and then waits to be told. As long
/// as nothing happens to this document, it sends nothing.
#[tokio::test]
async fn a_waiter_that_is_told_sends_no_queries() {
    let (cluster, commands) = counted().await;
    let locks = cluster.server().await;
    let _held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
    let waiting = waiting(&locks, &key("a")).await;
    is_told(&locks, &commands).await;
    let elsewhere = cluster.uncounted().await.server().await;
    let other = elsewhere.acquire(&key("b"), Wait::no()).await.unwrap();
    other.release().await.unwrap();
    sleep(Duration::from_secs(2)).await;
    let sent: Vec<_> = commands.take().into_iter().filter(|it| it != "getMore").collect();
    assert!(sent.is_empty(), "{sent:?}");
    assert!(!waiting.is_finished());
}
