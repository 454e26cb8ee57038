//! What the policies of the application allow to the person of a request.

use std::{cell::OnceCell, rc::Rc};

use tokio::time::timeout_at;

use crate::{
    clock,
    error::{LockError, Result},
    key::LockKey,
    lock::Lock,
    web::{
        access::Permissions,
        request::{LONGEST_LOOK, RequestLocks},
    },
};

impl RequestLocks {
    /// The permissions of this person.
    pub(in crate::web) fn permissions(&self) -> Permissions {
        Permissions {
            manager: Rc::clone(&self.manager),
            person: self.person(),
            knows_people: self.settings.identify.is_some() || self.is_client(),
            admits_visitors: self.settings.admits_visitors,
            policy: self.settings.access.clone(),
            answers: Rc::clone(&self.settings.answers),
            actor: self.actor(),
            sees_all: OnceCell::new(),
        }
    }

    pub(in crate::web) fn may_take_over(&self, lock: &Lock) -> bool {
        self.manager.core.may_take_over(&self.actor(), lock)
    }

    /// True if a policy decides about locks in the routes of the application.
    pub(in crate::web) fn has_policy(&self) -> bool {
        self.settings.access.is_some() && !self.settings.extractors_do_not_ask
    }

    /// Asks the policy before a route of the application takes or confirms these locks.
    ///
    /// # Errors
    /// The refusals of the policy: the answer for a missing document, or 401.
    pub(in crate::web) async fn may_lock(&self, keys: &[LockKey]) -> Result<()> {
        let refusals = self.may_lock_each(keys).await?;
        refusals.into_iter().flatten().next().map_or(Ok(()), Err)
    }

    /// As `may_lock`, but returns for each document its refusal, or none.
    pub(in crate::web) async fn may_lock_each(
        &self,
        keys: &[LockKey],
    ) -> Result<Vec<Option<LockError>>> {
        if !self.has_policy() {
            return Ok(keys.iter().map(|_| None).collect());
        }
        let refusals = self.permissions().check_each(keys).await?;
        let forbidden = refusals.iter().flatten().filter_map(|refusal| match refusal {
            LockError::NotFound { key } => Some(key),
            _ => None,
        });
        self.give_back(forbidden).await?;
        Ok(refusals)
    }

    /// Releases the locks on documents that the policy of the lock API forbids to this person. Where the extractors do not
    /// ask this policy, the routes of the application may have granted these locks by their own rules, so they stay.
    pub(in crate::web) async fn give_back_forbidden(
        &self,
        forbidden: impl Iterator<Item = &LockKey>,
    ) -> Result<()> {
        if self.has_policy() { self.give_back(forbidden).await } else { Ok(()) }
    }

    /// Gives back the locks of the session that its person may no longer have. The policy is asked at most once a minute.
    pub(in crate::web) async fn ask_again(&self) {
        let Some(aid) = self.aid().filter(|_| self.has_policy() && !self.headers.is_idle) else {
            return;
        };
        if !self.manager.core.granting.is_to_be_asked(&aid) {
            return;
        }
        let held = self.manager.core.reads.list_known(Some(&aid), self.begin()).await;
        let keys: Vec<_> = held.into_iter().flatten().map(|lock| lock.key).collect();
        if !keys.is_empty() {
            // The log tells of a policy that fails. The locks stay then, and it is asked again.
            let _ = self.may_lock_each(&keys).await;
        }
    }

    /// As [`ask_again`](Self::ask_again), for a request that may have nothing to do with locks: a policy or a store that
    /// hangs does not hold its answer up.
    pub(in crate::web) async fn ask_again_in_passing(&self) {
        let _ = timeout_at((clock::now() + LONGEST_LOOK).into(), self.ask_again()).await;
    }
}
