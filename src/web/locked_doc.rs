//! Documents as handler arguments.

use std::{
    fmt,
    future::Future,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    pin::Pin,
    rc::Rc,
    slice,
    time::Instant,
};

use actix_web::{FromRequest, HttpRequest, dev::Payload};

use crate::{
    error::{LockError, Result},
    key::{LockKey, Lockable},
    lock::{Lock, LockToken, Mode},
    manager::{Wait, decode},
    store::{Changes, Original, Released},
    version::{SharedVersion, Version},
    web::request::{Document, OwnLock, RequestLocks, Terms},
};

/// A document that this request locks for the session and then loads. If the session already holds the
/// lock, the lock is confirmed.
///
/// The id comes from the path parameter [`Lockable::PATH_PARAM`]. Use this type where editing begins,
/// with `POST`: prefetching browsers and crawlers follow every `GET`.
///
/// - *Proves:* the session held the lock when the document was loaded.
/// - *Ends* with the session, by [`release`](Guarded::release), or when the session is idle for the ttl.
///   Dropping this value does **not** release the lock: the person goes on editing between requests.
/// - *If the answer is an error*, a lock that this request took is given back before the answer is sent.
///
/// # Errors
/// As an argument `LockedDoc<T>`, the request is answered with the error. With `Option<LockedDoc<T>>` or
/// `Result<LockedDoc<T>, LockError>`, the handler is called anyway, for example to show a read-only page:
///
/// [`LockError::Held`] 423, [`LockError::StaleToken`] 412, [`LockError::NotFound`] 404,
/// [`LockError::InvalidKey`] and [`LockError::MalformedToken`] 400, [`LockError::SessionEnded`] and
/// [`LockError::LoginRequired`] 401, [`LockError::Store`] 503, [`LockError::Document`] and [`LockError::Misconfigured`] 500.
///
/// If there is an [access policy](crate::web::LockingSession::access_policy), it is asked before the store. Its "no" is
/// [`LockError::NotFound`].
///
/// If the client sends a `Lock-Token`, the lock is only confirmed, and it must have that token. A request
/// for several documents sends all their tokens, separated by commas.
pub type LockedDoc<T> = Guarded<T, Acquire>;

/// A document whose lock this session must already hold. The lock is confirmed, never acquired; then the
/// document is loaded.
///
/// Use this type where work is saved. It takes no lock, so there is nothing to give back.
///
/// - *Proves:* the session held the lock when the document was loaded. If the client sends a
///   `Lock-Token`, the session held that very acquisition, and not a later one of another tab.
/// - [`save`](Guarded::save) decides: it writes only if the lock is live at that moment.
///
/// # Errors
/// The errors of [`LockedDoc`], but [`LockError::Lost`] 409 instead of [`LockError::Held`].
pub type HeldDoc<T> = Guarded<T, Confirm>;

/// A document that others may read but not edit while this session reads it: takes or confirms a shared
/// lock, and then loads the document.
///
/// For work that considers several documents, or that needs a document not to change during a
/// calculation. A handler that only shows a document needs no lock:
/// [`SessionLocks::load`](crate::SessionLocks::load).
///
/// - *Proves:* no other session held an exclusive lock when the document was loaded. There may be other
///   readers. If this session holds the exclusive lock, that lock is confirmed and stays exclusive.
/// - *Ends* as the lock of a [`LockedDoc`], for each reader separately.
/// - A [`LockedDoc`] of the same session and document turns the shared lock into an exclusive lock with a
///   new token, if there is no other reader. Otherwise the [`LockedDoc`] is refused with
///   [`LockError::Held`], at once: two readers would wait for each other forever.
///
/// # Errors
/// The errors of [`LockedDoc`].
pub type SharedDoc<T> = Guarded<T, Share>;

/// How a [`Guarded`] document got its lock: taken or confirmed. See [`LockedDoc`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Acquire;

/// How a [`Guarded`] document got its lock: held before. See [`HeldDoc`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Confirm;

/// How a [`Guarded`] document got its lock: shared with others. See [`SharedDoc`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Share;

/// The ways to lock that allow a document to be written: `async fn save<How: Exclusive>(note: Guarded<Note, How>)` takes
/// what a [`LockedDoc`] and a [`HeldDoc`] have in common.
pub trait Exclusive {}

impl Exclusive for Acquire {}
impl Exclusive for Confirm {}

/// A loaded document whose lock this session holds. Dereferences to the document.
///
/// Used under the names [`LockedDoc`], [`HeldDoc`] and [`SharedDoc`].
#[must_use = "the document is locked and loaded for a reason"]
pub struct Guarded<T, How> {
    document: T,
    /// The document as it was last loaded or saved.
    original: Original,
    /// The version onto which alone it may be written, if the client has named one.
    onto: SharedVersion,
    pub(super) own: OwnLock,
    locks: Rc<RequestLocks>,
    how: PhantomData<How>,
}

impl<T: Lockable, How: Exclusive> Guarded<T, How> {
    /// Writes the changes since the document was loaded, if this acquisition of its lock is live at the
    /// moment of the write. Keeps the lock and renews its lease.
    ///
    /// Writes only the changed values, at any depth. So fields that `T` does not contain stay as they are, also in
    /// the elements of arrays, and so do fields that other programs have changed in the meantime. An array is
    /// rewritten as a whole. If nothing has changed, only the lease is renewed. To write the whole document, see
    /// [`replace`](Self::replace).
    ///
    /// On a replica set, the check of the lock and the write of the document are one transaction. So all of
    /// this holds even if a process was paused, a network partitioned or a clock skewed in between.
    ///
    /// # Errors
    /// [`LockError::Lost`] 409 or [`LockError::NotFound`] 404: nothing was written.
    /// [`LockError::ChangedMeanwhile`] 409: another program has changed a part that would be rewritten as a
    /// whole; nothing was written. [`LockError::UnclearChange`] 409: it is not certain which elements of an array are
    /// which; nothing was written. [`LockError::Rejected`] 422: a unique index or a validation rule of the
    /// collection forbids the document, its `_id` has changed, or it would be larger than 16 MiB.
    /// [`LockError::Document`] 500 if the document has no BSON form, if a name would stand twice in it, or if `T` would
    /// read it back as something else; nothing was written. [`LockError::TooSlow`] 500 if it took too long to compare the documents; nothing was written.
    /// [`LockError::Store`] or [`LockError::OutcomeUnknown`] 503: it is unknown whether the document was written;
    /// saving this value again is safe.
    ///
    /// # Cancel safety
    /// If the future is dropped, the document may or may not be written.
    pub async fn save(&mut self) -> Result<()> {
        let (saves, until) = (&self.locks.manager.core.saves, self.locks.begin());
        let saved =
            saves.save(&self.own.held, &self.original, &self.document, self.onto(), until).await;
        self.written(saved.map(Changes::into_original), until).await
    }

    /// As [`save`](Self::save), but writes the whole document: fields that `T` does not contain, or that
    /// others have added since, are removed.
    ///
    /// # Errors
    /// As `save`. It is also as cancel safe.
    pub async fn replace(&mut self) -> Result<()> {
        let (saves, until) = (&self.locks.manager.core.saves, self.locks.begin());
        let replaced =
            saves.replace(&self.own.held, &self.original, &self.document, self.onto(), until).await;
        self.written(replaced, until).await
    }

    fn onto(&self) -> Option<Version> {
        *self.onto.lock()
    }

    async fn written(&mut self, saved: Result<Original>, until: Instant) -> Result<()> {
        match saved {
            Ok(saved) => {
                let now = Some(saved.version());
                self.locks.shows(&self.own.lock.key, now);
                let onto = self.onto().and(now);
                *self.onto.lock() = onto;
                self.original = saved;
                return Ok(());
            }
            Err(LockError::Lost { .. }) => self.locks.forget(self.own.held.token),
            Err(LockError::StaleCopy { .. } | LockError::ChangedMeanwhile { .. }) => {
                self.locks.shows(&self.own.lock.key, None);
            }
            // A lock on a missing document is of no use.
            Err(LockError::NotFound { .. }) => {
                self.locks.release(&self.own, until).await?;
            }
            Err(ref error) if error.is_outage() => {
                self.locks.shows(&self.own.lock.key, None);
                self.original.doubt();
            }
            Err(_) => {}
        }
        saved.map(drop)
    }

    /// Deletes the document if the lock is still held, then [releases](Self::release) the lock. The next
    /// waiter finds no document.
    ///
    /// # Errors
    /// As [`save`](Self::save); the session then keeps the lock, so its next request can try again. A
    /// failed release is no error: the release goes on in the background.
    ///
    /// # Cancel safety
    /// If the future is dropped, the document may or may not be deleted.
    pub async fn delete(self) -> Result<()> {
        let (saves, until) = (&self.locks.manager.core.saves, self.locks.begin());
        let deleted = saves.delete(&self.own.held, self.onto(), until).await;
        match &deleted {
            Ok(()) | Err(LockError::NotFound { .. }) => {
                self.locks.shows(&self.own.lock.key, None);
                self.locks.let_go(&self.own, "deleted").await;
            }
            Err(LockError::Lost { .. }) => self.locks.forget(self.own.held.token),
            Err(_) => {}
        }
        deleted
    }

    /// [`save`](Self::save), then [`release`](Self::release).
    ///
    /// # Errors
    /// The errors of `save`; the session then keeps the lock, so its next request can try again. A failed
    /// release of a saved document is no error: the release goes on in the background.
    pub async fn save_and_release(mut self) -> Result<()> {
        self.save().await?;
        self.locks.let_go(&self.own, "saved").await;
        Ok(())
    }
}

impl<T: Lockable, How> Guarded<T, How> {
    /// Gives the lock back. It is no error if the lock is already gone, or if the reply to an earlier attempt
    /// was lost: then the answer is [`AlreadyGone`](Released::AlreadyGone). In that case a query of your own
    /// that ran before the release may have overwritten the work of the next holder. Use guarded writes instead.
    ///
    /// # Errors
    /// [`LockError::Store`] 503; the lock then ends with its session, or expires.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock is still released.
    pub async fn release(self) -> Result<Released> {
        let released = self.locks.release(&self.own, self.locks.begin()).await?;
        self.locks.has_released(&self.own.held, released);
        Ok(released)
    }

    /// True if this request has taken the lock, false if the session held it before. A handler that needed the lock
    /// for a moment should release only fresh locks, and so leave the lock of an open form alone.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.own.is_fresh()
    }

    /// The token of this acquisition, as the client gets it in `Lock-Token`.
    #[must_use]
    pub fn token(&self) -> LockToken {
        self.own.held.token
    }

    /// The lock, for guarded writes of your own:
    /// [`MongoStore::transaction`](crate::MongoStore::transaction) and
    /// [`update`](crate::MongoStore::update).
    #[cfg(feature = "_mongo")]
    #[must_use]
    pub fn held(&self) -> crate::store::HeldLock {
        let version = self.locks.shows(&self.own.lock.key, None);
        self.locks.manager.core.saves.held(self.own.held.clone(), version, self.onto.clone())
    }

    /// The version of the document as it was loaded or last saved by this value, as the client gets it in `ETag`.
    #[must_use]
    pub fn version(&self) -> Version {
        self.original.version()
    }

    /// Waits until this process learns that the lock is gone, at the latest when the lock expires; see
    /// [`LockManager::lost`](crate::LockManager::lost). For handlers that run long.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<T, How> {
        self.locks.manager.lost(&self.own.lock)
    }

    /// The lock as it was when the document was loaded.
    #[must_use]
    pub fn lock(&self) -> &Lock {
        &self.own.lock
    }

    /// Returns the document alone. The session keeps the lock.
    #[must_use]
    pub fn into_inner(self) -> T {
        self.document
    }

    pub(super) fn new(own: OwnLock, document: (T, Original), locks: Rc<RequestLocks>) -> Self {
        let (document, original) = document;
        locks.shows(&own.lock.key, Some(original.version()));
        let onto = SharedVersion::default();
        *onto.lock() = locks.names_version().then(|| original.version());
        Self { document, original, onto, own, locks, how: PhantomData }
    }
}

impl<T, How> Deref for Guarded<T, How> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.document
    }
}

impl<T, How: Exclusive> DerefMut for Guarded<T, How> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.document
    }
}

impl<T: fmt::Debug, How> fmt::Debug for Guarded<T, How> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarded")
            .field("document", &self.document)
            .field("lock", &self.own.lock)
            .finish_non_exhaustive()
    }
}

type Extracted<T, How> = Pin<Box<dyn Future<Output = Result<Guarded<T, How>>>>>;

impl<T: Lockable> FromRequest for LockedDoc<T> {
    type Error = LockError;
    type Future = Extracted<T, Acquire>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        Box::pin(acquire(req.clone(), Mode::Exclusive))
    }
}

impl<T: Lockable> FromRequest for SharedDoc<T> {
    type Error = LockError;
    type Future = Extracted<T, Share>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        Box::pin(acquire(req.clone(), Mode::Shared))
    }
}

async fn acquire<T: Lockable, How>(req: HttpRequest, mode: Mode) -> Result<Guarded<T, How>> {
    let locks = RequestLocks::of(&req)?;
    let key = locks.key_in_path::<T>(&req)?;
    locks.may_lock(slice::from_ref(&key)).await?;
    let wait = Wait::for_at_most(locks.settings.wait_for_documents);
    let offered = locks.headers.tokens()?;
    open(&locks, &key, Terms { mode, offered, ..Terms::exclusive(wait) }).await
}

/// Locks and loads a document that this person may lock.
pub(super) async fn open<T: Lockable, How>(
    locks: &Rc<RequestLocks>,
    key: &LockKey,
    how: Terms<'_>,
) -> Result<Guarded<T, How>> {
    let load = async |own: &OwnLock, until| {
        if own.has_waited {
            locks.may_lock(slice::from_ref(key)).await?;
        }
        decode(key, locks.load(own, until).await?)
    };
    let how = Terms { document: Document::IsLoaded, ..how };
    let (own, document) = locks.acquire(key, how, load).await?;
    Ok(Guarded::new(own, document, Rc::clone(locks)))
}

impl<T: Lockable> FromRequest for HeldDoc<T> {
    type Error = LockError;
    type Future = Extracted<T, Confirm>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        let req = req.clone();
        Box::pin(async move {
            let locks = RequestLocks::of(&req)?;
            let key = locks.key_in_path::<T>(&req)?;
            held(&locks, &key).await
        })
    }
}

/// Confirms the lock of a document that this person may lock, and loads the document.
pub(super) async fn held<T: Lockable>(
    locks: &Rc<RequestLocks>,
    key: &LockKey,
) -> Result<HeldDoc<T>> {
    locks.may_lock(slice::from_ref(key)).await?;
    let (offered, until) = (locks.headers.tokens()?, locks.begin());
    let how = Terms { offered, document: Document::IsLoaded, ..Terms::exclusive(Wait::no()) };
    let own = locks.confirm(key, how, until).await?;
    let loaded = locks.load(&own, until).await.and_then(|it| decode(key, it));
    if let Err(LockError::NotFound { .. }) = loaded {
        locks.release(&own, until).await?;
    }
    Ok(Guarded::new(own, loaded?, Rc::clone(locks)))
}
