//! How long commands may take, and how long their answers are waited for.

use std::time::Duration;

use tokio::time::timeout;

use crate::store::mongo::error::{Result, unavailable};

/// The server's time limit for the first attempt of a write, unless the deadline comes first, and for a command of
/// several callers, each with a deadline of its own. Together with the number of writes on [one
/// record](super::admission), it bounds the connections that a newly stuck record takes from the pool.
pub(super) const LIMIT: Duration = Duration::from_millis(500);
/// The longest wait for a majority, so that no request waits forever while replication stands still.
pub(super) const WRITE_CONCERN_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest time limit of a command, the longest wait of a write for its turn, and the time of a caller without a
/// deadline.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// How long after its time limit a write may stay unanswered before other writes are sent.
pub(super) const UNANSWERED: Duration = Duration::from_secs(2);

/// The answer to a command. A command without an answer is given up, and the driver closes its connection: TCP needs a
/// quarter of an hour to find a connection dead that broke without a word, and until then the command would keep its
/// place in the pool, and all that its caller holds. No time limit of a command is longer than [`LONGEST_WAIT`].
pub(super) async fn answered<T>(command: impl IntoFuture<Output = Result<T>>) -> Result<T> {
    let answer = timeout(LONGEST_WAIT + UNANSWERED, command.into_future()).await;
    answer.unwrap_or_else(|_| Err(unavailable("no answer in time")))
}
