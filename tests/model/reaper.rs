//! The reaper looks for idle sessions and reports each to the listener.
//!
//! It may die after each step. Then it starts again and has forgotten everything that it has not
//! written down.

use crate::{
    protocol::{Nexts, Protocol, Step},
    save::conflicts,
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
                see(&mut world.primary, who, traces);
                self.reaps(Step::LeavesAwake(who), from, world, to);
            }
            Sweep::Found { who, traces, awake: false } => {
                let mut world = World { sweep: Sweep::Idle, ..*from };
                // Without a lock it has nothing to end: another worker was quicker, or the session has
                // come back.
                if traces != [None; 2] || from.primary.expired_of(who).is_some() {
                    world.primary.claimed[who as usize] = true;
                    world.sweep = Sweep::Claimed { who, traces };
                }
                self.reaps(Step::Claims(who), from, world, to);
            }
            Sweep::Claimed { who, traces } if traces != [None; 2] => {
                let sweep = Sweep::Claimed { who, traces: [None; 2] };
                let mut world = World { sweep, ..*from };
                see(&mut world.primary, who, traces);
                self.reaps(Step::SeesTraces(who), from, world, to);
            }
            Sweep::Claimed { who, .. } => {
                let mut world = World { sweep: Sweep::Idle, ..*from };
                if from.primary.expired_of(who).is_some() {
                    world.primary.lock = None;
                }
                world.primary.claimed[who as usize] = false;
                world.primary.owed[who as usize] = false;
                self.reaps(Step::Announces(who), from, world, to);
            }
        }
        self.reaps(Step::ReaperDies, from, World { sweep: Sweep::Idle, ..*from }, to);
    }

    /// Finds expired locks, traces of them, and ends that another reaper has begun.
    fn find(&self, from: &World, who: Who, to: &mut Nexts) {
        let database = &from.primary;
        if database.claimed[who as usize] {
            let sweep = Sweep::Claimed { who, traces: [None; 2] };
            self.then(Step::Claims(who), World { sweep, ..*from }, to);
        }
        let waits = |trace| match trace {
            Trace::Waits(lease) if self.rules.reaper_reads_traces => Some(lease),
            _ => None,
        };
        let traces = database.traces[who as usize].map(waits);
        if traces != [None; 2] || database.expired_of(who).is_some() {
            let sweep = Sweep::Found { who, traces, awake: database.is_held_by(who) };
            self.then(Step::Finds(who), World { sweep, ..*from }, to);
        }
    }

    fn reaps(&self, step: Step, from: &World, mut world: World, to: &mut Nexts) {
        if !conflicts(from, &world) {
            if world.failovers == 0 {
                world.majority = world.primary;
            }
            self.then(step, world, to);
        }
    }
}

fn see(database: &mut Database, who: Who, traces: [Option<u8>; 2]) {
    for (trace, seen) in database.traces[who as usize].iter_mut().zip(traces) {
        if let Some(lease) = seen
            && *trace == Trace::Waits(lease)
        {
            *trace = Trace::Seen(lease);
        }
    }
}
