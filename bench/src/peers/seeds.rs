//! Algorithms published as articles, with the same driver that we use.

use std::time::{Duration, Instant};

use mongodb::{
    Client, Collection, IndexModel,
    bson::{DateTime, Document, doc},
    options::IndexOptions,
};
use tokio::time::sleep;

use crate::{
    floors::is_duplicate,
    load::{Contender, Turn, cycle},
    report::Role,
};

pub const UPSERT: &str = "upsert, delete, ask every 100 ms (article)";

const LEASE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(10);

/// `findAndModify` with `$setOnInsert`: no returned document means that there was no record, so the
/// lock is ours. A duplicate key counts as refused. The expiry is the application's clock plus a
/// minute, and only the TTL index acts on it. A release deletes by `_id`.
#[derive(Clone)]
pub struct Upsert {
    locks: Collection<Document>,
}

impl Upsert {
    pub async fn on(client: &Client) -> Self {
        let locks: Collection<Document> = client.database("bench_upsert").collection("locks");
        let expire = IndexOptions::builder().expire_after(Duration::ZERO).build();
        let index = IndexModel::builder().keys(doc! { "expireAt": 1 }).options(expire).build();
        locks.create_index(index).await.unwrap();
        Self { locks }
    }

    pub async fn try_acquire(&self, turn: Turn) -> bool {
        let expire_at = DateTime::from_system_time((DateTime::now().to_system_time()) + LEASE);
        let id = format!("lock_{}", turn.name());
        let fresh = doc! { "$setOnInsert": { "expireAt": expire_at } };
        match self.locks.find_one_and_update(doc! { "_id": id }, fresh).upsert(true).await {
            Ok(before) => before.is_none(),
            Err(e) if is_duplicate(&e) => false,
            Err(e) => panic!("{e}"),
        }
    }

    /// False if the article's patience is exhausted.
    pub async fn acquire(&self, turn: Turn) -> bool {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            if self.try_acquire(turn).await {
                return true;
            }
            sleep(POLL).await;
        }
        false
    }

    pub async fn release(&self, turn: Turn) {
        let id = format!("lock_{}", turn.name());
        self.locks.delete_one(doc! { "_id": id }).await.unwrap();
    }

    pub fn contender(self, at: &'static str) -> Contender {
        Contender::new(
            at,
            UPSERT,
            Role::Peer,
            cycle(move |turn| {
                let this = self.clone();
                async move {
                    let acquired = this.try_acquire(turn).await;
                    if acquired {
                        this.release(turn).await;
                    }
                    acquired
                }
            }),
        )
    }
}
