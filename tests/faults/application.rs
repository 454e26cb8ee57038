//! An application server: a separate process, started from this same executable, that the tests pause
//! and kill. It acts as an application and records everything that it sees.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix_doclock::{EndReason, LockManager, Lockable, MongoStore, Named};
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;
use tokio::time::sleep;

use crate::history::{Event, History, name};

pub(crate) mod desk;
pub(crate) mod guards;
mod load;
mod script;
pub(crate) mod standstill;

/// The environment variable with a process's [`Config`].
const CONFIG: &str = "DOCLOCK_APPLICATION_SERVER";
/// The line that the process prints when it is ready.
pub(crate) const READY: &str = "application server is ready";
/// The entry in its history when it has ended without being killed.
pub(crate) const ENDED: &str = "ended";
/// The first entry in its history; the seconds of its wall clock follow.
pub(crate) const WALL_CLOCK: &str = "wall clock ";

/// The configuration of an application server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) uri: String,
    pub(crate) database: String,
    pub(crate) process: String,
    /// The directory for its history and for the signals of the test.
    pub(crate) dir: PathBuf,
    pub(crate) settings: Settings,
    pub(crate) role: Role,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) ttl: Duration,
    pub(crate) deadline: Duration,
    pub(crate) reaper: Option<Duration>,
}

impl Default for Settings {
    fn default() -> Self {
        let ttl = Duration::from_millis(1_500);
        let (deadline, reaper) = (Duration::from_secs(2), Some(Duration::from_millis(200)));
        Self { ttl, deadline, reaper }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Many sessions and jobs, all at random, until it is told to stop.
    Load { seed: u64, keys: usize, careless: bool },
    /// One session that follows these steps; see [`script`].
    Script { steps: Vec<String>, id: String },
    /// Locks before and after standstills of its machine; see [`standstill`].
    StandsStill { rounds: usize },
}

/// A document of the load: a counter, and the ids of the saves that have counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counter {
    #[serde(rename = "_id")]
    pub(crate) id: String,
    pub(crate) n: u64,
    pub(crate) by: Vec<String>,
}

macro_rules! collections {
    ($($name:ident: $collection:literal, fenced $fenced:literal, fair $fair:literal;)*) => {
        $(
            #[derive(Debug, Serialize, Deserialize)]
            pub(crate) struct $name(Counter);

            impl Lockable for $name {
                type Id = String;
                const COLLECTION: &'static str = $collection;
                const FENCED: bool = $fenced;
                const FAIR: bool = $fair;
            }
        )*
    };
}

collections! {
    Plain: "plain", fenced false, fair false;
    Fenced: "fenced", fenced true, fair false;
    Fair: "fair", fenced false, fair true;
    FairFenced: "fairfenced", fenced true, fair true;
}

/// The collections with documents.
pub(crate) const DOCUMENTS: [&str; 2] = [Plain::COLLECTION, Fenced::COLLECTION];
/// The collections with names only, for jobs.
pub(crate) const NAMES: [&str; 3] = [Named::COLLECTION, Fair::COLLECTION, FairFenced::COLLECTION];

/// A running application server, seen from the inside.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    pub(crate) locks: LockManager,
    pub(crate) store: MongoStore,
    pub(crate) history: Arc<History>,
    pub(crate) dir: PathBuf,
    pub(crate) settings: Settings,
}

impl Server {
    /// Connects like an application, and registers all collections.
    pub(crate) async fn start(config: &Config) -> Self {
        let path = config.dir.join(format!("{}.jsonl", config.process));
        let history = Arc::new(History::create(&path, &config.process));
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        history.say(format!("{WALL_CLOCK}{}", wall.as_secs()));
        let store = loop {
            match MongoStore::connect(&config.uri, &config.database).await {
                Ok(store) => break store,
                // It may be restarted during an outage.
                Err(e) => history.say(format!("cannot connect: {e}")),
            }
            sleep(Duration::from_millis(200)).await;
        };
        let Settings { ttl, deadline, reaper } = config.settings;
        let builder = LockManager::builder(store.clone()).ttl(ttl).deadline(deadline);
        let builder = match reaper {
            None => builder.without_reaper(),
            Some(interval) => builder.reaper_interval(interval),
        };
        let heard = Arc::clone(&history);
        let builder = builder.on_session_end(move |ended| {
            if ended.reason == EndReason::Expired {
                let (aid, keys) = (ended.aid.as_str().to_owned(), ended.locks.iter().map(name));
                heard.write(heard.next_op(), Event::Idle { aid, keys: keys.collect() });
            }
            async { Ok(()) }
        });
        let locks = builder.build().await.unwrap();
        while let Err(e) = register(&locks).await {
            history.say(format!("cannot register: {e}"));
            sleep(Duration::from_millis(200)).await;
        }
        let (dir, settings) = (config.dir.clone(), config.settings);
        Self { locks, store, history, dir, settings }
    }

    /// Waits for a signal of the test: a file with this name.
    pub(crate) async fn told(&self, name: &str) {
        while !self.dir.join(name).exists() {
            sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn register(locks: &LockManager) -> Result<(), actix_doclock::LockError> {
    locks.register::<Plain>().await?;
    locks.register::<Fenced>().await?;
    locks.register::<Fair>().await?;
    locks.register::<FairFenced>().await?;
    locks.register::<Named>().await
}

/// The whole life of the process.
#[test]
#[ignore = "the other tests start it, as a process of its own"]
fn application_server() {
    let Ok(config) = env::var(CONFIG) else { return };
    let config: Config = serde_json::from_str(&config).expect("a configuration");
    Runtime::new().expect("a runtime").block_on(async {
        println!("{READY}");
        let server = Server::start(&config).await;
        match config.role {
            Role::Load { seed, keys, careless } => load::run(&server, seed, keys, careless).await,
            Role::Script { steps, id } => script::run(&server, &steps, &id).await,
            Role::StandsStill { rounds } => standstill::run(&server, rounds).await,
        }
        server.locks.shutdown().await;
        server.history.say(ENDED);
    });
}

/// The environment of the process.
pub(crate) fn environment(config: &Config) -> String {
    format!("{CONFIG}={}", serde_json::to_string(config).expect("plain data"))
}

pub(crate) const ARGUMENTS: &[&str] =
    &["--exact", "application::application_server", "--ignored", "--nocapture", "--test-threads=1"];
