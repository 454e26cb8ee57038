//! How the locks of a collection behave.

use std::{ops::RangeInclusive, time::Duration};

use crate::key::{LockId, Lockable};

/// The ttl of locks unless the application sets another one: 150 s.
///
/// Browsers wake the timers of a hidden tab once a minute at most, so a heartbeat can be that late.
/// WordPress uses the same figure for its post lock.
pub const DEFAULT_TTL: Duration = Duration::from_secs(150);
/// The ttl of locks, from 1 s to 30 days. A shorter ttl makes no sense over a network; a longer one
/// exceeds the server's limits for dates.
pub const TTL_RANGE: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(30 * 24 * 60 * 60);

/// A sweep ends 20 000 idle sessions in less time.
const LONGEST_MARGIN: Duration = Duration::from_secs(60);

/// How many sessions may hold a shared lock on one document at the same time.
pub const MAX_READERS: usize = 1_000;

/// How the locks of a collection behave. All servers of a cluster must agree on these rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rules {
    /// The ttl of a lock that has none of its own, such as the lock of a foreign program. Also the
    /// longest ttl that this crate writes.
    pub ttl: Duration,
    /// True if each grant carries a [`FencingToken`](crate::FencingToken), higher than the token of any earlier grant
    /// on the same document, and not below the store's clock in milliseconds since 1970. The record therefore stays
    /// when its lock is gone.
    pub fenced: bool,
    /// True if waiters get the lock in the order of arrival, over all servers.
    pub fair: bool,
    /// True if the ids may be strings. A store then refuses a collection in which different strings are the
    /// same id.
    pub text_ids: bool,
}

impl Rules {
    /// Not fenced, not fair, and without string ids.
    #[must_use]
    pub fn new(ttl: Duration) -> Self {
        Self { ttl, fenced: false, fair: false, text_ids: false }
    }

    /// The rules of this type. Written in full: a new rule must be asked for here.
    #[doc(hidden)]
    #[must_use]
    pub fn of<T: Lockable>(ttl: Duration) -> Self {
        Self { ttl, fenced: T::FENCED, fair: T::FAIR, text_ids: LockId::may_be_text::<T::Id>() }
    }

    /// How long after its `ts` a database may remove a record by itself: the ttl, plus a margin of the same length,
    /// but at most a minute. Within that margin the sweep announces the idle sessions.
    #[must_use]
    pub fn expiry(&self) -> Duration {
        self.ttl + self.ttl.min(LONGEST_MARGIN)
    }

    /// With fencing tokens.
    #[must_use]
    pub fn fenced(mut self) -> Self {
        self.fenced = true;
        self
    }

    /// First come, first served.
    #[must_use]
    pub fn fair(mut self) -> Self {
        self.fair = true;
        self
    }
}
