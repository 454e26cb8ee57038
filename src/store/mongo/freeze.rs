//! Freezes: one record for all of them, so that each server reads them by its `_id`.

use std::time::Duration;

use mongodb::{
    Collection,
    bson::{Bson, DateTime, Document as Record, doc},
    error::Result,
    options::ReturnDocument,
};
use uuid::Uuid;

use crate::{
    error::StoreError,
    freeze::{End, Freeze, MAX_NOTED, NewFreeze, Scope},
    store::mongo::{
        MongoStore, codec,
        error::{retry_duplicate_key, store_error},
        lanes, majority,
        pipeline::millis,
        record::presentable,
    },
};

/// The collection of the record.
pub(super) const FROZEN: &str = "doclock.frozen";
const ID: &str = "freezes";
/// Stands for all collections. No collection has this name, because drivers and shells refuse it.
const ALL: &str = "*";

impl MongoStore {
    /// findAndModify, an upsert, returns: the freezes that are on. Without this one → its time has passed,
    /// and nothing has changed. With this one → set; or set by an earlier attempt whose reply was lost.
    pub(super) async fn write_freeze(
        &self,
        scope: &Scope,
        freeze: Option<&NewFreeze>,
    ) -> std::result::Result<Vec<Freeze>, StoreError> {
        let written = self
            .frozen()
            .find_one_and_update(doc! { "_id": ID }, change(scope, freeze))
            .upsert(true)
            .return_document(ReturnDocument::After)
            .projection(remaining())
            .max_time(lanes::write_limit())
            .await;
        let failed = |e| retry_duplicate_key(store_error("freezing or thawing", e));
        Ok(freezes(written.map_err(failed)?))
    }

    pub(super) async fn read_freezes(&self) -> std::result::Result<Vec<Freeze>, StoreError> {
        let found: Result<_> = self
            .frozen()
            .find_one(doc! { "_id": ID })
            .projection(remaining())
            .max_time(lanes::read_limit())
            .await;
        Ok(freezes(found.map_err(|e| store_error("asking for freezes", e))?))
    }

    /// findAndModify returns: the record → this server is noted, or there are too many; nothing → it was noted
    /// before, or the freeze has ended.
    pub(super) async fn note_obedience(
        &self,
        id: Uuid,
        server: Uuid,
    ) -> std::result::Result<(), StoreError> {
        let (id, server) = (id.to_string(), server.to_string());
        let full = format!("this.obeyed.{}", MAX_NOTED - 1);
        let unnoted = doc! { "$elemMatch": { "id": &id, "obeyed": { "$ne": &server } } };
        let noted = self
            .frozen()
            .find_one_and_update(
                doc! { "_id": ID, "of": unnoted },
                doc! { "$addToSet": { "of.$[this].obeyed": server } },
            )
            .array_filters(vec![doc! { "this.id": id, full: { "$exists": false } }])
            .projection(doc! { "_id": 1 })
            .max_time(lanes::write_limit())
            .await;
        noted.map(drop).map_err(|e| store_error("noting that a freeze is obeyed", e))
    }

    fn frozen(&self) -> Collection<Record> {
        majority(self.database(), FROZEN)
    }
}

fn change(scope: &Scope, freeze: Option<&NewFreeze>) -> Vec<Record> {
    let collection = doc! { "$literal": name(scope) };
    let is_on = doc! { "$gt": ["$$this.until", "$$NOW"] };
    let is_other = doc! { "$ne": ["$$this.collection", &collection] };
    let others = doc! { "$and": [is_on, is_other] };
    let others = doc! { "$filter": { "input": all(), "cond": others } };
    let of = match freeze {
        None => others,
        Some(NewFreeze { id, reason, by, end }) => {
            let until = match end {
                End::At(until) => Bson::from(DateTime::from_system_time(*until)),
                End::In(lasts) => doc! { "$add": ["$$NOW", millis(*lasts)] }.into(),
            };
            let this = doc! {
                "collection": collection,
                "id": id.to_string(),
                "reason": { "$literal": reason },
                "by": { "$literal": by },
                "since": "$$NOW",
                "until": &until,
            };
            let with_this = doc! { "$concatArrays": [others, [this]] };
            doc! { "$cond": [{ "$gt": [until, "$$NOW"] }, with_this, all()] }
        }
    };
    vec![doc! { "$set": { "of": of } }]
}

/// The freezes that are on, with their remaining time by the server's clock.
fn remaining() -> Record {
    let left = doc! { "left": { "$subtract": ["$$this.until", "$$NOW"] } };
    let is_date = doc! { "$eq": [{ "$type": "$$this.until" }, "date"] };
    let is_on = doc! { "$and": [is_date, { "$gt": ["$$this.until", "$$NOW"] }] };
    let on = doc! { "$filter": { "input": all(), "cond": is_on } };
    let with_left = doc! { "$mergeObjects": ["$$this", left] };
    doc! { "_id": 0, "of": { "$map": { "input": on, "as": "this", "in": with_left } } }
}

/// Somebody may have edited the record.
fn all() -> Record {
    doc! { "$cond": [{ "$isArray": "$of" }, "$of", []] }
}

fn freezes(record: Option<Record>) -> Vec<Freeze> {
    let of = record.as_ref().and_then(|record| record.get_array("of").ok());
    let of = of.into_iter().flatten().filter_map(Bson::as_document);
    of.filter_map(|freeze| {
        let scope = match freeze.get_str("collection").ok()? {
            ALL => Scope::All,
            collection => collection.into(),
        };
        let until = presentable(freeze.get_datetime("until").ok().copied());
        let left = freeze.get("left").and_then(codec::number)?;
        let left = Duration::from_millis(left.max(0.0) as u64);
        let reason = freeze.get_str("reason").unwrap_or_default().to_owned();
        let mut read = Freeze::new(scope, reason, until, left);
        read.by = freeze.get_str("by").ok().map(str::to_owned);
        read.id = freeze.get_str("id").ok().and_then(|id| id.parse().ok());
        read.obeyed_by = freeze.get_array("obeyed").map_or(0, Vec::len);
        Some(read)
    })
    .collect()
}

fn name(scope: &Scope) -> &str {
    match scope {
        Scope::All => ALL,
        Scope::Collection(name) => name,
    }
}
