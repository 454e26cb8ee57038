//! What a driver error says about the request.

use mongodb::error::{
    Error, ErrorKind, RETRYABLE_WRITE_ERROR, TRANSIENT_TRANSACTION_ERROR,
    UNKNOWN_TRANSACTION_COMMIT_RESULT, WriteFailure,
};

use crate::{StoreError, StoreErrorKind};

/// Server codes after which the same request may be sent again: fail-over and shutdown, lost
/// connections, time limits, write conflicts, and a duplicate key between two upserts.
const TRANSIENT: &[i32] = &[
    6, 7, 24, 50, 64, 89, 91, 112, 133, 134, 189, 202, 251, 262, 317, 358, 384, 9001, 10107, 11000,
    11600, 11602, 13388, 13435, 13436,
];

/// Not authorised, and authentication failed.
const DENIED: &[i32] = &[13, 18];

/// `doing` says what failed, as in "renewing locks in shop.workitem.lock".
pub(super) fn store_error(doing: impl std::fmt::Display, error: Error) -> StoreError {
    match kind(&error) {
        StoreErrorKind::Unavailable => StoreError::new(
            StoreErrorKind::Unavailable,
            format!("{doing}: MongoDB cannot be reached, or its answer was lost"),
        ),
        StoreErrorKind::Denied => StoreError::new(
            StoreErrorKind::Denied,
            format!("{doing}: the database user is not allowed to do this"),
        ),
        kind => StoreError::new(kind, format!("{doing}: MongoDB refused")),
    }
    .because(error)
}

fn kind(error: &Error) -> StoreErrorKind {
    let labelled =
        [RETRYABLE_WRITE_ERROR, TRANSIENT_TRANSACTION_ERROR, UNKNOWN_TRANSACTION_COMMIT_RESULT]
            .iter()
            .any(|label| error.contains_label(label));
    if labelled {
        return StoreErrorKind::Unavailable;
    }
    match error.kind.as_ref() {
        ErrorKind::Authentication { .. } => StoreErrorKind::Denied,
        ErrorKind::Io(_)
        | ErrorKind::ServerSelection { .. }
        | ErrorKind::ConnectionPoolCleared { .. }
        | ErrorKind::DnsResolve { .. } => StoreErrorKind::Unavailable,
        _ => match code(error) {
            Some(code) if TRANSIENT.contains(&code) => StoreErrorKind::Unavailable,
            Some(code) if DENIED.contains(&code) => StoreErrorKind::Denied,
            _ => StoreErrorKind::Other,
        },
    }
}

/// The server's code, wherever the driver has put it.
pub(super) fn code(error: &Error) -> Option<i32> {
    match error.kind.as_ref() {
        ErrorKind::Command(e) => Some(e.code),
        ErrorKind::Write(WriteFailure::WriteError(e)) => Some(e.code),
        ErrorKind::Write(WriteFailure::WriteConcernError(e)) => Some(e.code),
        ErrorKind::InsertMany(e) => (e.write_concern_error.as_ref()).map(|e| e.code),
        _ => None,
    }
}
