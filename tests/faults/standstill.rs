//! A machine stands still, and the clocks of its processes with it: a snapshot, a live migration, a suspended laptop. A
//! stopped process gets clocks that the stop is taken off, by libfaketime. Without it, the test reports that it is skipped.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use actix_doclock::LockKey;
use mongodb::bson::{DateTime, Document, doc};
use tokio::time::sleep;

use crate::application::standstill::{guarded, taken};
use crate::application::{Role, Settings};
use crate::fleet::Fleet;
use crate::history::Event;
use crate::rig::mongod::strict_replica_set;
use crate::rig::{age, depth, faketime};

/// Longer than the ttl of sessions.
const STILL: Duration = Duration::from_secs(3);

/// The environment of a process whose clocks this file sets back.
fn environment(file: &Path) -> [String; 3] {
    let library = faketime::library().expect("asked for before");
    [
        format!("LD_PRELOAD={}", library.display()),
        format!("FAKETIME_TIMESTAMP_FILE={}", file.display()),
        "FAKETIME_NO_CACHE=1".to_owned(),
    ]
}

async fn now(fleet: &Fleet) -> DateTime {
    let hello = fleet.database.run_command(doc! { "hello": 1 }).await.unwrap();
    *hello.get_datetime("localTime").unwrap()
}

async fn dated(fleet: &Fleet, key: &LockKey) -> DateTime {
    let locks = fleet.database.collection::<Document>(&format!("{}.lock", key.collection()));
    let record = locks.find_one(doc! { "_id": key.id().to_string() }).await.unwrap();
    let record = record.unwrap_or_else(|| panic!("{key} is not locked"));
    *record.get_datetime("ts").unwrap()
}

/// Otherwise another server would let somebody else in before the lease that this one has told is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_taken_after_a_standstill_is_dated_after_it_and_a_guard_learns_of_its_loss()
{
    if faketime::library().is_none() {
        println!("skipped: no libfaketimeMT.so.1; see scripts/tool faketime");
        return;
    }
    let rounds = 2 * depth() as usize;
    let settings = Settings { ttl: Duration::from_secs(60), reaper: None, ..Settings::default() };
    let mut fleet = Fleet::new(&strict_replica_set().await.uri()).await.with(settings);
    let clock = fleet.dir().join("clock");
    fs::write(&clock, "+0").unwrap();
    let uri = strict_replica_set().await.uri();
    let still = fleet.start_on(&uri, Role::StandsStill { rounds }, &environment(&clock)).await;
    for round in 0..rounds {
        let ready = Instant::now();
        fleet.until_said(still, &format!("ready {round}")).await;
        fleet.applications[still].child.pause();
        let stopped = Instant::now();
        age(&fleet.database, &guarded(round), Duration::from_secs(6_000)).await;
        sleep(STILL).await;
        let back = STILL.as_millis() as usize * (round + 1);
        fs::write(&clock, format!("-{}.{:03}", back / 1_000, back % 1_000)).unwrap();
        let resumed = now(&fleet).await;
        let missing = stopped.elapsed();
        fleet.applications[still].child.resume();
        fleet.tell(&format!("go {round}"));
        fleet.until_said(still, &format!("done {round}")).await;
        let is_clock = |event: &Event| matches!(event, Event::Said(it) if it.starts_with(&format!("clock {round} ")));
        let Event::Said(told) = fleet.until(still, "on the clock", is_clock).await.event else {
            unreachable!()
        };
        let told: u64 = told.split(' ').nth(2).unwrap().parse().unwrap();
        let passed = ready.elapsed() + Duration::from_secs(1);
        assert!(
            Duration::from_millis(told) + STILL <= passed,
            "its clock stood still: {missing:?}"
        );
        for key in taken(round) {
            let dated = dated(&fleet, &key).await;
            assert!(dated >= resumed, "{key} was dated {dated}, before {resumed}");
        }
        fleet.tell(&format!("look {round}"));
        fleet.until_said(still, &format!("lost {round}")).await;
    }
}
