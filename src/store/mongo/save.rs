//! The guarded save.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use mongodb::{
    Client, ClientSession,
    bson::{Document, RawDocumentBuf, doc},
    error::{Error, Result, UNKNOWN_TRANSACTION_COMMIT_RESULT},
    options::{ReadConcern, UpdateModifications, WriteConcern},
};
use tokio::time::sleep;

use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockId,
    store::{
        Changes, Edit, Format, Saved, StoredDocument,
        mongo::{
            Prepared, edit,
            error::{DUPLICATE_KEY, code, store_error},
            lanes, pipeline,
            write::Write,
        },
    },
};

const IMMUTABLE_FIELD: i32 = 66;
const DOCUMENT_VALIDATION_FAILURE: i32 = 121;
/// The document would be larger than 16 MiB: the two codes for before and after the update.
const TOO_LARGE: [i32; 2] = [10334, 17419];

/// The first pause before a write or a commit is tried again.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// One save with all its parts.
pub(super) struct Save<'a> {
    pub(super) at: &'a Prepared,
    pub(super) id: &'a LockId,
    /// The live acquisition that guards the save.
    pub(super) acquisition: Document,
    /// The update of the lock record on a save.
    pub(super) renewed: Vec<Document>,
    pub(super) edit: &'a Edit,
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
        if self.is_empty() {
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
        let written = self.write(session).await?;
        // 1 → live and renewed; 0 → expired, released or broken, or another acquisition holds the lock.
        let touched = self.at.locks.update_one(self.acquisition, self.renewed).session(session);
        Ok(if touched.await?.matched_count == 0 { Saved::Lost } else { written })
    }

    /// The same on a server without transactions: first the lock, then the document.
    pub(super) async fn without_transaction(self) -> Result<Saved> {
        if self.is_empty() {
            return self.renew_only().await;
        }
        if self.touch().await? == 0 {
            return Ok(Saved::Lost);
        }
        let mut pause = FIRST_PAUSE;
        loop {
            if Instant::now() + pause >= self.until {
                return Err(too_late());
            }
            if let Some(written) = self.write_if_unchanged().await? {
                return Ok(written);
            }
            sleep(pause).await;
            pause *= 2;
        }
    }

    fn is_empty(&self) -> bool {
        matches!(self.edit, Edit::Changes(changes) if changes.is_empty())
    }

    /// Renews the lock and checks that the document exists, without changing the document.
    async fn renew_only(self) -> Result<Saved> {
        let touched = self.touch().await?;
        let found = self.at.documents.find_one(self.document()).projection(doc! { "_id": 1 });
        let found = found.max_time(lanes::read_limit()).await?;
        Ok(match (touched, found) {
            (0, _) => Saved::Lost,
            (_, None) => Saved::DocumentGone,
            (_, Some(_)) => Saved::Saved,
        })
    }

    async fn touch(&self) -> Result<u64> {
        let renewed = Write::Update(self.renewed.clone());
        self.at.write_one(self.id, self.acquisition.clone(), &renewed).await
    }

    fn document(&self) -> Document {
        pipeline::by_id(self.id)
    }

    // 1 → written; 0 → the document was deleted without regard to the lock. All reads and writes are of one
    // snapshot: a document that another program changes in between makes the write fail with a conflict.
    async fn write(&self, session: &mut ClientSession) -> Result<Saved> {
        let (documents, filter) = (&self.at.documents, self.document());
        let count = match self.edit {
            Edit::Changes(changes) => {
                let Some(now) = documents.find_one(filter.clone()).session(&mut *session).await?
                else {
                    return Ok(Saved::DocumentGone);
                };
                match update(changes, now)? {
                    Step::Write(update) => {
                        documents.update_one(filter, update).session(session).await?.matched_count
                    }
                    Step::Answer(saved) => return Ok(saved),
                }
            }
            // 11000 → there is such a document already.
            Edit::Creation(document) => {
                documents.insert_one(raw(document)?).session(session).await?;
                1
            }
            Edit::Deletion => documents.delete_one(filter).session(session).await?.deleted_count,
            Edit::Replacement(document) => {
                let replaced = documents.replace_one(filter, raw(document)?);
                replaced.session(session).await?.matched_count
            }
        };
        Ok(if count == 0 { Saved::DocumentGone } else { Saved::Saved })
    }

    // The same without a session. `None`: another program has changed the document since it was read, so
    // changes must be applied again. 11000 → there is such a document already, or a repetition after a lost
    // reply meets its own document.
    async fn write_if_unchanged(&self) -> Result<Option<Saved>> {
        let (documents, filter) = (&self.at.documents, self.document());
        let count = match self.edit {
            Edit::Changes(changes) => {
                let now = documents.find_one(filter.clone()).max_time(lanes::read_limit()).await?;
                let Some(now) = now else { return Ok(Some(Saved::DocumentGone)) };
                let mut unchanged = filter;
                let is_same = doc! { "$eq": ["$$ROOT", { "$literal": Document::try_from(now.clone()).map_err(Error::custom)? }] };
                unchanged.insert("$expr", is_same);
                match update(changes, now)? {
                    Step::Write(update) => {
                        let updated = documents.update_one(unchanged, update).await?;
                        return Ok((updated.matched_count > 0).then_some(Saved::Saved));
                    }
                    Step::Answer(saved) => return Ok(Some(saved)),
                }
            }
            Edit::Creation(document) => {
                documents.insert_one(raw(document)?).await?;
                1
            }
            Edit::Deletion => documents.delete_one(filter).await?.deleted_count,
            Edit::Replacement(document) => {
                documents.replace_one(filter, raw(document)?).await?.matched_count
            }
        };
        Ok(Some(if count == 0 { Saved::DocumentGone } else { Saved::Saved }))
    }
}

/// How changes go on once the document was read.
enum Step {
    Write(UpdateModifications),
    Answer(Saved),
}

fn update(changes: &Changes, now: RawDocumentBuf) -> Result<Step> {
    let now = StoredDocument::from_bytes(Format::Bson, now.into_bytes());
    Ok(match changes.apply(&now) {
        Err(field) => Step::Answer(Saved::ChangedMeanwhile(field)),
        Ok(result) => match edit::update(&now, &result).map_err(Error::custom)? {
            Some(update) => Step::Write(update),
            None => Step::Answer(Saved::Saved),
        },
    })
}

fn raw(document: &StoredDocument) -> Result<RawDocumentBuf> {
    RawDocumentBuf::from_bytes(document.as_bytes().to_vec()).map_err(Error::custom)
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

pub(super) fn too_late() -> Error {
    Error::custom("the deadline has passed; nothing was written")
}

/// Commits, and repeats the commit while its outcome is not known.
///
/// Repeating the whole transaction instead would be wrong: if the first one was committed and the lock
/// lost since, the answer would be "lost, nothing written".
pub(super) async fn commit(session: &mut ClientSession, until: Instant) -> Result<()> {
    let mut pause = FIRST_PAUSE;
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
        Some(IMMUTABLE_FIELD) => "its `_id` has changed; a document keeps its `_id`",
        Some(DOCUMENT_VALIDATION_FAILURE) => "it does not pass the collection's validation",
        Some(code) if TOO_LARGE.contains(&code) => "it would be larger than 16 MiB",
        _ => return store_error(doing, error),
    };
    StoreError::new(StoreErrorKind::Rejected, format!("{doing}: {why}")).because(error)
}
