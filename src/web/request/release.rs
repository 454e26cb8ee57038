//! Releases the locks of the session of a request.

use std::{
    collections::{BTreeSet, HashSet},
    time::{Duration, Instant},
};

use crate::{
    error::{LockError, Result},
    key::LockKey,
    lock::{Lock, LockToken, Mode, PageId, TabId},
    store::{Acquisition, Released},
    web::request::{Got, OwnLock, RequestLocks},
};

impl RequestLocks {
    /// Releases this acquisition, even if other requests were told that the session holds it.
    pub(in crate::web) async fn release(&self, own: &OwnLock, until: Instant) -> Result<Released> {
        let released = self.manager.core.granting.release_by(&own.held, until).await?;
        if let Some(grant) = own.grant.take() {
            grant.forget();
        }
        self.forget(own.held.token);
        Ok(released)
    }

    /// Gives back a lock that this request was granted, unless it is one of these. It stays for other requests that were
    /// told meanwhile that the session holds it.
    pub(in crate::web) fn retract_unless(&self, taken_before: &[LockToken], token: LockToken) {
        if !taken_before.contains(&token) {
            let mut fresh = self.fresh.borrow_mut();
            if fresh.extract_if(.., |fresh| fresh.token == token).count() > 0 {
                self.held.borrow_mut().retain(|held| *held != token);
            }
        }
    }

    /// Notes that the session itself has released this lock.
    pub(in crate::web) fn has_released(&self, held: &Acquisition, released: Released) {
        if released == Released::Released {
            self.manager.core.causes.was_released(held);
        }
    }

    /// As `release`, but a release that fails goes on in the background: the document is already `done`.
    pub(in crate::web) async fn let_go(&self, own: &OwnLock, done: &str) {
        match self.release(own, self.begin()).await {
            Ok(released) => self.has_released(&own.held, released),
            Err(e) => {
                log::warn!(
                    target: "actix_doclock::web",
                    "{:?} is {done}, but its lock is not released yet: {e}", own.held.key,
                );
                self.forget(own.held.token);
                self.manager.core.granting.release_in_background(own.held.clone());
            }
        }
    }

    /// Releases the lock of this session on the document, unless an exclusive one belongs to another tab.
    pub(in crate::web) async fn release_key(&self, key: &LockKey) -> Result<Released> {
        self.release_if(key, |_| true).await
    }

    /// As [`release_key`](Self::release_key), but a shared lock stays if another tab was granted it: a page that gives up a
    /// wait does not know whether it holds anything.
    pub(in crate::web) async fn release_of_tab(&self, key: &LockKey) -> Result<Released> {
        let is_of_another =
            |tab: TabId| self.headers.tab.is_some_and(|of_request| of_request != tab);
        let is_own =
            |lock: &Lock| lock.mode == Mode::Exclusive || !lock.tab.is_some_and(is_of_another);
        self.release_if(key, is_own).await
    }

    async fn release_if(&self, key: &LockKey, may: impl Fn(&Lock) -> bool) -> Result<Released> {
        let until = self.begin();
        let own = self.own_in(key.collection(), until).await?;
        match own.into_iter().find(|lock| lock.key == *key).filter(may) {
            None => Ok(Released::AlreadyGone),
            Some(lock) if lock.is_of_another_tab(self.headers.tab) => {
                Err(LockError::StaleToken { key: key.clone() })
            }
            Some(lock) => {
                let own = OwnLock::new(lock, Got::Confirmed)?;
                let released = self.release(&own, until).await?;
                self.has_released(&own.held, released);
                Ok(released)
            }
        }
    }

    /// Releases the locks on documents that this person may not, or no longer, have: whichever tab holds them.
    pub(super) async fn give_back(&self, forbidden: impl Iterator<Item = &LockKey>) -> Result<()> {
        let forbidden: HashSet<_> = forbidden.collect();
        let collections: BTreeSet<_> = forbidden.iter().map(|key| key.collection()).collect();
        for collection in collections {
            for lock in self.own_in(collection, self.begin()).await? {
                if forbidden.contains(&lock.key) {
                    self.release(&OwnLock::new(lock, Got::Confirmed)?, self.begin()).await?;
                }
            }
        }
        Ok(())
    }

    /// The page of this tab has been left, and may not know yet which lock it has been granted: its exclusive lock on the
    /// document expires after `grace`. A lock that is granted to it later is given back at once, on every server. Its
    /// shared lock stays, which another tab may have taken.
    pub(in crate::web) async fn leave(
        &self,
        key: &LockKey,
        tab: Option<TabId>,
        page: PageId,
        grace: Duration,
    ) -> Result<()> {
        let Some(aid) = self.aid() else { return Ok(()) };
        let (core, until) = (&self.manager.core, self.begin());
        core.sessions.end_page(&aid, page, until).await?;
        let own = self.own_in(key.collection(), until).await?;
        let is_of_tab = |lock: &Lock| {
            lock.key == *key && lock.mode == Mode::Exclusive && tab.is_some() && lock.tab == tab
        };
        if let Some(lock) = own.into_iter().find(is_of_tab) {
            let own = OwnLock::new(lock, Got::Confirmed)?;
            core.granting.release_in(&own.held, Some(page), grace, until).await?;
        }
        Ok(())
    }

    /// The locks of this session in the collection. Nobody learns from the time of the answer about the locks of others.
    async fn own_in(&self, collection: &str, until: Instant) -> Result<Vec<Lock>> {
        match self.aid() {
            Some(aid) => self.manager.core.reads.list_in(collection, &aid, until).await,
            None => Ok(Vec::new()),
        }
    }

    /// Notes that this request no longer holds this acquisition.
    pub(in crate::web) fn forget(&self, token: LockToken) {
        self.held.borrow_mut().retain(|held| *held != token);
        for gone in self.fresh.borrow_mut().extract_if(.., |fresh| fresh.token == token) {
            gone.forget();
        }
    }

    /// Notes that this request holds no locks any more.
    pub(in crate::web) fn forget_all(&self) {
        self.held.take();
        for gone in self.fresh.take() {
            gone.forget();
        }
    }
}
