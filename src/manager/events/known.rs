//! What those who look on have been told so far, and what is new.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use crate::{EndReason, Lock, LockError, LockEvent, LockKey, LockManager};

/// Of how many documents in a collection is known who holds them. Beyond, everybody is asked to look
/// for themselves.
const MOST: usize = 10_000;
/// How often everybody is asked to look for themselves, at most, where there is more than is known.
const RESYNC: Duration = Duration::from_secs(1);

/// What came of a look at all locks.
pub(super) enum Looked {
    /// Whatever has changed since the last one was told.
    AndTold,
    /// There was none to compare it with, or there are too many.
    Anew,
}

/// The locks of a collection as everybody was told of them, and since when that is so.
pub(super) struct Known {
    /// When everybody was last asked to look for themselves.
    asked: Option<Instant>,
    pub(super) collection: &'static str,
    locks: HashMap<LockKey, Vec<(Lock, Instant)>>,
    /// There are no more than could be listed.
    is_complete: bool,
}

impl Known {
    pub(super) fn new(collection: &'static str) -> Self {
        Self { asked: None, collection, locks: HashMap::new(), is_complete: false }
    }

    pub(super) async fn look_at(
        &mut self,
        manager: &LockManager,
        key: &LockKey,
    ) -> Result<(), LockError> {
        let locks =
            manager.run("locks_on", manager.until(), key.clone(), |store, key| store.locks_on(key));
        let locks = locks.await?;
        let is_unknown = locks.is_empty() && !self.is_complete && !self.locks.contains_key(key);
        if is_unknown && self.asked.is_none_or(|at| at.elapsed() >= RESYNC) {
            self.asked = Some(Instant::now());
            manager.inner.events.tell(LockEvent::Resync);
        }
        self.are_now(manager, key, locks).await;
        Ok(())
    }

    pub(super) async fn look_at_all(&mut self, manager: &LockManager) -> Result<Looked, LockError> {
        let args = (self.collection, MOST);
        let listed = manager.run("list", manager.until(), args, |store, (collection, most)| {
            store.list(collection, None, *most)
        });
        let mut now: HashMap<LockKey, Vec<Lock>> = HashMap::new();
        for lock in listed.await? {
            now.entry(lock.key.clone()).or_default().push(lock);
        }
        let was_new = self.locks.is_empty() && !self.is_complete;
        self.is_complete = now.len() < MOST;
        if was_new || !self.is_complete {
            let at = Instant::now();
            let dated = |locks: Vec<Lock>| locks.into_iter().map(|lock| (lock, at)).collect();
            self.locks = now.into_iter().map(|(key, locks)| (key, dated(locks))).collect();
            return Ok(Looked::Anew);
        }
        let keys: HashSet<LockKey> = self.locks.keys().chain(now.keys()).cloned().collect();
        for key in keys {
            let locks = now.remove(&key).unwrap_or_default();
            self.are_now(manager, &key, locks).await;
        }
        Ok(Looked::AndTold)
    }

    /// Tells in which way that differs from before.
    async fn are_now(&mut self, manager: &LockManager, key: &LockKey, locks: Vec<Lock>) {
        let before = self.locks.remove(key).unwrap_or_default();
        let (stay, gone): (Vec<_>, Vec<_>) =
            (before.into_iter()).partition(|(old, _)| locks.iter().any(|lock| is_same(old, lock)));
        for (lock, seen) in gone {
            let event = why_gone(manager, lock, seen).await;
            manager.inner.events.tell(event);
        }
        let now = Instant::now();
        let mut known = Vec::new();
        for lock in locks {
            let seen = stay.iter().find(|(old, _)| is_same(old, &lock)).map(|(_, seen)| *seen);
            if seen.is_none() {
                manager.inner.events.tell(LockEvent::Acquired(lock.clone()));
            }
            known.push((lock, seen.unwrap_or(now)));
        }
        if !known.is_empty() {
            self.locks.insert(key.clone(), known);
        }
    }
}

/// A foreign lock has no token, and is told from others by when it was taken.
fn is_same(old: &Lock, new: &Lock) -> bool {
    old.token == new.token && (old.token.is_some() || old.since == new.since)
}

async fn why_gone(manager: &LockManager, lock: Lock, seen: Instant) -> LockEvent {
    if let Some(taken) = manager.inner.events.taken_by(&lock) {
        return LockEvent::Broken(lock, taken);
    }
    let ended = manager
        .run("last_end", manager.until(), lock.aid.clone(), |store, aid| store.last_end(aid));
    // The end of a session is written down before its locks go.
    match ended.await {
        Ok(Some(end)) if end.reason == EndReason::Expired => {
            if end.ago <= seen.elapsed() {
                LockEvent::Expired(lock)
            } else {
                LockEvent::Released(lock)
            }
        }
        Ok(Some(_)) => LockEvent::SessionEnded(lock),
        _ => LockEvent::Released(lock),
    }
}
