//! Where the time of acquire and release goes: to which of the two, and to which processor.

use std::{
    fs,
    time::{Duration, Instant},
};

use actix_doclock::{Holder, Lockable, MongoStore, Released, TryAcquire, store::verbs::*};
use doclock_conformance::Shorthand;
use mongodb::bson::doc;

use super::{Bench, cycle::in_turn, fresh};
use crate::{
    floors::{self, majority},
    load::Turn,
    ours::{self, MANAGER, Page, STORE, key},
    report::{Role, Row},
    servers::Mongo,
    stats::Samples,
};

pub const WITH_INDEXES: &str = ", with our indexes";
/// The loads whose processor time is measured.
pub const TASKS: [usize; 3] = [16, 64, 256];

pub async fn measure(bench: &mut Bench<'_>) {
    for (at, mongo) in bench.sets() {
        halves(bench, at, mongo).await;
        processors(bench, at, mongo).await;
    }
}

/// One task; each verb after the other.
async fn halves(bench: &mut Bench<'_>, at: &'static str, mongo: &Mongo) {
    let rounds = bench.effort.pick(20, 400);
    let raw = majority(&fresh(mongo).await, "raw");
    let database = fresh(mongo).await;
    let locks = ours::on(&database).await;
    let database = fresh(mongo).await;
    let store = MongoStore::new(&database);
    ours::manager(store.clone()).await.shutdown().await;
    let (aid, holder) = (ours::session(0), Holder::new("alice"));
    let mut took = [const { (Vec::new(), Vec::new()) }; 3];
    for key_number in 0..rounds + 20 {
        let turn = Turn { task: 0, key: key_number };
        let key = key(turn);

        let began = Instant::now();
        assert!(floors::insert(&raw, turn).await);
        let acquired = Instant::now();
        raw.delete_one(doc! { "_id": turn.name() }).await.unwrap();
        let raw_took = (acquired - began, acquired.elapsed());

        let claim = ours::claim(&aid);
        let began = Instant::now();
        assert!(matches!(
            store.try_acquire(&key, &claim, Deadline::NONE).await.unwrap(),
            TryAcquire::Granted(_)
        ));
        let acquired = Instant::now();
        let released = store.release(&key, &aid, claim.token, claim.mode).await.unwrap();
        let store_took = (acquired - began, acquired.elapsed());
        assert_eq!(released, Released::Released);

        let began = Instant::now();
        let granted = locks.lock_for_session(&key, &aid, &holder).await.unwrap();
        let acquired = Instant::now();
        let TryAcquire::Granted(lock) = granted else { panic!("not granted: {granted:?}") };
        assert_eq!(locks.release(&lock).await.unwrap(), Released::Released);
        let manager_took = (acquired - began, acquired.elapsed());

        // The first rounds cache plans and open connections.
        if key_number >= 20 {
            for (all, (acquire, release)) in
                took.iter_mut().zip([raw_took, store_took, manager_took])
            {
                all.0.push(acquire);
                all.1.push(release);
            }
        }
    }
    let names = [
        ("insert_one", "delete_one", Role::Floor),
        (STORE, STORE, Role::Ours),
        (MANAGER, MANAGER, Role::Ours),
    ];
    for ((acquire, release, role), took) in names.into_iter().zip(took) {
        bench.report.add(Row::new("acquire", at, acquire, role).samples(&Samples::of(took.0)));
        bench.report.add(Row::new("release", at, release, role).samples(&Samples::of(took.1)));
    }
}

/// The processor time of a cycle, here and in the servers.
async fn processors(bench: &mut Bench<'_>, at: &'static str, mongo: &Mongo) {
    let database = fresh(mongo).await;
    let locks = ours::on(&database).await;
    let other = fresh(mongo).await;
    let store = MongoStore::new(&other);
    ours::manager(store.clone()).await.shutdown().await;
    // The floors once more, on a collection that has our indexes.
    let indexed = fresh(mongo).await;
    ours::on(&indexed).await.shutdown().await;
    let indexed = majority(&indexed, &format!("{}.lock", Page::COLLECTION));
    let mut contenders = [
        floors::insert_delete(at, majority(&fresh(mongo).await, "raw")),
        floors::upsert_delete(at, majority(&fresh(mongo).await, "raw")),
        floors::insert_delete(at, indexed.clone()),
        floors::upsert_delete(at, indexed),
        ours::store(at, store),
        ours::locks(at, locks),
    ];
    for it in &mut contenders[2..4] {
        it.who.push_str(WITH_INDEXES);
    }
    let (time, rounds) =
        bench.effort.pick((Duration::from_millis(200), 1), (Duration::from_secs(1), 3));
    for tasks in TASKS {
        let mut all = contenders.each_ref().map(|_| (0, Duration::ZERO, Duration::ZERO));
        for _ in 0..rounds {
            for (contender, (cycles, here, there)) in contenders.iter().zip(&mut all) {
                in_turn(&[contender], tasks, 10_000, time / 10, 1).await;
                let before = (own_processor_time(), mongo.processor_time().await);
                *cycles += contender.load(tasks, 10_000, time).await.took.len();
                *here += own_processor_time() - before.0;
                *there += mongo.processor_time().await - before.1;
            }
        }
        for (contender, (cycles, here, there)) in contenders.iter().zip(all) {
            let each = |time: Duration| time.as_secs_f64() * 1e6 / cycles as f64;
            let row = Row::new("processor", at, &contender.who, contender.role);
            let row = row.load(tasks, 10_000).value("client", each(here));
            bench.report.add(row.value("servers", each(there)));
        }
    }
}

/// The processor time of this process, in ticks of 10 ms, as on every Linux.
fn own_processor_time() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let ticks: u64 = fields.split(' ').skip(11).take(2).flat_map(str::parse::<u64>).sum();
    Duration::from_millis(ticks * 10)
}
