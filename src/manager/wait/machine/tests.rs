use std::{collections::HashSet, time::SystemTime};

use super::*;
use crate::{lock::Holder, manager::wait::machine::deadlock::BUDGET};

const LONG: Duration = Duration::from_secs(60);

fn key(id: impl ToString) -> LockKey {
    LockKey::new("workitem", id.to_string()).unwrap()
}

fn unlimited() -> Machine<()> {
    limited(usize::MAX, usize::MAX)
}

fn limited<H>(waiters_per_person: usize, waiters: usize) -> Machine<H> {
    let waiters_per_session = waiters_per_person;
    Machine::new(Limits { waiters_per_session, waiters_per_person, waiters, ..Limits::default() })
}

fn wanted(key: &LockKey, mode: Mode) -> Wanted {
    let (key, aid, holder) = (key.clone(), Aid::new(), Holder::new("alice"));
    Wanted {
        key,
        aid,
        person: None,
        holder,
        tab: None,
        page: None,
        mode,
        upgrades: None,
        ttl: LONG,
    }
}

impl Machine<()> {
    fn joins(&mut self, key: &LockKey, owner: &Aid) -> u64 {
        self.joins_as(key, owner, Mode::Exclusive).unwrap()
    }

    fn joins_as(&mut self, key: &LockKey, owner: &Aid, mode: Mode) -> Result<u64, LockError> {
        self.join(&wanted(key, mode), owner, (), false, Instant::now())
    }

    fn step(&mut self, number: u64) -> Step {
        self.next(number, Instant::now())
    }

    fn goes(&mut self, number: u64) {
        assert!(!self.leaves(number, Leaving::Gone, Instant::now()));
    }

    fn is_refused(&self, number: u64) -> bool {
        self.waiters[&number].circle.is_some()
    }

    /// A guard of this process.
    fn guards(&mut self, key: &LockKey, owner: &Aid) -> Acquisition {
        let held = Acquisition::exclusive(key, &Aid::new(), LockToken::new());
        self.guard_taken(&held, owner);
        held
    }

    /// Each owner holds a document, and waits for the document of its predecessor.
    fn chain(&mut self, owners: &[Aid]) -> Vec<u64> {
        for (n, owner) in owners.iter().enumerate() {
            self.guards(&key(n), owner);
        }
        owners[1..].iter().enumerate().map(|(n, owner)| self.joins(&key(n), owner)).collect()
    }

    /// How much the searches after this event visit.
    fn visits<T>(&mut self, event: impl FnOnce(&mut Self) -> T) -> (T, usize) {
        let before = self.visited;
        (event(self), self.visited - before)
    }
}

/// The lock as the store shows it.
fn lock(key: &LockKey, aid: &Aid, mode: Mode) -> Lock {
    Lock {
        key: key.clone(),
        description: None,
        mode,
        aid: aid.clone(),
        token: Some(LockToken::new()),
        tab: None,
        fence: None,
        holder: None,
        since: SystemTime::UNIX_EPOCH,
        expires_at: Instant::now() + LONG,
        ends_at: None,
        asks: Vec::new(),
    }
}

fn exclusive(key: &LockKey) -> Lock {
    lock(key, &Aid::new(), Mode::Exclusive)
}

/// The waiter is the first, and sleeps. Returns until when.
fn sleeps(step: Step) -> Option<Instant> {
    match step {
        Step::Sleep { is_first: true, wake_at } => wake_at,
        other => panic!("{other:?}"),
    }
}

#[test]
fn of_those_who_wait_for_each_other_one_is_refused_whatever_news_there_is_until_it_goes() {
    let (mut machine, one, two) = (unlimited(), Aid::new(), Aid::new());
    let (a, b) = (key("a"), key("b"));
    machine.guards(&a, &one);
    machine.guards(&b, &two);
    let first = machine.joins(&b, &one);
    let second = machine.joins(&a, &two);
    assert_eq!(machine.step(second), Step::Refuse(Vec::new()));
    machine.refused(first, &exclusive(&b)).unwrap();
    assert!(!machine.is_refused(first), "the other one goes");
    // The driver checks the circle, and finds it unchanged.
    machine.goes_on(second);
    assert!(machine.is_refused(second));
    machine.goes(second);
    let again = machine.joins(&a, &two);
    assert!(machine.is_refused(again));
    machine.goes(first);
    machine.goes_on(again);
    assert!(!machine.is_refused(again), "nobody waits for it any more");
}

#[test]
fn a_waiter_that_leaves_before_it_has_asked_passes_the_call_on() {
    let (mut machine, a) = (unlimited(), key("a"));
    let [first, second] = [(); 2].map(|()| machine.joins(&a, &Aid::new()));
    assert_eq!(machine.step(first), Step::Ask);
    machine.refused(first, &exclusive(&a)).unwrap();
    assert!(sleeps(machine.step(first)).is_some());
    assert_eq!(machine.step(second), Step::Sleep { is_first: false, wake_at: None });
    machine.freed(&a);
    assert!(machine.holder(&a).is_none(), "nobody is refused for it any more");
    machine.goes(first);
    assert_eq!(machine.step(second), Step::Ask);
}

#[test]
fn a_called_waiter_that_must_draw_a_ticket_first_asks_once_it_has_the_ticket() {
    let (mut machine, a) = (unlimited(), key("a"));
    let wanted = wanted(&a, Mode::Exclusive);
    let first = machine.join(&wanted, &Aid::new(), (), true, Instant::now()).unwrap();
    assert_eq!(machine.step(first), Step::Draw);
    // Another waiter has drawn it.
    let place = machine.place_to_set(&a);
    assert!(machine.was_set(&a, place, Some(Ticket(7))));
    assert_eq!(machine.step(first), Step::Ask);
    machine.refused(first, &exclusive(&a)).unwrap();
    assert!(sleeps(machine.step(first)).is_some(), "it is not called any more");
}

/// The next waiter does not ask, so that it can be handed the lock in turn.
#[test]
fn a_handover_is_no_reason_to_ask() {
    let (mut machine, a) = (unlimited(), key("a"));
    let [first, second] = [(); 2].map(|()| machine.joins(&a, &Aid::new()));
    assert_eq!(machine.step(first), Step::Ask);
    let before = exclusive(&a);
    machine.refused(first, &before).unwrap();
    // The handover comes before the waiter asks.
    machine.freed(&a);
    let lock = handed(&mut machine, &before);
    assert_eq!(machine.step(first), Step::Sleep { is_first: true, wake_at: None });
    let until = lock.expires_at;
    assert!(!machine.leaves(first, Leaving::Granted(lock.clone()), Instant::now()));
    assert_eq!(sleeps(machine.step(second)), Some(until));
    handed(&mut machine, &lock);
}

/// Hands the released lock over to the first waiter.
fn handed(machine: &mut Machine<()>, released: &Lock) -> Lock {
    let released = Acquisition::of(released).unwrap();
    let (heir, ..) = machine.heir(&released, Instant::now()).expect("an heir");
    assert!(machine.heir(&released, Instant::now()).is_none(), "not twice");
    let lock = lock(&heir.key, &heir.aid, Mode::Exclusive);
    machine.held(&lock);
    lock
}

#[test]
fn late_news_of_a_release_does_not_call_the_next_waiter_at_once() {
    let (mut machine, a) = (unlimited(), key("a"));
    let [first, second] = [(); 2].map(|()| machine.joins(&a, &Aid::new()));
    assert_eq!(machine.step(first), Step::Ask);
    machine.freed(&a);
    let lock = exclusive(&a);
    assert!(!machine.leaves(first, Leaving::Granted(lock.clone()), Instant::now()));
    // Without a handover, the news was not late.
    let soon = Instant::now() + Duration::from_millis(500);
    assert!(sleeps(machine.step(second)).is_some_and(|until| until <= soon));
    handed(&mut machine, &lock);
}

#[test]
fn after_64_handovers_nobody_asks_for_an_eighth_of_their_time_after_the_release() {
    for (each, pause) in [(1, 30), (10, 80), (1_000, 250)] {
        let (mut machine, a) = (unlimited(), key("a"));
        let (mut now, mut held) = (Instant::now(), exclusive(&a));
        machine.held(&held);
        let mut first = machine.joins(&a, &Aid::new());
        for _ in 0..64 {
            let next = machine.joins(&a, &Aid::new());
            let (heir, ..) = machine.heir(&Acquisition::of(&held).unwrap(), now).expect("an heir");
            held = lock(&a, &heir.aid, Mode::Exclusive);
            assert!(!machine.leaves(first, Leaving::Granted(held.clone()), now));
            (first, now) = (next, now + Duration::from_millis(each));
        }
        let released = Acquisition::of(&held).unwrap();
        assert!(machine.heir(&released, now).is_none(), "{each}");
        // The release takes its time, and no chance of the others is lost by that.
        now += LONG / 2;
        machine.ended(&released);
        let until = now + Duration::from_millis(pause);
        assert_eq!(sleeps(machine.next(first, now)), Some(until), "{each}");
        assert_eq!(machine.next(first, until), Step::Ask, "{each}");
    }
}

/// A lone waiter asks at once, whatever its session waits for elsewhere. It is refused itself if it has to wait.
#[test]
fn a_waiter_whose_session_waits_for_too_much_is_in_nobodys_way() {
    let mut machine = limited(1, usize::MAX);
    let (greedy, a, b) = (Aid::new(), key("a"), key("b"));
    let waits = |machine: &mut Machine<()>, key: &LockKey| {
        let wanted = Wanted { aid: greedy.clone(), ..wanted(key, Mode::Exclusive) };
        machine.join(&wanted, &greedy, (), false, Instant::now()).unwrap()
    };
    let one = waits(&mut machine, &a);
    machine.count(one).unwrap();
    let two = waits(&mut machine, &b);
    machine.joins_as(&b, &Aid::new(), Mode::Exclusive).expect("it waits for nothing else");
    assert!(machine.count(two).is_err());
}

#[test]
fn a_newcomer_does_not_take_the_room_of_the_waiter_that_came_first() {
    // A lone waiter does not count yet. The second one makes both count, before the store refuses the first.
    let mut machine = limited(usize::MAX, 2);
    let a = key("a");
    let first = machine.joins(&a, &Aid::new());
    machine.joins(&a, &Aid::new());
    let third = machine.joins_as(&a, &Aid::new(), Mode::Exclusive);
    assert!(matches!(third, Err(LockError::TooManyWaiters { limit: 2, per_session: false, .. })));
    machine.refused(first, &exclusive(&a)).expect("its own room");
    // A waiter that goes makes room.
    machine.goes(first);
    machine.joins(&a, &Aid::new());
}

#[test]
fn of_many_readers_at_the_front_some_go_in_at_a_time_and_the_others_follow() {
    let (mut machine, a) = (unlimited(), key("a"));
    let reader = |_| machine.joins_as(&a, &Aid::new(), Mode::Shared).unwrap();
    let readers: Vec<_> = (0..1_000).map(reader).collect();
    for (n, reader) in readers.iter().enumerate() {
        let asking =
            readers.iter().filter(|it| machine.waiters.get(it).is_some_and(|it| it.is_called));
        assert!((1..=READERS_AT_ONCE).contains(&asking.count()), "{n}");
        assert_eq!(machine.step(*reader), Step::Ask, "{n}");
        let granted = Leaving::Granted(lock(&a, &Aid::new(), Mode::Shared));
        assert!(!machine.leaves(*reader, granted, Instant::now()));
    }
}

#[test]
fn a_new_holder_closes_a_circle_for_those_who_have_waited_before() {
    let (mut machine, session, job) = (unlimited(), Aid::new(), Aid::new());
    let (a, b) = (key("a"), key("b"));
    machine.guards(&b, &job);
    machine.joins(&b, &session);
    let first = machine.joins(&a, &Aid::new());
    let behind = machine.joins(&a, &job);
    assert!(!machine.is_refused(behind));
    machine.refused(first, &lock(&a, &session, Mode::Exclusive)).unwrap();
    // The driver checks whether the session still holds it.
    assert_eq!(machine.step(behind), Step::Refuse(vec![(a, session)]));
}

#[test]
fn who_is_ahead_is_waited_for_too() {
    let (mut machine, [one, two, three]) = (unlimited(), [(); 3].map(|()| Aid::new()));
    let [a, b, c] = ["a", "b", "c"].map(key);
    machine.guards(&b, &one);
    machine.guards(&c, &three);
    let _ahead = machine.joins(&a, &two);
    let _at_the_same_time = machine.joins(&c, &two);
    let _behind = machine.joins(&a, &one);
    let last = machine.joins(&b, &three);
    assert!(machine.is_refused(last));
}

/// As an upgrade does it.
#[test]
fn one_acquisition_of_a_session_that_ends_does_not_end_the_next_one() {
    let (mut machine, owner, a) = (unlimited(), Aid::new(), key("a"));
    let [first, next] = [(); 2].map(|()| machine.guards(&a, &owner));
    machine.guard_dropped(&first);
    machine.guard_dropped(&first);
    let itself = machine.joins(&a, &owner);
    assert!(machine.is_refused(itself), "it still holds it");
    machine.guard_dropped(&next);
    assert!(machine.guards.is_empty());
}

#[test]
fn one_that_is_back_in_its_place_closes_a_circle_for_those_behind_it() {
    let (mut machine, reader, writer) = (unlimited(), Aid::new(), Aid::new());
    let a = key("a");
    let held = Acquisition { mode: Mode::Shared, ..Acquisition::of(&exclusive(&a)).unwrap() };
    machine.guard_taken(&held, &reader);
    let first = machine.joins(&a, &writer);
    let _stays = machine.joins_as(&a, &Aid::new(), Mode::Shared).unwrap();
    assert!(!machine.leaves(first, Leaving::TimeOver, Instant::now()));
    let again = machine.joins_as(&a, &reader, Mode::Shared).unwrap();
    assert!(!machine.is_refused(again), "readers only");
    assert_eq!(machine.joins(&a, &writer), first);
    assert!(machine.is_refused(again), "it waits for a writer that waits for it");
}

/// As two tabs of a browser. They are granted the lock together.
#[test]
fn two_requests_of_a_session_that_wait_for_one_document_are_no_circle() {
    let (mut machine, alice) = (unlimited(), Aid::new());
    let (a, own) = (key("a"), key("own"));
    machine.joins(&a, &alice);
    let other = machine.joins(&own, &Aid::new());
    machine.joins(&a, &Aid::new());
    machine.refused(other, &lock(&own, &alice, Mode::Exclusive)).unwrap();
    let second = machine.joins(&a, &alice);
    assert!(!machine.is_refused(second));
}

#[test]
fn a_chain_of_ten_thousand_costs_a_newcomer_no_more_than_one_search_wherever_it_comes_in() {
    const LENGTH: usize = 10_000;
    let (mut machine, owners) = (unlimited(), Vec::from_iter((0..LENGTH).map(|_| Aid::new())));
    let (chain, whole) = machine.visits(|it| it.chain(&owners));
    assert!(whole <= 2 * LENGTH, "{whole} for all of them");
    let (_, visited) = machine.visits(|it| it.joins(&key(LENGTH - 1), &Aid::new()));
    assert_eq!(visited, 0, "nobody waits for the one who has come last");
    let (ahead, visited) = machine.visits(|it| it.joins(&key("free"), &owners[0]));
    assert!(visited <= 4, "{visited} for one who waits for nobody");
    assert!(!machine.is_refused(ahead));
    machine.goes(ahead);
    // Two chains become one.
    let (middle, visited) = machine.visits(|it| it.joins(&key(LENGTH / 2), &owners[LENGTH - 1]));
    assert!(visited <= BUDGET && !machine.is_refused(middle), "{visited}");
    let last = lock(&key(LENGTH - 2), &owners[LENGTH - 2], Mode::Exclusive);
    let (refused, visited) = machine.visits(|it| it.refused(chain[LENGTH - 2], &last));
    assert!(visited <= BUDGET && refused.is_ok(), "{visited}");
    // Longer than one search can visit. The search refuses nobody and does not fail.
    let closes = machine.joins(&key(LENGTH - 1), &owners[0]);
    assert!(!machine.is_refused(closes));
}

#[test]
fn a_chain_that_is_no_longer_than_a_search_is_refused_to_whoever_closes_it() {
    for length in [2, 3, 100, BUDGET / 2] {
        let (mut machine, owners) = (unlimited(), Vec::from_iter((0..length).map(|_| Aid::new())));
        let chain = machine.chain(&owners);
        let closes = machine.joins(&key(length - 1), &owners[0]);
        assert!(machine.is_refused(closes), "{length}");
        assert!(!chain.iter().any(|it| machine.is_refused(*it)), "{length}");
    }
}

#[test]
fn twenty_thousand_waiters_cost_a_newcomer_nothing() {
    for documents in [1, 20_000] {
        let mut machine = unlimited();
        for n in 0..documents {
            machine.guards(&key(n), &Aid::new());
        }
        (0..20_000).for_each(|n| _ = machine.joins(&key(n % documents), &Aid::new()));
        assert_eq!(machine.waiting(), 20_000);
        // This owner holds a lock that another owner waits for.
        let owner = Aid::new();
        machine.guards(&key("own"), &owner);
        machine.joins(&key("own"), &Aid::new());
        let (_, visited) = machine.visits(|it| it.joins(&key(0), &owner));
        assert!(visited <= 8, "{visited} where {documents} documents are waited for");
        for number in machine.waiters.keys().copied().collect::<Vec<_>>() {
            machine.goes(number);
        }
        assert!(machine.queues.is_empty() && machine.owners.is_empty());
    }
}

/// Other waiters are before and behind each of the three, and some of these wait for another document as
/// well.
#[test]
fn a_circle_of_three_is_found_through_long_queues() {
    let (mut machine, owners) = (unlimited(), [(); 3].map(|()| Aid::new()));
    let busy = Vec::from_iter((0..300).map(|_| Aid::new()));
    busy.iter().enumerate().for_each(|(n, owner)| _ = machine.joins(&key(n), owner));
    let keys = ["a", "b", "c"].map(key);
    keys.iter().zip(&owners).for_each(|(key, owner)| _ = machine.guards(key, owner));
    let crowd = |machine: &mut Machine<()>, busy: &[Aid]| {
        for (n, key) in keys.iter().enumerate() {
            (0..5_000).for_each(|_| _ = machine.joins(key, &Aid::new()));
            busy.iter().skip(n).step_by(3).for_each(|owner| _ = machine.joins(key, owner));
        }
    };
    crowd(&mut machine, &busy);
    let places = [0, 1].map(|n| machine.joins(&keys[n + 1], &owners[n]));
    crowd(&mut machine, &[]);
    let (last, visited) = machine.visits(|it| it.joins(&keys[0], &owners[2]));
    assert!(machine.is_refused(last) && visited < 50, "{visited}");
    assert!(!places.iter().any(|it| machine.is_refused(*it)));
}

#[test]
fn each_part_of_a_queue_is_gone_through_once() {
    const BUSY: usize = 50;
    let (mut machine, last) = (unlimited(), Aid::new());
    machine.guards(&key("own"), &last);
    machine.joins(&key("own"), &Aid::new());
    for n in 0..BUSY {
        let owner = Aid::new();
        [key("a"), key(n)].iter().for_each(|key| _ = machine.joins(key, &owner));
    }
    let (last, visited) = machine.visits(|it| it.joins(&key("a"), &last));
    assert!(!machine.is_refused(last) && visited <= 4 * BUSY, "{visited}");
}

/// The obstacle holds nothing in the queue where it waits.
#[test]
fn a_circle_is_found_through_somebody_deep_in_a_long_queue() {
    let (mut machine, deep, last) = (unlimited(), Aid::new(), Aid::new());
    let (crowded, own) = (key("crowded"), key("own"));
    machine.guards(&crowded, &Aid::new());
    machine.guards(&own, &last);
    (0..5_000).for_each(|_| _ = machine.joins(&crowded, &Aid::new()));
    machine.joins(&crowded, &deep);
    (0..5_000).for_each(|_| _ = machine.joins(&crowded, &Aid::new()));
    machine.joins(&own, &deep);
    let (last, visited) = machine.visits(|it| it.joins(&crowded, &last));
    assert!(machine.is_refused(last) && visited < 10, "{visited}");
}

/// A store, guards and drivers, with random events.
struct World {
    machine: Machine<()>,
    random: fastrand::Rng,
    now: Instant,
    is_fair: bool,
    /// True if an owner may wait twice for one document. Then a circle may be found only once the owner holds
    /// that document.
    waits_twice: bool,
    keys: Vec<LockKey>,
    owners: Vec<Aid>,
    /// The locks that the store has granted, with their owners, and those on their way to an heir.
    held: Vec<(Lock, Aid)>,
    passing: BTreeMap<u64, Lock>,
    /// The guard of the last grant.
    begin_guard: Option<(Acquisition, Aid)>,
    /// The waiters whose drivers sleep, with the moment when they wake up.
    asleep: BTreeMap<u64, Option<Instant>>,
    tickets: u64,
    granted: usize,
    refused: usize,
}

/// The document and the owner of an event that may close a circle, and the waiter that has just come.
type Event = Option<(LockKey, Aid, Option<u64>)>;

#[derive(Debug)]
struct Circles {
    refused: BTreeSet<u64>,
    /// The others that wait for themselves.
    itself: BTreeSet<u64>,
    /// The documents whose holder waits, too. If there is another holder, both begin to be in the way.
    of_holder: BTreeSet<LockKey>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        Self {
            machine: limited(3, 12),
            now: Instant::now(),
            is_fair: random.u8(..4) == 0,
            waits_twice: random.bool(),
            owners: (0..random.usize(2..7)).map(|_| Aid::new()).collect(),
            keys: (0..random.usize(1..5)).map(key).collect(),
            random,
            held: Vec::new(),
            passing: BTreeMap::new(),
            begin_guard: None,
            asleep: BTreeMap::new(),
            tickets: 0,
            granted: 0,
            refused: 0,
        }
    }

    fn event(&mut self) -> Event {
        if let Some((held, owner)) = self.begin_guard.take() {
            self.machine.guard_taken(&held, &owner);
            return Some((held.key, owner, None));
        }
        let key = self.random.choice(&self.keys)?.clone();
        let owner = self.random.choice(&self.owners)?.clone();
        let mode = if self.random.bool() { Mode::Shared } else { Mode::Exclusive };
        let mut wanted = wanted(&key, mode);
        match self.random.u8(..16) {
            0..5 if self.waits_twice || self.machine.numbers(&owner, &key).is_empty() => {
                if self.random.bool() {
                    wanted.aid = owner.clone();
                }
                let number = self.machine.join(&wanted, &owner, (), self.is_fair, self.now).ok()?;
                return Some((key, owner, Some(number)));
            }
            5 if self.excluding(&wanted).is_none() => return self.grants(None, wanted, owner),
            // An answer that is out of date.
            6 => {
                let lock = Lock { expires_at: self.now + LOOK_AGAIN, ..lock(&key, &owner, mode) };
                self.machine.held(&lock);
                return Some((key, owner, None));
            }
            7 => _ = self.machine.call_some(key.collection(), None),
            8 => self.machine.freed(&key),
            9 => self.passes(),
            10 => self.releases(),
            11 => {
                let number = self.waiter(|_, _| true)?;
                let end = if self.random.bool() { Leaving::TimeOver } else { Leaving::Gone };
                self.leaves(number, end);
            }
            12 => return self.answers(),
            13 => return self.inherits(),
            _ => self.steps(),
        }
        None
    }

    fn waiter(&mut self, is_such: impl Fn(&u64, &Waiter<()>) -> bool) -> Option<u64> {
        let all = self.machine.waiters.iter().filter(|(number, it)| is_such(number, it));
        let all: BTreeSet<_> = all.map(|(number, _)| *number).collect();
        self.random.choice(all)
    }

    fn excluding(&self, wanted: &Wanted) -> Option<Lock> {
        let mut all = self.held.iter().map(|(lock, _)| lock).chain(self.passing.values());
        let is_shared = |lock: &Lock| [lock.mode, wanted.mode] == [Mode::Shared; 2];
        let excludes = |it: &&Lock| it.key == wanted.key && it.aid != wanted.aid && !is_shared(it);
        all.find(excludes).cloned()
    }

    /// A driver that is awake goes on.
    fn steps(&mut self) {
        let (asleep, now) = (self.asleep.clone(), self.now);
        let is_awake = |number: &u64, it: &Waiter<()>| {
            let until = asleep.get(number);
            let is_over = until.is_none_or(|until| until.is_some_and(|until| until <= now));
            it.phase != Phase::Asking && (it.is_woken || is_over)
        };
        let Some(number) = self.waiter(is_awake) else { return };
        let Wanted { key, mode, .. } = self.machine.waiters[&number].wanted.clone();
        self.asleep.remove(&number);
        match self.machine.next(number, now) {
            Step::Ask => {
                let asks = &self.machine.waiters[&number];
                let queue = &self.machine.queues[&key];
                let passes_over = queue.waiting.range(..number).any(|ahead| {
                    let ahead = &self.machine.waiters[ahead].wanted;
                    [ahead.mode, mode] != [Mode::Shared; 2]
                });
                assert!(!passes_over || queue.is_held_by(&asks.owner));
            }
            Step::Draw => {
                let place = self.machine.place_to_set(&key);
                self.tickets += 1;
                assert!(self.machine.was_set(&key, place, Some(Ticket(self.tickets))));
            }
            Step::Renew => {}
            Step::Sleep { wake_at, .. } => _ = self.asleep.insert(number, wake_at),
            Step::Refuse(_) if self.random.bool() => self.machine.goes_on(number),
            Step::Refuse(_) => self.leaves(number, Leaving::Gone),
        }
    }

    /// The store answers a claim.
    fn answers(&mut self) -> Event {
        let number = self.waiter(|_, it| it.phase == Phase::Asking)?;
        let Waiter { wanted, owner, .. } = &self.machine.waiters[&number];
        let (wanted, owner) = (wanted.clone(), owner.clone());
        if self.random.u8(..8) == 0 {
            self.machine.failed(number);
            return None;
        }
        let Some(holder) = self.excluding(&wanted) else {
            return self.grants(Some(number), wanted, owner);
        };
        if self.machine.refused(number, &holder).is_err() {
            self.leaves(number, Leaving::Gone);
        }
        Some((holder.key, holder.aid, None))
    }

    /// A handover ends.
    fn inherits(&mut self) -> Event {
        let number = self.waiter(|_, it| it.phase == Phase::Inheriting)?;
        let Waiter { wanted, owner, .. } = &self.machine.waiters[&number];
        let (wanted, owner) = (wanted.clone(), owner.clone());
        self.passing.remove(&number);
        if self.random.u8(..4) > 0 {
            return self.grants(Some(number), wanted, owner);
        }
        self.asleep.remove(&number);
        self.machine.failed(number);
        None
    }

    fn grants(&mut self, number: Option<u64>, wanted: Wanted, owner: Aid) -> Event {
        let lock = lock(&wanted.key, &wanted.aid, wanted.mode);
        let lock = Lock { expires_at: self.now + LOOK_AGAIN, ..lock };
        self.held.retain(|(before, _)| before.key != lock.key || before.aid != lock.aid);
        if let Some(number) = number {
            self.leaves(number, Leaving::Granted(lock.clone()));
            self.granted += 1;
        }
        if lock.aid != owner {
            self.begin_guard = Some((Acquisition::of(&lock).unwrap(), owner.clone()));
        }
        self.held.push((lock, owner.clone()));
        Some((wanted.key, owner, None))
    }

    fn releases(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let (lock, _) = self.held.swap_remove(self.random.usize(..self.held.len()));
        let released = Acquisition::of(&lock).unwrap();
        self.machine.guard_dropped(&released);
        let first = self.machine.first(&lock.key);
        if self.machine.heir(&released, self.now).is_some() {
            self.passing.insert(first.unwrap(), lock);
        } else if self.random.bool() {
            // Otherwise there is no news.
            self.machine.ended(&released);
        }
    }

    fn leaves(&mut self, number: u64, end: Leaving) {
        _ = self.machine.leaves(number, end, self.now);
        self.asleep.remove(&number);
        if let Some(lock) = self.passing.remove(&number) {
            self.machine.ended(&Acquisition::of(&lock).unwrap());
        }
    }

    fn passes(&mut self) {
        self.now += LOOK_AGAIN / self.random.u32(1..100);
        for (lost, _) in self.held.extract_if(.., |(lock, _)| lock.expires_at <= self.now) {
            self.machine.guard_dropped(&Acquisition::of(&lost).unwrap());
        }
    }

    fn circles(&self) -> Circles {
        let all = self.machine.waiters.keys().copied();
        let (refused, others): (BTreeSet<_>, BTreeSet<_>) =
            all.partition(|it| self.machine.is_refused(*it));
        let waits = |it: &u64| self.waits_for_itself(*it, vec![*it]);
        let itself = others.into_iter().filter(waits).collect();
        let is_of_holder = |key: &LockKey| {
            let holder = self.machine.holder(key);
            holder.is_some_and(|it| !self.machine.numbers(&it.aid, key).is_empty())
        };
        let of_holder = self.machine.queues.keys().filter(|it| is_of_holder(it)).cloned().collect();
        Circles { refused, itself, of_holder }
    }

    /// True if the waiter waits for itself by one of these waits of its owner. A slow search, which visits everybody.
    fn waits_for_itself(&self, number: u64, by: Vec<u64>) -> bool {
        let owner = &self.machine.waiters[&number].owner;
        let is_held = |(key, queue): (&LockKey, &Queue)| {
            let mut guards = self.machine.guards.get(key).into_iter().flatten();
            queue.is_held_by(owner) || guards.any(|guard| guard.owner == *owner)
        };
        self.machine.queues.iter().any(is_held) && self.reaches(owner, by, &mut HashSet::new())
    }

    fn reaches(&self, goal: &Aid, from: Vec<u64>, known: &mut HashSet<Aid>) -> bool {
        from.into_iter().flat_map(|it| self.obstacles(it)).any(|owner| {
            owner == *goal
                || known.insert(owner.clone()) && self.reaches(goal, self.waits_of(&owner), known)
        })
    }

    fn waits_of(&self, owner: &Aid) -> Vec<u64> {
        let all = self.machine.waiters.iter().filter(|(_, it)| it.owner == *owner);
        all.map(|(number, _)| *number).collect()
    }

    /// The owners that this waiter waits for.
    fn obstacles(&self, number: u64) -> Vec<Aid> {
        let Waiter { wanted, owner, circle, .. } = &self.machine.waiters[&number];
        let queue = &self.machine.queues[&wanted.key];
        if circle.is_some() || queue.is_held_by(owner) {
            return Vec::new();
        }
        let guards = self.machine.guards.get(&wanted.key).into_iter().flatten();
        let guards = guards.map(|guard| (guard.mode, &guard.owner));
        let holder = queue.holder.iter().map(|lock| (lock.mode, &lock.aid));
        let ahead = queue.waiting.range(..number).map(|it| &self.machine.waiters[it]);
        let ahead = ahead.filter(|it| it.circle.is_none() && it.owner != *owner);
        let ahead = ahead.map(|it| (it.wanted.mode, &it.owner));
        let all = guards.chain(holder).chain(ahead);
        let all = all.filter(|(mode, _)| [*mode, wanted.mode] != [Mode::Shared; 2]);
        all.map(|(_, owner)| owner.clone()).collect()
    }

    /// A refused waiter is in a circle, even if all other refused waiters leave. A newcomer that is not refused
    /// is in no circle, and neither is a waiter whose holder is news.
    fn check_circles(&mut self, before: &Circles, event: Event) {
        let now = self.circles();
        for number in now.refused.difference(&before.refused) {
            let Waiter { wanted, owner, .. } = &self.machine.waiters[number];
            let (own, all) = (self.machine.numbers(owner, &wanted.key), self.waits_of(owner));
            let waiters = &mut self.machine.waiters;
            let take = |it: u64| (it, waiters.get_mut(&it).unwrap().circle.take());
            let circles: Vec<_> = own.into_iter().map(take).collect();
            assert!(self.waits_for_itself(*number, all), "{number} waits for nobody");
            for (number, circle) in circles {
                self.machine.waiters.get_mut(&number).unwrap().circle = circle;
            }
            self.refused += 1;
        }
        let is_clear = |key: &LockKey| !self.waits_twice && !before.of_holder.contains(key);
        let Some((key, owner, newcomer)) = event.filter(|it| is_clear(&it.0)) else { return };
        for number in now.itself.difference(&before.itself) {
            let waiter = &self.machine.waiters[number];
            let is_meant = newcomer.map_or(waiter.owner != owner, |it| it == *number);
            assert!(waiter.wanted.key != key || !is_meant, "{number} is not found");
        }
    }

    fn check(&self) {
        let machine = &self.machine;
        for (key, queue) in &machine.queues {
            // Nobody is forgotten.
            let first = queue.waiting.first().unwrap();
            let has_moment = self.asleep.get(first).is_none_or(Option::is_some);
            let waiter = &machine.waiters[first];
            assert!(waiter.phase != Phase::Waiting || waiter.is_woken || has_moment, "{first}");
            // The indexes agree with the waiters.
            let is_here = |it: &u64| machine.waiters[it].wanted.key == *key;
            let all: BTreeSet<_> = machine.waiters.keys().copied().filter(is_here).collect();
            assert_eq!(queue.waiting, all);
            let is_writer = |it: &&u64| machine.waiters[*it].wanted.mode == Mode::Exclusive;
            assert!(queue.writers.iter().eq(all.iter().filter(is_writer)));
            let is_linked = |it: &&u64| {
                let owner = &machine.owners[&machine.waiters[*it].owner];
                owner.places.len() + owner.in_the_way > 1
            };
            assert!(queue.linked.iter().eq(all.iter().filter(is_linked)));
        }
        for (name, owner) in &machine.owners {
            let keys = machine.queues.iter();
            let held = keys.map(|(key, queue)| {
                let guards = machine.guards.get(key).into_iter().flatten();
                usize::from(queue.is_held_by(name)) + guards.filter(|it| it.owner == *name).count()
            });
            assert_eq!(owner.in_the_way, held.sum::<usize>());
            let places = self.waits_of(name).into_iter();
            let places = places.map(|it| (machine.waiters[&it].wanted.key.clone(), it));
            assert_eq!(owner.places, places.collect());
        }
        let counted = machine.waiters.values().filter(|it| it.is_counted).count();
        assert!(machine.counted == counted && counted <= machine.limits.waiters);
    }

    /// All waiters are served or refused, and nothing is left.
    fn ends(&mut self) {
        for _ in 0..1_000 {
            for _ in 0..20 {
                self.begin_guard = None;
                self.releases();
                self.inherits();
                self.answers();
                self.steps();
            }
            self.passes();
        }
        assert!(self.machine.waiters.is_empty(), "{:?}", self.machine);
        while !self.held.is_empty() {
            self.releases();
        }
        assert!(self.machine.queues.is_empty() && self.machine.owners.is_empty());
    }
}

#[test]
fn at_random_nobody_is_forgotten_nobody_is_passed_over_and_the_right_ones_are_refused() {
    let (mut granted, mut refused) = (0, 0);
    for seed in 0..150 {
        let mut world = World::new(seed);
        for _ in 0..100 {
            let before = world.circles();
            let event = world.event();
            world.check_circles(&before, event);
            world.check();
        }
        world.ends();
        (granted, refused) = (granted + world.granted, refused + world.refused);
    }
    assert!(granted > 750 && refused > 75, "{granted} {refused}");
}
