//! The freezes that this server knows and obeys.

use std::{
    future::{Future, pending},
    sync::{Arc, Weak},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use parking_lot::Mutex;
use tokio::{sync::watch, time::sleep};
use uuid::Uuid;

use crate::{
    actor::Actor,
    clock,
    error::{LockError, Result},
    event::LockEvent,
    freeze::{End, Freeze, NewFreeze, Scope},
    key::LockKey,
    manager::{
        Core, MAX_REASON_BYTES, claim::Provisional, pauses::Pauses, store_time::StoreTime,
        verbs::Verbs, watch::events::Events,
    },
    random,
    text::{cut, short},
};

/// How often each server asks for freezes.
const POLL: Duration = Duration::from_secs(1);
/// A freeze for longer has no end that anybody will see.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 24 * 60 * 60);
/// If the last answer is older than this, the server asks again before a grant counts. So all servers obey within two
/// seconds.
const OLD: Duration = Duration::from_secs(2);

/// The freezes that this server knows.
pub(crate) struct Freezes {
    verbs: Arc<Verbs>,
    events: Arc<Events>,
    known: watch::Sender<Vec<Freeze>>,
    newest: Mutex<Newest>,
    time: Arc<StoreTime>,
    /// The id by which a freeze notes that this server obeys it.
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
    pub(super) fn new(verbs: Arc<Verbs>, events: Arc<Events>, time: Arc<StoreTime>) -> Self {
        let now = clock::now();
        let newest = Mutex::new(Newest { asked: now, since: now });
        let (known, server) = (watch::Sender::default(), random::uuid());
        Self { verbs, events, known, newest, time, server }
    }

    /// The freeze of this collection that ends last.
    pub(crate) fn on(&self, collection: &str) -> Option<Freeze> {
        let known = self.known.borrow();
        let covering = known.iter().filter(|freeze| freeze.scope.covers(collection));
        let last = covering.max_by_key(|freeze| freeze.ends_in())?;
        (!last.ends_in().is_zero()).then(|| last.clone())
    }

    /// True if the freezes have changed. An answer counts unless a newer one is known. An answer is as new as its question:
    /// `since` is when the question was `asked`. For a change by this server, `since` is the end of the change, because the
    /// answer to a question that was asked meanwhile may lack it.
    fn saw(&self, now: Vec<Freeze>, asked: Instant, since: Instant) -> bool {
        let mut newest = self.newest.lock();
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

    /// The freezes that this server knows.
    pub(crate) fn all(&self) -> Vec<Freeze> {
        let mut all = self.known.borrow().clone();
        all.retain(|freeze| !freeze.ends_in().is_zero());
        all
    }

    /// Resolves when a freeze of this collection begins after this call.
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

impl Freezes {
    /// Freezes this scope, which is registered.
    pub(super) async fn begin(
        &self,
        scope: Scope,
        reason: &str,
        end: End,
        by: &Actor,
    ) -> Result<()> {
        let end = match end {
            End::At(until) => End::At(until.min(end_of_9999())),
            End::In(lasts) => End::In(lasts.min(LONGEST)),
        };
        let reason = cut(reason.to_owned(), MAX_REASON_BYTES);
        let new = NewFreeze { id: random::uuid(), reason, by: short(&by.label), end };
        let (asked, args) = (clock::now(), (scope.clone(), new.clone()));
        let known = self.verbs.ask("freeze", args, |store, (scope, new), until| {
            store.set_freeze(scope, Some(new), until)
        });
        let known = known.await?;
        let is_on = known.iter().any(|freeze| freeze.id == Some(new.id));
        self.saw_and_tell(known, asked, clock::now());
        if !is_on {
            return Err(LockError::PastFreeze);
        }
        log::info!(
            target: "actix_doclock::audit",
            "{scope} is frozen by {}; reason: {:?}", by.holder().shown(), new.reason,
        );
        Ok(())
    }

    /// Ends the freeze of this scope. True if there was one.
    pub(super) async fn end(&self, scope: Scope) -> Result<bool> {
        let before = self.verbs.ask("freezes", (), |store, (), until| store.freezes(until)).await?;
        let before = before.on;
        let asked = clock::now();
        let left = self
            .verbs
            .ask("thaw", scope.clone(), |store, scope, until| store.set_freeze(scope, None, until));
        self.saw_and_tell(left.await?, asked, clock::now());
        let was_frozen = before.iter().any(|freeze| freeze.scope == scope);
        if was_frozen {
            log::info!(target: "actix_doclock::audit", "{scope} is not frozen any more");
        }
        Ok(was_frozen)
    }

    /// Asks the store for freezes.
    pub(super) async fn ask(&self, until: Instant) -> Result<()> {
        let asked = clock::now();
        let now =
            self.verbs.run("freezes", until, (), |store, (), until| store.freezes(until)).await?;
        if let Some(at) = now.at {
            self.time.heard(asked, at);
        }
        self.saw_and_tell(now.on, asked, asked);
        Ok(())
    }

    /// Notes with each freeze that this server obeys it now. `noted` are the freezes that have that note.
    async fn note_obedience(&self, noted: &mut Vec<Uuid>, grants_locks: bool) -> Result<()> {
        let known: Vec<_> = self.all().iter().filter_map(|freeze| freeze.id).collect();
        noted.retain(|id| known.contains(id));
        for id in known {
            // A program that only looks at locks is no server.
            if !noted.contains(&id) && grants_locks {
                let args = (id, self.server);
                let note = self.verbs.ask("obey_freeze", args, |store, (id, server), until| {
                    store.obey_freeze(*id, *server, until)
                });
                note.await?;
                noted.push(id);
            }
        }
        Ok(())
    }

    pub(super) fn saw_and_tell(&self, now: Vec<Freeze>, asked: Instant, since: Instant) {
        if self.saw(now, asked, since) {
            // Pages look again, and learn of the freeze.
            self.events.tell(LockEvent::Resync);
        }
    }

    /// Gives a fresh lock back if its collection was frozen in the meantime.
    pub(super) async fn keep_unless_frozen(
        &self,
        fresh: Provisional,
        until: Instant,
    ) -> Result<Provisional> {
        match self.check(&fresh.lock.key, Some(fresh.lock.since), until).await {
            Ok(()) => Ok(fresh),
            Err(refused) => {
                if let LockError::Frozen { .. } = refused {
                    fresh.refuse_to_all();
                }
                Err(refused)
            }
        }
    }

    /// `granted` is the store's date of a fresh lock: a freeze from before that date must be known, however long this
    /// process stood still.
    ///
    /// # Errors
    /// [`LockError::Frozen`], and the errors of the store.
    pub(super) async fn check(
        &self,
        key: &LockKey,
        granted: Option<SystemTime>,
        until: Instant,
    ) -> Result<()> {
        let asked = self.newest.lock().asked;
        let is_older = |granted| self.time.is_before(granted, OLD);
        if clock::since(asked) > OLD || granted.is_some_and(is_older) {
            self.ask(until).await?;
        }
        match self.on(key.collection()) {
            Some(freeze) => Err(frozen_by(key, freeze)),
            None => Ok(()),
        }
    }
}

/// Each server's log says when it begins to obey a freeze, and when it stops.
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

pub(super) fn frozen_by(key: &LockKey, freeze: Freeze) -> LockError {
    LockError::Frozen { key: key.clone(), freeze: Box::new(freeze) }
}

/// Asks for freezes until the manager is gone.
pub(super) async fn follow(manager: Weak<Core>) {
    let mut pauses = Pauses::new("asking for freezes", POLL);
    let mut noted = Vec::new();
    let mut standstills = manager.upgrade().map(|core| core.beliefs.time.standstills());
    while let Some(core) = manager.upgrade() {
        let freezes = &core.freezes;
        // Without a type nothing can be locked, and the store may not be prepared.
        let pause = if core.collections.names().is_empty() {
            POLL
        } else {
            let ask = async {
                freezes.ask(core.verbs.until()).await?;
                freezes.note_obedience(&mut noted, core.collections.grants_locks()).await
            };
            let asked = ask.await;
            if let Some(news) = &mut standstills
                && news.has_changed().unwrap_or(false)
            {
                news.mark_unchanged();
                core.look_again();
            }
            match asked {
                Ok(()) => pauses.after_success(Some(POLL)),
                Err(e) => pauses.after_failure(&e).min(POLL),
            }
        };
        drop(core);
        sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{manager::verbs::Runner, store::MemoryStore};

    fn freezes() -> Freezes {
        let store = Arc::new(MemoryStore::new());
        let calls = Verbs::new(store, Runner::on_current_runtime(), Duration::from_secs(1));
        Freezes::new(Arc::new(calls), Arc::default(), Arc::default())
    }

    fn freeze() -> Vec<Freeze> {
        let until = SystemTime::now() + Duration::from_secs(600);
        vec![Freeze::new(Scope::All, "why".to_owned(), until, Duration::from_secs(600))]
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_to_an_older_question_changes_nothing() {
        let freezes = freezes();
        let before = clock::now();
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(freezes.saw(freeze(), clock::now(), clock::now()));
        assert!(!freezes.saw(Vec::new(), before, before), "the poll was asked before the freeze");
        assert!(freezes.on("page").is_some());
        assert!(freezes.saw(Vec::new(), clock::now(), clock::now()));
        assert!(freezes.on("page").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_grant_asks_again_if_the_last_answer_is_older_than_two_seconds() {
        let (freezes, key) = (freezes(), LockKey::new("page", 1).unwrap());
        let began = clock::now();
        let check = async || freezes.check(&key, None, clock::now() + Duration::from_secs(1)).await;
        tokio::time::advance(OLD).await;
        check().await.unwrap();
        assert_eq!(freezes.newest.lock().asked, began);
        tokio::time::advance(Duration::from_millis(1)).await;
        check().await.unwrap();
        assert!(freezes.newest.lock().asked > began);
    }

    #[tokio::test(start_paused = true)]
    async fn a_freeze_that_begins_after_the_call_is_not_missed() {
        let freezes = freezes();
        let begins = freezes.begins("page");
        freezes.saw(freeze(), clock::now(), clock::now());
        tokio::time::timeout(Duration::from_secs(1), begins).await.unwrap();
    }

    #[tokio::test]
    async fn an_answer_from_the_time_of_a_change_does_not_undo_the_change() {
        let (freezes, now) = (freezes(), clock::now());
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
