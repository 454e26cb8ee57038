//! A guarded update of one document by operators or by a pipeline.

use std::{any::type_name, slice, time::Instant};

use mongodb::{
    ClientSession,
    error::Error,
    options::{ReturnDocument, UpdateModifications},
};

use crate::{
    error::{LockError, StoreErrorKind},
    key::{LockKey, Lockable},
    store::{
        Deadline, Locks, Removal, decode,
        mongo::{
            HeldLock, MongoStore, codec,
            ids::{Exactly, by_id},
            save::{save_error, too_late},
            send::Timing,
            time_limits::answered,
            transaction::{
                InDoubt, TransactionError, check_version, guarding, lost, misconfigured, running,
            },
        },
    },
    version::Version,
};

impl MongoStore {
    /// Updates the locked document by operators or by a pipeline, if the exclusive lock is still held, and
    /// renews the lock. Returns the document after the update.
    ///
    /// ```no_run
    /// # use actix_doclock::{LockError, LockGuard, Lockable, MongoStore};
    /// # use mongodb::bson::{doc, oid::ObjectId};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Item { #[serde(rename = "_id")] id: ObjectId, tags: Vec<String> }
    /// # impl Lockable for Item { type Id = ObjectId; const COLLECTION: &'static str = "item"; }
    /// async fn tag(store: &MongoStore, lock: &LockGuard) -> Result<String, LockError> {
    ///     let push = doc! { "$push": { "tags": "urgent" } };
    ///     let now: Item = store.update(&lock.held(), push).await?;
    ///     Ok(now.tags.join(", "))
    /// }
    /// ```
    ///
    /// On a standalone server the lock is checked immediately before the update, as for a save, and an update
    /// is not undone.
    ///
    /// # Errors
    /// [`LockError::Lost`] or [`LockError::NotFound`]: nothing was written; a lock on a missing document is
    /// released. [`LockError::Rejected`] if the database does not accept the update.
    /// [`LockError::Document`] if the updated document is no `T`; nothing was written, except on a standalone
    /// server. [`LockError::Misconfigured`] if the lock is shared, or not on a document of type `T`.
    /// [`LockError::Store`] if the database does not answer; nothing was written. [`LockError::OutcomeUnknown`] if it
    /// is unknown whether the document was updated: a repetition may apply the update twice.
    ///
    /// # Cancel safety
    /// If the future is dropped, the document may or may not be updated.
    pub async fn update<T: Lockable>(
        &self,
        held: &HeldLock,
        update: impl Into<UpdateModifications>,
    ) -> Result<T, LockError> {
        let (acquisition, held_alone) = (&held.acquisition, slice::from_ref(held));
        let (key, update) = (&acquisition.key, update.into());
        if held.declared != Some(T::COLLECTION) {
            let name = type_name::<T>();
            return Err(misconfigured(format!("{key:?} is locked, and `{name}` is not its type")));
        }
        let until = Instant::now() + guarding(held_alone)?.deadline;
        let collection = self.prepared_for(held)?.with(Deadline::at(until));
        let mut unfit = None;
        let mut change = async |session: &mut ClientSession| {
            let changed = collection.documents.find_one_and_update(by_id(key.id()), update.clone());
            let changed = changed.return_document(ReturnDocument::After);
            let changed = changed.exactly([key.id()]);
            let changed = changed.max_time(collection.until.read_limit()).session(&mut *session);
            let changed = match answered(changed).await {
                // Updated, but the driver cannot read a text that is not UTF-8 in this reply.
                Err(e) if codec::is_unreadable(&e) => {
                    let updated =
                        collection.documents.find_one(by_id(key.id())).exactly([key.id()]);
                    let updated = updated.max_time(collection.until.read_limit());
                    answered(updated.session(session)).await?
                }
                changed => changed?,
            };
            let version = changed.as_ref().map(|document| Version::of(document.as_bytes()));
            *held.version.lock() = version;
            let fits = changed.map(|document| decode::<T>(document.as_bytes())).transpose();
            fits.map_err(|source| {
                unfit = Some(source);
                Error::custom("the updated document is not of the type")
            })
        };
        let mut doubt = InDoubt::new(held_alone);
        let onto = *held.onto.lock();
        let updated = if self.has_transactions_by(until).await? {
            self.transaction(held_alone, change).await
        } else {
            let session = self.database().client().start_session().await;
            let mut session = session.map_err(running)?;
            check_version(&collection, &mut session, held).await.map_err(running)??;
            match collection.touch(acquisition).await {
                Err(error) => Err(TransactionError::Work(error)),
                Ok(false) => Err(lost(held).into()),
                Ok(true) if Instant::now() >= until => Err(TransactionError::Work(too_late())),
                Ok(true) => change(&mut session).await.map_err(|error| {
                    let source = save_error(format!("updating {key:?}"), error.clone());
                    match source.kind() {
                        StoreErrorKind::Unavailable => LockError::OutcomeUnknown(source).into(),
                        _ => TransactionError::Work(error),
                    }
                }),
            }
        };
        if updated.is_ok() {
            doubt.0 = &[];
            *held.onto.lock() = onto.and(held.version());
        } else {
            *held.version.lock() = None;
        }
        if let Some(source) = unfit {
            return Err(LockError::Document { key: key.clone(), source });
        }
        let Some(updated) = updated.map_err(|error| refused(key, error))? else {
            // A lock on a missing document is of no use. If this fails, it expires.
            let (store, it) = (self.clone(), acquisition.clone());
            let released = held.spawn(async move {
                store.remove_lock(Removal::Release(&it), Deadline::at(until)).await
            });
            let _ = released.await;
            return Err(LockError::NotFound { key: key.clone() });
        };
        Ok(updated)
    }
}

fn refused(key: &LockKey, error: TransactionError) -> LockError {
    let error = match error {
        TransactionError::Lock(error) => return error,
        TransactionError::Work(error) => error,
    };
    let source = save_error(format!("updating {key:?}"), error);
    match source.kind() {
        // The server has refused the update of the application.
        StoreErrorKind::Rejected | StoreErrorKind::Other => {
            LockError::Rejected { key: key.clone(), source }
        }
        _ => LockError::Store(source),
    }
}
