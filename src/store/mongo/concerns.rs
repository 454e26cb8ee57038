//! Collections with fixed concerns, whatever the URI says.

use mongodb::{
    Collection, Database,
    options::{CollectionOptions, ReadConcern, ReadPreference, SelectionCriteria, WriteConcern},
};

use crate::store::mongo::time_limits::WRITE_CONCERN_TIMEOUT;

/// A collection whose writes are acknowledged by the majority, and whose reads go to the primary.
pub(super) fn open<T: Send + Sync>(
    database: &Database,
    name: &str,
    concern: ReadConcern,
) -> Collection<T> {
    let mut acknowledged = WriteConcern::majority();
    acknowledged.w_timeout = Some(WRITE_CONCERN_TIMEOUT);
    let options = CollectionOptions::builder()
        .write_concern(acknowledged)
        .read_concern(concern)
        .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
        .build();
    database.collection_with_options(name, options)
}

/// A collection whose reads return the state of the primary.
pub(super) fn primary<T: Send + Sync>(database: &Database, name: &str) -> Collection<T> {
    open(database, name, ReadConcern::local())
}
