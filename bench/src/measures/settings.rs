//! What the floor is made of, and what a user can set.

use std::time::Duration;

use super::{Bench, cycle::in_turn, fresh};
use crate::{
    floors::{self, majority, w1, with},
    load::Contender,
    ours,
    report::Row,
};

pub const DEFAULT_POOL: u32 = 10;
pub const POOLS: [u32; 4] = [DEFAULT_POOL, 32, 100, 256];
/// In ms; the first is the server's default.
pub const JOURNAL_INTERVALS: [i32; 3] = [100, 10, 1];

pub async fn measure(bench: &mut Bench<'_>) {
    write_concerns(bench).await;
    pools(bench).await;
    journal(bench).await;
}

/// The same floor, acknowledged sooner or later.
async fn write_concerns(bench: &mut Bench<'_>) {
    for (at, mongo) in bench.sets() {
        let mut contenders = Vec::new();
        for (name, concern) in [
            ("w: 1", w1(false)),
            ("w: 1, j: true", w1(true)),
            ("w: majority", mongodb::options::WriteConcern::majority()),
        ] {
            let mut it = floors::insert_delete(at, with(&fresh(mongo).await, "raw", concern));
            it.who = name.into();
            contenders.push(it);
        }
        run(bench, "write concern", &contenders, &[1, 16]).await;
    }
}

/// How many connections the driver opens at most, with more tasks than that.
async fn pools(bench: &mut Bench<'_>) {
    for (at, mongo) in bench.sets() {
        let mut contenders = Vec::new();
        for pool in POOLS {
            let client =
                async || mongo.client_with(|options| options.max_pool_size = Some(pool)).await;
            let raw = client().await.database("bench_pool");
            let mut floor = floors::insert_delete(at, majority(&raw, &format!("raw_{pool}")));
            let database = client().await.database(&format!("bench_pool_{pool}"));
            let mut ours = ours::locks(at, ours::on(&database).await);
            for it in [&mut floor, &mut ours] {
                it.who = format!("{}, maxPoolSize={pool}", it.who);
            }
            contenders.extend([floor, ours]);
        }
        run(bench, "pool", &contenders, &[256]).await;
    }
}

/// Whether the server's timer for the journal matters to writes that wait for it.
async fn journal(bench: &mut Bench<'_>) {
    for (at, mongo) in bench.sets() {
        for interval in JOURNAL_INTERVALS {
            if !mongo.parameter("journalCommitInterval", interval).await {
                eprintln!("journalCommitInterval cannot be set at run time; left out");
                break;
            }
            let mut floor = floors::insert_delete(at, majority(&fresh(mongo).await, "raw"));
            floor.who = format!("{interval} ms");
            run(bench, "journal", &[floor], &[1, 16]).await;
        }
        mongo.parameter("journalCommitInterval", JOURNAL_INTERVALS[0]).await;
    }
}

async fn run(bench: &mut Bench<'_>, measure: &str, contenders: &[Contender], tasks: &[usize]) {
    let all: Vec<_> = contenders.iter().collect();
    let (time, rounds) =
        bench.effort.pick((Duration::from_millis(120), 1), (Duration::from_millis(500), 2));
    for &tasks in tasks {
        // A slice must last for many turns of each.
        let time = if tasks > 16 { time * 2 } else { time };
        let samples = in_turn(&all, tasks, 10_000, time, rounds).await;
        for (it, samples) in all.iter().zip(samples) {
            let row = Row::new(measure, it.at, &it.who, it.role);
            bench.report.add(row.load(tasks, 10_000).samples(&samples));
        }
    }
}
