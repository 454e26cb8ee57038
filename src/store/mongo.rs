//! The store on MongoDB: locks beside the documents they guard.
//!
//! Above each write stands its contract: the command, and then `returns:` with each answer that can come back → its meaning.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Deref,
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::{
    Collection, Database,
    bson::{Document, RawDocumentBuf, doc},
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{OnceCell, Semaphore};
use uuid::Uuid;

/// Implements verbs of a trait by calls in other files. Each verb names its operation, for its errors.
macro_rules! verbs {
    ($self:ident, $until:ident: $(
        $verb:ident($($arg:ident: $type:ty),*) -> $answer:ty: $call:expr, $($doing:expr),*;
    )*) => {$(
        async fn $verb(
            &$self,
            $($arg: $type,)*
            $until: Deadline,
        ) -> $crate::store::StoreResult<$answer> {
            let answer = async { $call.await };
            let failed = |e| $crate::store::mongo::error::store_error(format!($($doing),*), e);
            answer.await.map_err(failed)
        }
    )*};
}

use self::{
    acquire::RecordHints,
    admission::{Admission, Shared},
    concerns::primary,
    error::{Doing, Result, failure, unavailable},
    schema::{absent::Absent, status},
    send::Groups,
    time_limits::answered,
};
use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Answer, Ask, Lock, PageId},
    store::{
        Ability, Acquisition, Active, Answered, Asked, Claim, Confirmed, Deadline, HandedOver,
        Locks, Pattern, Query, Released, Removal, Renewed, Rules, StoreResult, StoreStatus, Ticket,
        Topology, TryAcquire, Waiters, Watch, lock_rules::Moment,
    },
};

mod acquire;
mod admission;
mod asks;
pub(super) mod codec;
mod collection;
mod concerns;
mod connect;
mod difference;
mod documents;
mod ends;
mod error;
mod filters;
mod group;
mod hand_over;
mod held_lock;
mod ids;
mod lock_record;
mod new_record;
mod read;
mod release;
mod renew;
mod save;
mod schema;
mod send;
mod servers;
mod step;
mod time_limits;
mod transaction;
mod update;
mod watch;
mod write_many;

pub(crate) use held_lock::Forget;
pub use held_lock::HeldLock;
pub use schema::{
    danger::Danger,
    index::Index,
    requirements::Needs,
    survey::{Survey, Surveyed},
};
pub use transaction::{TransactionError, WorkError};

/// The kinds of collections that an application has of its own: [`MongoStore::own_collection`].
const FROZEN: &str = "frozen";
const SERVERS: &str = "server";
/// Ended sessions: one record each, kept for a day.
const ENDED: &str = "ended";
const REMEMBER_ENDED: Duration = Duration::from_secs(24 * 60 * 60);

/// How many connections a client of the driver opens to a server, unless it is told otherwise.
const DRIVERS_POOL: u32 = 10;

/// How many guarded saves and transactions are under way at once, so that they never take all connections: while no
/// majority follows the primary, each waits until its deadline. With the 64 writes on [single records](admission) these
/// are 96, with the change streams 128, fewer than [`connect::POOL`].
const SAVES: usize = 32;

/// The store on MongoDB 4.4 or later.
///
/// Locks of the collection `workitem` live in `workitem.lock` of the same database, ended sessions in
/// `doclock.ended`. Applications that share a database have [names](Self::named). All writes are acknowledged by a majority, all reads go to the primary, and a lease
/// is trusted only once it is majority-committed, whatever the URI says: with `w:1` a paused or lagging
/// primary would grant one lock twice.
///
/// On a replica set or a sharded cluster a guarded save is a transaction. A standalone server has no
/// transactions: there the lock is checked and renewed immediately before the document is written, and
/// a lock that is broken, released or expires between the two goes unnoticed. Use a standalone server
/// only for development.
#[derive(Debug, Clone)]
pub struct MongoStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    database: Database,
    /// The name of the application, if it has one.
    application: Option<String>,
    ended: Collection<Document>,
    /// How many connections the client opens to a server.
    connections: u32,
    /// For the change streams.
    watches: Arc<Semaphore>,
    /// The limits for the writes of all collections together.
    writes: Shared,
    saves: Semaphore,
    /// The kind of deployment, asked only once.
    topology: OnceCell<Topology>,
    collections: RwLock<HashMap<String, Arc<Prepared>>>,
    /// The needs of collections that are not the store's own, by their names.
    other_needs: Mutex<BTreeMap<String, Needs>>,
}

/// A collection whose locks are ready for use.
#[derive(Debug)]
struct Prepared {
    /// The records of the locks, as the primary has them.
    primary: Collection<Document>,
    /// The same records, read from majority-committed state. A failover may undo a write that only the
    /// primary has, so such a write proves no lease, not even to the sender of the renewal.
    majority: Collection<Document>,
    documents: Collection<RawDocumentBuf>,
    rules: Rules,
    /// True if this program only looks at the locks, so that nobody has told it the rules.
    is_attached: bool,
    hints: RecordHints,
    admission: Admission,
    groups: Groups,
    absent: Absent,
}

/// A prepared collection, and the deadline of a verb on it. Each verb is a method in a file of its own.
struct LockCollection<'a> {
    store: &'a MongoStore,
    at: Arc<Prepared>,
    until: Deadline,
}

impl Deref for LockCollection<'_> {
    type Target = Prepared;

    fn deref(&self) -> &Prepared {
        &self.at
    }
}

impl LockCollection<'_> {
    /// The same collection with another deadline.
    fn with(&self, until: Deadline) -> Self {
        Self { at: Arc::clone(&self.at), until, ..*self }
    }
}

impl MongoStore {
    /// The error of a store whose driver failed, for programs that send commands of their own to the same database.
    /// `doing` names the operation that failed, as in "reading titles".
    #[must_use]
    pub fn error(doing: impl std::fmt::Display, error: mongodb::error::Error) -> StoreError {
        error::store_error(doing, error)
    }

    /// Uses the database of a client that the application already has.
    ///
    /// Its server selection time-out (30 s by default) should be shorter than the manager's
    /// deadline; see [`connect`](Self::connect).
    #[must_use]
    pub fn new(database: &Database) -> Self {
        Self::of(database, None, DRIVERS_POOL)
    }

    /// Tells the store how many connections its client opens to a server: the `max_pool_size` of a client that the
    /// application made itself. Without this, the store assumes the driver's default of 10. Each watched collection
    /// takes one of them, and at most half of them are for that, at most 32: waiters and event streams of further
    /// collections poll. Call it before the store is given to a manager.
    #[must_use]
    pub fn with_connections(self, max_pool_size: u32) -> Self {
        Self::of(self.database(), self.inner.application.as_deref(), max_pool_size)
    }

    /// A store for one of several applications that share a database: the application keeps its ended sessions, freezes
    /// and notes of servers in `doclock.NAME.ended`, `doclock.NAME.frozen` and `doclock.NAME.server`. Without names, each
    /// application would hear of the sessions of the others, and obey their freezes. All servers of an application give
    /// the same name. Call it before the store is given to a manager.
    ///
    /// ```no_run
    /// # use actix_doclock::{MongoStore, StoreError};
    /// # async fn start(uri: &str) -> Result<MongoStore, StoreError> {
    /// MongoStore::connect(uri, "shop").await?.named("backoffice")
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name has other characters than `a` to `z`, digits, `-` and `_`, or more than 40 of them, or none.
    pub fn named(self, application: &str) -> StoreResult<Self> {
        let is_usual = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
        if application.is_empty() || application.len() > 40 || !application.chars().all(is_usual) {
            let message = format!(
                "{application:?} cannot be the name of an application: write at most 40 small letters, digits, `-` and \
                 `_`"
            );
            return Err(StoreError::new(StoreErrorKind::Other, message));
        }
        Ok(Self::of(self.database(), Some(application), self.inner.connections))
    }

    fn of(database: &Database, application: Option<&str>, connections: u32) -> Self {
        let application = application.map(str::to_owned);
        let ended = primary(database, &own_collection(application.as_deref(), ENDED));
        Self {
            inner: Arc::new(Inner {
                ended,
                application,
                connections,
                watches: Arc::new(Semaphore::new(watch::at_once(connections))),
                database: database.clone(),
                writes: Shared::new(),
                saves: Semaphore::new(SAVES),
                topology: OnceCell::new(),
                collections: RwLock::default(),
                other_needs: Mutex::default(),
            }),
        }
    }

    /// The database, for the application's own queries.
    #[must_use]
    pub fn database(&self) -> &Database {
        &self.inner.database
    }

    /// The name of a collection that the [application](Self::named) has of its own: `kind` is `ended`, `frozen` or
    /// `server`.
    #[must_use]
    pub fn own_collection(&self, kind: &str) -> String {
        own_collection(self.inner.application.as_deref(), kind)
    }

    /// The kind of deployment. The server is asked only once.
    ///
    /// # Errors
    /// If the database is not reached.
    pub async fn topology(&self) -> StoreResult<Topology> {
        self.kind().await.doing(|| "asking the server for its kind")
    }

    async fn kind(&self) -> Result<Topology> {
        let ask = async {
            let hello = answered(self.database().run_command(doc! { "hello": 1 })).await?;
            if status::is_uninitiated(&hello) {
                return Err(unavailable(status::UNINITIATED));
            }
            Ok(status::topology(&hello))
        };
        self.inner.topology.get_or_try_init(|| ask).await.copied()
    }

    /// A reading of the server's clock.
    async fn time(&self, limit: Duration) -> Result<Moment> {
        let asked = Instant::now();
        let hello = doc! { "hello": 1, "maxTimeMS": codec::millis(limit) };
        let hello = answered(self.database().run_command(hello)).await?;
        let now = hello.get_datetime("localTime").map_err(mongodb::error::Error::custom)?;
        Ok(lock_record::moment(*now, asked))
    }

    async fn has_transactions(&self) -> Result<bool> {
        Ok(!matches!(self.kind().await?, Topology::Standalone))
    }

    /// The rules for which this collection was prepared.
    fn rules_of(&self, collection: &str) -> Option<Rules> {
        let collections = self.inner.collections.read();
        collections.get(collection).filter(|it| !it.is_attached).map(|it| it.rules)
    }

    fn prepared(&self, collection: &str, until: Deadline) -> Result<LockCollection<'_>> {
        let collections = self.inner.collections.read();
        match collections.get(collection) {
            Some(at) => Ok(LockCollection { store: self, at: Arc::clone(at), until }),
            None => Err(failure(
                StoreErrorKind::Other,
                format!("the collection `{collection}` is not prepared: register its type"),
            )),
        }
    }
}

fn own_collection(application: Option<&str>, kind: &str) -> String {
    match application {
        None => format!("doclock.{kind}"),
        Some(name) => format!("doclock.{name}.{kind}"),
    }
}

impl Locks for MongoStore {
    /// A standalone server has no change streams. Before the first answer of the server, nobody knows its kind.
    fn can(&self, ability: Ability) -> bool {
        ability != Ability::Watch || self.inner.topology.get() != Some(&Topology::Standalone)
    }

    async fn prepare(&self, collection: &str, rules: &Rules, _until: Deadline) -> StoreResult<()> {
        collection::prepare(self, collection, rules).await
    }

    verbs! { self, until:
        try_acquire(key: &LockKey, claim: &Claim) -> TryAcquire:
            self.prepared(key.collection(), until)?.try_acquire(key, claim),
            "acquiring the lock on {key:?}";
        renew(collection: &str, active: &[Active], ttl: Duration) -> Renewed:
            self.prepared(collection, until)?.renew(active, ttl),
            "renewing locks in {collection}";
        locks(collection: &str, query: Query<'_>, limit: usize) -> Vec<Lock>:
            self.prepared(collection, until)?.locks(query, limit),
            "listing locks in {collection}";
        hand_over(from: &Acquisition, claim: &Claim) -> HandedOver:
            self.prepared(from.key.collection(), until)?.hand_over(from, claim),
            "handing over the lock on {:?}", from.key;
        confirm(key: &LockKey, aid: &Aid, load: bool) -> Option<Confirmed>:
            self.prepared(key.collection(), until)?.confirm(key, aid, load),
            "confirming the lock on {key:?}";
        release_all(collection: &str, aid: &Aid) -> Vec<LockKey>:
            self.prepared(collection, until)?.release_all(aid),
            "releasing a session in {collection}";
        expire_in(held: &Acquisition, page: Option<PageId>, grace: Duration) -> Released:
            self.prepared(held.key.collection(), until)?.expire_in(held, page, grace),
            "shortening the lease on {:?}", held.key;
        ask(key: &LockKey, ask: &Ask, again: bool) -> Asked:
            self.prepared(key.collection(), until)?.ask(key, ask, again),
            "asking the holder of {key:?}";
        answer(held: &Acquisition, ask: Uuid, answer: &Answer) -> Answered:
            self.prepared(held.key.collection(), until)?.answer(held, ask, answer),
            "answering an ask for {:?}", held.key;
        withdraw(key: &LockKey, aid: &Aid, user: Option<&str>) -> ():
            self.prepared(key.collection(), until)?.withdraw(key, aid, user),
            "withdrawing an ask for {key:?}";
        set_place(key: &LockKey, waiters: &Waiters) -> Option<Ticket>:
            self.prepared(key.collection(), until)?.set_place(key.id(), waiters),
            "queueing for {key:?}";
        watch(collection: &str) -> Option<Watch>:
            self.prepared(collection, until)?.watch(),
            "watching the locks in {collection}";
    }

    async fn remove_lock(&self, removal: Removal<'_>, until: Deadline) -> StoreResult<Released> {
        let Some(key) = removal.key() else { return Ok(Released::AlreadyGone) };
        let removed = async { self.prepared(key.collection(), until)?.remove_lock(removal).await };
        removed.await.map_err(|e| {
            let doing = match removal {
                Removal::Release(_) => "releasing",
                Removal::Retract(_) => "giving back",
                Removal::Break { .. } => "breaking",
            };
            error::store_error(format!("{doing} the lock on {key:?}"), e)
        })
    }

    async fn collections(
        &self,
        like: &Pattern,
        limit: usize,
        _until: Deadline,
    ) -> StoreResult<Vec<String>> {
        let names = collection::collections(self, like, limit).await;
        names.doing(|| "looking for collections")
    }

    async fn status(&self, collections: &[&str], _until: Deadline) -> StoreResult<StoreStatus> {
        status::status(self, collections).await
    }
}
