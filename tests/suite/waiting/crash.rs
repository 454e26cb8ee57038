//! The holder is killed: the next waiter is let in as soon as the lock has expired.

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use mongodb::bson::{DateTime, Document, doc};
use tokio::runtime::Runtime;

use super::*;
use crate::rig::app::record;
use crate::rig::client;

const CHILD_URI: &str = "DOCLOCK_TEST_HOLDER_URI";
const CHILD_DATABASE: &str = "DOCLOCK_TEST_HOLDER_DATABASE";
const LEASE: Duration = Duration::from_secs(2);

/// A process that holds the lock on `a` until it is killed.
struct Holder(Child);

impl Holder {
    /// Its name at the server.
    const NAME: &str = "holder";

    fn start(uri: &str, database: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["waiting::crash::holds_as_a_child_of_another_test", "--exact", "--ignored"])
            .arg("--nocapture")
            .env(CHILD_URI, format!("{uri}&appName={}", Self::NAME))
            .env(CHILD_DATABASE, database)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let holds =
            output.by_ref().lines().map_while(Result::ok).any(|line| line.ends_with("holds"));
        assert!(holds, "the child has ended before it held the lock");
        Self(child)
    }
}

/// Kills the process like `kill -9`.
impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "a part of another test, which starts it as a process"]
fn holds_as_a_child_of_another_test() {
    let variable = |name| env::var(name).unwrap();
    Runtime::new().unwrap().block_on(async {
        let database = client(&variable(CHILD_URI)).await.database(&variable(CHILD_DATABASE));
        let locks = Cluster::Mongo(database).server().await;
        let _held = locks.job("dies").ttl(LEASE).acquire(&key("a"), Wait::no()).await.unwrap();
        println!("holds");
        sleep(SOON).await;
    });
}

/// The server continues with a renewal that it has received when the client is killed.
async fn until_it_sends_nothing_more(database: &Database) {
    let admin = database.client().database("admin");
    eventually("its connections are closed", async || {
        let of_it = [
            doc! { "$currentOp": { "allUsers": true, "idleConnections": true } },
            doc! { "$match": { "appName": Holder::NAME } },
        ];
        !admin.aggregate(of_it).await.unwrap().advance().await.unwrap()
    })
    .await;
}

#[tokio::test]
async fn after_a_holder_is_killed_the_next_waiter_is_in_as_soon_as_the_lock_has_expired() {
    let server = mongod::local_replica_set().await;
    let (counted, commands) = crate::rig::counted_database(&server.uri()).await;
    let database = client(&server.uri()).await.database(counted.name());
    let locks = Cluster::Mongo(counted).server().await;
    let holder = Holder::start(&server.uri(), database.name());
    let waiting = waiting(&locks, &key("a")).await;
    until_told(&locks, WorkItem::COLLECTION).await;
    // So that the lock was renewed before it expires.
    sleep(LEASE / 2).await;
    assert!(!waiting.is_finished());
    drop(holder);
    until_it_sends_nothing_more(&database).await;
    let old = record(&database, &key("a")).await.unwrap();
    let ended = date(&old, "ts").timestamp_millis() + old.get_i64("ttl").unwrap();
    commands.take();

    let guard = in_time("the waiter is let in", waiting).await.unwrap();
    let asked = commands.take().iter().filter(|it| ["insert", "update"].contains(&&***it)).count();
    let new = record(&database, &key("a")).await.unwrap();
    assert_eq!(new.get_str("token").unwrap(), guard.token().to_string());
    let late = date(&new, "since").timestamp_millis() - ended;
    eprintln!("in {late} ms after the lock of a killed process had expired, by {asked} attempts");
    assert!(late >= 0, "{late} ms before it had expired");
    assert!(late < 30_000, "{late} ms");
    assert!(asked <= 10, "{asked} attempts: that is a loop");
}

fn date(record: &Document, field: &str) -> DateTime {
    *record.get_datetime(field).unwrap()
}
