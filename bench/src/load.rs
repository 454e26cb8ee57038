//! A number of tasks that take and give back locks as fast as they can, for a while.

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::{BoxFuture, join_all};

use crate::{report::Role, stats::Samples};

/// Takes the lock on a key for a task and gives it back; false if another contender has it.
pub type Cycle = Arc<dyn Fn(Turn) -> BoxFuture<'static, bool> + Send + Sync>;

#[derive(Debug, Clone, Copy)]
pub struct Turn {
    pub task: usize,
    pub key: usize,
}

impl Turn {
    /// The same names for every contender.
    pub fn name(self) -> String {
        format!("document-{:05}", self.key)
    }
}

pub fn cycle<F>(cycle: impl Fn(Turn) -> F + Send + Sync + 'static) -> Cycle
where
    F: Future<Output = bool> + Send + 'static,
{
    Arc::new(move |turn| Box::pin(cycle(turn)))
}

/// A participant in the comparison.
pub struct Contender {
    pub at: &'static str,
    pub who: String,
    pub role: Role,
    cycle: Cycle,
    /// Whether it waits where others ask again and again. A contender that waits has no uncontended
    /// rows of its own.
    pub waits: bool,
}

impl Contender {
    pub fn new(at: &'static str, who: &str, role: Role, cycle: Cycle) -> Self {
        Self { at, who: who.into(), role, cycle, waits: false }
    }

    pub fn waiting(mut self) -> Self {
        self.waits = true;
        self
    }

    pub async fn load(&self, tasks: usize, keys: usize, time: Duration) -> Samples {
        load(&self.cycle, tasks, keys, time).await
    }
}

async fn load(cycle: &Cycle, tasks: usize, keys: usize, time: Duration) -> Samples {
    let began = Instant::now();
    let until = began + time;
    let tasks = (0..tasks).map(|task| {
        let cycle = cycle.clone();
        tokio::spawn(async move {
            let mut samples = Samples::default();
            let mut random = Random::of(task);
            loop {
                let from = Instant::now();
                if from >= until {
                    return samples;
                }
                let turn = Turn { task, key: random.below(keys) };
                if cycle(turn).await {
                    samples.took.push(from.elapsed().as_secs_f32() * 1e6);
                } else {
                    samples.refused += 1;
                }
            }
        })
    });
    let mut all = Samples::default();
    for samples in join_all(tasks).await {
        all.add(samples.expect("no panic"));
    }
    // Includes the last cycles, because they were counted.
    all.elapsed = began.elapsed();
    all
}

/// Marsaglia's xorshift: the same keys in the same order in every run.
pub struct Random(u64);

impl Random {
    pub fn of(seed: usize) -> Self {
        Self((seed as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}
