//! A replica set of three members, for failovers.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use mongodb::bson::{Document, doc};
use tokio::net::TcpStream;
use tokio::time::sleep;

use super::mongod::{Mongod, Unusual};
use super::{client, close};

/// Elections take a second or two with the settings below, more on a busy machine.
const PRIMARY_WITHIN: Duration = Duration::from_secs(60);

/// A replica set of three. When it is dropped, its processes end and their files are deleted.
#[derive(Debug)]
pub(crate) struct ReplicaSet {
    members: Vec<Mongod>,
}

impl ReplicaSet {
    /// Starts with a primary and two secondaries that can take over.
    pub(crate) async fn start() -> Self {
        Self::start_with(Unusual::default()).await
    }

    /// The first member, which becomes the primary, may be unusual.
    pub(crate) async fn start_with(first: Unusual) -> Self {
        let starting = [first, Unusual::default(), Unusual::default()];
        let members = join_all(starting.map(Mongod::start_member_that_is)).await;
        let hosts = members.iter().zip(0..).map(|(member, id)| {
            doc! { "_id": id, "host": format!("127.0.0.1:{}", member.port()) }
        });
        let config = doc! {
            "_id": "rs0",
            "members": hosts.collect::<Vec<_>>(),
            "settings": { "heartbeatIntervalMillis": 500, "electionTimeoutMillis": 1000 },
        };
        members[0].admin(doc! { "replSetInitiate": config }).await;
        let set = Self { members };
        set.until_complete().await;
        set
    }

    /// The URI that an application would use.
    pub(crate) fn uri(&self) -> String {
        let hosts: Vec<_> =
            self.members.iter().map(|member| format!("127.0.0.1:{}", member.port())).collect();
        format!("mongodb://{}/?replicaSet=rs0&heartbeatFrequencyMS=500", hosts.join(","))
    }

    /// All members, by number.
    pub(crate) fn members(&self) -> &[Mongod] {
        &self.members
    }

    /// The primary steps down, and another member is elected.
    pub(crate) async fn step_down(&self) {
        // Not for long: if all members have stepped down, none can be elected.
        let command = doc! { "replSetStepDown": 5, "secondaryCatchUpPeriodSecs": 2 };
        let began = Instant::now();
        loop {
            let primary = self.primary().await;
            match self.members[primary].try_admin(command.clone()).await {
                Ok(_) => return self.another_than(primary).await,
                // The others are still catching up after an earlier fault.
                Err(e) => assert!(began.elapsed() < PRIMARY_WITHIN, "does not step down: {e}"),
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// The primary crashes, and another member is elected.
    pub(crate) async fn kill_primary(&self) {
        let primary = self.primary().await;
        self.members[primary].kill9();
        self.another_than(primary).await;
    }

    /// Waits until a member other than this one is the primary.
    pub(crate) async fn another_than(&self, old: usize) {
        let began = Instant::now();
        while self.primary().await == old {
            assert!(began.elapsed() < PRIMARY_WITHIN, "no other primary");
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// The number of the primary, once there is one.
    pub(crate) async fn primary(&self) -> usize {
        let began = Instant::now();
        loop {
            for (n, member) in self.members.iter().enumerate() {
                if let Some(hello) = hello(member).await
                    && hello.get_bool("isWritablePrimary").unwrap_or_default()
                {
                    return n;
                }
            }
            assert!(began.elapsed() < PRIMARY_WITHIN, "no primary");
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until there is a primary and all other members can take over.
    pub(crate) async fn until_complete(&self) {
        self.primary().await;
        let began = Instant::now();
        for member in &self.members {
            while !hello(member).await.is_some_and(|hello| {
                ["isWritablePrimary", "secondary"]
                    .iter()
                    .any(|role| hello.get_bool(role).unwrap_or_default())
            }) {
                // It may have to roll back first.
                let (port, waited) = (member.port(), began.elapsed());
                assert!(waited < 3 * PRIMARY_WITHIN, "the member on {port} does not become ready");
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// `None` if the member was killed or is paused.
async fn hello(member: &Mongod) -> Option<Document> {
    if member.is_paused() {
        return None;
    }
    // Checked first, because the driver would keep looking for the member for a while.
    TcpStream::connect((Ipv4Addr::LOCALHOST, member.port())).await.ok()?;
    let client = client(&member.direct_uri()).await;
    let hello = client.database("admin").run_command(doc! { "hello": 1 }).await;
    close(client).await;
    hello.ok()
}
