//! How the database handles the requests that arrive, and what a failover does to it.

use crate::{
    protocol::{Broken, Nexts, Protocol, Step},
    save::{commit, conflicts, has_to_wait},
    search::Next,
    world::*,
};

impl Protocol {
    pub(crate) fn of_database(&self, from: &World, to: &mut Nexts) {
        for at in 0..from.under_way.len() {
            let Some(request) = from.under_way[at] else { continue };
            // Handling either of two equal requests leads to the same state.
            if at > 0 && from.under_way[at - 1] == from.under_way[at] {
                continue;
            }
            if self.transactions && has_to_wait(from, request.verb) {
                continue;
            }
            let mut world = *from;
            world.remove(at);
            if let Verb::Confirm(token) = request.verb {
                self.read(world, token, from.majority, to);
                if let Some(deposed) = from.deposed {
                    self.read(world, token, deposed, to);
                }
                continue;
            }
            let (answer, broken) = self.carry_out(&mut world, request);
            if self.transactions && conflicts(from, &world) {
                continue;
            }
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

    /// A re-entry reads this state of the database.
    fn read(&self, mut world: World, token: Token, database: Database, to: &mut Nexts) {
        let is_gone = world.majority.live().is_none_or(|lock| lock.token != token);
        let lock = database.live().filter(|lock| lock.token == token);
        let answer =
            lock.map_or(Answer::Lost, |it| Answer::Confirmed(it.left as u8, database.version));
        let broken = (lock.is_some() && is_gone).then_some(Broken::AGoneLockWasConfirmed);
        let verb = Verb::Confirm(token);
        let client = world.client(token.who);
        let answer = (client.is_waiting() && client.request() == verb).then_some(answer);
        if let Some(answer) = answer {
            client.reply = Some(Reply { answer, durable: true });
        }
        to.push(Next { step: Step::CarriedOut(verb, answer), state: world, broken });
    }

    /// The connections break, and writes that are not majority-committed may be lost.
    fn fail_over(&self, from: &World, to: &mut Nexts) {
        let mut world = *from;
        world.failovers -= 1;
        if !self.rules.deposed_answers_no_reads {
            world.deposed = Some(from.majority);
        }
        // Open transactions end with their primary, and the sweep that is under way fails.
        world.sweep = Sweep::Idle;
        for it in &mut world.under_way {
            *it = it.filter(|request| !matches!(request.verb, Verb::Commit(..)));
        }
        world.under_way.sort_unstable();
        // Acknowledged writes have been answered. Whether the other answers arrive does not matter,
        // because nobody waits for them.
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

    /// One atomic command, by the server's clock.
    fn carry_out(&self, world: &mut World, request: Request) -> (Option<Answer>, Option<Broken>) {
        let verb = request.verb;
        let mut broken = None;
        let counts = self.counts_leases(world);
        let database = &mut world.primary;
        let answer = match verb {
            Verb::Acquire(token) => self.acquire(world, token, None),
            Verb::TakeOver(token, former) => self.acquire(world, token, Some(former)),
            Verb::Look(Who::Alice) if database.ended => Answer::Ended,
            Verb::Look(_) => Answer::Goes(database.version),
            Verb::Renew(token) => {
                let mine = |it: &&mut Lock| it.is_live() && it.token.who == token.who;
                match database.lock.as_mut().filter(mine) {
                    Some(lock) => {
                        lock.renew(counts);
                        if lock.token == token { Answer::Renewed } else { Answer::Lost }
                    }
                    None => Answer::Lost,
                }
            }
            Verb::Save(token, seen) if self.transactions => {
                return (Some(self.touch(world, token, seen)), None);
            }
            Verb::Commit(token, seen, changed) => {
                if seen != database.version {
                    broken = Some(Broken::AStaleSaveOverwrote);
                }
                commit(database, token, changed, request.age, counts)
            }
            Verb::Save(token, seen) => {
                let guard = database.lock.as_mut().filter(|it| it.is_live() && it.token == token);
                if self.rules.guarded_save && guard.is_none() {
                    Answer::Lost
                } else if self.forms
                    && self.rules.save_compares_versions
                    && seen != database.version
                {
                    Answer::Stale(database.version)
                } else {
                    if let Some(lock) = guard {
                        lock.renew(counts);
                        lock.again = true;
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
                self.leave_tombstone(database);
                Answer::Done
            }
            Verb::RemoveAll => {
                self.release_ended(database);
                Answer::Done
            }
            Verb::Trace(former) => {
                database.leave_trace(former);
                Answer::Done
            }
            Verb::Ask(read) => {
                // The same record, that many ticks later.
                let now = Lock { left: read.left - request.age as i8, ..read };
                let is_same = database.live() == Some(now);
                if now.is_live() && (is_same || !self.rules.ask_compares_record) {
                    database.lock = Some(Lock { asked: true, ..now });
                }
                return (Some(Answer::Done), None);
            }
            Verb::Confirm(_) => unreachable!("a read"),
            Verb::Break(token) => {
                let spares = self.rules.break_spares_expired;
                let is_meant = |it: &Lock| it.token == token && (it.is_live() || !spares);
                if let Some(lock) = database.lock.take_if(|it| is_meant(it)) {
                    self.owe(database, lock);
                    world.broken = Some(token);
                }
                return (Some(Answer::Done), None);
            }
        };
        (self.reply(world, verb, answer), broken)
    }

    /// `traced` is the expired lock of which the reaper will hear.
    fn acquire(&self, world: &mut World, token: Token, traced: Option<Former>) -> Answer {
        // Not after another attempt was answered.
        let client = &world.clients[token.who as usize];
        let waits =
            (client.phase, client.asked) == (Phase::Asking, token.nth) && client.reply.is_none();
        let counts = self.counts_leases(world);
        let database = &mut world.primary;
        match &mut database.lock {
            Some(lock) if lock.is_live() && self.is_same_claim(lock.token, token) => {
                lock.renew(counts);
                Answer::Granted(lock.token)
            }
            Some(lock) if lock.is_live() && lock.token.who == token.who => {
                lock.renew(counts);
                lock.again = true;
                lock.orphan |= !waits;
                Answer::AlreadyMine(lock.token)
            }
            Some(lock) if lock.is_live() => Answer::Held,
            Some(lock)
                if self.reaper
                    && self.rules.former_to_reaper
                    && lock.token.who != token.who
                    && traced != Some(lock.former()) =>
            {
                Answer::Expired(lock.former())
            }
            free => {
                let granted = Lock {
                    token,
                    left: LEASE,
                    lease: 0,
                    orphan: !waits,
                    again: false,
                    asked: false,
                };
                let former = free.replace(granted).filter(|it| it.token.who != token.who);
                if let Some(former) = former {
                    self.owe(database, former);
                }
                // A session that has ended does not come back.
                if !(token.who == Who::Alice && database.ended) {
                    database.owed[token.who as usize] = Leases::NONE;
                }
                Answer::Granted(token)
            }
        }
    }

    /// Leases are counted only while some participant knows a lease by its number.
    fn counts_leases(&self, world: &World) -> bool {
        let Database { traces, names, told, .. } = world.primary;
        let is_known = || {
            traces.iter().flatten().any(|trace| *trace != Trace::No)
                || names.iter().chain(&told).any(|leases| *leases != Leases::NONE)
        };
        self.reaper && self.rules.trace_names_lease && (is_known() || world.is_passing_on())
    }

    fn is_same_claim(&self, one: Token, other: Token) -> bool {
        let claim = |token: Token| (token.who, token.nth);
        one == other || self.rules.attempts_are_one_claim && claim(one) == claim(other)
    }

    /// Sends the answer to the client that still waits for it, if any.
    fn reply(&self, world: &mut World, verb: Verb, answer: Answer) -> Option<Answer> {
        let reads = matches!(verb, Verb::Look(_));
        let durable = !self.rules.majority
            || reads
            || world.primary == world.majority && answer == Answer::Lost;
        let to = match verb {
            Verb::Tombstone if world.logout == self.stage_of(verb) => &mut world.logout_reply,
            Verb::RemoveAll if world.logout == self.stage_of(verb) => &mut world.logout_reply,
            Verb::Tombstone | Verb::RemoveAll | Verb::Break(_) | Verb::Ask(_) => return None,
            Verb::Look(who) => {
                let client = world.client(who);
                if client.phase != Phase::Looking {
                    return None;
                }
                &mut client.reply
            }
            Verb::Trace(former) => {
                let client = world.client(former.token.who.other());
                if client.request() != verb {
                    return None;
                }
                &mut client.reply
            }
            Verb::Commit(token, seen, _) => {
                let client = world.client(token.who);
                if client.request() != Verb::Save(token, seen) {
                    return None;
                }
                &mut client.reply
            }
            Verb::Acquire(token)
            | Verb::TakeOver(token, _)
            | Verb::Renew(token)
            | Verb::Confirm(token)
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
}

fn replicate(world: &mut World) {
    world.majority = world.primary;
    let replies = world.clients.iter_mut().map(|client| &mut client.reply);
    for reply in replies.chain([&mut world.logout_reply]).flatten() {
        reply.durable = true;
    }
}
