//! Notices ended sessions, even if no request arrives.

use std::{sync::Weak, time::Duration};

use futures_util::{StreamExt, stream};
use tokio::time::sleep;
use uuid::Uuid;

use crate::{
    end::SessionEnd,
    error::Error,
    store::{Inner, MongoSessionStore},
};

/// How many ended sessions are taken at once, so that other servers get some as well.
const TAKEN: i64 = 100;
/// How many of them are processed at the same time.
const AT_ONCE: usize = 16;
/// The longest pause after failures: a database that recovers is noticed within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl MongoSessionStore {
    /// Calls the hook for the sessions that have ended. The store does so continuously in the background; call this in
    /// tests, or [without sweeps](crate::MongoSessionStoreBuilder::without_sweeps). Returns the number of sessions.
    ///
    /// # Errors
    /// If the database does not answer within the deadline, or if the hook fails.
    pub async fn sweep(&self) -> Result<usize, Error> {
        let mut swept = 0;
        loop {
            match self.sweep_some().await? {
                0 => return Ok(swept),
                some => swept += some,
            }
        }
    }

    async fn sweep_some(&self) -> Result<usize, Error> {
        let call = Uuid::new_v4();
        let due = self.run("looking for web sessions that have ended", call, |records, call| {
            Box::pin(records.take_due(*call, TAKEN))
        });
        let due = due.await?;
        if due.is_empty() {
            return Ok(0);
        }
        let ends = due.into_iter().map(async |(record, end)| self.end(end).await.map(|()| record));
        let ends: Vec<_> = stream::iter(ends).buffer_unordered(AT_ONCE).collect().await;
        // A session that fails is tried again later. The others should not wait for it.
        let mut failed = None;
        let ended: Vec<_> =
            ends.into_iter().filter_map(|end| end.map_err(|e| failed = Some(e)).ok()).collect();
        let swept = ended.len();
        let doing = "finishing the ends of web sessions";
        let finished = self.run(doing, ended, |records, ended| Box::pin(records.finish(ended)));
        finished.await?;
        failed.map_or(Ok(swept), Err)
    }

    async fn end(&self, end: Option<SessionEnd>) -> Result<(), Error> {
        let Some(end) = end else { return Ok(()) };
        let doing = "looking for a session with another key";
        let goes_on = self.run(doing, end.id.clone(), |records, id| Box::pin(records.has_live(id)));
        if goes_on.await? { Ok(()) } else { self.tell(end).await }
    }
}

/// Sweeps until the store is gone.
pub(crate) async fn run(store: Weak<Inner>, interval: Duration) {
    let mut pause = interval;
    while let Some(inner) = store.upgrade() {
        match (MongoSessionStore { inner }).sweep_some().await {
            Ok(0) => pause = interval,
            Ok(_) => pause = Duration::ZERO,
            Err(e) => {
                // Warns only once, so that an outage does not fill the log.
                let level = if pause <= interval { log::Level::Warn } else { log::Level::Debug };
                pause = LONGEST_PAUSE.min(interval.max(pause) * 2);
                log::log!(
                    level,
                    "looking for ended sessions has failed, trying again in {pause:?}: {e}"
                );
            }
        }
        sleep(pause).await;
    }
}
