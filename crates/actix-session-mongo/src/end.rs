//! The end of a session, as the application is told of it.

use std::{fmt, sync::Arc};

use futures_util::future::BoxFuture;

use crate::error::BoxError;

/// The end of a session, for the hook of [`on_end`](crate::MongoSessionStoreBuilder::on_end).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionEnd {
    /// The value of the entry that [`id_key`](crate::MongoSessionStoreBuilder::id_key) names.
    pub id: String,
    /// Why the session ended.
    pub reason: EndReason,
}

/// The id, and the name of the reason: for a hook in a crate that does not depend on this crate.
impl From<SessionEnd> for (String, &'static str) {
    fn from(end: SessionEnd) -> Self {
        (end.id, end.reason.as_str())
    }
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EndReason {
    /// The person ended it, by a `purge` or a `clear`.
    LoggedOut,
    /// Its idle or its absolute time-out has passed.
    Expired,
    /// The application ended it, by a method of the store.
    Revoked,
}

impl EndReason {
    /// The name of the reason: `logged_out`, `expired` or `revoked`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LoggedOut => "logged_out",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        }
    }

    /// Whatever a record says, its session has ended.
    pub(crate) fn from_stored(reason: Option<&str>) -> Self {
        match reason {
            None | Some("expired") => Self::Expired,
            Some("revoked") => Self::Revoked,
            Some(_) => Self::LoggedOut,
        }
    }
}

type OnEnd = dyn Fn(SessionEnd) -> BoxFuture<'static, Result<(), BoxError>> + Send + Sync;

/// The hook of the application.
#[derive(Clone)]
pub(crate) struct Hook(pub(crate) Arc<OnEnd>);

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}
