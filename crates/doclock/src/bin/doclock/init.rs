//! Creates lock collections.

use std::time::Duration;

use actix_doclock::{
    MongoStore, StoreError, StoreErrorKind,
    store::{Deadline, Locks, Rules},
};
use serde_json::json;

use crate::{Failure, Outcome, Result, answer, answer_within, args::Init, output};

/// The time limit for an index on an existing collection.
const INDEX_WITHIN: Duration = Duration::from_secs(10 * 60);

pub(crate) async fn init(store: &MongoStore, args: &Init, json: bool) -> Result {
    for collection in &args.collections {
        if let Some(problem) = MongoStore::no_documents(collection) {
            return Err(Failure::Usage(problem));
        }
        if let Some(danger) = answer(store.others_records(collection)).await? {
            return Err(Failure::Usage(danger.to_string()));
        }
        let before = answer(store.attach(collection)).await?;
        if before.is_some_and(|rules| rules.fenced) && !args.fenced {
            return Err(Failure::Usage(format!(
                "`{collection}` is fenced, and its fencing tokens would be lost: add --fenced"
            )));
        }
    }
    if let Some(sessions) = &args.sessions {
        refuse_others(store, sessions).await?;
    }
    let mut rules = Rules::new(args.ttl);
    if args.fenced {
        rules = rules.fenced();
    }
    let mut made = Vec::new();
    for collection in &args.collections {
        answer_within(INDEX_WITHIN, store.prepare(collection, &rules, Deadline::NONE)).await?;
        // The time of the index, which may have been longer before.
        let expires_after =
            answer(store.attach(collection)).await?.map_or(args.ttl, |rules| rules.ttl);
        made.push((collection, expires_after));
    }
    if let Some(sessions) = &args.sessions {
        let prepared = actix_session_mongo::prepare(store.database(), sessions).await;
        prepared.map_err(failed)?;
    }
    if json {
        let made = made.iter().map(|(collection, expires_after)| {
            json!({ "collection": collection, "expire_after_seconds": expires_after.as_secs() })
        });
        let mut made = json!({ "collections": made.collect::<Vec<_>>() });
        if let Some(sessions) = &args.sessions {
            made["sessions"] = json!(sessions);
        }
        output::print_json(&made)?;
        return Ok(Outcome::Done);
    }
    for (collection, expires_after) in made {
        let expires = if args.fenced {
            "records are kept".to_owned()
        } else {
            let after = humantime::format_duration(expires_after);
            let kept = if expires_after > Rules::new(args.ttl).expiry() {
                ", as before (it is never lowered automatically; `doclock doctor --ttl` tells how)"
            } else {
                ""
            };
            format!("the TTL index removes records after {after}{kept}")
        };
        let collection = output::printable(collection);
        output::print(&format!("{collection}.lock is ready; {expires}"))?;
    }
    if let Some(sessions) = &args.sessions {
        let sessions = output::printable(sessions);
        output::print(&format!("{sessions} is ready; sessions go a day after their end"))?;
    }
    Ok(Outcome::Done)
}

/// Before anything is created: `--sessions=offer` may be a slip of the hand.
async fn refuse_others(store: &MongoStore, sessions: &str) -> Result<()> {
    let others = actix_session_mongo::others_records(store.database(), sessions);
    let others = answer(async { others.await.map_err(failed) }).await?;
    let Some(why) = others else { return Ok(()) };
    let meant = match MongoStore::no_documents(sessions) {
        None => format!(
            "; did you mean `doclock init {sessions}`, which prepares locks for its documents?"
        ),
        Some(_) => String::new(),
    };
    Err(Failure::Usage(why + &meant))
}

fn failed(error: actix_session_mongo::Error) -> StoreError {
    let kind = match error.is_outage() {
        true => StoreErrorKind::Unavailable,
        false => StoreErrorKind::Other,
    };
    StoreError::new(kind, error.to_string())
}
