//! Handovers within a process, while waiters elsewhere wait for the same lock.

use super::*;

on_each_store! {
    async fn a_waiter_elsewhere_is_let_in_although_waiters_keep_coming_here(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        let mut busy = JoinSet::new();
        for _ in 0..4 {
            let locks = one.clone();
            busy.spawn(async move {
                loop {
                    let guard = locks.acquire(&key("a"), Wait::until_acquired()).await.unwrap();
                    guard.release().await.unwrap();
                }
            });
        }
        eventually("they are at it", async || one.inspect(&key("a")).await.unwrap().is_some()).await;
        for _ in 0..3 {
            let key = key("a");
            let acquire = other.acquire(&key, Wait::until_acquired());
            in_time("the waiter elsewhere is let in", acquire).await.unwrap().release().await.unwrap();
        }
    }
}
