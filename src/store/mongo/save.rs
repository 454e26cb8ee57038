//! The guarded save.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use mongodb::{
    Client, ClientSession,
    bson::{Document, doc},
    error::{Error, Result, UNKNOWN_TRANSACTION_COMMIT_RESULT},
    options::{ReadConcern, UpdateModifications, WriteConcern},
};
use tokio::time::sleep;

use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockId,
    store::{
        Saved,
        mongo::{
            Prepared,
            edit::Update,
            error::{DUPLICATE_KEY, code, store_error},
            lanes,
            write::Write,
        },
    },
};

const DOCUMENT_VALIDATION_FAILURE: i32 = 121;
const PATH_NOT_VIABLE: i32 = 28;
/// The document would be larger than 16 MiB: the two codes for before and after the update.
const TOO_LARGE: [i32; 2] = [10334, 17419];

/// One save with all its parts.
pub(super) struct Save<'a> {
    pub(super) at: &'a Prepared,
    pub(super) id: &'a LockId,
    /// The live acquisition that guards the save.
    pub(super) acquisition: Document,
    /// The update of the lock record on a save.
    pub(super) renewed: Vec<Document>,
    pub(super) document: Document,
    pub(super) update: Update,
    /// When the caller stops waiting.
    pub(super) until: Instant,
}

impl Save<'_> {
    /// Updates the document and touches the lock: both or neither.
    ///
    /// The touch always changes the record. A takeover, a break or an expiry at the same moment
    /// therefore conflicts with it, and the later one sees the outcome of the earlier one. A fence
    /// would have the same effect, but needs a field in the document. The touch comes last, because the
    /// record stays blocked until the commit, and if this process dies in between, until the server
    /// aborts the transaction (60 s).
    pub(super) async fn in_transaction(self, client: &Client) -> Result<Saved> {
        if let Update::Nothing = self.update {
            return self.renew_only().await;
        }
        let until = self.until;
        let mut session = begin(client).await?;
        // The future is not dropped half-way (rule 7 of the contract), so every path ends the
        // transaction.
        let saved = match self.write_and_touch(&mut session).await {
            Ok(Saved::Saved) if Instant::now() < until => {
                return commit(&mut session, until).await.map(|()| Saved::Saved);
            }
            // Delayed on its way: the caller has been told that the outcome is unknown, and may have
            // saved something newer since. Committing now could undo that newer save.
            Ok(Saved::Saved) => Err(too_late()),
            other => other,
        };
        let _ = session.abort_transaction().await;
        saved
    }

    async fn write_and_touch(self, session: &mut ClientSession) -> Result<Saved> {
        // Within a transaction the server does not wait for other transactions, so no time limit is
        // needed.
        // 1 → written; 0 → the document was deleted without regard to the lock.
        let written = self.write(Some(session)).await?;
        // 1 → live and renewed; 0 → expired, released or broken, or another acquisition holds the lock.
        let touched = self.at.locks.update_one(self.acquisition, self.renewed).session(session);
        Ok(outcome(touched.await?.matched_count, written))
    }

    /// The same on a server without transactions: first the lock, then the document.
    pub(super) async fn without_transaction(self) -> Result<Saved> {
        if let Update::Nothing = self.update {
            return self.renew_only().await;
        }
        if self.touch().await? == 0 {
            return Ok(Saved::Lost);
        }
        if Instant::now() >= self.until {
            return Err(too_late());
        }
        Ok(outcome(1, self.write(None).await?))
    }

    /// Renews the lock and checks that the document exists, without changing the document.
    async fn renew_only(self) -> Result<Saved> {
        let touched = self.touch().await?;
        let found = self.at.documents.find_one(self.document).projection(doc! { "_id": 1 });
        let found = found.max_time(lanes::read_limit()).await?;
        Ok(outcome(touched, found.is_some().into()))
    }

    async fn touch(&self) -> Result<u64> {
        let renewed = Write::Update(self.renewed.clone());
        self.at.write_one(self.id, self.acquisition.clone(), &renewed).await
    }

    async fn write(&self, session: Option<&mut ClientSession>) -> Result<u64> {
        let (documents, filter) = (&self.at.documents, self.document.clone());
        let update: UpdateModifications = match &self.update {
            Update::Nothing => return Ok(1),
            Update::Fields(fields) => fields.clone().into(),
            Update::Pipeline(stages) => stages.clone().into(),
            // 11000 → there is such a document already. A repetition after a lost reply meets its own
            // document only without transactions.
            Update::Insertion(document) => {
                let inserted = documents.insert_one(document);
                match session {
                    Some(session) => inserted.session(session).await?,
                    None => inserted.await?,
                };
                return Ok(1);
            }
            Update::Deletion => {
                let deleted = documents.delete_one(filter);
                let deleted = match session {
                    Some(session) => deleted.session(session).await?,
                    None => deleted.await?,
                };
                return Ok(deleted.deleted_count);
            }
            Update::Replacement(document) => {
                let replaced = documents.replace_one(filter, document);
                let replaced = match session {
                    Some(session) => replaced.session(session).await?,
                    None => replaced.await?,
                };
                return Ok(replaced.matched_count);
            }
        };
        let updated = documents.update_one(filter, update);
        let updated = match session {
            Some(session) => updated.session(session).await?,
            None => updated.await?,
        };
        Ok(updated.matched_count)
    }
}

/// Begins a transaction for a guarded write.
pub(super) async fn begin(client: &Client) -> Result<ClientSession> {
    let mut session = client.start_session().await?;
    session
        .start_transaction()
        .read_concern(ReadConcern::snapshot())
        .write_concern(WriteConcern::majority())
        .max_commit_time(lanes::read_limit())
        .await?;
    Ok(session)
}

fn outcome(touched: u64, written: u64) -> Saved {
    match (touched, written) {
        (0, _) => Saved::Lost,
        (_, 0) => Saved::DocumentGone,
        _ => Saved::Saved,
    }
}

pub(super) fn too_late() -> Error {
    Error::custom("the deadline has passed; nothing was written")
}

/// Commits, and repeats the commit while its outcome is not known.
///
/// Repeating the whole transaction instead would be wrong: if the first one was committed and the lock
/// lost since, the answer would be "lost, nothing written".
pub(super) async fn commit(session: &mut ClientSession, until: Instant) -> Result<()> {
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
    let why = match code(&error) {
        Some(DUPLICATE_KEY) => "a unique index of the collection has this value already",
        Some(DOCUMENT_VALIDATION_FAILURE) => "it does not pass the collection's validation",
        Some(PATH_NOT_VIABLE) => {
            "a field that was a document when it was loaded is no longer one; load the document again"
        }
        Some(code) if TOO_LARGE.contains(&code) => "it would be larger than 16 MiB",
        _ => return store_error(doing, error),
    };
    StoreError::new(StoreErrorKind::Rejected, format!("{doing}: {why}")).because(error)
}
