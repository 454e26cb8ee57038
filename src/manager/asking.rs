//! Asking the holder of a lock for it.

use std::{collections::HashSet, time::Instant};

use uuid::Uuid;

use crate::{
    ask::{Answer, Ask},
    error::{LockError, Result},
    key::LockKey,
    lock::{Aid, Lock},
    manager::Parts,
    store::{Acquisition, Answered, Asked},
};

impl Parts {
    /// Puts the ask on record. Returns it as it stands, and how many others are known here to have asked or to wait before
    /// its session. The asker's place in the queue is that of its own wait.
    pub(crate) async fn ask(
        &self,
        key: &LockKey,
        ask: Ask,
        until: Instant,
    ) -> Result<(Ask, usize)> {
        self.collections.ready(key, until).await?;
        let (aid, too_many) = (ask.aid.clone(), LockError::TooManyAsks { key: key.clone() });
        if !self.seen.activity.may_ask(&aid) {
            return Err(too_many);
        }
        let asked = self.verbs.run("ask", until, (key.clone(), ask), |store, (key, ask), until| {
            store.ask(key, ask, until)
        });
        match asked.await? {
            Asked::Stands { ask, before } => {
                let mut ahead: HashSet<Aid> = before.into_iter().collect();
                ahead.extend(self.seen.queues.machine.lock().before(key, &aid));
                Ok((ask, ahead.len()))
            }
            Asked::Free => Err(LockError::NotLocked { key: key.clone() }),
            Asked::NobodyHears => Err(LockError::NobodyHears { key: key.clone() }),
            Asked::TooMany => Err(too_many),
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
        let args = (held.clone(), ask, answer);
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

    /// Withdraws what this person asks. It is no error if there is nothing.
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

    /// Leaves out what sessions ask that have ended. Costs one read if there is any ask, and none otherwise.
    pub(crate) async fn leave_out_ended_askers(
        &self,
        locks: &mut [Lock],
        until: Instant,
    ) -> Result<()> {
        let askers: HashSet<_> =
            locks.iter().flat_map(|lock| &lock.asks).map(|ask| ask.aid.clone()).collect();
        if askers.is_empty() {
            return Ok(());
        }
        let askers: Vec<_> = askers.into_iter().collect();
        let ends = self.sessions.last_ends(askers.clone(), until).await?;
        let has_ended =
            |end: &Option<_>| end.is_some_and(|end: crate::store::LastEnd| end.for_good);
        let ended: HashSet<_> = askers
            .into_iter()
            .zip(&ends)
            .filter(|(_, end)| has_ended(end))
            .map(|it| it.0)
            .collect();
        for lock in locks {
            lock.asks.retain(|ask| !ended.contains(&ask.aid));
        }
        Ok(())
    }
}
