//! A held lock as a value.

pub(super) mod job;
pub(super) mod keeper;
mod write;

use std::{fmt, future::Future, ops::Deref, sync::Arc, time::Duration};

use futures_util::future::{join_all, select_all};
use parking_lot::Mutex;
use tokio::time::sleep;
use uuid::Uuid;

use crate::{
    error::{LockError, Result},
    event::LockEvent,
    key::LockKey,
    lock::{Aid, Answer, Ask, FencingToken, Lock, LockToken, Mode},
    manager::{
        Core, LockEvents,
        claim::{Acquired, Wanted},
        pauses::jittered,
        watched::LockWatch,
    },
    store::{Acquisition, Released},
    version::Version,
};

/// When a guard reads the asks again, if the store has not answered.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// A lock that is held as long as this value lives. Made by [`LockManager::acquire`](crate::LockManager::acquire) and by a
/// [`Job`](crate::Job).
///
/// - *Proves:* the lock was granted. Whether the lock is still held, only the server knows. Work that
///   must not overlap goes into a guarded save, carries the [`fence`](Self::fence), or stops when the
///   lock is [`lost`](Self::lost).
/// - *Is renewed* in the background, every third of its ttl, by one task for all guards of that ttl.
/// - *Ends* by [`release`](Self::release), by a drop (the manager's runtime then releases it; a drop
///   never blocks), or with its process after the ttl.
#[must_use = "the lock is released when the guard is dropped"]
pub struct LockGuard {
    core: Arc<Core>,
    lock: Lock,
    held: Acquisition,
    wanted: Wanted,
    owner: Aid,
    is_released: bool,
    /// The version of the document as it was last loaded or saved here.
    version: Mutex<Option<Version>>,
    /// The asks that this guard has returned, and that stand.
    heard: Mutex<Vec<Uuid>>,
    /// Keeps the news about the lock, which is stored only while something watches the lock.
    _watch: LockWatch,
}

impl LockGuard {
    pub(super) fn new(core: Arc<Core>, lock: Lock, wanted: Wanted, owner: Aid) -> Result<Self> {
        // Only possible if somebody has edited the lock record by hand.
        let held = Acquisition::of(&lock).ok_or_else(|| LockError::lost(lock.key.clone()))?;
        let watch = core.beliefs.watched.watch(&lock, held.token);
        core.keep(&wanted, &held, &owner);
        Ok(Self {
            core,
            lock,
            held,
            wanted,
            owner,
            is_released: false,
            version: Mutex::default(),
            heard: Mutex::default(),
            _watch: watch,
        })
    }

    /// The locked document.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.lock.key
    }

    /// Exclusive, or shared: then others may hold a shared lock at the same time.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.lock.mode
    }

    /// This acquisition.
    #[must_use]
    pub fn token(&self) -> LockToken {
        self.held.token
    }

    /// Higher than the fence of every earlier holder. Pass it to a resource outside the database, which
    /// refuses lower fences. Only in a [fenced](crate::Lockable::FENCED) collection.
    #[must_use]
    pub fn fence(&self) -> Option<FencingToken> {
        self.lock.fence
    }

    /// The version of the document as this guard has last loaded or saved it. `None` if it has not.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        *self.version.lock()
    }

    /// The lock as it was granted.
    #[must_use]
    pub fn lock(&self) -> &Lock {
        &self.lock
    }

    /// Waits until this process learns that the lock is gone: it was broken, or it could not be renewed.
    /// Resolves at the latest when the lock expires, counted from before its last renewal was sent, and
    /// so before the server grants the lock to anybody else.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        self.core.lost(&self.lock)
    }

    /// Waits until somebody asks for the exclusive lock, and returns each ask once. A job may then release the lock at a good
    /// moment, or [answer](Self::answer). Only people ask, through the lock API. `None` once the manager is being shut down,
    /// and at once if the job has not said that it [hears asks](crate::Job::hears_asks): then nobody can ask.
    /// Does not return if the lock is lost: wait for [`lost`](Self::lost) at the same time.
    ///
    /// As [`events`](crate::LockManager::events), this watches all registered collections. Each call begins with a read, so do
    /// not call it with a time limit that is shorter than one.
    ///
    /// # Cancel safety
    /// May be dropped and called again: no ask is missed.
    pub async fn asked(&self) -> Option<Ask> {
        if !self.held.aid.hears_asks() {
            return None;
        }
        let mut events = LockEvents::of(&self.core);
        loop {
            match &*events.next().await? {
                LockEvent::Resync => {}
                LockEvent::Asked(lock, _) if lock.token == Some(self.held.token) => {}
                _ => continue,
            }
            let asks = loop {
                match self.asks().await {
                    Ok(asks) => break asks,
                    Err(_) if self.core.stop_begins.is_cancelled() => return None,
                    Err(_) => sleep(jittered(ASK_AGAIN)).await,
                }
            };
            let mut heard = self.heard.lock();
            heard.retain(|id| asks.iter().any(|ask| ask.id == *id));
            if let Some(ask) = asks.into_iter().find(|ask| !heard.contains(&ask.id)) {
                heard.push(ask.id);
                return Some(ask);
            }
        }
    }

    /// The asks for the lock at this moment; none if the lock is gone.
    async fn asks(&self) -> Result<Vec<Ask>> {
        let until = self.core.verbs.until();
        let lock = self.core.reads.inspect(self.key(), Some(&self.held.aid), until).await?;
        let mut own = lock.filter(|lock| lock.token == Some(self.held.token));
        self.core.leave_out_ended_askers(own.as_mut_slice(), until).await;
        Ok(own.map(|lock| lock.asks).unwrap_or_default())
    }

    /// Answers an ask. The asker's page shows the answer.
    ///
    /// # Errors
    /// [`LockError::NoSuchAsk`] if the asker has left or has sent another text. [`LockError::Lost`] if the lock is gone.
    /// [`LockError::Store`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the answer may or may not be told.
    pub async fn answer(&self, ask: &Ask, answer: Answer) -> Result<()> {
        self.core.answer(&self.held, ask.id, answer, self.core.verbs.until()).await
    }

    /// Makes a shared lock exclusive. Granted if this is the only reader. Otherwise it is refused, and
    /// the lock stays shared. It does not wait: two readers would wait for each other forever.
    ///
    /// The upgrade is a new grant, with its own token and fence.
    ///
    /// # Errors
    /// [`LockError::Held`] by another reader. [`LockError::Lost`] if the shared lock had expired or was broken, even if
    /// the document is free: somebody may have written in between. [`LockError::Store`] or [`LockError::Frozen`]: the lock
    /// may be gone, and is then [lost](Self::lost).
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock may be lost.
    pub async fn upgrade(&mut self) -> Result<()> {
        if self.lock.mode == Mode::Exclusive {
            return Ok(());
        }
        let upgrades = Some(self.held.token);
        let wanted = Wanted { mode: Mode::Exclusive, upgrades, ..self.wanted.clone() };
        let scope = Default::default();
        match self.core.granting.acquire(&wanted, &scope, self.core.verbs.until()).await? {
            Acquired::Held(lock) => Err(LockError::Held(Box::new(lock))),
            Acquired::Lost(key) => Err(LockError::lost(key)),
            Acquired::AlreadyMine(lock) => self.becomes(lock, wanted),
            Acquired::Granted(fresh) => self.becomes(fresh.confirm(), wanted),
        }
    }

    fn becomes(&mut self, lock: Lock, wanted: Wanted) -> Result<()> {
        let upgraded = Self::new(Arc::clone(&self.core), lock, wanted, self.owner.clone())?;
        let mut shared = std::mem::replace(self, upgraded);
        // The grant has removed the shared lock.
        shared.is_released = true;
        Ok(())
    }

    /// Gives the lock back. It is no error if the lock is already gone.
    ///
    /// # Errors
    /// [`LockError::Store`]: the release goes on in the background until the lock expires.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock is still released.
    pub async fn release(mut self) -> Result<Released> {
        // A renewal at this moment would report the lock as lost.
        self.core.sessions.keep_no_more(&self.held);
        let released = self.core.granting.release_by(&self.held, self.core.verbs.until()).await;
        self.is_released = released.is_ok();
        released
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        self.core.sessions.keep_no_more(&self.held);
        if !self.is_released {
            self.core.granting.release_in_background(self.held.clone());
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard").field("lock", &self.lock).finish_non_exhaustive()
    }
}

/// Several locks, all of them held. Made by [`LockManager::acquire_all`](crate::LockManager::acquire_all); dereferences to the guards, in
/// the order of their keys.
#[derive(Debug, Default)]
#[must_use = "the locks are released when this is dropped"]
pub struct LockGuards(Vec<LockGuard>);

impl LockGuards {
    pub(super) fn push(&mut self, guard: LockGuard) {
        self.0.push(guard);
    }

    /// Waits until the first of them is [lost](LockGuard::lost). Never resolves if there are no guards.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub async fn lost(&self) {
        if self.0.is_empty() {
            return std::future::pending().await;
        }
        select_all(self.0.iter().map(|guard| Box::pin(guard.lost()))).await;
    }

    /// Gives all of them back at the same time.
    ///
    /// # Errors
    /// The first [`LockError::Store`]; see [`LockGuard::release`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the locks are still released.
    pub async fn release(mut self) -> Result<()> {
        let guards = std::mem::take(&mut self.0);
        let released = join_all(guards.into_iter().map(LockGuard::release)).await;
        released.into_iter().try_for_each(|released| released.map(drop))
    }
}

impl Deref for LockGuards {
    type Target = [LockGuard];

    fn deref(&self) -> &[LockGuard] {
        &self.0
    }
}

/// Drops the guards in reverse order.
impl Drop for LockGuards {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}
