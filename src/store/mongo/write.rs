//! Write commands: each is sent once, with a time limit, and acknowledged by a majority.
//!
//! They are run as raw commands, because the driver has no time limit for updates and deletes. The
//! driver also does not number raw commands for its own retries, which spares the server the
//! bookkeeping of a retryable write. No number is needed: every write of the store can tell its own
//! work from that of an earlier attempt, and the manager repeats it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mongodb::{
    Collection,
    bson::{Bson, Document, doc},
    error::{Error, Result},
};

use crate::{
    key::LockId,
    store::mongo::{
        Prepared, codec,
        error::{Refused, Unacknowledged, ran_out_of_time},
        lanes::{self, Turn},
        majority_acknowledges, pipeline,
    },
};

/// How many records are handled one by one when one of them is stuck.
const ONE_BY_ONE: i64 = 10_000;
/// Into how many parts records are split to find the stuck one.
const PARTS: usize = 8;

/// The result of a `findAndModify`.
pub(super) struct Modified {
    /// The record after the command; `None` if no record matched.
    pub(super) record: Option<Document>,
    /// The command created the record.
    pub(super) is_new: bool,
}

/// The result of a write on several records.
pub(super) struct Written {
    pub(super) matched: u64,
    /// Why some records were left out: an open transaction blocks them.
    stuck: Option<Error>,
}

impl Written {
    /// How many records were written; an error if any was left out.
    pub(super) fn all(self) -> Result<u64> {
        self.stuck.map_or(Ok(self.matched), Err)
    }
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

    /// One write on all records that `filter` matches.
    ///
    /// A stuck record does not keep the others from being written: it comes last, in a command of its
    /// own.
    pub(super) async fn write_all(&self, filter: Document, write: &Write) -> Result<Written> {
        let stuck = self.lanes.stuck();
        if stuck.is_empty() {
            let command = write.command(&self.locks, filter.clone(), false);
            let done = self::write(&self.locks, command, lanes::write_limit()).await;
            if !done.as_ref().is_err_and(ran_out_of_time) {
                return done.map(|matched| Written { matched, stuck: None });
            }
        }
        self.write_in_parts(filter, write).await
    }

    /// The same in parts. A part that exceeds its time limit is split further.
    async fn write_in_parts(&self, filter: Document, write: &Write) -> Result<Written> {
        let found = self.locks.find(filter.clone()).projection(doc! { "_id": 1 });
        let mut cursor = found.limit(ONE_BY_ONE).max_time(lanes::read_limit()).await?;
        let (mut easy, mut hard) = (Vec::new(), Vec::new());
        let stuck = self.lanes.stuck();
        while cursor.advance().await? {
            let record = cursor.deserialize_current()?;
            let id = record.get("_id").cloned().unwrap_or(Bson::Null);
            if stuck.contains(&id) { hard.push(id) } else { easy.push(id) }
        }
        let (mut matched, mut stuck) = (0, None);
        // The whole has just failed, or the known stuck records are left out.
        let part =
            if hard.is_empty() { easy.len().div_ceil(PARTS).max(1) } else { easy.len().max(1) };
        let mut open: Vec<_> = easy.chunks(part).map(<[Bson]>::to_vec).collect();
        while let Some(ids) = open.pop() {
            lanes::in_time()?;
            if ids.len() <= 1 {
                hard.extend(ids);
                continue;
            }
            let command = write.command(&self.locks, among(&filter, &ids), false);
            // A limit that grew with the time that the search has taken would take up the deadline.
            match self::write(&self.locks, command, lanes::group_limit()).await {
                Ok(these) => matched += these,
                Err(e) if ran_out_of_time(&e) => {
                    let part = ids.len().div_ceil(PARTS);
                    open.extend(ids.chunks(part).map(<[Bson]>::to_vec));
                }
                Err(e) => return Err(e),
            }
        }
        for id in hard {
            lanes::in_time()?;
            let filter = among(&filter, std::slice::from_ref(&id));
            let done = match codec::lock_id(&id) {
                Some(id) => self.write_one(&id, filter, write).await,
                // The record of a foreign program.
                None => {
                    let command = write.command(&self.locks, filter, false);
                    self::write(&self.locks, command, lanes::write_limit()).await
                }
            };
            match done {
                Ok(this) => matched += this,
                Err(e) => stuck = Some(e),
            }
        }
        Ok(Written { matched, stuck })
    }
}

fn among(filter: &Document, ids: &[Bson]) -> Document {
    doc! { "$and": [filter.clone(), { "_id": { "$in": ids } }] }
}
