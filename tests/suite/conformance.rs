//! The published conformance suite, on every store.

use std::time::Duration;

use actix_doclock::store::verbs::*;
use actix_doclock::{LockKey, MemoryStore, MongoStore, store::Rules};
use doclock_conformance::{COLLECTION, Page, Subject, TTL};
use mongodb::{Collection, Database, bson::doc};

use crate::rig;

mod memory {
    use super::*;

    struct Memory(MemoryStore);

    impl Subject for Memory {
        type Store = MemoryStore;

        async fn fresh() -> Self {
            let store = MemoryStore::new();
            store.prepare(COLLECTION, &Rules::new(TTL), Deadline::NONE).await.unwrap();
            Self(store)
        }

        fn store(&self) -> &MemoryStore {
            &self.0
        }

        async fn put(&self, page: &Page) {
            self.0.put(page.id.clone(), page).unwrap();
        }

        async fn delete(&self, key: &LockKey) {
            self.0.remove(key);
        }

        async fn age(&self, key: &LockKey, by: Duration) {
            self.0.age(key, by);
        }
    }

    doclock_conformance::store_conformance!(Memory);
}

/// MongoDB with any topology.
struct Mongo {
    store: MongoStore,
    pages: Collection<Page>,
}

impl Mongo {
    async fn fresh(database: Database) -> Self {
        let store = MongoStore::new(&database);
        store.prepare(COLLECTION, &Rules::new(TTL), Deadline::NONE).await.unwrap();
        Self { store, pages: database.collection(COLLECTION) }
    }

    async fn put(&self, page: &Page) {
        self.pages.insert_one(page).await.unwrap();
    }

    async fn delete(&self, key: &LockKey) {
        self.pages.delete_one(doc! { "_id": key.id().to_string() }).await.unwrap();
    }

    async fn age(&self, key: &LockKey, by: Duration) {
        rig::age(self.store.database(), key, by).await;
    }
}

macro_rules! on_mongo {
    ($name:ident, $database:expr, $($cases:ident),*) => {
        mod $name {
            use super::*;

            struct OnServer(Mongo);

            impl Subject for OnServer {
                type Store = MongoStore;

                async fn fresh() -> Self {
                    Self(Mongo::fresh($database).await)
                }

                fn store(&self) -> &MongoStore {
                    &self.0.store
                }

                async fn put(&self, page: &Page) {
                    self.0.put(page).await;
                }

                async fn delete(&self, key: &LockKey) {
                    self.0.delete(key).await;
                }

                async fn age(&self, key: &LockKey, by: Duration) {
                    self.0.age(key, by).await;
                }
            }

            $(doclock_conformance::$cases!(OnServer);)*
        }
    };
}

// Without transactions and change streams, a save and a watch are done in another way.
on_mongo!(
    standalone,
    rig::fresh_database(&rig::mongod::shared_standalone().await.uri()).await,
    saves,
    watch
);
// By a client that declares the strict Stable API: it may send less than the clients of all other tests.
on_mongo!(
    replica_set,
    rig::strict_database(rig::mongod::shared_replica_set().await.uri()).await,
    store_conformance
);
