//! For each drop, a new application server, and a document that no other test touches.

use std::{rc::Rc, time::Duration};

use actix_doclock::{
    Actor, Aid, Holder, Lock, LockKey, LockManager, Lockable, MemoryStore, MongoStore, Named,
    TryAcquire, Wait,
};
use actix_session_mongo::MongoSessionStore;
use mongodb::Database;
use serde::{Deserialize, Serialize};

use crate::rig::{
    self,
    app::{NO_DEADLINE, TTL},
    fresh_name, mongod,
};

/// Fair, so that an abandoned place in the queue blocks the next waiter.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Paper {
    #[serde(rename = "_id")]
    pub(super) id: String,
}

impl Lockable for Paper {
    type Id = String;
    const COLLECTION: &'static str = "paper";
    const FAIR: bool = true;
}

pub(super) enum Stores {
    Embedded,
    Mongo(Database),
}

impl Stores {
    pub(super) async fn mongo() -> Self {
        Self::Mongo(rig::fresh_database(mongod::shared_replica_set().await.uri()).await)
    }
}

pub(super) struct Scene {
    pub(super) locks: LockManager,
    pub(super) sessions: Option<MongoSessionStore>,
    pub(super) key: LockKey,
    /// Another document, whose key comes after `key`.
    pub(super) other: LockKey,
    pub(super) alice: Aid,
}

impl Scene {
    pub(super) async fn new(stores: &Stores) -> Rc<Self> {
        let id = fresh_name();
        let (key, other) = (paper(&id), paper(&format!("{id} other")));
        let settings = |builder: actix_doclock::LockManagerBuilder| {
            let builder = builder.ttl(TTL).deadline(NO_DEADLINE).without_reaper();
            builder.break_policy(|_, _| true)
        };
        let (locks, sessions) = match stores {
            Stores::Embedded => {
                let store = MemoryStore::new();
                for key in [&key, &other] {
                    let id = key.id().to_string();
                    store.put(id.clone(), &Paper { id }).unwrap();
                }
                (settings(LockManager::builder(store)).build().await.unwrap(), None)
            }
            Stores::Mongo(database) => {
                let store = MongoStore::new(database);
                let papers = [&key, &other].map(|key| Paper { id: key.id().to_string() });
                database.collection(Paper::COLLECTION).insert_many(papers).await.unwrap();
                let locks = settings(LockManager::builder(store.clone())).build().await.unwrap();
                let sessions = MongoSessionStore::builder(database)
                    .collection("doclock.session")
                    .user_key("name")
                    .id_key("doclock.aid")
                    .on_end(locks.session_ends())
                    .without_sweeps();
                (locks, Some(sessions.build().await.unwrap()))
            }
        };
        locks.register::<Paper>().await.unwrap();
        locks.register::<Named>().await.unwrap();
        Rc::new(Self { locks, sessions, key, other, alice: Aid::new() })
    }

    /// Alice takes the lock.
    pub(super) async fn hers(&self) -> Lock {
        match self
            .locks
            .lock_for_session(&self.key, &self.alice, &Holder::new("alice"))
            .await
            .unwrap()
        {
            TryAcquire::Granted(lock) => lock,
            other => panic!("not granted: {other:?}"),
        }
    }

    pub(super) fn actor(&self) -> Actor {
        Actor::new("root")
    }

    /// Long enough for a test that drops the wait.
    pub(super) fn patience(&self) -> Wait {
        Wait::for_at_most(Duration::from_secs(600))
    }

    async fn held(&self, key: &LockKey) -> Vec<Lock> {
        self.locks.locks_on(key).await.unwrap()
    }

    /// The number of its holders.
    pub(super) async fn held_by(&self) -> usize {
        self.held(&self.key).await.len()
    }

    /// Asserts that a new contender gets both documents.
    pub(super) async fn is_free(&self, what: &str) {
        for key in [&self.key, &self.other] {
            let left = self.held(key).await;
            assert!(left.is_empty(), "{what}: left behind: {left:?}");
            let next =
                self.locks.lock_for_session(key, &Aid::new(), &Holder::new("next")).await.unwrap();
            assert!(matches!(next, TryAcquire::Granted(_)), "{what}: a place is left: {next:?}");
        }
    }

    pub(super) async fn is_hers(&self, what: &str) {
        let held = self.held(&self.key).await;
        assert!(matches!(&held[..], [lock] if lock.aid == self.alice), "{what}: {held:?}");
        assert!(self.held(&self.other).await.is_empty(), "{what}");
    }

    pub(super) async fn is_hers_or_free(&self, what: &str) {
        if self.held(&self.key).await.is_empty() {
            self.is_free(what).await;
        } else {
            self.is_hers(what).await;
        }
    }
}

fn paper(id: &str) -> LockKey {
    LockKey::of::<Paper>(id.to_owned()).unwrap()
}
