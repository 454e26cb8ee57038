//! The change stream ends, for any reason: all waiters are served, and the stream is opened again.

use mongodb::Client;
use mongodb::bson::{Document, doc};
use mongodb::options::ClientOptions;

use super::*;
use crate::rig::log::{count_logged, log_lines};
use crate::rig::mongod::Mongod;
use crate::rig::proxy::Proxy;
use crate::rig::{client, fresh_name};

const CROWD: usize = 100;

/// A separate type for each test, so that the log tells which test a line belongs to.
macro_rules! document {
    ($collection:literal) => {{
        #[derive(serde::Serialize, serde::Deserialize)]
        struct Item {
            #[serde(rename = "_id")]
            id: i64,
        }
        impl Lockable for Item {
            type Id = i64;
            const COLLECTION: &'static str = $collection;
        }
        std::marker::PhantomData::<Item>
    }};
}

/// A holder in one process, and a crowd that waits for the lock in another one.
struct Crowd {
    key: LockKey,
    holds: LockManager,
    waits: LockManager,
    /// Direct access, without either manager.
    database: Database,
    held: Option<LockGuard>,
    waiting: Vec<JoinHandle<LockGuard>>,
}

impl Crowd {
    /// The crowd waits through this URI. Its name at the server is the name of its database.
    async fn new<T: Lockable>(_: std::marker::PhantomData<T>, server: &Mongod, uri: &str) -> Self {
        log_lines();
        let name = fresh_name();
        let database = client(&server.uri()).await.database(&name);
        let mut options = ClientOptions::parse(uri).await.unwrap();
        options.app_name = Some(name.clone());
        let through = Client::with_options(options).unwrap().database(&name);
        let holds = Cluster::Mongo(database.clone()).server().await;
        let waits = Cluster::Mongo(through).server().await;
        for locks in [&holds, &waits] {
            locks.register::<T>().await.unwrap();
        }
        let key = LockKey::new(T::COLLECTION, 1).unwrap();
        let held = Some(holds.acquire(&key, Wait::no()).await.unwrap());
        let mut it = Self { key, holds, waits, database, held, waiting: Vec::new() };
        for _ in 0..CROWD {
            it.waiting.push(waiting(&it.waits, &it.key).await);
        }
        it.is_told().await;
        it
    }

    async fn is_told(&self) {
        until_told(&self.waits, self.key.collection()).await;
    }

    async fn polls(&self) {
        until_wakeup(&self.waits, self.key.collection(), Wakeup::Polling).await;
    }

    /// The holder releases, and all waiters get the lock in turn.
    async fn is_served(&mut self) {
        let held = self.held.take();
        if let Some(held) = held {
            held.release().await.unwrap();
        }
        for waiting in self.waiting.drain(..) {
            in_time("all are served", waiting).await.unwrap().release().await.unwrap();
        }
    }

    /// A new waiter is told of the release, and is served.
    async fn is_as_before(&mut self) {
        self.held = Some(self.holds.acquire(&self.key, Wait::no()).await.unwrap());
        self.waiting.push(waiting(&self.waits, &self.key).await);
        self.is_told().await;
        self.is_served().await;
    }

    fn warnings(&self) -> usize {
        let watching = format!("watching the locks in {}", self.key.collection());
        count_logged(&["WARN", &watching])
    }

    /// Makes commands of the crowd fail from now on.
    async fn fail(&self, commands: &[&str], mut how: Document) {
        how.extend(doc! { "failCommands": commands, "appName": self.database.name() });
        self.fail_point(doc! { "mode": "alwaysOn", "data": how }).await;
    }

    async fn fail_point(&self, settings: Document) {
        let mut command = doc! { "configureFailPoint": "failCommand" };
        command.extend(settings);
        self.database.client().database("admin").run_command(command).await.unwrap();
    }

    async fn works_again(&self) {
        self.fail_point(doc! { "mode": "off" }).await;
    }
}

/// A server has only one such fail point, so each of these tests has its own server.
async fn the_stream_fails<T: Lockable>(
    of: std::marker::PhantomData<T>,
    commands: &[&str],
    how: Document,
) {
    let server = Mongod::start_replica_set().await;
    let mut crowd = Crowd::new(of, &server, &server.uri()).await;
    crowd.fail(commands, how).await;
    crowd.polls().await;
    crowd.is_served().await;
    assert_eq!(crowd.warnings(), 1, "one warning, however long it lasts");
    crowd.works_again().await;
    crowd.is_as_before().await;
}

#[tokio::test]
async fn the_stream_outlives_a_lost_history() {
    // ChangeStreamHistoryLost, after which no driver resumes.
    the_stream_fails(document!("history"), &["getMore"], doc! { "errorCode": 286 }).await;
}

#[tokio::test]
async fn the_stream_outlives_an_interruption_with_closed_connections() {
    let both = ["getMore", "aggregate"];
    the_stream_fails(document!("closed"), &both, doc! { "closeConnection": true }).await;
}

#[tokio::test]
async fn without_the_privilege_for_the_stream_all_waiters_are_served() {
    // Unauthorized, as without the privilege `changeStream`.
    let both = ["getMore", "aggregate"];
    the_stream_fails(document!("denied"), &both, doc! { "errorCode": 13 }).await;
}

#[tokio::test]
async fn the_stream_outlives_a_killed_cursor() {
    let server = mongod::local_replica_set().await;
    let mut crowd = Crowd::new(document!("killed"), server, &server.uri()).await;
    let admin = crowd.database.client().database("admin");
    let mut killed = 0;
    eventually("its cursor is found", async || {
        let open = [
            doc! { "$currentOp": { "allUsers": true, "idleCursors": true } },
            doc! { "$match": { "appName": crowd.database.name(), "cursor.cursorId": { "$exists": true } } },
        ];
        let mut open = admin.aggregate(open).await.unwrap();
        while open.advance().await.unwrap() {
            let operation = open.deserialize_current().unwrap();
            let id = operation.get_document("cursor").unwrap().get_i64("cursorId").unwrap();
            let kill = doc! { "killCursors": "killed.lock", "cursors": [id] };
            let reply = crowd.database.run_command(kill).await.unwrap();
            killed += reply.get_array("cursorsKilled").unwrap().len();
        }
        killed > 0
    })
    .await;
    // If the driver reopens it automatically, no waiter notices.
    crowd.is_served().await;
    crowd.is_as_before().await;
}

#[tokio::test]
async fn the_stream_outlives_a_server_that_stops_answering() {
    let server = mongod::local_replica_set().await;
    let proxy = Proxy::start(server.port());
    let mut crowd = Crowd::new(document!("stalled"), server, &proxy.uri()).await;
    // The driver would never notice this, because it has no timeout.
    proxy.hold_reply_to("getMore");
    proxy.until_fired(1).await;
    crowd.is_served().await;
    assert_eq!(crowd.warnings(), 1);
    crowd.is_as_before().await;
}

#[tokio::test]
async fn the_stream_outlives_a_dropped_collection() {
    let server = mongod::local_replica_set().await;
    let mut crowd = Crowd::new(document!("dropped"), server, &server.uri()).await;
    crowd.database.collection::<Document>("dropped.lock").drop().await.unwrap();
    // The obstacle is gone with the record, whatever the holder believes.
    let held = crowd.held.take();
    crowd.is_served().await;
    drop(held);
    crowd.is_as_before().await;
}

#[tokio::test]
async fn the_stream_outlives_a_step_down_of_the_primary() {
    let server = Mongod::start_replica_set().await;
    let mut crowd = Crowd::new(document!("stepdown"), &server, &server.uri()).await;
    let step_down = doc! { "replSetStepDown": 2, "secondaryCatchUpPeriodSecs": 0, "force": true };
    server.admin(step_down).await;
    crowd.is_served().await;
    crowd.is_as_before().await;
}
