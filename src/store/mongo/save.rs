//! The guarded save.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use mongodb::{
    Client, ClientSession, Collection,
    bson::{Document, RawDocumentBuf},
    error::{Error, Result, UNKNOWN_TRANSACTION_COMMIT_RESULT},
    options::{ReadConcern, WriteConcern},
};
use tokio::time::sleep;

use super::error::{DUPLICATE_KEY, code, store_error};
use crate::{StoreError, StoreErrorKind, store::Saved};

const DOCUMENT_VALIDATION_FAILURE: i32 = 121;

/// One save, with everything it needs.
pub(super) struct Save<'a> {
    pub(super) locks: &'a Collection<Document>,
    pub(super) documents: &'a Collection<RawDocumentBuf>,
    /// The live acquisition that guards it.
    pub(super) acquisition: Document,
    /// What the save makes of its record.
    pub(super) renewed: Vec<Document>,
    pub(super) document: Document,
    pub(super) replacement: RawDocumentBuf,
    /// When its caller stops waiting.
    pub(super) until: Instant,
}

impl Save<'_> {
    /// Replaces the document and touches the lock, both or neither.
    ///
    /// The touch is a write, so that a takeover at the same moment conflicts with it: whoever comes
    /// second sees the other's outcome. That is what a fence would give, without a field in the
    /// document. It comes last because the record that it touches stays locked until the commit,
    /// and if this process dies in between, until the server gives the transaction up (60 s).
    pub(super) async fn in_transaction(self, client: &Client) -> Result<Saved> {
        let until = self.until;
        let mut session = client.start_session().await?;
        session
            .start_transaction()
            .read_concern(ReadConcern::snapshot())
            .write_concern(WriteConcern::majority())
            .await?;
        // The future is not dropped half-way (rule 7 of the contract), so every path ends the
        // transaction.
        let saved = match self.replace_and_touch(&mut session).await {
            Ok(Saved::Saved) if Instant::now() < until => {
                return commit(&mut session, until).await.map(|()| Saved::Saved);
            }
            // Held up on its way: the caller has been told that the outcome is unknown, and may have
            // saved something newer since. What was saved from here on would conflict with us.
            Ok(Saved::Saved) => Err(too_late()),
            other => other,
        };
        let _ = session.abort_transaction().await;
        saved
    }

    async fn replace_and_touch(self, session: &mut ClientSession) -> Result<Saved> {
        // 1 → written; 0 → somebody has deleted the document past the lock.
        let replaced = self
            .documents
            .replace_one(self.document, &self.replacement)
            .session(&mut *session)
            .await?;
        // 1 → live and renewed; 0 → run out, released, broken, or another acquisition's.
        let touched =
            self.locks.update_one(self.acquisition, self.renewed).session(session).await?;
        Ok(outcome(touched.matched_count, replaced.matched_count))
    }

    /// The same on a server without transactions: first the lock, then the document.
    pub(super) async fn without_transaction(self) -> Result<Saved> {
        let touched = self.locks.update_one(self.acquisition, self.renewed).await?;
        if touched.matched_count == 0 {
            return Ok(Saved::Lost);
        }
        if Instant::now() >= self.until {
            return Err(too_late());
        }
        let replaced = self.documents.replace_one(self.document, &self.replacement).await?;
        Ok(outcome(touched.matched_count, replaced.matched_count))
    }
}

fn outcome(touched: u64, replaced: u64) -> Saved {
    match (touched, replaced) {
        (0, _) => Saved::Lost,
        (_, 0) => Saved::DocumentGone,
        _ => Saved::Saved,
    }
}

fn too_late() -> Error {
    Error::custom("the deadline has passed; nothing was written")
}

/// Commits, and commits again while it is not known whether that has happened.
///
/// Repeating the whole transaction instead would be wrong: had the first one been committed and the
/// lock been lost since, the answer would be "lost, nothing written".
async fn commit(session: &mut ClientSession, until: Instant) -> Result<()> {
    let mut pause = Duration::from_millis(20);
    loop {
        match session.commit_transaction().await {
            Err(e)
                if e.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT)
                    && Instant::now() + pause < until =>
            {
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
            }
            other => return other,
        }
    }
}

pub(super) fn save_error(doing: impl Display, error: Error) -> StoreError {
    if error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) {
        let message = format!("{doing}: whether it was committed is not known");
        return StoreError::new(StoreErrorKind::OutcomeUnknown, message).because(error);
    }
    match code(&error) {
        Some(DUPLICATE_KEY) => {
            let message =
                format!("{doing}: a unique index of the collection has this value already");
            StoreError::new(StoreErrorKind::Rejected, message).because(error)
        }
        Some(DOCUMENT_VALIDATION_FAILURE) => {
            let message = format!("{doing}: it does not pass the collection's validation");
            StoreError::new(StoreErrorKind::Rejected, message).because(error)
        }
        _ => store_error(doing, error),
    }
}
