//! The settings of a manager, with their defaults.

use std::{
    collections::HashMap, fmt, future::Future, ops::RangeInclusive, sync::Arc, time::Duration,
};

use crate::{
    actor::Actor,
    description::Description,
    ended::SessionEnded,
    error::BoxError,
    key::LockKey,
    lock::{Holder, Lock},
    manager::{
        Core, LockManager, Stop,
        activity::Activity,
        background::{
            listener::{self, Listener, Listeners},
            reaper,
        },
        collections::{self, Collections},
        describe::{Describe, Descriptions},
        dyn_store::DynStore,
        fleet::{self, Servers},
        freezes::{self, Freezes},
        granting::Granting,
        limits::{self, Limits},
        log_limit::LogLimit,
        reads::Reads,
        saves::Saves,
        sessions::Sessions,
        store_time::StoreTime,
        verbs::{Runner, Verbs},
        wait::Queues,
        watch::{events::Events, streams::Streams},
        watched::Beliefs,
    },
    store::{DEFAULT_TTL, TTL_RANGE},
    takeover::Takeover,
};

/// Long enough for an ordinary election of a primary with tuned settings, short enough for a person who
/// waits for a page.
const DEADLINE: Duration = Duration::from_secs(5);
const DRAIN_RANGE: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(10 * 60);
const DEADLINE_RANGE: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(120);

/// Often enough for a listener that notifies people. A query of an index that finds nothing costs the
/// server less than a millisecond.
const REAPER_INTERVAL: Duration = Duration::from_secs(1);
const REAPER_RANGE: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(60);

const LISTENER_TIMEOUT: Duration = Duration::from_secs(10);
const LISTENER_RANGE: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(10 * 60);

/// Settings of a [`LockManager`], each with a safe default.
#[must_use = "a builder does nothing until `build` is called"]
pub struct LockManagerBuilder {
    store: Arc<dyn DynStore>,
    settings: Settings,
    listeners: Listeners,
    listener_timeout: Duration,
    describe: Option<Describe>,
}

#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) ttl: Duration,
    pub(super) max_hold: Option<Duration>,
    pub(super) deadline: Duration,
    pub(crate) drain_delay: Duration,
    pub(crate) holder: Holder,
    pub(super) reaper_interval: Option<Duration>,
    limits: Limits,
    break_policy: LockPolicy,
    take_over_policy: LockPolicy,
    admin_policy: Option<AdminPolicy>,
}

type LockPolicy = Arc<dyn Fn(&Actor, &Lock) -> bool + Send + Sync>;
type AdminPolicy = Arc<dyn Fn(&Actor) -> bool + Send + Sync>;

impl Settings {
    pub(crate) fn may_break(&self, actor: &Actor, lock: &Lock) -> bool {
        (self.break_policy)(actor, lock)
    }

    pub(super) fn may_take_over(&self, actor: &Actor, lock: &Lock) -> bool {
        (self.take_over_policy)(actor, lock)
    }

    /// `None` if nobody may.
    pub(crate) fn may_see_all(&self, actor: &Actor) -> Option<bool> {
        self.admin_policy.as_ref().map(|allows| allows(actor))
    }
}

impl LockManagerBuilder {
    pub(super) fn new(store: Arc<dyn DynStore>) -> Self {
        let settings = Settings {
            ttl: DEFAULT_TTL,
            max_hold: None,
            deadline: DEADLINE,
            drain_delay: Duration::ZERO,
            holder: Holder::new("another session"),
            reaper_interval: Some(REAPER_INTERVAL),
            limits: Limits::default(),
            break_policy: Arc::new(|_, _| false),
            take_over_policy: Arc::new(Actor::is_holder_of),
            admin_policy: None,
        };
        let (listeners, listener_timeout) = (Listeners::default(), LISTENER_TIMEOUT);
        Self { store, settings, listeners, listener_timeout, describe: None }
    }

    /// How long a lock outlives the last activity of its session. Default 150 s, from 1 s to 30 days.
    ///
    /// While requests arrive, locks are renewed every third of the ttl. A shorter ttl frees the documents
    /// of vanished people sooner. But browsers run the timers of a hidden tab only once a minute, so
    /// below 150 s a person who looks at another tab can lose a lock.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = ttl;
        self
    }

    /// How long a lock may be held at most, however often it is renewed. Default: as long as its session
    /// is active. From 1 s to 30 days.
    ///
    /// The holder is told as of any other loss, and may take the lock again if nobody else has taken it. The
    /// session goes on: a lock that ends like this says nothing about its session. So set this to several times the
    /// ttl: otherwise no session is ever found to be idle.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.settings.max_hold = Some(max_hold);
        self
    }

    /// How many locks, waiters and event streams a session, a person and the server may have. See [`Limits`].
    pub fn limits(mut self, limits: Limits) -> Self {
        self.settings.limits = limits;
        self
    }

    /// How often to look for idle sessions. Default 1 s, from 10 ms to 60 s.
    ///
    /// Each look is one query of an index. It happens when the next lock is due to expire, if that is known, and
    /// otherwise in every third interval. After failures the queries become less frequent, but at least one every 10
    /// s. Each idle session is ended by one server of the cluster. Nobody has to wait for this: an
    /// expired lock is granted to the next caller at once.
    ///
    /// The reaper starts one interval after the last type was registered. All servers of a cluster should
    /// register the same types.
    pub fn reaper_interval(mut self, interval: Duration) -> Self {
        self.settings.reaper_interval = Some(interval);
        self
    }

    /// Leaves idle sessions to the other servers of the cluster, or to [`sweep`](LockManager::sweep).
    ///
    /// At least one server should run a reaper. Otherwise the records of vanished people stay until the
    /// TTL index removes them, and no listener is called.
    pub fn without_reaper(mut self) -> Self {
        self.settings.reaper_interval = None;
        self
    }

    /// Calls this listener for each session that ends: by logout, by its idle timeout, or by revocation.
    /// Default: no listener.
    ///
    /// The listener is called when the session's locks are gone, once in the whole cluster: by the server
    /// that ended the session, or by another one if that server has no listener or has died. If a server
    /// dies during the call, another server calls again, after the time-out and 10 s. Then
    /// [`event`](SessionEnded::event) is the same, and [`repeated`](SessionEnded::repeated) is true. An
    /// end that nobody could be told of within a day is dropped.
    ///
    /// The listener runs in a task of its own on the manager's runtime, without a request or a user. At
    /// most 16 calls run at the same time. An error, a panic or a time-out is logged, and the call is not repeated.
    /// As any asynchronous code, the listener must not block its thread.
    ///
    /// If no server runs for a minute, the TTL index removes the expired locks, and these ends are not
    /// reported.
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
        self.listeners.ended = Some(Listener::of_ends(listener));
        self
    }

    /// Calls this listener for each lock that is taken from its holder: broken, by whatever server or by
    /// the [command](crate::guide::cli), or taken over by another session. The listener can send the former holder a
    /// message, for example, or keep a history. Default: no listener.
    ///
    /// Called once in the whole cluster, in the same way as the listener for
    /// [ended sessions](Self::on_session_end). A break or takeover is noted before it is carried out, so that
    /// the listener is called even if the server dies in the middle, loses a reply, or cannot reach the store any more.
    /// In these cases, if the lock is gone, it may also be gone because its holder released it. The first server that has such a
    /// listener is told of the breaks and takeovers of the last day.
    ///
    /// ```
    /// # use actix_doclock::{BuildError, LockManager, Takeover, MemoryStore};
    /// # async fn build() -> Result<LockManager, BuildError> {
    /// LockManager::builder(MemoryStore::new())
    ///     .on_lock_taken(async |taken: Takeover| {
    ///         if let Some(user) = taken.from.and_then(|holder| holder.user) {
    ///             println!("to {user}: {} has your lock on {}", taken.by.label, taken.key);
    ///         }
    ///         Ok(())
    ///     })
    ///     .build()
    ///     .await
    /// # }
    /// ```
    pub fn on_lock_taken<F>(
        mut self,
        listener: impl Fn(Takeover) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        self.listeners.takeovers = Some(Listener::of_takeovers(listener));
        self
    }

    /// How long a listener may take before its call is dropped. Default 10 s, from 100 ms to 10
    /// minutes.
    pub fn listener_timeout(mut self, timeout: Duration) -> Self {
        self.listener_timeout = timeout;
        self
    }

    /// How long an operation may take before its caller is told that the store does not answer. Default 5
    /// s, from 100 ms to 120 s.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self
    }

    /// How long [`serve`](LockManager::serve) goes on to serve requests after `SIGTERM`, while
    /// [health](LockManager::check_health) already says `stopping` and is not ready. The load balancer thus sends no
    /// more requests when the server closes its port. Default 0: the server closes the port at once. Up to 10 minutes.
    ///
    /// The delay should be longer than the interval of the readiness probe times the failures that the probe
    /// tolerates, and much shorter than the time until the process is killed. Only for an `HttpServer`; a server that
    /// is already running handles its signals itself. `SIGINT` stops without delay.
    #[cfg(feature = "web")]
    pub fn drain_delay(mut self, delay: Duration) -> Self {
        self.settings.drain_delay = delay;
        self
    }

    /// The holder that is shown if a lock's session gives no name. Default "another session".
    pub fn holder_label(mut self, label: impl Into<String>) -> Self {
        self.settings.holder = Holder::new(label);
        self
    }

    /// Decides whether a person may break a lock. Default: nobody may.
    ///
    /// Called with the actor and the current lock; must not block.
    pub fn break_policy(
        mut self,
        allows: impl Fn(&Actor, &Lock) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.settings.break_policy = Arc::new(allows);
        self
    }

    /// Decides whether a person may take a lock over from another session, by the [lock API](crate::lock_api).
    /// Default: people may take over locks from their own other sessions, as told by [`Actor::with_id`].
    ///
    /// The new holder has the lock at once. The former holder is told, and its saves are refused, but it
    /// keeps the text that was typed. It is called in the same way as the [break policy](Self::break_policy). A
    /// takeover from another tab of the same session is always allowed.
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

    /// Decides whether a person may see the locks of all users, at `/admin` of the [lock API](crate::lock_api).
    /// Default: there is no such page.
    ///
    /// The [break policy](Self::break_policy) still decides who may break a lock there.
    pub fn admin_policy(mut self, allows: impl Fn(&Actor) -> bool + Send + Sync + 'static) -> Self {
        self.settings.admin_policy = Some(Arc::new(allows));
        self
    }

    /// Tells what people call documents: their titles, and where to open them. Default: documents are
    /// named by their collection and id.
    ///
    /// The titles are shown by the [admin page](Self::admin_policy), in refusals (423) and in the audit
    /// log. So everybody who is refused a lock sees the title of that document; if a title is secret,
    /// leave it out, or use
    /// [`describe_for`](Self::describe_for). [`Description`] says which titles and links are shown.
    ///
    /// The function gets at most 200 keys of any registered collections. A document that its answer lacks has no
    /// title. It runs in a task of its own on the manager's runtime, at most 4 calls at the
    /// same time, and its answer is kept until 10 s after the call began. A call that takes longer than 2 s is dropped. After an
    /// error, a panic or such a call there is one line in the log, and no titles for 10 s. A refusal waits
    /// for the title, at most 2 s; a break does not wait. As any asynchronous code, the function must not
    /// block its thread. A closure that owns a collection returns a block with a
    /// [clone of its own](crate::guide::existing_application#roles-and-policies-that-ask-the-database).
    ///
    /// ```
    /// # use std::collections::HashMap;
    /// # use actix_doclock::{BoxError, BuildError, Description, LockKey, LockManager, MemoryStore};
    /// # async fn titles(_: &[LockKey]) -> Result<Vec<(LockKey, String)>, BoxError> { Ok(vec![]) }
    /// # async fn build() -> Result<LockManager, BuildError> {
    /// LockManager::builder(MemoryStore::new())
    ///     .describe(async |keys: Vec<LockKey>| {
    ///         let mut described = HashMap::new();
    ///         for (key, title) in titles(&keys).await? {
    ///             let link = format!("/documents/{}", key.id());
    ///             described.insert(key, Description::new(title).link(link));
    ///         }
    ///         Ok(described)
    ///     })
    ///     .build()
    ///     .await
    /// # }
    /// ```
    pub fn describe<F>(
        mut self,
        describe: impl Fn(Vec<LockKey>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<HashMap<LockKey, Description>, BoxError>> + Send + 'static,
    {
        self.describe = Some(Describe::new(describe));
        self
    }

    /// As [`describe`](Self::describe), but the function also gets the person who will read the titles: one who
    /// was refused a lock, or an administrator. It gets `None` for an unknown person, and for the audit log. Leave
    /// out the titles that the person may not read. Answers are kept for each person.
    pub fn describe_for<F>(
        mut self,
        describe: impl Fn(Option<Actor>, Vec<LockKey>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<HashMap<LockKey, Description>, BoxError>> + Send + 'static,
    {
        self.describe = Some(Describe::personal(describe));
        self
    }

    /// Starts the manager on the current Tokio runtime. That runtime must outlive the manager: use
    /// `main`'s, not a worker's.
    ///
    /// # Errors
    /// [`BuildError`] if a setting is out of its range.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn build(self) -> Result<LockManager, BuildError> {
        let a_duration = "a duration";
        in_range("ttl", a_duration, self.settings.ttl, TTL_RANGE)?;
        in_range("deadline", a_duration, self.settings.deadline, DEADLINE_RANGE)?;
        in_range("drain_delay", a_duration, self.settings.drain_delay, DRAIN_RANGE)?;
        in_range("listener_timeout", a_duration, self.listener_timeout, LISTENER_RANGE)?;
        if let Some(max_hold) = self.settings.max_hold {
            in_range("max_hold", a_duration, max_hold, TTL_RANGE)?;
        }
        if let Some(interval) = self.settings.reaper_interval {
            in_range("reaper_interval", a_duration, interval, REAPER_RANGE)?;
        }
        let Settings { ttl, deadline, reaper_interval, limits, .. } = self.settings;
        for (limit, value) in [
            ("limit `locks_per_session`", limits.locks_per_session),
            ("limit `waiters_per_session`", limits.waiters_per_session),
            ("limit `waiters_per_person`", limits.waiters_per_person),
            ("limit `waiters`", limits.waiters),
        ] {
            in_range(limit, "a number", value, limits::RANGE)?;
        }
        let stop = Stop::default();
        let verbs = Arc::new(Verbs::new(self.store, Runner::on_current_runtime(), deadline));
        let (events, log_limit) = (Arc::<Events>::default(), Arc::<LogLimit>::default());
        let time = Arc::<StoreTime>::default();
        let freezes = Freezes::new(Arc::clone(&verbs), Arc::clone(&events), Arc::clone(&time));
        let freezes = Arc::new(freezes);
        let servers = Arc::new(Servers::new(Arc::clone(&verbs), ttl));
        let collections = Arc::new(Collections::new(
            Arc::clone(&verbs),
            Arc::clone(&freezes),
            Arc::clone(&servers),
            Arc::clone(&log_limit),
            ttl,
        ));
        let beliefs = Arc::new(Beliefs {
            activity: Activity::new(ttl / 3),
            watched: Default::default(),
            losses: Default::default(),
            time,
            queues: Arc::new(Queues::new(
                limits,
                Arc::clone(&verbs),
                Arc::clone(&collections),
                Arc::clone(&freezes),
                stop.token().child_token(),
            )),
        });
        let reads = Arc::new(Reads {
            verbs: Arc::clone(&verbs),
            collections: Arc::clone(&collections),
            beliefs: Arc::clone(&beliefs),
        });
        let granting = Arc::new(Granting {
            verbs: Arc::clone(&verbs),
            collections: Arc::clone(&collections),
            freezes: Arc::clone(&freezes),
            beliefs: Arc::clone(&beliefs),
            reads: Arc::clone(&reads),
            ttl,
            max_hold: self.settings.max_hold,
            max_locks: limits.locks_per_session,
        });
        let causes = Arc::default();
        let saves = Saves {
            verbs: Arc::clone(&verbs),
            collections: Arc::clone(&collections),
            beliefs: Arc::clone(&beliefs),
            causes: Arc::clone(&causes),
        };
        let served = Arc::default();
        let sessions = Arc::new(Sessions {
            verbs: Arc::clone(&verbs),
            collections: Arc::clone(&collections),
            beliefs: Arc::clone(&beliefs),
            reads: Arc::clone(&reads),
            renewals: Default::default(),
            paces: Default::default(),
            served: Arc::clone(&served),
            stop: stop.token(),
            ttl,
            max_hold: self.settings.max_hold,
        });
        let core = Arc::new(Core {
            verbs,
            collections,
            freezes,
            beliefs,
            reads,
            granting,
            saves,
            sessions,
            settings: self.settings,
            watches: Default::default(),
            events,
            causes,
            event_streams: Streams::new(limits),
            long_requests: Default::default(),
            asks: Default::default(),
            served,
            log_limit,
            descriptions: self.describe.map(Descriptions::new),
            stop_begins: stop.token().child_token(),
            stop,
            servers,
            sweeps: Default::default(),
            panics: Default::default(),
        });
        let weak = Arc::downgrade(&core);
        core.collections.follow_with(move || {
            if let Some(core) = weak.upgrade() {
                core.follow_all();
            }
        });
        core.supervise("freezes", |_| {}, freezes::follow);
        core.supervise("collections", |_| {}, collections::follow);
        if let Some(interval) = reaper_interval {
            let run = move |core| reaper::run(core, interval);
            core.sweeps.by(core.supervise("reaper", |_| {}, run));
            core.supervise("note of this server", |_| {}, fleet::follow);
        }
        let (Listeners { ended, takeovers }, limit) = (self.listeners, self.listener_timeout);
        for (task, listener) in [("listener", ended), ("listener for taken locks", takeovers)] {
            let Some(listener) = listener else { continue };
            let run = move |core| listener::run(core, listener.clone(), limit);
            core.supervise(task, |_| {}, run);
        }
        Ok(LockManager { core })
    }
}

fn in_range<T: PartialOrd + fmt::Debug>(
    setting: &'static str,
    what: &'static str,
    value: T,
    range: RangeInclusive<T>,
) -> Result<(), BuildError> {
    if range.contains(&value) {
        return Ok(());
    }
    let range = format!("{what} from {:?} to {:?}", range.start(), range.end());
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
            let usual = Limits::default();
            let cases = [
                ("locks_per_session", Limits { locks_per_session: value, ..usual }),
                ("waiters", Limits { waiters: value, ..usual }),
                ("waiters_per_session", Limits { waiters_per_session: value, ..usual }),
                ("waiters_per_person", Limits { waiters_per_person: value, ..usual }),
            ];
            for (limit, limits) in cases {
                let refused = settings().limits(limits).build().await.unwrap_err().to_string();
                assert!(refused.contains(&format!("the limit `{limit}` of")), "{refused}");
                assert!(refused.contains("write a number from 1 to"), "{refused}");
            }
        }
        settings().build().await.unwrap();
    }
}
