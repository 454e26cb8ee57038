//! The findings of `doclock doctor`, and the advice in them.

use mongodb::bson::Bson;

use super::*;
use crate::rig::client;
use crate::rig::mongod::Mongod;
use crate::rig::proxy::Proxy;

const TTL_SECS: i64 = TTL.as_secs() as i64;

/// The findings, without mere hints.
async fn faults(cli: &Cli, args: &[&str]) -> (Ran, Vec<Value>) {
    let ran = cli.run(&[&["doctor", "--json"], args].concat()).await;
    let mut findings = ran.json()["findings"].as_array().unwrap().clone();
    findings.retain(|finding| finding["severity"] != "info");
    assert_eq!(ran.code, Some(if findings.is_empty() { 0 } else { 1 }), "{ran:?}");
    (ran, findings)
}

/// The only fault.
async fn fault(cli: &Cli, args: &[&str]) -> Value {
    let (ran, mut findings) = faults(cli, args).await;
    assert_eq!(findings.len(), 1, "{ran:?}");
    findings.remove(0)
}

/// Asserts that the text output contains this finding too.
async fn is_told(cli: &Cli, finding: &Value) {
    let ran = cli.run(&["doctor"]).await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    for field in ["about", "problem", "advice"] {
        assert!(ran.out.contains(finding[field].as_str().unwrap()), "{field}: {}", ran.out);
    }
    if let Some(command) = finding["command"].as_str() {
        assert!(ran.out.lines().any(|line| line.ends_with(command)), "{}", ran.out);
    }
}

fn says(finding: &Value, code: &str, field: &str, text: &str) {
    assert_eq!(finding["code"], code, "{finding}");
    assert!(finding[field].as_str().unwrap_or_default().contains(text), "{field}: {finding}");
}

#[tokio::test]
async fn a_database_without_locks_is_wrong_use_and_not_a_healthy_one() {
    let (cli, database) = Cli::fresh().await;
    let wrong = cli.run(&["doctor"]).await;
    assert_eq!(wrong.code, Some(2), "{wrong:?}");
    assert!(wrong.err.contains(database.name()), "{wrong:?}");
    // A misspelt collection is a finding: an application may create it yet.
    let (_, misspelt) = faults(&cli, &["--collection", "workitm"]).await;
    says(misspelt.last().unwrap(), "missing_collection", "about", "workitm.lock");
    // An application may keep only its sessions here.
    let sessions = cli.run(&["doctor", "--sessions"]).await;
    assert_eq!(sessions.code, Some(1), "{sessions:?}");
}

#[tokio::test]
async fn a_replica_set_on_which_an_application_runs_has_no_faults() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    held_by(&app, &key("a"), "Alice").await;
    let ttl = format!("{TTL_SECS}s");
    for args in [&[][..], &["--ttl", &ttl], &["--collection", "workitem"]] {
        let (ran, findings) = faults(&cli, args).await;
        assert_eq!(findings, [Value::Null; 0], "{args:?}: {ran:?}");
    }
    assert!(cli.run(&["doctor"]).await.ok().contains("nothing is wrong"));
}

#[tokio::test]
async fn a_missing_index_is_found() {
    let (cli, database) = Cli::fresh().await;
    App::on(&database).await;
    for field in ["ts", "aid", "readers.aid", "due"] {
        lock_records(&database).drop_index(format!("{field}_1")).await.unwrap();
        let finding = fault(&cli, &[]).await;
        says(&finding, "missing_index", "problem", &format!("`{field}`"));
        says(&finding, "missing_index", "command", "createIndex(");
        assert_eq!(finding["about"], format!("{}.workitem.lock", cli.database));
        is_told(&cli, &finding).await;
        // Follows the advice.
        cli.run(&["init", "workitem", "--ttl", &format!("{TTL_SECS}s")]).await.ok();
        assert_eq!(faults(&cli, &[]).await.1, [Value::Null; 0]);
    }
    // No application has registered this collection.
    let finding = fault(&cli, &["--collection", "workitme"]).await;
    says(&finding, "missing_collection", "advice", "doclock init");
}

#[tokio::test]
async fn the_collection_of_web_sessions_is_examined_if_there_is_one_or_if_it_is_named() {
    let (cli, database) = Cli::fresh().await;
    App::on(&database).await;
    assert_eq!(faults(&cli, &[]).await.1, [Value::Null; 0]);
    for (option, name) in [("--sessions", "doclock.session"), ("--sessions=logins", "logins")] {
        let finding = fault(&cli, &[option]).await;
        says(&finding, "missing_collection", "about", &format!("{}.{name}", cli.database));
        says(&finding, "missing_collection", "advice", "doclock init --sessions");
        let told = cli.run(&["init", option]).await.ok();
        assert!(told.contains(&format!("{name} is ready")), "{told}");
        assert_eq!(faults(&cli, &[option]).await.1, [Value::Null; 0]);
    }
    let sessions = database.collection::<mongodb::bson::Document>("doclock.session");
    for index in ["expires", "due", "by", "aid", "user"] {
        sessions.drop_index(format!("{index}_1")).await.unwrap();
        let finding = fault(&cli, &[]).await;
        says(&finding, "missing_index", "problem", &format!("`{index}`"));
        cli.run(&["init", "workitem", "--sessions"]).await.ok();
    }
    assert_eq!(faults(&cli, &["--sessions"]).await.1, [Value::Null; 0]);
}

#[tokio::test]
async fn a_wrong_ttl_is_found() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    // After a lowering, which leaves the index as it is, nothing is wrong.
    assert_eq!(faults(&cli, &["--ttl", "150s"]).await.1, [Value::Null; 0]);
    let ran = cli.run(&["doctor", "--json", "--ttl", "150s"]).await.json();
    let all = ran["findings"].as_array().unwrap();
    let finding = all.iter().find(|finding| finding["code"] == "wrong_ttl").unwrap();
    says(finding, "wrong_ttl", "problem", &format!("after {} s", TTL_SECS + 60));
    says(finding, "wrong_ttl", "command", "expireAfterSeconds: 210");
    let finding = fault(&cli, &["--ttl", "1h"]).await;
    assert_eq!(finding["severity"], "error");
    says(&finding, "wrong_ttl", "command", "expireAfterSeconds: 3660");

    // An index that would remove locks while they are held is found without a given ttl.
    held_by(&app, &key("a"), "Alice").await;
    let change = doc! { "keyPattern": { "ts": 1 }, "expireAfterSeconds": 30 };
    let change = doc! { "collMod": "workitem.lock", "index": change };
    database.run_command(change).await.unwrap();
    let finding = fault(&cli, &[]).await;
    says(&finding, "wrong_ttl", "problem", "locks are lost while they are held");
    says(&finding, "wrong_ttl", "command", &format!("expireAfterSeconds: {}", TTL_SECS + 60));
    is_told(&cli, &finding).await;
}

#[tokio::test]
async fn w_1_in_the_uri_is_found() {
    let server = mongod::local_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    App::on(&database).await;
    let uri = format!("{}&w=1", server.uri());
    let cli = Cli { uri, database: database.name().to_owned() };
    let finding = fault(&cli, &[]).await;
    says(&finding, "weak_write_concern", "problem", "`w=1`");
    says(&finding, "weak_write_concern", "advice", "`w=majority`");
    is_told(&cli, &finding).await;
}

#[tokio::test]
async fn a_standalone_server_is_found() {
    let uri = mongod::shared_standalone().await.uri();
    let database = rig::fresh_database(&uri).await;
    App::on(&database).await;
    let cli = Cli { uri, database: database.name().to_owned() };
    let finding = fault(&cli, &[]).await;
    says(&finding, "standalone", "advice", "--replSet");
    says(&finding, "standalone", "command", "rs.initiate()");
    is_told(&cli, &finding).await;
}

#[tokio::test]
async fn a_skewed_clock_is_found() {
    let [first, second] = [Mongod::start_member().await, Mongod::start_member().await];
    let way = Proxy::start(second.port());
    let member = |id: i32, port: u16, votes: i32| {
        doc! { "_id": id, "host": format!("127.0.0.1:{port}"), "votes": votes, "priority": votes }
    };
    // Only the first member can be elected, so nobody waits for the other one.
    let members = vec![member(0, first.port(), 1), member(1, way.port(), 0)];
    first.admin(doc! { "replSetInitiate": { "_id": "rs0", "members": members } }).await;
    eventually("the second member follows", async || {
        let hello = second.admin(doc! { "hello": 1 }).await;
        hello.get_bool("secondary").unwrap_or_default()
    })
    .await;
    let database = client(&first.uri()).await.database(&fresh_name());
    App::on(&database).await;
    // So long that the driver finds the second member, however slow it is.
    let uri = format!("{}&serverSelectionTimeoutMS=60000", first.uri());
    let cli = Cli { uri, database: database.name().to_owned() };
    assert_eq!(faults(&cli, &[]).await.1, [Value::Null; 0]);

    for (millis, severity, direction) in [
        (300_000, "error", "ahead of"),
        (-300_000, "error", "behind"),
        (20_000, "warning", "ahead of"),
    ] {
        way.set_clock_ahead(millis);
        let finding = fault(&cli, &[]).await;
        assert_eq!(
            (&finding["about"], &finding["severity"]),
            (&json!(format!("127.0.0.1:{}", way.port())), &json!(severity),)
        );
        says(&finding, "skewed_clock", "problem", direction);
        says(&finding, "skewed_clock", "problem", &format!("127.0.0.1:{}", first.port()));
        says(&finding, "skewed_clock", "advice", "NTP");
    }
    way.set_clock_ahead(0);
    way.cut();
    let cli = Cli { uri: first.uri(), ..cli };
    let finding = fault(&cli, &[]).await;
    says(&finding, "unreachable_member", "about", &way.port().to_string());
    is_told(&cli, &finding).await;
}

/// The driver writes all names in small letters.
#[tokio::test]
async fn a_member_whose_name_has_capital_letters_is_found() {
    let member = Mongod::start_member().await;
    let named = |host: &str| format!("{host}:{}", member.port());
    let members = [doc! { "_id": 0, "host": named("LOCALHOST") }];
    let config = doc! { "_id": "rs0", "members": members.to_vec() };
    member.admin(doc! { "replSetInitiate": config }).await;
    member.primary().await;
    let uri = format!("mongodb://{}/?replicaSet=rs0", named("localhost"));
    let database = crate::rig::fresh_database(&uri).await;
    App::on(&database).await;
    let cli = Cli { uri, database: database.name().to_owned() };
    assert_eq!(faults(&cli, &[]).await.1, [Value::Null; 0]);
}

#[tokio::test]
async fn a_missing_privilege_is_found() {
    let server = Mongod::start_with_auth().await;
    let admin = client(&server.uri()).await;
    let database = admin.database(&fresh_name());
    App::on(&database).await;
    let name = database.name();
    let cli = |user: &str| {
        let uri = server.uri().replace("root:secret", &format!("{user}:secret"));
        Cli { uri: uri + "&authSource=admin", database: name.to_owned() }
    };
    let missing = async |user: &str| {
        let (_, mut findings) = faults(&cli(user), &[]).await;
        // A standalone server starts fastest with users.
        findings.retain(|finding| finding["code"] != "standalone");
        findings
    };
    let role = |role: &str| doc! { "role": role, "db": name };
    for (user, roles) in [
        ("reader", vec![role("read")]),
        ("writer", vec![role("readWrite")]),
        ("app", vec![role("readWrite"), role("dbAdmin")]),
        ("stranger", vec![]),
    ] {
        let user = doc! { "createUser": user, "pwd": "secret", "roles": roles };
        admin.database("admin").run_command(user).await.unwrap();
    }
    // The privileges from `docs/production.md`.
    let on = |collection: &str, actions: &[&str]| {
        let mut all: Vec<_> = ["find", "update"].into();
        all.extend(actions);
        doc! { "resource": { "db": name, "collection": collection }, "actions": all }
    };
    let records = ["insert", "remove", "listIndexes", "createIndex", "collMod"];
    let least = ["workitem.lock", "doclock.ended"].map(|collection| on(collection, &records));
    let others =
        [on("workitem", &[]), on("doclock.frozen", &["insert"]), on("doclock.server", &["insert"])];
    let least = [least.as_slice(), &others].concat();
    let role = doc! { "createRole": "doclock", "privileges": least, "roles": [] };
    admin.database("admin").run_command(role).await.unwrap();
    let user = doc! { "createUser": "least", "pwd": "secret", "roles": ["doclock"] };
    admin.database("admin").run_command(user).await.unwrap();
    for sufficient in ["app", "root", "least"] {
        assert_eq!(missing(sufficient).await, [Value::Null; 0], "{sufficient}");
    }

    let findings = missing("reader").await;
    let about: Vec<_> = findings.iter().map(|finding| finding["about"].clone()).collect();
    for collection in ["doclock.ended", "workitem.lock", "workitem"] {
        assert!(about.contains(&json!(format!("{name}.{collection}"))), "{about:?}");
    }
    for finding in &findings {
        says(finding, "missing_privilege", "problem", "`reader`");
        says(finding, "missing_privilege", "problem", "update");
        says(finding, "missing_privilege", "command", "grantRolesToUser(\"reader\"");
        is_told(&cli("reader"), finding).await;
    }
    for finding in missing("writer").await {
        says(&finding, "missing_privilege", "problem", "lacks collMod");
        says(&finding, "missing_privilege", "command", "dbAdmin");
        assert_eq!(finding["severity"], "warning");
    }
    // A user without any privilege is told so, and so is a client without a user.
    let stranger = cli("stranger").run(&["doctor", "--collection", "workitem"]).await;
    assert_eq!(stranger.code, Some(1), "{stranger:?}");
    assert!(stranger.out.contains("`stranger` lacks find"), "{stranger:?}");
    let nobody = server.uri().replace("root:secret@", "");
    let nobody = Cli { uri: nobody, database: name.to_owned() };
    let ran = nobody.run(&["doctor", "--collection", "workitem", "--json"]).await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.out.contains("not_authenticated"), "{ran:?}");
    let all = cli("stranger").run(&["doctor"]).await;
    assert_eq!(all.code, Some(1), "{all:?}");
    assert!(all.out.contains("grantRolesToUser(\"stranger\""), "{all:?}");
    // A user with rights on the documents only sees no lock collection.
    let privilege =
        doc! { "resource": { "db": name, "collection": "workitem" }, "actions": ["find"] };
    let role = doc! { "createRole": "documents_only", "privileges": [privilege], "roles": [] };
    admin.database("admin").run_command(role).await.unwrap();
    let user = doc! { "createUser": "blind", "pwd": "secret", "roles": ["documents_only"] };
    admin.database("admin").run_command(user).await.unwrap();
    let hidden = cli("blind").run(&["doctor"]).await;
    assert_eq!(hidden.code, Some(2), "{hidden:?}");
    assert!(hidden.err.contains("doctor --collection NAME"), "{hidden:?}");
    // A user who may read one lock collection need not be allowed to list all others. A list of nothing is no success.
    for (user, actions, code) in
        [("looker", &["find", "listIndexes"][..], Some(0)), ("glancer", &["find"], Some(4))]
    {
        let resource = doc! { "db": name, "collection": "workitem.lock" };
        let privilege = doc! { "resource": resource, "actions": actions };
        let role = doc! { "createRole": user, "privileges": [privilege], "roles": [] };
        admin.database("admin").run_command(role).await.unwrap();
        let create = doc! { "createUser": user, "pwd": "secret", "roles": [user] };
        admin.database("admin").run_command(create).await.unwrap();
        let list = cli(user).run(&["list"]).await;
        assert_eq!(list.code, code, "{list:?}");
    }
    let list = cli("stranger").run(&["list", "--collection", "workitem"]).await;
    assert_eq!(list.code, Some(4), "{list:?}");
}

#[tokio::test]
async fn the_longest_ttl_among_the_live_locks_counts() {
    let (cli, database) = Cli::fresh().await;
    let app = App::on(&database).await;
    let lock = held_by(&app, &key("a"), "Alice").await;
    lock_records(&database)
        .update_one(doc! { "_id": "a" }, doc! { "$set": { "ttl": 2 * TTL_SECS * 1_000 } })
        .await
        .unwrap();
    says(&fault(&cli, &[]).await, "wrong_ttl", "problem", "a lock that is held");
    rig::age(&database, &lock.key, 2 * TTL).await;
    assert_eq!(faults(&cli, &[]).await.1, [Value::Null; 0]);
}

/// What others have left: each is named, with its collection, and what to do.
#[tokio::test]
async fn each_index_that_others_have_left_is_named_with_the_command_that_removes_it() {
    let (cli, database) = Cli::fresh().await;
    App::on(&database).await;
    cli.run(&["init", "--sessions"]).await.ok();
    let leftovers = [
        ("workitem.lock", doc! { "key": { "resource": 1 }, "unique": true }, "unique_index"),
        ("doclock.ended", doc! { "key": { "sid": 1 }, "unique": true }, "unique_index"),
        ("doclock.session", doc! { "key": { "user": -1 }, "unique": true }, "unique_index"),
        ("workitem.lock", doc! { "key": { "ts": -1 }, "expireAfterSeconds": 30 }, "ttl_index"),
        ("workitem.lock", doc! { "key": { "since": 1 }, "expireAfterSeconds": 30 }, "ttl_index"),
        (
            "workitem.lock",
            doc! { "key": { "readers.ts": 1 }, "expireAfterSeconds": 30 },
            "ttl_index",
        ),
        ("doclock.ended", doc! { "key": { "noted": 1 }, "expireAfterSeconds": 30 }, "ttl_index"),
        ("doclock.session", doc! { "key": { "seen": 1 }, "expireAfterSeconds": 30 }, "ttl_index"),
    ];
    for (collection, mut index, code) in leftovers {
        index.insert("name", "left over");
        let command = doc! { "createIndexes": collection, "indexes": [index] };
        database.run_command(command).await.unwrap();
        let finding = fault(&cli, &[]).await;
        says(&finding, code, "problem", "`left over`");
        says(&finding, code, "about", collection);
        says(&finding, code, "advice", "drop the index");
        says(&finding, code, "command", r#"dropIndex("left over")"#);
        assert_eq!(finding["severity"], "error");
        is_told(&cli, &finding).await;
        database.collection::<Document>(collection).drop_index("left over").await.unwrap();
    }
    assert_eq!(faults(&cli, &[]).await.1, [Value::Null; 0]);
}

#[tokio::test]
async fn a_ttl_index_that_another_library_has_made_is_found_and_corrected() {
    let (cli, database) = Cli::fresh().await;
    App::on(&database).await;
    cli.run(&["init", "--sessions"]).await.ok();
    for (collection, field) in [("doclock.session", "expires"), ("doclock.ended", "ts")] {
        let change = doc! { "keyPattern": { field: 1 }, "expireAfterSeconds": 0 };
        database.run_command(doc! { "collMod": collection, "index": change }).await.unwrap();
        let finding = fault(&cli, &[]).await;
        says(&finding, "short_ttl", "problem", &format!("`{field}_1`"));
        says(&finding, "short_ttl", "about", collection);
        says(&finding, "short_ttl", "command", "expireAfterSeconds: 86400");
        is_told(&cli, &finding).await;
        // Follows the advice.
        cli.run(&["init", "workitem", "--sessions", "--ttl", &format!("{TTL_SECS}s")]).await.ok();
        assert_eq!(faults(&cli, &[]).await.1, [Value::Null; 0]);
    }
    // Without an expiry nothing is ever removed.
    let sessions = database.collection::<Document>("doclock.session");
    sessions.drop_index("expires_1").await.unwrap();
    let plain = mongodb::IndexModel::builder().keys(doc! { "expires": 1 }).build();
    sessions.create_index(plain).await.unwrap();
    says(&fault(&cli, &[]).await, "missing_index", "command", "collMod");
    cli.run(&["init", "--sessions"]).await.ok();
    assert_eq!(faults(&cli, &[]).await.1, [Value::Null; 0]);
}

#[tokio::test]
async fn a_hidden_index_is_found_with_the_command_that_shows_it_again() {
    let (cli, database) = Cli::fresh().await;
    App::on(&database).await;
    let hide = doc! { "name": "aid_1", "hidden": true };
    database.run_command(doc! { "collMod": "workitem.lock", "index": hide }).await.unwrap();
    let finding = fault(&cli, &[]).await;
    says(&finding, "missing_index", "problem", "`aid` is hidden");
    says(&finding, "missing_index", "command", "hidden: false");
    cli.run(&["init", "workitem", "--ttl", &format!("{TTL_SECS}s")]).await.ok();
    assert_eq!(faults(&cli, &[]).await.1, [Value::Null; 0]);
}

#[tokio::test]
async fn a_collation_that_a_collection_has_got_is_found() {
    for collection in ["workitem", "workitem.lock"] {
        let (cli, database) = Cli::fresh().await;
        let app = App::on(&database).await;
        held_by(&app, &key("a"), "Alice").await;
        let records = database.collection::<Document>(collection);
        let record = records.find_one(doc! {}).await.unwrap();
        records.drop().await.unwrap();
        let collation = doc! { "locale": "en", "strength": 2 };
        let create = doc! { "create": collection, "collation": collation };
        database.run_command(create).await.unwrap();
        if let Some(record) = record {
            records.insert_one(record).await.unwrap();
        }
        let (_, findings) = faults(&cli, &[]).await;
        let finding = findings.iter().find(|it| it["code"] == "collation").unwrap();
        says(finding, "collation", "about", &format!("{}.{collection}", cli.database));
        says(finding, "collation", "problem", "`en`");
        says(finding, "collation", "advice", "copy it into a collection without");
        is_told(&cli, finding).await;
    }
    // It does not affect other ids.
    let (cli, database) = Cli::fresh().await;
    App::on(&database).await;
    let create = doc! { "create": "workitem", "collation": { "locale": "en" } };
    database.run_command(create).await.unwrap();
    let items = database.collection::<Document>("workitem");
    items.insert_one(doc! { "_id": ObjectId::new() }).await.unwrap();
    assert_eq!(faults(&cli, &[]).await.1, [Value::Null; 0]);
}

#[tokio::test]
async fn a_validator_on_locks_is_found() {
    let (cli, database) = Cli::fresh().await;
    let validator = doc! { "ts": { "$type": "date" } };
    let create = doc! { "create": "workitem.lock", "validator": validator };
    database.run_command(create).await.unwrap();
    App::on(&database).await;
    let finding = fault(&cli, &[]).await;
    assert_eq!(finding["severity"], "warning");
    says(&finding, "validator", "about", "workitem.lock");
    says(&finding, "validator", "command", r#"validationAction: "warn""#);
    is_told(&cli, &finding).await;
}

#[tokio::test]
async fn too_few_connections_in_the_uri_are_found() {
    let server = mongod::local_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    let app = App::on(&database).await;
    for name in ["one", "two"] {
        app.locks.register_in::<WorkItem>(name).await.unwrap();
    }
    let cli = |pool: u32| {
        let uri = format!("{}&maxPoolSize={pool}", server.uri());
        Cli { uri, database: database.name().to_owned() }
    };
    let finding = fault(&cli(4), &[]).await;
    says(&finding, "few_connections", "problem", "3 collections can be watched at once");
    says(&finding, "few_connections", "problem", "`maxPoolSize` in the URI");
    is_told(&cli(4), &finding).await;
    assert_eq!(faults(&cli(6), &[]).await.1, [Value::Null; 0]);
}

#[tokio::test]
async fn two_applications_in_one_database_are_found_and_kept_apart_by_their_names() {
    let (cli, database) = Cli::fresh().await;
    let noted = async |store: &MongoStore, collection: &str| {
        let mut note = actix_doclock::store::ServerNote {
            id: uuid::Uuid::new_v4(),
            name: format!("server of {collection}"),
            version: "1.0.0".to_owned(),
            ttl: TTL,
            collections: Default::default(),
            key: None,
        };
        let flags = actix_doclock::store::Flags::new(false, false);
        note.collections.insert(collection.to_owned(), flags);
        store.note_server(note.id, Some(&note), Deadline::NONE).await.unwrap();
        note.id
    };
    let plain = MongoStore::new(&database);
    App::on(&database).await;
    noted(&plain, "workitem").await;
    let other = noted(&plain, "order").await;
    let finding = fault(&cli, &[]).await;
    says(&finding, "two_applications", "problem", "server of order");
    says(&finding, "two_applications", "advice", "MongoStore::named");
    says(&finding, "two_applications", "advice", "--application");
    is_told(&cli, &finding).await;

    // Follows the advice.
    plain.note_server(other, None, Deadline::NONE).await.unwrap();
    let named = MongoStore::new(&database).named("shop").unwrap();
    noted(&named, "order").await;
    named.prepare("order", &Rules::new(TTL), Deadline::NONE).await.unwrap();
    let ttl = format!("{TTL_SECS}s");
    assert_eq!(faults(&cli, &["--ttl", &ttl]).await.1, [Value::Null; 0]);
    let own = ["--application", "shop", "--ttl", &ttl];
    assert_eq!(faults(&cli, &own).await.1, [Value::Null; 0]);
    let told = cli.run(&[&["doctor", "--json"], &own[..]].concat()).await.out;
    assert!(told.contains("server of order") && !told.contains("server of workitem"), "{told}");
    let shop = ["--application", "shop", "freeze", "order", "--reason", "x", "--for", "1h"];
    cli.run(&shop).await.ok();
    assert_eq!(plain.freezes(Deadline::NONE).await.unwrap().on, []);
    assert_eq!(named.freezes(Deadline::NONE).await.unwrap().on.len(), 1);
    assert_eq!(cli.run(&["--application", "a.b", "doctor"]).await.code, Some(2));
}

/// A record of others may hold anything as its ttl, and no check ends with it.
#[tokio::test]
async fn an_odd_ttl_does_not_end_the_doctor() {
    let odd = [
        Bson::from("30"),
        DateTime::now().into(),
        vec![1, 2].into(),
        doc! { "seconds": 30 }.into(),
        true.into(),
        1e300.into(),
        f64::NAN.into(),
        f64::INFINITY.into(),
        i64::MAX.into(),
        Bson::Decimal128("9E6000".parse().unwrap()),
    ];
    for ttl in odd {
        let (cli, database) = Cli::fresh().await;
        App::on(&database).await;
        let record = doc! { "_id": "a", "ts": DateTime::now(), "aid": "x", "ttl": &ttl };
        lock_records(&database).insert_one(record).await.unwrap();
        lock_records(&database).drop_index("aid_1").await.unwrap();
        let (_, findings) = faults(&cli, &[]).await;
        assert!(findings.iter().any(|it| it["code"] == "missing_index"), "{ttl}: {findings:?}");
    }
}

#[tokio::test]
async fn what_cannot_be_checked_is_a_finding_and_the_other_checks_go_on() {
    let server = Mongod::start_replica_set().await;
    let database = rig::fresh_database(&server.uri()).await;
    App::on(&database).await;
    lock_records(&database).drop_index("aid_1").await.unwrap();
    let cli = Cli { uri: server.uri(), database: database.name().to_owned() };
    for (command, what) in [
        ("aggregate", "whose records these are"),
        ("find", "the ttl of the locks"),
        ("listCollections", "the collection"),
    ] {
        let named = ["--collection", "workitem"];
        let data = doc! { "failCommands": [command], "errorCode": 96 };
        let on = doc! { "configureFailPoint": "failCommand", "mode": "alwaysOn", "data": data };
        server.admin(on).await;
        let (_, findings) = faults(&cli, &named).await;
        let off = doc! { "configureFailPoint": "failCommand", "mode": "off" };
        server.admin(off).await;
        let of = |code: &str| findings.iter().filter(|it| it["code"] == code).collect::<Vec<_>>();
        let told = format!("could not check {what}: ");
        let is_told = |it: &&Value| it["problem"].as_str().unwrap().starts_with(&told);
        assert!(of("not_checked").iter().any(is_told), "{command}: {findings:?}");
        let others = command == "listCollections" || !of("missing_index").is_empty();
        assert!(others, "{command}: {findings:?}");
    }
}

#[tokio::test]
async fn a_collection_of_another_kind_or_of_somebody_else_is_found() {
    let time_series = doc! { "timeseries": { "timeField": "at" } };
    let view = doc! { "viewOn": "offer", "pipeline": [] };
    let capped = doc! { "capped": true, "size": 100_000 };
    for (options, code) in [(time_series, "time_series"), (view, "view"), (capped, "capped")] {
        for collection in ["workitem", "workitem.lock", "x.lock", "doclock.ended"] {
            let (cli, database) = Cli::fresh().await;
            App::on(&database).await;
            database.collection::<Document>(collection).drop().await.unwrap();
            let mut create = doc! { "create": collection };
            create.extend(options.clone());
            database.run_command(create).await.unwrap();
            let (ran, findings) = faults(&cli, &[]).await;
            let finding = findings.iter().find(|it| it["code"] == code);
            let finding = finding.unwrap_or_else(|| panic!("{collection} {code}: {ran:?}"));
            says(finding, code, "about", collection);
            assert_eq!(finding["severity"], "error");
        }
    }
    let (cli, database) = Cli::fresh().await;
    App::on(&database).await;
    let offer = doc! { "_id": "a", "title": "bread", "expires": DateTime::now() };
    // With fields of the same names: a door, and who has locked it.
    let door =
        doc! { "_id": "a", "ts": DateTime::now(), "holder": "ward 7", "until": DateTime::now() };
    database.collection::<Document>("offer").insert_one(&offer).await.unwrap();
    for others in [offer, door] {
        let locks = database.collection::<Document>("workitem.lock");
        locks.delete_many(doc! {}).await.unwrap();
        locks.insert_one(&others).await.unwrap();
        let (ran, findings) = faults(&cli, &["--sessions=offer"]).await;
        for about in ["offer", "workitem.lock"] {
            let about = format!("{}.{about}", cli.database);
            let is_told = |it: &Value| it["code"] == "others_records" && it["about"] == *about;
            assert!(findings.iter().any(is_told), "{about}, {others}: {ran:?}");
        }
    }
}
