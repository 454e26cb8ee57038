//! Limits on the number of waiters.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use actix_doclock::limits::Limits;
use futures_util::FutureExt;
use tokio::{sync::Semaphore, time::advance};

use super::*;
use crate::rig::paused::Paused;

/// That many calls that wait for a document, each in its own task, and are in the queue.
async fn wait(locks: &LockManager, jobs: &[Job], key: &LockKey) -> JoinSet<LockGuard> {
    let (mut all, before) = (JoinSet::new(), locks.health().waiting);
    for job in jobs {
        let (job, key) = (job.clone(), key.clone());
        all.spawn(async move { job.acquire(&key, Wait::until_acquired()).await.unwrap() });
    }
    eventually("they wait", async || locks.health().waiting == before + jobs.len()).await;
    all
}

on_each_store! {
    async fn a_waiter_beyond_the_limit_is_refused_but_a_free_lock_is_granted(cluster: Cluster) {
        const MOST: usize = 3;
        let limits = Limits { waiters: MOST, ..Limits::default() };
        let locks = cluster.server_with(|settings| settings.limits(limits)).await;
        let held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        let also_held = locks.acquire(&key("b"), Wait::no()).await.unwrap();
        let jobs: Vec<_> = (0..MOST).map(|n| locks.job(n.to_string())).collect();
        let mut all = wait(&locks, &jobs, &key("a")).await;
        // Both behind other waiters, and as the first waiter.
        for key in [key("a"), key("b")] {
            let refused = in_time("an answer", locks.acquire(&key, Wait::until_acquired())).await;
            let Err(LockError::TooManyWaiters { limit, per_session, .. }) = refused else {
                panic!("{refused:?}")
            };
            assert_eq!((limit, per_session), (MOST, false));
            let refused = locks.acquire(&key, Wait::no()).await;
            assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
        }
        drop(locks.acquire(&key("free"), Wait::until_acquired()).await.unwrap());
        eventually("the refused waiter is gone", async || locks.health().waiting == MOST).await;
        // There is room again as soon as a waiter has left.
        held.release().await.unwrap();
        let held = in_time("one is let in", all.join_next()).await.unwrap().unwrap();
        let mut next = wait(&locks, &jobs[..1], &key("b")).await;
        drop((held, also_held));
        drop(in_time("it is let in", next.join_next()).await.unwrap().unwrap());
        while let Some(guard) = in_time("the others are let in too", all.join_next()).await {
            drop(guard.unwrap());
        }
        assert_eq!(locks.health().waiting, 0);
    }

    async fn a_job_may_wait_for_more_than_a_session(cluster: Cluster) {
        let limits = Limits { waiters_per_session: 1, ..Limits::default() };
        let locks = cluster.server_with(|settings| settings.limits(limits)).await;
        let holder = locks.job("holder");
        let keys: Vec<_> = (0..20).map(|n| key(&n.to_string())).collect();
        let held = holder.acquire_all(keys.clone(), Wait::no()).await.unwrap();
        let job = locks.job("takes them all at once");
        let mut all = JoinSet::new();
        for key in keys {
            let job = job.clone();
            all.spawn(async move { job.acquire(&key, Wait::until_acquired()).await.unwrap() });
        }
        eventually("it waits", async || locks.health().waiting == 20).await;
        held.release().await.unwrap();
        drop(in_time("it has them all", all.join_all()).await);
    }
}

/// Each call that waits has such a future, so a crowd of ten thousand takes less than 50 MB for them.
#[tokio::test]
async fn the_future_of_a_waiter_is_small() {
    let locks = LockManager::builder(MemoryStore::new()).build().await.unwrap();
    let key = key("1");
    let size = size_of_val(&locks.acquire(&key, Wait::until_acquired()));
    assert!(size < 5_000, "{size} bytes");
}

/// Otherwise most claims of a crowd would wait for a connection until their deadline, and be repeated.
#[tokio::test(start_paused = true)]
async fn a_crowd_of_waiters_for_many_documents_asks_a_few_at_a_time() {
    const CROWD: usize = 2_000;
    const AT_ONCE: usize = 256;
    let (gate, asked) = (Arc::new(Semaphore::new(10)), Arc::new(AtomicUsize::new(0)));
    let store = Paused::new(MemoryStore::new(), {
        let (gate, asked) = (Arc::clone(&gate), Arc::clone(&asked));
        move || {
            let gate = Arc::clone(&gate);
            asked.fetch_add(1, Relaxed);
            async move { gate.acquire().await.unwrap().forget() }.boxed()
        }
    });
    let locks = LockManager::builder(store).ttl(TTL).deadline(NO_DEADLINE).without_reaper();
    let locks = locks.build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    gate.forget_permits(10);
    let before = asked.load(Relaxed);
    let mut all = JoinSet::new();
    for n in 0..CROWD {
        let (locks, key) = (locks.clone(), key(&n.to_string()));
        all.spawn(async move { locks.acquire(&key, Wait::until_acquired()).await.unwrap() });
    }
    let have_asked = async || {
        for _ in 0..1_000 {
            yield_now().await;
        }
        asked.load(Relaxed) - before
    };
    assert_eq!(have_asked().await, AT_ONCE);
    // Without an answer, these do not keep the others from asking for long.
    advance(Duration::from_millis(501)).await;
    assert_eq!(have_asked().await, 2 * AT_ONCE);
    // A waiter whose time is over before its turn asks once, and is given the free lock.
    let impatient = {
        let locks = locks.clone();
        let wait = Wait::for_at_most(Duration::from_millis(100));
        tokio::spawn(async move { locks.acquire(&key("impatient"), wait).await })
    };
    assert_eq!(have_asked().await, 2 * AT_ONCE);
    gate.add_permits(2 * CROWD + 2);
    let late = impatient.await.unwrap().expect("the lock is free");
    let guards = in_time("all get their locks", all.join_all()).await;
    assert_eq!((guards.len(), asked.load(Relaxed) - before), (CROWD, 2 * CROWD + 2));
    drop(late);
}
