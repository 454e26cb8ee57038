//! Collections by pattern: prepared on their first use, and found when other servers have prepared them.

use std::{
    sync::Weak,
    time::{Duration, Instant},
};

use tokio::{
    sync::MutexGuard,
    time::{sleep, timeout_at},
};

use super::{Collections, MAX_COLLECTIONS, Registered, is_ours};
use crate::{
    clock,
    error::{LockError, StoreError, StoreErrorKind},
    key::LockKey,
    manager::{Inner, rhythm::Rhythm},
    store::Pattern,
};

/// How often a manager looks for the collections that other servers have prepared.
const LOOK: Duration = Duration::from_secs(60);

impl Collections {
    async fn prepare_by_pattern(
        &self,
        name: &str,
        registered: Registered,
        until: Instant,
    ) -> Result<&'static str, LockError> {
        if self.known(|known| known.by_name.len()) >= MAX_COLLECTIONS {
            return Err(LockError::Misconfigured(format!(
                "the collection `{name}` cannot be locked: this server knows {MAX_COLLECTIONS} collections already, \
                 and takes no more by pattern; keep the tenants in one collection, or use a database and a manager \
                 for each"
            )));
        }
        self.prepare(name, registered, until).await
    }

    pub(super) async fn prepare_on_first_use(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<(&'static str, Registered), LockError> {
        let name = key.collection();
        let registered = self.registered(name)?;
        let _turn = self.turn_to_prepare(until).await?;
        if let Some(known) = self.get(name) {
            return Ok(known);
        }
        let found = self
            .calls
            .run("collections", until, Pattern::exactly(name), |store, it, until| {
                store.collections(it, 1, until)
            })
            .await?;
        if found.is_empty() {
            return Err(LockError::NotFound { key: key.clone() });
        }
        Ok((self.prepare_by_pattern(name, registered, until).await?, registered))
    }

    /// As [`ready`](Self::ready), for a new document, which may be the first one of its collection.
    #[cfg(feature = "web")]
    pub(crate) async fn ready_to_create(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<(), LockError> {
        let name = key.collection();
        if self.get(name).is_none() {
            let registered = self.registered(name)?;
            let _turn = self.turn_to_prepare(until).await?;
            if self.get(name).is_none() {
                self.prepare_by_pattern(name, registered, until).await?;
            }
        }
        Ok(())
    }

    async fn turn_to_prepare(
        &self,
        until: Instant,
    ) -> Result<MutexGuard<'_, Option<Instant>>, LockError> {
        timeout_at(until.into(), self.looked.lock()).await.map_err(|_| {
            let message = "another collection is being prepared, and the database does not answer";
            StoreError::new(StoreErrorKind::Unavailable, message).into()
        })
    }

    /// Learns of the collections by pattern that other servers have prepared, unless a look began within `age`
    /// before this call. Costs nothing without patterns.
    ///
    /// # Errors
    /// The first one; all other collections are prepared anyway.
    pub(in crate::manager) async fn look_for_collections(
        &self,
        age: Duration,
        until: Instant,
    ) -> Result<(), LockError> {
        let patterns = self.known(|known| known.patterns.clone());
        if patterns.is_empty() {
            return Ok(());
        }
        let asked = clock::now();
        let mut looked = self.turn_to_prepare(until).await?;
        if looked.is_some_and(|at| at + age >= asked) {
            return Ok(());
        }
        let (begins, mut outcome) = (clock::now(), Ok(()));
        for (pattern, registered) in patterns {
            let found =
                self.calls.run("collections", until, pattern.of_locks(), |store, it, until| {
                    store.collections(it, MAX_COLLECTIONS + 1, until)
                });
            for locks in found.await? {
                let name = locks.strip_suffix(".lock").unwrap_or(&locks);
                if self.get(name).is_none() && !is_ours(name) {
                    let prepared = self.prepare_by_pattern(name, registered, until).await;
                    outcome = outcome.and(prepared.map(drop));
                }
            }
        }
        *looked = Some(begins);
        outcome
    }

    /// For an operation on everything that a session holds: learns of collections that only other servers have used
    /// so far. If that fails, the operation has to do with those that this server knows.
    pub(in crate::manager) async fn all_collections(
        &self,
        age: Duration,
        until: Instant,
    ) -> Vec<&'static str> {
        if let Err(e) = self.look_for_collections(age, until).await {
            self.seldom.warn("collections", || {
                format!("locks in collections that only other servers know may be left out: {e}")
            });
        }
        self.names()
    }

    /// A client names these collections: makes sure that this server knows those that patterns cover.
    #[cfg(feature = "web")]
    pub(crate) async fn learn<'a>(&self, names: impl IntoIterator<Item = &'a str>, until: Instant) {
        if names.into_iter().any(|name| self.get(name).is_none() && self.kind(name).is_some()) {
            self.all_collections(Duration::ZERO, until).await;
        }
    }
}

/// Looks for collections that other servers have prepared, until the manager is gone or shut down.
pub(in crate::manager) async fn follow(manager: Weak<Inner>) {
    let mut rhythm = Rhythm::new("looking for collections", LOOK);
    while let Some(inner) = manager.upgrade() {
        let (stop, all) = (inner.stop.token(), &inner.collections);
        let pause = match all.look_for_collections(LOOK / 2, inner.calls.until()).await {
            Ok(()) => rhythm.after_success(Some(LOOK)),
            Err(e) => rhythm.after_failure(&e).min(LOOK),
        };
        drop(inner);
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep(pause) => {}
        }
    }
}
