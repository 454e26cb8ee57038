//! A refusal, as a template shows it.

use std::time::SystemTime;

use actix_web::ResponseError;
use serde::{Serialize, Serializer};

use crate::{
    error::LockError,
    lock::Lock,
    version::Version,
    web::{current_request::saved_before, format::rfc3339, problem::Problem},
};

/// What a page says of an error: who has the lock, since when, why, and what the person may do. Made by
/// [`SessionLocks::refused`](crate::SessionLocks::refused) for a template, or as a JSON value.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Refused {
    /// The status of an answer with this error.
    pub status: u16,
    /// The kind of the error, as in `code` of a problem: `held`, `stale_copy`, …
    pub code: String,
    /// For the person: what happened to which document, who holds it, and what to do. In English, or in German if the
    /// browser prefers that ([`Problem::for_people`]), unless [`explain`](crate::web::Locking::explain) says it in other
    /// words.
    pub why: String,
    /// The label of the holder, if another session or tab has the lock.
    pub holder: Option<String>,
    /// Since when the holder has the lock.
    #[serde(serialize_with = "date")]
    pub since: Option<SystemTime>,
    /// True if the person of the request holds the lock, in another session: that of another browser, or one that has lost its
    /// cookie. People are told apart by [`Actor::with_id`](crate::Actor::with_id).
    pub same_person: bool,
    /// True if this person may take the lock over.
    pub may_take_over: bool,
    /// The version of the document now, if the page shows another one.
    pub version: Option<Version>,
    /// The request names a lock and a version. This is a later version that was saved under that lock: the person may have
    /// submitted a form twice, or in two tabs. `None` if this server does not remember it.
    pub saved: Option<Version>,
}

impl Refused {
    pub(super) fn new(
        error: &LockError,
        policy_allows: impl Fn(&Lock) -> bool,
        explain: impl Fn(&Problem) -> String,
    ) -> Self {
        let may_take_over = match error {
            // A person may always take over from another of their own tabs.
            LockError::HeldByOtherTab(_) => true,
            LockError::Held(lock) => policy_allows(lock),
            _ => false,
        };
        let problem = Problem::from(error).with("may_take_over", may_take_over);
        let lock = match error {
            LockError::Held(lock) | LockError::HeldByOtherTab(lock) => Some(lock),
            LockError::Lost { holder, .. } | LockError::WouldDeadlock { holder, .. } => {
                holder.as_ref()
            }
            _ => None,
        };
        Self {
            status: problem.status_code().as_u16(),
            code: problem.member("code").and_then(|it| it.as_str()).unwrap_or_default().to_owned(),
            why: explain(&problem),
            holder: lock.and_then(|lock| Some(lock.holder.as_ref()?.label.clone())),
            since: lock.map(|lock| lock.since),
            same_person: problem.member("same_person") == Some(&true.into()),
            may_take_over,
            version: match error {
                LockError::StaleCopy { version, .. } => Some(*version),
                _ => None,
            },
            saved: saved_before(error),
        }
    }
}

fn date<S: Serializer>(since: &Option<SystemTime>, serializer: S) -> Result<S::Ok, S::Error> {
    since.map(rfc3339).serialize(serializer)
}
