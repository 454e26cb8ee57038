//! Requests that wait for a lock of another session.

use std::{future::Future, net::TcpListener, time::Instant};

use actix_doclock::{LockGuard, Wait, health::Wakeup};
use actix_web::HttpServer;
use futures_util::future::join_all;
use mongodb::bson::doc;
use serde_json::json;
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    time::{sleep, timeout},
};

use super::*;
use crate::rig::{app::eventually, client, fresh_database, fresh_name, mongod, proxy::Proxy};

const SOON: Duration = Duration::from_secs(60);
const A_WHILE: Duration = Duration::from_millis(150);

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    timeout(SOON, future).await.expect("nobody waits for so long")
}

/// Holds the lock on a note outside all requests.
async fn hold(locks: &LockManager, id: &str) -> LockGuard {
    locks.job("a job").acquire(&key(id), Wait::no()).await.unwrap()
}

fn long() -> Value {
    json!({ "wait_ms": 30_000 })
}

#[actix_web::test]
async fn a_client_that_wants_to_wait_is_let_in() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let held = hold(&locks, "a").await;
    let release = async {
        sleep(A_WHILE).await;
        held.release().await.unwrap();
        Instant::now()
    };
    let waits = async {
        let answer = alice.post_json("/locks/note/a", long()).await;
        (answer, Instant::now())
    };
    let ((answer, let_in), released) = in_time(async { tokio::join!(waits, release) }).await;
    assert_eq!(answer.status, 201);
    assert!(let_in >= released);
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
}

#[actix_web::test]
async fn a_client_waits_no_longer_than_the_application_lets_it() {
    let (locks, _) = embedded().await;
    let app = serve_with(&locks, |session| session.longest_wait(A_WHILE)).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let _held = hold(&locks, "a").await;
    for wait_ms in [600_000, u64::MAX] {
        let began = Instant::now();
        let wait = json!({ "wait_ms": wait_ms });
        let refused = in_time(alice.post_json("/locks/note/a", wait)).await.problem(423);
        assert_eq!(refused["holder"]["label"], "a job");
        assert!(began.elapsed() >= A_WHILE && began.elapsed() < SOON);
    }
}

/// Like a page that waits for longer than a request can be kept open.
#[actix_web::test]
async fn a_client_that_asks_again_at_once_after_its_wait_keeps_its_place() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let held = hold(&locks, "a").await;
    let order = RefCell::new(Vec::new());
    let alice_waits_twice = async {
        let wait = json!({ "wait_ms": 2 * A_WHILE.as_millis() as u64 });
        alice.post_json("/locks/note/a", wait).await.problem(423);
        let release = async {
            sleep(A_WHILE).await;
            held.release().await.unwrap();
        };
        let (answer, ()) = tokio::join!(alice.post_json("/locks/note/a", long()), release);
        order.borrow_mut().push("alice");
        assert_eq!(answer.status, 201);
        assert_eq!(alice.delete("/locks/note/a").await.status, 204);
    };
    let bob_waits_meanwhile = async {
        sleep(A_WHILE).await;
        assert_eq!(bob.post_json("/locks/note/a", long()).await.status, 201);
        order.borrow_mut().push("bob");
    };
    in_time(async { tokio::join!(alice_waits_twice, bob_waits_meanwhile) }).await;
    assert_eq!(*order.borrow(), ["alice", "bob"]);
}

#[actix_web::test]
async fn an_extractor_waits_as_long_as_configured() {
    let (locks, _) = embedded().await;
    let app = serve_with(&locks, |session| session.wait_for_documents(2 * A_WHILE)).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let held = hold(&locks, "a").await;
    let began = Instant::now();
    in_time(alice.post("/note/a")).await.problem(423);
    assert!(began.elapsed() >= 2 * A_WHILE);

    let app = serve_with(&locks, |session| session.wait_for_documents(SOON)).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let release = async {
        sleep(A_WHILE).await;
        drop(held);
    };
    let (answer, ()) = in_time(async { tokio::join!(alice.post("/note/a"), release) }).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["text"]), (200, &"old".into()));
    answer.token();
    assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"));
}

#[actix_web::test]
async fn a_request_that_is_dropped_while_it_waits_leaves_neither_place_nor_lock() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let held = hold(&locks, "a").await;
    let goes = timeout(A_WHILE, alice.post_json("/locks/note/a", long())).await;
    assert!(goes.is_err(), "the request waits");
    let release = async {
        sleep(A_WHILE).await;
        drop(held);
    };
    let next = bob.post_json("/locks/note/a", long());
    let (answer, ()) = in_time(async { tokio::join!(next, release) }).await;
    assert_eq!(answer.status, 201);
    assert_eq!(bob.delete("/locks/note/a").await.status, 204);
    assert_eq!(holder_of(&locks, "a").await, None);
}

/// By default, when a client closes its connection, actix-web assumes that the client has only finished
/// sending, and carries on.
#[actix_web::test]
async fn a_client_that_disconnects_while_it_waits_leaves_neither_place_nor_lock() {
    let (locks, _) = embedded_with(|settings| settings.ttl(SOON * 100)).await;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let manager = locks.clone();
    let server = HttpServer::new(move || {
        let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
        App::new().wrap(manager.session(session)).configure(routes)
    });
    let server = server.workers(1).listen(listener).unwrap();
    let serves = locks.clone();
    let serves = actix_web::rt::spawn(async move { serves.serve(server).await });
    let held = hold(&locks, "a").await;
    let mut client = TcpStream::connect(address).await.unwrap();
    let body = long().to_string();
    let request = format!(
        "POST /locks/note/a HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
        body.len(),
    );
    client.write_all(request.as_bytes()).await.unwrap();
    eventually("it waits", async || {
        locks.health().wakeups.get(Note::COLLECTION) == Some(&Wakeup::Told)
    })
    .await;
    drop(client);
    sleep(A_WHILE).await;
    held.release().await.unwrap();
    eventually("no lock is left for a client that has gone", async || {
        locks.inspect(&key("a")).await.unwrap().is_none()
    })
    .await;
    serves.abort();
}

#[actix_web::test]
async fn the_holder_does_not_queue_behind_the_waiters() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let token = alice.post("/locks/note/a").await.token();
    let again = async {
        sleep(A_WHILE).await;
        let again = in_time(alice.post_json("/locks/note/a", long())).await;
        assert_eq!((again.status.as_u16(), again.token()), (200, token));
        alice.delete("/locks/note/a").await;
    };
    let (next, ()) = tokio::join!(bob.post_json("/locks/note/a", long()), again);
    assert_eq!(next.status, 201);
}

/// Like two tabs: one of them gets the lock, and so the other one has it too.
#[actix_web::test]
async fn two_waiting_requests_of_a_session_are_let_in_together() {
    for others_between in [false, true] {
        let (locks, _) = embedded().await;
        let app = serve_with_cookies(&locks).await;
        let (alice, bob) =
            (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
        let other_tab = alice.copy();
        let held = hold(&locks, "a").await;
        let after = async |pauses: u32, browser: &Browser<'_, _>| {
            sleep(pauses * A_WHILE).await;
            browser.post_json("/locks/note/a", long()).await
        };
        let between = async {
            if others_between {
                assert_eq!(after(1, &bob).await.status, 201);
            }
        };
        let release = async {
            sleep(3 * A_WHILE).await;
            held.release().await.unwrap();
        };
        let began = Instant::now();
        let tabs = async {
            let (first, second) = tokio::join!(after(0, &alice), after(2, &other_tab));
            assert_eq!((first.status.as_u16(), second.status.as_u16()), (201, 200));
            assert_eq!(first.token(), second.token());
            assert!(began.elapsed() < Duration::from_secs(25), "before the end of the wait");
            alice.delete("/locks/note/a").await;
        };
        in_time(async { tokio::join!(tabs, between, release) }).await;
    }
}

/// The next waiter has not asked about the current holder, but must still know when the holder's lock
/// expires.
#[actix_web::test]
async fn when_a_waiter_that_was_let_in_becomes_idle_the_next_one_is_let_in() {
    let ttl = Duration::from_secs(2);
    let (locks, _) = embedded_with(|settings| settings.ttl(ttl).without_reaper()).await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let held = hold(&locks, "a").await;
    let began = Instant::now();
    let bob = async {
        sleep(A_WHILE).await;
        assert_eq!(bob.post_json("/locks/note/a", long()).await.status, 201);
        began.elapsed()
    };
    let release = async {
        sleep(3 * A_WHILE).await;
        held.release().await.unwrap();
    };
    let alice = alice.post_json("/locks/note/a", long());
    let (alice, waited, ()) = in_time(async { tokio::join!(alice, bob, release) }).await;
    assert_eq!(alice.status, 201);
    assert!(waited >= ttl, "not before the expiry");
}

#[actix_web::test]
async fn a_session_that_ends_while_it_waits_gets_no_lock() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let other_tab = alice.copy();
    let held = hold(&locks, "a").await;
    let logout = async {
        sleep(A_WHILE).await;
        assert_eq!(other_tab.post("/purge").await.status, 204);
        held.release().await.unwrap();
    };
    let waits = alice.post_json("/locks/note/a", long());
    let (answer, ()) = in_time(async { tokio::join!(waits, logout) }).await;
    answer.problem(401);
    assert_eq!(holder_of(&locks, "a").await, None);
}

#[actix_web::test]
async fn a_server_that_is_stopped_sends_its_waiters_to_another_one() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let _held = hold(&locks, "a").await;
    let stop = async {
        sleep(A_WHILE).await;
        locks.shutdown().await;
    };
    let waits = alice.post_json("/locks/note/a", long());
    let (answer, ()) = in_time(async { tokio::join!(waits, stop) }).await;
    assert_eq!(answer.problem(503)["code"], "shutting_down");
    assert!(answer.header("retry-after").is_some());
}

#[actix_web::test]
async fn a_session_and_a_job_that_would_wait_for_each_other_are_refused() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/locks/note/a").await.token();
    let job = locks.job("a job");
    let b = job.acquire(&key("b"), Wait::no()).await.unwrap();
    let circle = async {
        sleep(A_WHILE).await;
        let refused = alice.post_json("/locks/note/b", long()).await.problem(423);
        assert_eq!(
            (&refused["code"], &refused["state"]),
            (&"would_deadlock".into(), &"held".into())
        );
        assert_eq!(refused["holder"]["label"], "a job");
        alice.delete("/locks/note/a").await;
    };
    let key = key("a");
    let waits = job.acquire(&key, Wait::until_acquired());
    let (a, ()) = in_time(async { tokio::join!(waits, circle) }).await;
    drop((a.unwrap(), b));
}

#[actix_web::test]
async fn a_session_with_too_many_waiters_is_refused_and_others_still_wait() {
    let limits = Limits { waiters_per_session: 2, ..Limits::default() };
    let (locks, _) = embedded_with_limits(limits).await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let held = [hold(&locks, "a").await, hold(&locks, "b").await];
    let wait = async |browser: &Browser<'_, _>, note| {
        browser.post_json(&format!("/locks/note/{note}"), long()).await
    };
    let one_too_many = async {
        eventually("they wait", async || locks.health().waiting == 3).await;
        for note in ["a", "b"] {
            let refused = in_time(wait(&alice, note)).await;
            assert_eq!(refused.problem(503)["code"], "too_many_waiters");
            assert_eq!(refused.header("retry-after"), Some("2"));
            // A request that does not wait is told who holds the lock.
            alice.post(&format!("/locks/note/{note}")).await.problem(423);
        }
        drop(held);
    };
    let answers = in_time(async {
        let (a, b) = (wait(&alice, "a"), wait(&alice, "b"));
        let (a, b, bob, ()) = tokio::join!(
            async { (a.await, alice.delete("/locks/note/a").await).0 },
            async { (b.await, alice.delete("/locks/note/b").await).0 },
            wait(&bob, "a"),
            one_too_many
        );
        [a, b, bob]
    });
    assert!(answers.await.iter().all(|answer| answer.status == 201));
    assert_eq!(locks.health().waiting, 0);
}

#[actix_web::test]
async fn the_waiters_of_a_person_are_limited_over_all_sessions() {
    let limits = Limits { waiters_per_session: 1, waiters_per_person: 2, ..Limits::default() };
    let (locks, _) = embedded_with_limits(limits).await;
    let app = serve_with_cookies(&locks).await;
    let alice = [
        Browser::logged_in(&app, "alice").await,
        Browser::logged_in(&app, "alice").await,
        Browser::logged_in(&app, "alice").await,
    ];
    let bob = Browser::logged_in(&app, "bob").await;
    let held = hold(&locks, "a").await;
    let wait = async |browser: &Browser<'_, _>| {
        let granted = browser.post_json("/locks/note/a", long()).await;
        assert_eq!(granted.status, 201, "{}", granted.text());
        browser.delete("/locks/note/a").await;
    };
    let one_too_many = async {
        eventually("they wait", async || locks.health().waiting == 3).await;
        let refused = in_time(alice[2].post_json("/locks/note/a", long())).await;
        assert_eq!(refused.problem(503)["code"], "too_many_waiters");
        drop(held);
    };
    in_time(async { tokio::join!(wait(&alice[0]), wait(&alice[1]), wait(&bob), one_too_many) })
        .await;
    // Whoever has left makes room.
    let held = hold(&locks, "a").await;
    let again = async {
        eventually("they wait", async || locks.health().waiting == 2).await;
        drop(held);
    };
    in_time(async { tokio::join!(wait(&alice[2]), wait(&alice[0]), again) }).await;
}

#[derive(Debug, Serialize, Deserialize)]
struct Ticket {
    #[serde(rename = "_id")]
    id: String,
}

impl Lockable for Ticket {
    type Id = String;
    const COLLECTION: &'static str = "ticket";
    const FAIR: bool = true;
}

/// A queue has a thousand places in total.
#[actix_web::test]
async fn a_session_gets_at_most_sixteen_places_in_a_fair_queue() {
    let database = fresh_database(mongod::shared_replica_set().await.uri()).await;
    let tickets = database.collection::<Ticket>(Ticket::COLLECTION);
    tickets.insert_one(Ticket { id: "a".to_owned() }).await.unwrap();
    let locks = crate::rig::app::manager_on(&database).without_reaper().build();
    let locks = locks.await.unwrap();
    locks.register::<Ticket>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let ticket = LockKey::of::<Ticket>("a".to_owned()).unwrap();
    let held = locks.acquire(&ticket, Wait::no()).await.unwrap();
    let all = join_all((0..40).map(|_| alice.post_json("/locks/ticket/a", long())));
    let release = async {
        eventually("sixteen wait", async || locks.health().waiting == 16).await;
        held.release().await.unwrap();
    };
    let (answers, ()) = in_time(async { tokio::join!(all, release) }).await;
    let refused = answers.iter().filter(|answer| answer.status == 503);
    assert_eq!(refused.count(), 24);
    assert!(answers.iter().all(|answer| [200, 201, 503].contains(&answer.status.as_u16())));
}

/// The last observation of the holder is outdated: another server has released the lock since, and the
/// news is late. There is no circle any more.
#[actix_web::test]
async fn nobody_is_refused_for_a_circle_that_no_longer_exists() {
    let server = mongod::local_replica_set().await;
    let (name, proxy) = (fresh_name(), Proxy::start(server.port()));
    let database = client(&server.uri()).await.database(&name);
    for id in ["a", "b"] {
        let note = Note { id: id.to_owned(), text: "old".to_owned() };
        database.collection::<Note>(Note::COLLECTION).insert_one(&note).await.unwrap();
    }
    let on = async |database| {
        let locks = crate::rig::app::manager_on(&database).without_reaper().build();
        let locks = locks.await.unwrap();
        locks.register::<Note>().await.unwrap();
        locks
    };
    let other = on(database).await;
    let locks = on(client(&proxy.uri()).await.database(&name)).await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/locks/note/a").await.token();
    let job = locks.job("a job");
    let b = job.acquire(&key("b"), Wait::no()).await.unwrap();
    let late = async {
        eventually("it is told", async || {
            locks.health().wakeups.get(Note::COLLECTION) == Some(&Wakeup::Told)
        })
        .await;
        sleep(A_WHILE).await;
        proxy.hold_reply_to("getMore");
        proxy.until_fired(1).await;
        let lock = other.inspect(&key("a")).await.unwrap().unwrap();
        let _ = other.release(&lock).await.unwrap();
        alice.post_json("/locks/note/b", long()).await
    };
    let job_goes_on = async {
        let a = job.acquire(&key("a"), Wait::until_acquired()).await.unwrap();
        drop((a, b));
    };
    let (answer, ()) = in_time(async { tokio::join!(late, job_goes_on) }).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
}
