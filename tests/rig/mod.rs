//! Real servers, faults between them and the driver, and real browsers.
//!
//! Every server listens on 127.0.0.1, keeps its files in its own directory, and ends with the process
//! that started it, however that process ends.
#![allow(dead_code)]

pub(crate) mod app;
pub(crate) mod browser;
pub(crate) mod child;
pub(crate) mod claims;
mod clients;
pub(crate) mod editor;
pub(crate) mod faketime;
pub(crate) mod faulty;
pub(crate) mod log;
pub(crate) mod mongod;
pub(crate) mod odd;
pub(crate) mod paused;
pub(crate) mod proxy;
pub(crate) mod random;
pub(crate) mod recorded;
pub(crate) mod redis;
pub(crate) mod replica_set;
mod server;
mod wire;

pub(crate) use clients::*;

use std::env;
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use actix_doclock::LockKey;
use mongodb::bson::{Bson, Document, doc};
use mongodb::event::{
    EventHandler,
    command::{CommandEvent, CommandStartedEvent},
};
use mongodb::options::{ClientOptions, ServerApi, ServerApiVersion};
use mongodb::{Client, Database};
use uuid::Uuid;

/// Like [`fresh_database`], on a client that declares the strict Stable API.
pub(crate) async fn strict_database(uri: &str) -> Database {
    let mut options = options(uri).await;
    let version = ServerApiVersion::V1;
    options.server_api = Some(ServerApi::builder().version(version).strict(true).build());
    Client::with_options(options).expect("valid options").database(&fresh_name())
}

/// Like [`fresh_database`], and counts the commands that are sent.
pub(crate) async fn counted_database(uri: &str) -> (Database, Commands) {
    let commands = Commands::default();
    let sent = commands.clone();
    let sends = move |it: CommandStartedEvent| sent.push(it.command_name);
    (watched_database(options(uri).await, sends), commands)
}

/// Like [`counted_database`], and records the whole commands.
pub(crate) async fn recorded_database(uri: &str) -> (Database, Arc<Mutex<Vec<Document>>>) {
    let commands = Arc::new(Mutex::new(Vec::new()));
    let sent = commands.clone();
    let options = options(uri).await;
    let sends = move |started: CommandStartedEvent| {
        sent.lock().expect("no panic while locked").push(started.command);
    };
    (watched_database(options, sends), commands)
}

fn watched_database(
    mut options: ClientOptions,
    sends: impl Fn(CommandStartedEvent) + Send + Sync + 'static,
) -> Database {
    let of_manager = |it: &CommandStartedEvent| {
        it.command.get_str("find").is_ok_and(|it| it == "doclock.frozen")
            || it.command.get_str("findAndModify").is_ok_and(|it| it == "doclock.server")
    };
    options.command_event_handler = Some(EventHandler::callback(move |event| match event {
        CommandEvent::Started(it) if !is_housekeeping(&it.command_name) && !of_manager(&it) => {
            sends(it);
        }
        _ => {}
    }));
    Client::with_options(options).expect("valid options").database(&fresh_name())
}

/// How deep the tests go that repeat something or try random values: 1 at a commit, `DOCLOCK_DEPTH` by night.
pub(crate) fn depth() -> u32 {
    env::var("DOCLOCK_DEPTH").map_or(1, |it| it.parse().expect("a number"))
}

/// Every fourth of these at a commit, and all of them by night.
pub(crate) fn some<T>(all: Vec<T>) -> impl Iterator<Item = T> {
    let step = if depth() == 1 { 4 } else { 1 };
    all.into_iter().step_by(step)
}

/// The names of the commands that a client sent, without the driver's own housekeeping.
#[derive(Clone, Debug, Default)]
pub(crate) struct Commands(Arc<Mutex<Vec<String>>>);

impl Commands {
    /// The commands sent since the last call, in order.
    pub(crate) fn take(&self) -> Vec<String> {
        mem::take(&mut *self.0.lock().expect("no panic while locked"))
    }

    fn push(&self, name: String) {
        self.0.lock().expect("no panic while locked").push(name);
    }
}

/// Except for times that the driver received from the server and sends back unchanged.
pub(crate) fn carries_a_time(command: &Document) -> bool {
    let mut ours = command.clone();
    ours.remove("$clusterTime");
    has(&Bson::Document(ours), &|value| matches!(value, Bson::DateTime(_) | Bson::Timestamp(_)))
}

pub(crate) fn has(value: &Bson, is_it: &dyn Fn(&Bson) -> bool) -> bool {
    match value {
        Bson::Document(document) => document.values().any(|value| has(value, is_it)),
        Bson::Array(values) => values.iter().any(|value| has(value, is_it)),
        value => is_it(value),
    }
}

/// Makes a lock older: sets its dates back on the server, including those of readers and waiters, so
/// that no test waits for an expiry.
pub(crate) async fn age(database: &Database, key: &LockKey, by: Duration) {
    let locks = database.collection::<Document>(&format!("{}.lock", key.collection()));
    let by = i64::try_from(by.as_millis()).expect("a duration of our time");
    let older = |fields: &[&str], at: &str| {
        let mut older = doc! {};
        for field in fields {
            let date = format!("{at}{field}");
            let is_date = doc! { "$eq": [{ "$type": &date }, "date"] };
            older.insert(*field, doc! { "$cond": [is_date, { "$subtract": [&date, by] }, date] });
        }
        older
    };
    let each = |field: &str, fields: &[&str]| {
        let older = doc! { "$mergeObjects": ["$$it", older(fields, "$$it.")] };
        let field = format!("${field}");
        let all = doc! { "$map": { "input": &field, "as": "it", "in": older } };
        doc! { "$cond": [{ "$isArray": &field }, all, field] }
    };
    let mut aged = older(&["ts", "until", "due"], "$");
    let leaving = doc! { "$mergeObjects": ["$leaving", older(&["until"], "$leaving.")] };
    let is_leaving = doc! { "$eq": [{ "$type": "$leaving" }, "object"] };
    aged.insert("leaving", doc! { "$cond": [is_leaving, leaving, "$leaving"] });
    aged.insert("readers", each("readers", &["ts", "until"]));
    aged.insert("queue", each("queue", &["until"]));
    aged.insert("asks", each("asks", &["until"]));
    let older = vec![doc! { "$set": aged }];
    let aged = locks.update_one(doc! { "_id": { "$eq": Bson::from(key.id()) } }, older).await;
    assert_eq!(aged.expect("the server answers").matched_count, 1, "there is a lock on {key}");
}

/// Puts locks on these documents that are like the lock on another one.
pub(crate) async fn copies_of(database: &Database, original: &LockKey, keys: &[LockKey]) {
    let locks = database.collection::<Document>(&format!("{}.lock", original.collection()));
    let by_id = |key: &LockKey| doc! { "_id": { "$eq": Bson::from(key.id()) } };
    let record = locks.find_one(by_id(original)).await.expect("the server answers");
    let record = record.expect("there is a lock");
    let copies = keys.iter().map(|key| {
        let mut copy = record.clone();
        copy.insert("_id", Bson::from(key.id()));
        copy.insert("token", Uuid::new_v4().to_string());
        copy
    });
    locks.insert_many(copies).await.expect("the server answers");
}

/// The program of this name under `examples/`, built from the current sources.
pub(crate) fn example(name: &str) -> PathBuf {
    program(&format!("examples/{name}"))
}

/// The command `doclock`, built from the current sources.
pub(crate) fn command() -> PathBuf {
    program("doclock")
}

/// A program of `cargo build --workspace --examples --bins`, which is not run here: a second cargo would wait for the first.
///
/// # Panics
/// If a program was not there, or older than one of its sources, when this was first asked.
fn program(path: &str) -> PathBuf {
    static OLD: LazyLock<Vec<PathBuf>> = LazyLock::new(|| {
        let changed = |file: &Path| fs::metadata(file).and_then(|it| it.modified()).ok();
        let is_old = |program: &PathBuf| {
            let sources = fs::read_to_string(program.with_extension("d")).unwrap_or_default();
            let mut sources = sources.split_whitespace().skip(1).map(Path::new);
            let built = changed(program);
            built.is_none() || sources.any(|source| changed(source) > built)
        };
        let all = ["doclock", "examples/editor", "examples/forms", "examples/jobs"];
        all.map(|it| programs().join(it)).into_iter().filter(is_old).collect()
    });
    let program = programs().join(path);
    assert!(
        !OLD.contains(&program),
        "{} is missing or old: run `scripts/test`, or `cargo build --workspace --examples --bins --features _simulation`",
        program.display(),
    );
    program
}

fn programs() -> PathBuf {
    // This binary is target/debug/deps/suite-….
    let this = env::current_exe().expect("a running binary");
    this.ancestors().nth(2).expect("a target directory").to_owned()
}
