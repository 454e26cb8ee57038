//! `doclock`: lists, watches and breaks the locks of a database, freezes collections, and finds problems
//! of the database.

use std::{
    error::Error,
    future::Future,
    io::{self, Write},
    process::ExitCode,
    time::Duration,
};

use actix_doclock::{LockError, LockManager, MongoStore, StoreError, StoreErrorKind};
use clap::{CommandFactory, Parser, error::ErrorKind};
use tokio::time::timeout;

use args::{Args, Command};

mod args;
mod broken;
mod doctor;
mod freeze;
mod id;
mod init;
mod locks;
mod output;
mod watch;

/// How a run ended, for the exit code.
enum Outcome {
    Done = 0,
    /// There are findings, or there is no such lock.
    NotSo = 1,
}

type Result<T = Outcome, E = Failure> = std::result::Result<T, E>;

/// Why a run has no outcome.
enum Failure {
    /// Exit code 2, as for clap's own errors.
    Usage(String),
    /// Exit code 3 if the database was not reached, otherwise 4.
    Store(StoreError),
    Output(io::Error),
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        match error {
            LockError::Store(error) => Self::Store(error),
            other => Self::Store(StoreError::new(StoreErrorKind::Other, other.to_string())),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// The longest wait for an answer. The driver itself has no limit for a server that stops answering.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let logged = env_logger::Env::default().default_filter_or("warn,actix_doclock::audit=info");
    env_logger::Builder::from_env(logged).init();
    match run(Args::parse()).await {
        Ok(outcome) => ExitCode::from(outcome as u8),
        Err(Failure::Usage(message)) => {
            Args::command().error(ErrorKind::ValueValidation, message).exit()
        }
        Err(Failure::Store(error)) => {
            tell(&with_causes(&error));
            ExitCode::from(if error.kind() == StoreErrorKind::Unavailable { 3 } else { 4 })
        }
        // The reader of the output has closed it.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(Failure::Output(error)) => {
            tell(&error.to_string());
            ExitCode::from(4)
        }
    }
}

async fn run(args: Args) -> Result {
    let store = connect(&args).await?;
    let json = args.json;
    match args.command {
        Command::List(list) => locks::list(&store, &list, json).await,
        Command::Show(which) => locks::show(&store, &which, json).await,
        Command::Break(what) => broken::break_lock(&store, &what, json).await,
        Command::Freeze(what) => freeze::freeze(&store, &what, json).await,
        Command::Thaw(what) => freeze::thaw(&store, &what, json).await,
        Command::Watch(of) => watch::watch(&store, &of, json).await,
        Command::Init(what) => init::init(&store, &what, json).await,
        Command::Doctor(what) => doctor::doctor(&store, &what, json).await,
    }
}

async fn connect(args: &Args) -> Result<MongoStore> {
    let needed = |value: &Option<String>, name| {
        value.clone().ok_or_else(|| Failure::Usage(format!("which database? give {name}")))
    };
    let uri = needed(&args.uri, "--uri URI, or better MONGODB_URI in the environment")?;
    let database =
        needed(&args.database, "--database NAME, or MONGODB_DATABASE in the environment")?;
    let connected = match answer(MongoStore::connect(&uri, &database)).await {
        // The server was not asked yet, so the URI is wrong.
        Err(Failure::Store(error)) if error.kind() == StoreErrorKind::Other => {
            Err(Failure::Usage(error.to_string()))
        }
        connected => connected,
    }?;
    match &args.application {
        None => Ok(connected),
        Some(name) => connected.named(name).map_err(|e| Failure::Usage(e.to_string())),
    }
}

/// All collections that have locks. There must be one: the name of the database may be mistyped.
async fn lock_collections(store: &MongoStore) -> Result<Vec<String>> {
    let all = answer(store.lock_collections()).await?;
    if all.is_empty() {
        return Err(Failure::Usage(format!(
            "there is no lock collection in the database `{}`, or its user may see none: is this its name? \
             `doclock doctor --collection NAME` says which rights the user lacks",
            store.database().name(),
        )));
    }
    Ok(all)
}

/// Opens all lock collections. Leaves out views and collections whose indexes the user may not read, and says so.
async fn attach_all(store: &MongoStore) -> Result<Vec<String>> {
    let (mut opened, mut denied) = (Vec::new(), None);
    for collection in lock_collections(store).await? {
        match answer(store.attach(&collection)).await {
            Ok(Some(_)) => opened.push(collection),
            Ok(None) => tell(&format!("`{collection}.lock` is left out: it is no collection")),
            Err(Failure::Store(e)) if e.kind() == StoreErrorKind::Denied => {
                tell(&format!("`{collection}.lock` is left out: {e}"));
                denied = Some(e);
            }
            Err(e) => return Err(e),
        }
    }
    match denied {
        Some(e) if opened.is_empty() => Err(e.into()),
        _ => Ok(opened),
    }
}

async fn attach(store: &MongoStore, collection: &str) -> Result<()> {
    match answer(store.attach(collection)).await? {
        Some(_) => Ok(()),
        None => Err(Failure::Usage(format!(
            "there is no collection `{collection}.lock` in the database `{}`",
            store.database().name(),
        ))),
    }
}

/// A manager without background work: the servers of the application do that.
async fn manager(store: &MongoStore) -> Result<LockManager> {
    let locks = LockManager::builder(store.clone()).without_reaper().break_policy(|_, _| true);
    locks.build().await.map_err(|e| Failure::Usage(e.to_string()))
}

/// The answer; `None` if the database user lacks the right to ask.
fn allowed<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Err(Failure::Store(e)) if e.kind() == StoreErrorKind::Denied => Ok(None),
        answer => answer.map(Some),
    }
}

/// The answer of the store, within the time limit.
async fn answer<T>(asked: impl Future<Output = Result<T, StoreError>>) -> Result<T> {
    answer_within(ANSWER_WITHIN, asked).await
}

async fn answer_within<T>(
    longest: Duration,
    asked: impl Future<Output = Result<T, StoreError>>,
) -> Result<T> {
    match timeout(longest, asked).await {
        Ok(answer) => Ok(answer?),
        Err(_) => {
            let message = format!("no answer from the database within {longest:?}");
            Err(StoreError::new(StoreErrorKind::Unavailable, message).into())
        }
    }
}

/// Writes to the person, not to the program that reads the output. If this fails, nobody can be told.
fn tell(message: &str) {
    let _ = writeln!(io::stderr(), "doclock: {}", output::printable(message));
}

fn with_causes(error: &StoreError) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // From there on the driver's text is for its own developers.
        message += &format!(": {}", text.split(", labels: ").next().unwrap_or_default());
        cause = error.source();
    }
    message
}
