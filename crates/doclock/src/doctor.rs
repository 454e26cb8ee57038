//! Checks whether a database is fit to keep locks.

use std::{cmp::Reverse, time::Duration};

use actix_doclock::{
    MongoStore, StoreError, StoreErrorKind,
    limits::DEFAULT_TTL,
    store::{Needs, Surveyed, Topology},
};
use mongodb::{
    Database, Namespace,
    bson::{Bson, Document, doc},
    error::Result as MongoResult,
    options::{ReadPreference, SelectionCriteria},
};

mod clock;
mod finding;
mod fleet;
mod index;
mod majority;
mod privilege;
mod sharding;
mod topology;

pub use finding::{Finding, Severity};

/// The usual collection of web sessions.
pub const SESSIONS: &str = "doclock.session";

/// Looks for dangers to the locks of these collections: the kind of deployment, the write concern of the URI, a
/// majority that does not follow, missing indexes, indexes and options that others have brought and that lose or refuse
/// locks, a TTL index that differs from `ttl` or from the locks that are held, the collection of web sessions if there is one, servers that disagree, servers whose clocks differ, missing
/// privileges of the database user, and the sharding of the lock collections. The worst finding comes first; an empty
/// list means that nothing is wrong.
///
/// It only reads, so an application may log the findings when it starts:
///
/// ```no_run
/// # use actix_doclock::{MongoStore, StoreError};
/// # async fn start(store: &MongoStore) -> Result<(), StoreError> {
/// for finding in doclock::diagnose(store, &["workitem"], None).await? {
///     println!("{}: {}; {}", finding.about, finding.problem, finding.advice);
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
/// If the database is not reached. A check that the database user has no privilege for is left out, and reported as
/// left out.
pub async fn diagnose(
    store: &MongoStore,
    collections: &[impl AsRef<str>],
    ttl: Option<Duration>,
) -> Result<Vec<Finding>, StoreError> {
    let collections: Vec<_> = collections.iter().map(AsRef::as_ref).collect();
    let mut findings = look_over(store, &collections, ttl).await?;
    findings.sort_by_key(|finding| Reverse(finding.severity));
    Ok(findings)
}

async fn look_over(
    store: &MongoStore,
    collections: &[&str],
    ttl: Option<Duration>,
) -> Result<Vec<Finding>, StoreError> {
    let database = store.database();
    let hello = database.run_command(doc! { "hello": 1 }).await.map_err(failed)?;
    let topology = store.topology().await?;
    let mut findings = topology::findings(&hello, topology);
    findings.extend(topology::write_concern(topology, database.write_concern()));
    findings.extend(majority::stalled(store, &hello, topology).await);

    let mut needs = store.needs(collections).await?;
    let is_attached = needs.iter().any(is_of_sessions);
    if !is_attached {
        needs.push(sessions(SESSIONS));
    }
    let mut survey = store.survey(needs).await?;
    if survey.user.is_none() && survey.collections.iter().any(Surveyed::is_hidden) {
        findings.push(privilege::not_authenticated(database.name()));
        return Ok(findings);
    }
    let is_there = |it: &Surveyed| it.indexes.as_ref().is_some_and(|indexes| !indexes.is_empty());
    survey.collections.retain(|it| is_attached || !is_of_sessions(&it.needs) || is_there(it));

    let servers = allowed(store.servers().await)?.unwrap_or_default();
    findings.extend(fleet::findings(database.name(), &servers));
    let namespace = |it: &Surveyed| Namespace::new(database.name(), &it.needs.collection);
    for it in &survey.collections {
        findings.extend(privilege::finding(survey.user.as_ref(), &namespace(it), &it.lacks));
        let danger = |danger| index::danger(&namespace(it), danger, &it.needs.indexes);
        findings.extend(it.dangers.iter().map(danger));
    }
    let foreign_ttl = ttl.unwrap_or(DEFAULT_TTL);
    findings
        .extend(clock::findings(database, &hello, topology, foreign_ttl).await.map_err(failed)?);
    findings.extend(store.too_few_connections(collections.len()).map(topology::connections));
    if collections.is_empty() {
        findings.push(index::no_collections(database.name()));
    }
    for it in survey.collections.iter().filter(|it| !it.needs.indexes.is_empty()) {
        let (namespace, needed) = (namespace(it), &it.needs.indexes);
        if namespace.coll.ends_with(".lock") {
            if let Some(existing) = &it.indexes {
                let held = allowed(longest_held(database, &namespace).await.map_err(failed))?;
                findings.extend(index::of_locks(&namespace, needed, existing, ttl, held.flatten()));
            }
            if topology == Topology::Sharded {
                let key = sharding::key(database.client(), &namespace).await;
                findings.push(sharding::finding(&namespace, allowed(key.map_err(failed))?));
            }
        } else if let Some(existing) = &it.indexes
            && (is_of_sessions(&it.needs) || !collections.is_empty())
        {
            findings.extend(index::compare(&namespace, needed, existing));
        }
    }
    Ok(findings)
}

/// The needs of a collection of web sessions.
pub fn sessions(collection: &str) -> Needs {
    Needs::new(collection, actix_session_mongo::ACTIONS, actix_session_mongo::indexes())
        .with_dates(actix_session_mongo::DATES)
}

fn is_of_sessions(needs: &Needs) -> bool {
    needs.indexes.iter().any(|index| index.field == "expires")
}

/// The longest ttl of a live lock, as its record states it. A foreign program may have written any number.
async fn longest_held(database: &Database, locks: &Namespace) -> MongoResult<Option<Duration>> {
    let expires = doc! { "$add": ["$ts", "$ttl"] };
    let is_dated = doc! { "$eq": [{ "$type": "$ts" }, "date"] };
    let is_live = doc! { "$and": [is_dated, { "$gt": [expires, "$$NOW"] }] };
    // By the index on `_id`: with `notablescan` the server reads no whole collection without one.
    let all = doc! { "$gte": Bson::MinKey };
    let live = doc! { "_id": all, "ttl": { "$type": "number", "$gt": 0 }, "$expr": is_live };
    let primary = SelectionCriteria::ReadPreference(ReadPreference::Primary);
    let locks = database.collection::<Document>(&locks.coll);
    let longest = locks.find_one(live).sort(doc! { "ttl": -1 }).selection_criteria(primary);
    let longest = longest.projection(doc! { "ttl": { "$toDouble": "$ttl" } }).await?;
    let millis = longest.and_then(|record| record.get_f64("ttl").ok());
    Ok(millis.map(|millis| Duration::from_millis(millis as u64).min(index::LONGEST)))
}

fn failed(error: mongodb::error::Error) -> StoreError {
    StoreError::from_mongodb("checking the database", error)
}

/// `None` if the database user may not do this. The check of the privileges reports that anyway.
fn allowed<T>(result: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match result {
        Err(e) if e.kind() == StoreErrorKind::Denied => Ok(None),
        result => result.map(Some),
    }
}
