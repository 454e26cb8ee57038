//! Drives the [machine](super::machine): asks the store, sleeps, and hands locks over.

use std::{
    future::{Future, pending, poll_fn},
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{
    sync::{
        Semaphore,
        oneshot::{self, Receiver, Sender},
    },
    time::{sleep, sleep_until, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    clock,
    error::{LockError, Result, StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Lock, Mode},
    manager::{
        claim::{Acquired, Provisional, Wait, Wanted, lock_of},
        collections::Collections,
        freezes::Freezes,
        limits::Limits,
        pauses::jittered,
        verbs::{self, Verbs},
        wait::machine::{Circle, Leaving, Machine, Step},
    },
    store::Acquisition,
};

mod fair;

use fair::{Commands, Places};
pub(in crate::manager) use fair::{InTurn, Together};

/// How many waiters of a server ask the store at the same time: more than the commands that claims share can
/// carry. If a crowd asked at once, most claims would wait for a connection until their deadline, and be
/// repeated. Without answers, as many more ask after each [`PATIENCE`].
const ASK_AT_ONCE: usize = 256;
/// After this time an attempt no longer keeps other waiters from asking: its document may be stuck.
const PATIENCE: Duration = Duration::from_millis(500);
/// After this time a waiter asks again if the store did not answer, a quarter more or less.
const OUTAGE_PAUSE: Duration = Duration::from_millis(500);

/// The verbs of the manager that waiters need.
pub(in crate::manager) trait ForWaiters: Sync {
    /// Claims the lock. `in_turn` is the place of the waiter, in a fair collection only. `scope` tracks the claim, and the
    /// cleanup of an unwanted grant.
    fn claim(
        &self,
        wanted: &Wanted,
        in_turn: Option<InTurn>,
        scope: &TaskTracker,
        until: Instant,
    ) -> impl Future<Output = Result<Acquired>> + Send;

    /// The live lock on this document. Of several readers: the lock of `aid`, or else the one that expires last.
    fn live_lock(
        &self,
        key: &LockKey,
        aid: &Aid,
        until: Instant,
    ) -> impl Future<Output = Result<Option<Lock>>> + Send;

    /// Makes sure that the machine is told of all locks that end. Returns the pause until the next attempt if the store
    /// does not report them at once.
    fn watch(&self, collection: &'static str) -> Option<Duration>;
}

/// The queues of this process, and the parts that serve them.
pub(in crate::manager) struct Queues {
    pub(in crate::manager) machine: Mutex<Machine<Gift>>,
    /// Permits for the waiters that ask the store.
    asking: Arc<Semaphore>,
    /// Ends all waits.
    pub(in crate::manager) stop: CancellationToken,
    pub(super) places: Places,
    pub(super) verbs: Arc<Verbs>,
    collections: Arc<Collections>,
    freezes: Arc<Freezes>,
}

/// How to hand the lock over to a waiter. If this is dropped without a gift, the waiter asks the store.
#[derive(Debug)]
pub(in crate::manager) struct Gift {
    pub(in crate::manager) scope: TaskTracker,
    pub(in crate::manager) sender: Sender<Provisional>,
}

/// The waiter to hand a lock over to.
#[derive(Debug)]
pub(in crate::manager) struct Heir {
    pub(in crate::manager) wanted: Wanted,
    pub(in crate::manager) gift: Gift,
    /// In a fair collection.
    pub(in crate::manager) in_turn: Option<InTurn>,
}

impl Queues {
    pub(in crate::manager) fn new(
        limits: Limits,
        verbs: Arc<Verbs>,
        collections: Arc<Collections>,
        freezes: Arc<Freezes>,
        stop: CancellationToken,
    ) -> Self {
        Self {
            machine: Mutex::new(Machine::new(limits)),
            asking: Arc::new(Semaphore::new(ASK_AT_ONCE)),
            stop,
            places: Places::new(),
            verbs,
            collections,
            freezes,
        }
    }

    /// Calls the first waiter of every document of the collection.
    pub(in crate::manager) fn call_all(&self, collection: &str) {
        let mut last = None;
        loop {
            last = self.machine.lock().call_some(collection, last);
            if last.is_none() {
                return;
            }
        }
    }

    /// The waiter to hand this lock over to, instead of releasing it.
    pub(in crate::manager) fn heir(&self, released: &Acquisition, is_fair: bool) -> Option<Heir> {
        let key = &released.key;
        let order = if is_fair { self.places.together_at_once(key).ok()? } else { None };
        let (wanted, gift, turn) = self.machine.lock().heir(released, clock::now())?;
        let in_turn = turn.zip(order).map(|(turn, order)| self.places.in_turn(turn, order));
        Some(Heir { wanted, gift, in_turn })
    }

    /// The deadline of an operation that begins now, for a caller that gives up at `give_up`.
    pub(super) fn until(&self, give_up: Option<Instant>) -> Instant {
        let until = self.verbs.until();
        let latest = give_up.and_then(|at| at.checked_add(self.verbs.deadline));
        latest.map_or(until, |latest| latest.min(until))
    }

    /// Takes the lock, and waits for it if necessary. `owner` is the waiter that a search for circles sees: the
    /// session itself, or the job that the guard belongs to.
    ///
    /// # Cancel safety
    /// If the future is dropped, it leaves the queue and gives a fresh grant back.
    pub(in crate::manager) async fn acquire<M: ForWaiters>(
        self: &Arc<Self>,
        manager: &M,
        wanted: &Wanted,
        owner: &Aid,
        wait: Wait,
        scope: &TaskTracker,
    ) -> Result<Acquired> {
        // During a shutdown, the first caller for a document still makes one attempt.
        let is_stopping = self.stop.is_cancelled();
        let freeze_begins = self.freezes.begins(wanted.key.collection());
        tokio::select! {
            biased;
            acquired = self.acquire_in_turn(manager, wanted, owner, wait, scope) => acquired,
            () = self.stop.cancelled(), if !is_stopping => Err(LockError::ShutDown),
            // The last attempt is refused, unless the session got the lock at this moment.
            () = freeze_begins => {
                Box::pin(manager.claim(wanted, None, scope, self.until(None))).await
            }
        }
    }

    async fn acquire_in_turn<M: ForWaiters>(
        self: &Arc<Self>,
        manager: &M,
        wanted: &Wanted,
        owner: &Aid,
        wait: Wait,
        scope: &TaskTracker,
    ) -> Result<Acquired> {
        let key = &wanted.key;
        let (collection, registered) = self.collections.ready(key, self.until(None)).await?;
        let is_fair = registered.rules.fair;
        // A time that is too long for the clock counts as no limit. During a shutdown, nobody waits for long.
        let give_up = wait.0.and_then(|time| clock::now().checked_add(time));
        let stops = self.stop.is_cancelled().then(|| self.until(None));
        let give_up = give_up.into_iter().chain(stops).min();
        // A session that already holds the lock must not queue behind those that wait for its release.
        // The session of a guard is new and holds nothing.
        let may_hold = wanted.aid == *owner;
        if may_hold
            && self.machine.lock().has_waiters(key)
            && holds(manager, key, owner, self.until(give_up)).await?
        {
            return Box::pin(manager.claim(wanted, None, scope, self.until(give_up))).await;
        }
        let commands = is_fair.then(|| self.places.of(key));
        let (sender, gift) = oneshot::channel();
        let heir = Gift { scope: scope.clone(), sender };
        let number = self.machine.lock().join(wanted, owner, heir, is_fair, clock::now())?;
        let gift = Some(gift);
        let driver = Driver {
            queues: self,
            manager,
            wanted,
            scope,
            collection,
            may_hold,
            give_up,
            number,
            commands,
            gift,
            end: Leaving::Gone,
        };
        driver.run().await
    }
}

/// Drives one waiter. If it is dropped, the waiter leaves.
pub(super) struct Driver<'a, M> {
    pub(super) queues: &'a Arc<Queues>,
    manager: &'a M,
    pub(super) wanted: &'a Wanted,
    scope: &'a TaskTracker,
    collection: &'static str,
    /// True for a session, which may hold the lock already.
    may_hold: bool,
    pub(super) give_up: Option<Instant>,
    pub(super) number: u64,
    /// In a fair collection.
    commands: Option<Arc<Commands>>,
    gift: Option<Receiver<Provisional>>,
    end: Leaving,
}

impl<M> Drop for Driver<'_, M> {
    fn drop(&mut self) {
        let end = std::mem::replace(&mut self.end, Leaving::Gone);
        let key = &self.wanted.key;
        let is_stale = self.queues.machine.lock().leaves(self.number, end, clock::now());
        if is_stale {
            self.queues.refresh_place(key);
        }
    }
}

impl<M: ForWaiters> Driver<'_, M> {
    async fn run(mut self) -> Result<Acquired> {
        loop {
            let step = self.queues.machine.lock().next(self.number, clock::now());
            let acquired = match step {
                Step::Ask => self.ask_soon(false).await?,
                Step::Draw => self.ask_soon(true).await?,
                Step::Sleep { is_first, wake_at } => self.sleep(is_first, wake_at).await?,
                Step::Renew => {
                    self.queues.refresh_place(&self.wanted.key);
                    None
                }
                Step::Refuse(circle) => {
                    if let Err(e) = self.refuse_unless_gone(&circle).await {
                        self.sit_out(e).await?;
                    }
                    None
                }
            };
            let acquired = match acquired {
                Some(acquired) => acquired,
                None if self.give_up.is_some_and(|at| at <= clock::now()) => {
                    self.end = Leaving::TimeOver;
                    self.last_answer().await?
                }
                None => continue,
            };
            if let Acquired::Granted(_) | Acquired::AlreadyMine(_) = acquired
                && let Some(lock) = lock_of(&acquired)
            {
                // The waiters behind this one wait for its lock from now on.
                self.end = Leaving::Granted(lock.clone());
            }
            return Ok(acquired);
        }
    }

    /// Returns the lock if it is handed over.
    async fn sleep(
        &mut self,
        is_first: bool,
        wake_at: Option<Instant>,
    ) -> Result<Option<Acquired>> {
        if self.queues.stop.is_cancelled() {
            return Err(LockError::ShutDown);
        }
        let poll = is_first.then(|| self.manager.watch(self.collection)).flatten();
        let poll_at = poll.map(|pause| clock::now() + pause);
        let (queues, number) = (self.queues, self.number);
        let woken = poll_fn(|context| {
            let is_woken = queues.machine.lock().is_woken(number, context.waker());
            if is_woken { Poll::Ready(()) } else { Poll::Pending }
        });
        let gift = async {
            match &mut self.gift {
                Some(gift) => gift.await,
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            gift = gift => {
                self.gift = None;
                if let Ok(fresh) = gift {
                    // A freeze may have begun while this process stood still.
                    match queues.freezes.keep_unless_frozen(fresh, queues.until(self.give_up)).await {
                        Ok(fresh) => return Ok(Some(Acquired::Granted(fresh))),
                        Err(e) => {
                            // The handover has removed this waiter from the place.
                            queues.refresh_place(&self.wanted.key);
                            self.sit_out(e).await?;
                        }
                    }
                }
                queues.machine.lock().failed(number);
                return Ok(None);
            }
            () = woken => {}
            () = at([wake_at, poll_at, self.give_up].into_iter().flatten().min()) => {
                if poll_at.is_some_and(|at| at <= clock::now()) {
                    queues.machine.lock().call(number);
                }
            }
        }
        Ok(None)
    }

    /// Asks the store. Few waiters ask at the same time.
    async fn ask_soon(&self, draws: bool) -> Result<Option<Acquired>> {
        let permit = Arc::clone(&self.queues.asking).acquire_owned();
        let Some(permit) = self.in_time(permit).await else { return Ok(None) };
        // On the heap, so that a crowd of waiters is small while it does not ask.
        let ask = Box::pin(async {
            match &self.commands {
                None => self.ask(None).await,
                Some(commands) if draws => self.draw(commands).await,
                Some(commands) => self.ask_in_turn(commands).await,
            }
        });
        let key = &self.wanted.key;
        match verbs::with_permit(permit.ok(), PATIENCE, ask).await {
            Ok(None) if self.may_hold && self.wanted.mode == Mode::Exclusive => {
                // A reader that wants to write while other readers hold the lock does not wait: two such
                // readers would wait for each other forever.
                let holder = self.queues.machine.lock().holder(key);
                let holder = holder.filter(|lock| lock.mode == Mode::Shared);
                let Some(holder) = holder else { return Ok(None) };
                let until = self.queues.until(self.give_up);
                match holds(self.manager, key, &self.wanted.aid, until).await {
                    Ok(is_upgrade) => Ok(is_upgrade.then(|| Acquired::Held(holder))),
                    Err(e) => self.sit_out(e).await.map(|()| None),
                }
            }
            Err(e) => {
                self.sit_out(e).await?;
                self.queues.machine.lock().failed(self.number);
                Ok(None)
            }
            answer => answer,
        }
    }

    /// One attempt. `None` if the lock has another holder, or if another waiter comes first.
    pub(super) async fn ask(&self, in_turn: Option<InTurn>) -> Result<Option<Acquired>> {
        let (key, has_turn) = (&self.wanted.key, in_turn.is_some());
        match self
            .manager
            .claim(self.wanted, in_turn, self.scope, self.queues.until(self.give_up))
            .await
        {
            Ok(Acquired::Held(lock)) => {
                self.queues.machine.lock().refused(self.number, &lock)?;
                Ok(None)
            }
            Ok(granted) => Ok(Some(granted)),
            Err(e) => {
                // The claim is being given back, but it may have removed this waiter from the place.
                if has_turn {
                    self.queues.refresh_place(key);
                }
                Err(e)
            }
        }
    }

    /// Pauses if this is an outage that the wait may outlast. Otherwise the outage is the answer.
    async fn sit_out(&self, error: LockError) -> Result<()> {
        let (key, pause) = (&self.wanted.key, jittered(OUTAGE_PAUSE));
        let is_over = self.give_up.is_some_and(|at| at <= clock::now() + pause);
        let is_refused = || self.queues.machine.lock().count(self.number).is_err();
        if !is_outage(&error) || is_over || is_refused() {
            return Err(error);
        }
        log::warn!(
            target: "actix_doclock::manager",
            "still waiting for {key:?} although the store does not answer: {error}",
        );
        if self.queues.stop.is_cancelled() {
            return Err(LockError::ShutDown);
        }
        sleep(pause).await;
        Ok(())
    }

    /// Refuses this waiter, unless a holder in its circle is gone: that holder may have been seen a while ago.
    async fn refuse_unless_gone(&self, circle: &Circle) -> Result<()> {
        for (key, aid) in circle {
            if !holds(self.manager, key, aid, self.queues.until(self.give_up)).await? {
                self.queues.machine.lock().freed(key);
                self.queues.machine.lock().goes_on(self.number);
                return Ok(());
            }
        }
        let key = &self.wanted.key;
        let holder =
            self.manager.live_lock(key, &self.wanted.aid, self.queues.until(self.give_up)).await?;
        Err(LockError::WouldDeadlock { key: key.clone(), holder: holder.map(Box::new) })
    }

    /// The time is over: answers with the known holder. If no holder is known, makes a last attempt.
    async fn last_answer(&self) -> Result<Acquired> {
        if let Some(lock) = self.queues.machine.lock().holder(&self.wanted.key) {
            return Ok(Acquired::Held(lock));
        }
        self.queues.machine.lock().asks(self.number);
        let until = self.queues.until(self.give_up);
        let permit = Arc::clone(&self.queues.asking).acquire_owned();
        // The rest of the time is for the attempt.
        let soon = until.min(clock::now() + self.queues.verbs.deadline / 2);
        let permit = timeout_at(soon.into(), permit).await.map_err(|_| {
            let why = "acquire: too many waiters ask, and this one had no turn; try again later";
            StoreError::new(StoreErrorKind::Overloaded, why)
        })?;
        // On the heap, for the same reason as above.
        let ask = Box::pin(self.manager.claim(self.wanted, None, self.scope, until));
        verbs::with_permit(permit.ok(), PATIENCE, ask).await
    }

    /// `None` if the caller gives up before that.
    pub(super) async fn in_time<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = future => Some(done),
            () = at(self.give_up) => None,
        }
    }
}

async fn holds<M: ForWaiters>(
    manager: &M,
    key: &LockKey,
    aid: &Aid,
    until: Instant,
) -> Result<bool> {
    Ok(manager.live_lock(key, aid, until).await?.is_some_and(|lock| lock.aid == *aid))
}

async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment.into()).await,
        None => pending().await,
    }
}

/// True if a wait may outlast this error.
pub(in crate::manager) fn is_outage(error: &LockError) -> bool {
    let lasts = |e: &StoreError| {
        matches!(e.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Overloaded)
    };
    matches!(error, LockError::Store(e) if lasts(e))
}
