//! Asking the holder of a lock for it.

use std::{collections::HashSet, time::Instant};

use uuid::Uuid;

use crate::{
    actor::Person,
    error::{LockError, Result},
    key::LockKey,
    lock::{Aid, Answer, Ask, Lock},
    manager::{Core, takeover::can_be_taken_over},
    store::{Ability, Acquisition, Answered, Asked, LastEnd},
};

/// How often a person may ask in a minute, repetitions included: a page that waits sends one every 30 to 55 s.
const A_MINUTE: u32 = 30;

impl Core {
    /// False if nobody would hear an ask for this lock.
    pub(crate) fn hears_asks(&self, lock: &Lock) -> bool {
        can_be_taken_over(lock) && lock.aid.hears_asks() && self.verbs.store.can(Ability::Asks)
    }

    /// Puts the ask on record, or repeats the one that stands. Returns the ask as it stands, and how many others are known
    /// here to wait or to have asked before. The place of the asker in the queue is that of its own wait.
    pub(crate) async fn ask(
        &self,
        key: &LockKey,
        ask: Ask,
        again: bool,
        person: Person,
        until: Instant,
    ) -> Result<(Ask, usize)> {
        self.collections.ready(key, until).await?;
        let (aid, key) = (ask.aid.clone(), key.clone());
        if self.asks.count(person) > A_MINUTE {
            return Err(LockError::TooManyAsks { key });
        }
        let args = (key.clone(), ask, again);
        let asked = self.verbs.run("ask", until, args, |store, (key, ask, again), until| {
            store.ask(key, ask, *again, until)
        });
        match asked.await? {
            Asked::Stands { ask, before } => {
                let (waiting, behind) = self.beliefs.queues.machine.lock().around(&key, &aid);
                let asked = before.into_iter().filter(|it| !behind.contains(it));
                let ahead: HashSet<Aid> = waiting.into_iter().chain(asked).collect();
                Ok((ask, ahead.len()))
            }
            Asked::Gone => Err(LockError::NoSuchAsk { key }),
            Asked::Free => Err(LockError::NotLocked { key }),
            Asked::NobodyHears => Err(LockError::NobodyHears { key }),
            Asked::TooMany => Err(LockError::TooManyAsks { key }),
        }
    }

    /// # Errors
    /// [`LockError::NoSuchAsk`]; [`LockError::Lost`] if this acquisition has ended. Otherwise see
    /// [`LockManager`](crate::LockManager).
    pub(crate) async fn answer(
        &self,
        held: &Acquisition,
        ask: Uuid,
        answer: Answer,
        until: Instant,
    ) -> Result<()> {
        let args = (held.clone(), ask, answer.in_one_line());
        let answered =
            self.verbs.run("answer", until, args, |store, (held, ask, answer), until| {
                store.answer(held, *ask, answer, until)
            });
        let key = held.key.clone();
        match answered.await? {
            Answered::Told => Ok(()),
            Answered::NoSuchAsk => Err(LockError::NoSuchAsk { key }),
            Answered::Lost => Err(LockError::lost(key)),
        }
    }

    /// Withdraws the ask of this person. It is no error if there is none.
    pub(crate) async fn withdraw(
        &self,
        key: &LockKey,
        aid: Aid,
        user: Option<String>,
        until: Instant,
    ) -> Result<()> {
        self.collections.ready(key, until).await?;
        let args = (key.clone(), aid, user);
        let withdrawn =
            self.verbs.run("withdraw", until, args, |store, (key, aid, user), until| {
                store.withdraw(key, aid, user.as_deref(), until)
            });
        withdrawn.await
    }

    /// Leaves out the asks of sessions that have ended. Costs one read if there is any ask, and none otherwise. If the store
    /// does not answer, the asks stay.
    pub(crate) async fn leave_out_ended_askers(&self, locks: &mut [Lock], until: Instant) {
        let asks = locks.iter().flat_map(|lock| &lock.asks);
        let askers: HashSet<_> = asks.map(|ask| ask.aid.clone()).collect();
        if askers.is_empty() {
            return;
        }
        let askers: Vec<_> = askers.into_iter().collect();
        let Ok(ends) = self.sessions.last_ends(askers.clone(), until).await else { return };
        let is_over = |end: &Option<LastEnd>| end.is_some_and(|end| end.for_good);
        let all = askers.into_iter().zip(&ends);
        let ended: HashSet<_> = all.filter(|(_, end)| is_over(end)).map(|(aid, _)| aid).collect();
        for lock in locks {
            lock.asks.retain(|ask| !ended.contains(&ask.aid));
        }
    }
}
