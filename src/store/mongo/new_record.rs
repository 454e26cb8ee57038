//! Makes the record of a lock, dated by the command that writes it: no other clock of any machine has a part in it, not
//! even one that stands still.
//!
//! The rules need a time before the server has told one. They run at a [moment](unknown) in the far future, and each date
//! and number that comes out of it is written as an expression: the server's time, plus the rest. The reply tells that
//! time, and the rules run again by it, for the answer.

use std::time::{Duration, Instant, SystemTime};

use mongodb::bson::{Bson, DateTime, Document, doc};

use crate::{
    key::LockId,
    lock::LockToken,
    store::{
        lock_rules::Moment,
        mongo::{
            LockCollection,
            admission::Admitted,
            codec::millis,
            error::{Result, is_duplicate_id, unavailable},
            ids::{by_id, exactly},
            lock_record::{COMPARED, New, Stored, decode, moment},
            send::{Timing, acknowledged, number_of, refusals, run},
            time_limits::LIMIT,
        },
    },
};

/// About the year 4199. No record has a later date.
const FUTURE: Duration = Duration::from_millis(1 << 46);

/// The time of a record that is made by a later command. Leases count from `asked`.
pub(super) fn unknown(asked: Instant) -> Moment {
    Moment { now: FUTURE, read: asked, date: SystemTime::UNIX_EPOCH + FUTURE }
}

/// The longest time between a reading of the server's clock and the write of a lease that has its date. The server, or a
/// later reading, must prove that it was not longer: the process may have stood still.
pub(super) fn longest_age(ttl: Duration) -> Duration {
    // The shortest leases are those that end with their `max_hold` soon.
    (ttl / 4).max(Duration::from_millis(100))
}

/// The stage of a pipeline that sets all fields of a record but its `_id`.
pub(super) fn set(mut record: Document) -> Document {
    record.remove("_id");
    doc! { "$set": by_the_server(record.into()) }
}

/// Changes a record that contains nothing but an exclusive lock into this one.
///
/// By `$unset` and `$set`, because a `$replaceWith` makes a server abort if a name stands twice in the stored record.
pub(super) fn instead_of_a_lock(record: Document) -> Vec<Document> {
    let others = COMPARED.iter().chain(&["saved"]).filter(|name| !record.contains_key(**name));
    let others: Vec<_> = others.map(|name| Bson::from(*name)).collect();
    vec![doc! { "$unset": others }, set(record)]
}

/// The expression of a value in which the [unknown] time is the server's.
fn by_the_server(value: Bson) -> Bson {
    let future = millis(FUTURE);
    match value {
        Bson::DateTime(at) if at.timestamp_millis() >= future => {
            doc! { "$add": ["$$NOW", at.timestamp_millis() - future] }.into()
        }
        Bson::Int64(n) if n >= future => {
            doc! { "$add": [{ "$toLong": "$$NOW" }, n - future] }.into()
        }
        Bson::Document(fields) if has_dates(&fields) => {
            let fields = fields.into_iter().map(|(name, value)| (name, by_the_server(value)));
            fields.collect::<Document>().into()
        }
        Bson::Array(all) => all.into_iter().map(by_the_server).collect::<Vec<_>>().into(),
        value => doc! { "$literal": value }.into(),
    }
}

/// A document without dates, such as a holder, has texts of people in it, and is written as it is.
fn has_dates(fields: &Document) -> bool {
    fields.values().any(|it| matches!(it, Bson::DateTime(_)))
}

impl LockCollection<'_> {
    /// Makes the record of this claim. Returns its moment; `None` if there is a record already. The command is shared with
    /// other claims, unless another write of this record is under way.
    pub(super) async fn make(&self, new: &New) -> Result<Option<Moment>> {
        let id = new.key.id();
        if self.admission.is_used(id) {
            return self.make_alone(new).await;
        }
        // Releases are sent first.
        let send_by = self.until.claim_by(self.groups.releases.wait())?;
        let made =
            self.groups.new_records.submit(new.clone(), send_by, async |all| match &all[..] {
                [new] => vec![self.make_alone(new).await],
                all => self.each(all.iter().map(|it| it.key.id()), self.make_all(all).await),
            });
        made.await
    }

    async fn make_alone(&self, new: &New) -> Result<Option<Moment>> {
        let id = new.key.id();
        let (record, _) = new.at(&self.rules, unknown(Instant::now()));
        self.make_one(id, self.admit_claim(id).await?, set(record)).await
    }

    // findAndModify, an upsert, returns: the server's time → made. Error 11000 → there is a record. No reply → not known;
    // the verb is repeated, and the rules recognise their own work.
    pub(super) async fn make_one(
        &self,
        id: &LockId,
        admitted: Admitted<'_>,
        set: Document,
    ) -> Result<Option<Moment>> {
        match self.modify(admitted, no_record(id), vec![set], true).await {
            Err(e) if is_duplicate_id(&e) => Ok(None),
            made => made,
        }
    }

    /// Changes the record that the filter matches, and returns the server's time; `None` if there is none.
    pub(super) async fn modify(
        &self,
        admitted: Admitted<'_>,
        filter: Document,
        by: Vec<Document>,
        upsert: bool,
    ) -> Result<Option<Moment>> {
        let command = doc! {
            "findAndModify": self.primary.name(), "query": filter, "update": by, "upsert": upsert,
            "new": true, "fields": { "_id": 0, "now": "$$NOW" },
        };
        let (asked, limit) = (Instant::now(), admitted.limit);
        let command = exactly(command, "query");
        let reply = admitted.carry_out(run(&self.primary, command, limit)).await?;
        let now = reply.get_document("value").ok().and_then(|it| it.get_datetime("now").ok());
        acknowledged(&reply, now.is_some())?;
        Ok(now.map(|now| moment(*now, asked)))
    }

    // insert returns for each record: nothing → made. Error 11000 → there is one. No reply, or the read finds another lock
    // by now, or an old date → not known; each claim is repeated, and recognises its grant.
    //
    // An insert has no expressions, but the server makes many records by it in a third of the time of as many upserts. The
    // date is a reading of the server's clock before the insert. A reading after the insert, with the records, proves how
    // old that date is at most: the process may have stood still in between.
    async fn make_all(&self, all: &[New]) -> Result<Vec<Result<Option<Moment>>>> {
        let before = self.store.time(LIMIT).await?;
        let documents: Vec<_> = all.iter().map(|new| new.at(&self.rules, before).0).collect();
        let command =
            doc! { "insert": self.primary.name(), "documents": documents, "ordered": false };
        let reply = run(&self.primary, command, LIMIT).await?;
        acknowledged(&reply, number_of(&reply) > 0)?;
        let mut refused = refusals(&reply);
        let made: Vec<_> = (0..all.len()).filter(|n| !refused.contains_key(n)).collect();
        let ids: Vec<_> = made.iter().map(|n| all[*n].key.id()).collect();
        let stored = self.records(&ids).await?;
        let outcome = |(n, new): (usize, &New)| match refused.remove(&n) {
            Some(e) if is_duplicate_id(&e) => Ok(None),
            Some(e) => Err(e),
            None => {
                let stored = stored.get(new.key.id());
                let moment = stored.and_then(|it| self.granted_at(it, new.claim.token));
                moment.map(Some).ok_or_else(|| unavailable("the new lock is gone, or too old"))
            }
        };
        Ok(all.iter().enumerate().map(outcome).collect())
    }

    /// When this acquisition was granted, counted back from the read of its record. `None` if it is gone, or its lease has
    /// lost more than its part.
    fn granted_at(&self, stored: &Stored, token: LockToken) -> Option<Moment> {
        let record = decode(&stored.fields, &self.rules, stored.moment);
        let grant = record.grants.iter().find(|it| it.token == Some(token))?;
        let age = stored.moment.date.duration_since(grant.since).unwrap_or_default();
        let read = stored.moment.read.checked_sub(age)?;
        let is_young = age <= longest_age(grant.ttl);
        is_young.then(|| moment(DateTime::from_system_time(grant.since), read))
    }
}

/// Matches nothing, and names the id of the record that an upsert then makes. If there is such a record, the server
/// refuses the upsert, and does not try it again, because the filter has more than the id.
fn no_record(id: &LockId) -> Document {
    let mut filter = by_id(id);
    filter.insert("aid", doc! { "$in": [] });
    filter
}
