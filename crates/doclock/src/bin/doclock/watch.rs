//! Follows the events of locks.

use std::time::SystemTime;

use actix_doclock::{Answer, Ask, Lock, LockEvent, LockToken, MongoStore};
use serde_json::json;

use crate::{
    Outcome, Result,
    args::Collections,
    id, locks, manager,
    output::{self, printable, short},
};

pub(crate) async fn watch(store: &MongoStore, args: &Collections, json: bool) -> Result {
    let collections = locks::collections(store, args).await?;
    let manager = manager(store).await?;
    for collection in &collections {
        // Leaked on purpose: the process ends with the command.
        manager.attach(collection.clone().leak());
    }
    let mut events = manager.events();
    let mut shown: Option<Vec<Option<LockToken>>> = None;
    while let Some(event) = events.next().await {
        let now = humantime::format_rfc3339_millis(SystemTime::now());
        if !matches!(*event, LockEvent::Resync) {
            shown = None;
        }
        let line = match (&*event, json) {
            (LockEvent::Resync, true) => {
                let all = locks::all(store, &collections).await?;
                let all: Vec<_> = all.iter().map(locks::as_json).collect();
                json!({ "event": "resync", "at": now.to_string(), "locks": all }).to_string()
            }
            (LockEvent::Resync, false) => {
                let all = locks::all(store, &collections).await?;
                let held = Some(all.iter().map(|lock| lock.token).collect());
                // Each collection begins with its own resync.
                if shown == held {
                    continue;
                }
                shown = held;
                format!("{now}  {:13}  {} live locks", event.name(), all.len())
            }
            (event, true) => in_json(event, &now.to_string()),
            (event, false) => format!("{now}  {}", text(event)),
        };
        output::print(&line)?;
    }
    Ok(Outcome::Done)
}

fn in_json(event: &LockEvent, now: &str) -> String {
    let mut value = json!({
        "event": event.name(), "at": now, "lock": event.lock().map(locks::as_json),
    });
    match event {
        LockEvent::Broken(_, taken) => {
            value["by"] = json!(taken.by);
            value["reason"] = json!(taken.reason);
        }
        LockEvent::Asked(_, ask) | LockEvent::Answered(_, ask) => {
            value["by"] = json!(ask.by.label);
            value["message"] = json!(ask.message);
            value["answer"] = json!(ask.answer.as_ref().map(Answer::name));
            value["reply"] = json!(ask.answer.as_ref().map(Answer::message));
        }
        _ => {}
    }
    output::as_text(&value)
}

fn text(event: &LockEvent) -> String {
    let key = |lock: &Lock| short(&id::text(&lock.key));
    let holder = |lock: &Lock| short(locks::holder(lock));
    let mut text = format!("{:13}", event.name());
    if let Some(lock) = event.lock() {
        text += &format!("  {}  {}", key(lock), holder(lock));
    }
    match event {
        LockEvent::Broken(_, taken) => {
            text += &format!("  by {}: {}", short(&taken.by), printable(&taken.reason));
        }
        LockEvent::Asked(_, ask) => {
            text += &format!("  by {}: {}", short(&ask.by.label), printable(&ask.message));
        }
        LockEvent::Answered(_, Ask { by, answer: Some(answer), .. }) => {
            let (name, message) = (answer.name(), printable(answer.message()));
            text += &format!("  to {}: {name}: {message}", short(&by.label));
        }
        _ => {}
    }
    text
}
