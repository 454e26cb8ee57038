//! Freezes collections, and thaws them.

use std::time::SystemTime;

use actix_doclock::{
    MongoStore,
    freeze::{Freeze as Known, Scope},
    store::Store,
};
use serde_json::{Value, json};

use crate::{
    Failure, Outcome, answer,
    args::{Freeze, Frozen},
    locks,
    output::{self, printable},
};

/// A reason fits into an answer of every server.
const MAX_REASON_BYTES: usize = actix_doclock::limits::MAX_REASON_BYTES;

pub(crate) async fn freeze(
    store: &MongoStore,
    args: &Freeze,
    json: bool,
) -> Result<Outcome, Failure> {
    let scope = scope(store, &args.what).await?;
    let end = args.lasts.and_then(|lasts| SystemTime::now().checked_add(lasts)).or(args.until);
    let Some(until) = end else { return Err(Failure::Usage("that is too long".to_owned())) };
    if args.reason.len() > MAX_REASON_BYTES {
        let message = format!("a reason has at most {MAX_REASON_BYTES} bytes");
        return Err(Failure::Usage(message));
    }
    let on = answer(store.set_freeze(&scope, Some((&args.reason, until)))).await?;
    let Some(this) = on.iter().find(|it| it.scope == scope && it.reason == args.reason) else {
        return Err(Failure::Usage("the freeze would have ended already".to_owned()));
    };
    if json {
        output::print_json(&as_json(this))?;
    } else {
        output::print(&format!("{}; all servers obey within two seconds", line(this)))?;
    }
    Ok(Outcome::Done)
}

pub(crate) async fn thaw(
    store: &MongoStore,
    args: &Frozen,
    json: bool,
) -> Result<Outcome, Failure> {
    let scope = scope(store, args).await?;
    let before = answer(store.freezes()).await?;
    let left = answer(store.set_freeze(&scope, None)).await?;
    let was_frozen = before.iter().any(|freeze| freeze.scope == scope);
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

async fn scope(store: &MongoStore, args: &Frozen) -> Result<Scope, Failure> {
    let Some(collection) = &args.collection else { return Ok(Scope::All) };
    locks::attach(store, collection).await?;
    Ok(collection.as_str().into())
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
