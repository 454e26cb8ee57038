//! Many people who edit for a while: the processor time of mongod, compared with the costs of the verbs.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::Rc,
    time::Duration,
};

use actix_doclock::{LockKey, LockManager};
use mongodb::{Collection, bson::Document};
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    Set, Size,
    costs::{Unit, renewal},
    on_a_thread,
    site::{self, HEARTBEAT, Person, Site},
};
use crate::{
    count,
    load::Random,
    measures::fresh,
    meter::{self, Meter, Reading, Used},
    ours::Page,
};

const CLICK: Duration = Duration::from_secs(120);
const SAVE: Duration = Duration::from_secs(180);
/// A look at the document of another person, which is refused.
const VISIT: Duration = Duration::from_secs(600);
/// The pause between two repetitions of an ask.
const ASK: Duration = Duration::from_secs(30);
/// One of so many people has an asker.
const ASKED: usize = 100;
const STAY: Duration = Duration::from_secs(600);
/// How many requests are under way at most. A heartbeat waits up to half a second for the round of renewals.
const AT_ONCE: usize = 512;
/// The memory after the load may be that much more than after the first third.
const GROWTH: f64 = 1.10;
/// How many errors are printed.
const SHOWN: usize = 20;
/// How many documents one query asks for at the end.
const ASKED_AT_ONCE: usize = 500;
/// One of so many clicks is compared with the stored record.
const CHECKED: usize = 10;

const OPEN: usize = 0;
const CLICKED: usize = 1;
const BEAT: usize = 2;
const SAVED: usize = 3;
const REFUSED: usize = 4;
const RELEASED: usize = 5;
const LOGGED_OUT: usize = 6;
/// The requests, and the costs that belong to them.
const KINDS: [(&str, &str); 7] = [
    ("open", "request: open (LockedDoc takes the lock)"),
    ("click", "request: click (LockedDoc, held already)"),
    ("beat", "request: heartbeat, without the renewal"),
    ("save", "request: save (HeldDoc)"),
    ("refused", "request: refusal"),
    ("release", "request: release"),
    ("logout", "request: logout, one lock"),
];

struct World {
    site: Site,
    locks: LockManager,
    people: usize,
    turns: Semaphore,
    names_versions: Cell<bool>,
    is_asked: Cell<bool>,
    asks: Cell<u64>,
    done: [Cell<u64>; 7],
    checked: Cell<u64>,
    errors: Cell<usize>,
    /// How often each person has been replaced.
    generations: RefCell<Vec<usize>>,
}

pub async fn measure(set: &Set, size: Size, units: Vec<Unit>) -> bool {
    let people = size.pick(1_000, 20_000);
    let database = fresh(&set.mongo).await;
    site::write_documents(&database, 3 * people).await;
    let locks = site::manager(&database).await;
    let (meter, idle) = (set.meter.clone(), set.idle);
    let is_good = on_a_thread({
        let (locks, records) = (locks.clone(), database.collection("page.lock"));
        move || async move { run(locks, records, people, size.minutes, &meter, idle, &units).await }
    })
    .await;
    locks.shutdown().await;
    let _ = database.drop().await;
    is_good
}

/// The state at the end of a minute.
#[derive(Debug, Clone, Copy)]
struct Minute {
    reading: Reading,
    done: [u64; 7],
    resident: u64,
    allocated: i64,
}

impl Minute {
    fn now(world: &World, meter: &Meter) -> Self {
        Self {
            reading: meter.read(),
            done: world.done.each_ref().map(Cell::get),
            resident: meter::own_memory(),
            allocated: count::held(),
        }
    }
}

async fn run(
    locks: LockManager,
    records: Collection<Document>,
    people: usize,
    minutes: u64,
    meter: &Meter,
    idle: f64,
    units: &[Unit],
) -> bool {
    count::start();
    let world = Rc::new(World {
        site: site::open(&locks).await,
        locks: locks.clone(),
        people,
        turns: Semaphore::new(AT_ONCE),
        names_versions: Cell::new(false),
        is_asked: Cell::new(false),
        asks: Cell::default(),
        done: Default::default(),
        checked: Cell::default(),
        errors: Cell::default(),
        generations: RefCell::new(vec![0; people]),
    });
    println!(
        "[one] load: {people} people; a heartbeat every {HEARTBEAT:?}, a click every {CLICK:?}, a save every \
         {SAVE:?}, a refused visit every {VISIT:?}, each stays {STAY:?} on average and then releases or logs out"
    );
    let (over, is_over) = watch::channel(false);
    let began = Instant::now();
    for slot in (0..people).step_by(ASKED) {
        tokio::task::spawn_local(asks(Rc::clone(&world), slot, is_over.clone()));
    }
    let tasks: Vec<_> = (0..people)
        .map(|slot| {
            // Evenly within one heartbeat, so that the heartbeats are spread evenly, too.
            let arrives = began + HEARTBEAT * slot as u32 / people as u32;
            let (world, is_over) = (Rc::clone(&world), is_over.clone());
            tokio::task::spawn_local(live(world, slot, arrives, is_over))
        })
        .collect();
    sleep_until(began + HEARTBEAT + Duration::from_secs(10)).await;
    println!("[one] load: {} have a lock after {:.0?}", world.done[OPEN].get(), began.elapsed());

    let mut history = vec![Minute::now(&world, meter)];
    let began = Instant::now();
    let names = KINDS.map(|(name, _)| name).join(" ");
    println!("minute {names} errors resident allocated mongod app mongod-resident");
    for minute in 1..=minutes {
        world.names_versions.set(names_versions(minute));
        world.is_asked.set(has_asks(minute));
        sleep_until(began + Duration::from_secs(60 * minute)).await;
        let (before, now) = (*history.last().expect("the first"), Minute::now(&world, meter));
        let used = now.reading.since(&before.reading);
        let counts: Vec<_> =
            (0..KINDS.len()).map(|verb| (now.done[verb] - before.done[verb]).to_string()).collect();
        println!(
            "{minute} {} {} {:.1} MB {:.1} MB {:.1} % {:.1} % {:.0} MB",
            counts.join(" "),
            world.errors.get(),
            now.resident as f64 / 1e6,
            now.allocated as f64 / 1e6,
            used.mongod_cores() * 100.0,
            used.app_cores() * 100.0,
            meter.mongod_memory() as f64 / 1e6,
        );
        history.push(now);
    }

    let _ = over.send(true);
    let mut believed = HashMap::new();
    for task in tasks {
        // Each request ends within the deadline of the manager.
        match timeout(Duration::from_secs(60), task).await {
            Ok(Ok(Some((id, token)))) => drop(believed.insert(id, token)),
            Ok(Ok(None)) => {}
            other => {
                world.failed("a person", &format!("{other:?}"));
            }
        }
    }
    let are_equal =
        compare(&world, records.count_documents(Document::new()).await.unwrap(), &believed).await;
    println!("[one] load: {} asks", world.asks.get());
    compared(&history, "versions", names_versions);
    compared(&history, "asks", has_asks);
    let is_flat = is_flat(&history);
    let is_as_predicted = is_as_predicted(&history, idle, units);
    let errors = world.errors.get();
    println!(
        "[one] load: {errors} errors, {} clicks compared with what is stored",
        world.checked.get()
    );
    errors == 0 && are_equal && is_flat && is_as_predicted
}

/// Whether exactly the locks are stored that people believe to hold.
async fn compare(world: &World, records: u64, believed: &HashMap<String, String>) -> bool {
    let (mut stored, mut equal) = (0, 0);
    let names: Vec<_> = (0..2 * world.people).map(site::name).collect();
    for some in names.chunks(ASKED_AT_ONCE) {
        let keys: Vec<_> = some
            .iter()
            .map(|name| LockKey::of::<Page>(name.clone()).expect("a valid name"))
            .collect();
        let found = world.locks.inspect_many(&keys).await.unwrap();
        for (name, lock) in some.iter().zip(found) {
            let Some(lock) = lock else { continue };
            stored += 1;
            let token = lock.token.map(|token| format!("<urn:uuid:{token}>"));
            equal += usize::from(token.is_some() && believed.get(name) == token.as_ref());
        }
    }
    println!(
        "[one] load: {records} records and {stored} live locks are stored, {} are believed to be held, {equal} \
         are the same",
        believed.len()
    );
    records == stored as u64 && equal == stored && equal == believed.len()
}

/// In every second minute, each save names the version that its page shows.
fn names_versions(minute: u64) -> bool {
    minute % 2 == 0
}

/// In two of four minutes, one of a hundred people has an asker.
fn has_asks(minute: u64) -> bool {
    minute % 4 / 2 == 1
}

/// The minutes with and without.
fn compared(history: &[Minute], what: &str, is_with: fn(u64) -> bool) {
    let of = |with: bool| {
        let minutes = history.windows(2).zip(1..).filter(|(_, minute)| is_with(*minute) == with);
        let used: Vec<_> = minutes.map(|(it, _)| it[1].reading.since(&it[0].reading)).collect();
        let mean = |cores: fn(&Used) -> f64| {
            used.iter().map(cores).sum::<f64>() / used.len() as f64 * 100.0
        };
        format!("mongod {:.2} %, app {:.2} %", mean(Used::mongod_cores), mean(Used::app_cores))
    };
    println!("[one] load: minutes without {what}: {}; with {what}: {}", of(false), of(true));
}

fn is_flat(history: &[Minute]) -> bool {
    let (first, last) = (history[history.len() / 3], history[history.len() - 1]);
    let resident = last.resident as f64 / first.resident as f64;
    let allocated = last.allocated as f64 / first.allocated as f64;
    println!(
        "[one] load: memory of minute {} divided by that of minute {}: resident {resident:.3}, allocated \
         {allocated:.3}",
        history.len() - 1,
        history.len() / 3
    );
    resident <= GROWTH && allocated <= GROWTH
}

fn is_as_predicted(history: &[Minute], idle: f64, units: &[Unit]) -> bool {
    let (first, last) = (history[0], history[history.len() - 1]);
    let used = last.reading.since(&first.reading);
    let seconds = used.time.as_secs_f64();
    let mut ratios = Vec::new();
    for tasks in [1, 64] {
        let cost = |who: &str| {
            let unit = units
                .iter()
                .find(|it| it.who == who && it.tasks == tasks)
                // Renewals are never sent by a crowd.
                .or(units.iter().find(|it| it.who == who));
            unit.map_or((f64::NAN, f64::NAN), |it| (it.mongod / 1e6, it.app / 1e6))
        };
        let (mut mongod, mut app) = (idle, 0.0);
        for (verb, (name, who)) in KINDS.iter().enumerate() {
            let rate = (last.done[verb] - first.done[verb]) as f64 / seconds;
            let (of_mongod, of_app) = cost(who);
            mongod += rate * of_mongod;
            app += rate * of_app;
            if tasks == 1 {
                println!(
                    "  {:>7}: {rate:.1}/s of {:.0} µs = {:.2} % of a core",
                    name,
                    of_mongod * 1e6,
                    rate * of_mongod * 100.0
                );
            }
        }
        // Each heartbeat renews.
        let rate = (last.done[BEAT] - first.done[BEAT]) as f64 / seconds;
        let (of_mongod, of_app) = cost(&renewal(200));
        mongod += rate * of_mongod;
        app += rate * of_app;
        let ratio = used.mongod_cores() / mongod;
        println!(
            "[one] load: mongod {:.2} % of a core, predicted from {tasks} task(s) {:.2} %: ratio {ratio:.3}; \
             app {:.2} %, predicted {:.2} %: ratio {:.3}",
            used.mongod_cores() * 100.0,
            mongod * 100.0,
            used.app_cores() * 100.0,
            app * 100.0,
            used.app_cores() / app
        );
        ratios.push(ratio);
    }
    // The page's calculator uses the costs of one task: people come one after the other.
    (0.75..=1.25).contains(&ratios[0])
}

impl World {
    fn failed(&self, verb: &str, why: &str) {
        let errors = self.errors.get();
        self.errors.set(errors + 1);
        if errors < SHOWN {
            println!("error: {verb}: {why}");
        }
    }

    /// Counts the request. False if its answer was not the expected one.
    async fn does(&self, verb: usize, request: impl Future<Output = u16>, expected: u16) -> bool {
        let _turn = self.turns.acquire().await.expect("never closed");
        let status = request.await;
        if status == expected {
            self.done[verb].set(self.done[verb].get() + 1);
        } else {
            self.failed(KINDS[verb].0, &status.to_string());
        }
        status == expected
    }

    /// Two documents for each person, in turn.
    fn document(&self, slot: usize) -> String {
        site::name(slot + self.people * (self.generations.borrow()[slot] % 2))
    }

    /// Somebody without a session wants the document of another person.
    async fn visit(&self, slot: usize) {
        let mut visitor = Person::new(&self.site, self.document(slot));
        let turn = self.turns.acquire().await.expect("never closed");
        match visitor.edit().await {
            423 => self.done[REFUSED].set(self.done[REFUSED].get() + 1),
            // The other person has just gone.
            200 => {
                self.done[OPEN].set(self.done[OPEN].get() + 1);
                drop(turn);
                self.does(RELEASED, visitor.release(), 204).await;
            }
            status => self.failed("visit", &status.to_string()),
        }
    }

    async fn check(&self, person: &Person) {
        self.checked.set(self.checked.get() + 1);
        let key = LockKey::of::<Page>(person.id.clone()).unwrap();
        match self.locks.inspect(&key).await {
            Ok(lock) => {
                let token = lock.and_then(|it| it.token).map(|it| format!("<urn:uuid:{it}>"));
                if token != person.token {
                    self.failed("check", &format!("{token:?} is stored, not {:?}", person.token));
                }
            }
            Err(e) => self.failed("check", &e.to_string()),
        }
    }
}

/// Between a half and one and a half of this time.
fn about(random: &mut Random, time: Duration) -> Duration {
    time / 2 + time * random.below(1_000) as u32 / 1_000
}

/// At any moment of this time, so that as many happen at the beginning as later.
fn first(random: &mut Random, time: Duration) -> Duration {
    time * random.below(1_000) as u32 / 1_000
}

/// An asker of this person, and of the next ones.
async fn asks(world: Rc<World>, slot: usize, mut over: watch::Receiver<bool>) {
    let mut asker = Person::new(&world.site, site::name(2 * world.people + slot));
    // A session of its own, with an aid: other visitors count together.
    asker.edit().await;
    asker.release().await;
    while !*over.borrow_and_update() {
        if world.is_asked.get() {
            let _turn = world.turns.acquire().await.expect("never closed");
            match asker.ask(&world.document(slot)).await {
                202 => world.asks.set(world.asks.get() + 1),
                // Nobody has it at this moment.
                409 => {}
                status => world.failed("ask", &status.to_string()),
            }
        }
        let _ = timeout(ASK, over.changed()).await;
    }
}

/// One person after the other. Returns the lock that the last one holds.
async fn live(
    world: Rc<World>,
    slot: usize,
    arrives: Instant,
    mut over: watch::Receiver<bool>,
) -> Option<(String, String)> {
    sleep_until(arrives).await;
    let mut random = Random::of(slot);
    // The first people have been there for a while.
    let mut stays = STAY * random.below(1_000) as u32 / 1_000;
    loop {
        let mut person = Person::new(&world.site, world.document(slot));
        loop {
            if *over.borrow() {
                return None;
            }
            let turn = world.turns.acquire().await.expect("never closed");
            let status = person.edit().await;
            drop(turn);
            match status {
                200 => break,
                // A visitor has it for a moment.
                423 => world.done[REFUSED].set(world.done[REFUSED].get() + 1),
                status => world.failed("open", &status.to_string()),
            }
            sleep(Duration::from_secs(1)).await;
        }
        world.done[OPEN].set(world.done[OPEN].get() + 1);
        let began = Instant::now();
        let (mut beats, leaves) = (began + HEARTBEAT, began + stays);
        let mut clicks = began + first(&mut random, CLICK);
        let mut saves = began + first(&mut random, SAVE);
        let mut visits = began + first(&mut random, VISIT);
        stays = about(&mut random, STAY);
        loop {
            let next = beats.min(clicks).min(saves).min(visits).min(leaves);
            tokio::select! {
                biased;
                _ = over.wait_for(|it| *it) => return Some((person.id, person.token?)),
                () = sleep_until(next) => {}
            }
            if next == leaves {
                break;
            } else if next == beats {
                world.does(BEAT, person.heartbeat(), 200).await;
                beats = Instant::now() + HEARTBEAT;
            } else if next == clicks {
                world.does(CLICKED, person.edit(), 200).await;
                if random.below(CHECKED) == 0 {
                    world.check(&person).await;
                }
                clicks += about(&mut random, CLICK);
            } else if next == saves {
                person.names_version = world.names_versions.get();
                world.does(SAVED, person.save(), 204).await;
                saves += about(&mut random, SAVE);
            } else {
                world.visit(random.below(world.people)).await;
                visits += about(&mut random, VISIT);
            }
        }
        if random.below(2) == 0 {
            world.does(RELEASED, person.release(), 204).await;
        } else {
            world.does(LOGGED_OUT, person.log_out(), 204).await;
        }
        world.generations.borrow_mut()[slot] += 1;
    }
}
