//! Checks whether a majority follows the primary.

use std::time::Duration;

use mongodb::{
    Database,
    bson::{DateTime, Document, doc},
    options::{ReadConcern, ReadPreference, SelectionCriteria},
};

use crate::store::mongo::{
    doctor::{
        finding::{Finding, Severity},
        topology::Kind,
    },
    error::ran_out_of_time,
    freeze::FROZEN,
};

/// A majority that takes longer makes requests fail: this is the default deadline of a manager.
const IN_TIME: Duration = Duration::from_secs(5);

/// By a linearizable read, whose answer waits until a majority has confirmed the primary. It writes nothing, and
/// needs no right but that of the freezes. Other errors are left to the other checks.
pub(super) async fn stalled(database: &Database, hello: &Document, kind: Kind) -> Option<Finding> {
    if kind == Kind::Standalone {
        return None;
    }
    let looked = database
        .collection::<Document>(FROZEN)
        .find_one(doc! { "_id": "majority" })
        .read_concern(ReadConcern::linearizable())
        .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
        .max_time(IN_TIME)
        .await;
    let error = looked.err()?;
    if !ran_out_of_time(&error) {
        return None;
    }
    let lag = match majority_lag(hello) {
        Some(lag) => format!(" (its newest write is {lag:?} behind)"),
        None => String::new(),
    };
    Some(Finding::new(
        Severity::Error,
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

/// From the dates of the primary alone, in whole seconds. The primary writes at least every 10 s.
pub(in crate::store::mongo) fn majority_lag(hello: &Document) -> Option<Duration> {
    let writes = hello.get_document("lastWrite").ok()?;
    let millis = |name| writes.get_datetime(name).ok().copied().map(DateTime::timestamp_millis);
    let behind = millis("lastWriteDate")?.saturating_sub(millis("majorityWriteDate")?);
    Some(Duration::from_millis(behind.try_into().unwrap_or(0)))
}
