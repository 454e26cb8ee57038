//! Many sessions and jobs at random: each reads, modifies and writes under a lock. Some pauses are
//! longer than the ttl; without them a test would find nothing.

use std::time::Duration;

use actix_doclock::LockKey;
use fastrand::Rng;
use futures_util::future::join_all;
use tokio::time::sleep;

use super::desk::Desk;
use super::guards;
use super::{DOCUMENTS, NAMES, Server};
use crate::rig::depth;

const SESSIONS: usize = 5;
const JOBS: usize = 3;
const STOP: &str = "stop";

/// Runs until the test says `stop`.
pub(super) async fn run(server: &Server, seed: u64, keys: usize, careless: bool) {
    let mut seeds = Rng::with_seed(seed);
    let sessions = (0..SESSIONS).map(|_| {
        let worker = Worker { server: server.clone(), rng: seeds.fork(), keys, careless };
        tokio::spawn(worker.edit())
    });
    let sessions: Vec<_> = sessions.collect();
    let jobs: Vec<_> = (0..JOBS)
        .map(|_| {
            let worker = Worker { server: server.clone(), rng: seeds.fork(), keys, careless };
            tokio::spawn(worker.work())
        })
        .collect();
    for ended in join_all(sessions.into_iter().chain(jobs)).await {
        ended.expect("no worker panics");
    }
}

/// One worker, which does everything at random.
struct Worker {
    server: Server,
    rng: Rng,
    keys: usize,
    careless: bool,
}

impl Worker {
    fn goes_on(&self) -> bool {
        !self.server.dir.join(STOP).exists()
    }

    fn key(&mut self, collections: &[&str]) -> LockKey {
        let collection = collections[self.rng.usize(..collections.len())];
        LockKey::new(collection, self.rng.usize(..self.keys).to_string().as_str()).unwrap()
    }

    async fn millis(&mut self, range: std::ops::Range<u64>) {
        sleep(Duration::from_millis(self.rng.u64(range))).await;
    }

    /// A short pause between two steps. At a commit the pause is four times longer, so that the load leaves the processor to
    /// other tests.
    fn pause(&mut self, millis: std::ops::Range<u64>) -> Duration {
        let calm = if depth() == 1 { 4 } else { 1 };
        Duration::from_millis(calm * self.rng.u64(millis))
    }

    /// Sleeps for longer than the ttl of a lock that is not renewed.
    async fn longer_than_the_ttl(&mut self) {
        let more = Duration::from_millis(self.rng.u64(10..400));
        sleep(self.server.settings.ttl + more).await;
    }

    /// A session: opens a document, thinks, saves, closes.
    async fn edit(mut self) {
        let mut desk = Desk::new(&self.server);
        while self.goes_on() {
            let key = self.key(&DOCUMENTS);
            let Some(lock) = desk.acquire(&key).await else {
                sleep(self.pause(2..40)).await;
                if !desk.is_certain() {
                    desk = Desk::new(&self.server);
                }
                continue;
            };
            if let Some(loaded) = desk.load(&key).await {
                match self.rng.u8(..100) {
                    0..4 => self.longer_than_the_ttl().await,
                    4..10 => {
                        self.millis(0..600).await;
                        desk.renew(&lock).await;
                        self.millis(0..1200).await;
                    }
                    _ => sleep(self.pause(0..15)).await,
                }
                if self.careless {
                    desk.save_unguarded(&lock, loaded).await;
                } else {
                    let _ = desk.save(&lock, loaded).await;
                }
            }
            match self.rng.u8(..100) {
                // The page was closed without a release.
                0..2 => desk = Desk::new(&self.server),
                2..10 => {
                    desk.log_out(&lock).await;
                    desk = Desk::new(&self.server);
                }
                _ => desk.release(&lock).await,
            }
            // The renewed lock must be the only lock of the session.
            if !desk.is_certain() {
                desk = Desk::new(&self.server);
            }
        }
    }

    /// A job: waits for a name, holds it for a while, gives it back.
    async fn work(mut self) {
        while self.goes_on() {
            let key = self.key(&NAMES);
            let shared = self.rng.u8(..3) == 0;
            let hold = match self.rng.u8(..100) {
                // So long that the lock has to be renewed.
                0..10 => self.server.settings.ttl * 2,
                _ => self.pause(0..60),
            };
            guards::hold(&self.server, &key, shared, hold).await;
            sleep(self.pause(0..20)).await;
        }
    }
}
