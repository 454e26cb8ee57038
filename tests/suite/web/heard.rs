//! What the listener for the ends of sessions was told.

use std::sync::{Arc, Mutex};

use actix_doclock::{Aid, LockManager, LockManagerBuilder, SessionEnded};

use crate::rig::app::eventually;

/// Writes down what it hears. Clones share their notes.
#[derive(Clone, Default)]
pub(super) struct Heard(Arc<Mutex<Vec<SessionEnded>>>);

impl Heard {
    /// A manager with these settings, that tells it.
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

    /// All that is to be told of what has happened until now. Shuts the manager down: more is never
    /// told.
    pub(super) async fn in_the_end(&self, locks: &LockManager) -> Vec<SessionEnded> {
        let last = Aid::new();
        locks.end_session(&last).await.unwrap();
        eventually("the last end is told", async || {
            self.so_far().iter().any(|ended| ended.aid == last)
        })
        .await;
        // What was taken together with the last one may be on its way.
        locks.shutdown().await;
        self.so_far().into_iter().filter(|ended| ended.aid != last).collect()
    }
}
