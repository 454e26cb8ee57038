//! What a store tells of by itself.

use std::{fmt, pin::Pin};

use futures_util::{Stream, StreamExt};

use crate::{error::StoreError, key::LockKey, lock::LockToken, store::Taken};

/// Changes of one collection's locks, as [`Store::watch`](crate::Store::watch) tells them.
///
/// Ends with an error or with `None` when the store cannot go on; then one watches anew.
pub struct Watch(Pin<Box<dyn Stream<Item = Result<Change, StoreError>> + Send>>);

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// The lock on this document is gone, excludes less than before, or runs out sooner. With
    /// [`Interest::All`](crate::Interest::All) also: somebody has got it.
    Changed(LockKey),
    /// This acquisition of the lock was taken from its holder.
    Taken(LockKey, LockToken, Taken),
    /// Something may have happened to any document.
    Missed,
}

impl Watch {
    /// Tells what this stream yields.
    pub fn new(changes: impl Stream<Item = Result<Change, StoreError>> + Send + 'static) -> Self {
        Self(Box::pin(changes))
    }

    /// The next change.
    ///
    /// # Errors
    /// [`StoreError`] if the store was not reached any more. That ends the watch.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub async fn next(&mut self) -> Option<Result<Change, StoreError>> {
        self.0.next().await
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}
