//! How much one session, one person and all of them together may have of a server.

use std::ops::RangeInclusive;

/// How many locks, waiters and event streams a server admits; see
/// [`limits`](crate::LockManagerBuilder::limits). Later versions may have more limits, so name the ones that you set:
///
/// ```
/// # use actix_doclock::{LockManager, MemoryStore, limits::Limits};
/// # let store = MemoryStore::new();
/// let limits = Limits { locks_per_session: 20, ..Limits::default() };
/// let builder = LockManager::builder(store).limits(limits);
/// ```
///
/// A person is known by the [id](crate::Actor::with_id) that the application gives. A person without an id counts by
/// the session, and visitors without a session count together by the address of their connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How many locks one web session may hold at the same time, in all collections together. Default 100, from 1 to
    /// 1 000 000. One more is refused with [`LockError::TooManyLocks`](crate::LockError::TooManyLocks): before the grant
    /// if the limit is reached, and after it if several requests ask at once. The older locks stay.
    ///
    /// This prevents a session from locking all documents of a collection. The limit costs nothing for
    /// a session that began on this server and has few locks. The locks are counted, by one query for each collection,
    /// at the first grant of a session that began elsewhere, when this server has granted the session a quarter of
    /// what was left up to the limit at the last count, and at each grant beyond half of the limit. A session can exceed
    /// the limit only if a server has counted it when it had few locks, and other servers have granted it many since:
    /// by less than a quarter of the limit for each such server. Jobs and guards are not limited.
    pub locks_per_session: usize,
    /// For how many locks one web session may wait on this server at the same time. Default 16, from 1 to 1 000 000.
    ///
    /// The next request that would have to wait is refused with [`LockError::TooManyWaiters`], over HTTP
    /// 503 `too_many_waiters`. So no session can fill the queue of a [fair](crate::Lockable::FAIR)
    /// collection, which has [`MAX_READERS`](crate::limits::MAX_READERS) places: each server gives a session only
    /// this many. A request that gets its lock at once, or that does not want to wait, does not count.
    ///
    /// [Jobs](crate::LockManager::job) are not limited: how many locks a job wants at the same time is up to the
    /// application, not to a visitor.
    ///
    /// [`LockError::TooManyWaiters`]: crate::LockError::TooManyWaiters
    pub waiters_per_session: usize,
    /// For how many locks one person may wait on this server at the same time, in all web sessions. Default 64, from 1
    /// to 1 000 000; at least [`waiters_per_session`](Self::waiters_per_session).
    pub waiters_per_person: usize,
    /// How many waiters this server may have at the same time, sessions and jobs together. Default 4 096, from 1 to
    /// 1 000 000. Raise the limit if more jobs wait in one process.
    pub waiters: usize,
    /// How many [event streams](crate::lock_api) this server keeps open for one person. Default 64; 0 refuses all
    /// streams. More streams are answered with 503, and their pages poll instead. Raise the limit if many visitors
    /// listen from behind one proxy.
    pub event_streams_per_person: usize,
    /// How many event streams this server keeps open for one address. Default 4 096; 0 refuses all streams.
    ///
    /// The address is the peer of the connection: the reverse proxy, if there is one. So lower this
    /// limit only if browsers connect to this server directly, and not below the number of people behind
    /// one company's gateway.
    pub event_streams_per_address: usize,
    /// How many event streams this server keeps open in total. Default 4 096; 0 refuses all streams.
    pub event_streams: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // More than a person edits at once, and fewer than would block a team.
            locks_per_session: 100,
            // More than the tabs that a person keeps open for documents with another holder.
            waiters_per_session: 16,
            // A few browsers with all their tabs.
            waiters_per_person: 64,
            // About as many requests as a server can keep open for waiting people; up to 80 megabytes. A waiter takes 7
            // to 20 kilobytes, with its request and its share of everything else (docs/evidence/scale.md).
            waiters: 4_096,
            // A few browsers, or a few dozen tabs where each tab opens a stream.
            event_streams_per_person: 64,
            event_streams_per_address: 4_096,
            // An idle stream costs some kilobytes and a file descriptor. The limit for descriptors is often 1 024 or a
            // few thousand.
            event_streams: 4_096,
        }
    }
}

/// Of the limits for locks and waiters.
pub(super) const RANGE: RangeInclusive<usize> = 1..=1_000_000;
