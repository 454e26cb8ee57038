//! The locks that the end of a session names, and its announcement.

use crate::{
    protocol::{Broken, Protocol},
    stored::{Database, Leases, Lock},
    world::Who,
};

impl Protocol {
    /// The lost locks of a session of which a reaper learns by traces.
    pub(crate) fn taken_over(&self, database: &Database, who: Who) -> Leases {
        let traces =
            if self.rules.reaper_reads_traces { database.waiting(who) } else { Leases::NONE };
        // The others were told already. Their traces were left too late.
        traces.without(self.named(database, who))
    }

    /// The leases of this session that are not named again.
    pub(crate) fn named(&self, database: &Database, who: Who) -> Leases {
        let (names, told) = (database.names[who as usize], database.told[who as usize]);
        if self.rules.ends_keep_leases { names.and(told) } else { Leases::NONE }
    }

    /// Names these locks in the end of the session, unless it was told.
    pub(crate) fn name(&self, database: &mut Database, who: Who, lost: Leases) {
        if database.is_over(who) {
            return;
        }
        let new = lost.without(self.named(database, who));
        let names = &mut database.names[who as usize];
        *names = names.and(new);
    }

    /// The first half of Alice's logout.
    pub(crate) fn leave_tombstone(&self, database: &mut Database) {
        if self.reaper && !database.ended {
            database.claimed[Who::Alice as usize] = true;
            if !self.rules.logout_takes_names_over {
                database.names[Who::Alice as usize] = Leases::NONE;
            }
            self.name_on_record(database);
        }
        database.ended = true;
    }

    /// The second half. A reaper does the same if it finds the end unfinished.
    pub(crate) fn release_ended(&self, database: &mut Database) {
        self.name_on_record(database);
        if let Some(lock) = database.lock.take_if(|it| it.token.who == Who::Alice) {
            self.owe(database, lock);
        }
        // After the removal: a lock that was taken over before has a trace by now.
        if self.reaper && self.rules.logout_names_taken_over {
            let traces = database.waiting(Who::Alice);
            self.name(database, Who::Alice, traces);
            database.see(Who::Alice, traces);
        }
    }

    fn name_on_record(&self, database: &mut Database) {
        let is_named = |it: &Lock| it.is_live() || self.rules.logout_names_expired;
        let lock = database.lock.filter(|it| it.token.who == Who::Alice && is_named(it));
        if let (Some(lock), true) = (lock, self.reaper) {
            self.name(database, Who::Alice, Leases::of(lock.former()));
        }
    }

    /// Tells the end of a session. The listener is called and the call is recorded in one step. A logout is told once:
    /// what Alice's session locks after that belongs to nobody.
    pub(crate) fn tell(&self, database: &mut Database, who: Who) -> Option<Broken> {
        let at = who as usize;
        let names = std::mem::replace(&mut database.names[at], Leases::NONE);
        database.claimed[at] = false;
        if database.is_over(who) {
            return None;
        }
        let is_twice = database.told[at].has_any_of(names);
        database.told[at] = database.told[at].and(names);
        database.owed[at] = database.owed[at].without(names);
        database.over |= who == Who::Alice && database.ended;
        is_twice.then_some(Broken::ALockIsToldTwice)
    }

    /// This lock was removed, and not by its own session. If the lock had expired, it is still to be told.
    pub(crate) fn owe(&self, database: &mut Database, removed: Lock) {
        let who = removed.token.who;
        if self.reaper && !removed.is_live() && !database.is_over(who) {
            let owed = &mut database.owed[who as usize];
            *owed = owed.and(Leases::of(removed.former()));
        }
    }

    /// A lost lock of a session that no end will tell.
    pub(crate) fn forgets(&self, database: &Database) -> Option<Broken> {
        for who in [Who::Alice, Who::Bob] {
            let at = who as usize;
            if database.owed[at].without(database.names[at]) == Leases::NONE {
                continue;
            }
            if database.is_over(who) {
                return Some(Broken::ALostLockIsNeverTold);
            }
            if !database.knows_of(who) {
                return Some(Broken::AnIdleSessionIsForgotten);
            }
        }
        None
    }
}
