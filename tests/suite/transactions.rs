//! Guarded writes of the application's own: updates by operators, and transactions.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use actix_doclock::{
    Aid, LockError, LockGuard, LockKey, Lockable, MongoStore, StoreErrorKind, Wait,
    store::{HeldLock, TransactionError, WorkError},
};
use futures_util::future::join3;
use mongodb::bson::{Document, doc};
use mongodb::{ClientSession, Collection, Database, error::Error};
use serde::{Deserialize, Serialize};
use tokio::{sync::Notify, time::sleep};

use crate::rig::app::{
    App, WorkItem, key, lock_records, put, record, take_away, title, with_deadline,
};
use crate::rig::faulty::Faulty;
use crate::rig::{self, mongod};

async fn app() -> (App, Database) {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    (App::on(&database).await, database)
}

async fn guard(app: &App, key: &LockKey) -> LockGuard {
    app.locks.acquire(key, Wait::no()).await.unwrap()
}

fn entries(database: &Database) -> Collection<Document> {
    database.collection("entry")
}

/// Books two things: an entry, and the title of the document.
async fn book(
    store: &MongoStore,
    held: &[HeldLock],
    title: &'static str,
) -> Result<(), TransactionError> {
    let database = store.database();
    let (entries, items) = (entries(database), database.collection::<Document>("workitem"));
    let work = async move |session: &mut ClientSession| {
        entries.insert_one(doc! { "title": title }).session(&mut *session).await?;
        let (this, set) = (doc! { "_id": "a" }, doc! { "$set": { "title": title } });
        items.update_one(this, set).session(session).await?;
        Ok(())
    };
    store.transaction(held, work).await
}

async fn count(database: &Database) -> u64 {
    entries(database).count_documents(doc! {}).await.unwrap()
}

fn is_lost<T>(outcome: &Result<T, TransactionError>) -> bool {
    matches!(outcome, Err(TransactionError::Lock(LockError::Lost { .. })))
}

#[derive(Debug, Serialize, Deserialize)]
struct Tagged {
    #[serde(rename = "_id")]
    id: String,
    tags: Vec<String>,
}

impl Lockable for Tagged {
    type Id = String;
    const COLLECTION: &'static str = "workitem";
}

#[tokio::test]
async fn an_update_by_operators_returns_the_document_after_it() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let guard = guard(&app, &key("a")).await;
    for update in [doc! { "$push": { "tags": "new" } }, doc! { "$addToSet": { "tags": "urgent" } }]
    {
        let _: Result<Tagged, _> = app.store.update(&guard.held(), update).await;
    }
    let pipeline = vec![doc! { "$set": { "tags": { "$reverseArray": "$tags" } } }];
    let now: Tagged = app.store.update(&guard.held(), pipeline).await.unwrap();
    assert_eq!(now.tags, ["urgent", "new"]);
    assert_eq!(title(&database, "a").await, "old");
}

#[tokio::test]
async fn an_update_renews_the_lock() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let guard = guard(&app, &key("a")).await;
    let before = record(&database, &key("a")).await.unwrap();
    let set = doc! { "$set": { "title": "old" } };
    let _: WorkItem = app.store.update(&guard.held(), set).await.unwrap();
    let after = record(&database, &key("a")).await.unwrap();
    assert!(after.get_datetime("ts").unwrap() >= before.get_datetime("ts").unwrap());
    assert_ne!(after, before, "it would conflict with no break");
}

#[tokio::test]
async fn an_update_without_the_lock_writes_nothing() {
    for database in [
        rig::fresh_database(mongod::shared_replica_set().await.uri()).await,
        rig::fresh_database(&mongod::shared_standalone().await.uri()).await,
    ] {
        let app = App::on(&database).await;
        put(&database, "a", "old").await;
        let guard = guard(&app, &key("a")).await;
        take_away(&database, &key("a")).await;
        app.granted(&key("a"), &Aid::new()).await;
        let set = doc! { "$set": { "title": "late" } };
        let late: Result<WorkItem, _> = app.store.update(&guard.held(), set).await;
        assert!(matches!(late, Err(LockError::Lost { .. })), "{late:?}");
        assert_eq!(title(&database, "a").await, "old");
    }
}

#[tokio::test]
async fn what_is_wrong_with_an_update_is_said() {
    let (app, database) = app().await;
    let lost = guard(&app, &key("a")).await;
    let set = || doc! { "$set": { "title": "new" } };
    let absent: Result<WorkItem, _> = app.store.update(&lost.held(), set()).await;
    assert!(matches!(absent, Err(LockError::NotFound { .. })), "{absent:?}");
    assert!(app.locks.inspect(&key("a")).await.unwrap().is_none(), "a lock on nothing");
    let guard = guard(&app, &key("a")).await;
    put(&database, "a", "old").await;
    for refused in
        [doc! { "$set": { "_id": "b" } }, doc! { "$push": { "title": 1 } }, doc! { "title": 1 }]
    {
        let refused: Result<WorkItem, _> = app.store.update(&guard.held(), refused).await;
        assert!(matches!(refused, Err(LockError::Rejected { .. })), "{refused:?}");
    }
    let unreadable: Result<Tagged, _> = app.store.update(&guard.held(), set()).await;
    assert!(matches!(unreadable, Err(LockError::Document { .. })), "{unreadable:?}");
    assert_eq!(title(&database, "a").await, "old", "an update to what is no `Tagged`");
    let shared = app.locks.acquire_shared(&key("b"), Wait::no()).await.unwrap();
    let shared: Result<WorkItem, _> = app.store.update(&shared.held(), set()).await;
    assert!(matches!(shared, Err(LockError::Misconfigured(_))), "{shared:?}");
}

#[tokio::test]
async fn a_transaction_writes_everything_under_its_locks() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let (a, b) = (guard(&app, &key("a")).await, guard(&app, &key("b")).await);
    book(&app.store, &[a.held(), b.held()], "new").await.unwrap();
    assert_eq!((count(&database).await, title(&database, "a").await), (1, "new".to_owned()));
}

#[tokio::test]
async fn a_transaction_without_one_of_its_locks_writes_nothing() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let (a, b) = (guard(&app, &key("a")).await, guard(&app, &key("b")).await);
    take_away(&database, &key("b")).await;
    let late = book(&app.store, &[a.held(), b.held()], "late").await;
    assert!(is_lost(&late), "{late:?}");
    assert_eq!((count(&database).await, title(&database, "a").await), (0, "old".to_owned()));
}

#[tokio::test]
async fn a_transaction_whose_lock_is_taken_over_meanwhile_writes_nothing() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let guard = guard(&app, &key("a")).await;
    let entries = entries(&database);
    let late = app
        .store
        .transaction(&[guard.held()], async |session| -> Result<_, Error> {
            entries.insert_one(doc! {}).session(session).await?;
            if record(&database, &key("a")).await.is_some_and(|it| it.get_str("by").is_err()) {
                take_away(&database, &key("a")).await;
                let next = doc! { "_id": "a", "by": "the next holder" };
                lock_records(&database).insert_one(next).await.unwrap();
            }
            Ok(())
        })
        .await;
    assert!(is_lost(&late), "{late:?}");
    assert_eq!(count(&database).await, 0);
}

#[tokio::test]
async fn a_break_waits_for_a_transaction_that_commits() {
    let Faulty { proxy, app, database, other } = Faulty::new().await;
    put(&database, "a", "old").await;
    let guard = guard(&app, &key("a")).await;
    proxy.hold_request("commitTransaction");
    let next_holder = async {
        proxy.until_fired(1).await;
        let taken = other.locks.acquire(&key("a"), Wait::no()).await;
        assert!(matches!(taken, Err(LockError::Held(_))), "{taken:?}");
        proxy.let_go();
    };
    let held = [guard.held()];
    let (booked, ()) = tokio::join!(book(&app.store, &held, "new"), next_holder);
    booked.unwrap();
    assert_eq!(title(&database, "a").await, "new");
}

#[tokio::test]
async fn an_error_of_the_work_aborts_the_transaction_and_keeps_the_lock() {
    let (app, database) = app().await;
    let guard = guard(&app, &key("a")).await;
    let entries = entries(&database);
    let failed = app
        .store
        .transaction(&[guard.held()], async |session| -> Result<_, Error> {
            entries.insert_one(doc! {}).session(session).await?;
            Err::<(), _>(Error::custom("out of stock"))
        })
        .await;
    let Err(TransactionError::Work(why)) = failed else { panic!("its own error") };
    assert_eq!(why.get_custom::<&str>(), Some(&"out of stock"));
    assert_eq!(count(&database).await, 0);
    assert!(app.locks.inspect(&key("a")).await.unwrap().is_some());
}

#[tokio::test]
async fn a_transaction_is_repeated_after_a_conflict() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let guard = guard(&app, &key("a")).await;
    let (items, calls) = (database.collection::<Document>("workitem"), AtomicUsize::new(0));
    let add = |text: &str| vec![doc! { "$set": { "title": { "$concat": ["$title", text] } } }];
    let this = || doc! { "_id": "a" };
    let booked = app
        .store
        .transaction(&[guard.held()], async |session| -> Result<_, Error> {
            // Another program writes in between.
            if calls.fetch_add(1, Relaxed) == 0 {
                items.update_one(this(), add(" theirs")).await?;
            }
            items.update_one(this(), add(" ours")).session(session).await?;
            Ok(calls.load(Relaxed))
        })
        .await;
    assert_eq!(booked.unwrap(), 2, "calls");
    assert_eq!(title(&database, "a").await, "old theirs ours");
}

#[tokio::test]
async fn a_transaction_whose_commit_is_answered_by_nobody_is_written_once() {
    let Faulty { proxy, app, database, .. } = Faulty::new().await;
    put(&database, "a", "old").await;
    let guard = guard(&app, &key("a")).await;
    proxy.drop_reply_to("commitTransaction");
    book(&app.store, &[guard.held()], "new").await.unwrap();
    assert_eq!((proxy.fired(), count(&database).await), (1, 1));
}

#[tokio::test]
async fn a_transaction_whose_commit_is_not_answered_in_time_is_of_unknown_outcome() {
    let Faulty { proxy, app, database, .. } = Faulty::with_deadline(Duration::from_secs(3)).await;
    put(&database, "a", "old").await;
    let guard = guard(&app, &key("a")).await;
    proxy.hold_replies_to("commitTransaction");
    match book(&app.store, &[guard.held()], "new").await {
        Err(TransactionError::Lock(LockError::OutcomeUnknown(_))) => {}
        other => panic!("{other:?}"),
    }
    proxy.let_go();
}

#[tokio::test]
async fn a_guarded_write_whose_commit_is_not_answered_in_time_is_of_unknown_outcome() {
    let Faulty { proxy, app, database, .. } = Faulty::with_deadline(Duration::from_secs(3)).await;
    for id in ["a", "c"] {
        put(&database, id, "old").await;
    }
    let [a, b, c] = [key("a"), key("b"), key("c")];
    let (a, b, c) = join3(guard(&app, &a), guard(&app, &b), guard(&app, &c)).await;
    // Far more than the time allows.
    for _ in 0..1_000 {
        proxy.drop_reply_to("commitTransaction");
    }
    let new = WorkItem { id: "b".to_owned(), title: "new".to_owned() };
    let update = a.update(|item: &mut WorkItem| item.title = "new".to_owned());
    let (updated, created, deleted) = join3(update, b.create(&new), c.delete()).await;
    for (what, outcome) in [("update", updated.map(drop)), ("create", created), ("delete", deleted)]
    {
        assert!(matches!(outcome, Err(LockError::OutcomeUnknown(_))), "{what}: {outcome:?}");
    }
}

#[tokio::test]
async fn a_transaction_that_takes_too_long_writes_nothing() {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    let app = App::with(&database, with_deadline(Duration::from_secs(3))).await;
    let guard = guard(&app, &key("a")).await;
    let entries = entries(&database);
    let late = app
        .store
        .transaction(&[guard.held()], async |session| -> Result<_, Error> {
            entries.insert_one(doc! {}).session(session).await?;
            sleep(Duration::from_secs(600)).await;
            Ok(())
        })
        .await;
    assert!(is_too_slow(&late), "{late:?}");
    assert_eq!(count(&database).await, 0);
}

fn is_too_slow<T>(outcome: &Result<T, TransactionError>) -> bool {
    matches!(outcome, Err(TransactionError::Lock(LockError::TooSlow { .. })))
}

#[tokio::test]
async fn a_transaction_that_lets_a_renewal_come_in_between_each_time_is_too_slow() {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    let settings = |settings| with_deadline(Duration::from_secs(5))(settings).ttl(RENEWED * 3);
    const RENEWED: Duration = Duration::from_secs(1);
    let app = App::with(&database, settings).await;
    let guard = guard(&app, &key("a")).await;
    let (entries, aid) = (entries(&database), guard.lock().aid.clone());
    let late = app
        .store
        .transaction(&[guard.held()], async |session| -> Result<_, Error> {
            entries.insert_one(doc! {}).session(session).await?;
            sleep(RENEWED).await;
            app.locks.renew(&aid).await.unwrap();
            Ok(())
        })
        .await;
    assert!(is_too_slow(&late), "{late:?}");
    assert_eq!(count(&database).await, 0);
}

#[tokio::test]
async fn a_transaction_in_an_outage_is_not_called_slow() {
    let Faulty { proxy, app, database, .. } = Faulty::with_deadline(Duration::from_secs(3)).await;
    let guard = guard(&app, &key("a")).await;
    let entries = entries(app.store.database());
    let late = app
        .store
        .transaction(&[guard.held()], async |session| -> Result<_, Error> {
            proxy.blackhole();
            entries.insert_one(doc! {}).session(session).await?;
            Ok(())
        })
        .await;
    match late {
        Err(TransactionError::Lock(LockError::Store(e))) => {
            assert_eq!(e.kind(), StoreErrorKind::Unavailable, "{e}");
        }
        other => panic!("{other:?}"),
    }
    proxy.heal();
    assert_eq!(count(&database).await, 0);
}

/// Of an application.
#[derive(Debug)]
enum BookingError {
    Full,
    Database(Error),
}

impl From<Error> for BookingError {
    fn from(error: Error) -> Self {
        Self::Database(error)
    }
}

impl WorkError for BookingError {
    fn of_command(&self) -> Option<&Error> {
        match self {
            Self::Database(error) => Some(error),
            Self::Full => None,
        }
    }
}

#[tokio::test]
async fn an_application_gets_its_own_error_back_and_is_repeated_only_where_that_may_help() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let guard = guard(&app, &key("a")).await;
    let (entries, calls) = (entries(&database), AtomicUsize::new(0));
    let (items, this) = (database.collection::<Document>("workitem"), || doc! { "_id": "a" });
    let set = |title: &str| doc! { "$set": { "title": title } };
    let full = app
        .store
        .transaction(&[guard.held()], async |session| {
            // Another program writes in between.
            if calls.fetch_add(1, Relaxed) == 0 {
                entries.find_one(doc! {}).session(&mut *session).await?;
                items.update_one(this(), set("theirs")).await?;
            }
            items.update_one(this(), set("ours")).session(session).await?;
            Err::<(), _>(BookingError::Full)
        })
        .await;
    assert!(matches!(full, Err(TransactionError::Work(BookingError::Full))), "{full:?}");
    assert_eq!((calls.load(Relaxed), title(&database, "a").await), (2, "theirs".to_owned()));

    let twice = app
        .store
        .transaction(&[guard.held()], async |session| -> Result<(), BookingError> {
            calls.fetch_add(1, Relaxed);
            entries.insert_one(doc! { "_id": 1 }).session(&mut *session).await?;
            entries.insert_one(doc! { "_id": 1 }).session(session).await?;
            Ok(())
        })
        .await;
    assert!(matches!(twice, Err(TransactionError::Work(BookingError::Database(_)))), "{twice:?}");
    assert_eq!((calls.load(Relaxed), count(&database).await), (3, 0));
}

#[tokio::test]
async fn a_dropped_transaction_writes_nothing_and_blocks_nobody() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let guard = guard(&app, &key("a")).await;
    let (held, has_written) = ([guard.held()], Notify::new());
    let items = database.collection::<Document>("workitem");
    let endless = app.store.transaction(&held, async |session| -> Result<_, Error> {
        let set = doc! { "$set": { "title": "dropped" } };
        items.update_one(doc! { "_id": "a" }, set).session(session).await?;
        has_written.notify_one();
        std::future::pending::<()>().await;
        Ok(())
    });
    tokio::select! {
        ended = endless => panic!("it has ended: {ended:?}"),
        () = has_written.notified() => {}
    }
    book(&app.store, &held, "new").await.unwrap();
    assert_eq!((count(&database).await, title(&database, "a").await), (1, "new".to_owned()));
}

#[tokio::test]
async fn a_transaction_of_the_application_commits_only_under_its_lock() {
    let (app, database) = app().await;
    let guard = guard(&app, &key("a")).await;
    for is_held in [true, false] {
        if !is_held {
            take_away(&database, &key("a")).await;
        }
        let mut session = database.client().start_session().await.unwrap();
        session.start_transaction().await.unwrap();
        entries(&database).insert_one(doc! {}).session(&mut session).await.unwrap();
        match app.store.confirm_in(&mut session, &[guard.held()]).await {
            Ok(()) => session.commit_transaction().await.unwrap(),
            refused => {
                assert!(!is_held && is_lost(&refused), "{refused:?}");
                session.abort_transaction().await.unwrap();
            }
        }
    }
    assert_eq!(count(&database).await, 1);
}

#[tokio::test]
async fn what_cannot_be_a_guarded_transaction_is_refused() {
    let (app, _) = app().await;
    let nothing = book(&app.store, &[], "new").await;
    assert!(matches!(nothing, Err(TransactionError::Lock(LockError::Misconfigured(_)))));
    let shared = app.locks.acquire_shared(&key("a"), Wait::no()).await.unwrap();
    let shared = book(&app.store, &[shared.held()], "new").await;
    assert!(matches!(shared, Err(TransactionError::Lock(LockError::Misconfigured(_)))));
    let alone = rig::fresh_database(&mongod::shared_standalone().await.uri()).await;
    let app = App::on(&alone).await;
    let guard = guard(&app, &key("a")).await;
    let alone = book(&app.store, &[guard.held()], "new").await;
    assert!(matches!(alone, Err(TransactionError::Lock(LockError::Misconfigured(_)))));
}

#[tokio::test]
async fn a_job_can_run_a_transaction_in_a_task_of_its_own() {
    let (app, database) = app().await;
    put(&database, "a", "old").await;
    let guard = guard(&app, &key("a")).await;
    let store = app.store.clone();
    let items = database.collection::<Document>("workitem");
    let job = tokio::spawn(async move {
        let work = async move |session: &mut ClientSession| {
            let (this, set) = (doc! { "_id": "a" }, doc! { "$set": { "title": "new" } });
            items.update_one(this, set).session(session).await
        };
        store.transaction(&[guard.held()], work).await.unwrap();
        drop(guard);
    });
    job.await.unwrap();
    assert_eq!(title(&database, "a").await, "new");
}

#[tokio::test]
async fn work_that_panics_writes_nothing_and_keeps_the_lock() {
    let (app, database) = app().await;
    let (store, guard, entries) =
        (app.store.clone(), guard(&app, &key("a")).await, entries(&database));
    let held = [guard.held()];
    let panics = tokio::spawn(async move {
        let work = async move |session: &mut ClientSession| {
            entries.insert_one(doc! {}).session(session).await?;
            panic!("on purpose")
        };
        store.transaction::<(), Error>(&held, work).await
    });
    assert!(panics.await.unwrap_err().is_panic());
    assert_eq!(count(&database).await, 0);
    put(&database, "a", "old").await;
    book(&app.store, &[guard.held()], "new").await.unwrap();
    assert_eq!((count(&database).await, title(&database, "a").await), (1, "new".to_owned()));
}
