//! Errors of the store, and after which of them a command is sent again.

use actix_web::{
    HttpResponse, ResponseError,
    http::{StatusCode, header},
};
use mongodb::error::{ErrorKind, WriteFailure};

/// The error of a hook.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

const BACK_AFTER_SECONDS: u32 = 2;

/// Server codes after which the same command may be sent again: failover and shutdown, lost connections, time limits,
/// interruptions, and write conflicts.
const TRANSIENT: &[i32] = &[
    6, 7, 24, 43, 50, 64, 89, 91, 112, 133, 134, 175, 189, 202, 237, 251, 262, 290, 317, 358, 384,
    462, 9001, 10058, 10107, 11600, 11601, 11602, 13388, 13435, 13436,
];
const DUPLICATE_KEY: i32 = 11000;
const UNAUTHORIZED: i32 = 13;
const NAMESPACE_NOT_FOUND: i32 = 26;
const IS_A_VIEW: i32 = 166;

/// An operation on sessions has failed.
#[derive(Debug, thiserror::Error)]
#[error("{doing} has failed: {source}")]
pub struct Error {
    doing: String,
    source: BoxError,
    is_outage: bool,
}

impl Error {
    /// `doing` names the operation, as in "loading a web session".
    pub(crate) fn new(doing: &str, source: impl Into<BoxError>) -> Self {
        Self { doing: doing.to_owned(), source: source.into(), is_outage: false }
    }

    pub(crate) fn of_driver(doing: &str, source: mongodb::error::Error) -> Self {
        if let ErrorKind::Custom(ours) = source.kind.as_ref()
            && let Some(unfit) = ours.downcast_ref::<Unfit>()
        {
            return Self::new(doing, unfit.to_string());
        }
        if is_denied(&source) {
            // The server quotes the whole command, which must not get into the log.
            return Self::new(doing, "the database user lacks a privilege");
        }
        if code(&source) == Some(DUPLICATE_KEY)
            && !is_transient(&source)
            && let Some(index) = unique_index(said(&source))
        {
            let why = format!(
                "the unique index `{index}` of the collection refuses the session: drop the index"
            );
            return Self::new(doing, why);
        }
        Self { is_outage: is_transient(&source), ..Self::new(doing, source) }
    }

    pub(crate) fn no_answer(doing: &str) -> Self {
        let why = "no answer within the deadline, the outcome is unknown";
        Self { is_outage: true, ..Self::new(doing, why) }
    }

    /// True if the database was not reached, or did not say what became of the operation.
    #[must_use]
    pub fn is_outage(&self) -> bool {
        self.is_outage
    }
}

/// An outage is a 503, any other error a 500. The client is told nothing else.
impl ResponseError for Error {
    fn status_code(&self) -> StatusCode {
        if self.is_outage() {
            StatusCode::SERVICE_UNAVAILABLE
        } else {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }

    fn error_response(&self) -> HttpResponse {
        HttpResponse::build(self.status_code())
            .insert_header((header::RETRY_AFTER, BACK_AFTER_SECONDS))
            .finish()
    }
}

/// The collection is not one of sessions, or has an index with which sessions would be lost or refused.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Unfit(pub(crate) String);

/// True if the same command may be sent again, or will be possible again.
pub(crate) fn is_transient(error: &mongodb::error::Error) -> bool {
    const LABELS: [&str; 3] =
        ["RetryableWriteError", "TransientTransactionError", "RetryableError"];
    match error.kind.as_ref() {
        ErrorKind::Io(_)
        | ErrorKind::ServerSelection { .. }
        | ErrorKind::ConnectionPoolCleared { .. }
        | ErrorKind::DnsResolve { .. }
        | ErrorKind::Write(WriteFailure::WriteConcernError(_)) => true,
        _ => {
            LABELS.iter().any(|label| error.contains_label(label))
                || code(error).is_some_and(|code| TRANSIENT.contains(&code))
                // Two upserts of one record have met. Any other unique index refuses the record for good.
                || code(error) == Some(DUPLICATE_KEY) && said(error).contains(" index: _id_ ")
        }
    }
}

fn code(error: &mongodb::error::Error) -> Option<i32> {
    refused(error).map(|(code, _)| code)
}

fn said(error: &mongodb::error::Error) -> &str {
    refused(error).map_or("", |(_, message)| message)
}

/// The server's code and message.
fn refused(error: &mongodb::error::Error) -> Option<(i32, &str)> {
    match error.kind.as_ref() {
        ErrorKind::Command(e) => Some((e.code, &e.message)),
        ErrorKind::Write(WriteFailure::WriteError(e)) => Some((e.code, &e.message)),
        _ => None,
    }
}

/// The name of the unique index that has refused a record, from `E11000 duplicate key error collection: shop.session
/// index: user_1 dup key: …`. The rest of the text contains what people have typed.
fn unique_index(said: &str) -> Option<&str> {
    let (_, index) = said.split_once(" index: ")?;
    index.split(" dup key").next()?.split(" collation:").next()
}

pub(crate) fn is_denied(error: &mongodb::error::Error) -> bool {
    code(error) == Some(UNAUTHORIZED)
}

pub(crate) fn is_no_such_collection(error: &mongodb::error::Error) -> bool {
    code(error) == Some(NAMESPACE_NOT_FOUND)
}

/// A view has no indexes.
pub(crate) fn is_view(error: &mongodb::error::Error) -> bool {
    code(error) == Some(IS_A_VIEW)
}
