//! An application server that acts for one session.

use crate::{
    protocol::{Broken, Nexts, Protocol, Step},
    search::Next,
    world::*,
};

impl Protocol {
    pub(crate) fn of_client(&self, from: &World, who: Who, to: &mut Nexts) {
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
                // Also long after its lease has expired: a paused process does not know. Only a renewal
                // has to look at the clock.
                if from.primary.version < self.versions {
                    begin(Step::Saves(who), &|it| it.phase = Phase::Saving);
                }
                begin(Step::Releases(client.token), &|it| {
                    (it.phase, it.belief, it.seen) = (Phase::Releasing, 0, 0);
                });
                if self.renews && client.belief > 0 && who == Who::Alice {
                    begin(Step::Renews(who), &|it| {
                        (it.phase, it.if_answered) = (Phase::Renewing, TTL);
                    });
                }
                if self.reenters && who == Who::Alice {
                    begin(Step::Reenters(who), &|it| {
                        (it.phase, it.if_answered) = (Phase::Confirming, TTL);
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
        // A save is not repeated: the answer to the second one would not tell the outcome of the first.
        // Repeating a look or a renewal changes nothing: they are as good as new ones.
        let asks = matches!(client.phase, Phase::Asking | Phase::Tracing);
        let repeats = asks || matches!(client.phase, Phase::Releasing | Phase::GivingBack);
        if from.repetitions > 0 && client.patience > 0 && who == Who::Alice && repeats {
            let mut world = *from;
            world.repetitions -= 1;
            let again = world.client(who);
            again.reply = None;
            if asks {
                // Starts again from the beginning.
                (again.phase, again.former) = (Phase::Asking, None);
            }
            if asks && self.rules.token_for_each_attempt {
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
                (client.token, client.former) = (token, None);
                if !self.rules.count_from_the_send {
                    client.if_answered = TTL;
                }
                (client.belief, client.if_answered) = (client.if_answered, 0);
                if looks {
                    (client.phase, client.patience) = (Phase::Looking, DEADLINE);
                    let request = client.request();
                    // Where there is no room, the look is as good as lost: it is sent again or given
                    // up.
                    let _ = world.send(request);
                } else {
                    client.edits(version);
                }
            }
            (Phase::Asking, Answer::Expired(former)) => {
                (client.phase, client.former) = (Phase::Tracing, Some(former));
                let request = client.request();
                let _ = world.send(request);
            }
            (Phase::Tracing, Answer::Done) => {
                client.phase = Phase::Asking;
                let request = client.request();
                let _ = world.send(request);
            }
            (Phase::Looking, Answer::Goes(version)) if self.forms => {
                let shown = *client.form.get_or_insert(version);
                client.edits(shown);
            }
            (Phase::Looking, Answer::Goes(version)) => client.edits(version),
            // Given back unconditionally, whatever another request of the ended session was told.
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
            (Phase::Confirming, Answer::Confirmed(left, version)) => {
                // Counted from the send.
                client.belief = (left + client.if_answered).saturating_sub(TTL);
                client.edits(version);
            }
            // The page shows both texts, and the person decides.
            (Phase::Saving, Answer::Stale(version)) => {
                client.form = Some(version);
                client.edits(version);
            }
            (Phase::Saving, Answer::Saved(version)) => {
                client.form = client.form.map(|_| version);
                client.edits(version);
                if world.failovers > 0 {
                    world.acknowledged = world.acknowledged.max(version);
                }
            }
            (Phase::Releasing | Phase::GivingBack, _) => {
                let (nth, sends) = (client.token.nth, client.sends);
                client.stop();
                let is_of_this = |token: Token| (token.who, token.nth) == (who, nth);
                let is_asked_for = |it: &Request| matches!(it.verb, Verb::Acquire(t) | Verb::TakeOver(t, _) if is_of_this(t));
                let left = world
                    .primary
                    .live()
                    .filter(|it| is_of_this(it.token) && !it.orphan && !it.again);
                if sends > 0
                    && left.is_some()
                    && !world.under_way.iter().flatten().any(is_asked_for)
                {
                    return Some(Broken::ALockWasLeftBehind);
                }
            }
            // The other session holds it, or it is lost.
            _ => client.stop(),
        }
        let client = world.client(who);
        if self.vanish && client.phase == Phase::Editing {
            client.stop();
        }
        None
    }

    /// There was no answer within the deadline.
    fn give_up(&self, world: &mut World, client: Client) {
        let who = client.token.who;
        match client.phase {
            Phase::Asking | Phase::Tracing | Phase::Looking => self.give_back(world, who),
            Phase::Renewing | Phase::Confirming => world.client(who).edits(client.seen),
            Phase::Saving => {
                // A commit that has already been sent may still arrive.
                world.cancel(client.request());
                self.give_back(world, who);
            }
            _ => {
                // A lock that may still be there goes with its ttl.
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
        client.former = None;
        let request = client.request();
        let _ = world.send(request);
    }
}
