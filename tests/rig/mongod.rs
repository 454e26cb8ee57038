//! A real mongod that can be paused, killed and restarted.

use std::env;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use mongodb::Collection;
use mongodb::bson::{Bson, Document, doc};
use tokio::time::sleep;

use super::faketime;
use super::server::{self, Server};
use super::{POLLS, client, close, share};

const EAGER: &str = "ttlMonitorSleepSecs=1";

/// A replica set with one member elects its primary in a tenth of a second.
const PRIMARY_WITHIN: Duration = Duration::from_secs(30);

/// Replica sets of one that a test has left as they were, for the next test that wants its own: a start costs a second
/// of processor time. They end with this process.
static IDLE: Mutex<Vec<Server>> = Mutex::new(Vec::new());
const MOST_IDLE: usize = 4;

/// A mongod process. When it is dropped, the process ends and its files are deleted, unless another test can use it.
#[derive(Debug)]
pub(crate) struct Mongod {
    // `None` only while it is dropped.
    server: Option<Server>,
    kind: Kind,
    paused: AtomicBool,
    /// True if nothing was changed that the next test could notice.
    usual: AtomicBool,
    /// True if it obeys no time limit.
    is_patient: bool,
}

/// The differences from a usual member of a replica set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unusual {
    /// Removes expired records every second; otherwise never.
    pub(crate) eager_ttl_monitor: bool,
    /// Its clock is this many seconds ahead of the others' clocks, or behind. Needs
    /// [`faketime::library`].
    pub(crate) clock_ahead: Option<i64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Standalone,
    ReplicaSet,
    Auth,
}

impl Mongod {
    /// A server without an oplog: no transactions, no change streams.
    pub(crate) async fn start_standalone() -> Self {
        Self::start(Kind::Standalone, None, |port| arguments(port, &[])).await
    }

    /// Like [`Self::start_standalone`], but its TTL monitor runs every second, not every minute. This
    /// cannot be a parameter of the running server, which would apply only after the current minute.
    pub(crate) async fn start_with_eager_ttl_monitor() -> Self {
        let eager = |port| arguments(port, &["--setParameter", EAGER]);
        Self::start(Kind::Standalone, None, eager).await
    }

    /// A replica set of one member, already primary. Another test may have used it, and left databases there.
    pub(crate) async fn start_replica_set() -> Self {
        let idle = || IDLE.lock().expect("no panic while locked").pop();
        while let Some(server) = idle() {
            let mongod = Self::new(server, Kind::ReplicaSet);
            mongod.resume();
            let off = doc! { "configureFailPoint": "failCommand", "mode": "off" };
            if mongod.try_admin(off).await.is_ok() {
                mongod.usual.store(true, Ordering::Relaxed);
                return mongod;
            }
        }
        let mongod = Self::start_replica_set_that_is(Unusual::default()).await;
        mongod.usual.store(true, Ordering::Relaxed);
        mongod
    }

    /// Like [`Self::start_replica_set`], with these differences.
    pub(crate) async fn start_replica_set_that_is(unusual: Unusual) -> Self {
        let mongod = Self::start_member_that_is(unusual).await;
        mongod.initiate().await;
        mongod
    }

    /// Makes a replica set of this member alone.
    pub(crate) async fn initiate(&self) {
        let host = format!("127.0.0.1:{}", self.port());
        let config = doc! { "_id": "rs0", "members": [{ "_id": 0, "host": host }] };
        self.admin(doc! { "replSetInitiate": config }).await;
        self.primary().await;
    }

    /// A server that is to become a member of the replica set `rs0`.
    pub(crate) async fn start_member() -> Self {
        Self::start_member_that_is(Unusual::default()).await
    }

    /// Like [`Self::start_member`], with these differences.
    pub(crate) async fn start_member_that_is(unusual: Unusual) -> Self {
        let clock = unusual.clock_ahead;
        if unusual.eager_ttl_monitor {
            let eager = |port| arguments(port, &["--replSet", "rs0", "--setParameter", EAGER]);
            return Self::start(Kind::ReplicaSet, clock, eager).await;
        }
        Self::start(Kind::ReplicaSet, clock, |port| arguments(port, &["--replSet", "rs0"])).await
    }

    /// A standalone server that lets in only the user `root` of [`Self::uri`].
    pub(crate) async fn start_with_auth() -> Self {
        let mongod = Self::start(Kind::Auth, None, |port| arguments(port, &["--auth"])).await;
        // The localhost exception: as long as no user exists, any local client may create the first.
        let user = doc! { "createUser": "root", "pwd": "secret", "roles": ["root"] };
        let anybody = format!("mongodb://127.0.0.1:{}/?directConnection=true", mongod.port());
        run_admin(&anybody, user).await.expect("mongod obeys");
        mongod
    }

    async fn start(
        kind: Kind,
        clock_ahead: Option<i64>,
        arguments: fn(u16) -> Vec<String>,
    ) -> Self {
        const READY: &str = "Waiting for connections";
        let program = server::program("MONGOD", "mongod").await;
        let server = match clock_ahead {
            None => Server::start(program, arguments, READY).await,
            Some(seconds) => {
                let program = program.to_string_lossy().into_owned();
                let with_clock = |port| {
                    let clock = faketime::environment(seconds).into_iter();
                    clock.chain([program.clone()]).chain(arguments(port)).collect()
                };
                Server::start("env".into(), with_clock, READY).await
            }
        };
        Self::new(server, kind)
    }

    fn new(server: Server, kind: Kind) -> Self {
        Self {
            server: Some(server),
            kind,
            paused: false.into(),
            usual: false.into(),
            is_patient: false,
        }
    }

    fn server(&self) -> &Server {
        self.server.as_ref().expect("not dropped")
    }

    fn changed(&self) {
        self.usual.store(false, Ordering::Relaxed);
    }

    /// The URI that an application would use. It makes the driver find the primary of a replica set.
    pub(crate) fn uri(&self) -> String {
        self.uri_with(match self.kind {
            Kind::ReplicaSet => "replicaSet=rs0",
            Kind::Standalone | Kind::Auth => "directConnection=true",
        })
    }

    /// Talks only to this process, whatever it says about a replica set.
    pub(crate) fn direct_uri(&self) -> String {
        self.uri_with("directConnection=true")
    }

    fn uri_with(&self, option: &str) -> String {
        let user = if self.kind == Kind::Auth { "root:secret@" } else { "" };
        let polls = if self.is_patient { POLLS } else { "" };
        format!("mongodb://{user}127.0.0.1:{}/?{option}{polls}", self.port())
    }

    /// The port that it listens on.
    pub(crate) fn port(&self) -> u16 {
        self.server().port()
    }

    /// Stops the process where it is: connections stay open, and no request is answered.
    pub(crate) fn pause(&self) {
        self.paused.store(true, Ordering::Relaxed);
        self.server().stop();
    }

    /// Lets a paused process go on as if nothing had happened.
    pub(crate) fn resume(&self) {
        self.server().signal("CONT");
        self.paused.store(false, Ordering::Relaxed);
    }

    /// Whether the process is paused.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Crashes the process; its files stay for [`Self::restart`].
    pub(crate) fn kill9(&self) {
        self.changed();
        self.server().signal("KILL");
    }

    /// Starts the server again on the same files and port, after a clean stop if it still runs.
    pub(crate) async fn restart(&self) {
        self.restart_member().await;
        if self.kind == Kind::ReplicaSet {
            self.primary().await;
        }
    }

    /// The same for one of several members, which need not become the primary.
    pub(crate) async fn restart_member(&self) {
        self.changed();
        self.resume();
        self.server().signal("TERM");
        assert!(self.server().begin().await, "port {} was taken in the meantime", self.port());
    }

    /// The same server, which obeys no time limit from now on.
    async fn patient(mut self) -> Self {
        let patient = doc! { "configureFailPoint": "maxTimeNeverTimeOut", "mode": "alwaysOn" };
        self.admin(patient).await;
        self.is_patient = true;
        self
    }

    /// From now on no majority acknowledges this command in time, twice.
    pub(crate) async fn majority_is_late_for(&self, command: &str) {
        let late =
            doc! { "code": 50, "codeName": "MaxTimeMSExpired", "errmsg": "no majority in time" };
        let data = doc! { "failCommands": [command], "writeConcernError": late };
        let twice = doc! { "times": 2 };
        self.admin(doc! { "configureFailPoint": "failCommand", "mode": twice, "data": data }).await;
    }

    /// From now on these commands on this collection do this: fail with a code, or block.
    pub(crate) async fn disturb(
        &self,
        of: &Collection<Document>,
        commands: &[&str],
        how: Document,
    ) {
        let namespace = of.namespace().to_string();
        let mut data = doc! { "failCommands": commands, "namespace": namespace };
        data.extend(how);
        let always = doc! { "configureFailPoint": "failCommand", "mode": "alwaysOn", "data": data };
        self.admin(always).await;
    }

    pub(crate) async fn disturb_no_more(&self) {
        self.admin(doc! { "configureFailPoint": "failCommand", "mode": "off" }).await;
    }

    /// Runs a command on the database `admin`.
    pub(crate) async fn admin(&self, command: Document) -> Document {
        self.try_admin(command).await.expect("mongod obeys")
    }

    pub(super) async fn try_admin(&self, command: Document) -> mongodb::error::Result<Document> {
        let is_fail_point =
            command.get_str("configureFailPoint").is_ok_and(|it| it == "failCommand");
        if !is_fail_point && !command.contains_key("hello") {
            self.changed();
        }
        run_admin(&self.direct_uri(), command).await
    }

    /// Changes a parameter of the running server, such as `ttlMonitorEnabled`.
    pub(crate) async fn parameter(&self, name: &str, value: impl Into<Bson>) {
        let mut command = doc! { "setParameter": 1 };
        command.insert(name, value);
        self.admin(command).await;
    }

    /// Waits until the only member has elected itself.
    pub(crate) async fn primary(&self) {
        let began = Instant::now();
        loop {
            let hello = self.admin(doc! { "hello": 1 }).await;
            if hello.get_bool("isWritablePrimary").unwrap_or_default() {
                return;
            }
            let port = self.port();
            assert!(began.elapsed() < PRIMARY_WITHIN, "no primary on {port}");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Mongod {
    fn drop(&mut self) {
        let mut idle = IDLE.lock().expect("no panic while locked");
        if *self.usual.get_mut() && !thread::panicking() && idle.len() < MOST_IDLE {
            idle.extend(self.server.take());
        }
    }
}

/// The standalone server that all tests of the process share. It obeys no time limit, like [`local_replica_set`].
pub(crate) async fn shared_standalone() -> &'static Mongod {
    static SERVER: OnceLock<Option<Mongod>> = OnceLock::new();
    share(&SERVER, || async { Mongod::start_standalone().await.patient().await }).await
}

/// A replica set for tests with stuck records, which the tests share: it gives a command up after its time limit, as every
/// server does in production.
pub(crate) async fn strict_replica_set() -> &'static Mongod {
    static SERVER: OnceLock<Option<Mongod>> = OnceLock::new();
    share(&SERVER, Mongod::start_replica_set).await
}

/// The replica set that all tests of the process share: the one at `MONGODB_URI`, or otherwise one that
/// the tests start.
pub(crate) async fn shared_replica_set() -> SharedUri {
    match env::var("MONGODB_URI") {
        Ok(uri) if !uri.is_empty() => SharedUri { uri, server: None },
        _ => {
            let server = local_replica_set().await;
            SharedUri { uri: server.uri(), server: Some(server) }
        }
    }
}

/// A replica set that the tests always start themselves and share, for tests that put a proxy in front of it or count
/// commands. It obeys no time limit, so the crate repeats no command only because the machine is busy.
pub(crate) async fn local_replica_set() -> &'static Mongod {
    static SERVER: OnceLock<Option<Mongod>> = OnceLock::new();
    share(&SERVER, || async { Mongod::start_replica_set().await.patient().await }).await
}

/// The address of the shared replica set.
#[derive(Clone, Debug)]
pub(crate) struct SharedUri {
    uri: String,
    server: Option<&'static Mongod>,
}

impl SharedUri {
    /// The URI that an application would use.
    pub(crate) fn uri(&self) -> &str {
        &self.uri
    }

    /// The server, if the tests have started it. It is shared, so it must not be paused or killed.
    pub(crate) fn server(&self) -> Option<&'static Mongod> {
        self.server
    }
}

impl fmt::Display for SharedUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.uri)
    }
}

/// On a temporary client, because a server outlives the runtimes of the tests that use it.
async fn run_admin(uri: &str, command: Document) -> mongodb::error::Result<Document> {
    let client = client(uri).await;
    let reply = client.database("admin").run_command(command).await;
    close(client).await;
    reply
}

fn arguments(port: u16, more: &[&str]) -> Vec<String> {
    let port = port.to_string();
    let common = [
        ["--bind_ip", "127.0.0.1"],
        ["--port", &port],
        ["--dbpath", "."],
        // For many servers at once on a small machine: little memory, and 17 MB of disk instead of 300.
        ["--wiredTigerCacheSizeGB", "0.25"],
        ["--wiredTigerEngineConfigString", "log=(prealloc=false,file_max=16MB)"],
        ["--oplogSize", "16"],
        ["--setParameter", "diagnosticDataCollectionEnabled=false"],
        // Enables fail points.
        ["--setParameter", "enableTestCommands=1"],
    ];
    let flags = ["--nounixsocket", "--quiet"];
    // Tests make locks older. Then the crate must remove them, unless the test is about the monitor.
    let no_monitor = ["--setParameter", "ttlMonitorEnabled=false"];
    let no_monitor = if more.contains(&EAGER) { &[][..] } else { &no_monitor };
    common
        .iter()
        .flatten()
        .chain(&flags)
        .chain(no_monitor)
        .chain(more)
        .map(ToString::to_string)
        .collect()
}
