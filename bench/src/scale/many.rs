//! Sessions with many locks each, with and without a record that an open transaction blocks.

use std::{cell::Cell, time::Duration};

use actix_doclock::Lockable;
use futures_util::{StreamExt, future::join, stream};
use mongodb::{
    Collection, Database,
    bson::{Document, doc},
};
use tokio::time::{Instant, sleep, sleep_until};
use uuid::Uuid;

use super::{
    Set, Size, on_a_thread,
    site::{self, HEARTBEAT, Person},
};
use crate::{meter, ours::Page};

const LOCKS: usize = 60;
/// People who have just taken a lock, so that their heartbeats renew nothing.
const OTHERS: usize = 20;
/// How much older the locks are made before they are renewed.
const OLDER: Duration = Duration::from_secs(60);

pub async fn measure(set: &Set, size: Size) {
    let sessions = size.pick(100, 1_000);
    let at = set.at;
    for within in [Duration::ZERO, size.pick(Duration::from_secs(5), HEARTBEAT)] {
        for is_stuck in [false, true] {
            let database = meter::counted(&set.mongo).await;
            site::write_documents(&database, sessions + OTHERS).await;
            let (granted, renews) =
                (site::manager(&database).await, site::manager(&database).await);
            let (grants, on, records) = (granted.clone(), renews.clone(), database.clone());
            on_a_thread(move || async move {
                let site = site::open(&grants).await;
                let people = open_all(&site, 0..sessions).await;
                fill_up(&records).await;
                // To a server that has seen none of them, all are due.
                let site = site::open(&on).await;
                let people = people.into_iter().map(|person| person.at(&site)).collect();
                let others = open_all(&site, sessions..sessions + OTHERS).await;
                run(at, &records, people, others, within, is_stuck).await;
            })
            .await;
            granted.shutdown().await;
            renews.shutdown().await;
            let _ = database.drop().await;
        }
    }
}

async fn open_all(site: &site::Site, documents: std::ops::Range<usize>) -> Vec<Person> {
    let opened = documents.map(|n| {
        let mut person = Person::new(site, site::name(n));
        async move {
            assert_eq!(person.edit().await, 200);
            person
        }
    });
    stream::iter(opened).buffered(64).collect().await
}

fn records(database: &Database) -> Collection<Document> {
    database.collection(&format!("{}.lock", Page::COLLECTION))
}

/// Gives each session as many locks as it shall have, and makes all of them older.
async fn fill_up(database: &Database) {
    let locks = records(database);
    let mut found = locks.find(doc! {}).await.unwrap();
    let mut copies = Vec::new();
    while found.advance().await.unwrap() {
        let lock = found.deserialize_current().unwrap();
        let id = lock.get_str("_id").unwrap();
        copies.extend((1..LOCKS).map(|n| {
            let mut copy = lock.clone();
            copy.insert("_id", format!("{id}-{n}"));
            copy.insert("token", Uuid::new_v4().to_string());
            copy
        }));
    }
    for some in copies.chunks(10_000) {
        locks.insert_many(some).await.unwrap();
    }
    let older = doc! { "ts": { "$subtract": ["$ts", OLDER.as_millis() as i64] } };
    locks.update_many(doc! {}, vec![doc! { "$set": older }]).await.unwrap();
}

async fn run(
    at: &str,
    database: &Database,
    mut people: Vec<Person>,
    mut others: Vec<Person>,
    within: Duration,
    is_stuck: bool,
) {
    let locks = records(database);
    let mut blocks = database.client().start_session().await.unwrap();
    if is_stuck {
        blocks.start_transaction().await.unwrap();
        let touch = doc! { "$set": { "touched": true } };
        let one = doc! { "_id": site::name(0) };
        locks.update_one(one, touch).session(&mut blocks).await.unwrap();
    }
    let (began, is_over, n) = (Instant::now(), Cell::new(false), people.len());
    let all = async {
        let beats = people.iter_mut().enumerate().map(|(i, person)| async move {
            sleep_until(began + within * i as u32 / n as u32).await;
            let sent = Instant::now();
            assert_eq!(person.heartbeat().await, 200);
            sent.elapsed()
        });
        let took: Vec<_> = stream::iter(beats).buffered(n).collect().await;
        is_over.set(true);
        took
    };
    let meanwhile = async {
        let mut took = Vec::new();
        while !is_over.get() {
            for other in &mut others {
                let sent = Instant::now();
                assert_eq!(other.heartbeat().await, 200);
                took.push(sent.elapsed());
                sleep(Duration::from_millis(10)).await;
            }
        }
        took
    };
    let (mut took, mut meanwhile) = join(all, meanwhile).await;
    let lasted = began.elapsed();
    let age = doc! { "$subtract": ["$$NOW", "$ts"] };
    let old = doc! { "$expr": { "$gte": [age, (OLDER + within).as_millis() as i64] } };
    let left_out = locks.find(old).await.unwrap().count().await;
    if is_stuck {
        let _ = blocks.abort_transaction().await;
    }
    let first = took.remove(0);
    for times in [&mut took, &mut meanwhile] {
        times.sort();
    }
    let ms = |took: Duration| took.as_secs_f64() * 1e3;
    let of = |times: &[Duration]| {
        let at = |share: usize| ms(times[(times.len() - 1) * share / 100]);
        format!("median {:.0} ms, p99 {:.0} ms, longest {:.0} ms", at(50), at(99), at(100))
    };
    println!(
        "[{at}] {n} sessions of {LOCKS} locks, due within {within:?}, {}: over after {lasted:.1?}, {left_out} \
         locks not renewed; their heartbeats {}; that of the first session {:.0} ms; heartbeats of others {}",
        if is_stuck { "one lock stuck" } else { "none stuck" },
        of(&took),
        ms(first),
        of(&meanwhile),
    );
}
