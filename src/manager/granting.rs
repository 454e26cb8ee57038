//! Granting locks: a claim at once or after a wait, and re-entry by one read.
//!
//! A read may be older than a break by a moment. That is harmless: every guarded write checks the lock, and the next
//! read sees the break.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::time::sleep;
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::{LockError, Result, StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Lock, LockToken, Mode},
    manager::{
        Core,
        claim::{Acquired, Provisional, Wait, Wanted, upgraded_from},
        collections::Collections,
        freezes::{Freezes, frozen_by},
        observe,
        reads::Reads,
        verbs::{self, Verbs},
        wait::{ForWaiters, InTurn, Together},
        watch::changes::{Wakeup, poll_pause},
        watched::Beliefs,
    },
    store::{Claim, Confirmed, TryAcquire},
};

/// For how long a fresh lock within the limit waits for newer locks beyond it to be given back, and how often it counts.
const GIVES_WAY: Duration = Duration::from_secs(3);
const COUNT_AGAIN: Duration = Duration::from_millis(50);

/// The lock is neither stale nor beyond the limit: other requests of the session are giving locks back.
fn try_again(key: &LockKey) -> LockError {
    let what = format!(
        "the lock on {key} was not kept, because other requests of this session are giving locks back at this \
         moment: try again"
    );
    StoreError::new(StoreErrorKind::Unavailable, what).into()
}

/// What a read shows of a document whose lock a session asks for.
pub(crate) enum Availability {
    /// The session holds the lock.
    Own,
    /// Nothing that the read shows is in the way.
    Free,
    Refused(LockError),
}

/// Grants locks, and takes them back.
pub(crate) struct Granting {
    pub(super) verbs: Arc<Verbs>,
    pub(super) collections: Arc<Collections>,
    pub(super) freezes: Arc<Freezes>,
    pub(super) beliefs: Arc<Beliefs>,
    pub(super) reads: Arc<Reads>,
    pub(super) ttl: Duration,
    pub(super) max_hold: Option<Duration>,
    pub(super) max_locks: usize,
}

impl Core {
    /// Takes the lock, and waits for it as long as `wait` says. `owner` is the waiter that a search for circles
    /// sees: the session itself, or the job that the guard belongs to.
    ///
    /// # Cancel safety
    /// If the future is dropped, it leaves the queue and gives a fresh grant back.
    pub(crate) async fn acquire_or_wait(
        self: &Arc<Self>,
        wanted: &Wanted,
        owner: &Aid,
        wait: Wait,
        scope: &TaskTracker,
    ) -> Result<Acquired> {
        if wait.0 == Some(Duration::ZERO) {
            self.granting.acquire(wanted, scope, self.verbs.until()).await
        } else {
            self.wait(wanted, owner, wait, scope).await
        }
    }

    async fn wait(
        self: &Arc<Self>,
        wanted: &Wanted,
        owner: &Aid,
        wait: Wait,
        scope: &TaskTracker,
    ) -> Result<Acquired> {
        observe::in_span!("doclock.wait", Some(wanted.key.collection()), async {
            let label = self.collections.label(&wanted.key);
            let mut waiting = observe::Waiting::begins(label, wanted.mode);
            let acquired = self.beliefs.queues.acquire(self, wanted, owner, wait, scope).await;
            waiting.ends(&acquired);
            acquired
        })
    }
}

impl ForWaiters for Arc<Core> {
    async fn claim(
        &self,
        wanted: &Wanted,
        in_turn: Option<InTurn>,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired> {
        let (turn, order) = in_turn.map(|it| (it.turn, it.order)).unzip();
        let claim = wanted.claim(self.settings.max_hold, turn);
        let label = self.collections.label(&wanted.key);
        self.granting.claim(label, &wanted.key, claim, order, scope, until).await
    }

    async fn live_lock(&self, key: &LockKey, aid: &Aid, until: Instant) -> Result<Option<Lock>> {
        self.reads.inspect(key, Some(aid), until).await
    }

    fn watch(&self, collection: &'static str) -> Option<Duration> {
        self.watch_over(collection);
        (self.watches.state(collection) != Some(Wakeup::Told)).then(poll_pause)
    }
}

impl Granting {
    /// One attempt. `scope` also tracks the cleanup of an unwanted grant.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        wanted: &Wanted,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired> {
        let (label, _) = self.collections.ready(&wanted.key, until).await?;
        let claim = wanted.claim(self.max_hold, None);
        let answer = self.claim(label, &wanted.key, claim, None, scope, until).await?;
        if let Acquired::Held(_) = answer {
            observe::refused(label, wanted.mode);
        }
        Ok(answer)
    }

    /// `label` is the collection in metrics. `order` is kept until the outcome is known, but no longer than a
    /// deadline. A claim that takes effect later is corrected by the next command.
    async fn claim(
        self: &Arc<Self>,
        label: &'static str,
        key: &LockKey,
        claim: Claim,
        order: Option<Together>,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired> {
        observe::in_span!("doclock.acquire", Some(key.collection()), async {
            let timer = observe::Timer::start(label, claim.mode);
            let acquired = self.claim_unless_frozen(key, claim, order, scope, until).await;
            timer.ends(observe::outcome(&acquired));
            acquired
        })
    }

    async fn claim_unless_frozen(
        self: &Arc<Self>,
        key: &LockKey,
        claim: Claim,
        order: Option<Together>,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired> {
        let held = self.held_in_a_freeze(key, &claim, until).await?;
        match self.claim_at_once(key, claim, order, scope, until).await? {
            Acquired::Granted(fresh) => {
                Ok(Acquired::Granted(self.freezes.keep_unless_frozen(fresh, until).await?))
            }
            // Perhaps the grant of another request, which the freeze takes back at this moment.
            Acquired::AlreadyMine(lock) if held.is_none() || held != lock.token => {
                self.freezes.check(key, Some(lock.since), until).await?;
                Ok(Acquired::AlreadyMine(lock))
            }
            other => Ok(other),
        }
    }

    /// The lock that the session holds in a frozen collection, and that the claim only renews. `None` if the collection
    /// is not frozen.
    async fn held_in_a_freeze(
        &self,
        key: &LockKey,
        claim: &Claim,
        until: Instant,
    ) -> Result<Option<LockToken>> {
        let Some(freeze) = self.freezes.on(key.collection()) else { return Ok(None) };
        let held = self.reads.inspect(key, Some(&claim.aid), until).await?;
        match held.filter(|it| it.aid == claim.aid && it.mode.covers(claim.mode)) {
            Some(held) => Ok(held.token),
            None => Err(frozen_by(key, freeze)),
        }
    }

    async fn claim_at_once(
        self: &Arc<Self>,
        key: &LockKey,
        claim: Claim,
        order: Option<Together>,
        scope: &TaskTracker,
        until: Instant,
    ) -> Result<Acquired> {
        let permit = self.verbs.claim_permit_by(until).await?;
        let (granting, own_scope, key) = (Arc::clone(self), scope.clone(), key.clone());
        let acquire = async move {
            let (mut claim, mut attempts, asked) = (Arc::new(claim), 0, clock::now());
            let answer = verbs::retry(until, verbs::FOREGROUND, |until| {
                attempts += 1;
                if attempts > 1 {
                    Arc::make_mut(&mut claim).token = claim.token.next_attempt();
                }
                let (granting, key, claim) = (&granting, &key, Arc::clone(&claim));
                async move { granting.verbs.store.try_acquire(key, &claim, until).await }
            });
            let answer = answer.await;
            if let Ok(answer) = &answer {
                if attempts > 1 {
                    granting.earlier_may_be_late(&key, &claim, answer, &permit);
                }
                // Also if the caller is gone.
                if let Some(shared) = upgraded_from(&key, &claim)
                    && !matches!(answer, TryAcquire::Held(_))
                {
                    granting.beliefs.gone(&shared);
                }
                if let TryAcquire::Granted(lock)
                | TryAcquire::AlreadyMine(lock)
                | TryAcquire::Held(lock) = answer
                {
                    granting.beliefs.watched.saw(lock, asked);
                }
            }
            match answer {
                // If nobody waits for the answer any more, it is dropped, and the lock is given back.
                Ok(TryAcquire::Granted(lock)) => {
                    Ok(Acquired::Granted(Provisional::new(lock, &claim, move |it, joined| {
                        granting.give_back(vec![it], joined, &own_scope, permit);
                    })))
                }
                Ok(TryAcquire::AlreadyMine(lock)) => Ok(Acquired::AlreadyMine(lock)),
                Ok(TryAcquire::Held(lock)) => Ok(Acquired::Held(lock)),
                Ok(TryAcquire::Lost(key)) => Ok(Acquired::Lost(key)),
                Err(error) => {
                    // An attempt may have been carried out anyway, or may still be under way.
                    granting.claim_failed(&error, &key, &claim, &own_scope, &permit);
                    Err(error)
                }
            }
        };
        let acquire = verbs::with_permit(order, self.verbs.deadline, acquire);
        self.verbs.complete("try_acquire", until, scope, acquire).await
    }

    /// What one read shows of these documents, for a session that asks for their locks: one query for each collection.
    pub(crate) async fn availability_of_each(
        &self,
        keys: &[LockKey],
        aid: Option<&Aid>,
        mode: Mode,
        until: Instant,
    ) -> Result<Vec<Availability>> {
        let found = self.reads.inspect_many(keys, aid, until).await?;
        let shown = keys.iter().zip(found).map(|(key, lock)| {
            let is_mine = lock.as_ref().is_some_and(|it| Some(&it.aid) == aid);
            let excludes = |it: &Lock| mode == Mode::Exclusive || it.mode == Mode::Exclusive;
            match (lock, self.freezes.on(key.collection())) {
                (Some(lock), Some(_)) if is_mine && lock.mode.covers(mode) => Availability::Own,
                (_, Some(freeze)) => Availability::Refused(frozen_by(key, freeze)),
                (Some(_), None) if is_mine => Availability::Own,
                (Some(lock), None) if excludes(&lock) => {
                    observe::refused(self.collections.label(key), mode);
                    Availability::Refused(LockError::Held(Box::new(lock)))
                }
                _ => Availability::Free,
            }
        });
        Ok(shown.collect())
    }

    /// How many locks a web session may have beside those that it has.
    pub(crate) async fn locks_left(&self, aid: &Aid, until: Instant) -> Result<usize> {
        Ok(self.max_locks.saturating_sub(self.count(aid, until).await?.len()))
    }

    /// Refuses a web session that has no room for another lock, before it is granted one that it may not keep: another
    /// request may join a grant before it is given back. Asks the store only if the session may have reached the limit.
    ///
    /// # Errors
    /// [`LockError::TooManyLocks`], unless the session has this lock already, or somebody else has it.
    pub(crate) async fn check_limit_before(
        &self,
        key: &LockKey,
        aid: &Aid,
        until: Instant,
    ) -> Result<()> {
        if self.beliefs.activity.believed(aid) < self.max_locks
            || self.locks_left(aid, until).await? > 0
            || self.reads.inspect(key, Some(aid), until).await?.is_some()
        {
            return Ok(());
        }
        Err(self.too_many_locks())
    }

    /// Refuses a lock that a web session was just granted or has joined, if the session has too many locks with it.
    ///
    /// Each request counts after its own grant, and keeps it only if the count is within the limit. So of any locks that
    /// are kept, the request that counted last has counted all of them, whatever their dates say. The dates say who gives
    /// way: the newest locks do at once, and an older one waits for them, so that one of several simultaneous requests gets
    /// the last place. A lock that is not fresh is one of another request, which counts for itself. If that request waits
    /// in vain, the lock stays for the requests that have joined it.
    ///
    /// Asks the store only if the session may be close to the limit.
    pub(crate) async fn check_limit_after(
        &self,
        lock: &Lock,
        is_fresh: bool,
        until: Instant,
    ) -> Result<()> {
        let limit = self.max_locks;
        if !self.beliefs.activity.granted(&lock.aid, limit) {
            return Ok(());
        }
        let patience = until.min(clock::now() + GIVES_WAY);
        loop {
            let mut locks = self.count(&lock.aid, until).await?;
            locks.sort_by(|one, other| (one.since, &one.key).cmp(&(other.since, &other.key)));
            match locks.iter().position(|it| it.token == lock.token) {
                Some(at) if at < limit && (locks.len() <= limit || !is_fresh) => return Ok(()),
                Some(at) if at < limit && clock::now() < patience => sleep(COUNT_AGAIN).await,
                Some(at) if at < limit => return Err(try_again(&lock.key)),
                None if locks.len() < limit => return Err(try_again(&lock.key)),
                _ => return Err(self.too_many_locks()),
            }
        }
    }

    async fn count(&self, aid: &Aid, until: Instant) -> Result<Vec<Lock>> {
        let in_each = self.reads.in_each(|collection| self.reads.list_in(collection, aid, until));
        let locks: Vec<_> = in_each.await?.into_iter().flatten().collect();
        self.beliefs.activity.counted(aid, locks.len());
        Ok(locks)
    }

    pub(crate) fn overloaded(&self) -> LockError {
        verbs::overloaded("try_acquire").into()
    }

    pub(crate) fn too_many_locks(&self) -> LockError {
        observe::locks_refused();
        LockError::TooManyLocks { limit: self.max_locks }
    }

    /// Confirms by one read the lock that this request wants and its session holds. `None` also if the record must
    /// change: the lease is about to expire, or the lock belongs to another tab, to another load of the page or to
    /// another name of the holder, or the page comes back within its grace period, or no second request has joined
    /// the lock yet.
    ///
    /// Costs nothing unless a second request has [joined](Self::joined) the lock on this server.
    ///
    /// # Errors
    /// The errors of the store.
    pub(crate) async fn reenter(
        &self,
        wanted: &Wanted,
        load: bool,
        until: Instant,
    ) -> Result<Option<Confirmed>> {
        let Wanted { key, aid, .. } = wanted;
        if !self.beliefs.activity.was_joined(aid, key) {
            return Ok(None);
        }
        let timer = observe::Timer::start(self.collections.label(key), wanted.mode);
        let confirmed = self.reads.confirm(key, aid, load, until).await?;
        let Some(confirmed) = confirmed.filter(|it| changes_nothing(wanted, it)) else {
            return Ok(None);
        };
        timer.ends("already_mine");
        Ok(Some(confirmed))
    }

    /// Another request than the one that took this lock has joined it, and the record says so.
    pub(crate) fn joined(&self, lock: &Lock) {
        self.beliefs.activity.joined(&lock.aid, &lock.key);
    }

    /// The client of this session has shown that it believed in this acquisition, which is gone.
    pub(crate) fn missed_lock(&self, key: &LockKey, token: LockToken, noticed: &'static str) {
        self.beliefs.losses.count(self.collections.label(key), Some(token), "unknown", noticed);
    }

    /// The session has asked for a missing document, and had the lock of it for a moment.
    pub(crate) fn missed(&self, aid: &Aid) {
        self.beliefs.activity.missed(aid);
    }

    /// True if the application has to be asked, once a minute, whether the person of this session may keep its locks.
    pub(crate) fn is_to_be_asked(&self, aid: &Aid) -> bool {
        self.beliefs.activity.is_to_be_asked(aid)
    }

    /// True if the document may exist. The store is asked if the session has missed a document within the last
    /// minute: so one person who asks for missing documents again and again announces no locks to everybody.
    pub(crate) async fn may_exist(&self, key: &LockKey, aid: &Aid, until: Instant) -> Result<bool> {
        Ok(!self.beliefs.activity.has_missed(aid) || self.reads.exists(key, until).await?)
    }
}

fn changes_nothing(wanted: &Wanted, it: &Confirmed) -> bool {
    let Wanted { mode, tab, page, holder, ttl, .. } = wanted;
    let lock = &it.lock;
    it.is_known
        && !it.is_leaving
        && lock.mode.covers(*mode)
        && !lock.is_of_another_tab(*tab)
        && (page.is_none() || *page == it.page)
        && lock.holder.as_ref() == Some(holder)
        && lock.expires_in() >= *ttl / 3
}
