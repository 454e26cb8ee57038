//! What can happen next, and what must never have happened.

use crate::{
    rules::Rules,
    search::{Model, Next},
    world::*,
};

/// How often the document is saved.
const SAVES: u8 = 2;

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

type Nexts = Vec<Next<Protocol>>;

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

    fn then(&self, step: Step, state: World, to: &mut Nexts) {
        let broken = self.is_broken(&state);
        to.push(Next { step, state, broken });
    }

    /// What one can see in a state. What only shows in a step is seen there.
    fn is_broken(&self, world: &World) -> Option<Broken> {
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

    fn of_client(&self, from: &World, who: Who, to: &mut Nexts) {
        let client = from.clients[who as usize];
        let mut begin = |step, change: &dyn Fn(&mut Client)| {
            let mut world = *from;
            let client = world.client(who);
            change(client);
            (client.patience, client.reply) = (DEADLINE, None);
            let request = client.request();
            if world.send(request) {
                self.then(step, world, to);
            }
        };
        match client.phase {
            Phase::Idle if client.asked < self.asks[who as usize] => {
                let token = Token { who, nth: client.asked + 1, send: 0 };
                begin(Step::Asks(token), &|it| {
                    (it.phase, it.token, it.if_answered) = (Phase::Asking, token, TTL);
                    (it.asked, it.sends) = (token.nth, 1);
                });
            }
            Phase::Editing => {
                // Also long after its lease: a process that was paused does not know. But for
                // renewing it has to look at the clock.
                if from.primary.version < SAVES {
                    begin(Step::Saves(who), &|it| it.phase = Phase::Saving);
                }
                begin(Step::Releases(client.token), &|it| {
                    (it.phase, it.belief, it.seen) = (Phase::Releasing, 0, 0);
                });
                if client.belief > 0 && who == Who::Alice {
                    begin(Step::Renews(who), &|it| {
                        (it.phase, it.if_answered) = (Phase::Renewing, TTL);
                    });
                }
                if client.belief == 0 {
                    let mut world = *from;
                    world.client(who).stop();
                    self.then(Step::Notices(who), world, to);
                }
            }
            _ => {}
        }
        if client.is_waiting() {
            self.of_waiting(from, client, to);
        }
    }

    fn of_waiting(&self, from: &World, client: Client, to: &mut Nexts) {
        let who = client.token.who;
        if let Some(reply) = client.reply.filter(|reply| reply.durable) {
            let mut world = *from;
            let broken = self.hear(&mut world, who, reply.answer);
            let broken = broken.or_else(|| self.is_broken(&world));
            to.push(Next { step: Step::Hears(who, reply.answer), state: world, broken });
        }
        // A save is not: the answer to the second would not tell what became of the first. That a
        // look or a renewal is changes nothing: they are as good as new ones.
        let repeats = matches!(client.phase, Phase::Asking | Phase::Releasing | Phase::GivingBack);
        if from.repetitions > 0 && client.patience > 0 && who == Who::Alice && repeats {
            let mut world = *from;
            world.repetitions -= 1;
            let again = world.client(who);
            again.reply = None;
            if client.phase == Phase::Asking && self.rules.token_for_each_attempt {
                again.token.send = client.sends;
                again.sends += 1;
            }
            let request = again.request();
            if world.send(request) {
                self.then(Step::SendsAgain(Some(who)), world, to);
            }
        }
        let waits_on = client.phase == Phase::Releasing
            && self.rules.releases_are_not_overtaken
            && from.under_way.iter().flatten().any(|it| it.verb == client.request());
        if client.patience == 0 && !waits_on {
            let mut world = *from;
            self.give_up(&mut world, client);
            self.then(Step::GivesUp(who), world, to);
        }
    }

    fn hear(&self, world: &mut World, who: Who, answer: Answer) -> Option<Broken> {
        // Bob never logs out.
        let looks = self.rules.look_for_tombstone && who == Who::Alice;
        let (asking, version) = (world.clients[who as usize].phase, world.primary.version);
        let client = world.client(who);
        client.reply = None;
        match (asking, answer) {
            (Phase::Asking, Answer::Granted(token) | Answer::AlreadyMine(token)) => {
                client.token = token;
                if !self.rules.count_from_the_send {
                    client.if_answered = TTL;
                }
                (client.belief, client.if_answered) = (client.if_answered, 0);
                if looks {
                    (client.phase, client.patience) = (Phase::Looking, DEADLINE);
                    let request = client.request();
                    // Where there is no room the look is as good as lost, and sent again or given up.
                    let _ = world.send(request);
                } else {
                    client.edits(version);
                }
            }
            (Phase::Looking, Answer::Goes(version)) => client.edits(version),
            // Outright, whatever other request of the ended session was told.
            (Phase::Looking, _) => {
                (client.phase, client.patience) = (Phase::Releasing, DEADLINE);
                (client.belief, client.if_answered, client.seen) = (0, 0, 0);
                let request = client.request();
                let _ = world.send(request);
            }
            (Phase::Renewing, Answer::Renewed) => {
                client.belief = client.if_answered;
                client.edits(client.seen);
            }
            (Phase::Saving, Answer::Saved(version)) => {
                client.edits(version);
                if world.failovers > 0 {
                    world.acknowledged = world.acknowledged.max(version);
                }
            }
            (Phase::Releasing | Phase::GivingBack, _) => {
                let (nth, sends) = (client.token.nth, client.sends);
                client.stop();
                let is_of_this = |token: Token| (token.who, token.nth) == (who, nth);
                let is_asked_for =
                    |it: &Request| matches!(it.verb, Verb::Acquire(t) if is_of_this(t));
                let left =
                    world.primary.lock.filter(|it| is_of_this(it.token) && !it.orphan && !it.again);
                if sends > 0
                    && left.is_some()
                    && !world.under_way.iter().flatten().any(is_asked_for)
                {
                    return Some(Broken::ALockWasLeftBehind);
                }
            }
            // Held, or lost.
            _ => client.stop(),
        }
        None
    }

    /// No answer within the deadline.
    fn give_up(&self, world: &mut World, client: Client) {
        let who = client.token.who;
        match client.phase {
            Phase::Asking | Phase::Looking => self.give_back(world, who),
            Phase::Renewing => world.client(who).edits(client.seen),
            Phase::Saving => {
                world.cancel(client.request());
                self.give_back(world, who);
            }
            _ => {
                // What it does not know to be gone goes with its ttl.
                world.client(who).stop();
                for database in [&mut world.primary, &mut world.majority] {
                    if let Some(lock) = database.lock.as_mut().filter(|it| it.token.who == who) {
                        lock.orphan = true;
                    }
                }
            }
        }
    }

    fn give_back(&self, world: &mut World, who: Who) {
        let client = world.client(who);
        (client.phase, client.patience, client.reply) = (Phase::GivingBack, DEADLINE, None);
        (client.belief, client.if_answered, client.seen) = (0, 0, 0);
        let request = client.request();
        let _ = world.send(request);
    }

    fn of_logout(&self, from: &World, to: &mut Nexts) {
        let verbs = if self.rules.tombstone_first {
            [Verb::Tombstone, Verb::RemoveAll]
        } else {
            [Verb::RemoveAll, Verb::Tombstone]
        };
        let mut send = |step, logout, verb, repetitions| {
            let mut world = World { logout, logout_reply: None, repetitions, ..*from };
            if world.send(verb) {
                self.then(step, world, to);
            }
        };
        let heard = from.logout_reply.is_some_and(|reply| reply.durable);
        match from.logout {
            Logout::No if self.logout => {
                send(Step::LogsOut, Logout::First, verbs[0], from.repetitions)
            }
            Logout::First if heard => {
                send(Step::LogoutHears, Logout::Second, verbs[1], from.repetitions);
            }
            Logout::Second if heard => {
                let world = World { logout: Logout::Done(0), logout_reply: None, ..*from };
                self.then(Step::LogoutHears, world, to);
            }
            Logout::First | Logout::Second if from.repetitions > 0 => {
                let verb = verbs[usize::from(from.logout == Logout::Second)];
                send(Step::SendsAgain(None), from.logout, verb, from.repetitions - 1);
            }
            _ => {}
        }
    }

    fn of_database(&self, from: &World, to: &mut Nexts) {
        for at in 0..from.under_way.len() {
            let Some(request) = from.under_way[at] else { continue };
            // The same request twice leads to the same twice.
            if at > 0 && from.under_way[at - 1] == from.under_way[at] {
                continue;
            }
            let mut world = *from;
            world.remove(at);
            let (answer, broken) = self.carry_out(&mut world, request.verb);
            if world.failovers == 0 {
                replicate(&mut world);
            }
            let broken = broken.or_else(|| self.is_broken(&world));
            to.push(Next { step: Step::CarriedOut(request.verb, answer), state: world, broken });
        }
        if from.failovers > 0 {
            let mut world = *from;
            replicate(&mut world);
            if world != *from {
                self.then(Step::Replicated, world, to);
            }
            self.fail_over(from, to);
        }
    }

    /// The connections break, and what no majority has may be gone.
    fn fail_over(&self, from: &World, to: &mut Nexts) {
        let mut world = *from;
        world.failovers -= 1;
        // What was acknowledged has been sent. Whether the rest arrives does not matter: it is not
        // waited for.
        let forget = |reply: &mut Option<Reply>| *reply = reply.filter(|reply| reply.durable);
        world.clients.iter_mut().for_each(|client| forget(&mut client.reply));
        forget(&mut world.logout_reply);
        let mut kept = world;
        replicate(&mut kept);
        self.then(Step::FailsOver, kept, to);
        if from.primary != from.majority {
            world.primary = world.majority;
            let gone = world.acknowledged > world.primary.version;
            let broken = gone.then_some(Broken::AnAcknowledgedSaveIsGone);
            let broken = broken.or_else(|| self.is_broken(&world));
            to.push(Next { step: Step::RollsBack, state: world, broken });
        }
    }

    /// One command, atomic, by the clock of the server.
    fn carry_out(&self, world: &mut World, verb: Verb) -> (Option<Answer>, Option<Broken>) {
        let database = &mut world.primary;
        let mut broken = None;
        let answer = match verb {
            Verb::Acquire(token) => {
                // Not after another attempt was answered.
                let client = &world.clients[token.who as usize];
                let waits = (client.phase, client.asked) == (Phase::Asking, token.nth)
                    && client.reply.is_none();
                match &mut database.lock {
                    Some(lock) if self.is_same_claim(lock.token, token) => {
                        lock.left = TTL;
                        Answer::Granted(lock.token)
                    }
                    Some(lock) if lock.token.who == token.who => {
                        (lock.left, lock.again) = (TTL, true);
                        lock.orphan |= !waits;
                        Answer::AlreadyMine(lock.token)
                    }
                    Some(_) => Answer::Held,
                    free => {
                        *free = Some(Lock { token, left: TTL, orphan: !waits, again: false });
                        Answer::Granted(token)
                    }
                }
            }
            Verb::Look(Who::Alice) if database.ended => Answer::Ended,
            Verb::Look(_) => Answer::Goes(database.version),
            Verb::Renew(token) => {
                match database.lock.as_mut().filter(|it| it.token.who == token.who) {
                    Some(lock) => {
                        lock.left = TTL;
                        if lock.token == token { Answer::Renewed } else { Answer::Lost }
                    }
                    None => Answer::Lost,
                }
            }
            Verb::Save(token, seen) => {
                let guard = database.lock.as_mut().filter(|it| it.token == token);
                if self.rules.guarded_save && guard.is_none() {
                    Answer::Lost
                } else {
                    if let Some(lock) = guard {
                        (lock.left, lock.again) = (TTL, true);
                    }
                    if seen != database.version {
                        broken = Some(Broken::AStaleSaveOverwrote);
                    }
                    database.version += 1;
                    Answer::Saved(database.version)
                }
            }
            Verb::Release(token) | Verb::Retract(token) => {
                let spares_told = verb == Verb::Retract(token) && self.rules.retract_unless_told;
                let is_this = |it: &Lock| match verb {
                    Verb::Retract(_) => self.is_same_claim(it.token, token),
                    _ => it.token == token,
                };
                let is_meant = |it: &Lock| match self.rules.release_by_token {
                    true => is_this(it) && !(it.again && spares_told),
                    false => it.token.who == token.who,
                };
                if let Some(lock) = database.lock.take_if(|it| is_meant(it))
                    && !is_this(&lock)
                {
                    broken = Some(Broken::AReleaseRemovedAnotherLock);
                }
                Answer::Done
            }
            Verb::Tombstone => {
                database.ended = true;
                Answer::Done
            }
            Verb::RemoveAll => {
                if database.is_held_by(Who::Alice) {
                    database.lock = None;
                }
                Answer::Done
            }
        };
        (self.reply(world, verb, answer), broken)
    }

    fn is_same_claim(&self, one: Token, other: Token) -> bool {
        let claim = |token: Token| (token.who, token.nth);
        one == other || self.rules.attempts_are_one_claim && claim(one) == claim(other)
    }

    /// Sends the answer to whoever still waits for it.
    fn reply(&self, world: &mut World, verb: Verb, answer: Answer) -> Option<Answer> {
        let reads = matches!(verb, Verb::Look(_));
        let durable = !self.rules.majority
            || reads
            || world.primary == world.majority && answer == Answer::Lost;
        let to = match verb {
            Verb::Tombstone if world.logout == self.stage_of(verb) => &mut world.logout_reply,
            Verb::RemoveAll if world.logout == self.stage_of(verb) => &mut world.logout_reply,
            Verb::Tombstone | Verb::RemoveAll => return None,
            Verb::Look(who) => {
                let client = world.client(who);
                if client.phase != Phase::Looking {
                    return None;
                }
                &mut client.reply
            }
            Verb::Acquire(token)
            | Verb::Renew(token)
            | Verb::Save(token, _)
            | Verb::Release(token)
            | Verb::Retract(token) => {
                let client = world.client(token.who);
                if !client.is_waiting() || client.request() != verb {
                    return None;
                }
                &mut client.reply
            }
        };
        *to = Some(Reply { answer, durable });
        Some(answer)
    }

    fn stage_of(&self, verb: Verb) -> Logout {
        let first = (verb == Verb::Tombstone) == self.rules.tombstone_first;
        if first { Logout::First } else { Logout::Second }
    }
}

fn is_ending(world: &World) -> bool {
    world.logout != Logout::No
}

fn replicate(world: &mut World) {
    world.majority = world.primary;
    let replies = world.clients.iter_mut().map(|client| &mut client.reply);
    for reply in replies.chain([&mut world.logout_reply]).flatten() {
        reply.durable = true;
    }
}
