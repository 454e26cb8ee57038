//! The npm package, in a separate process that receives its orders line by line.

use std::{env, process::Stdio, time::Duration};

use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::Mutex,
};

use crate::{
    load::{By, Contender},
    report::Role,
    servers::Mongo,
    stats::Samples,
};

pub const NPM: &str = "distributed-locks-mongodb 1.0.3 (Node.js)";

pub struct Npm {
    pipes: Mutex<(ChildStdin, Lines<BufReader<ChildStdout>>)>,
    _process: Child,
}

#[derive(Deserialize)]
struct Answer {
    took: Vec<f32>,
    refused: u64,
    ms: f64,
}

impl Npm {
    /// `None` without the variable `BENCH_NPM`, the directory into which `scripts/bench` has installed
    /// the package.
    pub async fn contender(at: &'static str, mongo: &Mongo) -> Option<Contender> {
        let dir = env::var("BENCH_NPM").ok().filter(|dir| !dir.is_empty())?;
        let mut process = Command::new("node")
            .arg("peer.cjs")
            .arg(mongo.uri())
            .current_dir(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .ok()?;
        let (stdin, stdout) = (process.stdin.take()?, process.stdout.take()?);
        let pipes = Mutex::new((stdin, BufReader::new(stdout).lines()));
        let by = By::Process(Self { pipes, _process: process });
        Some(Contender { at, who: NPM.into(), role: Role::Peer, by, waits: false })
    }

    pub async fn load(&self, tasks: usize, keys: usize, time: Duration) -> Samples {
        let (stdin, stdout) = &mut *self.pipes.lock().await;
        let order = format!("{tasks} {keys} {}\n", time.as_millis());
        stdin.write_all(order.as_bytes()).await.expect("node reads");
        let line = stdout.next_line().await.expect("node answers").expect("node runs");
        let answer: Answer = serde_json::from_str(&line).expect("an answer in JSON");
        let elapsed = Duration::from_secs_f64(answer.ms / 1e3);
        Samples { took: answer.took, refused: answer.refused, elapsed }
    }
}
