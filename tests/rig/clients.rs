//! Databases and clients, and what the tests of a process share.

use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use mongodb::bson::oid::ObjectId;
use mongodb::options::ClientOptions;
use mongodb::{Client, Database};
use tokio::runtime::Runtime;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// A short name that no other test uses.
pub(crate) fn fresh_name() -> String {
    format!("t_{}", ObjectId::new().to_hex())
}

/// A new database on a new client. It stays until its server ends.
pub(crate) async fn fresh_database(uri: &str) -> Database {
    client(uri).await.database(&fresh_name())
}

/// A client on the current runtime that gives up after 5 s without a server.
pub(crate) async fn client(uri: &str) -> Client {
    Client::with_options(options(uri).await).expect("valid options")
}

/// A client whose driver reports no fault before four times [`BY_THE_DEADLINE`]: only a deadline of the locks ends an
/// operation earlier.
pub(crate) async fn patient_client(uri: &str) -> Client {
    let mut options = options(uri).await;
    options.server_selection_timeout = Some(4 * BY_THE_DEADLINE);
    options.connect_timeout = Some(4 * BY_THE_DEADLINE);
    Client::with_options(options).expect("valid options")
}

/// For the driver of a server that obeys no time limit: such a server never answers a `hello` that waits for news, and after
/// 20 s without an answer the driver closes all connections. A `hello` that polls waits for nothing.
pub(crate) const POLLS: &str = "&serverMonitoringMode=poll";

/// The time that an answer by a deadline of seconds may take on a busy machine.
pub(crate) const BY_THE_DEADLINE: Duration = Duration::from_secs(30);

/// Ends a client's background work. Waits no longer than this, because after a step-down the driver's
/// own shutdown was seen to hang forever.
pub(crate) async fn close(client: Client) {
    let _ = timeout(Duration::from_secs(2), client.shutdown().immediate(true)).await;
}

pub(crate) async fn options(uri: &str) -> ClientOptions {
    let mut options = ClientOptions::parse(uri).await.expect("a valid URI");
    options.server_selection_timeout = Some(Duration::from_secs(5));
    options
}

/// Commands that the driver sends on its own at any time.
pub(crate) fn is_housekeeping(command: &str) -> bool {
    matches!(
        command,
        "hello" | "isMaster" | "ismaster" | "ping" | "endSessions" | "saslStart" | "saslContinue"
    )
}

/// Starts the shared content of `cell`, once for all tests of the process.
///
/// It runs on its own thread and runtime. Each test that waits here has a runtime, and the first test
/// must not tie the others to a runtime that ends with it. A failure is shared too; otherwise each
/// waiting test would take its time to fail in the same way.
pub(crate) async fn share<T, F>(cell: &'static OnceLock<Option<T>>, start: fn() -> F) -> &'static T
where
    T: Send + Sync + 'static,
    F: Future<Output = T> + 'static,
{
    let started = spawn_blocking(move || {
        cell.get_or_init(|| {
            let run = move || Runtime::new().expect("a runtime").block_on(start());
            thread::spawn(run).join().ok()
        })
    });
    let shared = started.await.expect("a thread to wait on");
    shared.as_ref().expect("the shared server did not start; its own panic says why")
}
