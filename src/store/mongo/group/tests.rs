use futures_util::future::join_all;
use tokio::{
    sync::Semaphore,
    task::{JoinHandle, yield_now},
};

use super::*;
use crate::store::mongo::error::is_not_sent;

const UNDER_WAY: usize = 2;

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
            group: Group::new(UNDER_WAY, AT_ONCE, Duration::ZERO),
            gate: Semaphore::new(0),
            sizes: Mutex::default(),
        })
    }

    async fn submit(&self, job: u32, send_by: Instant) -> Result<u32> {
        let carry_out = async |jobs: Vec<u32>| {
            self.sizes.lock().push(jobs.len());
            self.gate.acquire().await.unwrap().forget();
            jobs.iter().map(|job| Ok(2 * job)).collect()
        };
        self.group.submit(job, send_by, carry_out).await
    }

    fn start(self: &Arc<Self>, job: u32) -> JoinHandle<Result<u32>> {
        let doubling = Arc::clone(self);
        tokio::spawn(async move { doubling.submit(job, later()).await })
    }

    /// Commands without an answer, as many as may be under way.
    async fn all_under_way(self: &Arc<Self>) -> Vec<JoinHandle<Result<u32>>> {
        let running = (0..UNDER_WAY as u32).map(|job| self.start(job)).collect();
        while self.sizes().len() < UNDER_WAY {
            yield_now().await;
        }
        running
    }

    async fn waiting(&self, jobs: usize) {
        while self.group.state.lock().waiting.len() < jobs {
            yield_now().await;
        }
    }

    async fn is_idle(&self) {
        let is_idle = || {
            let state = self.group.state.lock();
            state.under_way + state.late == 0
        };
        while !is_idle() {
            yield_now().await;
        }
    }

    fn sizes(&self) -> Vec<usize> {
        self.sizes.lock().clone()
    }
}

#[tokio::test]
async fn each_job_of_a_group_gets_its_own_outcome() {
    let doubling = Doubling::new();
    doubling.gate.add_permits(1_000);
    let all = join_all((0..500).map(|job| doubling.submit(job, later()))).await;
    assert!(all.iter().zip(0..).all(|(it, job)| matches!(it, Ok(n) if *n == 2 * job)), "{all:?}");
    assert_eq!(doubling.sizes().iter().sum::<usize>(), 500);
    assert!(doubling.sizes().contains(&AT_ONCE), "{:?}", doubling.sizes());
    assert_eq!(doubling.group.state.lock().under_way, 0);
}

#[tokio::test]
async fn a_job_does_not_wait_while_few_commands_are_under_way() {
    let doubling = Doubling::new();
    doubling.all_under_way().await;
    assert_eq!(doubling.sizes(), [1; UNDER_WAY]);
    (0..3).for_each(|job| drop(doubling.start(job)));
    doubling.waiting(3).await;
    doubling.gate.add_permits(10);
    doubling.is_idle().await;
    let gathered = doubling.sizes().split_off(UNDER_WAY);
    assert!(gathered == [3] || gathered == [2, 1] || gathered == [1, 2], "{gathered:?}");
}

#[tokio::test]
async fn a_job_that_is_not_sent_in_its_time_is_never_sent() {
    let doubling = Doubling::new();
    let running = doubling.all_under_way().await;
    let soon = Instant::now() + Duration::from_millis(10);
    assert!(doubling.submit(8, soon).await.is_err_and(|e| is_not_sent(&e)));
    let next = doubling.start(9);
    doubling.waiting(1).await;
    doubling.gate.add_permits(10);
    assert_eq!(next.await.unwrap().unwrap(), 18);
    join_all(running).await;
    assert_eq!(doubling.sizes(), [1; UNDER_WAY + 1]);
}

#[tokio::test]
async fn a_job_that_was_sent_in_its_time_is_waited_for() {
    let doubling = Doubling::new();
    doubling.all_under_way().await;
    let soon = Instant::now() + Duration::from_millis(200);
    let waits = Arc::clone(&doubling);
    let waits = tokio::spawn(async move { waits.submit(8, soon).await });
    doubling.waiting(1).await;
    doubling.gate.add_permits(UNDER_WAY);
    while doubling.sizes().len() <= UNDER_WAY {
        yield_now().await;
    }
    tokio::time::sleep_until((soon + Duration::from_millis(10)).into()).await;
    doubling.gate.add_permits(10);
    assert_eq!(waits.await.unwrap().unwrap(), 16);
}

#[tokio::test]
async fn a_job_whose_turn_would_come_too_late_is_refused_at_once() {
    let doubling = Doubling::new();
    doubling.all_under_way().await;
    let usual = Duration::from_secs(60);
    doubling.group.state.lock().usual = usual;
    // Two commands a minute: two full ones are sent within the first minute.
    let send_by = Instant::now() + usual + usual / 4;
    let waits = |_| {
        let doubling = Arc::clone(&doubling);
        tokio::spawn(async move { doubling.submit(1, send_by).await })
    };
    let all: Vec<_> = (0..3 * AT_ONCE).map(waits).collect();
    let refused = || all.iter().filter(|it| it.is_finished()).count();
    while refused() + doubling.group.state.lock().waiting.len() < all.len() {
        yield_now().await;
    }
    let refused = refused();
    assert_eq!(refused, all.len() - 2 * AT_ONCE);
    doubling.gate.add_permits(10);
    let outcomes = join_all(all).await;
    let refusals =
        outcomes.into_iter().filter(|it| it.as_ref().unwrap().as_ref().is_err_and(is_not_sent));
    assert_eq!(refusals.count(), refused);
}

#[tokio::test]
async fn the_queue_has_a_bound_however_fast_the_commands_are() {
    let doubling = Doubling::new();
    doubling.all_under_way().await;
    let notice = |_| doubling.group.join(1, later()).map(|(_, notice)| notice);
    let notice: Vec<_> = (0..WAITING).map(notice).collect();
    assert!(notice.iter().all(Result::is_ok));
    assert!(doubling.group.join(1, later()).is_err());
}

#[tokio::test]
async fn jobs_of_a_paced_group_wait_for_its_pace_or_for_a_full_command() {
    let group = Group::new(UNDER_WAY, AT_ONCE, Duration::from_secs(3600));
    let doubling =
        Arc::new(Doubling { group, gate: Semaphore::new(1_000), sizes: Mutex::default() });
    assert_eq!(doubling.submit(1, later()).await.unwrap(), 2, "the first one waits for nothing");
    let all: Vec<_> = (0..100).map(|job| doubling.start(job)).collect();
    doubling.waiting(all.len() - UNDER_WAY).await;
    assert_eq!(doubling.sizes(), [1]);
    // The next caller finds a full command.
    all[0].abort();
    let done = || all.iter().filter(|it| it.is_finished()).count();
    while done() <= AT_ONCE {
        yield_now().await;
    }
    assert_eq!(doubling.sizes(), [1, AT_ONCE]);
}

/// Otherwise nothing would ever correct the expectation.
#[tokio::test]
async fn after_a_stall_an_idle_group_sends_at_once_and_soon_expects_its_usual_time_again() {
    let doubling = Doubling::new();
    doubling.group.state.lock().usual = PATIENCE;
    doubling.gate.add_permits(1_000);
    for job in 0..50 {
        assert_eq!(doubling.submit(job, Instant::now()).await.unwrap(), 2 * job);
    }
    assert!(doubling.group.usual() < PATIENCE / 2, "{:?}", doubling.group.usual());
}

#[tokio::test]
async fn a_caller_that_no_longer_waits_stops_nobody() {
    let doubling = Doubling::new();
    let running = doubling.all_under_way().await;
    let gone = doubling.start(8);
    doubling.waiting(1).await;
    gone.abort();
    assert!(gone.await.is_err());
    let last = doubling.start(9);
    doubling.waiting(2).await;
    doubling.gate.add_permits(10);
    assert_eq!(last.await.unwrap().unwrap(), 18);
    join_all(running).await;
    assert_eq!(doubling.group.state.lock().under_way, 0);
}

#[tokio::test(start_paused = true)]
async fn commands_without_an_answer_slow_a_group_down_after_a_bound_but_never_close_it() {
    let doubling = Doubling::new();
    let is_sent_in = async |time: Duration| {
        let commands = doubling.sizes().len();
        drop(doubling.start(1));
        let sent = async {
            while doubling.sizes().len() == commands {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(time, sent).await.is_ok()
    };
    for command in 0..UNDER_WAY + LATE {
        assert!(is_sent_in(2 * PATIENCE).await, "{command}");
    }
    assert!(!is_sent_in(2 * PATIENCE).await);
    for command in 0..2 * LATE {
        assert!(is_sent_in(2 * (PATIENCE + UNANSWERED)).await, "{command}");
    }
    doubling.gate.add_permits(100);
    doubling.is_idle().await;
}

#[tokio::test]
async fn a_command_that_panics_passes_its_turn_on() {
    let group = Group::<u32, u32>::new(UNDER_WAY, AT_ONCE, Duration::ZERO);
    for _ in 0..UNDER_WAY {
        let group = Arc::clone(&group);
        let panics = tokio::spawn(async move {
            group.submit(1, later(), async |_: Vec<u32>| panic!("on purpose")).await
        });
        assert!(panics.await.is_err());
    }
    let doubled = async |jobs: Vec<u32>| jobs.iter().map(|job| Ok(2 * job)).collect();
    assert_eq!(group.submit(4, later(), doubled).await.unwrap(), 8);
}

#[tokio::test]
async fn a_gate_lets_so_many_in_and_the_others_in_their_turn() {
    let gate = Gate::new(UNDER_WAY, 1, Duration::ZERO);
    let first = join_all((0..UNDER_WAY).map(|_| gate.enter(later()))).await;
    let next = Arc::clone(&gate);
    let next = tokio::spawn(async move { next.enter(later()).await.is_ok() });
    while gate.state.lock().waiting.is_empty() {
        yield_now().await;
    }
    assert!(!next.is_finished());
    drop(first);
    assert!(next.await.unwrap());
    assert_eq!(gate.state.lock().under_way, 0);
}
