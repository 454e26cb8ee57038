//! Freezes collections, and thaws them.

use std::time::SystemTime;

use actix_doclock::{
    LockError, LockManager, MongoStore,
    freeze::{Freeze as Known, Scope},
    limits::MAX_REASON_BYTES,
};
use serde_json::{Value, json};

use crate::{
    Failure, Outcome,
    args::{Freeze, Frozen},
    locks, manager,
    output::{self, printable},
};

pub(crate) async fn freeze(
    store: &MongoStore,
    args: &Freeze,
    json: bool,
) -> Result<Outcome, Failure> {
    let end = args.lasts.and_then(|lasts| SystemTime::now().checked_add(lasts)).or(args.until);
    let Some(until) = end else { return Err(Failure::Usage("that is too long".to_owned())) };
    if args.reason.len() > MAX_REASON_BYTES {
        let message = format!("a reason has at most {MAX_REASON_BYTES} bytes");
        return Err(Failure::Usage(message));
    }
    let (locks, scope) = scope(store, &args.what).await?;
    match locks.freeze(scope.clone(), &args.reason, until).await {
        Err(e @ LockError::PastFreeze) => return Err(Failure::Usage(e.to_string())),
        frozen => frozen?,
    }
    let on = locks.freezes();
    for this in on.iter().filter(|freeze| freeze.scope == scope) {
        if json {
            output::print_json(&as_json(this))?;
        } else {
            output::print(&format!("{}; all servers obey within two seconds", line(this)))?;
        }
    }
    Ok(Outcome::Done)
}

pub(crate) async fn thaw(
    store: &MongoStore,
    args: &Frozen,
    json: bool,
) -> Result<Outcome, Failure> {
    let (locks, scope) = scope(store, args).await?;
    let was_frozen = locks.thaw(scope.clone()).await?;
    let left = locks.freezes();
    if json {
        let left: Vec<_> = left.iter().map(as_json).collect();
        output::print_json(&json!({ "thawed": was_frozen, "frozen": left }))?;
    } else {
        let thawed = if was_frozen { "is thawed" } else { "was not frozen" };
        let left = left.iter().map(|freeze| format!("\nstill: {}", line(freeze)));
        output::print(&format!("{scope} {thawed}{}", left.collect::<String>()))?;
    }
    Ok(if was_frozen { Outcome::Done } else { Outcome::NotSo })
}

async fn scope(store: &MongoStore, args: &Frozen) -> Result<(LockManager, Scope), Failure> {
    let locks = manager(store).await?;
    let Some(collection) = &args.collection else { return Ok((locks, Scope::All)) };
    locks::attach(store, collection).await?;
    // Leaked on purpose: the process ends with the command.
    locks.attach(collection.clone().leak());
    Ok((locks, collection.as_str().into()))
}

pub(crate) fn line(freeze: &Known) -> String {
    let until = humantime::format_rfc3339_seconds(freeze.until);
    format!("{} is frozen until {until}: {}", freeze.scope, printable(&freeze.reason))
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
    })
}
