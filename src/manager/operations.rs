//! The manager's verbs for the layer above, which has a deadline for a whole request.

use std::{
    any::type_name,
    slice,
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::oneshot::Receiver;
use tokio_util::task::TaskTracker;

use super::{LockManager, Provisional, Registered, observe, run};
use crate::{
    Aid, BoxError, Holder, Lock, LockError, LockKey, LockToken, Lockable, Mode, PageId,
    StoreErrorKind, TabId, clock,
    store::{
        Answer, Claim, DynStore, Edit, Saved, StoredDocument, TryAcquire, misnamed_id,
        with_deadline,
    },
};

/// How many documents of a collection are listed with the locks of everybody.
pub(crate) const LISTED: usize = 1_000;

/// What [`LockManager::acquire_by`] found.
#[derive(Debug)]
pub(crate) enum Acquired {
    /// Granted anew, and given back unless it is confirmed.
    Fresh(Provisional),
    AlreadyMine(Lock),
    Held(Lock),
}

impl Acquired {
    pub(super) fn lock(&self) -> &Lock {
        match self {
            Self::Fresh(fresh) => fresh.lock(),
            Self::AlreadyMine(lock) | Self::Held(lock) => lock,
        }
    }
}

/// What somebody wants, for themselves.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) key: LockKey,
    pub(crate) aid: Aid,
    pub(crate) holder: Holder,
    /// The tab of the session that wants it.
    pub(crate) tab: Option<TabId>,
    pub(crate) page: Option<PageId>,
    pub(crate) mode: Mode,
    /// That of the manager, or a shorter one of its own.
    pub(crate) ttl: Duration,
}

impl Wanted {
    pub(super) fn claim(&self, max_hold: Option<Duration>, place: Option<Duration>) -> Claim {
        Claim {
            aid: self.aid.clone(),
            // Chosen here, before the first attempt, so that a repetition knows it for the same claim.
            token: LockToken::new(),
            holder: self.holder.clone(),
            tab: self.tab,
            page: self.page,
            taken: None,
            mode: self.mode,
            ttl: self.ttl,
            max_hold,
            place,
        }
    }
}

/// One acquisition of a lock.
#[derive(Debug, Clone)]
pub(crate) struct Acquisition {
    pub(crate) key: LockKey,
    pub(crate) aid: Aid,
    pub(crate) token: LockToken,
    pub(crate) mode: Mode,
}

impl Acquisition {
    /// `None` for that of a foreign program.
    pub(crate) fn of(lock: &Lock) -> Option<Self> {
        let (key, aid, token) = (lock.key.clone(), lock.aid.clone(), lock.token?);
        Some(Self { key, aid, token, mode: lock.mode })
    }
}

impl LockManager {
    pub(crate) fn holder(&self) -> &Holder {
        &self.inner.settings.holder
    }

    pub(super) fn longest_hold(&self) -> Option<Duration> {
        self.inner.settings.max_hold
    }

    /// The deadline of an operation that begins now.
    pub(crate) fn until(&self) -> Instant {
        clock::now() + self.deadline()
    }

    pub(crate) fn is_registered(&self, collection: &str) -> bool {
        self.registered(collection).is_ok()
    }

    /// Everything that a grant leaves to be done if it is not wanted is tracked by `scope` too.
    pub(crate) async fn acquire_by(
        &self,
        wanted: &Wanted,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired, LockError> {
        self.registered(wanted.key.collection())?;
        let claim = wanted.claim(self.inner.settings.max_hold, None);
        let answer = self.claim(&wanted.key, claim, scope, until).await?;
        observe::answered(self, wanted, &answer);
        Ok(answer)
    }

    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.acquire", skip_all,
        fields(collection = key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(super) async fn claim(
        &self,
        key: &LockKey,
        claim: Claim,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired, LockError> {
        if let Some(lock) = self.inner.trusted(key, &claim) {
            return Ok(Acquired::AlreadyMine(lock));
        }
        let timer = observe::Timer::start(self, key, claim.mode);
        let page = claim.page;
        let (manager, own_scope, key) = (self.clone(), scope.clone(), key.clone());
        let acquire = async move {
            let (mut claim, mut attempts) = (claim, run::Attempts::new(until, run::FOREGROUND));
            let answer = loop {
                let answer = manager.inner.store.try_acquire(&key, &claim).await;
                let Some(pause) = attempts.pause_after(&answer) else { break answer };
                tokio::time::sleep(pause).await;
                claim.token = claim.token.next_attempt();
            };
            if let Ok(answer) = &answer {
                manager.earlier_may_be_late(&key, &claim, answer);
            }
            match answer {
                // Dropped with the answer if nobody waits for it any more, and then given back.
                Ok(TryAcquire::Granted(lock)) => {
                    let fresh = Provisional::new(manager, lock, &claim, own_scope);
                    Ok(Acquired::Fresh(fresh))
                }
                Ok(TryAcquire::AlreadyMine(lock)) => Ok(Acquired::AlreadyMine(lock)),
                Ok(TryAcquire::Held(lock)) => Ok(Acquired::Held(lock)),
                Err(error) => {
                    // An attempt may have been carried out all the same, or be still on its way.
                    manager.claim_is_unknown(&key, &claim, &own_scope);
                    Err(error)
                }
            }
        };
        let asked = clock::now();
        let outcome = self.inner.runner.spawn(scope, with_deadline(until, acquire));
        let acquired = run::answer("try_acquire", until, outcome).await;
        timer.acquired(&acquired);
        let acquired = acquired?;
        if let Acquired::Fresh(_) = acquired {
            self.inner.granted.notify_one();
        }
        self.inner.watched.saw(acquired.lock(), asked);
        if let Acquired::AlreadyMine(lock) = &acquired {
            self.inner.trusts(lock, page);
        }
        Ok(acquired)
    }

    /// Ends a session without anybody waiting.
    pub(crate) fn release_session_in_background(&self, aid: Aid) {
        let manager = self.clone();
        self.inner.runner.spawn(&TaskTracker::new(), async move {
            if let Err(e) = manager.release_session(&aid).await {
                log::error!(
                    target: "actix_doclock::manager",
                    "the locks of the ended session {aid:?} go with their ttl: {e}",
                );
            }
        });
    }

    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.inspect", skip_all,
        fields(collection = key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn inspect_by(
        &self,
        key: &LockKey,
        aid: Option<&Aid>,
        until: Instant,
    ) -> Result<Option<Lock>, LockError> {
        self.registered(key.collection())?;
        let asked = clock::now();
        let args = (key.clone(), aid.cloned());
        let lock =
            self.run("inspect", until, args, |store, (key, aid)| store.inspect(key, aid.as_ref()));
        let lock = lock.await?;
        match &lock {
            Some(lock) => self.inner.watched.saw(lock, asked),
            None => self.inner.watched.saw_free(key, asked),
        }
        Ok(lock)
    }

    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.list", skip_all,
        fields(outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn list_by(
        &self,
        aid: Option<&Aid>,
        until: Instant,
    ) -> Result<Vec<Lock>, LockError> {
        // What one session holds is its own doing; what all hold is for a page.
        let limit = if aid.is_some() { usize::MAX } else { LISTED };
        let lists = self.in_each_collection(|collection| {
            let args = (collection, aid.cloned(), limit);
            self.run("list", until, args, |store, (collection, aid, limit)| {
                store.list(collection, aid.as_ref().map(slice::from_ref), *limit)
            })
        });
        let asked = clock::now();
        let locks: Vec<_> = lists.await?.into_iter().flatten().collect();
        if let Some(aid) = aid {
            self.inner.watched.saw_all_of(aid, &locks, asked);
        }
        Ok(locks)
    }

    /// All live locks on these documents of a collection, by one read.
    pub(crate) async fn locks_on_all(
        &self,
        collection: &str,
        keys: Vec<LockKey>,
    ) -> Result<Vec<Lock>, LockError> {
        let (collection, _) = self.registered(collection)?;
        self.run("locks_on", self.until(), (collection, keys), |store, (collection, keys)| {
            store.locks_on(collection, keys)
        })
        .await
    }

    /// Whether a web session that was just granted a lock may keep it. Asks nobody unless the session may
    /// be close to the limit.
    pub(crate) async fn may_hold_another(
        &self,
        aid: &Aid,
        until: Instant,
    ) -> Result<(), LockError> {
        let limit = self.inner.settings.max_locks_per_session;
        if !self.inner.activity.granted(aid, limit, self.ttl() / 3) {
            return Ok(());
        }
        let lists = self.in_each_collection(|collection| {
            let args = (collection, aid.clone(), limit + 1);
            self.run("list", until, args, |store, (collection, aid, limit)| {
                store.list(collection, Some(slice::from_ref(aid)), *limit)
            })
        });
        let locks = lists.await?.iter().map(Vec::len).sum();
        self.inner.activity.counted(aid, locks);
        if locks <= limit {
            return Ok(());
        }
        observe::locks_refused();
        Err(LockError::TooManyLocks { limit })
    }

    /// How long ago the session ended, if it has.
    pub(crate) async fn session_ended(
        &self,
        aid: &Aid,
        until: Instant,
    ) -> Result<Option<Duration>, LockError> {
        self.run("session_ended", until, aid.clone(), |store, aid| store.session_ended(aid)).await
    }

    pub(crate) async fn exists(&self, key: &LockKey, until: Instant) -> Result<bool, LockError> {
        self.run("exists", until, key.clone(), |store, key| store.exists(key)).await
    }

    /// # Errors
    /// [`LockError::NotFound`], [`LockError::Document`], and those of the store.
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.load", skip_all,
        fields(collection = key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn load<T: Lockable>(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<T, LockError> {
        match self.run("load", until, key.clone(), |store, key| store.load(key)).await? {
            None => Err(LockError::NotFound { key: key.clone() }),
            Some(document) => {
                document.decode().map_err(|source| LockError::Document { key: key.clone(), source })
            }
        }
    }

    /// A document as the store keeps it.
    ///
    /// # Errors
    /// What serde says if `document` has no such form.
    pub(crate) fn encode<T: Lockable>(&self, document: &T) -> Result<StoredDocument, BoxError> {
        StoredDocument::encode(self.inner.store.format(), document)
    }

    /// Writes under the lock what differs from `before`, or the whole document without that.
    ///
    /// # Errors
    /// [`LockError::Lost`], [`LockError::NotFound`], [`LockError::Document`],
    /// [`LockError::Misconfigured`] and the store's.
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.save", skip_all,
        fields(collection = key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn save<T: Lockable>(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        before: Option<StoredDocument>,
        document: &T,
        until: Instant,
    ) -> Result<StoredDocument, LockError> {
        let timer = observe::Timer::start(self, key, Mode::Exclusive);
        let after = self
            .encode(document)
            .map_err(|source| LockError::Document { key: key.clone(), source })?;
        if let Some(name) = misnamed_id::<T>(&after) {
            let what_to_do = format!(
                "`{}` reads its id from `_id` and writes it to `{name}`: give the field \
                 `#[serde(rename = \"_id\")]`, and answers over HTTP a type of their own",
                type_name::<T>(),
            );
            log::error!(target: "actix_doclock::manager", "{what_to_do}");
            return Err(LockError::Misconfigured(what_to_do));
        }
        let edit = match before {
            Some(before) => Edit::Changes { before, after: after.clone() },
            None => Edit::Replacement(after.clone()),
        };
        let args = (key.clone(), aid.clone(), token, edit, until);
        let saved = self.run("save", until, args, |store, (key, aid, token, edit, until)| {
            store.save(key, aid, *token, edit, *until)
        });
        let saved = saved.await;
        let key = key.clone();
        if let Ok(Saved::Lost) = saved {
            let (key, aid) = (key.clone(), aid.clone());
            self.inner.gone(&Acquisition { key, aid, token, mode: Mode::Exclusive });
        }
        let saved = match saved {
            Ok(Saved::Saved) => Ok(after),
            Ok(Saved::Lost) => Err(LockError::Lost { key, holder: None }),
            Ok(Saved::DocumentGone) => Err(LockError::NotFound { key }),
            Err(LockError::Store(source)) if source.kind() == StoreErrorKind::Rejected => {
                Err(LockError::Rejected { key, source })
            }
            Err(error) => Err(error),
        };
        timer.saved(&saved);
        saved
    }

    /// Renews all locks of an active session, at most once in a third of the ttl and without
    /// anybody waiting. Returns the task if this call started one.
    pub(crate) fn touch(&self, aid: &Aid) -> Option<Receiver<()>> {
        if !self.inner.activity.is_due(aid, self.ttl() / 3) {
            return None;
        }
        let (manager, aid) = (self.clone(), aid.clone());
        Some(self.inner.runner.spawn(&TaskTracker::new(), async move {
            match manager.renew(&aid).await {
                Ok(locks) => manager.inner.activity.counted(&aid, locks.try_into().unwrap_or(0)),
                Err(e) => {
                    manager.inner.activity.forget(&aid);
                    log::warn!(
                        target: "actix_doclock::manager",
                        "the locks of {aid:?} were not renewed, the next request tries again: {e}",
                    );
                }
            }
        }))
    }

    /// A session that has just begun holds nothing, so nothing of it is due for renewal.
    pub(crate) fn session_begins(&self, aid: &Aid) {
        self.inner.activity.is_due(aid, self.ttl() / 3);
    }

    pub(super) fn registered(
        &self,
        collection: &str,
    ) -> Result<(&'static str, Registered), LockError> {
        let all = self.inner.collections.read().unwrap_or_else(PoisonError::into_inner);
        all.get_key_value(collection).map(|(name, registered)| (*name, *registered)).ok_or_else(
            || {
                LockError::Misconfigured(format!(
                    "the collection `{collection}` is not registered: call \
                     `locks.register::<T>().await?` for its type when the server starts"
                ))
            },
        )
    }

    /// Runs one operation to its end in a task of its own, again and again while its outcome is
    /// unknown and there is time.
    pub(super) async fn run<A, T>(
        &self,
        verb: &'static str,
        until: Instant,
        args: A,
        attempt: for<'a> fn(&'a dyn DynStore, &'a A) -> Answer<'a, T>,
    ) -> Result<T, LockError>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let store = Arc::clone(&self.inner.store);
        let operation =
            async move { run::retry(until, run::FOREGROUND, || attempt(&*store, &args)).await };
        let outcome = self.inner.runner.spawn(&TaskTracker::new(), operation);
        Ok(run::answer(verb, until, outcome).await?)
    }

    /// One operation in each registered collection, all at the same time.
    pub(super) async fn in_each_collection<T, F>(
        &self,
        operation: impl Fn(&'static str) -> F,
    ) -> Result<Vec<T>, LockError>
    where
        F: Future<Output = Result<T, LockError>>,
    {
        run::all(self.registered_names().into_iter().map(operation)).await
    }

    pub(super) fn registered_names(&self) -> Vec<&'static str> {
        let all = self.inner.collections.read().unwrap_or_else(PoisonError::into_inner);
        all.keys().copied().collect()
    }
}
