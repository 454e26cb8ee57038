//! The renewals of many sessions, and of locks that another server has granted.

use std::pin::pin;

use futures_util::future::{Either, join_all, select};

use super::*;
use crate::rig::{
    self,
    app::{eventually, stuck},
    mongod,
};

/// More locks than one command renews in its time.
const PEOPLE: usize = 12;
const LOCKS: usize = 500;
const STUCK: usize = 30;

/// The shortest time left of the locks of this session, in milliseconds.
async fn beat<S>(person: &Browser<'_, S>) -> u64
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    let answer = person.post("/locks/heartbeat").await.json();
    let held = answer["held"].as_array().unwrap();
    assert_eq!(held.len(), LOCKS);
    held.iter().map(|lock| lock["expires_in_ms"].as_u64().unwrap()).min().unwrap()
}

#[actix_web::test]
async fn a_heartbeat_waits_for_its_own_locks_and_for_no_stuck_lock_of_another_session() {
    let database = rig::fresh_database(&mongod::strict_replica_set().await.uri()).await;
    let names = |person: usize| (0..LOCKS).map(move |n| key(&format!("{person}-{n}")));
    let notes = (0..PEOPLE).map(|n| Note { id: format!("{n}-0"), text: String::new() });
    database.collection::<Note>(Note::COLLECTION).insert_many(notes).await.unwrap();
    let start = async || {
        let locks = crate::rig::app::manager_on(&database).without_reaper();
        let locks = locks.ttl(Duration::from_secs(600)).deadline(Duration::from_secs(40));
        let limits = Limits { locks_per_session: 2 * LOCKS, ..Limits::default() };
        let locks = locks.limits(limits).build().await.unwrap();
        locks.register::<Note>().await.unwrap();
        locks
    };
    let locks = start().await;
    let app = serve_with_cookies(&locks).await;
    // To a server that has just started, all sessions are due.
    let restarted = start().await;
    let restarted = serve_with_cookies(&restarted).await;
    let mut people = Vec::new();
    for n in 0..PEOPLE {
        let person = Browser::logged_in(&app, &format!("person{n}")).await;
        assert_eq!(person.post(&format!("/locks/note/{n}-0")).await.status, 201);
        let names: Vec<_> = names(n).collect();
        rig::age(&database, &names[0], Duration::from_secs(300)).await;
        rig::copies_of(&database, &names[0], &names[1..]).await;
        people.push(person.at(&restarted));
    }
    let mut transaction = stuck(&database, &names(7).take(STUCK).collect::<Vec<_>>()).await;
    let unlucky = people.remove(7);
    let waits = pin!(beat(&unlucky));
    let others = pin!(join_all(people.iter().map(beat)));
    let waits = match select(others, waits).await {
        Either::Left((left, waits)) => {
            assert!(left.iter().all(|left| *left > 500_000), "{left:?}");
            waits
        }
        Either::Right(_) => panic!("the heartbeat of the stuck locks was answered first"),
    };
    assert!(waits.await < 500_000, "not renewed");
    transaction.abort_transaction().await.unwrap();
    // The renewal has failed, so the next request tries again.
    eventually("all locks are renewed", async || beat(&unlucky).await > 500_000).await;
}

/// Locks for 3 s, which an old server grants, and a new server with a ttl of a minute.
#[actix_web::test]
async fn a_lock_with_a_shorter_ttl_than_the_servers_is_renewed_in_time() {
    tokio::time::pause();
    for path in ["/plain", "/locks/heartbeat", "/locks/note/a"] {
        for was_here_before in [false, true] {
            let (new, store) = embedded().await;
            let old = LockManager::builder(store.clone()).ttl(Duration::from_secs(3));
            let old = old.build().await.unwrap();
            old.register::<Note>().await.unwrap();
            let (old_app, app) = (serve_with_cookies(&old).await, serve_with_cookies(&new).await);
            let alice = Browser::logged_in(&old_app, "alice").await;
            if was_here_before {
                // A request that names no lock shows nothing of a lock that was taken elsewhere meanwhile.
                if path == "/plain" {
                    continue;
                }
                assert_eq!(alice.at(&app).get("/plain").await.status, 200);
                // Its renewal is over before the lock is taken.
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            let token = alice.post("/note/a").await.token();
            let alice = alice.at(&app);
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let beats = path == "/locks/heartbeat";
                let method = if beats { Method::POST } else { Method::GET };
                assert_eq!(alice.send(alice.request(method, path)).await.status, 200);
            }
            let saved = alice.with_token(Method::PUT, "/note/a", &token).await;
            assert_eq!(saved.status, 200, "{path} {was_here_before}");
        }
    }
}
