//! The current state of the servers.

use std::time::Duration;

use mongodb::{
    bson::{DateTime, Document, doc},
    options::{ReadPreference, SelectionCriteria},
};

use crate::store::{
    StoreResult, StoreStatus, Topology,
    mongo::{Danger, MongoStore, error::Doing, schema::index::Index, time_limits::answered},
};

// hello returns: the answer of the primary, or else of a member that says that there is none. No
// answer → unavailable.
pub(in crate::store::mongo) async fn status(
    store: &MongoStore,
    collections: &[&str],
) -> StoreResult<StoreStatus> {
    // A missing primary is also an answer.
    let anybody = ReadPreference::PrimaryPreferred { options: None };
    let anybody = SelectionCriteria::ReadPreference(anybody);
    let hello = store.database().run_command(doc! { "hello": 1 }).selection_criteria(anybody);
    let hello = answered(hello).await;
    let mut status = status_in(&hello.doing(|| "asking the server for its status")?);
    if !status.writable {
        return Ok(status);
    }
    if let Some(danger) = store.lacks_connections(collections.len()) {
        status
            .dangers
            .insert("the client".to_owned(), vec![format!("has too few connections: {danger}")]);
    }
    for it in store.survey(store.needs(collections).await?).await?.collections {
        // Prepared with the first collection.
        let is_prepared =
            !collections.is_empty() || it.needs.collection != store.inner.ended.name();
        let missing = it.indexes.iter().flat_map(|there| Index::missing(&it.needs.indexes, there));
        let missing: Vec<_> = missing.map(ToString::to_string).collect();
        let is_other_kind = it.dangers.iter().any(Danger::is_other_kind);
        if is_prepared && !is_other_kind && !missing.is_empty() {
            status.missing_indexes.insert(it.needs.collection.clone(), missing);
        }
        if is_prepared && !it.dangers.is_empty() {
            let dangers = it.dangers.iter().map(|it| format!("{}: {}", it.problem, it.remedy));
            status.dangers.insert(it.needs.collection.clone(), dangers.collect());
        }
        let lacks = it.lacks.iter().filter(|action| !is_for_preparation(action));
        let lacks: Vec<_> = lacks.map(ToString::to_string).collect();
        if !lacks.is_empty() {
            status.missing_privileges.insert(it.needs.collection, lacks);
        }
    }
    Ok(status)
}

/// True if a server does not need this action when it finds the indexes as they should be.
fn is_for_preparation(action: &str) -> bool {
    ["createIndex", "collMod"].contains(&action)
}

/// How far the majority is behind, from the dates of the primary alone, in whole seconds. An idle primary writes a no-op
/// every 10 s, so a stalled majority shows within that time even if nobody saves.
fn majority_lag(hello: &Document) -> Option<Duration> {
    let writes = hello.get_document("lastWrite").ok()?;
    let millis = |name| writes.get_datetime(name).ok().copied().map(DateTime::timestamp_millis);
    let behind = millis("lastWriteDate")?.saturating_sub(millis("majorityWriteDate")?);
    Some(Duration::from_millis(behind.try_into().unwrap_or(0)))
}

/// The kind of deployment, from a server's answer to `hello`. A member of a replica set names its set, as soon as the set
/// has a configuration; a mongos says `isdbgrid`.
pub(in crate::store::mongo) fn topology(hello: &Document) -> Topology {
    if hello.contains_key("setName") || is_uninitiated(hello) {
        Topology::ReplicaSet
    } else if hello.get_str("msg").is_ok_and(|it| it == "isdbgrid") {
        Topology::Sharded
    } else {
        Topology::Standalone
    }
}

pub(in crate::store::mongo) const UNINITIATED: &str =
    "the server is a member of a replica set that has no configuration yet: run `rs.initiate()`";

/// True for a member of a replica set without a configuration: it was not initiated yet, or has not read its files yet.
pub(in crate::store::mongo) fn is_uninitiated(hello: &Document) -> bool {
    !hello.contains_key("setName") && hello.get_bool("isreplicaset").unwrap_or(false)
}

fn status_in(hello: &Document) -> StoreStatus {
    let writable = hello.get_bool("isWritablePrimary").unwrap_or(false);
    let mut status = StoreStatus::new(topology(hello), writable);
    status.majority_lag = majority_lag(hello);
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> DateTime {
        DateTime::from_millis(1_700_000_000_000 + seconds * 1_000)
    }

    #[test]
    fn what_servers_say_of_themselves_is_understood() {
        let member = |writable, majority| {
            let writes = doc! { "lastWriteDate": at(60), "majorityWriteDate": at(majority) };
            doc! { "setName": "rs0", "isWritablePrimary": writable, "lastWrite": writes }
        };
        let lag = |seconds| Some(Duration::from_secs(seconds));
        let cases = [
            (doc! { "isWritablePrimary": true }, Topology::Standalone, true, None),
            (doc! { "isWritablePrimary": true, "msg": "isdbgrid" }, Topology::Sharded, true, None),
            (member(true, 60), Topology::ReplicaSet, true, lag(0)),
            (member(true, 18), Topology::ReplicaSet, true, lag(42)),
            (member(false, 60), Topology::ReplicaSet, false, lag(0)),
            (doc! { "isreplicaset": true }, Topology::ReplicaSet, false, None),
            (doc! { "setName": "rs0" }, Topology::ReplicaSet, false, None),
        ];
        for (hello, topology, writable, majority_lag) in cases {
            let status = status_in(&hello);
            let mut expected = StoreStatus::new(topology, writable);
            expected.majority_lag = majority_lag;
            assert_eq!(status, expected, "{hello}");
        }
    }
}
