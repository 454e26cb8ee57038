//! The cost of each operation in round trips; a refusal writes nothing.

use std::time::{Duration, Instant};

use actix_doclock::store::{Query, Rules, Saved, verbs::*};
use actix_doclock::{Aid, Lock, LockKey, Lockable, MongoStore, Released, TryAcquire, Wait};
use futures_util::future::{join, join_all};
use mongodb::bson::{RawDocumentBuf, doc};
use mongodb::{Collection, Database};
use tokio::time::sleep;

use crate::rig::app::{App, TTL, WorkItem, key, lock_records, put, title};
use crate::rig::{self, Commands, mongod, mongod::Mongod};

/// An application server on a replica set, its commands since it became ready, and its database.
async fn on_replica_set() -> (App, Commands, Database) {
    counted(&mongod::local_replica_set().await.uri()).await
}

async fn on_standalone() -> (App, Commands, Database) {
    counted(&mongod::shared_standalone().await.uri()).await
}

async fn counted(uri: &str) -> (App, Commands, Database) {
    let (database, commands) = rig::counted_database(uri).await;
    let app = App::on(&database).await;
    commands.take();
    (app, commands, database)
}

/// A lock of a new session, without counting the commands for it.
async fn lock(app: &App, commands: &Commands, key: &LockKey) -> Lock {
    let lock = app.granted(key, &Aid::new()).await;
    commands.take();
    lock
}

#[tokio::test]
async fn a_free_document_is_acquired_by_one_command() {
    for (app, commands, _) in [on_replica_set().await, on_standalone().await] {
        app.granted(&key("a"), &Aid::new()).await;
        assert_eq!(commands.take(), ["findAndModify"]);
    }
}

/// A late second write of the same attempt would bring a released lock back.
#[tokio::test]
async fn a_leftover_record_is_taken_over_by_a_read_and_a_write() {
    for (app, commands, database) in [on_replica_set().await, on_standalone().await] {
        lock_records(&database).insert_one(doc! { "_id": "a" }).await.unwrap();
        commands.take();
        let lock = app.granted(&key("a"), &Aid::new()).await;
        assert_eq!(commands.take(), ["findAndModify", "find", "update"]);
        assert!(lock.expires_in() > TTL / 2 && lock.expires_in() <= TTL, "{lock:?}");
    }
}

#[tokio::test]
async fn reentry_is_one_command() {
    for (app, commands, _) in [on_replica_set().await, on_standalone().await] {
        let lock = lock(&app, &commands, &key("a")).await;
        assert_eq!(app.already_mine(&key("a"), &lock.aid).await.token, lock.token);
        assert_eq!(commands.take(), ["findAndModify"]);
    }
}

#[tokio::test]
async fn a_refusal_is_one_read_and_names_the_holder() {
    for (app, commands, database) in [on_replica_set().await, on_standalone().await] {
        let lock = lock(&app, &commands, &key("a")).await;
        let seen = app.held(&key("a")).await;
        assert_eq!(commands.take(), ["find"]);
        // A server that knows nothing of the holder claims first, and knows it from then on.
        let other = App::on(&database).await;
        commands.take();
        other.held(&key("a")).await;
        other.held(&key("a")).await;
        assert_eq!(commands.take(), ["findAndModify", "find", "find"]);
        assert!(!seen.expires_in().is_zero());
        assert_eq!((seen.holder, seen.since), (lock.holder, lock.since));
    }
}

#[tokio::test]
async fn an_expired_lock_is_taken_over_after_its_holder_is_left_to_the_reaper() {
    for (app, commands, database) in [on_replica_set().await, on_standalone().await] {
        let lock = lock(&app, &commands, &key("a")).await;
        rig::age(&database, &key("a"), TTL).await;
        commands.take();
        assert_ne!(app.granted(&key("a"), &Aid::new()).await.token, lock.token);
        assert_eq!(commands.take(), ["find", "update", "find", "update"]);
    }
}

#[tokio::test]
async fn a_release_is_one_command() {
    for (app, commands, _) in [on_replica_set().await, on_standalone().await] {
        let lock = lock(&app, &commands, &key("a")).await;
        assert_eq!(app.locks.release(&lock).await.unwrap(), Released::Released);
        assert_eq!(commands.take(), ["delete"]);
    }
}

/// The server remembers who holds what, and forgets it when it has removed the lock itself.
#[tokio::test]
async fn a_document_that_the_end_of_a_session_has_freed_is_acquired_by_one_command() {
    let (app, commands, _) = on_replica_set().await;
    for all_at_once in [false, true] {
        let ends = Aid::new();
        app.granted(&key("a"), &ends).await;
        if all_at_once {
            app.locks.release_all(&ends).await.unwrap();
        } else {
            app.locks.end_session(&ends).await.unwrap();
        }
        commands.take();
        let next = app.granted(&key("a"), &Aid::new()).await;
        let sent = commands.take().into_iter().filter(|it| it != "update").collect::<Vec<_>>();
        assert_eq!(sent, ["findAndModify"], "besides the announcement of the end");
        app.locks.release(&next).await.unwrap();
    }
}

/// The end with the names of the locks, then their removal. The locks are read before each: one that was taken meanwhile
/// must be named before it is removed. Beside the removal, the traces of replaced locks are read.
#[tokio::test]
async fn a_logout_is_two_writes_each_after_a_read_of_its_locks() {
    let (app, commands, _) = on_replica_set().await;
    for locks in 0..3 {
        let aid = Aid::new();
        for n in 0..locks {
            app.granted(&key(&format!("{n}")), &aid).await;
        }
        commands.take();
        app.locks.end_session(&aid).await.unwrap();
        let mut sent = commands.take();
        assert_eq!(sent[..3], ["find", "findAndModify", "find"]);
        // The end is settled after the answer.
        while sent.len() < 6 {
            sleep(Duration::from_millis(1)).await;
            sent.extend(commands.take());
        }
        sent[3..].sort();
        assert_eq!(sent[3..], ["aggregate", "delete", "update"], "{locks} locks");
    }
}

/// The holder's release does not wait behind a write of each refused claim.
#[tokio::test]
async fn a_crowd_that_is_refused_at_the_same_time_writes_little() {
    for (app, commands, database) in [on_replica_set().await, on_standalone().await] {
        lock(&app, &commands, &key("a")).await;
        // It knows nothing of the holder.
        let app = App::on(&database).await;
        commands.take();
        let key = key("a");
        join_all((0..100).map(|_| app.held(&key))).await;
        let sent = commands.take();
        let writes = sent.iter().filter(|it| *it == "findAndModify").count();
        assert!((1..=20).contains(&writes), "{writes} of {}", sent.len());
        // Now it knows the holder, and one read answers many.
        join_all((0..100).map(|_| app.held(&key))).await;
        let sent = commands.take();
        assert!(sent.len() <= 20 && sent.iter().all(|it| it == "find"), "{sent:?}");
    }
}

/// A group of releases is a read and a delete; a group of acquires is an insert and a read.
#[tokio::test]
async fn acquires_and_releases_at_the_same_time_travel_together() {
    for (app, commands, _) in [on_replica_set().await, on_standalone().await] {
        let aids: Vec<_> = (0..100).map(|_| Aid::new()).collect();
        let acquire = async |(n, aid)| app.granted(&key(&format!("{n}")), aid).await;
        let began = Instant::now();
        let locks = join_all(aids.iter().enumerate().map(acquire)).await;
        let sent = commands.take();
        // On a machine that is busy with other things, a claim or a release that is late goes alone.
        let is_slow = |began: Instant| began.elapsed() >= Duration::from_millis(500);
        assert!(sent.len() <= 20 || is_slow(began), "{sent:?}");
        assert!(sent.iter().any(|it| it == "insert"), "{sent:?}");
        for (lock, aid) in locks.iter().zip(&aids) {
            assert_eq!(lock.aid, *aid);
            assert!(lock.expires_in() > TTL / 2 && lock.expires_in() <= TTL, "{lock:?}");
            let seen = app.locks.inspect(&lock.key).await.unwrap().unwrap();
            assert_eq!((seen.token, seen.since), (lock.token, lock.since));
        }
        // One of them is gone already, and its release must not be mistaken for another.
        let gone = &locks[50];
        app.locks.release(gone).await.unwrap();
        commands.take();
        let release = async |lock| app.locks.release(lock).await.unwrap();
        let began = Instant::now();
        let mut released = join_all(locks.iter().chain(&locks[51..52]).map(release)).await;
        // This one was released twice at once, and one of the two may have been too late.
        let twice = [released[51], released.pop().unwrap()];
        assert!(twice.contains(&Released::Released), "{twice:?}");
        released[51] = Released::Released;
        let sent = commands.take();
        assert!(sent.len() <= 20 || is_slow(began), "{sent:?}");
        for (lock, released) in locks.iter().zip(released) {
            let expected =
                if lock.token == gone.token { Released::AlreadyGone } else { Released::Released };
            assert_eq!(released, expected, "{lock:?}");
            assert!(app.locks.inspect(&lock.key).await.unwrap().is_none());
        }
    }
}

/// As the heartbeats of a crowd: each read tells each session its own locks, and nobody else's.
#[tokio::test]
async fn sessions_that_ask_for_their_locks_within_a_moment_share_the_reads() {
    for (app, commands, _) in [on_replica_set().await, on_standalone().await] {
        let mut aids: Vec<_> = (0..98).map(|_| Aid::new()).collect();
        for (n, aid) in aids.iter().enumerate() {
            app.granted(&key(&format!("{n}")), aid).await;
        }
        let read = async || app.locks.acquire_shared(&key("read by two"), Wait::no()).await;
        let readers = [read().await.unwrap(), read().await.unwrap()];
        aids.extend(readers.iter().map(|reader| reader.lock().aid.clone()));
        aids.push(Aid::new());
        commands.take();
        let began = Instant::now();
        let beat = async |(n, aid)| {
            sleep(Duration::from_millis(2) * n).await;
            app.locks.list_of(aid).await
        };
        let lists = join_all((0..).zip(&aids).map(beat)).await;
        let sent = commands.take();
        // On a slow machine there are more of them, but no more than three in each 25 ms.
        let most = 10 + began.elapsed().as_millis() as usize / 8;
        assert!(sent.len() <= most, "{} reads", sent.len());
        for (n, (list, aid)) in lists.into_iter().zip(&aids).enumerate() {
            let list = list.unwrap();
            assert!(list.iter().all(|lock| lock.aid == *aid), "{list:?}");
            assert_eq!(list.len(), usize::from(n < 100), "{list:?}");
        }
    }
}

#[tokio::test]
async fn renewing_all_locks_of_a_session_in_one_collection_is_a_write_and_a_look_for_shared_ones() {
    for (app, commands, _) in [on_replica_set().await, on_standalone().await] {
        let aid = Aid::new();
        for id in ["a", "b", "c"] {
            app.granted(&key(id), &aid).await;
        }
        commands.take();
        assert_eq!(app.locks.renew(&aid).await.unwrap(), 3);
        let mut sent = commands.take();
        sent.sort();
        assert_eq!(sent, ["find", "update"]);
    }
}

#[tokio::test]
async fn a_guarded_save_is_a_transaction_of_two_updates() {
    let (app, commands, database) = on_replica_set().await;
    put(&database, "a", "old").await;
    let lock = lock(&app, &commands, &key("a")).await;
    assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Saved);
    assert_eq!(commands.take(), ["update", "update", "commitTransaction"]);
    assert_eq!(title(&database, "a").await, "new");
}

#[tokio::test]
async fn without_transactions_a_guarded_save_is_two_updates() {
    let (app, commands, database) = on_standalone().await;
    put(&database, "a", "old").await;
    let lock = lock(&app, &commands, &key("a")).await;
    assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Saved);
    assert_eq!(commands.take(), ["update", "update"]);
    assert_eq!(title(&database, "a").await, "new");
}

#[tokio::test]
async fn a_refused_save_is_rolled_back() {
    let (app, commands, database) = on_replica_set().await;
    put(&database, "a", "old").await;
    let lock = lock(&app, &commands, &key("a")).await;
    rig::age(&database, &key("a"), TTL).await;
    let before = stored(&database).await;
    commands.take();
    assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Lost);
    assert_eq!(commands.take(), ["update", "update", "abortTransaction"]);
    assert_eq!(title(&database, "a").await, "old");
    assert_eq!(stored(&database).await, before);
}

#[tokio::test]
async fn a_refusal_writes_nothing() {
    let (app, _, database) = on_replica_set().await;
    app.granted(&key("a"), &Aid::new()).await;
    let before = (stored(&database).await, log_entries(&database).await);
    assert!(before.1 > 0, "a write is seen in the log");
    for _ in 0..3 {
        app.held(&key("a")).await;
    }
    assert_eq!((stored(&database).await, log_entries(&database).await), before);
}

#[tokio::test]
async fn registering_again_asks_for_the_indexes_and_changes_nothing() {
    let (app, commands, _) = on_replica_set().await;
    app.locks.register::<WorkItem>().await.unwrap();
    assert_eq!(commands.take(), ["listCollections", "listIndexes", "listIndexes"]);
}

#[tokio::test]
async fn inspecting_a_lock_is_one_command_and_breaking_it_five() {
    let (database, commands) =
        rig::counted_database(&mongod::local_replica_set().await.uri()).await;
    let app = App::with(&database, |settings| settings.break_policy(|_, _| true)).await;
    lock(&app, &commands, &key("a")).await;
    assert!(app.locks.inspect(&key("a")).await.unwrap().is_some());
    assert_eq!(commands.take(), ["find"]);
    assert!(app.break_lock(&key("a")).await.is_some());
    // The second command notes the break for the listener, and the fourth tells watchers who broke the lock.
    // The note is settled after the answer.
    assert_eq!(commands.take()[..5], ["find", "update", "find", "update", "delete"]);
    assert!(matches!(
        app.try_acquire(&key("a"), &Aid::new()).await.unwrap(),
        TryAcquire::Granted(_)
    ));
}

/// The majority-committed state is read later than the state of the primary, and the lock ends in between.
#[tokio::test]
async fn a_lock_that_ends_between_the_two_reads_of_a_list_is_no_error() {
    let server = Mongod::start_replica_set().await;
    let (app, _, database) = counted(&server.uri()).await;
    let store = MongoStore::new(&database);
    store.prepare(WorkItem::COLLECTION, &Rules::new(TTL), Deadline::NONE).await.unwrap();
    let lock = app.granted(&key("a"), &Aid::new()).await;
    let late = doc! { "failCommands": ["find"], "blockConnection": true, "blockTimeMS": 1_000 };
    let once = doc! { "times": 1 };
    server.admin(doc! { "configureFailPoint": "failCommand", "mode": once, "data": late }).await;
    let aids = [lock.aid.clone()];
    let listed = store.locks(WorkItem::COLLECTION, Query::Of(&aids), 10, Deadline::NONE);
    let release = async {
        sleep(Duration::from_millis(300)).await;
        app.locks.release(&lock).await.unwrap()
    };
    let (listed, released) = join(listed, release).await;
    assert_eq!(released, Released::Released);
    // On a slow machine the release may come after both reads.
    assert!(listed.unwrap().iter().all(|it| it.token == lock.token));
}

/// The lock records, byte for byte.
async fn stored(database: &Database) -> Vec<Vec<u8>> {
    let records: Collection<RawDocumentBuf> = lock_records(database).clone_with_type();
    let mut cursor = records.find(doc! {}).sort(doc! { "_id": 1 }).await.unwrap();
    let mut stored = Vec::new();
    while cursor.advance().await.unwrap() {
        stored.push(cursor.current().as_bytes().to_vec());
    }
    stored
}

/// The number of writes to the lock collection in the replica set's oplog.
async fn log_entries(database: &Database) -> u64 {
    let log = database.client().database("local").collection::<RawDocumentBuf>("oplog.rs");
    let namespace = lock_records(database).namespace().to_string();
    log.count_documents(doc! { "ns": namespace }).await.unwrap()
}
