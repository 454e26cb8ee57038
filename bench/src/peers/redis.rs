//! Redis: the two commands by hand, and the crate `rslock`.

use std::time::Duration;

use redis::{Client, Script};
use uuid::Uuid;

use crate::{
    load::{Contender, cycle},
    report::Role,
    servers::Redis,
};

pub const BY_HAND: &str = "SET NX PX + compare-and-delete";
pub const RSLOCK: &str = "rslock 0.10";

const TTL: Duration = Duration::from_secs(150);

/// On one node. The algorithm Redlock needs five nodes for its guarantee.
const COMPARE_AND_DELETE: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end";

pub async fn by_hand(at: &'static str, redis: &Redis) -> Contender {
    let client = Client::open(redis.url()).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let release = std::sync::Arc::new(Script::new(COMPARE_AND_DELETE));
    Contender::new(
        at,
        BY_HAND,
        Role::Peer,
        cycle(move |turn| {
            let (mut connection, release) = (connection.clone(), release.clone());
            async move {
                let (name, value) = (turn.name(), Uuid::new_v4().to_string());
                let mut set = redis::cmd("SET");
                set.arg(&name).arg(&value).arg("NX").arg("PX").arg(TTL.as_millis() as u64);
                if set.query_async::<Option<String>>(&mut connection).await.unwrap().is_none() {
                    return false;
                }
                let mut release = release.key(&name);
                release.arg(&value).invoke_async::<u32>(&mut connection).await.unwrap() == 1
            }
        }),
    )
}

/// When it is refused, it asks three times, at random within 200 ms each: its default.
pub fn rslock(at: &'static str, redis: &Redis) -> Contender {
    let manager = rslock::LockManager::new(vec![redis.url()]);
    Contender::new(
        at,
        RSLOCK,
        Role::Peer,
        cycle(move |turn| {
            let manager = manager.clone();
            async move {
                match manager.lock(turn.name().as_str(), TTL).await {
                    Ok(lock) => {
                        manager.unlock(&lock).await;
                        true
                    }
                    Err(rslock::LockError::Unavailable) => false,
                    Err(e) => panic!("{e}"),
                }
            }
        }),
    )
}

/// Another client holds the lock; true means refused.
pub async fn refused(redis: &Redis) -> Contender {
    let client = Client::open(redis.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let held = format!("refused-{}", Uuid::new_v4());
    let _: () = redis::cmd("SET").arg(&held).arg("x").query_async(&mut connection).await.unwrap();
    Contender::new(
        "redis",
        BY_HAND,
        Role::Peer,
        cycle(move |_| {
            let (mut connection, held) = (connection.clone(), held.clone());
            async move {
                let mut set = redis::cmd("SET");
                set.arg(held).arg("y").arg("NX").arg("PX").arg(TTL.as_millis() as u64);
                set.query_async::<Option<String>>(&mut connection).await.unwrap().is_none()
            }
        }),
    )
}
