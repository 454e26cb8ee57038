//! The error of a store.

/// The source of a [`StoreError`].
pub use doclock_document::BoxError;

/// The error of a store that cannot give an answer.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    source: Option<BoxError>,
}

/// The kind of a [`StoreError`]: whether the operation was carried out, and whether trying again helps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store was not reached, or its answer was lost: the operation may or may not have been carried
    /// out. Trying again is safe, because every operation of a store is idempotent.
    Unavailable,
    /// As [`Unavailable`](Self::Unavailable), but the manager does not repeat the operation: the answer
    /// to a repetition would not tell the outcome of the first attempt.
    OutcomeUnknown,
    /// The store refused the operation, because more is asked than it can do: the operation was not carried out,
    /// and will not be. Try again later. The manager repeats the operation only if nobody waits for it.
    Overloaded,
    /// The store has no permission to do this. Trying again does not help.
    Denied,
    /// The store does not accept this document. Nothing was written.
    Rejected,
    /// The store refused the operation, or contains a record that it cannot read.
    Other,
}

impl StoreErrorKind {
    /// The name, for metrics.
    #[doc(hidden)]
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::Overloaded => "overloaded",
            Self::Denied => "denied",
            Self::Rejected => "rejected",
            Self::Other => "other",
        }
    }
}

impl StoreError {
    /// An error of this kind. `message` tells an operator what failed and what to do.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// The same error with its cause.
    #[must_use]
    pub fn because(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The kind of this error.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}
