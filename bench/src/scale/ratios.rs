//! The end of a session and a refusal, each in turn with its floor.

use std::time::{Duration, Instant};

use actix_doclock::{Aid, Holder, TryAcquire};
use mongodb::bson::doc;
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
        assert_eq!(locks.end_session(&aid).await.unwrap().len(), 1);
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
