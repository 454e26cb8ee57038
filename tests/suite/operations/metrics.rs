//! Each metric changes with its event, and no label has a value that a client can choose.

use std::collections::BTreeSet;
use std::time::Duration;

use ::metrics::Unit;
use actix_doclock::{
    Actor, Aid, Holder, Lock, LockError, LockKey, LockManager, LockManagerBuilder, MemoryStore,
    TryAcquire, Wait, limits::Limits, metrics as names,
};
use metrics_util::debugging::DebuggingRecorder;

use crate::rig::app::{self, App, WorkItem, eventually, key, with_deadline};
use crate::rig::mongod::{self, Mongod};
use crate::rig::recorded::Recorded;
use crate::rig::{age, fresh_database};

async fn embedded() -> (LockManager, MemoryStore) {
    embedded_with(|settings| settings).await
}

async fn embedded_with(
    settings: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder,
) -> (LockManager, MemoryStore) {
    let store = MemoryStore::new();
    let builder = LockManager::builder(store.clone()).without_reaper();
    let locks = settings(builder).build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    (locks, store)
}

async fn granted(locks: &LockManager, id: &str, aid: &Aid) -> Lock {
    match locks.lock_for_session(&key(id), aid, &Holder::new("alice")).await.unwrap() {
        TryAcquire::Granted(lock) => lock,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn attempts_are_timed_by_their_outcome_and_refusals_counted() {
    let mut seen = Recorded::start();
    let (locks, _) = embedded().await;
    let (alice, holder) = (Aid::new(), Holder::new("alice"));
    granted(&locks, "a", &alice).await;
    for aid in [&alice, &Aid::new(), &Aid::new()] {
        let _ = locks.lock_for_session(&key("a"), aid, &holder).await.unwrap();
    }
    let reader = locks.acquire_shared(&key("a"), Wait::no()).await;
    assert!(matches!(reader, Err(LockError::Held(_))));
    seen.assert_only(
        names::ACQUIRE_SECONDS,
        &[
            ("collection=workitem,mode=exclusive,outcome=granted", 1.0),
            ("collection=workitem,mode=exclusive,outcome=already_mine", 1.0),
            ("collection=workitem,mode=exclusive,outcome=held", 2.0),
            ("collection=workitem,mode=shared,outcome=held", 1.0),
        ],
    );
    seen.assert_only(
        names::REFUSALS,
        &[("collection=workitem,mode=exclusive", 2.0), ("collection=workitem,mode=shared", 1.0)],
    );
    seen.assert_only(names::WAIT_SECONDS, &[]);
}

#[tokio::test]
async fn a_waiter_is_counted_while_it_waits_and_its_wait_is_timed_by_outcome() {
    let mut seen = Recorded::start();
    let (locks, _) = embedded().await;
    let (exclusive, in_workitem) = ("collection=workitem,mode=exclusive", "collection=workitem");
    let held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
    let waits = || {
        let (locks, key) = (locks.clone(), key("a"));
        tokio::spawn(async move { locks.acquire(&key, Wait::until_acquired()).await })
    };
    let (next, dropped) = (waits(), waits());
    eventually("both wait", async || seen.of(names::WAITING, in_workitem) == 2.0).await;
    dropped.abort();
    eventually("one waits", async || seen.of(names::WAITING, in_workitem) == 1.0).await;
    assert_eq!(seen.of(names::WAIT_SECONDS, &format!("{exclusive},outcome=dropped")), 1.0);

    held.release().await.unwrap();
    let held = next.await.unwrap().unwrap();
    let too_short = Wait::for_at_most(Duration::from_millis(50));
    assert!(locks.acquire(&key("a"), too_short).await.is_err());
    let last = waits();
    eventually("one waits", async || seen.of(names::WAITING, in_workitem) == 1.0).await;
    locks.shutdown().await;
    assert!(matches!(last.await.unwrap(), Err(LockError::ShutDown)));
    drop(held);
    seen.assert_only(
        names::WAIT_SECONDS,
        &["dropped", "granted", "held", "shutting_down"]
            .map(|outcome| (&*format!("{exclusive},outcome={outcome}").leak(), 1.0)),
    );
    seen.assert_only(names::REFUSALS, &[(exclusive, 1.0)]);
    seen.assert_only(names::HAND_OVERS, &[(in_workitem, 1.0)]);
    assert_eq!(seen.of(names::WAITING, in_workitem), 0.0);
}

#[tokio::test]
async fn two_waiters_for_each_other_are_one_deadlock() {
    let mut seen = Recorded::start();
    let (locks, _) = embedded().await;
    let [one, two] = ["one", "two"].map(|name| locks.job(name));
    let _a = one.acquire(&key("a"), Wait::no()).await.unwrap();
    let _b = two.acquire(&key("b"), Wait::no()).await.unwrap();
    let waits = tokio::spawn(async move { one.acquire(&key("b"), Wait::until_acquired()).await });
    eventually("it waits", async || locks.health().waiting == 1).await;
    let refused = two.acquire(&key("a"), Wait::until_acquired()).await;
    assert!(matches!(refused, Err(LockError::WouldDeadlock { .. })), "{refused:?}");
    let labels = "collection=workitem,mode=exclusive,outcome=would_deadlock";
    assert_eq!(seen.of(names::WAIT_SECONDS, labels), 1.0);
    waits.abort();
}

#[tokio::test]
async fn a_waiter_beyond_a_limit_is_counted_under_that_limit() {
    let mut seen = Recorded::start();
    let limits = Limits { waiters: 1, ..Limits::default() };
    let (locks, _) = embedded_with(|settings| settings.limits(limits)).await;
    let _held = locks.acquire(&key("a"), Wait::no()).await.unwrap();
    let (manager, a) = (locks.clone(), key("a"));
    let waits = tokio::spawn(async move { manager.acquire(&a, Wait::until_acquired()).await });
    eventually("it waits", async || locks.health().waiting == 1).await;
    let refused = locks.acquire(&key("a"), Wait::until_acquired()).await;
    assert!(matches!(refused, Err(LockError::TooManyWaiters { .. })), "{refused:?}");
    seen.assert_only(names::WAITERS_REFUSED, &[("collection=workitem,limit=server", 1.0)]);
    let labels = "collection=workitem,mode=exclusive,outcome=too_many_waiters";
    assert_eq!(seen.of(names::WAIT_SECONDS, labels), 1.0);
    waits.abort();
}

#[tokio::test]
async fn guards_are_counted_while_they_hold() {
    let mut seen = Recorded::start();
    let (locks, _) = embedded().await;
    let in_workitem = "collection=workitem";
    let mut guards = Vec::new();
    for id in ["a", "b"] {
        guards.push(locks.acquire_shared(&key(id), Wait::no()).await.unwrap());
    }
    assert_eq!(seen.of(names::GUARDS, in_workitem), 2.0);
    guards[0].upgrade().await.unwrap();
    assert_eq!(seen.of(names::GUARDS, in_workitem), 2.0, "the upgrade replaces the first guard");
    drop(guards);
    assert_eq!(seen.of(names::GUARDS, in_workitem), 0.0);
    assert_eq!(locks.health().guards, 0);
}

#[tokio::test]
async fn releases_and_breaks_are_counted() {
    let mut seen = Recorded::start();
    let chief = |actor: &Actor, _: &Lock| actor.has_role("chief");
    let (locks, _) = embedded_with(|settings| settings.break_policy(chief)).await;
    let lock = granted(&locks, "a", &Aid::new()).await;
    for _ in 0..2 {
        locks.release(&lock).await.unwrap();
    }
    drop(locks.acquire(&key("a"), Wait::no()).await.unwrap());
    eventually("the guard is released", async || {
        seen.of(names::RELEASES, "collection=workitem,outcome=released") == 2.0
    })
    .await;
    seen.assert_only(
        names::RELEASES,
        &[
            ("collection=workitem,outcome=released", 2.0),
            ("collection=workitem,outcome=already_gone", 1.0),
        ],
    );

    granted(&locks, "b", &Aid::new()).await;
    crate::rig::app::break_on(&locks, &key("b"), &Actor::new("bob")).await.unwrap_err();
    crate::rig::app::break_on(&locks, &key("b"), &Actor::new("root").with_role("chief"))
        .await
        .unwrap();
    seen.assert_only(
        names::BREAKS,
        &[
            ("collection=workitem,outcome=refused", 1.0),
            ("collection=workitem,outcome=broken", 1.0),
        ],
    );
}

#[tokio::test(start_paused = true)]
async fn renewals_and_lost_guards_are_counted() {
    let mut seen = Recorded::start();
    let (locks, store) = embedded().await;
    locks.renew(&Aid::new()).await.unwrap();
    seen.assert_only(names::RENEWALS, &[("of=session,outcome=ok", 1.0)]);

    // A ttl of one second means a renewal every third of a second.
    let job = locks.job("import").ttl(Duration::from_secs(1));
    let guard = job.acquire(&key("a"), Wait::no()).await.unwrap();
    eventually("it is renewed", async || seen.of(names::RENEWALS, "of=guards,outcome=ok") > 0.0)
        .await;
    seen.assert_only(names::LOST, &[]);
    // The break happens on another server.
    let other = LockManager::builder(store).without_reaper().break_policy(|_, _| true);
    let other = other.build().await.unwrap();
    other.register::<WorkItem>().await.unwrap();
    crate::rig::app::break_on(&other, &key("a"), &Actor::new("root")).await.unwrap().unwrap();
    guard.lost().await;
    eventually("its loss is noticed", async || {
        seen.of(names::LOST, "collection=workitem,reason=unknown,noticed=renewal") == 1.0
    })
    .await;
    assert_eq!(seen.of(names::GUARDS, "collection=workitem"), 0.0);
}

#[tokio::test]
async fn each_lost_lock_is_counted_once_on_a_server_with_its_reason() {
    let mut seen = Recorded::start();
    let database = fresh_database(mongod::shared_replica_set().await.uri()).await;
    let breaks = |settings: LockManagerBuilder| settings.break_policy(|_, _| true);
    let [one, two] = [App::with(&database, breaks).await, App::with(&database, breaks).await];
    let label = |reason: &str, noticed: &str| {
        format!("collection=workitem,reason={reason},noticed={noticed}")
    };
    app::put(&database, "a", "old").await;

    // A break on the first server, and a save that the same server refuses, are one loss.
    let lock = one.granted(&key("a"), &Aid::new()).await;
    let guard = one.locks.acquire(&key("saved"), Wait::no()).await.unwrap();
    app::put(&database, "saved", "old").await;
    one.break_lock(&key("a")).await.unwrap();
    one.break_lock(&key("saved")).await.unwrap();
    let rename = |item: &mut WorkItem| item.title = "new".to_owned();
    assert!(matches!(guard.update(rename).await, Err(LockError::Lost { .. })));
    seen.assert_only(names::LOST, &[(&label("broken", "break"), 2.0)]);

    // The second server does not know the reason.
    let guard = two.locks.acquire(&key("saved"), Wait::no()).await.unwrap();
    one.break_lock(&key("saved")).await.unwrap();
    for _ in 0..2 {
        assert!(matches!(guard.update(rename).await, Err(LockError::Lost { .. })));
    }
    let (broken, unknown) = (label("broken", "break"), label("unknown", "save"));
    seen.assert_only(names::LOST, &[(&broken, 3.0), (&unknown, 1.0)]);

    // Two locks of an idle session, one of a session that still works elsewhere, one that another session took
    // over after its expiry, and one reader.
    let (idle, works, left) = (Aid::new(), Aid::new(), Aid::new());
    for (aid, id) in [(&idle, "b"), (&idle, "c"), (&works, "d"), (&left, "e")] {
        one.granted(&key(id), aid).await;
        age(&database, &key(id), app::TTL).await;
    }
    one.granted(&key("f"), &works).await;
    two.granted(&key("e"), &Aid::new()).await;
    let reader = one.locks.acquire_shared(&key("g"), Wait::no()).await.unwrap();
    age(&database, &key("g"), app::TTL).await;
    one.locks.sweep().await.unwrap();
    two.locks.sweep().await.unwrap();
    let expired = label("expired", "reaper");
    seen.assert_only(names::LOST, &[(&broken, 3.0), (&unknown, 1.0), (&expired, 5.0)]);
    drop((lock, reader));
}

#[tokio::test]
async fn ends_of_sessions_are_counted_by_reason_and_sweeps_are_timed() {
    let mut seen = Recorded::start();
    let (locks, store) = embedded().await;
    locks.end_session(&Aid::new()).await.unwrap();
    locks.revoke_session(&Aid::new()).await.unwrap();
    for id in ["a", "b"] {
        granted(&locks, id, &Aid::new()).await;
    }
    store.advance(locks.ttl());
    assert_eq!(locks.sweep().await.unwrap(), 2);
    seen.assert_only(
        names::SESSIONS_ENDED,
        &[("reason=logged_out", 1.0), ("reason=revoked", 1.0), ("reason=expired", 2.0)],
    );
    seen.assert_only(names::SWEEP_SECONDS, &[("outcome=ok", 1.0)]);
    seen.assert_only(names::SWEEP_BEHIND, &[("", 0.0)]);
}

#[tokio::test]
async fn an_outage_is_counted_by_verb_and_kind_and_as_an_outcome() {
    let mut seen = Recorded::start();
    let server = Mongod::start_replica_set().await;
    let database = fresh_database(&server.uri()).await;
    let lock = App::on(&database).await.granted(&key("a"), &Aid::new()).await;
    let locks = App::with(&database, with_deadline(Duration::from_millis(500))).await.locks;
    server.pause();
    locks.lock_for_session(&key("b"), &Aid::new(), &Holder::new("bob")).await.unwrap_err();
    locks.renew(&lock.aid).await.unwrap_err();
    locks.release(&lock).await.unwrap_err();
    locks.sweep().await.unwrap_err();
    let labels = |verb: &str| format!("verb={verb},kind=unavailable");
    for verb in ["try_acquire", "renew", "release", "sweep"] {
        assert_eq!(seen.of(names::STORE_ERRORS, &labels(verb)), 1.0, "{verb}");
    }
    let acquire = "collection=workitem,mode=exclusive,outcome=error";
    assert_eq!(seen.of(names::ACQUIRE_SECONDS, acquire), 1.0);
    assert_eq!(seen.of(names::RENEWALS, "of=session,outcome=error"), 1.0);
    assert_eq!(seen.of(names::RELEASES, "collection=workitem,outcome=error"), 1.0);
    assert_eq!(seen.of(names::SWEEP_SECONDS, "outcome=error"), 1.0);
    // Connections are refused, so that attempts fail instead of hanging.
    server.kill9();
    locks.inspect(&key("a")).await.unwrap_err();
    eventually("the remaining work is retried", async || {
        seen.of(names::STORE_RETRIES, "kind=unavailable") > 0.0
    })
    .await;
}

#[tokio::test]
async fn a_refusal_by_a_freeze_is_an_outcome_of_its_own() {
    let mut seen = Recorded::start();
    let database = fresh_database(mongod::shared_replica_set().await.uri()).await;
    let locks = App::on(&database).await.locks;
    let (root, hour) = (Actor::new("root"), Duration::from_secs(3_600));
    locks.freeze("workitem", "migration", hour, &root).await.unwrap();
    let refused = locks.acquire(&key("a"), Wait::for_at_most(hour)).await;
    assert!(matches!(refused, Err(LockError::Frozen { .. })), "{refused:?}");
    let labels = "collection=workitem,mode=exclusive,outcome=frozen";
    seen.assert_only(names::ACQUIRE_SECONDS, &[(labels, 1.0)]);
    seen.assert_only(names::WAIT_SECONDS, &[(labels, 1.0)]);
}

#[tokio::test]
async fn unregistered_collections_are_counted_as_other() {
    let mut seen = Recorded::start();
    let (locks, _) = embedded().await;
    let mut lock = granted(&locks, "a", &Aid::new()).await;
    for n in 0..3 {
        lock.key = LockKey::new(format!("of a client's choice {n}"), n).unwrap();
        let _ = locks.release(&lock).await;
        let _ = locks.acquire(&lock.key, Wait::until_acquired()).await;
    }
    for name in seen.all().keys() {
        assert!(!name.contains("choice"), "{name}");
    }
    assert!(seen.all().keys().any(|name| name.contains("collection=other")));
}

#[tokio::test]
async fn each_metric_is_described_with_its_unit() {
    let recorder = DebuggingRecorder::new();
    let described = ::metrics::with_local_recorder(&recorder, || {
        names::describe();
        for name in names::ALL {
            // A metric that is only described does not appear in a snapshot.
            match name {
                &names::SWEEP_BEHIND => ::metrics::gauge!(names::SWEEP_BEHIND).set(1.0),
                name if name.ends_with("_seconds") => ::metrics::histogram!(*name).record(1.0),
                name if name.ends_with("_total") => ::metrics::counter!(*name).increment(1),
                name => ::metrics::gauge!(*name).set(1.0),
            }
        }
        recorder.snapshotter().snapshot().into_vec()
    });
    let all: BTreeSet<_> = described.iter().map(|(key, ..)| key.key().name().to_owned()).collect();
    assert_eq!(all, names::ALL.iter().map(ToString::to_string).collect());
    for (key, unit, description, _) in &described {
        let name = key.key().name();
        let expected = if name.ends_with("_seconds") { Unit::Seconds } else { Unit::Count };
        assert_eq!(*unit, Some(expected), "{name}");
        assert!(description.as_ref().is_some_and(|text| text.ends_with('.')), "{name}");
    }
}
