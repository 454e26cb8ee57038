//! Measures the cost when very many sessions expire at the same moment, and the cost of an idle reaper:
//! `cargo bench --features test-util --bench sweep`, or a part of it: `… --bench sweep -- expiry` or `…
//! -- idle`. Four minutes.
//!
//! The database is a replica set with one member that the benchmark starts, or the one at
//! `MONGODB_URI`. Application servers, the foreground work and the database share one machine, so
//! compare only figures of one run.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use std::{
    collections::BTreeMap,
    env, fmt, fs, mem,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use actix_doclock::{
    Aid, Holder, LockKey, LockManager, Lockable, MongoStore, SessionEnded, TryAcquire,
};
use futures_util::future::try_join_all;
use mongodb::{
    Client, Collection, Database,
    bson::{Bson, DateTime, Document, doc},
    event::{EventHandler, command::CommandEvent},
    options::ClientOptions,
};
use serde::{Deserialize, Serialize};
use tokio::{task::JoinSet, time::sleep};
use uuid::Uuid;

const LOCKS_OF_A_SESSION: usize = 3;
const FOREGROUND_TASKS: usize = 8;
/// From the end of the seeding to the expiry. In that time the application servers start, and the
/// foreground shows its undisturbed figures.
const LEAD: Duration = Duration::from_secs(15);
const GIVE_UP: Duration = Duration::from_secs(180);
const IDLE: Duration = Duration::from_secs(60);

const QUIET: [Scenario; 4] = [
    Scenario { sessions: 1_000, servers: 1, foreground: false },
    Scenario { sessions: 10_000, servers: 1, foreground: false },
    Scenario { sessions: 10_000, servers: 3, foreground: false },
    Scenario { sessions: 50_000, servers: 1, foreground: false },
];
const BUSY: [Scenario; 2] = [
    Scenario { sessions: 10_000, servers: 1, foreground: true },
    Scenario { sessions: 10_000, servers: 3, foreground: true },
];

#[derive(Clone, Copy, Serialize, Deserialize)]
struct Scenario {
    sessions: usize,
    servers: usize,
    foreground: bool,
}

/// The results of one scenario. Durations are counted from the expiry, in milliseconds.
#[derive(Serialize, Deserialize)]
struct Figures {
    gone: u128,
    told: u128,
    commands: usize,
    /// The processor time of the database server, in milliseconds.
    server: i64,
    rss_before: u64,
    rss_peak: u64,
    before: Foreground,
    during: Foreground,
}

/// The results of the foreground work over a period.
#[derive(Serialize, Deserialize)]
struct Foreground {
    cycles: usize,
    acquire: Latency,
    cycle: Latency,
}

/// In milliseconds.
#[derive(Serialize, Deserialize)]
struct Latency {
    p50: f64,
    p99: f64,
    max: f64,
}

/// An acquire and a release.
struct Cycle {
    began: Instant,
    acquire: Duration,
    both: Duration,
}

#[derive(Serialize, Deserialize)]
struct Page {
    #[serde(rename = "_id")]
    id: i64,
}

impl Lockable for Page {
    type Id = i64;
    const COLLECTION: &'static str = "page";
}

#[tokio::main]
async fn main() {
    let arguments: Vec<_> = env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    if let [role, uri, database, scenario] = &arguments[..]
        && role == "application"
    {
        let figures = application(uri, database, serde_json::from_str(scenario).unwrap()).await;
        println!("{}", serde_json::to_string(&figures).unwrap());
        return;
    }
    let wanted = |part| arguments.is_empty() || arguments.iter().any(|argument| argument == part);
    let uri = rig::mongod::shared_replica_set().await;
    if let Some(server) = uri.server() {
        // The monitor removes expired locks once a minute and announces nothing. Now and then it would
        // win.
        server.parameter("ttlMonitorEnabled", false).await;
    }
    if wanted("expiry") {
        expiry(uri.uri()).await;
    }
    if wanted("idle") {
        idle(uri.uri()).await;
    }
}

// Expiry

async fn expiry(uri: &str) {
    println!("All sessions expire at one moment, each with {LOCKS_OF_A_SESSION} locks\n");
    println!(
        "| sessions | servers | foreground | locks gone | listener called for all | commands \
         | CPU of mongod | RSS before | peak growth |"
    );
    println!("|---:|---:|---|---:|---:|---:|---:|---:|---:|");
    let mut latencies = Vec::new();
    for scenario in QUIET.into_iter().chain(BUSY) {
        let Scenario { sessions, servers, foreground } = scenario;
        let figures = run(uri, scenario).await;
        println!(
            "| {sessions} | {servers} | {} | {:.2} s | {:.2} s | {} | {} | {:.1} MiB | {:.1} MiB |",
            if foreground { "busy" } else { "none" },
            figures.gone as f64 / 1e3,
            figures.told as f64 / 1e3,
            if foreground { "–".to_owned() } else { figures.commands.to_string() },
            if foreground {
                "–".to_owned()
            } else {
                format!("{:.1} s", figures.server as f64 / 1e3)
            },
            figures.rss_before as f64 / 1024.0,
            figures.rss_peak.saturating_sub(figures.rss_before) as f64 / 1024.0,
        );
        if foreground {
            latencies.push((servers, "before", figures.before));
            latencies.push((servers, "during", figures.during));
        }
    }
    println!(
        "\n{FOREGROUND_TASKS} tasks that acquire and release other documents, for as long before the \
         expiry as the sweep takes (at most {} s), and during it; in ms\n",
        LEAD.as_secs(),
    );
    println!(
        "| servers | | cycles | acquire p50 | p99 | max | acquire + release p50 | p99 | max |"
    );
    println!("|---:|---|---:|---:|---:|---:|---:|---:|---:|");
    for (servers, when, Foreground { cycles, acquire, cycle }) in latencies {
        println!("| {servers} | {when} | {cycles} | {acquire} | {cycle} |");
    }
    println!();
}

/// Each in a process of its own, because an allocator does not return its memory.
async fn run(uri: &str, scenario: Scenario) -> Figures {
    let database = rig::fresh_database(uri).await;
    let lead = LEAD.as_millis() as i64;
    let ts = doc! { "$add": [{ "$subtract": ["$$NOW", "$ttl"] }, lead] };
    seed(&database, scenario.sessions, ts.into()).await;
    let name = database.name().to_owned();
    let arguments =
        ["application", uri, &name, &serde_json::to_string(&scenario).unwrap()].map(str::to_owned);
    let application = tokio::task::spawn_blocking(|| {
        Command::new(env::current_exe().unwrap()).args(arguments).stderr(Stdio::inherit()).output()
    });
    let output = application.await.unwrap().unwrap();
    assert!(output.status.success(), "see above");
    database.drop().await.unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

async fn application(uri: &str, database: &str, scenario: Scenario) -> Figures {
    let called = Arc::new(Called::new(scenario.sessions));
    let commands = Arc::new(AtomicUsize::new(0));
    let mut servers = Vec::new();
    for _ in 0..scenario.servers {
        let client = counting(uri, &commands).await;
        let called = Arc::clone(&called);
        servers.push(server(&client.database(database), move |ended| called.with(&ended)).await);
    }
    let database = rig::client(uri).await.database(database);
    let expiry = time_of_expiry(&records(&database)).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut foreground = JoinSet::new();
    if scenario.foreground {
        for (task, locks) in (0..FOREGROUND_TASKS as i64).zip(servers.iter().cycle()) {
            foreground.spawn(cycles(locks.clone(), task, Arc::clone(&stop)));
        }
    }
    tokio::time::sleep_until(expiry.into()).await;
    commands.store(0, Ordering::Relaxed);
    let worked = worked(&database).await;
    let rss_before = memory("VmRSS");
    // Resets the high-water mark.
    fs::write("/proc/self/clear_refs", "5").unwrap();

    let gone = {
        let locks = records(&database);
        tokio::spawn(async move { gone(&locks, expiry).await })
    };
    let told = called.all_since(expiry).await;
    let gone = gone.await.unwrap();
    let rss_peak = memory("VmHWM");
    let took = gone.max(told);
    stop.store(true, Ordering::Relaxed);
    let cycles: Vec<_> = foreground.join_all().await.into_iter().flatten().collect();
    let commands = commands.load(Ordering::Relaxed);
    let server = self::worked(&database).await - worked;
    // Time for a duplicate call that may be under way.
    sleep(Duration::from_secs(1)).await;
    called.assert_once_each();
    Figures {
        gone: gone.as_millis(),
        told: told.as_millis(),
        commands,
        server,
        rss_before,
        rss_peak,
        before: Foreground::between(expiry - took, expiry, &cycles),
        during: Foreground::between(expiry, expiry + took, &cycles),
    }
}

/// A client that counts its commands to the locks.
async fn counting(uri: &str, commands: &Arc<AtomicUsize>) -> Client {
    let mut options = ClientOptions::parse(uri).await.unwrap();
    let commands = Arc::clone(commands);
    options.command_event_handler = Some(EventHandler::callback(move |event| {
        if let CommandEvent::Started(started) = event
            && started.command_name != "ping"
        {
            commands.fetch_add(1, Ordering::Relaxed);
        }
    }));
    Client::with_options(options).unwrap()
}

/// The expiry by the server's clock, converted to ours.
async fn time_of_expiry(locks: &Collection<Document>) -> Instant {
    let left = doc! { "$subtract": [{ "$add": ["$ts", "$ttl"] }, "$$NOW"] };
    let asked = Instant::now();
    let record = locks.find_one(doc! {}).projection(doc! { "left": left }).await.unwrap().unwrap();
    let left = Duration::from_millis(record.get_i64("left").unwrap().try_into().unwrap());
    assert!(left > LEAD / 3, "the seeding took too long, {left:?} are left");
    asked + left
}

/// How often the listener was called for each session. Counting allocates no memory.
struct Called {
    times: Vec<AtomicU8>,
}

impl Called {
    fn new(sessions: usize) -> Self {
        Self { times: (0..sessions).map(|_| AtomicU8::new(0)).collect() }
    }

    fn with(&self, ended: &SessionEnded) {
        let session = ended.aid.as_str().parse::<Uuid>().unwrap().as_u128();
        assert_eq!(ended.locks.len(), LOCKS_OF_A_SESSION, "{ended:?}");
        self.times[usize::try_from(session).unwrap()].fetch_add(1, Ordering::Relaxed);
    }

    async fn all_since(&self, expiry: Instant) -> Duration {
        let missing =
            || self.times.iter().filter(|times| times.load(Ordering::Relaxed) == 0).count();
        loop {
            let missing = missing();
            if missing == 0 {
                return expiry.elapsed();
            }
            assert!(expiry.elapsed() < GIVE_UP, "{missing} sessions were never announced");
            sleep(Duration::from_millis(10)).await;
        }
    }

    fn assert_once_each(&self) {
        assert!(self.times.iter().all(|times| times.load(Ordering::Relaxed) == 1), "called again");
    }
}

async fn gone(locks: &Collection<Document>, expiry: Instant) -> Duration {
    loop {
        // The estimated count costs the server nothing; a query would disturb it.
        if locks.estimated_document_count().await.unwrap() <= FOREGROUND_TASKS as u64 {
            let asked = expiry.elapsed();
            if locks.find_one(doc! { "_id": { "$gte": 0 } }).await.unwrap().is_none() {
                return asked;
            }
        }
        assert!(expiry.elapsed() < GIVE_UP, "locks are left");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Acquires and releases its own document until it is told to stop.
async fn cycles(locks: LockManager, task: i64, stop: Arc<AtomicBool>) -> Vec<Cycle> {
    let (aid, holder) = (Aid::new(), Holder::new("foreground"));
    let key = LockKey::of::<Page>(-1 - task).unwrap();
    let mut cycles = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let answer = locks.lock_for_session(&key, &aid, &holder).await.unwrap();
        let acquire = began.elapsed();
        let TryAcquire::Granted(lock) = answer else { panic!("not granted: {answer:?}") };
        locks.release(&lock).await.unwrap();
        cycles.push(Cycle { began, acquire, both: began.elapsed() });
    }
    cycles
}

impl Foreground {
    fn between(from: Instant, to: Instant, cycles: &[Cycle]) -> Self {
        let within = || cycles.iter().filter(|cycle| (from..to).contains(&cycle.began));
        Self {
            cycles: within().count(),
            acquire: Latency::of(within().map(|cycle| cycle.acquire)),
            cycle: Latency::of(within().map(|cycle| cycle.both)),
        }
    }
}

impl Latency {
    fn of(all: impl Iterator<Item = Duration>) -> Self {
        let mut all: Vec<_> = all.map(|took| took.as_secs_f64() * 1e3).collect();
        all.sort_by(f64::total_cmp);
        let at = |part: f64| all.get((all.len() as f64 * part) as usize).copied().unwrap_or(0.0);
        Self { p50: at(0.5), p99: at(0.99), max: all.last().copied().unwrap_or(0.0) }
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} | {:.1} | {:.1}", self.p50, self.p99, self.max)
    }
}

/// The processor time of the database server, in milliseconds.
async fn worked(database: &Database) -> i64 {
    let status = database.run_command(doc! { "serverStatus": 1 }).await.unwrap();
    let times = status.get_document("extra_info").unwrap();
    let time = |of| times.get_i64(of).unwrap();
    (time("user_time_us") + time("system_time_us")) / 1000
}

/// The memory of this process, in KiB.
fn memory(what: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(what)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

// Idleness

async fn idle(uri: &str) {
    println!("One server for {} s, in which nothing expires\n", IDLE.as_secs());
    println!("| locks held | commands |");
    println!("|---:|---|");
    let sent = try_join_all([0, 1_000].map(|held| tokio::spawn(idle_with(uri.to_owned(), held))));
    for (held, sent) in sent.await.unwrap() {
        println!("| {held} | {sent} |");
    }
    explained(uri, 100_000).await;
}

async fn idle_with(uri: String, held: usize) -> (usize, String) {
    let (database, commands) = rig::counted_database(&uri).await;
    seed(&database, held / LOCKS_OF_A_SESSION, Bson::from("$$NOW")).await;
    let _server = nothing_expires(&database).await;
    commands.take();
    sleep(IDLE).await;
    let mut counts = BTreeMap::new();
    for name in commands.take() {
        *counts.entry(name).or_insert(0) += 1;
    }
    let counts: Vec<_> = counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
    (held, counts.join(", "))
}

/// The query of a reaper while many locks are live, with the server's execution plan.
async fn explained(uri: &str, held: usize) {
    let (database, commands) = rig::recorded_database(uri).await;
    seed(&database, held / LOCKS_OF_A_SESSION, Bson::from("$$NOW")).await;
    let server = nothing_expires(&database).await;
    let scanned = async || {
        let status = database.run_command(doc! { "serverStatus": 1 }).await.unwrap();
        let executor = status.get_document("metrics").unwrap().get_document("queryExecutor");
        executor.unwrap().get_i64("scanned").unwrap()
    };
    let before = scanned().await;
    commands.lock().unwrap().clear();
    let began = Instant::now();
    assert_eq!(server.sweep().await.unwrap(), 0);
    let took = began.elapsed();
    let sent = mem::take(&mut *commands.lock().unwrap());
    let scanned = scanned().await - before;
    let [query] = &sent[..] else { panic!("not one query: {sent:?}") };
    let query: Document = (query.iter())
        .filter(|(name, _)| ["aggregate", "pipeline", "cursor"].contains(&name.as_str()))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let explain = doc! { "explain": query, "verbosity": "executionStats" };
    let explain = Bson::from(database.run_command(explain).await.unwrap());
    println!("\nA sweep that finds nothing, with {held} live locks: one query, {took:.1?}\n");
    println!("| | |\n|---|---|");
    println!("| totalKeysExamined | {:?} |", all_of(&explain, "totalKeysExamined"));
    println!("| totalDocsExamined | {:?} |", all_of(&explain, "totalDocsExamined"));
    println!("| plan | {:?} |", all_of(&explain, "stage"));
    println!("| indexes | {:?} |", all_of(&explain, "indexName"));
    println!("| keys that the whole server has scanned in that time | {scanned} |");
}

async fn nothing_expires(database: &Database) -> LockManager {
    let server = server(database, |ended| panic!("no session has expired: {ended:?}")).await;
    // Time for the one-time work.
    sleep(Duration::from_secs(1)).await;
    server
}

/// The values of this field, at any depth.
fn all_of<'a>(bson: &'a Bson, field: &str) -> Vec<&'a Bson> {
    match bson {
        Bson::Array(array) => array.iter().flat_map(|bson| all_of(bson, field)).collect(),
        Bson::Document(document) => {
            let within = document.iter().flat_map(|(name, value)| {
                let mut found = all_of(value, field);
                found.extend((name == field).then_some(value));
                found
            });
            within.collect()
        }
        _ => Vec::new(),
    }
}

// Both

/// An application server with the default settings.
async fn server(
    database: &Database,
    listener: impl Fn(SessionEnded) + Send + Sync + 'static,
) -> LockManager {
    let builder = LockManager::builder(MongoStore::new(database)).on_session_end(move |ended| {
        listener(ended);
        async { Ok(()) }
    });
    let locks = builder.build().await.unwrap();
    locks.register::<Page>().await.unwrap();
    locks
}

/// Locks of that many sessions, each as `pipeline::acquire` writes it. `ts` is an expression, so that
/// only the server's clock counts.
async fn seed(database: &Database, sessions: usize, ts: Bson) {
    let locks = LockManager::builder(MongoStore::new(database)).without_reaper().build().await;
    let locks = locks.unwrap();
    locks.register::<Page>().await.unwrap();
    let ttl = locks.ttl().as_millis() as i64;
    let far = DateTime::from_millis(4_000_000_000_000);
    let ids: Vec<_> = (0..sessions * LOCKS_OF_A_SESSION).collect();
    for some in ids.chunks(10_000) {
        let record = |id: &usize| {
            doc! {
                "_id": *id as i64,
                "ts": far,
                "ttl": ttl,
                "aid": Uuid::from_u128((id / LOCKS_OF_A_SESSION) as u128).to_string(),
                "token": Uuid::new_v4().to_string(),
                "since": far,
                "holder": { "label": "alice" },
            }
        };
        records(database).insert_many(some.iter().map(record)).await.unwrap();
    }
    // One command has one `$$NOW`, so that all locks expire at the same moment.
    let of_now = vec![doc! { "$set": { "ts": ts, "since": "$$NOW" } }];
    records(database).update_many(doc! {}, of_now).await.unwrap();
}

fn records(database: &Database) -> Collection<Document> {
    database.collection(&format!("{}.lock", Page::COLLECTION))
}
