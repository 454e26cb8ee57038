//! Watching: which events are reported, by whom they were caused, and the fallback if the store reports
//! nothing.

use actix_doclock::{Actor, Aid, Holder, Lock, LockEvent, LockEvents, TryAcquire};

use super::*;
use crate::rig;

async fn age(cluster: &Cluster, id: &str, by: Duration) {
    match cluster {
        Cluster::Memory(store) => store.age(&key(id), by),
        Cluster::Mongo(database) => rig::age(database, &key(id), by).await,
    }
}

/// The next event of this document: its name, its holder, and who took the lock for which reason.
async fn next_on(events: &mut LockEvents, id: &str) -> (String, String, Option<(String, String)>) {
    let next = async {
        loop {
            let event = events.next().await.expect("it goes on");
            let Some(lock) = event.lock().filter(|lock| lock.key == key(id)) else { continue };
            let taken = match &*event {
                LockEvent::Broken(_, taken) => Some((taken.by.clone(), taken.reason.clone())),
                _ => None,
            };
            let holder = lock.holder.as_ref().map_or("?", |holder| &holder.label);
            return (event.name().to_owned(), holder.to_owned(), taken);
        }
    };
    in_time(&format!("an event of {id}"), next).await
}

async fn hears(events: &mut LockEvents, id: &str, name: &str, holder: &str) {
    assert_eq!(next_on(events, id).await, (name.to_owned(), holder.to_owned(), None));
}

/// Waits until the server watches, so that all later events are seen.
async fn looks_on(locks: &LockManager) -> LockEvents {
    let mut events = locks.events();
    for what in ["the first of all", "and when the watch is open"] {
        let event = in_time(what, events.next()).await.expect("it goes on");
        assert!(matches!(*event, LockEvent::Resync), "{event:?}");
    }
    events
}

async fn take(locks: &LockManager, id: &str, aid: &Aid, label: &str) -> Lock {
    match locks.lock_for_session(&key(id), aid, &Holder::new(label)).await.unwrap() {
        TryAcquire::Granted(lock) => lock,
        other => panic!("not granted: {other:?}"),
    }
}

/// Every possible event of a lock, watched on one server and caused on another. `broken` is the name of
/// a break there.
async fn every_event_is_reported(cluster: &Cluster, broken: &str) {
    let policy = |settings: LockManagerBuilder| settings.break_policy(|_, _| true);
    let (here, there) = (cluster.server().await, cluster.server_with(policy).await);
    let lock = take(&there, "before", &Aid::new(), "old").await;
    let mut events = looks_on(&here).await;

    let (alice, bob) = (Aid::new(), Aid::new());
    let a = take(&there, "a", &alice, "alice").await;
    hears(&mut events, "a", "acquired", "alice").await;
    there.renew(&alice).await.unwrap();
    there.release(&a).await.unwrap();
    hears(&mut events, "a", "released", "alice").await;
    take(&there, "a", &bob, "bob").await;
    hears(&mut events, "a", "acquired", "bob").await;
    there.end_session(&bob).await.unwrap();
    hears(&mut events, "a", "session_ended", "bob").await;

    take(&there, "idle", &alice, "alice").await;
    hears(&mut events, "idle", "acquired", "alice").await;
    age(cluster, "idle", TTL).await;
    there.sweep().await.unwrap();
    hears(&mut events, "idle", "expired", "alice").await;

    let seen = take(&there, "b", &alice, "alice").await;
    hears(&mut events, "b", "acquired", "alice").await;
    there.break_lock(&seen, &Actor::new("root"), "on holiday").await.unwrap();
    let by = (broken == "broken").then(|| ("root".to_owned(), "on holiday".to_owned()));
    assert_eq!(next_on(&mut events, "b").await, (broken.to_owned(), "alice".to_owned(), by));

    // The lock existed before the watch began.
    there.release(&lock).await.unwrap();
    hears(&mut events, "before", "released", "old").await;
}

on_each_store! {
    async fn every_event_of_a_lock_on_any_server_is_reported(cluster: Cluster) {
        every_event_is_reported(&cluster, "broken").await;
    }

    async fn streams_end_when_they_are_closed_and_no_new_one_is_opened(cluster: Cluster) {
        let locks = cluster.server().await;
        let mut open = looks_on(&locks).await;
        locks.begin_shutdown();
        assert!(in_time("the end", open.next()).await.is_none());
        assert!(in_time("the end of a new one", locks.events().next()).await.is_none());

        let locks = cluster.server().await;
        let mut open = looks_on(&locks).await;
        locks.shutdown().await;
        assert!(in_time("the end", open.next()).await.is_none());
    }

    async fn each_reader_is_reported_separately(cluster: Cluster) {
        let locks = cluster.server().await;
        let mut events = looks_on(&locks).await;
        let [one, two] = ["one", "two"].map(|label| locks.job(label));
        let first = one.acquire_shared(&key("a"), Wait::no()).await.unwrap();
        hears(&mut events, "a", "acquired", "one").await;
        let second = two.acquire_shared(&key("a"), Wait::no()).await.unwrap();
        hears(&mut events, "a", "acquired", "two").await;
        first.release().await.unwrap();
        hears(&mut events, "a", "released", "one").await;
        second.release().await.unwrap();
        hears(&mut events, "a", "released", "two").await;
    }
}

/// The manager drops the events, so that one store shows it.
#[tokio::test]
async fn a_slow_listener_is_told_to_resync() {
    let cluster = Cluster::memory().await;
    let locks = cluster.server().await;
    let mut slow = looks_on(&locks).await;
    let mut quick = locks.events();
    let alice = Aid::new();
    for _ in 0..600 {
        let lock = take(&locks, "a", &alice, "alice").await;
        hears(&mut quick, "a", "acquired", "alice").await;
        locks.release(&lock).await.unwrap();
        hears(&mut quick, "a", "released", "alice").await;
    }
    let first = in_time("an event", slow.next()).await.unwrap();
    assert!(matches!(*first, LockEvent::Resync), "{first:?}");
}

/// A standalone server reports no changes, so the locks are listed. Only who broke a lock elsewhere is
/// not known.
#[tokio::test]
async fn without_a_replica_set_all_events_are_reported_a_little_later() {
    every_event_is_reported(&Cluster::standalone().await, "released").await;
}
