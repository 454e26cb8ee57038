//! The crates `mongo-lock` (threads, driver 2) and `mongo-lock-async` (driver 3).

use std::time::Duration;

use tokio::task::spawn_blocking;

use crate::{
    load::{Contender, cycle},
    report::Role,
    servers::Mongo,
};

const TTL: Duration = Duration::from_secs(150);

pub async fn sync(at: &'static str, mongo: &Mongo) -> Contender {
    let uri = mongo.uri_of("bench_mongo_lock");
    let client = spawn_blocking(move || {
        let client = mongodb_2::sync::Client::with_uri_str(uri).unwrap();
        mongo_lock::prepare_database(&client).unwrap();
        client
    });
    let client = client.await.unwrap();
    Contender::new(
        at,
        "mongo-lock 0.3",
        Role::Peer,
        cycle(move |turn| {
            let client = client.clone();
            let once = move || {
                let lock = mongo_lock::Lock::try_acquire(&client, &turn.name(), TTL).unwrap();
                // Dropping the lock here gives it back.
                lock.is_some()
            };
            async move { spawn_blocking(once).await.unwrap() }
        }),
    )
}

pub async fn asynchronous(at: &'static str, mongo: &Mongo) -> Contender {
    let client = client(mongo).await;
    Contender::new(
        at,
        "mongo-lock-async 0.4",
        Role::Peer,
        cycle(move |turn| {
            let client = client.clone();
            async move {
                match mongo_lock_async::Lock::try_acquire(&client, &turn.name(), TTL).await.unwrap()
                {
                    Some(lock) => lock.release().await.unwrap(),
                    None => false,
                }
            }
        }),
    )
}

pub async fn client(mongo: &Mongo) -> mongodb::Client {
    let uri = mongo.uri_of("bench_mongo_lock_async");
    let client = mongodb::Client::with_uri_str(uri).await.unwrap();
    mongo_lock_async::prepare_database(&client).await.unwrap();
    client
}
