//! The last known locks of a collection, compared with the current ones.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use futures_util::future::join_all;

use crate::{
    clock,
    ended::EndReason,
    error::Result,
    event::LockEvent,
    key::LockKey,
    lock::{Ask, Lock, Mode},
    manager::Core,
    random::HashMap,
    store::Query,
};

/// For how many documents of a collection the holders are remembered. Beyond that, the subscribers are
/// asked to list the locks themselves.
const MOST: usize = 10_000;
/// How often the subscribers are asked to list the locks, at most, if there are more locks than are
/// remembered.
const RESYNC: Duration = Duration::from_secs(1);

/// For how many locks that are gone the store is asked for the reason at the same time.
const AT_ONCE: usize = 16;

/// The result of listing all locks.
pub(in crate::manager) enum Listing {
    /// All changes since the last list were told.
    Compared,
    /// There was no earlier list to compare with, or there are too many locks.
    Anew,
}

/// The locks of a collection as the subscribers know them, each with the time when it was seen first.
pub(in crate::manager) struct KnownLocks {
    /// When the subscribers were last asked to list the locks.
    asked: Option<Instant>,
    pub(in crate::manager) collection: &'static str,
    locks: HashMap<LockKey, Vec<(Lock, Instant)>>,
    /// True if all locks of the collection could be listed.
    is_complete: bool,
}

impl KnownLocks {
    pub(in crate::manager) fn new(collection: &'static str) -> Self {
        Self { asked: None, collection, locks: HashMap::default(), is_complete: false }
    }

    /// The exclusive lock on this document.
    pub(in crate::manager) fn writer_of(&self, key: &LockKey) -> Option<Lock> {
        let (lock, _) = self.locks.get(key)?.first()?;
        (lock.mode == Mode::Exclusive).then(|| lock.clone())
    }

    /// Reads these documents by one read, and reports the changes.
    pub(in crate::manager) async fn read(
        &mut self,
        core: &Core,
        keys: BTreeSet<LockKey>,
    ) -> Result<()> {
        let asked = keys.iter().cloned().collect();
        let listed = core.reads.locks_on(self.collection, asked, core.verbs.until()).await?;
        let mut now = by_document(listed);
        let is_unknown = |key: &LockKey| !now.contains_key(key) && !self.locks.contains_key(key);
        if !self.is_complete
            && keys.iter().any(is_unknown)
            && self.asked.is_none_or(|at| clock::since(at) >= RESYNC)
        {
            self.asked = Some(clock::now());
            core.events.tell(LockEvent::Resync);
        }
        let now = keys.into_iter().map(|key| (now.remove(&key).unwrap_or_default(), key));
        self.are_now(core, now.map(|(locks, key)| (key, locks)).collect()).await;
        Ok(())
    }

    pub(in crate::manager) async fn list(&mut self, core: &Core) -> Result<Listing> {
        let args = (self.collection, MOST);
        let listed = core.verbs.ask("list", args, |store, (collection, most), until| {
            store.locks(collection, Query::All, *most, until)
        });
        let mut now = by_document(listed.await?);
        let was_new = self.locks.is_empty() && !self.is_complete;
        self.is_complete = now.len() < MOST;
        if was_new || !self.is_complete {
            let at = clock::now();
            let dated = |locks: Vec<Lock>| locks.into_iter().map(|lock| (lock, at)).collect();
            self.locks = now.into_iter().map(|(key, locks)| (key, dated(locks))).collect();
            return Ok(Listing::Anew);
        }
        let keys: BTreeSet<LockKey> = self.locks.keys().chain(now.keys()).cloned().collect();
        let now = keys.into_iter().map(|key| (now.remove(&key).unwrap_or_default(), key));
        self.are_now(core, now.map(|(locks, key)| (key, locks)).collect()).await;
        Ok(Listing::Compared)
    }

    /// Tells how the locks on these documents differ from before.
    async fn are_now(&mut self, core: &Core, now: Vec<(LockKey, Vec<Lock>)>) {
        let mut gone = Vec::new();
        for (key, locks) in &now {
            if let Some(known) = self.locks.get_mut(key) {
                let left =
                    known.extract_if(.., |(old, _)| !locks.iter().any(|it| is_same(old, it)));
                gone.extend(left);
            }
        }
        for some in gone.chunks(AT_ONCE) {
            let asked = some.iter().map(|(lock, seen)| why_gone(core, lock.clone(), *seen));
            for event in join_all(asked).await {
                core.events.tell(event);
            }
        }
        let at = clock::now();
        for (key, locks) in now {
            let known = self.locks.entry(key.clone()).or_default();
            for lock in locks {
                match known.iter_mut().find(|(old, _)| is_same(old, &lock)) {
                    Some((old, _)) => {
                        tell_asks(core, &old.asks, &lock);
                        *old = lock;
                    }
                    None => {
                        core.events.tell(LockEvent::Acquired(lock.clone()));
                        tell_asks(core, &[], &lock);
                        known.push((lock, at));
                    }
                }
            }
            if known.is_empty() {
                self.locks.remove(&key);
            }
        }
    }
}

/// Tells which asks and answers are new.
fn tell_asks(core: &Core, old: &[Ask], new: &Lock) {
    for ask in &new.asks {
        let before = old.iter().find(|it| it.id == ask.id);
        if before.is_none() {
            core.events.tell(LockEvent::Asked(new.clone(), ask.clone()));
        }
        if ask.answer.is_some() && before.is_none_or(|it| it.answer != ask.answer) {
            core.events.tell(LockEvent::Answered(new.clone(), ask.clone()));
        }
    }
}

fn by_document(locks: Vec<Lock>) -> HashMap<LockKey, Vec<Lock>> {
    let mut all: HashMap<LockKey, Vec<Lock>> = HashMap::default();
    for lock in locks {
        all.entry(lock.key.clone()).or_default().push(lock);
    }
    all
}

/// A foreign lock has no token: it is recognised by the time when it was taken.
fn is_same(old: &Lock, new: &Lock) -> bool {
    old.token == new.token && (old.token.is_some() || old.since == new.since)
}

async fn why_gone(core: &Core, lock: Lock, seen: Instant) -> LockEvent {
    if let Some(taken_by) = lock.token.and_then(|token| core.causes.taken_by(&lock.key, token)) {
        return LockEvent::Broken(lock, taken_by);
    }
    // The end of a session is recorded before its locks are removed.
    match core.sessions.last_end(&lock.aid, core.verbs.until()).await {
        Ok(Some(end)) if end.reason == EndReason::Expired => {
            if end.ago <= clock::since(seen) {
                LockEvent::Expired(lock)
            } else {
                LockEvent::Released(lock)
            }
        }
        Ok(Some(_)) => LockEvent::SessionEnded(lock),
        _ => LockEvent::Released(lock),
    }
}
