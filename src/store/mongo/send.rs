//! Sends commands: each is sent once, with a time limit, and a majority acknowledges each write.
//!
//! Writes are run as raw commands, because the driver has no time limit for updates and deletes. The
//! driver also does not number raw commands for its own retries, which spares the server the
//! bookkeeping of a retryable write. No number is needed: every write of the store can tell its own
//! work from the work of an earlier attempt, and the manager repeats it.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::TryStreamExt;
use mongodb::{
    Collection, Cursor,
    bson::{Document, RawDocumentBuf, doc},
    error::Error,
};

use crate::{
    key::LockId,
    lock::{Aid, Lock},
    store::{
        Deadline,
        lock_rules::Moment,
        mongo::{
            codec::{self, documents, millis, number},
            error::{
                RefusedWrite, Result, Unacknowledged, is_not_sent, late_majority, not_sent,
                unavailable,
            },
            filters::Target,
            group::{AT_ONCE, Group},
            ids::exactly,
            lock_record::{New, Stored},
            time_limits::{LIMIT, LONGEST_WAIT, WRITE_CONCERN_TIMEOUT, answered},
        },
    },
};

/// What the deadline of a verb means for the commands of the verb.
pub(super) trait Timing: Copy {
    fn deadline(self) -> Deadline;

    /// The time limit of a write. Later attempts of a caller get more time: a majority that is always
    /// slower than the first limit must be waited for in the end.
    fn write_limit(self) -> Duration {
        self.time_left(LIMIT.max(self.deadline().waited()).min(LONGEST_WAIT))
    }

    /// The deadline of a write that a late read has held up. A verb that began in time is completed.
    fn or_soon(self) -> Deadline {
        let soon = Instant::now() + LIMIT;
        if self.deadline().moment().is_some_and(|moment| moment < soon) {
            Deadline::at(soon)
        } else {
            self.deadline()
        }
    }

    /// The time limit of a read, which no transaction blocks.
    fn read_limit(self) -> Duration {
        self.time_left(LONGEST_WAIT)
    }

    /// When a command is sent at the latest, so that its caller has time left for it.
    fn send_by(self) -> Instant {
        let left = self.read_limit();
        Instant::now() + left.saturating_sub(LIMIT).max(left / 2)
    }

    /// When a claim is sent at the latest. Half of the caller's time is for the command and a repetition. Releases
    /// come first: a claim waits no longer than the rest of the other half, after the wait of a release.
    fn claim_by(self, release_waits: Duration) -> Result<Instant> {
        let left = (self.read_limit() / 2).checked_sub(release_waits);
        left.map(|left| Instant::now() + left).ok_or_else(not_sent)
    }

    /// The moment of the deadline; for a caller without a deadline, the end of the longest wait from now on.
    fn latest(self) -> Instant {
        self.deadline().moment().unwrap_or_else(|| Instant::now() + LONGEST_WAIT)
    }

    /// The time until the deadline, at most `longest`. A caller without a deadline does not retry, so it gets more
    /// time. Never zero, which means "no limit" to the server.
    fn time_left(self, longest: Duration) -> Duration {
        let Some(moment) = self.deadline().moment() else { return LONGEST_WAIT };
        let left = moment.saturating_duration_since(Instant::now());
        left.clamp(Duration::from_millis(1), longest)
    }

    /// Returns an error if the deadline has passed.
    fn in_time(self) -> Result<()> {
        match self.deadline().moment() {
            Some(moment) if moment <= Instant::now() => Err(unavailable("the deadline has passed")),
            _ => Ok(()),
        }
    }
}

impl Timing for Deadline {
    fn deadline(self) -> Deadline {
        self
    }
}

/// Repeats a removal that no majority has acknowledged in time. The repetition waits for the majority
/// again. Unless a failover has undone the removal, the repetition finds nothing more to remove. Returns
/// the last outcome, and whether an earlier attempt has removed something.
///
/// A caller without a deadline repeats the removal once: the first command may have been one for several callers,
/// whose time is short.
pub(super) async fn until_majority<T, F>(
    until: Deadline,
    remove: impl Fn() -> F,
) -> Result<(T, bool)>
where
    F: Future<Output = Result<T>>,
{
    let (mut is_written, mut late) = (false, None);
    loop {
        let may_repeat = || until.moment().map_or(late.is_none(), |it| it > Instant::now());
        match remove().await {
            Err(e) if late_majority(&e).is_some() && may_repeat() => {
                is_written |= late_majority(&e) == Some(true);
                late = Some(e);
            }
            // The repetition was not sent, but an earlier attempt was.
            Err(e) if is_not_sent(&e) => return Err(late.unwrap_or(e)),
            done => return done.map(|done| (done, is_written)),
        }
    }
}

/// A write on all records that match a filter.
pub(super) enum Write {
    Update(Vec<Document>),
    /// Changes one record by operators, or replaces it by this document.
    One(Document),
    /// Changes nothing, but waits for a majority that knows the record, or knows that there is none.
    Nothing,
    /// Creates one record if none matches. Otherwise updates one.
    Upsert(Vec<Document>),
    Delete,
}

/// Carries out the write on the records that `filter` matches, and returns how many there were.
pub(super) async fn write(
    records: &Collection<Document>,
    filter: Document,
    by: &Write,
    limit: Duration,
) -> Result<u64> {
    let name = records.name();
    let command = match by {
        Write::Update(by) => {
            let update = doc! { "q": filter, "u": by.clone(), "multi": true };
            doc! { "update": name, "updates": [exactly(update, "q")] }
        }
        Write::One(by) => {
            let update = doc! { "q": filter, "u": by.clone() };
            doc! { "update": name, "updates": [exactly(update, "q")] }
        }
        Write::Nothing => {
            let update = doc! { "q": filter, "u": { "$unset": { "none": "" } } };
            doc! { "update": name, "updates": [exactly(update, "q")] }
        }
        Write::Upsert(by) => {
            let update = doc! { "q": filter, "u": by.clone(), "upsert": true };
            doc! { "update": name, "updates": [exactly(update, "q")] }
        }
        Write::Delete => {
            let delete = doc! { "q": filter, "limit": 0 };
            doc! { "delete": name, "deletes": [exactly(delete, "q")] }
        }
    };
    let reply = run(records, command, limit).await?;
    if let Some((_, refused)) = refusals(&reply).pop_first() {
        return Err(refused);
    }
    let matched = number_of(&reply);
    acknowledged(&reply, matched > 0 && !matches!(by, Write::Nothing))?;
    Ok(matched)
}

/// Runs a write command. The reply may contain errors of its statements.
pub(super) async fn run(
    records: &Collection<Document>,
    mut command: Document,
    limit: Duration,
) -> Result<Document> {
    command.insert("maxTimeMS", millis(limit));
    // A command does not inherit the write concern of the collection.
    let timeout = millis(WRITE_CONCERN_TIMEOUT);
    command.insert("writeConcern", doc! { "w": "majority", "wtimeout": timeout });
    let database = records.client().database(&records.namespace().db);
    match answered(database.run_command(command)).await {
        // The command was carried out.
        Err(e) => codec::reply_in(&e).map_or(Err(e.clone()), codec::readable_document),
        replied => replied,
    }
}

/// How many records a command has matched.
pub(super) fn number_of(reply: &Document) -> u64 {
    reply.get("n").and_then(number).unwrap_or_default() as u64
}

/// Why the server refused some statements of a command, by their numbers.
pub(super) fn refusals(reply: &Document) -> BTreeMap<usize, Error> {
    let refused = |error: &Document| {
        let code = error.get("code").and_then(number).unwrap_or_default() as i32;
        let message = error.get_str("errmsg").unwrap_or_default().to_owned();
        Some((index_of(error)?, Error::custom(RefusedWrite { code, message })))
    };
    documents(reply, "writeErrors").filter_map(refused).collect()
}

fn index_of(statement: &Document) -> Option<usize> {
    Some(statement.get("index").and_then(number)? as usize)
}

/// An error if the write was carried out but is not known to be durable. The driver does not check this
/// for a raw command.
pub(super) fn acknowledged(reply: &Document, has_written: bool) -> Result<()> {
    match reply.get("writeConcernError") {
        Some(error) => Err(Error::custom(Unacknowledged { has_written, error: error.clone() })),
        None => Ok(()),
    }
}

/// All rows that a query returns. One row that the driver cannot read does not cost the others.
pub(super) async fn rows(
    query: impl IntoFuture<Output = Result<Cursor<Document>>>,
) -> Result<Vec<Document>> {
    let raw: Vec<_> = raw_rows(query).await?;
    raw.iter().map(codec::readable_document).collect()
}

/// All rows that a query returns, as they are.
pub(super) async fn raw_rows<T>(
    query: impl IntoFuture<Output = Result<Cursor<T>>>,
) -> Result<Vec<RawDocumentBuf>> {
    let cursor = answered(query).await?;
    answered(cursor.with_type().try_collect::<Vec<_>>()).await
}

/// The record that a `findAndModify` of the driver returns.
pub(super) async fn modified(
    command: impl IntoFuture<Output = Result<Option<Document>>>,
) -> Result<Option<Document>> {
    let error = match answered(command).await {
        Err(error) => error,
        modified => return modified,
    };
    // The command was carried out.
    let Some(reply) = codec::reply_in(&error) else { return Err(error) };
    let value = codec::readable_document(reply)?.remove("value");
    Ok(value.and_then(|value| value.as_document().cloned()))
}

/// The one row that a query returns, if there is one.
pub(super) async fn row(
    query: impl IntoFuture<Output = Result<Option<RawDocumentBuf>>>,
) -> Result<Option<Document>> {
    answered(query).await?.as_ref().map(codec::readable_document).transpose()
}

/// How many commands of one kind are under way at once in a collection. With 64 tasks, two brought a
/// quarter more locks than one on one node, and half as many more on three: while one command waits for its
/// majority, the server works on the other.
const UNDER_WAY: usize = 2;
/// The pause between two reads of the locks of sessions, if fewer sessions wait than fill a command. So the
/// heartbeats of thousands of people share their reads: 400 a second, ten at a time. A lone heartbeat does not wait.
const SESSIONS_PACE: Duration = Duration::from_millis(25);

/// The locks of sessions.
#[derive(Debug)]
pub(super) struct Both {
    /// Majority-committed.
    pub(super) locks: Vec<Lock>,
    /// The locks that only the primary has.
    pub(super) uncommitted: Vec<Lock>,
}

/// The commands that several callers share. Each kind has commands of its own, so that claims never keep locks from
/// being given back.
#[derive(Debug)]
pub(super) struct Groups {
    /// Claims of free documents. The moment is that of a grant; `None` if there is a record already.
    pub(super) new_records: Arc<Group<New, Option<Moment>>>,
    /// Releases of exclusive locks.
    pub(super) releases: Arc<Group<Target, bool>>,
    /// Locks that nobody wants any more.
    pub(super) retractions: Arc<Group<Target, bool>>,
    /// Reads of locks that are known to be held.
    pub(super) reads: Arc<Group<LockId, Option<Stored>>>,
    /// Reads of the locks of sessions.
    pub(super) sessions: Arc<Group<Aid, Both>>,
}

impl Default for Groups {
    fn default() -> Self {
        Self {
            new_records: Group::new(UNDER_WAY, AT_ONCE, Duration::ZERO),
            releases: Group::new(UNDER_WAY, AT_ONCE, Duration::ZERO),
            retractions: Group::new(UNDER_WAY, AT_ONCE, Duration::ZERO),
            reads: Group::new(UNDER_WAY, AT_ONCE, Duration::ZERO),
            sessions: Group::new(UNDER_WAY, AT_ONCE, SESSIONS_PACE),
        }
    }
}
