//! The store on MongoDB: locks beside the documents they guard.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Deref,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use mongodb::{
    Collection, Database,
    bson::{Document, RawDocumentBuf, doc},
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{OnceCell, Semaphore};

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
    acquire::Seen,
    admission::{Admission, Shared},
    collection::primary,
    error::{Doing, Result, failure},
    send::Groups,
};
use crate::{
    error::StoreErrorKind,
    key::LockKey,
    lock::{Aid, Lock, PageId},
    store::{
        Ability, Acquisition, Active, Claim, Confirmed, Deadline, HandedOver, Locks, Pattern,
        Query, Released, Removal, Renewed, Rules, StoreResult, StoreStatus, Ticket, Topology,
        TryAcquire, Waiters, Watch,
    },
};

mod acquire;
mod admission;
pub(super) mod codec;
mod collection;
mod connect;
mod difference;
mod documents;
mod ends;
mod error;
mod grant;
mod group;
mod hand_over;
mod held_lock;
mod indexes;
mod needs;
mod queue;
mod read;
mod record;
mod release;
mod renew;
mod send;
mod servers;
mod settle;
mod status;
mod survey;
mod transaction;
mod watch;
mod write_many;

pub(crate) use held_lock::Forget;
pub use held_lock::HeldLock;
pub use indexes::Index;
pub use needs::Needs;
pub use survey::{Survey, Surveyed};
pub use transaction::{TransactionError, WorkError};

/// The collection of the freezes.
const FROZEN: &str = "doclock.frozen";
/// The collection of the notes.
const SERVERS: &str = "doclock.server";
/// The collection of ended sessions: one record each, kept for a day.
const ENDED: &str = "doclock.ended";
const REMEMBER_ENDED: Duration = Duration::from_secs(24 * 60 * 60);

/// How many guarded saves and transactions are under way at once, so that they never take all connections: while no
/// majority follows the primary, each waits until its deadline. With the 64 writes on [single records](admission) these
/// are 96, fewer than [`connect::POOL`].
const SAVES: usize = 32;

/// The store on MongoDB 4.4 or later.
///
/// Locks of the collection `workitem` live in `workitem.lock` of the same database, ended sessions in
/// `doclock.ended`. All writes are acknowledged by a majority, all reads go to the primary, and a lease
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
    ended: Collection<Document>,
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
    seen: Seen,
    admission: Admission,
    groups: Groups,
    /// True if the log has said that the ids may have another type.
    has_warned: AtomicBool,
}

/// A call of a verb on one collection. Each verb is a method in a file of its own.
struct Call<'a> {
    store: &'a MongoStore,
    at: Arc<Prepared>,
    until: Deadline,
}

impl Deref for Call<'_> {
    type Target = Prepared;

    fn deref(&self) -> &Prepared {
        &self.at
    }
}

impl Call<'_> {
    /// The same call with another deadline.
    fn with(&self, until: Deadline) -> Self {
        Self { at: Arc::clone(&self.at), until, ..*self }
    }
}

impl MongoStore {
    /// Uses the database of a client that the application already has.
    ///
    /// Its server selection time-out (30 s by default) should be shorter than the manager's
    /// deadline; see [`connect`](Self::connect).
    #[must_use]
    pub fn new(database: &Database) -> Self {
        Self {
            inner: Arc::new(Inner {
                ended: primary(database, ENDED),
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

    /// The kind of deployment. The server is asked only once.
    ///
    /// # Errors
    /// If the database is not reached.
    pub async fn topology(&self) -> StoreResult<Topology> {
        self.kind().await.doing(|| "asking the server for its kind")
    }

    async fn kind(&self) -> Result<Topology> {
        let ask = async {
            let hello = self.database().run_command(doc! { "hello": 1 }).await?;
            Ok(status::topology(&hello))
        };
        self.inner.topology.get_or_try_init(|| ask).await.copied()
    }

    async fn has_transactions(&self) -> Result<bool> {
        Ok(!matches!(self.kind().await?, Topology::Standalone))
    }

    fn call(&self, collection: &str, until: Deadline) -> Result<Call<'_>> {
        let collections = self.inner.collections.read();
        match collections.get(collection) {
            Some(at) => Ok(Call { store: self, at: Arc::clone(at), until }),
            None => Err(failure(
                StoreErrorKind::Other,
                format!("the collection `{collection}` is not prepared: register its type"),
            )),
        }
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
            self.call(key.collection(), until)?.try_acquire(key, claim),
            "acquiring the lock on {key:?}";
        renew(collection: &str, active: &[Active], ttl: Duration) -> Renewed:
            self.call(collection, until)?.renew(active, ttl),
            "renewing locks in {collection}";
        locks(collection: &str, query: Query<'_>, limit: usize) -> Vec<Lock>:
            self.call(collection, until)?.locks(query, limit),
            "listing locks in {collection}";
        hand_over(from: &Acquisition, claim: &Claim) -> HandedOver:
            self.call(from.key.collection(), until)?.hand_over(from, claim),
            "handing over the lock on {:?}", from.key;
        confirm(key: &LockKey, aid: &Aid, load: bool) -> Option<Confirmed>:
            self.call(key.collection(), until)?.confirm(key, aid, load),
            "confirming the lock on {key:?}";
        release_all(collection: &str, aid: &Aid) -> Vec<LockKey>:
            self.call(collection, until)?.release_all(aid),
            "releasing a session in {collection}";
        expire_in(held: &Acquisition, page: Option<PageId>, grace: Duration) -> Released:
            self.call(held.key.collection(), until)?.expire_in(held, page, grace),
            "shortening the lease on {:?}", held.key;
        set_place(key: &LockKey, waiters: &Waiters) -> Option<Ticket>:
            self.call(key.collection(), until)?.set_place(key.id(), waiters),
            "queueing for {key:?}";
        watch(collection: &str) -> Option<Watch>:
            self.call(collection, until)?.watch(),
            "watching the locks in {collection}";
    }

    async fn remove_lock(&self, removal: Removal<'_>, until: Deadline) -> StoreResult<Released> {
        let Some(key) = removal.key() else { return Ok(Released::AlreadyGone) };
        let removed = async { self.call(key.collection(), until)?.remove_lock(removal).await };
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
