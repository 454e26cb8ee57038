//! Finds the waiters that would wait for each other forever.
//!
//! A breadth-first search in the graph of who waits for whom (the wait-for graph of transaction
//! processing). It begins when a waiter joins a queue or a lock has a new holder, for only then can a
//! circle close. It refuses only waiters that hold something others wait for: without such a lock a circle
//! is not a deadlock yet.
//!
//! # Whom a waiter waits for
//! A waiter waits for the holders of the document and for the waiters ahead of it, unless both want to
//! share the lock. The search reaches all of them, but visits few:
//!
//! - *Of the waiters ahead of a writer: the linked ones*, which also wait elsewhere, or hold something
//!   that others wait for. A waiter that is not linked closes no circle, because nobody waits for it
//!   elsewhere. And it leads to nobody new: it waits in this queue only, for the holders and for the
//!   waiters ahead of it, and the writer behind it waits for all of these too.
//! - *Of the waiters ahead of a reader: the nearest writer*, which waits for all waiters ahead of itself.
//! - *Each part of a queue once.* A waiter ahead of one writer is ahead of every writer behind that
//!   writer, so the second walk along a queue ends where the first began.
//!
//! # What is found
//! One search visits [`BUDGET`] places, guards and linked waiters, the nearest ones first, by turns. If
//! that is not enough, the search gives up and refuses nobody: a deadlock then lasts until one of its
//! waits ends. The search finds a circle if at most so many entries are as near as the last owner of the
//! circle. The length of the queues does not matter, as long as their waiters wait for one document each
//! and hold nothing that others wait for. The search may miss a circle of more than half as many owners.

use std::{
    collections::{HashMap, HashSet, VecDeque, btree_set},
    iter::Rev,
    slice,
};

use crate::{
    key::LockKey,
    lock::{Aid, Mode},
    manager::{
        observe,
        wait::queue::{Held, Queue, State, Waiter},
    },
};

/// How much one search visits. While it lasts, some 50 µs, no other request can join or leave a queue.
pub(in crate::manager) const BUDGET: usize = 256;

/// One step of a circle: the wait for a document, because of another owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::manager) struct Edge {
    pub(in crate::manager) key: LockKey,
    /// The session that was seen as the holder. `None` if the obstacle is certain: a guard of this
    /// process, or a waiter ahead in the queue.
    pub(in crate::manager) seen: Option<Aid>,
}

/// The result of a search.
#[derive(Debug, Default)]
pub(in crate::manager) struct Found {
    /// The waiters that wait for themselves, by number in the queue, each with its path of documents.
    pub(in crate::manager) circles: Vec<(u64, Vec<Edge>)>,
    pub(in crate::manager) looked_at: usize,
}

/// Whether this waiter waits for itself.
pub(in crate::manager) fn of_waiter(state: &State, key: &LockKey, number: u64) -> Found {
    let Some(queue) = state.queues.get(key) else { return Found::default() };
    let Some(waiter) = queue.waiting.get(&number) else { return Found::default() };
    if !waits(queue, waiter) || !state.owners.is_in_the_way(&waiter.owner) {
        return Found::default();
    }
    let mut search = Search::new(state, &waiter.owner, None, Goal::Start(None));
    // The owner's other places come later: there may be many.
    search.goes_on_from(0, key, number);
    search.run();
    let circle = if let Goal::Start(circle) = search.goal { circle } else { None };
    let circles = circle.map(|circle| (number, circle)).into_iter().collect();
    Found { circles, looked_at: search.looked_at }
}

/// An owner that others wait for from now on.
#[derive(Clone, Copy)]
pub(in crate::manager) struct Obstacle<'a> {
    pub(in crate::manager) owner: &'a Aid,
    pub(in crate::manager) mode: Mode,
    /// Known from an answer of the store, which may be out of date. Otherwise it is certain.
    pub(in crate::manager) is_seen: bool,
    /// The number of a waiter that has come in between. Zero for a holder.
    pub(in crate::manager) number: u64,
}

/// Finds the waiters of this document that wait for themselves because of the obstacle.
pub(in crate::manager) fn by_obstacle(
    state: &State,
    key: &LockKey,
    obstacle: Obstacle<'_>,
) -> Found {
    let Some(queue) = state.queues.get(key) else { return Found::default() };
    let is_in_the_way = |number: &u64| {
        let waiter = queue.waiting.get(number);
        waiter.is_some_and(|waiter| state.owners.is_in_the_way(&waiter.owner))
    };
    if !queue.linked.iter().take(BUDGET).any(is_in_the_way) {
        return Found { circles: Vec::new(), looked_at: queue.linked.len().min(BUDGET) };
    }
    let edge = (key, obstacle.is_seen.then_some(obstacle.owner));
    let first_writer = first_writer(queue, obstacle.number, &[]);
    let wanted = Wanted { key, obstacle, first_writer, circles: Vec::new() };
    let mut search = Search::new(state, obstacle.owner, Some(edge), Goal::Waiters(wanted));
    search.run();
    let mut found = Found { circles: Vec::new(), looked_at: search.looked_at };
    if let Goal::Waiters(mut wanted) = search.goal {
        // A reader that waited because of a writer waits no longer once that writer is refused.
        wanted.first_writer = self::first_writer(queue, obstacle.number, &wanted.circles);
        found.circles = std::mem::take(&mut wanted.circles);
        found.circles.retain(|(number, _)| wanted.waits(queue, *number));
    }
    found
}

/// The first writer behind this number that waits and is not refused.
fn first_writer(queue: &Queue, behind: u64, refused: &[(u64, Vec<Edge>)]) -> Option<u64> {
    let refused: HashSet<_> = refused.iter().map(|(number, _)| number).collect();
    let waits = |number: &&u64| queue.waiting.get(number).is_some_and(|it| waits(queue, it));
    let mut writers = queue.writers.range(behind + 1..).take(2 * BUDGET);
    writers.find(|number| waits(number) && !refused.contains(number)).copied()
}

struct Search<'a> {
    state: &'a State,
    goal: Goal<'a>,
    /// The owners, in the order in which they were found. The search begins at the first one.
    reached: Vec<Reached<'a>>,
    known: HashSet<&'a Aid>,
    queues: HashMap<&'a LockKey, Covered>,
    /// The walks that are not finished, each with the owner whose waits it follows.
    looks: VecDeque<(usize, Look<'a>)>,
    looked_at: usize,
}

/// What the search looks for, and what it has found.
enum Goal<'a> {
    /// The circle through the owner where the search began.
    Start(Option<Vec<Edge>>),
    Waiters(Wanted<'a>),
}

/// The waiters that wait because of an obstacle.
struct Wanted<'a> {
    key: &'a LockKey,
    obstacle: Obstacle<'a>,
    first_writer: Option<u64>,
    circles: Vec<(u64, Vec<Edge>)>,
}

impl Wanted<'_> {
    /// A reader waits for another reader if a writer is in between. An owner does not wait for its own
    /// places.
    fn waits(&self, queue: &Queue, number: u64) -> bool {
        let Some(waiter) = queue.waiting.get(&number) else { return false };
        let Obstacle { owner, mode, number: obstacle, .. } = self.obstacle;
        number > obstacle
            && (obstacle == 0 || waiter.owner != *owner)
            && (excludes(mode, waiter.mode) || self.first_writer.is_some_and(|it| it < number))
    }
}

struct Reached<'a> {
    owner: &'a Aid,
    /// The index of the owner that waits for this one, and the document.
    by: usize,
    edge: Option<(&'a LockKey, Option<&'a Aid>)>,
}

/// The parts of a queue that need no second visit.
#[derive(Default)]
struct Covered {
    /// The holders that exclude a reader, or those that exclude a writer, which are all holders.
    holders: Option<Mode>,
    /// The waiters with a lower number.
    ahead: u64,
}

enum Look<'a> {
    Places(btree_set::Iter<'a, (LockKey, u64)>),
    Guards(&'a LockKey, Mode, slice::Iter<'a, Held>),
    /// Backwards to the nearest writer.
    Writers(&'a LockKey, &'a Queue, Rev<btree_set::Range<'a, u64>>),
    Ahead(&'a LockKey, &'a Queue, Rev<btree_set::Range<'a, u64>>),
}

impl Look<'_> {
    fn is_over(&self) -> bool {
        match self {
            Self::Places(places) => places.len() == 0,
            Self::Guards(_, _, guards) => guards.len() == 0,
            Self::Writers(_, _, numbers) | Self::Ahead(_, _, numbers) => {
                numbers.clone().next().is_none()
            }
        }
    }
}

impl<'a> Search<'a> {
    fn new(
        state: &'a State,
        start: &'a Aid,
        edge: Option<(&'a LockKey, Option<&'a Aid>)>,
        goal: Goal<'a>,
    ) -> Self {
        let places = state.owners.places(start).map(|places| (0, Look::Places(places)));
        Self {
            state,
            goal,
            reached: vec![Reached { owner: start, by: 0, edge }],
            known: HashSet::from([start]),
            queues: HashMap::new(),
            looks: places.into_iter().collect(),
            looked_at: 0,
        }
    }

    fn run(&mut self) {
        while !matches!(self.goal, Goal::Start(Some(_)))
            && let Some((from, look)) = self.looks.pop_front()
        {
            if self.looked_at >= BUDGET {
                observe::search_gave_up(self.looked_at);
                return;
            }
            self.looked_at += 1;
            if let Some(rest) = self.look(from, look) {
                self.later(from, rest);
            }
        }
    }

    fn later(&mut self, from: usize, look: Look<'a>) {
        if !look.is_over() {
            self.looks.push_back((from, look));
        }
    }

    /// Visits one entry. Returns the rest of the walk.
    fn look(&mut self, from: usize, mut look: Look<'a>) -> Option<Look<'a>> {
        match &mut look {
            Look::Places(places) => {
                let (key, number) = places.next()?;
                self.goes_on_from(from, key, *number);
            }
            Look::Guards(key, mode, guards) => {
                let held = guards.next()?;
                if excludes(held.mode, *mode) {
                    self.reach(from, &held.owner, key, None);
                }
            }
            Look::Writers(key, queue, writers) => {
                let number = *writers.next()?;
                if self.reach_ahead(from, key, queue, number) {
                    return None;
                }
            }
            Look::Ahead(key, queue, linked) => {
                let number = *linked.next()?;
                self.reach_ahead(from, key, queue, number);
            }
        }
        Some(look)
    }

    /// Goes on to whatever the owner waits for at this place.
    fn goes_on_from(&mut self, from: usize, key: &'a LockKey, number: u64) {
        let Some(queue) = self.state.queues.get(key) else { return };
        let Some(waiter) = queue.waiting.get(&number).filter(|it| waits(queue, it)) else { return };
        if let Goal::Waiters(wanted) = &mut self.goal
            && wanted.key == key
            && self.state.owners.is_in_the_way(&waiter.owner)
            && wanted.waits(queue, number)
        {
            let path = path(&self.reached, from);
            // Copying a path takes time, too.
            self.looked_at += path.len();
            wanted.circles.push((number, path));
            return;
        }
        match waiter.mode {
            Mode::Exclusive => self.goes_on_from_writer(from, key, queue, number),
            Mode::Shared => {
                self.goes_on_to_holders(from, key, queue, Mode::Shared);
                let writers = queue.writers.range(..number).rev();
                self.later(from, Look::Writers(key, queue, writers));
            }
        }
    }

    fn goes_on_from_writer(
        &mut self,
        from: usize,
        key: &'a LockKey,
        queue: &'a Queue,
        number: u64,
    ) {
        self.goes_on_to_holders(from, key, queue, Mode::Exclusive);
        let covered = &mut self.queues.entry(key).or_default().ahead;
        if *covered < number {
            let linked = queue.linked.range(*covered..number).rev();
            *covered = number;
            self.later(from, Look::Ahead(key, queue, linked));
        }
    }

    fn goes_on_to_holders(&mut self, from: usize, key: &'a LockKey, queue: &'a Queue, mode: Mode) {
        let covered = &mut self.queues.entry(key).or_default().holders;
        if matches!(*covered, Some(done) if done == Mode::Exclusive || done == mode) {
            return;
        }
        *covered = Some(mode);
        if let Some(lock) = queue.holder.as_ref().filter(|lock| excludes(lock.mode, mode)) {
            self.reach(from, &lock.aid, key, Some(&lock.aid));
        }
        if let Some(held) = self.state.held.get(key) {
            self.later(from, Look::Guards(key, mode, held.iter()));
        }
    }

    /// Says whether the waiter ahead waits.
    fn reach_ahead(
        &mut self,
        from: usize,
        key: &'a LockKey,
        queue: &'a Queue,
        number: u64,
    ) -> bool {
        let Some(waiter) = queue.waiting.get(&number) else { return false };
        let waits = waits(queue, waiter);
        // An owner that waits twice for a document does not block itself before it holds the document.
        if waiter.deadlock.is_none() && waiter.owner != *self.reached[from].owner {
            self.reach(from, &waiter.owner, key, None);
        }
        waits
    }

    fn reach(&mut self, from: usize, owner: &'a Aid, key: &'a LockKey, seen: Option<&'a Aid>) {
        let reached = Reached { owner, by: from, edge: Some((key, seen)) };
        if let Goal::Start(None) = self.goal
            && owner == self.reached[0].owner
        {
            let mut circle = path(&self.reached, from);
            circle.extend(reached.edge());
            self.goal = Goal::Start(Some(circle));
        } else if self.known.insert(owner)
            && let Some(places) = self.state.owners.places(owner)
        {
            self.later(self.reached.len(), Look::Places(places));
            self.reached.push(reached);
        }
    }
}

/// The path from the start of the search.
fn path(reached: &[Reached<'_>], mut to: usize) -> Vec<Edge> {
    let mut path: Vec<_> = reached[to].edge().into_iter().collect();
    while to > 0 {
        to = reached[to].by;
        path.extend(reached[to].edge());
    }
    path.reverse();
    path
}

impl Reached<'_> {
    fn edge(&self) -> Option<Edge> {
        self.edge.map(|(key, seen)| Edge { key: key.clone(), seen: seen.cloned() })
    }
}

/// A waiter that is about to be refused does not wait. Nor does a waiter whose session holds the lock: it
/// is granted or refused at once.
fn waits(queue: &Queue, waiter: &Waiter) -> bool {
    waiter.deadlock.is_none() && !queue.is_held_by(&waiter.owner)
}

fn excludes(held: Mode, wanted: Mode) -> bool {
    held == Mode::Exclusive || wanted == Mode::Exclusive
}
