//! The collections by pattern: a collection is prepared on its first use, and found when another server has prepared it.

use std::{
    sync::Weak,
    time::{Duration, Instant},
};

use futures_util::{StreamExt, stream};
use tokio::{
    sync::MutexGuard,
    time::{sleep, timeout_at},
};

use crate::{
    clock,
    error::{LockError, Result, StoreError, StoreErrorKind},
    key::LockKey,
    manager::{
        Core,
        collections::{Collections, MAX_COLLECTIONS, Registered, is_ours},
        pauses::Pauses,
    },
    store::Pattern,
};

/// How often a manager looks for the collections that other servers have prepared.
const DISCOVER_EVERY: Duration = Duration::from_secs(10);
const PREPARED_AT_ONCE: usize = 8;

impl Collections {
    async fn prepare_by_pattern(
        &self,
        name: &str,
        registered: Registered,
        until: Instant,
    ) -> Result<&'static str> {
        if self.known.read().by_name.len() >= MAX_COLLECTIONS {
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
    ) -> Result<(&'static str, Registered)> {
        let name = key.collection();
        let found = self.prepare_if_there(name, Pattern::exactly(name), until).await?;
        found.ok_or_else(|| LockError::NotFound { key: key.clone() })
    }

    /// Prepares a collection by pattern, unless this `sign` of it does not exist.
    pub(super) async fn prepare_if_there(
        &self,
        name: &str,
        sign: Pattern,
        until: Instant,
    ) -> Result<Option<(&'static str, Registered)>> {
        let registered = self.registered(name)?;
        let _turn = self.turn_to_prepare(until).await?;
        if let Some(known) = self.get(name) {
            return Ok(Some(known));
        }
        let found = self
            .verbs
            .run("collections", until, sign, |store, it, until| store.collections(it, 1, until));
        if found.await?.is_empty() {
            return Ok(None);
        }
        Ok(Some((self.prepare_by_pattern(name, registered, until).await?, registered)))
    }

    /// As [`ready`](Self::ready), for a new document, which may be the first one of its collection.
    #[cfg(feature = "web")]
    pub(crate) async fn ready_to_create(&self, key: &LockKey, until: Instant) -> Result<()> {
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

    async fn turn_to_prepare(&self, until: Instant) -> Result<MutexGuard<'_, Option<Instant>>> {
        timeout_at(until.into(), self.discovered.lock()).await.map_err(|_| {
            let message = "another collection is being prepared, and the database does not answer";
            StoreError::new(StoreErrorKind::Unavailable, message).into()
        })
    }

    /// Learns of the collections by pattern that other servers have prepared, unless a discovery began within `age`
    /// before this call. Costs nothing without patterns.
    ///
    /// # Errors
    /// The first error; all other collections are prepared anyway.
    pub(in crate::manager) async fn discover(&self, age: Duration, until: Instant) -> Result<()> {
        let patterns = self.known.read().patterns.clone();
        if patterns.is_empty() {
            return Ok(());
        }
        let asked = clock::now();
        let mut discovered = self.turn_to_prepare(until).await?;
        if discovered.is_some_and(|at| at + age >= asked) {
            return Ok(());
        }
        let (begins, mut outcome) = (clock::now(), Ok(()));
        for (pattern, registered) in patterns {
            let found =
                self.verbs.run("collections", until, pattern.of_locks(), |store, it, until| {
                    store.collections(it, MAX_COLLECTIONS + 1, until)
                });
            let found = found.await?;
            let names = found.iter().map(|locks| locks.strip_suffix(".lock").unwrap_or(locks));
            let new: Vec<_> =
                names.filter(|name| self.get(name).is_none() && !is_ours(name)).collect();
            let room = MAX_COLLECTIONS.saturating_sub(self.known.read().by_name.len());
            let (new, too_many) = new.split_at(room.min(new.len()));
            let prepare = |name| self.prepare_by_pattern(name, registered, until);
            // A collection that cannot be prepared takes the time of no other one.
            let all: Vec<_> = new.iter().copied().map(prepare).collect();
            let mut prepared = stream::iter(all).buffer_unordered(PREPARED_AT_ONCE);
            while let Some(prepared) = prepared.next().await {
                outcome = outcome.and(prepared.map(drop));
            }
            for name in too_many {
                outcome = outcome.and(prepare(name).await.map(drop));
            }
        }
        *discovered = Some(begins);
        outcome
    }

    /// For an operation on everything that a session holds: learns of collections that only other servers have used
    /// so far. If that fails, or takes half of the time, the operation covers only the collections that this server knows.
    pub(crate) async fn all_collections(&self, until: Instant) -> Vec<&'static str> {
        let half = clock::now() + until.saturating_duration_since(clock::now()) / 2;
        if let Err(e) = self.discover(Duration::ZERO, half).await {
            self.log_limit.warn("collections", || {
                format!("locks in collections that only other servers know may be left out: {e}")
            });
        }
        self.names()
    }

    /// Makes sure that this server knows these collections, which a client names, as far as patterns cover them and there
    /// are locks in them.
    ///
    /// # Errors
    /// If it is not certain whether there are locks in one of them.
    #[cfg(feature = "web")]
    pub(crate) async fn learn(
        &self,
        names: &std::collections::BTreeSet<&str>,
        until: Instant,
    ) -> Result<()> {
        let is_new = |name: &&str| self.get(name).is_none() && self.kind(name).is_some();
        if !names.iter().any(is_new) {
            return Ok(());
        }
        let discovered = self.discover(Duration::ZERO, until).await;
        if names.iter().any(is_new) { discovered } else { Ok(()) }
    }
}

/// Looks for collections that other servers have prepared, until the manager is gone.
pub(in crate::manager) async fn follow(manager: Weak<Core>) {
    let mut pauses = Pauses::new("looking for collections", DISCOVER_EVERY);
    while let Some(core) = manager.upgrade() {
        let discovery = core.collections.discover(DISCOVER_EVERY / 2, core.verbs.until());
        let pause = match discovery.await {
            Ok(()) => pauses.after_success(Some(DISCOVER_EVERY)),
            Err(e) => pauses.after_failure(&e).min(DISCOVER_EVERY),
        };
        drop(core);
        sleep(pause).await;
    }
}
