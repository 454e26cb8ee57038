//! Freezes: for a while, no new locks are granted.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{
    actor::Actor,
    clock,
    error::LockError,
    freeze::{End, Freeze, NewFreeze, Scope},
    key::LockKey,
    manager::{LockManager, MAX_REASON_BYTES},
    random,
    text::{cut, short},
};

/// A freeze for longer has no end that anybody will see.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 24 * 60 * 60);

impl LockManager {
    /// Freezes a collection, or all of them: until then no new locks are granted. Instead of a lock,
    /// callers get [`LockError::Frozen`] with the reason, and waiters get it at once. Held locks stay:
    /// their holders may save, and release them. So the documents are at rest when the last of these locks
    /// is gone, which [`list`](Self::list) shows.
    ///
    /// All servers of the cluster obey within two seconds. The freeze survives their restarts, and ends by
    /// itself, by the store's clock: at a time, or after a duration. A second freeze of the same scope replaces the
    /// first. The `reason` is cut to [`MAX_REASON_BYTES`]. `by` is recorded with the freeze, and stands in the
    /// log. [`Freeze::obeyed_by`] tells how many servers have noted that they obey.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use actix_doclock::{Actor, LockError, LockManager};
    /// # async fn migrate(locks: &LockManager) -> Result<(), LockError> {
    /// let (why, an_hour) = ("The numbers of all work items are changed.", Duration::from_secs(60 * 60));
    /// locks.freeze("workitem", why, an_hour, &Actor::new("migration 12")).await?;
    /// // … wait for the held locks, or break them; migrate …
    /// locks.thaw("workitem").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`LockError::PastFreeze`] if the end has passed; nothing changes then. [`LockError::Misconfigured`] if the
    /// collection is not registered, or for all collections if none is. Otherwise see [`LockManager`].
    pub async fn freeze(
        &self,
        scope: impl Into<Scope>,
        reason: &str,
        until: impl Into<End>,
        by: &Actor,
    ) -> Result<(), LockError> {
        let scope = self.scope(scope).await?;
        if !self.inner.collections.has_any() {
            let message = "a freeze of all collections without any that is registered";
            return Err(LockError::Misconfigured(message.to_owned()));
        }
        let end = match until.into() {
            End::At(until) => End::At(until.min(end_of_9999())),
            End::In(lasts) => End::In(lasts.min(LONGEST)),
        };
        let reason = cut(reason.to_owned(), MAX_REASON_BYTES);
        let new = NewFreeze { id: random::uuid(), reason, by: short(&by.label), end };
        let asked = clock::now();
        let args = (scope.clone(), new.clone());
        let known = self.inner.calls.run(
            "freeze",
            self.inner.calls.until(),
            args,
            |store, (scope, new), until| store.set_freeze(scope, Some(new), until),
        );
        let known = known.await?;
        let is_on = known.iter().any(|freeze| freeze.id == Some(new.id));
        self.inner.freezes.saw_and_tell(known, asked, clock::now());
        if !is_on {
            return Err(LockError::PastFreeze);
        }
        log::info!(
            target: "actix_doclock::audit",
            "{scope} is frozen by {}; reason: {:?}", by.holder().shown(), new.reason,
        );
        Ok(())
    }

    /// Ends the freeze of this scope. Returns whether there was one. A freeze of [`Scope::All`] and that of
    /// a collection end independently.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn thaw(&self, scope: impl Into<Scope>) -> Result<bool, LockError> {
        let scope = self.scope(scope).await?;
        let before = self
            .inner
            .calls
            .run("freezes", self.inner.calls.until(), (), |store, (), until| store.freezes(until))
            .await?;
        let asked = clock::now();
        let left = self.inner.calls.run(
            "thaw",
            self.inner.calls.until(),
            scope.clone(),
            |store, scope, until| store.set_freeze(scope, None, until),
        );
        self.inner.freezes.saw_and_tell(left.await?, asked, clock::now());
        let was_frozen = before.iter().any(|freeze| freeze.scope == scope);
        if was_frozen {
            log::info!(target: "actix_doclock::audit", "{scope} is not frozen any more");
        }
        Ok(was_frozen)
    }

    /// The freezes that this server knows. Costs nothing.
    #[must_use]
    pub fn freezes(&self) -> Vec<Freeze> {
        self.inner.freezes.all()
    }

    async fn scope(&self, scope: impl Into<Scope>) -> Result<Scope, LockError> {
        let scope = scope.into();
        if let Scope::Collection(name) = &scope {
            let ready = self
                .inner
                .collections
                .ready(&LockKey::new(&**name, 0)?, self.inner.calls.until())
                .await;
            ready.map_err(|e| match e {
                LockError::NotFound { .. } => LockError::Misconfigured(format!(
                    "there is no collection `{name}`: name one as it is stored, or freeze all"
                )),
                other => other,
            })?;
        }
        Ok(scope)
    }
}

/// The last date that stores can show.
fn end_of_9999() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(253_402_300_799)
}
