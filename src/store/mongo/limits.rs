//! How long commands may take, and when they are sent at the latest.

use std::time::{Duration, Instant};

use crate::store::{
    Deadline,
    mongo::error::{Result, is_not_sent, late_majority, not_sent, unavailable},
};

/// The server's time limit for the first attempt of a write, unless the deadline comes first, and for a command of
/// several callers, each with a deadline of its own. Together with the number of writes on [one
/// record](super::admission), it bounds the connections that a newly stuck record takes from the pool.
pub(super) const LIMIT: Duration = Duration::from_millis(500);
/// The longest time for a read, or for a write to be admitted, and the time of a caller without a deadline.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

impl Deadline {
    /// The time limit of a write. Later attempts of a caller get more time: a majority that is always
    /// slower than the first limit must be waited for in the end.
    pub(super) fn write_limit(self) -> Duration {
        self.time_left(LIMIT.max(self.waited()))
    }

    /// The time limit of a read, which no transaction blocks.
    pub(super) fn read_limit(self) -> Duration {
        self.time_left(LONGEST_WAIT)
    }

    /// When a command is sent at the latest, so that its caller has time left for it.
    pub(super) fn send_by(self) -> Instant {
        let left = self.read_limit();
        Instant::now() + left.saturating_sub(LIMIT).max(left / 2)
    }

    /// The same for a claim. Half of the caller's time is for the command and a repetition. What gives locks back
    /// comes first: a claim waits no longer than what is left of the other half after the wait of a release.
    pub(super) fn claim_by(self, release_waits: Duration) -> Result<Instant> {
        let left = (self.read_limit() / 2).checked_sub(release_waits);
        left.map(|left| Instant::now() + left).ok_or_else(not_sent)
    }

    /// The moment; of a caller without a deadline, the longest wait from now on.
    pub(super) fn moment_or_longest(self) -> Instant {
        self.moment().unwrap_or_else(|| Instant::now() + LONGEST_WAIT)
    }

    /// The time until the deadline, at most `longest`. A caller without a deadline does not retry, so it gets more
    /// time. Never zero, which means "no limit" to the server.
    fn time_left(self, longest: Duration) -> Duration {
        let Some(moment) = self.moment() else { return LONGEST_WAIT };
        let left = moment.saturating_duration_since(Instant::now());
        left.clamp(Duration::from_millis(1), longest)
    }

    /// An error once the deadline has passed.
    pub(super) fn in_time(self) -> Result<()> {
        match self.moment() {
            Some(moment) if moment <= Instant::now() => Err(unavailable("the deadline has passed")),
            _ => Ok(()),
        }
    }

    /// Repeats a removal that no majority has acknowledged in time. The repetition waits for the majority
    /// again. Unless a failover has undone the removal, the repetition finds nothing more to remove. Returns
    /// the last outcome, and whether an earlier attempt has removed something.
    ///
    /// A caller without a deadline repeats it once: its first command may have been one for several callers, whose time
    /// is short.
    pub(super) async fn until_majority<T, F>(self, remove: impl Fn() -> F) -> Result<(T, bool)>
    where
        F: Future<Output = Result<T>>,
    {
        let (mut is_written, mut late) = (false, None);
        loop {
            let may_repeat = || self.moment().map_or(late.is_none(), |it| it > Instant::now());
            match remove().await {
                Err(e) if late_majority(&e).is_some() && may_repeat() => {
                    is_written |= late_majority(&e) == Some(true);
                    late = Some(e);
                }
                // The repetition was not sent, but an earlier attempt was.
                Err(e) if is_not_sent(&e) => return Err(late.unwrap_or(e)),
                done => return done.map(|done| (done, is_written)),
            }
        }
    }
}
