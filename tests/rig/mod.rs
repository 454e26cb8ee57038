//! Real servers, faults between them and the driver, and real browsers.
//!
//! Every server listens on 127.0.0.1, keeps its files in its own directory, and ends with the process
//! that started it, however that process ends.
#![allow(dead_code)]

pub(crate) mod app;
pub(crate) mod browser;
pub(crate) mod child;
pub(crate) mod editor;
pub(crate) mod faketime;
pub(crate) mod faulty;
pub(crate) mod log;
pub(crate) mod mongod;
pub(crate) mod paused;
pub(crate) mod proxy;
pub(crate) mod redis;
pub(crate) mod replica_set;
mod server;
mod wire;

use std::env;
use std::mem;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::thread;
use std::time::Duration;

use actix_doclock::LockKey;
use mongodb::bson::{Bson, Document, doc, oid::ObjectId};
use mongodb::event::{
    EventHandler,
    command::{CommandEvent, CommandStartedEvent},
};
use mongodb::options::{ClientOptions, ServerApi, ServerApiVersion};
use mongodb::{Client, Database};
use tokio::runtime::Runtime;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use uuid::Uuid;

/// A short name that no other test uses.
pub(crate) fn fresh_name() -> String {
    format!("t_{}", ObjectId::new().to_hex())
}

/// A new database on a new client. It stays until its server ends.
pub(crate) async fn fresh_database(uri: &str) -> Database {
    client(uri).await.database(&fresh_name())
}

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
    let options = options(uri).await;
    let database = watched_database(options, move |started| sent.push(started.command_name));
    (database, commands)
}

/// Like [`counted_database`], and records the whole commands.
pub(crate) async fn recorded_database(uri: &str) -> (Database, Arc<Mutex<Vec<Document>>>) {
    let commands = Arc::new(Mutex::new(Vec::new()));
    let sent = commands.clone();
    let options = options(uri).await;
    let database = watched_database(options, move |started| {
        sent.lock().expect("no panic while locked").push(started.command);
    });
    (database, commands)
}

fn watched_database(
    mut options: ClientOptions,
    sends: impl Fn(CommandStartedEvent) + Send + Sync + 'static,
) -> Database {
    options.command_event_handler = Some(EventHandler::callback(move |event| {
        if let CommandEvent::Started(started) = event
            && !is_housekeeping(&started.command_name)
            && !started.command.get_str("find").is_ok_and(|it| it == "doclock.frozen")
            && !started.command.get_str("findAndModify").is_ok_and(|it| it == "doclock.server")
        {
            sends(started);
        }
    }));
    Client::with_options(options).expect("valid options").database(&fresh_name())
}

/// The names of the commands that a client sent, without the driver's own housekeeping.
#[derive(Clone, Debug, Default)]
pub(crate) struct Commands(Arc<Mutex<Vec<String>>>);

impl Commands {
    /// The commands sent since the last call, in order.
    pub(crate) fn take(&self) -> Vec<String> {
        mem::take(&mut self.0.lock().expect("no panic while locked"))
    }

    fn push(&self, name: String) {
        self.0.lock().expect("no panic while locked").push(name);
    }
}

/// A client on the current runtime that gives up after 5 s without a server.
pub(crate) async fn client(uri: &str) -> Client {
    Client::with_options(options(uri).await).expect("valid options")
}

/// Ends a client's background work. Waits no longer than this, because after a step-down the driver's
/// own shutdown was seen to hang forever.
pub(crate) async fn close(client: Client) {
    let _ = timeout(Duration::from_secs(2), client.shutdown().immediate(true)).await;
}

async fn options(uri: &str) -> ClientOptions {
    let mut options = ClientOptions::parse(uri).await.expect("a valid URI");
    options.server_selection_timeout = Some(Duration::from_secs(5));
    options
}

/// Commands that the driver sends on its own at any time.
fn is_housekeeping(command: &str) -> bool {
    matches!(
        command,
        "hello" | "isMaster" | "ismaster" | "ping" | "endSessions" | "saslStart" | "saslContinue"
    )
}

/// Starts the shared content of `cell`, once for all tests of the process.
///
/// It runs on its own thread and runtime. Each test that waits here has a runtime, and the first test
/// must not tie the others to a runtime that ends with it. A failure is shared too; otherwise each
/// waiting test would take its time to fail in the same way.
pub(crate) async fn share<T, F>(cell: &'static OnceLock<Option<T>>, start: fn() -> F) -> &'static T
where
    T: Send + Sync + 'static,
    F: Future<Output = T> + 'static,
{
    let started = spawn_blocking(move || {
        cell.get_or_init(|| {
            let run = move || Runtime::new().expect("a runtime").block_on(start());
            thread::spawn(run).join().ok()
        })
    });
    let shared = started.await.expect("a thread to wait on");
    shared.as_ref().expect("the shared server did not start; its own panic says why")
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
    static BUILT: Once = Once::new();
    // `cargo test --test suite` builds no examples.
    BUILT.call_once(|| {
        // With the features of this binary; otherwise each run would rebuild the examples.
        let mut features = vec!["test-util"];
        for (name, is_on) in [
            ("cli", cfg!(feature = "cli")),
            ("metrics", cfg!(feature = "metrics")),
            ("tracing", cfg!(feature = "tracing")),
        ] {
            features.extend(is_on.then_some(name));
        }
        let mut build = Command::new(env!("CARGO"));
        // Variables that cargo sets for a test of its package would rerun build scripts (ring's asks
        // for it) and rebuild everything that depends on them, here and once more in the next build.
        let of_package = |name: &str| {
            ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|prefix| name.starts_with(prefix))
        };
        for name in env::vars().map(|(name, _)| name).filter(|name| of_package(name)) {
            build.env_remove(name);
        }
        let built = build
            .args(["build", "--quiet", "--examples", "--features", &features.join(",")])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status();
        assert!(built.expect("cargo can be run").success());
    });
    // This binary is target/debug/deps/suite-….
    let this = env::current_exe().expect("a running binary");
    let target = this.ancestors().nth(2).expect("a target directory");
    target.join("examples").join(name)
}
