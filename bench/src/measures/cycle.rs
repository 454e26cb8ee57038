//! Acquire and release as fast as possible: all contenders, one after the other, again and again.

use std::time::Duration;

use actix_doclock::MongoStore;

use super::{Bench, fresh};
use crate::{
    floors::{self, INSERT_DELETE},
    load::Contender,
    ours,
    peers::{mongo_lock, redis, seeds},
    report::{Role, Row},
    stats::Samples,
};

pub const TASKS: [usize; 4] = [1, 16, 64, 256];
/// All tasks on one key, some contention, almost no contention.
pub const KEYS: [usize; 3] = [1, 16, 10_000];

pub async fn measure(bench: &mut Bench<'_>) {
    let mut contenders = contenders(bench).await;
    contenders.retain(|it| !bench.without_peers || it.role != Role::Peer);
    let goal = [INSERT_DELETE, floors::UPSERT_DELETE, ours::STORE, ours::MANAGER];
    for tasks in TASKS {
        for keys in KEYS {
            if tasks == 1 && keys < 10_000 {
                // A single task meets no contention.
                continue;
            }
            let taking_part = contenders.iter().filter(|it| !it.waits || keys < 10_000);
            let taking_part: Vec<_> = taking_part.collect();
            let (mut time, mut rounds) = bench.effort.slices();
            if tasks == 256 {
                // A slice must be long enough for many turns of each task.
                (time, rounds) = (time * 2, rounds.min(2));
            }
            let mut all = in_turn(&taking_part, tasks, keys, time, rounds).await;
            if keys == 10_000 && tasks < 256 {
                // Loads that have a goal run once more, and longer.
                let about_goal: Vec<_> = (taking_part.iter().copied())
                    .filter(|it| goal.contains(&&*it.who) && it.at != "redis")
                    .collect();
                let (time, rounds) = bench.effort.pick((time, 1), (Duration::from_secs(1), 6));
                let more = in_turn(&about_goal, tasks, keys, time, rounds).await;
                for (contender, samples) in about_goal.iter().zip(more) {
                    let at = taking_part.iter().position(|it| std::ptr::eq(*it, *contender));
                    all[at.expect("one of them")].add(samples);
                }
            }
            for (contender, samples) in taking_part.iter().zip(all) {
                let row = Row::new("cycle", contender.at, &contender.who, contender.role);
                bench.report.add(row.load(tasks, keys).samples(&samples));
            }
        }
    }
}

/// In the order A B C A B C …, so that a disturbance of the machine affects all contenders.
pub async fn in_turn(
    contenders: &[&Contender],
    tasks: usize,
    keys: usize,
    time: Duration,
    rounds: usize,
) -> Vec<Samples> {
    // Warms up connections, caches and code that has not run yet.
    for contender in contenders {
        contender.load(tasks, keys, time / 6).await;
    }
    let mut all = vec![Samples::default(); contenders.len()];
    for round in 0..rounds {
        for n in 0..contenders.len() {
            // Reversing every second round keeps a contender from always following the same one.
            let n = if round % 2 == 0 { n } else { contenders.len() - 1 - n };
            all[n].add(contenders[n].load(tasks, keys, time).await);
        }
    }
    all
}

async fn contenders(bench: &Bench<'_>) -> Vec<Contender> {
    let mut all = Vec::new();
    for (at, mongo) in bench.sets() {
        let database = fresh(mongo).await;
        let locks = ours::on(&database).await;
        all.push(floors::insert_delete(at, floors::majority(&fresh(mongo).await, "raw")));
        all.push(floors::upsert_delete(at, floors::majority(&fresh(mongo).await, "raw")));
        // On a client of its own, like every contender.
        let database = fresh(mongo).await;
        let store = MongoStore::new(&database);
        ours::manager(store.clone()).await.shutdown().await;
        all.push(ours::store(at, store));
        all.push(ours::waiting(at, locks.clone()));
        all.push(ours::locks(at, locks));
        all.push(mongo_lock::sync(at, mongo).await);
        all.push(mongo_lock::asynchronous(at, mongo).await);
        all.push(seeds::Upsert::on(&mongo.client().await).await.contender(at));
    }
    if let Some(server) = &bench.servers.redis {
        all.push(redis::by_hand("redis", server).await);
        all.push(redis::rslock("redis", server));
    }
    if let Some(server) = &bench.servers.redis_aof {
        all.push(redis::by_hand("redis-aof", server).await);
        all.push(redis::rslock("redis-aof", server));
    }
    all
}
