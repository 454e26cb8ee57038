//! The examples `editor` and `forms`, run as programs.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

/// A running server, which ends with the test.
#[derive(Debug)]
pub(crate) struct Editor {
    process: Child,
    base: String,
}

impl Editor {
    /// On the embedded store, unless `args` say otherwise.
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::with_warnings_in(Stdio::null(), args)
    }

    pub(crate) fn with_warnings_in(log: Stdio, args: &[&str]) -> Self {
        Self::run("editor", log, args)
    }

    /// The example `forms`.
    pub(crate) fn of_forms(args: &[&str]) -> Self {
        Self::run("forms", Stdio::null(), args)
    }

    fn run(example: &str, log: Stdio, args: &[&str]) -> Self {
        let bind: &[&str] = if args.contains(&"--bind") { &[] } else { &["--bind", "127.0.0.1:0"] };
        let mut process = Command::new(super::example(example))
            .args(bind)
            .args(args)
            .env_remove("MONGODB_URI")
            .env("RUST_LOG", "warn")
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("the example runs");
        let mut line = String::new();
        let stdout = process.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let base = line.trim().strip_prefix("listening on ").expect("it says where").to_owned();
        Self { process, base }
    }

    /// On a MongoDB database.
    pub(crate) fn on_mongodb(database: &str, uri: &str) -> Self {
        Self::start(&["--mongodb", uri, "--database", database, "--ttl-secs", "600"])
    }

    /// Stops the server as usual, and returns its warnings once it has ended. They must be piped.
    pub(crate) fn stopped(mut self) -> String {
        self.terminate();
        let mut warnings = String::new();
        let stderr = self.process.stderr.as_mut().expect("piped");
        stderr.read_to_string(&mut warnings).expect("text");
        assert!(self.process.wait().expect("a child").success());
        warnings
    }

    /// Tells the server to stop as usual.
    pub(crate) fn terminate(&self) {
        let killed = Command::new("kill").arg(self.process.id().to_string()).status();
        assert!(killed.expect("kill runs").success());
    }

    /// The URL of a path on this server.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
}

impl Drop for Editor {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
