//! The current state of the servers.

use futures_util::future::{try_join, try_join_all};
use mongodb::{
    bson::{Document, doc},
    options::{ReadPreference, SelectionCriteria},
};

use crate::{
    error::StoreError,
    store::{
        StoreStatus, Topology,
        mongo::{
            ENDED, MongoStore,
            doctor::{self, majority_lag},
            error::store_error,
            indexes,
        },
    },
};

impl MongoStore {
    // hello returns: the answer of the primary, or else of a member that says that there is none. No
    // answer → unavailable.
    pub(super) async fn ask_status(&self, collections: &[&str]) -> Result<StoreStatus, StoreError> {
        let database = &self.inner.database;
        // A missing primary is also an answer.
        let anybody = ReadPreference::PrimaryPreferred { options: None };
        let hello = database
            .run_command(doc! { "hello": 1 })
            .selection_criteria(SelectionCriteria::ReadPreference(anybody))
            .await
            .map_err(|e| store_error("asking the server for its status", e))?;
        let mut status = said(&hello);
        if status.writable {
            let of_locks = |name| (format!("{name}.lock"), "ts", indexes::OF_LOCKS);
            let locks = collections.iter().map(of_locks);
            // Prepared with the first collection.
            let ended = (ENDED.to_owned(), "ts", indexes::OF_ENDED);
            let ended = Some(ended).filter(|_| !collections.is_empty());
            let sessions = self.sessions().map(|name| (name, "expires", indexes::OF_SESSIONS));
            let all = locks.chain(ended).chain(sessions);
            let missing = all.map(async |(collection, date, expected)| {
                let missing = indexes::missing(database, &collection, date, expected).await;
                let missing = doctor::allowed(missing)
                    .map_err(|e| store_error(format!("looking at the indexes of {collection}"), e));
                Ok::<_, StoreError>((collection, missing?))
            });
            let missing = try_join_all(missing);
            let user = async {
                let user = doctor::User::ask(database).await;
                user.map_err(|e| store_error("looking at the privileges of the database user", e))
            };
            let (missing, user) = try_join(missing, user).await?;
            let has_evidence = missing.iter().any(|(_, missing)| missing.is_none());
            let sessions = self.sessions();
            if user.lists_privileges() || has_evidence {
                let kind = doctor::Kind::of(&hello);
                let lacks = user.lacks(database.name(), collections, sessions.as_deref(), kind);
                let lacks = lacks.map(|(collection, mut actions)| {
                    actions.retain(|action| !doctor::is_schema(action));
                    (collection, actions.into_iter().map(str::to_owned).collect::<Vec<_>>())
                });
                status.missing_privileges = lacks.filter(|(_, lacks)| !lacks.is_empty()).collect();
            }
            let missing = missing.into_iter().filter_map(|(name, missing)| Some((name, missing?)));
            status.missing_indexes = missing.filter(|(_, missing)| !missing.is_empty()).collect();
        }
        Ok(status)
    }
}

/// The kind of deployment, from a server's answer to `hello`. A member of a replica set names its set; a mongos says
/// `isdbgrid`.
pub(super) fn topology(hello: &Document) -> Topology {
    if hello.contains_key("setName") {
        Topology::ReplicaSet
    } else if hello.get_str("msg").is_ok_and(|it| it == "isdbgrid") {
        Topology::Sharded
    } else {
        Topology::Standalone
    }
}

fn said(hello: &Document) -> StoreStatus {
    let writable = hello.get_bool("isWritablePrimary").unwrap_or(false);
    StoreStatus { majority_lag: majority_lag(hello), ..StoreStatus::new(topology(hello), writable) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mongodb::bson::DateTime;

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
            (doc! { "setName": "rs0" }, Topology::ReplicaSet, false, None),
        ];
        for (hello, topology, writable, majority_lag) in cases {
            let status = said(&hello);
            let expected = StoreStatus { majority_lag, ..StoreStatus::new(topology, writable) };
            assert_eq!(status, expected, "{hello}");
        }
    }
}
