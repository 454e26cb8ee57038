//! The memory of an application server with many sessions and waiters.

use std::time::Duration;

use actix_doclock::{LockManager, MongoStore, Wait};
use futures_util::{StreamExt, stream};
use tokio::time::sleep;

use super::{
    Set, Size,
    costs::key,
    meter, on_a_thread,
    site::{self, Person},
};
use crate::{count, measures::fresh, ours::Page};

const MB: f64 = 1e6;
const HOUR: Duration = Duration::from_secs(3_600);

pub async fn measure(set: &Set, size: Size) {
    let (sessions, waiters) = size.pick((2_000, 200), (100_000, 10_000));
    let database = fresh(&set.mongo).await;
    site::write_documents(&database, sessions).await;
    // A manager forgets a session a third of the ttl after its last renewal. Here none should be forgotten.
    let locks = LockManager::builder(MongoStore::new(&database)).ttl(HOUR);
    let locks = locks.max_waiters(1_000_000).build().await.unwrap();
    locks.register::<Page>().await.unwrap();
    let own = locks.clone();
    on_a_thread(move || async move {
        let locks = own;
        let site = site::open(&locks).await;
        // What exists once: connections, the tables of the application.
        let warm = (0..64).map(|n| {
            let mut person = Person::new(&site, site::name(n));
            async move {
                assert_eq!(person.edit().await, 200);
                assert_eq!(person.log_out().await, 204);
            }
        });
        stream::iter(warm).buffer_unordered(64).collect::<Vec<()>>().await;
        sleep(Duration::from_secs(1)).await;

        let resident = meter::own_memory();
        count::start();
        let say = |what: &str| {
            let allocated = count::held() as f64;
            let grown = meter::own_memory() as f64 - resident as f64;
            println!(
                "[one] memory with {what}: allocated {:.2} MB, resident {:.2} MB more than {:.2} MB",
                allocated / MB,
                grown / MB,
                resident as f64 / MB
            );
        };
        // The cookies are with the browsers.
        let arrivals = (0..sessions).map(|n| {
            let mut person = Person::new(&site, site::name(n));
            async move { assert_eq!(person.edit().await, 200) }
        });
        stream::iter(arrivals).buffer_unordered(64).for_each(|()| async {}).await;
        sleep(Duration::from_secs(1)).await;
        say(&format!("{sessions} sessions with a lock each"));
        let before = count::held();

        let waiting: Vec<_> = (0..waiters)
            .map(|n| {
                let (locks, key) = (locks.clone(), key(n * 10 % sessions));
                tokio::task::spawn_local(async move {
                    let _ = locks.acquire(&key, Wait::until_acquired()).await;
                })
            })
            .collect();
        sleep(size.pick(Duration::from_secs(3), Duration::from_secs(20))).await;
        assert_eq!(locks.health().waiting, waiters);
        say(&format!("{waiters} waiters of the manager as well"));
        println!("  each: {:.0} B", (count::held() - before) as f64 / waiters as f64);
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
        sleep(Duration::from_secs(2)).await;
        assert_eq!(locks.health().waiting, 0);
        say("these waiters gone");
        let before = count::held();

        let waiting: Vec<_> = (0..waiters)
            .map(|n| {
                let mut person = Person::new(&site, site::name(n * 10 % sessions));
                tokio::task::spawn_local(async move { person.wait(600_000).await })
            })
            .collect();
        sleep(size.pick(Duration::from_secs(3), Duration::from_secs(20))).await;
        assert_eq!(locks.health().waiting, waiters);
        say(&format!("{waiters} waiting requests instead"));
        println!("  each: {:.0} B", (count::held() - before) as f64 / waiters as f64);
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
        sleep(Duration::from_secs(2)).await;
        count::stop();
    })
    .await;
    locks.shutdown().await;
    let _ = database.drop().await;
}
