//! Reports changes of locks to subscribers.

use futures_util::{StreamExt, future::ready, stream};
use tokio::sync::broadcast::{self, error::RecvError};

use crate::store::{Change, Watch};

/// How many changes are kept for a slow subscriber. Beyond that it gets [`Change::Missed`].
const KEPT: usize = 1024;

#[derive(Debug)]
pub(super) struct Changes(broadcast::Sender<Change>);

impl Default for Changes {
    fn default() -> Self {
        Self::keeping(KEPT)
    }
}

impl Changes {
    pub(super) fn keeping(kept: usize) -> Self {
        Self(broadcast::Sender::new(kept))
    }

    pub(super) fn tell(&self, change: Change) {
        // There may be no subscriber.
        let _ = self.0.send(change);
    }

    pub(super) fn are_watched(&self) -> bool {
        self.0.receiver_count() > 0
    }

    pub(super) fn watch(&self, collection: &str) -> Watch {
        let collection = collection.to_owned();
        let changes = stream::unfold(self.0.subscribe(), |mut changes| async {
            let change = match changes.recv().await {
                Ok(change) => change,
                Err(RecvError::Lagged(_)) => Change::Missed,
                Err(RecvError::Closed) => return None,
            };
            Some((change, changes))
        });
        let ours = changes.filter(move |change| {
            ready(match change {
                Change::Freed(key)
                | Change::Granted(key)
                | Change::Broken(key, ..)
                | Change::Asked(key)
                | Change::Saved(key, _) => key.collection() == collection,
                Change::Missed => true,
            })
        });
        Watch::new(ours.map(Ok))
    }
}
