//! Processor time, memory and commands.

use std::{
    collections::BTreeMap,
    fs,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use mongodb::{
    Database,
    bson::{Document, doc},
    event::{EventHandler, command::CommandEvent},
};
use uuid::Uuid;

use crate::servers::Mongo;

/// The unit of the processor times in `/proc`, on every Linux of today.
const TICK: Duration = Duration::from_millis(10);
const PAGE: u64 = 4_096;

/// The commands that clients of [`counted`] have sent, by name.
static SENT: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

#[derive(Debug, Clone)]
pub struct Meter {
    mongods: Vec<i64>,
}

#[derive(Debug, Clone, Copy)]
pub struct Reading {
    at: Instant,
    mongod: Duration,
    app: Duration,
}

/// The processor time between two readings.
#[derive(Debug, Clone, Copy)]
pub struct Used {
    pub time: Duration,
    pub mongod: Duration,
    pub app: Duration,
}

impl Meter {
    pub fn new(mongods: Vec<i64>) -> Self {
        Self { mongods }
    }

    pub fn read(&self) -> Reading {
        let mongod = self.mongods.iter().map(|pid| processor_time(&pid.to_string())).sum();
        Reading { at: Instant::now(), mongod, app: processor_time("self") }
    }

    /// The resident memory of all mongods, in bytes.
    pub fn mongod_memory(&self) -> u64 {
        self.mongods.iter().map(|pid| resident(&pid.to_string())).sum()
    }
}

impl Reading {
    pub fn since(&self, before: &Self) -> Used {
        Used {
            time: self.at - before.at,
            mongod: self.mongod - before.mongod,
            app: self.app - before.app,
        }
    }
}

impl Used {
    pub fn mongod_cores(&self) -> f64 {
        self.mongod.as_secs_f64() / self.time.as_secs_f64()
    }

    pub fn app_cores(&self) -> f64 {
        self.app.as_secs_f64() / self.time.as_secs_f64()
    }
}

fn processor_time(pid: &str) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process that runs");
    // "pid (name) state …": user and system time are the 12th and 13th after the name.
    let (_, after) = stat.rsplit_once(") ").expect("a name");
    let ticks = after.split(' ').skip(11).take(2).map(|it| it.parse::<u32>().expect("a number"));
    TICK * ticks.sum()
}

/// The resident memory of a process, in bytes.
pub fn resident(pid: &str) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).expect("a process that runs");
    statm.split(' ').nth(1).and_then(|it| it.parse().ok()).map_or(0, |pages: u64| pages * PAGE)
}

pub fn own_memory() -> u64 {
    resident("self")
}

/// A new database on a client that counts its commands.
pub async fn counted(mongo: &Mongo) -> Database {
    let client = mongo.client_with(|options| {
        options.command_event_handler = Some(EventHandler::callback(|event| {
            if let CommandEvent::Started(started) = event {
                *sent().entry(started.command_name).or_default() += 1;
            }
        }));
    });
    client.await.database(&format!("bench_{}", Uuid::new_v4().simple()))
}

fn sent() -> MutexGuard<'static, BTreeMap<String, u64>> {
    SENT.lock().expect("no panic while locked")
}

/// The commands since the last call.
pub fn take_sent() -> BTreeMap<String, u64> {
    std::mem::take(&mut *sent())
}

/// How many bytes the oplog holds.
pub async fn oplog(database: &Database) -> f64 {
    let local = database.client().database("local");
    let stats: Document =
        local.run_command(doc! { "collStats": "oplog.rs" }).await.expect("an oplog");
    let size = stats.get("size").expect("a size");
    size.as_i64().map(|it| it as f64).or(size.as_i32().map(f64::from)).or(size.as_f64()).unwrap()
}
