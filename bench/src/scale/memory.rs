//! The memory of an application server with many sessions and waiters.

use std::time::Duration;

use actix_doclock::{LockManager, MongoStore, Wait, limits::Limits};
use futures_util::{StreamExt, stream};
use tokio::time::sleep;

use super::{
    Set, Size,
    costs::key,
    on_a_thread,
    site::{self, Person},
};
use crate::{count, measures::fresh, meter, ours::Page};

const MB: f64 = 1e6;
/// How long after one waiter the next one comes, unless all come at once.
const APART: Duration = Duration::from_millis(5);
const HOUR: Duration = Duration::from_secs(3_600);

pub async fn measure(set: &Set, size: Size) {
    let (sessions, waiters) = size.pick((2_000, 200), (100_000, 10_000));
    let database = fresh(&set.mongo).await;
    site::write_documents(&database, sessions).await;
    // A manager forgets a session a third of the ttl after its last renewal. Here none should be forgotten.
    let locks = LockManager::builder(MongoStore::new(&database)).ttl(HOUR);
    let limits = Limits { waiters: 1_000_000, ..Limits::default() };
    let locks = locks.limits(limits).build().await.unwrap();
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

        // A hundred waiters for each document, then one for each, and then one for each at the same moment.
        for (documents, apart) in
            [(waiters / 100, APART), (waiters, APART), (waiters, Duration::ZERO)]
        {
            for is_request in [false, true] {
                let before = count::held();
                let waiting: Vec<_> = (0..waiters)
                    .map(|n| {
                        let of = n % documents * 10 % sessions;
                        let (locks, key) = (locks.clone(), key(of));
                        let mut person = Person::new(&site, site::name(of));
                        tokio::task::spawn_local(async move {
                            sleep(apart * n as u32).await;
                            if is_request {
                                person.wait(600_000).await;
                            } else {
                                drop(person);
                                let _ = locks.acquire(&key, Wait::until_acquired()).await;
                            }
                        })
                    })
                    .collect();
                let what = if is_request { "waiting requests" } else { "waiters of the manager" };
                let how = if apart.is_zero() { ", all at once" } else { "" };
                let what = format!("{waiters} {what} for {documents} documents{how}");
                sleep(apart * waiters as u32).await;
                for after in size.pick([1, 3], [5, 20]) {
                    sleep(Duration::from_secs(after)).await;
                    println!("  health says {} wait", locks.health().waiting);
                    say(&format!("{what}, {after} s later"));
                    println!("  each: {:.0} B", (count::held() - before) as f64 / waiters as f64);
                }
                // A task that has ended keeps its memory until its handle is dropped.
                waiting.into_iter().for_each(|waiter| waiter.abort());
                for after in size.pick([1, 3], [2, 15]) {
                    sleep(Duration::from_secs(after)).await;
                    assert_eq!(locks.health().waiting, 0);
                    say(&format!("them gone, {after} s later"));
                }
            }
        }
        count::stop();
    })
    .await;
    locks.shutdown().await;
    let _ = database.drop().await;
}
