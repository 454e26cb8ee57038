//! An application server whose machine stands still, again and again: what it does before and after.

use std::time::{Duration, Instant};

use actix_doclock::{Aid, Holder, LockKey, Lockable, Named, TryAcquire, Wait};
use futures_util::future::join_all;

use super::{Fair, Fenced, Plain, Server};

/// So long that no renewal is due by itself.
const LONG: Duration = Duration::from_secs(3_000);
/// How many locks it takes at once, so that they share commands.
pub(crate) const TOGETHER: usize = 8;

/// The locks that a round takes after the standstill.
pub(crate) fn taken(round: usize) -> Vec<LockKey> {
    let key = |collection, id: &str| LockKey::new(collection, format!("{round}{id}")).unwrap();
    let together = (0..TOGETHER).map(|n| key(Plain::COLLECTION, &format!("together{n}")));
    let single = [
        key(Plain::COLLECTION, "free"),
        key(Fenced::COLLECTION, "free"),
        key(Plain::COLLECTION, "shared"),
        key(Fair::COLLECTION, "waits"),
        key(Plain::COLLECTION, "handed"),
    ];
    single.into_iter().chain(together).collect()
}

/// The lock of the guard that the test makes expire during the standstill.
pub(crate) fn guarded(round: usize) -> LockKey {
    LockKey::new(Named::COLLECTION, format!("{round}guarded")).unwrap()
}

pub(super) async fn run(server: &Server, rounds: usize) {
    let locks = &server.locks;
    for round in 0..rounds {
        let [free, fenced, shared, waits, handed, together @ ..] = &taken(round)[..] else {
            unreachable!()
        };
        let job = locks.job("before").ttl(LONG);
        let guard = job.acquire(&guarded(round), Wait::no()).await.unwrap();
        let lost = guard.lost();
        // The release hands this lock over to the waiter. (The job's lease outlasts the standstill.)
        let held = job.acquire(handed, Wait::no()).await.unwrap();
        let waiting = tokio::spawn({
            let (locks, handed) = (locks.clone(), handed.clone());
            async move { locks.acquire(&handed, Wait::until_acquired()).await.unwrap() }
        });
        let began = Instant::now();
        server.history.say(format!("ready {round}"));
        server.told(&format!("go {round}")).await;
        server.history.say(format!("clock {round} {}", began.elapsed().as_millis()));

        let alice = async |key: LockKey| {
            let granted = locks.lock_for_session(&key, &Aid::new(), &Holder::new("alice")).await;
            assert!(matches!(granted, Ok(TryAcquire::Granted(_))), "{granted:?}");
        };
        alice(free.clone()).await;
        alice(fenced.clone()).await;
        join_all(together.iter().cloned().map(&alice)).await;
        let after = locks.job("after");
        let _reader = after.acquire_shared(shared, Wait::no()).await.unwrap();
        let _fair = after.acquire(waits, Wait::until_acquired()).await.unwrap();
        held.release().await.unwrap();
        let _handed = waiting.await.unwrap();
        server.history.say(format!("done {round}"));
        server.told(&format!("look {round}")).await;
        lost.await;
        server.history.say(format!("lost {round}"));
    }
}
