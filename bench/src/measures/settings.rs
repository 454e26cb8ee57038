//! The parts of the floor, and the settings that a user can change.

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
/// In s; the first is the server's default.
pub const HISTORY_WINDOWS: [i32; 2] = [300, 0];
/// Few names that come again and again, and so many that each comes once in a slice.
pub const NAMES: [usize; 2] = [10_000, 10_000_000];
/// Long enough for ten thousand cycles.
const SOME_NAMES: Duration = Duration::from_secs(6);

pub async fn measure(bench: &mut Bench<'_>) {
    write_concerns(bench).await;
    pools(bench).await;
    journal(bench).await;
    history(bench).await;
}

/// The same floor with different write concerns.
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

/// The driver's limit on open connections, with more tasks than connections.
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

/// Whether the server's journal interval affects writes that wait for the journal.
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

/// How long the server keeps deleted entries, which index scans have to step over.
async fn history(bench: &mut Bench<'_>) {
    let ("one", mongo) = bench.sets()[0] else { unreachable!("the first set is of one") };
    let (time, rounds) = bench.effort.pick((Duration::from_millis(120), 1), (SOME_NAMES, 2));
    for window in HISTORY_WINDOWS {
        if !mongo.parameter("minSnapshotHistoryWindowInSeconds", window).await {
            eprintln!("minSnapshotHistoryWindowInSeconds cannot be set at run time; left out");
            break;
        }
        for names in NAMES {
            let raw = floors::insert_delete("one", majority(&fresh(mongo).await, "raw"));
            let upsert = floors::upsert_delete("one", majority(&fresh(mongo).await, "raw"));
            let ours = ours::locks("one", ours::on(&fresh(mongo).await).await);
            let mut contenders = [raw, upsert, ours];
            for it in &mut contenders {
                it.who = format!("{}, {window} s", it.who);
            }
            let all: Vec<_> = contenders.iter().collect();
            let samples = in_turn(&all, 16, names, time, rounds).await;
            for (it, samples) in all.iter().zip(samples) {
                let row = Row::new("history", it.at, &it.who, it.role);
                bench.report.add(row.load(16, names).samples(&samples));
            }
        }
    }
    mongo.parameter("minSnapshotHistoryWindowInSeconds", HISTORY_WINDOWS[0]).await;
}

async fn run(bench: &mut Bench<'_>, measure: &str, contenders: &[Contender], tasks: &[usize]) {
    let all: Vec<_> = contenders.iter().collect();
    let (time, rounds) =
        bench.effort.pick((Duration::from_millis(120), 1), (Duration::from_millis(500), 2));
    for &tasks in tasks {
        // A slice must be long enough for many turns of each task.
        let time = if tasks > 16 { time * 2 } else { time };
        let samples = in_turn(&all, tasks, 10_000, time, rounds).await;
        for (it, samples) in all.iter().zip(samples) {
            let row = Row::new(measure, it.at, &it.who, it.role);
            bench.report.add(row.load(tasks, 10_000).samples(&samples));
        }
    }
}
