//! Confirms that the session of a request holds a lock already.

use std::time::Instant;

use crate::{
    error::{LockError, Result},
    key::LockKey,
    lock::{Aid, Lock},
    takeover::LossCause,
    web::{
        current_request::CURRENT_REQUEST,
        request::{Got, OwnLock, RequestLocks, Terms},
    },
};

impl RequestLocks {
    /// Makes sure that this session already holds the lock; if tokens are offered, the lock must have one of
    /// them.
    pub(in crate::web) async fn confirm(
        &self,
        key: &LockKey,
        how: Terms<'_>,
        until: Instant,
    ) -> Result<OwnLock> {
        let _ = CURRENT_REQUEST.try_with(|it| it.borrow_mut().document = Some(key.clone()));
        self.check_client()?;
        let aid = self.aid();
        let confirmed = match &aid {
            Some(aid) => self.manager.core.reads.confirm(key, aid, how.loads(), until).await?,
            None => None,
        };
        let own = match confirmed.filter(|it| it.lock.mode.covers(how.mode)) {
            Some(confirmed) => OwnLock::confirmed(confirmed)?,
            None => OwnLock::new(self.own_lock(key, aid, how, until).await?, Got::Confirmed)?,
        };
        let is_known = match how.offered {
            [] => !own.lock.is_of_another_tab(self.headers.tab),
            offered => offered.contains(&own.held.token),
        };
        if !is_known {
            return Err(LockError::StaleToken { key: key.clone() });
        }
        self.remember(&own);
        Ok(own)
    }

    /// The lock of this session, or why it has none.
    async fn own_lock(
        &self,
        key: &LockKey,
        aid: Option<Aid>,
        how: Terms<'_>,
        until: Instant,
    ) -> Result<Lock> {
        let lost = |holder, cause| LockError::Lost { key: key.clone(), holder, cause };
        let is_offered = |it: &Lock| it.token.is_some_and(|token| how.offered.contains(&token));
        if aid.is_none() && how.offered.is_empty() {
            return Err(lost(None, None));
        }
        let core = &self.manager.core;
        match core.reads.inspect(key, aid.as_ref(), until).await? {
            Some(lock) if Some(&lock.aid) == aid.as_ref() && lock.mode.covers(how.mode) => Ok(lock),
            Some(lock) if Some(&lock.aid) != aid.as_ref() && is_offered(&lock) => {
                let advice = if self.is_client() {
                    "keep the id of its login when the token is refreshed"
                } else {
                    "let it send the cookies back, or use `locks.clients(…)`"
                };
                core.log_limit.warn("session", || {
                    format!(
                        "a client sent the `Lock-Token` of {key:?} in a request of another session, so that \
                         its lock is of no use to it: {advice}"
                    )
                });
                Err(LockError::WrongSession { lock: Box::new(lock), asked: false })
            }
            other => {
                let Some(aid) = aid else {
                    let taken_by =
                        how.offered.iter().find_map(|token| core.causes.taken_by(key, *token));
                    return Err(lost(None, taken_by.map(LossCause::Taken)));
                };
                // A shared lock does not cover what the client wants, but it is there.
                let is_there = other.as_ref().is_some_and(is_offered);
                if let Some(token) = how.offered.first().filter(|_| !is_there) {
                    core.granting.missed_lock(key, *token, "request");
                }
                match core.sessions.refuse_ended(&aid, None, until).await {
                    Err(LockError::SessionEnded { ago }) if ago > self.news_for() => {
                        Err(lost(None, Some(LossCause::SessionEnded)))
                    }
                    Err(e) => Err(e),
                    Ok(()) => {
                        let causes = &core.causes;
                        let cause = causes.why_lost(&core.verbs, key, &aid, how.offered, until);
                        Err(lost(other.map(Box::new), cause.await))
                    }
                }
            }
        }
    }
}
