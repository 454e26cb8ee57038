//! `doclock break`.

use super::*;

#[tokio::test]
async fn break_removes_the_lock_and_logs_it() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    rig::app::put(&database, "a", "before").await;
    let lock = held_by(&app, &key("a"), "Alice").await;
    let other = held_by(&app, &key("b"), "Bob").await;

    // No person is there to confirm.
    let unasked = cli.run(&["break", "workitem/a", "--reason", "on holiday"]).await;
    assert_eq!(unasked.code, Some(2), "{unasked:?}");
    assert!(unasked.err.contains("--yes"), "{unasked:?}");
    let no_reason = cli.run(&["break", "workitem/a", "--yes"]).await;
    assert_eq!(no_reason.code, Some(2), "{no_reason:?}");
    let token = other.token.unwrap().to_string();
    let wrong = ["break", "workitem/a", "--reason", "x", "--yes", "--token", &token];
    assert_eq!(cli.run(&wrong).await.code, Some(1));
    assert!(record(&database, &lock.key).await.is_some());

    let broken = cli.run(&["break", "workitem/a", "--reason", "on holiday", "--yes"]).await;
    assert_eq!(broken.code, Some(0), "{broken:?}");
    for told in ["actix_doclock::audit", "\"oncall\"", "\"on holiday\"", "\"Alice\""] {
        assert!(broken.err.contains(told), "{told}: {broken:?}");
    }
    assert_eq!(record(&database, &lock.key).await, None);
    assert!(record(&database, &other.key).await.is_some());
    assert_eq!(app.save(&lock, "after").await.unwrap(), Saved::Lost);

    let again = cli.run(&["break", "workitem/a", "--reason", "x", "--yes", "--json"]).await;
    assert_eq!((again.code, again.json()), (Some(1), json!({ "broken": [] })));
}

#[tokio::test]
async fn break_removes_all_readers_or_the_named_one() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    let mut tokens = Vec::new();
    for name in ["Ann", "Ben", "Cid"] {
        let mut claim = crate::rig::claims::claim(actix_doclock::Mode::Shared);
        claim.holder = Holder::new(name);
        tokens.push(claim.token);
        assert!(matches!(
            app.store.try_acquire(&key("a"), &claim, Deadline::NONE).await.unwrap(),
            TryAcquire::Granted(_)
        ));
    }
    let readers = || async {
        let show = cli.run(&["show", "workitem/a", "--json"]).await.json();
        show["locks"].as_array().unwrap().len()
    };
    assert_eq!(readers().await, 3);
    let token = tokens[1].to_string();
    let args = ["break", "workitem/a", "--reason", "x", "--yes", "--json"];
    let one = cli.json(&[&args[..5], &["--token", &token]].concat()).await;
    assert_eq!(one["broken"][0]["holder"]["label"], "Ben");
    assert_eq!(readers().await, 2);
    let rest = cli.run(&args).await.json();
    assert_eq!(rest["broken"].as_array().unwrap().len(), 2, "{rest}");
    assert_eq!(readers().await, 0);
}

#[tokio::test]
async fn break_leaves_the_waiters_their_places() {
    let (cli, database) = Cli::fresh().await;
    let store = MongoStore::new(&database);
    store.prepare(WorkItem::COLLECTION, &Rules::new(TTL).fair(), Deadline::NONE).await.unwrap();
    let exclusive = || crate::rig::claims::claim(actix_doclock::Mode::Exclusive);
    assert!(matches!(
        store.try_acquire(&key("a"), &exclusive(), Deadline::NONE).await.unwrap(),
        TryAcquire::Granted(_)
    ));
    let waits = crate::rig::claims::queues(&store, &key("a"), actix_doclock::Mode::Exclusive).await;
    let late = exclusive();
    for claim in [&waits, &late] {
        let answer = store.try_acquire(&key("a"), claim, Deadline::NONE).await.unwrap();
        assert!(matches!(answer, TryAcquire::Held(_)), "{answer:?}");
    }
    cli.run(&["break", "workitem/a", "--reason", "x", "--yes"]).await.ok();
    let jumped = store.try_acquire(&key("a"), &late, Deadline::NONE).await.unwrap();
    assert!(matches!(jumped, TryAcquire::Held(_)), "{jumped:?}");
    let let_in = store.try_acquire(&key("a"), &waits, Deadline::NONE).await.unwrap();
    assert!(matches!(let_in, TryAcquire::Granted(_)), "{let_in:?}");
}

#[tokio::test]
async fn a_break_by_the_command_is_noted_for_the_listener_of_the_application() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    held_by(&app, &key("a"), "Alice").await;
    cli.run(&["break", "workitem/a", "--reason", "on holiday", "--yes"]).await.ok();
    let notes = database.collection::<Document>("doclock.ended");
    let note = notes.find_one(doc! { "step": "tell" }).await.unwrap().expect("a note");
    assert!(note.get("asked").is_none(), "it is settled: {note}");
    let taking = note.get_document("taking").unwrap();
    assert_eq!(taking.get_str("reason").unwrap(), "on holiday");
}

#[tokio::test]
async fn a_break_by_another_token_says_that_the_document_is_locked() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    held_by(&app, &key("a"), "alice").await;
    let other = "11111111-1111-4111-8111-111111111111";
    let ran = cli.run(&["break", "workitem/a", "--yes", "--reason", "why", "--token", other]).await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.err.contains("is locked, but not by the lock with this token"), "{ran:?}");
    assert!(record(&database, &key("a")).await.is_some());
}

#[tokio::test]
async fn a_break_that_fails_for_one_reader_names_the_others() {
    let server = mongod::Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    let cli = Cli { uri: server.uri(), database: database.name().to_owned() };
    let app = App::on(&database).await;
    for name in ["Ann", "Ben"] {
        let mut claim = crate::rig::claims::claim(actix_doclock::Mode::Shared);
        claim.holder = Holder::new(name);
        let _ = app.store.try_acquire(&key("a"), &claim, Deadline::NONE).await.unwrap();
    }
    let denied = doc! { "failCommands": ["update", "findAndModify"], "errorCode": 13 };
    let denied = doc! {
        "configureFailPoint": "failCommand", "mode": { "times": 1 }, "data": denied,
    };
    server.admin(denied).await;
    let ran = cli.run(&["break", "workitem/a", "--reason", "x", "--yes", "--json"]).await;
    assert_eq!(ran.code, Some(4), "{ran:?}");
    assert_eq!(ran.json()["broken"].as_array().unwrap().len(), 1, "{ran:?}");
}
