//! Records with arbitrary contents, written by none of our programs: of locks and of ended sessions.
//! For web sessions, see tests/app/web/session_store/records.rs.

use std::time::Duration;

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, EndReason, Holder, LockToken, Mode, MongoStore, TryAcquire,
    store::{Acquisition, Claim, Rules, TakenBy, TakeoverKind, Waiters},
};
use doclock_conformance::Shorthand;
use mongodb::bson::{Document, doc};
use proptest::prelude::*;
use tokio::runtime::Runtime;
use uuid::Uuid;

use crate::rig::{
    self,
    app::{TTL, key, lock_records, record},
    mongod,
    random::{FIELDS, check, fields},
};

/// Fields that a lock record may not have at its top level, because no program can insert it like that.
fn lock_fields() -> impl Strategy<Value = Document> {
    fields(&FIELDS[..FIELDS.len() - 1])
}

struct Server {
    store: MongoStore,
    other: LockToken,
}

const COLLECTIONS: &[&str] = &["workitem"];

fn claim(aid: &Aid, mode: Mode) -> Claim {
    Claim {
        aid: aid.clone(),
        token: LockToken::new(),
        holder: Holder::new("bob"),
        mode,
        ttl: TTL,
        tab: None,
        page: None,
        taken: None,
        max_hold: None,
        turn: None,
        upgrades: None,
    }
}

impl Server {
    async fn new(rules: Rules) -> Self {
        let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
        let store = MongoStore::new(&database);
        store.prepare(COLLECTIONS[0], &rules, Deadline::NONE).await.unwrap();
        let it = claim(&Aid::new(), Mode::Exclusive);
        let other = it.token;
        let granted = store.try_acquire(&key("other"), &it, Deadline::NONE).await.unwrap();
        assert!(matches!(granted, TryAcquire::Granted(_)));
        Self { store, other }
    }

    /// No verb fails, and the document can be locked: at once, or after a break of all visible locks.
    async fn survives(&self, mut stored: Document) {
        let (store, locks) = (&self.store, lock_records(self.store.database()));
        let before = record(store.database(), &key("other")).await;
        locks.delete_many(doc! { "_id": "a" }).await.unwrap();
        stored.insert("_id", "a");
        if locks.insert_one(&stored).await.is_err() {
            return;
        }
        let (bob, a) = (Aid::new(), key("a"));
        let seen = store.inspect(&a, None).await.expect("inspect");
        store.inspect(&a, Some(&bob)).await.expect("inspect");
        store.list(COLLECTIONS[0], None, 100).await.expect("list");
        let on_it =
            store.locks_on(a.collection(), std::slice::from_ref(&a)).await.expect("locks_on");
        assert_eq!(seen.is_some(), !on_it.is_empty(), "{seen:?}, {on_it:?}");
        for lock in &on_it {
            let _ = (format!("{lock:?}"), lock.expires_in());
        }
        store
            .renew_all(COLLECTIONS[0], &[bob.clone(), Aid::from("alice".to_owned())])
            .await
            .expect("renew");
        store.release_all(COLLECTIONS[0], &bob, Deadline::NONE).await.expect("release_session");
        let by = LockToken::new();
        store.release(&a, &bob, by, Mode::Shared).await.expect("release");
        store.retract(&a, &bob, &[by], Mode::Exclusive).await.expect("retract");
        store
            .expire_in(&Acquisition::exclusive(&a, &bob, by), None, Duration::ZERO, Deadline::NONE)
            .await
            .expect("run_out_in");
        let nobody = Waiters { server: Uuid::nil(), place: None, lease: TTL };
        store.set_place(&a, &nobody, Deadline::NONE).await.expect("set_place");
        let to = claim(&bob, Mode::Exclusive);
        assert!(
            store
                .hand_over(&Acquisition::exclusive(&a, &bob, by), &to, Deadline::NONE)
                .await
                .expect("hand_over")
                .lock()
                .is_none()
        );
        for mode in [Mode::Shared, Mode::Exclusive] {
            let answer = store
                .try_acquire(&a, &claim(&bob, mode), Deadline::NONE)
                .await
                .expect("try_acquire");
            if let TryAcquire::Held(lock) = answer {
                assert_ne!(lock.aid, bob);
            }
            store.release_all(COLLECTIONS[0], &bob, Deadline::NONE).await.expect("release_session");
        }
        store.sweep(COLLECTIONS, Uuid::new_v4(), 100, Deadline::NONE).await.expect("sweep");
        self.can_be_had(&bob).await;
        assert_eq!(
            record(store.database(), &key("other")).await,
            before,
            "another document's lock"
        );
        let other = store.inspect(&key("other"), None).await.unwrap().and_then(|lock| lock.token);
        assert_eq!(other, Some(self.other));
    }

    async fn can_be_had(&self, bob: &Aid) {
        let (store, a) = (&self.store, key("a"));
        let taken =
            TakenBy { kind: TakeoverKind::Broken, by: "root".to_owned(), reason: String::new() };
        for _ in 0..20 {
            match store
                .try_acquire(&a, &claim(bob, Mode::Exclusive), Deadline::NONE)
                .await
                .expect("try_acquire")
            {
                TryAcquire::Held(lock) => {
                    let on_it = store
                        .locks_on(a.collection(), std::slice::from_ref(&a))
                        .await
                        .expect("locks_on");
                    // A waiter has a place, and shows no token.
                    assert!(!on_it.is_empty(), "held by {lock:?}, but no lock or place is shown");
                    for lock in on_it {
                        store.break_lock(&lock, &taken).await.expect("break_lock");
                    }
                }
                _ => {
                    store
                        .release_all(COLLECTIONS[0], bob, Deadline::NONE)
                        .await
                        .expect("release_session");
                    return;
                }
            }
        }
        panic!("cannot be locked: {:?}", record(store.database(), &a).await);
    }
}

#[test]
fn no_lock_record_makes_a_verb_fail_or_locks_forever() {
    let runtime = Runtime::new().unwrap();
    for rules in [Rules::new(TTL), Rules::new(TTL).fenced()] {
        let server = runtime.block_on(Server::new(rules));
        let what = format!("lock records, {rules:?}");
        check(&what, 12, &lock_fields(), |stored: Document| {
            runtime.block_on(server.survives(stored));
        });
    }
}

/// All fields of the records of ended sessions.
const ENDED: &[&str] = &[
    "ts", "reason", "for_good", "silent", "event", "locks", "step", "due", "by", "lease", "taken",
    "until", "noted", "told", "announce", "release", "ended", "gone", "left", "x",
];

#[test]
fn no_record_of_an_ended_session_makes_a_verb_fail_or_hides_another_end() {
    let runtime = Runtime::new().unwrap();
    let server = runtime.block_on(Server::new(Rules::new(TTL)));
    let store = &server.store;
    check("ended sessions", 15, &fields(ENDED), |mut stored: Document| {
        runtime.block_on(async {
            let ended = store.database().collection::<Document>("doclock.ended");
            ended.delete_many(doc! {}).await.unwrap();
            let (alice, bob) = (Aid::new(), Aid::new());
            stored.insert("_id", alice.as_str());
            if ended.insert_one(&stored).await.is_err() {
                return;
            }
            store.session_ended(&alice).await.expect("session_ended");
            store.last_end(&alice).await.expect("last_end");
            store.sweep(COLLECTIONS, Uuid::new_v4(), 100, Deadline::NONE).await.expect("sweep");
            let worker = Uuid::new_v4();
            let bobs =
                store.end_session(&bob, EndReason::LoggedOut, COLLECTIONS, worker, Deadline::NONE);
            bobs.await.expect("end_session");
            store.ready(&bob, worker).await.expect("allow_announcement");
            let taken = store.take_ends(worker, TTL, 100).await.expect("take_announcements");
            assert!(taken.iter().any(|it| it.aid == bob), "bob's end is hidden: {taken:?}");
            store.told(worker, &taken).await.expect("announced");
            let ends = store.end_session(
                &alice,
                EndReason::Revoked,
                COLLECTIONS,
                Uuid::new_v4(),
                Deadline::NONE,
            );
            ends.await.expect("end_session");
            assert!(store.session_ended(&alice).await.expect("session_ended").is_some());
        });
    });
}
