//! Who may look at which locks, and who may lock which documents, by the lock API.

use std::{
    collections::HashMap,
    pin::Pin,
    rc::Rc,
    time::{Duration, Instant},
};

use actix_session::Session;
use futures_util::{StreamExt, stream};
use tokio::{sync::Semaphore, time::timeout};

use crate::{
    actor::Actor, clock, error::LockError, key::LockKey, manager::LockManager,
    web::problem::Problem,
};

/// What a person asks for, in an [access policy](crate::LockingSession::access_policy).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// To see whether the document is locked, since when, and by whom.
    Look,
    /// To lock the document.
    Lock,
}

pub(super) type Identify = Rc<dyn Fn(&Session) -> Option<Actor>>;
pub(super) type AccessPolicy =
    Rc<dyn Fn(Option<Actor>, LockKey, Access) -> Pin<Box<dyn Future<Output = bool>>>>;

/// How many documents of one request are asked for at the same time, and how many by all streams of events
/// of one worker.
pub(super) const AT_ONCE: usize = 16;

/// How long a stream of events remembers the answers of the policy, and how many of them.
const REMEMBER: Duration = Duration::from_secs(10);
const REMEMBERED: usize = 256;
/// A stream of events ends if the policy needs longer. The page then opens another stream.
const LONGEST: Duration = Duration::from_secs(5);

/// What one person may see and do. The answers of the policy are never kept for another person.
pub(super) struct Permissions {
    pub(super) manager: LockManager,
    pub(super) person: Option<Actor>,
    pub(super) knows_people: bool,
    pub(super) policy: Option<AccessPolicy>,
    /// An administrator, who may look at all locks.
    pub(super) sees_all: bool,
    /// How many streams of events may ask the policy at the same time.
    pub(super) turns: Rc<Semaphore>,
}

impl Permissions {
    pub(super) async fn allow(&self, key: &LockKey, access: Access) -> bool {
        if !self.reach(key.collection()) {
            return false;
        }
        if self.sees_all && access == Access::Look {
            return true;
        }
        match &self.policy {
            Some(policy) => policy(self.person.clone(), key.clone(), access).await,
            None => !self.needs_login(),
        }
    }

    /// Whether there are such locks over HTTP, for this person.
    pub(super) fn reach(&self, collection: &str) -> bool {
        self.manager.is_over_http(collection)
            || self.sees_all && self.manager.is_registered(collection)
    }

    /// Of these documents, those that the person may look at.
    pub(super) async fn visible(&self, keys: Vec<LockKey>) -> Vec<LockKey> {
        let asked = stream::iter(keys).map(async |key| {
            let may_look = self.allow(&key, Access::Look).await;
            may_look.then_some(key)
        });
        asked.buffered(AT_ONCE).filter_map(async |key| key).collect().await
    }

    /// # Errors
    /// 401 if a login may help. Otherwise the answer for a missing document, so that nobody can tell the
    /// difference.
    pub(super) async fn check(&self, key: &LockKey, access: Access) -> Result<(), Problem> {
        if self.allow(key, access).await {
            Ok(())
        } else if self.needs_login() {
            Err(login_required())
        } else {
            Err(LockError::NotFound { key: key.clone() }.into())
        }
    }

    /// # Errors
    /// 401 if visitors without a login may look at nothing.
    pub(super) fn check_any(&self) -> Result<(), Problem> {
        if self.policy.is_none() && self.needs_login() { Err(login_required()) } else { Ok(()) }
    }

    fn needs_login(&self) -> bool {
        self.knows_people && self.person.is_none()
    }
}

fn login_required() -> Problem {
    LockError::LoginRequired.into()
}

/// The documents that a stream of events may tell of.
pub(super) struct Visible {
    permissions: Permissions,
    known: HashMap<LockKey, (bool, Instant)>,
}

impl Visible {
    pub(super) fn new(permissions: Permissions) -> Self {
        Self { permissions, known: HashMap::new() }
    }

    /// `None` if the policy does not answer in time.
    pub(super) async fn has(&mut self, key: &LockKey) -> Option<bool> {
        if self.permissions.policy.is_none() || self.permissions.sees_all {
            return Some(self.permissions.allow(key, Access::Look).await);
        }
        if let Some((may_look, at)) = self.known.get(key)
            && clock::since(*at) < REMEMBER
        {
            return Some(*may_look);
        }
        // One event reaches all streams at the same moment, and their policies may use the database.
        let asking = timeout(LONGEST, async {
            let _turn = self.permissions.turns.acquire().await;
            self.permissions.allow(key, Access::Look).await
        });
        let Ok(may_look) = asking.await else {
            log::warn!(
                target: "actix_doclock::web",
                "the access policy did not answer within {LONGEST:?} for an event of {key:?}: the stream ends",
            );
            return None;
        };
        if self.known.len() >= REMEMBERED {
            self.known.retain(|_, (_, at)| clock::since(*at) < REMEMBER);
        }
        if self.known.len() >= REMEMBERED {
            self.known.clear();
        }
        self.known.insert(key.clone(), (may_look, clock::now()));
        Some(may_look)
    }
}
