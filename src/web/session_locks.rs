//! All locks of the session.

use std::{
    collections::BTreeSet,
    future::{Ready, ready},
    rc::Rc,
    slice,
};

use actix_web::{FromRequest, HttpRequest, dev::Payload};

use crate::{
    clock,
    error::{LockError, Result},
    key::{LockKey, Lockable},
    lock::{Lock, Mode},
    manager::{LockManager, Wait},
    store::Released,
    version::Version,
    web::{
        current_request::log_fault,
        locked_doc::{HeldDoc, LockedDoc, held, open},
        problem::Problem,
        refused::Refused,
        request::{Elsewhere, OwnLock, RequestLocks, Terms},
    },
};

/// The locks of this session, and operations on them. The extractor itself takes no lock.
///
/// ```
/// # use actix_doclock::{LockError, SessionLocks};
/// # use actix_web::{HttpResponse, Responder};
/// async fn my_desk(locks: SessionLocks) -> Result<impl Responder, LockError> {
///     let open = locks.list().await?.len();
///     Ok(format!("you have {open} documents open"))
/// }
///
/// async fn close_all(locks: SessionLocks) -> Result<impl Responder, LockError> {
///     locks.release_all().await?;
///     Ok(HttpResponse::NoContent())
/// }
/// ```
#[derive(Debug)]
pub struct SessionLocks {
    pub(super) locks: Rc<RequestLocks>,
    request: HttpRequest,
}

impl SessionLocks {
    /// Names the document `id` of the type `T`, in the collection that this request means
    /// ([`collection_names`](crate::web::Locking::collection_names)).
    ///
    /// # Errors
    /// [`LockError::NotFound`] if the request means none; [`LockError::InvalidKey`].
    pub fn key_of<T: Lockable>(&self, id: T::Id) -> Result<LockKey> {
        self.locks.key_of::<T>(&self.request, id)
    }

    /// The live locks of this session.
    ///
    /// # Errors
    /// [`LockError::Store`].
    pub async fn list(&self) -> Result<Vec<Lock>> {
        self.locks.list(self.locks.begin()).await
    }

    /// Takes the lock on the document `id`, or confirms that the session holds it. Does not check whether
    /// the document exists, and ignores a `Lock-Token` of the client.
    ///
    /// # Errors
    /// The errors of [`LockedDoc`](crate::LockedDoc); [`LockError::NotFound`] only from the access policy.
    ///
    /// # Cancel safety
    /// If the future is dropped, a fresh grant is given back.
    pub async fn lock<T: Lockable>(&self, id: T::Id) -> Result<Lock> {
        let key = self.key_of::<T>(id)?;
        self.locks.may_lock(slice::from_ref(&key)).await?;
        Ok(self.take(&key, Terms::exclusive(Wait::no())).await?.lock)
    }

    /// Takes or confirms the lock, whether or not there is such a document, unless the request names its version.
    async fn take(&self, key: &LockKey, how: Terms<'_>) -> Result<OwnLock> {
        let is_named = self.locks.names_version();
        let work = async |own: &OwnLock, until| {
            if is_named { self.locks.load(own, until).await.map(drop) } else { Ok(()) }
        };
        let (own, ()) = self.locks.acquire(key, how, work).await?;
        Ok(own)
    }

    /// Inserts a new document, whose lock this session holds from the first moment: nobody sees the
    /// document unlocked. `id` is its `_id`.
    ///
    /// The lock is taken first, so somebody who guesses the id waits, or is refused. The access policy is asked only
    /// if there is such a document, or if its lock is held: its "no" is [`LockError::NotFound`], and nothing is locked.
    /// A client that chooses the id learns whether it is in use: where that is a secret, let the server choose it.
    ///
    /// # Errors
    /// [`LockError::Rejected`] 422 if there is a document with this id already, if the new document has another
    /// `_id`, or if a unique index or a validation rule forbids it. Otherwise the errors of
    /// [`HeldDoc::save`](crate::HeldDoc) and of [`LockedDoc`](crate::LockedDoc). After a
    /// [`LockError::Store`] 503 the document may have been inserted, and no lock remains: create it again under the
    /// same id; it is then inserted, or refused.
    ///
    /// # Cancel safety
    /// If the future is dropped, the document may have been inserted. A lock remains only if the request succeeds.
    pub async fn create<T: Lockable>(&self, id: T::Id, document: T) -> Result<LockedDoc<T>> {
        let key = self.key_of::<T>(id)?;
        self.locks.manager.core.collections.ready_to_create(&key, self.locks.begin()).await?;
        // Not everybody may lock a document that is there already, even for a moment.
        if self.locks.has_policy()
            && self.locks.manager.core.reads.exists(&key, self.locks.begin()).await?
        {
            self.locks.may_lock(slice::from_ref(&key)).await?;
        }
        let taken_before = self.locks.taken();
        let attempt = self.take(&key, Terms::exclusive(Wait::no())).await;
        if let Err(LockError::Held(_)) = &attempt {
            // Not everybody may learn the name of its creator either.
            self.locks.may_lock(slice::from_ref(&key)).await?;
        }
        let (own, until) = (attempt?, self.locks.begin());
        match self.locks.manager.core.saves.create(&own.held, &document, until).await {
            Ok(original) => Ok(LockedDoc::new(own, (document, original), self.locks.clone())),
            Err(error) => {
                self.locks.retract_unless(&taken_before, own.held.token);
                Err(error)
            }
        }
    }

    /// Takes or confirms the exclusive locks on all of these documents, or takes none. Duplicate keys
    /// count once. Does not check whether the documents exist, and ignores a `Lock-Token` of the client.
    ///
    /// The locks are taken in the order of their keys, so two such calls cannot wait for each other;
    /// `wait` is for all of them together. If one lock is refused, the freshly taken locks are given back,
    /// except those that another request of the session was told of meanwhile. See [`Job::acquire_all`](crate::Job::acquire_all) for the duties of the caller.
    ///
    /// # Errors
    /// The errors of [`LockedDoc`](crate::LockedDoc); [`LockError::NotFound`] only from the access policy.
    ///
    /// # Cancel safety
    /// If the future is dropped, the freshly taken locks are given back if the answer of the request is
    /// an error. Otherwise they belong to the session.
    pub async fn lock_all(
        &self,
        keys: impl IntoIterator<Item = LockKey>,
        wait: Wait,
    ) -> Result<Vec<Lock>> {
        let take = async |key: LockKey, wait| self.take(&key, Terms::exclusive(wait)).await;
        let all = self.all_or_none(keys.into_iter().collect(), wait, take, |own| own).await?;
        Ok(all.into_iter().map(|own| own.lock).collect())
    }

    /// Takes or confirms the lock on the document `id`, and loads the document: [`LockedDoc`](crate::LockedDoc) for
    /// an id from anywhere, such as the body of the request. Ignores a `Lock-Token` of the client.
    ///
    /// # Errors
    /// The errors of [`LockedDoc`](crate::LockedDoc).
    ///
    /// # Cancel safety
    /// If the future is dropped, a fresh grant is given back.
    pub async fn open<T: Lockable>(&self, id: T::Id) -> Result<LockedDoc<T>> {
        let key = self.key_of::<T>(id)?;
        self.locks.may_lock(slice::from_ref(&key)).await?;
        open(&self.locks, &key, Terms::exclusive(Wait::no())).await
    }

    /// Confirms that the session holds the lock on the document `id`, and loads the document: [`HeldDoc`](crate::HeldDoc)
    /// for an id from anywhere.
    ///
    /// # Errors
    /// The errors of `HeldDoc`.
    pub async fn held<T: Lockable>(&self, id: T::Id) -> Result<HeldDoc<T>> {
        held(&self.locks, &self.key_of::<T>(id)?).await
    }

    /// As [`open`](Self::open), but takes the lock from its holder: from another tab of the session, or from another
    /// session if the [policy](crate::LockManagerBuilder::take_over_policy) allows it. For a button that a refusal offers.
    ///
    /// # Errors
    /// The errors of [`LockedDoc`](crate::LockedDoc), and [`LockError::TakeOverRefused`] 403.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock is given back, but not to its former holder.
    pub async fn take_over<T: Lockable>(&self, id: T::Id) -> Result<LockedDoc<T>> {
        let key = self.key_of::<T>(id)?;
        self.locks.may_lock(slice::from_ref(&key)).await?;
        let how = Terms { elsewhere: Elsewhere::TakeOver, ..Terms::exclusive(Wait::no()) };
        open(&self.locks, &key, how).await
    }

    /// [`open`](Self::open) for all of these documents, or for none, as [`lock_all`](Self::lock_all) does it. For
    /// documents of several types, lock all of them first, and then open each.
    ///
    /// # Errors
    /// The errors of [`LockedDoc`](crate::LockedDoc).
    ///
    /// # Cancel safety
    /// As `lock_all`.
    pub async fn open_all<T: Lockable>(
        &self,
        ids: impl IntoIterator<Item = T::Id>,
        wait: Wait,
    ) -> Result<Vec<LockedDoc<T>>> {
        let keys: Result<_, _> = ids.into_iter().map(|id| self.key_of::<T>(id)).collect();
        let take = async |key: LockKey, wait| open(&self.locks, &key, Terms::exclusive(wait)).await;
        self.all_or_none(keys?, wait, take, |doc| &doc.own).await
    }

    /// Takes or confirms the exclusive locks on the free ones of these documents, for a bulk edit. A lock that the
    /// session has already is confirmed, whichever tab holds it. Each document has its own outcome, in the order of the
    /// keys: a refusal names the holder. Duplicate keys count once.
    ///
    /// # Errors
    /// If the access policy fails. Each outcome may be an error of [`LockedDoc`](crate::LockedDoc).
    ///
    /// # Cancel safety
    /// As [`lock_all`](Self::lock_all).
    pub async fn lock_each(
        &self,
        keys: impl IntoIterator<Item = LockKey>,
    ) -> Result<Vec<(LockKey, Result<Lock>)>> {
        let take = async |key: LockKey| Ok(self.take(&key, Terms::in_any_tab()).await?.lock);
        self.each(keys.into_iter().collect(), take).await
    }

    /// [`open`](Self::open) for the free ones of these documents, as [`lock_each`](Self::lock_each) does.
    ///
    /// # Errors
    /// As `lock_each`, and if an id is invalid.
    ///
    /// # Cancel safety
    /// As `lock_all`.
    pub async fn open_each<T: Lockable>(
        &self,
        ids: impl IntoIterator<Item = T::Id>,
    ) -> Result<Vec<(LockKey, Result<LockedDoc<T>>)>> {
        let keys: Result<_, _> = ids.into_iter().map(|id| self.key_of::<T>(id)).collect();
        self.each(keys?, async |key: LockKey| open(&self.locks, &key, Terms::in_any_tab()).await)
            .await
    }

    async fn all_or_none<X>(
        &self,
        keys: BTreeSet<LockKey>,
        wait: Wait,
        take: impl AsyncFn(LockKey, Wait) -> Result<X>,
        own: impl Fn(&X) -> &OwnLock,
    ) -> Result<Vec<X>> {
        let (began, taken_before) = (clock::now(), self.locks.taken());
        self.locks.check_one_version(keys.len())?;
        self.locks.may_lock(&keys.iter().cloned().collect::<Vec<_>>()).await?;
        let mut all = Vec::new();
        for key in keys {
            match take(key, wait.since(began)).await {
                Ok(held) => all.push(held),
                Err(e) => {
                    for own in all.iter().rev().map(own) {
                        self.locks.retract_unless(&taken_before, own.held.token);
                    }
                    return Err(e);
                }
            }
        }
        Ok(all)
    }

    async fn each<X>(
        &self,
        keys: BTreeSet<LockKey>,
        take: impl AsyncFn(LockKey) -> Result<X>,
    ) -> Result<Vec<(LockKey, Result<X>)>> {
        let keys: Vec<_> = keys.into_iter().collect();
        let _turn = self.locks.turn(&keys).await?;
        let refused = self.locks.may_lock_each(&keys).await?;
        let (mut all, mut allowed) = (Vec::new(), Vec::new());
        for (key, refused) in keys.into_iter().zip(refused) {
            match refused {
                Some(e) => all.push((key, Err(e))),
                None => allowed.push(key),
            }
        }
        all.extend(self.locks.each(allowed, Mode::Exclusive, take).await?);
        all.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(all)
    }

    /// Loads the current document, to show it to a person who may lock it: for the page with the form, and for the page
    /// that follows a refusal. Needs no lock, and takes none. Asks the
    /// [access policy](crate::web::LockingSession::access_policy), as the extractors do.
    ///
    /// # Errors
    /// [`LockError::NotFound`] 404 and [`LockError::LoginRequired`] 401, also from the access policy;
    /// [`LockError::Document`] 500, [`LockError::Store`] 503.
    pub async fn load<T: Lockable>(&self, id: T::Id) -> Result<T> {
        let key = self.key_of::<T>(id)?;
        self.locks.may_lock(slice::from_ref(&key)).await?;
        self.read(key).await
    }

    /// As [`load`](Self::load), but asks no policy: for documents that everybody may read, or where the handler has decided
    /// who may.
    ///
    /// # Errors
    /// [`LockError::NotFound`] 404, [`LockError::Document`] 500, [`LockError::Store`] 503.
    pub async fn load_without_policy<T: Lockable>(&self, id: T::Id) -> Result<T> {
        self.read(self.key_of::<T>(id)?).await
    }

    async fn read<T: Lockable>(&self, key: LockKey) -> Result<T> {
        let document = self.locks.manager.core.reads.load(&key, self.locks.begin()).await?;
        self.locks.shows(&key, Some(document.version()));
        document.decode().map_err(|source| LockError::Document { key, source })
    }

    /// The version of the document that this request has loaded, locked or saved, as the answer carries it in `ETag`: for a
    /// template. `None` if there are several such documents, or none.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        self.locks.versions.borrow().shown()
    }

    /// The values of this error for a template, for the person of this request. A fault of the server is logged, as with an
    /// answer that is made of the error.
    #[must_use]
    pub fn refused(&self, error: &LockError) -> Refused {
        log_fault(error);
        let (head, explain) = (self.request.head(), &self.locks.settings.explain);
        let own = |problem: &_| explain.as_ref().and_then(|explain| explain(head, problem));
        let why = |problem: &Problem| own(problem).unwrap_or_else(|| problem.for_people(head));
        Refused::new(error, |lock| self.locks.may_take_over(lock), why)
    }

    /// Releases the session's lock on this document, if it holds one.
    ///
    /// # Errors
    /// [`LockError::StaleToken`] 412 if another tab of the session holds it; [`LockError::Store`].
    pub async fn release<T: Lockable>(&self, id: T::Id) -> Result<Released> {
        self.locks.release_key(&self.key_of::<T>(id)?).await
    }

    /// Releases all locks of the session, and returns the keys of the released locks. The session goes
    /// on.
    ///
    /// # Errors
    /// [`LockError::Store`]; the remaining locks end with the session, or expire.
    pub async fn release_all(&self) -> Result<Vec<LockKey>> {
        let Some(aid) = self.locks.aid() else { return Ok(Vec::new()) };
        let released = self.locks.manager.release_all(&aid).await?;
        self.locks.forget_all();
        Ok(released)
    }

    /// The manager, for operations beyond this session.
    #[must_use]
    pub fn manager(&self) -> &LockManager {
        &self.locks.manager
    }
}

impl FromRequest for SessionLocks {
    type Error = LockError;
    type Future = Ready<Result<Self>>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(RequestLocks::of(req).map(|locks| Self { locks, request: req.clone() }))
    }
}
