//! Many sessions and jobs at random: a read-modify-write under a lock, with pauses longer than the
//! lock lives, without which a test sees nothing.

use std::time::Duration;

use actix_doclock::LockKey;
use fastrand::Rng;
use futures_util::future::join_all;
use tokio::time::sleep;

use super::desk::Desk;
use super::guards;
use super::{DOCUMENTS, NAMES, Server};

const SESSIONS: usize = 5;
const JOBS: usize = 3;
const STOP: &str = "stop";

/// Until the test says `stop`.
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

/// One at work, all at random.
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

    /// Longer than a lock lives that is not renewed.
    async fn longer_than_the_ttl(&mut self) {
        let more = Duration::from_millis(self.rng.u64(10..400));
        sleep(self.server.settings.ttl + more).await;
    }

    /// Sessions: open a document, think, save, close.
    async fn edit(mut self) {
        let mut desk = Desk::new(&self.server);
        while self.goes_on() {
            let key = self.key(&DOCUMENTS);
            let Some(lock) = desk.acquire(&key).await else {
                self.millis(2..40).await;
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
                    _ => self.millis(0..15).await,
                }
                if self.careless {
                    desk.save_unguarded(&lock, loaded).await;
                } else {
                    let _ = desk.save(&lock, loaded).await;
                }
            }
            match self.rng.u8(..100) {
                // Closed without a word.
                0..2 => desk = Desk::new(&self.server),
                2..10 => {
                    desk.log_out(&lock).await;
                    desk = Desk::new(&self.server);
                }
                _ => desk.release(&lock).await,
            }
            // What was renewed is to be the one lock that the session has.
            if !desk.is_certain() {
                desk = Desk::new(&self.server);
            }
        }
    }

    /// Jobs: wait for a name, hold it for a while, give it back.
    async fn work(mut self) {
        while self.goes_on() {
            let key = self.key(&NAMES);
            let shared = self.rng.u8(..3) == 0;
            let hold = match self.rng.u8(..100) {
                // So that it has to be renewed.
                0..10 => self.server.settings.ttl * 2,
                _ => Duration::from_millis(self.rng.u64(0..60)),
            };
            guards::hold(&self.server, &key, shared, hold).await;
            self.millis(0..20).await;
        }
    }
}
