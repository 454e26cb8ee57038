//! Web sessions whose end is noticed.

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

/// The minimum time that another session has, after the deletion of a session, to continue with its
/// locks.
const GRACE: Duration = Duration::from_secs(10);

/// Web sessions in MongoDB, for [`SessionMiddleware`](actix_session::SessionMiddleware). Feature
/// `mongo-session`.
///
/// This store can do what cookies and Redis cannot: when a session expires, is deleted or is revoked
/// here, its locks are released at once, and the [listener](crate::LockManagerBuilder::on_session_end) is
/// called, even if no request arrives.
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
/// - *Keys* are 64 random characters. The database contains only their SHA-256, so a person who reads the
///   database cannot use them. States are stored unencrypted.
/// - *Time-outs* follow the database server's clock. The sliding time-out is that of the session
///   middleware (`PersistentSession` or `BrowserSession`, one day unless set). It is extended by requests
///   that change the session, or by all requests with `TtlExtensionPolicy::OnEveryRequest`. The absolute
///   time-out counts from the beginning of the session, and a `renew` does not change it.
/// - *Two requests at the same moment* do not undo each other's changes: only the entries that a request
///   has set or removed are written, in one update. This needs the wrap
///   [`locks.session(…)`](LockManager::session); without it the later request overwrites the earlier one,
///   as in all other stores. A `clear` removes everything. If one request renews the session, the changes
///   of another request at the same moment are lost with the old key.
/// - *An ended session* is not revived by a request that was under way when it ended: the changes of that
///   request are dropped.
///
/// Clones are handles to one store. Build it in `main`: like the manager, it runs on the runtime on which
/// it was built.
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
    /// The live sessions of a user, for a page that shows people where they are logged in.
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

    /// Ends a session: it is no longer accepted, its locks are released when this method returns, and the
    /// listener is called in the background.
    ///
    /// # Errors
    /// [`LockError::Store`]. An unfinished revocation is completed by a repeated call, or by the next
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

    /// Ends all sessions of a user, for example after a change of the password. Returns the number of
    /// sessions that were usable.
    ///
    /// A login at the same moment may or may not be included.
    ///
    /// # Errors
    /// As [`revoke`](Self::revoke): some of the sessions may have been revoked.
    pub async fn revoke_all_of(&self, user: &str) -> Result<usize, LockError> {
        let of = user.to_owned();
        let revoked = self.run("revoking the sessions of a user", move |sessions| {
            let user = of.clone();
            async move {
                // In this order, so that a session is not missed that is just being given another aid or
                // key.
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

    /// The changes of the current request to the session with this key, compared with the loaded state if
    /// that is known.
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
            // This would be the renewed session, but the session has ended. No record has this key.
            return Ok(key);
        }
        // A new key for the same session does not make the session younger.
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
            // An ended session is over, also for a request that was under way: this key is not valid, and
            // the wrap does not send it.
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
        // Uses the aid from the load: another request may have cleared it since.
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

/// Keeps the error for the wrap, and returns the error for actix-session.
fn failed(error: StoreError) -> anyhow::Error {
    let told = anyhow::Error::msg(error.to_string());
    memory(|it| it.failed = Some(error));
    told
}

fn std_duration(ttl: &Ttl) -> Duration {
    // A negative duration has already passed.
    Duration::try_from(*ttl).unwrap_or(Duration::ZERO)
}

impl fmt::Debug for MongoSessionStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MongoSessionStore")
            .field("sessions", &self.inner.sessions)
            .finish_non_exhaustive()
    }
}
