//! The crate itself, at two levels: the verbs of the store, and the manager that users call.

use std::{collections::HashMap, sync::Mutex, sync::OnceLock, time::Duration};

use actix_doclock::{
    Aid, Holder, LockId, LockKey, LockManager, LockToken, Lockable, Mode, MongoStore, Released,
    TryAcquire, Wait,
    store::{Claim, Store, verbs::*},
};
use doclock_conformance::Shorthand;
use mongodb::Database;
use serde::{Deserialize, Serialize};

use crate::{
    load::{Contender, Turn, cycle},
    report::Role,
};

pub const STORE: &str = "MongoStore";
pub const MANAGER: &str = "LockManager";
pub const WAITING: &str = "LockManager, waiting";

/// The document that is locked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Page {
    #[serde(rename = "_id")]
    pub id: String,
    pub text: String,
}

impl Lockable for Page {
    type Id = String;
    const COLLECTION: &'static str = "page";
}

/// The same document with a fair queue.
#[derive(Debug, Serialize, Deserialize)]
pub struct FairPage {
    #[serde(rename = "_id")]
    id: String,
}

impl Lockable for FairPage {
    type Id = String;
    const COLLECTION: &'static str = "fair_page";
    const FAIR: bool = true;
}

pub fn key(turn: Turn) -> LockKey {
    LockKey::of::<Page>(turn.name()).unwrap()
}

pub fn fair_key(turn: Turn) -> LockKey {
    LockKey::of::<FairPage>(turn.name()).unwrap()
}

/// With the default settings.
pub async fn manager(store: impl Store) -> LockManager {
    let locks = LockManager::builder(store).build().await.unwrap();
    locks.register::<Page>().await.unwrap();
    locks.register::<FairPage>().await.unwrap();
    locks
}

pub async fn on(database: &Database) -> LockManager {
    manager(MongoStore::new(database)).await
}

pub fn claim(aid: &Aid) -> Claim {
    Claim {
        aid: aid.clone(),
        token: LockToken::new(),
        tab: None,
        page: None,
        holder: Holder::new("alice"),
        taken: None,
        mode: Mode::Exclusive,
        ttl: Duration::from_secs(150),
        max_hold: None,
        turn: None,
        upgrades: None,
    }
}

/// The session of a task, the same for the whole run.
pub fn session(task: usize) -> Aid {
    static SESSIONS: OnceLock<Mutex<HashMap<usize, Aid>>> = OnceLock::new();
    let mut sessions = SESSIONS.get_or_init(Mutex::default).lock().unwrap();
    sessions.entry(task).or_insert_with(Aid::new).clone()
}

/// The verbs of a store that `manager` has prepared.
pub fn store(at: &'static str, store: MongoStore) -> Contender {
    Contender::new(
        at,
        STORE,
        Role::Ours,
        cycle(move |turn| {
            let store = store.clone();
            async move {
                let (key, aid) = (key(turn), session(turn.task));
                let claim = claim(&aid);
                match store.try_acquire(&key, &claim, Deadline::NONE).await.unwrap() {
                    TryAcquire::Granted(_) => {
                        let released = store.release(&key, &aid, claim.token, claim.mode).await;
                        released.unwrap() == Released::Released
                    }
                    TryAcquire::Held(_) => false,
                    TryAcquire::AlreadyMine(lock) => panic!("{lock:?} was not given back"),
                    TryAcquire::Lost(key) => panic!("{key:?} was not upgraded"),
                }
            }
        }),
    )
}

pub fn locks(at: &'static str, locks: LockManager) -> Contender {
    Contender::new(
        at,
        MANAGER,
        Role::Ours,
        cycle(move |turn| {
            let locks = locks.clone();
            async move {
                let (key, aid) = (key(turn), session(turn.task));
                match locks.lock_for_session(&key, &aid, &Holder::new("alice")).await.unwrap() {
                    TryAcquire::Granted(lock) => {
                        locks.release(&lock).await.unwrap() == Released::Released
                    }
                    TryAcquire::Held(_) => false,
                    TryAcquire::AlreadyMine(lock) => panic!("{lock:?} was not given back"),
                    TryAcquire::Lost(key) => panic!("{key:?} was not upgraded"),
                }
            }
        }),
    )
}

/// As jobs and workers lock: they wait for their turn.
pub fn waiting(at: &'static str, locks: LockManager) -> Contender {
    let cycle = cycle(move |turn| {
        let locks = locks.clone();
        async move {
            let guard = locks.acquire(&key(turn), Wait::until_acquired()).await.unwrap();
            guard.release().await.unwrap() == Released::Released
        }
    });
    Contender::new(at, WAITING, Role::Ours, cycle).waiting()
}

/// A record as this crate writes it, of a lock on `id`.
pub async fn record(locks: &LockManager, database: &Database) -> mongodb::bson::Document {
    let (key, aid) = (LockKey::of::<Page>("sample".into()).unwrap(), Aid::new());
    let granted = locks.lock_for_session(&key, &aid, &Holder::new("alice")).await.unwrap();
    let TryAcquire::Granted(lock) = granted else { panic!("not granted: {granted:?}") };
    let records = database.collection(&format!("{}.lock", Page::COLLECTION));
    let LockId::String(id) = key.id() else { panic!("not a string") };
    let record = records.find_one(mongodb::bson::doc! { "_id": id }).await.unwrap();
    locks.release(&lock).await.unwrap();
    record.expect("the lock that was just granted")
}
