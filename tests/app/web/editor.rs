//! The example, run as a program and used over HTTP, on each store.

use std::{process::Stdio, time::Instant};

use actix_web::http::header;
use awc::Client;
use mongodb::bson::{Bson, doc, oid::ObjectId};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpSocket,
    task::spawn_blocking,
};

use super::*;
use crate::rig::{self, editor::Editor};

/// A person with a browser.
struct Person {
    base: String,
    cookie: RefCell<Option<Cookie<'static>>>,
}

impl Person {
    fn at(editor: &Editor) -> Self {
        Self { base: editor.url(""), cookie: RefCell::default() }
    }

    async fn logged_in(editor: &Editor, name: &str) -> Self {
        let person = Self::at(editor);
        let (status, _) = person.send(Method::POST, "/login", Some(json!({ "name": name }))).await;
        assert_eq!(status, 204);
        person
    }

    /// The same browser, whose next request the load balancer sends to another server.
    fn moved_to(self, editor: &Editor) -> Self {
        Self { base: editor.url(""), ..self }
    }

    async fn send(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        let mut request = Client::default().request(method, format!("{}{path}", self.base));
        if let Some(cookie) = &*self.cookie.borrow() {
            request = request.cookie(cookie.clone());
        }
        let mut response = match body {
            Some(body) => request.send_json(&body).await.unwrap(),
            None => request.send().await.unwrap(),
        };
        for cookie in response.cookies().unwrap().iter() {
            let cookie = (!cookie.value().is_empty()).then(|| cookie.clone());
            self.cookie.replace(cookie);
        }
        let body = response.body().await.unwrap();
        (response.status().as_u16(), serde_json::from_slice(&body).unwrap_or_default())
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.send(Method::GET, path, None).await
    }

    async fn post(&self, path: &str) -> (u16, Value) {
        self.send(Method::POST, path, None).await
    }

    async fn put(&self, path: &str, title: &str) -> (u16, Value) {
        self.send(Method::PUT, path, Some(json!({ "title": title, "body": "text" }))).await
    }

    /// The path of the first document.
    async fn first_document(&self) -> String {
        let (status, list) = self.get("/api/workitem").await;
        assert_eq!((status, list.as_array().unwrap().len()), (200, 3), "three samples");
        format!("/api/workitem/{}", list[0]["id"].as_str().unwrap())
    }
}

/// The scenario that holds on every store.
async fn two_people_edit_one_document(editor: &Editor) {
    let reader = Person::at(editor);
    let document = reader.first_document().await;
    let (status, before) = reader.get(&document).await;
    assert_eq!((status, before.as_object().unwrap().len()), (200, 3), "id, title, body");
    assert_eq!(reader.post(&format!("{document}/edit")).await.0, 401);
    assert_eq!(reader.put(&document, "new").await.0, 401);
    let lock = document.replace("/api", "/locks");
    assert_eq!(reader.post(&lock).await.0, 401);
    assert_eq!(reader.get(&lock).await, (200, json!({ "state": "free" })));

    let alice = Person::logged_in(editor, "alice").await;
    let bob = Person::logged_in(editor, "bob").await;
    assert_eq!(alice.post(&format!("{document}/edit")).await, (200, before));
    let (status, refusal) = bob.post(&format!("{document}/edit")).await;
    assert_eq!((status, &refusal["holder"]["label"]), (423, &json!("alice")));
    assert_eq!(bob.put(&document, "bob's").await.0, 409);

    let (status, saved) = alice.put(&document, "new").await;
    assert_eq!((status, &saved["title"]), (200, &json!("new")));
    assert_eq!(bob.post(&format!("{document}/edit")).await.0, 423, "saving keeps the lock");
    assert_eq!(alice.put(&format!("{document}?release=true"), "newer").await.0, 200);
    let (status, seen) = bob.post(&format!("{document}/edit")).await;
    assert_eq!((status, &seen["title"]), (200, &json!("newer")));

    assert_eq!(bob.post("/logout").await.0, 204);
    assert_eq!(
        alice.post(&format!("{document}/edit")).await.0,
        200,
        "the logout frees the document"
    );
    assert_eq!(alice.get("/api/workitem/ffffffffffffffffffffffff").await.0, 404);
    assert_eq!(alice.get("/api/workitem/zzz").await.0, 400);
    assert_eq!(alice.post("/api/workitem/ffffffffffffffffffffffff/edit").await.0, 404);
}

/// The scenario of a document's life, which holds on every store.
async fn a_document_is_created_changed_and_deleted_under_its_lock(editor: &Editor) {
    let new = || Some(json!({ "title": "new", "body": "text" }));
    let reader = Person::at(editor);
    assert_eq!(reader.send(Method::POST, "/api/workitem", new()).await.0, 401);

    let alice = Person::logged_in(editor, "alice").await;
    let bob = Person::logged_in(editor, "bob").await;
    let (status, created) = alice.send(Method::POST, "/api/workitem", new()).await;
    assert_eq!((status, &created["title"]), (201, &json!("new")));
    let document = format!("/api/workitem/{}", created["id"].as_str().unwrap());
    let lock = document.replace("/api", "/locks");
    assert_eq!(alice.get(&lock).await.1["state"], "mine");
    assert_eq!(bob.post(&format!("{document}/edit")).await.0, 423);

    let title = |title| Some(json!({ "title": title }));
    assert_eq!(bob.send(Method::PATCH, &document, title("bob's")).await.0, 409);
    let (status, changed) = alice.send(Method::PATCH, &document, title("changed")).await;
    assert_eq!(
        (status, &changed["title"], &changed["body"]),
        (200, &json!("changed"), &json!("text"))
    );
    assert_eq!(reader.get(&document).await.1, changed);

    assert_eq!(reader.send(Method::DELETE, &document, None).await.0, 401);
    assert_eq!(bob.send(Method::DELETE, &document, None).await.0, 409);
    assert_eq!(reader.get(&document).await.0, 200);
    assert_eq!(alice.send(Method::DELETE, &document, None).await.0, 204);
    assert_eq!(reader.get(&document).await.0, 404);
    assert_eq!(reader.get(&lock).await.1["state"], "free");
    assert_eq!(alice.get("/locks").await.1, json!([]));
    assert_eq!(
        alice.send(Method::DELETE, &document, None).await.0,
        409,
        "there is no lock any more"
    );
}

#[actix_web::test]
async fn on_the_embedded_store_a_document_lives_and_dies_under_its_lock() {
    a_document_is_created_changed_and_deleted_under_its_lock(&Editor::start(&[])).await;
}

#[actix_web::test]
async fn on_mongodb_a_document_lives_and_dies_under_its_lock() {
    let shared = rig::mongod::shared_replica_set().await;
    let editor = Editor::on_mongodb(&rig::fresh_name(), shared.uri());
    a_document_is_created_changed_and_deleted_under_its_lock(&editor).await;
}

#[actix_web::test]
async fn on_a_standalone_server_a_document_lives_and_dies_under_its_lock() {
    let shared = rig::mongod::shared_standalone().await;
    let editor = Editor::on_mongodb(&rig::fresh_name(), &shared.uri());
    a_document_is_created_changed_and_deleted_under_its_lock(&editor).await;
}

#[actix_web::test]
async fn a_partial_update_leaves_fields_that_the_program_does_not_know() {
    let shared = rig::mongod::shared_replica_set().await;
    let database = rig::fresh_database(shared.uri()).await;
    let editor = Editor::on_mongodb(database.name(), shared.uri());
    let alice = Person::logged_in(&editor, "alice").await;
    let document = alice.first_document().await;
    let stored = database.collection::<mongodb::bson::Document>("workitem");
    let id = document.rsplit('/').next().unwrap().parse::<ObjectId>().unwrap();
    let unknown = doc! { "status": { "deleted": false }, "roles": ["editor"] };
    stored.update_one(doc! { "_id": id }, doc! { "$set": unknown.clone() }).await.unwrap();
    assert_eq!(alice.post(&format!("{document}/edit")).await.0, 200);
    let patch = Some(json!({ "title": "changed" }));
    assert_eq!(alice.send(Method::PATCH, &document, patch).await.0, 200);
    let after = stored.find_one(doc! { "_id": id }).await.unwrap().unwrap();
    assert_eq!(after.get_str("title").unwrap(), "changed");
    assert!(unknown.iter().all(|(name, value)| after.get(name) == Some(value)), "{after}");
}

#[actix_web::test]
async fn on_the_embedded_store_two_people_never_edit_one_document() {
    two_people_edit_one_document(&Editor::start(&[])).await;
}

#[actix_web::test]
async fn on_mongodb_two_people_never_edit_one_document() {
    let shared = rig::mongod::shared_replica_set().await;
    two_people_edit_one_document(&Editor::on_mongodb(&rig::fresh_name(), shared.uri())).await;
}

#[actix_web::test]
async fn on_a_standalone_server_two_people_never_edit_one_document() {
    let shared = rig::mongod::shared_standalone().await;
    two_people_edit_one_document(&Editor::on_mongodb(&rig::fresh_name(), &shared.uri())).await;
}

#[actix_web::test]
async fn several_servers_on_one_database_are_one_application() {
    let uri = rig::mongod::shared_replica_set().await;
    let database = rig::fresh_database(uri.uri()).await;
    let (first, second) = (
        Editor::on_mongodb(database.name(), uri.uri()),
        Editor::on_mongodb(database.name(), uri.uri()),
    );
    let alice = Person::logged_in(&first, "alice").await;
    let document = alice.first_document().await;
    alice.post(&format!("{document}/edit")).await;
    let bob = Person::logged_in(&second, "bob").await;
    assert_eq!(bob.post(&format!("{document}/edit")).await.0, 423);

    let record = database.collection::<mongodb::bson::Document>("workitem.lock");
    let record = record.find_one(doc! {}).await.unwrap().unwrap();
    let mut fields: Vec<&str> = record.keys().map(String::as_str).collect();
    fields.sort_unstable();
    assert_eq!(fields, ["_id", "aid", "holder", "since", "token", "ts", "ttl"]);
    assert_eq!(record.get("ttl"), Some(&Bson::Int64(600_000)));
    let id = document.rsplit('/').next().unwrap();
    assert_eq!(record.get_object_id("_id").unwrap().to_hex(), id);

    let alice = alice.moved_to(&second);
    assert_eq!(alice.put(&document, "new").await.0, 200, "her session is known there too");
    assert_eq!(alice.post("/logout").await.0, 204);
    assert_eq!(bob.post(&format!("{document}/edit")).await.0, 200);
}

#[actix_web::test]
async fn the_page_is_served_with_its_files_and_allows_nothing_else() {
    let editor = Editor::start(&[]);
    for (path, content_type) in [
        ("/", "text/html; charset=utf-8"),
        ("/page.css", "text/css; charset=utf-8"),
        ("/page.js", "text/javascript; charset=utf-8"),
    ] {
        let response = Client::default().get(editor.url(path)).send().await.unwrap();
        assert_eq!(response.status(), 200);
        let header = |name| response.headers().get(name).unwrap().to_str().unwrap();
        assert_eq!(header(header::CONTENT_TYPE), content_type);
        assert_eq!(header(header::CONTENT_SECURITY_POLICY), "default-src 'self'");
    }
    let (status, problem) = Person::at(&editor).get("/nowhere").await;
    assert_eq!((status, &problem["code"]), (404, &json!("no_such_route")));
}

/// The probe of a load balancer. It waits for longer than the deadline of the server.
#[actix_web::test]
async fn it_reports_that_it_is_ready_and_that_it_is_not_while_the_database_is_away() {
    let server = rig::mongod::Mongod::start_replica_set().await;
    let editor = Editor::on_mongodb(&rig::fresh_name(), &server.uri());
    let patient = Client::builder().timeout(Duration::from_secs(60)).finish();
    let ask = async || {
        let mut answer = patient.get(editor.url("/health")).send().await.unwrap();
        let report: Value = answer.json().await.unwrap();
        (answer.status().as_u16(), report["status"].clone())
    };
    assert_eq!(ask().await, (200, json!("ok")));
    server.pause();
    assert_eq!(ask().await, (503, json!("unavailable")));
    server.resume();
    crate::rig::app::eventually("it is ready again", async || ask().await.0 == 200).await;
}

/// How much Linux keeps for a client that takes nothing, in bytes.
fn largest_send_buffer() -> usize {
    let sizes = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_wmem").unwrap_or_default();
    sizes.split_whitespace().nth(2).and_then(|it| it.parse().ok()).unwrap_or(8 << 20)
}

/// The server waits for its connections, and the slow page takes nothing of what it is sent: more than the
/// buffers hold.
#[actix_web::test]
async fn a_page_that_takes_nothing_is_cut_when_the_server_is_stopped() {
    let editor = Editor::with_warnings_in(Stdio::piped(), &[]);
    // Six times as long in an event.
    let name = format!("b{}b", "\u{1}".repeat(198));
    let alice = Person::logged_in(&editor, &name).await;
    let lock = alice.first_document().await.replace("/api", "/locks");
    let cookie = alice.cookie.borrow().as_ref().unwrap().stripped().to_string();
    let address = editor.url("").trim_start_matches("http://").to_owned();
    let asks = format!("GET /locks/events HTTP/1.1\r\nHost: {address}\r\nCookie: {cookie}\r\n\r\n");
    let listens = async |buffer: u32| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(buffer).unwrap();
        let mut page = socket.connect(address.parse().unwrap()).await.unwrap();
        page.write_all(asks.as_bytes()).await.unwrap();
        page
    };
    let began = Instant::now();
    let (page, mut reader) = (listens(4_096).await, listens(1 << 20).await);
    let open = async || alice.get("/health").await.1["event_streams"] == 2;
    crate::rig::app::eventually("the streams are open", open).await;
    // The other stream shows how much was sent, until it is more than the system and the server keep.
    let (mut told, mut some) = (0, vec![0; 1 << 16]);
    while told < largest_send_buffer() + (1 << 19) {
        assert_eq!(alice.post(&lock).await.0, 201);
        told += reader.read(&mut some).await.unwrap();
        assert_eq!(alice.send(Method::DELETE, &lock, None).await.0, 204);
        told += reader.read(&mut some).await.unwrap();
    }
    drop(reader);
    let warnings = spawn_blocking(move || editor.stopped()).await.unwrap();
    // On a slow machine the system may have cut the connection by itself, after 30 s.
    let was_cut_before = began.elapsed() > Duration::from_secs(25);
    let is_cut_now = warnings.contains("the clients of 1 event streams take nothing");
    assert!(is_cut_now || was_cut_before, "{warnings}");
    drop(page);
}

#[actix_web::test]
async fn prometheus_gets_the_metrics_of_user_actions() {
    let editor = Editor::start(&[]);
    let alice = Person::logged_in(&editor, "alice").await;
    let document = alice.first_document().await;
    assert_eq!(alice.post(&format!("{document}/edit")).await.0, 200);
    let mut answer = Client::default().get(editor.url("/metrics")).send().await.unwrap();
    let metrics = String::from_utf8(answer.body().await.unwrap().to_vec()).unwrap();
    for line in [
        "# TYPE doclock_acquire_seconds histogram",
        r#"doclock_acquire_seconds_count{collection="workitem",mode="exclusive",outcome="granted"} 1"#,
    ] {
        assert!(metrics.lines().any(|it| it == line), "no {line} in\n{metrics}");
    }
    assert!(!metrics.contains("alice"));
}
