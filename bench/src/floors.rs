//! The cost of the database alone: the driver, without any protocol.

use mongodb::{
    Collection, Database,
    bson::{DateTime, Document, doc},
    error::{ErrorKind, WriteFailure},
    options::{Acknowledgment, CollectionOptions, WriteConcern},
};

use crate::{
    load::{Contender, Turn, cycle},
    report::Role,
};

/// The names of the floors, as the page refers to them.
pub const INSERT_DELETE: &str = "insert_one + delete_one";
pub const UPSERT_DELETE: &str = "findAndModify upsert + delete_one";

pub fn majority(database: &Database, name: &str) -> Collection<Document> {
    with(database, name, WriteConcern::majority())
}

pub fn with(database: &Database, name: &str, concern: WriteConcern) -> Collection<Document> {
    let options = CollectionOptions::builder().write_concern(concern).build();
    database.collection_with_options(name, options)
}

pub fn w1(journal: bool) -> WriteConcern {
    let mut concern = WriteConcern::builder().w(Acknowledgment::Nodes(1)).build();
    concern.journal = journal.then_some(true);
    concern
}

/// Carries as much data as one of our exclusive locks.
fn record(turn: Turn) -> Document {
    doc! {
        "_id": turn.name(),
        "ts": DateTime::now(),
        "ttl": 150_000_i64,
        "aid": "5f0c3f0e-8a42-4f0e-9d3c-0d8f3b1c2a11",
        "token": "0b5cf4a3-95ab-4c28-8ff0-3a4c6dc3a7d8",
        "since": DateTime::now(),
        "holder": { "label": "alice" },
    }
}

pub fn insert_delete(at: &'static str, raw: Collection<Document>) -> Contender {
    Contender::new(
        at,
        INSERT_DELETE,
        Role::Floor,
        cycle(move |turn| {
            let raw = raw.clone();
            async move { insert(&raw, turn).await && delete(&raw, turn).await }
        }),
    )
}

/// False if the record is there already.
pub async fn insert(raw: &Collection<Document>, turn: Turn) -> bool {
    match raw.insert_one(record(turn)).await {
        Ok(_) => true,
        Err(e) if is_duplicate(&e) => false,
        Err(e) => panic!("{e}"),
    }
}

async fn delete(raw: &Collection<Document>, turn: Turn) -> bool {
    raw.delete_one(doc! { "_id": turn.name() }).await.unwrap().deleted_count == 1
}

pub fn upsert_delete(at: &'static str, raw: Collection<Document>) -> Contender {
    Contender::new(
        at,
        UPSERT_DELETE,
        Role::Floor,
        cycle(move |turn| {
            let raw = raw.clone();
            async move {
                let mut set = record(turn);
                set.remove("_id");
                let by_id = doc! { "_id": turn.name() };
                let before =
                    raw.find_one_and_update(by_id, doc! { "$setOnInsert": set }).upsert(true);
                match before.await {
                    Ok(None) => delete(&raw, turn).await,
                    Ok(Some(_)) => false,
                    Err(e) if is_duplicate(&e) => false,
                    Err(e) => panic!("{e}"),
                }
            }
        }),
    )
}

pub fn is_duplicate(error: &mongodb::error::Error) -> bool {
    match &*error.kind {
        ErrorKind::Write(WriteFailure::WriteError(e)) => e.code == 11000,
        ErrorKind::Command(e) => e.code == 11000,
        _ => false,
    }
}
