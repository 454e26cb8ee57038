//! What can happen next, and what must never have happened.

use crate::{
    rules::Rules,
    search::{Model, Next},
    world::*,
};

/// The protocol, with or without one of its rules.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Protocol {
    pub(crate) rules: Rules,
    /// How often each session asks for the lock.
    pub(crate) asks: [u8; 2],
    /// Whether Alice logs out.
    pub(crate) logout: bool,
    /// Whether time passes.
    pub(crate) clock: bool,
    pub(crate) failovers: u8,
    pub(crate) repetitions: u8,
    /// What alone is looked for.
    pub(crate) only: Option<Broken>,
}

/// What must never be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    TwoBelieveAtOnce,
    AStaleSaveOverwrote,
    AReleaseRemovedAnotherLock,
    ALockWasLeftBehind,
    AnEndedSessionHasALock,
    AnEndedSessionHasALockForGood,
    AnAcknowledgedSaveIsGone,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    Asks(Token),
    Renews(Who),
    Saves(Who),
    Releases(Token),
    Notices(Who),
    LogsOut,
    SendsAgain(Option<Who>),
    GivesUp(Who),
    Hears(Who, Answer),
    LogoutHears,
    CarriedOut(Verb, Option<Answer>),
    Replicated,
    FailsOver,
    RollsBack,
    Ticks,
}

pub(crate) type Nexts = Vec<Next<Protocol>>;

impl Model for Protocol {
    type State = World;
    type Step = Step;
    type Broken = Broken;

    fn begin(&self) -> World {
        World::new(self.failovers, self.repetitions)
    }

    fn steps(&self, from: &World, to: &mut Nexts) {
        for who in [Who::Alice, Who::Bob] {
            self.of_client(from, who, to);
        }
        self.of_logout(from, to);
        self.of_database(from, to);
        if self.clock {
            let mut world = *from;
            world.tick();
            self.then(Step::Ticks, world, to);
        }
        for next in to {
            next.broken = next.broken.filter(|broken| self.is_wanted(*broken));
        }
    }
}

impl Protocol {
    fn is_wanted(&self, broken: Broken) -> bool {
        self.only.is_none_or(|only| only == broken)
    }

    pub(crate) fn then(&self, step: Step, state: World, to: &mut Nexts) {
        let broken = self.is_broken(&state);
        to.push(Next { step, state, broken });
    }

    /// What one can see in a state. What only shows in a step is seen there.
    pub(crate) fn is_broken(&self, world: &World) -> Option<Broken> {
        // What an end takes away it tells nobody: from its beginning on its belief does not count.
        let believes = |who: Who| {
            world.clients[who as usize].believes() && !(who == Who::Alice && is_ending(world))
        };
        if believes(Who::Alice) && believes(Who::Bob) {
            return Some(Broken::TwoBelieveAtOnce);
        }
        if let (Logout::Done(ticks), Some(lock)) = (world.logout, world.primary.lock)
            && lock.token.who == Who::Alice
        {
            let alice = &world.clients[Who::Alice as usize];
            let nobody_sees_to_it = !alice.is_waiting()
                && !world
                    .under_way
                    .iter()
                    .flatten()
                    .any(|it| matches!(it.verb, Verb::Release(_) | Verb::Retract(_)));
            if nobody_sees_to_it && !lock.orphan {
                return Some(Broken::AnEndedSessionHasALock);
            }
            if ticks == FOR_GOOD {
                return Some(Broken::AnEndedSessionHasALockForGood);
            }
        }
        None
    }
}

fn is_ending(world: &World) -> bool {
    world.logout != Logout::No
}
