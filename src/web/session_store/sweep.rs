//! Notices ended sessions, even if no request arrives.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::join_all;
use tokio::time::sleep;
use uuid::Uuid;

use crate::{
    error::LockError,
    manager::rhythm::Rhythm,
    store::mongo::sessions::Due,
    web::session_store::{Inner, MongoSessionStore},
};

/// How many ended sessions are taken at once, so that other servers get some as well.
const TAKEN: i64 = 100;
/// How many of them are processed at the same time.
const AT_ONCE: usize = 16;

impl MongoSessionStore {
    /// Processes the ended sessions: releases their locks and has the listener called. This happens
    /// continuously in the background; call it in tests, or if the manager has no reaper. Returns the
    /// number of sessions.
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
        if !self.inner.locks.has_types() {
            // The server is just starting, and would end sessions without releasing their locks.
            return Ok(0);
        }
        let call = Uuid::new_v4();
        let due = self
            .run("looking for web sessions that have ended", move |sessions| async move {
                sessions.take_due(call, TAKEN).await
            });
        let due = due.await?;
        if due.is_empty() {
            return Ok(0);
        }
        let (mut ended, mut failed) = (Vec::new(), None);
        for some in due.chunks(AT_ONCE) {
            let ends = join_all(some.iter().map(|session| self.end(session))).await;
            for (session, end) in some.iter().zip(ends) {
                match end {
                    Ok(()) => ended.push(session.id.clone()),
                    // This session is tried again later. The others should not wait for it.
                    Err(e) => failed = Some(e),
                }
            }
        }
        let (swept, ended) = (ended.len(), Arc::new(ended));
        self.run("finishing the ends of web sessions", move |sessions| {
            let ended = Arc::clone(&ended);
            async move { sessions.finish(&ended).await }
        })
        .await?;
        failed.map_or(Ok(swept), Err)
    }

    async fn end(&self, session: &Due) -> Result<(), LockError> {
        let Some(aid) = &session.aid else { return Ok(()) };
        let of = aid.clone();
        let goes_on = self.run("looking for a session with another key", move |sessions| {
            let aid = of.clone();
            async move { sessions.has_live(&aid).await }
        });
        if !goes_on.await? {
            self.inner.locks.end(aid, session.reason).await?;
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
