//! What a load balancer sees while servers start and stop.

use std::process::Stdio;
use std::time::Duration;

use actix_doclock::{MongoStore, StoreErrorKind, store::Topology};
use awc::Client;
use futures_util::future::join;
use mongodb::bson::doc;
use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::rig::app::{App, eventually, with_deadline};
use crate::rig::editor::Editor;
use crate::rig::log::{count_logged, log_lines};
use crate::rig::mongod::Mongod;
use crate::rig::{client, fresh_name};

async fn get(editor: &Editor, path: &str) -> (u16, Value) {
    let mut answer = Client::default().get(editor.url(path)).send().await.unwrap();
    let json = answer.json().await.unwrap_or_default();
    (answer.status().as_u16(), json)
}

#[actix_web::test]
async fn a_server_that_is_told_to_stop_says_so_for_its_drain_delay_and_still_serves() {
    let editor = Editor::start(&["--drain-secs", "300"]);
    assert_eq!(get(&editor, "/health").await.0, 200);
    editor.terminate();
    eventually("it says that it stops", async || get(&editor, "/health").await.0 == 503).await;
    assert_eq!(get(&editor, "/health").await.1["stopping"], true);
    assert_eq!(get(&editor, "/api/workitem").await.0, 200, "and serves pages");

    let editor = Editor::with_warnings_in(Stdio::piped(), &["--drain-secs", "1"]);
    assert_eq!(get(&editor, "/health").await.0, 200, "from then on it handles signals");
    let stopped = timeout(Duration::from_secs(60), spawn_blocking(move || editor.stopped()));
    assert_eq!(stopped.await.expect("it ends").unwrap(), "");
}

/// To a driver that talks only to this server, it is not unlike a standalone one, on which saves have no transactions.
#[tokio::test]
async fn a_member_of_a_set_that_is_not_initiated_yet_is_not_taken_for_a_standalone_server() {
    log_lines();
    let server = Mongod::start_member().await;
    let store = MongoStore::new(&client(&server.direct_uri()).await.database(&fresh_name()));
    let error = store.topology().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    assert!(format!("{error:?}").contains("rs.initiate()"), "{error:?}");

    let (uri, name) = (server.direct_uri(), fresh_name());
    let initiated = async {
        eventually("it waits", async || count_logged(&["WARN", "no primary at the moment"]) > 0)
            .await;
        server.initiate().await;
    };
    let (connected, ()) = join(MongoStore::connect(&uri, &name), initiated).await;
    assert_eq!(connected.unwrap().topology().await.unwrap(), Topology::ReplicaSet);
    assert_eq!(store.topology().await.unwrap(), Topology::ReplicaSet);
}

/// A set whose only member has stepped down for this time.
async fn without_primary(seconds: i32) -> Mongod {
    let server = Mongod::start_replica_set().await;
    server.admin(doc! { "replSetStepDown": seconds, "force": true }).await;
    server
}

#[tokio::test]
async fn a_server_that_starts_during_an_election_waits_for_the_primary() {
    log_lines();
    // Longer than a server selection.
    let server = without_primary(15).await;
    let uri = format!("{}&serverSelectionTimeoutMS=2000", server.uri());
    let store = MongoStore::connect(&uri, &fresh_name()).await.unwrap();
    assert!(count_logged(&["WARN", "no primary at the moment"]) > 0);
    let app = App::with(store.database(), with_deadline(Duration::from_secs(30))).await;
    assert!(app.locks.check_health().await.is_ready());
}
