//! Checks whether a majority follows the primary.

use std::time::Duration;

use actix_doclock::{
    MongoStore,
    store::{Topology, verbs::*},
};
use mongodb::{
    bson::{Document, doc},
    error::ErrorKind,
    options::{ReadConcern, ReadPreference, SelectionCriteria},
};

use crate::doctor::finding::{Finding, Severity};

/// A majority that takes longer makes requests fail: this is the default deadline of a manager.
const IN_TIME: Duration = Duration::from_secs(5);
/// The server's code for a command that did not end within its time limit.
const MAX_TIME_EXPIRED: i32 = 50;

/// Checks by a linearizable read, whose answer waits until a majority has confirmed the primary. The read writes
/// nothing, and needs only the right to read the freezes. Other errors are left to the other checks.
pub(super) async fn stalled(
    store: &MongoStore,
    hello: &Document,
    topology: Topology,
) -> Option<Finding> {
    if topology == Topology::Standalone {
        return None;
    }
    let looked = store
        .database()
        .collection::<Document>(&store.own_collection("frozen"))
        .find_one(doc! { "_id": "majority" })
        .read_concern(ReadConcern::linearizable())
        .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
        .max_time(IN_TIME)
        .await;
    match *looked.err()?.kind {
        ErrorKind::Command(e) if e.code == MAX_TIME_EXPIRED => {}
        _ => return None,
    }
    let status = store.status(&[], Deadline::NONE).await.ok();
    let lag = match status.and_then(|status| status.majority_lag) {
        Some(lag) => format!(" (its newest write is {lag:?} behind)"),
        None => String::new(),
    };
    Some(Severity::Error.finding(
        "stalled_majority",
        hello.get_str("me").unwrap_or("the router"),
        format!(
            "no majority has followed the primary within {IN_TIME:?}{lag}: locks and saves are written with \
             `w=majority`, so requests are answered with 503"
        ),
        "look at the secondaries: are they down, out of disk space, or behind (`rs.status()`, \
         `rs.printSecondaryReplicationInfo()`)?",
    ))
}
