//! A real redis, for session stores that keep their state there.

use std::sync::OnceLock;

use super::server::{self, Server};
use super::share;

/// The URL of the redis that all tests of the process share.
pub(crate) async fn shared() -> String {
    static REDIS: OnceLock<Option<Server>> = OnceLock::new();
    let server = share(&REDIS, start).await;
    format!("redis://127.0.0.1:{}", server.port())
}

async fn start() -> Server {
    let program = server::program("REDIS_SERVER", "redis-server").await;
    Server::start(program, arguments, "Ready to accept connections").await
}

fn arguments(port: u16) -> Vec<String> {
    let port = port.to_string();
    ["--bind", "127.0.0.1", "--port", &port, "--save", "", "--appendonly", "no"]
        .map(String::from)
        .to_vec()
}
