//! The end of a session and a refusal, each in turn with its floor.

use std::time::{Duration, Instant};

use actix_doclock::{Aid, Holder, TryAcquire};
use mongodb::{
    Collection,
    bson::{Document, doc},
};
use tokio::time::sleep;

use super::{
    Set, Size,
    costs::key,
    site::{self, name},
};
use crate::{
    floors::{self, majority},
    load::Turn,
    measures::fresh,
    meter::Reading,
    stats::Samples,
};

pub async fn measure(set: &Set, size: Size) {
    let database = fresh(&set.mongo).await;
    let (locks, raw) = (site::manager(&database).await, majority(&database, "raw"));
    let (alice, bob) = (Holder::new("alice"), Holder::new("bob"));

    let (mut inserts, mut updates, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    let rounds = size.pick(20, 600);
    for n in 0..rounds {
        let aid = Aid::new();
        let got = locks.lock_for_session(&key(n), &aid, &alice).await.unwrap();
        assert!(matches!(got, TryAcquire::Granted(_)));
        let began = Instant::now();
        assert!(floors::insert(&raw, Turn { task: 0, key: n }).await);
        inserts.push(began.elapsed());
        let began = Instant::now();
        let touch = doc! { "$currentDate": { "ts": true } };
        raw.update_one(doc! { "_id": Turn { task: 0, key: n }.name() }, touch).await.unwrap();
        updates.push(began.elapsed());
        let began = Instant::now();
        assert_eq!(locks.end_session(&aid).await.unwrap().locks.len(), 1);
        ends.push(began.elapsed());
        // The last step of the end is carried out in the background.
        sleep(Duration::from_millis(15)).await;
    }
    let (insert, update, end) = (p50(inserts), p50(updates), p50(ends));
    println!(
        "[{}] end of a session with one lock {end:.2} ms; insert with majority {insert:.2} ms: {:.2}; \
         update with majority {update:.2} ms: {:.2}",
        set.at,
        end / insert,
        end / update
    );

    let (holder, stranger) = (Aid::new(), Aid::new());
    let got = locks.lock_for_session(&key(0), &holder, &alice).await.unwrap();
    assert!(matches!(got, TryAcquire::Granted(_)));
    let records = majority(&database, "page.lock");
    let (mut finds, mut refusals) = (Vec::new(), Vec::new());
    for n in 0..size.pick(50, 6_000) {
        let began = Instant::now();
        assert!(records.find_one(doc! { "_id": name(0) }).await.unwrap().is_some());
        let find = began.elapsed();
        let began = Instant::now();
        let got = locks.lock_for_session(&key(0), &stranger, &bob).await.unwrap();
        let refusal = began.elapsed();
        assert!(matches!(got, TryAcquire::Held(_)));
        // The first ones open connections.
        if n >= 20 {
            finds.push(find);
            refusals.push(refusal);
        }
    }
    let (find, refusal) = (p50(finds), p50(refusals));
    println!(
        "[{}] refusal of a lock known to be held {refusal:.3} ms; find_one of the same record {find:.3} ms: {:.2}",
        set.at,
        refusal / find
    );
    locks.shutdown().await;
    let _ = database.drop().await;
}

/// In ms.
fn p50(took: Vec<Duration>) -> f64 {
    Samples::of(took).at(&[0.5])[0] / 1e3
}

fn say(set: &Set, what: &str, before: &Reading, took: Vec<Duration>) {
    let used = set.meter.read().since(before);
    let idle = set.idle * used.time.as_secs_f64();
    let each = (used.mongod.as_secs_f64() - idle) / took.len() as f64 * 1e6;
    println!("[{}] {what}: mongod {each:.0} µs, p50 {:.3} ms", set.at, p50(took));
}

/// The cost of reading a session's locks, which is a part of a heartbeat and of the end of a session.
pub async fn reads(set: &Set, size: Size) {
    let database = fresh(&set.mongo).await;
    let locks = site::manager(&database).await;
    let records: Collection<Document> = database.collection("page.lock");
    let n = size.pick(50, 3_000);
    let mut aids = Vec::new();
    for k in 0..n {
        let aid = Aid::new();
        let got = locks.lock_for_session(&key(k), &aid, &Holder::new("alice")).await.unwrap();
        assert!(matches!(got, TryAcquire::Granted(_)));
        aids.push(aid);
    }
    let of = |k: usize| aids[k % aids.len()].clone();
    let in_aids = |k: usize| doc! { "$in": [of(k).as_str()] };
    let both = |k: usize| doc! { "$or": [{ "aid": in_aids(k) }, { "readers.aid": in_aids(k) }] };
    let find = async |filter: Document, fields: Option<Document>| {
        let mut find = records.find(filter);
        if let Some(fields) = fields {
            find = find.projection(fields);
        }
        let mut cursor = find.await.unwrap();
        assert!(cursor.advance().await.unwrap());
    };
    let fields =
        doc! { "ts": 1, "ttl": 1, "aid": 1, "token": 1, "since": 1, "holder": 1, "now": "$$NOW" };
    for what in
        ["_id", "aid", "aid or readers.aid", "the same with fields", "_id with fields", "list_of"]
    {
        let before = set.meter.read();
        let mut took = Vec::new();
        for k in 0..n {
            let began = Instant::now();
            match what {
                "_id" => find(doc! { "_id": name(k % aids.len()) }, None).await,
                "aid" => find(doc! { "aid": of(k).as_str() }, None).await,
                "aid or readers.aid" => find(both(k), None).await,
                "the same with fields" => find(both(k), Some(fields.clone())).await,
                "_id with fields" => {
                    find(doc! { "_id": name(k % aids.len()) }, Some(fields.clone())).await;
                }
                _ => assert_eq!(locks.list_of(&of(k)).await.unwrap().len(), 1),
            }
            took.push(began.elapsed());
        }
        say(set, &format!("read by {what}"), &before, took);
    }
    // Another server, which has not heard of these locks.
    let other = site::manager(&database).await;
    for what in ["not known", "known"] {
        let before = set.meter.read();
        let (mut took, stranger) = (Vec::new(), Aid::new());
        for k in 0..n {
            let began = Instant::now();
            let of = if what == "known" { n - 1 } else { k };
            let got =
                other.lock_for_session(&key(of), &stranger, &Holder::new("bob")).await.unwrap();
            took.push(began.elapsed());
            assert!(matches!(got, TryAcquire::Held(_)));
        }
        say(set, &format!("refusal of a lock {what} to be held"), &before, took);
    }
    other.shutdown().await;
    locks.shutdown().await;
    let _ = database.drop().await;
}
