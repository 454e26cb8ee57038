//! Wakes those that announce news to the listeners of the application.

use std::sync::Arc;

use tokio::sync::Notify;

/// What wakes the announcers.
#[derive(Debug, Default)]
pub(super) struct Announce {
    pub(super) ended: Arc<Notify>,
    pub(super) taken: Arc<Notify>,
}

impl Announce {
    /// Something waits to be announced.
    pub(super) fn notify(&self) {
        self.ended.notify_one();
        self.taken.notify_one();
    }
}
