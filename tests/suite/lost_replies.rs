//! The network loses a request or its reply. The caller still learns the truth, and nothing is left
//! behind.
//!
//! The driver itself repeats some commands. Each count of losses above one reaches the crate's own
//! repetition, and so does each loss of a command that the driver never repeats.

use std::time::Duration;

use actix_doclock::{
    Actor, Aid, LockError, Released, StoreError, StoreErrorKind, TryAcquire, Wait, store::Saved,
};
use doclock_conformance::Shorthand;
use futures_util::future::join_all;
use mongodb::bson::{Document, doc};
use tokio::time::{sleep, timeout};

use crate::rig;
use crate::rig::app::{
    App, NO_DEADLINE, WorkItem, by_root, count, eventually, key, lock_records, put, record,
    store_error_kind, title,
};
use crate::rig::faulty::Faulty;
use crate::rig::mongod;
use crate::rig::proxy::Proxy;

/// The deadline of a verb that is to miss it: long enough for its command to leave a busy machine.
const LATE: Duration = Duration::from_secs(3);

/// Repeats a verb of the store while its outcome is unknown, like the manager.
async fn until_known<T>(mut verb: impl AsyncFnMut() -> Result<T, StoreError>) -> T {
    loop {
        match verb().await {
            Ok(answer) => return answer,
            Err(error) => assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}"),
        }
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn an_acquire_whose_reply_is_lost_finds_its_own_grant() {
    for losses in 1..=3 {
        let faulty = Faulty::new().await;
        for _ in 0..losses {
            faulty.proxy.drop_reply_to("findAndModify");
        }
        let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
        let record = record(&faulty.database, &key("a")).await.unwrap();
        assert_eq!(record.get_str("token").unwrap(), lock.token.unwrap().to_string());
        assert_eq!(count(&faulty.database).await, 1);
        assert_eq!(faulty.proxy.passed("findAndModify"), losses + 1);
        faulty.assert_fired(losses);
    }
}

/// Here the crate itself makes every attempt, the second one included.
#[tokio::test]
async fn an_acquire_finds_its_own_grant_without_the_drivers_help() {
    let server = mongod::local_replica_set().await;
    let faulty = Faulty::on(server, "&retryWrites=false", NO_DEADLINE).await;
    faulty.proxy.drop_reply_to("findAndModify");
    let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
    let record = record(&faulty.database, &key("a")).await.unwrap();
    assert_eq!(record.get_str("token").unwrap(), lock.token.unwrap().to_string());
    assert_eq!(faulty.proxy.passed("findAndModify"), 2);
    faulty.assert_fired(1);
}

#[tokio::test]
async fn an_acquire_that_never_arrived_is_sent_again() {
    for losses in 1..=3 {
        let faulty = Faulty::new().await;
        for _ in 0..losses {
            faulty.proxy.drop_request("findAndModify");
        }
        faulty.app.granted(&key("a"), &Aid::new()).await;
        assert_eq!(count(&faulty.database).await, 1);
        assert_eq!(faulty.proxy.passed("findAndModify"), 1);
        faulty.assert_fired(losses);
    }
}

#[tokio::test]
async fn a_refusal_whose_reply_is_lost_is_a_refusal() {
    let faulty = Faulty::new().await;
    let lock = faulty.other.granted(&key("a"), &Aid::new()).await;
    for _ in 0..3 {
        faulty.proxy.drop_reply_to("find");
    }
    assert_eq!(faulty.app.held(&key("a")).await.token, lock.token);
    faulty.assert_fired(3);
}

#[tokio::test]
async fn a_release_whose_reply_is_lost_has_released() {
    for losses in 1..=3 {
        let faulty = Faulty::new().await;
        let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
        for _ in 0..losses {
            faulty.proxy.drop_reply_to("delete");
        }
        faulty.app.locks.release(&lock).await.unwrap();
        assert_eq!(count(&faulty.database).await, 0);
        assert_eq!(faulty.proxy.passed("delete"), losses + 1);
        faulty.assert_fired(losses);
    }
}

#[tokio::test]
async fn a_release_that_never_arrived_is_sent_again() {
    for losses in 1..=3 {
        let faulty = Faulty::new().await;
        let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
        for _ in 0..losses {
            faulty.proxy.drop_request("delete");
        }
        faulty.app.locks.release(&lock).await.unwrap();
        assert_eq!(count(&faulty.database).await, 0);
        faulty.assert_fired(losses);
    }
}

/// The session has released the lock and locked again on another server while its first release was
/// still on its way.
#[tokio::test]
async fn a_release_that_arrives_late_does_not_remove_a_newer_lock_of_the_same_session() {
    let faulty = Faulty::with_deadline(LATE).await;
    let (a, alice) = (key("a"), Aid::new());
    let old = faulty.other.granted(&a, &alice).await;
    faulty.proxy.hold_request("delete");
    let unknown = faulty.app.locks.release(&old).await;
    assert_eq!(store_error_kind(unknown), StoreErrorKind::Unavailable);
    faulty.other.locks.release(&old).await.unwrap();
    let new = faulty.other.granted(&a, &alice).await;

    assert_eq!(faulty.proxy.passed("delete"), 0);
    faulty.proxy.let_go();
    eventually("the late release arrives", async || faulty.proxy.passed("delete") == 1).await;
    faulty.app.locks.shutdown().await;
    assert_eq!(faulty.other.already_mine(&a, &alice).await.token, new.token);
    faulty.assert_fired(1);
}

#[tokio::test]
async fn a_break_whose_reply_is_lost_is_reported_as_a_break() {
    for command in ["update", "delete"] {
        let faulty = Faulty::new().await;
        let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
        faulty.proxy.drop_reply_to(command);
        let store = &faulty.app.store;
        let broken = until_known(async || store.break_lock(&lock, &by_root()).await).await;
        assert_eq!(broken, Released::Released, "{command}");
        faulty.assert_fired(1);
        let again = until_known(async || store.break_lock(&lock, &by_root()).await).await;
        assert_eq!(again, Released::AlreadyGone, "{command}");
        assert_eq!(count(&faulty.database).await, 0, "{command}");
    }
}

/// Nobody knows then who has ended the lock. The listener is told later, as of a server that has died.
#[tokio::test]
async fn a_break_whose_reply_is_lost_stays_on_record_although_its_lock_is_gone_before_the_repetition()
 {
    let faulty = Faulty::new().await;
    let through = rig::client(&faulty.proxy.uri()).await.database(faulty.database.name());
    let app = App::with(&through, |settings| settings.break_policy(|_, _| true)).await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    // It is broken when the takeover is on record.
    faulty.proxy.hold_request("find");
    let root = Actor::new("root");
    let meanwhile = async {
        faulty.proxy.until_fired(1).await;
        faulty.proxy.drop_reply_to("update");
        // The repetition comes after some seconds.
        (0..40).for_each(|_| faulty.proxy.drop_request("find"));
        faulty.proxy.let_go();
        faulty.proxy.until_fired(2).await;
        lock_records(&faulty.database).delete_many(doc! {}).await.unwrap();
    };
    let (broken, ()) = tokio::join!(app.locks.break_lock(&lock, &root, ""), meanwhile);
    assert_eq!(broken.unwrap(), Released::AlreadyGone);
    app.locks.shutdown().await;
    let notes = faulty.database.collection::<Document>("doclock.ended");
    assert_eq!(notes.count_documents(doc! { "step": "tell" }).await.unwrap(), 1);
}

#[tokio::test]
async fn a_renewal_is_repeated_which_the_driver_never_does() {
    for losses in [1, 3] {
        let faulty = Faulty::new().await;
        let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
        for _ in 0..losses {
            faulty.proxy.drop_reply_to("update");
        }
        assert_eq!(faulty.app.locks.renew(&lock.aid).await.unwrap(), 1);
        assert_eq!(faulty.proxy.passed("update"), losses + 1);
        for _ in 0..losses {
            faulty.proxy.drop_request("update");
        }
        assert_eq!(faulty.app.locks.renew(&lock.aid).await.unwrap(), 1);
        assert_eq!(faulty.proxy.passed("update"), losses + 2);
        assert_eq!(faulty.app.already_mine(&key("a"), &lock.aid).await.token, lock.token);
        faulty.assert_fired(2 * losses);
    }
}

#[tokio::test]
async fn the_end_of_a_session_is_repeated_which_the_driver_never_does() {
    for losses in [1, 3] {
        let faulty = Faulty::new().await;
        let alice = Aid::new();
        faulty.app.granted(&key("a"), &alice).await;
        for _ in 0..losses {
            faulty.proxy.drop_request("delete");
        }
        assert_eq!(faulty.app.locks.end_session(&alice).await.unwrap().locks, [key("a")]);
        assert_eq!(count(&faulty.database).await, 0);
        assert!(faulty.other.store.session_ended(&alice).await.unwrap().is_some());
        faulty.assert_fired(losses);
    }
}

/// Each claim settles itself: some were granted, and others met a lock of somebody else.
#[tokio::test]
async fn claims_of_a_group_are_granted_once_each_whichever_reply_is_lost() {
    // The driver repeats a read once.
    for (command, losses) in [("findAndModify", 1), ("find", 1), ("find", 2)] {
        let faulty = Faulty::new().await;
        let (bob, aids) = (Aid::new(), [(); 40].map(|()| Aid::new()));
        for n in (0..40).step_by(4) {
            faulty.other.granted(&key(&n.to_string()), &bob).await;
        }
        for _ in 0..losses {
            faulty.proxy.drop_reply_to(command);
        }
        let acquire = async |(n, aid): (usize, &Aid)| {
            faulty.app.try_acquire(&key(&n.to_string()), aid).await.unwrap()
        };
        let answers = join_all(aids.iter().enumerate().map(acquire)).await;
        for (n, answer) in answers.into_iter().enumerate() {
            let seen = faulty.other.locks.inspect(&key(&n.to_string())).await.unwrap().unwrap();
            match answer {
                TryAcquire::Granted(lock) => {
                    assert_ne!(n % 4, 0, "{command}");
                    assert_eq!((seen.aid, seen.token), (aids[n].clone(), lock.token));
                }
                TryAcquire::Held(lock) => assert_eq!((n % 4, lock.aid), (0, bob.clone())),
                other => panic!("{command}: {other:?}"),
            }
        }
        faulty.assert_fired(losses);
    }
}

#[tokio::test]
async fn releases_of_a_group_take_effect_whichever_reply_is_lost() {
    for command in ["find", "delete"] {
        let faulty = Faulty::new().await;
        let aids = [(); 40].map(|()| Aid::new());
        let mut locks = Vec::new();
        for (n, aid) in aids.iter().enumerate() {
            locks.push(faulty.app.granted(&key(&n.to_string()), aid).await);
        }
        faulty.proxy.drop_reply_to(command);
        let release = async |lock| faulty.app.locks.release(lock).await.unwrap();
        join_all(locks.iter().map(release)).await;
        assert_eq!(count(&faulty.database).await, 0, "{command}");
        faulty.assert_fired(1);
    }
}

/// The list of held locks, the tombstone with their names and the removal each have a reply that can be lost.
#[tokio::test]
async fn a_session_ends_whichever_reply_is_lost() {
    for command in ["find", "findAndModify", "delete"] {
        for losses in [1, 3] {
            let faulty = Faulty::new().await;
            let (alice, bob) = (Aid::new(), Aid::new());
            faulty.app.granted(&key("a"), &alice).await;
            faulty.app.granted(&key("of bob"), &bob).await;
            for _ in 0..losses {
                faulty.proxy.drop_reply_to(command);
            }
            faulty.app.locks.end_session(&alice).await.unwrap();
            assert!(record(&faulty.database, &key("a")).await.is_none(), "{command}");
            assert!(record(&faulty.database, &key("of bob")).await.is_some(), "{command}");
            assert!(faulty.other.store.session_ended(&alice).await.unwrap().is_some());
            faulty.assert_fired(losses);
        }
    }
}

/// Released locks are announced; a lost reply must not suppress that.
#[tokio::test]
async fn a_session_whose_removal_is_repeated_still_names_its_locks() {
    let faulty = Faulty::new().await;
    let alice = Aid::new();
    faulty.app.granted(&key("a"), &alice).await;
    faulty.proxy.drop_reply_to("delete");
    assert_eq!(faulty.app.locks.end_session(&alice).await.unwrap().locks, [key("a")]);
    faulty.assert_fired(1);
}

/// Up to five commits, each sent twice by the driver.
#[tokio::test]
async fn a_save_whose_commit_is_not_confirmed_is_written_once() {
    for losses in [1, 2, 5] {
        let faulty = Faulty::new().await;
        put(&faulty.database, "a", "old").await;
        let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
        for _ in 0..losses {
            faulty.proxy.drop_reply_to("commitTransaction");
        }
        assert_eq!(faulty.app.save(&lock, "new").await.unwrap(), Saved::Saved);
        assert_eq!(title(&faulty.database, "a").await, "new");
        assert_eq!(faulty.proxy.passed("update"), 2, "the transaction was not repeated");
        assert_eq!(faulty.proxy.passed("commitTransaction"), losses + 1);
        assert_eq!(faulty.other.already_mine(&key("a"), &lock.aid).await.token, lock.token);
        faulty.assert_fired(losses);
    }
}

#[tokio::test]
async fn a_commit_that_never_arrived_is_sent_again() {
    for losses in [1, 2, 5] {
        let faulty = Faulty::new().await;
        put(&faulty.database, "a", "old").await;
        let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
        for _ in 0..losses {
            faulty.proxy.drop_request("commitTransaction");
        }
        assert_eq!(faulty.app.save(&lock, "new").await.unwrap(), Saved::Saved);
        assert_eq!(title(&faulty.database, "a").await, "new");
        assert_eq!(faulty.proxy.passed("update"), 2, "the transaction was not repeated");
        faulty.assert_fired(losses);
    }
}

/// No commit is confirmed before the deadline. The outcome is unknown, so no caller is told that
/// nothing was written, and the transaction is not repeated as if nothing had been written.
#[tokio::test]
async fn a_save_whose_commit_is_never_confirmed_has_an_unknown_outcome() {
    let faulty = Faulty::with_deadline(LATE).await;
    put(&faulty.database, "a", "old").await;
    let lock = faulty.other.granted(&key("a"), &Aid::new()).await;
    // Far more than the time allows.
    for _ in 0..100 {
        faulty.proxy.drop_reply_to("commitTransaction");
    }
    let error = faulty.app.save(&lock, "new").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "{error:?}");
    assert_eq!(faulty.proxy.passed("update"), 2);
    assert!(faulty.proxy.fired() > 0);
    assert_eq!(title(&faulty.database, "a").await, "new", "the commit did arrive");
}

/// Another session is already waiting for the document. The answer to the repeated commit must not
/// depend on the lock's later fate.
#[tokio::test]
async fn a_save_that_was_written_is_saved_even_if_its_lock_is_lost_before_the_reply() {
    let faulty = Faulty::new().await;
    put(&faulty.database, "a", "old").await;
    let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
    faulty.proxy.drop_reply_to("commitTransaction");
    faulty.proxy.drop_reply_to("commitTransaction");
    faulty.proxy.hold_request("commitTransaction");
    let saving = async { faulty.app.save(&lock, "new").await.unwrap() };
    let meanwhile = async {
        faulty.proxy.until_fired(3).await;
        faulty.other.locks.release(&lock).await.unwrap();
        faulty.other.granted(&key("a"), &Aid::new()).await;
        faulty.proxy.let_go();
    };
    assert_eq!(tokio::join!(saving, meanwhile).0, Saved::Saved);
    assert_eq!(title(&faulty.database, "a").await, "new");
    faulty.assert_fired(3);
}

/// A transaction that breaks off before its commit has not happened, and can be repeated at once.
#[tokio::test]
async fn a_save_that_breaks_off_before_its_commit_writes_nothing_and_can_be_repeated() {
    type Arm = fn(&Proxy, &str);
    let faults: [Arm; 2] = [Proxy::drop_request, Proxy::drop_reply_to];
    for arm in faults {
        for which in ["touching the lock", "replacing the document"] {
            let faulty = Faulty::new().await;
            put(&faulty.database, "a", "old").await;
            let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
            let mut faults = 1;
            if which == "replacing the document" {
                // Lets the first update pass, so that the fault hits the second.
                faulty.proxy.hold_request("update");
                faulty.proxy.let_go();
                faults += 1;
            }
            arm(&faulty.proxy, "update");
            let error = faulty.app.save(&lock, "new").await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{which}");
            assert_eq!(title(&faulty.database, "a").await, "old", "{which}");
            let saved = until_known(async || faulty.app.save(&lock, "new").await).await;
            assert_eq!(saved, Saved::Saved, "{which}");
            assert_eq!(title(&faulty.database, "a").await, "new", "{which}");
            faulty.assert_fired(faults);
        }
    }
}

#[tokio::test]
async fn a_save_without_transactions_can_be_repeated() {
    type Arm = fn(&Proxy, &str);
    let faults: [Arm; 2] = [Proxy::drop_request, Proxy::drop_reply_to];
    for arm in faults {
        let server = mongod::shared_standalone().await;
        let faulty = Faulty::on(server, "", NO_DEADLINE).await;
        put(&faulty.database, "a", "old").await;
        let lock = faulty.app.granted(&key("a"), &Aid::new()).await;
        arm(&faulty.proxy, "update");
        let saved = until_known(async || faulty.app.save(&lock, "new").await).await;
        assert_eq!(saved, Saved::Saved);
        assert_eq!(title(&faulty.database, "a").await, "new");
        faulty.assert_fired(1);
    }
}

/// A repetition would find the document, or miss it, and take that for the work of somebody else.
#[tokio::test]
async fn a_creation_or_deletion_without_transactions_whose_reply_is_lost_is_not_called_undone() {
    let server = mongod::shared_standalone().await;
    for command in ["insert", "delete"] {
        let faulty = Faulty::on(server, "", NO_DEADLINE).await;
        let locks = &faulty.app.locks;
        let guard = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        let item = WorkItem { id: "a".into(), title: "new".into() };
        let answer = if command == "insert" {
            faulty.proxy.drop_reply_to(command);
            guard.create(&item).await
        } else {
            put(&faulty.database, "a", "old").await;
            faulty.proxy.drop_reply_to(command);
            guard.delete().await
        };
        assert!(matches!(answer, Err(LockError::OutcomeUnknown(_))), "{command}: {answer:?}");
        faulty.assert_fired(1);
    }
}

/// The lock is granted after its caller was told that the outcome is unknown. The task that went on
/// sees that the caller no longer wants the lock.
#[tokio::test]
async fn a_grant_that_arrives_after_the_deadline_is_given_back() {
    let faulty = Faulty::with_deadline(LATE).await;
    faulty.proxy.hold_request("findAndModify");
    let unknown = faulty.app.try_acquire(&key("a"), &Aid::new()).await;
    assert_eq!(store_error_kind(unknown), StoreErrorKind::Unavailable);
    assert_eq!(count(&faulty.database).await, 0, "not there yet");

    faulty.proxy.let_go();
    eventually("the late grant", async || faulty.proxy.passed("findAndModify") == 1).await;
    eventually("it is given back", async || faulty.proxy.passed("delete") == 1).await;
    eventually("nothing is left", async || count(&faulty.database).await == 0).await;
    faulty.assert_fired(1);
}

/// Here the lock was granted in time, but its reply came too late.
#[tokio::test]
async fn a_grant_whose_reply_arrives_after_the_deadline_is_given_back() {
    let faulty = Faulty::with_deadline(LATE).await;
    faulty.proxy.hold_reply_to("findAndModify");
    let unknown = faulty.app.try_acquire(&key("a"), &Aid::new()).await;
    assert_eq!(store_error_kind(unknown), StoreErrorKind::Unavailable);
    faulty.proxy.until_fired(1).await;
    assert_eq!(count(&faulty.database).await, 1, "granted");

    faulty.proxy.let_go();
    eventually("nothing is left", async || count(&faulty.database).await == 0).await;
    faulty.assert_fired(1);
}

/// In the meantime another request of the session was told of the lock and works under it.
#[tokio::test]
async fn a_grant_that_is_kept_for_another_request_is_not_called_lost() {
    let faulty = Faulty::with_deadline(LATE).await;
    let alice = Aid::new();
    faulty.proxy.hold_reply_to("findAndModify");
    let unknown = faulty.app.try_acquire(&key("a"), &alice).await;
    assert_eq!(store_error_kind(unknown), StoreErrorKind::Unavailable);
    faulty.proxy.until_fired(1).await;
    let lock = faulty.app.already_mine(&key("a"), &alice).await;
    let mut lost = Box::pin(faulty.app.locks.lost(&lock));
    faulty.proxy.let_go();
    eventually("it is to be given back", async || faulty.proxy.passed("delete") == 1).await;
    assert!(timeout(Duration::from_millis(150), &mut lost).await.is_err(), "it is still there");
    assert_eq!(faulty.app.already_mine(&key("a"), &alice).await.token, lock.token);
    faulty.app.locks.release(&lock).await.unwrap();
    lost.await;
    faulty.assert_fired(1);
}

/// If the session already had the lock, an answer that comes too late does not give it back.
#[tokio::test]
async fn a_reentry_that_arrives_after_the_deadline_leaves_the_lock() {
    let faulty = Faulty::with_deadline(LATE).await;
    let lock = faulty.other.granted(&key("a"), &Aid::new()).await;
    faulty.proxy.hold_request("findAndModify");
    let unknown = faulty.app.try_acquire(&key("a"), &lock.aid).await;
    assert_eq!(store_error_kind(unknown), StoreErrorKind::Unavailable);
    faulty.proxy.let_go();
    faulty.app.locks.shutdown().await;
    // The command was for a free document, and changed nothing. After the deadline no other one is sent.
    assert_eq!(faulty.proxy.passed("findAndModify"), 1);
    assert_eq!(faulty.other.already_mine(&key("a"), &lock.aid).await.token, lock.token);
    faulty.assert_fired(1);
}
