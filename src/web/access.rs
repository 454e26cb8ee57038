//! Who may look at which locks, and who may lock which documents.

use std::{
    cell::OnceCell, collections::HashSet, fmt, panic::AssertUnwindSafe, rc::Rc, time::Duration,
};

use actix_session::Session;
use futures_util::{
    FutureExt, StreamExt, TryStreamExt,
    future::{LocalBoxFuture, Shared},
    stream,
};
use tokio::{sync::Semaphore, time::timeout};

use crate::{
    actor::Actor,
    error::{LockError, Result, StoreError, StoreErrorKind},
    key::LockKey,
    manager::{LockManager, batches::Batches, person_queues::PersonQueues},
    text::{printable, short},
    web::current_request::{hidden, log_failure},
};

/// The permission about which an [access policy](crate::web::LockingSession::access_policy) decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// To see whether the document is locked, since when, and by whom.
    Look,
    /// To lock the document, to save it, or to [load](crate::SessionLocks::load) it.
    Lock,
}

pub(super) type Identify = Rc<dyn Fn(&Session) -> Option<Actor>>;
type Allowed = LocalBoxFuture<'static, Result<Vec<bool>, String>>;
type Allows = dyn Fn(Option<Actor>, Vec<LockKey>, Access) -> Allowed;

/// What an [access policy](crate::web::LockingSession::access_policy) returns: the answer, or a `Result` of it with any
/// error that has a text.
pub trait PolicyAnswer<T> {
    /// # Errors
    /// The text of the policy's error.
    fn answer(self) -> Result<T, String>;
}

impl<T> PolicyAnswer<T> for T {
    fn answer(self) -> Result<T, String> {
        Ok(self)
    }
}

impl<T, E: fmt::Display> PolicyAnswer<T> for Result<T, E> {
    fn answer(self) -> Result<T, String> {
        self.map_err(|e| format!("{e:#}"))
    }
}

/// The policy of the application, for many documents at once.
#[derive(Clone)]
pub(super) struct AccessPolicy {
    allows: Rc<Allows>,
    /// The longest time for one call.
    longest: Duration,
}

/// For how many documents of one call a policy for single documents runs at the same time. Also how many calls the
/// streams of events of one worker have under way.
const AT_ONCE: usize = 16;

impl AccessPolicy {
    pub(super) fn of_many<A: PolicyAnswer<Vec<bool>>>(
        allows: impl AsyncFn(Option<Actor>, Vec<LockKey>, Access) -> A + 'static,
        longest: Duration,
    ) -> Self {
        let allows = Rc::new(allows);
        let allows: Rc<Allows> = Rc::new(move |person, keys, access| {
            let allows = Rc::clone(&allows);
            Box::pin(async move { allows(person, keys, access).await.answer() })
        });
        Self { allows, longest }
    }

    pub(super) fn of_one<A: PolicyAnswer<bool>>(
        allows: impl AsyncFn(Option<Actor>, LockKey, Access) -> A + 'static,
        longest: Duration,
    ) -> Self {
        let allows = Rc::new(allows);
        let of_many = async move |person: Option<Actor>, keys, access| {
            let each = stream::iter(keys).map(|key| allows(person.clone(), key, access));
            each.buffered(AT_ONCE).map(PolicyAnswer::answer).try_collect::<Vec<bool>>().await
        };
        Self::of_many(of_many, longest)
    }

    /// One answer for each key.
    ///
    /// # Errors
    /// [`Unavailable`](StoreErrorKind::Unavailable) if the policy fails, panics, or does not answer in time.
    async fn ask(
        &self,
        person: Option<Actor>,
        keys: &[LockKey],
        access: Access,
    ) -> Result<Vec<bool>> {
        let call = AssertUnwindSafe(async { (self.allows)(person, keys.to_vec(), access).await });
        let why = match timeout(self.longest, call.catch_unwind()).await {
            Ok(Ok(Ok(answers))) if answers.len() == keys.len() => return Ok(answers),
            Ok(Ok(Ok(answers))) => {
                format!("gave {} answers for {} keys", answers.len(), keys.len())
            }
            Ok(Ok(Err(error))) => format!("has failed: {}", printable(&short(&error))),
            Ok(Err(_)) => "has panicked".to_owned(),
            Err(_) => format!("did not answer within {:?}", self.longest),
        };
        let message = format!("the access policy {why}");
        let first = keys.first().map(LockKey::shown).unwrap_or_default();
        log_failure(
            "because the access policy fails",
            format!("{message}; it was asked for {first}"),
        );
        Err(StoreError::new(StoreErrorKind::Unavailable, message).into())
    }
}

/// What one person may see and do.
pub(super) struct Permissions {
    pub(super) manager: Rc<LockManager>,
    pub(super) person: Option<Actor>,
    pub(super) knows_people: bool,
    /// True if the policy is asked for visitors without a login, too.
    pub(super) admits_visitors: bool,
    pub(super) policy: Option<AccessPolicy>,
    /// The person, or a visitor under the name of all visitors.
    pub(super) actor: Actor,
    pub(super) sees_all: OnceCell<bool>,
    pub(super) answers: Rc<Answers>,
}

impl Permissions {
    /// True for an administrator, who may look at all locks. The policy is asked once.
    pub(super) fn sees_all(&self) -> bool {
        let policy = &self.manager.core.settings;
        *self.sees_all.get_or_init(|| policy.may_see_all(&self.actor) == Some(true))
    }

    /// True if this person can reach the locks of this collection over HTTP.
    pub(super) fn sees_collection(&self, collection: &str) -> bool {
        self.manager.core.collections.is_over_http(collection)
            || self.manager.core.collections.is_registered(collection) && self.sees_all()
    }

    /// The ones of these documents to which the person has this access by the lock API.
    ///
    /// # Errors
    /// If the policy fails.
    pub(super) async fn allowed(&self, keys: Vec<LockKey>, access: Access) -> Result<Vec<LockKey>> {
        let keys: Vec<_> =
            keys.into_iter().filter(|key| self.sees_collection(key.collection())).collect();
        match &self.policy {
            _ if matches!(access, Access::Look) && self.sees_all() => Ok(keys),
            _ if self.must_log_in() => Ok(Vec::new()),
            None => Ok(keys),
            Some(policy) => {
                let answers = policy.ask(self.person.clone(), &keys, access).await?;
                Ok(keys
                    .into_iter()
                    .zip(answers)
                    .filter_map(|(key, may)| may.then_some(key))
                    .collect())
            }
        }
    }

    /// # Errors
    /// The [refusal](Self::refusal), or that the policy fails.
    pub(super) async fn check(&self, key: &LockKey, access: Access) -> Result<()> {
        let allowed = self.allowed(vec![key.clone()], access).await?;
        if allowed.is_empty() { Err(self.refusal(key)) } else { Ok(()) }
    }

    /// For the routes of the application: returns for each document its refusal, or none. If the application has no
    /// policy, all of them pass.
    pub(super) async fn check_each(&self, keys: &[LockKey]) -> Result<Vec<Option<LockError>>> {
        let Some(policy) = &self.policy else { return Ok(keys.iter().map(|_| None).collect()) };
        self.check_any()?;
        let answers = policy.ask(self.person.clone(), keys, Access::Lock).await?;
        Ok(keys.iter().zip(answers).map(|(key, may)| (!may).then(|| self.refusal(key))).collect())
    }

    /// # Errors
    /// 401 if visitors without a login may look at nothing.
    pub(super) fn check_any(&self) -> Result<()> {
        if self.must_log_in() { Err(LockError::LoginRequired) } else { Ok(()) }
    }

    /// 401 if a login may help. Otherwise the answer for a missing document, so that nobody can tell the difference.
    pub(super) fn refusal(&self, key: &LockKey) -> LockError {
        if self.is_visitor() {
            return LockError::LoginRequired;
        }
        hidden(key.clone())
    }

    fn is_visitor(&self) -> bool {
        self.knows_people && self.person.is_none()
    }

    fn must_log_in(&self) -> bool {
        self.is_visitor() && !(self.admits_visitors && self.policy.is_some())
    }

    /// The ones of these documents that a stream of events may report. `None` if the policy fails.
    pub(super) async fn visible(&self, keys: HashSet<LockKey>) -> Option<HashSet<LockKey>> {
        match &self.policy {
            Some(policy) if !self.sees_all() => {
                self.check_any().ok()?;
                let keys =
                    keys.into_iter().filter(|key| self.sees_collection(key.collection())).collect();
                self.answers.of(policy, &self.person, keys).await
            }
            _ => {
                let allowed = self.allowed(keys.into_iter().collect(), Access::Look).await;
                allowed.ok().map(HashSet::from_iter)
            }
        }
    }
}

/// The answers of the policy that all streams of events of a worker share. A person has one call for each set of
/// documents, however many streams and events there are.
pub(super) struct Answers {
    calls: Batches<Option<Actor>, Call>,
    turns: Rc<Semaphore>,
    /// One call at a time: a policy that hangs for one person leaves the turns to the others.
    of_person: PersonQueues<Option<Actor>>,
}

/// A call of the policy. Returns the visible ones of its documents; `None` if the policy has failed.
type Call = LocalBoxFuture<'static, Option<Rc<HashSet<LockKey>>>>;

impl Default for Answers {
    fn default() -> Self {
        let calls = Batches::of_at_most(usize::MAX);
        Self { calls, turns: Rc::new(Semaphore::new(AT_ONCE)), of_person: PersonQueues::default() }
    }
}

impl Answers {
    /// The ones of these documents that the person may look at. `None` if the policy fails.
    async fn of(
        &self,
        policy: &AccessPolicy,
        person: &Option<Actor>,
        keys: Vec<LockKey>,
    ) -> Option<HashSet<LockKey>> {
        let begin = |keys| Some(self.call(policy.clone(), person.clone(), keys));
        let mut visible = HashSet::new();
        for (key, call) in self.calls.share(person, keys, begin) {
            if call.await?.contains(&key) {
                visible.insert(key);
            }
        }
        Some(visible)
    }

    /// Runs in a task of its own, because the streams that wait for the call may end.
    fn call(
        &self,
        policy: AccessPolicy,
        person: Option<Actor>,
        keys: Vec<LockKey>,
    ) -> Shared<Call> {
        let (own, turns) =
            (self.of_person.join(person.clone(), usize::MAX), Rc::clone(&self.turns));
        let call = actix_web::rt::spawn(async move {
            let _own = own?.await;
            let _turn = turns.acquire().await;
            let answers = policy.ask(person, &keys, Access::Look).await.ok()?;
            let visible = keys.into_iter().zip(answers).filter_map(|(key, may)| may.then_some(key));
            Some(Rc::new(visible.collect()))
        });
        async { call.await.ok().flatten() }.boxed_local().shared()
    }
}
