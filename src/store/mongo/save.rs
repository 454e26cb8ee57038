//! The guarded save.

use mongodb::{
    Client, ClientSession, Collection,
    bson::{Document, RawDocumentBuf},
    error::{Result, UNKNOWN_TRANSACTION_COMMIT_RESULT},
    options::{ReadConcern, WriteConcern},
};

use super::pipeline;
use crate::store::Saved;

/// How often a commit is repeated whose outcome is not known.
const COMMIT_ATTEMPTS: usize = 5;

/// One save, with everything it needs.
pub(super) struct Save<'a> {
    pub(super) locks: &'a Collection<Document>,
    pub(super) documents: &'a Collection<RawDocumentBuf>,
    /// The live acquisition that guards it.
    pub(super) acquisition: Document,
    pub(super) document: Document,
    pub(super) replacement: RawDocumentBuf,
}

impl Save<'_> {
    /// Touches the lock and replaces the document, both or neither.
    ///
    /// The touch is a write, so that a takeover at the same moment conflicts with it: whoever comes
    /// second sees the other's outcome. That is what a fence would give, without a field in the
    /// document.
    pub(super) async fn in_transaction(self, client: &Client) -> Result<Saved> {
        let mut session = client.start_session().await?;
        session
            .start_transaction()
            .read_concern(ReadConcern::snapshot())
            .write_concern(WriteConcern::majority())
            .await?;
        // The future is not dropped half-way (rule 7 of the contract), so every path ends the
        // transaction; where a connection was lost, the server aborts it.
        let saved = match self.touch_and_replace(&mut session).await {
            Ok(Saved::Saved) => return commit(&mut session).await.map(|()| Saved::Saved),
            other => other,
        };
        let _ = session.abort_transaction().await;
        saved
    }

    async fn touch_and_replace(self, session: &mut ClientSession) -> Result<Saved> {
        // 1 → live and renewed; 0 → run out, released, broken, or another acquisition's.
        let touched = self
            .locks
            .update_one(self.acquisition, pipeline::renew())
            .session(&mut *session)
            .await?;
        if touched.matched_count == 0 {
            return Ok(Saved::Lost);
        }
        // 1 → written; 0 → somebody has deleted the document past the lock.
        let replaced =
            self.documents.replace_one(self.document, &self.replacement).session(session).await?;
        Ok(if replaced.matched_count == 0 { Saved::DocumentGone } else { Saved::Saved })
    }

    /// The same on a server without transactions: first the lock, then the document.
    pub(super) async fn without_transaction(self) -> Result<Saved> {
        let touched = self.locks.update_one(self.acquisition, pipeline::renew()).await?;
        if touched.matched_count == 0 {
            return Ok(Saved::Lost);
        }
        let replaced = self.documents.replace_one(self.document, &self.replacement).await?;
        Ok(if replaced.matched_count == 0 { Saved::DocumentGone } else { Saved::Saved })
    }
}

/// Commits, and commits again while it is not known whether that has happened.
///
/// Repeating the whole transaction instead would be wrong: had the first one been committed and the
/// lock been lost since, the answer would be "lost, nothing written".
async fn commit(session: &mut ClientSession) -> Result<()> {
    for _ in 1..COMMIT_ATTEMPTS {
        match session.commit_transaction().await {
            Err(e) if e.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) => {}
            other => return other,
        }
    }
    session.commit_transaction().await
}
