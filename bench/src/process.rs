//! A contender in a process of its own, which receives its orders line by line.

use std::{process::Stdio, time::Duration};

use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::Mutex,
};

use crate::stats::Samples;

pub struct Process {
    pipes: Mutex<(ChildStdin, Lines<BufReader<ChildStdout>>)>,
    _process: Child,
}

#[derive(Deserialize)]
struct Answer {
    took: Vec<f32>,
    refused: u64,
    ms: f64,
}

impl Process {
    /// `None` if the program cannot be started.
    pub fn start(command: &mut Command) -> Option<Self> {
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = pipes.kill_on_drop(true).spawn().ok()?;
        let (stdin, stdout) = (process.stdin.take()?, process.stdout.take()?);
        let pipes = Mutex::new((stdin, BufReader::new(stdout).lines()));
        Some(Self { pipes, _process: process })
    }

    pub async fn load(&self, tasks: usize, keys: usize, time: Duration) -> Samples {
        let (stdin, stdout) = &mut *self.pipes.lock().await;
        let order = format!("{tasks} {keys} {}\n", time.as_millis());
        stdin.write_all(order.as_bytes()).await.expect("it reads");
        let line = stdout.next_line().await.expect("it answers").expect("it runs");
        let answer: Answer = serde_json::from_str(&line).expect("an answer in JSON");
        let elapsed = Duration::from_secs_f64(answer.ms / 1e3);
        Samples { took: answer.took, refused: answer.refused, elapsed }
    }
}
