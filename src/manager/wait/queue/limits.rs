//! Limits on the number of waiters.
//!
//! The number of waiters is limited per session, per person and in total. The first waiter of a queue counts once the
//! store has refused it, or once another waiter joins behind it: before that, it is an ordinary attempt.

use crate::{
    key::LockKey,
    manager::wait::queue::{State, Waiter},
};

/// How many waiters are allowed.
#[derive(Debug, Clone, Copy)]
pub(in crate::manager) struct Limits {
    pub(in crate::manager) per_session: usize,
    /// In all its sessions. At least that of one session.
    pub(in crate::manager) per_person: usize,
    pub(in crate::manager) all: usize,
}

/// A limit is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::manager) struct TooMany {
    pub(in crate::manager) limit: usize,
    /// Or per person.
    pub(in crate::manager) per_session: bool,
}

impl State {
    /// Jobs have no limit but the total: each guard of a job has a session of its own.
    pub(super) fn has_room_for(&self, waiter: &Waiter) -> Result<(), TooMany> {
        let Limits { per_session, per_person, all } = self.limits;
        let is_session = waiter.aid == waiter.owner;
        if is_session && self.owners.counted(&waiter.owner) >= per_session {
            return Err(TooMany { limit: per_session, per_session: true });
        }
        let per_person = per_person.max(per_session);
        if waiter.person.as_ref().is_some_and(|it| self.persons.of(it) >= per_person) {
            return Err(TooMany { limit: per_person, per_session: true });
        }
        if self.counted >= all {
            return Err(TooMany { limit: all, per_session: false });
        }
        Ok(())
    }

    pub(super) fn count_first_comer(&mut self, key: &LockKey) -> Result<(), TooMany> {
        let Some(queue) = self.queues.get(key) else { return Ok(()) };
        let Some(number) = queue.uncounted else { return Ok(()) };
        if let Some(waiter) = queue.waiting.get(&number) {
            self.has_room_for(waiter)?;
        }
        self.counts(key, number);
        Ok(())
    }

    pub(super) fn counts(&mut self, key: &LockKey, number: u64) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        queue.uncounted.take_if(|it| *it == number);
        let waiter = queue.waiting.get_mut(&number);
        if let Some(waiter) = waiter.filter(|waiter| !waiter.is_counted) {
            waiter.is_counted = true;
            self.owners.counts(&waiter.owner);
            if let Some(person) = &waiter.person {
                self.persons.add(person.clone());
            }
            self.counted += 1;
        }
    }
}
