//! Transactions of the application that commit only if all of their locks are held.

use std::time::{Duration, Instant};

use mongodb::{
    ClientSession,
    bson::doc,
    error::{Error, TRANSIENT_TRANSACTION_ERROR},
};
use tokio::time::{sleep, timeout, timeout_at};

use crate::{
    error::LockError,
    lock::Mode,
    store::{
        Deadline,
        mongo::{
            HeldLock, LockCollection, MongoStore,
            error::{Doing, unavailable},
            ids::Exactly,
            save::{FIRST_PAUSE, LONGEST_PAUSE, begin, commit, save_error, too_late},
            time_limits::answered,
            watch::saved_as,
        },
    },
};

/// How long a server that answers may take, once a transaction is late.
const PROBE: Duration = Duration::from_millis(250);

/// Why [`MongoStore::transaction`] has written nothing, or does not know whether it has.
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

/// Why an attempt has failed.
enum Failed<E> {
    /// In the application's part. Nothing was written.
    Work(E),
    /// In another step. Nothing was written.
    Step(Error),
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
    /// must use the [client of this store](Self::database). An error of `work` aborts the transaction: an error of
    /// the driver, or a type of yours that implements [`WorkError`]. All of `work`
    /// must be done within the manager's [deadline](crate::LockManagerBuilder::deadline), and well within a
    /// third of the ttl: a renewal of a lock in the meantime makes the transaction start again. `work` must
    /// return each error of a command, because the server has then aborted the transaction, and must not
    /// commit. In a spawned task, the compiler demands `async move`, and that `work` owns everything that it uses.
    /// If the compiler does not know the type of the error, name it: `async |session| -> Result<_, MyError> { … }`.
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
        if !self.has_transactions_by(until).await? {
            return Err(misconfigured(
                "transactions need a replica set or a sharded cluster; this server is standalone",
            )
            .into());
        }
        let mut doubt = InDoubt::new(held);
        let mut pause = FIRST_PAUSE;
        loop {
            let began = Instant::now();
            let failed = match self.attempt(held, soonest, until, &mut work).await {
                Err(failed) => failed,
                Ok(value) => {
                    doubt.0 = &[];
                    held.iter().for_each(|held| *held.onto.lock() = None);
                    return Ok(value);
                }
            };
            let error = match &failed {
                Failed::Work(error) => error.of_command(),
                Failed::Step(error) => Some(error),
                Failed::TooSlow | Failed::Refused(_) => None,
            };
            let is_transient = error.is_some_and(|e| e.contains_label(TRANSIENT_TRANSACTION_ERROR));
            if is_transient && Instant::now() + pause < until {
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
                continue;
            }
            // An active session renews its lock every third of the ttl, so a renewal falls into every attempt that takes
            // that long.
            let is_slow =
                is_transient && began.elapsed() >= self.prepared_for(soonest)?.rules.ttl / 3;
            return Err(match failed {
                Failed::Refused(error) => error.into(),
                Failed::TooSlow => self.too_slow(soonest).await.into(),
                _ if is_slow => self.too_slow(soonest).await.into(),
                Failed::Work(error) => TransactionError::Work(error),
                Failed::Step(error) => running(error).into(),
            });
        }
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
        // Outside of the transaction the document is still what the transaction writes onto: somebody who changes it now
        // conflicts with the transaction.
        let outside = self.database().client().start_session().await;
        let mut outside = outside.map_err(TransactionError::Work)?;
        for one in held {
            let compared = check_version(&self.prepared_for(one)?, &mut outside, one).await;
            compared.map_err(TransactionError::Work)??;
        }
        // Nobody knows what the transaction makes of the documents.
        held.iter().for_each(|one| *one.version.lock() = None);
        touch_all(self, session, held).await?;
        held.iter().for_each(|one| *one.onto.lock() = None);
        Ok(())
    }

    pub(super) async fn has_transactions_by(&self, until: Instant) -> Result<bool, LockError> {
        let answer = timeout_at(until.into(), self.has_transactions()).await;
        let answer = answer.unwrap_or_else(|_| Err(too_late()));
        answer.map_err(|e| LockError::Store(save_error("asking the server for its kind", e)))
    }

    pub(super) fn prepared_for(&self, held: &HeldLock) -> Result<LockCollection<'_>, LockError> {
        let collection = self.prepared(held.acquisition.key.collection(), Deadline::NONE);
        Ok(collection.doing(|| "guarding a write")?)
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
    ) -> Result<R, Failed<E>> {
        // Its commands end by that time, and so does the wait for them below.
        let _permit = self.save_permit(until).await.map_err(Failed::Step)?;
        let client = self.database().client().clone();
        let begun = soonest.spawn(async move { begin(&client, Deadline::at(until)).await });
        let mut session = match timeout_at(until.into(), begun).await {
            Ok(Ok(begun)) => begun.map_err(Failed::Step)?,
            _ => return Err(Failed::Step(too_late())),
        };
        let worked = timeout_at(until.into(), self.look_work_touch(&mut session, held, work)).await;
        let value = match worked.unwrap_or(Err(Failed::TooSlow)) {
            Ok(value) => value,
            Err(failed) => {
                let aborted =
                    soonest.spawn(async move { answered(session.abort_transaction()).await });
                let _ = timeout_at(until.into(), aborted).await;
                return Err(failed);
            }
        };
        let committed = soonest.spawn(async move { commit(&mut session, until).await });
        let unknown = |why| {
            let source = save_error("committing a transaction", why);
            Failed::Refused(LockError::OutcomeUnknown(source))
        };
        match timeout_at(until.into(), committed).await {
            Ok(Ok(Ok(()))) => Ok(value),
            // Rolled back, so the whole may be repeated.
            Ok(Ok(Err(error))) if error.contains_label(TRANSIENT_TRANSACTION_ERROR) => {
                Err(Failed::Step(error))
            }
            Ok(Ok(Err(error))) => Err(unknown(error)),
            Ok(Err(_)) | Err(_) => Err(unknown(unavailable("no answer in time"))),
        }
    }

    async fn look_work_touch<R, E>(
        &self,
        session: &mut ClientSession,
        held: &[HeldLock],
        work: &mut impl AsyncFnMut(&mut ClientSession) -> Result<R, E>,
    ) -> Result<R, Failed<E>> {
        for one in held {
            let collection = self.prepared_for(one).map_err(Failed::Refused)?;
            let live = collection.primary.find_one(collection.live(&one.acquisition));
            let live = live.projection(doc! { "_id": 1 }).exactly([one.acquisition.key.id()]);
            let live = live.session(&mut *session).await;
            if live.map_err(Failed::Step)?.is_none() {
                return Err(Failed::Refused(lost(one)));
            }
            let compared = check_version(&collection, session, one).await.map_err(Failed::Step)?;
            compared.map_err(Failed::Refused)?;
        }
        let value = work(session).await.map_err(Failed::Work)?;
        touch_all(self, session, held).await.map_err(|error| match error {
            TransactionError::Lock(error) => Failed::Refused(error),
            TransactionError::Work(error) => Failed::Step(error),
        })?;
        Ok(value)
    }

    /// The error of a transaction that is late. It is the application's fault if the server answers.
    async fn too_slow(&self, soonest: &HeldLock) -> LockError {
        let probed = self.database().run_command(doc! { "ping": 1 });
        match timeout(PROBE, probed).await {
            Ok(Ok(_)) => LockError::TooSlow { limit: soonest.deadline },
            Ok(Err(error)) => running(error),
            Err(_) => running(too_late()),
        }
    }
}

/// Refuses if the stored document has another version than the one that may be written onto. A missing document is not
/// refused here: the write reports it. The outer error is the database's.
pub(super) async fn check_version(
    collection: &LockCollection<'_>,
    session: &mut ClientSession,
    held: &HeldLock,
) -> Result<Result<(), LockError>, Error> {
    let Some(onto) = *held.onto.lock() else { return Ok(Ok(())) };
    let key = &held.acquisition.key;
    let stored = collection.read_in(session, key.id()).await?.map(|document| document.version());
    Ok(match stored {
        Some(version) if version != onto => Err(LockError::StaleCopy { key: key.clone(), version }),
        _ => Ok(()),
    })
}

async fn touch_all(
    store: &MongoStore,
    session: &mut ClientSession,
    held: &[HeldLock],
) -> Result<(), TransactionError> {
    for one in held {
        let (collection, saved) = (store.prepared_for(one)?, saved_as(one.version()));
        let touched = collection.touch_in(session, &one.acquisition, saved).await;
        if !touched.map_err(TransactionError::Work)? {
            return Err(lost(one).into());
        }
    }
    Ok(())
}

pub(super) fn running(error: Error) -> LockError {
    LockError::Store(save_error("running a transaction", error))
}

/// Until this value is emptied, a write under these locks may be under way, even after its caller is gone. When the
/// value is dropped, the manager forgets the state of the locks: the next re-entry waits for the write.
pub(super) struct InDoubt<'a>(pub(super) &'a [HeldLock]);

impl<'a> InDoubt<'a> {
    pub(super) fn new(held: &'a [HeldLock]) -> Self {
        // Nobody knows what the write makes of the documents.
        held.iter().for_each(|held| *held.version.lock() = None);
        Self(held)
    }
}

impl Drop for InDoubt<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|held| (held.forget.0)());
    }
}

/// Of these locks, the one with the shortest deadline.
///
/// # Errors
/// If they guard nothing.
pub(super) fn guarding(held: &[HeldLock]) -> Result<&HeldLock, LockError> {
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

pub(super) fn lost(held: &HeldLock) -> LockError {
    LockError::lost(held.acquisition.key.clone())
}

pub(super) fn misconfigured(what: impl Into<String>) -> LockError {
    let what = what.into();
    log::error!(target: "actix_doclock::store", "{what}");
    LockError::Misconfigured(what)
}
