//! What the database has.

use crate::world::{LEASE, Token, Who};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Lock {
    pub(crate) token: Token,
    /// The rest of its lease, by the clock of the server. Expired if that is not positive.
    pub(crate) left: i8,
    /// Which of its leases this is. Counted only while somebody knows its number, and modulo 4.
    pub(crate) lease: u8,
    /// Granted to an attempt that nobody waited for any more, or given back without an answer. Its
    /// holder is not to be blamed for it, but it goes with its ttl (in the code a bit earlier: it is
    /// given back once more after a third of it).
    pub(crate) orphan: bool,
    /// A second request of the session was told of it.
    pub(crate) again: bool,
}

impl Lock {
    pub(crate) fn is_live(&self) -> bool {
        self.left > 0
    }

    /// What a trace of it names.
    pub(crate) fn former(&self) -> Former {
        Former { token: self.token, lease: self.lease }
    }

    /// The lease begins anew. It never gets shorter: the clock may have stepped back since it began.
    pub(crate) fn renew(&mut self, counts: bool) {
        self.renew_from(LEASE, counts);
    }

    /// It began anew some time ago.
    pub(crate) fn renew_from(&mut self, left: i8, counts: bool) {
        if counts && self.left <= left {
            self.lease = (self.lease + 1) % 4;
        }
        self.left = self.left.max(left);
    }
}

/// An expired lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Former {
    pub(crate) token: Token,
    pub(crate) lease: u8,
}

/// What is left of an expired lock that somebody else takes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Trace {
    #[default]
    No,
    /// Of this lease, for a reaper to look at.
    Waits(u8),
    /// It stays, so that a late duplicate does not bring it back.
    Seen(u8),
}

/// The lock document, the locked document, and what is known of the ends of sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Database {
    pub(crate) lock: Option<Lock>,
    /// How often it was saved.
    pub(crate) version: u8,
    /// The tombstone of Alice's session.
    pub(crate) ended: bool,
    /// Of the expired locks of each session, in the order of its acquisitions.
    pub(crate) traces: [[Trace; 2]; 2],
    /// A reaper has claimed the end of the idle session, and named its locks.
    pub(crate) claimed: [bool; 2],
    /// For the search only: somebody else has removed the session's expired lock, and since then the
    /// session was neither announced nor granted a lock.
    pub(crate) owed: [bool; 2],
}

impl Database {
    pub(crate) fn live(&self) -> Option<Lock> {
        self.lock.filter(Lock::is_live)
    }

    pub(crate) fn is_held_by(&self, who: Who) -> bool {
        self.live().is_some_and(|lock| lock.token.who == who)
    }

    pub(crate) fn expired_of(&self, who: Who) -> Option<Lock> {
        self.lock.filter(|lock| lock.token.who == who && !lock.is_live())
    }

    /// Once for each lease. What is known of an earlier one gives way: fewer states.
    pub(crate) fn leave_trace(&mut self, of: Former) {
        let is_there = self.lock.is_some_and(|lock| lock.former() == of);
        let trace = &mut self.traces[of.token.who as usize][usize::from(of.token.nth) - 1];
        match *trace {
            Trace::No => *trace = Trace::Waits(of.lease),
            Trace::Waits(lease) | Trace::Seen(lease) if lease == of.lease => {}
            _ if is_there => *trace = Trace::Waits(of.lease),
            _ => {}
        }
    }

    /// Whether anything says that this session may be idle, other than an expired lock.
    pub(crate) fn knows_of(&self, who: Who) -> bool {
        self.claimed[who as usize]
            || self.traces[who as usize].iter().any(|trace| matches!(trace, Trace::Waits(_)))
    }
}
