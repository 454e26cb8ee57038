//! Releases a lock and grants it to a waiter in the same step, or takes it over; and keeps the queue.

use std::time::Instant;

use crate::{
    key::LockId,
    lock::Mode,
    store::{
        Acquisition, Claim, HandedOver, Ticket, Waiters,
        lock_rules::{Moment, Record},
        mongo::{
            LockCollection, admission::Purpose, error::Result, filters::Target,
            lock_record::encode, new_record, send::until_majority, step::Decided,
        },
    },
};

impl LockCollection<'_> {
    pub(super) async fn hand_over(&self, from: &Acquisition, claim: &Claim) -> Result<HandedOver> {
        let handed = until_majority(self.until, async || {
            if let Some(handed) = self.replace_plain(from, claim).await? {
                return Ok(handed);
            }
            let (rules, given, claim) = (self.rules, from.clone(), claim.clone());
            let decide = move |record: &mut Record, moment: Moment| {
                Decided::promise(record.hand_over(&given, &claim, &rules, moment))
            };
            self.step(from.key.id(), Purpose::Other, decide).await
        });
        let handed = handed.await?;
        if let HandedOver::To(lock) = &handed.0 {
            self.hints.there(from.key.id(), Some(&lock.aid));
        }
        Ok(match handed {
            // An earlier attempt was written, and only its majority was late.
            (HandedOver::AlreadyGone, true) => HandedOver::Released,
            (handed, _) => handed,
        })
    }

    // findAndModify returns: the server's time → handed over. Nothing → the lock is gone, or an earlier attempt has handed
    // it over: a step tells.
    //
    // A record that contains nothing but the lock is changed without a read.
    async fn replace_plain(&self, from: &Acquisition, claim: &Claim) -> Result<Option<HandedOver>> {
        let (key, rules) = (&from.key, &self.rules);
        let is_plain = claim.mode == Mode::Exclusive
            && claim.taken.is_none()
            && claim.aid != from.aid
            && !rules.fair
            && !rules.fenced;
        if !is_plain {
            return Ok(None);
        }
        let lock_at = |moment| {
            let mut record = Record::default();
            let lock = record.grant(key, claim, rules, None, moment);
            (record, lock)
        };
        let (record, _) = lock_at(new_record::unknown(Instant::now()));
        let by = new_record::instead_of_a_lock(encode(key.id(), None, &record, rules));
        let admitted = self.admit(key.id()).await?;
        let handed = self.modify(admitted, Target::exclusive(from).filter(), by, false).await?;
        Ok(handed.map(|moment| HandedOver::To(lock_at(moment).1)))
    }

    pub(super) async fn set_place(&self, id: &LockId, waiters: &Waiters) -> Result<Option<Ticket>> {
        if !self.rules.fair {
            return Ok(None);
        }
        let waiters = waiters.clone();
        let decide = move |record: &mut Record, moment: Moment| {
            Decided::promise(record.set_place(&waiters, moment))
        };
        self.step(id, Purpose::Other, decide).await
    }
}
