//! Connects to MongoDB by a URI.

use std::{
    error::Error,
    time::{Duration, Instant},
};

use mongodb::{Client, error::ErrorKind, options::ClientOptions};
use tokio::time::sleep;

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{
        StoreResult,
        mongo::{
            MongoStore,
            error::{Doing, store_error},
            schema::status::UNINITIATED,
            time_limits::LONGEST_WAIT,
        },
    },
};

/// Used unless the URI sets another time-out. Shorter than the manager's default deadline of 5 s, so that a
/// request can be retried and fails with an error of ours, not with a time-out of the driver.
const SERVER_SELECTION_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Connections to each member, opened as needed. More than all change streams, at most 32, and all writes that are under
/// way at once: at most 96 on single records and in saves, and a few for many records. So reads find a connection, also
/// while no majority acknowledges a write.
pub(super) const POOL: u32 = 160;

/// How long to wait for an election, which takes 12 s by default.
const ELECTION: Duration = Duration::from_secs(30);
/// The pause between two attempts. A server selection takes time itself.
const BETWEEN: Duration = Duration::from_millis(500);

/// True if members of the set answer, but none of them is the primary, or if the only server that the URI names waits for
/// its configuration. To the driver, a set that was never initiated, or has another name, has no members.
fn is_electing(error: &StoreError) -> bool {
    let source = format!("{:?}", error.source());
    source.contains("ReplicaSetNoPrimary") && source.contains("RsSecondary")
        || error.to_string().contains(UNINITIATED)
}

impl MongoStore {
    /// Connects, and checks that a server answers. If the replica set elects its primary at the moment, waits for the
    /// primary for at most 30 s, with a line in the log for each attempt.
    ///
    /// Call it in `main`, not in the application factory: the driver lives on the runtime on which it
    /// was created. If the URI sets no time-outs, server selection gives up after 3 s and connecting
    /// after 2 s. Server selection never takes longer than 10 s. If the URI sets no `maxPoolSize`, the pool has at most 160 connections.
    ///
    /// # Errors
    /// If the URI is malformed, or no server answers within the server selection time-out, or no primary in time.
    pub async fn connect(uri: &str, database: &str) -> StoreResult<Self> {
        if uri.starts_with("mongodb+srv:") && !cfg!(feature = "dns-resolver") {
            return Err(StoreError::new(
                StoreErrorKind::Other,
                "a `mongodb+srv://` URI needs the feature `dns-resolver` of actix-doclock",
            ));
        }
        let malformed = |e: mongodb::error::Error| {
            if let ErrorKind::DnsResolve { .. } = *e.kind {
                return store_error("looking for the servers that the URI names in DNS", e);
            }
            let error = StoreError::new(
                StoreErrorKind::Other,
                "this is not a MongoDB URI; write `mongodb://host:27017/?replicaSet=rs0`, with the \
                 characters `: / ? # [ ] @ %` of a password percent-encoded",
            );
            // The driver quotes the part that it could not read, which may belong to the password.
            if uri.contains('@') { error } else { error.because(e) }
        };
        let mut options = ClientOptions::parse(uri).await.map_err(malformed)?;
        // No command is waited for any longer, and then the error of the driver says more.
        let selection = options.server_selection_timeout.unwrap_or(SERVER_SELECTION_TIMEOUT);
        options.server_selection_timeout = Some(selection.min(LONGEST_WAIT));
        options.connect_timeout.get_or_insert(CONNECT_TIMEOUT);
        // To the driver, 0 is no limit.
        let pool = match *options.max_pool_size.get_or_insert(POOL) {
            0 => POOL,
            pool => pool,
        };
        options.app_name.get_or_insert_with(|| "actix-doclock".to_owned());
        let client = Client::with_options(options).map_err(malformed)?;
        let store = Self::new(&client.database(database)).with_connections(pool);
        let until = Instant::now() + ELECTION;
        let ask =
            async || store.has_transactions().await.doing(|| "asking the server for its kind");
        let mut answered = ask().await;
        while answered.as_ref().is_err_and(is_electing) && Instant::now() < until {
            log::warn!(
                target: "actix_doclock::store",
                "the replica set has no primary at the moment; waiting for its election",
            );
            sleep(BETWEEN).await;
            answered = ask().await;
        }
        match answered {
            Err(e) if format!("{:?}", e.source()).contains("ReplicaSetNoPrimary") => {
                Err(StoreError::new(
                    e.kind(),
                    "no primary: the server is a standalone (leave `replicaSet` out of the URI), its set \
                     has another name, was never initiated, or is electing at the moment",
                )
                .because(e))
            }
            Err(e) => Err(e),
            Ok(_) => Ok(store),
        }
    }
}
