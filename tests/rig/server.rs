//! A server process that ends with the process that started it, even if that process is killed.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// How often another port is tried if the free one has been taken in the meantime.
const PORTS: usize = 5;
/// Generous: a mongod is ready in about a second, on a machine with nothing else to do.
const READY_WITHIN: Duration = Duration::from_secs(180);
const LOG: &str = "server.log";

/// The parent of the server. It reads verbs from a pipe that this process holds: `start`, or the name
/// of a signal. It answers when it is done; a `start` has by then emptied the previous process's log.
/// When this process is gone for any reason, the kernel closes the pipe, and then the server and its
/// directory go too. As the parent, it also never signals a reused pid.
///
/// It must ignore SIGHUP, which the kernel sends to an orphaned process group with a stopped member,
/// here a paused server.
const GUARDIAN: &str = r#"
    trap '' HUP
    dir=$PWD
    # For what the server would leave there.
    export HOME="$dir" TMPDIR="$dir"
    while read -r verb; do
        case $verb in
            start) wait; : >server.log; "$@" >>server.log 2>&1 & server=$! ;;
            group-*) kill -s "${verb#group-}" -- "-$server" ;;
            *) kill -s "$verb" "$server" ;;
        esac
        echo "$server"
    done
    # The second is for a server that started as the leader of a group, with all that it has started.
    kill -s KILL "$server" "-$server"
    wait
    cd / && rm -rf "$dir"
"#;

/// A running server, its port and its directory.
#[derive(Debug)]
pub(super) struct Server {
    guardian: Mutex<Guardian>,
    name: String,
    dir: PathBuf,
    port: u16,
    ready: &'static str,
}

#[derive(Debug)]
struct Guardian {
    shell: Child,
    pids: BufReader<ChildStdout>,
}

impl Server {
    /// Starts `program` with the arguments for a free port, in its own directory, and waits until its
    /// log contains `ready`.
    ///
    /// The log decides, not a connection, since another process's server may answer on the port.
    pub(super) async fn start(
        program: PathBuf,
        arguments: impl Fn(u16) -> Vec<String>,
        ready: &'static str,
    ) -> Self {
        for _ in 0..PORTS {
            let port = free_port();
            let server = Self::guard(&program, &arguments(port), port, ready);
            if server.begin().await {
                return server;
            }
        }
        panic!("{} found {PORTS} free ports taken", program.display());
    }

    fn guard(program: &Path, arguments: &[String], port: u16, ready: &'static str) -> Self {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let dir = tempfile::Builder::new().prefix(&format!("{name}-")).tempdir();
        let dir = dir.expect("a temporary directory").keep();
        let mut shell = Command::new("sh")
            .args(["-c", GUARDIAN, "guardian"])
            .arg(program)
            .args(arguments)
            .current_dir(&dir)
            // A Ctrl-C is for the tests; the guardian must outlive them to clean up.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh");
        let pids = BufReader::new(shell.stdout.take().expect("piped"));
        Self { guardian: Mutex::new(Guardian { shell, pids }), name, dir, port, ready }
    }

    /// Starts the process, again if need be, on the same port and files, as soon as the previous
    /// process has ended. False if the port is taken.
    pub(super) async fn begin(&self) -> bool {
        self.tell("start");
        let began = Instant::now();
        loop {
            let log = fs::read(self.dir.join(LOG)).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            if log.contains(self.ready) {
                return true;
            }
            if log.contains("Address already in use") {
                return false;
            }
            assert!(began.elapsed() < READY_WITHIN, "{} is not ready; its log:\n{log}", self.name);
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Sends the process a signal, by its name without `SIG`.
    pub(super) fn signal(&self, signal: &str) {
        self.tell(signal);
    }

    /// Like [`Self::signal`], but to the process group that the process leads, and so to its children
    /// too.
    pub(super) fn signal_group(&self, signal: &str) {
        self.tell(&format!("group-{signal}"));
    }

    /// Stops every thread of the process where it is. `kill` returns while the signal is still on its
    /// way, and a thread that it has not reached yet may still answer.
    pub(super) fn stop(&self) {
        let pid = self.tell("STOP");
        while any_thread_runs(&pid) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The port that the server listens on.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// The directory that the server runs in. It is deleted with the server.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the server's pid once the guardian is done.
    fn tell(&self, verb: &str) -> String {
        let mut guardian = self.guardian.lock().expect("no panic while locked");
        let stdin = guardian.shell.stdin.as_mut().expect("piped");
        writeln!(stdin, "{verb}").expect("the guardian reads");
        let mut pid = String::new();
        guardian.pids.read_line(&mut pid).expect("the guardian answers");
        pid.trim().to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Closes the pipe and waits until server and directory are gone.
        let guardian = self.guardian.get_mut().expect("no panic while locked");
        guardian.shell.wait().expect("a child to wait for");
    }
}

/// The program at the path in `variable`, or else the one that `scripts/<script>` provides.
pub(super) async fn program(variable: &str, script: &str) -> PathBuf {
    if let Some(path) = env::var_os(variable).filter(|path| !path.is_empty()) {
        // The server will start in another directory.
        return path::absolute(path).expect("a current directory");
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(script);
    let run = move || Command::new(&script).stderr(Stdio::inherit()).output();
    let output = spawn_blocking(run).await.expect("a thread").expect("the script runs");
    assert!(output.status.success(), "the script above provided no server");
    String::from_utf8(output.stdout).expect("a path in UTF-8").trim_end().into()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("a bound listener").port()
}

/// By what Linux says of the process; elsewhere nothing is said.
fn any_thread_runs(pid: &str) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    threads.flatten().any(|thread| {
        // "pid (name) state …"; gone in the meantime is as good as stopped.
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('T'))
    })
}
