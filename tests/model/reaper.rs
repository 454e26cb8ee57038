//! The reaper looks for sessions that are idle or whose end is unfinished, and reports each to the listener.
//!
//! It may die after each step. Then it starts again and has forgotten everything that it has not
//! written down.

use crate::{
    protocol::{Broken, Nexts, Protocol, Step},
    save::conflicts,
    search::Next,
    world::*,
};

impl Protocol {
    pub(crate) fn of_reaper(&self, from: &World, to: &mut Nexts) {
        // It goes on once its last write is majority-committed.
        if from.primary != from.majority {
            return;
        }
        match from.sweep {
            Sweep::Idle => {
                for who in [Who::Alice, Who::Bob] {
                    self.find(from, who, to);
                }
                return;
            }
            Sweep::Found { who, traces, awake: true } => {
                let mut world = World { sweep: Sweep::Idle, ..*from };
                // They belong to the end that is to be told, if there is one.
                if from.primary.claimed[who as usize] {
                    self.name(&mut world.primary, who, traces);
                }
                world.primary.see(who, traces);
                self.reaps(Step::LeavesAwake(who), from, world, None, to);
            }
            Sweep::Found { who, awake: false, .. } => self.claim(from, who, to),
            Sweep::Claimed { who, traces } if traces != Leases::NONE => {
                let mut world =
                    World { sweep: Sweep::Claimed { who, traces: Leases::NONE }, ..*from };
                world.primary.see(who, traces);
                self.reaps(Step::SeesTraces(who), from, world, None, to);
            }
            Sweep::Claimed { who, .. } => self.finish(from, who, to),
        }
        self.reaps(Step::ReaperDies, from, World { sweep: Sweep::Idle, ..*from }, None, to);
    }

    /// Finds expired locks, traces of them, and ends that are unfinished.
    fn find(&self, from: &World, who: Who, to: &mut Nexts) {
        let database = &from.primary;
        if database.claimed[who as usize] {
            self.claim(from, who, to);
        }
        let traces =
            if self.rules.reaper_reads_traces { database.waiting(who) } else { Leases::NONE };
        let is_on_record = database.expired_of(who).is_some();
        if traces != Leases::NONE || is_on_record {
            let lost = is_on_record || self.taken_over(database, who) != Leases::NONE;
            let sweep = Sweep::Found { who, traces, awake: !lost || database.is_held_by(who) };
            self.then(Step::Finds(who), World { sweep, ..*from }, to);
        }
    }

    /// Claims the end of a session, and names the locks that the session has lost. Without such a lock there is nothing
    /// to end: another worker was quicker, or the session has come back.
    fn claim(&self, from: &World, who: Who, to: &mut Nexts) {
        let mut world = World { sweep: Sweep::Idle, ..*from };
        let database = &mut world.primary;
        let on_record = database.expired_of(who).map_or(Leases::NONE, |it| Leases::of(it.former()));
        let mut traces = self.taken_over(database, who);
        let lost = on_record.and(traces);
        if database.claimed[who as usize] || lost != Leases::NONE {
            database.claimed[who as usize] = true;
            if database.ended && who == Who::Alice {
                // Named when all locks of the session are removed.
                traces = Leases::NONE;
            } else {
                self.name(database, who, lost);
            }
            world.sweep = Sweep::Claimed { who, traces };
        }
        self.reaps(Step::Claims(who), from, world, None, to);
    }

    /// Removes the locks, and tells the end, unless it names nothing.
    fn finish(&self, from: &World, who: Who, to: &mut Nexts) {
        let mut world = World { sweep: Sweep::Idle, ..*from };
        let database = &mut world.primary;
        if database.ended && who == Who::Alice {
            self.release_ended(database);
        } else {
            let lock = database.expired_of(who);
            let is_new =
                |it: &Lock| !database.names[who as usize].has_any_of(Leases::of(it.former()));
            if lock.as_ref().is_some_and(is_new) && self.rules.sweeps_are_shorter_than_leases {
                return;
            }
            if let Some(lock) = lock {
                database.lock = None;
                self.owe(database, lock);
            }
            if database.names[who as usize] == Leases::NONE {
                database.claimed[who as usize] = false;
                return self.reaps(Step::Withdraws(who), from, world, None, to);
            }
        }
        let broken = self.tell(database, who);
        self.reaps(Step::Announces(who), from, world, broken, to);
    }

    fn reaps(
        &self,
        step: Step,
        from: &World,
        mut world: World,
        broken: Option<Broken>,
        to: &mut Nexts,
    ) {
        if !conflicts(from, &world) {
            if world.failovers == 0 {
                world.majority = world.primary;
            }
            let broken = broken.or_else(|| self.is_broken(&world));
            to.push(Next { step, state: world, broken });
        }
    }
}
