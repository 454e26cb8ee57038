//! What a store says of itself.

use std::{collections::BTreeMap, fmt, time::Duration};

use serde::{Serialize, Serializer};

/// The answer to [`Store::status`](crate::Store::status), for people and programs that watch over a
/// server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StoreStatus {
    /// What it runs on.
    pub topology: Topology,
    /// Whether it takes writes at the moment. Not while there is no primary.
    pub writable: bool,
    /// How far the newest write that a majority has is behind the newest one. Every grant waits for a
    /// majority. `None` where there is none to wait for, or where it is not known.
    #[serde(rename = "majority_lag_ms", serialize_with = "millis_if_any")]
    pub majority_lag: Option<Duration>,
    /// The indexes that [`prepare`](crate::Store::prepare) makes and that are not there any more, by
    /// collection: by that of the locks, as `workitem.lock`.
    pub missing_indexes: BTreeMap<String, Vec<String>>,
}

impl StoreStatus {
    /// One in which nothing is missing.
    #[must_use]
    pub fn new(topology: Topology, writable: bool) -> Self {
        Self { topology, writable, majority_lag: None, missing_indexes: BTreeMap::new() }
    }
}

/// What a store runs on, as far as it matters to those who run it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Topology {
    /// The process itself.
    Embedded,
    /// One server: no transactions, no change streams, and what it has acknowledged is lost with it.
    Standalone,
    /// Servers one of which is the primary.
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

/// Durations are milliseconds to programs.
pub(crate) fn millis<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).serialize(to)
}

pub(crate) fn millis_if_any<S: Serializer>(
    duration: &Option<Duration>,
    to: S,
) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => millis(duration, to),
        None => to.serialize_none(),
    }
}
