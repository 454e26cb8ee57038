//! Keeps one stuck record from holding up other documents.
//!
//! While another server's transaction on a record is open, a write on that record waits inside MongoDB
//! and occupies its connection: for a minute, if that other server has died. Ten such writes exhaust
//! the default pool. Therefore each write has a short time limit, few writes on one record are sent at
//! the same time, and the writes on all stuck records share a few connections. Of the writes on other
//! records, no more are sent than the pool can use, and those that take locks do not keep those that give
//! locks back from being sent.

use std::{
    collections::HashMap,
    convert::Infallible,
    future::Future,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use mongodb::{
    bson::Bson,
    error::{Error, Result},
};
use tokio::{
    sync::{AcquireError, OwnedSemaphorePermit, Semaphore},
    time::{timeout, timeout_at},
};

use crate::{
    key::LockId,
    store::{
        deadline,
        mongo::{
            error::{not_sent, ran_out_of_time},
            group::{self, Failed, Gate, SILENCE},
        },
    },
};

/// The server's time limit for the first attempt of a write, unless the deadline comes first. Together
/// with the next constant it bounds what a newly stuck record costs the pool.
const LIMIT: Duration = Duration::from_millis(500);
/// How many writes on one record are in progress at the same time: one that is sent while the previous
/// one waits for its majority, and a few more.
const FOR_ONE_RECORD: usize = 4;
/// How many writes on stuck records are in progress at the same time, in all collections together.
const FOR_STUCK_RECORDS: usize = 2;
/// How many writes on one record wait or are in progress at most.
const WAITING_FOR_ONE_RECORD: usize = 1_024;
/// How many writes on single records are in progress at the same time, in all collections together: so many that
/// take locks, and so many others.
const SINGLE: usize = 32;
/// How many records are tracked before the unused ones are forgotten for the first time.
const REMEMBERED: usize = 1_000;
/// The longest time for a read, or for a write to wait for its turn, if the caller sets no deadline.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// What the writes of all collections share.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    stuck: Arc<Semaphore>,
    claims: Arc<Gate>,
    others: Arc<Gate>,
}

impl Shared {
    pub(super) fn new() -> Self {
        let (claims, others) = (Gate::for_at_most(SINGLE), Gate::for_at_most(SINGLE));
        Self { stuck: Arc::new(Semaphore::new(FOR_STUCK_RECORDS)), claims, others }
    }
}

/// The time limit of a write. Later attempts of a caller get more time: a majority that is always
/// slower than the first limit must be waited for in the end.
pub(super) fn write_limit() -> Duration {
    time_left(LIMIT.max(deadline::waited()))
}

/// The time limit of a command for several callers, each with a deadline of its own.
pub(super) fn group_limit() -> Duration {
    LIMIT
}

/// When a command is sent at the latest, so that its caller has time left for it.
pub(super) fn send_by() -> Instant {
    let left = time_left(LONGEST_WAIT);
    Instant::now() + left.saturating_sub(LIMIT).max(left / 2)
}

/// The same for a claim. Half of the caller's time is for the command and a repetition. What gives locks back
/// comes first: a claim waits no longer than what is left of the other half after the wait of a release.
pub(super) fn claim_by(release_waits: Duration) -> Result<Instant> {
    let half = time_left(LONGEST_WAIT) / 2;
    half.checked_sub(release_waits).map(|left| Instant::now() + left).ok_or_else(not_sent)
}

/// When the caller stops waiting at the latest.
fn latest() -> Instant {
    Instant::now() + time_left(LONGEST_WAIT)
}

/// The time limit of a read, which no transaction blocks.
pub(super) fn read_limit() -> Duration {
    time_left(LONGEST_WAIT)
}

/// The time until the caller's deadline, at most `longest`. A caller without a deadline does not retry,
/// so it gets more time. Never zero, which means "no limit" to the server.
fn time_left(longest: Duration) -> Duration {
    let Some(deadline) = deadline::deadline() else { return LONGEST_WAIT };
    let left = deadline.saturating_duration_since(Instant::now());
    left.clamp(Duration::from_millis(1), longest)
}

/// An error once the caller's deadline has passed.
pub(super) fn in_time() -> Result<()> {
    match deadline::deadline() {
        Some(deadline) if deadline <= Instant::now() => {
            Err(Error::custom("the deadline has passed"))
        }
        _ => Ok(()),
    }
}

/// True if the caller has time to repeat a write. A caller without a deadline may do so once: its first command may
/// have been one for several callers, whose time is short.
pub(super) fn may_repeat(is_repeated: bool) -> bool {
    match deadline::deadline() {
        Some(deadline) => deadline > Instant::now(),
        None => !is_repeated,
    }
}

/// The records of one collection that are being written at the moment, or are stuck.
#[derive(Debug)]
pub(super) struct Lanes {
    records: Mutex<Records>,
    shared: Shared,
}

#[derive(Debug)]
struct Records {
    of: HashMap<LockId, Lane>,
    /// The size at which the unused ones are forgotten, so that this costs nothing on average.
    sweep_at: usize,
}

#[derive(Debug)]
struct Lane {
    turns: Arc<Semaphore>,
    /// How many writes wait for their turn or are in progress.
    users: usize,
    is_stuck: bool,
}

impl Lanes {
    pub(super) fn new(shared: Shared) -> Self {
        let records = Records { of: HashMap::new(), sweep_at: REMEMBERED };
        Self { records: Mutex::new(records), shared }
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The records known to be stuck.
    pub(super) fn stuck(&self) -> Vec<Bson> {
        let records = self.records();
        records.of.iter().filter(|(_, lane)| lane.is_stuck).map(|(id, _)| Bson::from(id)).collect()
    }

    /// True if a write of this record must not share a command with others: writes on it are under way, or it is
    /// stuck, or is suspected to be.
    pub(super) fn is_used(&self, id: &LockId) -> bool {
        self.records().of.contains_key(id)
    }

    /// One of these records is stuck, or the database is slow: the next write on each is sent alone, to find out.
    pub(super) fn suspect<'a>(&self, ids: impl Iterator<Item = &'a LockId>) {
        let mut records = self.records();
        for id in ids {
            records.lane(id);
        }
    }

    /// Waits for the turn of a write on this record, at most until the caller's deadline.
    pub(super) async fn turn<'a>(&'a self, id: &'a LockId) -> Result<Turn<'a>> {
        self.turn_at(&self.shared.others, id, send_by()).await
    }

    /// The same for a write that takes a lock.
    pub(super) async fn claim<'a>(&'a self, id: &'a LockId) -> Result<Turn<'a>> {
        let send_by = claim_by(self.shared.others.wait())?;
        self.turn_at(&self.shared.claims, id, send_by).await
    }

    async fn turn_at<'a>(
        &'a self,
        gate: &Arc<Gate>,
        id: &'a LockId,
        send_by: Instant,
    ) -> Result<Turn<'a>> {
        let until = latest();
        let (user, turns) = self.join(id)?;
        let turn = permit(turns, until).await?;
        let is_stuck = self.records().of.get(id).is_some_and(|lane| lane.is_stuck);
        let way = match is_stuck {
            true => Way::Stuck(permit(Arc::clone(&self.shared.stuck), until).await?),
            false => Way::Gate(gate.turn(send_by).await.map_err(|_: Failed| not_sent())?),
        };
        Ok(Turn { user, limit: write_limit(), permits: (turn, way) })
    }

    fn join<'a>(&'a self, id: &'a LockId) -> Result<(User<'a>, Arc<Semaphore>)> {
        let mut records = self.records();
        let lane = records.lane(id);
        if lane.users >= WAITING_FOR_ONE_RECORD {
            return Err(not_sent());
        }
        lane.users += 1;
        Ok((User { lanes: self, id }, Arc::clone(&lane.turns)))
    }
}

impl Records {
    fn lane(&mut self, id: &LockId) -> &mut Lane {
        if self.of.len() >= self.sweep_at && !self.of.contains_key(id) {
            self.of.retain(|_, lane| lane.users > 0);
            self.sweep_at = (self.of.len() * 2).max(REMEMBERED);
        }
        self.of.entry(id.clone()).or_insert_with(|| Lane {
            turns: Arc::new(Semaphore::new(FOR_ONE_RECORD)),
            users: 0,
            is_stuck: false,
        })
    }
}

async fn permit(of: Arc<Semaphore>, until: Instant) -> Result<OwnedSemaphorePermit> {
    match timeout_at(until.into(), of.acquire_owned()).await {
        Ok(permit) => permit.map_err(|closed: AcquireError| Error::custom(closed.to_string())),
        Err(_) => Err(Error::custom("the record is stuck: an open transaction blocks it")),
    }
}

/// A write on a record, waiting or in progress.
struct User<'a> {
    lanes: &'a Lanes,
    id: &'a LockId,
}

impl Drop for User<'_> {
    fn drop(&mut self) {
        let mut records = self.lanes.records();
        if let Some(lane) = records.of.get_mut(self.id) {
            lane.users -= 1;
            if lane.users == 0 && !lane.is_stuck {
                records.of.remove(self.id);
            }
        }
    }
}

/// The turn of one write.
#[must_use = "a turn is for one write"]
pub(super) struct Turn<'a> {
    user: User<'a>,
    /// The time limit to send with the write.
    pub(super) limit: Duration,
    permits: (OwnedSemaphorePermit, Way),
}

/// A write on a stuck record is late, and says nothing of how long the others take.
#[expect(dead_code, reason = "held until the write has ended")]
enum Way {
    Gate(group::Turn<(), Infallible>),
    Stuck(OwnedSemaphorePermit),
}

impl Turn<'_> {
    /// Awaits the write, and notes whether the record is stuck.
    pub(super) async fn of<T>(self, write: impl Future<Output = Result<T>>) -> Result<T> {
        let Self { user, limit, permits } = self;
        let mut write = pin!(write);
        let done = match timeout(limit + SILENCE, &mut write).await {
            Ok(done) => done,
            Err(_) => {
                // On a broken network there is no answer for a long time. The next write may get a
                // working connection.
                drop(permits);
                write.await
            }
        };
        if let Some(lane) = user.lanes.records().of.get_mut(user.id) {
            lane.is_stuck = done.as_ref().is_err_and(ran_out_of_time);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_records_are_forgotten_whenever_the_others_may_have_doubled() {
        let lanes = Lanes::new(Shared::new());
        let ids: Vec<_> = (0..10 * REMEMBERED as i64).map(LockId::from).collect();
        let (used, unused) = ids.split_at(3 * REMEMBERED);
        let users: Vec<_> = used.iter().map(|id| lanes.join(id).unwrap()).collect();
        assert_eq!(lanes.records().sweep_at, 4 * REMEMBERED, "scanned twice, not at each call");
        lanes.suspect(unused.iter());
        let records = lanes.records().of.len();
        assert!((used.len()..=2 * used.len()).contains(&records), "{records}");
        drop(users);
        assert!(used.iter().all(|id| !lanes.is_used(id)));
    }
}
