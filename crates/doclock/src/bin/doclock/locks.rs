//! Lists and shows locks.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use actix_doclock::{
    Lock, LockKey, Mode, MongoStore,
    store::{Deadline, Locks, Query, Servers},
};
use serde_json::{Value, json};

use crate::{
    Outcome, Result, allowed, answer,
    args::{Collections, List, Which},
    attach, attach_all, freeze, id,
    output::{self, printable},
};

pub(crate) async fn list(store: &MongoStore, args: &List, json: bool) -> Result {
    let mut locks = all(store, &collections(store, &args.of).await?).await?;
    // The database user may have the right to read locks, but not freezes.
    let frozen = allowed(answer(store.freezes(Deadline::NONE)).await)?.unwrap_or_default().on;
    if let Some(text) = &args.holder {
        let text = text.to_lowercase();
        let label = |lock: &Lock| lock.holder.as_ref().map(|holder| holder.label.to_lowercase());
        locks.retain(|lock| label(lock).is_some_and(|label| label.contains(&text)));
    }
    let titles = match &args.title {
        Some(field) => Some(titles(store, &locks, field).await?),
        None => None,
    };
    let with_title = |lock: &Lock| {
        let mut value = as_json(lock);
        if let Some(titles) = &titles {
            value["title"] = json!(titles.get(&lock.key));
        }
        value
    };
    let in_json: Vec<_> = locks.iter().map(with_title).collect();
    let frozen_in_json: Vec<_> = frozen.iter().map(freeze::as_json).collect();
    let frozen: String = frozen.iter().map(|it| freeze::line(it) + "\n").collect();
    let text = frozen + &table(&locks, titles.as_ref());
    output::show(json, &json!({ "locks": in_json, "frozen": frozen_in_json }), &text)?;
    Ok(Outcome::Done)
}

type Titles = HashMap<LockKey, String>;

async fn titles(store: &MongoStore, locks: &[Lock], field: &str) -> Result<Titles> {
    let keys: BTreeSet<_> = locks.iter().map(|lock| lock.key.clone()).collect();
    answer(doclock::titles(store, &Vec::from_iter(keys), field)).await
}

pub(crate) async fn show(store: &MongoStore, args: &Which, json: bool) -> Result {
    let locks = on(store, args).await?;
    let in_json: Vec<_> = locks.iter().map(as_json).collect();
    let (outcome, text) = if locks.is_empty() {
        (Outcome::NotSo, format!("{} is not locked", printable(&args.key)))
    } else {
        (Outcome::Done, locks.iter().map(details).collect::<Vec<_>>().join("\n\n"))
    };
    output::show(json, &json!({ "locks": in_json }), &text)?;
    Ok(outcome)
}

/// The named collections, or all if none are named, opened.
pub(crate) async fn collections(store: &MongoStore, args: &Collections) -> Result<Vec<String>> {
    if args.collections.is_empty() {
        return attach_all(store).await;
    }
    for collection in &args.collections {
        attach(store, collection).await?;
    }
    Ok(args.collections.clone())
}

/// The locks on the documents of these open collections, in order.
pub(crate) async fn all(store: &MongoStore, collections: &[String]) -> Result<Vec<Lock>> {
    let mut locks = Vec::new();
    for collection in collections {
        locks
            .extend(answer(store.locks(collection, Query::All, usize::MAX, Deadline::NONE)).await?);
    }
    locks.sort_by(|a, b| a.key.cmp(&b.key).then(a.since.cmp(&b.since)));
    Ok(locks)
}

/// All live locks on the document, or on the documents that the text may name.
pub(crate) async fn on(store: &MongoStore, which: &Which) -> Result<Vec<Lock>> {
    let mut locks = Vec::new();
    for key in &id::keys(&which.key)? {
        attach(store, key.collection()).await?;
        let on = Query::On(std::slice::from_ref(key));
        locks.extend(answer(store.locks(key.collection(), on, 1, Deadline::NONE)).await?);
    }
    Ok(locks)
}

pub(crate) fn table(locks: &[Lock], titles: Option<&Titles>) -> String {
    let row = |lock: &Lock| {
        let mut row = facts(lock).map(|(_, value)| value).to_vec();
        if let Some(titles) = titles {
            row.insert(1, titles.get(&lock.key).cloned().unwrap_or_default());
        }
        row
    };
    let rows = locks.iter().map(row);
    match titles {
        Some(_) => {
            output::table(&["DOCUMENT", "TITLE", "MODE", "HOLDER", "SINCE", "LEFT"], 1, rows)
        }
        None => output::table(&["DOCUMENT", "MODE", "HOLDER", "SINCE", "LEFT"], 2, rows),
    }
}

/// The lock for people: names and values.
fn facts(lock: &Lock) -> [(&'static str, String); 5] {
    let seconds = Duration::from_secs(lock.expires_in().as_secs());
    let mode = if lock.mode == Mode::Shared { "shared" } else { "exclusive" };
    [
        ("document", id::text(&lock.key)),
        ("mode", mode.to_owned()),
        ("holder", holder(lock).to_owned()),
        ("since", humantime::format_rfc3339_seconds(lock.since).to_string()),
        ("left", humantime::format_duration(seconds).to_string()),
    ]
}

fn details(lock: &Lock) -> String {
    let token = lock.token.map_or_else(|| "unknown".to_owned(), |token| token.to_string());
    let fence = lock.fence.map(|fence| ("fence", fence.to_string()));
    let facts = facts(lock).into_iter().chain([("token", token)]).chain(fence);
    let lines = facts.map(|(name, value)| format!("{name:10}{}", printable(&value)));
    lines.collect::<Vec<_>>().join("\n")
}

pub(crate) fn as_json(lock: &Lock) -> Value {
    let mut value = json!({
        "key": id::text(&lock.key),
        "collection": lock.key.collection(),
        "id": id::json(lock.key.id()),
        "mode": lock.mode,
        "holder": lock.holder.as_ref().map(|holder| json!({ "label": holder.label })),
        "since": humantime::format_rfc3339_millis(lock.since).to_string(),
        "expires_in_ms": u64::try_from(lock.expires_in().as_millis()).unwrap_or(u64::MAX),
        "token": lock.token,
    });
    if let Some(fence) = lock.fence {
        value["fence"] = json!(fence);
    }
    value
}

pub(crate) fn holder(lock: &Lock) -> &str {
    lock.holder.as_ref().map_or("another program", |holder| &holder.label)
}
