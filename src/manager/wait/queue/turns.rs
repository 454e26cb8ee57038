//! Numbers and tickets that are kept for waiters whose time is over and who may be back at once.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::{clock, key::LockKey, lock::Aid, random::HashMap, store::Ticket};

/// An HTTP request cannot wait for as long as a person does, so a client asks again and again.
const KEEP_TURN: Duration = Duration::from_secs(3);
/// How many entries are checked for each new one. More than one, so that all expired entries are removed
/// in the end.
const FORGET: usize = 4;

/// The number of a waiter, and its ticket in a fair collection.
pub(super) type Kept = (u64, Option<Ticket>);

#[derive(Debug, Default)]
pub(in crate::manager) struct Turns {
    kept: HashMap<(LockKey, Aid), (Kept, Instant)>,
    /// In the order in which they expire.
    ending: VecDeque<(Instant, (LockKey, Aid))>,
}

impl Turns {
    pub(super) fn keep(&mut self, key: &LockKey, owner: &Aid, turn: Kept) {
        self.forget();
        let (whose, until) = ((key.clone(), owner.clone()), clock::now() + KEEP_TURN);
        self.ending.push_back((until, whose.clone()));
        self.kept.insert(whose, (turn, until));
    }

    /// The turn that the owner had, if it is back in time.
    pub(super) fn take(&mut self, key: &LockKey, owner: &Aid) -> Option<Kept> {
        let (turn, until) = self.kept.remove(&(key.clone(), owner.clone()))?;
        (until > clock::now()).then_some(turn)
    }

    /// Removes a few expired entries, never all at once.
    fn forget(&mut self) {
        let now = clock::now();
        for _ in 0..FORGET {
            if self.ending.front().is_none_or(|(until, _)| *until > now) {
                return;
            }
            let Some((until, whose)) = self.ending.pop_front() else { return };
            // Otherwise the number was kept again in the meantime.
            if self.kept.get(&whose).is_some_and(|(_, kept)| *kept == until) {
                self.kept.remove(&whose);
            }
        }
    }
}
