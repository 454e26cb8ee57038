//! One verb on one record: reads it, lets the [rules](crate::store::lock_rules) decide, and writes the result while the
//! record is still as it was read.
//!
//! The rules run in this process, by the server's time of the read. A command that arrives late finds another record, and
//! changes nothing. If something was live when it was read, the server also refuses the result once that has expired.
//!
//! Modelled on the elections of Kubernetes (`client-go`, `leaderelection.go`), which decide and replace in the same way.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::{
    bson::{Bson, Document, doc},
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
            LockCollection,
            admission::{Admitted, Job, Purpose},
            error::{Odd, Result, unavailable, unwritten},
            ids::by_id,
            lock_record::{Stored, at, decode, difference, encode},
            new_record::{self, longest_age},
            send::{Timing, Write},
        },
    },
};

/// How often the record may change between the read and the write.
const ATTEMPTS: usize = 16;
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

impl LockCollection<'_> {
    pub(super) async fn step<T: Send + 'static>(
        &self,
        id: &LockId,
        purpose: Purpose,
        rule: impl Rule<T>,
    ) -> Result<T> {
        let found = self.read_with_moment(id).await?;
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
        let collection = self.with(until);
        let for_all = self.with(self.until.or_soon());
        let step = async |jobs: Vec<Job>| {
            let collection = if jobs.len() > 1 { &for_all } else { &collection };
            collection.step_together(id, &jobs).await
        };
        steps.submit(job, until.send_by(), step).await?;
        let answer = answer.lock().take();
        answer.ok_or_else(|| unavailable("the step has no answer"))
    }

    async fn read_with_moment(&self, id: &LockId) -> Result<(Option<Stored>, Moment)> {
        let asked = Instant::now();
        let found = self.read_record(id).await?;
        let moment = found.as_ref().map_or(new_record::unknown(asked), |it| it.moment);
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
            // Admitted first, so that the write follows the read at once.
            let admitted = match purpose {
                Purpose::Claim => self.admit_claim(id).await?,
                Purpose::Other => self.admit(id).await?,
            };
            let found = match jobs {
                [job] if attempt == 0 => job.found.clone(),
                _ => self.read_with_moment(id).await?,
            };
            let (before, moment) = (self.decoded(&found), found.1);
            let (mut after, mut is_promise) = (before.clone(), false);
            for (job, changes) in jobs.iter().zip(&mut *changes) {
                let earlier = after.clone();
                is_promise |= (job.decide)(&mut after, moment);
                *changes = after != earlier;
            }
            if after == before && !is_promise {
                return Ok(());
            }
            match &found.0 {
                Some(stored) => {
                    if self.replace(id, admitted, stored, &before, &after, moment).await? {
                        return Ok(());
                    }
                }
                // Waits for a majority that knows it, too.
                None if after == before => {
                    if self.write(admitted, by_id(id), &Write::Nothing).await? == 0 {
                        return Ok(());
                    }
                }
                None => {
                    let new = new_record::set(encode(id, None, &after, &self.rules));
                    if let Some(moment) = self.make_one(id, admitted, new).await? {
                        let mut made = Record::default();
                        // The answers, by the time of the command that made the record.
                        for job in jobs {
                            (job.decide)(&mut made, moment);
                        }
                        return Ok(());
                    }
                }
            }
        }
        Err(unavailable("the record changes all the time"))
    }

    // update or delete returns: 1 → replaced. 0, or error 11000 → the record has changed. No reply → not known; the
    // verb is repeated, and the rules recognise their own work.
    async fn replace(
        &self,
        id: &LockId,
        admitted: Admitted<'_>,
        stored: &Stored,
        before: &Record,
        after: &Record,
        moment: Moment,
    ) -> Result<bool> {
        let rules = &self.rules;
        let is_exact = stored.is_exact();
        let mut filter = stored.unchanged(id, is_exact);
        let live = || before.grants.iter().filter(|grant| grant.is_live(moment.now));
        if after.is_empty(rules) {
            return Ok(self.write(admitted, filter, &Write::Delete).await? > 0);
        }
        if !is_exact {
            if after == before {
                return Ok(self.write(admitted, filter, &Write::Nothing).await? > 0);
            }
            if live().next().is_some() {
                return Err(odd(id, self.primary.name()));
            }
            self.write(admitted, filter, &Write::Delete).await?;
            return Ok(false);
        }
        // The read dates the leases that begin, so the write itself must prove that the read is not old.
        let begins = after.grants.iter().filter(|grant| grant.ts >= moment.now);
        let ages = begins.map(|grant| moment.now + longest_age(grant.ttl));
        if let Some(latest) = live().map(|grant| grant.expires()).chain(ages).min() {
            let same = filter.remove("$expr").unwrap_or(Bson::Null);
            let in_time = doc! { "$lt": ["$$NOW", at(latest)] };
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
        Ok(self.write(admitted, filter, &by).await? > 0)
    }

    async fn write(&self, admitted: Admitted<'_>, filter: Document, by: &Write) -> Result<u64> {
        let limit = admitted.limit;
        admitted.carry_out(super::send::write(&self.primary, filter, by, limit)).await
    }
}

fn odd(id: &LockId, records: &str) -> Error {
    let what = format!(
        "the record {id} of {records} cannot be changed: a name stands twice in it, or a text is not UTF-8; remove it \
         with `doclock break`, or wait until it has expired"
    );
    Error::custom(Odd(what))
}
