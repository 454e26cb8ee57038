//! A pool of workers that write incoming messages to one file for each data type. Each file allows only
//! one writer at a time: two at once would corrupt it. Writers of different types do not wait for each
//! other.
//!
//! `cargo run --example jobs -- workers` runs the workers as tasks of this process;
//! `cargo run --example jobs -- workers --mongodb mongodb://127.0.0.1/?replicaSet=rs0` runs them as separate
//! processes. With `--without-lock` the output shows the purpose of the lock.

use std::{
    collections::BTreeMap,
    env,
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use actix_doclock::{BoxError, LockKey, LockManager, Named, Wait};
use clap::Args;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, Command},
    sync::Barrier,
    time::sleep,
};

const WORKERS: usize = 4;
const TYPES: [&str; 2] = ["t1", "t2"];
/// For each worker and data type.
const MESSAGES: usize = 5;
/// The number of pieces in which the storage writes a message.
const PIECES: usize = 6;

#[derive(Args, Clone)]
pub(crate) struct Arguments {
    #[command(flatten)]
    locks: crate::support::Locks,
    /// Let the workers write without a lock.
    #[arg(long)]
    without_lock: bool,
    /// Be one of the worker processes.
    #[arg(long, hide = true, requires = "storage")]
    worker: Option<usize>,
    #[arg(long, hide = true)]
    storage: Option<PathBuf>,
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), BoxError> {
    if let (Some(worker), Some(storage)) = (arguments.worker, &arguments.storage) {
        return be_a_worker(&arguments, worker, storage).await;
    }
    let storage = env::temp_dir().join(format!("doclock-workers-{}", std::process::id()));
    fs::create_dir_all(&storage)?;
    if arguments.locks.mongodb.is_some() {
        run_as_processes(&storage).await?;
    } else {
        run_as_tasks(&arguments, &storage).await?;
    }
    let mut corrupted = false;
    for (file, (intact, found)) in check(&storage)? {
        let written = WORKERS * MESSAGES;
        println!("{file}: {intact} of {written} messages intact, {found} pieces found");
        corrupted |= intact < written;
    }
    fs::remove_dir_all(&storage)?;
    println!("{}", if corrupted { "corrupted" } else { "all files are sound" });
    Ok(())
}

async fn run_as_tasks(arguments: &Arguments, storage: &Path) -> Result<(), BoxError> {
    let start = Barrier::new(WORKERS);
    // Each worker has its own manager, as in separate processes.
    let servers = arguments.locks.servers(WORKERS, Duration::from_secs(30)).await?;
    let workers = servers.iter().enumerate().map(async |(worker, locks)| {
        locks.register::<Named>().await?;
        start.wait().await;
        work(arguments, locks, worker, storage).await?;
        locks.shutdown().await;
        Ok::<_, BoxError>(())
    });
    futures_util::future::try_join_all(workers).await?;
    Ok(())
}

async fn run_as_processes(storage: &Path) -> Result<(), BoxError> {
    let start = |worker: usize| {
        Command::new(env::current_exe()?)
            .args(env::args().skip(1))
            .args(["--worker", &worker.to_string(), "--storage"])
            .arg(storage)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
    };
    let mut workers: Vec<Child> = (0..WORKERS).map(start).collect::<Result<_, _>>()?;
    // All workers begin together.
    for worker in &mut workers {
        let output = worker.stdout.take().ok_or("no output of a worker")?;
        let ready = BufReader::new(output).lines().next_line().await?;
        ready.ok_or("a worker has ended before it was ready")?;
    }
    for worker in &mut workers {
        worker.stdin.take().ok_or("no input of a worker")?.write_all(b"go\n").await?;
    }
    for worker in &mut workers {
        if !worker.wait().await?.success() {
            return Err("a worker has failed".into());
        }
    }
    Ok(())
}

async fn be_a_worker(arguments: &Arguments, worker: usize, storage: &Path) -> Result<(), BoxError> {
    let servers = arguments.locks.servers(1, Duration::from_secs(30)).await?;
    let [locks] = &servers[..] else { return Err("one server was asked for".into()) };
    locks.register::<Named>().await?;
    println!("ready");
    BufReader::new(tokio::io::stdin()).lines().next_line().await?;
    work(arguments, locks, worker, storage).await?;
    locks.shutdown().await;
    Ok(())
}

/// Takes one message after another, and writes it to the file of its type.
async fn work(
    arguments: &Arguments,
    locks: &LockManager,
    worker: usize,
    storage: &Path,
) -> Result<(), BoxError> {
    let job = locks.job(format!("worker {worker}"));
    for message in 0..MESSAGES {
        for data_type in TYPES {
            let file = storage.join(data_type);
            let write = write(&file, worker, message);
            if arguments.without_lock {
                write.await?;
            } else {
                let key = LockKey::named(format!("storage/{data_type}"))?;
                job.with_lock(&key, Wait::until_acquired(), write).await??;
            }
        }
    }
    Ok(())
}

/// Writes a message piece by piece. Pieces of another writer may end up in between.
async fn write(file: &Path, worker: usize, message: usize) -> Result<(), BoxError> {
    let mut file = OpenOptions::new().create(true).append(true).open(file)?;
    for piece in 0..PIECES {
        writeln!(file, "{worker}/{message} {piece}")?;
        sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// For each file, the number of intact messages, and the number of pieces.
fn check(storage: &Path) -> Result<BTreeMap<String, (usize, usize)>, BoxError> {
    let mut found = BTreeMap::new();
    for file in TYPES {
        let content = fs::read_to_string(storage.join(file))?;
        let pieces: Vec<_> = content.lines().filter_map(|line| line.split_once(' ')).collect();
        let is_intact = |pieces: &&[(&str, &str)]| {
            pieces.len() == PIECES
                && pieces
                    .iter()
                    .enumerate()
                    .all(|(n, (message, piece))| *message == pieces[0].0 && *piece == n.to_string())
        };
        let intact = pieces.windows(PIECES).filter(is_intact).count();
        found.insert(file.to_owned(), (intact, pieces.len()));
    }
    Ok(found)
}
