//! Fencing tokens rise, whatever ends a lock and whichever server is the primary.

use actix_doclock::{FencingToken, Lockable};
use mongodb::bson::{Bson, Document, doc};
use serde::{Deserialize, Serialize};

use super::*;
use crate::rig::{age, client, depth, fresh_name, replica_set::ReplicaSet};

const OWNERS: usize = 120;

#[derive(Serialize, Deserialize)]
struct Ledger {}

impl Lockable for Ledger {
    type Id = String;
    const COLLECTION: &'static str = "ledger";
    const FENCED: bool = true;
}

async fn server(database: &Database) -> LockManager {
    let store = MongoStore::new(database);
    let locks = LockManager::builder(store).ttl(TTL).deadline(NO_DEADLINE).without_reaper();
    let locks = locks.build().await.unwrap();
    locks.register::<Ledger>().await.unwrap();
    locks
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_rise_over_release_expiry_removal_of_the_record_and_two_failovers() {
    let set = ReplicaSet::start().await;
    let database = client(&set.uri()).await.database(&fresh_name());
    let servers = [server(&database).await, server(&database).await];
    let key = LockKey::of::<Ledger>("2026".into()).unwrap();
    let mut last = FencingToken::from(0);
    let mut run_out = Vec::new();
    let owners = OWNERS * depth() as usize;
    for n in 0..owners {
        let fail_over = async {
            if n == owners / 3 {
                set.step_down().await;
            } else if n == owners * 2 / 3 {
                set.kill_primary().await;
            }
        };
        let acquire = servers[n % 2].acquire(&key, Wait::until_acquired());
        let (guard, ()) = tokio::join!(acquire, fail_over);
        let guard = guard.unwrap();
        let fence = guard.fence().expect("a fenced collection");
        assert!(fence > last, "owner {n}: {fence} after {last}");
        last = fence;
        match n % 10 {
            // Its holder is idle and does not know that the lock is over.
            1 => {
                age(&database, &key, TTL).await;
                run_out.push(guard);
            }
            // Like a TTL index that dates from a time when the collection was not fenced. The index
            // would act later than this, but at least one millisecond later.
            2 => {
                let records = database.collection::<Document>("ledger.lock");
                sleep(Duration::from_millis(20)).await;
                records.delete_one(doc! { "_id": Bson::from(key.id()) }).await.unwrap();
            }
            3 => drop(servers[n % 2].release(guard.lock()).await.unwrap()),
            4 => drop(guard),
            _ => drop(guard.release().await.unwrap()),
        }
    }
    drop(run_out);
}
