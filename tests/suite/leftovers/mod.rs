//! What other programs, migrations and operators leave in a database: indexes, collations, validators, options of the
//! client, and other applications.

mod applications;
mod clients;
mod collation;
mod indexes;
mod options;

use std::time::{Duration, Instant};

use actix_doclock::store::verbs::*;
use actix_doclock::{Aid, LockError, StoreError, StoreErrorKind};
use mongodb::Database;
use mongodb::bson::{Document, doc};

use crate::rig::app::{App, WorkItem, key, lock_records};
use crate::rig::{self, mongod};

async fn fresh_database() -> Database {
    rig::fresh_database(mongod::shared_replica_set().await.uri()).await
}

/// Creates an index by a raw command, because the driver refuses some options.
async fn create_index(database: &Database, collection: &str, index: Document) {
    let command = doc! { "createIndexes": collection, "indexes": [index] };
    database.run_command(command).await.unwrap();
}

/// The error of a server that starts now.
async fn start_error(database: &Database) -> String {
    let app = App::unregistered(database, |settings| settings).await;
    app.locks.register::<WorkItem>().await.unwrap_err().to_string()
}

async fn starts(database: &Database) -> bool {
    let app = App::unregistered(database, |settings| settings).await;
    app.locks.register::<WorkItem>().await.is_ok()
}

/// What health says, as one text.
async fn problems(app: &App) -> String {
    app.locks.check_health().await.problems.join("; ")
}

/// The refusal of an operation that began at `began`: permanent, so it is not repeated until the deadline.
fn refused_at_once<T: std::fmt::Debug>(
    began: Instant,
    app: &App,
    outcome: Result<T, LockError>,
) -> StoreError {
    assert!(began.elapsed() < app.locks.deadline() / 2, "it is repeated: {:?}", began.elapsed());
    let Err(LockError::Store(error)) = outcome else { panic!("not refused: {outcome:?}") };
    assert_eq!(error.kind(), StoreErrorKind::Other, "{error}");
    assert!(!error.to_string().contains("reached"), "{error}");
    error
}
