//! The cost of a thousand event streams to one server, and the time from a release on another server to the event in
//! the pages.
//!
//! The server is a process of its own. This process holds the other ends of the streams, and takes and releases locks
//! without going through that server.

use std::{
    net::SocketAddr,
    process::Command,
    time::{Duration, Instant},
};

use actix_doclock::{LockManager, MongoStore, Wait, limits::Limits, lock_api};
use actix_session::{SessionMiddleware, storage::CookieSessionStore};
use actix_web::{App, HttpServer, cookie::Key, rt, web};
use mongodb::Client;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    sync::mpsc,
    task::spawn_blocking,
    time::sleep,
};

use super::{Bench, fresh};
use crate::{
    child::Child,
    load::Turn,
    meter,
    ours::{self, Page, key},
    report::{Role, Row},
    stats::Samples,
};

pub async fn measure(bench: &mut Bench<'_>) {
    let (streams, rounds) = bench.effort.pick((50, 5), (1_000, 200));
    let mongo = &bench.servers.one;
    let database = fresh(mongo).await;
    let mut server = Child::start(&["server", &mongo.uri(), database.name()]);
    let address: SocketAddr = server.line().await.parse().expect("its address");
    let pid = server.id().to_string();
    let locks = ours::on(&database).await;
    let key = key(Turn { task: 0, key: 0 });
    let (heard, mut hears) = mpsc::unbounded_channel();

    // One stream is open and in use before the memory is measured.
    tokio::spawn(listen(address, heard.clone()));
    sleep(Duration::from_secs(1)).await;
    locks.acquire(&key, Wait::no()).await.unwrap().release().await.unwrap();
    hears.recv().await.unwrap();
    let before = meter::resident(&pid);
    for _ in 1..streams {
        tokio::spawn(listen(address, heard.clone()));
    }
    sleep(Duration::from_secs(5)).await;
    let open = meter::resident(&pid);

    let (mut first, mut last) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let held = locks.acquire(&key, Wait::no()).await.unwrap();
        sleep(Duration::from_millis(50)).await;
        let began = Instant::now();
        held.release().await.unwrap();
        let mut at = Vec::new();
        for _ in 0..streams {
            at.push(hears.recv().await.unwrap() - began);
        }
        first.push(at[0]);
        last.push(at[streams - 1]);
    }
    let each = |now: u64| now.saturating_sub(before) as f64 / (streams - 1) as f64;
    let (open, used) = (each(open), each(meter::resident(&pid)));

    let began = Instant::now();
    let told = Command::new("kill").args(["-TERM", &pid]).status();
    assert!(told.is_ok_and(|it| it.success()));
    server.ended().await;
    let stop = began.elapsed().as_secs_f64() * 1e3;

    let row = |who| Row::new("streams", "one", who, Role::Ours).load(streams, 1);
    let memory = row("a stream").value("bytes_open", open).value("bytes_after_events", used);
    bench.report.add(memory.value("graceful_stop_ms", stop));
    bench.report.add(row("release → event, first page").samples(&Samples::of(first)));
    bench.report.add(row("release → event, last page").samples(&Samples::of(last)));
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

/// The server, on a runtime of actix-web.
pub async fn child(uri: String, database: String) {
    spawn_blocking(move || rt::System::new().block_on(serve(&uri, &database))).await.unwrap();
}

async fn serve(uri: &str, database: &str) {
    let client = Client::with_uri_str(uri).await.unwrap();
    // All of them are visitors of one address.
    let limits = Limits { event_streams_per_person: 4_096, ..Limits::default() };
    let locks = LockManager::builder(MongoStore::new(&client.database(database))).limits(limits);
    let locks = locks.build().await.unwrap();
    locks.register::<Page>().await.unwrap();
    let manager = locks.clone();
    let server = HttpServer::new(move || {
        let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
        let wrap = manager.session(session);
        App::new().wrap(wrap).service(web::scope("/locks").configure(lock_api))
    });
    let server = server.workers(2).bind("127.0.0.1:0").unwrap();
    println!("{}", server.addrs()[0]);
    locks.serve(server.run()).await.unwrap();
}
