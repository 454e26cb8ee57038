//! Measures the cost of a thousand event streams to one server, and the time from a release on another
//! server to the event in the pages: `cargo bench --features test-util --bench streams [-- <streams>]`.
//! One minute.
//!
//! The server is a separate process. Its database is a replica set with one member that the benchmark
//! starts. This process holds the other ends of the streams. It takes and releases locks without going
//! through that server.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use std::{
    env, fs,
    net::SocketAddr,
    process::Stdio,
    time::{Duration, Instant},
};

use actix_doclock::{LockKey, LockManager, MongoStore, Named, Wait, lock_api};
use actix_session::{SessionMiddleware, storage::CookieSessionStore};
use actix_web::{App, HttpServer, cookie::Key, web};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    process::Command,
    sync::mpsc,
    time::sleep,
};

const STREAMS: usize = 1_000;
const ROUNDS: usize = 200;

#[actix_web::main]
async fn main() {
    let arguments: Vec<_> = env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    if let [role, uri, database] = &arguments[..]
        && role == "server"
    {
        return serve(uri, database).await;
    }
    let streams = arguments.first().map_or(STREAMS, |n| n.parse().expect("a number of streams"));
    let server = rig::mongod::shared_replica_set().await;
    measure(server.uri(), &rig::fresh_name(), streams).await;
}

async fn manager(uri: &str, database: &str) -> LockManager {
    let store = MongoStore::new(&rig::client(uri).await.database(database));
    let locks = LockManager::builder(store).without_reaper().build().await.unwrap();
    locks.register::<Named>().await.unwrap();
    locks
}

async fn serve(uri: &str, database: &str) {
    let locks = manager(uri, database).await;
    let manager = locks.clone();
    let server = HttpServer::new(move || {
        let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
        App::new().wrap(manager.session(session)).service(web::scope("/locks").configure(lock_api))
    });
    let server = server.workers(2).bind("127.0.0.1:0").unwrap();
    println!("{}", server.addrs()[0]);
    locks.serve(server.run()).await.unwrap();
}

async fn measure(uri: &str, database: &str, streams: usize) {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["server", uri, database])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    let address: SocketAddr = said.next_line().await.unwrap().unwrap().parse().unwrap();
    let pid = child.id().unwrap();
    let locks = manager(uri, database).await;
    let key = LockKey::named("shown").unwrap();
    let (heard, mut hears) = mpsc::unbounded_channel();

    // One stream is open and in use before the memory is measured.
    tokio::spawn(listen(address, heard.clone()));
    sleep(Duration::from_secs(1)).await;
    locks.acquire(&key, Wait::no()).await.unwrap().release().await.unwrap();
    hears.recv().await.unwrap();
    let before = memory(pid);
    for _ in 1..streams {
        tokio::spawn(listen(address, heard.clone()));
    }
    sleep(Duration::from_secs(5)).await;
    let open = memory(pid);

    let (mut first, mut last) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let held = locks.acquire(&key, Wait::no()).await.unwrap();
        sleep(Duration::from_millis(50)).await;
        let began = Instant::now();
        held.release().await.unwrap();
        let mut at = Vec::new();
        for _ in 0..streams {
            at.push(hears.recv().await.unwrap().duration_since(began).as_secs_f64() * 1e3);
        }
        first.push(at[0]);
        last.push(at[streams - 1]);
    }
    let busy = memory(pid);

    println!("{streams} streams of events held by one server\n");
    println!("| | |\n|---|---|");
    println!("| memory of the server with one stream | {before} KiB |");
    println!("| memory for each stream more, open | {:.1} KiB |", per(open, before, streams));
    println!("| and after {ROUNDS} events | {:.1} KiB |", per(busy, before, streams));
    println!("\nFrom before the release on another server to the event in a page, in ms\n");
    println!("| | rounds | p50 | p90 | p99 | max |\n|---|---|---|---|---|---|");
    report("the first page", first);
    report(&format!("the last of {streams}"), last);

    let began = Instant::now();
    let killed = Command::new("kill").args(["-TERM", &pid.to_string()]).status().await.unwrap();
    assert!(killed.success());
    child.wait().await.unwrap();
    println!(
        "\ngraceful stop with all of them open: {:.0} ms",
        began.elapsed().as_secs_f64() * 1e3
    );
}

/// Reports when each release was heard.
async fn listen(address: SocketAddr, heard: mpsc::UnboundedSender<Instant>) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /locks/events HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut lines = BufReader::new(stream).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if line == "event: released" {
            let _ = heard.send(Instant::now());
        }
    }
}

/// The memory of the process, in KiB.
fn memory(pid: u32) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn per(now: usize, before: usize, streams: usize) -> f64 {
    now.saturating_sub(before) as f64 / (streams - 1).max(1) as f64
}

fn report(what: &str, mut took: Vec<f64>) {
    took.sort_by(f64::total_cmp);
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    println!(
        "| {what} | {} | {:.2} | {:.2} | {:.2} | {:.2} |",
        took.len(),
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0)
    );
}
