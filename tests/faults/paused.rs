//! An application server is paused with a lock until another one has taken it over, and then saves.

use std::time::{Duration, Instant};

use actix_doclock::{Lock, LockKey, Lockable};
use mongodb::bson::{Document, doc};
use tokio::time::sleep;

use crate::application::desk::Desk;
use crate::application::{Fenced, Role, Settings};
use crate::check::Clocks;
use crate::fleet::{Fleet, PATIENCE};
use crate::history::Event;
use crate::rig::mongod::strict_replica_set;

/// Acquires the lock as soon as it is free.
pub(crate) async fn acquired(desk: &Desk, key: &LockKey) -> Lock {
    let began = Instant::now();
    loop {
        if let Some(lock) = desk.acquire(key).await {
            return lock;
        }
        assert!(began.elapsed() < PATIENCE, "{key} does not become free");
        sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) fn script(steps: &[&str], id: &str) -> Role {
    Role::Script { steps: steps.iter().map(ToString::to_string).collect(), id: id.to_owned() }
}

async fn resumed_with_a_stale_lock(successor_has_saved: bool) {
    let mut fleet = Fleet::new(&strict_replica_set().await.uri()).await;
    fleet.put_documents(1).await;
    let paused = fleet.start(script(&["acquire", "wait:go", "save", "release"], "0")).await;
    let held = |event: &Event| matches!(event, Event::Granted { .. });
    fleet.until(paused, "granted", held).await;
    fleet.until_said(paused, "acquire").await;
    fleet.applications[paused].child.pause();
    fleet.tell("go");

    // The successor keeps its lock, however slow the machine is.
    let long = Settings { ttl: Duration::from_secs(600), ..fleet.settings() };
    let fleet = fleet.with(long);
    let successor = fleet.inside("successor").await;
    let desk = Desk::new(&successor);
    let key = LockKey::new(Fenced::COLLECTION, "0").unwrap();
    let lock = acquired(&desk, &key).await;
    let loaded = desk.load(&key).await.unwrap();
    if successor_has_saved {
        desk.save(&lock, loaded.clone()).await;
    }

    fleet.applications[paused].child.resume();
    let answer = |event: &Event| matches!(event, Event::Saved | Event::NotSaved);
    let line = fleet.until(paused, "answered to its save", answer).await;
    assert_eq!(line.event, Event::NotSaved);
    fleet.until(paused, "told that its lock is gone", |event| *event == Event::AlreadyGone).await;
    if !successor_has_saved {
        desk.save(&lock, loaded).await;
    }
    let stored = fleet.stored().await;
    assert_eq!(stored["fenced/0"].len(), 1, "the successor's work stands: {stored:?}");
    let report = fleet.check(Clocks::Agree).await;
    assert_eq!(report.violations, [""; 0]);
    assert_eq!((report.grants, report.saves, report.refused_saves), (2, 1, 1));
}

#[tokio::test]
async fn a_paused_holder_does_not_overwrite_what_its_successor_has_saved() {
    resumed_with_a_stale_lock(true).await;
}

#[tokio::test]
async fn a_paused_holder_does_not_save_while_its_successor_is_editing() {
    resumed_with_a_stale_lock(false).await;
}

/// Nobody else has taken the lock, and its record is still there. For its holder it is lost anyway.
#[tokio::test]
async fn a_paused_holder_does_not_revive_its_expired_lock() {
    let settings = Settings { reaper: None, ..Settings::default() };
    let mut fleet = Fleet::new(&strict_replica_set().await.uri()).await.with(settings);
    fleet.put_documents(1).await;
    let steps = ["acquire", "wait:go", "renew", "save", "release"];
    let paused = fleet.start(script(&steps, "0")).await;
    fleet.until_said(paused, "acquire").await;
    fleet.applications[paused].child.pause();
    fleet.tell("go");
    sleep(settings.ttl).await;
    fleet.applications[paused].child.resume();
    let answer = |event: &Event| matches!(event, Event::Renewed { .. } | Event::Lost { .. });
    let line = fleet.until(paused, "answered to its renewal", answer).await;
    assert!(matches!(line.event, Event::Lost { .. }), "{line:?}");
    let answer = |event: &Event| matches!(event, Event::Saved | Event::NotSaved);
    assert_eq!(fleet.until(paused, "answered to its save", answer).await.event, Event::NotSaved);
    let record = fleet.database.collection::<Document>("fenced.lock").find_one(doc! {}).await;
    assert!(record.unwrap().is_some(), "the record has been removed");
}
