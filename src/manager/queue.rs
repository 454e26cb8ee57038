//! Who waits in this process, in the order of arrival.
//!
//! Only the first one for a document asks the store, so that a hand-over costs the same however many
//! wait. Readers at the front follow the first of them together.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::{
    Notify,
    oneshot::{self, Sender},
};
use tokio_util::task::TaskTracker;

use super::{
    deadlock::{self, Edge},
    operations::{Acquired, Acquisition, Wanted},
};
use crate::{Aid, Lock, LockKey, LockToken, Mode};

mod place;

pub(super) use place::{Place, Step};

/// After the bound on local hand-overs in "Lock Cohorting" (Dice, Marathe, Shavit: PPoPP 2012): enough
/// to win what there is to win, few enough not to starve the others.
const IN_A_ROW: u32 = 64;
/// How long nobody asks here after that: long enough for news of the release to reach the others, and
/// for one of them to ask.
const STAND_BACK: Duration = Duration::from_millis(10);

/// How long the turn of one whose time is over is kept: over HTTP nobody can wait for as long as a
/// person does, so they ask again and again.
const KEEP_TURN: Duration = Duration::from_secs(3);

/// The queues of a manager, and what is known about who holds what they wait for.
#[derive(Debug, Clone, Default)]
pub(super) struct Queues(Arc<Mutex<State>>);

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) queues: HashMap<LockKey, Queue>,
    /// The guards of this process: for whom, and of which job each is.
    pub(super) held: HashMap<LockKey, Vec<Held>>,
    next: u64,
    /// Who has waited in vain and may be back at once: the number they had, and until when it counts.
    turns: HashMap<(LockKey, Aid), (u64, Instant)>,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) waiting: VecDeque<Waiter>,
    /// Who was last seen to hold it.
    pub(super) holder: Option<Lock>,
    /// How often in a row the lock went from hand to hand in this process.
    handed: u32,
    /// Until when those elsewhere have the first chance.
    stands_back: Option<Instant>,
    /// In a fair collection the first attempts are made one after the other, as they arrive.
    arrivals: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
pub(super) struct Waiter {
    number: u64,
    pub(super) owner: Aid,
    /// Under which it asks: that of a guard is its own.
    aid: Aid,
    pub(super) mode: Mode,
    /// How to hand it the lock. Taken by one who does.
    will: Option<Will>,
    /// Somebody is about to.
    is_heir: bool,
    /// Its own request is on the way. Were it handed the lock as well, the two grants would be one, and
    /// giving back what comes second would leave the first.
    is_asking: bool,
    /// Its place in the queue of a fair collection.
    token: Option<LockToken>,
    /// It shall ask the store, as soon as it is its turn.
    asked: bool,
    /// The circle in which it waits. It will go, so it counts as one who waits for nobody.
    pub(super) deadlock: Option<Vec<Edge>>,
    call: Arc<Notify>,
}

/// What the first one in a queue leaves with those who may hand it the lock.
#[derive(Debug)]
struct Will {
    wanted: Wanted,
    scope: TaskTracker,
    gift: Sender<Acquired>,
}

/// One who is to be handed the lock. Dropped without a gift, it asks for itself.
#[derive(Debug)]
pub(super) struct Heir {
    pub(super) wanted: Wanted,
    pub(super) scope: TaskTracker,
    gift: Sender<Acquired>,
}

impl Heir {
    /// If it does not wait any more, the lock is given back.
    pub(super) fn give(self, gift: Acquired) {
        drop(self.gift.send(gift));
    }
}

/// A guard of this process.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) token: LockToken,
    pub(super) aid: Aid,
    pub(super) owner: Aid,
    pub(super) mode: Mode,
}

impl Queues {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In a fair collection nobody `may_inherit`: others may have come first.
    pub(super) fn join(
        &self,
        wanted: &Wanted,
        owner: &Aid,
        scope: &TaskTracker,
        may_inherit: bool,
    ) -> Place {
        let (key, call) = (&wanted.key, Arc::new(Notify::new()));
        let (gift, receiver) = oneshot::channel();
        let will = Will { wanted: wanted.clone(), scope: scope.clone(), gift };
        let mut state = self.state();
        let number = state.turn_of(key, owner);
        let queue = state.queues.entry(key.clone()).or_default();
        let at = queue.waiting.partition_point(|waiter| waiter.number < number);
        let asked = at == 0 || queue.is_held_by(owner);
        queue.waiting.insert(
            at,
            Waiter {
                number,
                owner: owner.clone(),
                aid: wanted.aid.clone(),
                mode: wanted.mode,
                will: may_inherit.then_some(will),
                is_heir: false,
                is_asking: false,
                token: None,
                asked,
                deadlock: None,
                call: Arc::clone(&call),
            },
        );
        // One at the end of a queue has been passed by the news that let others see the holder.
        state.refuse_if_deadlocked(key, number);
        drop(state);
        let (queues, key, gift) = (self.clone(), key.clone(), may_inherit.then_some(receiver));
        Place { queues, key, number, call, gift, granted: None, keeps_turn: false }
    }

    pub(super) fn somebody_waits_for(&self, key: &LockKey) -> bool {
        self.state().queues.contains_key(key)
    }

    pub(super) fn somebody_waits_in(&self, collection: &str) -> bool {
        self.state().queues.keys().any(|key| key.collection() == collection)
    }

    /// How many wait, for whatever.
    pub(super) fn waiting(&self) -> usize {
        self.state().queues.values().map(|queue| queue.waiting.len()).sum()
    }

    /// The lock on this document is gone, or excludes less.
    pub(super) fn freed(&self, key: &LockKey) {
        if let Some(queue) = self.state().queues.get_mut(key) {
            queue.holder = None;
            queue.ask_first();
        }
    }

    /// As [`freed`](Self::freed), for this acquisition. Old news once somebody else is known to have it.
    pub(super) fn ended(&self, lock: &Acquisition) {
        if let Some(queue) = self.state().queues.get_mut(&lock.key) {
            let is_old_news = queue.holder.as_ref().is_some_and(|holder| {
                holder.mode == Mode::Exclusive && holder.token != Some(lock.token)
            });
            if !is_old_news {
                queue.holder = None;
                queue.ask_first();
            }
        }
    }

    /// It went from hand to hand, to one who may not wait any more.
    pub(super) fn was_handed(&self, lock: &Lock) {
        let mut state = self.state();
        if let Some(queue) = state.queues.get_mut(&lock.key) {
            queue.holder = Some(lock.clone());
            state.has_new_holder(&lock.key);
        }
    }

    /// Who is to be handed this lock, instead of its being released. Not more often in a row than
    /// [`IN_A_ROW`], so that those who wait in other processes get in as well.
    ///
    /// Not one whose own request is on the way.
    pub(super) fn heir(&self, lock: &Acquisition) -> Option<Heir> {
        let mut state = self.state();
        let queue = state.queues.get_mut(&lock.key)?;
        // A client need not say in which mode it has what it releases.
        let is_known_as_exclusive = queue
            .holder
            .as_ref()
            .is_some_and(|it| it.token == Some(lock.token) && it.mode == Mode::Exclusive);
        if lock.mode != Mode::Exclusive && !is_known_as_exclusive {
            return None;
        }
        if queue.handed >= IN_A_ROW {
            queue.handed = 0;
            queue.stands_back = Some(Instant::now() + STAND_BACK);
            return None;
        }
        let first = queue.waiting.front_mut().filter(|first| !first.is_asking)?;
        let Will { wanted, scope, gift } = first.will.take()?;
        first.is_heir = true;
        queue.handed += 1;
        Some(Heir { wanted, scope, gift })
    }

    /// That may be so for any document of the collection.
    pub(super) fn ask_all(&self, collection: &str) {
        for (key, queue) in &mut self.state().queues {
            if key.collection() == collection {
                queue.ask_first();
            }
        }
    }

    /// A guard was made. Until [`dropped`](Self::dropped), who waits for it waits for its owner.
    pub(super) fn holds(&self, key: &LockKey, held: Held) {
        let mut state = self.state();
        state.held.entry(key.clone()).or_default().push(held);
        state.has_new_holder(key);
    }

    pub(super) fn dropped(&self, key: &LockKey, token: LockToken) {
        let mut state = self.state();
        if let Some(held) = state.held.get_mut(key) {
            held.retain(|held| held.token != token);
            if held.is_empty() {
                state.held.remove(key);
            }
        }
    }
}

impl State {
    /// The number of one who joins: a new one, or that from before.
    fn turn_of(&mut self, key: &LockKey, owner: &Aid) -> u64 {
        self.next += 1;
        let now = Instant::now();
        match self.turns.remove(&(key.clone(), owner.clone())) {
            Some((number, until)) if until > now => number,
            _ => self.next,
        }
    }

    /// Who waits for it now waits for somebody else: that may close a circle for anybody, and the
    /// holder's own session need not wait.
    fn has_new_holder(&mut self, key: &LockKey) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        queue.ask_own();
        let waited_for = deadlock::waited_for(self);
        let queue = self.queues.get(key);
        let numbers: Vec<_> = (queue.iter().flat_map(|queue| &queue.waiting))
            .filter(|waiter| waited_for.contains(&waiter.owner))
            .map(|waiter| waiter.number)
            .collect();
        for number in numbers {
            self.refuse_if_deadlocked(key, number);
        }
    }

    fn keep_turn(&mut self, key: &LockKey, owner: &Aid, number: u64, until: Instant) {
        let now = Instant::now();
        self.turns.retain(|_, (_, until)| *until > now);
        self.turns.insert((key.clone(), owner.clone()), (number, until));
    }

    fn refuse_if_deadlocked(&mut self, key: &LockKey, number: u64) {
        let Some(waiter) = self.queues.get(key).and_then(|queue| queue.find(number)) else {
            return;
        };
        if waiter.deadlock.is_none()
            && let Some(cycle) = deadlock::cycle(self, &waiter.owner)
            && let Some(queue) = self.queues.get_mut(key)
            && let Some(waiter) = queue.find_mut(number)
        {
            waiter.deadlock = Some(cycle);
            waiter.call.notify_one();
        }
    }
}

impl Queue {
    fn find(&self, number: u64) -> Option<&Waiter> {
        self.waiting.iter().find(|waiter| waiter.number == number)
    }

    fn find_mut(&mut self, number: u64) -> Option<&mut Waiter> {
        self.waiting.iter_mut().find(|waiter| waiter.number == number)
    }

    fn ask_first(&mut self) {
        if let Some(first) = self.waiting.front_mut() {
            first.ask();
        }
    }

    /// The readers at the front may go in together.
    fn ask_readers(&mut self) {
        for waiter in self.waiting.iter_mut().take_while(|waiter| waiter.mode == Mode::Shared) {
            waiter.ask();
        }
    }

    /// Other requests of the session that has it now. In a fair collection also the one that the store
    /// shows as the next: that may be another than the first here, who is in line again, at its end,
    /// after its place had run out.
    fn ask_own(&mut self) {
        let Some(holder) = &self.holder else { return };
        let is_own = |waiter: &&mut Waiter| [&waiter.owner, &waiter.aid].contains(&&holder.aid);
        for waiter in self.waiting.iter_mut().filter(is_own) {
            waiter.ask();
        }
    }

    /// A guard has a session of its own, so nobody waits under the name that its lock has.
    pub(super) fn is_held_by(&self, owner: &Aid) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.aid == *owner)
    }

    /// Whether it is the turn of this one: the first, a reader behind readers only, one whose session has
    /// the lock already, or who is the next in the store.
    fn may_try(&self, number: u64) -> bool {
        let mut ahead = self.waiting.iter().take_while(|waiter| waiter.number != number).peekable();
        let Some(it) = self.find(number) else { return false };
        ahead.peek().is_none()
            || it.mode == Mode::Shared && ahead.all(|waiter| waiter.mode == Mode::Shared)
            || self.is_held_by(&it.owner)
            || self.is_held_by(&it.aid)
    }
}

impl Waiter {
    fn ask(&mut self) {
        self.asked = true;
        self.call.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::Holder;

    fn key(id: &str) -> LockKey {
        LockKey::new("workitem", id).unwrap()
    }

    fn joins(queues: &Queues, key: &LockKey, owner: &Aid) -> Place {
        let wanted = Wanted {
            key: key.clone(),
            aid: Aid::new(),
            holder: Holder::new("alice"),
            tab: None,
            page: None,
            mode: Mode::Exclusive,
            ttl: Duration::from_secs(60),
        };
        queues.join(&wanted, owner, &TaskTracker::new(), true)
    }

    /// A guard of this process, and its lock as the store shows it.
    fn guard(key: &LockKey, owner: &Aid) -> (Held, Lock) {
        let (token, aid, mode) = (LockToken::new(), Aid::new(), Mode::Exclusive);
        let held = Held { token, aid: aid.clone(), owner: owner.clone(), mode };
        let lock = Lock {
            key: key.clone(),
            mode,
            aid,
            token: Some(token),
            tab: None,
            fence: None,
            holder: None,
            since: SystemTime::UNIX_EPOCH,
            expires_at: Instant::now(),
        };
        (held, lock)
    }

    #[test]
    fn of_those_who_wait_for_each_other_one_is_refused_whatever_news_there_is_until_it_goes() {
        let (queues, one, two) = (Queues::default(), Aid::new(), Aid::new());
        let (a, b) = (key("a"), key("b"));
        let ((a_held, _), (b_held, b_lock)) = (guard(&a, &one), guard(&b, &two));
        queues.holds(&a, a_held);
        queues.holds(&b, b_held);
        let first = joins(&queues, &b, &one);
        let second = joins(&queues, &a, &two);
        assert!(matches!(second.next_step(), Step::Refuse(_)));
        first.saw(&b_lock);
        assert!(!matches!(first.next_step(), Step::Refuse(_)), "the other one goes");
        // It looks whether that is so, and finds that it is.
        second.goes_on();
        assert!(matches!(second.next_step(), Step::Refuse(_)));
        drop(second);
        let again = joins(&queues, &a, &two);
        assert!(matches!(again.next_step(), Step::Refuse(_)));
        drop(first);
        again.goes_on();
        assert!(!matches!(again.next_step(), Step::Refuse(_)), "nobody waits for it any more");
    }

    #[test]
    fn who_goes_before_it_has_asked_passes_the_call_on() {
        let (queues, key) = (Queues::default(), key("a"));
        let [first, second] = [(); 2].map(|()| joins(&queues, &key, &Aid::new()));
        assert!(matches!(first.next_step(), Step::Try));
        first.saw(&guard(&key, &Aid::new()).1);
        assert!(matches!(first.next_step(), Step::WaitFirst(Some(_))));
        queues.freed(&key);
        assert!(first.holder().is_none(), "nobody is refused for it any more");
        drop(first);
        assert!(matches!(second.next_step(), Step::Try));
    }

    #[test]
    fn news_of_a_holder_closes_a_circle_for_those_who_have_waited_before() {
        let (queues, session, job) = (Queues::default(), Aid::new(), Aid::new());
        let (a, b) = (key("a"), key("b"));
        queues.holds(&b, guard(&b, &job).0);
        let _session_waits = joins(&queues, &b, &session);
        let first = joins(&queues, &a, &Aid::new());
        let behind = joins(&queues, &a, &job);
        assert!(matches!(behind.next_step(), Step::Wait));
        let mut lock = guard(&a, &session).1;
        lock.aid = session;
        first.saw(&lock);
        assert!(matches!(behind.next_step(), Step::Refuse(_)));
    }

    #[test]
    fn who_is_ahead_is_waited_for_too() {
        let (queues, one, two, three) = (Queues::default(), Aid::new(), Aid::new(), Aid::new());
        let [a, b, c] = ["a", "b", "c"].map(key);
        queues.holds(&b, guard(&b, &one).0);
        queues.holds(&c, guard(&c, &three).0);
        let _ahead = joins(&queues, &a, &two);
        let _at_the_same_time = joins(&queues, &c, &two);
        let _behind = joins(&queues, &a, &one);
        let last = joins(&queues, &b, &three);
        assert!(matches!(last.next_step(), Step::Refuse(_)));
    }

    /// As by an upgrade.
    #[test]
    fn one_acquisition_of_a_session_that_ends_does_not_end_the_next_one() {
        let (queues, owner, key) = (Queues::default(), Aid::new(), key("a"));
        let (first, _) = guard(&key, &owner);
        let token = LockToken::new();
        let next = Held { token, aid: first.aid.clone(), owner: owner.clone(), mode: first.mode };
        let ended = first.token;
        queues.holds(&key, first);
        queues.holds(&key, next);
        queues.dropped(&key, ended);
        queues.dropped(&key, ended);
        let itself = joins(&queues, &key, &owner);
        assert!(matches!(itself.next_step(), Step::Refuse(_)), "it still holds it");
        queues.dropped(&key, token);
        assert!(queues.state().held.is_empty());
    }
}
