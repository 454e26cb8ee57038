//! One world: some application servers, one database, and all events of one seed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Arguments;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::AddAssign;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use actix_doclock::{
    Aid, Lock, LockKey, LockManager, LockToken, Lockable, Mode, SessionEnded, store::OnRecord,
};
use fastrand::Rng;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::check::Clocks;
use crate::database::Database;
use crate::history::{Event, Line, Moment, name, nanos};
use crate::link::Link;
use crate::rules::Rules;
use crate::work::{FairPage, FencedPage, Page};

/// The properties that stay the same for the whole life of a world.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) ttl: Duration,
    pub(crate) deadline: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) servers: usize,
    /// How long the workers work.
    pub(crate) works: Duration,
    /// Nothing fails, nothing is slow.
    pub(crate) is_calm: bool,
    /// How far each new primary's clock may be behind its predecessor's.
    pub(crate) clock_steps_back: Option<Duration>,
    /// The clock of the database is set forward now and then.
    pub(crate) clock_jumps: bool,
}

impl Settings {
    fn of(rng: &mut Rng) -> Self {
        let kind = rng.u8(..10);
        let ttl = Duration::from_millis(1_500) * rng.u32(1..=4);
        Self {
            ttl,
            deadline: ttl / 4,
            max_hold: (rng.u8(..5) == 0).then_some(ttl * 2),
            servers: rng.usize(2..4),
            works: Duration::from_secs(25),
            is_calm: kind == 0,
            clock_steps_back: (kind == 1 || kind == 2 || kind == 3)
                .then(|| Duration::from_millis(rng.u64(100..4_000))),
            clock_jumps: kind == 4,
        }
    }

    /// A random fraction of the ttl. A fault lasts so long that others notice it, but not as long as
    /// the manager's attempts to recover.
    pub(crate) fn part(&self, rng: &mut Rng, most: f64) -> Duration {
        let most = self.ttl.mul_f64(most).as_millis() as u64;
        Duration::from_millis(rng.u64(1..most))
    }

    pub(crate) fn clocks(&self) -> Clocks {
        if self.clock_jumps { Clocks::Jump } else { Clocks::Agree }
    }
}

/// The probabilities of the faults of a request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Weather {
    pub(crate) lost_requests: f64,
    pub(crate) lost_replies: f64,
    pub(crate) late_requests: f64,
    pub(crate) repeated_requests: f64,
    /// The probability that a way is slow; a slow way takes at most `slowest`.
    pub(crate) slow_ways: f64,
    pub(crate) slowest: u64,
}

/// One application server, as the network sees it.
#[derive(Debug, Default)]
pub(crate) struct Machine {
    /// It was killed.
    pub(crate) is_dead: bool,
    /// It cannot reach any other machine.
    pub(crate) is_cut: bool,
    /// It is paused.
    pub(crate) is_frozen: bool,
    /// How many requests wait for a database that stands still.
    pub(crate) waiting: usize,
    thawed: Arc<Notify>,
}

impl Machine {
    pub(crate) fn thaws(&self) -> Arc<Notify> {
        Arc::clone(&self.thawed)
    }
}

/// How often each event has happened.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Stats {
    pub(crate) worlds: u64,
    pub(crate) operations: u64,
    pub(crate) requests: u64,
    pub(crate) grants: u64,
    pub(crate) saved: u64,
    pub(crate) refused: u64,
    pub(crate) unknown: u64,
    pub(crate) announced: u64,
    pub(crate) idle_sessions: u64,
    pub(crate) broken: u64,
    pub(crate) asked: u64,
    pub(crate) ended: u64,
    pub(crate) lost_requests: u64,
    pub(crate) lost_replies: u64,
    pub(crate) late_requests: u64,
    pub(crate) repeated_requests: u64,
    pub(crate) partitions: u64,
    pub(crate) pauses: u64,
    pub(crate) crashes: u64,
    pub(crate) stalls: u64,
    pub(crate) failovers: u64,
    pub(crate) rollbacks: u64,
    pub(crate) clock_steps: u64,
    pub(crate) rushes: u64,
    pub(crate) overloaded: u64,
}

impl AddAssign for Stats {
    fn add_assign(&mut self, other: Self) {
        let Self { worlds, operations, requests, grants, saved, refused, unknown, .. } = other;
        self.worlds += worlds;
        self.operations += operations;
        self.requests += requests;
        self.grants += grants;
        (self.saved, self.refused) = (self.saved + saved, self.refused + refused);
        self.unknown += unknown;
        self.announced += other.announced;
        self.idle_sessions += other.idle_sessions;
        self.broken += other.broken;
        self.asked += other.asked;
        self.ended += other.ended;
        self.lost_requests += other.lost_requests;
        self.lost_replies += other.lost_replies;
        self.late_requests += other.late_requests;
        self.repeated_requests += other.repeated_requests;
        self.partitions += other.partitions;
        self.pauses += other.pauses;
        self.crashes += other.crashes;
        self.stalls += other.stalls;
        self.failovers += other.failovers;
        self.rollbacks += other.rollbacks;
        self.clock_steps += other.clock_steps;
        self.rushes += other.rushes;
        self.overloaded += other.overloaded;
    }
}

#[derive(Debug, Default)]
struct Trace {
    hash: DefaultHasher,
    lines: Option<Vec<String>>,
}

/// The last known state of an acquisition, as its holder was told.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Known {
    /// The holder has it, or may have it: it was not given back for certain.
    Held,
    Gone,
}

/// Locks that were taken away from holders who may not yet have been told of them.
#[derive(Debug, Default)]
struct TakenBy {
    tokens: BTreeSet<String>,
    sessions: BTreeSet<Aid>,
    /// The tokens that each session was told of.
    told: BTreeMap<Aid, BTreeSet<String>>,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) database: Database,
    pub(crate) settings: Settings,
    rng: Mutex<Rng>,
    weather: Mutex<Weather>,
    machines: Mutex<Vec<Machine>>,
    stats: Mutex<Stats>,
    trace: Mutex<Trace>,
    violations: Mutex<Vec<String>>,
    history: Mutex<Vec<Line>>,
    known: Mutex<BTreeMap<String, Known>>,
    /// The server that sent the claim with this token.
    claimants: Mutex<BTreeMap<String, usize>>,
    taken: Mutex<TakenBy>,
    /// Sessions whose end was acknowledged.
    ended: Mutex<BTreeSet<Aid>>,
    ops: AtomicU64,
    began: Instant,
    is_active: AtomicBool,
}

impl World {
    pub(crate) fn new(seed: u64, rules: Rules, keeps_lines: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let settings = Settings::of(&mut rng);
        let lines = keeps_lines.then(Vec::new);
        Self {
            database: Database::new(rules),
            settings,
            weather: Mutex::default(),
            machines: Mutex::default(),
            stats: Mutex::default(),
            trace: Mutex::new(Trace { lines, ..Trace::default() }),
            violations: Mutex::default(),
            history: Mutex::default(),
            known: Mutex::default(),
            claimants: Mutex::default(),
            taken: Mutex::default(),
            ended: Mutex::default(),
            ops: AtomicU64::new(0),
            rng: Mutex::new(rng),
            began: Instant::now(),
            is_active: AtomicBool::new(true),
        }
    }

    pub(crate) fn rng(&self) -> MutexGuard<'_, Rng> {
        self.rng.lock().expect("no panic while locked")
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.database.rules
    }

    pub(crate) fn stats(&self) -> MutexGuard<'_, Stats> {
        self.stats.lock().expect("no panic while locked")
    }

    pub(crate) fn weather(&self) -> Weather {
        *self.weather.lock().expect("no panic while locked")
    }

    pub(crate) fn becomes(&self, weather: Weather) {
        *self.weather.lock().expect("no panic while locked") = weather;
    }

    pub(crate) fn now(&self) -> Moment {
        nanos(self.began.elapsed())
    }

    /// Never later than the instant itself.
    pub(crate) fn moment(&self, instant: std::time::Instant) -> Moment {
        nanos(instant.saturating_duration_since(self.began.into_std()))
    }

    pub(crate) fn is_active(&self) -> bool {
        self.is_active.load(Relaxed)
    }

    pub(crate) fn winds_down(&self) {
        self.is_active.store(false, Relaxed);
    }

    /// A random duration of a way, in milliseconds.
    pub(crate) fn on_the_way(&self) -> u64 {
        self.stats().requests += 1;
        let weather = self.weather();
        let mut rng = self.rng();
        if rng.f64() < weather.slow_ways { rng.u64(3..weather.slowest) } else { rng.u64(..3) }
    }

    /// One line of the trace. The same seed writes the same lines.
    pub(crate) fn note(&self, what: Arguments<'_>) {
        let at = self.now() / 1_000_000;
        let mut trace = self.trace.lock().expect("no panic while locked");
        let line = format!("{at:>6} {what}");
        line.hash(&mut trace.hash);
        if let Some(lines) = &mut trace.lines {
            lines.push(line);
        }
    }

    pub(crate) fn violation(&self, what: impl Into<String>) {
        let what = what.into();
        let mut trace = self.trace.lock().expect("no panic while locked");
        trace.lines.iter_mut().for_each(|lines| lines.push(format!("VIOLATION: {what}")));
        drop(trace);
        self.violations.lock().expect("no panic while locked").push(what);
    }

    pub(crate) fn next_op(&self) -> u64 {
        self.stats().operations += 1;
        self.ops.fetch_add(1, Relaxed)
    }

    pub(crate) fn write(&self, op: u64, event: Event) {
        match &event {
            // Without the fence, which may contain the date of the run.
            Event::Granted { key, token, shared, until, .. } => self.note(format_args!(
                "op {op}: granted {key}, {token}, shared: {shared}, until {until}"
            )),
            event => self.note(format_args!("op {op}: {event:?}")),
        }
        let line = Line { at: self.now(), process: String::new(), op, event };
        self.history.lock().expect("no panic while locked").push(line);
    }

    /// The holder is told of the lock.
    pub(crate) fn granted(&self, op: u64, lock: &Lock) {
        let token = lock.token.expect("our own").to_string();
        self.stats().grants += 1;
        self.knows(&token, Known::Held);
        let shared = lock.mode == Mode::Shared;
        let (fence, until) = (lock.fence.map(|fence| fence.get()), self.moment(lock.expires_at));
        let (key, aid) = (name(&lock.key), lock.aid.as_str().to_owned());
        let mut taken = self.taken.lock().expect("no panic while locked");
        taken.told.entry(lock.aid.clone()).or_default().insert(token.clone());
        if taken.tokens.contains(&token) || taken.sessions.contains(&lock.aid) {
            // Too late: nobody may believe in this lock any more.
            self.write(op, Event::Held);
        } else {
            self.write(op, Event::Granted { key, aid, token, shared, fence, until });
        }
    }

    /// From now on this lock is about to be taken from its holder.
    pub(crate) fn takes(&self, op: u64, token: impl ToString) {
        let token = token.to_string();
        self.taken.lock().expect("no panic while locked").tokens.insert(token.clone());
        self.write(op, Event::Lost { token });
    }

    /// From now on, all locks of the session are about to go.
    pub(crate) fn takes_all_of(&self, op: u64, aid: &Aid) {
        let mut taken = self.taken.lock().expect("no panic while locked");
        taken.sessions.insert(aid.clone());
        for token in taken.told.get(aid).into_iter().flatten() {
            self.write(op, Event::Lost { token: token.clone() });
        }
    }

    pub(crate) fn history(&self) -> Vec<Line> {
        self.history.lock().expect("no panic while locked").clone()
    }

    pub(crate) fn knows(&self, token: impl ToString, known: Known) {
        self.known.lock().expect("no panic while locked").insert(token.to_string(), known);
    }

    pub(crate) fn known(&self, token: &str) -> Option<Known> {
        self.known.lock().expect("no panic while locked").get(token).copied()
    }

    pub(crate) fn claims(&self, server: usize, token: LockToken) {
        self.claimants.lock().expect("no panic while locked").insert(token.to_string(), server);
    }

    /// Nobody gives back the lock of a server that was killed before it heard of the grant. The lock goes with its
    /// session or with its ttl (docs/guarantees.md).
    fn claimant_was_killed(&self, token: &str) -> bool {
        let claimants = self.claimants.lock().expect("no panic while locked");
        claimants.get(token).is_some_and(|server| self.server(*server, |it| it.is_dead))
    }

    pub(crate) fn has_ended(&self, aid: &Aid) {
        self.ended.lock().expect("no panic while locked").insert(aid.clone());
    }

    /// Ended sessions of which no listener has heard.
    pub(crate) fn unheard_ends(&self) -> Vec<Aid> {
        let ended = self.ended.lock().expect("no panic while locked");
        let state = self.database.state();
        ended.iter().filter(|aid| !state.heard.has_ended(aid)).cloned().collect()
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.violations.lock().expect("no panic while locked").clone()
    }

    pub(crate) fn ends(&self) -> (u64, Vec<String>) {
        let mut trace = self.trace.lock().expect("no panic while locked");
        (trace.hash.finish(), trace.lines.take().unwrap_or_default())
    }

    pub(crate) fn server<T>(&self, number: usize, look: impl FnOnce(&Machine) -> T) -> T {
        look(&self.machines.lock().expect("no panic while locked")[number])
    }

    pub(crate) fn change(&self, number: usize, change: impl FnOnce(&mut Machine)) {
        let mut machines = self.machines.lock().expect("no panic while locked");
        change(&mut machines[number]);
        if !machines[number].is_frozen {
            machines[number].thawed.notify_waiters();
        }
    }

    pub(crate) fn machines(&self) -> usize {
        self.machines.lock().expect("no panic while locked").len()
    }

    fn new_machine(&self) -> usize {
        let mut machines = self.machines.lock().expect("no panic while locked");
        machines.push(Machine::default());
        machines.len() - 1
    }

    /// A listener is called.
    fn hears(&self, server: usize, ended: &SessionEnded) {
        if self.server(server, |it| it.is_dead) {
            return;
        }
        self.note(format_args!("s{server} hears of {:?}: {:?}", ended.aid, ended.locks));
        let wrong = self.database.told(ended);
        let mut stats = self.stats();
        stats.announced += 1;
        stats.idle_sessions += u64::from(!ended.for_good && !ended.repeated);
        drop(stats);
        if let Some(wrong) = wrong {
            self.violation(wrong);
        }
    }

    /// Checks that the answer came in time.
    pub(crate) fn answered(&self, what: &str, asked: Instant, at_most: Duration) {
        let took = asked.elapsed();
        if took > at_most + Duration::from_millis(20) {
            self.violation(format!("{what} was answered after {took:?}, not within {at_most:?}"));
        }
    }

    fn live_of(&self, aid: &Aid) -> Vec<OnRecord> {
        let state = self.database.state();
        let clock = state.primary.clock();
        state.truth.live(clock).filter(|it| it.aid == *aid).cloned().collect()
    }

    fn was_told_again(&self, token: &str) -> bool {
        self.database.state().told_again.contains(token)
    }

    /// The sessions that must be announced, each with the document that expired last, and how long ago.
    pub(crate) fn owed(&self) -> Vec<(Aid, LockKey, Duration)> {
        let (known, state) =
            (self.known.lock().expect("no panic while locked"), self.database.state());
        let was_heard_of = |token: LockToken| known.contains_key(&token.to_string());
        state.truth.owed(state.primary.clock(), was_heard_of)
    }

    /// The locks that an ended session still has and was told of.
    pub(crate) fn kept(&self, aid: &Aid) -> Vec<String> {
        // Without locks that were granted to a late attempt and have since been shown to another
        // request (docs/evidence/simulation.md).
        let is_kept = |token: &str| self.known(token).is_some() && !self.was_told_again(token);
        self.those(aid, is_kept)
    }

    /// Locks that a session without any open request has and does not know of. Again without locks that
    /// were granted to a late attempt and shown to another request.
    pub(crate) fn orphans(&self, aid: &Aid) -> Vec<String> {
        self.those(aid, |token| match self.known(token) {
            Some(Known::Held) => false,
            Some(Known::Gone) => true,
            None => !self.was_told_again(token) && !self.claimant_was_killed(token),
        })
    }

    fn those(&self, aid: &Aid, wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let named = self.live_of(aid).into_iter().map(|it| (it.key, it.token.to_string()));
        let these = named.filter(|(_, token)| wanted(token));
        these.map(|(key, token)| format!("{key:?} {token}")).collect()
    }
}

/// An application server.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    pub(crate) world: Arc<World>,
    pub(crate) number: usize,
    pub(crate) link: Link,
    pub(crate) locks: LockManager,
}

impl Server {
    pub(crate) async fn start(world: &Arc<World>) -> Self {
        let number = world.new_machine();
        let link = Link { world: Arc::clone(world), server: number };
        let settings = &world.settings;
        let listening = Arc::clone(world);
        let mut builder = LockManager::builder(link.clone())
            .ttl(settings.ttl)
            .deadline(settings.deadline)
            .reaper_interval(Duration::from_secs(1))
            .listener_timeout(Duration::from_secs(1))
            .break_policy(|_, _| true)
            .on_session_end(move |ended| {
                listening.hears(number, &ended);
                async { Ok(()) }
            });
        if let Some(max_hold) = settings.max_hold {
            builder = builder.max_hold(max_hold);
        }
        let locks = builder.build().await.expect("settings within their ranges");
        register::<Page>(&locks).await;
        register::<FairPage>(&locks).await;
        register::<FencedPage>(&locks).await;
        Self { world: Arc::clone(world), number, link, locks }
    }

    pub(crate) async fn is_awake(&self) {
        while let Some(thawed) =
            self.world.server(self.number, |it| it.is_frozen.then(|| it.thaws()))
        {
            thawed.notified().await;
        }
    }
}

async fn register<T: Lockable>(locks: &LockManager) {
    locks.register::<T>().await.expect("the simulated database takes any collection");
}

thread_local! {
    /// The panics on this thread.
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Records panics of tasks, which might otherwise go unnoticed.
pub(crate) fn remember_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.with_borrow_mut(|panics| panics.push(panic.to_string()));
            before(panic);
        }));
    });
}

pub(crate) fn panics() -> Vec<String> {
    PANICS.take()
}
