//! Loading and saving locked documents.

#[cfg(feature = "_mongo")]
use std::sync::Arc;
use std::time::Instant;

#[cfg(feature = "_mongo")]
use crate::store::{Forget, HeldLock};
use crate::{
    error::{BoxError, LockError, StoreErrorKind},
    key::{LockKey, Lockable},
    lock::Mode,
    manager::{LockManager, observe},
    store::{Acquisition, Edit, Original, Saved, StoredDocument},
};

impl LockManager {
    #[cfg(feature = "_mongo")]
    pub(crate) fn held(&self, acquisition: Acquisition) -> HeldLock {
        self.writes_under(&acquisition);
        let (runtime, tasks) = self.inner.runner.parts();
        let (manager, held) = (Arc::downgrade(&self.inner), acquisition.clone());
        let forget = Forget(Arc::new(move || {
            if let Some(inner) = manager.upgrade() {
                Self { inner }.writes_under(&held);
            }
        }));
        let deadline = self.inner.settings.deadline;
        let declared = self.declared(acquisition.key.collection());
        HeldLock { acquisition, declared, deadline, runtime, tasks, forget }
    }

    /// A write under this lock may be under way from now on, even after its caller was told that the outcome
    /// is unknown. The next re-entry therefore writes: it waits for that write, as a read would not, and the
    /// document that it loads is the latest.
    fn writes_under(&self, held: &Acquisition) {
        self.inner.activity.gone(&held.aid, &held.key);
    }

    pub(crate) async fn exists(&self, key: &LockKey, until: Instant) -> Result<bool, LockError> {
        self.ready(key, until).await?;
        self.run("exists", until, key.clone(), |store, key| store.exists(key)).await
    }

    /// # Errors
    /// [`LockError::NotFound`], and those of the store.
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.load", skip_all,
        fields(collection = key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn load(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<StoredDocument, LockError> {
        self.ready(key, until).await?;
        let loaded = self.run("load", until, key.clone(), |store, key| store.load(key)).await?;
        loaded.ok_or_else(|| LockError::NotFound { key: key.clone() })
    }

    /// Writes the changes of the document under the lock. Returns the document as it was written.
    ///
    /// # Errors
    /// [`LockError::Lost`], [`LockError::NotFound`], [`LockError::ChangedMeanwhile`],
    /// [`LockError::Document`] and those of the store.
    pub(crate) async fn save<T: Lockable>(
        &self,
        held: &Acquisition,
        original: &Original,
        document: &T,
        until: Instant,
    ) -> Result<Original, LockError> {
        let changes = original.changes_to(document).map_err(unfit(&held.key))?;
        self.write(held, changes.clone().into(), until).await?;
        Ok(changes.into_original())
    }

    /// Writes the whole document under the lock. Returns the document as it was written.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub(crate) async fn replace<T: Lockable>(
        &self,
        held: &Acquisition,
        original: &Original,
        document: &T,
        until: Instant,
    ) -> Result<Original, LockError> {
        let unfit = unfit(&held.key);
        let new = original.replaced_by(document).map_err(&unfit)?;
        self.write(held, new.clone().into(), until).await?;
        Original::new(new, document).map_err(&unfit)
    }

    /// Inserts a document whose lock is held already. Returns the document as it was written.
    ///
    /// # Errors
    /// As [`save`](Self::save). [`LockError::Rejected`] if there is such a document already.
    pub(crate) async fn create<T: Lockable>(
        &self,
        held: &Acquisition,
        document: &T,
        until: Instant,
    ) -> Result<Original, LockError> {
        let unfit = unfit(&held.key);
        let new = StoredDocument::encode(self.inner.store.format(), document).map_err(&unfit)?;
        let original = Original::new(new.clone(), document).map_err(&unfit)?;
        original.replaced_by(document).map_err(&unfit)?;
        self.write(held, Edit::Creation(new), until).await?;
        Ok(original)
    }

    /// Deletes the document under its lock. The lock stays.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub(crate) async fn delete(&self, held: &Acquisition, until: Instant) -> Result<(), LockError> {
        self.write(held, Edit::Deletion, until).await
    }

    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.save", skip_all,
        fields(collection = held.key.collection(), outcome = tracing::field::Empty),
    ))]
    async fn write(&self, held: &Acquisition, edit: Edit, until: Instant) -> Result<(), LockError> {
        let timer = observe::Timer::start(self, &held.key, Mode::Exclusive);
        self.writes_under(held);
        let args = (held.clone(), edit, until);
        let saved = self
            .run("save", until, args, |store, (held, edit, until)| store.save(held, edit, *until));
        let (saved, key) = (saved.await, held.key.clone());
        if !matches!(saved, Ok(Saved::Saved)) {
            // Another request may have entered meanwhile.
            self.writes_under(held);
        }
        if let Ok(Saved::Lost) = saved {
            self.inner.gone(held);
            observe::lost(self, &held.key, Some(held.token), "unknown", "save");
        }
        let saved = match saved {
            Ok(Saved::Saved) => Ok(()),
            Ok(Saved::Lost) => Err(LockError::Lost { key, holder: None }),
            Ok(Saved::DocumentGone) => Err(LockError::NotFound { key }),
            Ok(Saved::ChangedMeanwhile(field)) => Err(LockError::ChangedMeanwhile { key, field }),
            Err(LockError::Store(source)) if source.kind() == StoreErrorKind::Rejected => {
                Err(LockError::Rejected { key, source })
            }
            Err(error) => Err(error),
        };
        timer.saved(&saved);
        saved
    }
}

/// The document as a Rust value, and as it was loaded.
pub(crate) fn decode<T: Lockable>(
    key: &LockKey,
    document: StoredDocument,
) -> Result<(T, Original), LockError> {
    let value = document.decode().map_err(unfit(key))?;
    let original = Original::new(document, &value).map_err(unfit(key))?;
    Ok((value, original))
}

fn unfit(key: &LockKey) -> impl Fn(BoxError) -> LockError {
    |source| LockError::Document { key: key.clone(), source }
}
