//! The TTL monitor, the server's own removal of expired locks: switched off, and once a second.

use std::time::Duration;

use actix_doclock::{LockKey, Lockable, Named};
use mongodb::bson::{Document, doc};
use tokio::time::sleep;

use crate::application::desk::Desk;
use crate::application::{Plain, Settings, guards};
use crate::check::Clocks;
use crate::fleet::{Fleet, PATIENCE};
use crate::history::Event;
use crate::paused::{acquired, script};
use crate::rig::mongod::{Mongod, Unusual, strict_replica_set};

fn no_reaper() -> Settings {
    Settings { reaper: None, ..Settings::default() }
}

/// Nothing removes records here: each contender decides for itself whether a lock has expired.
#[tokio::test]
async fn without_the_monitor_a_lock_still_expires() {
    let server = strict_replica_set().await;
    let parameter = doc! { "getParameter": 1, "ttlMonitorEnabled": 1 };
    assert!(!server.admin(parameter).await.get_bool("ttlMonitorEnabled").unwrap());
    let mut fleet = Fleet::new(&server.uri()).await.with(no_reaper());
    fleet.put_documents(2).await;
    for id in ["0", "1"] {
        let holder = fleet.start(script(&["acquire", "wait:end"], id)).await;
        fleet.until_said(holder, "acquire").await;
        fleet.applications[holder].child.kill9();
    }
    let desk = Desk::new(&fleet.inside("next").await);
    acquired(&desk, &LockKey::new("fenced", "0").unwrap()).await;
    // The other lock has expired too by now, or will soon; its record stays.
    sleep(no_reaper().ttl).await;
    let records = fleet.database.collection::<Document>("fenced.lock");
    assert_eq!(records.count_documents(doc! { "_id": "1" }).await.unwrap(), 1);
    let report = fleet.check(Clocks::Agree).await;
    assert_eq!((report.violations, report.grants), (vec![], 3));
}

/// A lock that is kept alive by renewal is never purged; an abandoned one is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eager_monitor_purges_no_lock_that_is_renewed() {
    let eager = Unusual { eager_ttl_monitor: true, ..Unusual::default() };
    let server = Mongod::start_replica_set_that_is(eager).await;
    let settings = Settings { ttl: Duration::from_secs(10), ..no_reaper() };
    let fleet = Fleet::new(&server.uri()).await.with(settings);
    fleet.put_documents(2).await;
    let app = fleet.inside("holder").await;
    let [edited, abandoned] = ["0", "1"].map(|id| LockKey::new(Plain::COLLECTION, id).unwrap());
    let name = LockKey::new(Named::COLLECTION, "a").unwrap();
    Desk::new(&app).acquire(&abandoned).await.expect("a free document");

    let held_for = 2 * app.settings.ttl;
    let session = async {
        let desk = Desk::new(&app);
        let lock = desk.acquire(&edited).await.expect("a free document");
        let loaded = desk.load(&edited).await.unwrap();
        let began = std::time::Instant::now();
        while began.elapsed() < held_for {
            sleep(app.settings.ttl / 6).await;
            desk.renew(&lock).await;
        }
        assert!(desk.save(&lock, loaded).await, "it was renewed all the time");
        desk.release(&lock).await;
    };
    tokio::join!(session, guards::hold(&app, &name, false, held_for));

    let lines = fleet.lines();
    assert!(!lines.iter().any(|line| matches!(line.event, Event::Lost { .. })), "lost");
    let released = lines.iter().filter(|line| line.event == Event::Released).count();
    assert_eq!(released, 2, "both locks were there to the end");
    let records = fleet.database.collection::<Document>("plain.lock");
    let began = std::time::Instant::now();
    while records.count_documents(doc! { "_id": "1" }).await.unwrap() > 0 {
        assert!(began.elapsed() < PATIENCE, "the monitor does not run");
        sleep(Duration::from_millis(100)).await;
    }
    let report = fleet.check(Clocks::Agree).await;
    assert_eq!(report.violations, [""; 0]);
}
