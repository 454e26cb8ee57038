//! The asks for a lock.

use uuid::Uuid;

use crate::{
    key::LockKey,
    lock::{Aid, Answer, Ask},
    store::{
        Acquisition, Answered, Asked,
        lock_rules::{Moment, Record},
        mongo::{LockCollection, admission::Purpose, error::Result, step::Decided},
    },
};

// Each verb is a step, and `step.rs` lists the answers of its commands. A repeated attempt finds the work of the earlier one.
impl LockCollection<'_> {
    pub(super) async fn ask(&self, key: &LockKey, ask: &Ask, again: bool) -> Result<Asked> {
        let ask = ask.clone();
        let rule = move |record: &mut Record, moment: Moment| {
            Decided::promise(record.ask(&ask, again, moment))
        };
        self.step(key.id(), Purpose::Other, rule).await
    }

    pub(super) async fn answer(
        &self,
        held: &Acquisition,
        ask: Uuid,
        answer: &Answer,
    ) -> Result<Answered> {
        let (it, answer) = (held.clone(), answer.clone());
        let rule = move |record: &mut Record, moment: Moment| {
            Decided::promise(record.answer(&it, ask, &answer, moment.now))
        };
        self.step(held.key.id(), Purpose::Other, rule).await
    }

    pub(super) async fn withdraw(
        &self,
        key: &LockKey,
        aid: &Aid,
        user: Option<&str>,
    ) -> Result<()> {
        let (aid, user) = (aid.clone(), user.map(str::to_owned));
        let rule = move |record: &mut Record, _| {
            record.withdraw(&aid, user.as_deref());
            Decided::promise(())
        };
        self.step(key.id(), Purpose::Other, rule).await
    }
}
