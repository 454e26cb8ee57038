//! All verbs of a store in random order, compared with a reference that can be read in a minute.

mod op;
mod reference;
mod run;

use std::time::Duration;

use actix_doclock::store::verbs::*;
use actix_doclock::{LockKey, MemoryStore, MongoStore, store::Rules};
use mongodb::bson::{Document, doc};
use tokio::runtime::Runtime;

use self::{
    op::{Kind, Op, TTL, seconds, sequences},
    run::{Run, Subject, document},
};
use crate::rig::{
    self,
    app::{WorkItem, count, lock_records, record},
    mongod,
    random::check,
};

fn rules(kind: Kind) -> Rules {
    let rules = Rules::new(seconds(TTL));
    let rules = if kind.fair { rules.fair() } else { rules };
    if kind.fenced { rules.fenced() } else { rules }
}

fn item() -> WorkItem {
    WorkItem { id: document(0).id().to_string(), title: "old".to_owned() }
}

struct Memory(MemoryStore);

impl Subject for Memory {
    type Store = MemoryStore;

    fn store(&self) -> &MemoryStore {
        &self.0
    }

    async fn age(&self, key: &LockKey, by: Duration) {
        self.0.age(key, by);
    }

    async fn records(&self) -> Option<u64> {
        None
    }
}

#[test]
fn in_any_order_the_embedded_store_agrees_with_the_reference() {
    let runtime = Runtime::new().unwrap();
    check("verbs, embedded", 500, &sequences(50), |(kind, ops): (Kind, Vec<Op>)| {
        let memory = Memory(MemoryStore::new());
        memory.0.put(item().id, &item()).unwrap();
        runtime.block_on(async {
            memory.0.prepare("workitem", &rules(kind), Deadline::NONE).await.unwrap();
            Run::new(&memory, kind).all(&ops).await;
        });
    });
}

struct Mongo(MongoStore);

impl Subject for Mongo {
    type Store = MongoStore;

    fn store(&self) -> &MongoStore {
        &self.0
    }

    async fn age(&self, key: &LockKey, by: Duration) {
        if record(self.0.database(), key).await.is_some() {
            rig::age(self.0.database(), key, by).await;
        }
    }

    async fn records(&self) -> Option<u64> {
        Some(count(self.0.database()).await)
    }
}

impl Mongo {
    async fn new(kind: Kind) -> Self {
        let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
        let store = MongoStore::new(&database);
        store.prepare("workitem", &rules(kind), Deadline::NONE).await.unwrap();
        Self(store)
    }

    /// Empties the database, but keeps its indexes.
    async fn clear(&self) {
        let database = self.0.database();
        lock_records(database).delete_many(doc! {}).await.unwrap();
        database.collection::<Document>("doclock.ended").delete_many(doc! {}).await.unwrap();
        let items = database.collection::<WorkItem>("workitem");
        items.delete_many(doc! {}).await.unwrap();
        items.insert_one(item()).await.unwrap();
    }
}

#[test]
fn in_any_order_mongodb_agrees_with_the_reference() {
    let runtime = Runtime::new().unwrap();
    let kinds = [(false, false), (false, true), (true, false), (true, true)];
    let of = |(fair, fenced)| runtime.block_on(Mongo::new(Kind { fair, fenced }));
    let stores = kinds.map(of);
    check("verbs, MongoDB", 12, &sequences(40), |(kind, ops): (Kind, Vec<Op>)| {
        let at = kinds.iter().position(|it| *it == (kind.fair, kind.fenced));
        let store = &stores[at.expect("one of them")];
        runtime.block_on(async {
            store.clear().await;
            Run::new(store, kind).all(&ops).await;
        });
    });
}
