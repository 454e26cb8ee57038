//! Freezes collections, and thaws them.

use std::time::Duration;

use actix_doclock::{
    Actor, LockError, LockManager, MongoStore,
    freeze::{End, Freeze as Known, Scope},
    limits::MAX_REASON_BYTES,
    store::verbs::*,
};
use serde_json::{Value, json};

use crate::{
    Failure, Outcome, Result, allowed, answer,
    args::{Freeze, Frozen},
    attach, attach_all, manager,
    output::{self, printable},
};

/// Each server asks for freezes once a second.
const OBEYED_WITHIN: Duration = Duration::from_secs(3);

pub(crate) async fn freeze(store: &MongoStore, args: &Freeze, json: bool) -> Result {
    let end = args.lasts.map(End::In).or(args.until.map(End::At));
    let Some(until) = end else { return Err(Failure::Usage("give --for or --until".to_owned())) };
    if args.reason.len() > MAX_REASON_BYTES {
        let message = format!("a reason has at most {MAX_REASON_BYTES} bytes");
        return Err(Failure::Usage(message));
    }
    let (locks, scope) = scope(store, &args.what).await?;
    match locks.freeze(scope.clone(), &args.reason, until, &Actor::new(&args.actor)).await {
        Err(e @ LockError::PastFreeze) => return Err(Failure::Usage(e.to_string())),
        frozen => frozen?,
    }
    tokio::time::sleep(OBEYED_WITHIN).await;
    let on = answer(store.freezes(Deadline::NONE)).await?.on;
    // How many servers have noted themselves.
    let servers = allowed(answer(store.servers()).await)?.map(|servers| servers.len());
    for this in on.iter().filter(|freeze| freeze.scope == scope) {
        let mut value = as_json(this);
        value["servers"] = json!(servers);
        let of = servers.map(|all| format!(" of {all}")).unwrap_or_default();
        let text = format!("{}{of} after {} s", line(this), OBEYED_WITHIN.as_secs());
        output::show(json, &value, &text)?;
    }
    Ok(Outcome::Done)
}

pub(crate) async fn thaw(store: &MongoStore, args: &Frozen, json: bool) -> Result {
    let (locks, scope) = scope(store, args).await?;
    let was_frozen = locks.thaw(scope.clone()).await?;
    let left = locks.health().frozen;
    let in_json: Vec<_> = left.iter().map(as_json).collect();
    let (outcome, thawed) = match was_frozen {
        true => (Outcome::Done, "is thawed"),
        false => (Outcome::NotSo, "was not frozen"),
    };
    let left: String = left.iter().map(|freeze| format!("\nstill: {}", line(freeze))).collect();
    let value = json!({ "thawed": was_frozen, "frozen": in_json });
    output::show(json, &value, &format!("{scope} {thawed}{left}"))?;
    Ok(outcome)
}

async fn scope(store: &MongoStore, args: &Frozen) -> Result<(LockManager, Scope)> {
    let locks = manager(store).await?;
    let Some(collection) = &args.collection else {
        // Leaked on purpose: the process ends with the command.
        attach_all(store).await?.into_iter().for_each(|it| locks.attach(it.leak()));
        return Ok((locks, Scope::All));
    };
    attach(store, collection).await?;
    locks.attach(collection.clone().leak());
    Ok((locks, collection.as_str().into()))
}

pub(crate) fn line(freeze: &Known) -> String {
    let until = humantime::format_rfc3339_seconds(freeze.until);
    let by = freeze.by.as_ref().map(|by| format!(" by {}", printable(by))).unwrap_or_default();
    let (scope, reason, servers) = (&freeze.scope, printable(&freeze.reason), freeze.obeyed_by);
    format!("{scope} is frozen until {until}{by}: {reason}; servers that have noted it: {servers}")
}

pub(crate) fn as_json(freeze: &Known) -> Value {
    let collection = match &freeze.scope {
        Scope::All => None,
        Scope::Collection(name) => Some(name),
    };
    json!({
        "collection": collection,
        "reason": freeze.reason,
        "until": humantime::format_rfc3339_millis(freeze.until).to_string(),
        "by": freeze.by,
        "obeyed_by": freeze.obeyed_by,
    })
}
