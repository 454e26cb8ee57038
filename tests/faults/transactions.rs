//! Transactions and updates of the application under a lock, while the primary changes.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::pin::pin;

use actix_doclock::store::TransactionError;
use actix_doclock::{LockError, LockGuard, Lockable, Wait};
use mongodb::bson::{Document, doc};
use mongodb::{Collection, Database};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::members::shared_set;
use crate::rig;
use crate::rig::app::{App, WorkItem, key};
use crate::rig::replica_set::ReplicaSet;

/// How often the primary changes in each test.
const ROUNDS: usize = 3;

#[derive(Debug, Serialize, Deserialize)]
struct Tagged {
    #[serde(rename = "_id")]
    id: String,
    tags: Vec<String>,
}

impl Lockable for Tagged {
    type Id = String;
    const COLLECTION: &'static str = WorkItem::COLLECTION;
}

struct Scene {
    app: App,
    guard: LockGuard,
    items: Collection<Document>,
    entries: Collection<Document>,
}

impl Scene {
    async fn new(set: &ReplicaSet) -> Self {
        let database: Database = rig::fresh_database(&set.uri()).await;
        let (items, entries) = (database.collection("workitem"), database.collection("entry"));
        items.insert_one(doc! { "_id": "a", "tags": [] }).await.unwrap();
        entries.insert_one(doc! { "_id": "the collection exists" }).await.unwrap();
        let app = App::on(&database).await;
        let guard = app.locks.acquire(&key("a"), Wait::no()).await.unwrap();
        Self { app, guard, items, entries }
    }

    /// How often this tag was written: to the document, and as an entry.
    async fn written(&self, tag: &str) -> (usize, u64) {
        let item = self.items.find_one(doc! { "_id": "a" }).await.unwrap().unwrap();
        let tags = item.get_array("tags").unwrap().iter();
        let entries = self.entries.count_documents(doc! { "tag": tag }).await.unwrap();
        (tags.filter(|it| it.as_str() == Some(tag)).count(), entries)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_during_a_failover_is_written_once_or_not_at_all() {
    let (set, _turn) = shared_set().await;
    let scene = Scene::new(set).await;
    for round in 0..ROUNDS {
        for in_the_work in [true, false] {
            let tag = &format!("{round} {in_the_work}");
            let has_worked = Notify::new();
            let (held, calls) = ([scene.guard.held()], Cell::new(0));
            let booked = scene.app.store.transaction(&held, async |session| {
                calls.set(calls.get() + 1);
                let entry = doc! { "tag": tag };
                scene.entries.insert_one(entry).session(&mut *session).await?;
                if in_the_work && calls.get() == 1 {
                    set.step_down().await;
                }
                let push = doc! { "$push": { "tags": tag } };
                scene.items.update_one(doc! { "_id": "a" }, push).session(session).await?;
                has_worked.notify_one();
                Ok::<_, mongodb::error::Error>(())
            });
            let fails_at_the_commit = async {
                has_worked.notified().await;
                if !in_the_work {
                    set.step_down().await;
                }
            };
            let (booked, ()) = tokio::join!(booked, fails_at_the_commit);
            let written = scene.written(tag).await;
            match booked {
                Ok(()) => assert_eq!(written, (1, 1), "{tag}"),
                Err(TransactionError::Lock(LockError::OutcomeUnknown(_))) => {
                    assert!(matches!(written, (0, 0) | (1, 1)), "{tag}: {written:?}");
                }
                Err(e) => panic!("{tag}: {e}; {written:?}"),
            }
            assert!(!in_the_work || calls.get() > 1, "{tag}: it was not disturbed");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_during_a_failover_is_written_once_or_reported_as_unknown() {
    let (set, _turn) = shared_set().await;
    let scene = Scene::new(set).await;
    let held = scene.guard.held();
    for round in 0..ROUNDS {
        // As many as there is time for: some of them meet the election.
        let mut stepping = pin!(set.step_down());
        let (mut stepped, mut nth) = (false, 0);
        while !stepped {
            nth += 1;
            let tag = &format!("{round} {nth}");
            let push = doc! { "$push": { "tags": tag } };
            let update = scene.app.store.update::<Tagged>(&held, push);
            let updated = tokio::select! {
                updated = update => updated,
                () = &mut stepping, if !stepped => {
                    stepped = true;
                    continue;
                }
            };
            let (written, _) = scene.written(tag).await;
            match updated {
                Ok(now) => assert!(written == 1 && now.tags.last() == Some(tag), "{tag}: {now:?}"),
                Err(LockError::OutcomeUnknown(_)) => assert!(written <= 1, "{tag}"),
                Err(e) => panic!("{tag}: {e}; {written}"),
            }
        }
    }
    let tags = scene.items.find_one(doc! { "_id": "a" }).await.unwrap().unwrap();
    let tags: Vec<_> = tags.get_array("tags").unwrap().iter().map(ToString::to_string).collect();
    let once: BTreeSet<_> = tags.iter().collect();
    assert_eq!(once.len(), tags.len(), "an update was written twice");
    assert!(tags.len() > ROUNDS, "{tags:?}");
}
