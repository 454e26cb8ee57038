//! One verb on one record: reads it, lets the [rules](crate::store::lock_rules) decide, and writes the result while the
//! record is still as it was read.
//!
//! The rules run in this process, by the server's time of the read. A command that arrives late finds another record, and
//! changes nothing. If something was live when it was read, the server also refuses the result once that has expired.
//!
//! Modelled on the elections of Kubernetes (`client-go`, `leaderelection.go`), which decide and replace in the same way.

use std::{
    slice,
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::{
    bson::{Bson, DateTime, Document, doc},
    error::Error,
};
use parking_lot::Mutex;
use tokio::time::sleep;

use crate::{
    key::LockId,
    random,
    store::{
        lock_rules::{Moment, Record},
        mongo::{
            Call,
            admission::{Job, Purpose},
            codec::millis,
            error::{Odd, Result, is_duplicate_id, is_not_sent, unavailable, unwritten},
            group::Group,
            ids::by_id,
            lock_record::{Stored, at, decode, difference, encode, moment},
            send::{Insert, LIMIT, LONGEST_WAIT, Write, acknowledged, number_of, refusals, run},
        },
    },
};

/// How often the record may change between the read and the write.
const ATTEMPTS: usize = 16;
/// For how long the server's time that a reply has told may date a new lock.
const RECENT: Duration = Duration::from_secs(1);

/// The answer of a rule.
pub(super) struct Decided<T> {
    pub(super) answer: T,
    /// True if the answer must be durable even if the record stays as it is: all but refusals.
    pub(super) is_promise: bool,
}

impl<T> Decided<T> {
    pub(super) fn promise(answer: T) -> Self {
        Self { answer, is_promise: true }
    }
}

/// A rule of the store, with the arguments of one call.
pub(super) trait Rule<T>:
    Fn(&mut Record, Moment) -> Decided<T> + Send + Sync + 'static
{
}

impl<T, F: Fn(&mut Record, Moment) -> Decided<T> + Send + Sync + 'static> Rule<T> for F {}

/// The time of the primary.
#[derive(Debug)]
pub(super) struct Clock {
    /// The latest time that a reply has told, and a moment before that request was sent.
    latest: Mutex<Option<(Instant, DateTime)>>,
    /// The questions. One answers all callers who came before it was sent: if each asked by itself, thousands of questions
    /// would take the connections of the claims after each second without an answer, and no claim would be sent in its time.
    questions: Arc<Group<(), Moment>>,
}

impl Default for Clock {
    fn default() -> Self {
        Self { latest: Mutex::default(), questions: Group::new(1, usize::MAX, Duration::ZERO) }
    }
}

impl Clock {
    pub(super) fn told(&self, asked: Instant, now: DateTime) {
        let mut latest = self.latest.lock();
        if latest.is_none_or(|(before, _)| before < asked) {
            *latest = Some((asked, now));
        }
    }

    /// `None` if no reply has told the time lately.
    fn recent(&self) -> Option<Moment> {
        let latest = *self.latest.lock();
        latest.filter(|(asked, _)| asked.elapsed() < RECENT).map(|(asked, now)| moment(now, asked))
    }

    /// There may be another primary, with another clock.
    fn forget(&self) {
        *self.latest.lock() = None;
    }
}

impl Call<'_> {
    pub(super) async fn step<T: Send + 'static>(
        &self,
        id: &LockId,
        purpose: Purpose,
        rule: impl Rule<T>,
    ) -> Result<T> {
        let found = self.looked(id).await?;
        let (mut record, moment) = (self.decoded(&found), found.1);
        let before = record.clone();
        let Decided { answer, is_promise } = rule(&mut record, moment);
        if record == before && !is_promise {
            return Ok(answer);
        }
        let answer = Arc::new(Mutex::new(None));
        let kept = Arc::clone(&answer);
        let decide = move |record: &mut Record, moment| {
            let Decided { answer, is_promise } = rule(record, moment);
            *kept.lock() = Some(answer);
            is_promise
        };
        let job = Job { purpose, found, decide: Box::new(decide) };
        let (_pending, steps) = self.admission.steps(id)?;
        let until = if purpose == Purpose::Claim { self.until } else { self.until.or_soon() };
        let call = self.with(until);
        let for_all = self.with(self.until.or_soon());
        let step = async |jobs: Vec<Job>| {
            let call = if jobs.len() > 1 { &for_all } else { &call };
            call.step_together(id, &jobs).await
        };
        steps.submit(job, until.send_by(), step).await?;
        let answer = answer.lock().take();
        answer.ok_or_else(|| unavailable("the step has no answer"))
    }

    async fn looked(&self, id: &LockId) -> Result<(Option<Stored>, Moment)> {
        let found = self.look(id).await?;
        let moment = match &found {
            Some(stored) => stored.moment,
            None => self.time(self.rules.fenced || self.rules.fair).await?,
        };
        Ok((found, moment))
    }

    fn decoded(&self, (found, moment): &(Option<Stored>, Moment)) -> Record {
        let record = found.as_ref().map(|it| decode(&it.fields, &self.rules, *moment));
        record.unwrap_or_default()
    }

    /// The outcome of each job.
    async fn step_together(&self, id: &LockId, jobs: &[Job]) -> Vec<Result<()>> {
        let mut changes = vec![false; jobs.len()];
        let done = self.try_together(id, jobs, &mut changes).await;
        let outcome = |changes: &bool| match &done {
            // Its own part was no change, whatever the others have written.
            Err(e) if !changes => Err(unwritten(e)),
            done => done.clone(),
        };
        changes.iter().map(outcome).collect()
    }

    async fn try_together(&self, id: &LockId, jobs: &[Job], changes: &mut [bool]) -> Result<()> {
        let is_claim = jobs.iter().all(|job| job.purpose == Purpose::Claim);
        let purpose = if is_claim { Purpose::Claim } else { Purpose::Other };
        for attempt in 0..ATTEMPTS {
            if attempt > 0 && purpose == Purpose::Claim {
                self.until.in_time()?;
            }
            if attempt > 1 {
                // Other servers change it, too.
                let pause = u64::from(random::uuid().as_bytes()[0]) % (2 * attempt as u64);
                sleep(Duration::from_millis(pause)).await;
            }
            let found = match jobs {
                [job] if attempt == 0 => job.found.clone(),
                _ => self.looked(id).await?,
            };
            let (before, moment) = (self.decoded(&found), found.1);
            let (mut after, mut is_promise) = (before.clone(), false);
            for (job, changes) in jobs.iter().zip(&mut *changes) {
                let earlier = after.clone();
                is_promise |= (job.decide)(&mut after, moment);
                *changes = after != earlier;
            }
            if after == before && !is_promise
                || self.replace(id, purpose, found.0.as_ref(), &before, &after, moment).await?
            {
                return Ok(());
            }
        }
        Err(unavailable("the record changes all the time"))
    }

    // update or delete returns: 1 → replaced. 0, or error 11000 → the record has changed. No reply → not known; the
    // verb is repeated, and the rules recognise their own work.
    async fn replace(
        &self,
        id: &LockId,
        purpose: Purpose,
        stored: Option<&Stored>,
        before: &Record,
        after: &Record,
        moment: Moment,
    ) -> Result<bool> {
        let rules = &self.rules;
        let Some(stored) = stored else {
            if after == before {
                // Waits for a majority that knows it, too.
                return Ok(self.write(id, purpose, by_id(id), &Write::Nothing).await? == 0);
            }
            let record = encode(id, None, after, rules);
            return self.insert(Insert { id: id.clone(), record }).await;
        };
        let is_exact = stored.is_exact();
        let mut filter = stored.unchanged(id, is_exact);
        let live = || before.grants.iter().filter(|grant| grant.is_live(moment.now));
        if after.is_empty(rules) {
            return Ok(self.write(id, purpose, filter, &Write::Delete).await? > 0);
        }
        if !is_exact {
            if after == before {
                return Ok(self.write(id, purpose, filter, &Write::Nothing).await? > 0);
            }
            if live().next().is_some() {
                return Err(odd(id, self.primary.name()));
            }
            self.write(id, purpose, filter, &Write::Delete).await?;
            return Ok(false);
        }
        if let Some(first) = live().map(|grant| grant.expires()).min() {
            let same = filter.remove("$expr").unwrap_or(Bson::Null);
            let in_time = doc! { "$lt": ["$$NOW", at(first)] };
            filter.insert("$expr", doc! { "$and": [same, in_time] });
        }
        let record = encode(id, Some((&stored.fields, before)), after, rules);
        let continues = before.grants.is_empty() && after.grants.is_empty()
            || before.grants.iter().any(|it| after.grants.iter().any(|other| other.is_same(it)));
        let by = match continues {
            true => difference(&stored.fields, &record),
            false => record,
        };
        let by = if by.is_empty() { Write::Nothing } else { Write::One(by) };
        Ok(self.write(id, purpose, filter, &by).await? > 0)
    }

    async fn write(
        &self,
        id: &LockId,
        purpose: Purpose,
        filter: Document,
        by: &Write,
    ) -> Result<u64> {
        let admitted = match purpose {
            Purpose::Claim => self.admit_claim(id).await?,
            Purpose::Other => self.admit(id).await?,
        };
        let limit = admitted.limit;
        admitted.carry_out(super::send::write(&self.primary, filter, by, limit)).await
    }

    /// The server's time: as a recent reply has told it, or else by a question.
    ///
    /// Fencing tokens and tickets must rise over all servers, so whoever `draws` one must ask.
    pub(super) async fn time(&self, draws: bool) -> Result<Moment> {
        let clock = &self.store.inner.clock;
        if let Some(recent) = clock.recent().filter(|_| !draws) {
            return Ok(recent);
        }
        let ask = async |callers: Vec<()>| vec![self.ask_the_time().await; callers.len()];
        clock.questions.submit((), self.until.send_by(), ask).await
    }

    async fn ask_the_time(&self) -> Result<Moment> {
        let asked = Instant::now();
        let hello = doc! { "hello": 1, "maxTimeMS": millis(LONGEST_WAIT) };
        let hello = self.store.database().run_command(hello).await?;
        let now = hello.get_datetime("localTime").map_err(Error::custom)?;
        self.store.inner.clock.told(asked, *now);
        Ok(moment(*now, asked))
    }

    /// The server's time, if a recent reply has told it.
    pub(super) fn recent_time(&self) -> Option<Moment> {
        self.store.inner.clock.recent()
    }

    /// Makes this record. False if there is one already. The command is shared with other claims, unless another write of
    /// this record is under way.
    ///
    /// The date of the lock is not of this command, but of an earlier reply: it may be up to [`RECENT`] too old, and so
    /// the lease ends that much too early. That is safe, because the holder counts its lease from before the request
    /// whose reply told that time: the holder gives up no later than the server.
    pub(super) async fn insert(&self, job: Insert) -> Result<bool> {
        let inserted = if self.admission.is_used(&job.id) {
            self.insert_alone(&job).await
        } else {
            // Releases are sent first.
            let send_by = self.until.claim_by(self.groups.releases.wait())?;
            let inserted = self.groups.inserts.submit(job, send_by, async |jobs| match &jobs[..] {
                [job] => vec![self.insert_alone(job).await],
                jobs => {
                    let inserted = self.insert_together(jobs, LIMIT).await;
                    self.each(jobs.iter().map(|job| &job.id), inserted)
                }
            });
            inserted.await
        };
        // Another primary may have another clock.
        if inserted.as_ref().is_err_and(|e| !is_not_sent(e)) {
            self.store.inner.clock.forget();
        }
        inserted
    }

    async fn insert_alone(&self, job: &Insert) -> Result<bool> {
        let admitted = self.admit_claim(&job.id).await?;
        let limit = admitted.limit;
        let done = admitted.carry_out(self.insert_together(slice::from_ref(job), limit)).await?;
        done.into_iter().next().unwrap_or(Ok(false))
    }

    // insert returns for each record: nothing → made. Error 11000 → there is one. No reply → not known; each claim is
    // repeated, and recognises its grant.
    async fn insert_together(&self, jobs: &[Insert], limit: Duration) -> Result<Vec<Result<bool>>> {
        let records: Vec<_> = jobs.iter().map(|job| job.record.clone()).collect();
        let command =
            doc! { "insert": self.primary.name(), "documents": records, "ordered": false };
        let reply = run(&self.primary, command, limit).await?;
        acknowledged(&reply, number_of(&reply) > 0)?;
        let mut refused = refusals(&reply);
        let outcome = |n| match refused.remove(&n) {
            Some(e) if is_duplicate_id(&e) => Ok(false),
            Some(e) => Err(e),
            None => Ok(true),
        };
        Ok((0..jobs.len()).map(outcome).collect())
    }
}

fn odd(id: &LockId, records: &str) -> Error {
    let what = format!(
        "the record {id} of {records} cannot be changed: a name stands twice in it, or a text is not UTF-8; remove it \
         with `doclock break`, or wait until it has expired"
    );
    Error::custom(Odd(what))
}
