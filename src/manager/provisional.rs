//! A grant that nobody has answered for yet.

use tokio_util::task::TaskTracker;

use super::{LockManager, release::Unwanted};
use crate::{Lock, LockToken, PageId, store::Claim};

/// A fresh lock that is given back when this is dropped, unless it was confirmed before.
///
/// So no way out of a request leaves a lock behind: a deadline that passes, a handler that is
/// dropped with its connection, a sibling extractor that fails, a document that is not there.
#[derive(Debug)]
pub(crate) struct Provisional {
    manager: LockManager,
    lock: Lock,
    token: LockToken,
    page: Option<PageId>,
    /// Sees the end of the release, so that a request can wait for it.
    scope: TaskTracker,
    confirmed: bool,
}

impl Provisional {
    pub(super) fn new(manager: LockManager, lock: Lock, claim: &Claim, scope: TaskTracker) -> Self {
        // Perhaps that of an earlier attempt.
        let (token, page) = (lock.token.unwrap_or(claim.token), claim.page);
        Self { manager, lock, token, page, scope, confirmed: false }
    }

    pub(crate) fn lock(&self) -> &Lock {
        &self.lock
    }

    pub(crate) fn token(&self) -> LockToken {
        self.token
    }

    /// Keeps the lock.
    pub(crate) fn confirm(mut self) -> Lock {
        self.confirmed = true;
        self.manager.inner.trusts(&self.lock, self.page);
        self.lock.clone()
    }

    /// It has gone by other means, and need not be given back.
    pub(crate) fn forget(mut self) {
        self.confirmed = true;
    }
}

impl Drop for Provisional {
    fn drop(&mut self) {
        if !self.confirmed {
            let Lock { key, aid, mode, .. } = self.lock.clone();
            let unwanted = Unwanted { key, aid, tokens: vec![self.token], mode };
            self.manager.give_back(unwanted, &self.scope);
        }
    }
}
