//! The servers that are compared. Each is started from scratch, with explicit settings for surviving a
//! crash.

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../tests/rig/server.rs"]
mod server;

use std::{process::Command, time::Duration};

use futures_util::future::join_all;
use mongodb::{
    Client,
    bson::{Document, doc},
    options::ClientOptions,
};
use server::Server;
use tokio::time::{sleep, timeout};

/// Everything that runs for the benchmark; dropping it stops all servers.
pub struct Servers {
    pub one: Mongo,
    pub three: Mongo,
    pub redis: Option<Redis>,
    pub redis_aof: Option<Redis>,
}

impl Servers {
    pub async fn start() -> Self {
        let (one, three) = (Mongo::start(1).await, Mongo::start(3).await);
        let redis = Redis::start(&["--appendonly", "no"]).await;
        let redis_aof = Redis::start(&["--appendonly", "yes", "--appendfsync", "always"]).await;
        Self { one, three, redis, redis_aof }
    }
}

/// A replica set with the given number of members.
pub struct Mongo {
    members: Vec<Server>,
    pub version: String,
}

impl Mongo {
    pub async fn start(members: usize) -> Self {
        let program = server::program("MONGOD", "mongod").await;
        let start = || Server::start(program.clone(), mongod, "Waiting for connections");
        let members: Vec<_> = join_all((0..members).map(|_| start())).await;
        let hosts = members.iter().zip(0..).map(|(member, id)| {
            doc! { "_id": id, "host": format!("127.0.0.1:{}", member.port()) }
        });
        let config = doc! { "_id": "rs0", "members": hosts.collect::<Vec<_>>() };
        admin(&members[0], doc! { "replSetInitiate": config }).await;
        // Without this, nobody stands for election in the first ten seconds.
        let _ = try_admin(&members[0], doc! { "replSetStepUp": 1 }).await;
        for member in &members {
            let ready = |hello: &Document| {
                hello.get_bool("isWritablePrimary") == Ok(true)
                    || hello.get_bool("secondary") == Ok(true) && hello.contains_key("primary")
            };
            while !ready(&admin(member, doc! { "hello": 1 }).await) {
                let _ = try_admin(&members[0], doc! { "replSetStepUp": 1 }).await;
                sleep(Duration::from_millis(100)).await;
            }
        }
        let info = admin(&members[0], doc! { "buildInfo": 1 }).await;
        Self { members, version: info.get_str("version").unwrap_or_default().to_owned() }
    }

    /// The URI that an application would be configured with, without any extras.
    pub fn uri(&self) -> String {
        self.uri_of("")
    }

    /// The same with a default database, for crates that lock in the default database.
    pub fn uri_of(&self, database: &str) -> String {
        let hosts: Vec<_> =
            self.members.iter().map(|member| format!("127.0.0.1:{}", member.port())).collect();
        format!("mongodb://{}/{database}?replicaSet=rs0", hosts.join(","))
    }

    pub async fn client(&self) -> Client {
        Client::with_uri_str(self.uri()).await.expect("a valid URI")
    }

    /// A client whose options differ from the defaults.
    pub async fn client_with(&self, change: impl FnOnce(&mut ClientOptions)) -> Client {
        let mut options = ClientOptions::parse(self.uri()).await.expect("a valid URI");
        change(&mut options);
        Client::with_options(options).expect("valid options")
    }

    /// The processor time that all members have used.
    pub async fn processor_time(&self) -> Duration {
        let status = join_all(self.members.iter().map(|it| admin(it, doc! { "serverStatus": 1 })));
        let of = |status: &Document| {
            let times = status.get_document("extra_info").expect("on Linux");
            let time = |name| times.get_i64(name).unwrap_or_default() as u64;
            Duration::from_micros(time("user_time_us") + time("system_time_us"))
        };
        status.await.iter().map(of).sum()
    }

    /// The processes of the members.
    pub async fn processes(&self) -> Vec<i64> {
        let status = join_all(self.members.iter().map(|it| admin(it, doc! { "serverStatus": 1 })));
        status.await.iter().map(|it| it.get_i64("pid").expect("on Linux")).collect()
    }

    /// Sets a parameter of each member. False if the server refuses.
    pub async fn parameter(&self, name: &str, value: i32) -> bool {
        let set = |member| try_admin(member, doc! { "setParameter": 1, name: value });
        join_all(self.members.iter().map(set)).await.into_iter().all(|set| set.is_ok())
    }
}

async fn admin(member: &Server, command: Document) -> Document {
    try_admin(member, command).await.expect("mongod obeys")
}

async fn try_admin(member: &Server, command: Document) -> mongodb::error::Result<Document> {
    let uri = format!("mongodb://127.0.0.1:{}/?directConnection=true", member.port());
    let client = Client::with_uri_str(uri).await?;
    let reply = client.database("admin").run_command(command).await;
    // At most two seconds: after a step-down, the driver's own shutdown was seen to hang forever.
    let _ = timeout(Duration::from_secs(2), client.shutdown().immediate(true)).await;
    reply
}

fn mongod(port: u16) -> Vec<String> {
    let port = port.to_string();
    let arguments = [
        ["--bind_ip", "127.0.0.1"],
        ["--port", &port],
        ["--dbpath", "."],
        ["--replSet", "rs0"],
        // The measured data fits; by default, each member would take half of the machine's memory.
        ["--wiredTigerCacheSizeGB", "1"],
        ["--oplogSize", "512"],
        // Would disturb the measurement once a second.
        ["--setParameter", "diagnosticDataCollectionEnabled=false"],
    ];
    let flags = ["--nounixsocket", "--quiet"];
    arguments.iter().flatten().chain(&flags).map(ToString::to_string).collect()
}

pub struct Redis {
    server: Server,
    pub version: String,
}

impl Redis {
    async fn start(durability: &'static [&'static str]) -> Option<Self> {
        let program = server::program("REDIS_SERVER", "redis-server").await;
        let version = first_line(Command::new(&program).arg("--version"))?;
        let arguments = move |port: u16| {
            let port = port.to_string();
            let common = ["--bind", "127.0.0.1", "--port", &port, "--save", ""];
            common.iter().chain(durability).map(ToString::to_string).collect()
        };
        let server = Server::start(program, arguments, "Ready to accept connections").await;
        let version = version.split_whitespace().find_map(|word| word.strip_prefix("v="));
        Some(Self { version: version.unwrap_or("?").to_owned(), server })
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.server.port())
    }
}

fn first_line(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).lines().next()?.to_owned())
}
