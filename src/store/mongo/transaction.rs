//! Guarded writes in the application's own words: an update by operators, and transactions.

use std::{
    any::type_name,
    slice,
    time::{Duration, Instant},
};

use mongodb::{
    ClientSession,
    bson::doc,
    error::{Error, TRANSIENT_TRANSACTION_ERROR},
    options::{ReturnDocument, UpdateModifications},
};
use tokio::time::{sleep, timeout, timeout_at};

use crate::{
    error::{LockError, StoreError, StoreErrorKind},
    key::{LockKey, Lockable},
    lock::Mode,
    store::{
        HeldLock, Removal, Store,
        mongo::{
            MongoStore, codec, lanes, pipeline,
            save::{FIRST_PAUSE, begin, commit, save_error, too_late},
            write::Write,
        },
        with_deadline,
    },
};

const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How long a server that answers may take, once a transaction is late.
const PROBE: Duration = Duration::from_millis(250);

/// Why [`MongoStore::transaction`] has written nothing, or does not know it.
#[derive(Debug, thiserror::Error)]
pub enum TransactionError<E = Error> {
    /// A lock is lost, the database does not answer, or the outcome is not known.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The error of the application's own part. Nothing was written.
    #[error("the application's part of the transaction has failed: {0}")]
    Work(E),
}

impl From<TransactionError> for LockError {
    fn from(error: TransactionError) -> Self {
        match error {
            TransactionError::Lock(error) => error,
            TransactionError::Work(error) => {
                Self::Store(save_error("the application's part of a transaction", error))
            }
        }
    }
}

/// The error of an application's part of a [transaction](MongoStore::transaction).
///
/// ```
/// use actix_doclock::store::WorkError;
///
/// #[derive(Debug, thiserror::Error)]
/// enum BookingError {
///     #[error("the flight is full")]
///     Full,
///     #[error(transparent)]
///     Database(#[from] mongodb::error::Error),
/// }
///
/// impl WorkError for BookingError {
///     fn of_command(&self) -> Option<&mongodb::error::Error> {
///         match self {
///             Self::Database(error) => Some(error),
///             Self::Full => None,
///         }
///     }
/// }
/// ```
pub trait WorkError {
    /// The error of a command of the transaction, if that is the cause. The transaction is repeated if the server
    /// says that this may help.
    fn of_command(&self) -> Option<&Error>;
}

impl WorkError for Error {
    fn of_command(&self) -> Option<&Error> {
        Some(self)
    }
}

/// The outcome of one attempt.
enum Attempt<R, E> {
    Worked(R),
    /// The application's part has failed, so nothing was written.
    WorkFailed(E),
    /// Another step has failed, so nothing was written.
    Failed(Error),
    /// The application's part was not done in time, so nothing was written.
    TooSlow,
    Refused(LockError),
}

impl MongoStore {
    /// Runs `work` in a transaction that commits only if all of these exclusive locks are still held, and
    /// renews them. All or nothing: if a lock was lost, nothing of `work` is written.
    ///
    /// `work` may be called several times, as the server demands after a conflict or a failover, so it
    /// must have no effect outside the transaction. It passes the session to each of its commands, which
    /// must use the [client of this store](Self::database). Its own error aborts the transaction: an error of
    /// the driver, or a type of yours that implements [`WorkError`]. All of it
    /// must be done within the manager's [deadline](crate::LockManagerBuilder::deadline), and well within a
    /// third of the ttl: a renewal of a lock in the meantime makes the transaction start again. `work` must
    /// return each error of a command, because the server has then aborted the transaction, and must not
    /// commit. In a task that is spawned, write `async move`, and let `work` own what it uses: the compiler
    /// demands that. If the compiler does not know the error, name it: `async |session| -> Result<_, MyError> { … }`.
    ///
    /// ```no_run
    /// # use actix_doclock::{LockError, LockGuard, MongoStore};
    /// # use mongodb::bson::{Document, doc, oid::ObjectId};
    /// async fn book(store: &MongoStore, order: ObjectId, lock: &LockGuard) -> Result<(), LockError> {
    ///     let orders = store.database().collection::<Document>("order");
    ///     let entries = store.database().collection("entry");
    ///     store
    ///         .transaction(&[lock.held()], async |session| {
    ///             let booked = doc! { "$set": { "is_booked": true } };
    ///             orders.update_one(doc! { "_id": order }, booked).session(&mut *session).await?;
    ///             entries.insert_one(doc! { "order": order }).session(session).await?;
    ///             Ok(())
    ///         })
    ///         .await?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// [`TransactionError::Lock`] with [`LockError::Lost`] if a lock is not live, with
    /// [`LockError::Misconfigured`] if there is no lock, a lock is shared, or the server is standalone,
    /// with [`LockError::TooSlow`] if the server answers, but `work` takes too long, and with
    /// [`LockError::Store`]: in all these cases nothing was written. With
    /// [`LockError::OutcomeUnknown`], all may be written, or nothing: look before you repeat it.
    /// [`TransactionError::Work`] is the error of `work`.
    ///
    /// # Cancel safety
    /// If the future is dropped before the commit, nothing is written. The commit itself goes on.
    pub async fn transaction<R, E: WorkError>(
        &self,
        held: &[HeldLock],
        mut work: impl AsyncFnMut(&mut ClientSession) -> Result<R, E>,
    ) -> Result<R, TransactionError<E>> {
        let soonest = guarding(held)?;
        let until = Instant::now() + soonest.deadline;
        if !in_time(until, self.has_transactions()).await? {
            return Err(misconfigured(
                "transactions need a replica set or a sharded cluster; this server is standalone",
            )
            .into());
        }
        let mut doubt = InDoubt(held);
        let mut pause = FIRST_PAUSE;
        let done = with_deadline(until, async {
            loop {
                let began = Instant::now();
                let attempt = self.attempt(held, soonest, until, &mut work).await;
                let (error, of_command) = match attempt {
                    Attempt::Worked(value) => return Ok(value),
                    Attempt::Refused(error) => return Err(error.into()),
                    Attempt::TooSlow => return Err(self.too_slow(soonest).await.into()),
                    Attempt::WorkFailed(error) => {
                        let of_command = error.of_command().cloned();
                        (TransactionError::Work(error), of_command)
                    }
                    Attempt::Failed(error) => {
                        let source = save_error("running a transaction", error.clone());
                        (LockError::Store(source).into(), Some(error))
                    }
                };
                let is_transient =
                    of_command.is_some_and(|it| it.contains_label(TRANSIENT_TRANSACTION_ERROR));
                if !is_transient {
                    return Err(error);
                }
                if Instant::now() + pause >= until {
                    // Each attempt takes so long that a renewal of the lock comes in between.
                    let is_slow = began.elapsed() >= self.renewal_interval(soonest)?;
                    let error = if is_slow { self.too_slow(soonest).await.into() } else { error };
                    return Err(error);
                }
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        })
        .await;
        if done.is_ok() {
            doubt.0 = &[];
        }
        done
    }

    /// Makes sure, in a transaction that the application runs itself, that all of these exclusive locks
    /// are still held when the transaction commits, and renews them.
    ///
    /// Call it last before the commit: until then the records of these locks are blocked. The session must be
    /// in a transaction, with the read concern `snapshot` and the write concern `majority`: outside a
    /// transaction this only renews the locks.
    ///
    /// # Errors
    /// As [`transaction`](Self::transaction). Abort the transaction after any error. After a
    /// [`TransactionError::Work`] with the label `TransientTransactionError`, repeat it as a whole.
    ///
    /// # Cancel safety
    /// If the future is dropped, abort the transaction.
    pub async fn confirm_in(
        &self,
        session: &mut ClientSession,
        held: &[HeldLock],
    ) -> Result<(), TransactionError> {
        guarding(held)?;
        for one in held {
            // 1 → live, and changed by this transaction; 0 → expired, released, broken or taken over. A
            // conflict → somebody else changes the record at this moment; transient.
            let at = self.prepared(one.acquisition.key.collection()).map_err(LockError::Store)?;
            let touched = at.locks.update_one(at.live(&one.acquisition), at.touch());
            let touched = touched.session(&mut *session).await;
            if touched.map_err(TransactionError::Work)?.matched_count == 0 {
                return Err(lost(one).into());
            }
        }
        Ok(())
    }

    /// Updates the locked document by operators or by a pipeline, if the exclusive lock is still held, and
    /// renews the lock. Returns the document after the update.
    ///
    /// ```no_run
    /// # use actix_doclock::{LockError, LockGuard, Lockable, MongoStore};
    /// # use mongodb::bson::{doc, oid::ObjectId};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Item { #[serde(rename = "_id")] id: ObjectId, tags: Vec<String> }
    /// # impl Lockable for Item { type Id = ObjectId; const COLLECTION: &'static str = "item"; }
    /// async fn tag(store: &MongoStore, lock: &LockGuard) -> Result<String, LockError> {
    ///     let push = doc! { "$push": { "tags": "urgent" } };
    ///     let now: Item = store.update(&lock.held(), push).await?;
    ///     Ok(now.tags.join(", "))
    /// }
    /// ```
    ///
    /// On a standalone server the lock is checked immediately before the update, as for a save, and an update
    /// is not undone.
    ///
    /// # Errors
    /// [`LockError::Lost`] or [`LockError::NotFound`]: nothing was written; a lock on a missing document is
    /// released. [`LockError::Rejected`] if the database does not accept the update.
    /// [`LockError::Document`] if the updated document is no `T`; nothing was written, except on a standalone
    /// server. [`LockError::Misconfigured`] if the lock is shared, or not on a document of type `T`. [`LockError::Store`] if the database does not
    /// answer; nothing was written. [`LockError::OutcomeUnknown`] if it is unknown whether the document was
    /// updated: a repetition may apply the update twice.
    ///
    /// # Cancel safety
    /// If the future is dropped, the document may or may not be updated.
    pub async fn update<T: Lockable>(
        &self,
        held: &HeldLock,
        update: impl Into<UpdateModifications>,
    ) -> Result<T, LockError> {
        let (key, update) = (&held.acquisition.key, update.into());
        if held.declared != Some(T::COLLECTION) {
            let name = type_name::<T>();
            return Err(misconfigured(format!("{key:?} is locked, and `{name}` is not its type")));
        }
        let at = self.prepared(key.collection())?;
        let mut unfit = None;
        let mut change = async |session: Option<&mut ClientSession>| {
            let this = at.documents.find_one_and_update(pipeline::by_id(key.id()), update.clone());
            let changed = this.return_document(ReturnDocument::After);
            let changed = match session {
                Some(session) => changed.session(session).await?,
                None => changed.max_time(lanes::read_limit()).await?,
            };
            let fits = changed.map(|document| codec::decode::<T>(document.as_bytes())).transpose();
            fits.map_err(|source| {
                unfit = Some(source);
                Error::custom("the updated document is not of the type")
            })
        };
        let until = Instant::now() + guarding(slice::from_ref(held))?.deadline;
        let mut doubt = InDoubt(slice::from_ref(held));
        let updated = if in_time(until, self.has_transactions()).await? {
            let within = async |session: &mut ClientSession| change(Some(session)).await;
            self.transaction(slice::from_ref(held), within).await
        } else {
            with_deadline(until, async {
                let touch = Write::Update(at.touch());
                match at.write_one(key.id(), at.live(&held.acquisition), &touch).await {
                    Ok(0) => Err(lost(held).into()),
                    Ok(_) if Instant::now() >= until => Err(TransactionError::Work(too_late())),
                    Ok(_) => change(None).await.map_err(|error| {
                        let source = save_error(format!("updating {key:?}"), error.clone());
                        match source.kind() {
                            StoreErrorKind::Unavailable => LockError::OutcomeUnknown(source).into(),
                            _ => TransactionError::Work(error),
                        }
                    }),
                    Err(error) => Err(TransactionError::Work(error)),
                }
            })
            .await
        };
        if updated.is_ok() {
            doubt.0 = &[];
        }
        if let Some(source) = unfit {
            return Err(LockError::Document { key: key.clone(), source });
        }
        let Some(updated) = updated.map_err(|error| refused(key, error))? else {
            // A lock on a missing document is of no use. If this fails, it expires.
            let (store, it) = (self.clone(), held.acquisition.clone());
            let release = async move { store.remove_lock(Removal::Release(&it)).await };
            let _ = held.spawn(with_deadline(until, release)).await;
            return Err(LockError::NotFound { key: key.clone() });
        };
        Ok(updated)
    }

    /// The locks are looked at before the work, so that no work is done in vain, and touched after the
    /// work, so that their records are blocked for a short time only. All reads and writes are of one
    /// snapshot: a lock that was lost in between makes the touch fail with a conflict.
    ///
    /// Only `work` runs in the caller's task. Everything else goes on when the caller is gone, so that no
    /// transaction stays open.
    async fn attempt<R, E>(
        &self,
        held: &[HeldLock],
        soonest: &HeldLock,
        until: Instant,
        work: &mut impl AsyncFnMut(&mut ClientSession) -> Result<R, E>,
    ) -> Attempt<R, E> {
        // Its commands end by that time, and so does the wait for them below.
        let _turn = match self.save_turn(until).await {
            Ok(turn) => turn,
            Err(error) => return Attempt::Failed(error),
        };
        let client = self.inner.database.client().clone();
        let begun = soonest.spawn(with_deadline(until, async move { begin(&client).await }));
        let mut session = match timeout_at(until.into(), begun).await {
            Ok(Ok(Ok(session))) => session,
            Ok(Ok(Err(error))) => return Attempt::Failed(error),
            Ok(Err(_)) | Err(_) => return Attempt::Failed(too_late()),
        };
        let worked = timeout_at(until.into(), self.look_work_touch(&mut session, held, work)).await;
        let value = match worked.unwrap_or(Attempt::TooSlow) {
            Attempt::Worked(value) => value,
            other => {
                let aborted = soonest.spawn(async move { drop(session.abort_transaction().await) });
                let _ = timeout_at(until.into(), aborted).await;
                return other;
            }
        };
        let committed = soonest.spawn(async move { commit(&mut session, until).await });
        let unknown = |why: Error| {
            let source = save_error("committing a transaction", why);
            Attempt::Refused(LockError::OutcomeUnknown(source))
        };
        match timeout_at(until.into(), committed).await {
            Ok(Ok(Ok(()))) => Attempt::Worked(value),
            // Rolled back, so the whole may be repeated.
            Ok(Ok(Err(error))) if error.contains_label(TRANSIENT_TRANSACTION_ERROR) => {
                Attempt::Failed(error)
            }
            Ok(Ok(Err(error))) => unknown(error),
            Ok(Err(_)) | Err(_) => unknown(Error::custom("no answer in time")),
        }
    }

    async fn look_work_touch<R, E>(
        &self,
        session: &mut ClientSession,
        held: &[HeldLock],
        work: &mut impl AsyncFnMut(&mut ClientSession) -> Result<R, E>,
    ) -> Attempt<R, E> {
        let failed = |error| match error {
            TransactionError::Lock(error) => Attempt::Refused(error),
            TransactionError::Work(error) => Attempt::Failed(error),
        };
        for one in held {
            match self.is_live_in(session, one).await {
                Ok(true) => {}
                Ok(false) => return Attempt::Refused(lost(one)),
                Err(error) => return failed(error),
            }
        }
        match work(session).await {
            Ok(value) => match self.confirm_in(session, held).await {
                Ok(()) => Attempt::Worked(value),
                Err(error) => failed(error),
            },
            Err(error) => Attempt::WorkFailed(error),
        }
    }

    /// The error of a transaction that is late: of the application, if the server answers.
    async fn too_slow(&self, soonest: &HeldLock) -> LockError {
        let probed = self.inner.database.run_command(doc! { "ping": 1 });
        match timeout(PROBE, probed).await {
            Ok(Ok(_)) => LockError::TooSlow { limit: soonest.deadline },
            Ok(Err(error)) => LockError::Store(save_error("running a transaction", error)),
            Err(_) => LockError::Store(save_error("running a transaction", too_late())),
        }
    }

    /// How long an active session leaves a lock without a renewal.
    fn renewal_interval(&self, held: &HeldLock) -> Result<Duration, LockError> {
        let at = self.prepared(held.acquisition.key.collection()).map_err(LockError::Store)?;
        Ok(at.rules.ttl / 3)
    }

    async fn is_live_in(
        &self,
        session: &mut ClientSession,
        held: &HeldLock,
    ) -> Result<bool, TransactionError> {
        let at = self.prepared(held.acquisition.key.collection()).map_err(LockError::Store)?;
        let found = at
            .locks
            .find_one(at.live(&held.acquisition))
            .projection(doc! { "_id": 1 })
            .session(session)
            .await;
        Ok(found.map_err(TransactionError::Work)?.is_some())
    }
}

/// Until this is emptied, a write under these locks may be under way, even after its caller is gone. When it is
/// dropped, the manager forgets their state: the next re-entry waits for the write.
struct InDoubt<'a>(&'a [HeldLock]);

impl Drop for InDoubt<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|held| (held.forget.0)());
    }
}

/// Of these locks, the one with the shortest deadline.
///
/// # Errors
/// If they guard nothing.
fn guarding(held: &[HeldLock]) -> Result<&HeldLock, LockError> {
    if let Some(shared) = held.iter().find(|held| held.acquisition.mode == Mode::Shared) {
        let key = &shared.acquisition.key;
        return Err(misconfigured(format!(
            "the lock on {key:?} is shared: take it exclusively to write under it"
        )));
    }
    held.iter().min_by_key(|held| held.deadline).ok_or_else(|| {
        misconfigured("no lock guards this: name those that you hold, as in `&[order.held()]`")
    })
}

fn refused(key: &LockKey, error: TransactionError) -> LockError {
    let error = match error {
        TransactionError::Lock(error) => return error,
        TransactionError::Work(error) => error,
    };
    let source = save_error(format!("updating {key:?}"), error);
    match source.kind() {
        // What the server refuses is the update of the application.
        StoreErrorKind::Rejected | StoreErrorKind::Other => {
            LockError::Rejected { key: key.clone(), source }
        }
        _ => LockError::Store(source),
    }
}

async fn in_time<T>(
    until: Instant,
    asked: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, LockError> {
    match timeout_at(until.into(), asked).await {
        Ok(answer) => answer.map_err(LockError::Store),
        Err(_) => Err(LockError::Store(save_error("asking the server for its kind", too_late()))),
    }
}

fn lost(held: &HeldLock) -> LockError {
    LockError::Lost { key: held.acquisition.key.clone(), holder: None }
}

fn misconfigured(what: impl Into<String>) -> LockError {
    let what = what.into();
    log::error!(target: "actix_doclock::store", "{what}");
    LockError::Misconfigured(what)
}
