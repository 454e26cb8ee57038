//! The builder of a manager.

use std::{collections::HashMap, fmt, future::Future, sync::Arc, time::Duration};

use crate::{
    actor::Actor,
    description::Description,
    ended::SessionEnded,
    error::BoxError,
    key::LockKey,
    lock::{Holder, Lock},
    manager::{
        Core, LockManager,
        background::listener::{Listener, Listeners},
        describe::Describe,
        dyn_store::DynStore,
        limits::Limits,
        settings::{BuildError, Settings},
    },
    takeover::Takeover,
};

/// Settings of a [`LockManager`], each with a safe default.
#[must_use = "a builder does nothing until `build` is called"]
pub struct LockManagerBuilder {
    store: Arc<dyn DynStore>,
    settings: Settings,
    listeners: Listeners,
    describe: Option<Describe>,
}

impl LockManagerBuilder {
    pub(super) fn new(store: Arc<dyn DynStore>) -> Self {
        Self {
            store,
            settings: Settings::default(),
            listeners: Listeners::default(),
            describe: None,
        }
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
        self.settings.listener_timeout = timeout;
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
        self.settings.check()?;
        let core = Core::new(self.store, self.settings, self.describe);
        core.start(self.listeners);
        Ok(LockManager { core })
    }
}

impl fmt::Debug for LockManagerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockManagerBuilder")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
