//! The cost when very many sessions expire at the same moment, and the cost of an idle reaper.
//!
//! Application servers, the foreground work and the database share one machine: compare only figures of one run.

use std::{
    collections::BTreeMap,
    fs, mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    time::{Duration, Instant},
};

use actix_doclock::{
    Aid, Holder, LockKey, LockManager, Lockable, MongoStore, SessionEnded, TryAcquire,
};
use mongodb::{
    Client, Collection, Database,
    bson::{Bson, DateTime, Document, doc},
    event::{EventHandler, command::CommandEvent},
    options::ClientOptions,
};
use serde::{Deserialize, Serialize};
use tokio::{task::JoinSet, time::sleep};
use uuid::Uuid;

use super::{Bench, fresh};
use crate::{
    child::Child,
    report::{Role, Row},
    servers::Mongo,
    stats::Samples,
};

const LOCKS_OF_A_SESSION: usize = 3;
const FOREGROUND_TASKS: usize = 8;
/// From the end of the seeding to the expiry. In that time the application servers start, and the
/// foreground shows its undisturbed figures.
const LEAD: Duration = Duration::from_secs(15);
const GIVE_UP: Duration = Duration::from_secs(180);

const SCENARIOS: [Scenario; 6] = [
    Scenario { sessions: 1_000, servers: 1, foreground: false },
    Scenario { sessions: 10_000, servers: 1, foreground: false },
    Scenario { sessions: 10_000, servers: 3, foreground: false },
    Scenario { sessions: 50_000, servers: 1, foreground: false },
    Scenario { sessions: 10_000, servers: 1, foreground: true },
    Scenario { sessions: 10_000, servers: 3, foreground: true },
];

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Scenario {
    sessions: usize,
    servers: usize,
    foreground: bool,
}

impl Scenario {
    fn row(self, what: &str) -> Row {
        let who = format!("{what}, {} servers", self.servers);
        Row::new("expiry", "one", &who, Role::Ours).load(self.sessions, LOCKS_OF_A_SESSION)
    }
}

/// An acquire and a release.
struct Cycle {
    began: Instant,
    acquire: Duration,
    both: Duration,
}

/// The locked document. Its ids are numbers, which [`seed`] counts.
#[derive(Serialize, Deserialize)]
struct Page {
    #[serde(rename = "_id")]
    id: i64,
}

impl Lockable for Page {
    type Id = i64;
    const COLLECTION: &'static str = "page";
}

// Expiry

/// All sessions expire at one moment.
pub async fn expiry(bench: &mut Bench<'_>) {
    let mongo = &bench.servers.one;
    // The monitor removes expired locks once a minute and announces nothing. Now and then it would win.
    assert!(mongo.parameter("ttlMonitorEnabled", 0).await);
    for scenario in &SCENARIOS[..bench.effort.pick(1, SCENARIOS.len())] {
        let database = fresh(mongo).await;
        let lead = LEAD.as_millis() as i64;
        let ts = doc! { "$add": [{ "$subtract": ["$$NOW", "$ttl"] }, lead] };
        seed(&database, scenario.sessions, ts.into()).await;
        // Each in a process of its own, because an allocator does not return its memory.
        let scenario = serde_json::to_string(scenario).expect("plain data");
        let mut server = Child::start(&["expiry", &mongo.uri(), database.name(), &scenario]);
        let rows: Vec<Row> = serde_json::from_str(&server.line().await).expect("its rows");
        rows.into_iter().for_each(|row| bench.report.add(row));
        database.drop().await.unwrap();
    }
    assert!(mongo.parameter("ttlMonitorEnabled", 1).await);
}

/// The application servers of a scenario.
pub async fn child(uri: &str, database: &str, scenario: &str) {
    let scenario: Scenario = serde_json::from_str(scenario).expect("as it was written");
    let rows = application(uri, database, scenario).await;
    println!("{}", serde_json::to_string(&rows).expect("plain data"));
}

async fn application(uri: &str, database: &str, scenario: Scenario) -> Vec<Row> {
    let called = Arc::new(Called::new(scenario.sessions));
    let commands = Commands::default();
    let mut servers = Vec::new();
    for _ in 0..scenario.servers {
        let client = commands.client(uri).await;
        let called = Arc::clone(&called);
        servers.push(server(&client.database(database), move |ended| called.with(&ended)).await);
    }
    let database = Client::with_uri_str(uri).await.unwrap().database(database);
    let expiry = time_of_expiry(&records(&database)).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut foreground = JoinSet::new();
    if scenario.foreground {
        for (task, locks) in (0..FOREGROUND_TASKS as i64).zip(servers.iter().cycle()) {
            foreground.spawn(cycles(locks.clone(), task, Arc::clone(&stop)));
        }
    }
    tokio::time::sleep_until(expiry.into()).await;
    commands.take();
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
    let growth = memory("VmHWM").saturating_sub(rss_before);
    let took = gone.max(told);
    stop.store(true, Ordering::Relaxed);
    let cycles: Vec<_> = foreground.join_all().await.into_iter().flatten().collect();
    let commands: u64 = commands.take().values().sum();
    let server = self::worked(&database).await - worked;
    // Time for a duplicate call that may be under way.
    sleep(Duration::from_secs(1)).await;
    called.assert_once_each();

    let row = scenario.row(if scenario.foreground { "busy" } else { "quiet" });
    let row = row.value("gone_ms", gone.as_millis() as f64);
    let row = row.value("told_ms", told.as_millis() as f64);
    let row = row.value("rss_before_kib", rss_before as f64).value("rss_growth_kib", growth as f64);
    if !scenario.foreground {
        return vec![row.value("commands", commands as f64).value("mongod_ms", server as f64)];
    }
    let mut rows = vec![row];
    for (when, from, to) in [("before", expiry - took, expiry), ("during", expiry, expiry + took)] {
        let within = || cycles.iter().filter(|cycle| (from..to).contains(&cycle.began));
        let acquire = Samples::of(within().map(|cycle| cycle.acquire));
        rows.push(scenario.row(&format!("acquire {when}")).samples(&acquire));
        let both = Samples::of(within().map(|cycle| cycle.both));
        rows.push(scenario.row(&format!("acquire + release {when}")).samples(&both));
    }
    rows
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

/// One server while nothing expires: its commands in a minute, and the query of its reaper.
pub async fn idle(bench: &mut Bench<'_>) {
    let time = bench.effort.pick(Duration::from_secs(5), Duration::from_secs(60));
    for held in [0, 1_000] {
        let (database, commands, server) = server_with(&bench.servers.one, held).await;
        sleep(time).await;
        let row = Row::new("idle", "one", "commands", Role::Ours).load(1, held);
        let sent = commands.take();
        let row = sent.iter().fold(row, |row, (name, count)| row.value(name, *count as f64));
        bench.report.add(row.value("seconds", time.as_secs_f64()));
        server.shutdown().await;
        database.drop().await.unwrap();
    }
    sweep(bench).await;
}

/// The query of a reaper while many locks are live, with the server's execution plan.
async fn sweep(bench: &mut Bench<'_>) {
    let held = bench.effort.pick(3_000, 100_000);
    let (database, commands, server) = server_with(&bench.servers.one, held).await;
    let scanned = async || {
        let status = database.run_command(doc! { "serverStatus": 1 }).await.unwrap();
        let executor = status.get_document("metrics").unwrap().get_document("queryExecutor");
        executor.unwrap().get_i64("scanned").unwrap()
    };
    let before = scanned().await;
    commands.take();
    let began = Instant::now();
    assert_eq!(server.sweep().await.unwrap(), 0);
    let took = began.elapsed();
    let sent = commands.last();
    assert_eq!(commands.take().get("aggregate"), Some(&1), "one query");
    let scanned = scanned().await - before;
    let query: Document = (sent.into_iter())
        .filter(|(name, _)| ["aggregate", "pipeline", "cursor"].contains(&name.as_str()))
        .collect();
    let explain = doc! { "explain": query, "verbosity": "executionStats" };
    let explain = Bson::from(database.run_command(explain).await.unwrap());
    let sum = |field| all_of(&explain, field).iter().filter_map(|it| number(it)).sum();
    let row = Row::new("idle", "one", "a sweep that finds nothing", Role::Ours).load(1, held);
    let row = row.samples(&Samples::of([took])).value("keys_examined", sum("totalKeysExamined"));
    let row = row.value("docs_examined", sum("totalDocsExamined"));
    bench.report.add(row.value("keys_scanned_by_the_server", scanned as f64));
    eprintln!("plan: {:?}", all_of(&explain, "stage"));
    eprintln!("indexes: {:?}", all_of(&explain, "indexName"));
    server.shutdown().await;
    database.drop().await.unwrap();
}

async fn server_with(mongo: &Mongo, held: usize) -> (Database, Commands, LockManager) {
    let commands = Commands::default();
    let database = commands.client(&mongo.uri()).await.database(fresh(mongo).await.name());
    seed(&database, held / LOCKS_OF_A_SESSION, Bson::from("$$NOW")).await;
    let server = server(&database, |ended| panic!("no session has expired: {ended:?}")).await;
    // Time for the one-time work.
    sleep(Duration::from_secs(1)).await;
    commands.take();
    (database, commands, server)
}

fn number(value: &Bson) -> Option<f64> {
    value.as_i64().map(|it| it as f64).or(value.as_i32().map(f64::from)).or(value.as_f64())
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

/// The commands that its clients have sent: how many by name, and the last one.
#[derive(Clone, Default)]
struct Commands(Arc<Mutex<(BTreeMap<String, u64>, Document)>>);

impl Commands {
    async fn client(&self, uri: &str) -> Client {
        let mut options = ClientOptions::parse(uri).await.unwrap();
        let sent = Arc::clone(&self.0);
        options.command_event_handler = Some(EventHandler::callback(move |event| {
            if let CommandEvent::Started(started) = event
                && started.command_name != "ping"
            {
                let mut sent = sent.lock().unwrap();
                *sent.0.entry(started.command_name).or_default() += 1;
                sent.1 = started.command;
            }
        }));
        Client::with_options(options).unwrap()
    }

    /// Those since the last call.
    fn take(&self) -> BTreeMap<String, u64> {
        mem::take(&mut self.0.lock().unwrap().0)
    }

    fn last(&self) -> Document {
        self.0.lock().unwrap().1.clone()
    }
}

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
