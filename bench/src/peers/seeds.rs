//! Algorithms published as articles, with the same driver that we use.

use std::time::{Duration, Instant};

use mongodb::{
    Client, Collection, IndexModel,
    bson::{DateTime, Document, doc, oid::ObjectId},
    options::IndexOptions,
};
use tokio::time::sleep;

use crate::{
    floors::is_duplicate,
    load::{Contender, Turn, cycle},
    report::Role,
};

pub const UPSERT: &str = "upsert, delete, ask every 100 ms (article)";
pub const TWO_STEPS: &str = "find, then upsert (npm package's algorithm)";

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

/// `find`, with the server's clock in the projection. Without a record it sends an upsert by `_id` and
/// value; with an expired record, an upsert by the values that it found. A release deletes by `_id` and
/// value.
pub fn two_steps(at: &'static str, client: &Client) -> Contender {
    let locks: Collection<Document> = client.database("bench_two_steps").collection("locks");
    Contender::new(
        at,
        TWO_STEPS,
        Role::Peer,
        cycle(move |turn| {
            let locks = locks.clone();
            async move {
                let (id, value) = (turn.name(), ObjectId::new().to_hex());
                let found = locks.find_one(doc! { "_id": &id }).projection(doc! {
                    "_id": 1, "value": 1, "ttl": 1, "obtained_at": 1, "current_date": "$$NOW",
                });
                let filter = match found.await.unwrap() {
                    None => doc! { "_id": &id, "value": &value },
                    Some(lock) => {
                        let obtained = lock.get_datetime("obtained_at").unwrap();
                        let until =
                            obtained.timestamp_millis() + lock.get_i64("ttl").unwrap() * 1000;
                        if lock.get_datetime("current_date").unwrap().timestamp_millis() <= until {
                            return false;
                        }
                        let value = lock.get_str("value").unwrap();
                        doc! { "_id": &id, "value": value, "obtained_at": *obtained }
                    }
                };
                let take = doc! {
                    "$set": { "_id": &id, "value": &value, "ttl": 150_i64 },
                    "$currentDate": { "obtained_at": { "$type": "date" } },
                };
                match locks.update_one(filter, take).upsert(true).await {
                    Ok(_) => {}
                    Err(e) if is_duplicate(&e) => return false,
                    Err(e) => panic!("{e}"),
                }
                locks.delete_one(doc! { "_id": id, "value": value }).await.unwrap();
                true
            }
        }),
    )
}
