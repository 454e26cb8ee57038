//! The command `doclock`, as an operator on call uses it.

mod breaks;
mod init;

use actix_doclock::store::verbs::*;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::rig::app::{App, NO_DEADLINE, TTL, WorkItem, eventually, key, lock_records, record};
use crate::rig::log::log_lines;
use crate::rig::odd::{NOT_UTF8, odd};
use crate::rig::{self, fresh_name, mongod};
use actix_doclock::{
    Actor, Aid, Holder, LockError, LockId, LockKey, Lockable, MongoStore, TryAcquire,
    store::{Rules, Saved},
};
use mongodb::Database;
use mongodb::bson::{DateTime, Document, RawDocumentBuf, doc, oid::ObjectId};
use serde_json::{Value, json};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

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
async fn a_view_that_is_named_like_a_lock_collection_is_left_out_with_a_word() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    held_by(&app, &key("a"), "Alice").await;
    database.run_command(doc! { "create": "report.lock", "viewOn": "x" }).await.unwrap();
    let listed = cli.run(&["list"]).await;
    assert!(listed.err.contains("`report.lock` is left out"), "{listed:?}");
    assert_eq!(lines(&listed.ok(), "workitem/a "), 1);
    let thawed = cli.run(&["thaw", "--all"]).await;
    assert_eq!(thawed.code, Some(1), "{thawed:?}");
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
    for id in ["a", "b", "c", "d"] {
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
    let unreadable = odd(&[("_id", "d".into()), ("title", NOT_UTF8.into())]);
    database.collection::<RawDocumentBuf>("workitem").insert_one(unreadable).await.unwrap();
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
    assert_eq!(titles, [&json!("inner"), &Value::Null, &Value::Null, &Value::Null]);
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
