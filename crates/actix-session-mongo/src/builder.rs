//! The settings of the session store, with their defaults.

use std::{future::Future, sync::Arc, time::Duration};

use futures_util::TryFutureExt;
use mongodb::Database;
use tokio::runtime::Handle;

use crate::{
    change::Names,
    end::{Hook, SessionEnd},
    error::{BoxError, Error},
    records::Records,
    store::{Inner, MongoSessionStore},
    sweep,
};

/// Where actix-identity stores the user's id.
const USER: &str = "actix_identity.user_id";
const COLLECTION: &str = "session";
/// The time limit for an index on an existing collection.
const INDEX_WITHIN: Duration = Duration::from_secs(10 * 60);
const DEADLINE: Duration = Duration::from_secs(5);
/// Often enough for a hook that notifies people. A query of an index that finds nothing costs the server less than a
/// millisecond.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Settings of a [`MongoSessionStore`].
#[must_use = "a builder does nothing until `build` is called"]
#[derive(Debug)]
pub struct MongoSessionStoreBuilder {
    database: Database,
    collection: String,
    names: Names,
    hook: Option<Hook>,
    absolute_timeout: Option<Duration>,
    deadline: Duration,
    sweep_interval: Option<Duration>,
}

impl MongoSessionStoreBuilder {
    /// The collection of the sessions. Default `session`.
    pub fn collection(mut self, name: impl Into<String>) -> Self {
        self.collection = name.into();
        self
    }

    /// The entry of the session's state that contains the user, for
    /// [`list_of`](MongoSessionStore::list_of) and [`revoke_all_of`](MongoSessionStore::revoke_all_of). Default: the
    /// entry of actix-identity.
    pub fn user_key(mut self, key: impl Into<String>) -> Self {
        self.names.user = key.into();
        self
    }

    /// The entry of the session's state that identifies the session, whatever its session key is. The application
    /// chooses a new id with each login, such as a random UUID, and a `renew` keeps it. When the entry changes or goes,
    /// another session has begun. Default: none; then single sessions are not listed or revoked, and the hook hears
    /// nothing.
    pub fn id_key(mut self, key: impl Into<String>) -> Self {
        self.names.id = Some(key.into());
        self
    }

    /// Called for the end of each session that has an [id](Self::id_key): when it has expired, was logged out or was
    /// revoked. One of all servers calls the hook, at least once: the call is repeated if the hook fails, if it does
    /// not answer within 30 s, or if the server dies meanwhile. A revocation is told at once and once more later. A
    /// logout is told after some seconds, when no other session can have the id any more.
    pub fn on_end<F, E>(mut self, hook: impl Fn(SessionEnd) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<BoxError> + 'static,
    {
        self.hook = Some(Hook(Arc::new(move |end| Box::pin(hook(end).map_err(Into::into)))));
        self
    }

    /// How long a session may live at most, however active it is. Default: no limit.
    pub fn absolute_timeout(mut self, timeout: Duration) -> Self {
        self.absolute_timeout = Some(timeout);
        self
    }

    /// How long a request waits for the database at most. Default 5 s.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How often this server looks for sessions that have ended. Default 1 s.
    pub fn sweep_interval(mut self, interval: Duration) -> Self {
        self.sweep_interval = Some(interval);
        self
    }

    /// This server does not look for sessions that have ended: other servers do, or
    /// [`sweep`](MongoSessionStore::sweep) is called.
    pub fn without_sweeps(mut self) -> Self {
        self.sweep_interval = None;
        self
    }

    /// Prepares the collection, and starts to look for ended sessions. This search goes on until the last handle to the
    /// store is dropped.
    ///
    /// # Errors
    /// If the database is not reached, or its user lacks a privilege.
    pub async fn build(self) -> Result<MongoSessionStore, Error> {
        let Self { database, collection, names, hook, absolute_timeout, deadline, .. } = self;
        let records = Records::of(&database, &collection, absolute_timeout);
        let runtime = Handle::current();
        let inner = Arc::new(Inner { records, names, hook, deadline, runtime });
        let store = MongoSessionStore { inner };
        let doing = format!("preparing {}.{collection}", database.name());
        store.run(&doing, (), |records, ()| Box::pin(records.prepare())).await?;
        if let Some(interval) = self.sweep_interval {
            tokio::spawn(sweep::run(Arc::downgrade(&store.inner), interval));
        }
        Ok(store)
    }
}

impl MongoSessionStore {
    /// Settings for a store in this database.
    pub fn builder(database: &Database) -> MongoSessionStoreBuilder {
        MongoSessionStoreBuilder {
            database: database.clone(),
            collection: COLLECTION.to_owned(),
            names: Names { id: None, user: USER.to_owned() },
            hook: None,
            absolute_timeout: None,
            deadline: DEADLINE,
            sweep_interval: Some(SWEEP_INTERVAL),
        }
    }
}

/// Creates the collection with its indexes, as [`build`](MongoSessionStoreBuilder::build) does, for a database user who
/// may create some. Idempotent.
///
/// # Errors
/// As `build`.
pub async fn prepare(database: &Database, collection: &str) -> Result<(), Error> {
    let settings = MongoSessionStore::builder(database).collection(collection);
    settings.deadline(INDEX_WITHIN).without_sweeps().build().await.map(drop)
}
