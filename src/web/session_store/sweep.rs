//! Noticing that sessions have ended, although no request comes.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::try_join_all;
use tokio::time::sleep;

use super::{Inner, MongoSessionStore};
use crate::{LockError, manager::rhythm::Rhythm, store::mongo::sessions::Due};

/// How many ended sessions are taken at once, so that other servers get some, too.
const TAKEN: i64 = 100;
/// How many of them are dealt with at the same time.
const AT_ONCE: usize = 16;

impl MongoSessionStore {
    /// Deals with the sessions that have ended: releases their locks and has the listener called.
    /// This happens all the time in the background; call it in tests, or where the manager has no
    /// reaper. Says how many sessions there were.
    ///
    /// # Errors
    /// [`LockError::Store`].
    pub async fn sweep(&self) -> Result<usize, LockError> {
        let mut swept = 0;
        loop {
            match self.sweep_some().await? {
                0 => return Ok(swept),
                some => swept += some,
            }
        }
    }

    async fn sweep_some(&self) -> Result<usize, LockError> {
        let worker = self.inner.worker;
        let due = self
            .run("looking for web sessions that have ended", move |sessions| async move {
                sessions.take_due(worker, TAKEN).await
            });
        let due = due.await?;
        for some in due.chunks(AT_ONCE) {
            try_join_all(some.iter().map(|session| self.end(session))).await?;
        }
        let swept = due.len();
        if swept > 0 {
            let due = Arc::new(due);
            self.run("finishing the ends of web sessions", move |sessions| {
                let due = Arc::clone(&due);
                async move { sessions.finish(&due).await }
            })
            .await?;
        }
        Ok(swept)
    }

    async fn end(&self, session: &Due) -> Result<(), LockError> {
        let Some(aid) = &session.aid else { return Ok(()) };
        let of = aid.clone();
        let goes_on = self.run("looking for a session with another key", move |sessions| {
            let aid = of.clone();
            async move { sessions.has_live(&aid).await }
        });
        if !goes_on.await? {
            self.inner.locks.end_session(aid, session.reason).await?;
        }
        Ok(())
    }
}

/// Sweeps until the store is gone or the manager is shut down.
pub(super) async fn run(store: Weak<Inner>, interval: Duration) {
    let mut rhythm = Rhythm::new("looking for web sessions that have ended", interval);
    while let Some(inner) = store.upgrade() {
        let store = MongoSessionStore { inner };
        let stop = store.inner.locks.stop();
        let pause = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            swept = store.sweep_some() => match swept {
                Ok(0) => rhythm.after_success(Some(interval)),
                Ok(_) => Duration::ZERO,
                Err(e) => rhythm.after_failure(&e),
            },
        };
        drop(store);
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep(pause) => {}
        }
    }
}
