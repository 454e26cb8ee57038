use super::*;
use crate::rig::app::{NO_DEADLINE, eventually, put, title};
use crate::rig::log::{count_logged, log_lines};
use actix_doclock::store::Saved;
use actix_doclock::{LockKey, LockManager, MongoStore, TryAcquire, Wait};
use mongodb::Client;
use mongodb::options::{ReadPreference, ReadPreferenceOptions, SelectionCriteria};

/// Everything that reads or writes, on this database.
async fn works(database: &Database, what: &str) {
    let app = App::with(database, |settings| settings.break_policy(|_, _| true)).await;
    put(database, "a", "old").await;
    let lock = app.granted(&key("a"), &Aid::new()).await;
    assert_eq!(app.save(&lock, "replaced").await.unwrap(), Saved::Saved, "{what}");
    app.locks.release(&lock).await.unwrap();

    let guard = app.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    // The difference to the loaded document, which the transaction reads again.
    guard.update(|it: &mut WorkItem| it.title = "changed".to_owned()).await.unwrap();
    assert_eq!(title(database, "a").await, "changed", "{what}");
    let set = doc! { "$set": { "title": "updated" } };
    app.store.update::<WorkItem>(&guard.held(), set).await.unwrap();
    let items = app.store.database().collection::<Document>("workitem");
    let held = [guard.held()];
    let read = app.store.transaction(&held, async |session| {
        let found = items.find_one(doc! { "_id": "a" }).session(&mut *session).await?;
        items.insert_one(doc! { "_id": "b", "title": "x" }).session(session).await?;
        Ok::<_, mongodb::error::Error>(found)
    });
    let read = read.await.unwrap().unwrap();
    assert_eq!(read.get_str("title").unwrap(), "updated", "{what}");
    guard.delete().await.unwrap();
    let new = app.locks.acquire(&key("new"), Wait::no()).await.unwrap();
    new.create(&WorkItem { id: "new".to_owned(), title: "made".to_owned() }).await.unwrap();
    eventually("the deleted document has no lock", async || {
        app.locks.list().await.unwrap().len() == 1
    })
    .await;
    app.break_lock(&key("new")).await.unwrap();
    app.locks.sweep().await.unwrap();
    let mut events = app.locks.events();
    events.next().await.unwrap();
    eventually("the watch is open", async || {
        app.locks.health().wakeups.values().all(|it| format!("{it:?}") == "Told")
    })
    .await;
    assert_eq!(problems(&app).await, "", "{what}");
    let findings = doclock::diagnose(&app.store, &["workitem"], None).await.unwrap();
    assert!(findings.iter().all(|it| it.severity < doclock::Severity::Warning), "{findings:?}");
    database.drop().await.unwrap();
}

#[tokio::test]
async fn a_read_preference_of_the_uri_changes_nothing() {
    let server = mongod::local_replica_set().await;
    for preference in [
        "secondaryPreferred",
        "nearest",
        "primaryPreferred",
        "secondaryPreferred&maxStalenessSeconds=120",
        "nearest&readPreferenceTags=dc:east&readPreferenceTags=",
    ] {
        let uri = format!("{}&readPreference={preference}", server.uri());
        works(&rig::fresh_database(&uri).await, preference).await;
    }
}

/// Without any secondary, no read by such a preference is possible at all.
#[tokio::test]
async fn a_read_preference_of_the_applications_own_client_or_database_changes_nothing() {
    let server = mongod::local_replica_set().await;
    let secondary =
        || ReadPreference::Secondary { options: Some(ReadPreferenceOptions::default()) };
    let mut options = rig::options(&server.uri()).await;
    options.selection_criteria = Some(SelectionCriteria::ReadPreference(secondary()));
    let client = Client::with_options(options).unwrap();
    let prefers = client.database(&rig::fresh_name());
    let app = App::on(&prefers).await;
    let items = rig::client(&server.uri()).await.database(prefers.name());
    put(&items, "a", "old").await;
    let guard = app.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    guard.update(|it: &mut WorkItem| it.title = "changed".to_owned()).await.unwrap();
    let set = doc! { "$set": { "title": "updated" } };
    app.store.update::<WorkItem>(&guard.held(), set).await.unwrap();
    guard.delete().await.unwrap();
    assert_eq!(problems(&app).await, "");
}

fn polled(locks: &LockManager) -> usize {
    locks.health().wakeups.values().filter(|it| format!("{it:?}") == "Polling").count()
}

/// The client of an application, with the driver's default of ten connections.
#[tokio::test]
async fn watches_leave_connections_to_requests_and_say_what_to_set() {
    log_lines();
    let server = mongod::shared_replica_set().await;
    let database = rig::fresh_database(server.uri()).await;
    let manager = async |store: MongoStore| {
        let settings = LockManager::builder(store).deadline(NO_DEADLINE).without_reaper();
        let locks = settings.build().await.unwrap();
        for n in 0..10 {
            locks.register_in::<WorkItem>(&format!("w{n}")).await.unwrap();
        }
        locks
    };
    let before = count_logged(&["WARN", "collections can be watched"]);
    let locks = manager(MongoStore::new(&database)).await;
    // Other tests may log the same.
    assert!(count_logged(&["WARN", "collections can be watched"]) > before);
    assert_eq!(locks.check_health().await.problems, [""; 0], "nothing is watched yet");
    let mut events = locks.events();
    events.next().await.unwrap();
    eventually("all are watched or polled", async || {
        let wakeups = locks.health().wakeups;
        wakeups.len() == 10 && wakeups.values().all(|it| format!("{it:?}") != "Opening")
    })
    .await;
    assert_eq!(polled(&locks), 5, "half of the ten connections");
    let text = locks.check_health().await.problems.join("; ");
    assert!(text.contains("maxPoolSize") && text.contains("with_connections"), "{text}");
    // All collections are told of, by events or by a list.
    for n in 0..10 {
        let key = LockKey::new(format!("w{n}"), "a").unwrap();
        let holder = actix_doclock::Holder::new("alice");
        let granted = locks.lock_for_session(&key, &Aid::new(), &holder).await.unwrap();
        assert!(matches!(granted, TryAcquire::Granted(_)));
        let told = async {
            while events.next().await.is_some_and(|it| it.lock().is_none_or(|lock| lock.key != key))
            {
            }
        };
        tokio::time::timeout(NO_DEADLINE, told).await.unwrap();
    }

    let locks = manager(MongoStore::new(&database).with_connections(20)).await;
    let mut events = locks.events();
    events.next().await.unwrap();
    eventually("all are watched", async || {
        let wakeups = locks.health().wakeups;
        wakeups.len() == 10 && wakeups.values().all(|it| format!("{it:?}") == "Told")
    })
    .await;
    assert_eq!(locks.check_health().await.problems, [""; 0]);
}

/// A watch that ends gives its place to the next one.
#[tokio::test]
async fn the_place_of_a_watch_that_ends_is_taken_by_another_one() {
    let database = fresh_database().await;
    let app = App::unregistered(&database, |settings| settings).await;
    let store = MongoStore::new(&database).with_connections(2);
    for collection in ["one", "two"] {
        let rules = actix_doclock::store::Rules::new(Duration::from_secs(60));
        store.prepare(collection, &rules, Deadline::NONE).await.unwrap();
    }
    let first = store.watch("one", Deadline::NONE).await.unwrap();
    let refused = store.watch("two", Deadline::NONE).await.unwrap_err();
    assert!(refused.to_string().contains("maxPoolSize"), "{refused}");
    drop(first);
    assert!(store.watch("two", Deadline::NONE).await.unwrap().is_some());
    drop(app);
}
