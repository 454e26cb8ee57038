//! Alice logs out.

use crate::{
    protocol::{Nexts, Protocol, Step},
    world::*,
};

impl Protocol {
    pub(crate) fn of_logout(&self, from: &World, to: &mut Nexts) {
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
        let alice = from.clients[Who::Alice as usize];
        let is_asking = alice.asked == 0 || alice.is_waiting();
        let heard = from.logout_reply.is_some_and(|reply| reply.durable);
        match from.logout {
            Logout::No if self.logout && !(self.vanish && is_asking) => {
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

    pub(crate) fn stage_of(&self, verb: Verb) -> Logout {
        let first = (verb == Verb::Tombstone) == self.rules.tombstone_first;
        if first { Logout::First } else { Logout::Second }
    }
}
