//! The rules for the asks for a lock. They change nothing but the asks.

use std::time::Duration;

use uuid::Uuid;

use crate::{
    lock::{Aid, Answer, Ask, Mode},
    store::{
        Acquisition, Answered, Asked,
        lock_rules::{Grant, Moment, Record, StandingAsk},
    },
};

/// How many asks one lock has at most, each of another person.
pub const MAX_ASKS: usize = 8;
/// How long an ask stands after its asker has last repeated it: a page that waits repeats it every 30 to 55 s.
const LEASE: Duration = Duration::from_secs(90);
/// A repetition changes nothing while more than this is left: other writes of the record need not wait for it.
const ENOUGH: Duration = Duration::from_secs(60);

impl Record {
    pub fn ask(&mut self, ask: &Ask, again: bool, moment: Moment) -> Asked {
        let now = moment.now;
        let Some(grant) = self.grants.iter_mut().find(|it| it.is_live(now)) else {
            return if again { Asked::Gone } else { Asked::Free };
        };
        let hears =
            grant.mode == Mode::Exclusive && grant.token.is_some() && grant.aid.hears_asks();
        if !hears || grant.aid == ask.aid {
            return Asked::NobodyHears;
        }
        let asks = &mut grant.asks;
        asks.retain(|it| it.until > now);
        let own = asks.iter().position(|it| it.ask.is_of(Some(&ask.aid), ask.by.user.as_deref()));
        let until = now + LEASE;
        let place = match own {
            None if again => return Asked::Gone,
            None if asks.len() >= MAX_ASKS => return Asked::TooMany,
            None => {
                asks.push(StandingAsk { ask: Ask { at: moment.date, ..ask.clone() }, until });
                asks.len() - 1
            }
            Some(place) => {
                let StandingAsk { ask: standing, until: stands_until } = &mut asks[place];
                if !again && standing.message != ask.message {
                    *standing = Ask { at: moment.date, ..ask.clone() };
                    *stands_until = until;
                } else if *stands_until <= now + ENOUGH || standing.aid != ask.aid {
                    (standing.aid, *stands_until) = (ask.aid.clone(), until);
                }
                place
            }
        };
        let before = asks[..place].iter().map(|it| it.ask.aid.clone()).collect();
        Asked::Stands { ask: asks[place].ask.clone(), before }
    }

    pub fn answer(
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
    pub fn withdraw(&mut self, aid: &Aid, user: Option<&str>) -> bool {
        let withdraw = |grant: &mut Grant| {
            let before = grant.asks.len();
            grant.asks.retain(|it| !it.ask.is_of(Some(aid), user));
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
