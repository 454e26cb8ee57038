//! However a session ends, its locks go and its end is announced once, even without any further
//! request.

use futures_util::future::join_all;

use super::*;
use crate::rig::proxy::Proxy;

const OFTEN: Duration = Duration::from_millis(20);

#[actix_web::test]
async fn an_expired_session_loses_its_locks_and_is_announced_without_a_request() {
    let often = |sessions: MongoSessionStoreBuilder| sessions.sweep_interval(OFTEN);
    let server = Server::with(&database().await, |locks| locks.reaper_interval(OFTEN), often).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    let aid = server.holder("a").await;
    let (_, bob) = server.session("bob", "b").await;
    assert_eq!(server.told().await, []);

    age(&server.database, doc! { "user": "alice" }, TWO_DAYS).await;
    eventually("its lock is gone", async || !server.is_locked("a").await).await;
    eventually("it is told", async || !server.heard.so_far().is_empty()).await;
    assert_eq!(server.told().await, [(aid, EndReason::Expired)]);
    assert_eq!(server.heard.so_far()[0].locks, [key("a")]);
    assert_eq!(server.holder("b").await, bob);
    assert_eq!(alice.get("/state").await.json(), json!({}));
}

#[actix_web::test]
async fn without_a_reaper_a_sweep_does_the_same_and_counts_the_sessions() {
    let server = Server::on(&database().await).await;
    let (_, alice) = server.session("alice", "a").await;
    let (_, bob) = server.session("bob", "b").await;
    // This session never went through the wrap.
    server.sessions.save(State::from([("name".into(), "\"alice\"".into())]), &DAY).await.unwrap();
    assert_eq!(server.sessions.sweep().await.unwrap(), 0);
    age(&server.database, doc! { "user": "alice" }, TWO_DAYS).await;
    assert!(server.is_locked("a").await, "no sweep has run yet");
    assert_eq!(server.sessions.sweep().await.unwrap(), 2);
    assert!(!server.is_locked("a").await);
    assert_eq!(server.holder("b").await, bob);
    assert_eq!(server.told().await, [(alice, EndReason::Expired)]);
    assert_eq!(server.sessions.sweep().await.unwrap(), 0);
    assert_eq!(server.told().await.len(), 1);
}

/// More than one batch.
#[actix_web::test]
async fn a_sweep_covers_all_sessions() {
    let server = Server::on(&database().await).await;
    let save = |_| async { server.sessions.save(State::new(), &DAY).await.unwrap() };
    join_all((0..250).map(save)).await;
    age(&server.database, doc! {}, TWO_DAYS).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 250);
}

#[actix_web::test]
async fn a_deleted_session_loses_its_locks_once_no_new_key_can_take_them() {
    let server = Server::on(&database().await).await;
    let (session, alice) = server.session("alice", "a").await;
    server.sessions.delete(&session).await.unwrap();
    assert_eq!(server.load(&session).await, None);
    assert_eq!(server.sessions.sweep().await.unwrap(), 0);
    assert!(server.is_locked("a").await, "it may be on its way to another key");
    age(&server.database, doc! {}, TWO_DAYS).await;
    // A repetition does not start again.
    server.sessions.delete(&session).await.unwrap();
    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
    assert!(!server.is_locked("a").await);
    assert_eq!(server.told().await, [(alice, EndReason::LoggedOut)]);
}

#[actix_web::test]
async fn only_the_fact_of_the_end_is_left_of_an_ended_session() {
    let server = Server::on(&database().await).await;
    let fields = async || {
        let record = records(&server.database).find_one(doc! {}).await.unwrap().unwrap();
        let mut fields: Vec<_> = record.keys().cloned().collect();
        fields.sort();
        fields.join(" ")
    };
    for is_deleted in [true, false] {
        let (session, _) = server.session("alice", "a").await;
        if is_deleted {
            server.sessions.delete(&session).await.unwrap();
            assert_eq!(fields().await, "_id aid by created due ended expires seen user");
        }
        age(&server.database, doc! {}, TWO_DAYS).await;
        assert_eq!(server.sessions.sweep().await.unwrap(), 1);
        assert_eq!(fields().await, "_id created ended expires seen");
        records(&server.database).delete_many(doc! {}).await.unwrap();
    }
}

#[actix_web::test]
async fn a_logout_is_announced_once_although_the_session_store_hears_of_it_too() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    let aid = server.holder("a").await;
    alice.post("/purge").await;
    assert!(!server.is_locked("a").await, "the locks are gone with the answer");
    let logout = [(aid, EndReason::LoggedOut)];
    assert_eq!(server.told().await, logout);
    age(&server.database, doc! {}, TWO_DAYS).await;
    server.sessions.sweep().await.unwrap();
    assert_eq!(server.told().await, logout);
}

#[actix_web::test]
async fn a_cleared_session_is_announced_once_although_its_record_expires_later() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    let aid = server.holder("a").await;
    alice.post("/clear").await;
    assert!(!server.is_locked("a").await);
    age(&server.database, doc! {}, TWO_DAYS).await;
    server.sessions.sweep().await.unwrap();
    assert_eq!(server.told().await, [(aid, EndReason::LoggedOut)]);
}

#[actix_web::test]
async fn a_renewed_session_keeps_its_locks_when_its_old_record_is_swept() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    alice.post("/renew").await;
    alice.post("/login/alice").await;
    let replaced = doc! { "ended": "logged_out" };
    age(&server.database, replaced, TWO_DAYS).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 2, "two earlier keys");
    assert_eq!(alice.put("/note/a", "new").await.token(), token);
    assert_eq!(server.told().await, []);
    // Then it ends like any other session.
    let aid = server.holder("a").await;
    age(&server.database, doc! { "due": { "$exists": true } }, TWO_DAYS).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
    assert_eq!(server.told().await, [(aid, EndReason::Expired)]);
}

#[actix_web::test]
async fn a_revoked_session_loses_its_locks_and_its_key_at_once() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    let phone = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    phone.post("/note/b").await.token();
    let aid = server.holder("a").await;
    server.sessions.revoke(aid.as_str()).await.unwrap();
    assert!(!server.is_locked("a").await);
    assert!(server.is_locked("b").await, "her other session keeps its lock");
    assert_eq!(alice.get("/state").await.json(), json!({}));
    assert_eq!(phone.get("/state").await.json(), json!({ "name": "alice" }));
    let revoked = [(aid.clone(), EndReason::Revoked)];
    assert_eq!(server.told().await, revoked);

    // Nothing is left to do, and a repetition does nothing.
    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
    server.sessions.revoke(aid.as_str()).await.unwrap();
    assert_eq!(server.sessions.sweep().await.unwrap(), 0);
    assert_eq!(server.told().await, revoked);
    // The session was revoked, not the user.
    alice.post("/login/alice").await;
    assert_eq!(alice.post("/note/a").await.status, 200);
}

/// As if a server had been killed between the announcement and its record.
#[actix_web::test]
async fn an_announced_end_that_was_not_recorded_is_not_announced_again() {
    for reason in [EndReason::LoggedOut, EndReason::Expired] {
        let server = Server::on(&database().await).await;
        let (session, alice) = server.session("alice", "a").await;
        if reason == EndReason::LoggedOut {
            server.sessions.delete(&session).await.unwrap();
        }
        age(&server.database, doc! {}, TWO_DAYS).await;
        let before = records(&server.database).find_one(doc! {}).await.unwrap().unwrap();
        assert_eq!(server.sessions.sweep().await.unwrap(), 1);
        let told = [(alice, reason)];
        assert_eq!(server.told().await, told);
        records(&server.database).replace_one(doc! {}, before).await.unwrap();
        assert_eq!(server.sessions.sweep().await.unwrap(), 1, "another server completes the end");
        assert_eq!(server.told().await, told);
    }
}

#[actix_web::test]
async fn of_two_servers_one_announces_the_end_of_each_session() {
    const SESSIONS: usize = 30;
    let database = database().await;
    let locks = |locks: LockManagerBuilder| locks.reaper_interval(OFTEN);
    let sessions = |sessions: MongoSessionStoreBuilder| sessions.sweep_interval(OFTEN);
    let one = Server::with(&database, locks, sessions).await;
    let other = Server::with(&database, locks, sessions).await;
    let ids: Vec<_> = (0..SESSIONS).map(|n| n.to_string()).collect();
    let mut aids: Vec<_> =
        join_all(ids.iter().map(|id| async { one.session("alice", id).await.1 })).await;
    age(&database, doc! {}, TWO_DAYS).await;
    let told = || [one.heard.so_far(), other.heard.so_far()].concat();
    eventually("all are told", async || told().len() >= SESSIONS).await;
    let waiting = doc! { "due": { "$exists": true } };
    eventually("all are done with", async || {
        records(&database).count_documents(waiting.clone()).await.unwrap() == 0
    })
    .await;
    until_all_ends_are_announced(&database).await;
    let mut heard: Vec<_> = told().into_iter().map(|ended| ended.aid).collect();
    heard.sort();
    aids.sort();
    assert_eq!(heard, aids);
    for ended in told() {
        assert_eq!(
            (ended.reason, ended.locks.len(), ended.repeated),
            (EndReason::Expired, 1, false)
        );
    }
}

/// One sweep stops, before it has taken the session or while it works on it.
#[actix_web::test]
async fn of_two_simultaneous_sweeps_one_gets_the_session() {
    let mongod = rig::mongod::local_replica_set().await;
    let proxy = Proxy::start(mongod.port());
    let through = rig::client(&proxy.uri()).await.database(&rig::fresh_name());
    let direct = rig::client(&mongod.uri()).await.database(through.name());
    let (slow, quick) = (Server::on(&through).await, Server::on(&direct).await);
    for (n, (stops_at, expected)) in
        [("update", (0, 1)), ("findAndModify", (1, 0))].into_iter().enumerate()
    {
        quick.session("alice", "a").await;
        age(&direct, doc! { "user": "alice" }, TWO_DAYS).await;
        proxy.hold_request(stops_at);
        let meanwhile = async {
            proxy.until_fired(n + 1).await;
            let swept = quick.sessions.sweep().await.unwrap();
            proxy.let_go();
            swept
        };
        let (of_slow, of_quick) = join!(slow.sessions.sweep(), meanwhile);
        assert_eq!((of_slow.unwrap(), of_quick), expected, "stops at {stops_at}");
        assert!(!quick.is_locked("a").await);
    }
    until_all_ends_are_announced(&direct).await;
    assert_eq!(slow.heard.so_far().len() + quick.heard.so_far().len(), 2);
}

/// The server that swept it has died; after a while another one takes the session over.
#[actix_web::test]
async fn a_session_taken_by_a_dead_server_is_completed_by_another_one_later() {
    let database = database().await;
    let server = Server::on(&database).await;
    let (_, alice) = server.session("alice", "a").await;
    age(&database, doc! {}, TWO_DAYS).await;
    let in_a_while = doc! { "$add": ["$$NOW", 20_000] };
    let taken = vec![doc! { "$set": { "by": "a dead server", "due": in_a_while } }];
    records(&database).update_many(doc! {}, taken).await.unwrap();
    assert_eq!(
        server.sessions.sweep().await.unwrap(),
        0,
        "the other server may still be working on it"
    );
    age(&database, doc! {}, Duration::from_secs(30)).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
    assert_eq!(server.told().await, [(alice, EndReason::Expired)]);
    assert!(!server.is_locked("a").await);
}

/// The person logs out again after an outage between the commands of the first attempt.
#[actix_web::test]
async fn the_end_of_a_cleared_session_is_told_although_an_outage_comes_between() {
    async fn leave(session: Session) -> HttpResponse {
        session.clear();
        HttpResponse::NoContent().finish()
    }
    let mongod = rig::mongod::local_replica_set().await;
    let proxy = Proxy::start(mongod.port());
    let through = rig::client(&proxy.uri()).await.database(&rig::fresh_name());
    let direct = Server::on(&rig::client(&mongod.uri()).await.database(through.name())).await;
    let short = |sessions: MongoSessionStoreBuilder| sessions.deadline(Duration::from_secs(2));
    let server = Server::with(&through, |locks| locks, short).await;
    let app = App::new().wrap(server.middleware()).route("/leave", web::post().to(leave));
    let app = test::init_service(app).await;
    let (session, aid) = direct.session("alice", "a").await;
    let alice = browser_with(&app, &session);
    // The first command is carried out, and the second one never.
    proxy.hold_request("update");
    proxy.let_go();
    proxy.hold_request("update");
    alice.post("/leave").await;
    assert_eq!(proxy.fired(), 2);
    assert_eq!(direct.load(&session).await, Some(state_of("alice", &aid)), "the end comes first");
    let mut tries = 0;
    while alice.post("/leave").await.status != StatusCode::NO_CONTENT {
        tries += 1;
        assert!(tries < 20, "the database is there");
    }
    age(&direct.database, doc! { "ended": { "$exists": true } }, TWO_DAYS).await;
    direct.sessions.sweep().await.unwrap();
    assert_eq!(direct.told().await, [(aid, EndReason::LoggedOut)]);
}
