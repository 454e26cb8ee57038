//! The state of the database.

use crate::world::{LEASE, Token, Who};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
    /// A stranger asks its holder for it.
    pub(crate) asked: bool,
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

/// Leases of the locks of one session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Leases(u8);

impl Leases {
    pub(crate) const NONE: Self = Self(0);

    /// One lease.
    pub(crate) fn of(it: Former) -> Self {
        Self::nth(it.token.nth, it.lease)
    }

    /// This lease of the session's acquisition with this number.
    fn nth(nth: u8, lease: u8) -> Self {
        Self(1 << (4 * (nth - 1) + lease))
    }

    pub(crate) fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    pub(crate) fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    pub(crate) fn has_any_of(self, others: Self) -> bool {
        self.0 & others.0 != 0
    }
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
    /// The end of the session is to be told: a reaper has claimed it, or Alice has logged out.
    pub(crate) claimed: [bool; 2],
    /// The leases that this end names.
    pub(crate) names: [Leases; 2],
    /// The leases that ends of the session have told.
    pub(crate) told: [Leases; 2],
    /// The end of Alice's session was told.
    pub(crate) over: bool,
    /// For the search only: these expired locks of the session were removed by others, and since then no end has
    /// told them, and the session was not granted a lock.
    pub(crate) owed: [Leases; 2],
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

    /// The leases of which traces wait.
    pub(crate) fn waiting(&self, who: Who) -> Leases {
        let mut all = Leases::NONE;
        for (nth, trace) in (1..).zip(self.traces[who as usize]) {
            if let Trace::Waits(lease) = trace {
                all = all.and(Leases::nth(nth, lease));
            }
        }
        all
    }

    /// Marks the traces of these leases as seen.
    pub(crate) fn see(&mut self, who: Who, leases: Leases) {
        for (nth, trace) in (1..).zip(&mut self.traces[who as usize]) {
            if let Trace::Waits(lease) = *trace
                && leases.has_any_of(Leases::nth(nth, lease))
            {
                *trace = Trace::Seen(lease);
            }
        }
    }

    /// Whether the session has ended for good, and was told.
    pub(crate) fn is_over(&self, who: Who) -> bool {
        who == Who::Alice && self.over
    }

    /// Whether anything other than an expired lock says that this session may be idle.
    pub(crate) fn knows_of(&self, who: Who) -> bool {
        self.claimed[who as usize]
            || self.traces[who as usize].iter().any(|trace| matches!(trace, Trace::Waits(_)))
    }
}
