//! Saves documents under their locks.

use std::{slice, sync::Arc, thread::available_parallelism, time::Instant};

use tokio::{sync::Semaphore, time::timeout_at};

use crate::{
    clock,
    error::{BoxError, LockError, Result, StoreError, StoreErrorKind},
    key::{LockKey, Lockable},
    lock::Mode,
    manager::{
        causes::Causes,
        collections::Collections,
        observe,
        reads::unfit,
        verbs::{Verbs, overloaded},
        watched::Beliefs,
    },
    store::{Acquisition, Changes, Content, Draft, Edit, Original, Saved, StoredDocument},
    version::Version,
};
#[cfg(feature = "_mongo")]
use crate::{
    store::{Forget, HeldLock},
    version::SharedVersion,
};

/// Guarded writes.
#[derive(Clone)]
pub(crate) struct Saves {
    pub(super) verbs: Arc<Verbs>,
    pub(super) collections: Arc<Collections>,
    pub(super) beliefs: Arc<Beliefs>,
    pub(super) causes: Arc<Causes>,
    /// For the comparisons of large documents.
    pub(super) comparisons: Arc<Semaphore>,
}

impl Saves {
    /// As many comparisons as processors, and more than one: more of them only wait for each other, and nobody can stop one
    /// that has begun.
    pub(super) fn comparisons() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(available_parallelism().map_or(2, |it| it.get().max(2))))
    }

    #[cfg(feature = "_mongo")]
    pub(crate) fn held(
        &self,
        acquisition: Acquisition,
        version: SharedVersion,
        onto: SharedVersion,
    ) -> HeldLock {
        self.unlearn_before_write(&acquisition);
        let (runtime, tasks) = self.verbs.runner.parts();
        let (beliefs, held) = (Arc::downgrade(&self.beliefs), acquisition.clone());
        let forget = Forget(Arc::new(move || {
            if let Some(beliefs) = beliefs.upgrade() {
                beliefs.activity.unlearn(&held.aid, &held.key);
            }
        }));
        let deadline = self.verbs.deadline;
        let declared = self.collections.declared(acquisition.key.collection());
        HeldLock { acquisition, declared, deadline, runtime, tasks, forget, version, onto }
    }

    /// A write under this lock may be under way from now on, even after its caller was told that the outcome
    /// is unknown. The next re-entry therefore writes: unlike a read, it waits for the write under way, and then loads
    /// the latest document.
    fn unlearn_before_write(&self, held: &Acquisition) {
        self.beliefs.activity.unlearn(&held.aid, &held.key);
    }

    /// Writes the changes of the document under the lock, if the stored document still has the version `onto`.
    ///
    /// # Errors
    /// [`LockError::StaleCopy`] if it has another version.
    /// [`LockError::OutcomeUnknown`] if the document cannot be written, but an earlier save of it may have been.
    /// [`LockError::Lost`], [`LockError::NotFound`], [`LockError::ChangedMeanwhile`], [`LockError::UnclearChange`],
    /// [`LockError::Document`], [`LockError::TooSlow`] and the errors of the store.
    pub(crate) async fn save<T: Lockable>(
        &self,
        held: &Acquisition,
        original: &Original,
        document: &T,
        onto: Option<Version>,
        until: Instant,
    ) -> Result<Changes> {
        let draft = original.draft(document).map_err(unfit(&held.key))?;
        let changes = self.compared(&held.key, draft, until, Draft::changes).await?;
        let edit = Edit { onto, ..changes.clone().into() };
        let saved = self.write(held, edit, until).await;
        saved.map(|()| changes).map_err(in_doubt(original))
    }

    /// Writes the whole document under the lock. Returns the document as it was written.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub(crate) async fn replace<T: Lockable>(
        &self,
        held: &Acquisition,
        original: &Original,
        document: &T,
        onto: Option<Version>,
        until: Instant,
    ) -> Result<Original> {
        let unfit = unfit(&held.key);
        let draft = original.draft(document).map_err(&unfit)?;
        let new = self.compared(&held.key, draft, until, Draft::replacement).await?;
        let saved = self.write(held, Edit { onto, ..new.clone().into() }, until).await;
        saved.map_err(in_doubt(original))?;
        Original::new(new, document).map_err(&unfit)
    }

    /// Inserts a document whose lock is held already. Returns the document as it was written.
    ///
    /// # Errors
    /// As [`save`](Self::save). [`LockError::Rejected`] if there is such a document already.
    pub(crate) async fn create<T: Lockable>(
        &self,
        held: &Acquisition,
        document: &T,
        until: Instant,
    ) -> Result<Original> {
        let unfit = unfit(&held.key);
        let new = StoredDocument::encode(self.verbs.store.format(), document).map_err(&unfit)?;
        let draft = Original::new(new, document).and_then(|original| original.draft(document));
        let draft = draft.map_err(&unfit)?;
        let new = self.compared(&held.key, draft, until, Draft::replacement).await?;
        self.write(held, Content::Creation(new.clone()).into(), until).await?;
        Original::new(new, document).map_err(&unfit)
    }

    /// Compares the versions of a document. A large document takes some milliseconds, and more if its type has aliases,
    /// so another thread than those that serve requests compares it.
    async fn compared<R: Send + 'static>(
        &self,
        key: &LockKey,
        draft: Draft,
        until: Instant,
        compare: fn(Draft) -> Result<R, BoxError>,
    ) -> Result<R> {
        let compared = if draft.is_large() {
            let (runtime, tasks) = self.verbs.runner.parts();
            // A comparison that gets a place still has the time to use it.
            let half = clock::now() + until.saturating_duration_since(clock::now()) / 2;
            let place = timeout_at(half.into(), Arc::clone(&self.comparisons).acquire_owned());
            let Ok(place) = place.await else { return Err(overloaded("save").into()) };
            // The thread cannot be stopped, but nobody waits for it after the deadline. It keeps its place until it ends.
            let compare = move || {
                let _place = place;
                compare(draft)
            };
            let compared = tasks.spawn_blocking_on(compare, &runtime);
            let compared = timeout_at(until.into(), compared).await.ok();
            compared.map(|done| done.unwrap_or_else(|failed| Err(failed.into())))
        } else {
            Some(compare(draft))
        };
        match compared.filter(|_| clock::now() < until) {
            Some(compared) => compared.map_err(unfit(key)),
            None => Err(LockError::TooSlow { limit: self.verbs.deadline }),
        }
    }

    /// Deletes the document under its lock. The lock stays.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub(crate) async fn delete(
        &self,
        held: &Acquisition,
        onto: Option<Version>,
        until: Instant,
    ) -> Result<()> {
        self.write(held, Edit { content: Content::Deletion, onto }, until).await
    }

    /// The error of a write onto a document that has another version by now.
    async fn stale(&self, key: LockKey, until: Instant) -> LockError {
        let now =
            self.verbs.run("load", until, key.clone(), |store, key, until| store.load(key, until));
        match now.await {
            Ok(Some(now)) => LockError::StaleCopy { key, version: now.version() },
            Ok(None) => LockError::NotFound { key },
            Err(error) => error,
        }
    }

    async fn write(&self, held: &Acquisition, edit: Edit, until: Instant) -> Result<()> {
        observe::in_span!("doclock.save", Some(held.key.collection()), async {
            let timer = observe::Timer::start(self.collections.label(&held.key), Mode::Exclusive);
            self.unlearn_before_write(held);
            let has_condition = edit.onto.is_some();
            let args = (held.clone(), edit, has_condition.then(|| Arc::clone(&self.causes)));
            let saved =
                self.verbs.run("save", until, args, |store, (held, edit, causes), until| {
                    // Here, because the caller may be gone when the document is saved.
                    Box::pin(async move {
                        let saved = store.save(held, edit, until).await;
                        if let (Ok(Saved::Saved), Some(causes)) = (&saved, causes) {
                            causes.was_saved(held, edit.version_after());
                        }
                        saved
                    })
                });
            let (saved, key) = (saved.await, held.key.clone());
            if !matches!(saved, Ok(Saved::Saved)) {
                // Another request may have entered meanwhile.
                self.unlearn_before_write(held);
            }
            if let Ok(Saved::Lost) = saved {
                self.beliefs.gone(held);
                let label = self.collections.label(&held.key);
                self.beliefs.losses.count(label, Some(held.token), "unknown", "save");
            }
            let saved = match saved {
                Ok(Saved::Saved) => Ok(()),
                Ok(Saved::Lost) => {
                    let tokens = slice::from_ref(&held.token);
                    let cause = self.causes.why_lost(&self.verbs, &key, &held.aid, tokens, until);
                    let cause = cause.await;
                    Err(LockError::Lost { key, holder: None, cause })
                }
                Ok(Saved::DocumentGone) => Err(LockError::NotFound { key }),
                Ok(Saved::ChangedMeanwhile(_)) if has_condition => {
                    Err(self.stale(key, until).await)
                }
                Ok(Saved::ChangedMeanwhile(field)) => {
                    Err(LockError::ChangedMeanwhile { key, field })
                }
                Err(LockError::Store(source)) if source.kind() == StoreErrorKind::Rejected => {
                    Err(LockError::Rejected { key, source })
                }
                Err(error) => Err(error),
            };
            timer.saved(&saved);
            saved
        })
    }
}

/// The error of a write after a save of the same document whose outcome is unknown: what looks like a write by somebody else
/// may be that save.
fn in_doubt(original: &Original) -> impl Fn(LockError) -> LockError {
    let is_in_doubt = original.is_in_doubt();
    move |error| match error {
        LockError::Lost { ref key, .. }
        | LockError::ChangedMeanwhile { ref key, .. }
        | LockError::StaleCopy { ref key, .. }
        | LockError::NotFound { ref key }
            if is_in_doubt =>
        {
            let message = format!("saving {key:?} again, after a save whose outcome is unknown");
            let source = StoreError::new(StoreErrorKind::OutcomeUnknown, message).because(error);
            LockError::OutcomeUnknown(source)
        }
        error => error,
    }
}
