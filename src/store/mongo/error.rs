//! Translates errors of the driver into errors of the store.
//!
//! Inside this store an error of this crate travels as a custom error of the driver. The verb that answers names the
//! operation that failed: [`Doing`].

use std::fmt::Display;

use mongodb::{
    bson::Bson,
    error::{
        Error, ErrorKind, RETRYABLE_WRITE_ERROR, TRANSIENT_TRANSACTION_ERROR,
        UNKNOWN_TRANSACTION_COMMIT_RESULT, WriteFailure,
    },
};

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{StoreResult, mongo::codec},
};

/// A result with the error of the driver, unless another error is named.
pub(super) type Result<T, E = Error> = std::result::Result<T, E>;

/// Server codes after which the same request may be sent again: failover and shutdown, lost
/// connections, time limits, interruptions, and write conflicts.
const TRANSIENT: &[i32] = &[
    6, 7, 24, 43, 50, 64, 89, 91, 112, 133, 134, 175, 189, 202, 237, 246, 251, 262, 290, 317, 358,
    384, 462, 9001, 10058, 10107, 11600, 11601, 11602, 13388, 13435, 13436,
];

/// Not authorised, and authentication failed.
const DENIED: &[i32] = &[13, AUTHENTICATION_FAILED];
const AUTHENTICATION_FAILED: i32 = 18;
/// Atlas gives many errors this code.
const ATLAS_ERROR: i32 = 8000;

pub(super) const DUPLICATE_KEY: i32 = 11000;
pub(super) const DOCUMENT_VALIDATION_FAILURE: i32 = 121;
const WRITE_CONFLICT: i32 = 112;
const SNAPSHOT_UNAVAILABLE: i32 = 246;
/// The primary steps down, shuts down, or is another one.
const NO_LONGER_PRIMARY: &[i32] = &[91, 189, 10058, 10107, 11600, 11602, 13435, 13436];
pub(super) const MAX_TIME_EXPIRED: i32 = 50;
/// Write-concern timeout. A mongos merges several such errors of its shards into this one.
const WRITE_CONCERN_FAILED: i32 = 64;

/// Why the server refused one write of a command. The driver does not look for such an error in the
/// reply to a raw command.
#[derive(Debug, thiserror::Error)]
#[error("{message} (server code {code})")]
pub(super) struct RefusedWrite {
    pub(super) code: i32,
    pub(super) message: String,
}

/// A write on many records was not carried out on some of them.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("{written} records were written, but {left_out} are blocked by open transactions")]
pub(super) struct LeftOut {
    pub(super) written: u64,
    pub(super) left_out: u64,
}

/// A record cannot be changed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Odd(pub(super) String);

/// A write was carried out on the primary, but no majority acknowledged it in time.
#[derive(Debug, thiserror::Error)]
#[error("no majority has acknowledged it: {error}")]
pub(super) struct Unacknowledged {
    /// True if a record matched the write.
    pub(super) has_written: bool,
    pub(super) error: Bson,
}

/// A failure for which the server is not to blame.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
struct Failure {
    kind: StoreErrorKind,
    what: String,
}

pub(super) fn failure(kind: StoreErrorKind, what: impl Into<String>) -> Error {
    Error::custom(Failure { kind, what: what.into() })
}

/// The outcome is not known, or there is none yet: the verb is repeated.
pub(super) fn unavailable(what: impl Into<String>) -> Error {
    failure(StoreErrorKind::Unavailable, what)
}

/// Too much is waiting: the command was not sent, and will not be.
pub(super) fn not_sent() -> Error {
    let what = "nothing was sent, because more is asked than MongoDB can do; try again later";
    failure(StoreErrorKind::Overloaded, what)
}

pub(super) fn is_odd(error: &Error) -> bool {
    ours::<Odd>(error).is_some()
}

pub(super) fn is_not_sent(error: &Error) -> bool {
    kind(error) == StoreErrorKind::Overloaded
}

pub(super) trait Doing<T> {
    /// Names the operation that failed, as in "renewing locks in workitem".
    fn doing<D: Display>(self, what: impl FnOnce() -> D) -> StoreResult<T>;
}

impl<T> Doing<T> for Result<T, Error> {
    fn doing<D: Display>(self, what: impl FnOnce() -> D) -> StoreResult<T> {
        self.map_err(|error| store_error(what(), error))
    }
}

const TRANSIENT_LABELS: &[&str] = &[
    RETRYABLE_WRITE_ERROR,
    TRANSIENT_TRANSACTION_ERROR,
    UNKNOWN_TRANSACTION_COMMIT_RESULT,
    "RetryableError",
    "SystemOverloadedError",
];

/// `doing` names the operation that failed, as in "renewing locks in workitem".
pub(super) fn store_error(doing: impl Display, error: Error) -> StoreError {
    let kind = kind(&error);
    let new = |what: &str| StoreError::new(kind, format!("{doing}: {what}"));
    if let Some(what) = ours::<Failure>(&error)
        .map(ToString::to_string)
        .or_else(|| ours::<LeftOut>(&error).map(ToString::to_string))
        .or_else(|| ours::<Odd>(&error).map(ToString::to_string))
    {
        return new(&what);
    }
    match kind {
        StoreErrorKind::Unavailable => new(not_done(&error)).because(error),
        // The server quotes the whole command, which must not get into the log.
        StoreErrorKind::Denied => new(&denied(&error)).because(match code(&error) {
            Some(code) => format!("server code {code}"),
            None => error.to_string(),
        }),
        // The server quotes the values, which may be those of a session.
        _ => match (code(&error), unique_index(&error)) {
            (Some(code), Some((collection, index))) => {
                new(&unique(collection, index)).because(format!("server code {code}"))
            }
            (Some(DOCUMENT_VALIDATION_FAILURE), _) => new(
                "the validator of the collection refuses the record; set its `validationAction` to `warn`, or remove \
                 it: the collection belongs to actix-doclock",
            )
            .because(error),
            _ => new("MongoDB refused").because(error),
        },
    }
}

/// Why the outcome is not known, or there is none yet.
fn not_done(error: &Error) -> &'static str {
    match code(error) {
        None if ours::<Unacknowledged>(error).is_some() => NO_MAJORITY,
        None => unreachable(error),
        Some(MAX_TIME_EXPIRED) => {
            "MongoDB did not finish in time: it is busy, or a transaction blocks the record"
        }
        Some(WRITE_CONCERN_FAILED) => NO_MAJORITY,
        Some(DUPLICATE_KEY) => "another command has just made the record",
        Some(WRITE_CONFLICT) => {
            "other writes or transactions are changing the record at this moment"
        }
        Some(SNAPSHOT_UNAVAILABLE) => {
            "a collection or one of its indexes was changed at this moment, so the transaction could not read it"
        }
        Some(code) if NO_LONGER_PRIMARY.contains(&code) => {
            "the server is no longer the primary, or is being stopped; the next primary will answer"
        }
        Some(_) => "MongoDB did not carry it out at this moment",
    }
}

const NO_MAJORITY: &str = "no majority has acknowledged the write in time; check the secondaries";

/// Why no server has answered.
fn unreachable(error: &Error) -> &'static str {
    let ErrorKind::ServerSelection { message, .. } = error.kind.as_ref() else {
        return "MongoDB cannot be reached, or its answer was lost";
    };
    if message.contains("ReplicaSetNoPrimary") {
        "the replica set has no primary at the moment; if that lasts, look at `rs.status()`"
    } else if message.contains("refused") {
        "no MongoDB server runs there: the connection is refused; start mongod, or correct the host and the port in \
         the URI"
    } else {
        "no MongoDB server answers; check the network, and the hosts in the URI"
    }
}

/// The collection and the unique index that has refused a record, from `E11000 duplicate key error collection:
/// shop.item.lock index: aid_1 dup key: …`. The rest of the text contains what people have typed.
fn unique_index(error: &Error) -> Option<(&str, &str)> {
    if code(error) != Some(DUPLICATE_KEY) {
        return None;
    }
    let (_, collection) = said(error).split_once("collection: ")?;
    let (collection, index) = collection.split_once(" index: ")?;
    Some((collection, index.split(" dup key").next()?))
}

/// What to do about a unique index.
fn unique(collection: &str, index: &str) -> String {
    match index.split_once(" collation: ") {
        Some(("_id_", _)) => format!(
            "{collection} has a collation, by which different strings are the same `_id`, and another one of them is \
             there already; copy it into a collection without a default collation"
        ),
        with_collation => {
            let name = with_collation.map_or(index, |(name, _)| name);
            format!(
                "the unique index `{name}` of {collection} refuses the record; drop the index: two records may have \
                 the same value"
            )
        }
    }
}

/// True if two first upserts by one `_id` have met. Another unique index refuses the record for good.
pub(super) fn is_duplicate_id(error: &Error) -> bool {
    code(error) == Some(DUPLICATE_KEY) && unique_index(error).is_none_or(|(_, it)| it == "_id_")
}

/// The action that the server does not permit.
fn denied(error: &Error) -> String {
    let is_wrong_password = matches!(error.kind.as_ref(), ErrorKind::Authentication { .. })
        || code(error) == Some(AUTHENTICATION_FAILED);
    if is_wrong_password {
        return "MongoDB does not accept the user or the password; correct them in the URI, and `authSource`, the \
                database that keeps the user"
            .to_owned();
    }
    let said = said(error);
    if said.contains("requires authentication") {
        return "MongoDB asks for a user and a password; write them into the URI".to_owned();
    }
    let grant = "`doclock doctor` says what to grant";
    match refused_command(said) {
        Some((command, collection)) => {
            format!(
                "the database user is not allowed to do this: `{command}` on `{collection}`; {grant}"
            )
        }
        None => format!("the database user is not allowed to do this; {grant}"),
    }
}

/// The command and its collection, from `not authorized on shop to execute command { find: "workitem.lock", …`. The
/// rest of the text may contain what people have typed.
fn refused_command(said: &str) -> Option<(&str, &str)> {
    let (_, command) = said.split_once("to execute command { ")?;
    let (name, rest) = command.split_once(": \"")?;
    let (collection, _) = rest.split_once('"')?;
    let is_name = |text: &str| text.chars().all(|it| it.is_alphanumeric() || "._-".contains(it));
    (is_name(name) && is_name(collection)).then_some((name, collection))
}

/// The message of the server.
fn said(error: &Error) -> &str {
    match error.kind.as_ref() {
        ErrorKind::Command(e) => &e.message,
        ErrorKind::Write(WriteFailure::WriteError(e)) => &e.message,
        ErrorKind::Custom(_) => ours::<RefusedWrite>(error).map_or("", |refused| &refused.message),
        _ => "",
    }
}

pub(super) fn kind(error: &Error) -> StoreErrorKind {
    if let Some(failure) = ours::<Failure>(error) {
        return failure.kind;
    }
    if is_odd(error) {
        return StoreErrorKind::Other;
    }
    if TRANSIENT_LABELS.iter().any(|label| error.contains_label(label)) {
        return StoreErrorKind::Unavailable;
    }
    match error.kind.as_ref() {
        ErrorKind::Authentication { .. } => StoreErrorKind::Denied,
        ErrorKind::Io(_)
        | ErrorKind::ServerSelection { .. }
        | ErrorKind::ConnectionPoolCleared { .. }
        | ErrorKind::DnsResolve { .. }
        // Carried out, but not known to be durable.
        | ErrorKind::Write(WriteFailure::WriteConcernError(_)) => StoreErrorKind::Unavailable,
        _ => match code(error) {
            Some(code) if TRANSIENT.contains(&code) => StoreErrorKind::Unavailable,
            // Two first upserts by one `_id` have met. The second one finds the record when it is repeated; the server
            // usually repeats it without our help.
            Some(DUPLICATE_KEY) if is_duplicate_id(error) => StoreErrorKind::Unavailable,
            Some(code) if DENIED.contains(&code) => StoreErrorKind::Denied,
            Some(ATLAS_ERROR) if ["auth", "not allowed"].iter().any(|it| said(error).contains(it)) => {
                StoreErrorKind::Denied
            }
            // An error of our own: too late to continue.
            None if matches!(error.kind.as_ref(), ErrorKind::Custom(_)) => {
                StoreErrorKind::Unavailable
            }
            _ => StoreErrorKind::Other,
        },
    }
}

/// True if the connection was lost while the server carried out the command. Perhaps the server has aborted.
pub(super) fn has_lost_connection(error: &Error) -> bool {
    matches!(error.kind.as_ref(), ErrorKind::Io(_) | ErrorKind::ConnectionPoolCleared { .. })
}

/// True if the database user lacks the privilege for this.
pub(super) fn is_denied(error: &Error) -> bool {
    kind(error) == StoreErrorKind::Denied
}

/// True if the server gave up at the time limit of the command, before it carried out any of this
/// write. (A write that a majority did not acknowledge before the limit is another error.)
pub(super) fn exceeded_time_limit(error: &Error) -> bool {
    code(error) == Some(MAX_TIME_EXPIRED)
}

/// `Some` if the time limit came before a majority had acknowledged the write; `Some(true)` if a record
/// matched the write.
pub(super) fn late_majority(error: &Error) -> Option<bool> {
    let late: &Unacknowledged = ours(error)?;
    let code = codec::number(late.error.as_document()?.get("code")?)?;
    let is_late = [MAX_TIME_EXPIRED, WRITE_CONCERN_FAILED].map(f64::from).contains(&code);
    is_late.then_some(late.has_written)
}

/// The same error for a caller whose own part of the write was no change.
pub(super) fn unwritten(error: &Error) -> Error {
    match ours::<Unacknowledged>(error) {
        Some(it) => Error::custom(Unacknowledged { has_written: false, error: it.error.clone() }),
        None => error.clone(),
    }
}

/// The error of this crate that the driver carries.
pub(super) fn ours<E: std::error::Error + Send + Sync + 'static>(error: &Error) -> Option<&E> {
    let ErrorKind::Custom(ours) = error.kind.as_ref() else { return None };
    ours.downcast_ref()
}

/// The server's code, wherever the driver keeps it.
pub(super) fn code(error: &Error) -> Option<i32> {
    match error.kind.as_ref() {
        ErrorKind::Command(e) => Some(e.code),
        ErrorKind::Write(WriteFailure::WriteError(e)) => Some(e.code),
        ErrorKind::Write(WriteFailure::WriteConcernError(e)) => Some(e.code),
        ErrorKind::Custom(_) => ours::<RefusedWrite>(error).map(|refused| refused.code),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(code: i32, message: &str) -> StoreError {
        store_error("a test", Error::custom(RefusedWrite { code, message: message.to_owned() }))
    }

    #[test]
    fn only_a_server_that_does_not_answer_cannot_be_reached() {
        let reached = |error: &StoreError| !error.to_string().contains("cannot be reached");
        for code in TRANSIENT {
            let error = told(*code, "");
            assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{code}");
            assert!(reached(&error), "{code}: {error}");
        }
        let own = [
            (WRITE_CONFLICT, "other writes"),
            (SNAPSHOT_UNAVAILABLE, "was changed at this moment"),
            (MAX_TIME_EXPIRED, "in time"),
            (WRITE_CONCERN_FAILED, "no majority"),
            (10107, "no longer the primary"),
            (11600, "no longer the primary"),
        ];
        for (code, text) in own {
            assert!(told(code, "").to_string().contains(text), "{code}: {}", told(code, ""));
        }
        let late = Error::custom(Unacknowledged { has_written: true, error: Bson::Null });
        assert!(store_error("a test", late).to_string().contains("no majority"));
        let io = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert!(!reached(&store_error("a test", Error::from(io))));
    }

    #[test]
    fn a_duplicate_key_is_permanent_unless_it_is_the_id() {
        const MET: &str = "E11000 duplicate key error collection: shop.item.lock index: ";
        let of = |rest: &str| told(DUPLICATE_KEY, &format!("{MET}{rest}"));
        let error = of(r#"_id_ dup key: { _id: "a index: x dup key" }"#);
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        for (rest, name) in [
            (r#"aid_1 dup key: { aid: "secret" }"#, "`aid_1` of shop.item.lock"),
            (r#"my index dup key: { aid: "secret index: _id_ dup key" }"#, "`my index`"),
            (r#"_id_ collation: { locale: "en" } dup key: { _id: "0x37" }"#, "has a collation"),
            (r#"aid_1 collation: { locale: "en" } dup key: { aid: "0x37" }"#, "`aid_1`"),
        ] {
            let error = of(rest);
            assert_eq!(error.kind(), StoreErrorKind::Other, "{error}");
            assert!(error.to_string().contains(name), "{error}");
            assert!(!format!("{error:?}").contains("secret"), "{error:?}");
        }
    }
}
