//! However a session ends, its locks go and the listener is told, once, although no request comes.

use actix_doclock::StoredSession;
use futures_util::future::join_all;

use super::*;
use crate::rig::proxy::Proxy;

const OFTEN: Duration = Duration::from_millis(20);

#[actix_web::test]
async fn an_expired_session_loses_its_locks_and_is_told_without_a_request() {
    let often = |locks: LockManagerBuilder| locks.reaper_interval(OFTEN);
    let server = Server::with(&database().await, often, |sessions| sessions).await;
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
    // Was never in the wrap.
    server.sessions.save(State::from([("name".into(), "\"alice\"".into())]), &DAY).await.unwrap();
    assert_eq!(server.sessions.sweep().await.unwrap(), 0);
    age(&server.database, doc! { "user": "alice" }, TWO_DAYS).await;
    assert!(server.is_locked("a").await, "nobody has looked");
    assert_eq!(server.sessions.sweep().await.unwrap(), 2);
    assert!(!server.is_locked("a").await);
    assert_eq!(server.holder("b").await, bob);
    assert_eq!(server.told().await, [(alice, EndReason::Expired)]);
    assert_eq!(server.sessions.sweep().await.unwrap(), 0);
    assert_eq!(server.told().await.len(), 1);
}

/// More than one batch.
#[actix_web::test]
async fn a_sweep_deals_with_all_there_are() {
    let server = Server::on(&database().await).await;
    let save = |_| async { server.sessions.save(State::new(), &DAY).await.unwrap() };
    join_all((0..250).map(save)).await;
    age(&server.database, doc! {}, TWO_DAYS).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 250);
}

#[actix_web::test]
async fn a_deleted_session_loses_its_locks_once_no_other_key_can_come_for_them() {
    let server = Server::on(&database().await).await;
    let (session, alice) = server.session("alice", "a").await;
    server.sessions.delete(&session).await.unwrap();
    assert_eq!(server.load(&session).await, None);
    assert_eq!(server.sessions.sweep().await.unwrap(), 0);
    assert!(server.is_locked("a").await, "it may be on its way to another key");
    age(&server.database, doc! {}, TWO_DAYS).await;
    // A repetition does not begin anew.
    server.sessions.delete(&session).await.unwrap();
    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
    assert!(!server.is_locked("a").await);
    assert_eq!(server.told().await, [(alice, EndReason::LoggedOut)]);
}

#[actix_web::test]
async fn of_an_ended_session_nothing_is_left_but_that_it_has_ended() {
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
async fn a_logout_is_told_once_although_the_session_store_hears_of_it_too() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    let aid = server.holder("a").await;
    alice.post("/purge").await;
    assert!(!server.is_locked("a").await, "with the answer");
    let logout = [(aid, EndReason::LoggedOut)];
    assert_eq!(server.told().await, logout);
    age(&server.database, doc! {}, TWO_DAYS).await;
    server.sessions.sweep().await.unwrap();
    assert_eq!(server.told().await, logout);
}

#[actix_web::test]
async fn a_cleared_session_is_told_once_although_its_record_runs_out_later() {
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
async fn a_renewed_session_keeps_its_locks_also_when_its_old_record_is_swept() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    alice.post("/renew").await;
    alice.post("/login/alice").await;
    let replaced = doc! { "ended": "logged_out" };
    age(&server.database, replaced, TWO_DAYS).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 2, "two keys before");
    assert_eq!(alice.put("/note/a", "new").await.token(), token);
    assert_eq!(server.told().await, []);
    // And it ends as any other.
    let aid = server.holder("a").await;
    age(&server.database, doc! { "due": { "$exists": true } }, TWO_DAYS).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
    assert_eq!(server.told().await, [(aid, EndReason::Expired)]);
}

#[actix_web::test]
async fn a_revoked_session_has_no_locks_and_lets_nobody_in_on_return() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    let phone = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    phone.post("/note/b").await.token();
    let aid = server.holder("a").await;
    server.sessions.revoke(&aid).await.unwrap();
    assert!(!server.is_locked("a").await);
    assert!(server.is_locked("b").await, "another session of hers");
    assert_eq!(alice.get("/state").await.json(), json!({}));
    assert_eq!(phone.get("/state").await.json(), json!({ "name": "alice" }));
    let revoked = [(aid.clone(), EndReason::Revoked)];
    assert_eq!(server.told().await, revoked);

    // Nothing is left to be done; and whoever does it again does nothing.
    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
    server.sessions.revoke(&aid).await.unwrap();
    assert_eq!(server.sessions.sweep().await.unwrap(), 0);
    assert_eq!(server.told().await, revoked);
    // It is the session that was revoked, and not the person.
    alice.post("/login/alice").await;
    assert_eq!(alice.post("/note/a").await.status, 200);
}

#[actix_web::test]
async fn all_sessions_of_a_user_are_revoked_and_counted() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let desk = Browser::logged_in(&app, "alice").await;
    desk.post("/note/a").await.token();
    let desks = server.holder("a").await;
    let phone = Browser::logged_in(&app, "alice").await;
    let bob = Browser::logged_in(&app, "bob").await;
    let token = bob.post("/note/b").await.token();
    let name = State::from([("name".to_owned(), "\"alice\"".to_owned())]);
    let without_aid = server.sessions.save(name, &DAY).await.unwrap();

    assert_eq!(server.sessions.revoke_all_of("alice").await.unwrap(), 3);
    for browser in [&desk, &phone] {
        assert_eq!(browser.get("/state").await.json(), json!({}));
    }
    assert_eq!(server.load(&without_aid).await, None);
    assert!(!server.is_locked("a").await);
    assert_eq!(bob.put("/note/b", "new").await.token(), token);
    let told = server.told().await;
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told.iter().all(|(_, reason)| *reason == EndReason::Revoked), "{told:?}");
    assert!(told.iter().any(|(aid, _)| *aid == desks), "{told:?}");
    for nobody in ["alice", "", "$name", "carol"] {
        assert_eq!(server.sessions.revoke_all_of(nobody).await.unwrap(), 0, "{nobody}");
    }
}

/// Everybody has just got a new key who has just logged in, and the old one is not forgotten yet.
#[actix_web::test]
async fn a_session_with_a_new_key_counts_as_one() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/renew").await;
    alice.post("/renew").await;
    assert_eq!(server.sessions.revoke_all_of("alice").await.unwrap(), 1);
    assert_eq!(alice.get("/state").await.json(), json!({}));
    assert_eq!(server.told().await.len(), 1);
}

/// A renewal deletes the session and saves it with another key; a revocation can come before, between
/// and after.
#[actix_web::test]
async fn a_revocation_at_the_moment_of_a_renewal_leaves_no_usable_session() {
    for revoke_at in 0..3 {
        let server = Server::on(&database().await).await;
        let (old, alice) = server.session("alice", "a").await;
        let mut new = None;
        for step in 0..3 {
            if step == revoke_at {
                server.sessions.revoke(&alice).await.unwrap();
            }
            match step {
                0 => server.sessions.delete(&old).await.unwrap(),
                1 => {
                    let state = state_of("alice", &alice);
                    new = Some(server.sessions.save(state, &DAY).await.unwrap());
                }
                _ => {}
            }
        }
        for key in [old, new.unwrap()] {
            assert_eq!(server.load(&key).await, None, "revoked at step {revoke_at}");
            let state = state_of("alice", &alice);
            server.sessions.update(session_key(key.as_ref()), state, &DAY).await.unwrap();
            assert_eq!(server.load(&key).await, None, "revoked at step {revoke_at}");
        }
        assert_eq!(server.sessions.list_of("alice").await.unwrap(), []);
        assert!(!server.is_locked("a").await);
        age(&server.database, doc! {}, TWO_DAYS).await;
        server.sessions.sweep().await.unwrap();
        assert_eq!(server.told().await, [(alice, EndReason::Revoked)]);
    }
}

/// The same for all sessions of a user: the one that is between two keys is found, too.
#[actix_web::test]
async fn a_session_between_two_keys_is_revoked_with_all_of_its_user() {
    let server = Server::on(&database().await).await;
    let (old, alice) = server.session("alice", "a").await;
    server.sessions.delete(&old).await.unwrap();
    server.sessions.revoke_all_of("alice").await.unwrap();
    let new = server.sessions.save(state_of("alice", &alice), &DAY).await.unwrap();
    assert_eq!(server.load(&new).await, None);
    assert!(!server.is_locked("a").await);
}

/// As by a primary whose clock is behind: the end is a fact and not a date.
#[actix_web::test]
async fn an_ended_session_stays_ended_whatever_its_dates_say() {
    let server = Server::on(&database().await).await;
    for reason in [EndReason::LoggedOut, EndReason::Revoked] {
        let (session, alice) = server.session("alice", "a").await;
        match reason {
            EndReason::Revoked => server.sessions.revoke(&alice).await.unwrap(),
            _ => server.sessions.delete(&session).await.unwrap(),
        }
        let later = doc! { "$set": { "expires": { "$add": ["$$NOW", 3_600_000] } } };
        records(&server.database).update_many(doc! {}, vec![later]).await.unwrap();
        assert_eq!(server.load(&session).await, None, "{reason:?}");
        let state = state_of("alice", &alice);
        server.sessions.update(session_key(session.as_ref()), state, &DAY).await.unwrap();
        server.sessions.update_ttl(&session, &DAY).await.unwrap();
        assert_eq!(server.load(&session).await, None, "{reason:?}");
        assert_eq!(server.sessions.list_of("alice").await.unwrap(), []);
        let due = vec![doc! { "$set": { "due": "$$NOW" } }];
        records(&server.database).update_one(doc! { "user": "alice" }, due).await.unwrap();
        assert_eq!(server.sessions.sweep().await.unwrap(), 1);
        assert!(!server.is_locked("a").await, "{reason:?}");
        assert!(server.told().await.contains(&(alice, reason)));
    }
}

/// All the ways to end the session of Alice, who holds the note `a`, while a request of hers is under
/// way. Each time that request does something else.
#[actix_web::test]
async fn a_request_that_was_under_way_does_not_revive_an_ended_session() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    for end in ["purge", "delete", "revoke", "revoke all", "expire", "expire and sweep"] {
        for late in [json!({ "set": { "late": 1 } }), json!({ "remove": ["name"] })] {
            let alice = Browser::logged_in(&app, "alice").await;
            alice.post("/note/a").await.token();
            let (session, aid) = (key_in(&alice), server.holder("a").await);
            let mut request = late.clone();
            request["wait"] = true.into();
            let request = alice.post_json("/change", request);
            let other_tab = alice.copy();
            let ended = async {
                match end {
                    "purge" => drop(other_tab.post("/purge").await),
                    "delete" => server.sessions.delete(&session).await.unwrap(),
                    "revoke" => server.sessions.revoke(&aid).await.unwrap(),
                    "revoke all" => drop(server.sessions.revoke_all_of("alice").await.unwrap()),
                    _ => age(&server.database, doc! { "aid": aid.as_str() }, TWO_DAYS).await,
                }
                if end == "expire and sweep" {
                    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
                }
            };
            let (answer, ()) = server.while_it_waits(request, ended).await;
            assert_eq!(answer.status, 204);
            assert_eq!(server.load(&session).await, None, "{end}, {late}");
            assert_eq!(alice.get("/state").await.json(), json!({}), "{end}, {late}");
            assert_eq!(server.sessions.list_of("alice").await.unwrap(), [], "{end}, {late}");
            records(&server.database).delete_many(doc! {}).await.unwrap();
            server.locks.release_session(&aid).await.unwrap();
        }
    }
}

/// A renewal saves under a new key, so it is the aid that has to be remembered.
#[actix_web::test]
async fn a_renewal_that_was_under_way_does_not_revive_a_revoked_session() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/note/a").await.token();
    let aid = server.holder("a").await;
    let renewal = alice.post_json("/change", json!({ "wait": true, "renew": true }));
    server.while_it_waits(renewal, server.sessions.revoke(&aid)).await.1.unwrap();
    assert_eq!(alice.get("/state").await.json(), json!({}));
    assert!(!server.is_locked("a").await);
    assert_eq!(alice.put("/note/a", "new").await.status, 409);
}

#[actix_web::test]
async fn a_renewal_that_was_under_way_does_not_revive_a_session_that_has_ended_otherwise() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    for end in ["purge", "clear", "delete", "expire", "expire and sweep"] {
        let alice = Browser::logged_in(&app, "alice").await;
        let (session, other_tab) = (key_in(&alice), alice.copy());
        let renewal = alice.post_json("/change", json!({ "wait": true, "renew": true }));
        let ended = async {
            match end {
                "purge" | "clear" => drop(other_tab.post(&format!("/{end}")).await),
                "delete" => server.sessions.delete(&session).await.unwrap(),
                _ => age(&server.database, doc! { "ended": { "$exists": false } }, TWO_DAYS).await,
            }
            if end == "expire and sweep" {
                server.sessions.sweep().await.unwrap();
            }
        };
        let (renewed, ()) = server.while_it_waits(renewal, ended).await;
        assert_eq!(renewed.header("set-cookie"), None, "{end}: that would be a dead key");
        assert_eq!(alice.get("/state").await.json(), json!({}), "{end}");
        assert_eq!(server.sessions.list_of("alice").await.unwrap(), [], "{end}");
    }
}

/// The session is not there to release it, and nobody else knows of it.
#[actix_web::test]
async fn a_first_lock_of_a_session_that_has_ended_meanwhile_is_given_back() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let name = State::from([("name".to_owned(), "\"alice\"".to_owned())]);
    let session = server.sessions.save(name, &DAY).await.unwrap();
    let alice = browser_with(&app, &session);
    let lock = alice.post_json("/change", json!({ "wait": true, "lock": "a" }));
    let (answer, ended) = server.while_it_waits(lock, server.sessions.delete(&session)).await;
    ended.unwrap();
    answer.problem(401);
    assert_eq!(answer.header("lock-token"), None);
    assert!(!server.is_locked("a").await);
}

/// As a server leaves it that is killed between the two.
#[actix_web::test]
async fn an_end_that_was_told_and_not_noted_is_not_told_again() {
    let server = Server::on(&database().await).await;
    let (session, alice) = server.session("alice", "a").await;
    for reason in [EndReason::LoggedOut, EndReason::Expired] {
        if reason == EndReason::LoggedOut {
            server.sessions.delete(&session).await.unwrap();
        }
        age(&server.database, doc! {}, TWO_DAYS).await;
        let before = records(&server.database).find_one(doc! {}).await.unwrap().unwrap();
        assert_eq!(server.sessions.sweep().await.unwrap(), 1);
        records(&server.database).replace_one(doc! {}, before).await.unwrap();
        assert_eq!(server.sessions.sweep().await.unwrap(), 1, "another one has it to do");
        assert_eq!(server.told().await.len(), 1, "{reason:?}");
        if reason == EndReason::LoggedOut {
            assert_eq!(server.told().await, [(alice.clone(), reason)]);
            server.heard.forget();
            server.database.collection::<Document>("doclock.ended").drop().await.unwrap();
            records(&server.database).delete_many(doc! {}).await.unwrap();
            server.sessions.save(state_of("alice", &Aid::new()), &DAY).await.unwrap();
        }
    }
}

#[actix_web::test]
async fn of_two_servers_one_tells_the_end_of_each_session() {
    const SESSIONS: usize = 30;
    let database = database().await;
    let often = |locks: LockManagerBuilder| locks.reaper_interval(OFTEN);
    let one = Server::with(&database, often, |sessions| sessions).await;
    let other = Server::with(&database, often, |sessions| sessions).await;
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
    nothing_left_to_tell(&database).await;
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

/// One of them stops, before it has taken the session or when it is at it.
#[actix_web::test]
async fn of_two_sweeps_at_one_moment_one_gets_the_session() {
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
    nothing_left_to_tell(&direct).await;
    assert_eq!(slow.heard.so_far().len() + quick.heard.so_far().len(), 2);
}

/// The one that swept it has died; it is another one's after a while.
#[actix_web::test]
async fn what_a_dead_server_has_taken_is_done_by_another_one_later() {
    let database = database().await;
    let server = Server::on(&database).await;
    let (_, alice) = server.session("alice", "a").await;
    age(&database, doc! {}, TWO_DAYS).await;
    let in_a_while = doc! { "$add": ["$$NOW", 20_000] };
    let taken = vec![doc! { "$set": { "by": "a dead server", "due": in_a_while } }];
    records(&database).update_many(doc! {}, taken).await.unwrap();
    assert_eq!(server.sessions.sweep().await.unwrap(), 0, "it may still be at it");
    age(&database, doc! {}, Duration::from_secs(30)).await;
    assert_eq!(server.sessions.sweep().await.unwrap(), 1);
    assert_eq!(server.told().await, [(alice, EndReason::Expired)]);
    assert!(!server.is_locked("a").await);
}

#[actix_web::test]
async fn the_sessions_of_a_user_are_listed_without_what_lets_anybody_in() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let desk = Browser::logged_in(&app, "alice").await;
    let phone = Browser::logged_in(&app, "alice").await;
    Browser::logged_in(&app, "bob").await;
    let list = async || server.sessions.list_of("alice").await.unwrap();
    assert_eq!(list().await.len(), 2);
    age(&server.database, doc! {}, Duration::from_secs(3600)).await;
    desk.post("/theme").await;
    let mut sessions = list().await;
    sessions.sort_by_key(|session| session.seen);
    let [of_phone, of_desk]: [StoredSession; 2] = sessions.try_into().unwrap();
    let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3600));
    let between = |from: std::time::SystemTime, to| to > from && to < from + hour + 10 * minute;
    assert!(between(of_desk.created, of_desk.seen), "{of_desk:?}");
    assert!(of_desk.created <= of_phone.created + minute, "{of_desk:?}, {of_phone:?}");
    assert_eq!((&of_phone.user[..], of_phone.seen), ("alice", of_phone.created));
    assert_eq!(of_phone.expires.duration_since(of_phone.seen).unwrap(), 24 * hour);
    assert!(of_desk.expires > of_phone.expires + hour - minute);
    for session in [&of_phone, &of_desk] {
        let text = format!("{session:?}");
        assert!(!text.contains(key_in(&desk).as_ref()) && !text.contains(key_in(&phone).as_ref()));
        assert!(!text.contains(session.aid.as_str()), "{text}");
    }

    // By what is listed, one is ended.
    server.sessions.revoke(&of_phone.aid).await.unwrap();
    assert_eq!(phone.get("/state").await.json(), json!({}));
    assert_eq!(list().await, [of_desk]);
    desk.post("/purge").await;
    assert_eq!(list().await, []);
    server.sessions.save(state_of("alice", &Aid::new()), &Ttl::HOUR).await.unwrap();
    assert_eq!(list().await.len(), 1);
    age(&server.database, doc! {}, hour).await;
    assert_eq!(list().await, [], "not what has run out");
    assert_eq!(server.sessions.list_of("$name").await.unwrap(), []);
}

#[actix_web::test]
async fn whose_a_session_is_follows_its_state() {
    let database = database().await;
    let sessions = |builder: MongoSessionStoreBuilder| builder.user_key("uid");
    let server = Server::with(&database, |locks| locks, sessions).await;
    let app = server.app().await;
    let users = async |uid: &str| server.sessions.list_of(uid).await.unwrap().len();
    let browser = Browser::new(&app);
    browser.post_json("/change", json!({ "set": { "name": "alice" } })).await;
    assert_eq!(users("alice").await, 0);
    browser.post_json("/change", json!({ "set": { "uid": 42 } })).await;
    assert_eq!((users("42").await, users("alice").await), (1, 0));
    browser.post_json("/change", json!({ "set": { "uid": "$name" }, "renew": true })).await;
    assert_eq!((users("42").await, users("$name").await), (0, 1));
    browser.post_json("/change", json!({ "set": { "theme": "dark" } })).await;
    assert_eq!(users("$name").await, 1);
    browser.post_json("/change", json!({ "remove": ["uid"] })).await;
    assert_eq!(users("$name").await, 0);
}
