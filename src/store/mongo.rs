//! The store on MongoDB: locks beside the documents they guard.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use mongodb::{
    Collection, Database,
    bson::{Document as Record, doc},
};
use tokio::{
    sync::{OnceCell, Semaphore, SemaphorePermit},
    time::timeout_at,
};
use uuid::Uuid;

use self::{
    error::{retry_duplicate_key, store_error},
    grant::Answered,
    list::OfSession,
    pipeline::Target,
    prepared::{Prepared, majority, majority_acknowledges},
    removal::Grants,
};
use crate::{
    ended::{EndReason, SessionEnded},
    error::{StoreError, StoreErrorKind},
    freeze::{Freeze, NewFreeze, Scope},
    key::LockKey,
    lock::{Aid, Lock, PageId},
    server::ServerNote,
    store::{
        Acquisition, Active, Claim, Confirmed, Edit, Fleet, Format, HandedOver, LastEnd, Pattern,
        Query, Released, Removal, Renewed, Rules, Saved, Store, StoreStatus, StoredDocument, Swept,
        Ticket, Topology, TryAcquire, Waiters, Watch,
    },
    taken::{LockTaken, Settled},
};

mod attach;
pub(super) mod codec;
mod collation;
mod confirm;
mod connect;
mod doctor;
mod edit;
mod ends;
mod error;
mod freeze;
mod grant;
mod group;
mod indexes;
mod lanes;
mod list;
mod pipeline;
mod prepared;
mod queue;
mod record;
mod removal;
mod renew;
mod save;
mod seen;
mod server;
#[cfg(feature = "mongo-session")]
pub(crate) mod sessions;
mod status;
mod titles;
mod together;
mod transaction;
mod watch;
mod write;

pub use doctor::{Finding, Severity};
pub use transaction::{TransactionError, WorkError};

/// The collection of ended sessions: one record each, kept for a day.
const ENDED: &str = "doclock.ended";
/// The collection of web sessions, unless the application names another one.
pub(crate) const SESSIONS: &str = "doclock.session";
const REMEMBER_ENDED: Duration = Duration::from_secs(24 * 60 * 60);

/// How many guarded saves and transactions are under way at once, so that they never take all connections: while no
/// majority follows the primary, each waits until its deadline. Together with the writes on
/// [single records](lanes::Shared) they are fewer than [`connect::POOL`].
const SAVES: usize = 32;

/// How often a claim is repeated because yet another expired lock is in its way.
const TAKEOVERS: usize = 5;

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
    ended: Collection<Record>,
    /// The ways of the writes of all collections.
    lanes: lanes::Shared,
    saves: Semaphore,
    /// Asked only once.
    topology: OnceCell<Topology>,
    collections: RwLock<HashMap<String, Prepared>>,
    /// The collection of web sessions, if there is one.
    sessions: RwLock<Option<String>>,
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
                ended: majority(database, ENDED),
                database: database.clone(),
                lanes: lanes::Shared::new(),
                saves: Semaphore::new(SAVES),
                topology: OnceCell::new(),
                collections: RwLock::default(),
                sessions: RwLock::default(),
            }),
        }
    }

    /// The database, for the application's own queries.
    #[must_use]
    pub fn database(&self) -> &Database {
        &self.inner.database
    }

    /// The kind of deployment, asked only once.
    async fn topology(&self) -> Result<Topology, StoreError> {
        let ask = async {
            let hello = self.inner.database.run_command(doc! { "hello": 1 }).await;
            let hello = hello.map_err(|e| store_error("asking the server for its kind", e))?;
            Ok(status::topology(&hello))
        };
        self.inner.topology.get_or_try_init(|| ask).await.copied()
    }

    async fn has_transactions(&self) -> Result<bool, StoreError> {
        Ok(self.topology().await? != Topology::Standalone)
    }

    /// Waits for the turn of a save, until this time.
    async fn save_turn(&self, until: Instant) -> mongodb::error::Result<SemaphorePermit<'_>> {
        match timeout_at(until.into(), self.inner.saves.acquire()).await {
            Ok(Ok(turn)) => Ok(turn),
            _ => Err(error::not_sent()),
        }
    }

    fn now_has(&self, collection: &str, locks: Collection<Record>, rules: Rules) {
        let Inner { database, lanes, .. } = &*self.inner;
        let prepared = Prepared::new(database, collection, locks, rules, lanes.clone());
        let mut all = self.inner.collections.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(collection.to_owned(), prepared);
    }

    fn prepared(&self, collection: &str) -> Result<Prepared, StoreError> {
        let collections = self.inner.collections.read().unwrap_or_else(PoisonError::into_inner);
        collections.get(collection).cloned().ok_or_else(|| {
            StoreError::new(
                StoreErrorKind::Other,
                format!("the collection `{collection}` is not prepared: register its type"),
            )
        })
    }
}

impl Store for MongoStore {
    fn format(&self) -> Format {
        Format::Bson
    }

    async fn prepare(&self, collection: &str, rules: &Rules) -> Result<(), StoreError> {
        let database = &self.inner.database;
        self.has_transactions().await?;
        if rules.text_ids {
            collation::refuse(database, collection).await?;
        }
        let locks = majority(database, &format!("{collection}.lock"));
        indexes::of_locks(database, &locks, rules).await?;
        indexes::of_ended(database, &self.inner.ended).await?;
        self.now_has(collection, locks, *rules);
        Ok(())
    }

    async fn try_acquire(&self, key: &LockKey, claim: &Claim) -> Result<TryAcquire, StoreError> {
        let at = self.prepared(key.collection())?;
        let mut traced = Vec::new();
        for _ in 0..TAKEOVERS {
            match at.acquire(key, claim, &traced).await? {
                Answered::Answer(answer) => return Ok(answer),
                Answered::Expired(former) => {
                    traced.extend(self.leave_to_reaper(key, &former).await?);
                }
            }
        }
        let message = format!("acquiring the lock on {key:?}: too many expired locks in a row");
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
    }

    async fn renew(
        &self,
        collection: &str,
        active: &[Active],
        ttl: Duration,
    ) -> Result<Renewed, StoreError> {
        let renewed = self.prepared(collection)?.renew(active, ttl).await;
        renewed.map_err(|e| store_error(format!("renewing locks in {collection}"), e))
    }

    async fn set_place(
        &self,
        key: &LockKey,
        waiters: &Waiters,
    ) -> Result<Option<Ticket>, StoreError> {
        let at = self.prepared(key.collection())?;
        if !at.rules.fair {
            return Ok(None);
        }
        let set = at.set_place(key.id(), waiters).await;
        set.map_err(|e| retry_duplicate_key(store_error(format!("queueing for {key:?}"), e)))
    }

    async fn remove_lock(&self, removal: Removal<'_>) -> Result<Released, StoreError> {
        let Some(key) = removal.key() else { return Ok(Released::AlreadyGone) };
        let at = self.prepared(key.collection())?;
        let (doing, removed) = match removal {
            Removal::Release(it) => ("releasing", at.remove(&Target::of(it)).await),
            Removal::Retract(attempts) => {
                let Some(it) = Target::untold(attempts) else { return Ok(Released::AlreadyGone) };
                ("giving back", at.remove(&it).await)
            }
            Removal::Break { seen, taken } => ("breaking", at.take_away(seen, taken).await),
        };
        removed.map_err(|e| store_error(format!("{doing} the lock on {key:?}"), e))
    }

    // updateOne returns: 1 → the lock now expires within the grace period; 0 → it was gone already.
    async fn expire_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
    ) -> Result<Released, StoreError> {
        let key = &held.key;
        let at = self.prepared(key.collection())?;
        let mut filter = Target::exclusive(held).filter();
        if let Some(page) = page {
            filter.insert("page", doc! { "$eq": page.to_string() });
        }
        let shortened = at.shorten(key.id(), filter, pipeline::expire_in(grace)).await;
        shortened.map_err(|e| store_error(format!("shortening the lease on {key:?}"), e))
    }

    async fn hand_over(&self, from: &Acquisition, claim: &Claim) -> Result<HandedOver, StoreError> {
        self.prepared(from.key.collection())?.hand_over(from, claim).await
    }

    async fn end_session(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        worker: Uuid,
    ) -> Result<Vec<LockKey>, StoreError> {
        self.end_for_good(aid, reason, collections, worker).await
    }

    // A find, then the removal. A lock that is taken between the two is removed but not named. If the
    // reply to the removal is lost, the removal is repeated here and not by the manager: a second find
    // would find nothing to name.
    async fn release_all(&self, collection: &str, aid: &Aid) -> Result<Vec<LockKey>, StoreError> {
        let aids = std::slice::from_ref(aid);
        let OfSession { held, may_read } = self.of_session(collection, aid, usize::MAX).await?;
        let at = self.prepared(collection)?;
        let mut attempts = 3;
        loop {
            attempts -= 1;
            match at.remove_many(&Grants::Of(aids), may_read).await {
                Ok(()) => {
                    let keys: Vec<_> = held.into_iter().map(|lock| lock.key).collect();
                    self.are_gone(&keys);
                    return Ok(keys);
                }
                Err(e) => {
                    let error = store_error(format!("releasing a session in {collection}"), e);
                    if attempts == 0 || error.kind() != StoreErrorKind::Unavailable {
                        return Err(error);
                    }
                }
            }
        }
    }

    async fn allow_announcement(&self, aid: &Aid, worker: Uuid) -> Result<(), StoreError> {
        MongoStore::allow_announcement(self, aid, worker).await
    }

    async fn overdue(&self, names: &[&str], limit: usize) -> Result<Vec<Aid>, StoreError> {
        self.sessions_overdue(names, limit).await
    }

    async fn sweep(
        &self,
        collections: &[&str],
        worker: Uuid,
        limit: usize,
    ) -> Result<Swept, StoreError> {
        self.sweep_overdue(collections, worker, limit).await
    }

    async fn begin_taking(&self, taking: &LockTaken, lease: Duration) -> Result<(), StoreError> {
        self.note_taking(taking, lease).await
    }

    async fn settle_taking(
        &self,
        event: Uuid,
        worker: Uuid,
        settled: Settled,
    ) -> Result<(), StoreError> {
        self.settle_note(event, worker, settled).await
    }

    async fn takings(
        &self,
        collections: &[&str],
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<LockTaken>, StoreError> {
        self.take_notes(collections, worker, lease, limit).await
    }

    async fn set_freeze(
        &self,
        scope: &Scope,
        freeze: Option<&NewFreeze>,
    ) -> Result<Vec<Freeze>, StoreError> {
        self.write_freeze(scope, freeze).await
    }

    async fn freezes(&self) -> Result<Vec<Freeze>, StoreError> {
        self.read_freezes().await
    }

    async fn obey_freeze(&self, id: Uuid, server: Uuid) -> Result<(), StoreError> {
        self.note_obedience(id, server).await
    }

    async fn note_server(&self, id: Uuid, note: Option<&ServerNote>) -> Result<Fleet, StoreError> {
        self.write_note(id, note).await
    }

    async fn take_announcements(
        &self,
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<SessionEnded>, StoreError> {
        self.take_ends(worker, lease, limit).await
    }

    async fn announced(&self, worker: Uuid, ended: &[SessionEnded]) -> Result<(), StoreError> {
        self.ends_announced(worker, ended).await
    }

    async fn locks(
        &self,
        collection: &str,
        query: Query<'_>,
        limit: usize,
    ) -> Result<Vec<Lock>, StoreError> {
        self.locks_of(collection, query, limit).await
    }

    async fn last_ends(&self, aids: &[Aid]) -> Result<Vec<Option<LastEnd>>, StoreError> {
        self.last_ends_of(aids).await
    }

    async fn collections(&self, like: &Pattern, limit: usize) -> Result<Vec<String>, StoreError> {
        self.existing(like, limit).await
    }

    async fn watch(&self, collection: &str) -> Result<Option<Watch>, StoreError> {
        // A standalone server has neither change streams nor transactions.
        if !self.has_transactions().await? {
            return Ok(None);
        }
        let at = self.prepared(collection)?;
        watch::watch(&at.locks, Arc::clone(&at.seen), collection).await.map(Some)
    }

    async fn status(&self, collections: &[&str]) -> Result<StoreStatus, StoreError> {
        self.ask_status(collections).await
    }

    async fn exists(&self, key: &LockKey) -> Result<bool, StoreError> {
        let at = self.prepared(key.collection())?;
        let found = at.documents.find_one(pipeline::by_id(key.id())).projection(doc! { "_id": 1 });
        let found = found.max_time(lanes::read_limit()).await;
        Ok(found.map_err(|e| store_error(format!("looking for {key:?}"), e))?.is_some())
    }

    async fn confirm(
        &self,
        key: &LockKey,
        aid: &Aid,
        load: bool,
    ) -> Result<Option<Confirmed>, StoreError> {
        self.prepared(key.collection())?.confirm(key, aid, load).await
    }

    async fn load(&self, key: &LockKey) -> Result<Option<StoredDocument>, StoreError> {
        let at = self.prepared(key.collection())?;
        let found = at.documents.find_one(pipeline::by_id(key.id()));
        let found = found.max_time(lanes::read_limit()).await;
        let found = found.map_err(|e| store_error(format!("loading {key:?}"), e))?;
        if found.is_none() {
            at.warn_of_twin(key).await;
        }
        Ok(found.map(|raw| StoredDocument::from_bytes(Format::Bson, raw.into_bytes())))
    }

    async fn save(
        &self,
        held: &Acquisition,
        edit: &Edit,
        until: Instant,
    ) -> Result<Saved, StoreError> {
        let key = &held.key;
        let at = self.prepared(key.collection())?;
        if let Edit::Creation(document) = edit
            && !codec::has_id(document, key.id())
        {
            let why = format!("saving {key:?}: the document has another `_id` than the locked one");
            return Err(StoreError::new(StoreErrorKind::Rejected, why));
        }
        let save = save::Save {
            at: &at,
            id: key.id(),
            acquisition: at.live(held),
            renewed: at.touch(),
            edit,
            until,
        };
        let doing = || format!("saving {key:?}");
        let _turn = self.save_turn(until).await.map_err(|e| store_error(doing(), e))?;
        let saved = if self.has_transactions().await? {
            save.in_transaction(self.inner.database.client()).await
        } else {
            save.without_transaction().await
        };
        saved.map_err(|e| save::save_error(doing(), e))
    }
}
