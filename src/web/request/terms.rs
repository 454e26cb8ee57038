//! How a request asks for a lock, and the lock that it gets.

use std::cell::Cell;

use crate::{
    error::{LockError, Result},
    lock::{Lock, LockToken, Mode},
    manager::{Provisional, Wait},
    store::{Acquisition, Confirmed, StoredDocument},
};

/// How to ask for a lock.
#[derive(Clone, Copy)]
pub(in crate::web) struct Terms<'a> {
    pub(in crate::web) mode: Mode,
    /// The tokens that the client sent: the lock must have one of them. If there are none, any
    /// acquisition will do.
    pub(in crate::web) offered: &'a [LockToken],
    pub(in crate::web) wait: Wait,
    pub(in crate::web) elsewhere: Elsewhere,
    pub(in crate::web) document: Document,
}

/// What to do about a lock that another tab of the session holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::web) enum Elsewhere {
    Refuse,
    /// The lock is confirmed. The other tab keeps it.
    Confirm,
    /// The lock is taken from the other tab, or also from another session if the policy allows it.
    TakeOver,
}

/// Whether a lock is of use without its document.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::web) enum Document {
    MayBeMissing,
    MustExist,
    /// The document must exist, and is read together with the lock, where one read suffices.
    IsLoaded,
}

impl Terms<'_> {
    /// Asks for the exclusive lock, without a token of the client.
    pub(in crate::web) fn exclusive(wait: Wait) -> Self {
        Self {
            mode: Mode::Exclusive,
            offered: &[],
            wait,
            elsewhere: Elsewhere::Refuse,
            document: Document::MayBeMissing,
        }
    }

    /// Asks for the exclusive lock, or confirms it if any tab of the session holds it, and does not wait.
    pub(in crate::web) fn in_any_tab() -> Self {
        Self { elsewhere: Elsewhere::Confirm, ..Self::exclusive(Wait::no()) }
    }

    /// True if the document is read together with the lock.
    pub(super) fn loads(&self) -> bool {
        self.document == Document::IsLoaded
    }
}

/// A lock of this session, as a request has got it.
pub(in crate::web) struct OwnLock {
    pub(in crate::web) lock: Lock,
    pub(in crate::web) held: Acquisition,
    pub(in crate::web) got: Got,
    /// True if there was a wait, during which the person may have lost the permission.
    pub(in crate::web) has_waited: bool,
    /// True if its page was left, so that the lock is about to expire.
    pub(super) is_leaving: bool,
    /// The document, if it was read together with the lock, until somebody takes it from here.
    pub(in crate::web) document: Cell<Option<StoredDocument>>,
    /// Gives the lock back when it is dropped. `None` if the request keeps the lock, or was not granted it.
    pub(super) grant: Cell<Option<Provisional>>,
}

/// How a request has got a lock of its session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::web) enum Got {
    /// The lock was granted to this request.
    Granted,
    /// The request has joined the grant of another request, and perhaps that one may not keep the lock.
    Joined,
    /// A read has confirmed the lock.
    Confirmed,
}

impl OwnLock {
    pub(super) fn new(lock: Lock, got: Got) -> Result<Self> {
        // Our own locks have a token, unless somebody has edited the lock record by hand.
        let held = Acquisition::of(&lock).ok_or_else(|| LockError::lost(lock.key.clone()))?;
        let (document, grant) = (Cell::default(), Cell::default());
        Ok(Self { lock, held, got, has_waited: false, is_leaving: false, document, grant })
    }

    pub(super) fn granted(grant: Provisional) -> Result<Self> {
        let own = Self::new(grant.lock.clone(), Got::Granted)?;
        Ok(Self { grant: Cell::new(Some(grant)), ..own })
    }

    pub(super) fn confirmed(
        Confirmed { lock, document, is_leaving, .. }: Confirmed,
    ) -> Result<Self> {
        let document = Cell::new(document);
        Ok(Self { document, is_leaving, ..Self::new(lock, Got::Confirmed)? })
    }

    pub(in crate::web) fn is_fresh(&self) -> bool {
        self.got == Got::Granted
    }
}
