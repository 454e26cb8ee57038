//! Takes one lock for a request, or confirms it, and keeps it only if the request may.

use std::{
    iter,
    rc::Rc,
    time::{Duration, Instant},
};

use crate::{
    clock,
    error::{LockError, Result},
    key::LockKey,
    lock::{Aid, Lock, LockToken, Mode},
    manager::{Acquired, Wait, Wanted, can_be_taken_over, watch::ends::came},
    web::{
        current_request::CURRENT_REQUEST,
        request::{Document, Elsewhere, Got, OwnLock, RequestLocks, Terms},
    },
};

/// For a page that was left before the server had carried out its request: a reload keeps the lock.
const GRACE: Duration = Duration::from_secs(4);

/// How often a request tries to take a lock over whose holder changes meanwhile.
const TAKEOVERS: usize = 3;

/// After a wait of this length the access policy is asked again.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);

impl RequestLocks {
    /// Takes or confirms the lock and does `work` with it. Keeps no new lock if the work fails.
    ///
    /// # Cancel safety
    /// If the future is dropped, a fresh grant is given back.
    pub(in crate::web) async fn acquire<T>(
        &self,
        key: &LockKey,
        how: Terms<'_>,
        work: impl AsyncFn(&OwnLock, Instant) -> Result<T>,
    ) -> Result<(OwnLock, T)> {
        // The log names this document.
        let _ = CURRENT_REQUEST.try_with(|it| it.borrow_mut().document = Some(key.clone()));
        let mut acquired = self.acquire_or_refuse(key, how, work).await;
        self.describe_each(acquired.as_mut().err()).await;
        acquired
    }

    async fn acquire_or_refuse<T>(
        &self,
        key: &LockKey,
        how: Terms<'_>,
        work: impl AsyncFn(&OwnLock, Instant) -> Result<T>,
    ) -> Result<(OwnLock, T)> {
        self.check_may_lock()?;
        let turn = Rc::clone(self.taking.borrow_mut().entry(key.clone()).or_default());
        let _turn = turn.lock().await;
        let (mut upgrades, mut comes_back) = (None, None);
        if !how.offered.is_empty() && how.elsewhere != Elsewhere::TakeOver {
            let until = self.begin();
            match self.confirm(key, how, until).await {
                // A claim keeps the lock for the page that is there now.
                Ok(own) if own.is_leaving => comes_back = Some(own.held.token),
                Ok(own) => {
                    let worked = work(&own, until).await;
                    return self.keep_if_it_worked(own, worked, until).await;
                }
                Err(e) => upgrades = Some(self.upgradable(how.offered, e)?),
            }
        }
        let mut wanted = self.wanted(key, how.mode, upgrades)?;
        if comes_back.is_some() {
            // Whoever names its token may have it in any tab.
            wanted.tab = None;
        }
        // Confirmed, and not acquired again: otherwise the record would say that another request was told of the lock,
        // and the end of this request would not give the lock back.
        if self.has_taken(&wanted) {
            let until = self.begin();
            let confirmed = self.confirm(key, Terms { offered: &[], ..how }, until).await?;
            let own = OwnLock { got: Got::Granted, ..confirmed };
            let worked = work(&own, until).await;
            return self.keep_if_it_worked(own, worked, until).await;
        }
        let granting = &self.manager.core.granting;
        granting.check_limit_before(key, &wanted.aid, self.begin()).await?;
        if how.document != Document::MayBeMissing
            && !granting.may_exist(key, &wanted.aid, self.begin()).await?
        {
            self.give_back(iter::once(key)).await?;
            return Err(LockError::NotFound { key: key.clone() });
        }
        if self.names_version() {
            self.compare(key, &self.manager.core.reads.load(key, self.begin()).await?)?;
        }
        let began = clock::now();
        loop {
            let mut own = self.take(&wanted, how).await?;
            if comes_back.is_some_and(|token| token != own.held.token) {
                return Err(LockError::StaleToken { key: key.clone() });
            }
            let until = self.begin();
            let is_claimed = own.got != Got::Confirmed;
            own.has_waited = is_claimed && clock::since(began) > ASK_AGAIN_AFTER;
            let (kept, worked) = tokio::join!(self.check_may_keep(&own, until), work(&own, until));
            match kept {
                Ok(()) => return self.keep_if_it_worked(own, worked, until).await,
                Err(refused) => wanted.aid = self.take_again_as(refused, own, until).await?,
            }
        }
    }

    /// The token of the client's own shared lock, which is to become exclusive.
    ///
    /// # Errors
    /// If the acquisition that the client has named is gone.
    fn upgradable(&self, offered: &[LockToken], error: LockError) -> Result<LockToken> {
        Err(match error {
            LockError::Lost { key, holder: Some(lock), .. }
                if Some(&lock.aid) == self.aid().as_ref() =>
            {
                let named = lock.token.filter(|token| offered.contains(token));
                return named.ok_or(LockError::StaleToken { key });
            }
            LockError::Lost { holder: Some(lock), .. } => LockError::Held(lock),
            LockError::Lost { key, holder: None, .. } => LockError::StaleToken { key },
            LockError::WrongSession { lock, .. } => LockError::WrongSession { lock, asked: true },
            other => other,
        })
    }

    fn wanted(&self, key: &LockKey, mode: Mode, upgrades: Option<LockToken>) -> Result<Wanted> {
        Ok(Wanted {
            key: key.clone(),
            aid: self.aid_for_lock()?,
            person: Some(self.counts_as()),
            holder: self.actor().holder(),
            tab: self.headers.tab,
            page: self.headers.page,
            mode,
            upgrades,
            ttl: self.manager.core.settings.ttl,
        })
    }

    /// The locks that this request has taken, and has not given back.
    pub(in crate::web) fn taken(&self) -> Vec<LockToken> {
        self.fresh.borrow().iter().map(|fresh| fresh.token).collect()
    }

    /// True if this request has taken such a lock on this document.
    fn has_taken(&self, Wanted { key, aid, mode, .. }: &Wanted) -> bool {
        let is_such = |it: &Lock| it.key == *key && it.aid == *aid && it.mode.covers(*mode);
        self.fresh.borrow().iter().map(|fresh| &fresh.lock).any(is_such)
    }

    /// Sends one command, if there is no wait.
    async fn take(&self, wanted: &Wanted, how: Terms<'_>) -> Result<OwnLock> {
        let core = &self.manager.core;
        // A request of an idle page renews nothing else, so it must renew this lock.
        if !self.headers.is_idle
            && wanted.upgrades.is_none()
            && let Some(it) = core.granting.reenter(wanted, how.loads(), self.begin()).await?
        {
            return OwnLock::confirmed(it);
        }
        let (began, mut has_waited, mut takeovers) = (clock::now(), false, 0);
        loop {
            self.begin();
            // Two readers that waited to upgrade their locks would wait for each other.
            let waits = !has_waited && wanted.upgrades.is_none();
            let wait = if waits { how.wait.since(began) } else { Wait::no() };
            let acquired = self.acquire_or_wait(wanted, wait).await?;
            // A new deadline, but not after an error: the answer need not wait until an unwanted lock is given back.
            let until = self.begin();
            let from = match acquired {
                Acquired::Granted(fresh) => return OwnLock::granted(fresh),
                Acquired::Lost(key) => return Err(LockError::StaleToken { key }),
                // Another request of the session has got the lock during this wait.
                Acquired::Held(lock) if lock.aid == wanted.aid && !has_waited => {
                    has_waited = true;
                    continue;
                }
                Acquired::Held(lock)
                    if how.elsewhere == Elsewhere::TakeOver && can_be_taken_over(&lock) =>
                {
                    self.check_take_over(&lock, &wanted.aid, until).await?;
                    lock
                }
                Acquired::Held(lock) => return Err(LockError::Held(Box::new(lock))),
                Acquired::AlreadyMine(lock)
                    if how.elsewhere == Elsewhere::Confirm
                        || !lock.is_of_another_tab(wanted.tab) =>
                {
                    return OwnLock::new(lock, Got::Joined);
                }
                Acquired::AlreadyMine(lock) if how.elsewhere == Elsewhere::TakeOver => lock,
                Acquired::AlreadyMine(lock) => {
                    return Err(LockError::HeldByOtherTab(Box::new(lock)));
                }
            };
            let granted = core.take_over(&from, wanted, &self.actor(), &self.scope, until).await?;
            if let Some(fresh) = granted {
                return OwnLock::granted(fresh);
            }
            // The lock is gone in the meantime, so it may be free now.
            takeovers += 1;
            if takeovers == TAKEOVERS {
                return Err(LockError::Held(Box::new(from)));
            }
        }
    }

    /// # Errors
    /// If this session may not take this lock of another session over.
    async fn check_take_over(&self, lock: &Lock, aid: &Aid, until: Instant) -> Result<()> {
        let granting = &self.manager.core.granting;
        if !self.may_take_over(lock) {
            return Err(LockError::TakeOverRefused { key: lock.key.clone() });
        }
        match granting.locks_left(aid, until).await? {
            // Otherwise nobody would have the lock in the end.
            0 => Err(granting.too_many_locks()),
            _ => Ok(()),
        }
    }

    /// A wait ends with its session, and with its page, on whatever server they have ended.
    ///
    /// # Errors
    /// [`LockError::SessionEnded`], [`LockError::PageLeft`] if they end during the wait.
    async fn acquire_or_wait(&self, wanted: &Wanted, wait: Wait) -> Result<Acquired> {
        let core = &self.manager.core;
        let acquired = core.acquire_or_wait(wanted, &wanted.aid, wait, &self.scope);
        if wait == Wait::no() {
            return acquired.await;
        }
        self.has_waited.set(true);
        let end = core.end_of(&wanted.aid);
        let left = wanted.page.map(|page| core.end_of(&wanted.aid.of_page(page)));
        tokio::select! {
            biased;
            // A waiter that has left must not take the lock of the page that was loaded instead.
            () = came(left.as_ref()) => Err(LockError::PageLeft),
            acquired = acquired => acquired,
            () = end.came() => {
                self.has_ended.set(true);
                Err(LockError::SessionEnded { ago: Duration::ZERO })
            }
        }
    }

    /// A session that ends at this moment either releases this lock, or has already left its tombstone. A lock from an
    /// earlier request was released by that end. The same applies to a page that is left.
    ///
    /// # Errors
    /// If the session has ended or has too many locks, or if the page was left.
    async fn check_may_keep(&self, own: &OwnLock, until: Instant) -> Result<()> {
        if own.got == Got::Confirmed {
            return Ok(());
        }
        let core = &self.manager.core;
        let alive = core.sessions.refuse_ended(&own.lock.aid, self.headers.page, until);
        let is_fresh = own.got == Got::Granted;
        let limit = core.granting.check_limit_after(&own.lock, is_fresh, until);
        let (alive, limit) = tokio::join!(alive, limit);
        alive.and(limit)
    }

    /// Gives back a lock that this request may not keep. Returns the new aid of a session that came back, which may try
    /// again.
    ///
    /// # Errors
    /// The refusal, for all others.
    async fn take_again_as(&self, refused: LockError, own: OwnLock, until: Instant) -> Result<Aid> {
        match &refused {
            // The request that was granted the lock gives it back, or it is an old one.
            LockError::TooManyLocks { .. } if own.got == Got::Joined => {}
            // Other requests of the session may have been told that they hold this lock, and may not keep it either.
            LockError::SessionEnded { .. } | LockError::TooManyLocks { .. } => {
                self.release(&own, until).await?;
            }
            // This request has made the lock one of its page, whose beacon has come before.
            LockError::PageLeft if own.got == Got::Joined && own.lock.mode == Mode::Exclusive => {
                let granting = &self.manager.core.granting;
                granting.release_in(&own.held, self.headers.page, GRACE, until).await?;
            }
            _ => {}
        }
        if let LockError::SessionEnded { ago } = refused {
            // A token that was logged out stays so.
            if ago > self.news_for() && !self.is_client() {
                return Ok(self.replace_aid(&own.lock.aid));
            }
            self.has_ended.set(true);
        }
        Err(refused)
    }

    /// The aid for an ask.
    ///
    /// # Errors
    /// If the session has ended, or the page has been left.
    pub(in crate::web) async fn aid_for_ask(&self, until: Instant) -> Result<Aid> {
        let (aid, page) = (self.aid_for_lock()?, self.headers.page);
        match self.manager.core.sessions.refuse_ended(&aid, page, until).await {
            Err(LockError::SessionEnded { ago }) if ago > self.news_for() && !self.is_client() => {
                Ok(self.replace_aid(&aid))
            }
            refused => refused.map(|()| aid),
        }
    }

    /// A new aid for a session that came back, unless another extractor has already given it one.
    fn replace_aid(&self, dead: &Aid) -> Aid {
        let mut aid = self.aid.borrow_mut();
        if aid.as_ref() == Some(dead) {
            *aid = None;
        }
        aid.get_or_insert_with(Aid::new).clone()
    }

    /// Keeps the lock if the work with it has succeeded.
    async fn keep_if_it_worked<T>(
        &self,
        own: OwnLock,
        worked: Result<T>,
        until: Instant,
    ) -> Result<(OwnLock, T)> {
        let granting = &self.manager.core.granting;
        match worked {
            Ok(value) => {
                self.fresh.borrow_mut().extend(own.grant.take());
                self.remember(&own);
                if own.got == Got::Joined {
                    granting.joined(&own.lock);
                }
                Ok((own, value))
            }
            Err(e) => {
                if let LockError::NotFound { .. } = e {
                    granting.missed(&own.lock.aid);
                }
                if let LockError::NotFound { .. } | LockError::LoginRequired = e {
                    // There is no document, or nobody is logged in: the lock goes even if an earlier request took it.
                    self.release(&own, until).await?;
                }
                // The drop of `own` gives a new grant back.
                Err(e)
            }
        }
    }
}
