//! Confirming a lock that a session holds, by one read.
//!
//! A read may be older than a break by a moment. That is harmless: every guarded write checks the lock, and
//! the next read sees the break.

use std::time::Instant;

use crate::{
    clock,
    error::LockError,
    key::LockKey,
    lock::{Aid, Lock, LockToken, Mode},
    manager::{
        LockManager,
        claim::{Acquired, Wanted},
        observe,
    },
    store::Confirmed,
};

impl LockManager {
    /// The lock of this session and, if `load`, its document. `None` if one read does not tell; then ask with
    /// another verb.
    ///
    /// # Errors
    /// See [`LockManager`].
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.confirm", skip_all,
        fields(collection = key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn confirm(
        &self,
        key: &LockKey,
        aid: &Aid,
        load: bool,
        until: Instant,
    ) -> Result<Option<Confirmed>, LockError> {
        self.ready(key, until).await?;
        let asked = clock::now();
        let args = (key.clone(), aid.clone(), load);
        let confirmed = self
            .run("confirm", until, args, |store, (key, aid, load)| store.confirm(key, aid, *load));
        let confirmed = confirmed.await?;
        observe::confirmed(confirmed.is_some());
        if let Some(confirmed) = &confirmed {
            self.inner.saw(&confirmed.lock, asked);
        }
        Ok(confirmed)
    }

    /// The same for a request that wants this lock. `None` also if the record must change: its lease is
    /// about to expire, or it belongs to another tab, to another load of the page or to another name of the
    /// holder, or the page comes back within its grace period, or no second request was told of the lock
    /// yet.
    ///
    /// Costs nothing if the session was not [told](Self::told) of the lock on this server.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub(crate) async fn reenter(
        &self,
        wanted: &Wanted,
        load: bool,
        until: Instant,
    ) -> Result<Option<Confirmed>, LockError> {
        let Wanted { key, aid, .. } = wanted;
        if !self.inner.activity.was_told(aid, key) {
            return Ok(None);
        }
        let timer = observe::Timer::start(self, key, wanted.mode);
        let confirmed = self.confirm(key, aid, load, until).await?;
        let Some(confirmed) = confirmed.filter(|it| changes_nothing(wanted, it)) else {
            return Ok(None);
        };
        timer.acquired::<LockError>(&Ok(Acquired::AlreadyMine(confirmed.lock.clone())));
        Ok(Some(confirmed))
    }

    /// Another request than the one that took this lock was told of it, and the record says so.
    pub(crate) fn told(&self, lock: &Lock) {
        self.inner.activity.told(&lock.aid, &lock.key);
    }

    /// The client of this session has shown that it believed in this acquisition, which is gone.
    pub(crate) fn missed_lock(&self, key: &LockKey, token: LockToken, noticed: &'static str) {
        observe::lost(self, key, Some(token), "unknown", noticed);
    }

    /// The session has asked for a missing document, and had the lock of it for a moment.
    pub(crate) fn missed(&self, aid: &Aid) {
        self.inner.activity.missed(aid);
    }

    /// Whether the document may exist. The store is asked if the session has missed a document within the last
    /// minute: so one person who asks for missing documents again and again announces no locks to everybody.
    pub(crate) async fn may_exist(
        &self,
        key: &LockKey,
        aid: &Aid,
        until: Instant,
    ) -> Result<bool, LockError> {
        Ok(!self.inner.activity.has_missed(aid) || self.exists(key, until).await?)
    }
}

fn changes_nothing(wanted: &Wanted, it: &Confirmed) -> bool {
    let Wanted { mode, tab, page, holder, ttl, .. } = wanted;
    let lock = &it.lock;
    let is_of_this_tab =
        lock.mode == Mode::Shared || tab.zip(lock.tab).is_none_or(|(this, that)| this == that);
    it.is_known
        && !it.is_leaving
        && lock.mode.covers(*mode)
        && is_of_this_tab
        && (page.is_none() || *page == it.page)
        && lock.holder.as_ref() == Some(holder)
        && lock.expires_in() >= *ttl / 3
}
