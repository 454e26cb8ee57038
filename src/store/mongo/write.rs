//! Write commands: each is sent once, with a time limit, and acknowledged by a majority.
//!
//! They are run as raw commands, because the driver has no time limit for updates and deletes. The
//! driver also does not number raw commands for its own retries, which spares the server the
//! bookkeeping of a retryable write. No number is needed: every write of the store can tell its own
//! work from that of an earlier attempt, and the manager repeats it.

use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
    time::Duration,
};

use mongodb::{
    Collection,
    bson::{Bson, Document, doc},
    error::{Error, Result},
};
use tokio::time::timeout;

use crate::{
    key::LockId,
    store::mongo::{
        Prepared, codec,
        error::{LeftOut, MAX_TIME_EXPIRED, Refused, Unacknowledged, ran_out_of_time},
        lanes::{self, Turn},
        majority_acknowledges, pipeline,
    },
};

/// How many records one command writes when the write on all of them has exceeded its time limit, or when
/// one of them is stuck.
const PAGE: usize = 1_000;
/// Into how many parts a page is split to find a stuck record in it.
const PARTS: usize = 10;

/// The result of a `findAndModify`.
pub(super) struct Modified {
    /// The record after the command; `None` if no record matched.
    pub(super) record: Option<Document>,
    /// The command created the record.
    pub(super) is_new: bool,
}

/// A write on all records that match a filter.
pub(super) enum Write {
    Update(Vec<Document>),
    Delete,
}

impl Write {
    /// The command for the records that `filter` matches. With `upsert`, creates one record if none
    /// matches.
    pub(super) fn command(
        &self,
        records: &Collection<Document>,
        filter: Document,
        upsert: bool,
    ) -> Document {
        match self {
            Self::Update(by) => doc! {
                "update": records.name(),
                "updates": [{ "q": filter, "u": by.clone(), "upsert": upsert, "multi": !upsert }],
            },
            Self::Delete => {
                doc! { "delete": records.name(), "deletes": [{ "q": filter, "limit": 0 }] }
            }
        }
    }
}

/// Runs a write command, and returns how many records it matched.
pub(super) async fn write(
    records: &Collection<Document>,
    command: Document,
    limit: Duration,
) -> Result<u64> {
    let reply = run(records, command, limit).await?;
    if let Some((_, refused)) = refusals(&reply).pop_first() {
        return Err(refused);
    }
    let matched = reply.get("n").and_then(codec::number).unwrap_or_default() as u64;
    acknowledged(&reply, matched > 0)?;
    Ok(matched)
}

/// Why the server refused some statements of a command, by their numbers.
pub(super) fn refusals(reply: &Document) -> BTreeMap<usize, Error> {
    let errors = reply.get_array("writeErrors").map_or(&[][..], |errors| errors);
    let refused = |error: &Document| {
        let code = error.get("code").and_then(codec::number).unwrap_or_default() as i32;
        let message = error.get_str("errmsg").unwrap_or_default().to_owned();
        Error::custom(Refused { code, message })
    };
    let numbered = errors.iter().filter_map(Bson::as_document);
    numbered.filter_map(|error| Some((index_of(error)?, refused(error)))).collect()
}

/// The numbers of the statements that this field of a reply lists.
pub(super) fn indexes(reply: &Document, field: &str) -> BTreeSet<usize> {
    let all = reply.get_array(field).map_or(&[][..], |all| all);
    all.iter().filter_map(Bson::as_document).filter_map(index_of).collect()
}

fn index_of(statement: &Document) -> Option<usize> {
    Some(statement.get("index").and_then(codec::number)? as usize)
}

/// Runs a write command. The reply may contain errors of its statements.
pub(super) async fn run(
    records: &Collection<Document>,
    mut command: Document,
    limit: Duration,
) -> Result<Document> {
    command.insert("maxTimeMS", pipeline::millis(limit));
    command.insert("writeConcern", majority_acknowledges());
    records.client().database(&records.namespace().db).run_command(command).await
}

/// An error if the write was carried out but is not known to be durable. The driver does not check this
/// for a raw command.
pub(super) fn acknowledged(reply: &Document, has_written: bool) -> Result<()> {
    match reply.get("writeConcernError") {
        Some(error) => Err(Error::custom(Unacknowledged { has_written, error: error.clone() })),
        None => Ok(()),
    }
}

impl Prepared {
    /// One `findAndModify` on the record of this turn.
    ///
    /// Without `fields` the whole record is returned, which costs the server less than any projection.
    pub(super) async fn modify(
        &self,
        turn: Turn<'_>,
        filter: Document,
        by: Vec<Document>,
        upsert: bool,
        fields: Option<Document>,
    ) -> Result<Modified> {
        let mut command = doc! {
            "findAndModify": self.locks.name(),
            "query": filter,
            "update": by,
            "new": true,
            "upsert": upsert,
        };
        if let Some(fields) = fields {
            command.insert("fields", fields);
        }
        let limit = turn.limit;
        let mut reply = turn.of(run(&self.locks, command, limit)).await?;
        let record = match reply.remove("value") {
            Some(Bson::Document(record)) => Some(record),
            _ => None,
        };
        acknowledged(&reply, record.is_some())?;
        let is_new =
            reply.get_document("lastErrorObject").is_ok_and(|it| it.contains_key("upserted"));
        Ok(Modified { record, is_new })
    }

    /// One write on the record `id`, if `filter` matches it.
    pub(super) async fn write_one(
        &self,
        id: &LockId,
        filter: Document,
        write: &Write,
    ) -> Result<u64> {
        let turn = self.lanes.turn(id).await?;
        let (limit, command) = (turn.limit, write.command(&self.locks, filter, false));
        turn.of(self::write(&self.locks, command, limit)).await
    }

    /// One write on all records that `filter` matches. Returns how many it matched.
    ///
    /// A stuck record does not keep the others from being written.
    ///
    /// # Errors
    /// If any record is left out. All others are written, unless the deadline has passed.
    pub(super) async fn write_all(&self, filter: Document, write: &Write) -> Result<u64> {
        if self.lanes.stuck().is_empty() {
            let command = write.command(&self.locks, filter.clone(), false);
            let done = self::write(&self.locks, command, lanes::write_limit()).await;
            if !done.as_ref().is_err_and(ran_out_of_time) {
                return done;
            }
        }
        self.write_in_pages(filter, write).await
    }

    /// The same in pages. The records that are known to be stuck come last.
    async fn write_in_pages(&self, filter: Document, write: &Write) -> Result<u64> {
        let found = self.locks.find(filter.clone()).projection(doc! { "_id": 1 });
        let mut found = found.batch_size(PAGE as u32).max_time(lanes::read_limit()).await?;
        let known = self.lanes.stuck();
        let (mut written, mut last, mut left_out) = (0, Vec::new(), 0);
        loop {
            let mut page = Vec::new();
            while page.len() < PAGE && found.advance().await? {
                let id = found.deserialize_current()?.remove("_id").unwrap_or(Bson::Null);
                (if known.contains(&id) { &mut last } else { &mut page }).push(id);
            }
            if page.is_empty() {
                break;
            }
            let (these, late) = self.write_page(page, &filter, write).await?;
            written += these;
            left_out += late;
        }
        for id in last {
            match self.write_stuck(id, &filter, write).await {
                Err(e) if ran_out_of_time(&e) => left_out += 1,
                done => written += done?,
            }
        }
        match left_out {
            0 => Ok(written),
            _ => Err(Error::custom(LeftOut { written, left_out })),
        }
    }

    /// Writes the records of a page. A part that exceeds its time limit is split further. Returns how many
    /// were written, and how many are stuck.
    async fn write_page(
        &self,
        page: Vec<Bson>,
        filter: &Document,
        write: &Write,
    ) -> Result<(u64, u64)> {
        let (mut written, mut stuck, mut open) = (0, 0, vec![page]);
        while let Some(mut ids) = open.pop() {
            let done = match ids.len() {
                1 => self.write_stuck(ids.remove(0), filter, write).await,
                _ => {
                    lanes::in_time()?;
                    let command = write.command(&self.locks, among(filter, &ids), false);
                    // A limit that grew with the time that the search takes would take up the deadline.
                    self::write(&self.locks, command, lanes::group_limit()).await
                }
            };
            match done {
                Err(e) if !ran_out_of_time(&e) => return Err(e),
                Ok(these) => written += these,
                Err(_) if ids.is_empty() => stuck += 1,
                Err(_) => open.extend(ids.chunks(ids.len().div_ceil(PARTS)).map(<[_]>::to_vec)),
            }
        }
        Ok((written, stuck))
    }

    /// Writes a record that may be stuck. If so, that is remembered.
    async fn write_stuck(&self, id: Bson, filter: &Document, write: &Write) -> Result<u64> {
        lanes::in_time()?;
        let filter = among(filter, slice::from_ref(&id));
        let command = write.command(&self.locks, filter, false);
        // The id of a foreign program.
        let Some(id) = codec::lock_id(&id) else {
            return self::write(&self.locks, command, lanes::group_limit()).await;
        };
        let limit = lanes::group_limit();
        match timeout(limit, self.lanes.turn(&id)).await {
            Ok(Ok(mut turn)) => {
                turn.limit = turn.limit.min(limit);
                let limit = turn.limit;
                turn.of(self::write(&self.locks, command, limit)).await
            }
            // Other writes on stuck records do not leave it a turn.
            _ => {
                let message = "an open transaction blocks the record".to_owned();
                Err(Error::custom(Refused { code: MAX_TIME_EXPIRED, message }))
            }
        }
    }
}

fn among(filter: &Document, ids: &[Bson]) -> Document {
    doc! { "$and": [filter.clone(), { "_id": { "$in": ids } }] }
}
