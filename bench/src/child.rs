//! Other processes of this program: an application server, or one that waits for what this one does.

use std::{env, process::Stdio};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{self, ChildStdout, Command},
};

/// The flag before the arguments of a child.
pub const FLAG: &str = "--child";

/// Ends with this value, if not before.
pub struct Child {
    process: process::Child,
    output: Lines<BufReader<ChildStdout>>,
}

impl Child {
    pub fn start(arguments: &[&str]) -> Self {
        let program = env::current_exe().expect("the path of this program");
        let mut process = Command::new(program)
            .arg(FLAG)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("a process can be started");
        let output = BufReader::new(process.stdout.take().expect("piped")).lines();
        Self { process, output }
    }

    pub fn id(&self) -> u32 {
        self.process.id().expect("it runs")
    }

    pub async fn tell(&mut self, line: &str) {
        let input = self.process.stdin.as_mut().expect("piped");
        input.write_all(format!("{line}\n").as_bytes()).await.expect("it runs");
    }

    /// The next line that it prints.
    pub async fn line(&mut self) -> String {
        self.output.next_line().await.expect("text").expect("the other process has ended")
    }

    pub async fn ended(mut self) {
        self.process.wait().await.expect("it has ended");
    }
}
