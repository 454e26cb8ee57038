//! The locks on the free ones of many documents, for one request.

use futures_util::{StreamExt, stream};
use tokio::time::timeout_at;

use crate::{
    error::{LockError, Result},
    key::LockKey,
    lock::Mode,
    manager::{Availability, person_queues::PersonTurn},
    web::request::RequestLocks,
};

/// How many documents of one request are claimed at the same time, so that their claims share commands.
const AT_ONCE: usize = 16;

/// How many requests of a person that name many documents may be there, all but one of them waiting. As many as there
/// may be streams of a person: after a gap, each page with a stream asks for the state of its documents.
const MOST: usize = 64;

impl RequestLocks {
    /// Waits until no other request of this person that names many documents is under way. So a person who sends
    /// many of them gets no more of this server than with one, and waits for no other person. `None` if there are no
    /// documents.
    ///
    /// # Errors
    /// [`LockError::TooManyWaiters`], also if the turn does not come in time.
    pub(in crate::web) async fn turn(&self, keys: &[LockKey]) -> Result<Option<PersonTurn>> {
        let Some(key) = keys.first() else { return Ok(None) };
        let too_many =
            || LockError::TooManyWaiters { key: key.clone(), limit: MOST, per_session: true };
        let its_turn =
            self.manager.core.long_requests.join(self.counts_as(), MOST).ok_or_else(too_many)?;
        match timeout_at(self.begin().into(), its_turn).await {
            Ok(Some(turn)) => Ok(Some(turn)),
            _ => Err(too_many()),
        }
    }

    /// Takes or confirms the locks on those of these documents that are free, each by `take`. The outcomes come in no
    /// order. It must be this request's [turn](Self::turn).
    ///
    /// Who holds the others is told by one query for each collection, and their titles by one call. After the first
    /// refusal that says that there is no room for more, the rest is refused unasked.
    ///
    /// # Errors
    /// If the request may lock nothing, or if the store does not say who holds the documents.
    pub(in crate::web) async fn each<T>(
        &self,
        keys: Vec<LockKey>,
        mode: Mode,
        take: impl AsyncFn(LockKey) -> Result<T>,
    ) -> Result<Vec<(LockKey, Result<T>)>> {
        self.check_may_lock()?;
        self.check_one_version(keys.len())?;
        let (granting, until) = (&self.manager.core.granting, self.begin());
        let available =
            granting.availability_of_each(&keys, self.aid().as_ref(), mode, until).await?;
        let mut left = match self.aid() {
            Some(aid) => granting.locks_left(&aid, self.begin()).await?,
            None => usize::MAX,
        };
        let (mut outcomes, mut own, mut free) = (Vec::new(), Vec::new(), Vec::new());
        for (key, available) in keys.into_iter().zip(available) {
            match available {
                Availability::Own => own.push(key),
                Availability::Free => free.push(key),
                Availability::Refused(error) => outcomes.push((key, Err(error))),
            }
        }
        let take = async |key: LockKey| (key.clone(), take(key).await);
        let confirmed = stream::iter(own).map(&take).buffered(AT_ONCE);
        outcomes.extend(confirmed.collect::<Vec<_>>().await);
        let (mut free, mut is_overloaded) = (free.into_iter().peekable(), false);
        while left > 0 && free.peek().is_some() {
            // No more at once than there is room for, so that no lock is granted only to be given back.
            let these: Vec<_> = free.by_ref().take(left.min(AT_ONCE)).collect();
            let claimed: Vec<_> = stream::iter(these).map(&take).buffered(AT_ONCE).collect().await;
            for (_, outcome) in &claimed {
                match outcome {
                    Ok(_) => left = left.saturating_sub(1),
                    Err(LockError::TooManyLocks { .. }) => left = 0,
                    Err(e) if e.is_overload() => (left, is_overloaded) = (0, true),
                    Err(_) => {}
                }
            }
            outcomes.extend(claimed);
        }
        let refusal =
            || if is_overloaded { granting.overloaded() } else { granting.too_many_locks() };
        outcomes.extend(free.map(|key| (key, Err(refusal()))));
        self.describe_each(outcomes.iter_mut().filter_map(|(_, it)| it.as_mut().err())).await;
        Ok(outcomes)
    }
}
