//! The npm package, in Node.js.

use std::env;

use tokio::process::Command;

use crate::{
    load::{By, Contender},
    process::Process,
    report::Role,
    servers::Mongo,
};

pub const NPM: &str = "distributed-locks-mongodb 1.0.3 (Node.js)";

/// `None` without the variable `BENCH_NPM`, the directory into which `scripts/bench` has installed the package.
pub fn contender(at: &'static str, mongo: &Mongo) -> Option<Contender> {
    let dir = env::var("BENCH_NPM").ok().filter(|dir| !dir.is_empty())?;
    let mut node = Command::new("node");
    let process = Process::start(node.arg("peer.cjs").arg(mongo.uri()).current_dir(dir))?;
    let by = By::Process(process);
    Some(Contender { at, who: NPM.into(), role: Role::Peer, by, waits: false })
}
