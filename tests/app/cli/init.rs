//! `doclock init`, and what creates nothing.

use super::*;

/// The indexes with their options, by name.
async fn indexes(database: &Database) -> Vec<String> {
    let mut cursor = lock_records(database).list_indexes().await.unwrap();
    let mut indexes = Vec::new();
    while cursor.advance().await.unwrap() {
        let index = cursor.deserialize_current().unwrap();
        let options = index.options.unwrap();
        indexes.push(format!(
            "{:?} {:?} {:?}",
            index.keys, options.expire_after, options.partial_filter_expression
        ));
    }
    indexes.sort();
    indexes
}

#[tokio::test]
async fn init_creates_the_same_indexes_as_registering_and_reading_commands_change_nothing() {
    let (cli, database) = Cli::fresh().await;
    let (_, other) = Cli::fresh().await;
    App::on(&other).await;
    let ttl = format!("{}s", TTL.as_secs());
    for _ in 0..2 {
        cli.run(&["init", "workitem", "--ttl", &ttl]).await.ok();
        assert_eq!(indexes(&database).await, indexes(&other).await);
    }
    for args in [&["list"][..], &["show", "workitem/a"], &["doctor"]] {
        cli.run(args).await;
        assert_eq!(indexes(&database).await, indexes(&other).await, "{args:?}");
    }
    let made = cli.json(&["init", "workitem", "--ttl", "15m"]).await;
    let expected = json!({ "collection": "workitem", "expire_after_seconds": 960 });
    assert_eq!(made, json!({ "collections": [expected] }));
    // A server with the longer ttl may hold locks.
    let kept = cli.run(&["init", "workitem", "--ttl", "5m"]).await.ok();
    assert!(kept.contains("after 16m, as before") && kept.contains("doclock doctor"), "{kept}");
    for wrong in ["0s", "31days", "soon"] {
        assert_eq!(cli.run(&["init", "workitem", "--ttl", wrong]).await.code, Some(2));
    }
}

#[tokio::test]
async fn init_does_not_forget_the_fences_of_a_fenced_collection() {
    let (cli, database) = Cli::fresh().await;
    let store = MongoStore::new(&database);
    store.prepare(WorkItem::COLLECTION, &Rules::new(TTL).fenced(), Deadline::NONE).await.unwrap();
    lock_records(&database).insert_one(doc! { "_id": "a", "fence": 5_i64 }).await.unwrap();
    let refused = cli.run(&["init", "other", "workitem"]).await;
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.err.contains("--fenced"), "{refused:?}");
    cli.run(&["init", "workitem", "--fenced"]).await.ok();
    assert!(record(&database, &key("a")).await.is_some());
}

/// It would say that nothing is locked, and thaw nothing, in a database that was not meant.
#[tokio::test]
async fn a_database_without_locks_is_probably_mistyped_and_is_not_created() {
    let (cli, database) = Cli::fresh().await;
    let freeze = ["freeze", "--all", "--reason", "why", "--for", "1h"];
    for args in [&["list"][..], &["watch"], &["thaw", "--all"], &freeze] {
        let ran = cli.run(args).await;
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.err.contains(database.name()), "{ran:?}");
    }
    let all = database.client().list_database_names().await.unwrap();
    assert!(!all.contains(&database.name().to_owned()), "{all:?}");
}

#[tokio::test]
async fn no_lock_collection_is_made_for_a_lock_collection() {
    let (cli, database) = Cli::fresh().await;
    let ran = cli.run(&["init", "workitem.lock"]).await;
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.err.contains("`workitem`"), "{ran:?}");
    assert!(database.list_collection_names().await.unwrap().is_empty());
}

/// The names of the collections, and of their indexes.
async fn everything(database: &Database) -> Vec<String> {
    let mut all = Vec::new();
    for name in database.list_collection_names().await.unwrap() {
        let indexes = database.collection::<Document>(&name).list_index_names().await;
        all.push(format!("{name} {:?}", indexes.unwrap_or_default()));
    }
    all.sort();
    all
}

/// The slip of a hand, as in `--sessions=offer` for `offer`: a TTL index would delete the documents.
#[tokio::test]
async fn init_creates_nothing_in_a_collection_of_somebody_else() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    held_by(&app, &key("a"), "Alice").await;
    let offers: Vec<_> = (0..50)
        .map(|n| doc! { "_id": n, "user": "x", "state": "open", "expires": DateTime::MIN })
        .collect();
    for name in ["offer", "other.lock"] {
        database.collection::<Document>(name).insert_many(&offers).await.unwrap();
    }
    let view = doc! { "create": "shown", "viewOn": "offer", "pipeline": [] };
    database.run_command(view).await.unwrap();
    let before = everything(&database).await;
    for (args, told) in [
        (&["init", "--sessions=offer"][..], "did you mean `doclock init offer`"),
        (&["init", "fresh", "--sessions=offer"], "did you mean `doclock init offer`"),
        (&["init", "--sessions=workitem"], "did you mean `doclock init workitem`"),
        (&["init", "--sessions=shown"], "`shown` is a view"),
        (&["init", "--sessions=workitem.lock"], "is the name of a collection of locks"),
        (&["init", "--sessions=fresh.lock"], "is the name of a collection of locks"),
        (&["init", "--sessions=doclock.ended"], "is the name of a collection of locks"),
        (&["init", "--sessions=doclock.shop.frozen"], "is the name of a collection of locks"),
        (&["init", "workitem.lock"], "`workitem`"),
        (&["init", "doclock.ended"], "is a collection of this crate"),
        (&["init", "doclock.session"], "is a collection of this crate"),
        (&["init", "fresh", "other"], "other.lock contains documents that are no locks"),
    ] {
        let ran = cli.run(args).await;
        assert_eq!(ran.code, Some(2), "{args:?}: {ran:?}");
        assert!(ran.err.contains(told), "{args:?}: {ran:?}");
        assert_eq!(everything(&database).await, before, "{args:?}");
    }
    cli.run(&["init", "offer", "--sessions"]).await.ok();
}
