//! The version that a request names, and the one that its answer shows.

use std::{sync::Arc, time::Instant};

use parking_lot::Mutex;

use crate::{
    error::{LockError, Result},
    key::LockKey,
    lock::{Lock, LockToken},
    store::StoredDocument,
    version::{SharedVersion, Version},
    web::{
        current_request::Asker,
        request::{OwnLock, RequestLocks},
    },
};

/// The documents that a request has loaded or saved.
#[derive(Default)]
pub(in crate::web) struct ShownVersions {
    /// The document whose version was compared with that of the client.
    compared: Option<LockKey>,
    shown: Shown,
}

#[derive(Default)]
enum Shown {
    #[default]
    Nothing,
    /// The version of this document. `None` while nobody knows what a write of the application has made of it.
    One(LockKey, SharedVersion),
    Several,
}

impl ShownVersions {
    /// The version for the answer, if it is about one document.
    pub(in crate::web) fn shown(&self) -> Option<Version> {
        if let Shown::One(_, version) = &self.shown { *version.lock() } else { None }
    }
}

impl Asker for RequestLocks {
    /// If there is one, the form of this request was submitted before, or another one after it.
    fn saved_before(&self, key: &LockKey) -> Option<Version> {
        let shown = self.headers.versions().ok()??;
        self.saved_under(key, self.headers.tokens().ok()?, shown)
    }

    fn has_shown_it(&self) -> bool {
        let in_headers =
            self.headers.versions().is_ok_and(|it| it.is_some_and(|it| !it.is_empty()));
        in_headers
            || self.shows_version.get()
            || self.headers.tokens().is_ok_and(|it| !it.is_empty())
    }

    fn is_holder_of(&self, lock: &Lock) -> bool {
        self.actor().is_holder_of(lock)
    }
}

impl RequestLocks {
    /// The document under this lock, if it has the version that the request names.
    ///
    /// # Errors
    /// [`LockError::StaleCopy`] if it has another one, [`LockError::MalformedVersion`] if the request means several
    /// documents.
    pub(in crate::web) async fn load(
        &self,
        own: &OwnLock,
        until: Instant,
    ) -> Result<StoredDocument> {
        let key = &own.lock.key;
        let document = match own.document.take() {
            Some(document) => document,
            None => self.manager.core.reads.load(key, until).await?,
        };
        self.compare(key, &document)?;
        Ok(document)
    }

    /// Compares the document with the version that the request names, if it names one. Called before a claim as well: a
    /// claim may cost another lock, which must not be lost for a copy that has changed.
    pub(super) fn compare(&self, key: &LockKey, document: &StoredDocument) -> Result<()> {
        let Some(accepted) = self.headers.versions()? else { return Ok(()) };
        let mut versions = self.versions.borrow_mut();
        if versions.compared.get_or_insert_with(|| key.clone()) != key {
            return Err(LockError::MalformedVersion);
        }
        let version = document.version();
        if accepted.contains(&version) {
            return Ok(());
        }
        Err(LockError::StaleCopy { key: key.clone(), version })
    }

    /// The version that this session has saved last under one of these locks, if it is none of those that a page `shows`.
    pub(in crate::web) fn saved_under(
        &self,
        key: &LockKey,
        tokens: &[LockToken],
        shows: &[Version],
    ) -> Option<Version> {
        let saved = self.manager.core.causes.saved_under(key, &self.aid()?, tokens)?;
        (!shows.contains(&saved)).then_some(saved)
    }

    /// # Errors
    /// [`LockError::MalformedVersion`] if the request names a version, and means several documents.
    pub(in crate::web) fn check_one_version(&self, documents: usize) -> Result<()> {
        if documents > 1 && self.names_version() {
            Err(LockError::MalformedVersion)
        } else {
            Ok(())
        }
    }

    /// True if the request goes on only with a certain version of its document.
    pub(in crate::web) fn names_version(&self) -> bool {
        !matches!(self.headers.versions(), Ok(None))
    }

    /// Notes the version of this document, as this request has loaded or saved it. The returned place may get a later one.
    pub(in crate::web) fn shows(&self, key: &LockKey, version: Option<Version>) -> SharedVersion {
        let place = Arc::new(Mutex::new(version));
        let shown = &mut self.versions.borrow_mut().shown;
        *shown = match shown {
            Shown::One(shown, _) if shown != key => Shown::Several,
            Shown::Several => Shown::Several,
            _ => Shown::One(key.clone(), Arc::clone(&place)),
        };
        place
    }
}
