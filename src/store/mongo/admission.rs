//! Writes on single records: admits and sends them, and keeps one stuck record from holding up other documents.
//!
//! While another server's transaction on a record is open, a write on that record waits inside MongoDB
//! and occupies its connection: for a minute, if that other server has died. Ten such writes exhaust
//! the default pool. Therefore each write has a short time limit, few writes on one record are sent at
//! the same time, and the writes on all stuck records share a few connections. Other records
//! are written by no more commands at once than the pool can use, and the writes that take locks never hold up
//! the writes that give locks back.

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt,
    future::Future,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::bson::{Bson, Document, RawDocumentBuf};
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{timeout, timeout_at},
};

use crate::{
    error::StoreErrorKind,
    key::LockId,
    store::{
        lock_rules::{Moment, Record as LockRecord},
        mongo::{
            LockCollection, Prepared, codec,
            error::{
                Result, exceeded_time_limit, failure, has_lost_connection, not_sent, unavailable,
            },
            group::{AT_ONCE, Gate, Group, Slot},
            ids::{Exactly, by_id},
            lock_record::Stored,
            send::{Timing, Write, write},
            time_limits::{LIMIT, UNANSWERED, answered},
        },
    },
};

/// How many writes on one record are in progress at the same time: one that is sent while the previous
/// one waits for its majority, and a few more.
const FOR_ONE_RECORD: usize = 4;
/// How many writes on stuck records are in progress at the same time, in all collections together.
const FOR_STUCK_RECORDS: usize = 2;
/// How many writes on one record wait or are in progress at most.
const WAITING_FOR_ONE_RECORD: usize = 1_024;
/// How many writes on single records that take locks are in progress at the same time, in all collections together.
/// As many other writes may be in progress, too.
const SINGLE: usize = 32;
/// How many records are tracked before the unused ones are forgotten for the first time.
const REMEMBERED: usize = 1_000;

/// The limits for the writes of all collections together.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    stuck: Arc<Semaphore>,
    claims: Arc<Gate>,
    others: Arc<Gate>,
}

impl Shared {
    pub(super) fn new() -> Self {
        let (claims, others) =
            (Gate::new(SINGLE, 1, Duration::ZERO), Gate::new(SINGLE, 1, Duration::ZERO));
        Self { stuck: Arc::new(Semaphore::new(FOR_STUCK_RECORDS)), claims, others }
    }
}

/// The writes on the records of one collection.
#[derive(Debug)]
pub(super) struct Admission {
    records: Mutex<Records>,
    shared: Shared,
}

/// The records that are being written at the moment, or are stuck.
#[derive(Debug)]
struct Records {
    of: HashMap<LockId, Record>,
    /// The size at which the unused records are forgotten, so that forgetting costs nothing on average.
    sweep_at: usize,
}

#[derive(Debug)]
struct Record {
    permits: Arc<Semaphore>,
    steps: Arc<Steps>,
    /// How many writes wait for a permit or are in progress.
    writes: usize,
    is_stuck: bool,
    /// True if the connection was lost during a write on this record, or on its document, and none has succeeded since.
    has_lost_server: bool,
}

/// Which writes this one waits behind.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Purpose {
    Claim,
    Other,
}

type Decide = dyn Fn(&mut LockRecord, Moment) -> bool + Send + Sync;

/// A [step](super::step) that waits for others on its record.
pub(super) struct Job {
    pub(super) purpose: Purpose,
    /// The record as it was read before, and when.
    pub(super) found: (Option<Stored>, Moment),
    /// Decides, and keeps the answer. True if the answer must be durable.
    pub(super) decide: Box<Decide>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Job")
    }
}

/// The steps on one record. While one is under way, the next ones are gathered, and share a read and a write.
pub(super) type Steps = Group<Job, ()>;

impl Admission {
    pub(super) fn new(shared: Shared) -> Self {
        let records = Records { of: HashMap::new(), sweep_at: REMEMBERED };
        Self { records: Mutex::new(records), shared }
    }

    /// The records known to be stuck.
    pub(super) fn stuck(&self) -> Vec<Bson> {
        let records = self.records.lock();
        records.of.iter().filter(|(_, it)| it.is_stuck).map(|(id, _)| Bson::from(id)).collect()
    }

    /// True if a write of this record must not share a command with others: writes on the record are under way, or
    /// the record is stuck, or is suspected to be.
    pub(super) fn is_used(&self, id: &LockId) -> bool {
        self.records.lock().of.contains_key(id)
    }

    /// Notes that one of these records is stuck, or the database is slow: the next write on each is sent alone, to
    /// find out.
    pub(super) fn suspect<'a>(&self, ids: impl Iterator<Item = &'a LockId>) {
        let mut records = self.records.lock();
        for id in ids {
            records.entry(id);
        }
    }

    /// Notes that the connection was lost during a write.
    pub(super) fn note_lost_server(&self, id: &LockId) {
        self.records.lock().entry(id).has_lost_server = true;
    }

    /// True if a write on this record, or on its document, may have made a server abort.
    pub(super) fn has_lost_server(&self, id: &LockId) -> bool {
        self.records.lock().of.get(id).is_some_and(|it| it.has_lost_server)
    }

    /// The steps on this record, as long as one of them is under way.
    pub(super) fn steps<'a>(&'a self, id: &'a LockId) -> Result<(Pending<'a>, Arc<Steps>)> {
        // Whoever leads them writes, too.
        let (pending, _) = self.join(id, WAITING_FOR_ONE_RECORD)?;
        let steps = Arc::clone(&self.records.lock().entry(id).steps);
        Ok((pending, steps))
    }

    fn join<'a>(&'a self, id: &'a LockId, most: usize) -> Result<(Pending<'a>, Arc<Semaphore>)> {
        let mut records = self.records.lock();
        let record = records.entry(id);
        if record.writes >= most {
            return Err(not_sent());
        }
        record.writes += 1;
        Ok((Pending { admission: self, id }, Arc::clone(&record.permits)))
    }
}

impl Records {
    fn entry(&mut self, id: &LockId) -> &mut Record {
        if self.of.len() >= self.sweep_at && !self.of.contains_key(id) {
            self.of.retain(|_, record| record.writes > 0);
            self.sweep_at = (self.of.len() * 2).max(REMEMBERED);
        }
        self.of.entry(id.clone()).or_insert_with(|| Record {
            permits: Arc::new(Semaphore::new(FOR_ONE_RECORD)),
            steps: Group::new(1, AT_ONCE, Duration::ZERO),
            writes: 0,
            is_stuck: false,
            has_lost_server: false,
        })
    }
}

impl LockCollection<'_> {
    /// Waits until this record may be written, at most until the deadline.
    pub(super) async fn admit<'a>(&'a self, id: &'a LockId) -> Result<Admitted<'a>> {
        self.admit_by(&self.admission.shared.others, id, self.until.send_by()).await
    }

    /// As `admit`, for a write that takes a lock.
    pub(super) async fn admit_claim<'a>(&'a self, id: &'a LockId) -> Result<Admitted<'a>> {
        let Shared { claims, others, .. } = &self.admission.shared;
        self.admit_by(claims, id, self.until.claim_by(others.wait())?).await
    }

    async fn admit_by<'a>(
        &'a self,
        gate: &Arc<Gate>,
        id: &'a LockId,
        send_by: Instant,
    ) -> Result<Admitted<'a>> {
        let latest = Instant::now() + self.until.read_limit();
        if self.admission.has_lost_server(id) {
            self.look_before_writing(id).await?;
        }
        let (pending, permits) = self.admission.join(id, 2 * WAITING_FOR_ONE_RECORD)?;
        let own = permit(permits, latest).await?;
        let is_stuck = self.admission.records.lock().of.get(id).is_some_and(|it| it.is_stuck);
        let way = match is_stuck {
            true => Way::Stuck(permit(Arc::clone(&self.admission.shared.stuck), latest).await?),
            false => Way::Gate(gate.enter(send_by).await?),
        };
        Ok(Admitted { pending, limit: self.until.write_limit(), permits: (own, way) })
    }

    /// The last write on this record may have made a server abort, as writes of some records of other programs do. Such a
    /// write must not be sent to the next primary as well.
    ///
    /// # Errors
    /// If no program of this crate has written the record.
    async fn look_before_writing(&self, id: &LockId) -> Result<()> {
        let records = self.primary.clone_with_type::<RawDocumentBuf>();
        let found = records.find_one(by_id(id));
        let found = answered(found.exactly([id]).max_time(LIMIT)).await?;
        if found.is_none_or(|record| codec::is_exact(&record)) {
            return Ok(());
        }
        let what = format!(
            "a server was lost during a write on the record {id} of {}, in which a name stands twice or a text is not \
             UTF-8: it is not sent again; look at the server's log, and remove the record with `doclock break`",
            self.primary.name(),
        );
        Err(failure(StoreErrorKind::Other, what))
    }

    /// One write on the record `id`, if `filter` matches it.
    pub(super) async fn write_one(&self, id: &LockId, filter: Document, by: &Write) -> Result<u64> {
        let admitted = self.admit(id).await?;
        let limit = admitted.limit;
        admitted.carry_out(write(&self.primary, filter, by, limit)).await
    }
}

impl Prepared {
    /// The outcomes of the jobs of a group. If their command exceeded its time limit, perhaps a record is stuck: the
    /// repetitions are sent alone, so that the record is found.
    pub(super) fn each<'a, T>(
        &self,
        ids: impl Iterator<Item = &'a LockId> + Clone,
        outcomes: Result<Vec<Result<T>>>,
    ) -> Vec<Result<T>> {
        outcomes.unwrap_or_else(|e| {
            if exceeded_time_limit(&e) {
                self.admission.suspect(ids.clone());
            }
            ids.map(|_| Err(e.clone())).collect()
        })
    }
}

async fn permit(of: Arc<Semaphore>, latest: Instant) -> Result<OwnedSemaphorePermit> {
    match timeout_at(latest.into(), of.acquire_owned()).await {
        Ok(Ok(permit)) => Ok(permit),
        _ => Err(unavailable("the record is stuck: an open transaction blocks it")),
    }
}

/// A write on a record, waiting or in progress.
pub(super) struct Pending<'a> {
    admission: &'a Admission,
    id: &'a LockId,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let mut records = self.admission.records.lock();
        if let Some(record) = records.of.get_mut(self.id) {
            record.writes -= 1;
            if record.writes == 0 && !record.is_stuck && !record.has_lost_server {
                records.of.remove(self.id);
            }
        }
    }
}

/// A write that may be sent.
#[must_use = "it is for one write"]
pub(super) struct Admitted<'a> {
    pending: Pending<'a>,
    /// The time limit to send with the write.
    pub(super) limit: Duration,
    permits: (OwnedSemaphorePermit, Way),
}

/// How a write was admitted. A write on a stuck record passes no gate: it is late, and says nothing of how long the
/// other writes take.
#[expect(dead_code, reason = "held until the write has ended")]
enum Way {
    Gate(Slot<(), Infallible>),
    Stuck(OwnedSemaphorePermit),
}

impl Admitted<'_> {
    /// Awaits the write, and notes whether the record is stuck.
    pub(super) async fn carry_out<T>(self, write: impl Future<Output = Result<T>>) -> Result<T> {
        let Self { pending, limit, permits } = self;
        let mut write = pin!(write);
        let done = match timeout(limit + UNANSWERED, &mut write).await {
            Ok(done) => done,
            Err(_) => {
                // On a broken network there is no answer for a long time. The next write may get a
                // working connection.
                drop(permits);
                write.await
            }
        };
        if let Some(record) = pending.admission.records.lock().of.get_mut(pending.id) {
            record.is_stuck = done.as_ref().is_err_and(exceeded_time_limit);
            record.has_lost_server = match &done {
                Ok(_) => false,
                Err(e) => record.has_lost_server || has_lost_connection(e),
            };
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_records_are_forgotten_whenever_the_others_may_have_doubled() {
        let admission = Admission::new(Shared::new());
        let ids: Vec<_> = (0..10 * REMEMBERED as i64).map(LockId::from).collect();
        let (used, unused) = ids.split_at(3 * REMEMBERED);
        let users: Vec<_> =
            used.iter().map(|id| admission.join(id, WAITING_FOR_ONE_RECORD).unwrap()).collect();
        assert_eq!(
            admission.records.lock().sweep_at,
            4 * REMEMBERED,
            "scanned twice, not at each call"
        );
        admission.suspect(unused.iter());
        let records = admission.records.lock().of.len();
        assert!((used.len()..=2 * used.len()).contains(&records), "{records}");
        drop(users);
        assert!(used.iter().all(|id| !admission.is_used(id)));
    }
}
