//! Records the calls of the listener for ends of sessions.

use std::sync::{Arc, Mutex};

use actix_doclock::{Aid, LockManager, LockManagerBuilder, SessionEnded};

use crate::rig::app::eventually;

/// Records the announcements. Clones share their records.
#[derive(Clone, Default)]
pub(super) struct Heard(Arc<Mutex<Vec<SessionEnded>>>);

impl Heard {
    /// Makes a manager with these settings report to it.
    pub(super) fn listening(&self, settings: LockManagerBuilder) -> LockManagerBuilder {
        let heard = Arc::clone(&self.0);
        settings.on_session_end(move |ended| {
            heard.lock().unwrap().push(ended);
            async { Ok(()) }
        })
    }

    pub(super) fn so_far(&self) -> Vec<SessionEnded> {
        self.0.lock().unwrap().clone()
    }

    /// All announcements of everything that has happened until now. Shuts the manager down, so there
    /// will be no more.
    pub(super) async fn in_the_end(&self, locks: &LockManager) -> Vec<SessionEnded> {
        let last = Aid::new();
        locks.end_session(&last).await.unwrap();
        eventually("the last end is told", async || {
            self.so_far().iter().any(|ended| ended.aid == last)
        })
        .await;
        // Announcements that were taken together with the last one may still be on their way.
        locks.shutdown().await;
        self.so_far().into_iter().filter(|ended| ended.aid != last).collect()
    }
}
