//! Finds the waiters that would wait for each other forever.
//!
//! The search follows the graph of who waits for whom (the wait-for graph of transaction processing). It begins
//! when a waiter joins a queue or a lock has a new holder, for only then can a circle close. The search refuses only
//! waiters that hold something others wait for: without such a lock a circle is not a deadlock yet.
//!
//! # Whom a waiter waits for
//! A waiter waits for the holders of the document and for the waiters ahead of it, unless both want to
//! share the lock. The search follows the waits for *holders* first: nearly all circles consist of these.
//! It visits few of the waiters ahead:
//!
//! - *Ahead of a writer: the linked ones*, which also wait elsewhere, or hold something that others wait
//!   for. A waiter that is not linked closes no circle, because nobody waits for it elsewhere. Such a waiter also
//!   leads to nobody new: it waits in this queue only, for the holders and for the waiters ahead of it, and the
//!   writer behind it waits for all of these too.
//! - *Ahead of a reader: the nearest writer*, which waits for all waiters ahead of itself.
//! - *Each part of a queue once.* A waiter ahead of one writer is ahead of every writer behind that writer.
//!
//! # Which circles are found
//! One search visits [`BUDGET`] holders, waiters ahead and places where they wait. If that is not enough, the search
//! gives up and refuses nobody: a deadlock then lasts until one of its waits ends. So the length of the
//! queues does not matter, as long as their waiters wait for one document each and hold nothing that others
//! wait for. The search may miss a circle with more owners than half the budget.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use crate::{
    key::LockKey,
    lock::{Aid, Mode},
    manager::{observe, wait::machine::Machine},
};

/// How much one search visits. While it lasts, some 50 µs, no other request can join or leave a queue.
pub(super) const BUDGET: usize = 256;

/// The holders in a circle that were seen in answers of the store, perhaps a while ago. The rest of the
/// circle is certain: guards of this process, and waiters ahead.
pub(in crate::manager::wait) type Circle = Vec<(LockKey, Aid)>;

/// An owner that the waiters of a document wait for from now on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Obstacle<'a> {
    pub(super) owner: &'a Aid,
    pub(super) mode: Mode,
    /// True if it is the holder in an answer of the store.
    pub(super) is_seen: bool,
    /// The number of a waiter that has come in between. Zero for a holder.
    pub(super) number: u64,
}

impl<H> Machine<H> {
    /// These waiters of an owner wait from now on, which may close circles: for themselves and, if they are not the
    /// last, for the waiters behind them.
    pub(super) fn wait_from_now_on(&mut self, numbers: Vec<u64>) {
        for number in &numbers {
            let Some(waiter) = self.waiters.get(number).filter(|_| self.waits(*number)) else {
                continue;
            };
            let owner = self.owners.get(&waiter.owner);
            if owner.is_some_and(|it| it.in_the_way > 0) {
                let key = waiter.wanted.key.clone();
                let mut search = Search::new(self, &key, |other| other == *number);
                search.reached.push(Reached { by: 0, seen: None });
                search.for_holders.push_back((0, *number));
                let found = search.run(1);
                self.refuse(found, |_, _| true);
            }
        }
        for number in numbers {
            let Some(waiter) = self.waiters.get(&number).filter(|_| self.waits(number)) else {
                continue;
            };
            let (key, mode) = (waiter.wanted.key.clone(), waiter.wanted.mode);
            let is_last = self.queues.get(&key).is_none_or(|it| it.waiting.last() == Some(&number));
            if !is_last {
                let owner = &waiter.owner.clone();
                self.refuse_behind(&key, Obstacle { owner, mode, is_seen: false, number });
            }
        }
    }

    /// Refuses the waiters of this document that wait for themselves because of the obstacle.
    pub(super) fn refuse_behind(&mut self, key: &LockKey, obstacle: Obstacle<'_>) {
        let mut search = Search::new(self, key, |number| self.waits_because_of(number, obstacle));
        search.visit(0, obstacle.owner, obstacle.is_seen.then_some((key, obstacle.owner)));
        let found = search.run(usize::MAX);
        // A reader that waits because of a writer waits no longer once that writer is refused.
        self.refuse(found, |it, number| it.waits_because_of(number, obstacle));
    }

    /// Refuses the waiters that were found, in the order of the queue, as long as they wait.
    fn refuse(&mut self, found: Found, waits: impl Fn(&Self, u64) -> bool) {
        self.visited += found.visited;
        for (number, circle) in found.circles {
            if waits(self, number)
                && let Some(waiter) = self.waiters.get_mut(&number)
            {
                waiter.circle = Some(circle);
                waiter.wake();
            }
        }
    }

    /// True unless the waiter is about to be refused, or its session holds the lock: then it is granted or
    /// refused at once.
    fn waits(&self, number: u64) -> bool {
        let Some(waiter) = self.waiters.get(&number) else { return false };
        let queue = self.queues.get(&waiter.wanted.key);
        waiter.circle.is_none() && queue.is_some_and(|queue| !queue.is_held_by(&waiter.owner))
    }

    /// True if this waiter waits because of the obstacle. A reader waits for another reader if a writer is in
    /// between. A waiter does not wait for another waiter of its owner.
    fn waits_because_of(&self, number: u64, obstacle: Obstacle<'_>) -> bool {
        let Obstacle { owner, mode, number: before, .. } = obstacle;
        let Some(waiter) = self.waiters.get(&number).filter(|_| number > before) else {
            return false;
        };
        let Some(queue) = self.queues.get(&waiter.wanted.key) else { return false };
        let mut between = queue.writers.range(before + 1..number).take(BUDGET);
        self.waits(number)
            && (before == 0 || waiter.owner != *owner)
            && (excludes(mode, waiter.wanted.mode) || between.any(|writer| self.waits(*writer)))
    }
}

fn excludes(held: Mode, wanted: Mode) -> bool {
    held == Mode::Exclusive || wanted == Mode::Exclusive
}

/// The result of a search: waiters with their circles, by number in the queue.
#[derive(Default)]
struct Found {
    circles: BTreeMap<u64, Circle>,
    visited: usize,
}

struct Search<'a, H, G> {
    machine: &'a Machine<H>,
    /// The search looks for owners with such a waiter for this document.
    key: &'a LockKey,
    is_goal: G,
    found: Found,
    /// In the order in which they were reached.
    reached: Vec<Reached<'a>>,
    known: HashSet<&'a Aid>,
    /// The waits that the search still has to follow: to the holders, and to the waiters ahead.
    for_holders: VecDeque<Wait>,
    for_waiters: VecDeque<Wait>,
    /// The queues whose holders were visited for a writer, and the number below which the waiters were visited.
    covered: HashMap<&'a LockKey, u64>,
}

/// A wait of an owner: the index of the owner among those that were reached, and the number of the waiter.
type Wait = (usize, u64);

/// An owner that the search has reached.
struct Reached<'a> {
    /// The index of the owner that waits for this one.
    by: usize,
    /// The document and this owner, if the owner was seen as the holder of the document.
    seen: Option<(&'a LockKey, &'a Aid)>,
}

impl<'a, H, G: Fn(u64) -> bool> Search<'a, H, G> {
    fn new(machine: &'a Machine<H>, key: &'a LockKey, is_goal: G) -> Self {
        Self {
            machine,
            key,
            is_goal,
            found: Found::default(),
            reached: Vec::new(),
            known: HashSet::new(),
            for_holders: VecDeque::new(),
            for_waiters: VecDeque::new(),
            covered: HashMap::new(),
        }
    }

    /// Ends when this many circles are found.
    fn run(mut self, circles: usize) -> Found {
        while self.found.circles.len() < circles {
            if self.budget() == 0 {
                observe::search_gave_up(self.found.visited);
                break;
            }
            if let Some(wait) = self.for_holders.pop_front() {
                self.visit_holders(wait);
            } else if let Some(wait) = self.for_waiters.pop_front() {
                self.visit_waiters_ahead(wait);
            } else {
                break;
            }
        }
        self.found
    }

    fn budget(&self) -> usize {
        BUDGET.saturating_sub(self.found.visited)
    }

    fn visit_holders(&mut self, (from, number): Wait) {
        let machine = self.machine;
        let Some(waiter) = machine.waiters.get(&number).filter(|_| machine.waits(number)) else {
            return;
        };
        let (key, mode) = (&waiter.wanted.key, waiter.wanted.mode);
        self.for_waiters.push_back((from, number));
        if mode == Mode::Exclusive {
            if self.covered.contains_key(key) {
                return;
            }
            self.covered.insert(key, 0);
        }
        let holder = machine.queues.get(key).and_then(|queue| queue.holder.as_ref());
        if let Some(lock) = holder.filter(|lock| excludes(lock.mode, mode)) {
            self.visit(from, &lock.aid, Some((key, &lock.aid)));
        }
        let guards = machine.guards.get(key).into_iter().flatten();
        for guard in guards.filter(|guard| excludes(guard.mode, mode)).take(self.budget()) {
            self.visit(from, &guard.owner, None);
        }
    }

    fn visit_waiters_ahead(&mut self, (from, number): Wait) {
        let Some(waiter) = self.machine.waiters.get(&number) else { return };
        let Some(queue) = self.machine.queues.get(&waiter.wanted.key) else { return };
        let is_reader = waiter.wanted.mode == Mode::Shared;
        let ahead = if is_reader {
            queue.writers.range(..number)
        } else {
            let covered = self.covered.entry(&waiter.wanted.key).or_insert(0);
            let before = *covered;
            *covered = before.max(number);
            queue.linked.range(before..*covered)
        };
        for number in ahead.rev().take(self.budget()) {
            let Some(ahead) = self.machine.waiters.get(number) else { continue };
            // An owner that waits twice for a document does not block itself before it holds the document.
            if ahead.circle.is_none() && ahead.owner != waiter.owner {
                self.visit(from, &ahead.owner, None);
            }
            if is_reader && self.machine.waits(*number) {
                return;
            }
        }
    }

    fn visit(&mut self, by: usize, owner: &'a Aid, seen: Option<(&'a LockKey, &'a Aid)>) {
        self.found.visited += 1;
        let Some(it) = self.machine.owners.get(owner) else { return };
        if !self.known.insert(owner) {
            return;
        }
        let index = self.reached.len();
        self.reached.push(Reached { by, seen });
        if it.in_the_way > 0 {
            for number in self.machine.numbers(owner, self.key) {
                if (self.is_goal)(number) {
                    let circle = self.circle(index);
                    // Copying takes time, too.
                    self.found.visited += circle.len();
                    self.found.circles.insert(number, circle);
                }
            }
        }
        for (_, number) in it.places.iter().take(self.budget()) {
            self.found.visited += 1;
            if !self.found.circles.contains_key(number) {
                self.for_holders.push_back((index, *number));
            }
        }
    }

    /// The holders that were seen, on the way from the start of the search.
    fn circle(&self, mut to: usize) -> Circle {
        let mut circle = Vec::new();
        loop {
            let Reached { by, seen } = &self.reached[to];
            circle.extend(seen.map(|(key, aid)| (key.clone(), aid.clone())));
            if to == 0 {
                return circle;
            }
            to = *by;
        }
    }
}
