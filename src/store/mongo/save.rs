//! The guarded save: the document and the touch of its lock, both or neither.

use std::{
    fmt::Display,
    pin::pin,
    time::{Duration, Instant},
};

use mongodb::{
    Client, ClientSession,
    bson::{Document, RawDocumentBuf, doc},
    error::{Error, TRANSIENT_TRANSACTION_ERROR, UNKNOWN_TRANSACTION_COMMIT_RESULT},
    options::{ReadConcern, ReadPreference, SelectionCriteria, WriteConcern},
};
use tokio::{
    sync::SemaphorePermit,
    task::spawn_blocking,
    time::{sleep, timeout, timeout_at},
};

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{
        Acquisition, Changes, Content, Deadline, Edit, Saved, StoredDocument,
        mongo::{
            LockCollection, MongoStore, codec,
            difference::{self, Difference},
            error::{
                DOCUMENT_VALIDATION_FAILURE, DUPLICATE_KEY, Result, code, failure,
                has_lost_connection, not_sent, store_error, unavailable,
            },
            ids::{Exactly, by_id},
            send::Timing,
            time_limits::{LIMIT, LONGEST_WAIT, UNANSWERED},
            watch::{renewal, saved_as},
        },
    },
};

const IMMUTABLE_FIELD: i32 = 66;
/// The document would be larger than 16 MiB: the two codes for before and after the update.
const TOO_LARGE: [i32; 2] = [10334, 17419];

/// The pauses before a write or a commit is tried again.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(20);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_millis(500);

impl LockCollection<'_> {
    /// A save without an answer gives its permit up soon after its caller is gone: its connection may be dead. The save
    /// itself goes on for [`LONGEST_WAIT`]. If it were dropped while the server only stands still, the server would begin
    /// the transaction later, and nobody would end it.
    pub(super) async fn save(&self, held: &Acquisition, edit: &Edit) -> Result<Saved> {
        let latest = self.until.latest();
        let permit = self.store.save_permit(latest).await?;
        let mut save = pin!(self.save_by(latest, held, edit));
        if let Ok(saved) = timeout_at((latest + UNANSWERED).into(), &mut save).await {
            return saved;
        }
        drop(permit);
        timeout(LONGEST_WAIT, save).await.unwrap_or_else(|_| Err(no_answer()))
    }

    async fn save_by(&self, latest: Instant, held: &Acquisition, edit: &Edit) -> Result<Saved> {
        let id = held.key.id();
        if let Content::Creation(document) = &edit.content
            && !codec::has_id(document, id)
        {
            let why = "the document has another `_id` than the locked one";
            return Err(failure(StoreErrorKind::Rejected, why));
        }
        let save = Save { collection: self, held, edit, latest };
        // Without changes, only renews the lock.
        if edit.is_empty() && edit.onto.is_none() {
            let (is_held, exists) = (self.touch(held).await?, self.exists(id).await?);
            return Ok(match (is_held, exists) {
                (false, _) => Saved::Lost,
                (_, false) => Saved::DocumentGone,
                (_, true) => Saved::Saved,
            });
        }
        match self.store.has_transactions().await? {
            true => save.in_transaction().await,
            false => save.without_transaction().await,
        }
    }
}

impl MongoStore {
    /// Waits until a guarded write may begin, so that guarded writes never take all connections.
    pub(super) async fn save_permit(&self, latest: Instant) -> Result<SemaphorePermit<'_>> {
        match timeout_at(latest.into(), self.inner.saves.acquire()).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(not_sent()),
        }
    }
}

/// One save with all its parts.
struct Save<'a> {
    collection: &'a LockCollection<'a>,
    held: &'a Acquisition,
    edit: &'a Edit,
    /// When the caller stops waiting.
    latest: Instant,
}

impl Save<'_> {
    /// Updates the document and touches the lock: both or neither.
    ///
    /// The touch always changes the record. A takeover, a break or an expiry at the same moment
    /// therefore conflicts with it, and the later one sees the outcome of the earlier one. A fence
    /// would have the same effect, but needs a field in the document. The touch comes last, because the
    /// record stays blocked until the commit, and if this process dies in between, until the server
    /// aborts the transaction (60 s).
    async fn in_transaction(self) -> Result<Saved> {
        let mut session =
            begin(self.collection.store.database().client(), self.collection.until).await?;
        let saved = match self.write_and_touch(&mut session).await {
            Ok(Saved::Saved) if Instant::now() < self.latest => {
                return commit(&mut session, self.latest).await.map(|()| Saved::Saved);
            }
            // Delayed on its way: the caller has been told that the outcome is unknown, and may have
            // saved something newer since. Committing now could undo that newer save.
            Ok(Saved::Saved) => Err(too_late()),
            other => other,
        };
        let _ = session.abort_transaction().await;
        if saved.as_ref().is_err_and(has_lost_connection) {
            self.collection.admission.note_lost_server(self.held.key.id());
        }
        saved
    }

    async fn write_and_touch(&self, session: &mut ClientSession) -> Result<Saved> {
        // Within a transaction the server does not wait for other transactions, so no time limit is
        // needed.
        let written = self.write(session, false).await?.unwrap_or(Saved::DocumentGone);
        let saved =
            if self.edit.is_empty() { renewal() } else { saved_as(self.edit.version_after()) };
        let is_held = self.collection.touch_in(session, self.held, saved).await?;
        Ok(if is_held { written } else { Saved::Lost })
    }

    /// The save on a server without transactions: first touches the lock, then writes the document.
    async fn without_transaction(self) -> Result<Saved> {
        if !self.collection.touch(self.held).await? {
            return Ok(Saved::Lost);
        }
        let mut session = self.collection.store.database().client().start_session().await?;
        let mut pause = FIRST_PAUSE;
        loop {
            if Instant::now() + pause >= self.latest {
                return Err(too_late());
            }
            let written = self.write(&mut session, true).await;
            if let Some(written) = written.map_err(|error| self.perhaps_done(error))? {
                return Ok(written);
            }
            sleep(pause).await;
            pause *= 2;
        }
    }

    /// A repetition of a creation or a deletion would meet the effect of this attempt, and take it for the work of somebody
    /// else.
    fn perhaps_done(&self, error: Error) -> Error {
        match self.edit.content {
            Content::Creation(_) | Content::Deletion if has_lost_connection(&error) => {
                failure(StoreErrorKind::OutcomeUnknown, format!("the reply was lost: {error}"))
            }
            _ => error,
        }
    }

    // 1 → written; 0 → the document was deleted without regard to the lock. 11000 → there is such a document already.
    //
    // In a transaction all reads and writes are of one snapshot: a document that another program changes in between
    // makes the write fail with a conflict. Elsewhere the document is written only `if_unchanged` since it was read.
    // `None`: another program has changed it, so the changes must be applied again.
    async fn write(
        &self,
        session: &mut ClientSession,
        if_unchanged: bool,
    ) -> Result<Option<Saved>> {
        let (documents, mut filter) = (&self.collection.documents, by_id(self.held.key.id()));
        let exact = [self.held.key.id()];
        if self.edit.onto.is_some() && !matches!(self.edit.content, Content::Changes(_)) {
            let now = match self.base(session).await? {
                Ok(now) => now,
                Err(refused) => return Ok(Some(refused)),
            };
            if if_unchanged {
                filter.insert("$expr", unchanged(&now)?);
            }
        }
        let count = match &self.edit.content {
            Content::Changes(changes) => {
                return match self.base(session).await? {
                    Ok(now) => {
                        self.write_changes(changes, now, filter, session, if_unchanged).await
                    }
                    Err(refused) => Ok(Some(refused)),
                };
            }
            Content::Creation(document) => {
                documents.insert_one(raw(document)?).session(session).await?;
                1
            }
            Content::Deletion => {
                let deleted = documents.delete_one(filter).exactly(exact);
                deleted.session(session).await?.deleted_count
            }
            Content::Replacement(document) => {
                let replaced = documents.replace_one(filter, raw(document)?).exactly(exact);
                replaced.session(session).await?.matched_count
            }
        };
        if count == 0 && if_unchanged && self.edit.onto.is_some() {
            return Ok(None);
        }
        Ok(Some(if count == 0 { Saved::DocumentGone } else { Saved::Saved }))
    }

    /// The stored document, if the edit may be written onto its version.
    async fn base(&self, session: &mut ClientSession) -> Result<Result<StoredDocument, Saved>> {
        Ok(match self.collection.read_in(session, self.held.key.id()).await? {
            Some(now) if self.edit.fits(&now) => Ok(now),
            Some(_) => Err(Saved::ChangedMeanwhile(String::new())),
            None => Err(Saved::DocumentGone),
        })
    }

    /// As [`write`](Self::write), for the changes of a document that is `now` stored like this.
    async fn write_changes(
        &self,
        changes: &Changes,
        now: StoredDocument,
        mut filter: Document,
        session: &mut ClientSession,
        if_unchanged: bool,
    ) -> Result<Option<Saved>> {
        let (documents, exact) = (&self.collection.documents, [self.held.key.id()]);
        // The same write may make the next primary abort, too.
        if self.collection.admission.has_lost_server(self.held.key.id())
            && codec::exact(&now).is_none()
        {
            return Err(lost_a_server());
        }
        let difference = match difference_of(changes, &now).await? {
            Ok(difference) => difference,
            Err(field) => return Ok(Some(Saved::ChangedMeanwhile(field))),
        };
        if if_unchanged {
            filter.insert("$expr", unchanged(&now)?);
        }
        let is_unordered = matches!(difference, Difference::Unordered(_));
        let updated = match difference {
            Difference::Nothing => {
                changes.were_stored_as(now);
                return Ok(Some(Saved::Saved));
            }
            Difference::Fields(update) | Difference::Unordered(update) => {
                let updated = documents.update_one(filter, update).exactly(exact);
                updated.session(&mut *session).await?
            }
            Difference::Whole(after) => {
                let replaced = documents.replace_one(filter, after).exactly(exact);
                replaced.session(&mut *session).await?
            }
        };
        if if_unchanged && updated.matched_count == 0 {
            return Ok(None);
        }
        if is_unordered
            && let Some(stored) = self.collection.read_in(session, self.held.key.id()).await?
        {
            changes.were_stored_as(stored);
        }
        let is_there = updated.matched_count > 0;
        Ok(Some(if is_there { Saved::Saved } else { Saved::DocumentGone }))
    }
}

/// The write that applies the changes to the stored document, or the field that forbids it. A large document is compared
/// by another thread than those that serve requests.
async fn difference_of(
    changes: &Changes,
    now: &StoredDocument,
) -> Result<Result<Difference, String>, Error> {
    let difference = |changes: &Changes, now: &StoredDocument| match changes.apply(now) {
        Ok(after) => difference::between(now, &after, changes.have_an_order()).map(Ok),
        Err(field) => Ok(Err(field)),
    };
    let found = if changes.are_large() {
        let (changes, now) = (changes.clone(), now.clone());
        let found = spawn_blocking(move || difference(&changes, &now)).await;
        found.unwrap_or_else(|failed| Err(failed.into()))
    } else {
        difference(changes, now)
    };
    found.map_err(Error::custom)
}

/// The condition that the document is still this one.
fn unchanged(now: &StoredDocument) -> Result<Document> {
    let now = codec::exact(now).ok_or_else(odd_on_a_standalone_server)?;
    Ok(doc! { "$eq": ["$$ROOT", { "$literal": now }] })
}

fn raw(document: &StoredDocument) -> Result<RawDocumentBuf> {
    codec::raw(document).map_err(Error::custom)
}

/// The write may have made the server abort, and would make the next primary abort, too.
fn lost_a_server() -> Error {
    let why = "a server was lost during this save, and a name stands twice in the stored document, or a text in it is \
               not UTF-8: it is not sent again; look at the server's log, and correct the document";
    failure(StoreErrorKind::Rejected, why)
}

/// Without a transaction a document is written only if nobody has changed it since it was read. No command can compare a
/// document like this one.
fn odd_on_a_standalone_server() -> Error {
    let why = "a name stands twice in the stored document, or a text in it is not UTF-8: a server without \
               transactions cannot save its changes; replace the document, or use a replica set";
    failure(StoreErrorKind::Rejected, why)
}

/// Begins a transaction for a guarded write.
pub(super) async fn begin(client: &Client, until: Deadline) -> Result<ClientSession> {
    let mut session = client.start_session().await?;
    session
        .start_transaction()
        .read_concern(ReadConcern::snapshot())
        .write_concern(WriteConcern::majority())
        // Otherwise it has the read preference of the client, and only `primary` may read in a transaction.
        .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
        .max_commit_time(until.read_limit())
        .await?;
    Ok(session)
}

pub(super) fn too_late() -> Error {
    unavailable("the deadline has passed; nothing was written")
}

pub(super) fn no_answer() -> Error {
    failure(StoreErrorKind::OutcomeUnknown, "no answer in time")
}

/// Commits, and repeats the commit while its outcome is not known. The connection of a commit without an answer may be
/// dead, so some time is left for a repetition. Once an attempt may have been carried out, only a success counts, or the
/// server's word that the transaction was rolled back.
///
/// Repeating the whole transaction instead would be wrong: if the first one was committed and the lock
/// lost since, the answer would be "lost, nothing written".
pub(super) async fn commit(session: &mut ClientSession, latest: Instant) -> Result<()> {
    let (mut pause, mut unknown) = (FIRST_PAUSE, None);
    loop {
        let left = latest.saturating_duration_since(Instant::now());
        let patience = left.saturating_sub(2 * LIMIT).max(left / 2).max(LIMIT);
        match timeout(patience, session.commit_transaction()).await {
            Err(_) => unknown = Some(no_answer()),
            Ok(Err(e)) if e.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) => unknown = Some(e),
            Ok(Err(e)) if unknown.is_some() && !e.contains_label(TRANSIENT_TRANSACTION_ERROR) => {}
            Ok(known) => return known,
        }
        if Instant::now() + pause >= latest {
            return Err(unknown.unwrap_or_else(no_answer));
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
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
