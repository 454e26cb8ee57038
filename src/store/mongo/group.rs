//! Group commit: while commands of one kind are under way, the next ones are gathered, and the first of
//! them sends all as one command. So a lone caller never waits.
//!
//! Each caller keeps its own outcome, token and deadline. If the reply to a command is lost, each caller
//! is told so, and settles its own claim as after a command of its own.
//!
//! A job that cannot be sent in its time is refused: at once, or, if the commands take longer than expected, when
//! its time is over. A refused job was never sent, so its outcome is known, and the database spends nothing on it:
//! whatever the load, the commands under way are as many, and as full, as at the best throughput.

use std::{
    collections::VecDeque,
    convert::Infallible,
    future::Future,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::error::Error;
use parking_lot::Mutex;
use tokio::{
    sync::oneshot::{self, Receiver, Sender},
    time::{sleep_until, timeout, timeout_at},
};

use crate::store::mongo::{
    error::{Result, not_sent, unavailable},
    time_limits::UNANSWERED,
};

/// How many jobs one command carries, if it carries several.
pub(super) const AT_ONCE: usize = 64;
/// After this time a command no longer keeps others from being sent: on a broken network there is no
/// answer for a long time, and the next command may get a working connection.
const PATIENCE: Duration = Duration::from_millis(500);
/// After this number of late commands, more than the connections of a default pool, the next command waits longer:
/// for [`UNANSWERED`] more, so that commands that hang never close a group.
const LATE: usize = 16;
/// How many jobs wait at most, however fast the commands are.
const WAITING: usize = 16_384;
/// The usual time of a command is the mean of about so many commands. One slow command is soon forgotten.
const MEAN_OF: u32 = 8;

/// The jobs of one kind, in the order of their arrival.
#[derive(Debug)]
pub(super) struct Group<J, R> {
    /// How many commands are under way at once, besides the late ones.
    at_most: usize,
    /// How many jobs one command carries.
    at_once: usize,
    /// The time between two commands that are not full.
    pace: Duration,
    state: Mutex<State<J, R>>,
}

/// Commands that carry one job each.
pub(super) type Gate = Group<(), Infallible>;

#[derive(Debug)]
struct State<J, R> {
    under_way: usize,
    late: usize,
    /// The usual time of a command. A stall counts as [`PATIENCE`].
    usual: Duration,
    waiting: VecDeque<Member<J, R>>,
    /// When the next command is sent at the earliest.
    next_at: Instant,
    /// The number of the next member.
    next: u64,
}

#[derive(Debug)]
struct Member<J, R> {
    number: u64,
    job: J,
    notice: Sender<Notice<J, R>>,
}

#[derive(Debug)]
enum Notice<J, R> {
    Outcome(Result<R>),
    /// This caller sends the next command.
    Lead(J, Slot<J, R>),
}

/// One of the commands that may be under way. A drop passes it on to the next caller, even if the owner was cancelled.
#[derive(Debug)]
pub(super) struct Slot<J, R> {
    group: Arc<Group<J, R>>,
    began: Instant,
    is_late: bool,
}

impl<J, R> Slot<J, R> {
    /// The command is late: the next one is sent, unless `at_most` are late already.
    fn pass_on(&mut self, at_most: usize) {
        let mut state = self.group.state.lock();
        if !self.is_late && state.late < at_most {
            state.late += 1;
            drop(state);
            self.is_late = true;
            self.call_next();
        }
    }

    fn call_next(&self) {
        let mut state = self.group.state.lock();
        let took = self.began.elapsed().min(PATIENCE);
        state.usual = (state.usual * (MEAN_OF - 1) + took) / MEAN_OF;
        let Some(Member { job, notice, .. }) = state.pop() else {
            state.under_way -= 1;
            return;
        };
        drop(state);
        // If the caller is gone by now, the slot that comes back goes to the next one.
        drop(notice.send(Notice::Lead(job, self.group.slot())));
    }
}

impl<J, R> Drop for Slot<J, R> {
    fn drop(&mut self) {
        if self.is_late {
            self.group.state.lock().late -= 1;
        } else {
            self.call_next();
        }
    }
}

impl<J, R> State<J, R> {
    /// The first member that still waits.
    fn pop(&mut self) -> Option<Member<J, R>> {
        std::iter::from_fn(|| self.waiting.pop_front()).find(|it| !it.notice.is_closed())
    }
}

impl<J, R> Group<J, R> {
    /// If the jobs can wait for the time of `pace`, more of them gather.
    pub(super) fn new(at_most: usize, at_once: usize, pace: Duration) -> Arc<Self> {
        let (under_way, late, next) = (0, 0, 0);
        let (usual, waiting, next_at) = (Duration::ZERO, VecDeque::new(), Instant::now());
        let state = Mutex::new(State { under_way, late, usual, waiting, next_at, next });
        Arc::new(Self { at_most, at_once, pace, state })
    }

    fn slot(self: &Arc<Self>) -> Slot<J, R> {
        Slot { group: Arc::clone(self), began: Instant::now(), is_late: false }
    }

    /// The usual time of a command.
    pub(super) fn usual(&self) -> Duration {
        self.state.lock().usual
    }

    /// How long a job that arrives now is expected to wait until it is sent.
    pub(super) fn wait(&self) -> Duration {
        self.wait_behind(&self.state.lock())
    }

    fn wait_behind(&self, state: &State<J, R>) -> Duration {
        if state.under_way < self.at_most {
            return Duration::ZERO;
        }
        let commands = (state.waiting.len() / self.at_once + 1) as u32;
        state.usual * commands / self.at_most as u32
    }

    /// Carries out this job, alone or with others: `carry_out` gets the jobs, and returns their outcomes in
    /// the same order. A job that is not sent by `send_by` is not sent at all. A job that is under way is waited
    /// for.
    pub(super) async fn submit<F>(
        self: &Arc<Self>,
        job: J,
        send_by: Instant,
        carry_out: impl FnOnce(Vec<J>) -> F,
    ) -> Result<R>
    where
        F: Future<Output = Vec<Result<R>>>,
    {
        let (job, mut slot) = match self.lead_or_outcome(job, send_by).await? {
            Notice::Outcome(outcome) => return outcome,
            Notice::Lead(job, slot) => (job, slot),
        };
        self.gather().await;
        let (mut jobs, mut others) = (vec![job], Vec::new());
        {
            let mut state = self.state.lock();
            while others.len() + 1 < self.at_once {
                let Some(Member { job, notice, .. }) = state.pop() else { break };
                jobs.push(job);
                others.push(notice);
            }
        }
        let mut carried_out = pin!(carry_out(jobs));
        let outcomes = match timeout(PATIENCE, &mut carried_out).await {
            Ok(outcomes) => outcomes,
            Err(_) => {
                slot.pass_on(LATE);
                match timeout(UNANSWERED, &mut carried_out).await {
                    Ok(outcomes) => outcomes,
                    Err(_) => {
                        slot.pass_on(usize::MAX);
                        carried_out.await
                    }
                }
            }
        };
        drop(slot);
        let mut outcomes = outcomes.into_iter();
        let own = outcomes.next();
        for (notice, outcome) in others.into_iter().zip(outcomes) {
            // A caller that no longer waits has been told that the outcome is unknown.
            let _ = notice.send(Notice::Outcome(outcome));
        }
        own.unwrap_or_else(|| Err(unknown()))
    }

    /// Waits until the next command may be sent, unless a full one waits already.
    async fn gather(&self) {
        let at = {
            let (mut state, now) = (self.state.lock(), Instant::now());
            let is_full = state.waiting.len() + 1 >= self.at_once;
            let at = if is_full { now } else { state.next_at.max(now) };
            state.next_at = at + self.pace;
            at
        };
        if at > Instant::now() {
            sleep_until(at.into()).await;
        }
    }

    /// Waits for an outcome or a slot.
    async fn lead_or_outcome(self: &Arc<Self>, job: J, send_by: Instant) -> Result<Notice<J, R>> {
        let (number, mut notice) = self.join(job, send_by)?;
        match timeout_at(send_by.into(), &mut notice).await {
            Ok(notice) => notice,
            Err(_) if self.leave(number) => return Err(not_sent()),
            Err(_) => notice.await,
        }
        .map_err(|_| unknown())
    }

    /// Joins the queue, unless it is too long for this job.
    fn join(self: &Arc<Self>, job: J, send_by: Instant) -> Result<(u64, Receiver<Notice<J, R>>)> {
        let (notice, receiver) = oneshot::channel();
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        if state.under_way < self.at_most {
            state.under_way += 1;
            drop(state);
            drop(notice.send(Notice::Lead(job, self.slot())));
            return Ok((number, receiver));
        }
        let is_sent_at = Instant::now() + self.wait_behind(&state);
        if state.waiting.len() >= WAITING || is_sent_at > send_by {
            return Err(not_sent());
        }
        state.waiting.push_back(Member { number, job, notice });
        Ok((number, receiver))
    }

    /// Takes the job back. False if it no longer waits.
    fn leave(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        let at = state.waiting.binary_search_by_key(&number, |member| member.number);
        at.is_ok_and(|at| state.waiting.remove(at).is_some())
    }
}

/// The caller that sent the command has gone.
fn unknown() -> Error {
    unavailable("the outcome of a command for several callers is not known")
}

impl Gate {
    /// Waits for a slot, at most until `send_by`.
    pub(super) async fn enter(self: &Arc<Self>, send_by: Instant) -> Result<Slot<(), Infallible>> {
        match self.lead_or_outcome((), send_by).await? {
            Notice::Lead((), slot) => Ok(slot),
            Notice::Outcome(none) => match none? {},
        }
    }
}

#[cfg(test)]
mod tests;
