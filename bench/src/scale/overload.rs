//! More than can be served, beside a machine that is busy with other things: callers who ask again and again, and
//! a database that stands still for three seconds.

use std::{
    env,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::available_parallelism,
    time::Duration,
};

use actix_doclock::{Aid, Holder, LockError, LockManager, StoreErrorKind, TryAcquire};
use actix_web::{ResponseError, http::header::RETRY_AFTER};
use futures_util::future::join_all;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout};

use super::{Set, Size, costs::key, site};
use crate::{load::Random, measures::fresh};

/// Busy loops for each core.
const BUSY: usize = 2;
/// How long a busy loop lives, should nobody end it.
const LONGEST: Duration = Duration::from_secs(900);
const CALLERS: [usize; 4] = [64, 256, 800, MOST];
const MOST: usize = 8_000;
const STILL: Duration = Duration::from_secs(3);
const TICK: Duration = Duration::from_millis(10);
/// The throughput of [the most callers](MOST), patient or not, as a part of the best.
const UNDER_LOAD: f64 = 0.7;
/// The throughput within [`SOON`] after the stall, as a part of the best second before it.
const AFTERWARDS: f64 = 0.75;
const SOON: usize = 5;

/// A process that uses a core. It is ended when this value is dropped.
struct BusyLoop(Child);

impl BusyLoop {
    fn start() -> Self {
        let program = env::current_exe().expect("the path of this program");
        let spins = Command::new(program).arg("--spin").stdin(Stdio::null()).spawn();
        Self(spins.expect("a process can be started"))
    }
}

impl Drop for BusyLoop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A busy loop, for a process of its own.
pub fn spin() {
    let began = std::time::Instant::now();
    while began.elapsed() < LONGEST {
        std::hint::spin_loop();
    }
}

#[derive(Debug, Default)]
struct Counts {
    locked: AtomicU64,
    refused: AtomicU64,
    /// Any other error.
    failed: AtomicU64,
}

impl Counts {
    fn now(&self) -> [u64; 3] {
        [&self.locked, &self.refused, &self.failed].map(|it| it.load(Relaxed))
    }

    fn count(&self, done: &Result<(), LockError>) {
        let of = match done {
            Ok(()) => &self.locked,
            Err(LockError::Store(e)) if e.kind() == StoreErrorKind::Overloaded => &self.refused,
            Err(_) => &self.failed,
        };
        of.fetch_add(1, Relaxed);
    }
}

pub async fn measure(set: &Set, size: Size) -> bool {
    let mut is_good = true;
    for busy in [0, BUSY] {
        let cores = available_parallelism().map_or(1, usize::from);
        let _loops: Vec<_> = (0..busy * cores).map(|_| BusyLoop::start()).collect();
        let beside = if busy == 0 { "idle" } else { "busy" };
        let (best, most) = closed_loops(set, size, beside).await;
        let ratio = most / best;
        println!(
            "[{}] overload, {beside} machine: under the most callers {ratio:.2} of the best",
            set.at
        );
        let recovered = stall(set, size, beside, best).await;
        is_good &= busy == 0 || ratio >= UNDER_LOAD && recovered >= AFTERWARDS;
    }
    is_good
}

/// The best throughput, and that of the most callers.
async fn closed_loops(set: &Set, size: Size, beside: &str) -> (f64, f64) {
    let (mut best, mut most) = (0_f64, f64::MAX);
    let patient = CALLERS.map(|callers| (callers, true));
    for (callers, is_patient) in patient.into_iter().chain([(MOST, false)]) {
        let database = fresh(&set.mongo).await;
        let locks = site::manager(&database).await;
        let (counts, is_over) = (Arc::<Counts>::default(), Arc::<AtomicBool>::default());
        let tasks: Vec<_> = (0..callers)
            .map(|n| {
                let (locks, counts, is_over) = (locks.clone(), counts.clone(), is_over.clone());
                tokio::spawn(async move { calls(&locks, n, is_patient, &counts, &is_over).await })
            })
            .collect();
        sleep(size.pick(Duration::from_secs(3), Duration::from_secs(6))).await;
        let (before, began) = (counts.now(), Instant::now());
        sleep(size.pick(Duration::from_secs(5), Duration::from_secs(12))).await;
        let (after, seconds) = (counts.now(), began.elapsed().as_secs_f64());
        is_over.store(true, Relaxed);
        let [locked, refused, failed] = [0, 1, 2].map(|n| (after[n] - before[n]) as f64 / seconds);
        println!(
            "[{}] overload, {beside} machine: {callers} callers (patient: {is_patient}) get {locked:.0} locks a second, {refused:.0} \
             refusals, {failed:.0} other errors",
            set.at
        );
        let _ = timeout(Duration::from_secs(60), join_all(tasks)).await;
        locks.shutdown().await;
        let _ = database.drop().await;
        best = best.max(locked);
        if callers == MOST {
            most = most.min(locked);
        }
    }
    (best, most)
}

/// Takes a lock and gives it back, again and again. A patient caller that is refused waits as long as it is told.
async fn calls(
    locks: &LockManager,
    n: usize,
    is_patient: bool,
    counts: &Counts,
    is_over: &AtomicBool,
) {
    let (aid, mut random) = (Aid::new(), Random::of(n));
    while !is_over.load(Relaxed) {
        let done = cycle(locks, n, &aid).await;
        counts.count(&done);
        if let Err(refused) = done
            && is_patient
        {
            let pause = retry_after(&refused).as_millis() as usize;
            sleep(Duration::from_millis((pause / 2 + random.below(pause)) as u64)).await;
        }
    }
}

async fn cycle(locks: &LockManager, n: usize, aid: &Aid) -> Result<(), LockError> {
    let got = locks.lock_for_session(&key(n), aid, &Holder::new("alice")).await?;
    let lock = match got {
        TryAcquire::Granted(lock) | TryAcquire::AlreadyMine(lock) => lock,
        TryAcquire::Held(lock) => return Err(LockError::Held(Box::new(lock))),
        TryAcquire::Lost(key) => panic!("{key:?} was not upgraded"),
    };
    locks.release(&lock).await?;
    Ok(())
}

/// As a client of the web application is told.
fn retry_after(refused: &LockError) -> Duration {
    let answer = refused.error_response();
    let seconds = answer.headers().get(RETRY_AFTER).and_then(|it| it.to_str().ok()?.parse().ok());
    Duration::from_secs(seconds.unwrap_or(1))
}

/// Three quarters of the best, at a constant rate. Returns the best second within [`SOON`] after the stall, as a part
/// of the best one before it.
async fn stall(set: &Set, size: Size, beside: &str, best: f64) -> f64 {
    let rate = best * 0.75;
    let database = fresh(&set.mongo).await;
    let locks = site::manager(&database).await;
    let (counts, is_over) = (Arc::<Counts>::default(), Arc::<AtomicBool>::default());
    let arrivals = tokio::spawn({
        let (locks, counts, is_over) = (locks.clone(), counts.clone(), is_over.clone());
        async move {
            let (began, mut arrived) = (Instant::now(), 0);
            let mut tick = interval(TICK);
            tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
            while !is_over.load(Relaxed) {
                tick.tick().await;
                while arrived < (began.elapsed().as_secs_f64() * rate) as usize {
                    arrived += 1;
                    let (locks, counts, n) = (locks.clone(), counts.clone(), arrived % 100_000);
                    tokio::spawn(async move {
                        counts.count(&cycle(&locks, n, &Aid::new()).await);
                    });
                }
            }
        }
    });
    let seconds = size.pick(5, 10);
    sleep(Duration::from_secs(3)).await;
    let normal = each_second(&counts, seconds).await;
    let members = set.mongo.processes().await;
    signal("-STOP", &members);
    sleep(STILL).await;
    signal("-CONT", &members);
    let after = each_second(&counts, 2 * seconds).await;
    is_over.store(true, Relaxed);
    let _ = arrivals.await;
    locks.shutdown().await;
    let _ = database.drop().await;
    let of = |some: &[[u64; 3]]| some.iter().map(|it| it[0]).max().unwrap_or_default() as f64;
    println!(
        "[{}] overload, {beside} machine: at {rate:.0} a second {normal:?} (locks, refusals, other errors) in each second, after \
         {STILL:?} of a database that stands still {after:?}",
        set.at
    );
    let recovered = of(&after[..SOON.min(after.len())]) / of(&normal);
    let lasting = of(&after[SOON.min(after.len() - 1)..]) / of(&normal);
    println!(
        "[{}] overload, {beside} machine: within {SOON} s after it {recovered:.2} of the best second before, later \
         {lasting:.2}",
        set.at
    );
    recovered.min(lasting)
}

async fn each_second(counts: &Counts, seconds: usize) -> Vec<[u64; 3]> {
    let (mut before, mut all) = (counts.now(), Vec::new());
    let began = Instant::now();
    for second in 1..=seconds {
        sleep_until(began + Duration::from_secs(second as u64)).await;
        let now = counts.now();
        all.push([0, 1, 2].map(|n| now[n] - before[n]));
        before = now;
    }
    all
}

fn signal(name: &str, processes: &[i64]) {
    for pid in processes {
        let sent = Command::new("kill").args([name, &pid.to_string()]).status();
        assert!(sent.is_ok_and(|it| it.success()), "{name} {pid}");
    }
}
