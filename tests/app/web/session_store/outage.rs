//! The database does not answer.

use std::time::Instant;

use super::*;
use crate::rig::proxy::Proxy;

const DEADLINE: Duration = Duration::from_secs(1);

async fn fails_in_time<T, E>(verb: &str, operation: impl Future<Output = Result<T, E>>) {
    let began = Instant::now();
    assert!(operation.await.is_err(), "{verb}");
    assert!(began.elapsed() < rig::BY_THE_DEADLINE, "{verb} took {:?}", began.elapsed());
}

#[actix_web::test]
async fn every_verb_is_an_error_within_the_deadline_and_works_again_afterwards() {
    let mongod = rig::mongod::local_replica_set().await;
    let database = rig::client(&mongod.uri()).await.database(&rig::fresh_name());
    put_notes(&database).await;
    // Prepares the collections without a tight deadline.
    let unhurried = Server::on(&database).await;
    let proxy = Proxy::start(mongod.port());
    let through = rig::patient_client(&proxy.uri()).await.database(database.name());
    let hasty = |locks: LockManagerBuilder| locks.deadline(DEADLINE);
    let sessions = |sessions: MongoSessionStoreBuilder| sessions.deadline(DEADLINE);
    let server = Server::with(&through, hasty, sessions).await;
    let (session, aid) = unhurried.session("alice", "a").await;
    let app = server.app().await;
    let (alice, visitor) = (browser_with(&app, &session), Browser::new(&app));
    assert_eq!(alice.get("/state").await.json(), json!({ "name": "alice" }));

    proxy.blackhole();
    let (store, other, began) = (&server.sessions, session_key("x".repeat(64)), Instant::now());
    let (state, nobody) = (|| state_of("alice", &Aid::new()), Aid::new());
    let (loads, creates, ..) = join!(
        alice.get("/state"),
        visitor.post("/login/bob"),
        fails_in_time("load", store.load(&session)),
        fails_in_time("save", store.save(state(), &DAY)),
        fails_in_time("update", store.update(session_key("x"), state(), &DAY)),
        fails_in_time("update_ttl", store.update_ttl(&session, &DAY)),
        fails_in_time("delete", store.delete(&other)),
        fails_in_time("list_of", store.list_of("alice")),
        fails_in_time("revoke", store.revoke(nobody.as_str())),
        fails_in_time("revoke_all_of", store.revoke_all_of("carol")),
        fails_in_time("sweep", store.sweep()),
    );
    assert!(began.elapsed() < rig::BY_THE_DEADLINE, "{:?}", began.elapsed());
    for answer in [loads, creates] {
        assert_eq!(answer.problem(503)["code"], "store_unavailable");
        assert!(answer.header("retry-after").is_some());
        let text = answer.text().to_lowercase();
        assert!(!text.contains("mongo") && !text.contains("127.0.0.1"), "{text}");
    }
    assert!(!visitor.has_cookie());
    proxy.heal();

    eventually("it works again", async || alice.get("/state").await.status == 200).await;
    assert_eq!(alice.get("/state").await.json(), json!({ "name": "alice" }));
    assert_eq!(server.holder("a").await, aid);
}

/// The driver repeats the command once, and the store repeats it again, but it is still one session.
#[actix_web::test]
async fn a_session_whose_saving_was_answered_late_is_saved_once() {
    let mongod = rig::mongod::local_replica_set().await;
    let proxy = Proxy::start(mongod.port());
    let through = rig::patient_client(&proxy.uri()).await.database(&rig::fresh_name());
    let server = Server::on(&through).await;
    for _ in 0..3 {
        proxy.drop_reply_to("update");
    }
    let state = state_of("alice", &Aid::new());
    let key = server.sessions.save(state.clone(), &DAY).await.unwrap();
    assert_eq!(proxy.fired(), 3);
    assert_eq!(server.load(&key).await, Some(state));
    assert_eq!(records(&through).count_documents(doc! {}).await.unwrap(), 1);
}

/// Without outside help, the store completes a sweep that the outage has interrupted.
#[actix_web::test]
async fn an_end_is_announced_after_the_database_is_back() {
    let mongod = rig::mongod::local_replica_set().await;
    let proxy = Proxy::start(mongod.port());
    let through = rig::patient_client(&proxy.uri()).await.database(&rig::fresh_name());
    const OFTEN: Duration = Duration::from_millis(20);
    let settings = |locks: LockManagerBuilder| locks.reaper_interval(OFTEN).deadline(DEADLINE);
    let sessions =
        |sessions: MongoSessionStoreBuilder| sessions.sweep_interval(OFTEN).deadline(DEADLINE);
    let direct = rig::client(&mongod.uri()).await.database(through.name());
    let unhurried = Server::on(&direct).await;
    let server = Server::with(&through, settings, sessions).await;
    let (_, aid) = unhurried.session("alice", "a").await;
    proxy.cut();
    age(&direct, doc! {}, TWO_DAYS).await;
    proxy.until_fired(1).await;
    proxy.heal();
    let told = || server.heard.so_far().into_iter().chain(unhurried.heard.so_far());
    eventually("it is told", async || told().count() == 1).await;
    assert!(told().all(|ended| ended.aid == aid));
    assert!(!unhurried.is_locked("a").await);
}

/// All connections of the pool break without a word, and TCP does not report that for a quarter of an hour.
#[actix_web::test]
async fn connections_that_died_without_a_word_are_given_up() {
    let mongod = rig::mongod::local_replica_set().await;
    let proxy = Proxy::start(mongod.port());
    let through = rig::client(&proxy.uri()).await.database(&rig::fresh_name());
    let hasty = |sessions: MongoSessionStoreBuilder| sessions.deadline(DEADLINE);
    let server = Server::with(&through, |locks| locks, hasty).await;
    // The connections of the driver's default pool.
    for _ in 0..10 {
        proxy.hold_request("find");
        fails_in_time("list_of", server.sessions.list_of("alice")).await;
    }
    eventually("it works again", async || server.sessions.list_of("alice").await.is_ok()).await;
}
