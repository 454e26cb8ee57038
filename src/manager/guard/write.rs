//! Guarded writes of jobs.

#[cfg(feature = "_mongo")]
use std::sync::Arc;

use crate::{
    error::{LockError, Result, StoreErrorKind},
    key::Lockable,
    manager::{
        guard::LockGuard,
        reads::{decode, unfit},
    },
    store::StoredDocument,
};

/// The error of a write that was sent. Without an answer, the document may be written.
fn perhaps_written(error: LockError) -> LockError {
    use StoreErrorKind::{OutcomeUnknown, Unavailable};
    match error {
        LockError::Store(source) if matches!(source.kind(), Unavailable | OutcomeUnknown) => {
            LockError::OutcomeUnknown(source)
        }
        error => error,
    }
}

impl LockGuard {
    /// The current document.
    ///
    /// # Errors
    /// [`LockError::NotFound`], [`LockError::Document`], [`LockError::Store`].
    /// [`LockError::Misconfigured`] if the lock is not on a document of type `T`.
    pub async fn load<T: Lockable>(&self) -> Result<T> {
        self.core.collections.is_of::<T>(self.key())?;
        let key = self.key();
        let document = self.core.reads.load(key, self.core.verbs.until()).await?;
        *self.version.lock() = Some(document.version());
        document.decode().map_err(unfit(key))
    }

    /// Loads the document, changes it, and writes the difference if the exclusive lock is still held: the
    /// check of the lock and the write are one transaction. Returns the document as it was written.
    ///
    /// Fields that `T` does not contain stay as they are, at any depth. An array is rewritten as a whole. If the
    /// change leaves the document as it was, only the lock is renewed.
    ///
    /// ```no_run
    /// # use actix_doclock::{LockError, LockKey, LockManager, Lockable, Wait};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Invoice { #[serde(rename = "_id")] number: i64, is_sent: bool }
    /// # impl Lockable for Invoice { type Id = i64; const COLLECTION: &'static str = "invoice"; }
    /// # async fn send(locks: LockManager) -> Result<(), LockError> {
    /// let guard = locks.acquire(&LockKey::of::<Invoice>(4711)?, Wait::no()).await?;
    /// guard.update(|invoice: &mut Invoice| invoice.is_sent = true).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`LockError::Lost`], [`LockError::NotFound`], [`LockError::ChangedMeanwhile`] or [`LockError::UnclearChange`]: nothing was
    /// written. [`LockError::OutcomeUnknown`]: the document may or may not be written. Load it before you call this method again:
    /// a repetition may apply the change twice. With the other errors of [`load`](Self::load) and of `HeldDoc::save`,
    /// nothing was written.
    ///
    /// # Cancel safety
    /// If the future is dropped, the document may or may not be written.
    pub async fn update<T: Lockable>(&self, change: impl FnOnce(&mut T)) -> Result<T> {
        self.core.collections.is_of::<T>(self.key())?;
        let loaded = self.core.reads.load(self.key(), self.core.verbs.until()).await?;
        let version = loaded.version();
        let (mut document, original) = decode(self.key(), loaded)?;
        change(&mut document);
        let saves = &self.core.saves;
        let until = self.core.verbs.until();
        let saved = saves.save(&self.held, &original, &document, None, until).await;
        let changes = saved.map_err(perhaps_written)?;
        let stored = changes.stored();
        *self.version.lock() = Some(stored.as_ref().map_or(version, StoredDocument::version));
        match stored {
            Some(stored) => stored.decode().map_err(unfit(self.key())),
            None => Ok(document),
        }
    }

    /// Inserts a new document under the lock.
    ///
    /// # Errors
    /// [`LockError::Rejected`] if there is such a document already. Otherwise as
    /// [`update`](Self::update), which is also as cancel safe.
    pub async fn create<T: Lockable>(&self, document: &T) -> Result<()> {
        self.core.collections.is_of::<T>(self.key())?;
        let until = self.core.verbs.until();
        let created = self.core.saves.create(&self.held, document, until).await;
        *self.version.lock() = Some(created.map_err(perhaps_written)?.version());
        Ok(())
    }

    /// Deletes the document if the exclusive lock is still held. Releases the lock in any case, in the background.
    ///
    /// # Errors
    /// [`LockError::Lost`] or [`LockError::NotFound`]: nothing was deleted. [`LockError::OutcomeUnknown`]: the document may or
    /// may not be deleted. [`LockError::Store`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the document may or may not be deleted.
    pub async fn delete(self) -> Result<()> {
        // The drop of the guard releases the lock.
        let deleted = self.core.saves.delete(&self.held, None, self.core.verbs.until()).await;
        deleted.map_err(perhaps_written)
    }

    /// The lock, for guarded writes of your own:
    /// [`MongoStore::transaction`](crate::MongoStore::transaction) and
    /// [`update`](crate::MongoStore::update).
    #[cfg(feature = "_mongo")]
    #[must_use]
    pub fn held(&self) -> crate::store::HeldLock {
        self.core.saves.held(self.held.clone(), Arc::default(), Arc::default())
    }
}
