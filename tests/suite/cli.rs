//! The command `doclock`, as an operator on call uses it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Actor, Aid, Holder, LockError, LockId, LockKey, Lockable, MongoStore, TryAcquire,
    store::{Rules, Saved},
};
use mongodb::Database;
use mongodb::bson::{DateTime, Document, doc, oid::ObjectId};
use serde_json::{Value, json};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::rig::app::{App, NO_DEADLINE, TTL, WorkItem, eventually, key, lock_records, record};
use crate::rig::log::log_lines;
use crate::rig::{self, fresh_name, mongod};

mod doctor;

/// The database that the command connects to.
#[derive(Clone, Debug)]
struct Cli {
    uri: String,
    database: String,
}

/// The exit code and the output of a run.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    /// Asserts success, and returns the standard output.
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.out
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

impl Cli {
    async fn fresh() -> (Self, Database) {
        let uri = mongod::shared_replica_set().await.uri().to_owned();
        let database = rig::fresh_database(&uri).await;
        (Self { uri, database: database.name().to_owned() }, database)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(rig::command());
        command
            .args(args)
            .env("MONGODB_URI", &self.uri)
            .env("MONGODB_DATABASE", &self.database)
            .env("USER", "oncall")
            .env_remove("RUST_LOG")
            .stdin(Stdio::null());
        command
    }

    async fn run(&self, args: &[&str]) -> Ran {
        let mut command = self.command(args);
        let output = spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let Output { status, stdout, stderr } = output;
        let [out, err] = [stdout, stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        Ran { code: status.code(), out, err }
    }

    async fn json(&self, args: &[&str]) -> Value {
        let ran = self.run(&[args, &["--json"]].concat()).await;
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.json()
    }
}

async fn held_by(app: &App, key: &LockKey, label: &str) -> actix_doclock::Lock {
    match app.locks.lock_for_session(key, &Aid::new(), &Holder::new(label)).await.unwrap() {
        TryAcquire::Granted(lock) => lock,
        other => panic!("not newly granted: {other:?}"),
    }
}

/// A lock of a program that does not use this crate.
async fn foreign(database: &Database, collection: &str, mut record: Document) {
    record.extend(doc! { "aid": "legacy" });
    let locks = database.collection::<Document>(&format!("{collection}.lock"));
    let filter = doc! { "_id": record.get("_id").cloned() };
    let now = vec![doc! { "$replaceWith": { "$mergeObjects": [record, { "ts": "$$NOW" }] } }];
    locks.update_one(filter, now).upsert(true).await.unwrap();
}

fn lines(out: &str, containing: &str) -> usize {
    out.lines().filter(|line| line.contains(containing)).count()
}

#[tokio::test]
async fn list_shows_every_live_lock_of_the_database() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    held_by(&app, &key("a"), "Alice").await;
    held_by(&app, &key("5"), "Bob").await;
    let gone = held_by(&app, &key("gone"), "Carol").await;
    rig::age(&database, &gone.key, TTL).await;
    foreign(&database, "counter", doc! { "_id": 5 }).await;

    let out = cli.run(&["list"]).await.ok();
    assert!(out.starts_with("DOCUMENT"), "{out}");
    assert_eq!(out.lines().count(), 4, "{out}");
    assert_eq!(lines(&out, "workitem/a "), 1, "{out}");
    // A string that looks like a number must not be taken for a number.
    assert_eq!(lines(&out, "workitem/\"5\" "), 1, "{out}");
    assert_eq!(lines(&out, "counter/5 "), 1, "{out}");
    assert_eq!(lines(&out, "another program"), 1, "{out}");

    let out = cli.run(&["list", "--collection", "workitem", "--holder", "ali"]).await.ok();
    assert_eq!((out.lines().count(), lines(&out, "Alice")), (2, 1), "{out}");
    let out = cli.run(&["list", "--collection", "counter", "--collection", "workitem"]).await.ok();
    assert_eq!(out.lines().count(), 4, "{out}");

    let typo = cli.run(&["list", "--collection", "workitme"]).await;
    assert_eq!(typo.code, Some(2), "{typo:?}");
    assert!(typo.err.contains("no collection `workitme.lock`"), "{typo:?}");
}

#[tokio::test]
async fn a_program_gets_one_json_document() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    let lock = held_by(&app, &key("5"), "Alice \"A\"").await;
    let id = ObjectId::new();
    foreign(&database, "zeta", doc! { "_id": id }).await;

    let list = cli.json(&["list"]).await;
    let [ours, theirs] = &list["locks"].as_array().unwrap()[..] else { panic!("{list}") };
    assert_eq!(ours["key"], json!("workitem/\"5\""));
    assert_eq!((&ours["collection"], &ours["id"]), (&json!("workitem"), &json!("5")));
    assert_eq!(
        (&ours["mode"], &ours["holder"]),
        (&json!("exclusive"), &json!({ "label": "Alice \"A\"" }))
    );
    assert_eq!(ours["token"], json!(lock.token.unwrap().to_string()));
    assert!(ours["expires_in_ms"].as_u64().unwrap() <= TTL.as_millis() as u64, "{ours}");
    assert!(ours["since"].as_str().unwrap().ends_with('Z'), "{ours}");
    assert_eq!(theirs["id"], json!({ "$oid": id.to_hex() }));
    assert_eq!((&theirs["holder"], &theirs["token"]), (&Value::Null, &Value::Null));
    // The session must stay secret.
    assert!(!list.to_string().contains(lock.aid.as_str()), "{list}");

    let show = cli.json(&["show", ours["key"].as_str().unwrap()]).await;
    assert_eq!(show["locks"].as_array().unwrap().len(), 1, "{show}");
    let free = cli.run(&["show", "workitem/free", "--json"]).await;
    assert_eq!((free.code, free.json()), (Some(1), json!({ "locks": [] })));
}

#[tokio::test]
async fn list_shows_the_field_of_the_documents_that_the_operator_names() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    for id in ["a", "b", "c"] {
        held_by(&app, &key(id), "Alice").await;
    }
    let (hex, id) = (ObjectId::new(), 7);
    foreign(&database, "zeta", doc! { "_id": hex }).await;
    foreign(&database, "zeta", doc! { "_id": id }).await;
    let write = async |collection: &str, document: Document| {
        let documents = database.collection::<Document>(collection);
        let filter = doc! { "_id": document.get("_id").cloned() };
        documents.delete_one(filter).await.unwrap();
        documents.insert_one(document).await.unwrap();
    };
    let title = "Contract \u{1b}[31m with \u{202e}Miller";
    write("workitem", doc! { "_id": "a", "title": title, "of": { "name": "inner" } }).await;
    write("workitem", doc! { "_id": "b", "title": 4711_i64, "of": "flat" }).await;
    write("workitem", doc! { "_id": "c", "title": ["no", "text"] }).await;
    write("zeta", doc! { "_id": hex, "title": "Seven" }).await;
    // The shell writes numbers as doubles.
    write("zeta", doc! { "_id": 7.0, "title": 1.5 }).await;

    let out = cli.run(&["list", "--title", "title"]).await.ok();
    assert!(out.lines().next().unwrap().contains("TITLE"), "{out}");
    let row = |document: &str, title: &str| {
        out.lines().any(|line| line.starts_with(document) && line.contains(title))
    };
    assert!(row("workitem/a ", "Contract \\u{1b}[31m with \\u{202e}Miller"), "{out}");
    assert!(row("workitem/b ", "  4711  ") && row("zeta/7 ", "  1.5  "), "{out}");
    assert!(row(&format!("zeta/{hex}"), "Seven"), "{out}");
    assert!(!out.contains("text"), "{out}");

    let list = cli.json(&["list", "--collection", "workitem", "--title", "of.name"]).await;
    let titles: Vec<_> =
        list["locks"].as_array().unwrap().iter().map(|lock| &lock["title"]).collect();
    assert_eq!(titles, [&json!("inner"), &Value::Null, &Value::Null]);
    let plain = cli.json(&["list"]).await;
    assert!(plain["locks"][0].get("title").is_none(), "{plain}");

    for wrong in ["$where", "a..b", ""] {
        let ran = cli.run(&["list", "--title", wrong]).await;
        assert_eq!(ran.code, Some(2), "{ran:?}");
    }
}

#[tokio::test]
async fn show_finds_a_document_whatever_the_type_of_its_id() {
    let (cli, database) = Cli::fresh().await;
    let hex = ObjectId::new();
    let uuid = uuid::Uuid::new_v4();
    let binary = mongodb::bson::Binary {
        subtype: mongodb::bson::spec::BinarySubtype::Uuid,
        bytes: uuid.as_bytes().to_vec(),
    };
    for id in [hex.into(), binary.into(), 7.into(), 8_i64.into(), 9.0.into(), "a/b ?".into()] {
        let id: mongodb::bson::Bson = id;
        foreign(&database, "any", doc! { "_id": id }).await;
    }
    let (hex, uuid) = (hex.to_hex(), uuid.to_string());
    for id in [&hex, &uuid, "7", "8", "9", "a/b ?", r#"{"$numberLong":"7"}"#, r#""a/b ?""#] {
        let out = cli.run(&["show", &format!("any/{id}")]).await.ok();
        assert_eq!(lines(&out, "document"), 1, "{id}: {out}");
    }
    // In JSON, an id has exactly one type.
    for other in [format!("\"{hex}\""), r#""7""#.to_owned()] {
        let ran = cli.run(&["show", &format!("any/{other}")]).await;
        assert_eq!((ran.code, ran.out.contains("is not locked")), (Some(1), true), "{ran:?}");
    }
    // Two documents to which the text may refer.
    foreign(&database, "any", doc! { "_id": "7" }).await;
    let out = cli.run(&["show", "any/7"]).await.ok();
    assert_eq!((lines(&out, "any/7"), lines(&out, "any/\"7\"")), (1, 1), "{out}");
}

#[tokio::test]
async fn labels_do_not_reach_the_terminal_as_commands() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    let evil = "\u{1b}[2J\u{9b}1m\u{202e}exe\u{2066}\r\nworkitem/fake\u{7}";
    let lock = held_by(&app, &key("\u{1b}]0;x\u{7}"), evil).await;
    held_by(&app, &key("b"), &"long".repeat(1_000)).await;
    let id = lock.key.to_string();
    let reason = ["--reason", "\u{1b}[31m\u{202e}", "--yes"];
    for args in [vec!["list"], vec!["show", &id], [&["break", &id][..], &reason].concat()] {
        let ran = cli.run(&args).await;
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let written = ran.out + ran.err.as_str();
        let obeyed = |c: char| (c.is_control() && c != '\n') || "\u{202e}\u{2066}".contains(c);
        assert!(!written.contains(obeyed), "{args:?}: {written:?}");
        assert_eq!(lines(&written, "workitem/fake"), lines(&written, "[2J"), "{written}");
        assert!(written.lines().all(|line| line.chars().count() < 400), "{written}");
    }
}

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
        let mut claim = crate::shared::claim(actix_doclock::Mode::Shared);
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
    let exclusive = || crate::shared::claim(actix_doclock::Mode::Exclusive);
    assert!(matches!(
        store.try_acquire(&key("a"), &exclusive(), Deadline::NONE).await.unwrap(),
        TryAcquire::Granted(_)
    ));
    let waits = crate::shared::queues(&store, &key("a"), actix_doclock::Mode::Exclusive).await;
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

#[tokio::test]
async fn the_exit_code_distinguishes_wrong_use_from_an_outage() {
    let nowhere = |uri: &str| Cli { uri: uri.to_owned(), database: fresh_name() };
    for (cli, code) in [
        (nowhere("mongodb://root:s3cret@127.0.0.1:1/?serverSelectionTimeoutMS=100"), 3),
        (nowhere("mongodb://root:s3cret@127.0.0.1:1:1/"), 2),
        (nowhere("s3cret"), 2),
        (nowhere(""), 2),
    ] {
        let ran = cli.run(&["list"]).await;
        assert_eq!(ran.code, Some(code), "{ran:?}");
        assert!(!ran.err.is_empty() && !ran.err.contains("panicked"), "{ran:?}");
        assert!(cli.uri == "s3cret" || !ran.err.contains("s3cret"), "{ran:?}");
        let help = cli.run(&["list", "--help"]).await;
        assert!(!help.out.contains("s3cret"), "{help:?}");
        assert!(help.out.contains("MONGODB_URI"), "{help:?}");
    }
    let (cli, _) = Cli::fresh().await;
    for args in [&["nothing"][..], &["show", "workitem"], &["show", "/a"], &["break"]] {
        assert_eq!(cli.run(args).await.code, Some(2), "{args:?}");
    }
    let help = cli.run(&["--help"]).await.ok();
    assert!(help.contains("Exit codes:"), "{help}");
}

#[tokio::test]
async fn a_closed_output_pipe_is_no_error() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    held_by(&app, &key("a"), "Alice").await;
    for args in [&["list"][..], &["list", "--json"], &["show", "workitem/a"], &["watch"]] {
        let mut command = cli.command(args);
        let ended = spawn_blocking(move || {
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            drop(child.stdout.take());
            child.wait_with_output().unwrap()
        });
        let ended = ended.await.unwrap();
        let err = String::from_utf8_lossy(&ended.stderr);
        assert_eq!((ended.status.code(), &*err), (Some(0), ""), "{args:?}");
    }
}

#[tokio::test]
async fn watch_reports_events_as_they_happen() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    held_by(&app, &key("before"), "Alice").await;
    let mut watch = cli.command(&["watch", "--json"]);
    let mut child = watch.stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
    let (lines, mut told) = tokio::sync::mpsc::unbounded_channel::<Value>();
    let reading = spawn_blocking(move || {
        while let Some(Ok(line)) = out.next() {
            if lines.send(serde_json::from_str(&line).expect("JSON on each line")).is_err() {
                break;
            }
        }
    });
    let mut next = async || timeout(NO_DEADLINE, told.recv()).await.expect("an event").unwrap();
    let first = next().await;
    assert_eq!(first["event"], "resync");
    assert_eq!(first["locks"][0]["key"], "workitem/before");
    // The command's own resync, sent once it watches the collection's changes.
    assert_eq!(next().await["event"], "resync");

    let lock = held_by(&app, &key("a"), "Bob").await;
    let event = next().await;
    assert_eq!(
        (&event["event"], &event["lock"]["key"]),
        (&json!("acquired"), &json!("workitem/a"))
    );
    assert_eq!(event["lock"]["holder"]["label"], "Bob");
    app.locks.release(&lock).await.unwrap();
    assert_eq!(next().await["event"], "released");
    cli.run(&["break", "workitem/before", "--reason", "why not", "--yes"]).await.ok();
    let event = next().await;
    assert_eq!(event["event"], "broken");
    assert_eq!((&event["by"], &event["reason"]), (&json!("oncall"), &json!("why not")));
    child.kill().unwrap();
    child.wait().unwrap();
    reading.await.unwrap();
}

#[tokio::test]
async fn an_audit_line_names_people_by_their_ids_and_a_document_so_that_show_finds_it() {
    log_lines();
    let (cli, database) = Cli::fresh().await;
    let app = App::with(&database, |settings| settings.break_policy(|_, _| true)).await;
    let root = Actor::new("Root").with_id("root@example.org");
    let alice = Holder::new("Alice").of_user("alice@example.org");
    let reason = format!("in {}", database.name());
    let ids = [
        LockId::ObjectId([0x5a; 12]),
        uuid::Uuid::from_u128(7).into(),
        5_i64.into(),
        "5".into(),
        "5a5a5a5a5a5a5a5a5a5a5a5a".into(),
        "a \"b\" \\ c'd/\u{202e}\n\u{1f512}ä".into(),
    ];
    let lock = async |key: &LockKey| match app
        .locks
        .lock_for_session(key, &Aid::new(), &alice)
        .await
        .unwrap()
    {
        TryAcquire::Granted(lock) => lock,
        other => panic!("not newly granted: {other:?}"),
    };
    for (n, id) in ids.into_iter().enumerate() {
        let key = LockKey::new("workitem", id).unwrap();
        let broken = lock(&key).await;
        app.locks.break_lock(&broken, &root, &format!("{reason}, {n}")).await.unwrap();
        let lines = log_lines().lock().unwrap().clone();
        let line = lines.iter().find(|line| line.contains(&format!("{reason}, {n}\""))).unwrap();
        assert!(line.contains("was broken by \"Root\" (id \"root@example.org\")"), "{line}");
        assert!(line.ends_with("held by \"Alice\" (id \"alice@example.org\")"), "{line}");
        let shown = line.split_once("the lock on ").unwrap().1.split_once(" was broken").unwrap().0;
        assert!(!shown.contains(|c: char| c.is_control() || c == '\u{202e}'), "{shown}");
        let now = lock(&key).await;
        let found = cli.json(&["show", shown]).await;
        let [found] = &found["locks"].as_array().unwrap()[..] else { panic!("{shown}: {found}") };
        assert_eq!(found["token"], json!(now.token), "{shown}");
        app.locks.release(&now).await.unwrap();
    }
}

#[tokio::test]
async fn an_operator_freezes_and_thaws() {
    let (cli, database) = Cli::fresh().await;
    // A server with a reaper, which notes itself.
    let often = Duration::from_millis(100);
    let app = App::with(&database, |settings| settings.reaper_interval(often)).await;
    let refuses = async || {
        matches!(app.try_acquire(&key("a"), &Aid::new()).await, Err(LockError::Frozen { .. }))
    };
    let reason = ["--reason", "new numbers\u{1b}[31m", "--for", "2h", "--actor", "Root"];
    let out = cli.run(&[&["freeze", "workitem"], &reason[..]].concat()).await.ok();
    assert!(out.contains("the collection `workitem` is frozen until 20"), "{out}");
    assert!(out.contains("Z by Root: new numbers") && out.contains("noted it: "), "{out}");
    assert!(out.contains("new numbers") && !out.contains('\u{1b}'), "{out}");
    eventually("the server obeys", refuses).await;
    let out = cli.run(&["list"]).await.ok();
    assert!(out.starts_with("the collection `workitem` is frozen until 20"), "{out}");
    let all = cli.json(&["freeze", "--all", "--reason", "all", "--until", "2999-12-24T18:00:00Z"]);
    let all = all.await;
    assert_eq!(all["collection"], Value::Null);
    assert_eq!(
        (&all["reason"], &all["until"]),
        (&json!("all"), &json!("2999-12-24T18:00:00.000Z"))
    );
    assert!(all["by"].is_string(), "the user of the system: {all}");
    let again = ["freeze", "--all", "--reason", "all", "--until", "2999-12-24T18:00:00Z"];
    eventually("the command counts the server", async || {
        let all = cli.json(&again).await;
        all["servers"] == 1 && all["obeyed_by"] == 1
    })
    .await;
    eventually("the server has noted both", async || {
        let list = cli.json(&["list"]).await;
        list["frozen"].as_array().unwrap().iter().all(|freeze| freeze["obeyed_by"] == 1)
    })
    .await;
    assert_eq!(cli.json(&["list"]).await["frozen"].as_array().unwrap().len(), 2);

    let out = cli.run(&["thaw", "workitem"]).await.ok();
    assert!(out.starts_with("the collection `workitem` is thawed"), "{out}");
    assert!(out.contains("still: every collection is frozen until 2999"), "{out}");
    cli.run(&["thaw", "--all"]).await.ok();
    eventually("the server obeys", async || !refuses().await).await;
    let again = cli.run(&["thaw", "--all"]).await;
    assert_eq!((again.code, again.out.as_str()), (Some(1), "every collection was not frozen\n"));
}

#[tokio::test]
async fn a_freeze_without_a_collection_an_end_or_a_future_is_wrong_use() {
    let (cli, database) = Cli::fresh().await;
    let _ = App::on(&database).await;
    for (args, says) in [
        (&["freeze", "--reason", "x", "--for", "1h"][..], "COLLECTION"),
        (&["freeze", "workitem", "--all", "--reason", "x", "--for", "1h"], "cannot be used with"),
        (&["freeze", "workitem", "--reason", "x"], "--for"),
        (&["freeze", "workitem", "--for", "1h"], "--reason"),
        (&["freeze", "workitme", "--reason", "x", "--for", "1h"], "no collection `workitme.lock`"),
        (&["freeze", "workitem", "--reason", "x", "--for", "0s"], "would have ended already"),
        (
            &["freeze", "workitem", "--reason", "x", "--until", "2020-01-01 00:00:00"],
            "would have ended",
        ),
        (&["freeze", "workitem", "--reason", &"x".repeat(501), "--for", "1h"], "500 bytes"),
        (
            &["freeze", "--all", "--reason", "x", "--for", "1h", "--database", "shpo"],
            "there is no lock collection",
        ),
        (&["thaw"], "COLLECTION"),
    ] {
        let ran = cli.run(args).await;
        assert!(ran.code == Some(2) && ran.err.contains(says), "{args:?}: {ran:?}");
    }
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
