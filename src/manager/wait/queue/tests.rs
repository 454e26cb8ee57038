use std::time::SystemTime;

use super::*;
use crate::lock::Holder;

fn key(id: &str) -> LockKey {
    LockKey::new("workitem", id).unwrap()
}

fn unlimited() -> Queues {
    Queues::new(Limits { per_session: usize::MAX, per_person: usize::MAX, all: usize::MAX })
}

fn joins(queues: &Queues, key: &LockKey, owner: &Aid) -> Place {
    joins_as(queues, key, owner, Mode::Exclusive)
}

fn joins_as(queues: &Queues, key: &LockKey, owner: &Aid, mode: Mode) -> Place {
    try_join(queues, key, owner, mode).unwrap()
}

fn try_join(queues: &Queues, key: &LockKey, owner: &Aid, mode: Mode) -> Result<Place, TooMany> {
    let wanted = Wanted {
        key: key.clone(),
        aid: Aid::new(),
        person: None,
        holder: Holder::new("alice"),
        tab: None,
        page: None,
        mode,
        ttl: Duration::from_secs(60),
    };
    queues.join(&wanted, owner, &TaskTracker::new(), false)
}

/// A guard of this process, and its lock as the store shows it.
fn guard(key: &LockKey, owner: &Aid) -> (Held, Lock) {
    let (token, aid, mode) = (LockToken::new(), Aid::new(), Mode::Exclusive);
    let held = Held { token, owner: owner.clone(), mode };
    let lock = Lock {
        key: key.clone(),
        description: None,
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
    let (queues, one, two) = (unlimited(), Aid::new(), Aid::new());
    let (a, b) = (key("a"), key("b"));
    let ((a_held, _), (b_held, b_lock)) = (guard(&a, &one), guard(&b, &two));
    queues.holds(&a, a_held);
    queues.holds(&b, b_held);
    let first = joins(&queues, &b, &one);
    let second = joins(&queues, &a, &two);
    assert!(matches!(second.next_step(), Step::Refuse(_)));
    first.saw(&b_lock);
    assert!(!matches!(first.next_step(), Step::Refuse(_)), "the other one goes");
    // The waiter checks the circle, and finds it unchanged.
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
    let (queues, key) = (unlimited(), key("a"));
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
fn a_waiter_that_was_called_but_could_not_ask_is_called_again() {
    let (queues, key) = (unlimited(), key("a"));
    let first = joins(&queues, &key, &Aid::new());
    assert!(matches!(first.next_step(), Step::Try));
    first.ask_again();
    assert!(matches!(first.next_step(), Step::Try));
    first.saw(&guard(&key, &Aid::new()).1);
    assert!(matches!(first.next_step(), Step::WaitFirst(_)));
    first.ask_again();
    assert!(matches!(first.next_step(), Step::WaitFirst(_)), "it was not called for an attempt");
}

#[test]
fn news_of_a_holder_closes_a_circle_for_those_who_have_waited_before() {
    let (queues, session, job) = (unlimited(), Aid::new(), Aid::new());
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
    let (queues, one, two, three) = (unlimited(), Aid::new(), Aid::new(), Aid::new());
    let [a, b, c] = ["a", "b", "c"].map(key);
    queues.holds(&b, guard(&b, &one).0);
    queues.holds(&c, guard(&c, &three).0);
    let _ahead = joins(&queues, &a, &two);
    let _at_the_same_time = joins(&queues, &c, &two);
    let _behind = joins(&queues, &a, &one);
    let last = joins(&queues, &b, &three);
    assert!(matches!(last.next_step(), Step::Refuse(_)));
}

/// Hands the released lock over to the first waiter.
fn handed(queues: &Queues, first: &Place, released: &Lock) -> Lock {
    let heir = queues.heir(&Acquisition::of(released).unwrap()).expect("somebody to hand it to");
    assert!(matches!(first.next_step(), Step::Wait));
    let lock = Lock { aid: heir.wanted.aid.clone(), ..for_long(&first.key) };
    queues.was_handed(&lock);
    lock
}

fn for_long(key: &LockKey) -> Lock {
    Lock { expires_at: Instant::now() + 10 * LOOK_AGAIN, ..guard(key, &Aid::new()).1 }
}

/// The next waiter does not ask, so that it can be handed the lock in turn.
#[test]
fn a_hand_over_is_no_reason_to_ask() {
    let (queues, key) = (unlimited(), key("a"));
    let [first, second] = [(); 2].map(|()| joins(&queues, &key, &Aid::new()));
    assert!(matches!(first.next_step(), Step::Try));
    let before = for_long(&key);
    first.saw(&before);
    assert!(matches!(first.next_step(), Step::WaitFirst(_)));
    // The handover comes before the waiter asks.
    queues.freed(&key);
    let lock = handed(&queues, &first, &before);
    first.granted(lock.clone());
    assert!(matches!(second.next_step(), Step::WaitFirst(Some(until)) if until == lock.expires_at));
    handed(&queues, &second, &lock);
}

#[test]
fn late_news_of_a_release_does_not_have_the_next_one_ask_before_it_is_its_turn() {
    let (queues, key) = (unlimited(), key("a"));
    let [first, second] = [(); 2].map(|()| joins(&queues, &key, &Aid::new()));
    assert!(matches!(first.next_step(), Step::Try));
    queues.freed(&key);
    let lock = for_long(&key);
    first.granted(lock.clone());
    // Without a handover, the news was not late.
    let soon = Instant::now() + LOOK_AGAIN;
    assert!(matches!(second.next_step(), Step::WaitFirst(Some(until)) if until <= soon));
    handed(&queues, &second, &lock);
}

/// As an upgrade does it.
#[test]
fn one_acquisition_of_a_session_that_ends_does_not_end_the_next_one() {
    let (queues, owner, key) = (unlimited(), Aid::new(), key("a"));
    let (first, _) = guard(&key, &owner);
    let token = LockToken::new();
    let next = Held { token, owner: owner.clone(), mode: first.mode };
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

/// The lock of this session, as the store shows it.
fn seen(key: &LockKey, session: &Aid, mode: Mode) -> Lock {
    Lock { aid: session.clone(), mode, ..guard(key, session).1 }
}

fn is_refused(place: &Place) -> bool {
    matches!(place.next_step(), Step::Refuse(_))
}

/// How much the search of a newcomer visits.
fn looked_at(queues: &Queues, newcomer: impl FnOnce() -> Place) -> (Place, usize) {
    let before = queues.state().looked_at;
    let place = newcomer();
    let after = queues.state().looked_at;
    (place, after - before)
}

/// Each owner holds a document, and waits for the document of its predecessor.
fn chain(queues: &Queues, owners: &[Aid]) -> Vec<Place> {
    let keys: Vec<_> = (0..owners.len()).map(|n| key(&n.to_string())).collect();
    for (key, owner) in keys.iter().zip(owners) {
        queues.holds(key, guard(key, owner).0);
    }
    keys.iter().zip(&owners[1..]).map(|(before, owner)| joins(queues, before, owner)).collect()
}

#[test]
fn a_chain_of_ten_thousand_costs_a_newcomer_no_more_than_one_search_wherever_it_comes_in() {
    const LENGTH: usize = 10_000;
    let (queues, owners) = (unlimited(), Vec::from_iter((0..LENGTH).map(|_| Aid::new())));
    let chain = chain(&queues, &owners);
    let whole = queues.state().looked_at;
    assert!(whole <= 2 * LENGTH, "{whole} for all of them");
    let (first, last) = (key("0"), key(&(LENGTH - 1).to_string()));
    let (_behind, looked) = looked_at(&queues, || joins(&queues, &last, &Aid::new()));
    assert_eq!(looked, 0, "nobody waits for the one who has come last");
    let (ahead, looked) = looked_at(&queues, || joins(&queues, &key("free"), &owners[0]));
    assert!(looked <= 4, "{looked} for one who waits for nobody");
    assert!(!is_refused(&ahead));
    drop(ahead);
    // Two chains become one.
    let (middle, looked) = looked_at(&queues, || {
        let place = &chain[LENGTH / 2];
        joins(&queues, &place.key, &owners[LENGTH - 1])
    });
    assert!(looked <= deadlock::BUDGET, "{looked}");
    assert!(!is_refused(&middle));
    // As the store shows it to the last waiter.
    let before = queues.state().looked_at;
    chain[LENGTH - 2].saw(&seen(&chain[LENGTH - 2].key, &owners[LENGTH - 2], Mode::Exclusive));
    let looked = queues.state().looked_at - before;
    assert!(looked <= deadlock::BUDGET, "{looked}");
    // Longer than one search can visit. The search refuses nobody and does not fail.
    assert!(!is_refused(&joins(&queues, &last, &owners[0])));
    assert!(!is_refused(&joins(&queues, &first, &owners[0])) || deadlock::BUDGET > 1);
}

#[test]
fn a_chain_that_is_no_longer_than_a_search_is_closed_by_nobody() {
    for length in [2, 3, 100, deadlock::BUDGET / 2] {
        let (queues, owners) = (unlimited(), Vec::from_iter((0..length).map(|_| Aid::new())));
        let chain = chain(&queues, &owners);
        let last = key(&(length - 1).to_string());
        let closes = joins(&queues, &last, &owners[0]);
        assert!(is_refused(&closes), "{length}");
        assert!(!chain.iter().any(is_refused), "{length}");
    }
}

#[test]
fn a_hundred_thousand_waiters_cost_a_newcomer_nothing() {
    for documents in [1, 100_000] {
        let queues = unlimited();
        let keys: Vec<_> = (0..documents).map(|n| key(&n.to_string())).collect();
        for key in &keys {
            queues.holds(key, guard(key, &Aid::new()).0);
        }
        let waits = |n: usize| joins(&queues, &keys[n % documents], &Aid::new());
        let mut all: Vec<_> = (0..100_000).map(waits).collect();
        assert_eq!(queues.waiting(), 100_000);
        // This owner holds a lock that another owner waits for.
        let (own, owner) = (key("own"), Aid::new());
        queues.holds(&own, guard(&own, &owner).0);
        all.push(joins(&queues, &own, &Aid::new()));
        let before = queues.state().looked_at;
        all.push(joins(&queues, &keys[0], &owner));
        let looked = queues.state().looked_at - before;
        assert!(looked <= 8, "{looked} where {documents} documents are waited for");
        drop(all);
        let state = queues.state();
        assert_eq!((state.waiting, state.queues.len(), state.waited_for.len()), (0, 0, 0));
    }
}

/// Other waiters are before and behind each of the three, and some of these wait for another document as
/// well.
#[test]
fn a_circle_of_three_is_found_through_long_queues() {
    let (queues, owners) = (unlimited(), [(); 3].map(|()| Aid::new()));
    let keys = ["a", "b", "c"].map(key);
    let busy: Vec<_> = (0..300).map(|_| Aid::new()).collect();
    let elsewhere = |(n, owner)| joins(&queues, &key(&format!("other {n}")), owner);
    let _elsewhere: Vec<_> = busy.iter().enumerate().map(elsewhere).collect();
    for (key, owner) in keys.iter().zip(&owners) {
        queues.holds(key, guard(key, owner).0);
    }
    let mut all = Vec::new();
    let mut crowd = |busy: &[Aid]| {
        for (n, key) in keys.iter().enumerate() {
            all.extend((0..5_000).map(|_| joins(&queues, key, &Aid::new())));
            all.extend(busy.iter().skip(n).step_by(3).map(|owner| joins(&queues, key, owner)));
        }
    };
    crowd(&busy);
    let places = [joins(&queues, &keys[1], &owners[0]), joins(&queues, &keys[2], &owners[1])];
    crowd(&[]);
    let (last, looked) = looked_at(&queues, || joins(&queues, &keys[0], &owners[2]));
    assert!(is_refused(&last));
    assert!(looked < 50, "{looked}");
    assert!(!places.iter().any(is_refused));
}

#[test]
fn each_part_of_a_queue_is_gone_through_once() {
    const BUSY: usize = 50;
    let (queues, last) = (unlimited(), Aid::new());
    let (a, own) = (key("a"), key("own"));
    queues.holds(&own, guard(&own, &last).0);
    let _waits_for_last = joins(&queues, &own, &Aid::new());
    let all: Vec<_> = (0..BUSY).map(|_| Aid::new()).collect();
    let waits =
        |(n, owner)| [&a, &key(&format!("other {n}"))].map(|key| joins(&queues, key, owner));
    let _all: Vec<_> = all.iter().enumerate().map(waits).collect();
    let (last, looked) = looked_at(&queues, || joins(&queues, &a, &last));
    assert!(!is_refused(&last));
    assert!(looked <= 4 * BUSY, "{looked}");
}

/// The obstacle holds nothing in the queue where it waits.
#[test]
fn a_circle_is_found_through_somebody_deep_in_a_long_queue() {
    let (queues, deep, last) = (unlimited(), Aid::new(), Aid::new());
    let (crowded, own) = (key("crowded"), key("own"));
    queues.holds(&crowded, guard(&crowded, &Aid::new()).0);
    queues.holds(&own, guard(&own, &last).0);
    let crowd = || Vec::from_iter((0..5_000).map(|_| joins(&queues, &crowded, &Aid::new())));
    let _before = crowd();
    let _place = joins(&queues, &crowded, &deep);
    let _behind = crowd();
    let _waits_too = joins(&queues, &own, &deep);
    let (last, looked) = looked_at(&queues, || joins(&queues, &crowded, &last));
    assert!(is_refused(&last));
    assert!(looked < 10, "{looked}");
}

#[test]
fn one_that_is_back_in_its_place_closes_a_circle_for_those_behind_it() {
    let (queues, reader, writer) = (unlimited(), Aid::new(), Aid::new());
    let a = key("a");
    queues.holds(&a, Held { mode: Mode::Shared, ..guard(&a, &reader).0 });
    let mut first = joins(&queues, &a, &writer);
    first.keep_turn();
    let _stays = joins_as(&queues, &a, &Aid::new(), Mode::Shared);
    drop(first);
    let again = joins_as(&queues, &a, &reader, Mode::Shared);
    assert!(!is_refused(&again), "readers only");
    let _back = joins(&queues, &a, &writer);
    assert!(is_refused(&again), "it waits for a writer that waits for it");
}

/// As two tabs of a browser. They are granted the lock together.
#[test]
fn two_requests_of_a_session_that_wait_for_one_document_are_no_circle() {
    let (queues, alice) = (unlimited(), Aid::new());
    let (a, own) = (key("a"), key("own"));
    let _first = joins(&queues, &a, &alice);
    let others = [joins(&queues, &own, &Aid::new()), joins(&queues, &a, &Aid::new())];
    others[0].saw(&seen(&own, &alice, Mode::Exclusive));
    let second = joins(&queues, &a, &alice);
    assert!(!is_refused(&second));
}

#[test]
fn of_many_readers_at_the_front_some_go_in_at_a_time_and_the_others_follow() {
    let (queues, key) = (unlimited(), key("a"));
    let readers: Vec<_> =
        (0..1_000).map(|_| joins_as(&queues, &key, &Aid::new(), Mode::Shared)).collect();
    let mut asked = 0;
    for (n, reader) in readers.into_iter().enumerate() {
        assert!(matches!(reader.next_step(), Step::Try), "{n}");
        asked += 1;
        reader.granted(seen(&key, &Aid::new(), Mode::Shared));
    }
    assert_eq!(asked, 1_000);
}

/// The slow search that the real one abbreviates: it visits everybody, one after the other.
mod reference {
    use super::*;
    use std::collections::HashSet;

    /// By any place of the owner, or by this place.
    pub(in crate::manager) fn waits_for_itself(
        state: &State,
        owner: &Aid,
        place: Option<(&LockKey, u64)>,
    ) -> bool {
        let is_held = |key: &LockKey, queue: &Queue| {
            queue.is_held_by(owner)
                || state.held.get(key).is_some_and(|held| held.iter().any(|it| it.owner == *owner))
        };
        let is_in_the_way = state.queues.iter().any(|(key, queue)| is_held(key, queue));
        is_in_the_way && search(state, owner, place, owner, &mut HashSet::new())
    }

    fn search(
        state: &State,
        from: &Aid,
        place: Option<(&LockKey, u64)>,
        goal: &Aid,
        known: &mut HashSet<Aid>,
    ) -> bool {
        known.insert(from.clone())
            && blockers(state, from, place)
                .iter()
                .any(|next| next == goal || search(state, next, None, goal, known))
    }

    fn blockers(state: &State, owner: &Aid, place: Option<(&LockKey, u64)>) -> Vec<Aid> {
        let mut all = Vec::new();
        let places = state.queues.iter().flat_map(|(key, queue)| {
            queue.waiting.iter().map(move |(number, waiter)| (key, queue, *number, waiter))
        });
        for (key, queue, number, waiter) in places {
            let is_meant = place.is_none_or(|place| place == (key, number));
            let waits = waiter.deadlock.is_none() && !queue.is_held_by(owner);
            if waiter.owner != *owner || !is_meant || !waits {
                continue;
            }
            let excludes = |mode| mode == Mode::Exclusive || waiter.mode == Mode::Exclusive;
            let here = state.held.get(key).into_iter().flatten();
            all.extend(here.filter(|it| excludes(it.mode)).map(|it| it.owner.clone()));
            let seen = queue.holder.iter().filter(|lock| excludes(lock.mode));
            all.extend(seen.map(|lock| lock.aid.clone()));
            let ahead = queue.waiting.range(..number).map(|(_, it)| it);
            let ahead = ahead.filter(|it| it.deadlock.is_none() && excludes(it.mode));
            all.extend(ahead.filter(|it| it.owner != *owner).map(|it| it.owner.clone()));
        }
        all
    }
}

/// Random events. A refused waiter is in a circle, even if all other refused waiters leave. A newcomer
/// that is not refused is in no circle, and neither is a waiter whose holder is news. If an owner waits
/// twice for a document, the search may find a circle only once the owner holds that document.
fn agrees_with_the_reference(seed: u64, waits_twice: bool) -> usize {
    let mut random = fastrand::Rng::with_seed(seed);
    let owners: Vec<_> = (0..random.usize(2..7)).map(|_| Aid::new()).collect();
    let keys: Vec<_> = (0..random.usize(1..5)).map(|n| key(&n.to_string())).collect();
    let queues = unlimited();
    let (mut places, mut guards, mut refused) = (Vec::<Place>::new(), Vec::new(), 0);
    for _ in 0..60 {
        let (key, owner) = (random.choice(&keys).unwrap(), random.choice(&owners).unwrap());
        let mode = if random.bool() { Mode::Shared } else { Mode::Exclusive };
        let before = in_circles(&queues, key);
        let last = places.last().map(|place| place.number);
        match random.u8(0..10) {
            0..4 => {
                let is_there = !queues.state().owners.numbers_in(owner, key).is_empty();
                if waits_twice || !is_there {
                    places.push(joins_as(&queues, key, owner, mode));
                    places.last_mut().unwrap().keeps_turn = random.bool();
                }
            }
            4..6 if !places.is_empty() => drop(places.swap_remove(random.usize(..places.len()))),
            6 => {
                let place = places.iter().find(|place| place.key == *key);
                place.inspect(|place| place.saw(&seen(key, owner, mode)));
            }
            7 => {
                let held = Held { mode, ..guard(key, owner).0 };
                let excludes = |it: &Held| mode == Mode::Exclusive || it.mode == Mode::Exclusive;
                let is_excluded =
                    queues.state().held.get(key).is_some_and(|it| it.iter().any(excludes));
                // As the store grants the locks.
                if !is_excluded {
                    guards.push((key.clone(), held.token));
                    queues.holds(key, held);
                }
            }
            8 if !guards.is_empty() => {
                let (key, token) = guards.swap_remove(random.usize(..guards.len()));
                queues.dropped(&key, token);
            }
            _ => queues.freed(key),
        }
        for (number, now) in in_circles(&queues, key) {
            let before = before.get(&number).cloned().unwrap_or_default();
            if now.is_refused && !before.is_refused {
                assert!(now.is_in_circle, "seed {seed}: {number} waits for nobody");
                refused += 1;
            }
            let newcomer = places.last().map(|it| it.number).filter(|number| Some(*number) != last);
            let is_meant = newcomer.map_or(now.owner.as_ref() != Some(owner), |it| it == number);
            if now.is_by_this && !now.is_refused && !before.is_by_this && is_meant {
                assert!(waits_twice, "seed {seed}: {number} is not found");
            }
        }
        places.retain(|place| !is_refused(place) || random.bool());
        assert_is_sound(&queues.state());
    }
    refused
}

/// The indexes beside the queues agree with the queues.
fn assert_is_sound(state: &State) {
    let all = state.queues.values().flat_map(|queue| queue.waiting.values());
    assert_eq!(state.waiting, all.clone().count());
    let keys = state.waited_for.values().flatten();
    assert_eq!(keys.collect::<BTreeSet<_>>(), state.queues.keys().collect());
    for (key, queue) in &state.queues {
        let mode = |number: &u64| queue.waiting[number].mode;
        let writers = queue.waiting.keys().filter(|number| mode(number) == Mode::Exclusive);
        assert!(queue.writers.iter().eq(writers), "{key:?}");
        let is_linked = |number: &&u64| state.owners.is_linked(&queue.waiting[number].owner);
        assert!(queue.linked.iter().eq(queue.waiting.keys().filter(is_linked)), "{key:?}");
    }
    for owner in all.map(|waiter| &waiter.owner) {
        let is_held = |(key, queue): (&LockKey, &Queue)| {
            let guards = state.held.get(key).into_iter().flatten();
            queue.is_held_by(owner) || guards.clone().any(|held| held.owner == *owner)
        };
        assert_eq!(state.owners.is_in_the_way(owner), state.queues.iter().any(is_held));
    }
}

#[derive(Clone, Default)]
struct Circle {
    owner: Option<Aid>,
    is_refused: bool,
    /// Its owner is in a circle by any of its places, if none of its requests for this document is
    /// refused.
    is_in_circle: bool,
    /// It is in a circle by this place.
    is_by_this: bool,
}

/// The circles of each waiter in the queue.
fn in_circles(queues: &Queues, key: &LockKey) -> BTreeMap<u64, Circle> {
    let mut state = queues.state();
    let Some(queue) = state.queues.get(key) else { return BTreeMap::new() };
    let all = queue.waiting.iter();
    let all: Vec<_> =
        all.map(|(number, it)| (*number, it.owner.clone(), it.deadlock.clone())).collect();
    let refuse = |state: &mut State, number, deadlock| {
        let waiting = &mut state.queues.get_mut(key).unwrap().waiting;
        waiting.get_mut(&number).unwrap().deadlock = deadlock;
    };
    let mut seen = BTreeMap::new();
    for (number, owner, circle) in &all {
        let own = || all.iter().filter(move |it| it.1 == *owner);
        own().for_each(|it| refuse(&mut state, it.0, None));
        let by = |place| reference::waits_for_itself(&state, owner, place);
        let (is_in_circle, is_by_this) = (by(None), by(Some((key, *number))));
        own().for_each(|it| refuse(&mut state, it.0, it.2.clone()));
        let (owner, is_refused) = (Some(owner.clone()), circle.is_some());
        seen.insert(*number, Circle { owner, is_refused, is_in_circle, is_by_this });
    }
    seen
}

#[test]
fn at_random_the_same_circles_are_found_as_by_looking_at_everybody() {
    let mut refused = 0;
    for seed in 0..300 {
        refused += agrees_with_the_reference(seed, false);
        refused += agrees_with_the_reference(seed, true);
    }
    assert!(refused > 300, "{refused}");
}

/// `cargo test --release --lib -- --ignored --nocapture what_a_newcomer_costs`
#[test]
#[ignore = "a measurement"]
fn what_a_newcomer_costs() {
    /// Joins and leaves again and again. Returns the longest and the mean time.
    fn measure(what: &str, mut newcomer: impl FnMut() -> Place) {
        const ROUNDS: u32 = 1_000;
        let (mut longest, mut sum) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..ROUNDS {
            let began = Instant::now();
            let place = newcomer();
            let took = began.elapsed();
            (longest, sum) = (longest.max(took), sum + took);
            drop(place);
        }
        println!("{what}: {:?}, at most {longest:?}", sum / ROUNDS);
    }
    for documents in [1, 100, 100_000] {
        let queues = unlimited();
        let keys: Vec<_> = (0..documents).map(|n| key(&n.to_string())).collect();
        for key in &keys {
            queues.holds(key, guard(key, &Aid::new()).0);
        }
        let _all =
            Vec::from_iter((0..100_000).map(|n| joins(&queues, &keys[n % documents], &Aid::new())));
        let mut n = 0;
        measure(&format!("100 000 waiters for {documents} documents"), || {
            n = (n + 7_919) % documents;
            joins(&queues, &keys[n], &Aid::new())
        });
        let began = Instant::now();
        queues.ask_all("workitem");
        println!("  all of them asked: {:?}", began.elapsed());
    }
    let (queues, owners) = (unlimited(), Vec::from_iter((0..10_000).map(|_| Aid::new())));
    let chain = chain(&queues, &owners);
    measure("a chain of 10 000, behind its end", || joins(&queues, &key("9999"), &Aid::new()));
    measure("before its beginning", || joins(&queues, &key("free"), &owners[0]));
    measure("a whole search", || joins(&queues, &key("9998"), &owners[0]));
    let last = &chain[9_998];
    measure("the holder is seen", || {
        queues.freed(&last.key);
        last.saw(&seen(&last.key, &owners[9_998], Mode::Exclusive));
        joins(&queues, &key("free"), &Aid::new())
    });
}

/// The store may take its time to refuse the first waiter.
#[test]
fn a_newcomer_does_not_take_the_room_of_the_waiter_that_came_first() {
    let queues = Queues::new(Limits { per_session: usize::MAX, per_person: usize::MAX, all: 2 });
    let a = key("a");
    let first = joins(&queues, &a, &Aid::new());
    let _second = joins(&queues, &a, &Aid::new());
    let third = try_join(&queues, &a, &Aid::new(), Mode::Exclusive);
    assert_eq!(third.err(), Some(TooMany { limit: 2, per_session: false }));
    first.waits().expect("its own room");
    drop(first);
    joins(&queues, &a, &Aid::new());
}
