//! The speed proof of actix-doclock: see `scripts/bench`.
//!
//! ```text
//! doclock-bench [--quick] [--only MEASURE,…] [--ours]   starts all servers, measures, writes JSON and the page
//! doclock-bench --render [--quick]             writes the page again from the JSON of the last such run
//! doclock-bench --scale [--minutes N] [--short] [--only PART,…]   see `scripts/bench --scale`
//! ```

mod about;
mod child;
mod count;
mod floors;
mod load;
mod measures;
mod meter;
mod ours;
mod page;
mod peers;
mod plot;
mod report;
mod scale;
mod servers;
mod stats;
mod table;

use std::{env, path::Path, process::ExitCode, time::Instant};

use crate::{
    measures::{Bench, Effort},
    report::Report,
    servers::Servers,
};

#[global_allocator]
static COUNTED: count::Counted = count::Counted;

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let only = arguments.iter().position(|argument| argument == "--only");
    let only = only.and_then(|at| arguments.get(at + 1)).map(String::as_str);

    if arguments.first().is_some_and(|first| first == child::FLAG) {
        measures::child(&arguments[1..]).await;
        return ExitCode::SUCCESS;
    }
    if has("--spin") {
        scale::spin();
        return ExitCode::SUCCESS;
    }
    if has("--scale") {
        return scale::run(&arguments).await;
    }
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("beside the crate");
    let target = repository.join("bench/target");
    let is_whole = only.is_none() && !has("--quick");
    // The results of a part, or of a hasty run, are not for others to read.
    let (raw, docs) = if is_whole {
        (target.join("results.json"), repository.join("docs/evidence"))
    } else {
        (target.join("results-in-part.json"), target.join("evidence"))
    };
    if !has("--render") {
        let effort = if has("--quick") { Effort::Quick } else { Effort::Full };
        measure(&mut Report::default(), effort, only, has("--ours"), &raw).await;
    }
    let report = Report::read(&raw).expect("the results of an earlier run");
    page::write(&report, &repository.join("bench/page.md"), &docs);
    eprintln!("{} and its plots", docs.join("benchmarks.md").display());
    ExitCode::SUCCESS
}

async fn measure(
    report: &mut Report,
    effort: Effort,
    only: Option<&str>,
    without_peers: bool,
    raw: &Path,
) {
    let began = Instant::now();
    let servers = Servers::start().await;
    about::machine(report, &servers);
    let mut bench = Bench { servers: &servers, report, effort, without_peers };
    let named = |name: &str| only.is_some_and(|only| only.split(',').any(|part| part == name));
    let of_page = measures::ALL.iter().filter(|(name, _)| only.is_none() || named(name));
    for (name, measure) in of_page.chain(measures::OTHERS.iter().filter(|(name, _)| named(name))) {
        let started = Instant::now();
        measure(&mut bench).await;
        eprintln!("— {name}: {:.0} s", started.elapsed().as_secs_f64());
        // Written after each measure, in case a later one fails.
        bench.report.write(raw).expect("a file can be written");
    }
    let minutes = format!("{:.0}", began.elapsed().as_secs_f64() / 60.0);
    report.about.insert("minutes".into(), minutes);
    report.write(raw).expect("a file can be written");
}
