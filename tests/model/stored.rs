//! The state of the database.

use crate::world::{LEASE, Token, Who};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Lock {
    pub(crate) token: Token,
    /// The rest of its lease by the server's clock. The lock has expired if this is not positive.
    pub(crate) left: i8,
    /// The number of its current lease, modulo 4. Counted only while some participant knows this number.
    pub(crate) lease: u8,
    /// Granted to an attempt whose caller had stopped waiting, or given back without an answer. Its
    /// holder is not to blame for it, but the lock goes with its ttl. (In the code it goes a bit
    /// earlier: it is given back once more after a third of the ttl.)
    pub(crate) orphan: bool,
    /// A second request of the session was told of it.
    pub(crate) again: bool,
}

impl Lock {
    pub(crate) fn is_live(&self) -> bool {
        self.left > 0
    }

    /// The contents of a trace of this lock.
    pub(crate) fn former(&self) -> Former {
        Former { token: self.token, lease: self.lease }
    }

    /// Starts a new lease. It never gets shorter, because the clock may have stepped back since the
    /// lease began.
    pub(crate) fn renew(&mut self, counts: bool) {
        self.renew_from(LEASE, counts);
    }

    /// Starts a new lease that began some time ago.
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

/// The trace of an expired lock that another session takes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Trace {
    #[default]
    No,
    /// A trace of this lease, for the reaper to examine.
    Waits(u8),
    /// A trace that has been examined. It stays, so that a late duplicate does not bring it back.
    Seen(u8),
}

/// The lock record, the locked document, and the records of ended sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Database {
    pub(crate) lock: Option<Lock>,
    /// The number of saves.
    pub(crate) version: u8,
    /// The tombstone of Alice's session.
    pub(crate) ended: bool,
    /// Traces of the expired locks of each session, in the order of its acquisitions.
    pub(crate) traces: [[Trace; 2]; 2],
    /// A reaper has claimed the end of the idle session, and named its locks.
    pub(crate) claimed: [bool; 2],
    /// For the search only: another session has removed this session's expired lock, and since then
    /// this session was neither announced nor granted a lock.
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

    /// One trace for each lease. A trace of an earlier lease is replaced, which saves states.
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

    /// Whether anything other than an expired lock says that this session may be idle.
    pub(crate) fn knows_of(&self, who: Who) -> bool {
        self.claimed[who as usize]
            || self.traces[who as usize].iter().any(|trace| matches!(trace, Trace::Waits(_)))
    }
}
