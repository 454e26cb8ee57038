//! Broken applications. The checker must find them broken; otherwise it would not find anything in ours
//! either.

use std::time::Duration;

use actix_doclock::{Aid, LockKey, Lockable};
use mongodb::bson::{Document, doc};
use mongodb::options::{Acknowledgment, ReturnDocument, WriteConcern};
use mongodb::{Client, Database};
use tokio::time::sleep;

use crate::application::desk::Desk;
use crate::application::{Fenced, Plain, Role, Settings};
use crate::check::{Clocks, Stored, check};
use crate::fleet::Fleet;
use crate::history::{Event, History, moment, name};
use crate::members::shared_set;
use crate::nemesis::stop_replication;
use crate::rig::mongod::strict_replica_set;
use crate::rig::{client, fresh_name};
use crate::round;

/// So long that no lock expires in the meantime.
const TTL: Duration = Duration::from_secs(60);

/// No pause from outside is needed: the sessions think for longer than the ttl, and then write without
/// the guard.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saves_without_the_guard_are_found_to_lose_updates() {
    let mut fleet = Fleet::new(&strict_replica_set().await.uri()).await;
    fleet.put_documents(1).await;
    for seed in [1, 2] {
        fleet.start(Role::Load { seed, keys: 1, careless: true }).await;
    }
    fleet
        .until_recorded("some have overwritten what others had saved", |lines| {
            let seen = check(lines, &Stored::new(), Clocks::Agree).violations;
            seen.iter().filter(|it| it.contains("had the lock by then")).count() >= 3
        })
        .await;
    let report = round::finish(fleet, Clocks::Agree).await;
    assert!(!report.violations.is_empty(), "the checker is blind: {report:?}");
    let text = report.violations.join("\n");
    assert!(text.contains("and is lost") && text.contains("had the lock by then"), "{text}");
}

/// An exclusive lock by the driver alone, with the given write concern: a single insert.
async fn grant(database: &Database, history: &History, concern: WriteConcern) -> bool {
    let key = LockKey::new(Plain::COLLECTION, "twin").unwrap();
    let op = history.next_op();
    history.write(op, Event::AcquireBegan { key: name(&key) });
    let (asked, token) = (std::time::Instant::now(), Aid::new());
    let locks = database.collection::<Document>("twin.lock");
    let free = doc! { "$eq": [{ "$type": "$token" }, "missing"] };
    let granted = locks
        .find_one_and_update(
            doc! { "_id": "twin" },
            vec![doc! { "$set": { "token": { "$cond": [free, token.as_str(), "$token"] } } }],
        )
        .upsert(true)
        .return_document(ReturnDocument::After)
        .write_concern(concern)
        .await;
    match granted {
        Ok(Some(lock)) if lock.get_str("token").is_ok_and(|it| it == token.as_str()) => {
            history.write(
                op,
                Event::Granted {
                    key: name(&key),
                    aid: String::new(),
                    token: token.as_str().to_owned(),
                    shared: false,
                    fence: None,
                    until: moment(asked + TTL),
                },
            );
            true
        }
        Ok(_) => false,
        Err(e) => {
            history.write(op, Event::Unknown { why: e.to_string() });
            false
        }
    }
}

async fn patient(uri: &str, name: &str) -> Database {
    let client: Client = client(uri).await;
    client.database(name)
}

/// The primary grants a lock, its write does not reach another member, and it dies. The next primary
/// grants the same lock. With `w: 1` both holders believe in their locks, and the checker finds it. The
/// crate is not deceived: its first grant has an unknown outcome.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_acknowledged_by_one_member_is_found_to_be_granted_twice() {
    let (set, _turn) = shared_set().await;
    let fleet = Fleet::new(&set.uri()).await.with(Settings { ttl: TTL, ..Settings::default() });
    let name = fresh_name();
    let (twin, again) = (patient(&set.uri(), &name).await, patient(&set.uri(), &name).await);
    let twin_history = tempfile::tempdir().unwrap();
    let history = History::create(&twin_history.path().join("twin.jsonl"), "twin");
    let (ours, after) = (fleet.inside("ours").await, fleet.inside("after").await);

    let primary = set.primary().await;
    stop_replication(set, primary, true).await;
    let one = WriteConcern::builder().w(Acknowledgment::Nodes(1)).build();
    assert!(grant(&twin, &history, one).await, "the twin has its lock");
    let key = LockKey::new(Fenced::COLLECTION, "a").unwrap();
    assert!(
        Desk::new(&ours).acquire(&key).await.is_none(),
        "the lock was granted without a majority"
    );
    set.members()[primary].kill9();
    stop_replication(set, primary, false).await;
    set.another_than(primary).await;

    assert!(grant(&again, &history, WriteConcern::majority()).await, "the twin's lock is lost");
    let mut attempts = 0;
    while Desk::new(&after).acquire(&key).await.is_none() {
        attempts += 1;
        assert!(attempts < 600, "locked forever");
        sleep(Duration::from_millis(100)).await;
    }
    set.members()[primary].restart_member().await;
    set.until_complete().await;

    let broken =
        check(&crate::history::read_all(twin_history.path()), &Stored::new(), Clocks::Agree);
    assert_eq!(broken.violations.len(), 1, "the checker is blind: {broken:?}");
    let report = check(&fleet.lines(), &Stored::new(), Clocks::Agree);
    assert!(report.unknown > 0);
    assert_eq!(report.violations, [""; 0]);
}
