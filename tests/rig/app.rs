//! An application server inside a test, and direct access to the stored data.

use std::time::{Duration, Instant};

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Actor, Aid, Holder, Lock, LockError, LockKey, LockManager, LockManagerBuilder, Lockable,
    MongoStore, StoreError, StoreErrorKind, TryAcquire,
    store::{Acquisition, Released, Saved, StoredDocument as Encoded, TakenBy, TakeoverKind},
};
use mongodb::bson::{Bson, Document, doc};
use mongodb::{ClientSession, Collection, Database};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::{client, mongod};

/// So long that no lock of a test expires unintentionally, however slow the machine.
pub(crate) const TTL: Duration = Duration::from_secs(600);

/// For tests that are not about deadlines: so long that no deadline passes.
pub(crate) const NO_DEADLINE: Duration = Duration::from_secs(60);

/// How long [`eventually`] waits for steps that usually take milliseconds.
const EVENTUALLY: Duration = Duration::from_secs(180);

/// The document type of the tests, in the collection `workitem`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WorkItem {
    #[serde(rename = "_id")]
    pub(crate) id: String,
    pub(crate) title: String,
}

impl Lockable for WorkItem {
    type Id = String;
    const COLLECTION: &'static str = "workitem";
}

/// The key of the work item with this id.
pub(crate) fn key(id: &str) -> LockKey {
    LockKey::new(WorkItem::COLLECTION, id).unwrap()
}

/// An application server: a manager, and the store below it for the verbs that only the web layer
/// calls.
#[derive(Debug, Clone)]
pub(crate) struct App {
    pub(crate) locks: LockManager,
    pub(crate) store: MongoStore,
}

impl App {
    /// An application server that has registered [`WorkItem`], with [`TTL`] and [`NO_DEADLINE`].
    pub(crate) async fn on(database: &Database) -> Self {
        Self::with(database, |settings| settings).await
    }

    /// Like [`Self::on`], with other settings.
    pub(crate) async fn with(
        database: &Database,
        settings: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder,
    ) -> Self {
        let app = Self::unregistered(database, settings).await;
        app.locks.register::<WorkItem>().await.unwrap();
        app
    }

    /// An application server that has registered nothing yet.
    pub(crate) async fn unregistered(
        database: &Database,
        settings: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder,
    ) -> Self {
        let store = MongoStore::new(database);
        // Without a reaper: where commands or records are counted, no other task may send or remove
        // any.
        let defaults =
            LockManager::builder(store.clone()).ttl(TTL).deadline(NO_DEADLINE).without_reaper();
        Self { locks: settings(defaults).build().await.unwrap(), store }
    }

    pub(crate) async fn try_acquire(
        &self,
        key: &LockKey,
        aid: &Aid,
    ) -> Result<TryAcquire, LockError> {
        self.locks.lock_for_session(key, aid, &Holder::new("alice")).await
    }

    /// The new lock on `key`.
    pub(crate) async fn granted(&self, key: &LockKey, aid: &Aid) -> Lock {
        match self.try_acquire(key, aid).await.unwrap() {
            TryAcquire::Granted(lock) => lock,
            other => panic!("not newly granted: {other:?}"),
        }
    }

    /// The lock that `aid` already had on `key`.
    pub(crate) async fn already_mine(&self, key: &LockKey, aid: &Aid) -> Lock {
        match self.try_acquire(key, aid).await.unwrap() {
            TryAcquire::AlreadyMine(lock) => lock,
            other => panic!("not already mine: {other:?}"),
        }
    }

    /// The lock that another session has on `key`.
    pub(crate) async fn held(&self, key: &LockKey) -> Lock {
        match self.try_acquire(key, &Aid::new()).await.unwrap() {
            TryAcquire::Held(lock) => lock,
            other => panic!("not held: {other:?}"),
        }
    }

    /// Saves under `lock`, a single time, so an unknown outcome is an error.
    pub(crate) async fn save(&self, lock: &Lock, title: &str) -> Result<Saved, StoreError> {
        let item = WorkItem { id: lock.key.id().to_string(), title: title.into() };
        let item = Encoded::encode(self.store.format(), &item).unwrap();
        let until = Instant::now() + self.locks.deadline();
        self.store.save(&Acquisition::of(lock).unwrap(), &item.into(), Deadline::at(until)).await
    }

    /// Breaks the lock on `key`; needs a policy that allows it.
    pub(crate) async fn break_lock(&self, key: &LockKey) -> Option<Lock> {
        break_on(&self.locks, key, &Actor::new("admin")).await.unwrap()
    }
}

/// Breaks the lock on `key`. Returns it; `None` if there is none.
pub(crate) async fn break_on(
    locks: &LockManager,
    key: &LockKey,
    by: &Actor,
) -> Result<Option<Lock>, LockError> {
    let Some(lock) = locks.inspect(key).await? else { return Ok(None) };
    let broken = locks.break_lock(&lock, by, "").await?;
    Ok((broken == Released::Released).then_some(lock))
}

/// An administrator who breaks locks without a reason.
pub(crate) fn by_root() -> TakenBy {
    TakenBy { kind: TakeoverKind::Broken, by: "root".to_owned(), reason: String::new() }
}

/// A manager of the locks in this database, without a tight deadline.
pub(crate) fn manager_on(database: &Database) -> LockManagerBuilder {
    LockManager::builder(MongoStore::new(database)).deadline(NO_DEADLINE)
}

/// The settings of a server that waits no longer than this for its database.
pub(crate) fn with_deadline(
    deadline: Duration,
) -> impl FnOnce(LockManagerBuilder) -> LockManagerBuilder {
    move |settings| settings.deadline(deadline)
}

/// The lock records as they are stored.
pub(crate) fn lock_records(database: &Database) -> Collection<Document> {
    database.collection(&format!("{}.lock", WorkItem::COLLECTION))
}

/// The lock record of this document, expired or not.
pub(crate) async fn record(database: &Database, key: &LockKey) -> Option<Document> {
    lock_records(database).find_one(doc! { "_id": { "$eq": Bson::from(key.id()) } }).await.unwrap()
}

/// How many lock records there are, live or not.
pub(crate) async fn count(database: &Database) -> u64 {
    lock_records(database).count_documents(doc! {}).await.unwrap()
}

/// Takes the lock away, as a break does.
pub(crate) async fn take_away(database: &Database, key: &LockKey) {
    let gone = lock_records(database).delete_one(doc! { "_id": key.id().to_string() }).await;
    assert_eq!(gone.unwrap().deleted_count, 1);
}

/// A transaction that has touched the lock records of these documents. A server that dies between the
/// touch and the commit of its saves leaves such a transaction behind.
pub(crate) async fn stuck(database: &Database, keys: &[LockKey]) -> ClientSession {
    let client = client(&mongod::strict_replica_set().await.uri()).await;
    let mut session = client.start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    for key in keys {
        let locks = format!("{}.lock", key.collection());
        let locks = client.database(database.name()).collection::<Document>(&locks);
        let touch = locks
            .update_one(doc! { "_id": key.id().to_string() }, doc! { "$set": { "touched": true } });
        assert_eq!(touch.session(&mut session).await.unwrap().modified_count, 1);
    }
    session
}

/// Makes all locks older, as if their sessions had been idle for that long.
pub(crate) async fn age_all(database: &Database, since: Duration) {
    let by = i64::try_from(since.as_millis()).unwrap();
    let older = vec![doc! { "$set": { "ts": { "$subtract": ["$ts", by] } } }];
    lock_records(database).update_many(doc! {}, older).await.unwrap();
}

/// Writes a document without regard to its lock.
pub(crate) async fn put(database: &Database, id: &str, title: &str) {
    let items = database.collection(WorkItem::COLLECTION);
    items.insert_one(WorkItem { id: id.into(), title: title.into() }).await.unwrap();
}

/// The stored title of the document.
pub(crate) async fn title(database: &Database, id: &str) -> String {
    let items = database.collection::<WorkItem>(WorkItem::COLLECTION);
    items.find_one(doc! { "_id": id }).await.unwrap().expect("the document is there").title
}

/// Waits until the condition holds.
pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < EVENTUALLY, "{what}: not within {EVENTUALLY:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// The kind of a store error; panics at an answer and at any other error.
pub(crate) fn store_error_kind<T: std::fmt::Debug>(result: Result<T, LockError>) -> StoreErrorKind {
    match result {
        Err(LockError::Store(error)) => error.kind(),
        other => panic!("not an error of the store: {other:?}"),
    }
}
