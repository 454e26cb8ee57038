//! Web sessions that are known to end.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use actix_session::storage::{
    LoadError, SaveError, SessionKey, SessionStore, UpdateError, generate_session_key,
};
use actix_web::cookie::time::Duration as Ttl;
use uuid::Uuid;

pub use self::builder::MongoSessionStoreBuilder;
use crate::{
    error::{LockError, StoreError},
    lock::Aid,
    manager::LockManager,
    store::{
        StoredSession,
        mongo::sessions::{Change, Sessions, State, Updated, text_of},
    },
    web::{memory::memory, request::AID},
};

mod builder;
mod sweep;

/// How long after the deletion of a session another one may come with its locks, at least.
const GRACE: Duration = Duration::from_secs(10);

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
///   from the beginning of the session, and a `renew` does not change that.
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
}

impl MongoSessionStore {
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

    /// Ends all sessions of a user, as after a change of the password. Says how many there were that
    /// could be used.
    ///
    /// A login that comes at the same moment may or may not be among them.
    ///
    /// # Errors
    /// As [`revoke`](Self::revoke): some of the sessions may have been revoked.
    pub async fn revoke_all_of(&self, user: &str) -> Result<usize, LockError> {
        let of = user.to_owned();
        let revoked = self.run("revoking the sessions of a user", move |sessions| {
            let user = of.clone();
            async move {
                // In this order, so that none is missed that is just given another aid or key.
                let aids = sessions.aids_of(&user).await?;
                Ok((sessions.revoke_user(&user).await?, aids))
            }
        });
        let (live, aids) = revoked.await?;
        for aid in &aids {
            self.revoke(aid).await?;
        }
        Ok(live)
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

    /// What the current request has done to the session with this key, which it has loaded if that
    /// is known.
    fn change(&self, key: Option<&str>, state: State) -> Arc<Change> {
        let base = memory(|it| {
            let (loaded, state) = it.loaded.as_ref()?;
            (loaded == key?).then(|| (state.clone(), it.aid_is_spare))
        });
        let (base, aid_is_spare) = base.flatten().unzip();
        let aid_is_spare = aid_is_spare.unwrap_or_default();
        Arc::new(Change::between(base, state, AID, &self.inner.user_key, aid_is_spare))
    }

    async fn create(&self, state: State, ttl: &Ttl) -> Result<SessionKey, anyhow::Error> {
        let key = generate_session_key();
        if memory(|it| it.has_ended) == Some(true) {
            // This would be the session under a new key, had it not ended: nothing has this one.
            return Ok(key);
        }
        // A new key for the same session does not make it younger.
        let old_key = memory(|it| it.loaded.as_ref().map(|(key, _)| key.clone())).flatten();
        let is_renewed = !self.change(old_key.as_deref(), state.clone()).replaces();
        let left = memory(|it| it.absolute_left).flatten().filter(|_| is_renewed);

        let (change, ttl) = (self.change(None, state), std_duration(ttl));
        let name: Arc<str> = key.as_ref().into();
        let saved = self.run("saving a web session", move |sessions| {
            let (name, change) = (Arc::clone(&name), Arc::clone(&change));
            async move { sessions.save(&name, &change, ttl, left).await }
        });
        saved.await.map_err(failed)?;
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
        let state = state.await.map_err(|e| LoadError::Other(failed(e)))?;
        memory(|it| it.loaded = state.clone().map(|state| (key.as_ref().to_owned(), state)));
        Ok(state)
    }

    async fn save(&self, state: State, ttl: &Ttl) -> Result<SessionKey, SaveError> {
        self.create(state, ttl).await.map_err(SaveError::Other)
    }

    async fn update(
        &self,
        key: SessionKey,
        state: State,
        ttl: &Ttl,
    ) -> Result<SessionKey, UpdateError> {
        let change = self.change(Some(key.as_ref()), state.clone());
        let (name, duration): (Arc<str>, _) = (key.as_ref().into(), std_duration(ttl));
        let updated = self.run("updating a web session", move |sessions| {
            let (name, change) = (Arc::clone(&name), Arc::clone(&change));
            async move { sessions.update(&name, &change, duration).await }
        });
        match updated.await.map_err(|e| UpdateError::Other(failed(e)))? {
            Updated::Written => Ok(key),
            // An ended session is over, also for a request that was under way: this key lets nobody
            // in, and the wrap does not send it.
            Updated::Ended => {
                memory(|it| it.has_ended = true);
                Ok(key)
            }
            // As all other stores do.
            Updated::Unknown => self.create(state, ttl).await.map_err(UpdateError::Other),
        }
    }

    async fn update_ttl(&self, key: &SessionKey, ttl: &Ttl) -> Result<(), anyhow::Error> {
        let (name, ttl): (Arc<str>, _) = (key.as_ref().into(), std_duration(ttl));
        let extended = self.run("extending a web session", move |sessions| {
            let name = Arc::clone(&name);
            async move { sessions.extend(&name, ttl).await }
        });
        extended.await.map_err(failed)
    }

    async fn delete(&self, key: &SessionKey) -> Result<(), anyhow::Error> {
        let name: Arc<str> = key.as_ref().into();
        let grace = GRACE.max(self.inner.locks.deadline() * 2);
        let call = Uuid::new_v4();
        // Not one that another request has cleared since.
        let aid = memory(|it| it.loaded.as_ref()?.1.get(AID).map(|json| text_of(json))).flatten();
        let deleted = self.run("deleting a web session", move |sessions| {
            let (name, aid) = (Arc::clone(&name), aid.clone());
            async move { sessions.delete(&name, aid.as_deref(), grace, call).await }
        });
        match deleted.await.map_err(failed)? {
            None => memory(|it| it.has_ended = true),
            Some(left) => memory(|it| it.absolute_left = left),
        };
        Ok(())
    }
}

/// Keeps the error for the wrap, and returns what actix-session is told.
fn failed(error: StoreError) -> anyhow::Error {
    let told = anyhow::Error::msg(error.to_string());
    memory(|it| it.failed = Some(error));
    told
}

fn std_duration(ttl: &Ttl) -> Duration {
    // A negative one is over already.
    Duration::try_from(*ttl).unwrap_or(Duration::ZERO)
}

impl fmt::Debug for MongoSessionStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MongoSessionStore")
            .field("sessions", &self.inner.sessions)
            .finish_non_exhaustive()
    }
}
