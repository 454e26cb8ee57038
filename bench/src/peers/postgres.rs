//! PostgreSQL: advisory locks, and a row that a transaction locks. Each task has a connection of its
//! own, since both kinds of locks belong to a connection.

use std::{collections::HashMap, sync::Arc};

use tokio::sync::{Mutex, OnceCell};
use tokio_postgres::{Client, NoTls, Statement};

use crate::{
    load::{Contender, Turn, cycle},
    report::Role,
    servers,
};

pub const ADVISORY: &str = "advisory lock";
pub const ADVISORY_WAITING: &str = "advisory lock, waiting";
pub const ROW: &str = "SELECT … FOR UPDATE in a transaction, waiting";

#[derive(Clone)]
pub struct Postgres {
    url: String,
    connections: Arc<Mutex<HashMap<usize, Arc<OnceCell<Connection>>>>>,
}

pub struct Connection {
    client: Client,
    try_lock: Statement,
    lock: Statement,
    unlock: Statement,
    row: Statement,
}

impl Postgres {
    pub async fn on(server: &servers::Postgres) -> Self {
        let this = Self { url: server.url(), connections: Arc::default() };
        let (client, connection) = tokio_postgres::connect(&this.url, NoTls).await.unwrap();
        tokio::spawn(connection);
        let prepare = "CREATE TABLE IF NOT EXISTS document (id text PRIMARY KEY, text text);
            INSERT INTO document SELECT 'document-' || lpad(i::text, 5, '0'), 'x'
                FROM generate_series(0, 9999) i ON CONFLICT DO NOTHING;
            VACUUM ANALYZE document";
        for statement in prepare.split(';') {
            client.batch_execute(statement).await.unwrap();
        }
        this
    }

    pub async fn connection(&self, task: usize) -> Arc<OnceCell<Connection>> {
        let cell = self.connections.lock().await.entry(task).or_default().clone();
        cell.get_or_init(|| Connection::to(&self.url)).await;
        cell
    }

    fn contender<F>(
        &self,
        who: &str,
        run: impl Fn(Arc<OnceCell<Connection>>, Turn) -> F + Copy + Send + Sync + 'static,
    ) -> Contender
    where
        F: Future<Output = bool> + Send + 'static,
    {
        let this = self.clone();
        Contender::new(
            "postgres",
            who,
            Role::Peer,
            cycle(move |turn| {
                let this = this.clone();
                async move { run(this.connection(turn.task).await, turn).await }
            }),
        )
    }

    pub fn contenders(&self) -> [Contender; 3] {
        let advisory = self.contender(ADVISORY, async |cell, turn| {
            let at = cell.get().expect("connected");
            let acquired = at.try_lock(turn).await;
            if acquired {
                at.unlock(turn).await;
            }
            acquired
        });
        let waiting = self.contender(ADVISORY_WAITING, async |cell, turn| {
            let at = cell.get().expect("connected");
            at.lock(turn).await;
            at.unlock(turn).await;
            true
        });
        let row = self.contender(ROW, async |cell, turn| {
            let at = cell.get().expect("connected");
            at.client.batch_execute("BEGIN").await.unwrap();
            at.client.query_one(&at.row, &[&turn.name()]).await.unwrap();
            at.client.batch_execute("COMMIT").await.unwrap();
            true
        });
        [advisory, waiting.waiting(), row]
    }

    /// Another connection holds the lock; true means refused.
    pub async fn refused(&self) -> Contender {
        const HOLDER: usize = usize::MAX;
        let held = self.connection(HOLDER).await;
        held.get().expect("connected").lock(Turn { task: HOLDER, key: 0 }).await;
        self.contender(ADVISORY, async |cell, turn| {
            !cell.get().expect("connected").try_lock(turn).await
        })
    }
}

impl Connection {
    async fn to(url: &str) -> Self {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
        tokio::spawn(connection);
        let advisory = async |verb| {
            let sql = format!("SELECT {verb}(hashtextextended($1, 0))");
            client.prepare(&sql).await.unwrap()
        };
        let (try_lock, lock, unlock) = (
            advisory("pg_try_advisory_lock").await,
            advisory("pg_advisory_lock").await,
            advisory("pg_advisory_unlock").await,
        );
        let row = client.prepare("SELECT text FROM document WHERE id = $1 FOR UPDATE");
        let row = row.await.unwrap();
        Self { client, try_lock, lock, unlock, row }
    }

    pub async fn try_lock(&self, turn: Turn) -> bool {
        self.client.query_one(&self.try_lock, &[&turn.name()]).await.unwrap().get(0)
    }

    pub async fn lock(&self, turn: Turn) {
        self.client.query_one(&self.lock, &[&turn.name()]).await.unwrap();
    }

    pub async fn unlock(&self, turn: Turn) {
        self.client.query_one(&self.unlock, &[&turn.name()]).await.unwrap();
    }
}
