//! Queues of persons: of each person one thing of a kind is under way at a time, and the others wait.

use std::{hash::Hash, sync::Arc};

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::random::HashMap;

/// The queues of the persons that have something under way.
#[derive(Debug)]
pub(crate) struct PersonQueues<P>(Mutex<HashMap<P, Arc<Semaphore>>>);

/// The next one in the queue follows when this value is dropped.
pub(crate) type PersonTurn = OwnedSemaphorePermit;

impl<P> Default for PersonQueues<P> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<P: Hash + Eq> PersonQueues<P> {
    /// Joins the queue of this person, and resolves when the turn comes. Returns `None` if `most` are in the queue
    /// already, with the one that has its turn. A future that is dropped leaves the queue.
    pub(crate) fn join(
        &self,
        person: P,
        most: usize,
    ) -> Option<impl Future<Output = Option<PersonTurn>> + Send + use<P>> {
        let mut queues = self.0.lock();
        if !queues.contains_key(&person) {
            queues.retain(|_, queue| Arc::strong_count(queue) > 1);
        }
        let queue = queues.entry(person).or_insert_with(|| Arc::new(Semaphore::new(1)));
        // Each future and each turn holds the queue, and so does this map.
        let is_full = Arc::strong_count(queue) > most;
        (!is_full).then(|| Arc::clone(queue).acquire_owned().map(Result::ok))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_person_has_one_turn_and_idle_queues_are_forgotten() {
        let turns = PersonQueues::default();
        let now = |person| turns.join(person, 2).and_then(|it| it.now_or_never().flatten());
        let first = now("alice").unwrap();
        let second = turns.join("alice", 2).unwrap();
        assert!(turns.join("alice", 2).is_none(), "two are in the queue");
        assert!(now("bob").is_some(), "each person for itself");
        drop(second);
        assert!(now("alice").is_none(), "the first one is still under way");
        drop(first);
        let turn = now("alice").unwrap();
        assert!(now("carol").is_some());
        assert!(now("dave").is_some());
        assert_eq!(turns.0.lock().len(), 2, "alice and dave");
        drop(turn);
    }
}
