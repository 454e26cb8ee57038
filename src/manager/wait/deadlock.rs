//! The refusal of a waiter that would wait for itself.

use std::time::Instant;

use crate::{
    error::LockError,
    lock::Lock,
    manager::{
        LockManager,
        claim::Wanted,
        wait::{
            Caller,
            queue::{Place, deadlock::Edge},
        },
    },
};

impl LockManager {
    /// Refuses a waiter that would wait for itself. First checks the holders of the circle, which were
    /// seen perhaps a while ago.
    pub(super) async fn refuse_if_certain(
        &self,
        cycle: &[Edge],
        caller: &Caller<'_>,
        place: &Place,
    ) -> Result<(), LockError> {
        let (wanted, until) = (caller.wanted, self.until_at_most(caller.give_up));
        match self.is_certain(cycle, wanted, place, until).await {
            Ok(Some(holder)) => Err(LockError::WouldDeadlock { key: wanted.key.clone(), holder }),
            Ok(None) => {
                place.goes_on();
                Ok(())
            }
            Err(e) => self.sit_out(e, caller, place).await,
        }
    }

    /// Checks the holders that were seen, perhaps a while ago, before a waiter is refused because of
    /// them.
    async fn is_certain(
        &self,
        cycle: &[Edge],
        wanted: &Wanted,
        place: &Place,
        until: Instant,
    ) -> Result<Option<Option<Box<Lock>>>, LockError> {
        for edge in cycle {
            let Some(aid) = &edge.seen else { continue };
            let lock = self.inspect_by(&edge.key, Some(aid), until).await?;
            if lock.is_none_or(|lock| lock.aid != *aid) {
                self.inner.queues.freed(&edge.key);
                return Ok(None);
            }
        }
        // A waiter that has just joined has not asked the store yet.
        let holder = match place.holder() {
            None => self.inspect_by(&wanted.key, Some(&wanted.aid), until).await?,
            seen => seen,
        };
        Ok(Some(holder.map(Box::new)))
    }
}
