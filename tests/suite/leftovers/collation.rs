use super::*;
use crate::rig::app::{put, record, title};
use actix_doclock::store::{Released, Saved};
use actix_doclock::{LockId, LockKey, Wait};

/// Collations by which `Home` and `home`, or `e` and `é`, are the same string.
fn collations() -> [Document; 3] {
    [
        doc! { "locale": "en", "strength": 2 },
        doc! { "locale": "de", "strength": 1 },
        doc! { "locale": "en", "strength": 2, "numericOrdering": true },
    ]
}

/// The collection is dropped, and created again with this default collation.
async fn recreate(database: &Database, collection: &str, collation: &Document) {
    database.collection::<Document>(collection).drop().await.unwrap();
    let create = doc! { "create": collection, "collation": collation.clone() };
    database.run_command(create).await.unwrap();
}

#[tokio::test]
async fn documents_that_get_a_collation_while_servers_run_are_found_by_their_own_id_only() {
    for database in [
        fresh_database().await,
        rig::fresh_database(&mongod::shared_standalone().await.uri()).await,
    ] {
        for collation in collations() {
            let app = App::on(&database).await;
            recreate(&database, "workitem", &collation).await;
            put(&database, "Home", "of the first").await;
            let first = app.locks.acquire(&key("Home"), Wait::no()).await.unwrap();
            let other = app.granted(&key("home"), &Aid::new()).await;

            // Nobody else reads or writes the document by a similar id.
            let error = app.store.load(&key("home"), Deadline::NONE).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Other, "{error}");
            assert!(error.to_string().contains("workitem has the collation"), "{error}");
            assert!(!app.store.exists(&key("home"), Deadline::NONE).await.unwrap());
            assert_eq!(app.save(&other, "of the other").await.unwrap(), Saved::DocumentGone);
            assert_eq!(title(&database, "Home").await, "of the first");
            assert_eq!(app.locks.release(&other).await.unwrap(), Released::Released);
            let held = app.locks.acquire(&key("home"), Wait::no()).await.unwrap();
            let set = doc! { "$set": { "title": "of the other" } };
            let updated = app.store.update::<WorkItem>(&held.held(), set).await;
            assert!(matches!(updated, Err(LockError::NotFound { .. })), "{updated:?}");
            let held = app.locks.acquire(&key("home"), Wait::no()).await.unwrap();
            held.delete().await.unwrap_err();
            assert_eq!(title(&database, "Home").await, "of the first");

            // The one that the document belongs to goes on.
            first.update(|it: &mut WorkItem| it.title = "saved".to_owned()).await.unwrap();
            assert_eq!(title(&database, "Home").await, "saved");
            first.release().await.unwrap();

            let text = problems(&app).await;
            assert!(text.contains("workitem has the collation"), "{text}");
            assert!(text.contains("copy it into a collection without"), "{text}");
            let text = start_error(&database).await;
            assert!(text.contains("workitem has the collation"), "{text}");
            database.drop().await.unwrap();
        }
    }
}

#[tokio::test]
async fn locks_that_get_a_collation_while_servers_run_are_told_apart_or_refused() {
    for collation in collations() {
        let database = fresh_database().await;
        let app = App::on(&database).await;
        recreate(&database, "workitem.lock", &collation).await;
        put(&database, "Home", "old").await;
        let alice = Aid::new();
        let lock = app.granted(&key("Home"), &alice).await;
        let began = Instant::now();
        let error = refused_at_once(began, &app, app.try_acquire(&key("home"), &Aid::new()).await);
        assert!(error.to_string().contains("workitem.lock has a collation"), "{error}");
        // Claims of one command, too.
        let claims = ["HOME", "hOME"].map(|id| {
            let app = app.clone();
            tokio::spawn(async move { app.try_acquire(&key(id), &Aid::new()).await })
        });
        for claim in claims {
            refused_at_once(began, &app, claim.await.unwrap());
        }
        assert!(app.locks.inspect(&key("home")).await.unwrap().is_none());
        assert!(app.locks.inspect(&key("Home")).await.unwrap().is_some());
        app.already_mine(&key("Home"), &alice).await;
        assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Saved);
        assert!(problems(&app).await.contains("workitem.lock has the collation"));
        assert_eq!(app.locks.release(&lock).await.unwrap(), Released::Released);
        assert!(record(&database, &key("Home")).await.is_none());
    }
}

/// An index on `_id` with the collation of its collection serves all other types.
#[tokio::test]
async fn ids_that_are_no_strings_are_not_affected() {
    #[derive(Debug, serde::Serialize, serde::Deserialize)]
    struct Numbered {
        #[serde(rename = "_id")]
        id: i64,
        title: String,
    }
    impl actix_doclock::Lockable for Numbered {
        type Id = i64;
        const COLLECTION: &'static str = "numbered";
    }
    let database = fresh_database().await;
    recreate(&database, "numbered", &collations()[0]).await;
    let app = App::unregistered(&database, |settings| settings).await;
    app.locks.register::<Numbered>().await.unwrap();
    let numbered = database.collection::<Document>("numbered");
    numbered.insert_one(doc! { "_id": 7_i64, "title": "old" }).await.unwrap();
    let key = LockKey::of::<Numbered>(7).unwrap();
    let guard = app.locks.acquire(&key, Wait::no()).await.unwrap();
    guard.update(|it: &mut Numbered| it.title = "new".to_owned()).await.unwrap();
    assert_eq!(problems(&app).await, "");
    let missing = LockKey::of::<Numbered>(8).unwrap();
    assert!(app.store.load(&missing, Deadline::NONE).await.unwrap().is_none());
}

/// The comparison of strings as they are is the usual one, so it costs no plan.
#[tokio::test]
async fn commands_by_id_are_planned_as_without_a_collation() {
    let database = fresh_database().await;
    let app = App::on(&database).await;
    put(&database, "a", "old").await;
    app.granted(&key("a"), &Aid::new()).await;
    let ids = |id: &LockId| doc! { "_id": id.to_string() };
    let filter = ids(key("a").id());
    let exactly = doc! { "locale": "simple" };
    for command in [
        doc! { "find": "workitem", "filter": filter.clone(), "collation": exactly.clone() },
        doc! { "findAndModify": "workitem.lock", "query": filter.clone(), "upsert": true,
        "update": [{ "$set": { "x": 1 } }], "collation": exactly.clone() },
        doc! { "update": "workitem.lock", "updates": [{ "q": filter.clone(), "upsert": true,
        "u": [{ "$set": { "x": 1 } }], "collation": exactly.clone() }] },
        doc! { "aggregate": "workitem.lock", "pipeline": [{ "$match": filter }], "cursor": {},
        "collation": exactly },
    ] {
        let explain = doc! { "explain": command, "verbosity": "queryPlanner" };
        let plan = database.run_command(explain).await.unwrap().to_string();
        assert!(plan.contains("IDHACK"), "{plan}");
    }
}

/// All commands that look for a string id say how to compare it.
#[tokio::test]
async fn each_command_by_id_compares_strings_as_they_are() {
    let uri = mongod::shared_replica_set().await;
    let (database, sent) = rig::recorded_database(uri.uri()).await;
    let app = App::with(&database, |settings| settings.break_policy(|_, _| true)).await;
    put(&database, "a", "old").await;
    sent.lock().unwrap().clear();
    let alice = Aid::new();
    let lock = app.granted(&key("a"), &alice).await;
    app.already_mine(&key("a"), &alice).await;
    app.held(&key("a")).await;
    assert_eq!(app.save(&lock, "new").await.unwrap(), Saved::Saved);
    app.store.load(&key("a"), Deadline::NONE).await.unwrap();
    app.store.exists(&key("a"), Deadline::NONE).await.unwrap();
    app.store.confirm(&key("a"), &alice, true, Deadline::NONE).await.unwrap();
    app.locks.inspect(&key("a")).await.unwrap();
    app.break_lock(&key("a")).await.unwrap();
    let guard = app.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    guard.update(|it: &mut WorkItem| it.title = "newer".to_owned()).await.unwrap();
    let set = doc! { "$set": { "title": "newest" } };
    app.store.update::<WorkItem>(&guard.held(), set).await.unwrap();
    guard.delete().await.unwrap();

    let sent = sent.lock().unwrap();
    let mut by_id = 0;
    for command in sent.iter() {
        let collection = command.values().next().unwrap().as_str().unwrap_or_default();
        if !["workitem", "workitem.lock"].contains(&collection) {
            continue;
        }
        let statements = |name| command.get_array(name).into_iter().flatten();
        let statements = statements("updates").chain(statements("deletes"));
        let statements: Vec<_> = statements.filter_map(|it| it.as_document()).collect();
        for part in if statements.is_empty() { vec![command] } else { statements } {
            let filter =
                ["q", "filter", "query"].into_iter().find_map(|it| part.get_document(it).ok());
            let looks =
                filter.is_some_and(|it| it.contains_key("_id")) || part.contains_key("pipeline");
            if looks {
                by_id += 1;
                assert!(part.contains_key("collation"), "{part}");
            }
        }
    }
    assert!(by_id >= 14, "{by_id}");
}
