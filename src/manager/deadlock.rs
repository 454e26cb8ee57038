//! Finding those who would wait for each other for good.
//!
//! A depth-first search in the graph of who waits for whom (the wait-for graph of transaction
//! processing), begun only by one who holds something that others wait for.

use std::collections::HashSet;

use super::queue::{Queue, State, Waiter};
use crate::{Aid, LockKey, Mode};

/// One waits for a document because of another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Edge {
    pub(super) key: LockKey,
    /// The session that was seen to hold it. `None` if that is sure: a guard of this process, or
    /// somebody ahead in the queue.
    pub(super) seen: Option<Aid>,
}

/// The documents over which `start` waits for itself, if it does.
///
/// Sees who waits in this process, for whomever.
pub(super) fn cycle(state: &State, start: &Aid) -> Option<Vec<Edge>> {
    let mut path = Vec::new();
    let is_found = waited_for(state).contains(start)
        && search(state, start, start, &mut HashSet::new(), &mut path);
    is_found.then_some(path)
}

/// Those who hold something that others wait for. Nobody else can be in a circle.
pub(super) fn waited_for(state: &State) -> HashSet<&Aid> {
    let seen = state.queues.values().filter_map(|queue| queue.holder.as_ref()).map(|it| &it.aid);
    let here = state.queues.keys().filter_map(|key| state.held.get(key)).flatten();
    seen.chain(here.map(|held| &held.owner)).collect()
}

fn search(
    state: &State,
    from: &Aid,
    goal: &Aid,
    visited: &mut HashSet<Aid>,
    path: &mut Vec<Edge>,
) -> bool {
    if !visited.insert(from.clone()) {
        return false;
    }
    for (key, queue) in &state.queues {
        for (at, waiter) in queue.waiting.iter().enumerate() {
            if waiter.owner != *from || waiter.deadlock.is_some() {
                continue;
            }
            for (blocker, seen) in blockers(state, key, queue, at, waiter) {
                path.push(Edge { key: key.clone(), seen });
                if blocker == *goal || search(state, &blocker, goal, visited, path) {
                    return true;
                }
                path.pop();
            }
        }
    }
    false
}

/// Whom this one waits for.
fn blockers(
    state: &State,
    key: &LockKey,
    queue: &Queue,
    at: usize,
    waiter: &Waiter,
) -> Vec<(Aid, Option<Aid>)> {
    if queue.is_held_by(&waiter.owner) {
        // It is let in at once, or refused at once.
        return Vec::new();
    }
    let in_the_way = |mode| mode == Mode::Exclusive || waiter.mode == Mode::Exclusive;
    let here = state.held.get(key).map_or(&[][..], |held| held);
    let mut blockers: Vec<_> = (here.iter())
        .filter(|held| in_the_way(held.mode))
        .map(|held| (held.owner.clone(), None))
        .collect();
    if let Some(lock) = &queue.holder
        && in_the_way(lock.mode)
        && !here.iter().any(|held| held.aid == lock.aid)
    {
        blockers.push((lock.aid.clone(), Some(lock.aid.clone())));
    }
    let ahead =
        (queue.waiting.iter().take(at)).filter(|it| it.deadlock.is_none() && in_the_way(it.mode));
    blockers.extend(ahead.map(|it| (it.owner.clone(), None)));
    blockers
}
