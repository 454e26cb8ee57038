//! Shared by the examples: the choice of the store.
#![allow(dead_code, reason = "not every example uses everything")]

use std::time::Duration;

use actix_doclock::{BoxError, LockManager, MemoryStore, MongoStore};
use clap::Args;

/// The store of the locks.
#[derive(Args, Clone)]
pub(crate) struct Locks {
    /// Keep the locks in MongoDB instead of this process.
    #[arg(long, env = "MONGODB_URI", value_name = "URI")]
    pub(crate) mongodb: Option<String>,
    /// The database in MongoDB.
    #[arg(long, value_name = "NAME", default_value = "doclock_examples")]
    pub(crate) database: String,
}

impl Locks {
    /// This number of application servers, with one store.
    pub(crate) async fn servers(
        &self,
        count: usize,
        ttl: Duration,
    ) -> Result<Vec<LockManager>, BoxError> {
        let memory = MemoryStore::new();
        let mut servers = Vec::new();
        for _ in 0..count {
            let builder = match &self.mongodb {
                Some(uri) => LockManager::builder(MongoStore::connect(uri, &self.database).await?),
                None => LockManager::builder(memory.clone()),
            };
            // A job has time: it waits for a busy database rather than fail.
            let builder = builder.ttl(ttl).deadline(Duration::from_secs(60));
            servers.push(builder.build().await?);
        }
        Ok(servers)
    }
}
