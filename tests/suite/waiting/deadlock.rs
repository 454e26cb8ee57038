//! Waiters that would wait for each other forever are found, and no others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;

async fn waits(job: &Job, key: LockKey) -> JoinHandle<Result<LockGuard, LockError>> {
    let job = job.clone();
    let waiting = tokio::spawn(async move { job.acquire(&key, Wait::until_acquired()).await });
    sleep(A_WHILE).await;
    assert!(!waiting.is_finished(), "it waits");
    waiting
}

on_each_store! {
    async fn a_circle_of_three_is_found_and_the_refused_job_goes_on_after_a_release(cluster: Cluster) {
        let locks = cluster.server().await;
        let jobs = ["a", "b", "c"].map(|name| locks.job(name));
        let mut held = Vec::new();
        for (job, id) in jobs.iter().zip(["a", "b", "c"]) {
            held.push(job.acquire(&key(id), Wait::no()).await.unwrap());
        }
        let first = waits(&jobs[0], key("b")).await;
        let second = waits(&jobs[1], key("c")).await;
        let refused = in_time("refused", jobs[2].acquire(&key("a"), Wait::until_acquired())).await;
        assert!(matches!(refused, Err(LockError::WouldDeadlock { .. })), "{refused:?}");

        drop(held.pop());
        let again = jobs[2].clone();
        let again = tokio::spawn(async move { again.acquire(&key("a"), Wait::until_acquired()).await });
        let c = in_time("c is passed on", second).await.unwrap().unwrap();
        drop((c, held.pop()));
        let b = in_time("b is passed on", first).await.unwrap().unwrap();
        drop((b, held));
        drop(in_time("and a", again).await.unwrap().unwrap());
    }

    async fn a_chain_is_no_circle(cluster: Cluster) {
        let locks = cluster.server().await;
        let jobs: Vec<_> = (0..10).map(|n| locks.job(n.to_string())).collect();
        let ids: Vec<_> = (0..10).map(|n| key(&n.to_string())).collect();
        let mut held: HashMap<_, _> = HashMap::new();
        for n in 0..10 {
            held.insert(n, jobs[n].acquire(&ids[n], Wait::no()).await.unwrap());
        }
        let mut waiting = Vec::new();
        for n in 1..10 {
            // Each waits for its predecessor, and one more waits for the same lock as another waiter.
            waiting.push(waits(&jobs[n], ids[n - 1].clone()).await);
        }
        drop(held.remove(&0));
        for (n, waiting) in waiting.into_iter().enumerate() {
            let guard = in_time("it is let in", waiting).await.unwrap().unwrap();
            drop((guard, held.remove(&(n + 1))));
        }
    }

    async fn a_circle_between_servers_lasts_until_a_wait_is_over(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        let (here, there) = (one.job("here"), other.job("there"));
        let _a = here.acquire(&key("a"), Wait::no()).await.unwrap();
        let b = there.acquire(&key("b"), Wait::no()).await.unwrap();
        let waiting = waits(&here, key("b")).await;
        let refused = there.acquire(&key("a"), Wait::for_at_most(A_WHILE)).await;
        assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
        drop(b);
        drop(in_time("the other one goes on", waiting).await.unwrap().unwrap());
    }

    // One job that waits twice at the same time, so that a grant closes the circle, not a wait.
    async fn a_circle_that_a_grant_closes_is_found(cluster: Cluster) {
        let locks = cluster.server().await;
        let (twice, once) = (locks.job("twice"), locks.job("once"));
        let in_the_way = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        let b = once.acquire(&key("b"), Wait::no()).await.unwrap();
        let for_a = waits(&twice, key("a")).await;
        let then_a = waits(&once, key("a")).await;
        let for_b = waits(&twice, key("b")).await;
        drop(in_the_way);
        let a = in_time("the first one is let in", for_a).await.unwrap().unwrap();
        let refused = in_time("the second one is refused", then_a).await.unwrap();
        assert!(matches!(refused, Err(LockError::WouldDeadlock { .. })), "{refused:?}");
        drop(b);
        drop(in_time("and the first one goes on", for_b).await.unwrap().unwrap());
        drop(a);
    }

    async fn jobs_that_take_two_in_any_order_get_both_or_are_refused(cluster: Cluster) {
        let seed = uuid_seed();
        eprintln!("seed {seed}");
        let locks = cluster.server().await;
        let taken: Arc<[AtomicBool; 5]> = Arc::default();
        let (both, refused) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let until = Instant::now() + Duration::from_secs(3);
        let mut all = JoinSet::new();
        for n in 0..16 {
            let (job, taken) = (locks.job(n.to_string()), Arc::clone(&taken));
            let (both, refused) = (Arc::clone(&both), Arc::clone(&refused));
            let mut random = seed.wrapping_add(n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            all.spawn(async move {
                while Instant::now() < until {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let first = (random % 5) as usize;
                    let second = (first + 1 + (random / 5 % 4) as usize) % 5;
                    let mut held = Vec::new();
                    for which in [first, second] {
                        let (key, wait) = (key(&which.to_string()), Wait::until_acquired());
                        match in_time("an answer", job.acquire(&key, wait)).await {
                            Ok(guard) => {
                                assert!(!taken[which].swap(true, Ordering::SeqCst), "twice");
                                held.push((which, guard));
                            }
                            Err(LockError::WouldDeadlock { .. }) => break,
                            Err(e) => panic!("{e:?}"),
                        }
                    }
                    let counter = if held.len() == 2 { &both } else { &refused };
                    counter.fetch_add(1, Ordering::SeqCst);
                    yield_now().await;
                    for (which, guard) in held {
                        taken[which].store(false, Ordering::SeqCst);
                        guard.release().await.unwrap();
                    }
                }
            });
        }
        in_time("nobody hangs", all.join_all()).await;
        eprintln!("both {both:?}, refused {refused:?}");
        assert!(both.load(Ordering::SeqCst) > 0);
        assert!(refused.load(Ordering::SeqCst) > 0, "some circles were found");
    }
}

/// As long as a chain of sessions that an attacker could build.
#[tokio::test]
async fn a_chain_of_three_thousand_breaks_nothing_and_delays_nobody() {
    const LENGTH: usize = 3_000;
    let locks = Cluster::memory().await.server().await;
    let ids: Vec<_> = (0..LENGTH).map(|n| key(&n.to_string())).collect();
    let jobs: Vec<_> = (0..LENGTH).map(|n| locks.job(n.to_string())).collect();
    let mut held = HashMap::new();
    for n in 0..LENGTH {
        held.insert(n, jobs[n].acquire(&ids[n], Wait::no()).await.unwrap());
    }
    let mut all = JoinSet::new();
    for (n, job) in jobs.iter().enumerate().skip(1) {
        let (job, before) = (job.clone(), ids[n - 1].clone());
        all.spawn(async move { job.acquire(&before, Wait::until_acquired()).await });
    }
    eventually("all wait", async || locks.health().waiting == LENGTH - 1).await;
    // The chain is longer than a search, so this waiter waits until its time is over.
    let closes = jobs[0].acquire(&ids[LENGTH - 1], Wait::for_at_most(A_WHILE));
    let refused = in_time("an answer", closes).await;
    assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
    // A short circle in parallel is still found.
    let (one, other) = (locks.job("one"), locks.job("other"));
    let _a = one.acquire(&key("a"), Wait::no()).await.unwrap();
    let _b = other.acquire(&key("b"), Wait::no()).await.unwrap();
    all.spawn(async move { one.acquire(&key("b"), Wait::until_acquired()).await });
    eventually("it waits, too", async || locks.health().waiting == LENGTH).await;
    let refused = in_time("refused", other.acquire(&key("a"), Wait::until_acquired())).await;
    assert!(matches!(refused, Err(LockError::WouldDeadlock { .. })), "{refused:?}");
    all.abort_all();
}

fn uuid_seed() -> u64 {
    let id = actix_doclock::Aid::new();
    id.as_str().bytes().fold(0, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(byte.into()))
}
