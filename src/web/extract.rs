//! Documents as handler arguments.

use std::{
    any::type_name,
    fmt,
    future::Future,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    pin::Pin,
};

use actix_web::{FromRequest, HttpRequest, dev::Payload};

use crate::{
    error::LockError,
    key::{InvalidKey, LockKey, Lockable},
    lock::{Lock, Mode},
    store::StoredDocument,
    web::{
        path::path_param,
        problem::misconfigured,
        request::{Ask, Mine, RequestLocks},
    },
};

/// A document that this session locks with the request: acquired, or confirmed if the session holds
/// it already; then loaded.
///
/// The id is taken from the path parameter [`Lockable::PATH_PARAM`]. Use it where editing begins,
/// with `POST`: prefetching browsers and crawlers follow every `GET`.
///
/// - *Proves:* the session held the lock when the document was loaded.
/// - *Ends* with the session, by [`release`](Guarded::release), or when the session is silent for
///   the ttl. Dropping it does **not** release: the person goes on editing between requests.
/// - *If the answer is an error*, a lock that this request took is given back before it is sent.
///
/// # Errors
/// As an argument `LockedDoc<T>` the request is answered with the error. `Option<LockedDoc<T>>` and
/// `Result<LockedDoc<T>, LockError>` call the handler all the same, for a read-only page:
///
/// [`LockError::Held`] 423, [`LockError::StaleToken`] 412, [`LockError::NotFound`] 404,
/// [`LockError::InvalidKey`] and [`LockError::MalformedToken`] 400, [`LockError::SessionEnded`] 401, [`LockError::Store`] 503,
/// [`LockError::Document`] and [`LockError::Misconfigured`] 500.
///
/// If the client sends a `Lock-Token`, the lock is confirmed only, and it must be that acquisition. A
/// request for several documents sends the tokens of all of them, separated by commas.
pub type LockedDoc<T> = Guarded<T, Acquire>;

/// A document that this session must hold already: confirmed, never acquired; then loaded.
///
/// Use it where work is saved. Nothing is taken by it, so nothing needs to be given back.
///
/// - *Proves:* the session held the lock when the document was loaded. By the client's
///   `Lock-Token`, if it sends one, even the same acquisition: not one that another tab of the
///   session took later.
/// - What decides is [`save`](Guarded::save): it writes if the lock is live at that moment.
///
/// # Errors
/// Those of [`LockedDoc`], but [`LockError::Lost`] 409 instead of [`LockError::Held`].
pub type HeldDoc<T> = Guarded<T, Confirm>;

/// A document that others may read, but nobody edit, while this session reads it: a shared lock,
/// acquired or confirmed; then loaded.
///
/// For what takes several documents into account, or must not change under a calculation. Whoever only
/// wants to look needs no lock: [`SessionLocks::load`](crate::SessionLocks::load).
///
/// - *Proves:* no other session held an exclusive lock when the document was loaded. Other readers may
///   be there. If this session holds the exclusive lock, that is confirmed and stays.
/// - *Ends* as that of a [`LockedDoc`], for each reader by itself.
/// - A [`LockedDoc`] of the same session and document turns it into an exclusive lock, with a new
///   token, if nobody else reads it. Beside other readers that is refused with [`LockError::Held`],
///   at once: two readers that waited for each other would do so for good.
///
/// # Errors
/// Those of [`LockedDoc`].
pub type SharedDoc<T> = Guarded<T, Share>;

/// How a [`Guarded`] document came by its lock: taken or confirmed. See [`LockedDoc`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Acquire;

/// How a [`Guarded`] document came by its lock: held before. See [`HeldDoc`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Confirm;

/// How a [`Guarded`] document came by its lock: shared with others. See [`SharedDoc`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Share;

/// The locks under which a document may be written.
#[doc(hidden)]
pub trait Exclusive {}

impl Exclusive for Acquire {}
impl Exclusive for Confirm {}

/// A loaded document whose lock this session holds. Dereferences to the document.
///
/// Used under its names [`LockedDoc`], [`HeldDoc`] and [`SharedDoc`].
#[must_use = "the document is locked and loaded for a reason"]
pub struct Guarded<T, How> {
    document: T,
    /// As it was loaded or saved last; `None` if it is not to be written.
    before: Option<StoredDocument>,
    mine: Mine,
    locks: RequestLocks,
    how: PhantomData<How>,
}

impl<T: Lockable, How: Exclusive> Guarded<T, How> {
    /// Writes what has changed since the document was loaded, if this acquisition of its lock is live at
    /// that moment. Keeps the lock, with a new lease.
    ///
    /// Field by field, also in documents within the document; an array is one value. So fields that `T`
    /// does not name stay as they are, and so do those that other programs have changed in the meantime.
    /// If nothing has changed, only the lease is renewed. To write the whole document, see
    /// [`replace`](Self::replace).
    ///
    /// On a replica set, whatever was paused, partitioned or skewed in between: checking the lock
    /// and writing the document is one transaction.
    ///
    /// # Errors
    /// [`LockError::Lost`] 409 or [`LockError::NotFound`] 404: nothing was written.
    /// [`LockError::Rejected`] 422: a unique index or a validation rule of the collection forbids it, its
    /// `_id` has changed, or it would be larger than 16 MiB. [`LockError::Document`] 500 if the document
    /// has no BSON form. [`LockError::Misconfigured`] 500 if `T` reads its id from `_id` and writes it
    /// elsewhere. [`LockError::Store`] 503: it is not known whether it was written; saving again is safe.
    ///
    /// # Cancel safety
    /// If the future is dropped, the document may or may not be written.
    pub async fn save(&mut self) -> Result<(), LockError> {
        self.write(self.before.clone()).await
    }

    /// As [`save`](Self::save), but writes the whole document: fields that `T` does not name, or that
    /// others have added since, are gone.
    ///
    /// # Errors
    /// As `save`, and as cancel safe.
    pub async fn replace(&mut self) -> Result<(), LockError> {
        self.write(None).await
    }

    async fn write(&mut self, before: Option<StoredDocument>) -> Result<(), LockError> {
        let (Mine { lock, token, .. }, until) = (&self.mine, self.locks.begin());
        let manager = self.locks.manager();
        let saved = manager.save(&lock.key, &lock.aid, *token, before, &self.document, until).await;
        match saved {
            Ok(saved) => {
                self.before = Some(saved);
                return Ok(());
            }
            Err(LockError::Lost { .. }) => self.locks.forget(*token),
            // Nobody needs a lock on what is not there.
            Err(LockError::NotFound { .. }) => self.locks.release(&self.mine, until).await?,
            Err(_) => {}
        }
        saved.map(drop)
    }

    /// [`save`](Self::save), then [`release`](Self::release).
    ///
    /// # Errors
    /// Those of `save`; the lock is kept, so that it can be tried again. That a saved document could
    /// not be released at once is none: that goes on in the background.
    pub async fn save_and_release(mut self) -> Result<(), LockError> {
        self.save().await?;
        if let Err(e) = self.locks.release(&self.mine, self.locks.begin()).await {
            let held = self.mine.acquisition();
            log::warn!(target: "actix_doclock::web", "{:?} is saved, not yet released: {e}", held.key);
            self.locks.forget(held.token);
            self.locks.manager().release_in_background(held);
        }
        Ok(())
    }
}

impl<T: Lockable, How> Guarded<T, How> {
    /// Gives the lock back. That it had gone already is no error.
    ///
    /// # Errors
    /// [`LockError::Store`] 503; the lock then goes with its session or its ttl.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock is released all the same.
    pub async fn release(self) -> Result<(), LockError> {
        self.locks.release(&self.mine, self.locks.begin()).await
    }

    /// Waits until this process learns that the lock is gone, at the latest when it runs out; see
    /// [`LockManager::lost`](crate::LockManager::lost). For handlers that take long.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<T, How> {
        self.locks.manager().lost(&self.mine.lock)
    }

    /// The lock as it was when the document was loaded.
    #[must_use]
    pub fn lock(&self) -> &Lock {
        &self.mine.lock
    }

    /// The document alone. The lock stays with the session.
    #[must_use]
    pub fn into_inner(self) -> T {
        self.document
    }

    fn new(mine: Mine, document: T, locks: RequestLocks) -> Self {
        Self { document, before: None, mine, locks, how: PhantomData }
    }

    /// The same for a document that may be written.
    fn editable(self) -> Result<Self, LockError> {
        let encoded = self.locks.manager().encode(&self.document);
        let unwritable = |source| LockError::Document { key: self.mine.lock.key.clone(), source };
        Ok(Self { before: Some(encoded.map_err(unwritable)?), ..self })
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
            .field("lock", &self.mine.lock)
            .finish_non_exhaustive()
    }
}

type Extracted<T, How> = Pin<Box<dyn Future<Output = Result<Guarded<T, How>, LockError>>>>;

impl<T: Lockable> FromRequest for LockedDoc<T> {
    type Error = LockError;
    type Future = Extracted<T, Acquire>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        let acquired = acquire::<T, Acquire>(req.clone(), Mode::Exclusive);
        Box::pin(async { acquired.await?.editable() })
    }
}

impl<T: Lockable> FromRequest for SharedDoc<T> {
    type Error = LockError;
    type Future = Extracted<T, Share>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        Box::pin(acquire(req.clone(), Mode::Shared))
    }
}

async fn acquire<T: Lockable, How>(
    req: HttpRequest,
    mode: Mode,
) -> Result<Guarded<T, How>, LockError> {
    let locks = RequestLocks::of(&req)?;
    let key = key_of::<T>(&req, &locks)?;
    let load = |_, until| locks.manager().load::<T>(&key, until);
    let how = Ask { mode, offered: locks.offered()?, wait: locks.wait(), take_over: false };
    let (mine, document) = locks.acquire(&key, how, load).await?;
    Ok(Guarded::new(mine, document, locks))
}

impl<T: Lockable> FromRequest for HeldDoc<T> {
    type Error = LockError;
    type Future = Extracted<T, Confirm>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        let req = req.clone();
        Box::pin(async move {
            let locks = RequestLocks::of(&req)?;
            let key = key_of::<T>(&req, &locks)?;
            let until = locks.begin();
            let offered = locks.offered()?;
            let confirm = locks.confirm(&key, Mode::Exclusive, offered, until);
            let load = locks.manager().load::<T>(&key, until);
            // At the same time if the client has been told of this very acquisition: then nobody else
            // can have written in between. Else one after the other, or a lock that another tab of
            // the session takes in between would seem to cover an older document.
            let (mine, document) = if offered.is_empty() {
                (confirm.await?, load.await)
            } else {
                let (confirmed, document) = tokio::join!(confirm, load);
                (confirmed?, document)
            };
            match document {
                Ok(document) => Self::new(mine, document, locks).editable(),
                Err(e) => {
                    if let LockError::NotFound { .. } = e {
                        locks.release(&mine, until).await?;
                    }
                    Err(e)
                }
            }
        })
    }
}

fn key_of<T: Lockable>(req: &HttpRequest, locks: &RequestLocks) -> Result<LockKey, LockError> {
    if !locks.manager().is_registered(T::COLLECTION) {
        return Err(misconfigured(format!(
            "the collection `{}` is not registered: call `locks.register::<{}>().await?` when the \
             server starts",
            T::COLLECTION,
            type_name::<T>(),
        )));
    }
    let param = path_param(req, T::PATH_PARAM).ok_or_else(|| {
        misconfigured(format!(
            "the route `{}` has no parameter `{{{}}}`, from which the id of `{}` is taken: name it \
             so, or set `Lockable::PATH_PARAM`",
            req.match_pattern().unwrap_or_default(),
            T::PATH_PARAM,
            T::COLLECTION,
        ))
    })?;
    let not_an_id = |_| InvalidKey::NotOfType { collection: T::COLLECTION };
    Ok(LockKey::of::<T>(param.parse().map_err(not_an_id)?)?)
}
