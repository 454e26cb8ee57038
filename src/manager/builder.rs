//! What can be set, with its defaults.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use crate::{
    actor::Actor,
    ended::SessionEnded,
    error::BoxError,
    lock::{Holder, Lock},
    manager::{
        Inner, LockManager, Stop,
        background::{
            listener::{self, Listener},
            reaper,
        },
        guard::leases,
        task::Runner,
        wait::queue::{Limits, Queues},
    },
    store::DynStore,
};

/// Browsers wake the timers of a hidden tab once a minute at most, so a heartbeat can be late by
/// that much; WordPress settled on the same figure for its post lock.
const TTL: Duration = Duration::from_secs(150);
/// Shorter makes no sense over a network, longer hits the server's limits for dates.
const TTL_RANGE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30 * 24 * 60 * 60)];

/// Long enough for an ordinary election of a primary with tuned settings, short enough for a person
/// who waits for a page.
const DEADLINE: Duration = Duration::from_secs(5);
const DEADLINE_RANGE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(120)];

/// Often enough for a listener that tells people; a query of an index that finds nothing costs the
/// server less than a millisecond.
const REAPER_INTERVAL: Duration = Duration::from_secs(1);
/// More than anybody edits at once, and fewer than would block a team.
const MAX_LOCKS_PER_SESSION: usize = 100;
const LOCKS_RANGE: [usize; 2] = [1, 1_000_000];
const REAPER_RANGE: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(60)];

const LISTENER_TIMEOUT: Duration = Duration::from_secs(10);
const LISTENER_RANGE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10 * 60)];

/// More than the tabs that a person keeps open for documents which others hold.
const WAITERS_PER_SESSION: usize = 16;
/// As many as the requests that a server can keep open for people who wait; a few megabytes.
const WAITERS: usize = 4_096;
/// A waiter takes about a kilobyte, without its request.
const WAITERS_RANGE: [usize; 2] = [1, 1_000_000];

/// Settings of a [`LockManager`], each with a safe default.
#[must_use = "a builder does nothing until `build` is called"]
pub struct LockManagerBuilder {
    store: Arc<dyn DynStore>,
    settings: Settings,
    listener: Option<Listener>,
    listener_timeout: Duration,
}

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) ttl: Duration,
    pub(super) max_hold: Option<Duration>,
    pub(super) deadline: Duration,
    pub(super) holder: Holder,
    pub(super) reaper_interval: Option<Duration>,
    pub(super) max_locks_per_session: usize,
    pub(super) trust_leases: bool,
    waiters: Limits,
    break_policy: LockPolicy,
    take_over_policy: LockPolicy,
    admin_policy: Option<AdminPolicy>,
}

type LockPolicy = Arc<dyn Fn(&Actor, &Lock) -> bool + Send + Sync>;
type AdminPolicy = Arc<dyn Fn(&Actor) -> bool + Send + Sync>;

impl Settings {
    pub(super) fn may_break(&self, actor: &Actor, lock: &Lock) -> bool {
        (self.break_policy)(actor, lock)
    }

    pub(super) fn may_take_over(&self, actor: &Actor, lock: &Lock) -> bool {
        (self.take_over_policy)(actor, lock)
    }

    /// `None` if nobody is meant to.
    pub(super) fn may_see_all(&self, actor: &Actor) -> Option<bool> {
        self.admin_policy.as_ref().map(|allows| allows(actor))
    }
}

impl LockManagerBuilder {
    pub(super) fn new(store: Arc<dyn DynStore>) -> Self {
        let settings = Settings {
            ttl: TTL,
            max_hold: None,
            deadline: DEADLINE,
            holder: Holder::new("another session"),
            reaper_interval: Some(REAPER_INTERVAL),
            max_locks_per_session: MAX_LOCKS_PER_SESSION,
            trust_leases: false,
            waiters: Limits { per_session: WAITERS_PER_SESSION, all: WAITERS },
            break_policy: Arc::new(|_, _| false),
            take_over_policy: Arc::new(Actor::is_holder_of),
            admin_policy: None,
        };
        Self { store, settings, listener: None, listener_timeout: LISTENER_TIMEOUT }
    }

    /// How long a lock outlives the last sign of life of its session. Default 150 s, from 1 s to
    /// 30 days.
    ///
    /// Locks are renewed every third of it while requests come. Shorter frees the documents of
    /// vanished people sooner; but browsers let the timers of a hidden tab run once a minute only,
    /// so below 150 s somebody who looks at another tab can lose a lock.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = ttl;
        self
    }

    /// How long a lock may be held at most, however often it is renewed. Default: as long as its
    /// session shows signs of life. From 1 s to 30 days.
    ///
    /// The holder is told as of any loss, and may take the lock again if nobody else has. The session
    /// goes on: locks that end like this say nothing about it, so set this to several times the ttl,
    /// or no session will ever be seen to fall silent.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.settings.max_hold = Some(max_hold);
        self
    }

    /// How many locks one web session may hold at a time, in all collections together. Default 100, from
    /// 1 to 1 000 000. One more is refused with [`LockError::TooManyLocks`](crate::LockError::TooManyLocks).
    ///
    /// So that nobody locks all documents of a collection. A session with few locks costs nothing for it:
    /// its locks are counted, by one query for each collection, only when it may have come a quarter of
    /// the way closer to the limit. Several servers that grant locks to one session at the same moment
    /// may let it have some more, until its next renewal counts them. Jobs and guards are not limited.
    pub fn max_locks_per_session(mut self, most: usize) -> Self {
        self.settings.max_locks_per_session = most;
        self
    }

    /// How often to look for sessions that have fallen silent. Default 1 s, from 10 ms to 60 s.
    ///
    /// One query of an index: when the next lock is due to run out, if that is known, and else in
    /// every third interval. After failures less and less often, at least every 10 s. Each of the
    /// sessions is ended by one server of the cluster. Nobody waits for it: who wants a lock that has
    /// run out gets it at once.
    ///
    /// It begins one interval after the last type was registered. All servers of a cluster should
    /// register the same types.
    pub fn reaper_interval(mut self, interval: Duration) -> Self {
        self.settings.reaper_interval = Some(interval);
        self
    }

    /// Answers a session that asks again for a lock it has been told it holds, without asking the store,
    /// as long as the lease that was told then lasts. Default: every request asks.
    ///
    /// Saves one command where a page makes many requests for one document. What the answer tells is
    /// that the session had the lock when the store was asked last, at most a ttl ago, and that this
    /// process has not heard of its end since. It hears of what it does itself at once, and of what other
    /// servers do within milliseconds on a replica set, within a second on a standalone server. Until
    /// then a handler can be told that a lock is held which is gone: broken by an administrator, ended
    /// by a logout on another server. So it may show the document, and must not conclude that nobody
    /// else edits it. [`save`](crate::LockedDoc) asks, always: who lost the lock writes nothing.
    ///
    /// Not the default, because the one who breaks a lock expects that the next click of its holder is
    /// refused. Such an answer renews nothing; active sessions are renewed as ever. Another tab, another
    /// load of the page and a shared lock are always asked for.
    pub fn trust_leases(mut self) -> Self {
        self.settings.trust_leases = true;
        self
    }

    /// How many locks one web session may wait for on this server at the same time. Default 16, from 1 to
    /// 1 000 000.
    ///
    /// The next request that would have to wait is refused with [`LockError::TooManyWaiters`], over HTTP
    /// 503 `too_many_waiters`. So no session fills the queue of a [fair](crate::Lockable::FAIR) collection,
    /// which has [`MAX_READERS`](crate::MAX_READERS) places: on each server it gets as many as this. A
    /// request that gets its lock at once, or does not want to wait, does not count.
    ///
    /// Does not hold for [jobs](LockManager::job): how many locks a job wants at the same time is up to the
    /// application, not to a visitor.
    ///
    /// [`LockError::TooManyWaiters`]: crate::LockError::TooManyWaiters
    pub fn max_waiters_per_session(mut self, waiters: usize) -> Self {
        self.settings.waiters.per_session = waiters;
        self
    }

    /// How many may wait for locks on this server at the same time, sessions and jobs together. Default
    /// 4 096, from 1 to 1 000 000.
    ///
    /// Whoever would have to wait beyond that is refused as by
    /// [`max_waiters_per_session`](Self::max_waiters_per_session). Raise it where more jobs wait in one
    /// process.
    pub fn max_waiters(mut self, waiters: usize) -> Self {
        self.settings.waiters.all = waiters;
        self
    }

    /// Leaves silent sessions to the other servers of the cluster, or to
    /// [`sweep`](LockManager::sweep).
    ///
    /// At least one should do it: without, the records of vanished people stay until the TTL index
    /// removes them, and no listener hears of it.
    pub fn without_reaper(mut self) -> Self {
        self.settings.reaper_interval = None;
        self
    }

    /// Has the application told of each session that ends: by logout, by silence, or by revocation.
    /// Default: nobody.
    ///
    /// Called when the session's locks are gone, once in the whole cluster: by the server that ended
    /// the session, or by another one with a listener if that has none or has died. If a server dies
    /// while it calls, another one calls again, after the time-out and 10 s;
    /// [`event`](SessionEnded::event) is the same then, and [`repeated`](SessionEnded::repeated) is
    /// true. What nobody could be told within a day is forgotten.
    ///
    /// It runs in a task of its own on the manager's runtime, for the system: there is no request and
    /// no user. At most 16 run at the same time. An error, a panic or a time-out is logged, and not
    /// repeated. It must not block its thread, as nothing asynchronous may.
    ///
    /// If no server runs for a minute, the TTL index removes what has run out, and of that nobody hears.
    ///
    /// ```
    /// # use actix_doclock::{BuildError, LockManager, MemoryStore, SessionEnded};
    /// # async fn build() -> Result<LockManager, BuildError> {
    /// LockManager::builder(MemoryStore::new())
    ///     .on_session_end(async |ended: SessionEnded| {
    ///         println!("{:?}: {} documents are free", ended.reason, ended.locks.len());
    ///         Ok(())
    ///     })
    ///     .build()
    ///     .await
    /// # }
    /// ```
    pub fn on_session_end<F>(
        mut self,
        listener: impl Fn(SessionEnded) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        self.listener = Some(Listener::new(listener));
        self
    }

    /// How long the listener may take before it is dropped. Default 10 s, from 100 ms to 10 minutes.
    pub fn listener_timeout(mut self, timeout: Duration) -> Self {
        self.listener_timeout = timeout;
        self
    }

    /// How long an operation may take before its caller is told that the store does not answer.
    /// Default 5 s, from 100 ms to 120 s.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self
    }

    /// Who is shown where a lock's session gives no name. Default "another session".
    pub fn holder_label(mut self, label: impl Into<String>) -> Self {
        self.settings.holder = Holder::new(label);
        self
    }

    /// Who may break whose lock. Default: nobody.
    ///
    /// Called with the person who asks and the lock as it is; must not block.
    pub fn break_policy(
        mut self,
        allows: impl Fn(&Actor, &Lock) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.settings.break_policy = Arc::new(allows);
        self
    }

    /// Who may take over whose lock from another session, by the [lock API](crate::lock_api). Default:
    /// everybody from their own other sessions, as told by [`Actor::with_id`].
    ///
    /// Who takes over has the lock at once. The holder is told, and what they save is refused; what they
    /// have typed is theirs to keep. Called as the [break policy](Self::break_policy). From another tab
    /// of the same session anybody may take a lock.
    ///
    /// ```
    /// # use actix_doclock::{Actor, Lock, LockManager, MemoryStore};
    /// # let builder = LockManager::builder(MemoryStore::new());
    /// builder.take_over_policy(|actor: &Actor, lock: &Lock| {
    ///     actor.has_role("editor-in-chief") || actor.is_holder_of(lock)
    /// });
    /// ```
    pub fn take_over_policy(
        mut self,
        allows: impl Fn(&Actor, &Lock) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.settings.take_over_policy = Arc::new(allows);
        self
    }

    /// Who may see the locks of everybody, at `/admin` of the [lock API](crate::lock_api). Default:
    /// there is no such page.
    ///
    /// Breaking a lock there is still up to the [break policy](Self::break_policy).
    pub fn admin_policy(mut self, allows: impl Fn(&Actor) -> bool + Send + Sync + 'static) -> Self {
        self.settings.admin_policy = Some(Arc::new(allows));
        self
    }

    /// Starts the manager on the current Tokio runtime, which must outlive it: `main`'s, not that
    /// of a worker.
    ///
    /// # Errors
    /// [`BuildError`] if a setting is out of its range.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn build(self) -> Result<LockManager, BuildError> {
        let (a_duration, a_number) = ("a duration", "a number");
        in_range("ttl", a_duration, self.settings.ttl, TTL_RANGE)?;
        in_range("deadline", a_duration, self.settings.deadline, DEADLINE_RANGE)?;
        in_range("listener_timeout", a_duration, self.listener_timeout, LISTENER_RANGE)?;
        let most = self.settings.max_locks_per_session;
        in_range("max_locks_per_session", a_number, most, LOCKS_RANGE)?;
        if let Some(max_hold) = self.settings.max_hold {
            in_range("max_hold", a_duration, max_hold, TTL_RANGE)?;
        }
        if let Some(interval) = self.settings.reaper_interval {
            in_range("reaper_interval", a_duration, interval, REAPER_RANGE)?;
        }
        let Limits { per_session, all } = self.settings.waiters;
        in_range("max_waiters_per_session", a_number, per_session, WAITERS_RANGE)?;
        in_range("max_waiters", a_number, all, WAITERS_RANGE)?;
        let reaper_interval = self.settings.reaper_interval;
        let stop = Stop::default();
        let waits = stop.token().child_token();
        let inner = Arc::new(Inner {
            store: self.store,
            collections: Default::default(),
            runner: Runner::on_current_runtime(),
            activity: Default::default(),
            watched: Default::default(),
            queues: Queues::new(self.settings.waiters),
            settings: self.settings,
            wakeups: Default::default(),
            kept: Default::default(),
            leases: Default::default(),
            events: Default::default(),
            event_streams: Default::default(),
            stop,
            waits,
            register: Default::default(),
            granted: Default::default(),
            announce: Default::default(),
            sweeps: Default::default(),
            panics: Default::default(),
        });
        leases::follow(&inner);
        let manager = LockManager { inner };
        if let Some(interval) = reaper_interval {
            let run = move |inner| reaper::run(inner, interval);
            manager.inner.sweeps.by(manager.supervise("reaper", |_| {}, run));
        }
        if let Some(listener) = self.listener {
            let limit = self.listener_timeout;
            let run = move |inner| listener::run(inner, listener.clone(), limit);
            manager.supervise("listener", |_| {}, run);
        }
        Ok(manager)
    }
}

fn in_range<T: PartialOrd + fmt::Debug>(
    setting: &'static str,
    what: &'static str,
    value: T,
    [least, most]: [T; 2],
) -> Result<(), BuildError> {
    if (&least..=&most).contains(&&value) {
        return Ok(());
    }
    let range = format!("{what} from {least:?} to {most:?}");
    Err(BuildError { setting, value: format!("{value:?}"), range })
}

/// A setting is out of its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the {setting} of {value} is out of range: write {range}")]
pub struct BuildError {
    setting: &'static str,
    value: String,
    range: String,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("ttl", &self.ttl)
            .field("max_hold", &self.max_hold)
            .field("deadline", &self.deadline)
            .field("holder", &self.holder)
            .field("reaper_interval", &self.reaper_interval)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for LockManagerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockManagerBuilder")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    #[tokio::test]
    async fn a_setting_out_of_range_is_refused_by_name_and_says_what_to_write() {
        let settings = || LockManager::builder(MemoryStore::new());
        let (none, year) = (Duration::ZERO, Duration::from_secs(365 * 24 * 60 * 60));
        for value in [none, year] {
            let cases = [
                ("ttl", settings().ttl(value)),
                ("deadline", settings().deadline(value)),
                ("max_hold", settings().max_hold(value)),
                ("reaper_interval", settings().reaper_interval(value)),
                ("listener_timeout", settings().listener_timeout(value)),
            ];
            for (setting, builder) in cases {
                let refused = builder.build().await.unwrap_err().to_string();
                assert!(refused.contains(setting), "{refused}");
                assert!(refused.contains("write a duration from"), "{refused}");
            }
        }
        for value in [0, usize::MAX] {
            let cases = [
                ("max_waiters", settings().max_waiters(value)),
                ("max_waiters_per_session", settings().max_waiters_per_session(value)),
            ];
            for (setting, builder) in cases {
                let refused = builder.build().await.unwrap_err().to_string();
                assert!(refused.contains(&format!("the {setting} of")), "{refused}");
                assert!(refused.contains("write a number from 1 to"), "{refused}");
            }
        }
        settings().build().await.unwrap();
    }
}
