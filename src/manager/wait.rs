//! Waiting for a lock that another session or job holds.

mod deadlock;
mod fair;
pub(super) mod queue;

use std::{
    future::{Future, pending},
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::time::{sleep, timeout_at};
use tokio_util::task::TaskTracker;

use crate::{
    clock,
    error::{LockError, StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Mode},
    manager::{
        LockManager,
        claim::{Acquired, Patience, Wait, Wanted},
        observe, task,
        wait::{
            fair::Leaving,
            queue::{Place, Step, TooMany, line::InLine},
        },
        watch::changes::{Wakeup, poll_pause},
    },
};

/// How often the place of this server is renewed in the store's queue, in a fair collection.
const KEEP_PLACE: Duration = Duration::from_secs(1);
/// How many waiters of a server ask the store at the same time: more than the commands that claims share can
/// carry. If a crowd asked at once, most claims would wait for a connection until their deadline, and be
/// repeated. Without answers, as many more ask after each [`PATIENCE`].
pub(super) const ASK_AT_ONCE: usize = 256;
/// After this time an attempt no longer keeps other waiters from asking: its document may be stuck.
const PATIENCE: Duration = Duration::from_millis(500);

/// A caller that waits.
#[derive(Clone, Copy)]
struct Caller<'a> {
    wanted: &'a Wanted,
    /// Tracks the cleanup of an unwanted grant.
    scope: &'a TaskTracker,
    collection: &'static str,
    fair: bool,
    /// It is a session, which may hold the lock already.
    may_hold: bool,
    give_up: Option<Instant>,
}

impl Caller<'_> {
    fn is_over(&self) -> bool {
        self.give_up.is_some_and(|at| at <= clock::now())
    }

    /// Waits for a turn. `None` if the caller gives up before that.
    async fn in_time<T>(&self, turn: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            turn = turn => Some(turn),
            () = at(self.give_up) => None,
        }
    }
}

/// What comes after a turn of a waiter: the wait goes on, or ends with the lock, or (`None`) without it: the
/// caller is then told who holds the lock.
type Turn = ControlFlow<Option<Acquired>>;

impl LockManager {
    /// Takes the lock, and waits for it if necessary. `owner` is the waiter that a deadlock search sees:
    /// the session itself, or the job that the guard belongs to.
    ///
    /// # Cancel safety
    /// If the future is dropped, it leaves the queue and gives a fresh grant back.
    #[cfg_attr(feature = "tracing", tracing::instrument(
        name = "doclock.wait", skip_all,
        fields(collection = wanted.key.collection(), outcome = tracing::field::Empty),
    ))]
    pub(crate) async fn acquire_waiting(
        &self,
        wanted: &Wanted,
        owner: &Aid,
        wait: Wait,
        scope: &TaskTracker,
    ) -> Result<Acquired, LockError> {
        let mut waiting = observe::Waiting::begins(self, wanted, wait);
        let freeze_begins = self.inner.freezes.begins(wanted.key.collection());
        let acquired = tokio::select! {
            biased;
            acquired = self.acquire_in_turn(wanted, owner, wait, scope) => acquired,
            () = self.begins_shutdown(), if wait != Wait::no() => Err(LockError::ShutDown),
            // The last attempt is refused, unless the session got the lock at this moment.
            () = freeze_begins, if wait != Wait::no() => {
                self.acquire_by(wanted, scope, self.until()).await
            }
        };
        waiting.ends(&acquired);
        acquired
    }

    /// Resolves when a shutdown begins. During a shutdown the first caller for a document still makes one
    /// attempt.
    async fn begins_shutdown(&self) {
        if self.inner.waits.is_cancelled() {
            return pending().await;
        }
        self.inner.waits.cancelled().await;
    }

    /// The deadline of an operation that begins now, for a caller that gives up at `give_up`.
    fn until_at_most(&self, give_up: Option<Instant>) -> Instant {
        let latest = give_up.and_then(|at| at.checked_add(self.deadline()));
        latest.map_or_else(|| self.until(), |latest| latest.min(self.until()))
    }

    async fn acquire_in_turn(
        &self,
        wanted: &Wanted,
        owner: &Aid,
        wait: Wait,
        scope: &TaskTracker,
    ) -> Result<Acquired, LockError> {
        let key = &wanted.key;
        let (collection, registered) = self.ready(key, self.until()).await?;
        let fair = registered.rules.fair;
        let give_up = match wait.0 {
            Patience::No => return self.acquire_by(wanted, scope, self.until()).await,
            // A time that is too long for the clock counts as no limit.
            Patience::ForAtMost(time) => clock::now().checked_add(time),
            Patience::UntilAcquired => None,
        };
        // During a shutdown, nobody waits for a turn for long.
        let shutdown = self.inner.waits.is_cancelled().then(|| self.until());
        let give_up = give_up.into_iter().chain(shutdown).min();
        // A session that already holds the lock must not queue behind those that wait for its release.
        // The session of a guard is new and holds nothing.
        let may_hold = wanted.aid == *owner;
        let caller = Caller { wanted, scope, collection, fair, may_hold, give_up };
        if may_hold
            && self.inner.queues.somebody_waits_for(key)
            && self.holds(wanted, self.until_at_most(give_up)).await?
        {
            return self.acquire_by(wanted, scope, self.until_at_most(give_up)).await;
        }
        // Dropped after the place.
        let mut leaving = Leaving { manager: self, key, line: None };
        let joined = self.inner.queues.join(wanted, owner, scope, fair);
        let mut place = joined.map_err(|it| self.too_many(key, it))?;
        leaving.line = place.line();
        if let Some(line) = leaving.line.as_ref().filter(|_| place.has_ticket()) {
            // The waiter is back with its ticket.
            self.set_place_in_background(key, line);
        }
        let first =
            if fair { self.takes_its_turn(&caller, &place).await? } else { Turn::Continue(()) };
        match self.wait(&caller, &mut place, first).await? {
            // The waiters behind this one wait for its lock from now on.
            Some(answer) => {
                place.granted(answer.lock().clone());
                Ok(answer)
            }
            None => self.refusal(&caller, &place).await,
        }
    }

    async fn wait(
        &self,
        caller: &Caller<'_>,
        place: &mut Place,
        first: Turn,
    ) -> Result<Option<Acquired>, LockError> {
        let Caller { collection, fair, give_up, .. } = *caller;
        let line = place.line();
        let mut keep_at = None;
        let mut turn = first;
        loop {
            if let Turn::Break(ended) = turn {
                if ended.is_none() && caller.is_over() {
                    place.keep_turn();
                }
                return Ok(ended);
            }
            let (is_first, expires_at) = match place.next_step() {
                Step::Try => {
                    turn = self.takes_its_turn(caller, place).await?;
                    continue;
                }
                Step::Refuse(cycle) => {
                    self.refuse_if_certain(&cycle, caller, place).await?;
                    continue;
                }
                Step::Wait => (false, None),
                Step::WaitFirst(expires_at) => {
                    self.watch_over(collection);
                    (true, expires_at)
                }
            };
            // The command that made this waiter the first has renewed the place.
            keep_at = keep_at.filter(|_| is_first);
            if is_first && fair {
                keep_at.get_or_insert_with(|| clock::now() + KEEP_PLACE);
            }
            let must_poll = is_first && self.inner.watches.state(collection) != Some(Wakeup::Told);
            tokio::select! {
                biased;
                gift = place.called() => {
                    if let Some(gift) = gift {
                        return Ok(Some(gift));
                    }
                }
                () = at(expires_at.filter(|_| is_first)) => place.ask(),
                () = after(must_poll.then(poll_pause)) => place.ask(),
                () = at(keep_at) => {
                    keep_at = None;
                    if let Some(line) = &line {
                        self.set_place_in_background(&caller.wanted.key, line);
                    }
                }
                () = at(give_up) => {
                    place.keep_turn();
                    return Ok(None);
                }
                () = self.inner.waits.cancelled() => return Err(LockError::ShutDown),
            }
        }
    }

    /// Asks the store, if it is this waiter's turn. Few waiters ask at the same time.
    async fn takes_its_turn(&self, caller: &Caller<'_>, place: &Place) -> Result<Turn, LockError> {
        let asking = Arc::clone(&self.inner.asking).acquire_owned();
        let Some(asking) = caller.in_time(asking).await else { return Ok(Turn::Break(None)) };
        // On the heap, so that a crowd of waiters is small while it does not ask.
        let asks = Box::pin(async {
            match place.line() {
                Some(line) => self.asks_in_line(caller, place, line).await,
                None => self.asks(caller, place, None).await,
            }
        });
        match task::with_permit(asking.ok(), PATIENCE, asks).await {
            Ok(Some(answer)) => return Ok(Turn::Break(Some(answer))),
            Ok(None) => {
                let until = self.until_at_most(caller.give_up);
                if caller.may_hold && self.is_upgrade(caller.wanted, place, until).await? {
                    return Ok(Turn::Break(None));
                }
            }
            Err(e) => {
                self.sit_out(e, caller, place).await?;
                place.ask_anew();
            }
        }
        Ok(if caller.is_over() { Turn::Break(None) } else { Turn::Continue(()) })
    }

    /// One attempt. `None` if the lock has another holder, or if another waiter comes first.
    async fn asks(
        &self,
        caller: &Caller<'_>,
        place: &Place,
        in_line: Option<InLine>,
    ) -> Result<Option<Acquired>, LockError> {
        let Caller { wanted, scope, give_up, .. } = *caller;
        let (line, turn, order) = match in_line {
            Some(InLine { turn, line, order }) => (Some(line), Some(turn), Some(order)),
            None => (None, None, None),
        };
        let (claim, until) =
            (wanted.claim(self.inner.settings.max_hold, turn), self.until_at_most(give_up));
        match self.claim(&wanted.key, claim, order, scope, until).await {
            Ok(Acquired::Held(lock)) => {
                place.saw(&lock);
                place.waits().map_err(|it| self.too_many(&wanted.key, it))?;
                Ok(None)
            }
            Ok(granted) => Ok(Some(granted)),
            Err(e) => {
                // The claim is being given back, but it may have removed this waiter from the place.
                if let Some(line) = line {
                    self.set_place_in_background(&wanted.key, &line);
                }
                Err(e)
            }
        }
    }

    fn too_many(&self, key: &LockKey, TooMany { limit, per_session }: TooMany) -> LockError {
        observe::waiter_refused(self, key, per_session);
        LockError::TooManyWaiters { key: key.clone(), limit, per_session }
    }

    /// Pauses if this is an outage that the wait may outlast. Otherwise the outage is the answer.
    async fn sit_out(
        &self,
        error: LockError,
        caller: &Caller<'_>,
        place: &Place,
    ) -> Result<(), LockError> {
        let (key, pause) = (&caller.wanted.key, poll_pause());
        let is_over = caller.give_up.is_some_and(|at| at <= clock::now() + pause);
        if !is_outage(&error) || is_over || place.waits().is_err() {
            return Err(error);
        }
        log::warn!(
            target: "actix_doclock::manager",
            "still waiting for {key:?} although the store does not answer: {error}",
        );
        tokio::select! {
            biased;
            () = self.inner.waits.cancelled() => Err(LockError::ShutDown),
            () = sleep(pause) => Ok(()),
        }
    }

    async fn holds(&self, wanted: &Wanted, until: Instant) -> Result<bool, LockError> {
        let lock = self.inspect_by(&wanted.key, Some(&wanted.aid), until).await?;
        Ok(lock.is_some_and(|lock| lock.aid == wanted.aid))
    }

    /// A reader that wants to write while other readers hold the lock does not wait: two such readers
    /// would wait for each other forever.
    async fn is_upgrade(
        &self,
        wanted: &Wanted,
        place: &Place,
        until: Instant,
    ) -> Result<bool, LockError> {
        let has_readers = place.holder().is_some_and(|lock| lock.mode == Mode::Shared);
        Ok(has_readers && wanted.mode == Mode::Exclusive && self.holds(wanted, until).await?)
    }

    /// Answers with the known holder. If no holder is known, makes a last attempt.
    async fn refusal(&self, caller: &Caller<'_>, place: &Place) -> Result<Acquired, LockError> {
        let Caller { wanted, scope, give_up, .. } = *caller;
        match place.holder() {
            Some(lock) => {
                let refused = Acquired::Held(lock);
                observe::answered(self, wanted, &refused);
                Ok(refused)
            }
            None => {
                let until = self.until_at_most(give_up);
                let asking = Arc::clone(&self.inner.asking).acquire_owned();
                // The rest of the time is for the attempt.
                let soon = until.min(clock::now() + self.deadline() / 2);
                let asking = timeout_at(soon.into(), asking).await.map_err(|_| {
                    let why =
                        "acquire: too many waiters ask, and this one had no turn; try again later";
                    StoreError::new(StoreErrorKind::Overloaded, why)
                })?;
                // On the heap, for the same reason as a turn.
                let asks = Box::pin(self.acquire_by(wanted, scope, until));
                task::with_permit(asking.ok(), PATIENCE, asks).await
            }
        }
    }
}

/// True if a wait may outlast this error.
pub(super) fn is_outage(error: &LockError) -> bool {
    let lasts = |e: &StoreError| {
        matches!(e.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Overloaded)
    };
    matches!(error, LockError::Store(e) if lasts(e))
}

fn at(moment: Option<Instant>) -> impl Future<Output = ()> {
    after(moment.map(|moment| moment.saturating_duration_since(clock::now())))
}

async fn after(pause: Option<Duration>) {
    match pause {
        Some(pause) => sleep(pause).await,
        None => pending().await,
    }
}
