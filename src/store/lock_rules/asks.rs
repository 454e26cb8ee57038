//! The rules for what others ask the holder of a lock. They change nothing else.

use std::time::Duration;

use uuid::Uuid;

use crate::{
    ask::{Answer, Ask, MAX_ASKS},
    lock::{Aid, Mode},
    store::{
        Acquisition, Answered, Asked,
        lock_rules::{Grant, Moment, Record},
    },
};

/// How long an ask stands after its asker has last repeated it: a page that waits repeats it about every 25 s.
const LEASE: Duration = Duration::from_secs(90);

/// An ask, and until when it stands.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::store) struct Standing {
    pub(in crate::store) ask: Ask,
    pub(in crate::store) until: Duration,
}

impl Record {
    pub(in crate::store) fn ask(&mut self, ask: &Ask, moment: Moment) -> Asked {
        let now = moment.now;
        let Some(grant) = self.grants.iter_mut().find(|it| it.is_live(now)) else {
            return Asked::Free;
        };
        if grant.mode == Mode::Shared || grant.token.is_none() || grant.aid == ask.aid {
            return Asked::NobodyHears;
        }
        let asks = &mut grant.asks;
        asks.retain(|it| it.until > now);
        let user = ask.by.user.as_deref();
        let place = asks.iter().position(|it| it.ask.is_of(&ask.aid, user));
        if place.is_none() && asks.len() >= MAX_ASKS {
            return Asked::TooMany;
        }
        let place = place.unwrap_or(asks.len());
        let mut standing =
            Standing { ask: Ask { at: moment.date, ..ask.clone() }, until: now + LEASE };
        match asks.get_mut(place) {
            None => asks.push(standing),
            Some(before) => {
                if before.ask.message == ask.message {
                    let Ask { aid, by, .. } = standing.ask;
                    standing.ask = Ask { aid, by, ..before.ask.clone() };
                }
                *before = standing;
            }
        }
        let before = asks[..place].iter().map(|it| it.ask.aid.clone()).collect();
        Asked::Stands { ask: asks[place].ask.clone(), before }
    }

    pub(in crate::store) fn answer(
        &mut self,
        held: &Acquisition,
        id: Uuid,
        answer: &Answer,
        now: Duration,
    ) -> Answered {
        let is_held = |it: &&mut Grant| it.is_acquisition(&held.aid, held.token) && it.is_live(now);
        let Some(grant) = self.grants.iter_mut().find(is_held) else { return Answered::Lost };
        match grant.asks.iter_mut().find(|it| it.ask.id == id && it.until > now) {
            None => Answered::NoSuchAsk,
            Some(standing) => {
                standing.ask.answer = Some(answer.clone());
                Answered::Told
            }
        }
    }

    /// True if there was an ask of this person.
    pub(in crate::store) fn withdraw(&mut self, aid: &Aid, user: Option<&str>) -> bool {
        let withdraw = |grant: &mut Grant| {
            let before = grant.asks.len();
            grant.asks.retain(|it| !it.ask.is_of(aid, user));
            grant.asks.len() < before
        };
        self.grants.iter_mut().any(withdraw)
    }
}

impl Grant {
    pub(super) fn asks_at(&self, now: Duration) -> Vec<Ask> {
        self.asks.iter().filter(|it| it.until > now).map(|it| it.ask.clone()).collect()
    }
}
