//! Acquire and release while a million other locks are held, compared with an empty collection.

use std::time::Instant;

use actix_doclock::{Lockable, MongoStore};
use mongodb::{
    Collection, Database,
    bson::{Document, doc, oid::ObjectId},
};

use super::{Bench, cycle::in_turn, fresh};
use crate::{
    floors::{insert_delete, majority, w1, with},
    load::Contender,
    ours::{self, Page},
    report::{Role, Row},
};

const AT_ONCE: usize = 10_000;
const LOCKS_OF_A_SESSION: usize = 10;

pub async fn measure(bench: &mut Bench<'_>) {
    let many = bench.effort.pick(50_000, 1_000_000);
    let mongo = &bench.servers.one;
    let mut contenders = Vec::new();
    let mut full = None;
    for records in [0, many] {
        let database = fresh(mongo).await;
        let locks = ours::on(&database).await;
        let raw = "raw";
        if records > 0 {
            let sample = ours::record(&locks, &database).await;
            let began = Instant::now();
            fill(&database, &format!("{}.lock", Page::COLLECTION), &sample, records).await;
            eprintln!("{records} records in {:.1?}", began.elapsed());
            fill(&database, raw, &sample, records).await;
            full = Some(database.clone());
        }
        // The verbs of the store need a store that knows the collection.
        let store = MongoStore::new(&database);
        ours::manager(store.clone()).await.shutdown().await;
        let these = [
            insert_delete("one", majority(&database, raw)),
            ours::store("one", store),
            ours::locks("one", locks),
        ];
        contenders.extend(these.map(|it| (records, it)));
    }
    let (time, rounds) = bench.effort.slices();
    let all: Vec<&Contender> = contenders.iter().map(|(_, it)| it).collect();
    for tasks in [1, 16] {
        let samples = in_turn(&all, tasks, 10_000, time, rounds).await;
        for ((records, it), samples) in contenders.iter().zip(samples) {
            let row = Row::new("many", it.at, &it.who, it.role).load(tasks, *records);
            bench.report.add(row.samples(&samples));
        }
    }
    if let Some(database) = full {
        sizes(bench, &database, many).await;
        database.drop().await.unwrap();
    }
}

/// Inserts copies of a real record, in sessions of ten. They need not be durable.
async fn fill(database: &Database, name: &str, sample: &Document, records: usize) {
    let into: Collection<Document> = with(database, name, w1(false));
    for from in (0..records).step_by(AT_ONCE) {
        let batch = (from..from + AT_ONCE).map(|n| {
            let mut record = sample.clone();
            record.insert("_id", ObjectId::new().to_hex());
            record
                .insert("aid", format!("00000000-0000-4000-8000-{:012x}", n / LOCKS_OF_A_SESSION));
            record
        });
        into.insert_many(batch).ordered(false).await.unwrap();
    }
}

async fn sizes(bench: &mut Bench<'_>, database: &Database, records: usize) {
    let of = format!("{}.lock", Page::COLLECTION);
    let stats = database.run_command(doc! { "collStats": of }).await.unwrap();
    let number = |name: &str| {
        let value = stats.get(name).cloned().unwrap_or_default();
        value.as_i32().map(f64::from).or(value.as_i64().map(|n| n as f64)).or(value.as_f64())
    };
    let mut row = Row::new("record", "one", "a lock's record", Role::Ours).load(1, records);
    for name in ["size", "storageSize", "totalIndexSize"] {
        row = row.value(name, number(name).unwrap_or(f64::NAN) / records as f64);
    }
    bench.report.add(row);
}
