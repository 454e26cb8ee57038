//! Freezes: for a while, no new locks are granted.

use std::{
    future::{Future, pending},
    sync::{Mutex, PoisonError, Weak},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::{sync::watch, time::sleep};
use uuid::Uuid;

use crate::{
    actor::Actor,
    clock,
    error::LockError,
    event::LockEvent,
    freeze::{End, Freeze, NewFreeze, Scope},
    key::LockKey,
    manager::{Inner, LockManager, MAX_REASON_BYTES, rhythm::Rhythm},
    random,
    store::Claim,
    text::{cut, short},
};

/// How often each server asks for freezes.
const POLL: Duration = Duration::from_secs(1);
/// If the last answer is older, a grant asks again before it counts. So all servers obey within two seconds.
const OLD: Duration = Duration::from_secs(2);

/// The freezes that this server knows.
#[derive(Debug)]
pub(super) struct Freezes {
    known: watch::Sender<Vec<Freeze>>,
    newest: Mutex<Newest>,
    /// By this value a freeze notes that this server obeys it.
    server: Uuid,
}

/// The newest answer.
#[derive(Debug)]
struct Newest {
    /// The question was asked at this moment, so the answer is not older.
    asked: Instant,
    /// Answers to questions from before this moment do not count.
    since: Instant,
}

impl Freezes {
    pub(super) fn new() -> Self {
        let now = clock::now();
        let newest = Mutex::new(Newest { asked: now, since: now });
        Self { known: watch::Sender::default(), newest, server: random::uuid() }
    }

    /// The freeze of this collection that ends last.
    fn on(&self, collection: &str) -> Option<Freeze> {
        let known = self.known.borrow();
        let covering = known.iter().filter(|freeze| freeze.scope.covers(collection));
        let last = covering.max_by_key(|freeze| freeze.ends_in())?;
        (!last.ends_in().is_zero()).then(|| last.clone())
    }

    /// Returns whether the freezes have changed. An answer counts unless a newer one is known. An answer is as
    /// new as its question, which was asked at `since`. For a change by this server, `since` is the end of the
    /// change: the answer to a question that was asked meanwhile may lack the change.
    fn saw(&self, now: Vec<Freeze>, asked: Instant, since: Instant) -> bool {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if since < newest.since {
            return false;
        }
        *newest = Newest { asked, since };
        self.known.send_if_modified(|known| {
            let has_changed = *known != now;
            log_changes(known, &now);
            *known = now;
            has_changed
        })
    }

    fn are_old(&self) -> bool {
        clock::since(self.newest.lock().unwrap_or_else(PoisonError::into_inner).asked) > OLD
    }

    /// Resolves when a freeze of this collection begins, from this call on.
    pub(super) fn begins(&self, collection: &str) -> impl Future<Output = ()> {
        let mut known = self.known.subscribe();
        async move {
            while known.changed().await.is_ok() {
                if self.on(collection).is_some() {
                    return;
                }
            }
            pending().await
        }
    }
}

impl LockManager {
    /// Freezes a collection, or all of them: until then no new locks are granted. Instead of a lock,
    /// callers get [`LockError::Frozen`] with the reason, and waiters get it at once. Held locks stay:
    /// their holders may save, and release them. So the documents are at rest when the last of these locks
    /// is gone, which [`list`](Self::list) shows.
    ///
    /// All servers of the cluster obey within two seconds. The freeze survives their restarts, and ends by
    /// itself, by the store's clock: at a time, or after a duration. A second freeze of the same scope replaces the
    /// first. The `reason` is cut to [`MAX_REASON_BYTES`]. `by` is recorded with the freeze, and stands in the
    /// log. [`Freeze::obeyed_by`] tells how many servers have noted that they obey.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use actix_doclock::{Actor, LockError, LockManager};
    /// # async fn migrate(locks: &LockManager) -> Result<(), LockError> {
    /// let (why, an_hour) = ("The numbers of all work items are changed.", Duration::from_secs(60 * 60));
    /// locks.freeze("workitem", why, an_hour, &Actor::new("migration 12")).await?;
    /// // … wait for the held locks, or break them; migrate …
    /// locks.thaw("workitem").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`LockError::PastFreeze`] if the end has passed; nothing changes then. [`LockError::Misconfigured`] if the
    /// collection is not registered, or for all collections if none is. Otherwise see [`LockManager`].
    pub async fn freeze(
        &self,
        scope: impl Into<Scope>,
        reason: &str,
        until: impl Into<End>,
        by: &Actor,
    ) -> Result<(), LockError> {
        let scope = self.scope(scope).await?;
        if !self.has_collections() {
            let message = "a freeze of all collections without any that is registered";
            return Err(LockError::Misconfigured(message.to_owned()));
        }
        let end = match until.into() {
            End::At(until) => End::At(until.min(end_of_9999())),
            End::In(lasts) => End::In(lasts.min(LONGEST)),
        };
        let reason = cut(reason.to_owned(), MAX_REASON_BYTES);
        let new = NewFreeze { id: random::uuid(), reason, by: short(&by.label), end };
        let asked = clock::now();
        let args = (scope.clone(), new.clone());
        let known = self.run("freeze", self.until(), args, |store, (scope, new)| {
            store.set_freeze(scope, Some(new))
        });
        let known = known.await?;
        let is_on = known.iter().any(|freeze| freeze.id == Some(new.id));
        self.saw_freezes(known, asked, clock::now());
        if !is_on {
            return Err(LockError::PastFreeze);
        }
        log::info!(
            target: "actix_doclock::audit",
            "{scope} is frozen by {}; reason: {:?}", by.holder().shown(), new.reason,
        );
        Ok(())
    }

    /// Ends the freeze of this scope. Returns whether there was one. A freeze of [`Scope::All`] and that of
    /// a collection end independently.
    ///
    /// # Errors
    /// See [`LockManager`].
    pub async fn thaw(&self, scope: impl Into<Scope>) -> Result<bool, LockError> {
        let scope = self.scope(scope).await?;
        let before = self.run("freezes", self.until(), (), |store, ()| store.freezes()).await?;
        let asked = clock::now();
        let left = self
            .run("thaw", self.until(), scope.clone(), |store, scope| store.set_freeze(scope, None));
        self.saw_freezes(left.await?, asked, clock::now());
        let was_frozen = before.iter().any(|freeze| freeze.scope == scope);
        if was_frozen {
            log::info!(target: "actix_doclock::audit", "{scope} is not frozen any more");
        }
        Ok(was_frozen)
    }

    /// The freezes that this server knows. Costs nothing.
    #[must_use]
    pub fn freezes(&self) -> Vec<Freeze> {
        let mut all = self.inner.freezes.known.borrow().clone();
        all.retain(|freeze| !freeze.ends_in().is_zero());
        all
    }

    /// The freeze of this collection, as far as this server knows.
    pub(crate) fn freeze_of(&self, collection: &str) -> Option<Freeze> {
        self.inner.freezes.on(collection)
    }

    async fn scope(&self, scope: impl Into<Scope>) -> Result<Scope, LockError> {
        let scope = scope.into();
        if let Scope::Collection(name) = &scope {
            let ready = self.ready(&LockKey::new(&**name, 0)?, self.until()).await;
            ready.map_err(|e| match e {
                LockError::NotFound { .. } => LockError::Misconfigured(format!(
                    "there is no collection `{name}`: name one as it is stored, or freeze all"
                )),
                other => other,
            })?;
        }
        Ok(scope)
    }

    /// Asks the store for freezes.
    pub(super) async fn ask_for_freezes(&self, until: Instant) -> Result<(), LockError> {
        let asked = clock::now();
        let now = self.run("freezes", until, (), |store, ()| store.freezes()).await?;
        self.saw_freezes(now, asked, asked);
        Ok(())
    }

    /// Notes with each freeze that this server obeys it now. `noted` are the freezes that have that note.
    async fn note_obedience(&self, noted: &mut Vec<Uuid>) -> Result<(), LockError> {
        let known: Vec<_> = self.freezes().iter().filter_map(|freeze| freeze.id).collect();
        noted.retain(|id| known.contains(id));
        for id in known {
            // A program that only looks at locks is no server.
            if !noted.contains(&id) && self.grants_locks() {
                let args = (id, self.inner.freezes.server);
                let note = self.run("obey_freeze", self.until(), args, |store, (id, server)| {
                    store.obey_freeze(*id, *server)
                });
                note.await?;
                noted.push(id);
            }
        }
        Ok(())
    }

    fn saw_freezes(&self, now: Vec<Freeze>, asked: Instant, since: Instant) {
        if self.inner.freezes.saw(now, asked, since) {
            // Pages look again, and learn of the freeze.
            self.inner.events.tell(LockEvent::Resync);
        }
    }

    /// Refuses a claim in a frozen collection, unless it is for a lock that its session holds already.
    pub(super) async fn refuse_if_frozen(
        &self,
        key: &LockKey,
        claim: &Claim,
        until: Instant,
    ) -> Result<(), LockError> {
        let Some(freeze) = self.freeze_of(key.collection()) else { return Ok(()) };
        match self.inspect_by(key, Some(&claim.aid), until).await? {
            Some(lock) if lock.aid == claim.aid && lock.mode.covers(claim.mode) => Ok(()),
            _ => Err(frozen_by(key, freeze)),
        }
    }

    /// Refuses a new lock if the collection was frozen in the meantime. The caller gives the lock back.
    pub(super) async fn refuse_if_frozen_meanwhile(
        &self,
        key: &LockKey,
        until: Instant,
    ) -> Result<(), LockError> {
        if self.inner.freezes.are_old() {
            self.ask_for_freezes(until).await?;
        }
        match self.freeze_of(key.collection()) {
            Some(freeze) => Err(frozen_by(key, freeze)),
            None => Ok(()),
        }
    }
}

/// A freeze for longer has no end that anybody will see.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 24 * 60 * 60);

/// Each server's log says when it begins to obey a freeze, and when it ends to do so.
fn log_changes(before: &[Freeze], now: &[Freeze]) {
    for freeze in now.iter().filter(|freeze| !before.contains(freeze)) {
        let Freeze { scope, reason, by, .. } = freeze;
        log::info!(
            target: "actix_doclock::manager",
            "{scope} is frozen for {} s from now, by {:?}: this server grants no new locks; reason: {:?}",
            freeze.ends_in().as_secs(), by.as_deref().unwrap_or("unknown"), short(reason),
        );
    }
    for freeze in before.iter().filter(|freeze| !now.iter().any(|it| it.scope == freeze.scope)) {
        log::info!(
            target: "actix_doclock::manager",
            "{} is not frozen any more: this server grants locks again", freeze.scope,
        );
    }
}

/// The last date that stores can show.
fn end_of_9999() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(253_402_300_799)
}

fn frozen_by(key: &LockKey, freeze: Freeze) -> LockError {
    LockError::Frozen { key: key.clone(), freeze: Box::new(freeze) }
}

/// Asks for freezes until the manager is gone or shut down.
pub(super) async fn follow(manager: Weak<Inner>) {
    let mut rhythm = Rhythm::new("asking for freezes", POLL);
    let mut noted = Vec::new();
    while let Some(inner) = manager.upgrade() {
        let manager = LockManager { inner };
        let stop = manager.inner.stop.token();
        // Without a type nothing can be locked, and the store may not be prepared.
        let pause = if manager.registered_names().is_empty() {
            POLL
        } else {
            let ask = async {
                manager.ask_for_freezes(manager.until()).await?;
                manager.note_obedience(&mut noted).await
            };
            let asked = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                asked = ask => asked,
            };
            match asked {
                Ok(()) => rhythm.after_success(Some(POLL)),
                Err(e) => rhythm.after_failure(&e).min(POLL),
            }
        };
        drop(manager);
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep(pause) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn freeze() -> Vec<Freeze> {
        let until = SystemTime::now() + Duration::from_secs(600);
        vec![Freeze::new(Scope::All, "why".to_owned(), until, Duration::from_secs(600))]
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_to_an_older_question_changes_nothing() {
        let freezes = Freezes::new();
        let before = clock::now();
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(freezes.saw(freeze(), clock::now(), clock::now()));
        assert!(!freezes.saw(Vec::new(), before, before), "the poll was asked before the freeze");
        assert!(freezes.on("page").is_some());
        assert!(freezes.saw(Vec::new(), clock::now(), clock::now()));
        assert!(freezes.on("page").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_old_after_two_seconds() {
        let freezes = Freezes::new();
        tokio::time::advance(OLD).await;
        assert!(!freezes.are_old());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(freezes.are_old());
        freezes.saw(Vec::new(), clock::now(), clock::now());
        assert!(!freezes.are_old());
    }

    #[tokio::test(start_paused = true)]
    async fn a_freeze_that_begins_after_the_call_is_not_missed() {
        let freezes = Freezes::new();
        let begins = freezes.begins("page");
        freezes.saw(freeze(), clock::now(), clock::now());
        tokio::time::timeout(Duration::from_secs(1), begins).await.unwrap();
    }

    #[test]
    fn an_answer_from_the_time_of_a_change_does_not_undo_the_change() {
        let (freezes, now) = (Freezes::new(), clock::now());
        let at = |n| now + Duration::from_millis(n);
        // Asked while the change is under way, and answered before it.
        freezes.saw(Vec::new(), at(20), at(20));
        assert!(freezes.saw(freeze(), at(10), at(30)), "the change counts");
        // Asked while the change is under way, and answered after it.
        freezes.saw(Vec::new(), at(25), at(25));
        assert!(freezes.on("page").is_some());
        freezes.saw(Vec::new(), at(40), at(40));
        assert!(freezes.on("page").is_none());
    }
}
