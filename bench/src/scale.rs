//! How many people edit at once: the cost of each verb, and a load that is compared with them.
//!
//! The parts run in this order. The costs of one node are kept in a file, so that a load alone can be compared
//! with the costs of an earlier run.

mod costs;
mod load;
mod many;
mod memory;
mod overload;
mod ratios;
mod renewals;
mod site;

use std::{fs, path::Path, process::ExitCode, time::Duration};

use actix_web::rt;
use tokio::task::spawn_blocking;

use crate::{meter::Meter, servers::Mongo};
use costs::Unit;
pub use overload::spin;

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// To try whether all of it works.
    is_short: bool,
    minutes: u64,
}

impl Size {
    fn pick<T>(self, short: T, full: T) -> T {
        if self.is_short { short } else { full }
    }
}

/// A replica set that is measured, and the processor time that it uses when idle.
pub struct Set {
    at: &'static str,
    mongo: Mongo,
    meter: Meter,
    /// Cores.
    idle: f64,
}

impl Set {
    async fn start(at: &'static str, members: usize, size: Size) -> Self {
        let mongo = Mongo::start(members).await;
        let meter = Meter::new(mongo.processes().await);
        // After the start, the members still build their own collections.
        tokio::time::sleep(size.pick(Duration::from_secs(2), Duration::from_secs(15))).await;
        let before = meter.read();
        tokio::time::sleep(size.pick(Duration::from_secs(3), Duration::from_secs(30))).await;
        let idle = meter.read().since(&before).mongod_cores();
        println!("[{at}] MongoDB {}, idle: {:.2} % of a core", mongo.version, idle * 100.0);
        Self { at, mongo, meter, idle }
    }
}

pub async fn run(arguments: &[String]) -> ExitCode {
    let value_of = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag)?;
        arguments.get(at + 1).cloned()
    };
    let is_short = arguments.iter().any(|argument| argument == "--short");
    let minutes = value_of("--minutes").map(|it| it.parse().expect("a number of minutes"));
    let size = Size { is_short, minutes: minutes.unwrap_or(15).clamp(1, 24 * 60) };
    let only = value_of("--only");
    let wants = |part: &str| {
        only.as_deref().is_none_or(|only| only.split(',').any(|wanted| wanted == part))
    };

    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
    let file = target.join(if is_short { "scale-short.json" } else { "scale.json" });
    let mut is_good = true;
    for (at, members) in [("one", 1), ("three", 3)] {
        let only_on_one = ["memory", "load", "overload"];
        let has_part = ["costs", "ratios", "reads", "renewals", "many"].into_iter().any(wants);
        if !(has_part || members == 1 && only_on_one.into_iter().any(wants)) {
            continue;
        }
        let set = Set::start(at, members, size).await;
        if wants("costs") {
            let units = costs::measure(&set, size).await;
            if members == 1 {
                let text = serde_json::to_string_pretty(&units).expect("plain data");
                fs::write(&file, text).expect("a file can be written");
            }
        }
        if wants("ratios") {
            ratios::measure(&set, size).await;
        }
        if wants("reads") {
            ratios::reads(&set, size).await;
        }
        if wants("renewals") {
            renewals::measure(&set, size).await;
        }
        if wants("many") {
            many::measure(&set, size).await;
        }
        if members == 1 && wants("memory") {
            memory::measure(&set, size).await;
        }
        if members == 1 && wants("overload") {
            is_good &= overload::measure(&set, size).await;
        }
        if members == 1 && wants("load") {
            let text = fs::read_to_string(&file).expect("the costs of this or of an earlier run");
            let units: Vec<Unit> = serde_json::from_str(&text).expect("as they were written");
            is_good &= load::measure(&set, size, units).await;
        }
    }
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs this on a thread of its own with actix's runtime. The managers stay on the runtime that built them.
async fn on_a_thread<T, F>(work: impl FnOnce() -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    spawn_blocking(|| rt::System::new().block_on(work())).await.expect("no panic")
}
