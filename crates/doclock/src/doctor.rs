//! Checks whether a database is fit to keep locks.

use std::{cmp::Reverse, time::Duration};

use actix_doclock::{
    MongoStore, StoreError, StoreErrorKind,
    limits::DEFAULT_TTL,
    store::{Danger, Needs, Surveyed, Topology},
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
/// If the database is not reached. A check that fails, or that the database user has no privilege for, is left out, and
/// reported as left out.
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
    let (user, mut surveyed) = survey(store, needs, &mut findings).await;
    if user.is_none() && surveyed.iter().any(Surveyed::is_hidden) {
        findings.push(privilege::not_authenticated(database.name()));
        return Ok(findings);
    }
    let is_there = |it: &Surveyed| {
        let has_indexes = it.indexes.as_ref().is_some_and(|indexes| !indexes.is_empty());
        has_indexes || !it.dangers.is_empty()
    };
    surveyed.retain(|it| is_attached || !is_of_sessions(&it.needs) || is_there(it));

    let servers = store.servers().await;
    let about = database.name();
    let servers = checked(&mut findings, about, "the servers", servers).unwrap_or_default();
    findings.extend(fleet::findings(database.name(), &servers));
    let namespace = |it: &Surveyed| Namespace::new(database.name(), &it.needs.collection);
    for it in &surveyed {
        findings.extend(privilege::finding(user.as_ref(), &namespace(it), &it.lacks));
        let danger = |danger| index::danger(&namespace(it), danger, &it.needs.indexes);
        findings.extend(it.dangers.iter().map(danger));
    }
    let foreign_ttl = ttl.unwrap_or(DEFAULT_TTL);
    let clocks = clock::findings(database, &hello, topology, foreign_ttl).await.map_err(failed);
    let clocks = checked(&mut findings, about, "the clocks", clocks);
    findings.extend(clocks.unwrap_or_default());
    findings.extend(store.too_few_connections(collections.len()).map(topology::connections));
    if collections.is_empty() {
        findings.push(index::no_collections(database.name()));
    }
    let has_indexes = |it: &&Surveyed| {
        !it.needs.indexes.is_empty() && !it.dangers.iter().any(Danger::is_other_kind)
    };
    for it in surveyed.iter().filter(has_indexes) {
        let (namespace, needed) = (namespace(it), &it.needs.indexes);
        if let Some(of_documents) = namespace.coll.strip_suffix(".lock") {
            let others = store.others_records(of_documents).await;
            let others = checked(&mut findings, &namespace, "whose records these are", others);
            findings.extend(others.flatten().map(|it| index::danger(&namespace, &it, needed)));
            if let Some(existing) = &it.indexes {
                let held = longest_held(database, &namespace).await.map_err(failed);
                let held = checked(&mut findings, &namespace, "the ttl of the locks", held);
                findings.extend(index::of_locks(&namespace, needed, existing, ttl, held.flatten()));
            }
            if topology == Topology::Sharded {
                let key = sharding::key(database.client(), &namespace).await.map_err(failed);
                // Without the privilege, the finding says that nothing is known.
                if !matches!(&key, Err(e) if e.kind() != StoreErrorKind::Denied) {
                    findings.push(sharding::finding(&namespace, key.ok()));
                } else {
                    checked(&mut findings, &namespace, "the sharding", key);
                }
            }
            continue;
        }
        if is_of_sessions(&it.needs) {
            let others = actix_session_mongo::others_records(database, &namespace.coll).await;
            let others = others.map_err(|e| StoreError::new(StoreErrorKind::Other, e.to_string()));
            let others = checked(&mut findings, &namespace, "whose records these are", others);
            findings.extend(others.flatten().map(|it| index::others_sessions(&namespace, it)));
        }
        if let Some(existing) = &it.indexes
            && (is_of_sessions(&it.needs) || !collections.is_empty())
        {
            findings.extend(index::compare(&namespace, needed, existing));
        }
    }
    Ok(findings)
}

/// Each check stands alone: what cannot be checked is a finding, and the other checks go on. `None` also if the
/// database user may not do this, which the check of the privileges reports.
fn checked<T>(
    findings: &mut Vec<Finding>,
    about: impl ToString,
    what: &str,
    outcome: Result<T, StoreError>,
) -> Option<T> {
    let error = match outcome {
        Ok(found) => return Some(found),
        Err(e) if e.kind() == StoreErrorKind::Denied => return None,
        Err(e) => e,
    };
    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
    let problem = format!("could not check {what}: {error}{}", cause.unwrap_or_default());
    let advice = "remove the cause, and run the check again; all other checks were made";
    findings.push(Severity::Warning.finding("not_checked", about, problem, advice));
    None
}

/// The user, and each collection that can be looked at. If one of them cannot, each is looked at alone.
async fn survey(
    store: &MongoStore,
    needs: Vec<Needs>,
    findings: &mut Vec<Finding>,
) -> (Option<(String, String)>, Vec<Surveyed>) {
    if let Ok(all) = store.survey(needs.clone()).await {
        return (all.user, all.collections);
    }
    let (mut user, mut surveyed) = (None, Vec::new());
    for needs in needs {
        let about = Namespace::new(store.database().name(), &needs.collection);
        let alone = store.survey(vec![needs]).await;
        if let Some(alone) = checked(findings, about, "the collection", alone) {
            user = user.or(alone.user);
            surveyed.extend(alone.collections);
        }
    }
    (user, surveyed)
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
    // A record of others may hold anything: in doubles nothing overflows, and what is no number is passed over.
    let double = |of: &str| {
        let none = Bson::Null;
        doc! { "$convert": { "input": of, "to": "double", "onError": none.clone(), "onNull": none } }
    };
    let is_dated = doc! { "$eq": [{ "$type": "$ts" }, "date"] };
    let expires = doc! { "$add": [double("$ts"), double("$ttl")] };
    let is_live = doc! { "$and": [is_dated, { "$gt": [expires, double("$$NOW")] }] };
    let is_live = doc! { "$cond": [{ "$isNumber": "$ttl" }, is_live, false] };
    // By the index on `_id`: with `notablescan` the server reads no whole collection without one.
    let all = doc! { "$gte": Bson::MinKey };
    let live = doc! { "_id": all, "ttl": { "$type": "number", "$gt": 0 }, "$expr": is_live };
    let primary = SelectionCriteria::ReadPreference(ReadPreference::Primary);
    let locks = database.collection::<Document>(&locks.coll);
    let longest = locks.find_one(live).sort(doc! { "ttl": -1 }).selection_criteria(primary);
    let longest = longest.projection(doc! { "ttl": double("$ttl") }).await?;
    let millis = longest.and_then(|record| record.get_f64("ttl").ok());
    Ok(millis.map(|millis| Duration::from_millis(millis as u64).min(index::LONGEST)))
}

fn failed(error: mongodb::error::Error) -> StoreError {
    MongoStore::error("checking the database", error)
}
