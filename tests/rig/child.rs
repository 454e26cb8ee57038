//! A child process that can be paused and killed, and that never outlives the tests.

use std::path::PathBuf;

use super::server::Server;

/// Ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Child(Server);

impl Child {
    /// Starts `program` with these settings `NAME=value` in its environment, and waits until it prints
    /// `ready`.
    pub(crate) async fn start(
        program: PathBuf,
        environment: &[String],
        arguments: &[&str],
        ready: &'static str,
    ) -> Self {
        let program = program.to_string_lossy().into_owned();
        let all = |_| {
            let arguments = arguments.iter().map(ToString::to_string);
            environment.iter().cloned().chain([program.clone()]).chain(arguments).collect()
        };
        Self(Server::start("env".into(), all, ready).await)
    }

    /// Stops every thread where it is.
    pub(crate) fn pause(&self) {
        self.0.stop();
    }

    /// Lets the process go on as if nothing had happened.
    pub(crate) fn resume(&self) {
        self.0.signal("CONT");
    }

    /// Crashes the process.
    pub(crate) fn kill9(&self) {
        self.0.signal("KILL");
    }
}
