//! The stream of changes that a store reports.

use std::{fmt, pin::Pin};

use futures_util::{Stream, StreamExt};

use crate::{
    key::LockKey,
    lock::LockToken,
    store::{StoreResult, TakenBy},
    version::Version,
};

/// Changes of one collection's locks, as [`Locks::watch`](crate::store::Locks::watch) reports them.
///
/// The stream ends with an error or with `None` when the store cannot continue. The subscriber then calls `watch`
/// again.
pub struct Watch(Pin<Box<dyn Stream<Item = StoreResult<Change>> + Send>>);

/// One report about the locks of a collection.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// The lock on this document is gone, excludes less than before, or expires sooner. A waiter may be
    /// let in.
    Freed(LockKey),
    /// A session has acquired the lock on this document, or has joined its readers.
    Granted(LockKey),
    /// This acquisition of the lock was broken or taken over. Another `Freed` or `Granted` may
    /// follow.
    Broken(LockKey, LockToken, TakenBy),
    /// A guarded write of this document was committed. The lock may be gone by now.
    Saved(LockKey, Written),
    /// Somebody has asked the holder of this lock for it, has withdrawn that, or was answered.
    Asked(LockKey),
    /// Changes may have been missed, for any document.
    Missed,
}

/// A guarded write, as it is told after its commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The label of the [holder](crate::Holder) who wrote.
    pub by: String,
    /// The version of the document after the write. `None` if the document was deleted, or if the writer did not read
    /// it again: look.
    pub version: Option<Version>,
}

impl Watch {
    /// Reports the items of this stream.
    pub fn new(changes: impl Stream<Item = StoreResult<Change>> + Send + 'static) -> Self {
        Self(Box::pin(changes))
    }

    /// The next change.
    ///
    /// # Errors
    /// [`StoreError`](crate::StoreError) if the store can no longer be reached. That ends the watch.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub async fn next(&mut self) -> Option<StoreResult<Change>> {
        self.0.next().await
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}
