//! A store on `redb`, an embedded database: written from `docs/a-store-of-your-own.md`, and an example for that page.

#![expect(clippy::unwrap_used, reason = "a failed preparation is a panic")]

use std::time::Duration;

use doclock_conformance::{COLLECTION, Page, Subject, TTL};
use doclock_core::{
    LockKey,
    store::{Deadline, Locks, Rules},
};
use redb::{Database, backends::InMemoryBackend};

mod grant;
mod store;

use store::RedbStore;

struct Redb(RedbStore);

impl Subject for Redb {
    type Store = RedbStore;

    async fn fresh() -> Self {
        let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
        let store = RedbStore::new(database);
        store.prepare(COLLECTION, &Rules::new(TTL), Deadline::NONE).await.unwrap();
        Self(store)
    }

    fn store(&self) -> &RedbStore {
        &self.0
    }

    async fn put(&self, page: &Page) {
        let key = LockKey::of::<Page>(page.id.clone()).unwrap();
        self.0.put(&key, page).unwrap();
    }

    async fn delete(&self, key: &LockKey) {
        self.0.delete(key).unwrap();
    }

    async fn age(&self, key: &LockKey, by: Duration) {
        self.0.age(key, by).unwrap();
    }
}

doclock_conformance::store_conformance!(Redb);
