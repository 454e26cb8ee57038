//! The possible steps, and the states that must never occur.

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
    /// Whether a session vanishes when it has got the lock, so that the lock expires. Alice logs out only after that.
    pub(crate) vanish: bool,
    /// Whether Alice renews.
    pub(crate) renews: bool,
    /// Whether Alice's requests enter again by a read.
    pub(crate) reenters: bool,
    /// How many versions of the document the sessions may make.
    pub(crate) versions: u8,
    /// Whether a save is a transaction: touch and write, then commit. Otherwise it is a single step.
    pub(crate) transactions: bool,
    /// Whether Alice's page still shows the version that it loaded under an earlier lock: a form of yesterday.
    pub(crate) forms: bool,
    /// How often an administrator breaks a lock of Alice's.
    pub(crate) breaks: u8,
    /// How often a stranger asks for the lock.
    pub(crate) stranger_asks: u8,
    /// How often the clock of the server steps back by a tick.
    pub(crate) steps_back: u8,
    /// Whether there is a reaper, which announces idle sessions.
    pub(crate) reaper: bool,
    /// The only violation to look for, if set.
    pub(crate) only: Option<Broken>,
}

/// The violations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    TwoBelieveAtOnce,
    AStaleSaveOverwrote,
    AReleaseRemovedAnotherLock,
    ALockWasLeftBehind,
    AnEndedSessionHasALock,
    AnEndedSessionHasALockForGood,
    AnAcknowledgedSaveIsGone,
    AnIdleSessionIsForgotten,
    ALostLockIsNeverTold,
    ALockIsToldTwice,
    AGoneLockWasConfirmed,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    Asks(Token),
    Renews(Who),
    Reenters(Who),
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
    StepsBack,
    Breaks(Token),
    ReadsToAsk(Token),
    Finds(Who),
    LeavesAwake(Who),
    Claims(Who),
    SeesTraces(Who),
    Announces(Who),
    Withdraws(Who),
    ReaperDies,
}

pub(crate) type Nexts = Vec<Next<Protocol>>;

impl Model for Protocol {
    type State = World;
    type Step = Step;
    type Broken = Broken;

    fn begin(&self) -> World {
        World {
            failovers: self.failovers,
            repetitions: self.repetitions,
            breaks: self.breaks,
            asks: self.stranger_asks,
            steps_back: self.steps_back,
            ..World::new()
        }
    }

    fn steps(&self, from: &World, to: &mut Nexts) {
        for who in [Who::Alice, Who::Bob] {
            self.of_client(from, who, to);
        }
        self.of_logout(from, to);
        self.of_database(from, to);
        if self.clock {
            let mut world = *from;
            world.tick(self.expired_stay());
            self.then(Step::Ticks, world, to);
        }
        if from.steps_back > 0 && !(self.rules.expired_stays_expired && from.is_passing_on()) {
            let mut world = World { steps_back: from.steps_back - 1, ..*from };
            world.step_back();
            self.then(Step::StepsBack, world, to);
        }
        let of_alice = from.primary.live().filter(|lock| lock.token.who == Who::Alice);
        if let (Some(lock), 1..) = (of_alice, from.breaks) {
            let mut world = World { breaks: from.breaks - 1, ..*from };
            if world.send(Verb::Break(lock.token)) {
                self.then(Step::Breaks(lock.token), world, to);
            }
        }
        if let (Some(lock), 1..) = (from.primary.live(), from.asks) {
            let mut world = World { asks: from.asks - 1, ..*from };
            if world.send(Verb::Ask(lock)) {
                self.then(Step::ReadsToAsk(lock.token), world, to);
            }
        }
        if self.reaper {
            self.of_reaper(from, to);
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

    /// Where no rule can tell the difference, an expired lock counts as gone, which saves states.
    fn expired_stay(&self) -> bool {
        self.transactions || self.reaper
    }

    pub(crate) fn then(&self, step: Step, state: World, to: &mut Nexts) {
        let broken = self.is_broken(&state);
        to.push(Next { step, state, broken });
    }

    /// The violation that a state shows. Violations that only a step shows are found there.
    pub(crate) fn is_broken(&self, world: &World) -> Option<Broken> {
        // Neither an end nor a break reaches the holder in time, so from its beginning on, the holder's
        // belief does not count.
        let believes = |who: Who| {
            let client = &world.clients[who as usize];
            let is_taken_away = who == Who::Alice && is_ending(world);
            client.believes() && !is_taken_away && world.broken != Some(client.token)
        };
        if believes(Who::Alice) && believes(Who::Bob) {
            return Some(Broken::TwoBelieveAtOnce);
        }
        if let (Logout::Done(ticks), Some(lock)) = (world.logout, world.primary.live())
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
        self.forgets(&world.primary)
    }
}

fn is_ending(world: &World) -> bool {
    world.logout != Logout::No
}
