//! Web sessions that are known to end.

use std::{
    cell::RefCell,
    fmt,
    future::Future,
    sync::{Arc, Weak},
    time::Duration,
};

use actix_session::storage::{
    LoadError, SaveError, SessionKey, SessionStore, UpdateError, generate_session_key,
};
use actix_web::cookie::time::Duration as Ttl;
use tokio::time::sleep;
use uuid::Uuid;

use super::request::AID;
use crate::{
    Aid, LockError, LockManager, MongoStore, StoreError,
    manager::rhythm::Rhythm,
    store::{
        StoredSession,
        mongo::sessions::{Change, Fact, Sessions, State, Updated},
    },
};

const COLLECTION: &str = "doclock.session";
/// Where actix-identity keeps it.
const USER: &str = "actix_identity.user_id";

/// How long after the deletion of a session another one may come with its locks, at least.
const GRACE: Duration = Duration::from_secs(10);
/// How many ended sessions are dealt with at once.
const AT_ONCE: i64 = 100;

tokio::task_local! {
    /// The session that the current request has loaded, as it was.
    static LOADED: RefCell<Option<(String, State)>>;
}

/// Lets the session store see what a request has loaded when it saves: only the difference is
/// written then.
pub(super) fn with_memory<F: Future>(request: F) -> impl Future<Output = F::Output> {
    LOADED.scope(RefCell::default(), request)
}

/// Web sessions in MongoDB, for [`SessionMiddleware`](actix_session::SessionMiddleware). Feature
/// `mongo-session`.
///
/// What cookies and Redis cannot do: a session that expires, is deleted or revoked here takes its
/// locks with it at once, and the [listener](crate::LockManagerBuilder::on_session_end) is called,
/// although no request comes.
///
/// ```no_run
/// # use std::time::Duration;
/// # use actix_doclock::{LockManager, MongoSessionStore, MongoStore};
/// # use actix_session::SessionMiddleware;
/// # use actix_web::{App, cookie::Key};
/// # async fn main_(key: Key) -> Result<(), Box<dyn std::error::Error>> {
/// let store = MongoStore::connect("mongodb://localhost:27017/?replicaSet=rs0", "shop").await?;
/// let locks = LockManager::builder(store.clone()).build().await?;
/// let sessions = MongoSessionStore::builder(&store, &locks)
///     .user_key("name")
///     .absolute_timeout(Duration::from_secs(12 * 60 * 60))
///     .build()
///     .await?;
/// let app = App::new().wrap(locks.session(SessionMiddleware::new(sessions.clone(), key)));
/// // The person has a new password:
/// sessions.revoke_all_of("alice").await?;
/// # Ok(()) }
/// ```
///
/// - *Keys* are 64 random characters. The database has their SHA-256 only: who reads it cannot use
///   what they find. States are stored as they are.
/// - *Time-outs* go by the database server's clock. The sliding one is that of the session middleware
///   (`PersistentSession` or `BrowserSession`, one day unless set). It is extended by requests that
///   change the session, or by all with `TtlExtensionPolicy::OnEveryRequest`. The absolute one counts
///   from when the session got its key: from its beginning, or the last `renew`.
/// - *Two requests at the same moment* do not undo each other's changes: only the entries that a
///   request has set or removed are written, in one update. That needs the wrap
///   [`locks.session(…)`](LockManager::session); without it the later one overwrites, as in all
///   other stores. A `clear` removes everything. What a request writes while another one renews the
///   session goes with the old key.
/// - *An ended session* is not revived by a request that was under way when it ended: what that
///   request wanted to save is dropped.
///
/// Clones are handles to one store. Build it in `main`: like the manager, it runs on the runtime on
/// which it was built.
#[derive(Clone)]
pub struct MongoSessionStore {
    inner: Arc<Inner>,
}

struct Inner {
    sessions: Sessions,
    locks: LockManager,
    user_key: String,
    worker: Uuid,
}

/// Settings of a [`MongoSessionStore`].
#[must_use = "a builder does nothing until `build` is called"]
#[derive(Debug)]
pub struct MongoSessionStoreBuilder {
    store: MongoStore,
    locks: LockManager,
    collection: String,
    user_key: String,
    absolute_timeout: Option<Duration>,
}

impl MongoSessionStoreBuilder {
    /// The collection that the sessions are kept in. Default `doclock.session`.
    pub fn collection(mut self, name: impl Into<String>) -> Self {
        self.collection = name.into();
        self
    }

    /// The entry of the session's state that says whose it is, for
    /// [`revoke_all_of`](MongoSessionStore::revoke_all_of). Default: that of actix-identity.
    pub fn user_key(mut self, key: impl Into<String>) -> Self {
        self.user_key = key.into();
        self
    }

    /// How long a session may live at most, however active it is. Default: no limit.
    pub fn absolute_timeout(mut self, timeout: Duration) -> Self {
        self.absolute_timeout = Some(timeout);
        self
    }

    /// Makes the collection ready, and begins to watch for sessions that end, as often as the
    /// manager's [reaper](crate::LockManagerBuilder::reaper_interval); not at all if it has none.
    ///
    /// # Errors
    /// If the database is not reached, or its user lacks a privilege; the message names it.
    pub async fn build(self) -> Result<MongoSessionStore, StoreError> {
        let (collection, absolute) = (self.collection, self.absolute_timeout);
        let store = self.store;
        let sessions = self.locks.in_own_task("preparing web sessions", move || {
            let (store, collection) = (store.clone(), collection.clone());
            async move { Sessions::prepare(&store, &collection, absolute).await }
        });
        let inner = Arc::new(Inner {
            sessions: sessions.await?,
            locks: self.locks,
            user_key: self.user_key,
            worker: Uuid::new_v4(),
        });
        if let Some(interval) = inner.locks.reaper_interval() {
            tokio::spawn(watch(Arc::downgrade(&inner), interval));
        }
        Ok(MongoSessionStore { inner })
    }
}

impl MongoSessionStore {
    /// In the database of `store`, for the locks of `locks`.
    pub fn builder(store: &MongoStore, locks: &LockManager) -> MongoSessionStoreBuilder {
        MongoSessionStoreBuilder {
            store: store.clone(),
            locks: locks.clone(),
            collection: COLLECTION.to_owned(),
            user_key: USER.to_owned(),
            absolute_timeout: None,
        }
    }

    /// The live sessions of a user: for a page on which people see where they are logged in.
    ///
    /// # Errors
    /// [`StoreError`], within the manager's deadline.
    pub async fn list_of(&self, user: &str) -> Result<Vec<StoredSession>, StoreError> {
        let user = user.to_owned();
        self.run("listing web sessions", move |sessions| {
            let user = user.clone();
            async move { sessions.list(&user).await }
        })
        .await
    }

    /// Ends a session: no request gets in with it any more, its locks are gone on return, and the
    /// listener is called in the background.
    ///
    /// # Errors
    /// [`LockError::Store`]. What has been begun then is finished by a repeated call, or by the next
    /// sweep of any server.
    ///
    /// # Cancel safety
    /// If the future is dropped, the session may or may not be revoked.
    pub async fn revoke(&self, aid: &Aid) -> Result<(), LockError> {
        let of = aid.clone();
        self.run("revoking a web session", move |sessions| {
            let aid = of.clone();
            async move { sessions.revoke(&aid).await }
        })
        .await?;
        self.inner.locks.revoke_session(aid).await?;
        Ok(())
    }

    /// Ends all sessions of a user, as after a change of the password. Says how many there were.
    ///
    /// A login that comes at the same moment may or may not be among them.
    ///
    /// # Errors
    /// As [`revoke`](Self::revoke): some of the sessions may have been revoked.
    pub async fn revoke_all_of(&self, user: &str) -> Result<usize, LockError> {
        let of = user.to_owned();
        let aids = self.run("looking for the sessions of a user", move |sessions| {
            let user = of.clone();
            async move {
                sessions.revoke_without_aid(&user).await?;
                sessions.aids_of(&user).await
            }
        });
        let aids = aids.await?;
        for aid in &aids {
            self.revoke(aid).await?;
        }
        Ok(aids.len())
    }

    /// Deals with the sessions that have ended: releases their locks and has the listener called.
    /// This happens all the time in the background; call it in tests, or where the manager has no
    /// reaper. Says how many sessions there were.
    ///
    /// # Errors
    /// [`LockError::Store`].
    pub async fn sweep(&self) -> Result<usize, LockError> {
        let mut swept = 0;
        loop {
            match self.sweep_some().await? {
                0 => return Ok(swept),
                some => swept += some,
            }
        }
    }

    async fn sweep_some(&self) -> Result<usize, LockError> {
        let worker = self.inner.worker;
        let due = self
            .run("looking for web sessions that have ended", move |sessions| async move {
                sessions.take_due(worker, AT_ONCE).await
            });
        let due = due.await?;
        for session in &due {
            let Some(aid) = &session.aid else { continue };
            let of = aid.clone();
            let goes_on = self.run("looking for a session with another key", move |sessions| {
                let aid = of.clone();
                async move { sessions.has_live(&aid).await }
            });
            if !goes_on.await? {
                self.inner.locks.end_session(aid, session.reason).await?;
            }
        }
        let swept = due.len();
        if swept > 0 {
            let due = Arc::new(due);
            self.run("finishing the ends of web sessions", move |sessions| {
                let due = Arc::clone(&due);
                async move { sessions.finish(&due).await }
            })
            .await?;
        }
        Ok(swept)
    }

    /// Runs an operation on the sessions as the manager runs its own.
    async fn run<T, F>(
        &self,
        what: &'static str,
        attempt: impl Fn(Sessions) -> F + Send + 'static,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let sessions = self.inner.sessions.clone();
        self.inner.locks.in_own_task(what, move || attempt(sessions.clone())).await
    }

    /// What the current request has changed, if it is known what it has loaded.
    fn change(&self, key: Option<&SessionKey>, state: State) -> Change {
        let base = LOADED.try_with(|loaded| match (&*loaded.borrow(), key) {
            (Some((loaded, state)), Some(key)) if loaded == key.as_ref() => Some(state.clone()),
            _ => None,
        });
        Change::between(base.ok().flatten(), state, &self.inner.user_key)
    }

    async fn create(&self, state: State, ttl: &Ttl) -> Result<SessionKey, StoreError> {
        let key = generate_session_key();
        let (change, ttl) = (Arc::new(self.change(None, state)), std_duration(ttl));
        let name: Arc<str> = key.as_ref().into();
        self.run("saving a web session", move |sessions| {
            let (name, change) = (Arc::clone(&name), Arc::clone(&change));
            async move { sessions.save(&name, &change, ttl).await }
        })
        .await?;
        Ok(key)
    }
}

impl SessionStore for MongoSessionStore {
    async fn load(&self, key: &SessionKey) -> Result<Option<State>, LoadError> {
        let name: Arc<str> = key.as_ref().into();
        let state = self.run("loading a web session", move |sessions| {
            let name = Arc::clone(&name);
            async move { sessions.load(&name).await }
        });
        let state = state.await.map_err(|e| LoadError::Other(e.into()))?;
        // Outside of the wrap there is nowhere to keep it.
        let _ = LOADED.try_with(|loaded| {
            loaded.replace(state.clone().map(|state| (key.as_ref().to_owned(), state)))
        });
        Ok(state)
    }

    async fn save(&self, state: State, ttl: &Ttl) -> Result<SessionKey, SaveError> {
        self.create(state, ttl).await.map_err(|e| SaveError::Other(e.into()))
    }

    async fn update(
        &self,
        key: SessionKey,
        state: State,
        ttl: &Ttl,
    ) -> Result<SessionKey, UpdateError> {
        let failed = |e: StoreError| UpdateError::Other(e.into());
        let change = Arc::new(self.change(Some(&key), state.clone()));
        let (name, duration): (Arc<str>, _) = (key.as_ref().into(), std_duration(ttl));
        let updated = self.run("updating a web session", move |sessions| {
            let (name, change) = (Arc::clone(&name), Arc::clone(&change));
            async move { sessions.update(&name, &change, duration).await }
        });
        match updated.await.map_err(failed)? {
            // An ended session is over, also for a request that was under way: its key stays with
            // the client and lets nobody in.
            Updated::Updated | Updated::Ended => Ok(key),
            // As all other stores do.
            Updated::Unknown => self.create(state, ttl).await.map_err(failed),
        }
    }

    async fn update_ttl(&self, key: &SessionKey, ttl: &Ttl) -> Result<(), anyhow::Error> {
        let (name, ttl): (Arc<str>, _) = (key.as_ref().into(), std_duration(ttl));
        let extended = self.run("extending a web session", move |sessions| {
            let name = Arc::clone(&name);
            async move { sessions.extend(&name, ttl).await }
        });
        Ok(extended.await?)
    }

    async fn delete(&self, key: &SessionKey) -> Result<(), anyhow::Error> {
        let name: Arc<str> = key.as_ref().into();
        let grace = GRACE.max(self.inner.locks.deadline() * 2);
        let deleted = self.run("deleting a web session", move |sessions| {
            let name = Arc::clone(&name);
            async move { sessions.delete(&name, grace).await }
        });
        Ok(deleted.await?)
    }
}

impl Change {
    /// From what was loaded to what is to be saved. Without the former everything is replaced; so it
    /// is by a request that has cleared the session, whatever others have added in the meantime.
    fn between(base: Option<State>, state: State, user_key: &str) -> Self {
        let fact = |name: &str, set: &State, removed: bool| match set.get(name) {
            Some(json) => Fact::Is(text_of(json)),
            None if removed => Fact::Gone,
            None => Fact::Unchanged,
        };
        let is_kept = |base: &State| base.keys().any(|name| state.contains_key(name));
        let kept = base.filter(|base| base.is_empty() || is_kept(base));
        let replaces = kept.is_none();
        let base = kept.unwrap_or_default();
        let removed: Vec<_> =
            base.keys().filter(|name| !state.contains_key(*name)).cloned().collect();
        let is_new = |name: &String, value: &String| base.get(name) != Some(value);
        let set: State = state.into_iter().filter(|(name, value)| is_new(name, value)).collect();
        let is_removed = |name: &str| replaces || removed.iter().any(|removed| removed == name);
        Self {
            replaces,
            aid: fact(AID, &set, is_removed(AID)),
            user: fact(user_key, &set, is_removed(user_key)),
            set,
            removed,
        }
    }
}

/// A JSON string without its quotes; anything else as it is.
fn text_of(json: &str) -> String {
    serde_json::from_str(json).unwrap_or_else(|_| json.to_owned())
}

fn std_duration(ttl: &Ttl) -> Duration {
    // A negative one is over already.
    Duration::try_from(*ttl).unwrap_or(Duration::ZERO)
}

/// Sweeps until the store is gone or the manager is shut down.
async fn watch(store: Weak<Inner>, interval: Duration) {
    let mut rhythm = Rhythm::new("looking for web sessions that have ended", interval);
    while let Some(inner) = store.upgrade() {
        let store = MongoSessionStore { inner };
        let stop = store.inner.locks.stop();
        let pause = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            swept = store.sweep_some() => match swept {
                Ok(0) => rhythm.after_success(Some(Duration::ZERO)),
                Ok(_) => Duration::ZERO,
                Err(e) => rhythm.after_failure(&e),
            },
        };
        drop(store);
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep(pause) => {}
        }
    }
}

impl fmt::Debug for MongoSessionStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MongoSessionStore")
            .field("sessions", &self.inner.sessions)
            .finish_non_exhaustive()
    }
}
