//! Group commit: while commands of one kind are under way, the next ones are gathered, and the first of
//! them sends all as one command. So a lone caller never waits. A caller that has waited for long goes alone.
//!
//! Each caller keeps its own outcome, token and deadline. If the reply to a command is lost, each caller
//! is told so, and settles its own claim as after a command of its own.

use std::{
    collections::VecDeque,
    future::Future,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    sync::oneshot::{self, Receiver, Sender},
    time::{timeout, timeout_at},
};

/// How many commands of one kind are under way at once in a collection. With 64 tasks, two brought a
/// quarter more locks than one on one node, and half as many more on three: while one command waits for its
/// majority, the server works on the other.
const UNDER_WAY: usize = 2;
/// How many jobs one command carries.
const AT_ONCE: usize = 64;
/// After this time a command no longer keeps others from being sent: on a broken network there is no
/// answer for a long time, and the next command may get a working connection.
const PATIENCE: Duration = Duration::from_millis(500);

/// The jobs of one kind in one collection.
#[derive(Debug)]
pub(super) struct Group<J, R>(Mutex<State<J, R>>);

#[derive(Debug)]
struct State<J, R> {
    under_way: usize,
    /// At most one for each operation of the manager that waits for it.
    waiting: VecDeque<Member<J, R>>,
    /// The number of the next member.
    next: u64,
}

#[derive(Debug)]
struct Member<J, R> {
    number: u64,
    job: J,
    told: Sender<Told<J, R>>,
}

#[derive(Debug)]
enum Told<J, R> {
    Outcome(R),
    /// This caller sends the next command.
    Lead(J, Turn<J, R>),
}

/// The right to send one command. A drop passes it on to the next caller, even if the owner was cancelled.
#[derive(Debug)]
struct Turn<J, R>(Arc<Group<J, R>>);

impl<J, R> Default for Group<J, R> {
    fn default() -> Self {
        Self(Mutex::new(State { under_way: 0, waiting: VecDeque::new(), next: 0 }))
    }
}

impl<J, R> Drop for Turn<J, R> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        while let Some(Member { job, told, .. }) = state.waiting.pop_front() {
            if told.is_closed() {
                continue;
            }
            drop(state);
            // If the caller is gone by now, the turn that comes back goes to the next one.
            drop(told.send(Told::Lead(job, Turn(Arc::clone(&self.0)))));
            return;
        }
        state.under_way -= 1;
    }
}

impl<J, R> Group<J, R> {
    fn state(&self) -> MutexGuard<'_, State<J, R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out this job, alone or with others: `carry_out` gets the jobs, and returns their outcomes in
    /// the same order. A job that is still waiting for others at `until` is carried out alone. A job that is
    /// under way is waited for. `None` if the caller that carried it out has gone.
    pub(super) async fn submit<F>(
        self: &Arc<Self>,
        job: J,
        until: Instant,
        carry_out: impl FnOnce(Vec<J>) -> F,
    ) -> Option<R>
    where
        F: Future<Output = Vec<R>>,
    {
        let (number, mut told) = self.join(job);
        let told = match timeout_at(until.into(), &mut told).await {
            Ok(told) => told,
            Err(_) => match self.leave(number) {
                Some(job) => return carry_out(vec![job]).await.pop(),
                None => told.await,
            },
        };
        let (job, turn) = match told.ok()? {
            Told::Outcome(outcome) => return Some(outcome),
            Told::Lead(job, turn) => (job, turn),
        };
        let (mut jobs, mut others) = (vec![job], Vec::new());
        {
            let mut state = self.state();
            while others.len() + 1 < AT_ONCE {
                let Some(Member { job, told, .. }) = state.waiting.pop_front() else { break };
                if !told.is_closed() {
                    jobs.push(job);
                    others.push(told);
                }
            }
        }
        let mut carried_out = pin!(carry_out(jobs));
        let outcomes = match timeout(PATIENCE, &mut carried_out).await {
            Ok(outcomes) => outcomes,
            Err(_) => {
                drop(turn);
                carried_out.await
            }
        };
        let mut outcomes = outcomes.into_iter();
        let own = outcomes.next();
        for (told, outcome) in others.into_iter().zip(outcomes) {
            // A caller that no longer waits has been told that the outcome is unknown.
            let _ = told.send(Told::Outcome(outcome));
        }
        own
    }

    fn join(self: &Arc<Self>, job: J) -> (u64, Receiver<Told<J, R>>) {
        let (told, receiver) = oneshot::channel();
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        if state.under_way < UNDER_WAY {
            state.under_way += 1;
            drop(state);
            drop(told.send(Told::Lead(job, Turn(Arc::clone(self)))));
        } else {
            state.waiting.push_back(Member { number, job, told });
        }
        (number, receiver)
    }

    /// Takes the job back, if it still waits.
    fn leave(&self, number: u64) -> Option<J> {
        let mut state = self.state();
        let at = state.waiting.iter().position(|member| member.number == number)?;
        state.waiting.remove(at).map(|member| member.job)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;
    use tokio::{sync::Semaphore, task::yield_now};

    use super::*;

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    /// Doubles its jobs once `gate` lets it, and notes how many they were.
    struct Doubling {
        group: Arc<Group<u32, u32>>,
        gate: Semaphore,
        sizes: Mutex<Vec<usize>>,
    }

    impl Doubling {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                group: Arc::default(),
                gate: Semaphore::new(0),
                sizes: Mutex::default(),
            })
        }

        async fn submit(&self, job: u32, until: Instant) -> Option<u32> {
            let carry_out = async |jobs: Vec<u32>| {
                self.sizes.lock().unwrap().push(jobs.len());
                self.gate.acquire().await.unwrap().forget();
                jobs.iter().map(|job| 2 * job).collect()
            };
            self.group.submit(job, until, carry_out).await
        }

        fn start(self: &Arc<Self>, job: u32) {
            let doubling = Arc::clone(self);
            tokio::spawn(async move { doubling.submit(job, later()).await });
        }

        fn sizes(&self) -> Vec<usize> {
            self.sizes.lock().unwrap().clone()
        }
    }

    #[tokio::test]
    async fn each_job_of_a_group_gets_its_own_outcome() {
        let doubling = Doubling::new();
        doubling.gate.add_permits(1_000);
        let all = join_all((0..500).map(|job| doubling.submit(job, later()))).await;
        assert!(all.iter().zip(0..).all(|(outcome, job)| *outcome == Some(2 * job)), "{all:?}");
        assert_eq!(doubling.sizes().iter().sum::<usize>(), 500);
        assert!(doubling.sizes().contains(&AT_ONCE), "{:?}", doubling.sizes());
        assert_eq!(doubling.group.state().under_way, 0);
    }

    #[tokio::test]
    async fn a_job_does_not_wait_while_few_commands_are_under_way() {
        let doubling = Doubling::new();
        for job in 0..UNDER_WAY {
            doubling.start(job as u32);
            while doubling.sizes().len() <= job {
                yield_now().await;
            }
        }
        assert_eq!(doubling.sizes(), [1; UNDER_WAY]);
        (0..3).for_each(|job| doubling.start(job));
        while doubling.group.state().waiting.len() < 3 {
            yield_now().await;
        }
        doubling.gate.add_permits(10);
        while doubling.group.state().under_way > 0 {
            yield_now().await;
        }
        let gathered = doubling.sizes().split_off(UNDER_WAY);
        assert!(gathered == [3] || gathered == [2, 1] || gathered == [1, 2], "{gathered:?}");
    }

    #[tokio::test]
    async fn a_job_that_has_waited_for_long_is_carried_out_alone() {
        let doubling = Doubling::new();
        let long = |job| {
            let doubling = Arc::clone(&doubling);
            tokio::spawn(async move { doubling.submit(job, later()).await })
        };
        let running: Vec<_> = (0..UNDER_WAY as u32).map(long).collect();
        while doubling.sizes().len() < UNDER_WAY {
            yield_now().await;
        }
        let hurried = Arc::clone(&doubling);
        let hurried = tokio::spawn(async move { hurried.submit(8, Instant::now()).await });
        while doubling.sizes().len() <= UNDER_WAY {
            yield_now().await;
        }
        doubling.gate.add_permits(10);
        assert_eq!(hurried.await.unwrap(), Some(16));
        join_all(running).await;
        assert_eq!(doubling.sizes(), [1; UNDER_WAY + 1]);
    }

    #[tokio::test]
    async fn a_caller_that_no_longer_waits_stops_nobody() {
        let doubling = Doubling::new();
        let running: Vec<_> = (0..UNDER_WAY as u32)
            .map(|job| {
                let doubling = Arc::clone(&doubling);
                tokio::spawn(async move { doubling.submit(job, later()).await })
            })
            .collect();
        while doubling.group.state().under_way < UNDER_WAY {
            yield_now().await;
        }
        let gone = Arc::clone(&doubling);
        let gone = tokio::spawn(async move { gone.submit(8, later()).await });
        while doubling.group.state().waiting.is_empty() {
            yield_now().await;
        }
        gone.abort();
        assert!(gone.await.is_err());
        let last = Arc::clone(&doubling);
        let last = tokio::spawn(async move { last.submit(9, later()).await });
        while doubling.group.state().waiting.len() < 2 {
            yield_now().await;
        }
        doubling.gate.add_permits(10);
        assert_eq!(last.await.unwrap(), Some(18));
        join_all(running).await;
        assert_eq!(doubling.group.state().under_way, 0);
    }

    #[tokio::test]
    async fn a_command_without_an_answer_does_not_keep_others_from_being_sent() {
        let doubling = Doubling::new();
        for job in 0..=UNDER_WAY {
            doubling.start(job as u32);
            while doubling.sizes().len() <= job {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        assert_eq!(doubling.sizes(), [1; UNDER_WAY + 1]);
        doubling.gate.add_permits(10);
        while doubling.group.state().under_way > 0 {
            yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_command_that_panics_passes_its_turn_on() {
        let group = Arc::<Group<u32, u32>>::default();
        for _ in 0..UNDER_WAY {
            let group = Arc::clone(&group);
            let panics = tokio::spawn(async move {
                group.submit(1, later(), async |_: Vec<u32>| panic!("on purpose")).await
            });
            assert!(panics.await.is_err());
        }
        let doubled = async |jobs: Vec<u32>| jobs.iter().map(|job| 2 * job).collect();
        assert_eq!(group.submit(4, later(), doubled).await, Some(8));
    }
}
