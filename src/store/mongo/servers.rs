//! Freezes, and the notes of the servers: one record for each kind, so that a server reads all of a kind by one `_id`,
//! and writes and reads by one command.
//!
//! ```text
//! doclock.frozen: { _id: "freezes", of: [ { collection, id, reason, by, since, until, obeyed: [ "<server>" ] } ] }
//! doclock.server: { _id: "servers", of: [ { id, name, version, ttl, key, at, collections: [ { name, fenced, fair } ] } ] }
//! ```

use std::{collections::BTreeMap, time::Duration};

use futures_util::future::try_join;
use mongodb::{
    Collection,
    bson::{Bson, DateTime, Document, doc},
    options::ReturnDocument,
};
use uuid::Uuid;

use crate::{
    freeze::{End, Freeze, MAX_NOTED, NewFreeze, Scope},
    server::{Flags, ServerNote},
    store::{
        Deadline, Fleet, Frozen, Servers, StoreResult,
        mongo::{
            FROZEN, MongoStore, SERVERS,
            codec::{self, millis, presentable},
            concerns::primary,
            error::Doing,
            send::{Timing, modified, row},
            time_limits::answered,
        },
    },
};

const FREEZES: &str = "freezes";
/// Stands for all collections. No collection has this name, because drivers and shells refuse it.
const ALL: &str = "*";

const NOTES: &str = "servers";
/// How long a note counts after its last refresh.
const COUNTS_FOR: Duration = Duration::from_secs(3 * 60);
/// How many notes there are at most, and how many collections a note names.
const MOST: usize = 200;

impl Servers for MongoStore {
    // findAndModify, an upsert, returns: the freezes that are on. Without this one → its time has passed,
    // and nothing has changed. With this one → set; or set by an earlier attempt whose reply was lost.
    async fn set_freeze(
        &self,
        scope: &Scope,
        freeze: Option<&NewFreeze>,
        until: Deadline,
    ) -> StoreResult<Vec<Freeze>> {
        let frozen = self.frozen();
        let written = frozen
            .find_one_and_update(doc! { "_id": FREEZES }, with_freeze(scope, freeze))
            .upsert(true)
            .return_document(ReturnDocument::After)
            .projection(remaining())
            .max_time(until.write_limit());
        Ok(freezes(modified(written).await.doing(|| "freezing or thawing")?))
    }

    async fn freezes(&self, until: Deadline) -> StoreResult<Frozen> {
        let frozen = self.frozen().clone_with_type();
        let found = frozen.find_one(doc! { "_id": FREEZES }).projection(remaining());
        let found = row(found.max_time(until.read_limit()));
        let both = try_join(found, self.time(until.read_limit())).await;
        let (found, at) = both.doing(|| "asking for freezes")?;
        Ok(Frozen { on: freezes(found), at: Some(at.date) })
    }

    // findAndModify returns: the record → this server is noted, or there are too many; nothing → it was noted
    // before, or the freeze has ended.
    async fn obey_freeze(&self, id: Uuid, server: Uuid, until: Deadline) -> StoreResult<()> {
        let (id, server) = (id.to_string(), server.to_string());
        let full = format!("this.obeyed.{}", MAX_NOTED - 1);
        let unnoted = doc! { "$elemMatch": { "id": &id, "obeyed": { "$ne": &server } } };
        let frozen = self.frozen();
        let noted = frozen
            .find_one_and_update(
                doc! { "_id": FREEZES, "of": unnoted },
                doc! { "$addToSet": { "of.$[this].obeyed": server } },
            )
            .array_filters(vec![doc! { "this.id": id, full: { "$exists": false } }])
            .projection(doc! { "_id": 1 })
            .max_time(until.write_limit());
        answered(noted).await.map(drop).doing(|| "noting that a freeze is obeyed")
    }

    // findAndModify, an upsert, returns: the notes that count, with this one, or without it if `note` is `None`; also if
    // an earlier attempt has done it, whose reply was lost.
    async fn note_server(
        &self,
        id: Uuid,
        note: Option<&ServerNote>,
        until: Deadline,
    ) -> StoreResult<Fleet> {
        let topology = self.topology().await?;
        let servers = primary(self.database(), &self.own_collection(SERVERS));
        let written = servers
            .find_one_and_update(doc! { "_id": NOTES }, with_note(id, note))
            .upsert(true)
            .return_document(ReturnDocument::After)
            .max_time(until.write_limit());
        let written = modified(written).await;
        Ok(Fleet::new(topology, notes(written.doing(|| "noting this server")?)))
    }
}

impl MongoStore {
    fn frozen(&self) -> Collection<Document> {
        primary(self.database(), &self.own_collection(FROZEN))
    }

    /// The servers that have noted themselves. In contrast to `note_server`, this only reads.
    ///
    /// # Errors
    /// If the database is not reached, or its user may not read the notes.
    pub async fn servers(&self) -> StoreResult<Vec<ServerNote>> {
        let counting = doc! { "_id": 0, "of": counting(true.into()) };
        let servers = primary(self.database(), &self.own_collection(SERVERS));
        let found = row(servers.find_one(doc! { "_id": NOTES }).projection(counting)).await;
        Ok(notes(found.doing(|| "reading the notes of the servers")?))
    }
}

/// The entries of either record, which somebody may have edited.
fn all() -> Document {
    doc! { "$cond": [{ "$isArray": "$of" }, "$of", []] }
}

/// Replaces the freeze of this scope, or removes it, and drops those that are over. A freeze that would be over already
/// changes nothing.
fn with_freeze(scope: &Scope, freeze: Option<&NewFreeze>) -> Vec<Document> {
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
fn remaining() -> Document {
    let left = doc! { "left": { "$subtract": ["$$this.until", "$$NOW"] } };
    let is_date = doc! { "$eq": [{ "$type": "$$this.until" }, "date"] };
    let is_on = doc! { "$and": [is_date, { "$gt": ["$$this.until", "$$NOW"] }] };
    let on = doc! { "$filter": { "input": all(), "cond": is_on } };
    let with_left = doc! { "$mergeObjects": ["$$this", left] };
    doc! { "_id": 0, "of": { "$map": { "input": on, "as": "this", "in": with_left } } }
}

fn freezes(record: Option<Document>) -> Vec<Freeze> {
    let record = record.unwrap_or_default();
    let read = codec::documents(&record, "of").filter_map(|freeze| {
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
    });
    read.collect()
}

fn name(scope: &Scope) -> &str {
    match scope {
        Scope::All => ALL,
        Scope::Collection(name) => name,
    }
}

/// The notes that count, and for which the condition holds.
fn counting(condition: Bson) -> Document {
    let is_date = doc! { "$eq": [{ "$type": "$$this.at" }, "date"] };
    let oldest = doc! { "$subtract": ["$$NOW", millis(COUNTS_FOR)] };
    let counts = doc! { "$and": [is_date, { "$gt": ["$$this.at", oldest] }, condition] };
    doc! { "$filter": { "input": all(), "cond": counts } }
}

fn with_note(id: Uuid, note: Option<&ServerNote>) -> Vec<Document> {
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

fn record(note: &ServerNote) -> Document {
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

fn notes(record: Option<Document>) -> Vec<ServerNote> {
    codec::documents(&record.unwrap_or_default(), "of").filter_map(note).collect()
}

/// `None` for a note that this version does not understand.
fn note(record: &Document) -> Option<ServerNote> {
    let text = |of: &Document, field| of.get_str(field).ok().map(str::to_owned);
    let collections = codec::documents(record, "collections").filter_map(|it| {
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
