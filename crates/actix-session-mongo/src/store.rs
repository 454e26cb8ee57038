//! The session store.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use actix_session::storage::{
    LoadError, SaveError, SessionKey, SessionStore, UpdateError, generate_session_key,
};
use actix_web::cookie::time::Duration as Ttl;
use futures_util::future::BoxFuture;
use tokio::{
    runtime::Handle,
    time::{sleep, timeout},
};
use uuid::Uuid;

use crate::{
    change::{Change, Names, State},
    end::{EndReason, Hook, SessionEnd},
    error::{Error, is_transient},
    records::{LEASE, Records, StoredSession, Updated},
    wrap::request,
};

/// After a session was deleted, another session has at least this time to continue with the same id.
const GRACE: Duration = Duration::from_secs(10);
/// The first pause before a command is sent again; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Web sessions in MongoDB, for [`SessionMiddleware`](actix_session::SessionMiddleware).
///
/// - *Keys* are 64 random characters. The database contains only their SHA-256, so a person who reads the
///   database cannot use them. States are stored unencrypted.
/// - *Time-outs* follow the database server's clock. The sliding time-out is set in the session
///   middleware (`PersistentSession` or `BrowserSession`, one day unless set). It is extended by requests
///   that change the session; with `TtlExtensionPolicy::OnEveryRequest`, by all requests. The absolute
///   time-out counts from the beginning of the session, and a `renew` does not change it.
/// - *Two requests at the same moment* do not undo each other's changes: only the entries that a request
///   has set or removed are written, in one update. A `clear` removes everything, also the entries of other requests,
///   if the session has an [id](crate::MongoSessionStoreBuilder::id_key) or is empty then. If one request renews the
///   session, the changes of another request at the same moment are lost with the old key.
/// - *An ended session* is not revived by a request that was under way when it ended: the changes of that
///   request are dropped.
///
/// The last two points, and the absolute time-out of a renewed session, need the [wrap](crate::SessionWrap).
///
/// Clones are handles to one store. Build it in `main`: it runs on the runtime on which it was built.
#[derive(Debug, Clone)]
pub struct MongoSessionStore {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) records: Records,
    pub(crate) names: Names,
    pub(crate) hook: Option<Hook>,
    pub(crate) deadline: Duration,
    pub(crate) runtime: Handle,
}

impl MongoSessionStore {
    /// The live sessions of a user that have an [id](crate::MongoSessionStoreBuilder::id_key), for a page that shows
    /// people where they are logged in.
    ///
    /// # Errors
    /// If the database does not answer within the deadline.
    pub async fn list_of(&self, user: &str) -> Result<Vec<StoredSession>, Error> {
        let list = self.run("listing web sessions", user.to_owned(), |records, user| {
            Box::pin(records.list(user))
        });
        list.await
    }

    /// Ends the session with this [id](crate::MongoSessionStoreBuilder::id_key): it is no longer accepted, and the
    /// [hook](crate::MongoSessionStoreBuilder::on_end) has answered when this method returns.
    ///
    /// # Errors
    /// If the database does not answer within the deadline, or if the hook fails. An unfinished revocation is
    /// completed by a repeated call, or by the next sweep of any server.
    ///
    /// # Cancel safety
    /// If the future is dropped, the session may or may not be revoked.
    pub async fn revoke(&self, id: &str) -> Result<(), Error> {
        let revoked = self.run("revoking a web session", id.to_owned(), |records, id| {
            Box::pin(records.revoke(id))
        });
        revoked.await?;
        self.tell(SessionEnd { id: id.to_owned(), reason: EndReason::Revoked }).await
    }

    /// Ends all sessions of a user, for example after a change of the password. Returns the number of
    /// sessions that were usable.
    ///
    /// A login at the same moment may or may not be included.
    ///
    /// # Errors
    /// As [`revoke`](Self::revoke): some of the sessions may have been revoked.
    pub async fn revoke_all_of(&self, user: &str) -> Result<usize, Error> {
        let doing = "revoking the sessions of a user";
        let revoked =
            self.run(doing, user.to_owned(), |records, user| Box::pin(records.revoke_user(user)));
        let (live, ids) = revoked.await?;
        for id in &ids {
            self.revoke(id).await?;
        }
        Ok(usize::try_from(live).unwrap_or(usize::MAX))
    }

    /// Calls the hook. A hook that does not answer is called again later, by the next sweep.
    pub(crate) async fn tell(&self, end: SessionEnd) -> Result<(), Error> {
        let Some(Hook(hook)) = &self.inner.hook else { return Ok(()) };
        const DOING: &str = "telling of the end of a web session";
        let told = timeout(LEASE, hook(end)).await.map_err(|_| Error::no_answer(DOING))?;
        told.map_err(|e| Error::new(DOING, e))
    }

    /// Runs an operation to its end in a task of its own, because a command of the driver must not be dropped
    /// half-way. Repeats it while its outcome is unknown and time is left. The caller waits no longer than the
    /// deadline. An operation without an answer is given up after the grace time: its connection may be dead.
    pub(crate) async fn run<A, T>(
        &self,
        doing: &str,
        args: A,
        attempt: for<'a> fn(&'a Records, &'a A) -> BoxFuture<'a, mongodb::error::Result<T>>,
    ) -> Result<T, Error>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let (records, deadline) = (self.inner.records.clone(), self.inner.deadline);
        let until = Instant::now() + deadline;
        let operation = async move {
            let mut pause = FIRST_PAUSE;
            loop {
                match attempt(&records, &args).await {
                    Err(e) if is_transient(&e) && Instant::now() + pause < until => {
                        sleep(pause).await;
                    }
                    outcome => return outcome,
                }
                pause = LONGEST_PAUSE.min(pause * 2);
            }
        };
        let task = self.inner.runtime.spawn(timeout(self.grace(), operation));
        match timeout(deadline, task).await {
            Ok(Ok(Ok(outcome))) => outcome.map_err(|e| Error::of_driver(doing, e)),
            // The runtime has ended, or the task has panicked.
            _ => Err(Error::no_answer(doing)),
        }
    }

    fn grace(&self) -> Duration {
        GRACE.max(self.inner.deadline * 2)
    }

    async fn create(&self, state: State, ttl: &Ttl) -> Result<SessionKey, anyhow::Error> {
        let key = generate_session_key();
        let loaded = request(|it| it.loaded.clone()).flatten().map(|(_, state)| state);
        if request(|it| it.has_ended) == Some(true) {
            let is_somebodys = |state: &State| self.inner.names.user_in(state).is_some();
            // Only a visitor logs in: a session with a user, whichever, must not live on after its end.
            let is_login =
                is_somebodys(&state) && loaded.as_ref().is_some_and(|it| !is_somebodys(it));
            if !is_login {
                // This would be the renewed session, but the session has ended. No record has this key.
                return Ok(key);
            }
            // Whoever logs in has a session, whatever has become of the one before: the login may have been sent twice.
            request(|it| it.has_ended = false);
        }
        // A new key for the same session does not make the session younger.
        let is_renewed = !Change::between(loaded, state.clone(), &self.inner.names).replaces;
        let left = request(|it| it.absolute_left).flatten().filter(|_| is_renewed);
        let change = Change::between(None, state, &self.inner.names);
        let args = (key.as_ref().to_owned(), change, std_duration(ttl), left);
        let saved = self.run("saving a web session", args, |records, (key, change, ttl, left)| {
            Box::pin(records.save(key, change, *ttl, *left))
        });
        saved.await.map_err(failed)?;
        Ok(key)
    }
}

impl SessionStore for MongoSessionStore {
    async fn load(&self, key: &SessionKey) -> Result<Option<State>, LoadError> {
        let key = key.as_ref().to_owned();
        let state = self
            .run("loading a web session", key.clone(), |records, key| Box::pin(records.load(key)));
        let loaded = state.await.map_err(|e| LoadError::Other(failed(e)))?;
        let (state, left) = loaded.unzip();
        request(|it| {
            it.loaded = state.clone().map(|state| (key, state));
            it.left = left.flatten();
        });
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
        let name = key.as_ref().to_owned();
        // Compared with the loaded state, if that is known.
        let loaded = request(|it| it.loaded.clone()).flatten();
        let base = loaded.filter(|(key, _)| *key == name).map(|(_, state)| state);
        let change = Change::between(base, state.clone(), &self.inner.names);
        let args = (name, change, std_duration(ttl), self.grace());
        let doing = "updating a web session";
        let updated = self.run(doing, args, |records, (key, change, ttl, grace)| {
            Box::pin(records.update(key, change, *ttl, *grace))
        });
        match updated.await.map_err(|e| UpdateError::Other(failed(e)))? {
            Updated::Written => Ok(key),
            // An ended session is over, also for a request that was under way: this key is not valid, and
            // the wrap does not send it.
            Updated::Ended => {
                request(|it| it.has_ended = true);
                Ok(key)
            }
            // As all other stores do.
            Updated::Unknown => self.create(state, ttl).await.map_err(UpdateError::Other),
        }
    }

    async fn update_ttl(&self, key: &SessionKey, ttl: &Ttl) -> Result<(), anyhow::Error> {
        let args = (key.as_ref().to_owned(), std_duration(ttl));
        let extended = self.run("extending a web session", args, |records, (key, ttl)| {
            Box::pin(records.extend(key, *ttl))
        });
        if !extended.await.map_err(failed)? {
            request(|it| it.has_ended = true);
        }
        Ok(())
    }

    async fn delete(&self, key: &SessionKey) -> Result<(), anyhow::Error> {
        // As it was loaded: another request may have changed it since.
        let loaded = request(|it| it.loaded.clone()).flatten();
        let whose = loaded.and_then(|(_, state)| self.inner.names.whose(&state));
        let args = (key.as_ref().to_owned(), whose, self.grace(), Uuid::new_v4());
        let deleted =
            self.run("deleting a web session", args, |records, (key, whose, grace, call)| {
                Box::pin(records.delete(key, whose.as_ref(), *grace, *call))
            });
        match deleted.await.map_err(failed)? {
            None => request(|it| it.has_ended = true),
            Some(left) => request(|it| it.absolute_left = left),
        };
        Ok(())
    }
}

/// Keeps the error for the wrap, which answers with it. The client is not told of a fault, so the fault is logged.
fn failed(error: Error) -> anyhow::Error {
    if !error.is_outage() {
        log::error!("{error}");
    }
    let told = anyhow::Error::msg(error.to_string());
    request(|it| it.failed = Some(error));
    told
}

fn std_duration(ttl: &Ttl) -> Duration {
    // A negative duration has already passed.
    Duration::try_from(*ttl).unwrap_or(Duration::ZERO)
}
