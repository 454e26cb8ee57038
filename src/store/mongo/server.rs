//! The notes of the servers: one record for all of them, so that one command writes a note and reads the others.

use std::{collections::BTreeMap, time::Duration};

use mongodb::{
    Collection,
    bson::{Bson, Document as Record, doc},
    options::ReturnDocument,
};
use uuid::Uuid;

use crate::{
    error::StoreError,
    server::{Flags, ServerNote},
    store::Fleet,
    store::mongo::{
        MongoStore, codec,
        error::{retry_duplicate_key, store_error},
        lanes, majority,
        pipeline::millis,
    },
};

/// The collection of the record.
pub(super) const SERVERS: &str = "doclock.server";
const ID: &str = "servers";
/// How long a note counts after its last refresh.
const COUNTS_FOR: Duration = Duration::from_secs(3 * 60);
/// How many notes there are at most, and how many collections a note names.
const MOST: usize = 200;

impl MongoStore {
    /// findAndModify, an upsert, returns: the notes that count. With this one → written, perhaps by an earlier
    /// attempt whose reply was lost. Without → removed.
    pub(super) async fn write_note(
        &self,
        id: Uuid,
        note: Option<&ServerNote>,
    ) -> Result<Fleet, StoreError> {
        let topology = self.topology().await?;
        let written = self
            .notes()
            .find_one_and_update(doc! { "_id": ID }, change(id, note))
            .upsert(true)
            .return_document(ReturnDocument::After)
            .max_time(lanes::write_limit())
            .await;
        let failed = |e| retry_duplicate_key(store_error("noting this server", e));
        Ok(Fleet::new(topology, notes(written.map_err(failed)?)))
    }

    /// The notes that count.
    pub(super) async fn read_notes(&self) -> mongodb::error::Result<Vec<ServerNote>> {
        let counting = doc! { "_id": 0, "of": counting(true.into()) };
        let found = self.notes().find_one(doc! { "_id": ID }).projection(counting).await?;
        Ok(notes(found))
    }

    fn notes(&self) -> Collection<Record> {
        majority(self.database(), SERVERS)
    }
}

/// The notes that count, and for which the condition holds.
fn counting(condition: Bson) -> Record {
    // Somebody may have edited the record.
    let all = doc! { "$cond": [{ "$isArray": "$of" }, "$of", []] };
    let is_date = doc! { "$eq": [{ "$type": "$$this.at" }, "date"] };
    let oldest = doc! { "$subtract": ["$$NOW", millis(COUNTS_FOR)] };
    let counts = doc! { "$and": [is_date, { "$gt": ["$$this.at", oldest] }, condition] };
    doc! { "$filter": { "input": all, "cond": counts } }
}

fn change(id: Uuid, note: Option<&ServerNote>) -> Vec<Record> {
    let is_other = doc! { "$ne": ["$$this.id", { "$literal": id.to_string() }] };
    let others = doc! { "$slice": [counting(is_other.into()), MOST as i32 - 1] };
    let of: Bson = match note {
        None => others.into(),
        Some(note) => {
            let this = doc! { "$mergeObjects": [{ "$literal": record(note) }, { "at": "$$NOW" }] };
            doc! { "$concatArrays": [[this], others] }.into()
        }
    };
    vec![doc! { "$set": { "of": of } }]
}

fn record(note: &ServerNote) -> Record {
    let ServerNote { id, name, version, ttl, collections, key } = note;
    let collections = collections.iter().take(MOST).map(|(name, flags)| {
        doc! { "name": name, "fenced": flags.fenced, "fair": flags.fair }
    });
    let collections: Vec<_> = collections.collect();
    doc! {
        "id": id.to_string(), "name": name, "version": version, "ttl": millis(*ttl),
        "collections": collections, "key": key.as_deref(),
    }
}

fn notes(record: Option<Record>) -> Vec<ServerNote> {
    let of = record.as_ref().and_then(|record| record.get_array("of").ok());
    of.into_iter().flatten().filter_map(Bson::as_document).filter_map(note).collect()
}

/// `None` for a note that this version does not understand.
fn note(record: &Record) -> Option<ServerNote> {
    let text = |of: &Record, field| of.get_str(field).ok().map(str::to_owned);
    let collections = record.get_array("collections").ok()?.iter().filter_map(Bson::as_document);
    let collections = collections.filter_map(|it| {
        let flag = |name| it.get_bool(name).unwrap_or_default();
        Some((text(it, "name")?, Flags::new(flag("fenced"), flag("fair"))))
    });
    Some(ServerNote {
        id: Uuid::parse_str(record.get_str("id").ok()?).ok()?,
        name: text(record, "name")?,
        version: text(record, "version")?,
        ttl: Duration::from_millis(record.get("ttl").and_then(codec::number)?.max(0.0) as u64),
        collections: collections.collect::<BTreeMap<_, _>>(),
        key: text(record, "key"),
    })
}
