//! Loading and saving locked documents.

use std::{any::type_name, time::Instant};

#[cfg(feature = "_mongo")]
use crate::store::HeldLock;
use crate::{
    error::{BoxError, LockError, StoreErrorKind},
    key::{LockKey, Lockable},
    lock::Mode,
    manager::{LockManager, observe},
    store::{Acquisition, Edit, Saved, StoredDocument, misnamed_id},
};

impl LockManager {
    #[cfg(feature = "_mongo")]
    pub(crate) fn held(&self, acquisition: Acquisition) -> HeldLock {
        self.writes_under(&acquisition);
        let (runtime, tasks) = self.inner.runner.parts();
        HeldLock { acquisition, deadline: self.inner.settings.deadline, runtime, tasks }
    }

    /// A write under this lock may be under way from now on, even after its caller was told that the outcome
    /// is unknown. The next re-entry therefore writes: it waits for that write, as a read would not, and the
    /// document that it loads is the latest.
    fn writes_under(&self, held: &Acquisition) {
        self.inner.activity.gone(&held.aid, &held.key);
    }

    pub(crate) async fn exists(&self, key: &LockKey, until: Instant) -> Result<bool, LockError> {
        self.run("exists", until, key.clone(), |store, key| store.exists(key)).await
    }

    /// # Errors
    /// [`LockError::NotFound`], [`LockError::Document`], and those of the store.
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.load", skip_all,
        fields(collection = key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn load<T: Lockable>(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<T, LockError> {
        match self.run("load", until, key.clone(), |store, key| store.load(key)).await? {
            None => Err(LockError::NotFound { key: key.clone() }),
            Some(document) => decode(key, document),
        }
    }

    /// Encodes a document as the store keeps it.
    ///
    /// # Errors
    /// The error of serde if `document` has no such form.
    pub(crate) fn encode<T: Lockable>(&self, document: &T) -> Result<StoredDocument, BoxError> {
        StoredDocument::encode(self.inner.store.format(), document)
    }

    /// Writes the differences from `before` under the lock, or the whole document if there is no
    /// `before`. Returns the document as it was written.
    ///
    /// # Errors
    /// [`LockError::Lost`], [`LockError::NotFound`], [`LockError::Document`],
    /// [`LockError::Misconfigured`] and those of the store.
    pub(crate) async fn save<T: Lockable>(
        &self,
        held: &Acquisition,
        before: Option<StoredDocument>,
        document: &T,
        until: Instant,
    ) -> Result<StoredDocument, LockError> {
        // Fields that have not changed are not written.
        let is_whole = before.is_none();
        let after = self.writable(&held.key, document, is_whole)?;
        let edit = match before {
            Some(before) => Edit::Changes { before, after: after.clone() },
            None => Edit::Replacement(after.clone()),
        };
        self.write(held, edit, until).await?;
        Ok(after)
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
    ) -> Result<StoredDocument, LockError> {
        let new = self.writable(&held.key, document, true)?;
        self.write(held, Edit::Creation(new.clone()), until).await?;
        Ok(new)
    }

    /// Deletes the document under its lock. The lock stays.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub(crate) async fn delete(&self, held: &Acquisition, until: Instant) -> Result<(), LockError> {
        self.write(held, Edit::Deletion, until).await
    }

    fn writable<T: Lockable>(
        &self,
        key: &LockKey,
        document: &T,
        is_whole: bool,
    ) -> Result<StoredDocument, LockError> {
        let encoded = self.encode(document);
        let encoded = encoded.map_err(|source| LockError::Document { key: key.clone(), source })?;
        let Some(name) = misnamed_id::<T>(&encoded, is_whole.then(|| key.id())) else {
            return Ok(encoded);
        };
        let what_to_do = format!(
            "`{}` reads its id from `_id` and writes it to `{name}`: give the field \
             `#[serde(rename = \"_id\")]`, and answers over HTTP a type of their own",
            type_name::<T>(),
        );
        log::error!(target: "actix_doclock::manager", "{what_to_do}");
        Err(LockError::Misconfigured(what_to_do))
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
        }
        let saved = match saved {
            Ok(Saved::Saved) => Ok(()),
            Ok(Saved::Lost) => Err(LockError::Lost { key, holder: None }),
            Ok(Saved::DocumentGone) => Err(LockError::NotFound { key }),
            Err(LockError::Store(source)) if source.kind() == StoreErrorKind::Rejected => {
                Err(LockError::Rejected { key, source })
            }
            Err(error) => Err(error),
        };
        timer.saved(&saved);
        saved
    }
}

pub(crate) fn decode<T: Lockable>(key: &LockKey, document: StoredDocument) -> Result<T, LockError> {
    document.decode().map_err(|source| LockError::Document { key: key.clone(), source })
}
