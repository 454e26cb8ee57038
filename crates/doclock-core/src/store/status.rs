//! The status of a store.

use std::{collections::BTreeMap, fmt, time::Duration};

use serde::Serialize;

use crate::{store::ServerNote, text::millis_if_any};

/// The answer to [`Locks::status`](crate::store::Locks::status), for the people and programs that monitor a
/// server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StoreStatus {
    /// The kind of deployment.
    pub topology: Topology,
    /// True if the store takes writes at the moment; false while there is no primary.
    pub writable: bool,
    /// How far the majority-committed state lags behind the newest write. Every grant waits for a
    /// majority. `None` if the deployment has no majority to wait for, or if the lag is not known.
    #[serde(rename = "majority_lag_ms", serialize_with = "millis_if_any")]
    pub majority_lag: Option<Duration>,
    /// The indexes that [`prepare`](crate::store::Locks::prepare) creates but that are missing now, by the
    /// name of the lock collection, such as `workitem.lock`.
    pub missing_indexes: BTreeMap<String, Vec<String>>,
    /// What other programs or migrations have brought to a collection and its locks cannot live with, such as a unique
    /// index, with what to do, by the name of the collection.
    pub dangers: BTreeMap<String, Vec<String>>,
    /// The actions that the database user lacks, by the name of the collection. The privileges to create
    /// indexes are not included: another user may have created them.
    pub missing_privileges: BTreeMap<String, Vec<String>>,
}

impl StoreStatus {
    /// A status in which nothing is missing.
    #[must_use]
    pub fn new(topology: Topology, writable: bool) -> Self {
        let (missing_indexes, missing_privileges, dangers) = Default::default();
        let majority_lag = None;
        Self { topology, writable, majority_lag, missing_indexes, dangers, missing_privileges }
    }
}

/// The answer to [`Servers::note_server`](crate::store::Servers::note_server).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fleet {
    /// The kind of deployment.
    pub topology: Topology,
    /// The notes of all servers, including the caller.
    pub servers: Vec<ServerNote>,
}

impl Fleet {
    /// The servers on a deployment of this kind.
    #[must_use]
    pub fn new(topology: Topology, servers: Vec<ServerNote>) -> Self {
        Self { topology, servers }
    }
}

/// The kind of deployment that a store runs on, as far as operators need to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Topology {
    /// The process itself.
    Embedded,
    /// One server: no transactions and no change streams, and acknowledged writes are lost with the
    /// server.
    Standalone,
    /// Several servers, one of which is the primary.
    ReplicaSet,
    /// Several replica sets behind a router.
    Sharded,
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Embedded => "embedded",
            Self::Standalone => "standalone",
            Self::ReplicaSet => "replica set",
            Self::Sharded => "sharded cluster",
        })
    }
}
